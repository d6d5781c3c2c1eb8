"""One step of training, and the ranks' votes in it. Nothing here knows about failure or changes of the world."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from elastic_train.errors import TrainingDiverged, UsageError, first_line
from elastic_train.training.optimizers import parameters_of
from elastic_train.training.reduction import Loss, Reduction, Share, StepTotals
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState, dense_parts
from elastic_train.training.tasks import Task
from elastic_train.wording import kind_of


class Votes(NamedTuple):
    """The numbers that a rank contributes to each step, and their sums over the ranks."""

    told_to_stop: int = 0
    """0 or 1"""
    leaving: int = 0
    """1 where this rank leaves after the step, else 0"""
    joining: int = 0
    """rank 0's knowledge of newcomers: 0, SOON or NOW (protocol/plan.py)"""
    save_seconds: int = 0
    """seconds to save the state, as rank 0 has measured them (`SaveTime.note_vote`); 0: no new measurement"""


NO_VOTES = Votes()

OF_UPDATE = -1
"""instead of a shard: the draws of the optimizer's step, which no rank's samples may change; below it are those of a
user's code before a step, by shard"""

OF_DIVERGED = (
    "no snapshot is written of it: the next start goes on from the newest one, or from scratch where there is none "
    "(--snapshot-every)"
)
"""text: what becomes of a state whose loss ended the training"""


class Outcome(StrEnum):
    """Why the loop ended; the same on every rank, at the same step."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """every rank was told to stop"""
    SOME_LEAVE = "some_leave"
    """some ranks were told to stop and leave; the rest go on without them"""
    SOME_JOIN = "some_join"
    """newcomers are ready to be admitted; all ranks go on with them"""


def train_step(
    state: TrainState, micro_batches: Share, reduction: Reduction, loss: Loss, votes: Sequence[int]
) -> StepTotals:
    """Make one optimizer step over the global batch, without committing it.

    Raises:
        TrainingDiverged: the loss is NaN or infinite, on every rank alike; the weights are those before the step.
        UsageError: the optimizer wants a closure.
    """
    if not state.is_step_open:  # a user's own loop may have opened the step already
        state.remember()
    drop_gradients(state.optimizer)
    scale = state.scaler.scale if state.scaler else lambda loss: loss
    with state.lock.released():
        totals = reduction.run(micro_batches, loss, scale, votes=votes)
    if not math.isfinite(totals.loss):
        if not _is_left_to_scaler(state):
            raise TrainingDiverged(
                f"the loss of step {state.step + 1} (epoch {state.epoch + 1}) is {totals.loss}; {OF_DIVERGED}. "
                "Lower --lr, give --clip-grad-norm, or look at the data of that step (--ledger writes it)"
            )
        if state.is_step_open:  # else a peer's state was loaded within the step
            state.kept.buffers.put_back()  # an overflow in one forward pass must not stay in BatchNorm's statistics
    try:
        if state.scaler:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        else:
            state.optimizer.step()
    except Exception as error:  # each optimizer raises another type, and a signature may hide the closure (SAM)
        if "closure" not in str(error):
            raise
        raise UsageError(
            f"{type(state.optimizer).__name__} computes its losses itself, by a closure ({first_line(error)}), and "
            "training.step has one: loop over training.batches(), in a training function of your own"
        ) from error
    return totals


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Do as torch's `zero_grad(set_to_none=True)`, without the profiler's range around it: that costs 10 us a step."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()  # without an argument, which apex's optimizers do not take
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def drop_all_gradients(state: TrainState) -> None:
    """Drop all gradients before a step that was broken off is done again: autograd would add the new ones to the old,
    where the loop calls `zero_grad()` only at the end of a step."""
    updates, owned = state.kept.updates, state.kept.updates.owned
    for optimizer in updates.optimizers:
        drop_gradients(optimizer)
    for module in state.kept.modules.values():
        for parameter in module.parameters():
            if id(parameter) not in owned:  # an owner is above: it may keep its gradients in one flat tensor
                parameter.grad = None


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    max_norm: float,
    others: Iterable[nn.Parameter] = (),
) -> None:
    """Limit the norm of the step's gradient (of the mean loss over all its samples), alike on every rank. `max_norm` is
    in units of the unscaled loss. `others` are trained by other optimizers, without a scaler."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    number = torch.get_num_threads()
    torch.set_num_threads(1)  # machines with different numbers of cores would round the norm differently
    try:
        nn.utils.clip_grad_norm_([*parameters_of(optimizer), *others], max_norm)
    finally:
        torch.set_num_threads(number)


def _is_left_to_scaler(state: TrainState) -> bool:
    """Return whether the scaler can cure a loss that is not finite: on an overflow of fp16 it skips the step and
    halves the scale. It cannot at a scale of 1 or below, nor where the gradients, which it goes by, are finite."""
    if state.scaler is None or state.scaler.get_scale() <= 1.0:
        return False
    gradients = (one.grad for one in parameters_of(state.optimizer) if one.grad is not None)
    return not all(part.isfinite().all() for gradient in gradients for part in dense_parts(gradient))


def task_loss(
    task: Task,
    *,
    seed: int,
    precision: str,
    device: torch.device,
    stand_in: Callable[[], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
) -> Loss:
    """Return the loss of a micro-batch under `--precision`; it seeds the model's draws for that micro-batch.

    `stand_in` makes a batch of one sample for a rank without samples in a step, which must still take part in the
    reduction. Its loss and gradients do not count; the caller restores the buffers (`kept.leave_no_trace`).
    """
    autocast = autocast_of(precision, device)
    name = f"{type(task).__name__}.loss" if loss == task.loss else getattr(loss, "__name__", "the loss")

    def micro_batch_loss(module: nn.Module, micro_batch: MicroBatch, batch: Any) -> torch.Tensor:
        seed_model_draws(seed, micro_batch.step, micro_batch.shard, device)
        with autocast():
            return scalar(name, loss(module, task.to_device(stand_in() if batch is None else batch, device)))

    return micro_batch_loss


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of the context in which a forward pass has `--precision`."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype=dtype)


def scalar(name: str, loss: Any) -> torch.Tensor:
    """Return `loss`. Raises: UsageError: it is not a scalar tensor, or cannot be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"{name} gave {kind_of(loss)}: it must give a tensor, the mean over the samples of the batch, to "
            "differentiate (no .item())"
        )
    if loss.dim() != 0:
        raise UsageError(
            f"{name} gave a tensor of shape {tuple(loss.shape)}: it must give a scalar, the mean "
            "over the samples of the batch"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(f"{name} gave a tensor without a gradient: it must be computed from the model's outputs")
    return loss


def seed_model_draws(seed: int, step: int, shard: int, device: torch.device) -> None:
    """Make what the model draws (dropout) a function of (seed, step, shard of the step)."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, shard), digest_size=8, person=b"model-draws").digest()
    value = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(value)  # a model may be on several GPUs
