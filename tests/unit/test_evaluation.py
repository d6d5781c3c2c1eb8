"""What an evaluation gives, in a world of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from elastic_train.config import Config
from elastic_train.training.evaluation import evaluate
from elastic_train.training.tasks import Task
from elastic_train.world import World
from tests.unit.test_liveness import make_member

WORLD = World(rank=0, generation=0, members=(make_member(0),))


class RunsDry(Dataset[Any]):
    """An iterator of its own ends before its samples do."""

    def __init__(self) -> None:
        self._held = iter(range(100))

    def __len__(self) -> int:
        return 128

    def __getitem__(self, _index: int) -> tuple[torch.Tensor, int]:
        next(self._held)
        return torch.ones(4), 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_runs_dry_ends_no_evaluation_early(num_workers: int) -> None:
    """A loop over its batches would take StopIteration for their end, and count the others as zeros."""
    with pytest.raises(RuntimeError, match=r"StopIteration.* item 100 of the data set could not be read"):
        evaluate(
            nn.Linear(4, 2), Task(), RunsDry(), WORLD, torch.device("cpu"), Config(num_workers=num_workers),
            block_samples=32,
        )  # fmt: skip
