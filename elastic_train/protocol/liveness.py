"""Who is alive, by the pings of links.py: a watcher that breaks a hopeless collective off.

A killed process is seen at once: its connections close and its listener refuses. A frozen one, a cut cable, a stuck
training thread close nothing: the watchers of those that ping it see those, and then close the sockets of the process
group, so that the blocked collective raises and the ordinary way out is taken.

In a small world everybody pings everybody. In a large one each member pings some neighbours (protocol/neighbours.py),
and what one has found out is passed on by each that hears it; so all know it within some hops.

Times are local and monotonic: a member is silent when *this* process has not heard of it for so long. No two machines'
clocks are compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Liveness
from elastic_train.protocol.heartbeat import (
    Heartbeat,
    LastOutside,
    describe,
    has_ended_by_vote,
    head_of,
    is_silence,
    verdicts_of,
)
from elastic_train.protocol.laws import is_dead_in_time
from elastic_train.protocol.links import Heard
from elastic_train.protocol.neighbours import STANDARD, Topology
from elastic_train.protocol.pace import Pace
from elastic_train.rules import Activity, Beat, is_cut_off, stalled
from elastic_train.world import Member, World

TEND_SECONDS = 0.5
"""between two rounds of background tasks"""
WARN_SECONDS = 5.0
"""of a store's silence before anybody is told"""


class Pings(Protocol):
    """What the watcher needs of links.Links."""

    def watch(
        self, members: Iterable[tuple[str, tuple[str, int]]], epoch: str, answered: Collection[str] | None = None
    ) -> None: ...
    def tell(self, status: str, *, at_once: bool = False) -> None: ...
    def heard(self, uid: str) -> Heard | None: ...
    def answered(self) -> dict[str, float]: ...
    def wake(self) -> None: ...
    def turn(self, seconds: float) -> bool: ...
    def close(self) -> None: ...


