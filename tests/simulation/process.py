"""A simulated process: two threads, a clock of its own, and the store that it serves to others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.heartbeat import LONGEST_PAUSE
from tests.memory_store import MemoryStore
from tests.simulation.kernel import Kernel, Network, Task

Address = tuple[str, int]
STORE_SECONDS = 1.0
"""after which a call of a store is given up"""


class Machines:
    """What all processes share: time, the network, and who listens where."""

    checks_uid = True
    """whether a listener says who it is; a planted error otherwise"""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(seed)
        self.network = Network(self.kernel)
        self.random = self.kernel.random
        random.seed(seed)  # the client of etcd draws its pauses there
        self.at: dict[Address, Process] = {}
        """the last process that listened there"""
        self.processes: list[Process] = []
        self._num_uids = 0

    def draw_uid(self) -> str:
        self._num_uids += 1
        return f"u{self._num_uids}"


class Process:
    """Alive, frozen, or dead; its host may be without power besides."""

    def __init__(self, machines: Machines, host: str, port: int, uid: str) -> None:
        self.machines, self.kernel, self.network = machines, machines.kernel, machines.network
        self.host, self.address, self.uid = host, (host, port), uid
        self.is_alive, self.is_frozen = True, False
        self.ending: str | None = None
        """how it ended; None while it lives"""
        self.ended_at = -1e9
        self.successor: Process | None = None
        """what it is after it was left out: the same process, with the store of this one besides its own"""
        self.rate = 1.0 + self.kernel.random.uniform(-0.005, 0.005)
        self.offset = self.kernel.random.uniform(0.0, 1000.0)
        self.memory = MemoryStore()
        self.tasks: list[Task] = []
        self.loses_replies = 0
        """how many of its next replies as a server are lost"""
        self.on_closed: list[Callable[[], None]] = []
        """called at its end: what the kernels of others see of it"""
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._freezes: list[list[float]] = []
        """when each began and ended"""
        machines.at[self.address] = self
        machines.processes.append(self)

    @property
    def has_power(self) -> bool:
        return self.host not in self.network.off

    @property
    def newest(self) -> Process:
        """What it is by now."""
        return self if self.successor is None else self.successor.newest

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_frozen and self.has_power

    def start(self, name: str, run: Callable[[], None]) -> None:
        self.tasks.append(Task(self.kernel, self, run, name))

    def clock(self) -> float:
        return self.offset + self.rate * self.kernel.now

    def sleep(self, seconds: float) -> None:
        self.kernel.wait(max(seconds, 0.00001) / self.rate)

    def take(self, run: Callable[..., None], *arguments: Any) -> None:
        """Something has arrived for its code; a frozen process finds it when it wakes."""
        if self.is_frozen or self._inbox:
            self._inbox.append((run, arguments))
        elif self.is_alive:
            run(*arguments)

    def freeze(self) -> None:
        if not self.is_frozen:
            self._freezes.append([self.kernel.now, self.kernel.now])
        self.is_frozen = True

    def thaw(self, seconds_before_reading: float = 0.0) -> None:
        """Its threads go on; those that read what has come meanwhile may be the last to do so."""
        if not self.is_frozen or not self.is_alive:
            return
        self.is_frozen = False
        self._freezes[-1][1] = self.kernel.now
        if seconds_before_reading:
            self.kernel.after(seconds_before_reading, self._read)
        else:
            self._read()
        for task in self.tasks:
            task.unpark()

    def seconds_awake(self, since: float) -> float:
        """Until now; it cannot tell a short freeze, nor where a long one began, from time that it needed."""
        freezes = [end - max(start, since) for start, end in self._freezes if end > since]
        return self.kernel.now - since - sum(max(0.0, seconds - LONGEST_PAUSE) for seconds in freezes)

    def _read(self) -> None:
        if self.is_frozen:
            return
        inbox, self._inbox = self._inbox, []
        for run, arguments in inbox:
            self.take(run, *arguments)

    def end(self, ending: str) -> None:
        """Killed, or gone of itself: its kernel closes what it had open."""
        if not self.is_alive:
            return
        self.is_alive, self.ending, self.ended_at = False, ending, self.kernel.now
        for tell in self.on_closed:
            tell()
        self.on_closed.clear()


class SimStore:
    """A member's store, for one other member, or for itself; a KeyValueStore."""

    def __init__(self, mine: Process, served_by: Process) -> None:
        self._mine, self._server = mine, served_by
        self._is_lost = False

    @staticmethod
    def connect(mine: Process, address: Address) -> SimStore:
        server = mine.machines.at.get(address)
        if server is None:
            raise StoreUnreachable("nobody was ever there")
        store = SimStore(mine, server)
        if server is not mine:
            store._call("get", "")
        return store

    def get(self, key: str) -> str | None:
        return self._call("get", key)  # type: ignore[no-any-return]

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        return self._call("get_many", keys) if keys else []

    def put(self, key: str, value: str) -> None:
        self._call("put", key, value)

    def create(self, key: str, value: str) -> str:
        return self._call("create", key, value)  # type: ignore[no-any-return]

    def swap(self, key: str, expected: str, value: str) -> bool:
        return self._call("swap", key, expected, value)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, amount)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def keys(self) -> list[str]:
        return self._call("keys")  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: Any) -> Any:
        mine, server, kernel = self._mine, self._server, self._mine.kernel
        if server is mine:
            if kernel.current is not None:
                kernel.step()
            return getattr(server.memory, name)(*arguments)
        if self._is_lost:
            raise StoreUnreachable("an earlier call got no answer")
        task = kernel.current
        assert task is not None, "only tasks call"
        outcome: list[Any] = []

        def finish(found: Any) -> None:
            outcome.append(found)
            task.wake()

        def execute() -> None:
            found = getattr(server.memory, name)(*arguments)
            if server.loses_replies > 0:
                server.loses_replies -= 1
            else:
                mine.network.send(server.host, mine.host, finish, found)

        def arrive() -> None:
            if server.newest.is_alive:
                server.newest.take(execute)
            else:
                mine.network.send(server.host, mine.host, finish, StoreUnreachable("refused"))

        mine.network.send(mine.host, server.host, arrive)
        deadline = kernel.now + STORE_SECONDS
        while not outcome and kernel.now < deadline:
            task.wait(deadline - kernel.now)
        if not outcome:
            self._is_lost = True
            raise StoreUnreachable("no answer")
        if isinstance(outcome[0], StoreUnreachable):
            self._is_lost = True
            raise outcome[0]
        return outcome[0]
