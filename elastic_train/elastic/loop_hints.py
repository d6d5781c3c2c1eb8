"""Hints, given once, at what a user's own loop seems to lack: nothing else shows it before a node joins or dies."""

from __future__ import annotations

import re
import weakref

import torch
from torch import nn

from elastic_train.elastic.loading import all_rates
from elastic_train.elastic.worker import Worker
from elastic_train.errors import first_line
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.optimizers import (
    has_scheduler,
    may_hold,
    may_schedule,
    parameters_beside,
    parameters_of,
    stepping_scaler,
)
from elastic_train.world import World

STEPS_OF_ONE_THAT_STAYS = 3
"""after so many steps with the same optimizer, that is not one made anew for each step"""


class LoopHints:
    """Hints of one worker, in all its worlds; for the training thread. Only rank 0 gives them, but for `note_lost`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._has_looked_for_scheduler = self._has_looked_at_gradients = self._has_looked_for_ddp = False
        self._has_seen_early_commit = self._has_seen_unreduced = self._has_seen_message = False
        self._steps_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        """for each optimizer: the last step in which it stepped, and the number of such steps"""
        self._has_warned_of_other = False
        self._rates: list[float | None] | None = None
        """learning rates as the function began, where it repeats what it does at the top of an epoch"""
        self._begun_epoch = -1
        """epoch of the newest batch"""

    def enter(self, world: World) -> None:
        """Note that the function begins in `world`."""
        state = self._worker.state
        repeats = state.samples_done > 0 or self._begun_epoch == state.epoch
        self._rates = all_rates(state) if repeats and world.rank == 0 else None

    def note_begun(self) -> None:
        """Note that the function has asked for a batch."""
        state, rates, self._rates = self._worker.state, self._rates, None
        self._begun_epoch = state.epoch
        pairs = zip(rates, all_rates(state), strict=False) if rates else ()  # to read a rate may wait for a GPU
        for before, now in [pair for pair in pairs if len({*pair}) > 1][:1]:
            self._worker.reporter.warn(
                f"the function has changed the learning rate from {before} to {now} before its first batch, within "
                f"epoch {state.epoch}: what stands above training.batches() runs again in each world that begins "
                "within an epoch, so that lr *= 0.1 or a scheduler's step counts twice there; derive the rate from the "
                "epoch, or step the scheduler after the epoch's last batch"
            )

    def note_stepped(self, world: World, *, is_in_hand: bool) -> None:
        """Note that the optimizer has stepped, in a step that is in hand or between two."""
        if not is_in_hand and world.rank == 0 and not self._has_seen_early_commit:
            self._has_seen_early_commit = True
            self._worker.reporter.warn(
                f"the optimizer has stepped between two steps (after step {self._worker.state.step}): its step belongs "
                "between the batch and training.commit(loss), else what is saved, and handed to newcomers, may lack it"
            )
        if self._has_looked_for_scheduler or world.rank != 0:
            return
        self._has_looked_for_scheduler = True
        state = self._worker.state
        if all(one.grad is None for one in parameters_of(state.optimizer)):
            self._worker.reporter.warn(
                "the optimizer has stepped, and none of its parameters has a gradient, so it has changed nothing: call "
                "loss.backward() before its step"
            )
        others = torch.amp.GradScaler | AveragedWeights | torch.optim.Optimizer | nn.Module
        may_be = [one for one in state.extras.values() if not isinstance(one, others)]
        for optimizer in state.kept.updates.optimizers:
            if has_scheduler(optimizer) and not any(may_schedule(one, optimizer) for one in may_be):
                what = "the optimizer" if optimizer is state.optimizer else f"{type(optimizer).__name__} in the extras"
                self._worker.reporter.warn(
                    f"{what} has a scheduler of torch's, which is not saved: it would begin anew where the run is "
                    "continued, and on each node that joins; give it to run(..., extras={'scheduler': scheduler}), or "
                    "make the learning rate a function of training.state.step"
                )
        scaler = stepping_scaler()
        if scaler not in (None, state.scaler) and not any(may_hold(one, (scaler,)) for one in state.extras.values()):
            self._worker.reporter.warn(
                "the optimizer is stepped by a GradScaler that is not saved: its scale would begin anew where the run "
                "is continued, and on each node that joins, whose gradients then count otherwise than those of the "
                "others; give it to run(..., extras={'scaler': scaler})"
            )

    def note_other_stepped(self, world: World, optimizer: torch.optim.Optimizer) -> None:
        """Note that any optimizer has stepped. One that is made for a single step is ignored."""
        if world.rank != 0 or self._has_warned_of_other:
            return
        state = self._worker.state
        last_step, num_steps = self._steps_of.get(optimizer, (-1, 0))
        self._steps_of[optimizer] = state.step, num_steps + (last_step != state.step)
        if last_step == state.step or num_steps + 1 != STEPS_OF_ONE_THAT_STAYS:
            return
        if state.kept.updates.is_part(optimizer) and state.kept.updates.has_saved(optimizer):
            return
        modules = [*state.kept.modules.values()]
        others = torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler | AveragedWeights
        is_known = any(optimizer is one for one in state.kept.updates.optimizers)
        if is_known:
            may_be_saved = any(not isinstance(one, others | nn.Module) for one in state.extras.values())
            if may_be_saved or not parameters_beside(modules, [optimizer]):
                return
        self._has_warned_of_other = True
        kind = type(optimizer).__name__
        what = f"the parameters that {kind} trains are" if is_known else f"{kind}, which trains too, is"
        self._worker.reporter.warn(
            f"{what} no part of the state: a restart or a newcomer begins with new ones, and of a step that is broken "
            "off these keep their half. Give every optimizer but the first, and every module but the model, to "
            "run(..., extras={'d': d, 'd_optimizer': d_optimizer})"
        )

    def note_unstepped(self, world: World) -> None:
        """Note that a step is committed in which the optimizer has not stepped."""
        state = self._worker.state
        has_others = any(isinstance(one, torch.optim.Optimizer) for one in state.extras.values())
        if self._has_looked_at_gradients or world.rank != 0 or has_others or not _do_add_up(state.model):
            return
        self._has_looked_at_gradients = True
        self._worker.reporter.warn(
            f"step {state.step + 1} is committed without a step of the optimizer. Gradients that add up over several "
            "commits are no part of the state: a restart, and each change of the world, loses them. Each batch of "
            "training.batches() is a whole step: give --global-batch-size all samples of it, and split the batch "
            "within the step (training.step does that by --micro-batch-size)"
        )

    def note_unreduced(self, world: World) -> None:
        """Note that the optimizer has stepped in a step in which DDP has summed no gradients."""
        if self._has_seen_unreduced or world.rank != 0 or world.world_size == 1:
            return
        self._has_seen_unreduced = True
        self._worker.reporter.warn(
            f"the optimizer has stepped in step {self._worker.state.step + 1}, and no gradient came through a module "
            "of training.parallel(): call that module, not the model in it, else each worker trains a model of its "
            "own. (A loop that averages gradients by itself may ignore this)"
        )

    def note_lost(self, error: Exception) -> None:
        """Note an error of communication that the function has raised, on any rank."""
        if re.search(r"Timed out waiting \d+ms for (recv|send) operation", str(error)) and not self._has_seen_message:
            self._has_seen_message = True
            self._worker.reporter.warn(
                f"a message of the function's own (dist.send, dist.recv) came too late: {first_line(error)}. In the "
                "group of run() that is taken for a lost peer: send it in one that the function makes, dist.new_group()"
            )

    def note_unwrapped(self) -> None:
        """Note that the only worker commits a step of the function's own without DDP."""
        if self._has_looked_for_ddp or not self._worker.launch.is_open:
            return
        self._has_looked_for_ddp = True
        self._worker.reporter.report(
            "the function trains no module that training.parallel() has made: unless it calls that once a second "
            "worker has joined, their gradients are not averaged, and that ends the job with an error"
        )


def _do_add_up(model: nn.Module) -> bool:
    """Whether the gradients hold finite values. After a step that a GradScaler has skipped they do not, or are gone."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found]
    return any(bool(one.any()) for one in values) and all(bool(one.isfinite().all()) for one in values)
