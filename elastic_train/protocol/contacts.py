"""Whom a member pings, what it has heard of them, and whether by that a world has no hope any more.

Nothing here breaks anything off: the watcher (liveness.py) asks, and acts on the answer.

Times are local and monotonic: a member is silent when *this* process has not heard of it for so long. No two machines'
clocks are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_train.protocol.agreement import Liveness
from elastic_train.protocol.heartbeat import (
    Heartbeat,
    OwnHeartbeat,
    describe,
    has_ended_by_vote,
    is_silence,
    verdicts_of,
)
from elastic_train.protocol.laws import is_dead_in_time
from elastic_train.protocol.neighbours import Heard, Topology
from elastic_train.rules import Activity, MemberActivity, is_cut_off, stalled
from elastic_train.world import Member, World


class Pings(Protocol):
    """What is needed here, and by the watcher, of links.Links."""

    def watch(
        self, members: Iterable[tuple[str, tuple[str, int]]], epoch: str, answered: Collection[str] | None = None
    ) -> None: ...
    def announce(self, status: str, *, at_once: bool = False) -> None: ...
    def heard(self, uid: str) -> Heard | None: ...
    def answered(self) -> dict[str, float]: ...
    def wake(self) -> None: ...
    def turn(self, seconds: float) -> bool: ...
    def close(self) -> None: ...


class Contacts:
    """The members of the adopted world that this one pings, some neighbours each or all, and what it has heard of them.

    The training thread alone says whom to ping, and adopts under the watcher's lock; both threads read without one.

    Args:
        topology: who pings whom.
        peer_timeout: seconds after which a silent member is taken for dead.
        interval: seconds between two pings of `links`.
    """

    def __init__(
        self,
        links: Pings,
        topology: Topology,
        peer_timeout: float,
        interval: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._links, self.topology = links, topology
        self._peer_timeout, self._interval = peer_timeout, interval
        self._monotonic = monotonic
        self.world: World | None = None
        """the adopted one"""
        self._neighbours: tuple[str, tuple[int, ...]] = ("", ())
        """uid of the adopted world, and whom this member pings all the time"""
        self._watched: set[int] = set()
        """ranks that are pinged: the neighbours, and some more while an agreement needs them"""
        self.is_sparse = False
        """whether they are not all: then what is found out is passed on"""

    # --- whom it pings ------------------------------------------------------------------------------------------------

    def adopt(self, world: World, neighbours: Collection[int]) -> None:
        """This member is one of `world` from now on; `watch` is to follow."""
        self.world, self._neighbours, self._watched = world, (world.uid, tuple(neighbours)), set(neighbours)
        self.is_sparse = not self.topology.is_dense(len(world.members))

    def watch(self) -> None:
        """Ping those in the name of the adopted world from now on, and answer nobody else than its members."""
        world = self.world
        assert world is not None, "it is adopted"
        members = [world.members[rank] for rank in sorted(self._watched)]
        everybody = [member.uid for member in world.members]
        self._links.watch([(member.uid, member.address) for member in members], world.uid, everybody)

    def watch_too(self, ranks: Iterable[int]) -> None:
        """Ping these members of the adopted world as well, until the next one is."""
        world = self.world
        more = set(ranks) - self._watched - {world.rank if world else -1}
        if more:
            self._watched |= more
            self.watch()

    @property
    def watched(self) -> frozenset[int]:
        """Ranks of the adopted world that are pinged."""
        return frozenset(self._watched)

    def neighbours(self, world: World, rank: int) -> tuple[int, ...]:
        """Whom a member of `world` pings all the time."""
        return self.topology.neighbours([member.node for member in world.members], world.world_size, rank)

    def training_neighbours(self, world: World) -> list[int]:
        """This member's, without spares: nobody's step needs those."""
        uid, neighbours = self._neighbours  # at once: the training thread may adopt the next world
        return [rank for rank in neighbours if rank < world.world_size] if uid == world.uid else []

    def witnesses(self, world: World, rank: int) -> tuple[int, ...]:
        """Ranks that may prove the death of `rank`, which this member finds gone and has not pinged in time itself."""
        if rank in self._neighbours[1] or not self.is_refused(world.members[rank]):
            return ()
        return self.neighbours(world, rank)

    def hearsay_seconds(self, world: World) -> float:
        """Within which all workers of `world` hear what one of them has found out."""
        return 2 * self._interval * self.topology.hops(world.world_size)

    # --- what it has heard --------------------------------------------------------------------------------------------

    def heard_in(self, world: World, rank: int) -> Heard | None:
        """What a member has said last, as one of `world`; None where that is nothing."""
        heard = self._links.heard(world.members[rank].uid)
        return None if heard is None or not heard.status or heard.epoch != world.uid else heard

    def seconds_elsewhere(self, world: World, rank: int) -> float:
        """For how long a watched member of `world` has said that it is not in it."""
        heard = self._links.heard(world.members[rank].uid)
        since = None if heard is None else heard.elsewhere_since
        return 0.0 if since is None else self._monotonic() - since

    def status(self, member: Member, verdict: str | None, time_is_up: bool) -> Liveness:
        """What is known of a member that has not come to the agreement.

        Args:
            verdict: why it is out of the world, if it is, whatever its listener says.
            time_is_up: the member has had all the time that a training thread needs to notice.
        """
        heard = self._links.heard(member.uid)
        is_out = verdict is not None
        if verdict is not None and self.is_sparse and is_silence(verdict) and self.is_heard(member):
            is_out = False  # by others, and may hear those again
        if heard is None:
            return Liveness.UNKNOWN if time_is_up or is_out else Liveness.ALIVE
        if heard.refused_at is not None:
            since = None if heard.pinged_at is None else heard.refused_at - heard.pinged_at
            return Liveness.DEAD if is_dead_in_time(since, self._peer_timeout) else Liveness.UNKNOWN
        if is_out or time_is_up or self.age(member) > self._peer_timeout:
            return Liveness.UNKNOWN
        return Liveness.ALIVE

    def is_refused(self, member: Member) -> bool:
        """Whether nobody of its uid listens at a watched member's address any more."""
        heard = self._links.heard(member.uid)
        return heard is not None and heard.refused_at is not None

    def is_gone(self, member: Member) -> bool:
        """The same, and no sign of life for a whole timeout: a refusal alone may be a firewall's, for a moment."""
        return self.is_refused(member) and self.age(member) > self._peer_timeout

    def is_at_work(self, world: World, rank: int) -> bool:
        """Whether one member is at something that it may take this long for, as far as this one sees."""
        found = self.activity_of(world, rank)
        if found is None or found.generation != world.generation:
            return False
        return found.activity is not Activity.REDUCE and not found.is_late

    def activity_of(self, world: World, rank: int) -> Heartbeat | None:
        """What a member of `world` that lives has said last."""
        heard = self.heard_in(world, rank)
        if heard is None or heard.refused_at is not None:
            return None
        is_silent = self._monotonic() - heard.heard_at > self._peer_timeout
        return None if is_silent else Heartbeat.from_line(heard.status)

    def longest_wait(self, world: World) -> float:
        """Seconds that a worker of `world` whom this member pings has been inside of a collective, by its own word."""
        found = (self.activity_of(world, rank) for rank in self.training_neighbours(world))
        return max((one.seconds for one in found if one and one.activity.is_inside), default=0.0)

    def are_training(self, world: World) -> bool:
        """Whether all workers of `world` whom this member pings have just said that they are in it."""
        ranks = self.training_neighbours(world)
        return bool(ranks) and all(self._is_in(world, rank) for rank in ranks)

    def _is_in(self, world: World, rank: int) -> bool:
        heard = self.heard_in(world, rank)
        if heard is None or heard.refused_at is not None or heard.elsewhere_since is not None:
            return False
        is_over = verdicts_of(world, heard.status) is not None
        is_there = Heartbeat.from_line(heard.status).generation == world.generation
        return is_there and not is_over and self.is_heard(world.members[rank])

    def age(self, member: Member) -> float:
        """Seconds since a watched member gave a sign of life."""
        heard = self._links.heard(member.uid)
        return 0.0 if heard is None else self._monotonic() - heard.heard_at

    def is_heard(self, member: Member) -> bool:
        """Whether a watched member has given a sign of life within some pings."""
        heard = self._links.heard(member.uid)
        if self.is_sparse and (heard is None or not heard.has_answered):
            return False  # it is not watched, or has been for a moment
        return self.age(member) <= 4 * self._interval

    def unreachable(self, world: World) -> tuple[int, ...]:
        """Ranks that have been silent for some pings though nobody refuses; for when a world broke and no one died."""
        silent = 3 * self._interval + 0.5
        others = (rank for rank in range(world.world_size) if rank != world.rank)
        return tuple(rank for rank in others if self.age(world.members[rank]) > silent)

    def lost_neighbours(self, world: World) -> tuple[int, ...]:
        """Ranks that have been silent to this member for too long; others may hear them."""
        return tuple(
            rank for rank in self.training_neighbours(world) if self.age(world.members[rank]) > self._peer_timeout
        )


