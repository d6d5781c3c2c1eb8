"""A clock that somebody sets: a machine's wall clock jumps, and its monotonic clock does not."""

from __future__ import annotations

import subprocess
import time

from elastic_train.tools.drills.faketime import REREAD_SECONDS, NodeClocks
from elastic_train.tools.drills.injection import Disturbance, NotInjected

OFFSET_SECONDS = 3600
"""a time zone, or daylight saving, that somebody took for the time"""


class SetClock(Disturbance):
    name = "clock"
    says = "a node's clock jumps by an hour, ahead or back, and after ten seconds back again"
    needs_clocks = True
    undo_after = 10.0  # longer than any timeout that a clock could end

    @classmethod
    def why_not(cls) -> str | None:
        return NodeClocks.why_not()

    def inject(self) -> str:
        place, clocks = self.place, self.cluster.clocks
        assert clocks is not None
        processes = [self.agent(), *place.workers()]
        if honest := [process.pid for process in processes if not clocks.is_mapped(process.pid)]:
            raise NotInjected(f"libfaketime is not in process {honest[0]}")
        offset = self.rng.choice((OFFSET_SECONDS, -OFFSET_SECONDS))
        clocks.set(place.index, offset)
        try:
            seen = clocks.offset(place.index)
        except subprocess.SubprocessError as error:
            raise NotInjected(f"its clock cannot be read: {error}") from error
        if abs(seen - offset) > 1:
            raise NotInjected(f"its clock was set {offset:+d} s off, and is {seen:+.0f} s off")
        return f"the clock is {seen:+.0f} s off in all {len(processes)} processes"

    def undo(self) -> None:
        assert self.cluster.clocks is not None
        self.cluster.clocks.set(self.place.index, 0)
        self._right_from = time.monotonic() + REREAD_SECONDS

    def is_cleared(self) -> bool:
        return time.monotonic() > self._right_from
