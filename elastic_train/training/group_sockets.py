"""The sockets of the process group that reduces a step, so that another thread can break it off."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from elastic_train.errors import FormationFailed
from elastic_train.system import call_in_children, copy_of_socket, name_of_socket, open_sockets, opened_since, starts
from elastic_train.world import Address

ABORT_SECONDS = 60.0
"""timeout for NCCL's abort, which may wait until every rank aborts (NVIDIA/nccl#1013)"""
ENQUEUE_SECONDS = 1.0
"""how long an abort waits until the training thread gives NCCL no more work"""
KEEP_SECONDS = 0.5
"""how long a broken-off group's connections stay, and gloo may take to end; mostly it takes a few ms"""


END_SECONDS = 60
"""timeout for the interpreter's end, if a thread is left behind"""


_left_behind: list[object] = []
"""groups in which a thread hangs, and threads that hang; never freed"""


def leave_behind(what: object) -> None:
    """Keep an object whose thread hangs in torch's C++. A thread that returns while the interpreter ends would abort
    the process (std::terminate), and a finished worker would count as failed. From now on that is prevented."""
    if not _left_behind:
        atexit.register(_end_in_spite_of_threads)
    _left_behind.append(what)


def _end_in_spite_of_threads() -> None:
    """Let the interpreter end with its own exit code, which cannot be read here. A thread that would abort the process
    pauses instead, and no library's exit handler frees what a thread still uses."""
    libc, libstdcpp = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    libc.alarm(END_SECONDS)  # std::terminate may have a good reason
    libstdcpp._ZSt13set_terminatePFvvE(libc.pause)
    libc.on_exit(libc._exit, None)


