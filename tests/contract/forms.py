"""The forms in which a job is kept, for contracts that hold in all of them.

A form is a class with the methods of `Form`; one more in FORMS runs all of these tests. One is in memory, two are what
jobs use: stores of the members with signposts, and with etcd.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import pytest

from elastic_train.elastic.claims import Bounded
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.arbiter import Arbiter
from elastic_train.protocol.finder import Finder, Size
from elastic_train.protocol.group_store import GroupStoreServer
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.signposts import Signposts, reach
from elastic_train.protocol.store import KeyValueStore, TorchStore
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_finder import EtcdFinder
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.drills.nodes import free_port
from elastic_train.world import Address, Member
from tests.memory_store import MemoryStore

MIN_NODES = 3
PEER_TIMEOUT = 2.0
PATIENCE = 20.0
"""seconds that a store may take where nothing is wrong with it"""


class Clock:
    """Seconds that pass when a test says so; and names."""

    def __init__(self) -> None:
        self.now = 100.0
        self._num_uids = 0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def draw_uid(self) -> str:
        self._num_uids += 1
        return f"world{self._num_uids}"


class Form(Protocol):
    """One way to keep a job."""

    def job(self, number: int) -> PeerJob:
        """A new worker's."""

    def member(self, number: int) -> Member:
        """What this worker says of itself; after `job`."""

    def kill(self, number: int) -> None:
        """Nothing that this worker serves answers any more."""

    def pass_time(self) -> None:
        """A tenth of a second, or what it takes for news to spread."""

    def draw_uid(self) -> str:
        """Of a world."""

    def close(self) -> None:
        """End what it has started."""


def member(number: int, address: Address) -> Member:
    return Member(f"node{number}", 0, number, 1, address, "run", "gloo", None, store=address, uid=f"uid{number}")


class _Finder:
    """The first worker begins; the others find these stores."""

    shown: Sequence[Address] = ()

    def __init__(self, is_first: bool, stores: Sequence[Address]) -> None:
        self._is_first, self._stores = is_first, stores

    def is_beginner(self) -> bool:
        return self._is_first

    def addresses(self) -> Sequence[Address]:
        return () if self._is_first else self._stores

    def called_by(self) -> Sequence[Address]:
        return ()

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        self.shown = addresses

    def keep(self, *, has_world: bool) -> None: ...
    def other_jobs(self) -> Sequence[Address]:
        return ()

    def describe(self) -> str:
        return "the first worker"

    def close(self) -> None: ...


class _Client(MemoryStore):
    """One worker's view of a store that may be gone; `before_call` lets others go first."""

    def __init__(self, store: MemoryStore, is_gone: Callable[[], bool], before_call: Callable[[], None]) -> None:
        super().__init__()
        self.values = store.values
        self._is_gone, self._before_call = is_gone, before_call

    def _reach(self) -> None:
        self._before_call()
        if self._is_gone():
            raise StoreUnreachable("gone")

    def get(self, key: str) -> str | None:
        self._reach()
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        self._reach()
        return super().get_many(keys)

    def put(self, key: str, value: str) -> None:
        self._reach()
        super().put(key, value)

    def create(self, key: str, value: str) -> str:
        self._reach()
        return super().create(key, value)

    def swap(self, key: str, expected: str, value: str) -> bool:
        self._reach()
        return super().swap(key, expected, value)

    def add(self, key: str, amount: int) -> int:
        self._reach()
        return super().add(key, amount)


class _OnFakeClock:
    def __init__(self) -> None:
        self.clock = Clock()

    def member(self, number: int) -> Member:
        return member(number, ("host", number))

    def pass_time(self) -> None:
        self.clock.now += 0.1

    def draw_uid(self) -> str:
        return self.clock.draw_uid()

    def close(self) -> None: ...


