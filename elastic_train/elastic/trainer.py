"""Enters a training function, bundled or a user's own, in one world after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic_train.elastic.evaluations import Evaluations
from elastic_train.elastic.loop_hints import LoopHints
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.own_parallel import MAKE_ANEW, OwnParallel, Wrapped, require_summed
from elastic_train.elastic.pass_checks import PassChecks
from elastic_train.elastic.process_group import is_communication_error, translated_failures
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.session import Training
from elastic_train.elastic.session_steps import SessionSteps
from elastic_train.elastic.states_check import StateChecks
from elastic_train.elastic.step_sums import StepSums
from elastic_train.elastic.whole_steps import (
    ALONE,
    BatchLoss,
    Beginning,
    WholeSteps,
    stand_in_batch,
    warm_up,
)
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd, WorldEnds
from elastic_train.errors import StatesDiffer, TrainingDiverged
from elastic_train.rules import Activity
from elastic_train.training.kept import Arguments
from elastic_train.training.reduction import Share
from elastic_train.training.state import TrainState
from elastic_train.training.step import NO_VOTES, Outcome, Votes, drop_all_gradients
from elastic_train.world import World

TrainingFunction = Callable[[Training], None]


@dataclass(frozen=True)
class Program:
    """The code that trains."""

    train: TrainingFunction
    """called anew in every world"""
    loss: BatchLoss | None = None
    """the loss of every step, if it leaves the weights alone until a step's gradients are reduced, as the bundled
    trainer's does; None where that is unknown"""