class GroupSockets:
    """The sockets of the present process group, so that another thread can break off what blocks on them.

    gloo has no abort (pytorch/pytorch#130345). `shutdown(2)` from a side thread makes a blocked collective raise; on
    the store client of the group it does so for a blocked `init_process_group`. The sockets are those that appeared
    while the group was made; once it stands, those of other threads are left out (`keep_only`). A descriptor is
    touched only while it still names the same socket. Listening sockets are left alone: gloo aborts the process when
    its `accept` fails.

    gloo groups of some ranks that user code makes are broken off with it. They are recognised as later connections to
    a peer's host with all the options that gloo sets (`_is_as_gloo_sets`).

    A gloo send on a broken connection hangs (collectives.py). To make this rare only reading is shut down. The
    connection stays until `release`, or for KEEP_SECONDS, in which the peers break off theirs. While all members are
    alive, votes end a world.

    NCCL has an abort, after which open collectives end with garbage and no error. So a caller calls
    `require_unbroken` before it uses a result. The abort takes half a second, the polling interval of NCCL's threads
    (2.28). NCCL's own sockets are not among those here.

    A group that is over is kept until `release`: gloo takes 20 to 40 ms to end one, because its threads poll every
    10 ms, and the next world need not wait for that.

    Args:
        spared_port: of the store that this process serves; its clients need answers even when a group is broken off.
    """

    def __init__(self, spared_port: int | None = None) -> None:
        self._spared_port = spared_port
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._sockets: dict[int, str] = {}
        self._of_store: frozenset[str] = frozenset()
        self._of_others: frozenset[str] = frozenset()
        """sockets that were open when the group stood, and connections of groups that were formed ahead"""
        self._nccl: dist.ProcessGroup | None = None
        self._over: list[dist.ProcessGroup] = []
        self._kept: dict[str, socket.socket] = {}
        """broken-off connections, to which peers may still write"""
        self._closing: threading.Timer | None = None
        """closes the connections in `_kept`"""
        self._shut_at: float | None = None
        """when the present group was broken off, on the monotonic clock"""
        self._hangs = False
        self.has_nccl = False
        """whether the present group, or the last one, has NCCL in it"""
        self._abort: threading.Thread | None = None
        self._is_waiting = threading.Event()
        # A forked DataLoader process holds copies, which would hide this process's death from its peers.
        call_in_children(self._close_all)

    @property
    def is_shut(self) -> bool:
        """Whether the present group was broken off."""
        return self._shut_at is not None

    def require_hope(self) -> None:
        """Raises: FormationFailed: the group was broken off, and its open collectives do not end."""
        if self._shut_at is not None and time.monotonic() - self._shut_at > KEEP_SECONDS:
            self._hangs = True
            raise FormationFailed("the process group was broken off, and Gloo does not end what was under way")

    def require_unbroken(self, device: torch.device | None = None) -> None:
        """Check the group before the result of a collective is used: aborted ones of NCCL give garbage and no error.

        Args:
            device: block until its queued work is done; None if the result was read already.

        Raises: FormationFailed: the process group was broken off.
        """
        if device is not None and self.has_nccl and not torch.cuda.is_current_stream_capturing():
            with self.waiting():
                torch.cuda.current_stream(device).synchronize()
        if self.is_shut:
            raise FormationFailed("the process group was broken off")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as a wait of the training thread, for its device or an abort, in which NCCL gets no work. At
        its end wait for an abort that has begun, for `ABORT_SECONDS` at most: new work would be freed under it."""
        self._is_waiting.set()
        try:
            yield
        finally:
            self._is_waiting.clear()
            with self._lock:  # an abort that another thread is about to begin has begun then
                abort = self._abort
            if abort is not None:
                abort.join(ABORT_SECONDS)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark the block in which the training thread reads a batch. Raises, at its end: FormationFailed: NCCL's group
        was broken off; further work would go to a communicator that is being freed."""
        if not self.has_nccl:
            yield
            return
        with self.waiting():
            yield
        self.require_unbroken()

    def begin(self) -> None:
        """Begin a group: sockets opened from now on belong to it."""
        self.release()
        with self._lock:
            self._before, self._shut_at, self._hangs = open_sockets(), None, False

    def note_store(self, port: int) -> None:
        """Record the present connections to this port as those to the new group's store."""
        with self._lock:
            found = self._present().items()
            self._of_store = frozenset(name for fd, name in found if (peer := ends_of(fd, name)[1]) and peer[1] == port)

    def complete(self, nccl: dist.ProcessGroup | None = None) -> None:
        """Record that the group stands, except for NCCL's part; later sockets do not belong to it. `nccl` is the group,
        if NCCL is in it."""
        with self._lock:
            assert self._before is not None, "it has begun"
            found = open_sockets()
            self._sockets = opened_since(self._before, found)
            self._of_others, self._before = frozenset(found.values()), None
            self._nccl, self.has_nccl = nccl, nccl is not None

    def listening(self) -> list[Address]:
        """Return the addresses at which the group's peers may have connected to this process."""
        return [one for fd, name in self._sockets.items() if (one := listening_address(fd, name)) is not None]

    def keep_only(self, theirs: Sequence[Address], num_peers: int) -> None:
        """Keep only the group's sockets: connections to a listening address of a member, and those to its store. Other
        threads may have opened sockets meanwhile: a store's client, a snapshot's upload.

        Args:
            theirs: as `listening`, of all ranks.
            num_peers: least number of a rank's connections. If fewer are found, all sockets stay.
        """
        mine = self.listening()
        found = set(connections_at(mine, theirs).values())
        with self._lock:
            kept = {fd: name for fd, name in self._sockets.items() if name in found}
            if len(kept) >= num_peers:
                own_store = {fd: name for fd, name in self._sockets.items() if name in self._of_store}
                self._sockets = kept | own_store

    def take(self, sockets: dict[int, str]) -> None:
        """Take the sockets of a group that was formed ahead and is installed now."""
        self.release()
        with self._lock:
            self._sockets, self._before, self._shut_at, self._hangs = sockets, None, None, False
            self._of_others, self.has_nccl = frozenset(open_sockets().values()), False

    def spare(self, sockets: dict[int, str]) -> None:
        """Exclude the sockets of a group that stands beside the present one, to be installed later. From any thread.
        Before it stands it is broken off with the present one, and is then not installed."""
        with self._lock:
            self._of_others |= set(sockets.values())

    def forget(self, group: dist.ProcessGroup | None = None) -> None:
        """Record that the group is over; torch has dropped it."""
        with self._lock:
            if self._hangs:
                # Its destructor would wait for a thread that hangs. So it never runs, not even at the process's end.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                leave_behind(group)
            elif group is not None:
                self._over.append(group)
            self._sockets, self._before, self._nccl = {}, None, None

    def release(self) -> None:
        """Free the groups that are over, on a separate thread, and close their connections. No exception may hold a
        group by then through its frames."""
        self._close_kept()
        if self._over:
            over, self._over = self._over, []
            # No daemon: a process that ends while a group is being freed is aborted.
            threading.Thread(target=over.clear, name="release").start()

    def _close_kept(self) -> None:
        if self._closing is not None:
            self._closing.cancel()  # connections of a later group have a timer of their own
        with self._lock:
            kept, self._kept = self._kept, {}
        for connection in kept.values():
            connection.close()

    def shut(self) -> None:
        """Break off this member's part in every collective. Called from any thread; does not block."""
        if not self._kept and not sys.is_finalizing():  # while finalizing no thread starts, and all closes soon
            self._closing = threading.Timer(KEEP_SECONDS, self._close_kept)
            self._closing.daemon = True
            starts(self._closing)
        with self._lock:
            if self._shut_at is None:
                self._shut_at = time.monotonic()
            if self._nccl is not None:
                self.abort(self._nccl)
                self._nccl = None
            for fd, name in (groups_beside(self._sockets, self._of_others) | self._present()).items():
                with suppress(OSError):
                    connection = copy_of_socket(fd, name)
                    is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if is_listening or name in self._kept or self._is_spared(connection):
                        connection.close()
                        continue
                    self._kept[name] = connection
                    connection.shutdown(socket.SHUT_RD)

    def abort(self, nccl: dist.ProcessGroup) -> None:
        """Abort NCCL on a separate thread: it may wait until every rank aborts (NVIDIA/nccl#1013)."""

        before = self._abort

        def abort() -> None:
            if before is not None:
                before.join()
            self._is_waiting.wait(ENQUEUE_SECONDS)
            with suppress(RuntimeError):  # while NCCL connects, torch waits a second for it; so does the group's end
                nccl.abort()

        self._abort = threading.Thread(target=abort, name="abort", daemon=True)
        self._abort.start()

    def wait_for_abort(self) -> None:
        """Wait until NCCL's abort, if any, has ended: torch would destroy what it still uses. Blocks for
        `ABORT_SECONDS` at most."""
        with self._lock:
            abort, self._abort, self._nccl = self._abort, None, None  # nothing is left to abort
        if abort is not None:
            with self.waiting():
                abort.join(ABORT_SECONDS)

    def _is_spared(self, connection: socket.socket) -> bool:
        is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
        return is_ip and connection.getsockname()[1] == self._spared_port

    def _present(self) -> dict[int, str]:
        if self._before is None:
            return self._sockets
        return opened_since(self._before, open_sockets())

    def _close_all(self) -> None:
        for connection in self._kept.values():
            connection.close()
        for fd, name in self._sockets.items():
            with suppress(OSError):
                if name_of_socket(fd) == name:
                    os.close(fd)


