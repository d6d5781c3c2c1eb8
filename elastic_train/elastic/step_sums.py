"""Sums over the ranks that belong to a step of a user's own loop, and may arrive only after its commit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd
from elastic_train.errors import FormationFailed, TrainingDiverged
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Activity
from elastic_train.snapshot_interval import interval_of
from elastic_train.training.collectives import LateNumbers, wait
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.step import NO_VOTES, OF_DIVERGED, Votes
from elastic_train.world import World

EVERY = 100
"""number of steps between two in which all ranks wait, to compare what must be equal"""
LONG_STEP_SECONDS = 1.0
"""in steps of this length all ranks wait: that costs little, and a grace period may be short"""


@dataclass
class LateTotals:
    """Sums over the ranks that belong to a step. They may still be under way when it is committed."""

    first: MicroBatch
    """the step's first micro-batch, without the batch, which would only take memory"""
    known_loss: float | None
    has_stepped: bool
    """whether the optimizer has stepped; else a GradScaler has skipped the step"""
    may_be_late: bool
    """whether the step is committed before they have arrived"""
    sums: torch.Tensor
    """mean loss, the votes, and each rank's seconds since its previous commit"""
    work: Any = None
    """the all-reduce; None in a world of one"""
    found_inf: torch.Tensor | None = None
    """as `StepInHand`'s; read only where the loss is not finite, as reading waits for the device"""
    unread: LateNumbers | None = None
    """the loss, in a world of one whose GPU has not computed it yet"""

    @property
    def mean_loss(self) -> float:
        return float(self.sums[0])

    @property
    def votes(self) -> Votes:
        return Votes(*map(int, self.sums[1:-1].tolist()))

    @property
    def seconds(self) -> float:
        return float(self.sums[-1])

    @property
    def has_diverged(self) -> bool:
        if not self.has_stepped or math.isfinite(self.mean_loss):
            return False
        return self.found_inf is None or not bool(self.found_inf)

    def read(self) -> None:
        """Block until they have arrived. Raises as `collectives.wait`."""
        if self.work is not None:
            wait(self.work, self.sums)
        if self.unread is not None:
            self.sums[0] = self.unread.read()

    def read_at_once(self) -> bool:
        """Return whether they have arrived. Waits only for this rank's device. Raises: RuntimeError: a peer is lost."""
        have_come = self.work is None or self.work.is_completed()
        if have_come:
            self.read()
        return have_come


