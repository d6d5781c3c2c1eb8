"""The laws of voting: which side may go on when members are lost and no outside store decides. Pure rules over values.

Voters are nodes, since an eight-GPU node fails as one. A side goes on by a majority of the voters that are not proven
dead: dynamic voting (Jajodia and Mutchler, "Dynamic Voting Algorithms for Maintaining the Consistency of a Replicated
Database", 1990). The majority must hold in each world that is not settled yet, as in the joint majorities of the Raft
dissertation (Ongaro 2014, section 4.3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.world import Member

IN_TIME = 0.75
"""share of the peer timeout within which a death must be found to count as proven"""


@dataclass(frozen=True)
class Voters:
    """The votes of one world.

    A node votes by the register of its first member; it loses its vote when that member dies. If no node has a vote
    left, each living member has one and all these votes are needed: else each member could go on alone. If none of them
    lives, the spares vote.
    """

    world: str
    """uid of the world"""
    nodes: tuple[str, ...]
    """uid of each node's first member, by rank"""
    dead: frozenset[str] = frozenset()
    """uids of members that are proven dead in time, or have left on purpose"""
    members: tuple[str, ...] = ()
    """uids of all members that train, by rank"""
    spares: tuple[str, ...] = ()
    """uids of those that do not train, by rank"""

    @staticmethod
    def of(world: str, members: Sequence[Member], max_world_size: int | None = None) -> Voters:
        workers = members[:max_world_size]
        firsts: dict[Any, str] = {}
        for member in workers:
            firsts.setdefault(member.node, member.uid)
        training, spares = (tuple(one.uid for one in some) for some in (workers, members[len(workers) :]))
        return Voters(world, tuple(firsts.values()), members=training, spares=spares)

    def without(self, dead: Collection[str]) -> Voters:
        known = frozenset(self.nodes) | frozenset(self.members) | frozenset(self.spares)
        return replace(self, dead=self.dead | (frozenset(dead) & known))

    @property
    def living(self) -> tuple[str, ...]:
        """Voters that are not proven dead, by rank."""
        voters = self.spares if self.dead.issuperset((*self.nodes, *self.members)) else self.nodes
        return tuple(one for one in voters if one not in self.dead)

    @property
    def electors(self) -> tuple[str, ...]:
        """Members that vote: the living voters, or all living members if no voter lives."""
        return self.living or tuple(member for member in self.members if member not in self.dead)


def may_go_on(worlds: Sequence[Voters], side: Collection[str]) -> bool:
    """Return whether `side` may decide what follows the last of `worlds`, the worlds since the last settled one.

    In each world the side needs more than half of the living voters, or exactly half with the lowest rank among them.
    If no voter of a world lives, it needs all living members of that world.
    """
    return all(_is_enough(voters, side) for voters in worlds)


def _is_enough(voters: Voters, side: Collection[str]) -> bool:
    living = voters.living
    if not living:
        return all(member in side for member in voters.electors)
    inside = [node for node in living if node in side]
    if 2 * len(inside) == len(living):
        return living[0] in inside
    return 2 * len(inside) > len(living)


def missing_votes(worlds: Sequence[Voters], side: Collection[str]) -> tuple[str, ...]:
    """Return the electors that `side` waits for: those outside of it in each world where it has not enough votes."""
    lacking = [voters for voters in worlds if not _is_enough(voters, side)]
    return tuple(dict.fromkeys(uid for voters in lacking for uid in voters.electors if uid not in side))


def is_dead_in_time(seconds_since_answered_ping: float | None, peer_timeout: float) -> bool:
    """Return whether a death counts as proven: later, the member may have gone on in a world unknown to this side.

    Args:
        seconds_since_answered_ping: from the sending of the last ping that the member answered in this world, to the
            moment before the probe that found it dead. None if it never answered one.
    """
    return seconds_since_answered_ping is not None and seconds_since_answered_ping <= IN_TIME * peer_timeout
