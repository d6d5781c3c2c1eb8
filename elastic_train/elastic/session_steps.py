"""The steps of a training function in one world, one in hand at a time: from its batch to its commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from elastic_train.elastic.loop_hints import LoopHints
from elastic_train.elastic.step_sums import LateTotals, StepSums
from elastic_train.elastic.worker import Worker
from elastic_train.errors import FormationFailed, UsageError
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Activity
from elastic_train.training.collectives import require_sound
from elastic_train.training.kept import leave_no_trace
from elastic_train.training.reduction import Share, StepTotals
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.step import OF_UPDATE, seed_model_draws
from elastic_train.world import World


@dataclass
class StepInHand:
    """A step whose batch the training function has, and which it has not committed."""

    first: MicroBatch
    """the first micro-batch of this rank"""
    num_samples: int
    """of this rank"""
    result: StepTotals | None = None
    """set where `Training.step` computed the step"""
    is_applied: bool = False
    """the optimizer has stepped"""
    found_inf: torch.Tensor | None = None
    """from a fused optimizer under a GradScaler; not 0 where its step has changed nothing"""
    has_begun: bool = False
    """a pass through DDP has begun"""
    has_reduced: bool = False
    """DDP has summed its gradients"""
    stood_in: dict[nn.Module, Callable[[], None]] = field(default_factory=dict)
    """modules that a stand-in has passed through, each with a function that restores its buffers"""

    @property
    def weight(self) -> float:
        """This rank's share of the step's samples."""
        return self.num_samples / self.first.step_samples

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no sample in the step."""
        return self.num_samples == 0

    def stand_in(self, module: nn.Module) -> None:
        """Keep the buffers of `module` before a stand-in passes through it."""
        self.stood_in[module] = leave_no_trace(module)

    def end_passes(self, *modules: nn.Module) -> None:
        """Restore the buffers after a stand-in's passes through `modules`, or through all modules, are over."""
        for module in modules or [*reversed(self.stood_in)]:  # a later one may be a part of an earlier one
            if (put_back := self.stood_in.pop(module, None)) is not None:
                put_back()


class StepClock(Protocol):
    """The owner of the start time of the step in hand; it outlives the world."""

    step_started: float


