"""Workers agree on the next world: one of them proposes, they decide, any of them may die at any moment.

The protocol, for the members of the world that ends:

1. Each member says that it is here (`Presence`), or that it leaves on purpose.
2. The lowest rank that is neither dead nor silent collects what the others say, until each old rank is here, has left,
   is dead, or is given up. It adds the newcomers that it has chosen, and proposes the list (`Decision`). Where it gets
   no answer from the place in which decisions are claimed, the next rank that does proposes beside it.
3. They make that list, or an earlier one, the only successor of the world (ballots.py). A worker that is not on it must
   not train on.

Nobody is special: when the proposer dies, the next rank proposes. Each look takes a bounded number of store operations
and returns a value; a thin driver acts on it.

In a large world a member pings few others (neighbours.py). A member that waits for a lower rank pings that one too, and
the proposer pings all while it proposes. Where it has not pinged a dead member before, it leaves the proof to
those that have: they report it in their `Presence`.
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
from elastic_train.rules import next_generation, next_members
from elastic_train.world import Member, Reach, World, from_json, from_runs, to_json, to_runs, value_of

if TYPE_CHECKING:
    from elastic_train.protocol.contacts import Contacts
    from elastic_train.protocol.peers import PeerJob

NUM_AWAITED = 3
"""of the lower ranks that may propose, those that a member watches: the first of them may be silent"""


class Liveness(StrEnum):
    """What is known of a member that has not come to the agreement."""

    ALIVE = "alive"
    """or not known to be out: it is waited for"""
    DEAD = "dead"
    """proven, and in time (laws.py)"""
    UNKNOWN = "unknown"
    """silent or stuck for too long: it is out, and may live"""


@dataclass(frozen=True)
class Presence:
    """What a member says of itself when it wants to be in the next world."""

    max_generation: int | None
    """largest generation that it knows of"""
    unreachable: tuple[int, ...] = ()
    """old ranks that it could not reach, where it had reason to look"""
    dead: tuple[str, ...] = ()
    """uids of old members that it has proven dead in time"""
    lacks_place: bool = False
    """whether a place where it would claim a decision does not answer it: then one that is answered is to propose"""


@dataclass(frozen=True)
class Decision:
    """The one successor of a world, told as what differs from it."""

    generation: int
    uid: str
    """of the world that it makes"""
    ranks: tuple[int, ...]
    """old ranks, by rank in the new world"""
    new: tuple[Member, ...] = ()
    """newcomers, without their agreement texts; their ranks follow"""
    lost: tuple[int, ...] = ()
    """old ranks that are dead, or were given up"""
    left: tuple[int, ...] = ()
    """old ranks that left on purpose"""
    dead: tuple[str, ...] = ()
    """uids of those that are proven dead, or have left, or that a branch goes on without: they have no vote any more"""
    facts: Mapping[str, str] = field(default_factory=dict)
    """what the members know of the job, for the newcomers"""

    def __post_init__(self) -> None:
        # Their texts are equal, and a fact of the job: a thousand copies would fill every store.
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
        """The members that it makes of those of `world`, by rank; agreement texts are kept by nobody."""
        old = () if world is None else tuple(world.members[rank] for rank in self.ranks)
        return tuple(replace(one, max_generation=self.generation, agreement={}) for one in (*old, *self.new))

    def world_for(self, uid: str, world: World) -> World | None:
        """What follows `world`, as the member `uid` sees it; None where it is not in it."""
        members = self.members_after(world)
        uids = [member.uid for member in members]
        return World(uids.index(uid), self.generation, members, world.max_world_size, self.uid) if uid in uids else None


@dataclass(frozen=True)
class Denied:
    """A proposal that was not decided; the next look may."""

    votes: tuple[str, ...] = ()
    """uids of the voters without whom this side may not go on; empty where another one is proposing"""
    gone_on: int | None = None
    """generation of a world in which one of them trains, on another way than this member's: it is left behind"""


# --- what a look finds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Nothing is decided yet."""

    ranks: tuple[int, ...] = ()
    """for whom; empty where the next look may already find more"""
    votes: tuple[str, ...] = ()
    """uids without whose vote this side may not go on"""


@dataclass(frozen=True)
class LeftBehind:
    """The others went on from a world before this one, which nobody has trained in long enough to settle it."""

    generation: int


Found = Wait | Decision | LeftBehind


