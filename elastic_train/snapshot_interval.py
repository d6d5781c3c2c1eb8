"""The interval between snapshots: the value of --snapshot-every, and the best interval by failures and costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import UsageError

PRIOR_FAILURE_SECONDS = 6 * 3600.0
"""Before the first failure of a run, one is expected in this time."""
FIRST_SECONDS = 30.0
"""The time until the first snapshot of `auto`, which measures the cost."""
FAILURES = frozenset({"peer_lost", "restart"})
"""Causes of incidents that are failures. Leaves, joins and stops of all nodes are planned (`planned`)."""
_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smh])")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SnapshotInterval:
    """Steps or seconds between snapshots; neither for `auto`, which decides by their cost."""

    steps: int | None = None
    """With 0 there are snapshots only at a stop and at the end."""
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.steps is None and self.seconds is None

    @property
    def first_seconds(self) -> float:
        """The time until the first snapshot of a run, if the interval is not in steps."""
        return FIRST_SECONDS if self.seconds is None else self.seconds


def steps_or_text(text: str) -> int | str:
    """A whole number as an int, any other text as it is."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def interval_of(value: int | str) -> SnapshotInterval:
    """Parse the value of --snapshot-every. Raises: UsageError: it is not valid."""
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
    """Seconds between the starts of two snapshots that lose the least time to snapshots and failures: sqrt(2 C M) - C.

    Young, "A first order approximation to the optimum checkpoint interval" (CACM 17(9), 1974): sqrt(2 C M). Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22(3), 2006), equation 13,
    subtracts the cost. If C is more than half of M, the approximation fails, and the result is C: a snapshot cannot
    begin while another is written.

    Args:
        cost_seconds: C, the training time that one snapshot costs.
        failure_seconds: M, the mean time between failures.
    """
    return max(math.sqrt(2 * cost_seconds * failure_seconds) - cost_seconds, cost_seconds)


def num_failures(incidents: Iterable[Mapping[str, Any]]) -> int:
    return sum(one.get("cause") in FAILURES and not one.get("planned") for one in incidents)


def mean_failure_seconds(wall_seconds: float, failures: int) -> float:
    """Estimate the mean time between failures of a run from its wall time and number of failures.

    The prior is one failure in `PRIOR_FAILURE_SECONDS` (a gamma prior). Without it a run without failures would never
    write, and a run that failed in its first minute would do nothing else.
    """
    return (PRIOR_FAILURE_SECONDS + wall_seconds) / (1 + failures)
