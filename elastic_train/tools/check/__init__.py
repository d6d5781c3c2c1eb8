"""Whether machines can do a job, before it starts: `torchrun ... -m elastic_train.check`, `elastic-train check`.

- `facts.py`: what is gathered, as plain values
- `here.py`: what a worker finds by itself; `endpoint.py`: at the store it is to meet the others at
- `together.py`: what takes the others: who reaches whom, clocks, an all-reduce, the directory they share
- `judgement.py`: facts in, findings out; the whole judgement, with no input or output
- `check_command.py`: the order of it all, and what is printed
"""
