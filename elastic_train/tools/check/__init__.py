"""Whether machines can do a job, before it starts: `torchrun ... -m elastic_train.check`, `elastic-train check`.

- `facts.py`: what is gathered, as plain values
- `here.py`: what a worker finds by itself; `endpoint.py`: at the store it is to meet the others at
- `together.py`: what takes the others: who reaches whom, clocks, an all-reduce, the directory they share
- `node_rules.py`, `world_rules.py`: facts in, findings out, with no input or output
- `check_command.py`: the order of it all, the rules among it, and what is printed
"""
