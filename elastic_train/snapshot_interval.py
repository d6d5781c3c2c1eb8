"""How often snapshots are written: what --snapshot-every says, and the interval that failures and costs call for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import UsageError

PRIOR_FAILURE_SECONDS = 6 * 3600.0
"""before a run has seen any failure, one is expected in so long"""
FIRST_SECONDS = 30.0
"""to the first snapshot of `auto`, after which its cost is known"""
FAILURES = frozenset({"peer_lost", "restart"})
"""causes of incidents; who leaves or joins does so as planned, and so do all who are told to stop (`planned`)"""
_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smh])")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SnapshotInterval:
    """Steps or seconds between snapshots; neither where it is decided by what they cost."""

    steps: int | None = None
    """0: none but those at a stop and at the end"""
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.steps is None and self.seconds is None

    @property
    def first_seconds(self) -> float:
        """To the first one of a run, where it does not go by steps."""
        return FIRST_SECONDS if self.seconds is None else self.seconds


def steps_or_text(text: str) -> int | str:
    """A number as a number, whatever else as it is."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def interval_of(value: int | str) -> SnapshotInterval:
    """Raises: UsageError: --snapshot-every says nothing that works."""
    if isinstance(value, int):
        if value < 0:
            raise UsageError(f"--snapshot-every {value}: must be at least 0")
        return SnapshotInterval(steps=value)
    if value == "auto":
        return SnapshotInterval()
    found = _TIME.fullmatch(value)
    seconds = float(found["number"]) * _UNIT_SECONDS[found["unit"]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"--snapshot-every {value}: must be steps such as 100, a time such as 30s, 5m or 1h, or auto")
    return SnapshotInterval(seconds=seconds)


def best_interval(cost_seconds: float, failure_seconds: float) -> float:
    """Seconds from the start of one snapshot to the next that lose the least time, to snapshots and failures together:
    sqrt(2 C M) - C.

    Young, "A first order approximation to the optimum checkpoint interval" (CACM 17(9), 1974): sqrt(2 C M). Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22(3), 2006), equation 13, takes
    the cost itself off. Where C is more than half of M the approximation breaks down: C then, for no snapshot can begin
    while another one is written.

    Args:
        cost_seconds: C, training time that one snapshot costs.
        failure_seconds: M, mean time between failures.
    """
    return max(math.sqrt(2 * cost_seconds * failure_seconds) - cost_seconds, cost_seconds)


def num_failures(incidents: Iterable[Mapping[str, Any]]) -> int:
    return sum(one.get("cause") in FAILURES and not one.get("planned") for one in incidents)


def mean_failure_seconds(wall_seconds: float, failures: int) -> float:
    """Mean time between failures of a run that has seen so many in so long.

    It begins with the belief in one failure in `PRIOR_FAILURE_SECONDS` (a gamma prior). Without it a run that has seen
    no failure would never write, and one that failed in its first minute would do nothing else.
    """
    return (PRIOR_FAILURE_SECONDS + wall_seconds) / (1 + failures)
