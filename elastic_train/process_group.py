"""Form and end the process group of one World, and the few collectives that recovery needs."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from elastic_train.errors import FormationFailed, UsageError, first_line
from elastic_train.torchrun import split_endpoint
from elastic_train.world import World

BROADCAST_CHUNK_BYTES = 64 * 2**20
"""gloo moves a broadcast as one buffer; chunks bound the extra memory"""


FORM_TIMEOUT = timedelta(seconds=1)
"""A member that dies within the milliseconds in which the group is made costs this much, five times as much where it
had published its address: gloo waits for the connection that it would have made for five timeouts, with no socket yet
that could be shut."""
GROUP_TIMEOUT = timedelta(minutes=30)
"""the last resort in training; the watcher is there to be faster"""


class GroupSockets:
    """The sockets of the present process group, so that another thread can break off what blocks on them.

    gloo has no abort (pytorch/pytorch#130345): `shutdown(2)` from a side thread makes the blocked collective raise, and
    on the store client that the group was made with, a blocked `init_process_group`. The sockets are those that
    appeared while the group was made; a number is only touched while it still names the same socket. Listening ones
    are left alone: gloo aborts the process when its `accept` fails.

    Only for a collective that waits for a lost peer. When a connection breaks, gloo (`Pair::signalException` in
    transport/tcp/pair.cc) passes over the sends that it has queued: one that meets the broken connection is never
    ended, and its collective waits in `waitSend` until GROUP_TIMEOUT. Where all members are alive, votes end a world.

    NCCL has an abort, after which what was under way ends with garbage and no error: whoever uses the result of a
    collective asks `is_shut` first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._sockets: dict[int, str] = {}
        self._nccl: dist.ProcessGroup | None = None
        self.is_shut = False
        """whether the present group was broken off"""
        # A forked DataLoader process holds copies, and would hide this process's death from its peers.
        os.register_at_fork(after_in_child=self._close_all)

    def begin(self) -> None:
        """What is opened from now on belongs to the group that is being made."""
        with self._lock:
            self._before, self.is_shut = open_sockets(), False

    def complete(self, nccl: dist.ProcessGroup | None = None) -> None:
        """The group stands; what is opened from now on does not belong to it. `nccl` is it, if NCCL is in it."""
        with self._lock:
            self._sockets, self._before, self._nccl = self._present(), None, nccl

    def forget(self) -> None:
        """The group is gone."""
        with self._lock:
            self._sockets, self._before, self._nccl = {}, None, None

    def shut(self) -> None:
        """Break off every connection. Called from any thread; does not block."""
        with self._lock:
            self.is_shut = True
            if self._nccl is not None:
                # On a thread of its own: it may wait until every rank aborts (NVIDIA/nccl#1013).
                threading.Thread(target=self._nccl.abort, name="abort", daemon=True).start()
                self._nccl = None
            for fd, name in self._present().items():
                with suppress(OSError):
                    # The number may be given to another file between look and use, a copy may not.
                    copy = os.dup(fd)
                    if os.readlink(f"/proc/self/fd/{copy}") != name:
                        os.close(copy)
                        continue
                    with socket.socket(fileno=copy) as connection:
                        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            connection.shutdown(socket.SHUT_RDWR)

    def _present(self) -> dict[int, str]:
        if self._before is None:
            return self._sockets
        return {fd: name for fd, name in open_sockets().items() if self._before.get(fd) != name}

    def _close_all(self) -> None:
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
        # which others wait for its answers.
        os.register_at_fork(after_in_child=lambda: close_sockets_at(self.address[1]))
        fd = listener.detach()
        self.store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, timeout=FORM_TIMEOUT, master_listen_fd=fd
        )

    def group_store(self, world: World) -> Store:
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
        return TCPStore(*first.store, is_master=False, wait_for_workers=False, timeout=FORM_TIMEOUT)


def require_unbroken(sockets: GroupSockets) -> None:
    """For after a collective whose result is about to be used: NCCL's, once aborted, end with garbage and no error.

    Raises: FormationFailed where the process group was broken off.
    """
    if sockets.is_shut:
        raise FormationFailed("the process group was broken off")


