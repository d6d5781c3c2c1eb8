"""The sums over the ranks that belong to a step of an own loop, and may come only after its commit."""

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
"""steps from one that waits for all ranks, to compare what must be equal, to the next"""
LONG_STEP_SECONDS = 1.0
"""steps that take as long wait for all ranks: it costs little, and a grace period may be short"""


@dataclass
class LateTotals:
    """Sums over the ranks that belong to a step, which may still be under way when it is committed."""

    first: MicroBatch
    """of the step; the batch itself would only take memory"""
    known_loss: float | None
    has_stepped: bool
    """the optimizer; else a GradScaler has skipped the step"""
    may_be_late: bool
    """whether the step is committed without them"""
    sums: torch.Tensor
    """mean loss, the votes, and each rank's seconds since its commit before"""
    work: Any = None
    """None in a world of one"""
    found_inf: torch.Tensor | None = None
    """as `StepInHand`'s: read only where the loss is not finite, for that waits for the device"""
    unread: LateNumbers | None = None
    """the loss, in a world of one whose GPU does not have it yet"""

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
        """Blocks until they have come. Raises as `collectives.wait`."""
        if self.work is not None:
            wait(self.work, self.sums)
        if self.unread is not None:
            self.sums[0] = self.unread.read()

    def read_at_once(self) -> bool:
        """Whether they have come. Waits for nobody but its own device. Raises: RuntimeError: a peer was lost."""
        have_come = self.work is None or self.work.is_completed()
        if have_come:
            self.read()
        return have_come


class StepSums:
    """The sums of one world's steps: at each commit they are begun, and waited for at once or before the next one.

    The thread that trains calls everything here; another one gives up what has not come, when that thread waits in a
    collective that will not end.

    Args:
        end: is told of votes and of lost peers.
        votes: this rank's, asked for once a step at most.
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
        """of the newest step whose totals have come, a mean over the ranks"""
        self.late: LateTotals | None = None
        """of the newest committed step"""
        self._lock = threading.Lock()
        """of taking it away"""
        self._diverged: TrainingDiverged | None = None

    @property
    def is_sound(self) -> bool:
        """False after a loss that is not finite, or a lost peer; ask once the sums are settled."""
        return self._diverged is None and self._end.lost is None

    def require_finite(self) -> None:
        """Raises: TrainingDiverged where the loss of a committed step was not finite."""
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
        """Those of the step in hand are under way. Does not block.

        Args:
            own_part: this rank's part of the mean loss.
            known_loss: stands for the mean where a peer is lost; None where no step before has one.
            seconds: since this rank's commit before.
            has_stepped: the optimizer has.
            has_reduced: the gradients were summed by DDP.
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
        """Whether the sums of the step in hand have come; not where a peer was lost. Blocks until either is known.

        Raises: TrainingDiverged.
        """
        is_known = self._end.lost is None and self._has_come(totals)
        if is_known and totals.has_diverged:
            raise self._divergence(totals, self._state.step + 1)
        return is_known

    def _may_be_late(self, stands: bool) -> bool:
        """Whether loss and votes of the step in hand need not be known at its commit; alike on every rank."""
        state = self._state
        is_last_of_epoch = state.samples_done + state.next_step_samples() >= state.length
        return (
            stands  # every rank has taken part in it
            and self._step_seconds < LONG_STEP_SECONDS  # who is told to stop may not have the time for two
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
        """The mean loss and the votes of the newest step, once every rank has committed it. Blocks until then, but does
        not raise what it finds."""
        totals = self.late
        if totals is None:
            return
        is_known = self._has_come(totals)
        if not self._claim(totals):  # another thread has given it up, and tells of the step
            return
        self._take_in(totals, is_known=is_known)
        if is_known and self._diverged is None:
            self._end.follow(totals.votes)

    def give_up(self) -> None:
        """As `settle`, but waits for its own device alone: the world is over, and what has not come yet never will."""
        totals = self.late
        if totals is None or not self._claim(totals):
            return
        is_known = False
        with suppress(RuntimeError):  # a peer was lost
            # What a device has to say of a loss that is not finite may never come.
            is_known = totals.read_at_once() and (math.isfinite(totals.mean_loss) or totals.found_inf is None)
        self._take_in(totals, is_known=is_known)

    def _claim(self, totals: LateTotals) -> bool:
        """Whether this thread takes them in: one does."""
        with self._lock:
            if self.late is not totals:
                return False
            self.late = None
            return True

    def _has_come(self, totals: LateTotals) -> bool:
        """Waits for the sums; False where a peer was lost."""
        self._watcher.do(Activity.REDUCE if self._world.world_size > 1 else Activity.COMPUTE)  # alone for its device
        try:
            totals.read()
        except (RuntimeError, FormationFailed) as error:
            self._end.note_lost(error)
            return False
        self._watcher.do(Activity.COMPUTE)
        self._step_seconds = totals.seconds / self._world.world_size
        return True

    def _take_in(self, totals: LateTotals, *, is_known: bool) -> None:
        """The totals of the newest step have come, or never will."""
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
