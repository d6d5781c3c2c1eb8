"""Connections of one member to the stores of others. A client that once got no answer gives none again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.store import KeyValueStore
from elastic_train.world import Member, World

Address = tuple[str, int]
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