class SessionSteps:
    """Begins, commits and logs the steps of one world.

    Args:
        shares: this rank's part of each step.
        is_own_code: whether the code between two steps is the user's own.
        require_unbroken: raises FormationFailed where the process group was broken off; waits for the device.
        reading: the context in which a batch is read (`GroupSockets.reading`).
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
        hints: LoopHints,
    ) -> None:
        self._shares = iter(shares)
        self._worker = worker
        self._watcher = watcher
        self._world = world
        self._sums = sums
        self._clock = clock
        self._committed_at = time.monotonic()
        self._is_own_code = is_own_code
        self._require_unbroken, self._reading, self._hints = require_unbroken, reading, hints
        self.in_hand: StepInHand | None = None
        self._is_after_epoch = False
        """an epoch's last step is committed, and the function has not asked for the next batch or epoch"""

    @property
    def seconds_since_commit(self) -> float:
        """Seconds since this rank's commit before the step in hand, or since its world began."""
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
        """Raise UsageError where a step is in hand. Raises FormationFailed instead where a peer was lost in it and the
        function caught the error: a loop may catch all errors in order to skip a bad batch."""
        if self.in_hand is not None:
            require_sound()
            raise UsageError(
                f"step {self._worker.state.step + 1} ended without training.commit(loss): call it after the "
                "optimizer's step. (training.batches() is for training alone: a validation reads a DataLoader of its "
                "own)"
            )

    def require_none(self, what: str) -> None:
        """Raise UsageError where a step is in hand: `what` belongs between two steps."""
        if self.in_hand is not None:
            raise UsageError(
                f"{what} was called while step {self._worker.state.step + 1} is in hand: call it on every rank after "
                "commit(), before the next batch is asked for"
            )

    def begin_epoch(self, last_begun_at: int | None) -> int:
        """Return the step at which an epoch begins. Raises: UsageError where the last epoch began at the same step: it
        was left without a step, and would be repeated for ever."""
        state = self._worker.state
        if last_begun_at == state.step:
            raise UsageError(
                f"epoch {state.epoch} was left without a step: call training.batches() anew in each epoch; none can be "
                "skipped"
            )
        return state.step

    def begin(self) -> Share:
        """Take the next step in hand. Returns this rank's share of it, of which nothing has been computed."""
        self._watcher.do(Activity.COMPUTE)
        with self._reading(), self._worker.state.lock.released():  # reading data may take long
            share = next(self._shares)
        first, indices = share[0][0], [micro_batch.indices for micro_batch, _ in share]
        self.in_hand = StepInHand(first, sum(map(len, indices)))
        self._clock.step_started = time.monotonic()
        self._worker.reach("step", self._world)
        self._watcher.do(Activity.COMPUTE)
        if (ledger := self._worker.reporter.ledger) is not None:
            ledger.write(epoch=first.epoch, step=first.step, world=self._world, indices=indices)
        if self._is_own_code:
            self._hints.note_begun()
            self._worker.state.remember()
            # What the function draws now is of this rank: the numbers of the optimizer's step are the same on all.
            seed_model_draws(self._worker.config.seed, first.step, OF_UPDATE - 1 - first.shard, self._worker.device)
        return share

    def leave_to_function(self, micro_batch: MicroBatch) -> None:
        """Leave the step in hand, one micro-batch on this rank, to the user's own code. That may evaluate first."""
        state = self._worker.state
        self.turn_to_function()
        seed_model_draws(self._worker.config.seed, micro_batch.step, micro_batch.shard, self._worker.device)
        state.lock.let_go()

    def note_applied(self, found_inf: torch.Tensor | None) -> bool:
        """Note that the optimizer has stepped; a fused one changed nothing where `found_inf` of a GradScaler is not 0.
        Returns whether a step is in hand."""
        if self.in_hand is not None:
            self.in_hand.end_passes()  # before the function goes on: it may change buffers by hand
            self.in_hand.is_applied, self.in_hand.found_inf = True, found_inf
        return self.in_hand is not None

    def begin_commit(self) -> bool:
        """Count the step in hand from here on, whatever happens before its `commit`, unless all of it is put back
        (`KeptUpdates`). Returns whether the optimizer has stepped; if not, a GradScaler has skipped it, or gradients
        are accumulated.

        Raises: FormationFailed where it has not stepped because the reduction was broken off. A GradScaler takes that
            for an overflow.
        """
        step = self.required()
        has_stepped = step.is_applied
        if not has_stepped:
            self._require_none_caught()
            if step.has_reduced:
                self._require_unbroken()
            self._hints.note_unstepped(self._world)
        elif not step.has_reduced:
            self._hints.note_unreduced(self._world)
        step.is_applied = True
        return has_stepped

    def _require_none_caught(self) -> None:
        """Raise FormationFailed where the function has caught the error of a lost peer and gone on. Warns where a part
        of the step cannot be put back."""
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
        """Commit the step in hand. `late` are its sums where they are not waited for; they bring its loss later.
        Without `is_told` no event is written: the other workers may redo the step."""
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
        """Commit the step in hand if the weights already are those after it, unless all of it can be put back.

        The world is over by an `error` of the user's code, or else by a lost peer, and the step before is settled.
        Returns whether the step is committed. Does not block. Warns of what the next world does not repeat."""
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
        # Otherwise the gradients were this rank's own, or non-finite weights are the very reason for the error.
        if error is not None and not (has_all and all(one.isfinite().all() for one in state.model.parameters())):
            return False
        what, then = (f"{error} came", "") if error else ("a peer was lost", "; move collectives out of there")
        if error != UsageError.__name__:  # its own line says how to repair the loop
            self._worker.reporter.warn(
                f"{what} between the optimizer's step and the commit of step {state.step + 1}, which counts: what the "
                f"loop does in between (a scheduler's step) may be missing once{then}"
            )
        # The loss of this step is unknown; that of the step before stands in, if there is one.
        self.commit(state.last_loss, is_told=error is None or is_alone)
        state.lock.hold()
        return True

    def ask(self, *, looks: bool = False) -> None:
        """Note that the function asks for the next batch or epoch, or has returned: its code after the commit is done.

        Args:
            looks: check for an NCCL abort too. It raises no error in a collective of the function's own.

        Raises: as `require_committed`. FormationFailed: NCCL's group was aborted, or a peer was lost in another way.
        """
        self.require_committed()
        if looks and self._is_own_code:
            with self._reading():
                pass
        self._worker.state.lock.hold()
        self._is_after_epoch = False
        require_sound()

    def let_go_between(self) -> None:
        """Release the state's lock between two steps of the user's code, if everything that it steps can be saved."""
        state = self._worker.state
        is_all_ours = all(one is state.averaged for one in state.extras.values())  # the commit updates `averaged`
        if self._is_own_code and is_all_ours:  # else the user's code may be about to step a scheduler
            state.lock.let_go()

    def turn_to_function(self) -> None:
        """Allow the user's own code more time between two steps' passes; it may run on one rank alone."""
        if self._is_own_code:
            self._watcher.do(Activity.COMPUTE, self._watcher.pace.between_steps)

    def close(self) -> None:
        """Drop the batches and the step in hand: the world is over."""
        step, self.in_hand = self.in_hand, None
        self._shares = iter(())
        if step is not None:
            step.end_passes()
