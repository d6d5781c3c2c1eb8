"""Who is alive: a listener to be probed, a heartbeat to be seen, and a watcher that breaks a hopeless collective off.

A killed process is seen at once: its listener refuses connections, and gloo raises at its ring neighbours. A frozen
one, a cut cable, a stuck training thread raise nothing: those are seen by the watcher of every other member, which
then closes the sockets of the process group, so that the blocked collective raises and the ordinary way out is taken.

Times are local and monotonic: a heartbeat is old when *this* process has not seen it change for so long. No two
machines' clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from elastic_train.errors import StoreUnreachable
from elastic_train.meeting import Sight
from elastic_train.rules import Activity, Beat, is_cut_off, stalled
from elastic_train.store import KeyValueStore
from elastic_train.world import Member, World

PROBE_SECONDS = 0.5
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


class Listener:
    """A TCP socket that says by its existence that this process lives. It reads nothing."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(4096)  # probes of a member whose watcher is stuck must still be accepted
        self._socket.setblocking(False)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        # A forked DataLoader process would keep the socket open beyond this process's death. And so it stays open until
        # `close` or the end of the process, whatever becomes of this object.
        os.register_at_fork(after_in_child=self._socket.close)

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> None:
        """Close the connections of probes, so that there is always room for the next."""
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.close()

    def close(self) -> None:
        self._socket.close()


