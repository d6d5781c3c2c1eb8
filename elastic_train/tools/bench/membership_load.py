"""The cost of membership per member, by the size of the world: hundreds of members on one machine, without training.

Each has a store, pings and connections of its own, like a worker; a process has several members. Per size it measures
what a member sends per second while nothing happens, on average and at most (without TCP's overhead). Then one member
is killed, and one joins: each time until all are in the next world and could begin to make the process group.

More than 128 members share a machine only if each pings less often; the figures are then scaled to the usual pace. The
time of a re-form is that of one machine which does the work of all members.

A row's `theirs` is the cost if every member pinged every other, and for seconds the line that is fitted to all sizes.
The last rows are these lines at 10,000 members.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from elastic_train.errors import ElasticTrainError
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.laws import Voters
from elastic_train.protocol.liveness import ping_interval
from elastic_train.protocol.store import NUM_PROPOSERS
from elastic_train.tools.bench.members import PEER_TIMEOUT, Crew, Sent, interval_for
from elastic_train.tools.bench.table import BenchRow
from elastic_train.world import Address, Member, to_json

QUICK = (2, 8, 32)
THOROUGH = (2, 8, 32, 128, 512)
FITTED_FROM = 32
"""least members for the fit; in smaller worlds all members ping each other, which costs less"""
LARGE = 10_000
CREW = 32
"""members per process"""
MEASURED = {
    "messages": ("messages of a member", "1/s"),
    "bytes": ("bytes of a member", "B/s"),
    "killed": ("one killed, until all are in the next world", "s"),
    "joined": ("one joins, likewise", "s"),
    "calls": ("calls of the proposer for it", ""),
}
"""name -> words and unit of its row; messages and bytes are per second, calls are to other stores in one re-form"""
WITH_DIGITS = ("messages", "bytes")
"""messages contain numbers, so their size grows with the digits of the world's size"""
QUIET_SECONDS = 10.0
DEADLINE_SECONDS = 240.0


Found: TypeAlias = Mapping[str, tuple[float, float]]
"""what was measured at one size, by MEASURED: the mean and the busiest member, for seconds the same number twice"""


def run(quick: bool) -> list[BenchRow]:
    """Measure all sizes. Quick: half a minute; else some minutes."""
    return rows_of(measure_all(QUICK if quick else THOROUGH, QUIET_SECONDS))


def measure_all(sizes: Sequence[int], seconds: float) -> dict[int, Found]:
    """Measure sizes until one is too large for this machine, and print that."""
    found: dict[int, Found] = {}
    for size in sizes:
        try:
            found[size] = measure(size, seconds)
        except TooMany as error:
            print(f"{size} members: {error}; the rest is by the formula", file=sys.stderr, flush=True)
            break
        print(f"{size} members: {found[size]}", file=sys.stderr, flush=True)
    return found


class TooMany(ElasticTrainError):
    """This machine cannot run so many members."""


