"""Form and end the process group of one World, and break it off."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from elastic_train.collectives import GROUP_TIMEOUT, broken_off_by
from elastic_train.errors import FormationFailed, UsageError, first_line
from elastic_train.formed_group import FormedGroup, install
from elastic_train.protocol.names import look_up
from elastic_train.system import close_sockets_at, open_sockets
from elastic_train.torchrun import split_endpoint
from elastic_train.world import World

FORM_TIMEOUT = timedelta(seconds=1)
"""A member that dies within the milliseconds in which the group is made costs this much, five times as much where it
had published its address: gloo waits for the connection that it would have made for five timeouts, with no socket yet
that could be shut."""
ABORT_SECONDS = 60.0
"""that NCCL's abort is waited for; it may wait until every rank aborts (NVIDIA/nccl#1013)"""
KEEP_SECONDS = 1.0
"""that the connections of a group that is broken off stay, and that gloo has to end; most often it takes a few ms"""


class GroupSockets:
    """The sockets of the present process group, so that another thread can break off what blocks on them.

    gloo has no abort (pytorch/pytorch#130345): `shutdown(2)` from a side thread makes the blocked collective raise, and
    on the store client that the group was made with, a blocked `init_process_group`. The sockets are those that
    appeared while the group was made; a number is only touched while it still names the same socket. Listening ones
    are left alone: gloo aborts the process when its `accept` fails.

    A send of gloo's that meets a broken connection hangs (collectives.py). So that few do, only the reading ends, and
    the connection stays until `release`, or for KEEP_SECONDS, in which the others break off their own. Where all
    members are alive, votes end a world.

    NCCL has an abort, after which what was under way ends with garbage and no error: whoever uses the result of a
    collective asks `is_shut` first.

    A group that is over is kept until `release`: gloo takes 20 to 40 ms to end one, for its threads look up every
    10 ms, and the next world need not wait for that.

    Args:
        spared_port: of the store that this process serves: its callers wait for answers, whatever becomes of a group.
    """

    def __init__(self, spared_port: int | None = None) -> None:
        self._spared_port = spared_port
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._sockets: dict[int, str] = {}
        self._nccl: dist.ProcessGroup | None = None
        self._over: list[dist.ProcessGroup] = []
        self._kept: dict[str, socket.socket] = {}
        """connections that were broken off, and that the others may still write to"""
        self._shut_at: float | None = None
        """when the present group was broken off, on the monotonic clock"""
        self._hangs = False
        self.has_nccl = False
        """whether the present group, or the last one, has NCCL in it"""
        self._abort: threading.Thread | None = None
        # A forked DataLoader process holds copies, and would hide this process's death from its peers.
        os.register_at_fork(after_in_child=self._close_all)

    @property
    def is_shut(self) -> bool:
        """Whether the present group was broken off."""
        return self._shut_at is not None

    def require_hope(self) -> None:
        """As `collectives.Breakable`."""
        if self._shut_at is not None and time.monotonic() - self._shut_at > KEEP_SECONDS:
            self._hangs = True
            raise FormationFailed("the process group was broken off, and Gloo does not end what was under way")

    def begin(self) -> None:
        """What is opened from now on belongs to the group that is being made."""
        self.release()
        with self._lock:
            self._before, self._shut_at, self._hangs = open_sockets(), None, False

    def complete(self, nccl: dist.ProcessGroup | None = None) -> None:
        """The group stands; what is opened from now on does not belong to it. `nccl` is it, if NCCL is in it."""
        with self._lock:
            self._sockets, self._before, self._nccl = self._present(), None, nccl
            self.has_nccl = nccl is not None

    def take(self, sockets: dict[int, str]) -> None:
        """A group is to be installed that was formed with these."""
        self.release()
        with self._lock:
            self._sockets, self._before, self._shut_at, self._hangs = sockets, None, None, False
            self.has_nccl = False

    def forget(self, group: dist.ProcessGroup | None = None) -> None:
        """The group is over; torch does not know it any more. NCCL's ends at once."""
        with self._lock:
            if self._hangs:
                # A thread of it hangs, for which its end would wait: it has none, not even at the end of the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            elif group is not None and self._nccl is None:
                self._over.append(group)
            self._sockets, self._before, self._nccl = {}, None, None

    def release(self) -> None:
        """Let go of the groups that are over, on a thread of its own, and of their connections. An exception that holds
        a group, by the frames that it went through, should be gone by then."""
        self._close_kept()
        if self._over:
            over, self._over = self._over, []
            # No daemon: a process that ends while a group does is aborted.
            threading.Thread(target=over.clear, name="release").start()

    def _close_kept(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, {}
        for connection in kept.values():
            connection.close()

    def shut(self) -> None:
        """Break off this member's part in every collective. Called from any thread; does not block."""
        if not self._kept and not sys.is_finalizing():  # then no thread starts, and all is closed in a moment
            timer = threading.Timer(KEEP_SECONDS, self._close_kept)
            timer.daemon = True
            timer.start()
        with self._lock:
            if self._shut_at is None:
                self._shut_at = time.monotonic()
            if self._nccl is not None:
                # On a thread of its own: it may wait until every rank aborts (NVIDIA/nccl#1013).
                self._abort = threading.Thread(target=self._nccl.abort, name="abort", daemon=True)
                self._abort.start()
                self._nccl = None
            for fd, name in self._present().items():
                with suppress(OSError):
                    # The number may be given to another file between look and use, a copy may not.
                    copy = os.dup(fd)
                    if os.readlink(f"/proc/self/fd/{copy}") != name:
                        os.close(copy)
                        continue
                    connection = socket.socket(fileno=copy)
                    is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if is_listening or name in self._kept or self._is_spared(connection):
                        connection.close()
                        continue
                    self._kept[name] = connection
                    connection.shutdown(socket.SHUT_RD)

    def wait_for_abort(self, seconds: float = ABORT_SECONDS) -> None:
        """Until NCCL's abort, if there was one, has ended: torch would destroy what it still works on. In torch 2.15
        neither takes a lock. Blocks for `seconds` at most."""
        with self._lock:
            abort, self._abort, self._nccl = self._abort, None, None  # from here on there is nothing to abort
        if abort is not None:
            abort.join(seconds)

    def _is_spared(self, connection: socket.socket) -> bool:
        is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
        return is_ip and connection.getsockname()[1] == self._spared_port

    def _present(self) -> dict[int, str]:
        if self._before is None:
            return self._sockets
        return {fd: name for fd, name in open_sockets().items() if self._before.get(fd) != name}

    def _close_all(self) -> None:
        for connection in self._kept.values():
            connection.close()
        for fd, name in self._sockets.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:
                    os.close(fd)


class GroupStoreServer:
    """A TCPStore that this process serves, on one address and a free port: what it says to the members of its world is
    there, and process groups meet there of which it is rank 0."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = (host, int(listener.getsockname()[1]))
        # A forked DataLoader process would accept connections in the place of a dead parent, and keep those open on
        # which others wait for its answers. Only as long as this server is there: others may get its port.
        server = weakref.ref(self)
        port = self.address[1]
        os.register_at_fork(after_in_child=lambda: close_sockets_at(port) if server() is not None else None)
        fd = listener.detach()
        self.store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, timeout=FORM_TIMEOUT, master_listen_fd=fd
        )

    def group_store(self, world: World, timeout: timedelta = FORM_TIMEOUT) -> Store:
        """The store of the world's rank 0, on a connection of its own, so that it can be broken off.

        Raises:
            FormationFailed: rank 0 is dead.
        """
        first = world.members[0]
        assert first.store is not None, "every member serves one"
        if world.rank > 0:
            host, port = first.store
            try:
                socket.create_connection(first.store, FORM_TIMEOUT.total_seconds()).close()
            except OSError as error:  # TCPStore would try for seconds
                raise FormationFailed(f"{first.name} (rank 0) does not answer at {host}:{port}") from error
        return TCPStore(*first.store, is_master=False, wait_for_workers=False, timeout=timeout)


def require_unbroken(sockets: GroupSockets, device: torch.device | None = None) -> None:
    """For after a collective whose result is about to be used: NCCL's, once aborted, end with garbage and no error.

    Args:
        device: blocks until it has done what it was given, where the result was not read yet; None where it was.

    Raises: FormationFailed where the process group was broken off.
    """
    if device is not None and sockets.has_nccl and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    if sockets.is_shut:
        raise FormationFailed("the process group was broken off")


@contextmanager
def process_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    timeout: timedelta = GROUP_TIMEOUT,
    formed: FormedGroup | None = None,
    device: torch.device | None = None,
) -> Iterator[None]:
    """The default process group of `world` inside the block; destroyed on the way out, whatever happened.

    Every member calls it; `make_store` gives a connection of its own, with a prefix of this generation alone. Blocks
    until all have, FORM_TIMEOUT at most; not at all where the group is `formed` already, by all of them. Inside the
    block collectives wait `timeout`, until `set_group_timeout`. `device` is this worker's: NCCL would else take the one
    of LOCAL_RANK, or of a rank that changes from world to world.

    Raises:
        FormationFailed: not all members connected in time.
    """
    # torch's default arguments `group=group.WORLD`, bound when a first DDP imports torch.distributed.nn.functional,
    # would keep the first group's sockets open for ever; imported before it exists, they bind None.
    import torch._dynamo  # noqa: F401

    has_nccl = "nccl" in backend
    if has_nccl:
        # 1 is what torchrun's agent sets: NCCL's watchdog would kill this process when a peer is lost, as with 3; with
        # 2 it would abort, and nobody knew. 0 leaves the abort to us, as torch's `_abort_process_group` asks for.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    excepthook = sys.excepthook  # init_process_group wraps it each time and never puts it back
    try:
        if formed is None:
            _make_group(world, make_store, backend, sockets, device if has_nccl else None)
        else:
            sockets.take(formed.sockets)
            install(formed)
        set_group_timeout(timeout)
        with nullcontext() if has_nccl else broken_off_by(sockets):
            yield
    except BaseException:
        sockets.shut()  # whatever still holds the group, `release` is to close its connections
        raise
    finally:
        group = dist.group.WORLD
        if group is None:
            _count_groups_anew()
        sockets.wait_for_abort()
        dist.destroy_process_group()
        sockets.forget(group)
        sys.excepthook = excepthook


def _make_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    device: torch.device | None,
) -> None:
    """Raises: FormationFailed, as `process_group`."""
    sockets.begin()
    try:
        dist.init_process_group(
            backend,
            store=make_store(),
            rank=world.rank,
            world_size=world.world_size,
            timeout=FORM_TIMEOUT,
            device_id=device,
        )
        sockets.complete(dist.group.WORLD if "nccl" in backend else None)
        # Until here a member that died after the list was made costs FORM_TIMEOUT only. No barrier(), which would be
        # NCCL's where a device is given, and have no timeout.
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        raise FormationFailed(
            f"no process group of {world.world_size} workers within {FORM_TIMEOUT.total_seconds():.0f} s: "
            f"{first_line(error)}"
        ) from error


def _count_groups_anew() -> None:
    """Make a group of this process alone; its end has torch count from 0 again.

    torch numbers the groups that a process has begun to make, and the number is in the keys by which the members find
    each other. Where one has failed and another had not begun, they would look under different keys for ever.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=FORM_TIMEOUT)


