"""The steps of a training function in one world, one in hand at a time: from its batch to its commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from elastic_train.elastic.step_sums import LateTotals, StepSums
from elastic_train.elastic.worker import Worker
from elastic_train.errors import FormationFailed, UsageError
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Activity
from elastic_train.training.collectives import require_sound
from elastic_train.training.kept import leave_no_trace
from elastic_train.training.reduction import Share, StepTotals
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.step import seed_model_draws
from elastic_train.world import World


@dataclass
class StepInHand:
    """A step whose batch the training function has got, and which it has not committed."""

    first: MicroBatch
    """of this rank's"""
    num_samples: int
    """this rank's"""
    result: StepTotals | None = None
    """where it was computed as a whole"""
    is_applied: bool = False
    """the optimizer has stepped"""
    found_inf: torch.Tensor | None = None
    """of a fused optimizer under a GradScaler: not 0 where its step has changed nothing"""
    has_begun: bool = False
    """a pass through DDP has"""
    has_reduced: bool = False
    """its gradients have been summed by DDP"""
    stood_in: dict[nn.Module, Callable[[], None]] = field(default_factory=dict)
    """modules through which a stand-in has gone, with what puts their buffers back"""

    @property
    def weight(self) -> float:
        """This rank's share of the step's samples."""
        return self.num_samples / self.first.step_samples

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no sample in it."""
        return self.num_samples == 0

    def stand_in(self, module: nn.Module) -> None:
        """A stand-in is about to go through `module`."""
        self.stood_in[module] = leave_no_trace(module)

    def end_passes(self, *modules: nn.Module) -> None:
        """Those through `modules`, or all, are over: a stand-in leaves no trace in buffers."""
        for module in modules or [*reversed(self.stood_in)]:  # one may be a part of one before it
            if (put_back := self.stood_in.pop(module, None)) is not None:
                put_back()


class StepClock(Protocol):
    """What keeps the time of the step in hand, beyond its world."""

    step_started: float


class SessionSteps:
    """Begins and commits the steps of one world, and tells of them.

    Args:
        shares: this rank's part of each step.
        is_own_code: whether what is done between two steps is the user's own.
        require_unbroken: raises FormationFailed where the process group was broken off; waits for the device.
        reading: surrounds what reads a batch (`GroupSockets.reading`).
        note_unstepped: called where a step is committed in which the optimizer has not stepped.
    """

    def __init__(
        self,
        shares: Iterable[Share],
        worker: Worker,
        watcher: Watcher,
        world: World,
        sums: StepSums,
        clock: StepClock,
        *,
        is_own_code: bool,
        require_unbroken: Callable[[], None],
        reading: Callable[[], AbstractContextManager[None]],
        note_unstepped: Callable[[], None],
    ) -> None:
        self._shares = iter(shares)
        self._worker = worker
        self._watcher = watcher
        self._world = world
        self._sums = sums
        self._clock = clock
        self._committed_at = time.monotonic()
        self._is_own_code = is_own_code
        self._require_unbroken, self._reading, self._note_unstepped = require_unbroken, reading, note_unstepped
        self.in_hand: StepInHand | None = None
        self._is_after_epoch = False
        """an epoch's last step is committed, and the function has not asked for what comes next"""

    @property
    def seconds_since_commit(self) -> float:
        """Since this rank's commit before the step in hand, or since its world began."""
        return time.monotonic() - self._committed_at

    def required(self) -> StepInHand:
        """The step in hand. Raises: UsageError where there is none."""
        if self.in_hand is None:
            raise UsageError(
                "there is no step in hand: training.batches() begins one, and commit() ends it, after the last "
                "optimizer's step"
            )
        return self.in_hand

    def require_committed(self) -> None:
        """Raises: UsageError where a step is in hand. FormationFailed where a peer was lost in it, and the function
        goes on all the same: a loop may catch all errors, to leave a bad batch out."""
        if self.in_hand is not None:
            require_sound()
            raise UsageError(
                f"step {self._worker.state.step + 1} ended without training.commit(loss): call it after the "
                "optimizer's step. (training.batches() is for training alone: a validation reads a DataLoader of its "
                "own)"
            )

    def require_none(self, what: str) -> None:
        """Raises: UsageError where a step is in hand, between which `what` belongs."""
        if self.in_hand is not None:
            raise UsageError(
                f"{what} was called while step {self._worker.state.step + 1} is in hand: call it on every rank after "
                "commit(), before the next batch is asked for"
            )

    def begin_epoch(self, last_begun_at: int | None) -> int:
        """The step from which an epoch goes on. Raises: UsageError where the last one was begun at it, too: it was left
        without a step, and would come again for ever."""
        state = self._worker.state
        if last_begun_at == state.step:
            raise UsageError(
                f"epoch {state.epoch} was left without a step: call training.batches() anew in each epoch; none can be "
                "skipped"
            )
        return state.step

    def begin(self) -> Share:
        """The next step is in hand; returns this rank's share of it, of which nothing has been computed."""
        self._watcher.do(Activity.COMPUTE)
        with self._reading(), self._worker.state.lock.released():  # data may take their time
            share = next(self._shares)
        first, indices = share[0][0], [micro_batch.indices for micro_batch, _ in share]
        self.in_hand = StepInHand(first, sum(map(len, indices)))
        self._clock.step_started = time.monotonic()
        self._worker.reach("step", self._world)
        self._watcher.do(Activity.COMPUTE)
        if (ledger := self._worker.reporter.ledger) is not None:
            ledger.write(epoch=first.epoch, step=first.step, world=self._world, indices=indices)
        if self._is_own_code:
            self._worker.state.remember()
        return share

    def leave_to_function(self, micro_batch: MicroBatch) -> None:
        """The user's own code computes the step in hand, from its one micro-batch on this rank, and may evaluate before
        that."""
        state = self._worker.state
        self.turn_to_function()
        seed_model_draws(self._worker.config.seed, micro_batch.step, micro_batch.shard, self._worker.device)
        state.lock.let_go()

    def note_applied(self, found_inf: torch.Tensor | None) -> bool:
        """The optimizer has stepped; a fused one has done nothing where a GradScaler `found_inf`. Returns whether a
        step is in hand."""
        if self.in_hand is not None:
            self.in_hand.end_passes()  # before the function goes on, which may change buffers by hand
            self.in_hand.is_applied, self.in_hand.found_inf = True, found_inf
        return self.in_hand is not None

    def begin_commit(self) -> bool:
        """The step in hand counts from here on, whatever happens before its `commit`, unless all of it is put back
        (`KeptUpdates`). Returns whether the optimizer has stepped; else a GradScaler has skipped it, or gradients add
        up.

        Raises: FormationFailed where it has not, because the reduction was broken off: to a GradScaler that looks like
            an overflow.
        """
        step = self.required()
        has_stepped = step.is_applied
        if not has_stepped:
            self._require_none_caught()
            if step.has_reduced:
                self._require_unbroken()
            self._note_unstepped()
        step.is_applied = True
        return has_stepped

    def _require_none_caught(self) -> None:
        """Raises: FormationFailed where the function has gone on after the error of a lost peer; it is told what of the
        step cannot be put back."""
        state = self._worker.state
        try:
            require_sound()
        except FormationFailed:
            if not state.kept.updates.are_kept and any(one is not state.averaged for one in state.extras.values()):
                self._worker.reporter.warn(
                    "the loop has caught the error of a lost peer, and gone on to the commit of step "
                    f"{state.step + 1}: that is done again, and what the loop does in it to the extras (a scheduler's "
                    "step) is done twice; catch errors of your own alone"
                )
            raise

    def commit(self, loss: float | None, late: LateTotals | None = None, *, is_told: bool = True) -> None:
        """The step in hand counts. `late` are its sums where they are not waited for; they give its loss then. It has
        an event unless others, of whom nobody knows, may do it again."""
        step, state, reporter, watcher = self.required(), self._worker.state, self._worker.reporter, self._watcher
        self.in_hand = None
        step.end_passes()
        self._is_after_epoch = state.commit(loss)
        reporter.note_commit(state.step)
        self._sums.late = late
        if late is None and is_told:
            reporter.step(state, loss, epoch=step.first.epoch, samples=step.first.step_samples)
        self._worker.reach("commit", self._world)
        watcher.do(Activity.COMPUTE)
        now = time.monotonic()
        watcher.pace.note_step(now - self._clock.step_started, now - self._committed_at)
        self._clock.step_started = self._committed_at = now
        self.turn_to_function()
        self.let_go_between()

    def commit_what_is_applied(self, error: str | None = None) -> bool:
        """The world is over, by an `error` of the user's code or else a lost peer, and the step before is settled.
        Where the weights are those after the step in hand, the step is done, unless all of it can be put back. Returns
        whether it is. Does not block. Warns of what the next world does not do again."""
        is_done = self._commit_applied(error)
        if self._is_after_epoch and self._is_own_code and error is None:
            self._worker.reporter.warn(
                f"what the training function does after step {self._worker.state.step}, the last of an epoch (an "
                "evaluation, say), was broken off, and is not done again: what must not be missed stands at the top of "
                "the loop (elastic_train/training/README.md)"
            )
        return is_done

    def _commit_applied(self, error: str | None) -> bool:
        state, is_alone = self._worker.state, self._world.world_size == 1
        if self.in_hand is None or not self.in_hand.is_applied or state.kept.updates.are_kept:
            return False
        has_all = is_alone or self.in_hand.has_reduced or self.in_hand.result is not None
        # Else the gradients were this rank's own; or it is why the error was raised that the weights are none.
        if error is not None and not (has_all and all(one.isfinite().all() for one in state.model.parameters())):
            return False
        what, then = (f"{error} came", "") if error else ("a peer was lost", "; move collectives out of there")
        if error != UsageError.__name__:  # whose own line says how the loop is to be mended
            self._worker.reporter.warn(
                f"{what} between the optimizer's step and the commit of step {state.step + 1}, which counts: what the "
                f"loop does in between (a scheduler's step) may be missing once{then}"
            )
        # Its loss was not told; that of the step before stands in, if there was any.
        self.commit(state.last_loss, is_told=error is None or is_alone)
        state.lock.hold()
        return True

    def ask(self, *, looks: bool = False) -> None:
        """The function asks for what comes next, or has returned: it is through with what follows the step before.

        Args:
            looks: for an abort of NCCL's, which tells nobody whose own collective since the commit it has ended.

        Raises: as `require_committed`. FormationFailed: there was one, or a peer was lost in another way.
        """
        self.require_committed()
        if looks and self._is_own_code:
            with self._reading():
                pass
        self._worker.state.lock.hold()
        self._is_after_epoch = False
        require_sound()

    def let_go_between(self) -> None:
        """The user's own code is outside of a step: what it does not step itself can be saved."""
        state = self._worker.state
        is_all_ours = all(one is state.averaged for one in state.extras.values())  # which the commit updates
        if self._is_own_code and is_all_ours:  # else it may be about to step a scheduler
            state.lock.let_go()

    def turn_to_function(self) -> None:
        """What the user's own code does between two steps' passes, on one rank perhaps, may take its time."""
        if self._is_own_code:
            self._watcher.do(Activity.COMPUTE, self._watcher.pace.between_steps)

    def close(self) -> None:
        """The world is over: its batches, and the step in hand, are let go."""
        step, self.in_hand = self.in_hand, None
        self._shares = iter(())
        if step is not None:
            step.end_passes()