@dataclass(frozen=True)
class Blame:
    """Why a world is over."""

    verdicts: dict[int, str]
    """ranks that are to blame, and why; perhaps none"""
    why: str = "a member has left the world"
    """where nobody is"""
    is_by_vote: bool = False
    """whether a vote has ended it"""


class Judge:
    """Whether a world has no hope any more, and who is to blame, by what this member has heard.

    For the watcher's thread alone. Its answers are found one by one: each is to be acted on before the next is asked
    for, as what this member says of itself may change by that.
    """

    def __init__(
        self, contacts: Contacts, own: OwnHeartbeat, peer_timeout: float, monotonic: Callable[[], float]
    ) -> None:
        self._contacts, self._own = contacts, own
        self._peer_timeout, self._monotonic = peer_timeout, monotonic

    def look(self, world: World, *, is_standing: bool) -> Iterator[Blame]:
        """At the world that this member is in.

        Args:
            is_standing: whether its process group has been made.
        """
        if world.world_size == 1 and not world.is_spare:
            return
        contacts = self._contacts
        activities: dict[int, MemberActivity] = {}
        if not world.is_spare:
            activities[world.rank] = MemberActivity(world.generation, *self._own.at())
        for rank in contacts.training_neighbours(world):
            heard = contacts.heard_in(world, rank)
            is_elsewhere = contacts.seconds_elsewhere(world, rank) > self._peer_timeout
            if is_elsewhere and (heard is not None or world.is_spare):
                # It has gone on. Where it was never here, a worker's process group does not form, or `_blamed` says
                # so; and a spare waits for none. Where it was, gloo may not have noticed, and it may wait for ever.
                yield Blame({})
                return
            if heard is None:
                continue
            verdicts = verdicts_of(world, heard.status)
            if verdicts is not None:
                is_by_vote = has_ended_by_vote(heard.status)
                if is_by_vote and not world.is_spare and Heartbeat.from_line(heard.status).seconds < self._peer_timeout:
                    continue  # this member reads the same votes in a moment
                yield Blame(verdicts, "another worker has broken it off, or has left", is_by_vote=is_by_vote)
                if not contacts.is_sparse:
                    return
                continue
            activities[rank] = heartbeat = Heartbeat.from_line(heard.status)
            self._own.outside.hear(heartbeat.witness, heard.heard_at - heartbeat.age)
        # A lone worker has no collective that could be broken off, so nobody goes on until it is proven dead.
        is_judged = is_standing and world.world_size > 1
        blamed = (
            self._blamed(world, activities) if is_judged else self._find_lost(world, " before its first step") or None
        )
        if blamed is not None:
            what = f"a collective has not ended in {self._own.at()[1]:.0f} s though all take part"
            yield Blame(blamed, f"{what}: two cannot reach each other, or ranks are in different ones")

    def look_back(self, world: World) -> Iterator[Mapping[int, str]]:
        """Verdicts on lost members of `world`, which has ended, while the next one is agreed on: of each neighbour, and
        this member's own."""
        for rank in self._contacts.training_neighbours(world):
            heard = self._contacts.heard_in(world, rank)
            if heard is not None:
                yield verdicts_of(world, heard.status) or {}
        yield self._find_lost(world)

    def _find_lost(self, world: World, when: str = "") -> dict[int, str]:
        lost = {}
        for rank in self._contacts.training_neighbours(world):
            member = world.members[rank]
            silence = self._contacts.age(member)
            if self._contacts.is_refused(member):
                lost[rank] = describe(world, rank, f"died{when}")
            elif silence > self._peer_timeout:  # frozen, while others wait for an answer of its
                lost[rank] = describe(world, rank, f"was silent for {silence:.1f} s{when}")
        return lost

    def _has_left_by_vote(self, world: World, rank: int) -> bool:
        """Whether it has ended since it said so: this member reads the same votes in a moment."""
        heard = self._contacts.heard_in(world, rank)
        has_said = heard is not None and has_ended_by_vote(heard.status)
        return has_said and not world.is_spare and self._contacts.age(world.members[rank]) < self._peer_timeout

    def _blamed(self, world: World, activities: Mapping[int, MemberActivity]) -> dict[int, str] | None:
        """The ranks to blame, with the reason, if this member must break the world; perhaps none of them."""
        blamed = {rank: why for rank, why in self._find_lost(world).items() if not self._has_left_by_vote(world, rank)}
        if world.is_spare:  # it knows nothing of how long a step takes
            return blamed or None
        for rank in stalled(activities, world.generation):
            seconds = f"{activities[rank].seconds:.0f} s"
            blamed.setdefault(rank, describe(world, rank, f"kept the others waiting, and was stuck for {seconds}"))
        for rank in self._missing(world, activities):
            blamed.setdefault(rank, describe(world, rank, "kept the others waiting, and did not come into their world"))
        is_complete = len(activities) == len(self._contacts.training_neighbours(world)) + 1
        if blamed or (is_complete and is_cut_off(activities, world.generation) and self._all_wait(world)):
            return blamed
        return None

    def _missing(self, world: World, activities: Mapping[int, MemberActivity]) -> list[int]:
        """Who has never come into a world whose group stood before it began, for as long as one may be between steps:
        of its training thread nothing is known, and its listener answers."""
        limit, (activity, seconds, _) = self._own.pace.between_steps, self._own.at()
        if not activity.is_inside or seconds <= limit:
            return []
        absent = (rank for rank in self._contacts.training_neighbours(world) if rank not in activities)
        return [rank for rank in absent if self._contacts.seconds_elsewhere(world, rank) > limit]

    def _all_wait(self, world: World) -> bool:
        """Whether those that this member does not see have waited as long as those that it does."""
        if not self._contacts.is_sparse:
            return True
        hearsay = self._contacts.hearsay_seconds(world)
        return self._monotonic() - self._own.outside.at > self._own.pace.limit(Activity.REDUCE) + hearsay
