"""The agreement on the next world: one worker proposes, all decide, and any worker may die at any moment.

The protocol, for the members of the world that ends:

1. Each member reports that it is present (`Presence`), or that it leaves on purpose.
2. The proposer, the lowest rank that is neither dead nor silent, collects these reports until each old rank is present,
   has left, is dead, or is given up. It adds the newcomers that it has chosen and proposes the list (`Decision`). If
   the place for claims does not answer the proposer, the next rank that gets an answer there proposes as well.
3. The members make that list, or an earlier one, the only successor of the world (ballots.py). A worker that is not on
   the list must not train on.

No member is special: when the proposer dies, the next rank proposes. Each `look` takes a bounded number of store
operations and returns a value; a thin driver acts on that value.

In a large world a member pings only some neighbours (neighbours.py). While it waits for a lower rank it pings that rank
too. The proposer pings all members. It cannot prove the death of a member that it did not ping before: the neighbours
of the dead member prove that death and report it in their `Presence`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from elastic_train.errors import JobFailed
from elastic_train.protocol.join_queue import fitting_nodes, ready_nodes, without_nodes_of
from elastic_train.rules import next_generation, next_members
from elastic_train.world import Member, Reach, World, from_json, from_runs, to_json, to_runs, value_of

if TYPE_CHECKING:
    from elastic_train.protocol.contacts import Contacts
    from elastic_train.protocol.peers import PeerJob

NUM_AWAITED = 3
"""how many of the lower ranks that may propose a member watches: the first of them may be silent"""


class Liveness(StrEnum):
    """The liveness status of a member that has not come to the agreement."""

    ALIVE = "alive"
    """or not known to be out of the world: the proposer waits for it"""
    DEAD = "dead"
    """proven dead in time (laws.py)"""
    UNKNOWN = "unknown"
    """silent or stuck for too long: it is left out, though its process may live"""


@dataclass(frozen=True)
class Presence:
    """The report of a member that wants to be in the next world."""

    max_generation: int | None
    """largest generation that it knows of"""
    unreachable: tuple[int, ...] = ()
    """old ranks that it could not reach, as far as it had reason to try"""
    dead: tuple[str, ...] = ()
    """uids of old members that it has proven dead in time"""
    lacks_place: bool = False
    """whether the place for claims does not answer it: then a member that gets an answer there is to propose"""
    holds_state: bool = False
    """whether it has the run's state"""