def ends_of(fd: int, name: str) -> tuple[Address | None, Address | None]:
    """Return the addresses of one of `open_sockets`: (own, the peer's); no peer's if it listens. Neither if it is no IP
    connection, or is over."""
    with suppress(OSError), copy_of_socket(fd, name) as copy:
        if copy.family in (socket.AF_INET, socket.AF_INET6):
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return copy.getsockname()[:2], None if is_listening else copy.getpeername()[:2]
    return None, None


def listening_address(fd: int, name: str) -> Address | None:
    """Return the address at which one of `open_sockets` listens, or None."""
    own, peer = ends_of(fd, name)
    return own if peer is None else None


def connections_at(mine: Sequence[Address], theirs: Sequence[Address]) -> dict[int, str]:
    """Return this process's connections that were accepted at one of `mine`, or made to one of `theirs`."""
    ends = ((fd, name, *ends_of(fd, name)) for fd, name in open_sockets().items())
    return {fd: name for fd, name, own, peer in ends if peer is not None and (own in mine or peer in theirs)}


def groups_beside(sockets: Mapping[int, str], others: Collection[str]) -> dict[int, str]:
    """Connections to the hosts to which these `sockets` of a group lead, as gloo makes them; those of `others` are
    none."""
    hosts = {peer[0] for fd, name in sockets.items() if (peer := ends_of(fd, name)[1])}
    new = {fd: name for fd, name in open_sockets().items() if name not in others} if hosts else {}
    theirs = ((fd, name) for fd, name in new.items() if (peer := ends_of(fd, name)[1]) and peer[0] in hosts)
    return {fd: name for fd, name in theirs if _is_as_gloo_sets(fd, name)}


def _is_as_gloo_sets(fd: int, name: str) -> bool:
    """Whether a connection has one time limit for sends and receives, and the rest that gloo's have at both ends. The
    client of a database may set limits, but has no use for SO_REUSEADDR."""
    with suppress(OSError), copy_of_socket(fd, name) as copy:
        switches = ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.IPPROTO_TCP, socket.TCP_NODELAY))
        limits = {copy.getsockopt(socket.SOL_SOCKET, one, 16) for one in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)}
        return len(limits) == 1 and any(limits.pop()) and all(copy.getsockopt(*switch) for switch in switches)
    return False
