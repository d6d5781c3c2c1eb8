"""The key-value store of a member: the few operations that membership needs, and clients of other members' stores.

An implementation answers each call at once or raises StoreUnreachable; no call waits for a key. Values are text;
`create` and `swap` treat an empty value as none. Keys carry the generation that they belong to; a member deletes the
keys of past worlds in its own store.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed import Store, TCPStore

from elastic_train.errors import StoreUnreachable, first_line
from elastic_train.system import copy_of_socket, open_sockets
from elastic_train.world import Address, Member, World

NO_VALUE = "\0none"
"""stands for a key that does not exist; no key ever has this value"""
FEW_KEYS = 3
"""number of keys up to which `get_many` reads one by one"""


class KeyValueStore(Protocol):
    """The store of any member, as another member calls it."""

    def get(self, key: str) -> str | None:
        """Return the value; None if there is none."""

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of several keys, in two round trips if all of them exist."""

    def put(self, key: str, value: str) -> None:
        """Set a value; return once the store has acknowledged it."""

    def create(self, key: str, value: str) -> str:
        """Set a value if there is none. Return the value that stands afterwards, ours or the earlier one."""

    def delete(self, key: str) -> None:
        """Delete the key, which may not exist."""

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Set a value if `expected` stands there. Return whether `value` stands there then, perhaps set by another."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, and return the sum."""


class OwnStore(KeyValueStore, Protocol):
    """The store that a member serves, as that member calls it."""

    def keys(self) -> list[str]:
        """Return all keys."""


class TorchStore:
    """A `torch.distributed` store: a TCPStore that a member serves, MASTER_ADDR's, or one in this process.

    A TCPStore client is one connection under one lock, and `set` on a dead connection returns silently. So each thread
    has a client of its own, and writes that matter are compare-and-set or read back. The store's own timeout bounds
    only waits for keys: if the server is frozen or behind a cut cable, all other calls would block for ever. So the
    sockets get a deadline. A reply after the deadline would count as the reply of a later call, so the client is not
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
            store.check([key])  # the acknowledgement that `set` lacks; the reader may have deleted the key by now

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
        """Yield the store for one call. Raises: StoreUnreachable if this call or an earlier one gets no answer."""
        try:
            yield self.raw
        except RuntimeError as error:
            why = f"the rendezvous store does not answer: {first_line(error)}"
            if isinstance(self._raw, TCPStore):
                self._why_lost = why
            raise StoreUnreachable(why) from error


def _value_of(store: Store, key: str) -> str | None:
    """Return the value in one round trip. `get` would wait for a key that was deleted after a check. `compare_set` does
    not set a key that does not exist if it expects a value other than "": it returns the expected value."""
    value = store.compare_set(key, NO_VALUE, NO_VALUE).decode()
    return None if value == NO_VALUE else str(value)


def limit_socket_waits(port: int, timeout: timedelta) -> None:
    """Give this process's connections to a store's port a deadline for every send and receive.

    torch has no way to ask a TCPStore for its socket. Its waits for a key poll first, so the deadline does not cut them
    short. Does nothing on macOS, where a world of one has only its own store.
    """
    seconds, rest = divmod(timeout // timedelta(microseconds=1), 10**6)
    deadline = struct.pack("ll", seconds, rest)  # struct timeval
    for fd, name in open_sockets().items():
        with contextlib.suppress(OSError), copy_of_socket(fd, name) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)


def append(store: KeyValueStore, key: str, text: str) -> None:
    """Append to a list that other members read as a whole; it costs them nothing while it is empty."""
    store.put(f"{key}/{store.add(f'{key}/count', 1)}", text)


def entries(store: KeyValueStore, key: str) -> list[str]:
    """Return the entries of a list of `append`, without an entry that is being written at this moment."""
    count = int(store.get(f"{key}/count") or 0)
    return [text for text in store.get_many([f"{key}/{number}" for number in range(1, count + 1)]) if text is not None]


Answer = TypeVar("Answer")
NUM_PROPOSERS = 2
"""ranks that keep a connection to all members: the proposer, and the next one if that is lost"""


class Clients:
    """One thread's clients of stores; `connect_ahead` may run beside that thread.

    Args:
        own: this member's own store; two threads may call it.
        uid: of this process.
        connect: returns a client of the store at an address. Raises: StoreUnreachable.
    """

    def __init__(self, own: KeyValueStore, uid: str, connect: Callable[[Address], KeyValueStore]) -> None:
        self.own, self._uid, self._connect = own, uid, connect
        self._found: dict[Address | str, KeyValueStore] = {}
        """clients, of members by uid and of other stores by address"""

    def of(self, member: Member) -> KeyValueStore:
        """Return a client of a member's store. Raises: StoreUnreachable, also if another process has the address."""
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
        """As `of`."""
        return self.of(world.members[rank])

    def at(self, address: Address) -> KeyValueStore:
        """Return a client of the store at an address. Raises: StoreUnreachable."""
        store = self._found.get(address)
        if store is None:
            store = self._found[address] = self._connect(address)
        return store

    def lose(self, which: Member | Address) -> None:
        """Drop the connection: the store did not answer."""
        self._found.pop(which.uid if isinstance(which, Member) else which, None)

    def lose_rank(self, world: World, rank: int) -> None:
        self.lose(world.members[rank])

    def of_first(self, world: World) -> KeyValueStore:
        """Return a client of rank 0's store, over a new connection if the old one fails. Raises: StoreUnreachable."""
        with contextlib.suppress(StoreUnreachable):
            store = self.of_rank(world, 0)
            store.get("run_id")
            return store
        self.lose_rank(world, 0)
        return self.of_rank(world, 0)

    def ask(self, which: Member | Address, question: Callable[[KeyValueStore], Answer]) -> Answer:
        """Ask the store of a member, or at an address, and return its answer. Raises: StoreUnreachable if there is
        none, and drops the connection: the next call makes a new one."""
        try:
            return question(self.of(which) if isinstance(which, Member) else self.at(which))
        except StoreUnreachable:
            self.lose(which)
            raise

    def ask_each(
        self, world: World, ranks: Iterable[int], question: Callable[[KeyValueStore], Answer]
    ) -> dict[int, Answer]:
        """Ask the store of each rank and return the answers by rank. Drops the connections that give no answer."""
        answers = {}
        for rank in ranks:
            with contextlib.suppress(StoreUnreachable):
                answers[rank] = self.ask(world.members[rank], question)
        return answers

    def keep_only(self, uids: Collection[str]) -> None:
        for gone in set(self._found) - set(uids):
            self._found.pop(gone, None)

    def connect_ahead(self, world: World, is_current: Callable[[], bool]) -> None:
        """Connect to the stores that a recovery would ask: the first NUM_PROPOSERS ranks; a proposer needs all."""
        ranks = range(len(world.members)) if world.rank < NUM_PROPOSERS else range(NUM_PROPOSERS)
        for rank in ranks:
            if not is_current() or rank >= len(world.members):
                return
            try:
                self.of_rank(world, rank)
            except StoreUnreachable:
                continue


def stores_in(sign: str | None) -> tuple[Address, ...]:
    """Return the stores that a sign names, or the value of a store's key `members`."""
    return () if sign is None else tuple((str(host), int(port)) for host, port in json.loads(sign)["stores"])