@dataclass(frozen=True)
class Decision:
    """The one successor of a world, written as the difference from that world."""

    generation: int
    uid: str
    """of the new world"""
    ranks: tuple[int, ...]
    """old ranks, by rank in the new world"""
    new: tuple[Member, ...] = ()
    """newcomers, without their agreement texts; their ranks follow"""
    lost: tuple[int, ...] = ()
    """old ranks that are dead or were given up"""
    left: tuple[int, ...] = ()
    """old ranks that left on purpose"""
    dead: tuple[str, ...] = ()
    """uids of members without a vote from now on: proven dead, left, or left behind by a branch"""
    facts: Mapping[str, str] = field(default_factory=dict)
    """what the members know of the job, for the newcomers"""

    def __post_init__(self) -> None:
        # All agreement texts are equal, and the job has the text as a fact: a thousand copies would fill every store.
        object.__setattr__(self, "new", tuple(replace(one, agreement={}) for one in self.new))

    def to_json(self) -> str:
        return to_json(self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        return vars(self) | {name: to_runs(getattr(self, name)) for name in ("ranks", "lost", "left")}

    @staticmethod
    def from_json(text: str) -> Decision:
        return Decision.from_fields(json.loads(text))

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Decision:
        runs = {name: from_runs(fields[name]) for name in ("ranks", "lost", "left")}
        decision: Decision = value_of(Decision, {**fields, **runs})
        return decision

    def members_after(self, world: World | None) -> tuple[Member, ...]:
        """The members of the new world, which follows `world`, by rank, without their agreement texts."""
        old = () if world is None else tuple(world.members[rank] for rank in self.ranks)
        return tuple(replace(one, max_generation=self.generation, agreement={}) for one in (*old, *self.new))

    def world_for(self, uid: str, world: World) -> World | None:
        """The successor of `world` as the member `uid` sees it; None if that member is not in it."""
        members = self.members_after(world)
        uids = [member.uid for member in members]
        return World(uids.index(uid), self.generation, members, world.max_world_size, self.uid) if uid in uids else None


@dataclass(frozen=True)
class Denied:
    """The result of a proposal that was not decided; the next look may decide it."""

    votes: tuple[str, ...] = ()
    """uids of the voters without whose votes this side may not go on; empty if another member is proposing"""
    gone_on: int | None = None
    """generation of a later world of the job, in which others train: this member is left behind"""


# --- what a look finds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """The result that nothing is decided yet."""

    ranks: tuple[int, ...] = ()
    """ranks to wait for; empty if the next look may already find more"""
    votes: tuple[str, ...] = ()
    """uids of the voters without whose votes this side may not go on"""


@dataclass(frozen=True)
class LeftBehind:
    """The result that other members went on from a world before this one, and that no member has settled this one."""

    generation: int


Found = Wait | Decision | LeftBehind


class Agreement:
    """One member's part in the agreement on what follows `world`.

    Args:
        presence: the first report of this member.
        contacts: of this member, in `world`. A member that was not heard just now is not asked: that would only block.
        status: returns the liveness status of an old member.
        newcomers: called each time that this member proposes; returns the newcomers to admit.
        draw_uid: returns a new uid for a world.
        witnesses: returns the ranks that may prove the death of an old rank which this member has not pinged in time.
        is_early: whether reports about this member may be outdated: it was suspended and has contact again.
        reach: called with `proposed` before the store is asked to decide; drills inject faults there.
    """

    def __init__(
        self,
        job: PeerJob,
        world: World,
        presence: Presence,
        contacts: Contacts,
        *,
        status: Callable[[int], Liveness],
        newcomers: Callable[[], Sequence[Member]],
        facts: Mapping[str, str],
        draw_uid: Callable[[], str],
        witnesses: Callable[[int], Collection[int]] = lambda _rank: (),
        is_early: Callable[[], bool] = lambda: False,
        reach: Reach = lambda _point, _world: None,
    ) -> None:
        self._job, self._world, self._mine, self._contacts = job, world, presence, contacts
        self._status, self._newcomers, self._facts, self._draw_uid = status, newcomers, facts, draw_uid
        self._witnesses, self._reach, self._is_early = witnesses, reach, is_early
        self._present: dict[int, Presence] = {world.rank: presence}
        self._is_announced = False
        self.asks_others = False
        """whether `look` asks other members for the decision, besides this member's own store"""

    def has_come(self, rank: int) -> bool:
        """Return whether an old rank takes part in this agreement; ask its store if that is not known. Without this,
        two members that wait for a third member would give up each other along with the third."""
        if rank not in self._present and self._is_heard(rank):
            self._note_present([rank])
        return rank in self._present

    def _is_heard(self, rank: int) -> bool:
        return self._contacts.is_heard(self._world.members[rank])

    def look(self) -> Found:
        """Take one step. Raises: StoreUnreachable; JobFailed if a member has announced that the job cannot go on."""
        job, world = self._job, self._world
        left = job.left(world)
        found = {rank: self._status_of(rank, left) for rank in sorted(self._contacts.watched)}
        dead = tuple(world.members[rank].uid for rank, status in found.items() if status is Liveness.DEAD)
        unreachable = tuple(rank for rank in self._mine.unreachable if not self._is_heard(rank))  # contact may return
        is_lacking = job.place.is_lacking(world.uid)
        self._announce(replace(self._mine, dead=dead, unreachable=unreachable, lacks_place=is_lacking))
        asked = (
            [rank for rank in found if found[rank] is Liveness.ALIVE and self._is_heard(rank)]
            if self.asks_others
            else []
        )
        decided = job.decided(world, asked)
        if isinstance(decided, Denied):
            return LeftBehind(decided.gone_on or world.generation)
        if decided is not None:
            return Decision.from_json(decided)
        fatal = job.heard("fatal")
        if fatal is not None:
            raise JobFailed(fatal)
        lower = (rank for rank in range(world.rank) if self._status_of(rank, left, found) is Liveness.ALIVE)
        lower = (rank for rank in lower if not self._leaves_it(rank))
        proposers = tuple(islice(lower, NUM_AWAITED))
        if proposers:
            self._contacts.watch_too(proposers)
            if proposers[0] in asked:  # it may be a newcomer that does not know its world yet: this call informs it
                self._note_present(proposers[:1])
            return Wait(proposers[:1])
        others = [rank for rank in range(len(world.members)) if rank != world.rank]
        self._contacts.watch_too(others)
        return self._propose(left, {rank: self._status_of(rank, left, found) for rank in others})

    def _announce(self, mine: Presence) -> None:
        if not self._is_announced or mine != self._mine:
            self._mine = self._present[self._world.rank] = mine
            self._job.announce_presence(self._world, to_json(mine))
            self._is_announced = True

    def _leaves_it(self, rank: int) -> bool:
        """Return whether a lower rank could not claim its proposal, while this member may be able to."""
        return rank in self._present and self._present[rank].lacks_place and not self._mine.lacks_place

    def _status_of(
        self, rank: int, left: frozenset[int], found: Mapping[int, Liveness] = MappingProxyType({})
    ) -> Liveness:
        return found.get(rank) or (Liveness.DEAD if rank in left else self._status(rank))

    def _note_present(self, ranks: Sequence[int]) -> None:
        for rank, text in self._job.announcements.present(self._world, ranks).items():
            self._present[rank] = from_json(Presence, text)

    def _gone(self, found: Mapping[int, Liveness], side: Collection[int]) -> set[str]:
        """Return the uids of members that are proven dead or have left, as the members of this side report."""
        gone = {self._world.members[rank].uid for rank, status in found.items() if status is Liveness.DEAD}
        gone |= {uid for rank in side for uid in self._present[rank].dead}
        gone |= {uid for one in self._world.members if one.uid in gone for uid, _ in one.was}
        return gone - {self._world.members[rank].uid for rank in side}

    def _holding(self, side: Collection[int]) -> frozenset[str]:
        """Return the uids of members of this side that report to have the run's state."""
        return frozenset(self._world.members[rank].uid for rank in side if self._present[rank].holds_state)

    def _returning(self, room: int) -> tuple[Member, ...]:
        """Return nodes in the join queue with a worker that is back after it was left out, at most `room`, if they are
        ready and do not refuse connections; none if there never was a state. Blocks for short timeouts."""
        job, inside = self._job, self._world.members
        if not job.worlds.has_state:
            return ()
        nodes = fitting_nodes(ready_nodes(job.queue(), inside), job.facts.known.get("agreement"))
        found = [member for node in [*filter(job.worlds.given_up, nodes)][:room] for member in node]
        return without_nodes_of(job.entrance.refused(found), found) if found else ()

    def _ended(self, out: Sequence[Member], gone: Collection[str]) -> frozenset[str]:
        """Return `job.ended_holders`; nothing if a member in `out` may live, for that member may have a state."""
        is_anybody_silent = any(one.uid not in gone and not self._contacts.is_gone(one) for one in out)
        return frozenset() if is_anybody_silent else self._job.ended_holders({*gone, *(one.uid for one in out)})

    def _unproven(self, out: Collection[int], gone: Collection[str], side: Collection[int]) -> dict[int, set[int]]:
        """Return the ranks whose death is not proven yet, each with the members of this side that may soon prove it."""
        members = self._world.members
        unproven = {rank: {*self._witnesses(rank)} & {*side} for rank in out if members[rank].uid not in gone}
        return {rank: witnesses for rank, witnesses in unproven.items() if witnesses}

    def _propose(self, left: frozenset[int], found: Mapping[int, Liveness]) -> Found:
        job, world = self._job, self._world
        out = {rank for rank, status in found.items() if status is not Liveness.ALIVE and rank not in left}
        missing = [rank for rank in found if rank not in self._present and rank not in left and rank not in out]
        doubtful = [rank for rank, told in self._present.items() if told.unreachable and rank != world.rank]
        self._note_present(list(filter(self._is_heard, dict.fromkeys([*missing, *doubtful]))))
        joined = {rank: told.unreachable for rank, told in self._present.items()}
        verdict = next_members(len(world.members), joined, left, out)
        if verdict.waiting_for:
            return Wait(verdict.waiting_for)
        gone = self._gone(found, verdict.members)
        unproven = self._unproven(out, gone, verdict.members)
        if unproven:
            self._note_present(sorted(set().union(*unproven.values()) - {world.rank}))
            return Wait(tuple(sorted(unproven)))
        alive = [rank for rank, status in found.items() if status is Liveness.ALIVE and rank in self._present]
        missed_by = [rank for rank in alive if world.rank in self._present[rank].unreachable]
        if missed_by and self._is_early():
            return Wait(tuple(missed_by))
        newcomers, holding = tuple(self._newcomers()), self._holding(verdict.members)
        if not holding:  # one that was left out may be back with the state: it is admitted at once
            room = len({world.members[rank].node for rank in out})
            newcomers += tuple(one for one in self._returning(room) if one not in newcomers)
        apart = [one for rank, one in enumerate(world.members) if rank not in {*verdict.members, *left}]
        ended = self._ended(apart, gone)  # some of these may answer, and this member may be one of them
        seen = [self._present[rank].max_generation for rank in verdict.members]
        decision = Decision(
            generation=next_generation([*seen, world.generation, *(one.max_generation for one in newcomers)]),
            uid=self._draw_uid(),
            ranks=verdict.members,
            new=newcomers,
            lost=tuple(rank for rank in found if rank not in verdict.members and rank not in left),
            left=tuple(sorted(left)),
            dead=tuple(sorted(gone | ended)),
            facts=self._facts,
        )
        reachable = [rank for rank, status in found.items() if status is Liveness.ALIVE and self._is_heard(rank)]
        answering = frozenset(world.members[rank].uid for rank in found if self._is_heard(rank))
        self._reach("proposed", world)
        outcome = job.decide(
            world, decision.to_json(), [world.rank, *reachable],
            dead=frozenset(gone), ended=ended, answering=answering, holding=holding,
        )  # fmt: skip
        if isinstance(outcome, Denied):
            self.asks_others = bool(outcome.votes)
            self._announce(replace(self._mine, lacks_place=job.place.is_lacking(world.uid)))
            return Wait(votes=outcome.votes) if outcome.gone_on is None else LeftBehind(outcome.gone_on)
        return Decision.from_json(outcome)
