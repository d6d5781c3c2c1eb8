"""Check before a job whether machines can run it: `torchrun ... -m elastic_train.check`, `elastic-train check`.

- `facts.py`: the gathered facts, as plain values
- `here.py`: the facts that a worker finds by itself; `endpoint.py`: those about the rendezvous
- `together.py`: the facts that need several workers: reachability, clocks, an all-reduce, a shared directory
- `node_rules.py`, `world_rules.py`: pure functions from facts to findings
- `check_command.py`: the order of the checks, the list of the rules, and the output
"""
