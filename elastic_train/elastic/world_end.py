"""What ends a world, by the votes in its steps or by a lost peer."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.rules import NOW
from elastic_train.training.step import Outcome, Votes
from elastic_train.world import World


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