class Crews:
    """All crews (processes with members) of one size."""

    def __init__(self, size: int) -> None:
        rest = size - 1
        self.size, self.crews = size, list[Crew]()
        self._members: list[Member] = []
        self._worlds: dict[str, tuple[int, float]] = {}
        """uid of each member -> generation of its last world, and when it entered that"""
        self._generation = -1
        try:
            for first in range(min(rest, NUM_PROPOSERS)):
                self._start(first, 1)  # a process of its own, as on a machine of its own
            for first in range(NUM_PROPOSERS, rest, CREW):
                self._start(first, min(CREW, rest - first))
            self._start(rest, 1)  # the last rank, alone so that it can be killed alone
        except BaseException:
            self.end()
            raise

    def _start(self, first: int, count: int, known: Sequence[Address] = ()) -> Crew:
        """Start a crew and wait for it: of many at once, some stores would not be served in time."""
        crew = Crew(first, count, self.size, known)
        self.crews.append(crew)
        self._members += self._next(crew, "members")[0]
        return crew

    def form(self) -> None:
        """Form a first world by sending it to all members."""
        decision = Decision(0, "bench-0", (), tuple(self._members))
        worlds = [Voters.of(decision.uid, decision.new)]
        text = to_json({"decision": decision.to_fields(), "old": [], "worlds": worlds})
        for crew in self.crews:
            crew.pipe.send(text)
        self._wait_for_world()

    def quiet(self, seconds: float) -> tuple[list[float], list[float]]:
        """Measure each member's messages and bytes per second."""
        before = self.sent()
        time.sleep(seconds)
        pairs = list(zip(before, self.sent(), strict=True))
        pace = interval_for(self.size) / ping_interval(PEER_TIMEOUT)
        messages = [pace * (b.pings - a.pings) / (tb - ta) for (ta, a), (tb, b) in pairs]
        return messages, [pace * (b.ping_bytes - a.ping_bytes) / (tb - ta) for (ta, a), (tb, b) in pairs]

    def sent(self) -> list[tuple[float, Sent]]:
        """For each member, the time at which it was asked, and what it had sent."""
        found = []
        for crew in self.crews:
            crew.pipe.send("count")
            at, members = self._next(crew, "sent")
            found += [(at, one) for one in members]
        return found

    def kill(self) -> float:
        """Kill a member; return the seconds until all others are in the next world."""
        started = time.monotonic()
        self.crews.pop().end()
        del self._worlds[self._members.pop().uid]
        return self._wait_for_world() - started

    def join(self) -> float:
        """Start a newcomer; return the seconds from rank 0's end of the world for it to the next world of all."""
        first = self._members[0].store
        assert first is not None, "every member serves one"
        self._start(self.size, 1, [first]).pipe.send("")
        (started,) = self._next(self.crews[0], "admits")
        return self._wait_for_world() - float(started)

    def end(self) -> None:
        for crew in self.crews:
            crew.end()

    def _wait_for_world(self) -> float:
        """Wait until all are in the same later world; return when the last member entered it. A world that a member
        misses, on an overloaded machine, is over at once, and the next one counts."""
        last = self._generation
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            generations = {self._worlds.get(member.uid, (-1, 0.0))[0] for member in self._members}
            if len(generations) == 1 and min(generations) > last:
                self._generation = generations.pop()
                return max(at for _, at in self._worlds.values())
            ready = wait([crew.pipe for crew in self.crews], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TooMany(f"no world of all within {DEADLINE_SECONDS:.0f} s")
            for crew in self.crews:
                if crew.pipe in ready:
                    self._receive(crew)

    def _next(self, crew: Crew, name: str) -> tuple[Any, ...]:
        while True:
            if not crew.pipe.poll(DEADLINE_SECONDS):
                raise TooMany(f"no answer within {DEADLINE_SECONDS:.0f} s")
            found, what = self._receive(crew)
            if found == name:
                return what

    def _receive(self, crew: Crew) -> tuple[str, tuple[Any, ...]]:
        try:
            name, *what = crew.pipe.recv()
        except EOFError:
            raise ElasticTrainError("a process of the benchmark has died") from None
        if name == "failed":
            raise TooMany(f"a member failed: {what[0]}")
        if name == "in":
            uid, generation, at = what
            self._worlds[uid] = generation, at
        return name, tuple(what)


def measure(size: int, seconds: float) -> Found:
    job = Crews(size)
    try:
        job.form()
        messages, sizes = job.quiet(seconds)
        before = job.sent()[:-1]
        killed = job.kill()
        after = job.sent()
        joined = job.join()
        pairs = [(a, b) for (_, a), (_, b) in zip(before, after, strict=True)]
        calls = [b.calls - a.calls for a, b in pairs]
        figures: tuple[Sequence[float], ...] = (messages, sizes, [killed], [joined], calls)
        return {name: (statistics.mean(values), max(values)) for name, values in zip(MEASURED, figures, strict=True)}
    finally:
        job.end()


def rows_of(found: Mapping[int, Found]) -> list[BenchRow]:
    rows = []
    for size in [*found, LARGE]:
        for name, (what, unit) in MEASURED.items():
            intercept, slope = line_through(found, name)
            fitted = max(0.0, intercept + slope * scale(name, size))
            ours, most = found[size][name] if size in found else (fitted, fitted)
            case = f"{size:,} members, {what}"
            if size not in found:
                case += f", by {intercept:.3g} + {slope:.3g} {'log10 n' if name in WITH_DIGITS else 'n'}"
            if name in WITH_DIGITS:
                theirs = all_to_all(found, name, size)
                rows.append(row(case, ours, theirs, unit))
                if size in found:
                    rows.append(row(f"{size:,} members, the busiest", most, theirs, unit))
            else:
                rows.append(row(case, most, fitted if size >= FITTED_FROM else most, unit))
    return rows


def row(case: str, ours: float, theirs: float, unit: str) -> BenchRow:
    return BenchRow(case, ours, theirs, unit, theirs / ours if ours else 0.0, 0.0)


def all_to_all(found: Mapping[int, Found], name: str, size: int) -> float:
    """The cost of a member that pings every other one: a ping to each, and an answer to each."""
    messages = 2 * (size - 1) / ping_interval(PEER_TIMEOUT)
    if name == "messages":
        return messages
    largest = found[max(found)]
    return messages * largest["bytes"][0] / largest["messages"][0]


def scale(name: str, members: int) -> float:
    """The x value of the fitted line: the members for seconds and calls, their logarithm for messages and bytes."""
    return math.log10(members) if name in WITH_DIGITS else float(members)


def line_through(found: Mapping[int, Found], name: str) -> tuple[float, float]:
    """Intercept and slope of the least squares, for the busiest member where a field has one."""
    sizes = [size for size in found if size >= FITTED_FROM] or list(found)
    numbers = [found[size][name][1] for size in sizes]
    if len(sizes) < 2:
        return numbers[0], 0.0
    slope, intercept = statistics.linear_regression([scale(name, size) for size in sizes], numbers)
    return intercept, slope
