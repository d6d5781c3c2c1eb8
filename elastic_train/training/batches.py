"""The batches of a world: from its position in the run to the end of training, one list of micro-batches per step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from elastic_train.config import Config
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.loader_processes import open_loader
from elastic_train.training.planned_steps import steps_per_epoch
from elastic_train.training.sampler import MicroBatch, StepSampler
from elastic_train.training.state import TrainState
from elastic_train.training.tasks import mapped
from elastic_train.world import World


class RunSampler:
    """A `batch_sampler` over all epochs that are left, so that loader processes start once per world, not per epoch."""

    def __init__(self, state: TrainState, world: World, config: Config, first_ranks: int | None = None) -> None:
        self._first_ranks = world.world_size if first_ranks is None else first_ranks
        self._last_step = state.last_step
        self._rest = StepSampler(
            length=state.length,
            seed=config.seed,
            epoch=state.epoch,
            samples_done=state.samples_done,
            steps_done=state.step,
            global_batch_size=config.global_batch_size,
            rank=world.rank,
            world_size=world.world_size,
            virtual_ranks=config.virtual_ranks if config.reduction == "ordered" else None,
            micro_batch_size=None if config.static_graph else state.micro_batch_size,  # DDP fails under `no_sync` then
            max_steps=state.last_step,
        )
        """sampler of the epoch in which the world begins"""

    def __iter__(self) -> Iterator[MicroBatch]:
        rest, step = self._rest, self._rest.steps_done
        if self._first_ranks < rest.world_size and step < self._last_step:
            first = list(self._first_step())
            yield from first
            step += 1
            rest = replace(rest, steps_done=step, samples_done=rest.samples_done + first[0].step_samples)
        while step < self._last_step:
            for micro_batch in rest:
                step = micro_batch.step
                yield micro_batch
            rest = replace(rest, epoch=rest.epoch + 1, samples_done=0, steps_done=step)

    def of_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of any step, also of a committed one."""
        batch = self._rest.global_batch_size
        epoch, within = divmod(step - 1, steps_per_epoch(self._rest.length, batch))
        return list(replace(self._rest, epoch=epoch, samples_done=within * batch, steps_done=step - 1, max_steps=step))

    def _first_step(self) -> Iterator[MicroBatch]:
        """Yield a step that is split over the first ranks alone; later ranks get an empty micro-batch."""
        rank, ranks = self._rest.rank, self._first_ranks
        one = self._rest.steps_done + 1
        for micro_batch in replace(self._rest, rank=min(rank, ranks - 1), world_size=ranks, max_steps=one):
            if rank < ranks:
                yield micro_batch
            elif micro_batch.is_last:
                yield replace(micro_batch, indices=micro_batch.indices[:0], shard=micro_batch.step_samples)


def steps(
    dataset: Dataset[Any],
    collate: Any,
    state: TrainState,
    world: World,
    config: Config,
    device: torch.device,
    first_ranks: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Iterator[list[tuple[MicroBatch, Any]]]:
    """Yield this rank's micro-batches, a list per step, from `state`'s position to the end of training.

    Reading ahead changes nothing: the position counts committed samples.

    Args:
        first_ranks: how many ranks have samples in the first step, while newcomers have no weights yet (fast reduction
            only); None for all.
        warn: as `open_loader`'s.

    Raises: TypeError: a batch of samples is None. As for any error of the data, only this node may have it.
    """
    reader = EpochDataset(dataset, seed=config.seed, collate=collate)
    sampler = RunSampler(state, world, config, first_ranks)
    fetched: Iterable[tuple[MicroBatch, Any]]
    if config.num_workers == 0:
        fetched = map(reader.__getitems__, sampler)  # what a DataLoader would do, without its cost per batch
        if device.type == "cuda":
            fetched = ((micro_batch, pinned(batch)) for micro_batch, batch in fetched)
    else:
        fetched = open_loader(reader, sampler, config, warn, pin_memory=device.type == "cuda")
    step: list[tuple[MicroBatch, Any]] = []
    for micro_batch, batch in fetched:
        if batch is None and len(micro_batch.indices):  # None stands for no samples: another would be trained instead
            raise TypeError(
                f"the batch of sample {micro_batch.indices[0]} of the data set is None: no sample can be skipped; give "
                "a batch without effect on the loss, or a data set without such samples"
            )
        step.append((micro_batch, batch))
        if micro_batch.is_last:
            yield step
            step = []


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory, from which copies to a GPU do not block. Tensors on a
    device stay there; for those a DataLoader would raise."""

    def pin(value: Any) -> Any:
        is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        return value if is_elsewhere or not hasattr(value, "pin_memory") else value.pin_memory()

    return mapped(batch, pin)
