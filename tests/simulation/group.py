"""The process group of a world: collectives that end when every worker has entered, or break."""

from __future__ import annotations

from typing import Any

from elastic_train.errors import FormationFailed
from elastic_train.world import World
from tests.simulation.kernel import Task
from tests.simulation.process import Process


class GroupBroken(FormationFailed):
    """A collective did not end: a connection was closed."""


class Group:
    """One member's part in the process group of one world.

    A member's contribution is on its way as soon as it has entered, whatever becomes of the member: so one may end a
    collective, and another not. Who has closed its connections has sent before what it had to; that arrives, as with
    TCP.
    """

    def __init__(self, process: Process, world: World, *, is_ahead: bool = False) -> None:
        self._process, self._world = process, world
        self._key = f"{world.uid}, ahead" if is_ahead else world.uid
        self.is_shut = False
        self._closed: dict[str, int] = {}
        """who has closed its connections, and the last collective that it has entered"""
        self._received: dict[int, dict[int, Any]] = {}
        self._others = {
            rank: process.machines.at[member.address] for rank, member in enumerate(world.workers) if rank != world.rank
        }
        self._number = -1
        self._waiter: Task | None = None
        groups: dict[str, Group] = process.groups  # type: ignore[attr-defined]
        groups[self._key] = self
        for key, uid, last in process.early_closings:  # type: ignore[attr-defined]
            if key == self._key:
                self._closed[uid] = last
        for key, early in process.early_contributions:  # type: ignore[attr-defined]
            if key == self._key:
                self._receive(*early)

    def form(self, seconds: float) -> None:
        """Raises: FormationFailed."""
        try:
            self.exchange(None, seconds)
        except GroupBroken as error:
            raise FormationFailed(str(error)) from error

    def exchange(self, mine: Any, limit: float = 1e9) -> list[Any]:
        """What everybody gives, by rank. Raises: GroupBroken."""
        process, world = self._process, self._world
        self._number += 1
        number = self._number
        received = self._received.setdefault(number, {})
        received[world.rank] = mine
        for other in self._others.values():
            process.network.send(process.host, other.host, self._arrive, other, world.rank, number, mine)
        deadline = process.kernel.now + limit
        process.kernel.step()
        while len(received) < world.world_size and not self.is_shut and not self._is_closed_before(number):
            if process.kernel.now >= deadline:
                raise GroupBroken("it was not made in time")
            self._waiter = process.kernel.current
            assert self._waiter is not None, "a task waits"
            self._waiter.wait(deadline - process.kernel.now)
            self._waiter = None
        if len(received) < world.world_size or self.is_shut:
            raise GroupBroken("a connection was closed")
        del self._received[number]
        return [received[rank] for rank in range(world.world_size)]

    def _is_closed_before(self, number: int) -> bool:
        return any(last < number for last in self._closed.values())

    def shut(self) -> None:
        """Called by the watcher's thread."""
        self.is_shut = True
        self._wake()

    def close(self) -> None:
        """The others see its connections close."""
        process = self._process
        for other in self._others.values():
            process.network.send(process.host, other.host, self._note_closed, other, process.uid, self._number)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def _arrive(self, other: Process, rank: int, number: int, value: Any) -> None:
        theirs: Group | None = other.groups.get(self._key)  # type: ignore[attr-defined]
        if theirs is not None:
            theirs._receive(rank, number, value)
        else:
            other.early_contributions.append((self._key, (rank, number, value)))  # type: ignore[attr-defined]

    def _receive(self, rank: int, number: int, value: Any) -> None:
        received = self._received.setdefault(number, {})
        received[rank] = value
        if len(received) == self._world.world_size:
            self._wake()

    def _note_closed(self, other: Process, uid: str, last: int) -> None:
        theirs: Group | None = other.groups.get(self._key)  # type: ignore[attr-defined]
        if theirs is not None:
            theirs._closed.setdefault(uid, last)
            theirs._wake()
        else:  # it finds nobody to connect to
            other.early_closings.add((self._key, uid, last))  # type: ignore[attr-defined]
