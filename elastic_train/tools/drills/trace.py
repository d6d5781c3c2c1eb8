"""Availability traces: when each node is there, read from CSV, and the moves with which a drill replays them.

    node,from,to,notice,price
    a,0,,0,0.40
    b,0,60,30,0.12
    b,90,,0,0.12

Times are seconds from any moment; the drill begins at the earliest `from`. An empty `to` means to the end. `notice` is
in seconds before `to`, 0 for none; `price` is that of the node per hour. Both columns may be left out.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from elastic_train.errors import UsageError, first_line
from elastic_train.tools.drills.schedule import Planned

NEEDED, OPTIONAL = ("node", "from", "to"), ("notice", "price")


@dataclass(frozen=True)
class Stay:
    """A row: the stay of a node from `start` to `end`."""

    node: str
    start: float
    """seconds, as in the file"""
    end: float
    """the same; infinite if the node stays"""
    notice: float = 0.0
    price: float | None = None
    """per hour"""


class Act(Enum):
    """A change to a node, in the order within the same moment; the value is the fault that causes it."""

    TAKE = "kill"
    START = "join"
    NOTICE = "stop"


@dataclass(frozen=True)
class Move:
    at: float
    """seconds of the drill"""
    act: Act
    place: int
    """of the node, from 0 in the order in which nodes come"""
    is_fault: bool = True
    """whether it is a fault of its own: the end of a node after a notice is not"""


@dataclass(frozen=True)
class AvailabilityTrace:
    """The contents of a file."""

    stays: tuple[Stay, ...]
    """by start"""
    speed: float

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in the order in which they come, which is that of the drill's places."""
        return tuple(dict.fromkeys(stay.node for stay in self.stays))

    @property
    def first(self) -> tuple[int, ...]:
        """The places that have a node from the beginning."""
        start = self.stays[0].start
        return tuple(self.nodes.index(stay.node) for stay in self.stays if stay.start == start)

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves after the beginning, by time."""
        found = [move for stay in self.stays for move in self._moves_of(stay)]
        return tuple(sorted(found, key=lambda move: (move.at, list(Act).index(move.act))))

    @property
    def plan(self) -> list[Planned]:
        return [Planned(move.at, move.act.value) for move in self.moves if move.is_fault]

    @property
    def new_beginnings(self) -> list[tuple[float, list[str]]]:
        """(when, nodes that begin) for each new beginning of a job that all nodes have left; times as in the file."""
        ends = sorted({stay.end for stay in self.stays} - {math.inf})
        empty = [at for at in ends if not any(stay.start < at < stay.end for stay in self.stays)]
        following = [min(stay.start for stay in self.stays if stay.start >= at) for at in empty]
        return [(start, [stay.node for stay in self.stays if stay.start == start]) for start in following]

    def as_json(self) -> dict[str, object]:
        """For drill.json."""
        rows = [
            {
                "node": stay.node,
                "place": f"node{self.nodes.index(stay.node) + 1}",
                "from": stay.start,
                "to": None if stay.end == math.inf else stay.end,
                "notice": stay.notice,
                "price": stay.price,
            }
            for stay in self.stays
        ]
        return {"trace": rows, "speed": self.speed}

    def _moves_of(self, stay: Stay) -> Iterable[Move]:
        place = self.nodes.index(stay.node)
        if stay.start > self.stays[0].start:
            yield Move(self._scaled(stay.start), Act.START, place)
        if stay.end < math.inf:
            if stay.notice:
                yield Move(self._scaled(stay.end - stay.notice), Act.NOTICE, place)
            yield Move(self._scaled(stay.end), Act.TAKE, place, is_fault=not stay.notice)

    def _scaled(self, at: float) -> float:
        return (at - self.stays[0].start) / self.speed


def read_trace(path: Path, speed: float) -> AvailabilityTrace:
    """Read a trace. Raises: UsageError naming the file, the line, the value and what would work."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--trace {path} cannot be read: {first_line(error)}") from error
    if not set(NEEDED) <= set(columns) <= {*NEEDED, *OPTIONAL} or len(set(columns)) < len(columns):
        told = ",".join(columns) or "nothing"
        raise UsageError(f"--trace {path}, line 1: {told}: write a line with node,from,to and, if wanted, notice,price")
    stays = [_stay(f"--trace {path}, line {number}", row) for number, row in rows]
    _check(path, stays)
    return AvailabilityTrace(tuple(sorted(stays, key=lambda stay: stay.start)), speed)


def _stay(where: str, row: dict[str, str | None]) -> Stay:
    if None in row or None in row.values():
        raise UsageError(f"{where}: it has not as many values as line 1 has names; leave none out, but it may be empty")
    values = {name: (value or "").strip() for name, value in row.items()}
    if not values["node"]:
        raise UsageError(f"{where}: node is empty: write its name")
    start = _number(where, "from", values["from"])
    end = _number(where, "to", values["to"]) if values["to"] else math.inf
    notice = _number(where, "notice", values["notice"]) if values.get("notice") else 0.0
    price = _number(where, "price", values["price"]) if values.get("price") else None
    if end <= start:
        raise UsageError(f"{where}: to = {end:g} is not after from = {start:g}: write a later one, or none to stay")
    if notice > end - start or (notice and end == math.inf):
        raise UsageError(
            f"{where}: notice = {notice:g} is longer than the node is there, or it stays: write 0, or less"
        )
    return Stay(values["node"], start, end, notice, price)


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        what = "price" if name == "price" else "number of seconds"
        raise UsageError(f"{where}: {name} = {text!r} is no {what}: write 0 or more, such as 90 or 0.5")
    return value


def _check(path: Path, stays: Sequence[Stay]) -> None:
    """Check the rows together. Raises: UsageError: they contradict each other, or make no drill."""
    if len({stay.node for stay in stays}) < 2:
        raise UsageError(f"--trace {path}: it has {len({stay.node for stay in stays})} nodes: a drill needs two")
    if len({stay.price is None for stay in stays}) > 1:
        raise UsageError(f"--trace {path}: some rows have a price and some none: write one in every row, or in none")
    by_node = sorted(stays, key=lambda stay: (stay.node, stay.start))
    for before, after in itertools.pairwise(by_node):
        if before.node == after.node and after.start < before.end:
            raise UsageError(
                f"--trace {path}: {after.node} comes at {after.start:g} and is there until {before.end:g}: "
                "end the earlier row before"
            )
    if all(stay.end < math.inf for stay in stays):
        last = max(stay.end for stay in stays)
        raise UsageError(f"--trace {path}: nobody is left after {last:g} s: leave one `to` empty, for the job's end")
    if all(stay.end == math.inf and stay.start == stays[0].start for stay in stays):
        raise UsageError(f"--trace {path}: nothing happens in it: write a row with `to`, or with a later `from`")