class PeersInMemory(_OnFakeClock):
    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = lambda: None
        self._stores: dict[Address, MemoryStore] = {}
        self._gone: set[Address] = set()
        self.goes_on = False
        self.arbiter: Arbiter | None = None
        self.finds: Sequence[Address] = [("host", 0)]

    def job(self, number: int) -> PeerJob:
        address = ("host", number)
        own = self._stores[address] = MemoryStore()
        return self._job_with(
            number,
            self._client(own, address),
            address,
            lambda address: self._client(self._stores[address], address),
            _Finder(number == 0, self.finds),
        )

    def _job_with(
        self,
        number: int,
        own: KeyValueStore,
        address: Address,
        connect: Callable[[Address], KeyValueStore],
        finder: Finder,
    ) -> PeerJob:
        return PeerJob(
            own,
            address,
            connect,
            finder,
            Size(min_nodes=MIN_NODES, max_nodes=8, last_call=0.0),
            uid=f"uid{number}",
            run_id="run",
            peer_timeout=PEER_TIMEOUT,
            max_world_size=None,
            refused=lambda _members: [],
            draw_uid=self.clock.draw_uid,
            clock=self.clock,
            arbiter=self._arbiter(),
            goes_on=self.goes_on,
        )

    def _arbiter(self) -> Callable[[], Arbiter] | None:
        arbiter = self.arbiter
        return None if arbiter is None else lambda: arbiter

    def _client(self, store: MemoryStore, address: Address) -> _Client:
        return _Client(store, lambda: address in self._gone, lambda: self.interrupt())

    def kill(self, number: int) -> None:
        self._gone.add(("host", number))


class _Own:
    """A worker's client of the store that it serves. TCPStore's server ends with the last reference to it."""

    def __init__(self, store: TorchStore) -> None:
        self._store: TorchStore | None = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def end(self) -> None:
        self._store = None


class PeersOnTcp(PeersInMemory):
    """What c10d has: TCPStores, and a signpost."""

    def __init__(self) -> None:
        super().__init__()
        self._endpoint = ("127.0.0.1", free_port())
        self._served: dict[int, tuple[Address, _Own]] = {}
        self._finders: dict[int, Finder] = {}
        self._jobs: dict[int, PeerJob] = {}

    def job(self, number: int) -> PeerJob:
        server = GroupStoreServer("127.0.0.1")
        own = _Own(TorchStore(server.store, timedelta(seconds=PATIENCE)))
        finder = self._finder(number, server.address)
        self._served[number], self._finders[number] = (server.address, own), finder
        job = self._job_with(number, own, server.address, reach, finder)
        self._jobs[number] = job
        return job

    def _finder(self, number: int, address: Address) -> Finder:
        return Signposts([self._endpoint], "run", is_host=None, timeout=PATIENCE, clock=self.clock)

    def member(self, number: int) -> Member:
        return member(number, self._served[number][0])

    def kill(self, number: int) -> None:
        self._finders[number].close()
        self._served[number][1].end()
        del self._jobs[number]

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()


class PeersOnEtcd(PeersOnTcp):
    """What etcd3 has: the same stores, found in etcd, whose claims say which side goes on."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__()
        self._settings, self._run_id = settings, secrets.token_hex(6)

    def _finder(self, number: int, address: Address) -> Finder:
        finder = EtcdFinder(
            Connections(self._settings),
            self._run_id,
            uid=f"uid{number}",
            address=address,
            lease=PATIENCE,
            check=lambda: None,
            log=lambda _text: None,
            warn=lambda _text: None,
        )
        self.arbiter = Bounded(finder.arbiter(), PATIENCE)
        return finder


FORMS: dict[str, Callable[[pytest.FixtureRequest], Form]] = {
    "PeersInMemory": lambda _request: PeersInMemory(),
    "PeersOnTcp": lambda _request: PeersOnTcp(),
    "PeersOnEtcd": lambda request: PeersOnEtcd(request.getfixturevalue("etcd_settings")),
}


def eventually(form: Form, is_so: Callable[[], bool]) -> bool:
    """Whether it comes to be so: what one worker writes, another may read a moment later."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            return False
        form.pass_time()
    return True