def set_group_timeout(timeout: timedelta) -> None:
    """`torch.distributed.distributed_c10d.set_timeout` where torch has it (2.15), else its private older name."""
    setter = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from the communication library rather than from the code that is trained.

    gloo has no class of its own: its errors are RuntimeErrors that name its source file.
    """
    if isinstance(error, dist.DistError | FormationFailed):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Gloo" in text or "NCCL" in text)


def choose_device(requested: str, local_rank: int) -> torch.device:
    """This worker's device: by `local_rank`, wrapping round where local ranks share GPUs."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; auto takes the CPU then")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(device: torch.device) -> str:
    """NCCL for the tensors of a GPU that nobody else in the world uses, which rules.py judges; gloo for the CPU's."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def gpu_of(device: torch.device) -> str | None:
    """The UUID of a CUDA device; None for the CPU. A launcher may have given each worker one GPU, number 0 to all."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def address_towards(host: str, port: int, warn: Callable[[str], None]) -> str:
    """The local IP address from which `host` is reached; 127.0.0.1 where it cannot be found out. Blocks for
    LOOK_UP_SECONDS where no name server answers.

    A host name that leads to the loopback interface, as Debian's 127.0.1.1 does on the very host, is meant for others
    too: then it is the address of the default route, if there is one.

    Args:
        warn: told where the name leads nowhere: the address may be wrong.
    """
    default = "127.0.0.1"
    with suppress(OSError):
        default = source_address("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737), which is nobody
    try:
        ip = look_up(host)[0]
    except (OSError, ValueError) as error:
        warn(
            f"the name in {host}:{port} leads nowhere ({first_line(error)}): others are told {default}, the address of "
            "the default route; check the name server, or give an IP address instead of the name"
        )
        return default
    with suppress(OSError):  # there may be no route
        found = source_address(ip, port)
        is_loopback = ipaddress.ip_address(found).is_loopback
        if not is_loopback or host in ("localhost", "::1") or host.startswith("127."):
            return found
    return default


def address_towards_any(endpoints: Sequence[str], warn: Callable[[str], None]) -> str:
    """The local IP address towards the first of several HOST:PORT that is reached by one that others can use too.
    Blocks and warns as `address_towards`, for each of them."""
    found = [address_towards(*split_endpoint(endpoint), warn) for endpoint in endpoints]
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), found[0])


def source_address(ip: str, port: int) -> str:
    """The local address of the route to an address. Sends nothing. Raises OSError where there is none."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((ip, port))
        return str(asker.getsockname()[0])


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface that has this address, unless GLOO_SOCKET_IFNAME says otherwise.

    gloo would take the address that the host name resolves to, often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for _, name in socket.if_nameindex():
        if interface_address(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def interface_address(name: str) -> str | None:
    """The first IPv4 address of a network interface; None if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR, netdevice(7)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
