"""Pings between members over TCP, by one thread that never blocks on a peer.

Each member listens, and keeps one connection to every member that it watches (neighbours.py). A ping names its sender,
the sender's world (`epoch`) and status; it is answered `A` by a member of the same world, and `N` by any other process.
A killed process is noticed at once: the kernel closes its end, and a new connection is refused, or another uid answers.
Its canary (canary.py) is gone before all else: a connection there is never used, and says so by its end. A frozen
process, or a cut cable, is only silent.

The lines: `P uid epoch seq status`, `A uid epoch seq status`, `N uid`; a status has no line break. `C` asks for the
port of the canary, and `C uid port` says it. Where a status's first word, its **head**, changes, who hears it acts at
once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from elastic_train.protocol.canary import Canary

Address = tuple[str, int]

CONNECT_SECONDS = 1.0
"""after which an attempt to connect is begun anew, and a connection given up whose other kernel acknowledges nothing:
the kernel's own pauses grow"""
QUICK_ATTEMPTS = 2
LONGEST_LINE = 65536


@dataclass
class Heard:
    """What is known of a watched member. Times are of this process's monotonic clock; those of the two that prove a
    death, of one that goes on while the machine is suspended."""

    heard_at: float
    """when it last gave any sign of life; at first, since when it is watched"""
    status: str = ""
    """what it last said of itself"""
    epoch: str = ""
    """the world that it said that of"""
    went_on_at: float | None = None
    """since when it has answered as a member of another world, though it was in the present epoch's"""
    pinged_at: float | None = None
    """when the last ping that it answered in the present epoch was sent"""
    refused_at: float | None = None
    """when the connection was begun that was refused, or that another uid answered: it is dead"""
    has_answered: bool = False
    """whether it has ever answered from this address"""


@dataclass
class _Connection:
    """One that this member makes."""

    address: Address
    socket: socket.socket | None = None
    is_open: bool = False
    probed_at: float = 0.0
    """when it was begun, on the clock that counts suspends"""


@dataclass(kw_only=True)
class _Peer(_Connection):
    uid: str
    heard: Heard
    is_proven: bool = False
    """whether the member has answered on this connection"""
    attempts_left: int = 0
    """to connect before the next ping is due, once a connection on which it had answered was closed"""
    began_at: float = 0.0
    received: bytes = b""
    unsent: bytes = b""
    pings: dict[int, float] = field(default_factory=dict)
    canary: _Canary | None = None


@dataclass(kw_only=True)
class _Canary(_Connection):
    """A connection to that of a watched member."""

    peer: _Peer
    was_open: bool = False
    """whether it was accepted once: then it is a proof when it is refused"""


@dataclass
class _Caller:
    """A connection that another member has made."""

    socket: socket.socket
    heard_at: float
    received: bytes = b""
    unsent: bytes = b""