class StepSums:
    """The sums of one world's steps. Each commit begins them, and waits for them at once or before the next commit.

    The training thread calls everything here. When it waits in a collective that will not end, another thread gives up
    the missing sums.

    Args:
        end: gets the votes and lost peers.
        votes: returns this rank's votes; called once a step at most.
    """

    def __init__(
        self,
        worker: Worker,
        watcher: Watcher,
        world: World,
        end: WorldEnd,
        votes: Callable[[], Votes],
    ) -> None:
        self._state, self._reporter = worker.state, worker.reporter
        self._watcher = watcher
        self._world = world
        self._end = end
        self._votes = votes
        self._every = interval_of(worker.config.snapshot_every).steps or EVERY
        self._step_seconds = math.inf
        """mean over the ranks for the newest step whose totals have arrived"""
        self.late: LateTotals | None = None
        """the totals of the newest committed step"""
        self._lock = threading.Lock()
        """for taking `late`"""
        self._diverged: TrainingDiverged | None = None

    @property
    def is_sound(self) -> bool:
        """False after a loss that is not finite, or a lost peer; read it once the sums are settled."""
        return self._diverged is None and self._end.lost is None

    def require_finite(self) -> None:
        """Raise TrainingDiverged where the loss of a committed step was not finite."""
        if self._diverged is not None:
            raise self._diverged

    # --- at a commit --------------------------------------------------------------------------------------------------

    def begin(
        self,
        first: MicroBatch,
        own_part: float,
        known_loss: float | None,
        seconds: float,
        *,
        has_stepped: bool,
        has_reduced: bool,
        unread: LateNumbers | None = None,
    ) -> LateTotals:
        """Begin the sums of the step in hand. Does not block.

        Args:
            own_part: this rank's part of the mean loss.
            known_loss: stands in for the mean where a peer is lost; None where no earlier step has one.
            seconds: since this rank's previous commit.
            has_stepped: whether the optimizer has stepped.
            has_reduced: whether DDP has summed the gradients.
            unread: `own_part`, where the device does not have it yet.
        """
        may_be_late = self._may_be_late(has_reduced or unread is not None)
        self._end.enter_sums()
        votes = NO_VOTES if self._end.is_due else self._votes()
        sums = torch.tensor([own_part, *votes, seconds], dtype=torch.float64, device="cpu")
        totals = LateTotals(first, known_loss, has_stepped, may_be_late, sums, unread=unread)
        if self._end.lost is None and self._world.world_size > 1:
            try:
                totals.work = dist.all_reduce(totals.sums, async_op=True)
            except RuntimeError as error:
                self._end.note_lost(error)
                totals.may_be_late = False
        return totals

    def wait_for(self, totals: LateTotals) -> bool:
        """Return whether the sums of the step in hand have arrived; False where a peer was lost. Blocks until then.

        Raises: TrainingDiverged.
        """
        is_known = self._end.lost is None and self._has_come(totals)
        if is_known and totals.has_diverged:
            raise self._divergence(totals, self._state.step + 1)
        return is_known

    def _may_be_late(self, stands: bool) -> bool:
        """Whether the step in hand may be committed before loss and votes are known; alike on every rank."""
        state = self._state
        is_last_of_epoch = state.samples_done + state.next_step_samples() >= state.length
        return (
            stands  # every rank has taken part in it
            and self._step_seconds < LONG_STEP_SECONDS  # a worker told to stop may not have the time for two steps
            and not self._end.is_announced
            and not is_last_of_epoch
            and not self._is_waited_for()
            and state.step + 1 < state.last_step
        )

    def _is_waited_for(self) -> bool:
        """Whether all ranks wait in the step in hand, for a snapshot or to compare the states."""
        step = self._state.step + 1
        return step % self._every == 0 or step % EVERY == 0

    # --- after it -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take in the mean loss and the votes of the newest step. Blocks until every rank has committed it, but does
        not raise what it finds."""
        totals = self.late
        if totals is None:
            return
        is_known = self._has_come(totals)
        if not self._claim(totals):  # another thread has given it up, and logs the step
            return
        self._take_in(totals, is_known=is_known)
        if is_known and self._diverged is None:
            self._end.follow(totals.votes)

    def give_up(self) -> None:
        """Do as `settle`, but wait for this rank's device only: the world is over, and missing sums never arrive."""
        totals = self.late
        if totals is None or not self._claim(totals):
            return
        is_known = False
        with suppress(RuntimeError):  # a peer was lost
            # What a device would report about a loss that is not finite may never arrive.
            is_known = totals.read_at_once() and (math.isfinite(totals.mean_loss) or totals.found_inf is None)
        self._take_in(totals, is_known=is_known)

    def _claim(self, totals: LateTotals) -> bool:
        """Return whether this thread takes them in: exactly one does."""
        with self._lock:
            if self.late is not totals:
                return False
            self.late = None
            return True

    def _has_come(self, totals: LateTotals) -> bool:
        """Wait for the sums. Returns False where a peer was lost."""
        self._watcher.do(Activity.REDUCE if self._world.world_size > 1 else Activity.COMPUTE)  # alone: for its device
        try:
            totals.read()
        except (RuntimeError, FormationFailed) as error:
            self._end.note_lost(error)
            return False
        self._watcher.do(Activity.COMPUTE)
        self._step_seconds = totals.seconds / self._world.world_size
        return True

    def _take_in(self, totals: LateTotals, *, is_known: bool) -> None:
        """Log the newest step: its totals have arrived, or never will."""
        if is_known and totals.has_diverged:
            self._diverged = self._divergence(totals, self._state.step)
            return
        loss = totals.mean_loss if is_known else totals.known_loss
        self._state.note_loss(loss)
        self._reporter.step(self._state, loss, epoch=totals.first.epoch, samples=totals.first.step_samples)

    def _divergence(self, totals: LateTotals, step: int) -> TrainingDiverged:
        return TrainingDiverged(
            f"the loss of step {step} (epoch {self._state.epoch + 1}) is {totals.mean_loss}; {OF_DIVERGED}. "
            "Lower the learning rate, clip the gradients, or look at the data of that step (--ledger writes it)"
        )
