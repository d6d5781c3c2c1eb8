"""What every rival trains, and how it tells of its steps: the bundled job of a drill, and the events of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from elastic_train.runlog.events import JsonLines, file_name
from elastic_train.tools.drills.task import PacedDigits
from elastic_train.world import host_name

BATCH_PER_RANK = 21
"""samples; of three ranks as many as our default global batch"""

task = PacedDigits()


def build_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return task.build_model()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def endless(loader: DataLoader[Any], sampler: DistributedSampler[Any], epoch: int) -> Iterator[tuple[int, Any]]:
    """(epoch, batch), from the beginning of an epoch on; a rival trains until it is ended."""
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch
        epoch += 1


class StepLog:
    """The `step` events of one process. They have one generation: the goodput is told by times and world sizes."""

    def __init__(self, run_dir: Path) -> None:
        self._identity = {"pid": os.getpid(), "host": host_name()}
        self._lines = JsonLines(run_dir / "events" / file_name(host_name(), 0, os.getpid()))

    def write(self, step: int, epoch: int, world_size: int, loss: Tensor) -> None:
        """Of the one rank that speaks for all, once the optimizer has stepped."""
        line = {"time": time.time(), "event": "step", "rank": 0, "world_size": world_size, "generation": 0}
        self._lines.write(line | self._identity | {"step": step, "epoch": epoch, "loss": loss.item()})