class Links:
    """The pings of one member. `turn` is for one thread; `watch`, `tell` and what is read may be of another.

    Args:
        host: the address to listen at; the port is free.
        uid: of this process.
        interval: seconds between two pings.
        peer_timeout: seconds after which a silent member is taken for dead. Who has called and is silent for twice as
            long, and for 20 pings, is hung up on: where a machine loses power, its end of the connection closes never.
        warn: told once where this process has no descriptor left for a connection.
    """

    def __init__(
        self,
        host: str,
        uid: str,
        interval: float,
        peer_timeout: float,
        warn: Callable[[str], None] = lambda _message: None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(4096)  # probes of a member whose thread is stuck must still be accepted
        self._listener.setblocking(False)
        self.address: Address = (host, int(self._listener.getsockname()[1]))
        self._canary = Canary(host)
        self._uid, self._interval = uid, interval
        self._caller_timeout = max(2 * peer_timeout, 20 * interval)
        self._warn, self._has_warned = warn, False
        self._is_accepting = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._peers: dict[str, _Peer] = {}
        self._callers: dict[int, _Caller] = {}
        self._wanted: tuple[tuple[tuple[str, Address], ...], str] | None = None
        self._answers: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._epoch = ""
        self._status = ""
        self._is_ping_due = True
        self._next_ping = 0.0
        self._seq = 0
        self._answered: dict[str, float] = {}
        self._awake_at = time.monotonic()
        self._matters = False
        self.num_messages = self.num_bytes = 0
        """that were sent, pings and answers"""
        # A forked DataLoader process would keep connections open beyond this process's death.
        os.register_at_fork(after_in_child=self._close_in_child)

    # --- for every thread ---------------------------------------------------------------------------------------------

    def watch(
        self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None = None
    ) -> None:
        """Whom to ping from now on, and as a member of which world.

        Args:
            answered: uids of its members: they alone are answered `A`. Those watched by default.
        """
        wanted = tuple((uid, address) for uid, address in members if uid != self._uid)
        now = time.monotonic()
        with self._lock:
            is_new = epoch != self._epoch
            if is_new:
                # Joining or accepting a list starts no age. One that began in the world before goes on: whoever goes on
                # without this member there has first not answered it for a whole timeout (law 2).
                before = self._answers
                for uid, peer in self._peers.items():
                    peer.heard.pinged_at = peer.heard.pinged_at if uid in before else None
                    peer.heard.went_on_at = None
                    peer.pings.clear()
            self._epoch, self._wanted = epoch, (wanted, epoch)
            self._answers = frozenset(uid for uid, _ in wanted) if answered is None else frozenset(answered)
            for uid, address in wanted:
                if uid not in self._peers:
                    self._peers[uid] = _Peer(address, uid=uid, heard=Heard(now))
                elif is_new:
                    self._peers[uid].heard.heard_at = max(self._peers[uid].heard.heard_at, now)
            self._is_ping_due = True
        self.wake()

    def tell(self, status: str, *, at_once: bool = False) -> None:
        """What pings and answers say of this member from now on; `at_once`: in a ping that is sent now. A change of its
        head ends the `turn` of those who hear it."""
        self._status = status
        if at_once:
            self._is_ping_due = True
            self.wake()

    def heard(self, uid: str) -> Heard | None:
        """What is known of a member that is watched."""
        peer = self._peers.get(uid)
        return None if peer is None else peer.heard

    def answered(self) -> dict[str, float]:
        """Seconds since this member last answered a ping of each uid."""
        now = time.monotonic()
        return {uid: now - at for uid, at in list(self._answered.items())}

    def wake(self) -> None:
        """End a `turn` that waits."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    # --- for its own thread -------------------------------------------------------------------------------------------

    def turn(self, seconds: float) -> bool:
        """Send what is due, and take what comes, for at most so long; returns as soon as anything was heard that may
        matter: whether there was."""
        now = self._note_awake()
        self._drop_unwatched()
        if self._is_ping_due or now >= self._next_ping:
            self._is_ping_due, self._next_ping = False, now + self._interval
            for peer in list(self._peers.values()):
                self._ping(peer, now)
            self._look_after_callers(now)
        self._matters = False
        ready = self._selector.select(max(0.0, min(seconds, self._next_ping - now)))
        self._note_awake()
        for key, _ in ready:
            if key.data is None:
                self._accept_or_wake(key.fd)
            elif isinstance(key.data, _Peer):
                self._matters |= self._serve_peer(key.data)
            elif isinstance(key.data, _Canary):
                self._matters |= self._serve_canary(key.data)
            else:
                self._serve_caller(key.data)
        return self._matters

    def _note_awake(self) -> float:
        """The time. Nobody was silent while this process was suspended, or starved."""
        now = time.monotonic()
        if now - self._awake_at > 4 * self._interval + 0.5:
            with self._lock:
                for peer in self._peers.values():
                    peer.heard.heard_at = max(peer.heard.heard_at, now - self._interval)
                    if peer.heard.went_on_at is not None:
                        peer.heard.went_on_at = now
            for caller in self._callers.values():
                caller.heard_at = now
        self._awake_at = now
        return now

    def close(self) -> None:
        """End all connections."""
        self._canary.close()
        for peer in self._peers.values():
            self._forget(peer)
        for caller in list(self._callers.values()):
            self._hang_up(caller)
        self._selector.close()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1  # its number may be given to a file, and a last word still be told
        self._listener.close()

    def _close_in_child(self) -> None:
        peers = list(self._peers.values())
        connections = [self._listener, *(peer.socket for peer in peers if peer.socket)]
        connections += [peer.canary.socket for peer in peers if peer.canary and peer.canary.socket]
        for one in (*connections, *(caller.socket for caller in self._callers.values())):
            with contextlib.suppress(OSError):
                one.close()

    # --- to those that are watched ------------------------------------------------------------------------------------

    def _drop_unwatched(self) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None:
                return
            self._wanted = None
            uids = {uid for uid, _ in wanted[0]}
            gone = [self._peers.pop(uid) for uid in list(self._peers) if uid not in uids]
        for peer in gone:
            self._forget(peer)

    def _ping(self, peer: _Peer, now: float) -> None:
        if peer.socket is not None and not peer.is_open and now - peer.began_at > CONNECT_SECONDS:
            self._disconnect(peer)
        if peer.socket is None:
            if peer.heard.refused_at is None or now - peer.began_at > self._interval / 2:
                self._connect(peer)
            return
        if not peer.is_open:
            return
        self._seq += 1
        with self._lock:  # `watch` may begin another epoch
            peer.pings[self._seq] = through_suspends()
            while len(peer.pings) > 256:
                del peer.pings[next(iter(peer.pings))]
        self._send(peer, f"P {self._uid} {self._epoch or '-'} {self._seq} {self._status}\n")

    def _connect(self, peer: _Peer) -> None:
        peer.began_at, peer.is_proven = time.monotonic(), False
        peer.received, peer.unsent = b"", b""
        if self._begin(peer, CONNECT_SECONDS) == errno.ECONNREFUSED:
            self._note_refused(peer, peer.probed_at)

    def _begin(self, connection: _Connection, user_timeout: float = 0.0) -> int:
        """The error with which it has failed already; 0 where its end is to be seen.

        Args:
            user_timeout: seconds without an acknowledgement after which the kernel gives it up; 0: its own choice.
        """
        connection.probed_at, connection.is_open = through_suspends(), False
        family = socket.AF_INET6 if ":" in connection.address[0] else socket.AF_INET
        try:
            connection.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._warn_once(error)
            return error.errno or errno.EMFILE
        connection.socket.setblocking(False)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * user_timeout))
        code = connection.socket.connect_ex(connection.address)
        if code in (0, errno.EINPROGRESS):
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
            return 0
        self._disconnect(connection)
        return code

    def _note_refused(self, peer: _Peer, at: float) -> None:
        if peer.heard.refused_at is None:
            peer.heard.refused_at = at

    def _disconnect(self, connection: _Connection) -> None:
        if connection.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
        connection.socket, connection.is_open = None, False

    def _send(self, peer: _Peer, line: str) -> None:
        assert peer.socket is not None, "open"
        self._count(line)
        try:
            peer.unsent = _send(peer.socket, peer.unsent, line)
        except OSError:
            self._reconnect(peer)

    def _count(self, line: str) -> None:
        self.num_messages += 1
        self.num_bytes += len(line)

    def _reconnect(self, peer: _Peer) -> None:
        """Its end is closed: whether it is dead shows at once, or when its kernel, which closes the newest files first,
        has come to the listener and resets what that has accepted meanwhile. What goes on accepting and never answers
        may be a stranger, and is tried again with the next ping."""
        self._disconnect(peer)
        if peer.is_proven:
            peer.attempts_left = QUICK_ATTEMPTS
        if peer.attempts_left > 0:
            peer.attempts_left -= 1
            self._connect(peer)

    def _serve_peer(self, peer: _Peer) -> bool:
        """Whether something was heard that may matter at once."""
        if peer.socket is None:
            return False
        if not peer.is_open:
            code = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code != 0:
                self._disconnect(peer)
                if code == errno.ECONNREFUSED:
                    self._note_refused(peer, peer.probed_at)
                    return True
                return False
            peer.is_open = True
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
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
        heard = peer.heard
        if kind not in ("A", "N", "C") or not rest or rest[0] != peer.uid:
            self._note_refused(peer, peer.probed_at)  # another process has its port
            return
        peer.is_proven = True
        heard.heard_at, heard.has_answered, heard.refused_at = time.monotonic(), True, None
        if kind == "N" and heard.went_on_at is None and heard.epoch == self._epoch:
            heard.went_on_at = heard.heard_at
        if kind == "C" and peer.canary is None and rest[-1].isdecimal():
            peer.canary = _Canary((peer.address[0], int(rest[-1])), peer=peer)
            self._connect_canary(peer.canary)
        if kind == "A" and len(rest) == 4:
            _, epoch, seq, heard.status = rest
            heard.epoch, heard.went_on_at = epoch, None
            with self._lock:  # `watch` may begin another epoch
                sent_at = peer.pings.pop(int(seq), None)
                if sent_at is not None and epoch == self._epoch:
                    heard.pinged_at = max(sent_at, heard.pinged_at or sent_at)

    # --- to their canaries --------------------------------------------------------------------------------------------

    def _connect_canary(self, canary: _Canary) -> bool:
        """Whether that was refused at once, where it is a proof."""
        return self._judge_canary(canary, self._begin(canary))

    def _judge_canary(self, canary: _Canary, code: int) -> bool:
        """What became of an attempt to connect; whether it matters."""
        if code != errno.ECONNREFUSED or not canary.was_open:
            return False
        peer = canary.peer
        self._note_refused(peer, canary.probed_at)
        self._disconnect(peer)  # the rest of the process dies: what it still says is old, and its listener may accept
        peer.began_at = time.monotonic()
        return True

    def _serve_canary(self, canary: _Canary) -> bool:
        """Whether it is known now that the member is dead."""
        if canary.socket is None:
            return False
        if not canary.is_open:
            code = canary.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0 and not canary.was_open:
                canary.is_open = canary.was_open = True
                self._selector.modify(canary.socket, selectors.EVENT_READ, canary)
                return False
            self._disconnect(canary)  # it was refused, or something else has its port by now
            return self._judge_canary(canary, code)
        try:
            if canary.socket.recv(1):
                return False  # nobody writes there
        except BlockingIOError:
            return False
        except ConnectionError:
            pass  # as its end
        self._disconnect(canary)
        return self._connect_canary(canary)

    def _forget(self, peer: _Peer) -> None:
        self._disconnect(peer)
        if peer.canary is not None:
            self._disconnect(peer.canary)

    # --- from those that call -----------------------------------------------------------------------------------------

    def _accept_or_wake(self, fd: int) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
            return
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # The caller that cannot be accepted keeps the listener readable: `turn` would not wait any more.
                self._selector.unregister(self._listener)
                self._is_accepting = False
                self._warn_once(error)
                return
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # it is gone already, which the first read finds out
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = _Caller(connection, time.monotonic())
            self._callers[connection.fileno()] = caller
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"no connection to another member can be opened ({error.strerror}): it is tried with each ping; where "
                "files are too many, raise `ulimit -n`"
            )

    def _look_after_callers(self, now: float) -> None:
        if not self._is_accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._is_accepting = True
        for caller in list(self._callers.values()):
            if now - caller.heard_at > self._caller_timeout:
                self._hang_up(caller)

    def _hang_up(self, caller: _Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.socket)
        caller.socket.close()

    def _serve_caller(self, caller: _Caller) -> None:
        try:
            data = caller.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(caller.received) > LONGEST_LINE:
            self._hang_up(caller)
            return
        caller.heard_at = time.monotonic()
        *lines, caller.received = (caller.received + data).split(b"\n")
        try:
            for line in lines:
                answer = self._answer(line.decode(errors="replace"))
                self._count(answer)
                caller.unsent = _send(caller.socket, caller.unsent, answer)
        except OSError:
            self._hang_up(caller)

    def _answer(self, line: str) -> str:
        kind, *rest = line.split(" ", 4)
        if kind == "C" and self._canary.port is not None:
            return f"C {self._uid} {self._canary.port}\n"
        if kind != "P" or len(rest) < 3:
            return f"N {self._uid}\n"
        uid, epoch, seq = rest[:3]
        status = rest[3] if len(rest) == 4 else ""
        with self._lock:
            if epoch != self._epoch or uid not in self._answers:
                return f"N {self._uid}\n"
            self._answered[uid] = time.monotonic()
            peer = self._peers.get(uid)
        if peer is not None:
            self._matters |= head(peer.heard.status) != head(status)
            peer.heard.status, peer.heard.epoch, peer.heard.went_on_at = status, epoch, None
            peer.heard.heard_at = time.monotonic()
        return f"A {self._uid} {epoch} {seq} {self._status}\n"


def head(status: str) -> str:
    """What is passed on at once where it changes."""
    return status.partition(" ")[0]


def _send(connection: socket.socket, unsent: bytes, line: str) -> bytes:
    """Send what is left of an earlier line, or else this one; what is left then. Who does not read loses lines, never a
    part of one. Raises: OSError."""
    data = unsent or line.encode()
    try:
        return data[connection.send(data) :]
    except BlockingIOError:
        return unsent


def through_suspends() -> float:
    """A monotonic clock that goes on while the machine is suspended, and others may train."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
