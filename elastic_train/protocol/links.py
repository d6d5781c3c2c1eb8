"""Pings between members over TCP, by one thread that never blocks on a peer.

Each member listens, and keeps one connection to every member that it watches (neighbours.py). A ping carries its
sender's uid, world (`epoch`) and status. A member of the same world answers `A`, any other process `N`. The death of a
process is noticed at once: the kernel closes its end, and a new connection is refused, or another uid answers. Its
canary (canary.py) is gone first: the connection to it carries no data, and its end shows the death. A frozen process,
or a cut cable, is only silent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from elastic_train.protocol.canary import Canary
from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.protocol.neighbours import (
    LONGEST_LINE,
    Callers,
    Heard,
    Hearing,
    Sockets,
    head,
)
from elastic_train.system import call_in_children, through_suspends
from elastic_train.world import Address

CONNECT_SECONDS = 1.0
"""time after which an attempt to connect is begun anew (the kernel's own pauses grow), and after which a connection is
given up if the other kernel acknowledges nothing"""
QUICK_ATTEMPTS = 2


@dataclass
class _Connection:
    """A connection that this member makes."""

    address: Address
    socket: socket.socket | None = None
    is_open: bool = False
    probed_at: float = 0.0
    """time when it was begun, on the clock that goes on during suspends"""


@dataclass(kw_only=True)
class _Canary(_Connection):
    """A connection to the canary of a watched member."""

    was_open: bool = False
    """whether it was accepted once: then a refusal proves the death"""


@dataclass(kw_only=True)
class _Peer(_Connection):
    uid: str
    heard: Heard
    is_proven: bool = False
    """whether the member has answered on this connection"""
    attempts_left: int = 0
    """attempts to connect before the next ping is due, after a connection with answers was closed"""
    began_at: float = 0.0
    received: bytes = b""
    unsent: bytes = b""
    canary: _Canary | None = None


class Calls:
    """The connections that this member makes, to the members that it watches and to their canaries; for one thread.

    Args:
        interval: seconds between two pings.
    """

    def __init__(self, interval: float, hearing: Hearing, sockets: Sockets) -> None:
        self._interval, self._hearing, self._sockets = interval, hearing, sockets
        self.peers: dict[str, _Peer] = {}

    def follow(self) -> None:
        """Keep only the connections to members that are still watched, and add new ones."""
        wanted = self._hearing.take_wanted()
        if wanted is None:
            return
        for uid in [uid for uid in self.peers if uid not in wanted]:
            self._forget(self.peers.pop(uid))
        for uid, (address, heard) in wanted.items():
            if uid not in self.peers:
                self.peers[uid] = _Peer(address, uid=uid, heard=heard)

    def ping(self, now: float) -> None:
        """Ping all peers; connect to those without a connection."""
        for peer in self.peers.values():
            self._ping(peer, now)

    def sockets(self) -> list[socket.socket]:
        """Return the sockets that are open or being connected."""
        peers = list(self.peers.values())
        connections = [*peers, *(peer.canary for peer in peers if peer.canary)]
        return [connection.socket for connection in connections if connection.socket]

    def close(self) -> None:
        for peer in self.peers.values():
            self._forget(peer)

    def _ping(self, peer: _Peer, now: float) -> None:
        if peer.socket is not None and not peer.is_open and now - peer.began_at > CONNECT_SECONDS:
            self._disconnect(peer)
        if peer.socket is None:
            if peer.heard.refused_at is None or now - peer.began_at > self._interval / 2:
                self._connect(peer)
        elif peer.is_open:
            self._send(peer, self._hearing.ping(peer.heard))

    def _connect(self, peer: _Peer) -> None:
        peer.began_at, peer.is_proven = time.monotonic(), False
        peer.received, peer.unsent = b"", b""
        if self._begin(peer, partial(self._serve_peer, peer), CONNECT_SECONDS) == errno.ECONNREFUSED:
            peer.heard.refuse(peer.probed_at)

    def _begin(self, connection: _Connection, serve: Callable[[], bool], user_timeout: float = 0.0) -> int:
        """Begin to connect. Return the error if that has failed already; 0 if it is under way.

        Args:
            serve: called when the socket is ready; returns whether an event may matter at once.
            user_timeout: seconds without an acknowledgement after which the kernel gives up; 0 for the kernel's choice.
        """
        connection.probed_at, connection.is_open = through_suspends(), False
        family = socket.AF_INET6 if ":" in connection.address[0] else socket.AF_INET
        try:
            connection.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._sockets.warn_of(error)
            return error.errno or errno.EMFILE
        connection.socket.setblocking(False)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * user_timeout))
        try:
            code = connection.socket.connect_ex(connection.address)
        except socket.gaierror:  # a link-local address of another machine, with the name of an interface there
            code = errno.EHOSTUNREACH
        if code in (0, errno.EINPROGRESS):
            self._sockets.selector.register(connection.socket, selectors.EVENT_WRITE, serve)
            return 0
        self._disconnect(connection)
        return code

    def _disconnect(self, connection: _Connection) -> None:
        if connection.socket is not None:
            self._sockets.close(connection.socket)
        connection.socket, connection.is_open = None, False

    def _forget(self, peer: _Peer) -> None:
        self._disconnect(peer)
        if peer.canary is not None:
            self._disconnect(peer.canary)

    def _send(self, peer: _Peer, line: str) -> None:
        assert peer.socket is not None, "open"
        try:
            peer.unsent = self._sockets.send(peer.socket, peer.unsent, line)
        except OSError:
            self._reconnect(peer)

    def _reconnect(self, peer: _Peer) -> None:
        """Connect again: the peer's end is closed. If the peer is dead, that fails at once, or when the kernel, which
        closes the newest files first, closes the listener and resets what it has accepted meanwhile. A process that
        accepts and never answers may be a stranger: it is tried again with the next ping."""
        self._disconnect(peer)
        if peer.is_proven:
            peer.attempts_left = QUICK_ATTEMPTS
        if peer.attempts_left > 0:
            peer.attempts_left -= 1
            self._connect(peer)

    def _serve_peer(self, peer: _Peer) -> bool:
        """Handle a ready socket. Return whether an answer may matter at once."""
        if peer.socket is None:
            return False
        if not peer.is_open:
            code = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code != 0:
                self._disconnect(peer)
                if code == errno.ECONNREFUSED:
                    peer.heard.refuse(peer.probed_at)
                    return True
                return False
            peer.is_open = True
            self._sockets.selector.modify(peer.socket, selectors.EVENT_READ, partial(self._serve_peer, peer))
            if peer.canary is None:
                self._send(peer, "C\n")
            if peer.is_open:
                self._ping(peer, time.monotonic())
            return False
        try:
            data = peer.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._reconnect(peer)
            return True
        *lines, peer.received = (peer.received + data).split(b"\n")
        if len(peer.received) > LONGEST_LINE:
            lines, peer.received = [b""], b""
        before, was_refused = peer.heard.status, peer.heard.refused_at is not None
        for line in lines:
            self._note(peer, line.decode(errors="replace"))
        return head(peer.heard.status) != head(before) or (peer.heard.refused_at is not None) != was_refused

    def _note(self, peer: _Peer, line: str) -> None:
        kind, *rest = line.split(" ", 4)
        if kind not in ("A", "N", "C") or not rest or rest[0] != peer.uid:
            peer.heard.refuse(peer.probed_at)  # another process has its port
            return
        peer.is_proven = True
        if not self._hearing.note(peer.heard, kind, rest[1:]):
            self._sockets.warn_of_unreadable(peer.address[0])
        if kind == "C" and peer.canary is None and rest[-1].isdecimal():
            peer.canary = _Canary((peer.address[0], int(rest[-1])))
            self._connect_canary(peer, peer.canary)

    # --- to their canaries --------------------------------------------------------------------------------------------

    def _connect_canary(self, peer: _Peer, canary: _Canary) -> bool:
        """Connect to the canary. Return whether that was refused at once and proves the death."""
        return self._judge_canary(peer, canary, self._begin(canary, partial(self._serve_canary, peer, canary)))

    def _judge_canary(self, peer: _Peer, canary: _Canary, code: int) -> bool:
        """Handle the outcome of an attempt to connect. Return whether it proves the death."""
        if code != errno.ECONNREFUSED or not canary.was_open:
            return False
        peer.heard.refuse(canary.probed_at)
        self._disconnect(peer)  # the process is dying: what it still sends is old, and its listener may still accept
        peer.began_at = time.monotonic()
        return True

    def _serve_canary(self, peer: _Peer, canary: _Canary) -> bool:
        """Handle a ready socket of a canary. Return whether the member is proven dead now."""
        if canary.socket is None:
            return False
        if not canary.is_open:
            code = canary.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0 and not canary.was_open:
                canary.is_open = canary.was_open = True
                self._sockets.selector.modify(
                    canary.socket, selectors.EVENT_READ, partial(self._serve_canary, peer, canary)
                )
                return False
            self._disconnect(canary)  # refused, or another process has the port by now
            return self._judge_canary(peer, canary, code)
        try:
            if canary.socket.recv(1):
                return False  # a canary never writes
        except BlockingIOError:
            return False
        except ConnectionError:
            pass  # the same as a closed end
        self._disconnect(canary)
        return self._connect_canary(peer, canary)


class Links:
    """The pings of one member. `turn` is for one thread; `watch`, `announce` and all reads may be on another.

    Args:
        host: the address to listen at; the port is free.
        uid: of this process.
        interval: seconds between two pings.
        peer_timeout: seconds after which a silent member counts as dead. The connection of a caller that is silent for
            twice as long, and for 20 pings, is closed: a machine that loses power never closes its end.
        warn: called once if no descriptor is left for a connection, and once for each host whose status is unreadable.
        can_read: as in `Hearing`.
    """

    def __init__(
        self,
        host: str,
        uid: str,
        interval: float,
        peer_timeout: float,
        warn: Callable[[str], None] = lambda _: None,
        can_read: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._interval, self._hearing = interval, Hearing(uid, can_read)
        self.sockets = Sockets(warn)
        self._callers = Callers(host, max(2 * peer_timeout, 20 * interval), self._hearing, self.sockets)
        self._calls = Calls(interval, self._hearing, self.sockets)
        self.address: Address = (host, int(self._callers.listener.getsockname()[1]))
        self._canary = Canary(host)
        self._hearing.canary_port = self._canary.port
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self.sockets.selector.register(self._wake_read, selectors.EVENT_READ, self._take_wakes)
        self._wake_lock = threading.Lock()
        self._is_ping_due, self._next_ping = True, 0.0
        self._awake = AwakeTime(longest=4 * interval + 0.5)
        # A forked DataLoader process would keep connections open beyond this process's death.
        call_in_children(self._close_in_child)

    # --- for every thread ---------------------------------------------------------------------------------------------

    def watch(
        self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None = None
    ) -> None:
        """Ping these members from now on, as a member of the world `epoch`.

        Args:
            answered: uids of the world's members: only these get the answer `A`. By default the watched members.
        """
        self._hearing.watch(members, epoch, answered)
        self._is_ping_due = True
        self.wake()

    def announce(self, status: str, *, at_once: bool = False) -> None:
        """Send `status` with pings and answers from now on; with `at_once` ping now. A change of its head ends the
        `turn` of each receiver."""
        self._hearing.status = status
        if at_once:
            self._is_ping_due = True
            self.wake()

    def heard(self, uid: str) -> Heard | None:
        """Return the signs of life of a watched member; None if it is not watched."""
        return self._hearing.watched.get(uid)

    def answered(self) -> dict[str, float]:
        """Return the seconds since this member last answered a ping of each uid."""
        now = time.monotonic()
        return {uid: now - at for uid, at in list(self._hearing.answered.items())}

    def wake(self) -> None:
        """End a `turn` that waits."""
        with self._wake_lock, contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    # --- for its own thread -------------------------------------------------------------------------------------------

    def turn(self, seconds: float) -> bool:
        """Send due pings and receive for at most `seconds`. Return early, with True, once an answer may matter."""
        self._excuse_suspension()
        now = time.monotonic()
        self._calls.follow()
        if self._is_ping_due or now >= self._next_ping:
            self._is_ping_due, self._next_ping = False, now + self._interval
            self._calls.ping(now)
            self._callers.look_after(now)
        ready = self.sockets.selector.select(max(0.0, min(seconds, self._next_ping - now)))
        self._excuse_suspension()
        matters = False
        for key, _ in ready:
            matters |= key.data()
        return matters

    def _excuse_suspension(self) -> None:
        """Count no silence while this process was suspended or starved."""
        if self._awake.look() > 0:
            now = time.monotonic()
            self._hearing.excuse_silence(now, now - self._interval)
            self._callers.excuse_silence(now)

    def close(self) -> None:
        """End all connections."""
        self._canary.close()
        self._calls.close()
        self._callers.hang_up()
        self.sockets.selector.close()
        with self._wake_lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1  # a late `wake` must not write into a file that gets this number
        self._callers.listener.close()

    def _close_in_child(self) -> None:
        for one in (*self._callers.sockets(), *self._calls.sockets()):
            with contextlib.suppress(OSError):
                one.close()

    def _take_wakes(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return False
