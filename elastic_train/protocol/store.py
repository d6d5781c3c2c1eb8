"""The key-value store that members meet at, as the few operations that membership needs; connections to other ones.

An implementation answers each call at once or raises StoreUnreachable; no call waits for a key. Values are text; an
empty one is as good as none to `create` and `swap`. Keys carry the generation that they belong to; a member deletes in
its own store what worlds that are over have left there.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed import Store, TCPStore

from elastic_train.errors import StoreUnreachable, first_line
from elastic_train.system import copy_of_socket, open_sockets
from elastic_train.world import Address, Member, World

NO_VALUE = "\0none"
"""what stands for a key that does not exist, and for no value of any"""
FEW_KEYS = 3
"""that are asked for one by one"""


class SharedStore(Protocol):
    """What the members of a world share while it stands."""

    def get(self, key: str) -> str | None:
        """The value, None where there is none."""

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        """The values of several keys, in two round trips where all of them exist."""

    def put(self, key: str, value: str) -> None:
        """Set a value, acknowledged."""

    def create(self, key: str, value: str) -> str:
        """Set a value if there is none; the value that stands afterwards, ours or the earlier one."""

    def delete(self, key: str) -> None:
        """It has no value any more, and perhaps had none."""


class KeyValueStore(SharedStore, Protocol):
    """What a member serves to the others."""

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Set a value if `expected` stands there; whether `value` stands there then, set by another one perhaps."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; the sum."""


class OwnStore(KeyValueStore, Protocol):
    """The store that a member serves."""

    def keys(self) -> list[str]:
        """All of them."""


