"""Evaluation on the test set, sharded over the ranks: every sample once, and the same result for every world size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.config import Config
from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.collectives import all_reduce, gather_json
from elastic_train.training.determinism import refused_as_what_it_is
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.loader_processes import open_loader, read_apart
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import modes_kept
from elastic_train.training.step import autocast_of, seed_model_draws
from elastic_train.training.tasks import Task
from elastic_train.wording import kind_of
from elastic_train.world import World

BLOCK_SAMPLES = 256
SUM_TOLERANCE = 0.02
"""relative; half precision and other padding of texts differ by less, a mean in place of a sum by a third"""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    dataset: Any,
    world: World,
    device: torch.device,
    config: Config,
    *,
    do: Callable[[Activity], None] = lambda _activity: None,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, float]:
    """Evaluate on the whole test set. Every rank calls it and runs its blocks; all blocks' sums are added in order.

    Per block `task.evaluate` draws the same numbers from torch in each evaluation: those of step 0.

    Returns the task's summary of the means over the whole test set, the same on every rank; "correct" is renamed to
    `accuracy`.

    Args:
        do: called at every block, because each may take long, and when this rank begins to wait for its peers.
        warn: as `open_loader`'s.
    """
    length, size = len(dataset), _block_samples(config)
    num_blocks = -(-length // size)
    blocks = [
        MicroBatch(0, 0, block, np.arange(block * size, min((block + 1) * size, length)), length, is_last=False)
        for block in range(world.rank, num_blocks, world.world_size)  # rank 0 always has the first block
    ]
    nothing = torch.zeros(num_blocks, dtype=torch.float64, device="cpu")
    sums: dict[str, torch.Tensor] = {}
    with modes_kept(model):
        model.eval()
        do(Activity.COMPUTE)
        reader = EpochDataset(dataset, seed=config.seed, collate=task.collate)
        for micro_batch, batch in open_loader(reader, blocks, config, warn, at_most=len(blocks)):
            seed_model_draws(config.seed, micro_batch.step, micro_batch.shard, device)
            for name, value in _sums_of(model, task, batch, device, config).items():
                sums.setdefault(name, nothing.clone())[micro_batch.shard] = value.double().cpu()
            do(Activity.COMPUTE)
    do(Activity.REDUCE)
    told = gather_json([*sums]) if world.world_size > 1 else [[*sums]]
    names = sorted({*chain(*told)})  # a block may lack some (a class's sums, say), and a rank may have no block
    table = torch.stack([sums.get(name, nothing) for name in names])
    if world.world_size > 1:
        all_reduce(table)  # every entry is one rank's value plus zeros: exact
    totals = [sum(row, start=0.0) for row in table.tolist()]
    means = {name: total / length for name, total in zip(names, totals, strict=True)}
    return _metrics_of(task, means)


@torch.no_grad()
def find_no_sum(
    model: nn.Module,
    task: Task,
    dataset: Any,
    device: torch.device,
    config: Config,
    *,
    warn: Callable[[str], None] = warnings.warn,
) -> str | None:
    """Return a warning if a task's own `evaluate` returns a value that is not a sum over samples, such as a mean; else
    None. For a sum, the values of the first block's two halves add up to those of the block.

    Args:
        warn: as `open_loader`'s.
    """
    num_samples = min(_block_samples(config), len(dataset))
    if type(task).evaluate is Task.evaluate or num_samples < 2:  # one sample has no halves
        return None
    block = np.arange(num_samples)
    reader = EpochDataset(dataset, seed=config.seed, collate=task.collate)
    found = []
    with modes_kept(model):
        model.eval()
        for batch in read_apart(reader, (block, *np.split(block, [num_samples // 2])), config, warn):
            sums = _sums_of(model, task, batch, device, config)
            found.append({name: value.double().item() for name, value in sums.items()})
    whole, *halves = found
    for name, value in whole.items():
        parts = [part.get(name, math.nan) for part in halves]
        if abs(value - sum(parts)) > SUM_TOLERANCE * sum(map(abs, (value, *parts))):
            return (
                f"{type(task).__name__}.evaluate gives {name!r} = {value:.4g} for {num_samples} samples, and "
                f"{parts[0]:.4g} and {parts[1]:.4g} for its halves: no sum. It must give sums over the samples of the "
                f"batch (a mean times their number), or what is reported of {name!r} is wrong"
            )
    return None


def _block_samples(config: Config) -> int:
    """Return the most samples of a forward pass. It ignores the state's micro-batch size, set by the first world, and
    the world's size: the sums must not depend on these."""
    return min(BLOCK_SAMPLES, config.micro_batch_size or config.global_batch_size)


def _sums_of(model: nn.Module, task: Task, batch: Any, device: torch.device, config: Config) -> dict[str, torch.Tensor]:
    """Return the values of the task's `evaluate` for a batch. Raises: UsageError: they are not a dict of scalars; as
    `refused_as_what_it_is`."""
    with refused_as_what_it_is(device), autocast_of(config.precision, device)():
        values: Any = task.evaluate(model, task.to_device(batch, device))
    if not isinstance(values, dict):
        raise UsageError(
            f"{type(task).__name__}.evaluate gave {kind_of(values)}: it must give a dict of scalars by name, "
            "sums over the samples of the batch"
        )
    found = {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        for name, value in values.items()
    }
    for name, value in found.items():
        if value.dim() != 0:
            raise UsageError(
                f"{type(task).__name__}.evaluate gave {name!r} of shape {tuple(value.shape)}: it must be a scalar, the "
                "sum over the samples of the batch"
            )
    return found


def _metrics_of(task: Task, means: dict[str, float]) -> dict[str, float]:
    """Return the task's summary. Raises: UsageError: `summarize` returned no dict of numbers."""
    found = task.summarize(means)
    if not isinstance(found, dict):
        raise UsageError(
            f"{type(task).__name__}.summarize gave {kind_of(found)}: it must give a dict of numbers by name"
        )
    metrics: dict[str, float] = {}
    for name, value in found.items():
        try:
            metrics["accuracy" if name == "correct" else str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"{type(task).__name__}.summarize gave {name!r} as {kind_of(value)}: it must be a number"
            ) from error
    if len(metrics) < len(found):
        raise UsageError(
            f'{type(task).__name__} reports both "correct" and "accuracy", which is what "correct" is called: one of '
            "them must have another name"
        )
    return metrics
