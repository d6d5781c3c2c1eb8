"""The gradients of one step, from every rank's micro-batches to one gradient in every rank's `.grad`.

This is the seam between the modes of `--reduction`: a `Reduction` runs forward and backward over a rank's
micro-batches and leaves the gradient of the mean loss over the whole step's samples, the same on every rank. With it
travel the step's loss and the members' votes (such as "I was told to stop"), so that a decision about what follows a
step costs no message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_train.sampler import MicroBatch
from elastic_train.world import World

Batch = Any
Share = Sequence[tuple[MicroBatch, Batch]]
"""a rank's part of a step: micro-batches with their data, None for an empty one"""
Loss = Callable[[nn.Module, MicroBatch, Batch], torch.Tensor]
"""(module, micro-batch, its data or None if it is empty) -> mean loss over the micro-batch's samples, a scalar"""


@dataclass(frozen=True)
class StepTotals:
    """What all ranks know after a step's reduction."""

    loss: float
    """mean over all samples of the step"""
    votes: tuple[int, ...]
    """the ranks' votes, summed entry by entry"""


class Reduction(Protocol):
    """One way of turning micro-batches into the step's gradient; every rank calls `run` once per step."""

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        """Forward, backward and reduce. Blocks until every rank has taken part.

        Args:
            micro_batches: this rank's share of the step, at least one (perhaps empty) micro-batch.
            loss: computes a micro-batch's mean loss with the module that it is given.
            scale: multiplies a loss before its backward pass (fp16 loss scaling).
            votes: this rank's votes, as many on every rank.

        Raises:
            RuntimeError: from the communication library, when a peer is lost.
        """
        ...


class FastReduction:
    """DDP's own all-reduce, overlapping the backward pass; sums in an order that depends on the world size.

    Micro-batches but the last accumulate under `no_sync`. Gradients are weighted by sample count: each loss is
    multiplied by its share of the step's samples, and by the world size, which DDP divides by.

    Loss and votes are the gradient of one more parameter, which DDP puts into its first bucket: a message of their own
    costs as much as the whole gradient of a small model. Being the first root of the backward pass, they are on their
    way before any other gradient. In float32, so the loss travels as this rank's part of the mean, not of the sum.

    Args:
        num_votes: as many as `run` is given.
    """

    def __init__(self, model: nn.Module, world: World, device: torch.device, num_votes: int = 2) -> None:
        self._world_size = world.world_size
        self._device = device
        self._module: nn.Module = model
        self._totals = nn.Parameter(torch.zeros(1 + num_votes, device=device))
        if world.world_size > 1:
            ddp = DistributedDataParallel(
                _Carrier(model, self._totals),
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,  # spares a copy of every gradient
            )
            # DDP has taken note of all parameters and buffers. From here on its module is the model itself, as a loss
            # that looks at `module.module` expects.
            ddp.module = model
            self._module = ddp

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        totals = self._make_totals(votes)
        for micro_batch, batch in micro_batches:
            with self._synchronise_at(micro_batch):
                mean = loss(self._module, micro_batch, batch)
                weight = len(micro_batch.indices) * self._world_size / micro_batch.step_samples
                totals[0].add_(mean.detach(), alpha=weight)
                scaled = scale(mean if weight == 1.0 else mean * weight)
                if self._world_size > 1 and micro_batch.is_last:
                    self._totals.grad = None
                    torch.autograd.backward([scaled, self._totals], [None, totals])
                else:
                    scaled.backward()  # type: ignore[no-untyped-call]
        if self._world_size > 1:
            assert self._totals.grad is not None, "the last micro-batch has set it"
            totals = self._totals.grad
        # The only place where a step waits for the device. DDP's mean over the ranks leaves votes not quite integers.
        mean_loss, *all_votes = totals.tolist()
        return StepTotals(mean_loss, tuple(round(vote) for vote in all_votes))

    def _make_totals(self, votes: Sequence[int]) -> torch.Tensor:
        """(loss, votes...) of this rank times the world size, on its device, before its first micro-batch."""
        is_cuda = self._device.type == "cuda"
        # From pinned memory, else the copy would wait until the device has done all that it was given.
        totals = torch.tensor(
            [0, *(vote * self._world_size for vote in votes)], dtype=torch.float32, pin_memory=is_cuda
        )
        return totals.to(self._device, non_blocking=True) if is_cuda else totals

    def _synchronise_at(self, micro_batch: MicroBatch) -> Any:
        if isinstance(self._module, DistributedDataParallel) and not micro_batch.is_last:
            return self._module.no_sync()
        return nullcontext()


class _Carrier(nn.Module):
    """What DDP is built from, and never called: the model's parameters and one more."""

    def __init__(self, model: nn.Module, totals: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.totals = totals