class Watcher:
    """The thread that beats this member's heart and watches the others'; it has its own connection to the store.

    The training thread tells it what it does by `activity`, an assignment and nothing more; so the step path never
    waits for the store.

    Args:
        store: a client of its own.
        prefix: of the heartbeat keys, one per member of this torchrun round.
        peer_timeout: seconds after which a silent member is taken for dead.
        cut: closes the sockets of the present process group, from this thread.
        errands: called about once a second, for what else must be looked after; may raise StoreUnreachable.
        store_grace: seconds that the store may be away before the world ends, also one of this member alone; without
            it `peer_timeout`, and a world of one trains on. Such a store writes what it is told to several disks and
            keeps the past for a while: hearts beat more slowly there.
        warn: told once when the store is away, and once when it is back, while training goes on.
        give_up: ends the process, where the training thread still waits for a collective of a broken world after all
            the time that a step may take: gloo can lose the end of a send (process_group.GroupSockets), as seen in
            `waitSend` of a worker that had been frozen. Or where it does anything else there for STUCK_SECONDS.
    """

    def __init__(
        self,
        store: KeyValueStore,
        prefix: str,
        me: Member,
        peer_timeout: float,
        cut: Callable[[], None],
        errands: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        store_grace: float | None = None,
        warn: Callable[[str], None] = lambda _message: None,
        give_up: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.store = store
        self._prefix = prefix
        self._me = me
        self._peer_timeout = peer_timeout
        self._interval = min(0.25, peer_timeout / 8)
        self._beat_interval = self._interval if store_grace is None else min(1.0, peer_timeout / 8)
        self._next_beat = monotonic()
        self._cut = cut
        self._errands = errands
        self._has_grace = store_grace is not None
        self._store_grace = peer_timeout if store_grace is None else store_grace
        self._warn = warn
        self._give_up = give_up
        self._broken_at: float | None = None
        self._has_given_up = False
        self._has_warned = False
        self._monotonic = monotonic
        self.listener = Listener(me.address[0])
        self._activity: tuple[Activity, float] = (Activity.FORM, monotonic())
        self._members: tuple[Member, ...] = ()
        self._world: World | None = None
        self._world_key = ""
        self._is_standing = False
        self._seen: dict[str, tuple[str, float]] = {}
        self._last_answer = monotonic()
        self.answering_since = monotonic()
        """since when the store has answered without a pause that anybody would notice"""
        self._next_errand = monotonic()
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
        self._count = 0
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._is_stopping = False
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self, store: KeyValueStore) -> None:
        """Returns once the heart has beaten, before anybody can look for it.

        Args:
            store: the training thread's, which waits longer for an answer than this thread may.
        """
        self._beat(store)
        self._last_answer = self._monotonic()
        self._thread.start()

    def stop(self, *, keeps_listening: bool = False) -> None:
        """End the thread; it holds no key that others would wait for.

        Args:
            keeps_listening: others see that this process lives for as long as it does.
        """
        self._is_stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join(self._peer_timeout + 5)
        if not self._thread.is_alive():
            if not keeps_listening:
                self.listener.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

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

    def observe(self, members: tuple[Member, ...]) -> None:
        """Whose heartbeats to follow from now on."""
        with self._lock:
            now = self._monotonic()
            self._members = members
            self._seen = {member.name: (self._seen.get(member.name, ("", now))[0], now) for member in members}

    def expect(self, world: World, key: str) -> None:
        """A process group of this world is about to be made: break it off if a member dies before it stands."""
        with self._lock:
            self._world, self._world_key, self._is_standing = world, key, False
            self._broken_at = None
            self.verdicts, self.reason, self.least_patience = {}, None, 0.0

    def enter(self, world: World, key: str) -> None:
        """The process group of this world stands: it is watched until `leave`."""
        with self._lock:
            self._world, self._world_key, self._is_standing = world, key, True

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

    def sight(self, member: Member, rank: int, patience_is_over: bool) -> Sight:
        """What is known of an old member that has not joined: probes it, and looks at its heart.

        Args:
            patience_is_over: the member has had all the time that a training thread needs to notice.
        """
        if rank in self.verdicts or probe(member.address) is Probe.REFUSED:
            return Sight.DEAD
        if patience_is_over or self.age(member) > self._peer_timeout:
            return Sight.DEAD
        return Sight.ALIVE

    def age(self, member: Member) -> float:
        """Seconds since this member's heartbeat was seen to change; 0 while the store itself does not answer."""
        if self.is_store_silent:
            return 0.0
        now = self._monotonic()
        return now - self._seen.setdefault(member.name, ("", now))[1]

    @property
    def is_store_silent(self) -> bool:
        """Whether it has missed more than a heartbeat of this member's."""
        return self.store_silence > 2 * self._beat_interval + 0.5

    @property
    def store_silence(self) -> float:
        """Seconds since the store last answered."""
        return self._monotonic() - self._last_answer

    # --- the thread ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What the thread does in each of its rounds."""
        try:
            is_beat_due = self._monotonic() >= self._next_beat
            if is_beat_due:
                self._beat(self.store)
                self._next_beat = self._monotonic() + self._beat_interval - self._interval / 2
            self._look()
            if self._monotonic() >= self._next_errand:
                self._next_errand = self._monotonic() + 1.0
                self._errands()
            if is_beat_due:
                self.note_answer()
        except StoreUnreachable as error:
            world = self._world
            if world is not None and self.store_silence > WARN_SECONDS and not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"{error}; training goes on for up to {self._store_grace:.0f} s without it, but nobody can join, "
                    "and a lost member cannot be replaced"
                )
            with self._lock:  # the training thread may have an answer at this moment
                excess = self.store_silence - self._store_grace
                # The step in hand still goes on, and others may be about to take over.
                ahead = min(self.slowest_step, self._store_grace / 2) if self._has_grace else 0.0
                self.is_store_lost = (
                    world is not None and excess + ahead > 0 and (self._has_grace or world.world_size > 1)
                )
            if world is not None and excess > self._patience and (world.world_size > 1 or world.is_spare):
                self.reason = str(error)  # no step has ended since: a peer may be gone as well
                self._break_off(world, {})
            with contextlib.suppress(StoreUnreachable):  # a client that once got no answer gives none again
                self.store = self.store.clone()
        self._end_if_stuck()

    def note_answer(self) -> None:
        """The store has answered, on this thread or the training thread."""
        with self._lock:
            self.is_store_lost = False
            silence, was_silent = self.store_silence, self.is_store_silent
            self._last_answer = self._monotonic()
            if was_silent:
                self.answering_since = self._last_answer
            has_warned, self._has_warned = self._has_warned, False
        if has_warned:
            self._warn(f"the store answers again, after {silence:.0f} s")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self.listener.fileno(), select.POLLIN)
        while not self._is_stopping:
            try:
                self.turn()
            except Exception as error:  # the end of this thread; the training thread raises it
                self._crash = error
                return
            poll.poll(1000 * self._interval)
            self.listener.drain()

    def _beat(self, store: KeyValueStore) -> None:
        self._count += 1
        activity, since = self._activity
        generation = self._world.generation if self._world else -1
        seconds = self._monotonic() - since
        value = json.dumps([self._count, generation, activity, round(seconds, 3)])
        store.put(f"{self._prefix}/beat/{self._me.name}", value)

    def _look(self) -> None:
        with self._lock:
            members, world, key, is_standing = self._members, self._world, self._world_key, self._is_standing
        beats = self._follow(members)
        if world is None or (world.world_size == 1 and not world.is_spare):
            return
        broken = self.store.get(f"{key}/broken")
        if broken is None:
            # A lone worker has no collective that could be broken off, so nobody goes on until it is proven dead.
            is_judged = is_standing and world.world_size > 1
            blamed = self._judge(world, beats) if is_judged else self._find_dead(world)
            if blamed is None:
                return
            broken = self.store.create(f"{key}/broken", json.dumps(blamed))
        self._break_off(world, parse_broken(broken))

    def _follow(self, members: tuple[Member, ...]) -> dict[str, Beat]:
        """The newest heartbeats, by name."""
        beats: dict[str, Beat] = {}
        values = self.store.get_many([f"{self._prefix}/beat/{member.name}" for member in members])
        now = self._monotonic()
        with self._lock:
            if self.is_store_silent:  # it was, for the others too: no heart could be seen
                self._seen = {name: (value, now) for name, (value, _) in self._seen.items()}
            for member, value in zip(members, values, strict=True):
                if value is None or member.name not in self._seen:
                    continue
                if self._seen[member.name][0] != value:
                    self._seen[member.name] = (value, now)
                _, generation, activity, seconds = json.loads(value)
                beats[member.name] = Beat(int(generation), Activity(activity), float(seconds))
        return beats

    def _find_dead(self, world: World) -> dict[int, str] | None:
        dead = {}
        for rank, member in enumerate(world.workers):
            silence = self.age(member)
            if rank == world.rank:
                continue
            if probe(member.address) is Probe.REFUSED:
                dead[rank] = f"{member.name} (rank {rank}) died before its first step"
            elif silence > self._peer_timeout:  # frozen, while others wait for an answer of its
                dead[rank] = f"{member.name} (rank {rank}) was silent for {silence:.1f} s before its first step"
        return dead or None

    def _judge(self, world: World, beats_by_name: Mapping[str, Beat]) -> dict[int, str] | None:
        """The ranks to blame, with the reason, if this member must break the world; perhaps none of them."""
        blamed: dict[int, str] = {}
        for rank, member in enumerate(world.workers):
            silence = self.age(member)
            if rank != world.rank and silence > self._peer_timeout:
                blamed[rank] = f"{member.name} (rank {rank}) was silent for {silence:.1f} s"
        if world.is_spare:  # it knows nothing of how long a step takes
            return blamed or None
        patience = self._patience
        beats = {
            rank: beats_by_name[member.name]
            for rank, member in enumerate(world.workers)
            if member.name in beats_by_name
        }
        for rank in stalled(beats, world.generation, patience):
            blamed.setdefault(rank, f"{world.members[rank].name} (rank {rank}) kept the others waiting")
        if blamed or is_cut_off(beats, world.generation, patience):
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
                f"the others went on without this worker ({self.reason}), and {what} has not ended here in "
                f"{waited:.0f} s: this worker ends"
            )

    def _break_off(self, world: World, verdicts: dict[int, str]) -> None:
        with self._lock:
            if self._world is not world:
                return  # the training thread has left it meanwhile
            if self._broken_at is None:
                self._broken_at = self._monotonic()
            self.verdicts = verdicts
            if self.reason is None:
                self.reason = "; ".join(verdicts.values()) or "a member has left the world"
            self._cut()


def announce_broken(store: KeyValueStore, key: str) -> dict[int, str]:
    """Tell the others' watchers that this member is out of the world, for those whom no closed socket tells.

    Returns the ranks that some member's watcher has blamed for it, with the reasons.
    """
    return parse_broken(store.create(f"{key}/broken", "{}"))


def parse_broken(text: str) -> dict[int, str]:
    return {int(rank): why for rank, why in json.loads(text).items()}


def refusing(members: Sequence[Member]) -> list[Member]:
    """Those at whose address nobody listens: their processes are gone. Blocks up to PROBE_SECONDS."""
    return [member for member, found in zip(members, probe_all(members), strict=True) if found is Probe.REFUSED]


def unreachable_members(world: World) -> tuple[int, ...]:
    """Ranks whose listener does not answer; for when a world broke and nobody is known to be dead."""
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    results = probe_all([world.members[rank] for rank in others])
    return tuple(rank for rank, found in zip(others, results, strict=True) if found is Probe.SILENT)


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
