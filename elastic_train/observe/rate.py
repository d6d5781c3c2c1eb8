"""Samples per second, smoothed for people."""

from __future__ import annotations

import math
import time

SMOOTHING_SECONDS = 3.0


class Rate:
    """Samples per second, smoothed over the last few refreshes so that the figure is readable."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._samples = 0
        self._since = time.monotonic()

    def restart(self) -> None:
        self._samples, self._since, self.per_second = 0, time.monotonic(), 0.0

    def add(self, samples: int) -> None:
        self._samples += samples

    def update(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed <= 0:
            return
        current = self._samples / elapsed
        weight = 1.0 if self.per_second == 0.0 else 1.0 - math.exp(-elapsed / SMOOTHING_SECONDS)
        self.per_second += weight * (current - self.per_second)
        self._samples, self._since = 0, now