class Watcher:
    """The thread that answers pings, sends them, and breaks a hopeless collective off.

    The training thread tells it what it does by `activity`, an assignment and nothing more; so the step path never
    waits for anything here.

    Args:
        links: the pings; for this thread alone from `start` on.
        peer_timeout: seconds after which a silent member is taken for dead.
        pace: how long the training thread may take.
        cut: closes the sockets of the present process group, from this thread.
        tend: background tasks, about once a second, with the world and whether this is its rank 0; may raise
            StoreUnreachable.
        store_grace: seconds that a store which all members need may be away before the world ends; None where there
            is no such store.
        warn: told once when the store is away, and once when it is back, while training goes on.
        give_up: ends the process, where the training thread still waits for a collective of a broken world after all
            the time that a step may take: gloo can lose the end of what was under way (collectives.py). Or where it
            does anything else there for as long as nothing takes (`Pace.last_limit`).
        topology: who pings whom.
        interval: seconds between two pings of `links`; by default what `ping_interval` says.
    """

    def __init__(
        self,
        links: Pings,
        peer_timeout: float,
        cut: Callable[[], None],
        tend: Callable[[World | None, bool], None],
        monotonic: Callable[[], float] = time.monotonic,
        store_grace: float | None = None,
        warn: Callable[[str], None] = lambda _message: None,
        give_up: Callable[[str], None] = lambda _message: None,
        topology: Topology = STANDARD,
        interval: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.links, self.topology = links, topology
        self.pace = Pace(peer_timeout) if pace is None else pace
        self._peer_timeout = peer_timeout
        self._interval = interval or ping_interval(peer_timeout)
        self._cut = cut
        self._tend = tend
        self._store_grace = store_grace
        self._warn = warn
        self._give_up = give_up
        self._broken_at: float | None = None
        self._has_given_up = False
        self._has_warned = False
        self._monotonic = monotonic
        self._activity: tuple[Activity, float, float | None] = (Activity.FORM, monotonic(), None)
        """with the moment since when, and with a limit of its own"""
        self._world: World | None = None
        self._adopted: World | None = None
        """whose members are pinged, by some neighbours each or all"""
        self._neighbours: tuple[str, tuple[int, ...]] = ("", ())
        """uid of the adopted world, and whom this member pings all the time"""
        self._watched: set[int] = set()
        """ranks that are pinged: the neighbours, and some more while an agreement needs them"""
        self._is_sparse = False
        """whether they are not all: then what is found out is passed on"""
        self._broken: dict[int, str] | None = None
        """verdicts of the adopted world, once it is over"""
        self._is_by_vote = False
        """whether a vote has ended it"""
        self._passes_on = self._is_turn_due = False
        self._outside, self._count, self.num_reductions = LastOutside(0.0), 0, 0
        self._is_standing = False
        self._last_answer = monotonic()
        self._next_tend = monotonic()
        self.verdicts: dict[int, str] = {}
        """ranks of the present world that are out, whatever their listener says, and why"""
        self.is_store_lost = False
        """whether the store has been away for so long that the world is to end, which it does at a step boundary"""
        self.reason: str | None = None
        """why the present world was broken, as far as this member knows"""
        self._lock = threading.RLock()
        self._is_stopping = False
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it holds no key that others would wait for."""
        self._is_stopping = True
        self.links.wake()
        if self._thread.ident is not None:  # it may never have found its job
            self._thread.join(self._peer_timeout + 5)
        if not self._thread.is_alive():
            self.links.close()

    # --- for the training thread --------------------------------------------------------------------------------------

    def do(self, activity: Activity, limit: float | None = None) -> None:
        """The training thread turns to something else, or gets on with the same.

        Args:
            limit: seconds that it may take, where the pace of the steps before does not tell.

        Raises:
            Whatever ended the watcher's thread: a bug, without which this worker would silently look dead to others.
        """
        self.check()
        if self._has_given_up and threading.current_thread() is threading.main_thread():
            threading.Event().wait()  # it came back after all; what is being saved must not change any more
        now, (before, since, _) = self._monotonic(), self._activity
        if before is Activity.REDUCE and activity is Activity.COMPUTE:
            self.pace.note_collective(now - since)
        self._activity = (activity, now, limit)

    def check(self) -> None:
        """Raises: as `do`."""
        if self._crash is not None:
            raise self._crash

    def adopt(self, world: World) -> None:
        """Ping neighbours among the members of `world` from now on, as one of them, and answer nobody else."""
        nodes = [member.node for member in world.members]
        neighbours = self.topology.neighbours(nodes, world.world_size, world.rank)
        with self._lock:
            self._adopted, self._neighbours, self._watched = world, (world.uid, neighbours), set(neighbours)
            self._is_sparse = self._passes_on = not self.topology.is_dense(len(nodes))
            self._broken, self._is_by_vote, self.num_reductions = None, False, 0
            self._outside = LastOutside(self._monotonic(), self._interval / 4)
            self.links.tell(self._status())
        self._watch()

    def watch_too(self, ranks: Iterable[int]) -> None:
        """Ping these members of the adopted world as well, until the next one is."""
        world = self._adopted
        more = set(ranks) - self._watched - {world.rank if world else -1}
        if more:
            self._watched |= more
            self._watch()

    def _watch(self) -> None:
        world = self._adopted
        assert world is not None, "it is adopted"
        members = [world.members[rank] for rank in sorted(self._watched)]
        everybody = [member.uid for member in world.members]
        self.links.watch([(member.uid, member.address) for member in members], world.uid, everybody)

    @property
    def watched(self) -> frozenset[int]:
        """Ranks of the adopted world that are pinged."""
        return frozenset(self._watched)

    def witnesses(self, world: World, rank: int) -> tuple[int, ...]:
        """Who may prove the death of a member that this one finds gone, and has not pinged in time itself."""
        if rank in self._neighbours[1] or not self.is_refused(world.members[rank]):
            return ()
        return self.topology.neighbours([member.node for member in world.members], world.world_size, rank)

    def forgive(self) -> None:
        """Nothing but their silence counts against the members of the world that is over, from now on."""
        with self._lock:
            self.verdicts, self._passes_on = {}, False

    def expect(self, world: World) -> None:
        """A process group of this world is about to be made: break it off if a member dies before it stands."""
        with self._lock:
            self._world, self._is_standing = world, False
            self._broken_at = None
            self.verdicts, self.reason = {}, None
        self._look_soon()

    def enter(self, world: World) -> None:
        """The process group of this world stands: it is watched until `leave`."""
        with self._lock:
            self._world, self._is_standing = world, True
        self._look_soon()

    @property
    def headless(self) -> World | None:
        """The adopted world where it is over, and its rank 0 lost; the training thread may not have noticed."""
        with self._lock:
            world, broken = self._adopted, self._broken
            if world is None or broken is None:
                return None
            is_lost = 0 in self.verdicts or 0 in broken or self.is_refused(world.members[0])
            return world if is_lost else None

    @property
    def is_spokesman(self) -> bool:
        """Whether this member is rank 0 of a world that stands."""
        world = self._world
        return world is not None and world.rank == 0

    def leave(self) -> None:
        """The world is over: nothing is cut from now on."""
        with self._lock:
            self._world = self._broken_at = None
        self._look_soon()
        self.do(Activity.FORM)

    def _look_soon(self) -> None:
        """What was heard before may matter now."""
        self._is_turn_due = True
        self.links.wake()

    def announce_broken(self, *, is_by_vote: bool = False) -> None:
        """Tell the others' watchers that this member is out of the world, for those whom no closed socket tells.

        Args:
            is_by_vote: all who train end it at the same step; one of them may still be reading the votes.
        """
        with self._lock:
            if self._broken is None:
                self._broken, self._is_by_vote = {}, is_by_vote
            self.links.tell(self._status(), at_once=True)

    def status(self, member: Member, rank: int, patience_is_over: bool) -> Liveness:
        """What is known of a member that has not come to the agreement.

        Args:
            patience_is_over: the member has had all the time that a training thread needs to notice.
        """
        heard = self.links.heard(member.uid)
        is_out = rank in self.verdicts
        if is_out and self._is_sparse and is_silence(self.verdicts[rank]) and self.is_heard(member):
            is_out = False  # by others, and may hear those again
        if heard is None:
            return Liveness.UNKNOWN if patience_is_over or is_out else Liveness.ALIVE
        if heard.refused_at is not None:
            since = None if heard.pinged_at is None else heard.refused_at - heard.pinged_at
            return Liveness.DEAD if is_dead_in_time(since, self._peer_timeout) else Liveness.UNKNOWN
        if is_out or patience_is_over or self.age(member) > self._peer_timeout:
            return Liveness.UNKNOWN
        return Liveness.ALIVE

    def is_refused(self, member: Member) -> bool:
        """Whether nobody of its uid listens at a watched member's address any more."""
        heard = self.links.heard(member.uid)
        return heard is not None and heard.refused_at is not None

    def is_anybody_at_work(self, world: World, proposer: int | None, seconds: float) -> bool:
        """Whether a member of `world` that has not come to the agreement on the next one is still at something that it
        may take this long for: it comes when it has done that. In a large world only the proposer sees everybody; it
        says so to the others by beginning anew with what it does.

        Args:
            proposer: for whom this member waits.
            seconds: less than these have passed since the proposer began anew.
        """
        if any(self.is_at_work(world, rank) for rank in range(len(world.members)) if rank != world.rank):
            self.do(Activity.FORM)
            return True
        if not self._is_sparse or proposer is None:
            return False
        beat = self._beat(world, proposer)
        return beat is not None and beat.generation < 0 and beat.seconds < seconds

    def is_at_work(self, world: World, rank: int) -> bool:
        """Whether one member is, as far as this one sees."""
        beat = self._beat(world, rank)
        if beat is None or beat.generation != world.generation:
            return False
        return beat.activity is not Activity.REDUCE and not beat.is_late

    def _beat(self, world: World, rank: int) -> Beat | None:
        """What a member of `world` that lives has said last."""
        heard = self.links.heard(world.members[rank].uid)
        if heard is None or not heard.status or heard.epoch != world.uid or heard.refused_at is not None:
            return None
        is_silent = self._monotonic() - heard.heard_at > self._peer_timeout
        return None if is_silent else Heartbeat.from_line(heard.status).beat

    def age(self, member: Member) -> float:
        """Seconds since a watched member gave a sign of life."""
        heard = self.links.heard(member.uid)
        return 0.0 if heard is None else self._monotonic() - heard.heard_at

    def is_heard(self, member: Member) -> bool:
        """Whether a watched member has given a sign of life within some pings."""
        heard = self.links.heard(member.uid)
        if self._is_sparse and (heard is None or not heard.has_answered):
            return False  # it is not watched, or has been for a moment
        return self.age(member) <= 4 * self._interval

    def unreachable(self, world: World) -> tuple[int, ...]:
        """Ranks that have been silent for some pings though nobody refuses; for when a world broke and no one died."""
        silent = 3 * self._interval + 0.5
        others = (rank for rank in range(world.world_size) if rank != world.rank)
        return tuple(rank for rank in others if self.age(world.members[rank]) > silent)

    def lost_neighbours(self, world: World) -> tuple[int, ...]:
        """Ranks that are silent to this member, of a world in which others may hear them."""
        if not self._is_sparse:
            return ()
        return tuple(rank for rank in self._judged(world) if self.age(world.members[rank]) > self._peer_timeout)

    @property
    def is_store_silent(self) -> bool:
        """Whether the store has missed some of this member's background tasks."""
        return self._store_grace is not None and self.store_silence > 2.5

    @property
    def store_silence(self) -> float:
        """Seconds since the store last answered."""
        return self._monotonic() - self._last_answer

    # --- the thread ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What the thread does in each of its rounds."""
        with self._lock:
            self.links.tell(self._status())
        self._look()
        if self._monotonic() >= self._next_tend:
            self._next_tend = self._monotonic() + TEND_SECONDS
            try:
                self._tend(self._world, self.is_spokesman)
                self.note_answer()
            except StoreUnreachable as error:
                self._judge_store(error)
        self._end_if_stuck()

    def _judge_store(self, error: StoreUnreachable) -> None:
        world, grace = self._world, self._store_grace
        if grace is None:
            return
        if world is not None and self.store_silence > WARN_SECONDS and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{error}; training goes on for up to {grace:.0f} s without it, but nobody can join, and a lost member "
                "cannot be replaced"
            )
        with self._lock:  # the training thread may have an answer at this moment
            excess = self.store_silence - grace
            # The step in hand still goes on, others may be about to take over.
            ahead = min(self.pace.slowest_step, grace / 2)
            self.is_store_lost = world is not None and excess + ahead > 0
        if world is not None and excess > self.pace.step_limit and (world.world_size > 1 or world.is_spare):
            self.reason = str(error)  # no step has ended since: a peer may be gone as well
            self._break_off(world, {})

    def note_answer(self) -> None:
        """The store has answered, on this thread or the training thread."""
        with self._lock:
            self.is_store_lost = False
            silence, self._last_answer = self.store_silence, self._monotonic()
            has_warned, self._has_warned = self._has_warned, False
        if has_warned:
            self._warn(f"the store answers again, after {silence:.0f} s")

    def _run(self) -> None:
        next_turn = 0.0
        while not self._is_stopping:
            try:
                if self._is_turn_due or self._monotonic() >= next_turn:
                    self._is_turn_due, next_turn = False, self._monotonic() + self._interval
                    self.turn()
                seconds = 0.0 if self._is_turn_due else next_turn - self._monotonic()
                self._is_turn_due |= self.links.turn(max(0.0, seconds))
            except Exception as error:  # the end of this thread; the training thread raises it
                self._crash = error
                return

    def _status(self) -> str:
        """One line for the others; its head changes when this member is out of the world."""
        (activity, seconds, limit), now = self._at(), self._monotonic()
        adopted, world = self._adopted, self._world
        rank = adopted.rank if adopted is not None else -1
        if activity is not Activity.REDUCE or world is None:
            self._count += 1
            self._outside.hear((rank, self._count), now)
        generation = world.generation if world else -1
        heartbeat = Heartbeat(
            generation, self.num_reductions, activity, seconds, limit, now - self._outside.at, self._outside.witness
        )
        return heartbeat.to_line(head_of(adopted, self._broken, is_by_vote=self._is_by_vote))

    def _at(self) -> tuple[Activity, float, float]:
        """What the training thread does, for how many seconds, and how many it may."""
        activity, since, limit = self._activity
        return activity, self._monotonic() - since, self.pace.limit(activity) if limit is None else limit

    def _look(self) -> None:
        with self._lock:
            world, is_standing = self._world, self._is_standing
        if world is None:
            self._look_back()
            return
        if world.world_size == 1 and not world.is_spare:
            return
        beats: dict[int, Beat] = {}
        if not world.is_spare:
            beats[world.rank] = Beat(world.generation, *self._at())
        for rank in self._judged(world):
            heard = self.links.heard(world.members[rank].uid)
            if heard is None or not heard.status or heard.epoch != world.uid:
                continue
            if heard.went_on_at is not None and self._monotonic() - heard.went_on_at > self._peer_timeout:
                self._break_off(world, {})  # and gloo has not noticed: what it waits for may have no end
                return
            verdicts = verdicts_of(world, heard.status)
            if verdicts is not None:
                is_by_vote = has_ended_by_vote(heard.status)
                if is_by_vote and not world.is_spare and Heartbeat.from_line(heard.status).seconds < self._peer_timeout:
                    continue  # this member reads the same votes in a moment
                self._break_off(world, verdicts, is_by_vote=is_by_vote)
                if not self._is_sparse:
                    return
                continue
            heartbeat = Heartbeat.from_line(heard.status)
            beats[rank] = heartbeat.beat
            self._outside.hear(heartbeat.witness, heard.heard_at - heartbeat.age)
        # A lone worker has no collective that could be broken off, so nobody goes on until it is proven dead.
        is_judged = is_standing and world.world_size > 1
        blamed = self._judge(world, beats) if is_judged else self._find_lost(world, " before its first step") or None
        if blamed is not None:
            waited = self._at()[1]
            why = f"a collective has not ended in {waited:.0f} s though all take part: two cannot reach each other"
            self._break_off(world, blamed, why)

    def _look_back(self) -> None:
        """At the world that this member has left, while it agrees on the next one: who else is out of it."""
        world = self._adopted
        if world is None or not self._is_sparse or self._broken is None:
            return
        for rank in self._judged(world):
            heard = self.links.heard(world.members[rank].uid)
            if heard is not None and heard.epoch == world.uid:
                self._merge(world, verdicts_of(world, heard.status) or {})
        self._merge(world, self._find_lost(world))

    def _judged(self, world: World) -> list[int]:
        """Neighbours that train: nobody's step needs a spare."""
        uid, neighbours = self._neighbours  # at once: the training thread may adopt the next world
        return [rank for rank in neighbours if rank < world.world_size] if uid == world.uid else []

    def _find_lost(self, world: World, when: str = "") -> dict[int, str]:
        lost = {}
        for rank in self._judged(world):
            member = world.members[rank]
            silence = self.age(member)
            if self.is_refused(member):
                lost[rank] = describe(world, rank, f"died{when}")
            elif silence > self._peer_timeout:  # frozen, while others wait for an answer of its
                lost[rank] = describe(world, rank, f"was silent for {silence:.1f} s{when}")
        return lost

    def _has_left_by_vote(self, world: World, rank: int) -> bool:
        """Whether it has ended since it said so: this member reads the same votes in a moment."""
        heard = self.links.heard(world.members[rank].uid)
        has_said = heard is not None and heard.epoch == world.uid and has_ended_by_vote(heard.status)
        return has_said and not world.is_spare and self.age(world.members[rank]) < self._peer_timeout

    def _judge(self, world: World, beats: Mapping[int, Beat]) -> dict[int, str] | None:
        """The ranks to blame, with the reason, if this member must break the world; perhaps none of them."""
        blamed = {rank: why for rank, why in self._find_lost(world).items() if not self._has_left_by_vote(world, rank)}
        if world.is_spare:  # it knows nothing of how long a step takes
            return blamed or None
        for rank in stalled(beats, world.generation):
            seconds = f"{beats[rank].seconds:.0f} s"
            blamed.setdefault(rank, describe(world, rank, f"kept the others waiting, and was stuck for {seconds}"))
        is_complete = len(beats) == len(self._judged(world)) + 1
        if blamed or (is_complete and is_cut_off(beats, world.generation) and self._all_wait(world)):
            return blamed
        return None

    def _all_wait(self, world: World) -> bool:
        """Whether those that this member does not see have waited as long as those that it does."""
        if not self._is_sparse:
            return True
        hearsay = 2 * self._interval * self.topology.hops(world.world_size)
        return self._monotonic() - self._outside.at > self.pace.limit(Activity.REDUCE) + hearsay

    def _end_if_stuck(self) -> None:
        (activity, seconds, limit), broken_at = self._at(), self._broken_at
        if broken_at is None:
            return
        waited = min(seconds, self._monotonic() - broken_at)
        if waited > max(limit, self.pace.last_limit(activity)):
            self._has_given_up = True
            what = "a collective of theirs" if activity is Activity.REDUCE else "what it was doing"
            self._give_up(
                f"this world is over ({self.reason}), and {what} has not ended here in {waited:.0f} s: this worker ends"
            )

    def _break_off(
        self,
        world: World,
        verdicts: dict[int, str],
        why: str = "a member has left the world",
        *,
        is_by_vote: bool = False,
    ) -> None:
        with self._lock:
            if self._world is not world:
                return  # the training thread has left it meanwhile
            if self._broken_at is None:
                self._broken_at = self._monotonic()
                self.verdicts = verdicts
                self._broken, self._is_by_vote = dict(verdicts), is_by_vote
                self.links.tell(self._status(), at_once=True)
            elif self._is_sparse:
                self._merge(world, verdicts)
            if self.reason is None:
                self.reason = "; ".join(verdicts.values()) or why
            self._cut()

    def _merge(self, world: World, verdicts: Mapping[int, str]) -> None:
        """Pass on what is news: who proposes, and for whom it waits, must not depend on whom a member pings."""
        with self._lock:
            if self._adopted is not world or self._broken is None or not self._passes_on:
                return
            news = {rank: why for rank, why in verdicts.items() if rank not in self._broken}
            if news:
                self._broken.update(news)
                self.verdicts = self.verdicts | news
                self.links.tell(self._status(), at_once=True)


def ping_interval(peer_timeout: float) -> float:
    """Seconds between two pings."""
    return min(0.25, peer_timeout / 8)
