"""What each process wrote into its files. A run has millions of steps: they, and the lines of the ledger, are values of
few bytes.

A run directory may have others beside those of the run: of processes that had ended before --fresh began it anew on
another node, or of a branch that was given up.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_train.runlog.reader import Line, float_of

SET_SECONDS = 1.0
"""by which a clock is off its host's other one when it was set; less is a moment between two looks at them"""

Clock = tuple[str, int]
"""a host, and a number for each time that its clock was set, or that the machine began anew"""


class Clocks:
    """By which clock a time is. Only those of one are compared: two hosts' may be apart, and one that was set in the
    middle of a run is another from then on. The seconds of `monotonic`, which nobody can set, tell that."""

    def __init__(self, *, is_one: bool) -> None:
        """`is_one`: whether all hosts have the same, as the nodes of a drill."""
        self._is_one = is_one
        self._known: dict[str, list[tuple[float, Clock]]] = defaultdict(list)
        """host -> how far each of its clocks was ahead of `monotonic`; 0.0 in older versions, which wrote none"""

    def of(self, member: str, line: Line) -> Clock:
        """That of a line which a member wrote."""
        host = "" if self._is_one else host_of(member)
        monotonic, known = float_of(line, "monotonic"), self._known[host]
        ahead = 0.0 if monotonic is None else float(line["time"]) - monotonic
        for other, clock in reversed(known):
            if abs(ahead - other) <= SET_SECONDS:
                return clock
        known.append((ahead, (host, len(known))))
        return known[-1][1]


@dataclass(slots=True)
class Step:
    """A committed step as somebody wrote it down."""

    step: int
    generation: int
    epoch: int
    loss: float | None
    """None: it was not finite, and a GradScaler skipped the step"""
    time: float
    """of the commit, Unix seconds"""
    clock: Clock
    """by which that is"""
    world_size: int
    writer: str


@dataclass(slots=True)
class LedgerLine:
    """The samples that a rank used in a step."""

    step: int
    generation: int
    epoch: int
    rank: int
    indices: Sequence[int]
    writer: str


def packed(line: Line, member: str) -> LedgerLine:
    """Its indices in a ninth of the memory; where one is no index, as they stand."""
    indices: Sequence[int] = line["indices"]
    with contextlib.suppress(TypeError, OverflowError):
        indices = array("i", indices)
    return LedgerLine(line["step"], line["generation"], line["epoch"], line["rank"], indices, member)


@dataclass
class Life:
    """One process. In containers several, one after the other, have the same name and so the same file."""

    member: str
    """NODE/LOCAL_RANK/PID"""
    lines: list[Line] = field(default_factory=list)
    """its events but the steps; each has its `writer`, and the `clock` of its `time`"""
    steps: list[Step] = field(default_factory=list)
    spans: dict[Clock, tuple[float, float]] = field(default_factory=dict)
    """clock -> the earliest and the latest time that it wrote by it, Unix seconds"""

    def add(self, line: Line, clock: Clock) -> None:
        """The next event of its file."""
        time = float(line["time"])
        first, last = self.spans.get(clock, (time, time))
        self.spans[clock] = (min(first, time), max(last, time))
        if line["event"] != "step":
            self.lines.append({**line, "writer": self.member, "clock": clock})
            return
        self.steps.append(
            Step(
                int(line["step"]),
                int(line["generation"]),
                int(line["epoch"]),
                float_of(line, "loss"),
                time - (float_of(line, "late_seconds") or 0.0),
                clock,
                int(line["world_size"]),
                self.member,
            )
        )

    @property
    def began(self) -> float:
        """The earliest time of its events, Unix seconds."""
        return min(first for first, _ in self.spans.values())

    @property
    def ended(self) -> float:
        """The latest time of its events, Unix seconds."""
        return max(last for _, last in self.spans.values())


def host_of(member: str) -> str:
    return member.rsplit("/", 2)[0]


def lives_of(member: str, lines: Iterable[Line], clocks: Clocks) -> list[Life]:
    """The processes that wrote the events of one file."""
    found: list[Life] = []
    was_in_a_world = True
    for line in lines:
        is_in_a_world = line.get("generation") is not None
        if line["event"] == "start" or (was_in_a_world and not is_in_a_world) or not found:
            found.append(Life(member))
        found[-1].add(line, clocks.of(member, line))
        was_in_a_world = is_in_a_world
    return found


def of_one_run(lives: Sequence[Life], ledger: Sequence[LedgerLine]) -> tuple[list[Life], list[LedgerLine]]:
    """The events of each process, and the ledger, without lines that are not the run's."""
    own = _of_fresh_run(lives)
    replaced = {life.member for life in lives} - own
    kept = [life for life in lives if life.member in own]
    kept_ledger = [line for line in ledger if line.writer not in replaced]
    if discarded := _discarded_worlds(kept):
        for life in kept:
            life.lines = [line for line in life.lines if not _is_discarded(line, discarded)]
            life.steps = [step for step in life.steps if (step.writer, step.generation) not in discarded]
        kept_ledger = [line for line in kept_ledger if (line.writer, line.generation) not in discarded]
    return [life for life in kept if life.lines or life.steps], kept_ledger


def _of_fresh_run(lives: Sequence[Life]) -> set[str]:
    """The members since --fresh; all where nobody said it. They share worlds with the one that did, or have begun later
    than such a one on its host. Only of a host that had none of them clocks of two machines are compared."""
    anew = [life for life in lives if any(line.get("is_anew") for line in life.lines)]
    if not anew:
        return {life.member for life in lives}
    newest = max(anew, key=lambda life: life.began)
    own = _related({newest.member}, lives)
    hosts = set(map(host_of, own))
    return own | {life.member for life in lives if host_of(life.member) not in hosts and life.ended >= newest.began}


def _related(own: set[str], lives: Sequence[Life]) -> set[str]:
    """Generations are numbered on from all that a host's directory shows; who was in none says only when it began."""
    worlds = [line for life in lives for line in life.lines if line["event"] == "world"]
    while True:
        began: dict[str, float] = {}
        for life in lives:
            if life.member in own:
                host = host_of(life.member)
                began[host] = min(began.get(host, life.began), life.began)
        first: dict[str, int] = {}
        for line in worlds:
            if line["writer"] in own:
                host = host_of(line["writer"])
                first[host] = min(first.get(host, line["generation"]), line["generation"])
        later = {it["writer"] for it in worlds if it["generation"] > first.get(host_of(it["writer"]), math.inf)}
        idle = {life.member for life in lives if life.began >= began.get(host_of(life.member), math.inf)}
        together = (it["members"] for it in worlds if not own.isdisjoint(it["members"]))
        found = own.union(later, idle.difference(it["writer"] for it in worlds), *together)
        if found == own:
            return own
        own = found


_Place = tuple[str, int]
"""who wrote a line, and in which generation"""


def _discarded_worlds(lives: Sequence[Life]) -> set[_Place]:
    """Of branches that have stopped where they met one with more steps: as their members have said."""
    lines = [line for life in lives for line in life.lines]
    said = [line["discarded"] for line in lines if line["event"] == "warning" and line.get("discarded")]
    return {
        (str(line["writer"]), int(line["generation"]))
        for line in lines
        if line["event"] == "world"
        and any(line.get("branch") == one["branch"] and int(line["step"]) >= int(one["first"]) - 1 for one in said)
    }


def _is_discarded(line: Line, worlds: set[_Place]) -> bool:
    if line.get("event") in ("start", "warning", "signal", "done") or line.get("generation") is None:
        return False
    return (str(line["writer"]), int(line["generation"])) in worlds
