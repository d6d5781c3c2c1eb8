"""When rank 0 writes a snapshot: after so many steps, after so much time, or by its cost and the failures."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from elastic_train.runlog.event_types import IntervalChanged
from elastic_train.runlog.goodput import Phase
from elastic_train.snapshot_interval import (
    SnapshotInterval,
    best_interval,
    mean_failure_seconds,
    num_failures,
)
from elastic_train.storage.shares import senders
from elastic_train.training.state import TrainState
from elastic_train.world import World

KEPT_FACTOR = 2.0
"""An interval is kept while it is at most this many times the best one, and at least its inverse. The loss is then at
most a quarter larger than at the best one, which moves with the noise of a few steps."""
IDLE_STEPS = 64
BUSY_STEPS = 1024
"""number of the newest steps in a median; a snapshot may hang for as long as its store does"""
COSTS = 5
"""number of the newest costs in a median"""


class SaveTime:
    """How long saving the state takes. Rank 0 measures it and shares it by a vote, so that all of a world use the same
    value from the same step on. If all nodes have a notice, it decides when they leave.

    Args:
        is_bucket: whether snapshots go to a bucket.
    """

    def __init__(self, *, is_bucket: bool) -> None:
        self._is_bucket = is_bucket
        self._generation, self._is_rank_0, self._num_nodes = -1, False, 1
        self._measured = 0.0, 0
        """seconds and bytes of this worker's newest snapshot"""
        self._announced = -1, 0
        """the generation in which it was shared last, and the whole seconds: negative where one node sends alone"""

    def enter(self, world: World) -> None:
        self._generation, self._is_rank_0, self._num_nodes = world.generation, world.rank == 0, world.num_training_nodes

    def note_written(self, seconds: float, num_bytes: int) -> None:
        """Note the time and the size of this worker's newest snapshot."""
        self._measured = seconds, num_bytes

    def vote(self) -> int:
        """Return the value for `note_vote` that rank 0 has not yet shared with its world; else 0."""
        seconds, num_bytes = math.ceil(self._measured[0]), self._measured[1]
        if senders(2, num_bytes, is_bucket=self._is_bucket) == 1:  # the next world may have more nodes than this one
            seconds = -seconds
        seconds = seconds or self._announced[1]
        return seconds if self._is_rank_0 and self._announced != (self._generation, seconds) else 0

    def note_vote(self, seconds: int) -> None:
        """Note the sum of the world's votes in a step: whole seconds that one node needs for the state, negative where
        the other nodes would not help it."""
        if seconds:
            self._announced = self._generation, seconds

    @property
    def seconds(self) -> float:
        """Seconds that all nodes of the world need together; 0 where none has measured it. For any thread."""
        seconds = self._announced[1]
        return -seconds if seconds < 0 else seconds / self._num_nodes