class Agreement:
    """One member's part in the agreement on what follows `world`.

    Args:
        presence: what this member says of itself.
        contacts: of this member, in `world`; who has given no sign of life just now is not asked, it would only wait.
        status: what is known of an old member.
        newcomers: asked once, when this member proposes, for those to be admitted.
        draw_uid: names a world that nobody else has.
        witnesses: ranks that may prove the death of one that is gone, and that this member has not watched in time.
        is_early: whether what others say of this member may be of before: it was suspended, and has contact again.
        reach: told, as `proposed`, before the store is asked to decide, for the faults of drills.
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
        self._is_told = False
        self.asks_others = False
        """whether the others are asked too, not only what this member was told"""

    def has_come(self, rank: int) -> bool:
        """Whether an old rank takes part in this agreement, too; it is asked where that is not known. Two that both
        wait for a third one would else give each other up together with that."""
        if rank not in self._present and self._is_heard(rank):
            self._note_present([rank])
        return rank in self._present

    def _is_heard(self, rank: int) -> bool:
        return self._contacts.is_heard(self._world.members[rank])

    def look(self) -> Found:
        """Raises: StoreUnreachable; JobFailed where this member has heard that the job cannot go on."""
        job, world = self._job, self._world
        left = job.left(world)
        found = {rank: self._status_of(rank, left) for rank in sorted(self._contacts.watched)}
        dead = tuple(world.members[rank].uid for rank, status in found.items() if status is Liveness.DEAD)
        unreachable = tuple(rank for rank in self._mine.unreachable if not self._is_heard(rank))  # contact may return
        self._say(replace(self._mine, dead=dead, unreachable=unreachable, lacks_place=job.place.is_silent))
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
        fatal = job.heard(world, "fatal")
        if fatal is not None:
            raise JobFailed(fatal)
        lower = (rank for rank in range(world.rank) if self._status_of(rank, left, found) is Liveness.ALIVE)
        lower = (rank for rank in lower if not self._leaves_it(rank))
        proposers = tuple(islice(lower, NUM_AWAITED))
        if proposers:
            self._contacts.watch_too(proposers)
            if proposers[0] in asked:  # it may be a newcomer that nobody has told: this tells it
                self._note_present(proposers[:1])
            return Wait(proposers[:1])
        others = [rank for rank in range(len(world.members)) if rank != world.rank]
        self._contacts.watch_too(others)
        return self._propose(left, {rank: self._status_of(rank, left, found) for rank in others})

    def _say(self, mine: Presence) -> None:
        if not self._is_told or mine != self._mine:
            self._mine = self._present[self._world.rank] = mine
            self._job.say_present(self._world, to_json(mine))
            self._is_told = True

    def _leaves_it(self, rank: int) -> bool:
        """Whether a lower rank could not claim what it proposes, and this one may be able to."""
        return rank in self._present and self._present[rank].lacks_place and not self._mine.lacks_place

    def _status_of(
        self, rank: int, left: frozenset[int], found: Mapping[int, Liveness] = MappingProxyType({})
    ) -> Liveness:
        return found.get(rank) or (Liveness.DEAD if rank in left else self._status(rank))

    def _note_present(self, ranks: Sequence[int]) -> None:
        for rank, text in self._job.announcements.present(self._world, ranks).items():
            self._present[rank] = from_json(Presence, text)

    def _gone(self, found: Mapping[int, Liveness], side: Collection[int]) -> set[str]:
        """uids of those that are proven dead, or have left, by what the members of this side say."""
        gone = {self._world.members[rank].uid for rank, status in found.items() if status is Liveness.DEAD}
        gone |= {uid for rank in side for uid in self._present[rank].dead}
        return gone - {self._world.members[rank].uid for rank in side}

    def _ended(self, out: Sequence[Member], gone: Collection[str]) -> frozenset[str]:
        """As `job.ended_holders`, where each of the members that are out is gone for sure; others may have a state."""
        is_anybody_silent = any(one.uid not in gone and not self._contacts.is_gone(one) for one in out)
        return frozenset() if is_anybody_silent else self._job.ended_holders({*gone, *(one.uid for one in out)})

    def _unproven(self, out: Collection[int], gone: Collection[str], side: Collection[int]) -> dict[int, set[int]]:
        """Dead members whose death is not proven yet, each with the members of this side that may soon prove it."""
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
        newcomers = tuple(self._newcomers())
        ended = self._ended([world.members[rank] for rank in out], gone)
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
            world, decision.to_json(), [world.rank, *reachable], dead=frozenset(gone), ended=ended, answering=answering
        )
        if isinstance(outcome, Denied):
            self.asks_others = bool(outcome.votes)
            self._say(replace(self._mine, lacks_place=job.place.is_silent))
            return Wait(votes=outcome.votes) if outcome.gone_on is None else LeftBehind(outcome.gone_on)
        return Decision.from_json(outcome)
