"""Virtual time: tasks that take turns by a seeded heap of events, and the network between hosts.

A task is a greenlet of one process. Whatever it does between two waits happens at one moment; each wait is a point at
which its process may die or freeze, and others go first.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

LATENCY = (0.0005, 0.004)
"""seconds that a message takes"""
CPU = (0.00001, 0.0004)
"""seconds of an operation that leaves no process"""


class Task:
    """One thread of a process."""

    def __init__(self, kernel: Kernel, process: Any, run: Callable[[], None], name: str) -> None:
        self.kernel, self.process, self.name = kernel, process, name
        self.is_stuck = False
        """whether this thread alone is held up"""
        self._greenlet = greenlet(run, parent=kernel.hub)
        self._ticket = 0
        self._is_parked = False
        kernel.after(0.0, self._resume, 0)

    def _resume(self, ticket: int) -> None:
        if ticket != self._ticket or not self.process.is_alive:
            return
        if self.process.is_frozen or self.is_stuck:
            self._is_parked = True
            return
        self._ticket += 1
        kernel = self.kernel
        kernel.turns += 1
        if kernel.on_turn is not None:
            kernel.on_turn(self)
            if not self.process.is_alive:
                return
            if self.process.is_frozen or self.is_stuck:
                self._is_parked = True
                return
        kernel.current = self
        self._greenlet.switch()

    def unpark(self) -> None:
        if self._is_parked:
            self._is_parked = False
            self.kernel.after(0.0, self._resume, self._ticket)

    def wait(self, seconds: float) -> None:
        """Let others go on; until `wake`, or for so many seconds of real time."""
        if self.kernel.skips(self, seconds):
            self._ticket += 1
        else:
            self.kernel.after(seconds, self._resume, self._ticket)
            self.kernel.hub.switch()

    def wake(self) -> None:
        self.kernel.after(0.0, self._resume, self._ticket)

    def end(self) -> None:
        """It is never resumed; what it held is let go. Called by others only."""
        if self._greenlet:
            self._greenlet.throw()


class Kernel:
    """The clock that nobody sees, and what is to happen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.turns = 0
        """how often a task was resumed: the operations of a history, in their order"""
        self.on_turn: Callable[[Task], None] | None = None
        self.hub = getcurrent()
        self.current: Task | None = None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count, self._until = 0, 0.0

    def after(self, seconds: float, run: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, run, arguments))

    def skips(self, task: Task, seconds: float) -> bool:
        """Take the turn of the running task at once, where nothing else is to happen before it: the clock alone moves.
        Return False where others go first, or the task is held up, or each turn is looked at."""
        events, later = self._events, self.now + seconds
        is_held = task.is_stuck or task.process.is_frozen or not task.process.is_alive
        if is_held or later > self._until or (events and events[0][0] <= later) or self.on_turn is not None:
            return False
        self.now = later
        self.turns += 1
        return True

    def run(self, until: float) -> None:
        events, self._until = self._events, until
        while events and events[0][0] <= until:
            self.now, _, run, arguments = heapq.heappop(events)
            run(*arguments)
            self.current = None
        self.now = until

    def wait(self, seconds: float) -> None:
        assert self.current is not None, "only tasks wait"
        self.current.wait(seconds)

    def step(self) -> None:
        """An operation of the running task that leaves no process."""
        low, high = CPU
        self.wait(low + (high - low) * self.random.random())


class Network:
    """Hosts, and which of them hear which.

    What cannot pass waits in its sender's kernel, as TCP does, and arrives after the heal; a host without power loses
    all.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.cuts: set[tuple[str, str]] = set()
        """(from, to)"""
        self.off: set[str] = set()
        self._parked: list[tuple[str, str, Callable[..., None], tuple[Any, ...]]] = []

    def is_open(self, source: str, target: str) -> bool:
        return (source, target) not in self.cuts and source not in self.off and target not in self.off

    def send(self, source: str, target: str, run: Callable[..., None], *arguments: Any) -> None:
        if target in self.off or source in self.off:
            return
        if (source, target) in self.cuts:
            self._parked.append((source, target, run, arguments))
            return
        low, high = LATENCY
        self.kernel.after(low + (high - low) * self.kernel.random.random(), run, *arguments)

    def cut(self, source: str, target: str) -> None:
        self.cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self.cuts.discard((source, target))
        self._flush()

    def heal_all(self) -> None:
        self.cuts.clear()
        self._flush()

    def _flush(self) -> None:
        parked, self._parked = self._parked, []
        for source, target, run, arguments in parked:
            self.send(source, target, run, *arguments)
