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
from elastic_train.tools.audit.lives import Life

TOLERANCE_SECONDS = 2.0
"""a clock that is off by less counts as right: members do not write that their world stands at quite the same moment"""


@dataclass
class _Clock:
    """Of one process."""

    life: Life
    reading: str = "monotonic"
    """which of its two it is; `time` in runs of versions that wrote no other"""
    offset: float | None = None
    """what that clock lacks of the common one; None where nobody can tell"""

    def __post_init__(self) -> None:
        of_lines = (isinstance(line.get("monotonic"), int | float) for line in self.life.lines)
        if not all(of_lines) or not all(step.monotonic is not None for step in self.life.steps):
            self.reading, self.offset = "time", 0.0

    def set_right(self) -> None:
        if self.offset is None:
            return
        for line in self.life.lines:
            line["time"] = line[self.reading] + self.offset
        for step in self.life.steps:
            if step.monotonic is not None and self.reading == "monotonic":
                step.time = step.monotonic + self.offset


def set_right(lives: Iterable[Life]) -> None:
    """Let the `time` of every event be by one clock: what most machines' said when the run began.

    Nothing changes for those who never were in a world, and next to nothing for those whose clocks were right.
    """
    clocks = [_Clock(life) for life in lives]
    meetings: dict[int, list[tuple[_Clock, Line]]] = defaultdict(list)
    for clock in clocks:
        for line in clock.life.lines:
            if line["event"] == "world":
                meetings[int(line["generation"])].append((clock, line))
    now = -math.inf
    for generation, present in sorted(meetings.items()):
        # Where nobody is known, the clocks vote; of two that differ the earlier, since a time that lies ahead is wrong
        # for certain. And generations never go back in time.
        now = max(now, median_low(_written(present, median_low([line["time"] for _, line in present]))))
        unknown = [(clock, line) for clock, line in present if clock.offset is None]
        written = _written(present, now)
        for clock, line in unknown:
            if _is_near(line, written):  # then it knows better than the moment does
                clock.offset = line["time"] - line["monotonic"]
        for clock, line in unknown:
            if clock.offset is None:
                later = (there for number, there in meetings.items() if number > generation)
                clock.offset = _right_later(clock, later)
            if clock.offset is None:
                clock.offset = now - line["monotonic"]
    for clock in clocks:
        clock.set_right()


def _written(present: Sequence[tuple[_Clock, Line]], otherwise: float) -> list[float]:
    """When its members that are known have written that a generation stood."""
    return [line[clock.reading] + clock.offset for clock, line in present if clock.offset is not None] or [otherwise]


def _is_near(line: Line, written: Sequence[float]) -> bool:
    """Whether the wall clock of a line is right, as far as these moments tell."""
    return bool(min(written) - TOLERANCE_SECONDS <= line["time"] <= max(written) + TOLERANCE_SECONDS)


def _right_later(clock: _Clock, meetings: Iterable[Sequence[tuple[_Clock, Line]]]) -> float | None:
    """The offset of a clock that is right in one of these generations; None where it is in none.

    Then it was in the one before, too, and its member was late to write: the first step of a world, a state that is
    still being sent, or a busy machine keep one for seconds.
    """
    for present in meetings:
        own = [line for other, line in present if other is clock]
        written = _written(present, math.inf)
        for line in own:
            if _is_near(line, written):
                return float(line["time"] - line["monotonic"])
    return None
