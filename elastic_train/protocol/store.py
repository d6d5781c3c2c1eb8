"""The key-value store that members meet at, as the few operations that membership needs.

An implementation answers each call at once or raises StoreUnreachable; no call waits for a key. Values are text; an
empty one is as good as none to `create` and `swap`. There is no deletion and no listing: a TCPStore cannot list, and
keys carry the generation that they belong to.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store, TCPStore

from elastic_train.errors import StoreUnreachable, first_line


class Notes(Protocol):
    """What is written down for others to read."""

    def get(self, key: str) -> str | None:
        """The value, None where there is none."""

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        """The values of several keys, in one round trip where all of them exist."""

    def put(self, key: str, value: str) -> None:
        """Set a value, acknowledged."""


class KeyValueStore(Notes, Protocol):
    """What `membership` speaks. One instance serves one thread; `clone` gives another thread its own."""

    def create(self, key: str, value: str) -> str:
        """Set a value if there is none; the value that stands afterwards, ours or the earlier one."""

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Set a value if `expected` stands there; whether `value` stands there afterwards (whoever set it)."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; the sum."""

    def clone(self) -> KeyValueStore:
        """The same store for another thread."""


class TorchStore:
    """A `torch.distributed` store: the TCPStore of torchrun's rendezvous, or an in-process one.

    A TCPStore client is one connection under one lock, and `set` on a dead connection returns silently; so each thread
    has a client of its own, and writes that matter are compare-and-set or read back. The store's own timeout bounds
    nothing but waits for keys: on a server that is frozen, or behind a cut cable, all else would block for ever. So the
    sockets get a deadline; a reply that comes after it would be taken for that of a later call, so the client is not
    used again.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self._raw = store
        self._timeout = timeout
        self._why_lost: str | None = None
        store.set_timeout(timeout)
        if isinstance(store, TCPStore):
            limit_socket_waits(store.port, timeout)

    @property
    def raw(self) -> Store:
        """The store itself.

        Raises:
            StoreUnreachable: an earlier call got no answer.
        """
        if self._why_lost is not None:
            raise StoreUnreachable(self._why_lost)
        return self._raw

    def get(self, key: str) -> str | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        if not keys:
            return []
        try:
            if self.raw.check(list(keys)):
                return [value.decode() for value in self.raw.multi_get(list(keys))]
            return [self.raw.get(key).decode() if self.raw.check([key]) else None for key in keys]
        except RuntimeError as error:
            raise self._lost(error) from error

    def put(self, key: str, value: str) -> None:
        try:
            self.raw.set(key, value)
            self.raw.get(key)  # the acknowledgement that `set` does not give; perhaps of a value that came after ours
        except RuntimeError as error:
            raise self._lost(error) from error

    def create(self, key: str, value: str) -> str:
        try:
            return str(self.raw.compare_set(key, "", value).decode())
        except RuntimeError as error:
            raise self._lost(error) from error

    def swap(self, key: str, expected: str, value: str) -> bool:
        try:
            return bool(self.raw.compare_set(key, expected, value).decode() == value)
        except RuntimeError as error:
            raise self._lost(error) from error

    def add(self, key: str, amount: int) -> int:
        try:
            return int(self.raw.add(key, amount))
        except RuntimeError as error:
            raise self._lost(error) from error

    def clone(self) -> TorchStore:
        if not isinstance(self._raw, TCPStore):
            return TorchStore(self._raw, self._timeout)  # lives in this process and locks for itself
        found: Store | RuntimeError
        try:  # its attempts to connect are bounded by the timeout itself
            found = connect(self._raw.clone).get(timeout=2 * self._timeout.total_seconds())
        except queue.Empty:
            found = RuntimeError("it accepts connections and says nothing")
        if isinstance(found, RuntimeError):
            raise StoreUnreachable(f"the rendezvous store does not answer: {first_line(found)}") from found
        return TorchStore(found, self._timeout)

    def _lost(self, error: RuntimeError) -> StoreUnreachable:
        if isinstance(self._raw, TCPStore):
            self._why_lost = f"the rendezvous store does not answer: {first_line(error)}"
        return StoreUnreachable(f"the rendezvous store does not answer: {first_line(error)}")


class Below:
    """The part of a store below a prefix: what `Job.beside` gives where one store serves all."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def get(self, key: str) -> str | None:
        return self._store.get(self._prefix + key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        return self._store.get_many([self._prefix + key for key in keys])

    def put(self, key: str, value: str) -> None:
        self._store.put(self._prefix + key, value)


def is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except (OSError, ValueError):  # ValueError: of a name that is none
        return False
    return True


def connect(make: Callable[[], Store]) -> queue.SimpleQueue[Store | RuntimeError]:
    """Where the TCPStore client that `make` makes will be, or its error (DistNetworkError, DistStoreError).

    It greets its server while it is made, without a deadline: so on a thread, which can be left behind.
    """
    made: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            made.put(make())
        except RuntimeError as error:
            made.put(error)

    threading.Thread(target=run, name="connect", daemon=True).start()
    return made


def limit_socket_waits(port: int, timeout: timedelta) -> None:
    """Give this process's connections to a store's port a deadline for every send and receive.

    torch has no way to ask a TCPStore for its socket. Its waits for a key poll first and are not cut short. Nothing on
    macOS, where a world of one has no store but its own.
    """
    if sys.platform != "linux":
        return
    seconds, rest = divmod(timeout // timedelta(microseconds=1), 10**6)
    deadline = struct.pack("ll", seconds, rest)  # struct timeval
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family == socket.AF_UNIX:
                    continue
                if connection.getpeername()[1] == port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)


def append(store: KeyValueStore, key: str, text: str) -> None:
    """Add to a list that others read as a whole; so it costs them nothing while nobody adds to it."""
    store.put(f"{key}/{store.add(f'{key}/count', 1)}", text)


def entries(store: KeyValueStore, key: str) -> list[str]:
    """What has been added; without what somebody is adding at this moment."""
    count = int(store.get(f"{key}/count") or 0)
    return [text for text in store.get_many([f"{key}/{number}" for number in range(1, count + 1)]) if text is not None]


class MemoryStore:
    """The same in a dictionary, for simulations and tests."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def create(self, key: str, value: str) -> str:
        with self._lock:
            standing = self.values[key] = self.values.get(key) or value
            return standing

    def swap(self, key: str, expected: str, value: str) -> bool:
        with self._lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values.get(key) == value

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

    def clone(self) -> MemoryStore:
        return self  # a dictionary serves all threads
