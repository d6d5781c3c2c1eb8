"""Process groups that a training function makes itself, in each world: what blocks in them is broken off as well."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster, check_ledger, check_steps, events, result, wait_until, worlds

SCRIPT = """
import os, signal
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

numbers = torch.linspace(-1, 1, 128).unsqueeze(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(training):
    ddp = training.parallel()
    world = training.world
    own = dist.new_group(list(range(world.world_size)))
    for _ in training.epochs():
        for inputs, targets in training.batches():
            total = torch.ones(SIZE)
            if world.generation == 0 and world.rank == 2 and training.state.step == 20:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(total, group=own)
            assert float(total[-1]) == world.world_size
            optimizer.zero_grad()
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            training.commit(loss)


elastic_train.run(train, model, optimizer, TensorDataset(numbers, numbers.square()), elastic_train.parse_flags())
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, 20_000_000])
def test_a_peer_freezes_before_a_collective_in_a_group_of_the_functions_own(cluster: Cluster, size: int) -> None:
    """gloo has sent nothing of a large one to it yet but what the kernel takes."""
    (cluster.path / "own.py").write_text(SCRIPT.replace("SIZE", str(size)))
    flags = ("--max-steps", "40", "--epochs", "40", "--global-batch-size", "16", "--ledger", "--peer-timeout", "2")
    nodes = cluster.start(*flags, nodes=3, program=("own.py",))
    wait_until(lambda: (1, 2) in worlds(cluster.run_dir), "world of two", 120.0)
    [frozen] = {event["pid"] for event in events(cluster.run_dir, "world") if event["rank"] == 2}
    survivors = [node for node in nodes if frozen not in {worker.pid for worker in node.workers()}]
    assert len(survivors) == 2
    cluster.finish(survivors)
    [incident] = result(cluster.run_dir)["incidents"]
    assert (incident["cause"], incident["committed_steps_lost"]) == ("peer_lost", 0)
    assert sum(incident["seconds"].values()) < 10.0, "--peer-timeout and what a re-form takes"
    check_ledger([cluster.run_dir], length=128, batch=16, steps=40)
    check_steps(cluster.run_dir, 40)
