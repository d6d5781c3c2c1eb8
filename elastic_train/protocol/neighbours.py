"""The neighbours of a member: whom it pings (Topology), what they answer (Hearing), and who calls it (Callers).

The lines are `P uid epoch seq status` (a ping), `A uid epoch seq status` and `N uid` (its answers); a status has no
line break. `C` asks for the port of the canary, and `C uid port` answers it. When the first word of a status, its
**head**, changes, the receiver acts at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from elastic_train.system import through_suspends
from elastic_train.world import Address

LONGEST_LINE = 65536
Clock = Callable[[], float]


@dataclass(frozen=True)
class Topology:
    """The choice of neighbours: all members in a small world, a fixed number in a large one. Pure arithmetic.

    A large world is a circulant graph (Boesch and Wang, "Reliable circulant networks with minimum transmission delay",
    1985): members stand in a ring, and each pings the members at some fixed distances, both ways. So the cost of a
    member does not grow with the world, and news of one member reaches all others within `hops`.
    """

    dense: int = 9
    """most members of a world in which each pings every other"""
    degree: int = 8
    """workers that a worker of a larger world pings; even"""
    spare_degree: int = 4
    """workers that a spare of a larger world pings; they ping it too"""

    def is_dense(self, num_members: int) -> bool:
        return num_members <= self.dense

    def neighbours(self, nodes: Sequence[Hashable], num_workers: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` pings. Neighbours are mutual: each pings the other.

        Args:
            nodes: node of every member, by rank. Neighbours in the ring are of other nodes: a node may die as a whole.
            num_workers: number of the lowest ranks, which train; the other ranks are spares.
        """
        num_members = len(nodes)
        if self.is_dense(num_members):
            return tuple(other for other in range(num_members) if other != rank)
        if rank >= num_workers:
            return tuple(sorted(self._workers_of_spare(num_workers, rank)))
        found = {
            spare for spare in range(num_workers, num_members) if rank in self._workers_of_spare(num_workers, spare)
        }
        if num_workers <= self.degree + 1:
            return tuple(sorted({*range(num_workers), *found} - {rank}))
        ring = by_turns(nodes[:num_workers])
        place = ring.index(rank)
        for distance in self.distances(num_workers):
            found |= {ring[(place + distance) % num_workers], ring[(place - distance) % num_workers]}
        return tuple(sorted(found))

    def distances(self, num_workers: int) -> tuple[int, ...]:
        """Return the distances in a ring of more than `degree` + 1: powers of one base; a few of each lead anywhere."""
        number, longest = self.degree // 2, (num_workers - 1) // 2
        found = [0]
        for index in range(number):
            distance = max(round(num_workers ** (index / number)), found[-1] + 1)
            found.append(min(distance, longest - (number - 1 - index)))
        return tuple(found[1:])

    def hops(self, num_workers: int) -> int:
        """Return the most hops from any worker to any other, while all live."""
        if self.is_dense(num_workers) or num_workers <= self.degree + 1:
            return 1
        distances = (*self.distances(num_workers), num_workers)
        return sum(math.ceil(after / before / 2) for before, after in itertools.pairwise(distances)) + 1

    def _workers_of_spare(self, num_workers: int, spare: int) -> set[int]:
        number = min(self.spare_degree, num_workers)
        return {(spare + index * num_workers // number) % num_workers for index in range(number)}


STANDARD = Topology()


def by_turns(nodes: Sequence[Hashable]) -> list[int]:
    """Return the ranks in an order that separates those of one node: the first of each node, then the second, ..."""
    counts: dict[Hashable, int] = {}
    turns = []
    for rank, node in enumerate(nodes):
        counts[node] = turn = counts.get(node, -1) + 1
        turns.append((turn, rank))
    return [rank for _, rank in sorted(turns)]


@dataclass
class Heard:
    """The signs of life of a watched member. Times are of this process's clock; the two that prove a death, `pinged_at`
    and `refused_at`, are of a clock that goes on while the machine is suspended."""

    heard_at: float
    """time of its last sign of life; at first, of the start of watching it"""
    status: str = ""
    """its last status"""
    epoch: str = ""
    """the world of its last status"""
    elsewhere_since: float | None = None
    """time since when it has answered that it is not in the world of the present epoch"""
    pinged_at: float | None = None
    """sending time of the last ping that it answered in the present epoch"""
    refused_at: float | None = None
    """begin of the connection that was refused, or that another uid answered: the member is dead"""
    has_answered: bool = False
    """whether it has ever answered from this address"""
    pings: dict[int, float] = field(default_factory=dict)
    """sending times of the pings that it has not answered in the present epoch, by number"""

    def refuse(self, at: float) -> None:
        """Note that the connection begun at `at` proves its death; of several the first counts."""
        if self.refused_at is None:
            self.refused_at = at


class Hearing:
    """The answers of watched members, this member's world and its own status; without sockets.

    `watch`, `status` and all reads are for every thread; the rest is for the thread of `Links.turn`.

    Args:
        uid: of this process.
        can_read: returns whether this build knows the form of another member's status.
        clock, outer: clocks of this process; `outer` goes on while the machine is suspended.
    """

    def __init__(
        self, uid: str, can_read: Callable[[str], bool], clock: Clock = time.monotonic, outer: Clock = through_suspends
    ) -> None:
        self._uid, self._seq, self._can_read = uid, 0, can_read
        self._clock, self._outer_clock = clock, outer
        self.canary_port: int | None = None
        """port of this process's canary; None without one"""
        self.status = ""
        """status of this member, sent with pings and answers"""
        self.watched: dict[str, Heard] = {}
        self.answered: dict[str, float] = {}
        """time of this member's last answer to a ping of each uid"""
        self._lock, self._epoch = threading.Lock(), ""  # the lock keeps the values of one epoch together
        self._wanted: dict[str, tuple[Address, Heard]] | None = None
        self._answers: frozenset[str] = frozenset()

    def watch(self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None) -> None:
        """As `Links.watch`."""
        wanted = {uid: address for uid, address in members if uid != self._uid}
        now = self._clock()
        with self._lock:
            is_new = epoch != self._epoch
            if is_new:
                # Joining or accepting a list starts no age, but an age from the world before goes on: before a member
                # goes on there without this one, it has not answered this one for a whole timeout (barriers.py).
                for uid, heard in self.watched.items():
                    heard.pinged_at = heard.pinged_at if uid in self._answers else None
                    heard.elsewhere_since = None
                    heard.pings.clear()
            self._epoch = epoch
            self._answers = frozenset(wanted if answered is None else answered)
            for uid in wanted:
                if uid not in self.watched:
                    self.watched[uid] = Heard(now)
                elif is_new:
                    self.watched[uid].heard_at = max(self.watched[uid].heard_at, now)
            self._wanted = {uid: (address, self.watched[uid]) for uid, address in wanted.items()}

    def take_wanted(self) -> dict[str, tuple[Address, Heard]] | None:
        """Return the members to ping from now on, by uid, and forget all others; None if there was no new `watch`."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self.watched = {uid: heard for uid, heard in self.watched.items() if uid in wanted}
        return wanted

    def excuse_silence(self, now: float, heard_at: float) -> None:
        """Count all members as heard at `heard_at`: this process was suspended or starved, so no silence counts."""
        with self._lock:
            for heard in self.watched.values():
                heard.heard_at = max(heard.heard_at, heard_at)
                if heard.elsewhere_since is not None:
                    heard.elsewhere_since = now

    def ping(self, heard: Heard) -> str:
        """Return the line of the next ping to the member of `heard`."""
        self._seq += 1
        with self._lock:  # `watch` may begin another epoch
            heard.pings[self._seq] = self._outer_clock()
            while len(heard.pings) > 256:
                del heard.pings[next(iter(heard.pings))]
        return f"P {self._uid} {self._epoch or '-'} {self._seq} {self.status}\n"

    def note(self, heard: Heard, kind: str, rest: Sequence[str]) -> bool:
        """Note an answer of the member of `heard`: `A`, `N` or `C`, and the words after its uid. Return False, and note
        nothing, if it cannot be read."""
        if kind == "A" and not (len(rest) == 3 and rest[1].isdecimal() and self._can_read(rest[2])):
            return False
        heard.heard_at, heard.has_answered, heard.refused_at = self._clock(), True, None
        if kind == "N" and heard.elsewhere_since is None:
            heard.elsewhere_since = heard.heard_at
        if kind == "A":
            epoch, seq, heard.status = rest
            heard.epoch, heard.elsewhere_since = epoch, None
            with self._lock:  # `watch` may begin another epoch
                sent_at = heard.pings.pop(int(seq), None)
                if sent_at is not None and epoch == self._epoch:
                    heard.pinged_at = max(sent_at, heard.pinged_at or sent_at)
        return True

    def answer(self, line: str) -> tuple[str, bool]:
        """Return the answer to a line of another process, and whether that line matters at once."""
        kind, *rest = line.split(" ", 4)
        if kind == "C" and self.canary_port is not None:
            return f"C {self._uid} {self.canary_port}\n", False
        if kind != "P" or len(rest) < 3:
            return f"N {self._uid}\n", False
        uid, epoch, seq = rest[:3]
        status = rest[3] if len(rest) == 4 else ""
        with self._lock:
            if epoch != self._epoch or uid not in self._answers or not self._can_read(status):
                return f"N {self._uid}\n", False
            self.answered[uid] = self._clock()
            heard = self.watched.get(uid)
        matters = heard is not None and head(heard.status) != head(status)
        if heard is not None:
            heard.status, heard.epoch, heard.elsewhere_since = status, epoch, None
            heard.heard_at = self._clock()
        return f"A {self._uid} {epoch} {seq} {self.status}\n", matters


class Sockets:
    """One member's selector and its sends. For the thread that selects.

    A socket is registered with a function to call when it is ready, which returns whether an event matters at once.

    Args:
        warn: called once if this process has no descriptor left for a connection.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self.num_messages = self.num_bytes = 0
        """pings and answers that were sent"""
        self._warn, self._has_warned = warn, set[str]()

    def send(self, connection: socket.socket, unsent: bytes, line: str) -> bytes:
        """Send the rest of an earlier line or else this line, and return what is left. A receiver that does not read
        loses whole lines, never a part of one. Raises: OSError."""
        self.num_messages += 1
        self.num_bytes += len(line)
        data = unsent or line.encode()
        try:
            return data[connection.send(data) :]
        except BlockingIOError:
            return unsent

    def close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection)
        connection.close()

    def warn_of(self, error: OSError) -> None:
        """Warn once that no connection can be opened."""
        self._warn_once(
            f"no connection to another member can be opened ({error.strerror}): it is tried with each ping; where "
            "files are too many, raise `ulimit -n`",
            about="connections",
        )

    def warn_of_unreadable(self, host: str) -> None:
        """Warn once for each host that the status of a member there cannot be read."""
        self._warn_once(
            f"what the member at {host} says of itself cannot be read here, and counts as silence: give all nodes the "
            "same build of elastic_train",
            about=host,
        )

    def _warn_once(self, text: str, about: str) -> None:
        if about not in self._has_warned:
            self._has_warned.add(about)
            self._warn(text)


@dataclass
class _Caller:
    """A connection that another member has made."""

    socket: socket.socket
    heard_at: float
    received: bytes = b""
    unsent: bytes = b""


class Callers:
    """The listener of this member, and the connections made to it. For the thread that selects.

    Args:
        host: the address to listen at; the port is free.
        timeout: seconds after which the connection of a silent caller is closed.
        hearing: returns the answers.
    """

    def __init__(self, host: str, timeout: float, hearing: Hearing, sockets: Sockets) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.bind((host, 0))
        self.listener.listen(4096)  # probes of a member whose thread is stuck must still be accepted
        self.listener.setblocking(False)
        self._timeout, self._hearing, self._sockets = timeout, hearing, sockets
        self.callers: dict[int, _Caller] = {}
        self._sockets.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self._is_accepting = True

    def look_after(self, now: float) -> None:
        """Accept again after an error, and close the connections of silent callers."""
        if not self._is_accepting:
            self._sockets.selector.register(self.listener, selectors.EVENT_READ, self._accept)
            self._is_accepting = True
        for caller in list(self.callers.values()):
            if now - caller.heard_at > self._timeout:
                self._hang_up(caller)

    def excuse_silence(self, now: float) -> None:
        """As `Hearing.excuse_silence`."""
        for caller in self.callers.values():
            caller.heard_at = now

    def sockets(self) -> list[socket.socket]:
        return [self.listener, *(caller.socket for caller in self.callers.values())]

    def hang_up(self) -> None:
        """Close all connections."""
        for caller in list(self.callers.values()):
            self._hang_up(caller)

    def _accept(self) -> bool:
        while True:
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return False
            except OSError as error:
                # A caller that cannot be accepted keeps the listener readable: `turn` would not wait any more.
                self._sockets.selector.unregister(self.listener)
                self._is_accepting = False
                self._sockets.warn_of(error)
                return False
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # the caller is gone already: the first read finds that out
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = _Caller(connection, time.monotonic())
            self.callers[connection.fileno()] = caller
            self._sockets.selector.register(connection, selectors.EVENT_READ, partial(self._serve, caller))

    def _hang_up(self, caller: _Caller) -> None:
        self.callers.pop(caller.socket.fileno(), None)
        self._sockets.close(caller.socket)

    def _serve(self, caller: _Caller) -> bool:
        """Answer the lines of a caller. Return whether one of them may matter at once."""
        matters = False
        try:
            data = caller.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data or len(caller.received) > LONGEST_LINE:
            self._hang_up(caller)
            return False
        caller.heard_at = time.monotonic()
        *lines, caller.received = (caller.received + data).split(b"\n")
        try:
            for line in lines:
                answer, is_news = self._hearing.answer(line.decode(errors="replace"))
                matters |= is_news
                caller.unsent = self._sockets.send(caller.socket, caller.unsent, answer)
        except OSError:
            self._hang_up(caller)
        return matters


def head(status: str) -> str:
    """Return the head of a status: the receiver acts at once when it changes."""
    return status.partition(" ")[0]
