"""The votes in the steps of a world, what ends the world, and whether another one is worth trying."""

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
"""worlds in a row without a committed step, in addition to one for each member"""
LOOK_SECONDS = 0.05
"""between two looks for nodes that are ready to join"""


def votes_of(worker: Worker, membership: Membership) -> Votes:
    """Return this rank's votes in the step in hand."""
    membership.note_reduction()
    told_to_stop, leaving = worker.stop.votes()
    return Votes(told_to_stop, leaving, membership.joins.vote())


class WorldEnds(BaseException):
    """Unwinds a training function when all ranks have agreed to stop. No Exception: the function might catch that."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class WorldEnd:
    """The end of one world, as far as it is known.

    The votes of a step decide it, and may arrive when the next step is under way. So the decision is carried out after
    that step, on every rank alike; at once (`bring_forward`) where all ranks waited for the votes.

    Args:
        note_save_seconds: called with the sum of the votes `save_seconds`.
    """

    def __init__(self, world: World, membership: Membership, note_save_seconds: Callable[[int], None]) -> None:
        self._world = world
        self._membership = membership
        self._note_save_seconds = note_save_seconds
        self.lost: Exception | None = None
        """the error of a collective between two steps, where a peer was lost"""
        self._outcome: Outcome | None = None
        """how this world ends, after the step in hand"""
        self._next_outcome: Outcome | None = None
        """what the last step has decided, for after the step in hand"""

    @property
    def is_announced(self) -> bool:
        """Whether the last step has shown that the world ends."""
        return self.lost is not None or self._next_outcome is not None

    @property
    def is_due(self) -> bool:
        """Whether the world ends with the step in hand, in which no rank votes."""
        return self.lost is not None or self._outcome is not None

    def enter_sums(self) -> None:
        """Note that the sums of the step in hand are begun: the last step's decision is carried out after this one."""
        self._outcome, self._next_outcome = self._next_outcome, None

    def follow(self, votes: Votes) -> None:
        """Note what all have decided, to be carried out after the step in hand."""
        if self._outcome is not None:  # no votes count in the last step of a world
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
        """Carry out at once what was decided: no other step is in hand."""
        self._outcome, self._next_outcome = self._outcome or self._next_outcome, None

    def call_off(self) -> None:
        """Cancel the end of the world: training is finished, so any other request came too late."""
        self._outcome = None

    def note_lost(self, error: Exception) -> None:
        """Note a lost peer. It is raised when the next batch is asked for, after the function's code past the commit.

        Raises: `error`, where it is none of the communication library.
        """
        if not is_communication_error(error):
            raise error
        self.lost = error
        self._membership.watcher.announce_broken()

    def raise_if_lost(self) -> None:
        """Raise the error of a peer that was lost while the function made no collective."""
        if self.lost is not None:
            raise self.lost

    def raise_if_over(self) -> None:
        """Raise what has ended the world meanwhile."""
        self.raise_if_lost()
        if self._outcome is not None:
            raise WorldEnds(self._outcome)

    def close(self) -> None:
        """Drop the error, and with it the frames that it refers to."""
        self.lost = None


def judge(error: Exception, step: int, world: World, membership: Membership) -> Failure:
    """Judge whose error ended `step`. Announces it to the other members unless a lost peer caused it."""
    if isinstance(error, ElasticTrainError) and not isinstance(error, FormationFailed):
        if isinstance(error, TrainingDiverged | UsageError):  # raised on all that train; a spare must not go on
            with suppress(StoreUnreachable):
                membership.survivors.announce_fatal(world, str(error))
        return Failure.JOB
    if is_communication_error(error):
        return Failure.PEER
    try:
        verdict = membership.survivors.judge_own(kind_and_line(error), step, world)
        if verdict is Failure.OWN:
            membership.leave(world, "error")  # so that the other members do not wait for this worker
        return verdict
    except StoreUnreachable:  # no other member can be told
        return Failure.OWN


class FruitlessWorlds:
    """Counts worlds in a row without a committed step."""

    def __init__(self) -> None:
        self._count, self._last_step = 0, -1

    def note(self, world: World, step: int, failure: str | None) -> None:
        """Note that a world has ended at a committed step. Raises: FormationFailed where there were too many."""
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
        """kept until a world trains: else the first member that gives up would make the others begin anew"""

    def note_training(self) -> None:
        """Note that there are enough nodes."""
        self._until = None

    def report(self, world: World, lost: list[str]) -> None:
        """Log the wait, and begin it unless it has begun. `lost` tells why, in words."""
        if self._until is None:
            self._until = self._clock() + self._worker.config.wait_timeout
        left = max(0.0, self._until - self._clock())
        few = f"{world.num_nodes} of at least {world.min_nodes} nodes are here"
        self._worker.reporter.log(f"{'; '.join([few, *lost])}: waiting {left:.0f} s for others to join")
        self._worker.state.clock.count_nodes(world.num_nodes)

    def wait(self, world: World) -> bool:
        """Wait until nodes can be admitted, and return True. Returns False where this world begins as it is: a member
        that is ahead by the last step has begun it.

        Raises:
            Stopped: told to stop. FormationFailed: no node came in time. The error that ended the watcher thread.
        """
        membership = self._membership
        membership.watcher.expect(world)  # the end of the previous world is past; this one's rank 0 can be found
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