def open_sockets() -> dict[int, str]:
    """The sockets of this process: number -> `socket:[inode]`; none on macOS, where a world of one has none to shut."""
    found: dict[int, str] = {}
    if sys.platform != "linux":
        return found
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found


def close_sockets_at(port: int) -> None:
    """This process's copies of the sockets that have this port here."""
    for fd in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                os.close(fd)


@contextmanager
def process_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    timeout: timedelta = GROUP_TIMEOUT,
) -> Iterator[None]:
    """The default process group of `world` inside the block; destroyed on the way out, whatever happened.

    Every member calls it; `make_store` gives a connection of its own, with a prefix of this generation alone. Blocks
    until all have, FORM_TIMEOUT at most. Inside the block collectives wait `timeout`, until `set_group_timeout`.

    Raises:
        FormationFailed: not all members connected in time.
    """
    # torch's default arguments `group=group.WORLD`, bound when a first DDP imports torch.distributed.nn.functional,
    # would keep the first group's sockets open for ever; imported before it exists, they bind None.
    import torch._dynamo  # noqa: F401

    has_nccl = "nccl" in backend
    if has_nccl and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        # 1 is what torchrun's agent sets: NCCL's watchdog would kill this process when a peer is lost. 0 leaves the
        # abort to us, as torch's `_abort_process_group` asks for.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    excepthook = sys.excepthook  # init_process_group wraps it each time and never puts it back
    sockets.begin()
    try:
        try:
            dist.init_process_group(
                backend, store=make_store(), rank=world.rank, world_size=world.world_size, timeout=FORM_TIMEOUT
            )
            sockets.complete(dist.group.WORLD if has_nccl else None)
            dist.barrier()  # until here a member that died after the list was made costs FORM_TIMEOUT only
            set_group_timeout(timeout)
        except RuntimeError as error:
            raise FormationFailed(
                f"no process group of {world.world_size} workers within {FORM_TIMEOUT.total_seconds():.0f} s: "
                f"{first_line(error)}"
            ) from error
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sockets.forget()
        sys.excepthook = excepthook


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


def address_towards(host: str, port: int) -> str:
    """The local IP address from which `host` is reached; 127.0.0.1 where it cannot be found out.

    A host name that leads to the loopback interface, as Debian's 127.0.1.1 does on the very host, is meant for others
    too: then it is the address of the default route, if there is one.
    """
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        found = source_address(family, target)
        is_loopback = ipaddress.ip_address(found).is_loopback
        if not is_loopback or host in ("localhost", "::1") or host.startswith("127."):
            return found
    with suppress(OSError):
        return source_address(socket.AF_INET, ("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737), which is nobody
    return "127.0.0.1"


def address_towards_any(endpoints: Sequence[str]) -> str:
    """The local IP address towards the first of several HOST:PORT that is reached by one that others can use too."""
    found = [address_towards(*split_endpoint(endpoint)) for endpoint in endpoints]
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), found[0])


def source_address(family: int, target: Any) -> str:
    """The local address of the route to `target`. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as asker:
        asker.connect(target)
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


def broadcast_bytes(data: bytes | None, source: int, before_sending: Callable[[], None] | None = None) -> bytes:
    """`data` of rank `source` on every rank; the others pass None. Whole, or an exception.

    `before_sending` is called on the source when the others know how much is to come, and wait for it.
    """
    is_source = dist.get_rank() == source
    size = torch.tensor([len(data) if is_source and data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, source)
    total = int(size)
    if total == 0:
        return b""
    if is_source and before_sending is not None:
        before_sending()
    buffer = bytearray(data) if is_source and data is not None else bytearray(total)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, total, BROADCAST_CHUNK_BYTES):
        dist.broadcast(whole[start : start + BROADCAST_CHUNK_BYTES], source)
    return bytes(buffer)


def gather_json(value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON can say), by rank. Every rank calls it; nothing is unpickled."""
    data = array.array("B", json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, mine)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
