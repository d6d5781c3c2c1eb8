"""One clock for what many processes wrote down: the wall clock of any machine may be wrong, or be set while it runs.

Every line has `time`, by such a clock, and `monotonic`, by one that nobody sets but that begins anywhere. All members
of a generation write that their world stands at nearly the same moment, but for one that is late now and then. So each
generation tells what the monotonic clocks of its members show at one moment, and members that are in several tie all
generations together. Who has written as late as another one of the generation, whose clock is known, is not wrong: both
may have waited for a state that was being sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from elastic_train.runlog.reader import Line

TOLERANCE_SECONDS = 2.0
"""a clock that is off by less counts as right: members do not write that their world stands at quite the same moment"""


@dataclass
class _Life:
    """The lines of one process."""

    lines: list[Line]
    reading: str = "monotonic"
    """of which of its clocks; `time` in runs of versions that wrote no other"""
    offset: float | None = None
    """what that clock lacks of the common one; None where nobody can tell"""

    def __post_init__(self) -> None:
        if not all(isinstance(line.get("monotonic"), int | float) for line in self.lines):
            self.reading, self.offset = "time", 0.0


def set_right(files: Iterable[Sequence[Line]]) -> None:
    """Let the `time` of every line be by one clock: what most machines' said when the run began.

    `files` are the lines of each event file. Nothing changes for those who never were in a world, and next to nothing
    for those whose clocks were right.
    """
    lives = [life for lines in files for life in _lives(lines)]
    meetings: dict[int, list[tuple[_Life, Line]]] = defaultdict(list)
    for life in lives:
        for line in life.lines:
            if line["event"] == "world":
                meetings[int(line["generation"])].append((life, line))
    now = -math.inf
    for generation, present in sorted(meetings.items()):
        # Where nobody is known, the clocks vote; of two that differ the earlier, since a time that lies ahead is wrong
        # for certain. And generations never go back in time.
        now = max(now, _moment(present, median_low([line["time"] for _, line in present])))
        unknown = [(life, line) for life, line in present if life.offset is None]
        written = _written(present, now)
        for life, line in unknown:
            if _is_near(line, written):  # then it knows better than the moment does
                life.offset = line["time"] - line["monotonic"]
        for life, line in unknown:
            if life.offset is None:
                life.offset = _right_later(life, (there for number, there in meetings.items() if number > generation))
            if life.offset is None:
                life.offset = now - line["monotonic"]
    for life in lives:
        if life.offset is not None:
            for line in life.lines:
                line["time"] = line[life.reading] + life.offset


def _moment(present: Sequence[tuple[_Life, Line]], otherwise: float) -> float:
    """When a generation stood, by those of its members that are known."""
    return median_low(_written(present, otherwise))


def _written(present: Sequence[tuple[_Life, Line]], otherwise: float) -> list[float]:
    """When its members that are known have written that a generation stood."""
    return [line[life.reading] + life.offset for life, line in present if life.offset is not None] or [otherwise]


def _is_near(line: Line, written: Sequence[float]) -> bool:
    """Whether the wall clock of a line is right, as far as these moments tell."""
    return bool(min(written) - TOLERANCE_SECONDS <= line["time"] <= max(written) + TOLERANCE_SECONDS)


def _right_later(life: _Life, meetings: Iterable[Sequence[tuple[_Life, Line]]]) -> float | None:
    """The offset of a clock that is right in one of these generations; None where it is in none.

    Then it was in the one before, too, and its member was late to write: the first step of a world, a state that is
    still being sent, or a busy machine keep one for seconds.
    """
    for present in meetings:
        own = [line for other, line in present if other is life]
        written = _written(present, math.inf)
        for line in own:
            if _is_near(line, written):
                return float(line["time"] - line["monotonic"])
    return None


def _lives(lines: Sequence[Line]) -> list[_Life]:
    """In containers several processes, one after the other, have the same name and so the same file."""
    found: list[list[Line]] = []
    was_in_a_world = True
    for line in lines:
        is_in_a_world = line.get("generation") is not None
        if line["event"] == "start" or (was_in_a_world and not is_in_a_world) or not found:
            found.append([])
        found[-1].append(line)
        was_in_a_world = is_in_a_world
    return [_Life(own) for own in found]