class Trainer:
    """Runs a program in the worlds of one worker.

    What belongs to one world is made here for each world, and released at its end.
    """

    def __init__(self, program: Program, worker: Worker, membership: Membership, saver: Saver) -> None:
        self._program, self._worker = program, worker
        self._membership, self._saver = membership, saver
        self._evaluations = Evaluations(worker, membership)
        self._stand_in = stand_in_batch(worker)
        self.step_started = time.monotonic()
        """when the step in hand began, or the world before its first step, by the monotonic clock"""
        self.was_applied = False
        """whether the step in which the user's code failed counts nevertheless"""
        self.last_votes: Votes = NO_VOTES
        """of this rank, in the last step"""
        self.states = StateChecks(worker, membership)
        self._passes = PassChecks(worker, membership)
        self._hints = LoopHints(worker)
        # A SyncBatchNorm would include a newcomer's stand-in sample in the statistics of all ranks.
        has_sync = any(isinstance(module, nn.SyncBatchNorm) for module in worker.state.model.modules())
        self.has_room_for_handover = self._is_bundled and worker.config.reduction == "fast" and not has_sync
        """whether newcomers may take part in a step without samples, and receive the state while it is computed"""
        self._training: Training | None = None
        self._ddp_modules: list[Wrapped] = []
        """of the newest world"""
        optimizer = worker.state.optimizer
        if not self._is_bundled:
            worker.state.before_update = self._require_unbroken
        self._hooks = () if self._is_bundled else (optimizer.register_step_post_hook(self._note_step),)

    @property
    def _is_bundled(self) -> bool:
        return self._program.loss is not None

    def run(self, world: World, shares: Iterable[Share], begin: Beginning = ALONE) -> Outcome:
        """Train in `world` over the given shares; every rank calls this. `begin` is what must be finished before a
        gradient is applied.

        Raises:
            StatesDiffer: not all ranks hold the same state; the step in hand does not count.
            Any error of the training function.
        """
        state, watcher = self._worker.state, self._membership.watcher
        self.was_applied = False
        self._warn_of_kept_modules()
        state.modes.put_back()  # a user's function may have been interrupted in an evaluation of its own
        drop_all_gradients(state)
        if not self._is_bundled:  # now: it is unknown what the function does with the weights
            begin.wait_for_claim(watcher)
            if begin.comparison is not None:
                begin.comparison.begin()
                with state.lock.released():  # rank 0 may send its state to other ranks first
                    self.states.finish(begin.comparison)
            watcher.do(Activity.COMPUTE)
            begin = replace(begin, finish_claim=None, comparison=None)
        if self._worker.config.compile or not self._is_bundled:  # it may compile anew for other shapes of shares
            watcher.pace.expect_first_step()
        self._training = training = self._make_training(world, shares, begin)
        try:
            try:
                with self._seeing_every_optimizer(), translated_failures(state, self._membership.sockets):
                    self._program.train(training)
            finally:
                state.lock.hold()  # the code that uses the state from here on checks for a stop itself
            training.finish()
            self._return_together(world)
            if not state.is_finished:  # else the last step has compared the states
                training.check_states()
        except WorldEnds as end:
            return end.outcome
        except StatesDiffer:  # raised on every rank alike, and no peer is lost
            raise
        except Exception as error:
            watcher.announce_broken()  # now: the function, or its debugger, may take time
            training.settle_at_once()  # raises TrainingDiverged for NaN, which says more than its consequences
            if is_communication_error(error):
                self._hints.note_lost(error)
                training.commit_what_is_applied()
                begin_scalers_anew(state)
            elif not isinstance(error, TrainingDiverged):  # so that what is saved then is of a commit
                self.was_applied = training.commit_what_is_applied(type(error).__name__)
            raise
        finally:
            training.close()
            self._training = None
        if not state.is_finished:
            self._worker.reporter.report(
                f"the training function returned at step {state.step} of {state.last_step}: that ends the training"
            )
            state.last_step = state.step
        return Outcome.FINISHED

    def _return_together(self, world: World) -> None:
        """Wait until the training function has returned on all ranks. Raises: as `Barriers.return_together`."""
        state = self._worker.state
        if world.world_size == 1 or (state.is_finished and self._is_bundled):  # else a rank may be in a collective
            return
        with state.lock.released():  # others may be busy for long, and this worker may be told to stop
            self._membership.barriers.return_together(world, state.step, is_end=state.is_finished)

    def warm_up(self) -> None:
        """Run what makes a newcomer's first step slow, before there is a process group; its state is not used yet."""
        if self._program.loss is None or self._worker.config.compile:  # no loss to run; a compilation is for one shape
            return
        warm_up(self._worker, self._stand_in, self._program.loss)

    def evaluate_if_missed(self, world: World) -> None:
        """Make up for an evaluation that a death has interrupted; every rank calls this."""
        self._evaluations.if_missed(world)

    def abandon(self) -> None:
        """Put the state back to a commit, on another thread, as the training thread waits and will not come back.

        Raises:
            TrainingDiverged: the loss of the newest commit is not finite, so it must not be saved.
        """
        self.settle()
        if self._training is not None:
            self._training.commit_what_is_applied()
        self._worker.state.rollback()

    def settle(self) -> None:
        """Give up sums of the newest step that have not come; on another thread, which has acquired the state's lock.

        Raises:
            TrainingDiverged: the loss of the newest commit is not finite, so it must not be saved.
        """
        if self._training is not None:
            self._training.settle_at_once()

    def close(self) -> None:
        """Detach this trainer from the state: it trains no more."""
        self._worker.state.before_update = lambda: None
        for hook in self._hooks:
            hook.remove()

    def _make_training(self, world: World, shares: Iterable[Share], begin: Beginning) -> Training:
        """Make the parts of one world; from here on this rank counts as inside the training function."""
        worker, membership = self._worker, self._membership
        end = WorldEnd(world, membership, self._saver.save_time.note_vote)
        self._passes.enter(world)
        self._hints.enter(world)
        sums = StepSums(worker, membership.watcher, world, end, self._votes)
        steps = SessionSteps(
            shares, worker, membership.watcher, world, sums, self, is_own_code=not self._is_bundled,
            require_unbroken=self._require_unbroken, reading=membership.sockets.reading, hints=self._hints,
        )  # fmt: skip
        parallel = OwnParallel(
            world, worker.device, membership.watcher, steps, sums, self._hints.note_unwrapped,
            self._require_unbroken, self._passes.watch,
        )  # fmt: skip
        self._ddp_modules = parallel.made
        whole = WholeSteps(
            worker, membership, world, begin, self.states, self._stand_in, self._votes, self._passes
        )  # fmt: skip
        if self._is_bundled:  # before its first batch
            whole.prepare()
        steps.turn_to_function()
        steps.let_go_between()  # the function may take time before its first batch
        return Training(
            worker,
            world,
            self._saver,
            steps,
            sums,
            parallel,
            whole,
            end,
            evaluations=self._evaluations,
            check_states=partial(self._check_states, world, whole, end),
        )

    def _check_states(self, world: World, whole: WholeSteps, end: WorldEnd) -> None:
        if whole.is_comparing:  # the comparison that the world began with is still open
            return
        # A user's own loop may be about to step a scheduler: a save by another thread would lack that.
        lock = self._worker.state.lock
        with lock.released() if self._is_bundled else nullcontext():
            self.states.check(world, end)

    def _votes(self) -> Votes:
        joining, save_seconds = self._membership.vote(), self._saver.save_time.vote()
        self.last_votes = Votes(*self._worker.stop.votes(), joining, save_seconds)
        return self.last_votes

    def _warn_of_kept_modules(self) -> None:
        if are_kept(self._ddp_modules):
            gc.collect()  # a circle alone may keep them: an optimizer's closure and an error's frames make one
        if are_kept(self._ddp_modules):
            self._worker.reporter.warn(
                "the training function keeps the DDP module of an earlier world, and with it that world's memory: "
                f"{MAKE_ANEW}"
            )
        self._ddp_modules = []

    def _require_unbroken(self) -> None:
        """Keep garbage from the weights: an aborted NCCL collective ends without an error, and its result may look like
        an overflow. Raises: FormationFailed. UsageError: DDP has not summed the gradients."""
        if self._training is None:
            return
        device = self._worker.device if self._training.world.world_size > 1 else None  # NCCL changes no lone worker's
        watcher, sockets = self._membership.watcher, self._membership.sockets
        if device is not None and sockets.has_nccl:
            watcher.do(Activity.REDUCE)  # this rank has nothing of its own left to compute
        sockets.require_unbroken(device)  # the backward pass may still be under way
        if self._worker.device.type == "cpu" or sockets.has_nccl:  # else a GPU may still wait for gloo
            watcher.do(Activity.COMPUTE)
        require_summed(self._ddp_modules, self._worker.state.step + 1)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if self._training is None:
            return
        is_in_hand = self._training.note_applied(getattr(optimizer, "found_inf", None))
        self._hints.note_stepped(self._training.world, is_in_hand=is_in_hand)

    @contextmanager
    def _seeing_every_optimizer(self) -> Iterator[None]:
        """Watch every optimizer of a user's own loop, also those that `extras` do not name. One of them may be made of
        several, and change the weights between its own passes (SAM)."""
        state, between = self._worker.state, None

        def begin(optimizer: torch.optim.Optimizer, *arguments: Any) -> Arguments | None:
            nonlocal between
            if self._training is None or not state.is_whole:
                return None
            between = None if state.is_step_open else optimizer  # not asked at the end: it may be given up meanwhile
            if not state.kept.updates.is_part(optimizer):
                return None
            state.kept.updates.is_needed = True
            return state.begin_update(optimizer, *arguments)

        def end(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
            if self._training is None:
                return
            if state.kept.updates.is_part(optimizer):
                self._training.note_applied(None)
            if optimizer is between:  # not a part of the one that steps
                state.end_update()
            self._hints.note_other_stepped(self._training.world, optimizer)

        hooks = () if self._is_bundled else (
            register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        )  # fmt: skip
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def are_kept(modules: Iterable[Wrapped]) -> bool:
    """Whether one of the modules still exists."""
    return any(module.ddp() is not None for module in modules)


def begin_scalers_anew(state: TrainState) -> None:
    """Make GradScalers forget a step that was aborted between `unscale_` or `step` and `update`. Otherwise they would
    take its gradients, when it is redone, for unscaled ones, or a fused optimizer would unscale them twice."""
    for scaler in state.kept.scalers:
        if scaler._scale is not None:  # else `scale` was never called
            scaler.update(scaler.get_scale())  # the only public way; the scale stays
    for optimizer in state.kept.updates.optimizers:
        for name in ("grad_scale", "found_inf"):  # a scaler removes them only when the step has returned
            vars(optimizer).pop(name, None)
