"""What the page's charts need that no template can compute: axes, their ticks, and points few enough to draw."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_POINTS = 1600


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


def short_number(value: float) -> str:
    """As a person writes it at an axis."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def shared_length(names: Sequence[str]) -> int:
    """Of what all names begin with (a host, up to its slash): a lane has room for a few characters."""
    shared = os.path.commonpath(names) if len(names) > 1 else ""
    return len(shared) + 1 if shared else 0


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
