"""What is told and voted in the steps of a world, what ends it, and whether another one is worth going on to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.elastic.worker import Worker
from elastic_train.errors import (
    ElasticTrainError,
    FormationFailed,
    StoreUnreachable,
    TrainingDiverged,
    UsageError,
    kind_and_line,
)
from elastic_train.rules import NOW, Failure
from elastic_train.training.step import Outcome, Votes
from elastic_train.world import World

MAX_FRUITLESS_WORLDS = 10
"""worlds in a row in which no step was committed, beyond one for each member"""
LOOK_SECONDS = 0.05
"""between two looks at who is ready to join"""


def votes_of(worker: Worker, membership: Membership) -> Votes:
    """What this rank contributes to the decisions of the step in hand."""
    membership.note_reduction()
    told_to_stop, leaving = worker.stop.votes()
    return Votes(told_to_stop, leaving, membership.joins.vote())


class WorldEnds(BaseException):
    """Unwinds a training function in which all ranks have agreed to stop; no Exception, which it might catch."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class WorldEnd:
    """What is known of the end of one world.

    A decision is taken by the votes of a step, which may come when the next step is under way. So it is done after the
    step that is in hand then, on every rank alike; at once (`bring_forward`) where all ranks waited for the votes.

    Args:
        note_save_seconds: is told the sum of those votes.
    """

    def __init__(self, world: World, membership: Membership, note_save_seconds: Callable[[int], None]) -> None:
        self._world = world
        self._membership = membership
        self._note_save_seconds = note_save_seconds
        self.lost: Exception | None = None
        """with what a collective ended between two steps, where a peer was lost"""
        self._outcome: Outcome | None = None
        """of this world, after the step in hand"""
        self._next_outcome: Outcome | None = None
        """what was decided in the last step, to be done after the one in hand"""

    @property
    def is_announced(self) -> bool:
        """Whether the last step has shown that the world ends."""
        return self.lost is not None or self._next_outcome is not None

    @property
    def is_due(self) -> bool:
        """Whether the world ends with the step in hand: nobody votes in it."""
        return self.lost is not None or self._outcome is not None

    def enter_sums(self) -> None:
        """The sums of the step in hand are begun: what was decided in the last step is done after this one."""
        self._outcome, self._next_outcome = self._next_outcome, None

    def follow(self, votes: Votes) -> None:
        """Do what all have decided, after the step in hand."""
        if self._outcome is not None:  # in the last step of a world nobody votes
            return
        self._membership.joins.follow_vote(self._world, votes.joining)
        self._note_save_seconds(votes.save_seconds)
        if votes.told_to_stop == self._world.world_size:
            self._next_outcome = Outcome.STOPPED
        elif votes.joining == NOW:
            self._next_outcome = Outcome.SOME_JOIN
        elif votes.leaving:
            self._next_outcome = Outcome.SOME_LEAVE

    def bring_forward(self) -> None:
        """No other step is in hand: what was decided is done now."""
        self._outcome, self._next_outcome = self._outcome or self._next_outcome, None

    def call_off(self) -> None:
        """Training is finished: whatever else was asked for has come too late."""
        self._outcome = None

    def note_lost(self, error: Exception) -> None:
        """It is raised when the next batch is asked for, so that what the function does after a commit is done.

        Raises: `error`, where it is none of the communication library.
        """
        if not is_communication_error(error):
            raise error
        self.lost = error
        self._membership.watcher.announce_broken()

    def raise_if_lost(self) -> None:
        """Raises the error by which a peer was lost while the function was not looking."""
        if self.lost is not None:
            raise self.lost

    def raise_if_over(self) -> None:
        """Raises what ended the world while the function was not looking."""
        self.raise_if_lost()
        if self._outcome is not None:
            raise WorldEnds(self._outcome)

    def close(self) -> None:
        """The error is let go, and with it the frames that it holds."""
        self.lost = None


def judge(error: Exception, step: int, world: World, membership: Membership) -> Failure:
    """Find out whose error ended `step`, and announce one that is not a lost peer's to the others."""
    if isinstance(error, ElasticTrainError) and not isinstance(error, FormationFailed):
        if isinstance(error, TrainingDiverged | UsageError):  # of all who train; a spare must not go on
            with suppress(StoreUnreachable):
                membership.survivors.announce_fatal(world, str(error))
        return Failure.JOB
    if is_communication_error(error):
        return Failure.PEER
    try:
        verdict = membership.survivors.judge_own(kind_and_line(error), step, world)
        if verdict is Failure.OWN:
            membership.leave(world, "error")  # so that the others do not wait for this worker
        return verdict
    except StoreUnreachable:  # then there is nobody to tell
        return Failure.OWN


class FruitlessWorlds:
    """Counts worlds in a row that committed nothing."""

    def __init__(self) -> None:
        self._count, self._last_step = 0, -1

    def note(self, world: World, step: int, failure: str | None) -> None:
        """A world has ended at a committed step. Raises: FormationFailed where there were too many."""
        self._count = 0 if step > self._last_step or world.is_spare else self._count + 1
        self._last_step = step
        if self._count > MAX_FRUITLESS_WORLDS + world.world_size:
            raise FormationFailed(f"{self._count} worlds in a row committed no step; the last error: {failure}")


class MissingNodes:
    """Waits, without training, while there are fewer nodes than --min-nodes.

    Args:
        clock, sleep: as the ring's.
    """

    def __init__(
        self, worker: Worker, membership: Membership, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._worker, self._membership, self._clock, self._sleep = worker, membership, clock, sleep
        self._until: float | None = None
        """until a world trains: else who gives up first would have the others begin anew"""

    def note_training(self) -> None:
        """There are enough."""
        self._until = None

    def report(self, world: World, lost: list[str]) -> None:
        """Log the wait, which begins here unless it has; `lost`: why, in words."""
        if self._until is None:
            self._until = self._clock() + self._worker.config.wait_timeout
        left = max(0.0, self._until - self._clock())
        few = f"{world.num_nodes} of at least {world.min_nodes} nodes are here"
        self._worker.reporter.log(f"{'; '.join([few, *lost])}: waiting {left:.0f} s for others to join")
        self._worker.state.clock.count_nodes(world.num_nodes)

    def wait(self, world: World) -> bool:
        """Until some are ready to be admitted, and whether they are. Else this world is begun as it is, by a member
        that was ahead by the last step.

        Raises:
            Stopped: told to stop. FormationFailed: none came before the deadline. What ended the watcher's thread.
        """
        membership = self._membership
        membership.watcher.expect(world)  # what ended the world before is over; its rank 0 can be found
        while True:
            self._worker.stop.check()
            membership.watcher.thread.check()
            if membership.can_admit:
                return True
            if membership.barriers.is_begun(world):
                return False
            if self._until is None or self._clock() >= self._until:
                break
            self._sleep(LOOK_SECONDS)
        raise FormationFailed(
            f"only {world.num_nodes} of at least {world.min_nodes} nodes after "
            f"{self._worker.config.wait_timeout:.0f} s (--min-nodes, --wait-timeout)"
        )
