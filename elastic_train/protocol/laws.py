"""Who may go on when members are lost and no store outside of them decides: pure rules over values.

Voters are nodes, for an eight-GPU node is one failure. A side goes on by majority of the voters that are not proven
dead: dynamic voting (Jajodia and Mutchler, "Dynamic Voting Algorithms for Maintaining the Consistency of a Replicated
Database", 1990). Worlds that nobody has settled yet are counted one by one, as in the joint majorities of the Raft
dissertation (Ongaro 2014, section 4.3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.world import Member

IN_TIME = 0.75
"""share of the peer timeout within which a death must be found to count as proven"""


@dataclass(frozen=True)
class Voters:
    """The votes of one world.

    A node votes by the register of its first member; a node whose first member is dead has no vote left. Where no node
    has one, each member has, and all are needed: else each of them could go on alone.
    """

    world: str
    """uid of the world"""
    nodes: tuple[str, ...]
    """uid of each node's first member, by rank"""
    dead: frozenset[str] = frozenset()
    """those that are proven dead in time, or have left on purpose"""
    members: tuple[str, ...] = ()
    """uids of all, by rank"""

    @staticmethod
    def of(world: str, members: Iterable[Member]) -> Voters:
        firsts: dict[Any, str] = {}
        uids = []
        for member in members:
            firsts.setdefault(member.node, member.uid)
            uids.append(member.uid)
        return Voters(world, tuple(firsts.values()), members=tuple(uids))

    def without(self, dead: Collection[str]) -> Voters:
        known = frozenset(self.nodes) | frozenset(self.members)
        return Voters(self.world, self.nodes, self.dead | (frozenset(dead) & known), self.members)

    @property
    def living(self) -> tuple[str, ...]:
        """Voters that are not proven dead, by rank."""
        return tuple(node for node in self.nodes if node not in self.dead)

    @property
    def electors(self) -> tuple[str, ...]:
        """Those that vote: living voters, or all living members where there is none."""
        return self.living or tuple(member for member in self.members if member not in self.dead)


def may_go_on(worlds: Sequence[Voters], side: Collection[str]) -> bool:
    """Whether the voters in `side` may decide what follows the last of `worlds`, those since the last settled one.

    In each of them: every voter is in the side or dead; else more than half of the living ones; with exactly half,
    the side that has the lowest rank.
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
    """The living voters outside of `side` in worlds where it is not enough; for whom it waits."""
    lacking = [voters for voters in worlds if not _is_enough(voters, side)]
    return tuple(dict.fromkeys(uid for voters in lacking for uid in voters.electors if uid not in side))


def is_dead_in_time(seconds_since_answered_ping: float | None, peer_timeout: float) -> bool:
    """Whether a death counts as proven, though the dead may have gone on in a world that this side has not seen.

    Args:
        seconds_since_answered_ping: from the sending of the last ping that it answered in this world, to the moment
            before the probe that found it dead. None where it never answered one.
    """
    return seconds_since_answered_ping is not None and seconds_since_answered_ping <= IN_TIME * peer_timeout