class SnapshotSchedule:
    """The schedule of one worker, in all its worlds. Rank 0 alone decides; the other ranks need not know.

    A snapshot costs the time for which it blocks the training thread, and the time by which steps are slower while it
    is written. The latter is a difference of medians, so that an evaluation between two steps does not count.
    """

    def __init__(self, interval: SnapshotInterval, *, now: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._now = now
        self.is_overdue = False
        """whether a snapshot is due after the newest step, or was due before and is not written"""
        self._noted_step: int | None = None
        """the newest step"""
        self._started_at: float | None = None
        """when the newest snapshot was begun; before that, this worker's first world"""
        self._step_at: float | None = None
        self._was_writing = False
        self._idle: deque[float] = deque(maxlen=IDLE_STEPS)
        """seconds of steps during which no snapshot was written"""
        self._busy: deque[float] = deque(maxlen=BUSY_STEPS)
        """seconds of steps during which the present snapshot is written"""
        self._num_busy = 0
        self._costs: deque[float] = deque(maxlen=COSTS)
        self.seconds = interval.first_seconds
        """between the starts of two snapshots, if the interval is not a number of steps"""
        self._decided_at: int | None = None
        """number of failures when the interval in use was decided"""
        self._counted: tuple[list[dict[str, Any]], int] = ([], 0)
        """the incidents that were counted, and their number"""
        self._failures = 0

    @property
    def cost_seconds(self) -> float | None:
        """Training time that a snapshot costs; None before the first."""
        return median(self._costs) if self._costs else None

    @property
    def seconds_on_the_way(self) -> float:
        """Seconds since the newest snapshot was begun."""
        return 0.0 if self._started_at is None else self._now() - self._started_at

    def enter(self, *, takes_over: bool = False, step: int = 0) -> None:
        """Note that a world stands. Time counts from this worker's first world. If it becomes rank 0 later, a snapshot
        is due soon: it does not know when the previous rank 0 has written one, nor whether any member sees that.

        Args:
            takes_over: whether this worker was a member before, with another rank 0.
            step: the newest committed step.
        """
        self._step_at = None  # the time between two worlds is no step
        if takes_over and self._interval.steps:
            self.is_overdue = self.is_overdue or step >= self._interval.steps
        if self._started_at is None:
            self._started_at = self._now()

    def note_step(self, step: int, *, is_writing: bool) -> None:
        """Note that `step` steps are committed.

        Args:
            is_writing: whether a snapshot is being written.
        """
        now = self._now()
        if self._step_at is not None:
            is_busy = is_writing or self._was_writing
            (self._busy if is_busy else self._idle).append(now - self._step_at)
            self._num_busy += is_busy
        self._step_at, self._was_writing = now, is_writing
        before, self._noted_step = step - 1 if self._noted_step is None else self._noted_step, step
        if self._interval.steps is not None:  # a due step was not noted itself if a peer was lost after it
            every = self._interval.steps
            is_due = every > 0 and step // every > before // every
        else:
            is_due = self._started_at is not None and now - self._started_at >= self.seconds
        self.is_overdue = self.is_overdue or is_due

    def put_off(self) -> None:
        """Keep the due snapshot due: it is not written now."""
        self.is_overdue = True

    def note_start(self, started_at: float) -> None:
        """Note that a snapshot is under way since `started_at`; its copying is no part of a step."""
        self.is_overdue = False
        self._started_at = started_at
        self._step_at, self._was_writing = self._now(), True
        self._forget_busy()

    def note_written(self, stall_seconds: float) -> None:
        """Note that the newest snapshot is durable."""
        slower = median(self._busy) - median(self._idle) if self._busy and self._idle else 0.0
        self._costs.append(stall_seconds + self._num_busy * max(0.0, slower))
        self._forget_busy()

    def _forget_busy(self) -> None:
        self._busy.clear()
        self._num_busy = 0

    def adapt(self, state: TrainState) -> IntervalChanged | None:
        """Take the interval that is now best, if it is `auto`, and far from the one in use or after another failure.
        Returns the event to log if it has changed."""
        cost = self.cost_seconds
        if not self._interval.is_auto or cost is None:
            return None
        failures = self._count_failures(state.incidents)
        seconds = state.clock.totals()
        seconds.pop(Phase.DOWN, None)  # nothing can fail then; and two clocks, of which one may be wrong, measure it
        failure_seconds = mean_failure_seconds(sum(seconds.values()), failures)
        best = best_interval(cost, failure_seconds)
        is_near = self.seconds <= KEPT_FACTOR * best and best <= KEPT_FACTOR * self.seconds
        if failures == self._decided_at and is_near:
            return None
        self.seconds, self._decided_at = best, failures
        return IntervalChanged(
            seconds=self.seconds, cost_seconds=cost, failures=failures, failure_seconds=failure_seconds
        )

    def _count_failures(self, incidents: list[dict[str, Any]]) -> int:
        """Return the failures; cached, as each step asks for them and a long run may have many incidents."""
        known, number = self._counted
        if incidents is not known or len(incidents) != number:
            self._counted, self._failures = (incidents, len(incidents)), num_failures(incidents)
        return self._failures
