"""What each process wrote into its files. A run has millions of steps: steps and ledger lines are values of few bytes.

A run directory may also hold lines that are not the run's: of processes that had ended before --fresh began it anew on
another node, or of a branch that was given up.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_train.runlog.reader import Line, float_of, member_of, read_with_torn

SET_SECONDS = 1.0
"""a clock was set if it jumps by more against `monotonic`; less is the time between reading the two"""

Clock = tuple[str, int]
"""a host, and a number that grows whenever its clock was set or the machine rebooted"""


class Clocks:
    """The clocks of a run. Only times of the same clock are compared: those of two hosts may differ, and a clock that
    was set during a run is another one afterwards. `monotonic`, which cannot be set, reveals that."""

    def __init__(self, *, is_one: bool) -> None:
        """`is_one`: whether all hosts share one clock, as the nodes of a drill."""
        self._is_one = is_one
        self._known: dict[str, list[tuple[float, Clock]]] = defaultdict(list)
        """host -> (seconds ahead of `monotonic`, clock); 0.0 seconds in older versions, which wrote no `monotonic`"""

    def of(self, member: str, line: Line) -> Clock:
        """The clock of a line that a member wrote."""
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
    """A committed step as a worker wrote it down."""

    step: int
    generation: int
    epoch: int
    loss: float | None
    """None: it was not finite, and a GradScaler skipped the step"""
    time: float
    """of the commit, Unix seconds"""
    clock: Clock
    """the clock of `time`"""
    world_size: int
    writer: str
    monotonic: float | None = None
    """of the commit, by the clock of its machine that cannot be set; None in older versions"""
    process: int = 0
    """the place of its process among those that wrote its file: they may have run on machines of one name"""


@dataclass(slots=True)
class LedgerLine:
    """The samples that a rank used in a step."""

    step: int
    generation: int
    epoch: int
    rank: int
    indices: Sequence[int]
    writer: str


@dataclass
class Life:
    """One process. In containers, successive processes have the same name and so the same file."""

    member: str
    """NODE/LOCAL_RANK/PID"""
    number: int = 0
    """its place among those that wrote its file"""
    lines: list[Line] = field(default_factory=list)
    """its events but the steps, each with its `writer` and the `clock` of its `time`"""
    steps: list[Step] = field(default_factory=list)
    spans: dict[Clock, tuple[float, float]] = field(default_factory=dict)
    """clock -> the earliest and the latest time of its events by that clock, Unix seconds"""

    def add(self, line: Line, clock: Clock) -> None:
        """Add the next event of its file."""
        time = float(line["time"])
        first, last = self.spans.get(clock, (time, time))
        self.spans[clock] = (min(first, time), max(last, time))
        if line["event"] != "step":
            self.lines.append({"generation": None, **line, "writer": self.member, "clock": clock})
            return
        late, monotonic = float_of(line, "late_seconds") or 0.0, float_of(line, "monotonic")
        self.steps.append(
            Step(
                int(line["step"]),
                int(line["generation"]),
                int(line["epoch"]),
                float_of(line, "loss"),
                time - late,
                clock,
                int(line["world_size"]),
                self.member,
                None if monotonic is None else monotonic - late,
                self.number,
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


def lives_of(path: Path, torn: list[str], clocks: Clocks) -> list[Life]:
    """Return the processes that wrote a file of events. `torn` as for `ledger_of`. Raises OSError."""
    member = member_of(path)
    found: list[Life] = []
    was_in_a_world = True
    for line in _sound_lines(path, torn):
        is_in_a_world = line.get("generation") is not None
        if line["event"] == "start" or (was_in_a_world and not is_in_a_world) or not found:
            found.append(Life(member, len(found)))
        found[-1].add(line, clocks.of(member, line))
        was_in_a_world = is_in_a_world
    return found


def ledger_of(path: Path, torn: list[str]) -> Iterator[LedgerLine]:
    """Yield the lines of a ledger, with the indices in a ninth of the memory; as they are if one is too large.

    Args:
        torn: gets the lines that cannot be read, as `file: what`.

    Raises: OSError.
    """
    member = member_of(path)
    for line in _sound_lines(path, torn):
        indices: Sequence[int] = line["indices"]
        with contextlib.suppress(OverflowError):
            indices = array("i", indices)
        yield LedgerLine(line["step"], line["generation"], line["epoch"], line["rank"], indices, member)


_OF_SAMPLES: dict[str, Any] = {"step": int, "generation": int, "epoch": int, "rank": int, "indices": list}
_OF_ANY: dict[str, Any] = {"time": float, "event": str, "generation": int | None, "step": int}
_OF_LOSS = dict.fromkeys(("lost_members", "left_members", "joined_members"), list | None)
_OF_EVENT = {
    "start": _OF_ANY | {"config": dict | None, "task": dict | None},
    "world": _OF_ANY | _OF_LOSS | {"generation": int, "rank": int, "cause": str, "members": list},
    "peer_lost": _OF_ANY | _OF_LOSS,
    "restore": _OF_ANY | {"generation": int, "source": str, "restored_step": int},
    "step": _OF_ANY | {"generation": int, "world_size": int, "epoch": int},
    "snapshot": _OF_ANY | {"generation": int, "snapshot_step": int, "path": str},
    "ledger": _OF_ANY | {"generation": int},
    "done": _OF_ANY | {"rank": int, "outcome": str},
    "warning": _OF_ANY | {"void": list | None, "discarded": dict | None},
}
"""event -> the fields that its checks read, and their types; those that may be None are missing in older versions"""


def _sound_lines(path: Path, torn: list[str]) -> Iterator[Line]:
    is_ledger = path.parent.name == "ledger"

    def fault_of(line: Line) -> str | None:
        fields = _OF_SAMPLES if is_ledger else _OF_EVENT.get(str(line.get("event")), _OF_ANY)
        for name, kind in fields.items():
            if float_of(line, name) is None if kind is float else not isinstance(line.get(name), kind):
                return f"has {'no' if line.get(name) is None else 'a wrong'} {name}"
        return "has wrong indices" if is_ledger and not {int}.issuperset(map(type, line["indices"])) else None

    found: dict[int, str] = {}
    yield from read_with_torn(path, found, fault_of)
    torn += [f"{path.parent.name}/{path.name}: line {number} {what}" for number, what in found.items()]


def of_one_run(lives: Sequence[Life], ledger: Sequence[LedgerLine]) -> tuple[list[Life], list[LedgerLine]]:
    """Return the processes and the ledger without lines that are not the run's."""
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
    """The members since the last --fresh; all members without one. They share worlds with its member, or came later on
    the host of such a member. Clocks of two machines are compared only for a host without such a member."""
    anew = [life for life in lives if any(line.get("is_anew") for line in life.lines)]
    if not anew:
        return {life.member for life in lives}
    newest = max(anew, key=lambda life: life.began)
    own = _related({newest.member}, lives)
    hosts = set(map(host_of, own))
    return own | {life.member for life in lives if host_of(life.member) not in hosts and life.ended >= newest.began}


def _related(own: set[str], lives: Sequence[Life]) -> set[str]:
    """`own`, and the members that shared a world with them or came later on their hosts. Later is by generation, which
    counts on from all that a host's directory shows; for a worker that was in no world, by its start."""
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
"""writer and generation of a line"""


def _discarded_worlds(lives: Sequence[Life]) -> set[_Place]:
    """The worlds of branches that stopped when they met one with more steps, by their members' warnings."""
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
