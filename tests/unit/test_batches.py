"""The batches of a world, with and without loader processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.batches import steps
from elastic_train.config import Config
from elastic_train.tasks import build_task
from elastic_train.worker import make_state
from elastic_train.world import Member, World

CPU = torch.device("cpu")
MEMBER = Member(
    host="localhost",
    local_rank=0,
    pid=0,
    agent_pid=0,
    address=("127.0.0.1", 0),
    directory_id="",
    backend="gloo",
    max_generation=None,
)


def read(num_workers: int, rank: int) -> list[list[tuple[Any, Any]]]:
    config = Config(model="mlp", global_batch_size=500, epochs=2, micro_batch_size=100, num_workers=num_workers)
    task = build_task("digits", "mlp", Path(), 0)
    state = make_state(config, task, CPU)
    world = World(rank=rank, generation=0, members=(MEMBER, MEMBER))
    return list(steps(task.train_set, task.collate, state, world, config, CPU))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_list_of_micro_batches_per_step(rank: int) -> None:
    found = read(0, rank)
    assert [sum(len(micro_batch.indices) for micro_batch, _ in step) for step in found] == 2 * [
        250, 250, 218 + rank  # half of 500 and of the 437 that are left
    ]  # fmt: skip
    for number, step in enumerate(found, start=1):
        assert [micro_batch.is_last for micro_batch, _ in step] == [False] * (len(step) - 1) + [True]
        assert all(micro_batch.step == number for micro_batch, _ in step)


def test_loader_processes_change_nothing() -> None:
    for step, same in zip(read(0, 1), read(2, 1), strict=True):
        for (micro_batch, batch), (other, other_batch) in zip(step, same, strict=True):
            assert micro_batch.indices.tolist() == other.indices.tolist()
            assert all(torch.equal(one, another) for one, another in zip(batch, other_batch, strict=True))
