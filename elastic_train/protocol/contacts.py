"""The members that a member pings, their answers, and the judgement by these whether a world is over.

Nothing here breaks anything off: the watcher (liveness.py) asks, and acts on the answer.

Times are local and monotonic: a member is silent if *this* process has not heard it for a timeout. The clocks of two
machines are never compared.
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
    """The part of links.Links that this file and the watcher need."""

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
    """The members of the adopted world that this member pings (its neighbours or all members), and their answers.

    Only the training thread chooses whom to ping, and adopts under the watcher's lock; both threads read without one.

    Args:
        topology: chooses the neighbours that a member pings.
        peer_timeout: seconds after which a silent member counts as dead.
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
        """the adopted world"""
        self._neighbours: tuple[str, tuple[int, ...]] = ("", ())
        """uid of the adopted world, and the ranks that this member pings all the time"""
        self._watched: set[int] = set()
        """ranks that this member pings: the neighbours, and more while an agreement needs them"""
        self.is_sparse = False
        """whether members ping only some of the members: then they pass on their verdicts"""

    # --- whom it pings ------------------------------------------------------------------------------------------------

    def adopt(self, world: World, neighbours: Collection[int]) -> None:
        """Adopt `world`, of which this member is one from now on. The caller must call `watch` next."""
        self.world, self._neighbours, self._watched = world, (world.uid, tuple(neighbours)), set(neighbours)
        self.is_sparse = not self.topology.is_dense(len(world.members))

    def watch(self) -> None:
        """Ping the watched members in the name of the adopted world from now on, and answer only its members."""
        world = self.world
        assert world is not None, "it is adopted"
        members = [world.members[rank] for rank in sorted(self._watched)]
        everybody = [member.uid for member in world.members]
        self._links.watch([(member.uid, member.address) for member in members], world.uid, everybody)

    def watch_too(self, ranks: Iterable[int]) -> None:
        """Ping these members of the adopted world as well, until this member adopts the next world."""
        world = self.world
        more = set(ranks) - self._watched - {world.rank if world else -1}
        if more:
            self._watched |= more
            self.watch()

    @property
    def watched(self) -> frozenset[int]:
        """The ranks of the adopted world that this member pings."""
        return frozenset(self._watched)

    def neighbours(self, world: World, rank: int) -> tuple[int, ...]:
        """Return the ranks that a member of `world` pings all the time."""
        return self.topology.neighbours([member.node for member in world.members], world.world_size, rank)

    def training_neighbours(self, world: World) -> list[int]:
        """Return this member's neighbours without the spares, which no step needs."""
        uid, neighbours = self._neighbours  # read once: the training thread may adopt the next world
        return [rank for rank in neighbours if rank < world.world_size] if uid == world.uid else []

    def witnesses(self, world: World, rank: int) -> tuple[int, ...]:
        """Return the ranks that may prove the death of `rank`, if this member finds it gone and did not ping it."""
        if rank in self._neighbours[1] or not self.is_refused(world.members[rank]):
            return ()
        return self.neighbours(world, rank)

    def spread_seconds(self, world: World) -> float:
        """Return the seconds within which all workers of `world` learn what one of them has found out."""
        return 2 * self._interval * self.topology.hops(world.world_size)

    # --- what it has heard --------------------------------------------------------------------------------------------

    def heard_in(self, world: World, rank: int) -> Heard | None:
        """Return the last heartbeat of a member of `world` that it sent in this world; None if there is none."""
        heard = self._links.heard(world.members[rank].uid)
        return None if heard is None or not heard.status or heard.epoch != world.uid else heard

    def seconds_elsewhere(self, world: World, rank: int) -> float:
        """Return for how many seconds a watched member of `world` has answered that it is not in it."""
        heard = self._links.heard(world.members[rank].uid)
        since = None if heard is None else heard.elsewhere_since
        return 0.0 if since is None else self._monotonic() - since

    def status(self, member: Member, verdict: str | None, time_is_up: bool) -> Liveness:
        """Return the liveness status of a member that has not come to the agreement.

        Args:
            verdict: the reason why it is out of the world even if its listener answers; None if it is not out.
            time_is_up: whether it has had the time that a training thread needs to notice the end of the world.
        """
        heard = self._links.heard(member.uid)
        is_out = verdict is not None
        if verdict is not None and self.is_sparse and is_silence(verdict) and self.is_heard(member):
            is_out = False  # other members judged it silent, and it may reach them again
        if heard is None:
            return Liveness.UNKNOWN if time_is_up or is_out else Liveness.ALIVE
        if heard.refused_at is not None:
            since = None if heard.pinged_at is None else heard.refused_at - heard.pinged_at
            return Liveness.DEAD if is_dead_in_time(since, self._peer_timeout) else Liveness.UNKNOWN
        if is_out or time_is_up or self.age(member) > self._peer_timeout:
            return Liveness.UNKNOWN
        return Liveness.ALIVE

    def is_refused(self, member: Member) -> bool:
        """Return whether no process with its uid listens at a watched member's address any more."""
        heard = self._links.heard(member.uid)
        return heard is not None and heard.refused_at is not None

    def is_gone(self, member: Member) -> bool:
        """Return whether it is refused and silent for a whole peer timeout: a firewall may refuse for a moment."""
        return self.is_refused(member) and self.age(member) > self._peer_timeout

    def is_at_work(self, world: World, rank: int) -> bool:
        """Return whether a member is busy outside of a collective, within its limit, as far as this member sees."""
        found = self.activity_of(world, rank)
        if found is None or found.generation != world.generation:
            return False
        return found.activity is not Activity.REDUCE and not found.is_late

    def activity_of(self, world: World, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a member of `world`; None if it is silent or refused."""
        heard = self.heard_in(world, rank)
        if heard is None or heard.refused_at is not None:
            return None
        is_silent = self._monotonic() - heard.heard_at > self._peer_timeout
        return None if is_silent else Heartbeat.from_line(heard.status)

    def longest_wait(self, world: World) -> float:
        """Return the longest time, in seconds, that a training neighbour reports to be inside a collective."""
        found = (self.activity_of(world, rank) for rank in self.training_neighbours(world))
        return max((one.seconds for one in found if one and one.activity.is_inside), default=0.0)

    def are_training(self, world: World) -> bool:
        """Return whether all training neighbours in `world` have just reported that they are in it."""
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
        """Return the seconds since a watched member gave a sign of life."""
        heard = self._links.heard(member.uid)
        return 0.0 if heard is None else self._monotonic() - heard.heard_at

    def is_heard(self, member: Member) -> bool:
        """Return whether a watched member has given a sign of life within the last four pings."""
        heard = self._links.heard(member.uid)
        if self.is_sparse and (heard is None or not heard.has_answered):
            return False  # it is not watched, or only since a moment ago
        return self.age(member) <= 4 * self._interval

    def unreachable(self, world: World) -> tuple[int, ...]:
        """Return the ranks that have been silent for some pings; for a world that broke though no member died."""
        silent = 3 * self._interval + 0.5
        others = (rank for rank in range(world.world_size) if rank != world.rank)
        return tuple(rank for rank in others if self.age(world.members[rank]) > silent)

    def lost_neighbours(self, world: World) -> tuple[int, ...]:
        """Return the training neighbours that have been silent for too long; other members may hear them."""
        return tuple(
            rank for rank in self.training_neighbours(world) if self.age(world.members[rank]) > self._peer_timeout
        )


@dataclass(frozen=True)
class Blame:
    """The reason why a world is over."""

    verdicts: dict[int, str]
    """ranks that are to blame, each with the reason; may be empty"""
    why: str = "a member has left the world"
    """the reason if no rank is to blame"""
    is_by_vote: bool = False
    """whether a vote has ended the world"""


class Judge:
    """The judgement whether a world is over and which ranks are to blame, by the answers to this member's pings.

    For the watcher thread alone. Its methods yield results one by one: the caller must act on each before it takes the
    next, since this may change this member's own heartbeat.
    """

    def __init__(
        self, contacts: Contacts, own: OwnHeartbeat, peer_timeout: float, monotonic: Callable[[], float]
    ) -> None:
        self._contacts, self._own = contacts, own
        self._peer_timeout, self._monotonic = peer_timeout, monotonic

    def look(self, world: World, *, has_group: bool) -> Iterator[Blame]:
        """Yield the reasons why the world that this member is in is over.

        Args:
            has_group: whether its process group has been made.
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
            if is_elsewhere and (heard is not None or world.is_spare or world.num_nodes < world.min_nodes):
                # The member has gone on. If it was in this world before, gloo may not notice, and this member may wait
                # for ever. If it never was, the process group does not form or `_blamed` blames it, where there is one:
                # a spare has none, nor has a world that waits for nodes.
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
        # A lone worker has no collective that could be broken off, so no spare goes on until it is proven dead.
        is_judged = has_group and world.world_size > 1
        blamed = (
            self._blamed(world, activities) if is_judged else self._find_lost(world, " before its first step") or None
        )
        if blamed is not None:
            what = f"a collective has not ended in {self._own.at()[1]:.0f} s though all take part"
            yield Blame(blamed, f"{what}: two cannot reach each other, or ranks are in different ones")

    def look_back(self, world: World) -> Iterator[Mapping[int, str]]:
        """Yield verdicts on lost members of `world`, which has ended, during the agreement on the next world: those of
        each neighbour, and this member's own."""
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
            elif silence > self._peer_timeout:  # frozen, while other members wait for it
                lost[rank] = describe(world, rank, f"was silent for {silence:.1f} s{when}")
        return lost

    def _has_left_by_vote(self, world: World, rank: int) -> bool:
        """Return whether a member is gone since it ended the world by a vote, which this member reads in a moment."""
        heard = self._contacts.heard_in(world, rank)
        has_said = heard is not None and has_ended_by_vote(heard.status)
        return has_said and not world.is_spare and self._contacts.age(world.members[rank]) < self._peer_timeout

    def _blamed(self, world: World, activities: Mapping[int, MemberActivity]) -> dict[int, str] | None:
        """Return the ranks to blame (perhaps none) with reasons if this member must break the world, else None."""
        blamed = {rank: why for rank, why in self._find_lost(world).items() if not self._has_left_by_vote(world, rank)}
        if world.is_spare:  # a spare does not know how long a step takes
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
        """Return the training neighbours that have not come into this world for as long as a member may be between two
        steps, though its process group stands. Their listeners answer, but tell nothing of their training threads."""
        limit, (activity, seconds, _) = self._own.pace.between_steps, self._own.at()
        if not activity.is_inside or seconds <= limit:
            return []
        absent = (rank for rank in self._contacts.training_neighbours(world) if rank not in activities)
        return [rank for rank in absent if self._contacts.seconds_elsewhere(world, rank) > limit]

    def _all_wait(self, world: World) -> bool:
        """Return whether the members that this one does not ping have waited as long as the members that it pings."""
        if not self._contacts.is_sparse:
            return True
        hearsay = self._contacts.spread_seconds(world)
        return self._monotonic() - self._own.outside.at > self._own.pace.limit(Activity.REDUCE) + hearsay
