"""Who is alive, by the pings of links.py: a watcher that breaks a hopeless collective off.

A killed process is seen at once: its connections close and its listener refuses. A frozen one, a cut cable, a stuck
training thread close nothing: the watcher of every other member sees those, and then closes the sockets of the process
group, so that the blocked collective raises and the ordinary way out is taken.

Times are local and monotonic: a member is silent when *this* process has not heard of it for so long. No two machines'
clocks are compared.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Status
from elastic_train.protocol.laws import is_dead_in_time
from elastic_train.protocol.links import Heard
from elastic_train.rules import Activity, Beat, is_cut_off, stalled
from elastic_train.world import Member, World

PROBE_SECONDS = 0.5
TEND_SECONDS = 0.5
"""between two rounds of background tasks"""
WARN_SECONDS = 5.0
"""of a store's silence before anybody is told"""
STUCK_SECONDS = 1800.0
"""what anything but a collective may take in a world that is over, such as reading from a disk that does not answer:
its agent waits for as long, and so does who has started that"""


class Probe(StrEnum):
    """What a connection attempt to a member's listener told."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """its host answers and nobody listens: the process is gone"""
    SILENT = "silent"
    """no answer: a dead host, a cut cable, a firewall; proves nothing"""


def probe(address: tuple[str, int], timeout: float = PROBE_SECONDS) -> Probe:
    """Try to connect. Blocks up to `timeout` seconds."""
    try:
        with socket.create_connection(address, timeout):
            return Probe.ACCEPTED
    except ConnectionRefusedError:
        return Probe.REFUSED
    except OSError:
        return Probe.SILENT


class Pings(Protocol):
    """What the watcher needs of links.Links."""

    def watch(self, members: Iterable[tuple[str, tuple[str, int]]], epoch: str) -> None: ...
    def tell(self, status: str, *, at_once: bool = False) -> None: ...
    def heard(self, uid: str) -> Heard | None: ...
    def answered(self) -> dict[str, float]: ...
    def wake(self) -> None: ...
    def turn(self, seconds: float) -> bool: ...
    def close(self, *, keeps_listening: bool = False) -> None: ...


class Watcher:
    """The thread that answers pings, sends them, and breaks a hopeless collective off.

    The training thread tells it what it does by `activity`, an assignment and nothing more; so the step path never
    waits for anything here.

    Args:
        links: the pings; for this thread alone from `start` on.
        peer_timeout: seconds after which a silent member is taken for dead.
        cut: closes the sockets of the present process group, from this thread.
        tend: background tasks, about once a second, with the world and whether this is its rank 0; may raise
            StoreUnreachable.
        store_grace: seconds that a store which all members need may be away before the world ends; None where there
            is no such store.
        warn: told once when the store is away, and once when it is back, while training goes on.
        give_up: ends the process, where the training thread still waits for a collective of a broken world after all
            the time that a step may take: gloo can lose the end of a send (process_group.GroupSockets), as seen in
            `waitSend` of a worker that had been frozen. Or where it does anything else there for STUCK_SECONDS.
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
    ) -> None:
        self.links = links
        self._peer_timeout = peer_timeout
        self._interval = ping_interval(peer_timeout)
        self._cut = cut
        self._tend = tend
        self._store_grace = store_grace
        self._warn = warn
        self._give_up = give_up
        self._broken_at: float | None = None
        self._has_given_up = False
        self._has_warned = False
        self._monotonic = monotonic
        self._activity: tuple[Activity, float] = (Activity.FORM, monotonic())
        self._world: World | None = None
        self._epoch = ""
        self._broken: str | None = None
        """verdicts of the present epoch, once its world is over"""
        self._is_standing = False
        self._last_answer = monotonic()
        self._next_tend = monotonic()
        self.verdicts: dict[int, str] = {}
        """ranks of the present world that are out, whatever their listener says, and why"""
        self.slowest_step = 0.0
        """seconds of the slowest of the last steps: what a training thread may take before it is called stuck"""
        self.is_store_lost = False
        """whether the store has been away for so long that the world is to end, which it does at a step boundary"""
        self.least_patience = 0.0
        """seconds that it may take at least, however fast the steps before were"""
        self.reason: str | None = None
        """why the present world was broken, as far as this member knows"""
        self._lock = threading.RLock()
        self._is_stopping = False
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, keeps_listening: bool = False) -> None:
        """End the thread; it holds no key that others would wait for.

        Args:
            keeps_listening: others see that this process lives for as long as it does.
        """
        self._is_stopping = True
        self.links.wake()
        if self._thread.ident is not None:  # it may never have found its job
            self._thread.join(self._peer_timeout + 5)
        if not self._thread.is_alive():
            self.links.close(keeps_listening=keeps_listening)

    # --- for the training thread --------------------------------------------------------------------------------------

    def do(self, activity: Activity) -> None:
        """The training thread turns to something else.

        Raises:
            Whatever ended the watcher's thread: a bug, without which this worker would silently look dead to others.
        """
        self.check()
        if self._has_given_up and threading.current_thread() is threading.main_thread():
            threading.Event().wait()  # it came back after all; what is being saved must not change any more
        self._activity = (activity, self._monotonic())

    def check(self) -> None:
        """Raises: as `do`."""
        if self._crash is not None:
            raise self._crash

    def adopt(self, world: World) -> None:
        """Ping the members of `world` from now on, as one of them, and answer nobody else."""
        with self._lock:
            self._epoch, self._broken = world.uid, None
            self.links.tell(self._status())
        self.links.watch([(member.uid, member.address) for member in world.members], world.uid)

    def expect(self, world: World) -> None:
        """A process group of this world is about to be made: break it off if a member dies before it stands."""
        with self._lock:
            self._world, self._is_standing = world, False
            self._broken_at = None
            self.verdicts, self.reason, self.least_patience = {}, None, 0.0

    def enter(self, world: World) -> None:
        """The process group of this world stands: it is watched until `leave`."""
        with self._lock:
            self._world, self._is_standing = world, True

    @property
    def is_spokesman(self) -> bool:
        """Whether this member is rank 0 of a world that stands."""
        world = self._world
        return world is not None and world.rank == 0

    def leave(self) -> None:
        """The world is over: nothing is cut from now on."""
        with self._lock:
            self._world = self._broken_at = None
        self.do(Activity.FORM)

    def announce_broken(self) -> None:
        """Tell the others' watchers that this member is out of the world, for those whom no closed socket tells."""
        with self._lock:
            if self._broken is None:
                self._broken = "{}"
            self.links.tell(self._status(), at_once=True)

    def status(self, member: Member, rank: int, patience_is_over: bool) -> Status:
        """What is known of a member that has not come to the agreement.

        Args:
            patience_is_over: the member has had all the time that a training thread needs to notice.
        """
        heard = self.links.heard(member.uid)
        if heard is None:
            return Status.UNKNOWN if patience_is_over else Status.ALIVE
        if heard.refused_at is not None:
            since = None if heard.pinged_at is None else heard.refused_at - heard.pinged_at
            return Status.DEAD if is_dead_in_time(since, self._peer_timeout) else Status.UNKNOWN
        if rank in self.verdicts or patience_is_over or self.age(member) > self._peer_timeout:
            return Status.UNKNOWN
        return Status.ALIVE

    def is_refused(self, member: Member) -> bool:
        """Whether nobody of its uid listens at a watched member's address any more."""
        heard = self.links.heard(member.uid)
        return heard is not None and heard.refused_at is not None

    def age(self, member: Member) -> float:
        """Seconds since a watched member gave a sign of life."""
        heard = self.links.heard(member.uid)
        return 0.0 if heard is None else self._monotonic() - heard.heard_at

    def is_heard(self, member: Member) -> bool:
        """Whether a watched member has given a sign of life within some pings."""
        return self.age(member) <= 4 * self._interval

    def unreachable(self, world: World) -> tuple[int, ...]:
        """Ranks that have been silent for some pings though nobody refuses; for when a world broke and no one died."""
        silent = 3 * self._interval + 0.5
        others = (rank for rank in range(world.world_size) if rank != world.rank)
        return tuple(rank for rank in others if self.age(world.members[rank]) > silent)

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
            ahead = min(
                self.slowest_step, grace / 2
            )  # the step in hand still goes on, others may be about to take over
            self.is_store_lost = world is not None and excess + ahead > 0
        if world is not None and excess > self._patience and (world.world_size > 1 or world.is_spare):
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
        while not self._is_stopping:
            try:
                self.turn()
                self.links.turn(self._interval)
            except Exception as error:  # the end of this thread; the training thread raises it
                self._crash = error
                return

    def _status(self) -> str:
        """One line for the others; its first character changes when this member is out of the world."""
        activity, since = self._activity
        seconds = round(self._monotonic() - since, 3)
        generation = self._world.generation if self._world else -1
        mark = "-" if self._broken is None else "!"
        return mark + json.dumps([generation, activity, seconds, self._broken or "{}"])

    def _look(self) -> None:
        with self._lock:
            world, is_standing = self._world, self._is_standing
        if world is None or (world.world_size == 1 and not world.is_spare):
            return
        beats: dict[int, Beat] = {}
        for rank, member in enumerate(world.workers):
            heard = self.links.heard(member.uid)
            if rank == world.rank:
                activity, since = self._activity
                beats[rank] = Beat(world.generation, activity, self._monotonic() - since)
            elif heard is not None and heard.status and heard.epoch == world.uid:
                generation, activity, seconds, broken = json.loads(heard.status[1:])
                beats[rank] = Beat(int(generation), Activity(activity), float(seconds))
                if heard.status[0] == "!":
                    self._break_off(world, {int(one): why for one, why in json.loads(broken).items()})
                    return
        # A lone worker has no collective that could be broken off, so nobody goes on until it is proven dead.
        is_judged = is_standing and world.world_size > 1
        blamed = self._judge(world, beats) if is_judged else self._find_dead(world)
        if blamed is not None:
            self._break_off(world, blamed)

    def _find_dead(self, world: World) -> dict[int, str] | None:
        dead = {}
        for rank, member in enumerate(world.workers):
            silence = self.age(member)
            if rank == world.rank:
                continue
            if self.is_refused(member):
                dead[rank] = f"{member.name} (rank {rank}) died before its first step"
            elif silence > self._peer_timeout:  # frozen, while others wait for an answer of its
                dead[rank] = f"{member.name} (rank {rank}) was silent for {silence:.1f} s before its first step"
        return dead or None

    def _judge(self, world: World, beats: Mapping[int, Beat]) -> dict[int, str] | None:
        """The ranks to blame, with the reason, if this member must break the world; perhaps none of them."""
        blamed: dict[int, str] = {}
        for rank, member in enumerate(world.workers):
            silence = self.age(member)
            if rank == world.rank:
                continue
            if self.is_refused(member):
                blamed[rank] = f"{member.name} (rank {rank}) died"
            elif silence > self._peer_timeout:
                blamed[rank] = f"{member.name} (rank {rank}) was silent for {silence:.1f} s"
        if world.is_spare:  # it knows nothing of how long a step takes
            return blamed or None
        for rank in stalled(beats, world.generation, self._patience):
            blamed.setdefault(rank, f"{world.members[rank].name} (rank {rank}) kept the others waiting")
        is_complete = len(beats) == world.world_size
        if blamed or (is_complete and is_cut_off(beats, world.generation, self._patience)):
            return blamed
        return None

    @property
    def _patience(self) -> float:
        """Seconds that a training thread may take before it is called stuck."""
        patience = self._peer_timeout + 10 * self.slowest_step if self.slowest_step else 6 * self._peer_timeout
        return max(patience, self.least_patience)

    def _end_if_stuck(self) -> None:
        (activity, since), broken_at = self._activity, self._broken_at
        if broken_at is None:
            return
        is_reducing = activity is Activity.REDUCE
        waited = self._monotonic() - max(since, broken_at)
        if waited > (self._patience if is_reducing else STUCK_SECONDS):
            self._has_given_up = True
            what = "a collective of theirs" if is_reducing else "what it was doing"
            self._give_up(
                f"this world is over ({self.reason}), and {what} has not ended here in {waited:.0f} s: this worker ends"
            )

    def _break_off(self, world: World, verdicts: dict[int, str]) -> None:
        with self._lock:
            if self._world is not world:
                return  # the training thread has left it meanwhile
            if self._broken_at is None:
                self._broken_at = self._monotonic()
                self.verdicts = verdicts
                self._broken = json.dumps(verdicts)
                self.links.tell(self._status(), at_once=True)
            if self.reason is None:
                self.reason = "; ".join(verdicts.values()) or "a member has left the world"
            self._cut()


def ping_interval(peer_timeout: float) -> float:
    """Seconds between two pings."""
    return min(0.25, peer_timeout / 8)


def refusing(members: Sequence[Member]) -> list[Member]:
    """Those at whose address nobody listens: their processes are gone. Blocks up to PROBE_SECONDS."""
    return [member for member, found in zip(members, probe_all(members), strict=True) if found is Probe.REFUSED]


def probe_all(members: Sequence[Member]) -> list[Probe]:
    """All at once. Blocks up to PROBE_SECONDS."""
    results = [Probe.SILENT] * len(members)

    def look(index: int) -> None:
        results[index] = probe(members[index].address)

    threads = [threading.Thread(target=look, args=(index,), daemon=True) for index in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PROBE_SECONDS)
    return results
