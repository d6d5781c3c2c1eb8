"""Charts as HTML that adapts to its width: lanes, lines and bars, placed in percent, coloured by classes.

Only the curve itself is SVG, stretched to the area; text is HTML and keeps its size on a phone. Whatever can be pointed
at is a link, so that it can be reached with the keyboard.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

MAX_POINTS = 1600


@dataclass(frozen=True)
class Segment:
    """A stretch of a lane."""

    start: float
    end: float
    kind: str
    """CSS class"""
    title: str


@dataclass(frozen=True)
class Mark:
    """Something at one place of the x axis that leads to a row of a table."""

    at: float
    href: str
    title: str
    kind: str = "fault"


@dataclass(frozen=True)
class Axis:
    """The range of one axis, never empty."""

    low: float
    high: float

    @staticmethod
    def over(values: Iterable[float]) -> Axis:
        found = [value for value in values if math.isfinite(value)]
        low, high = min(found, default=0.0), max(found, default=1.0)
        return Axis(low, high if high > low else low + 1.0)

    def percent(self, value: float) -> float:
        """0 to 100, whatever the value is."""
        return max(0.0, min(100.0, 100.0 * (value - self.low) / (self.high - self.low)))

    def ticks(self, count: int = 5) -> list[float]:
        """Some round numbers within the range."""
        step = nice_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= rough * (1 - 1e-9))


def lanes(rows: Sequence[tuple[str, Sequence[Segment]]], x: Axis, marks: Sequence[Mark], unit: str) -> str:
    """One row per name with its segments, the marks across all of them, and the x axis below. What all names begin with
    (a host, up to its slash) is left out: there is room for a few characters."""
    common = os.path.commonpath([name for name, _ in rows]) if len(rows) > 1 else ""
    begin = len(common) + 1 if common else 0
    body = "".join(
        f'<div class="lane"><span class="lane-name" title="{escape(name)}"><bdi>{escape(name[begin:])}</bdi></span>'
        '<div class="lane-area">' + "".join(_segment(segment, x) for segment in segments) + "</div></div>"
        for name, segments in rows
    )
    return f'<div class="lanes">{body}<div class="lane-marks">{_marks(marks, x)}</div></div>{_x_axis(x, unit)}'


def curve(
    points: Sequence[tuple[float, float]], x: Axis, y: Axis, marks: Sequence[Mark], *, x_unit: str, label: str
) -> str:
    """A line through the points, with both axes; `label` says what it shows, for who does not see it."""
    path = " ".join(f"{x.percent(a) * 10:.2f},{(100 - y.percent(b)) * 2:.2f}" for a, b in thinned(points))
    y_ticks = "".join(f'<span style="bottom:{y.percent(tick):.2f}%">{number(tick)}</span>' for tick in y.ticks(4))
    lines = "".join(f'<i style="bottom:{y.percent(tick):.2f}%"></i>' for tick in y.ticks(4))
    return (
        f'<div class="plot"><div class="y">{y_ticks}</div><div class="area">{lines}'
        f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<polyline points="{path}"/></svg>{_marks(marks, x)}</div></div>{_x_axis(x, x_unit)}'
    )


def bar(parts: Sequence[tuple[str, float, str]], total: float, unit: str = "s") -> str:
    """(name, value, CSS class) side by side; `total` fills the whole width."""
    return '<div class="bar">' + "".join(
        f'<span class="{escape(kind)}" style="width:{100 * value / total:.3f}%" '
        f'title="{escape(name)} {value:.3f} {unit}"></span>'
        for name, value, kind in parts
        if total > 0 and value > 0
    ) + "</div>"  # fmt: skip


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(name, CSS class)."""
    items = "".join(f'<li><span class="key {escape(kind)}"></span>{escape(name)}</li>' for name, kind in entries)
    return f'<ul class="legend">{items}</ul>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, ids: Sequence[str] = (), is_prose: bool = False
) -> str:
    """Cells are HTML; `ids` name the rows for links to them. `is_prose`: on a phone it wraps, where others scroll."""
    titles = "".join(f"<th scope=col>{escape(title)}</th>" for title in head)
    kind = ' class="prose"' if is_prose else ""
    lines = []
    for index, row in enumerate(rows):
        name = f' id="{escape(ids[index])}" tabindex="-1"' if ids else ""
        lines.append(f"<tr{name}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table{kind}><thead><tr>'
        f"{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def number(value: float) -> str:
    """Short, as a person writes it at an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Few enough points to draw; of each bucket the lowest and the highest, so that no spike is lost."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / (MAX_POINTS // 2))
    kept = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {bucket.index(min(bucket, key=lambda p: p[1])), bucket.index(max(bucket, key=lambda p: p[1]))}
        kept += [bucket[index] for index in sorted(ends)]
    return kept


def _segment(segment: Segment, x: Axis) -> str:
    left, right = x.percent(segment.start), x.percent(segment.end)
    return (
        f'<span class="{escape(segment.kind)}" style="left:{left:.3f}%;width:{right - left:.3f}%" '
        f'title="{escape(segment.title)}"></span>'
    )


def _marks(marks: Sequence[Mark], x: Axis) -> str:
    return "".join(
        f'<a class="mark {escape(mark.kind)}" href="{escape(mark.href)}" style="left:{x.percent(mark.at):.3f}%" '
        f'title="{escape(mark.title)}" aria-label="{escape(mark.title)}"></a>'
        for mark in marks
    )


def _x_axis(x: Axis, unit: str) -> str:
    ticks = x.ticks(5)
    spans = "".join(f'<span style="left:{x.percent(tick):.2f}%">{number(tick)}</span>' for tick in ticks)
    return f'<div class="x">{spans}<b>{escape(unit)}</b></div>'