class TorchStore:
    """A `torch.distributed` store: a TCPStore that a member serves, MASTER_ADDR's, or one in this process.

    A TCPStore client is one connection under one lock, and `set` on a dead connection returns silently; so each thread
    has a client of its own, and writes that matter are compare-and-set or read back. The store's own timeout bounds
    nothing but waits for keys: on a server that is frozen, or behind a cut cable, all else would block for ever. So the
    sockets get a deadline; a reply that comes after it would be taken for that of a later call, so the client is not
    used again.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self._raw = store
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
        with self._answered() as store:
            return _value_of(store, key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        with self._answered() as store:
            if len(keys) > FEW_KEYS and store.check(list(keys)):
                return [value.decode() for value in store.multi_get(list(keys))]
            return [_value_of(store, key) for key in keys]

    def put(self, key: str, value: str) -> None:
        with self._answered() as store:
            store.set(key, value)
            store.check([key])  # the acknowledgement that `set` does not give; the reader may have deleted it by now

    def create(self, key: str, value: str) -> str:
        with self._answered() as store:
            return str(store.compare_set(key, "", value).decode())

    def swap(self, key: str, expected: str, value: str) -> bool:
        with self._answered() as store:
            return bool(store.compare_set(key, expected, value).decode() == value)

    def add(self, key: str, amount: int) -> int:
        with self._answered() as store:
            return int(store.add(key, amount))

    def delete(self, key: str) -> None:
        with self._answered() as store:
            store.delete_key(key)

    def keys(self) -> list[str]:
        with self._answered() as store:
            return list(store.list_keys())

    @contextlib.contextmanager
    def _answered(self) -> Iterator[Store]:
        """For one question. Raises: StoreUnreachable where it gets no answer, or an earlier one got none."""
        try:
            yield self.raw
        except RuntimeError as error:
            why = f"the rendezvous store does not answer: {first_line(error)}"
            if isinstance(self._raw, TCPStore):
                self._why_lost = why
            raise StoreUnreachable(why) from error


def _value_of(store: Store, key: str) -> str | None:
    """In one round trip: `get` waits for a key that another one has deleted since it was looked for. A key that does
    not exist is not set where another value than "" is expected of it, which comes back then."""
    value = store.compare_set(key, NO_VALUE, NO_VALUE).decode()
    return None if value == NO_VALUE else str(value)


def limit_socket_waits(port: int, timeout: timedelta) -> None:
    """Give this process's connections to a store's port a deadline for every send and receive.

    torch has no way to ask a TCPStore for its socket. Its waits for a key poll first and are not cut short. Nothing on
    macOS, where a world of one has no store but its own.
    """
    seconds, rest = divmod(timeout // timedelta(microseconds=1), 10**6)
    deadline = struct.pack("ll", seconds, rest)  # struct timeval
    for fd, name in open_sockets().items():
        with contextlib.suppress(OSError), copy_of_socket(fd, name) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)


def append(store: KeyValueStore, key: str, text: str) -> None:
    """Add to a list that others read as a whole; so it costs them nothing while nobody adds to it."""
    store.put(f"{key}/{store.add(f'{key}/count', 1)}", text)


def entries(store: KeyValueStore, key: str) -> list[str]:
    """What has been added; without what somebody is adding at this moment."""
    count = int(store.get(f"{key}/count") or 0)
    return [text for text in store.get_many([f"{key}/{number}" for number in range(1, count + 1)]) if text is not None]


def scoped(world: World, name: str) -> str:
    """The key of what is announced: of this world alone, or of the job."""
    return f"{world.key}/{name}" if name.startswith(("left/", "finished")) else f"job/{name}"


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

    def delete(self, key: str) -> None:
        with self._lock:
            self.values.pop(key, None)

    def keys(self) -> list[str]:
        return list(self.values)


Answer = TypeVar("Answer")
NUM_PROPOSERS = 2
"""ranks that keep a connection to everybody: who proposes, and who does when that one is lost"""


class Clients:
    """For the training thread; `connect_ahead` may run beside it.

    Args:
        own: this member's own store, which answers two threads.
        uid: of this process.
        connect: a client of the store at an address. Raises: StoreUnreachable.
    """

    def __init__(self, own: KeyValueStore, uid: str, connect: Callable[[Address], KeyValueStore]) -> None:
        self.own, self._uid, self._connect = own, uid, connect
        self._found: dict[Address | str, KeyValueStore] = {}
        """of members by uid, of others by address"""

    def of(self, member: Member) -> KeyValueStore:
        """Raises: StoreUnreachable, also where another process has the member's address by now."""
        if member.uid == self._uid:
            return self.own
        store = self._found.get(member.uid)
        if store is None:
            assert member.store is not None, "every member serves one"
            store = self._connect(member.store)
            if store.get("uid") != member.uid:
                raise StoreUnreachable(f"{member.name} is gone: another process has its address")
            self._found[member.uid] = store
        return store

    def of_rank(self, world: World, rank: int) -> KeyValueStore:
        """Raises: StoreUnreachable."""
        return self.of(world.members[rank])

    def at(self, address: Address) -> KeyValueStore:
        """Raises: StoreUnreachable."""
        store = self._found.get(address)
        if store is None:
            store = self._found[address] = self._connect(address)
        return store

    def lose(self, which: Member | Address) -> None:
        """It has not answered."""
        self._found.pop(which.uid if isinstance(which, Member) else which, None)

    def lose_rank(self, world: World, rank: int) -> None:
        self.lose(world.members[rank])

    def of_first(self, world: World) -> KeyValueStore:
        """Of rank 0, over a fresh connection where the one there was gives no answer. Raises: StoreUnreachable."""
        with contextlib.suppress(StoreUnreachable):
            store = self.of_rank(world, 0)
            store.get("run_id")
            return store
        self.lose_rank(world, 0)
        return self.of_rank(world, 0)

    def ask(self, member: Member, question: Callable[[KeyValueStore], Answer]) -> Answer:
        """What comes of it at the store of a member, which is lost where it does not answer. Raises: StoreUnreachable;
        the next one is asked over a new connection."""
        try:
            return question(self.of(member))
        except StoreUnreachable:
            self.lose(member)
            raise

    def ask_each(
        self, world: World, ranks: Iterable[int], question: Callable[[KeyValueStore], Answer]
    ) -> dict[int, Answer]:
        """What comes of it at the store of each rank. Who does not answer is lost, and not in it."""
        answers = {}
        for rank in ranks:
            with contextlib.suppress(StoreUnreachable):
                answers[rank] = self.ask(world.members[rank], question)
        return answers

    def keep_only(self, uids: Collection[str]) -> None:
        for gone in set(self._found) - set(uids):
            self._found.pop(gone, None)

    def connect_ahead(self, world: World, is_current: Callable[[], bool]) -> None:
        """To whom this member would ask in a recovery: rank 0, or everybody where it would propose itself."""
        ranks = range(len(world.members)) if world.rank < NUM_PROPOSERS else range(NUM_PROPOSERS)
        for rank in ranks:
            if not is_current() or rank >= len(world.members):
                return
            try:
                self.of_rank(world, rank)
            except StoreUnreachable:
                continue


def stores_in(sign: str | None) -> tuple[Address, ...]:
    """That a sign names, or a store in `members`."""
    return () if sign is None else tuple((str(host), int(port)) for host, port in json.loads(sign)["stores"])
