"""What a snapshot costs training: ours beside torch.save and torch.distributed.checkpoint, one right after the other.

Each way has a process of its own for each round (snapshot_ways.py), so that a first call is one and a peak is its own.
All write the same bytes to the same disk and flush them. A row's ratio is theirs in terms of ours: above 1.0 ours costs
less. Beside memcpy, which copies the same bytes into memory that is there, ours takes at most 1.25 times as long where
the ratio is 0.8 at least.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_train.errors import ElasticTrainError
from elastic_train.tools.bench import table
from elastic_train.tools.bench.snapshot_ways import Cost, Order
from elastic_train.tools.bench.table import BenchRow

OURS = "ours"
RIVALS = ("torch.save", "DCP save", "DCP async_save", "DCP async_save, cached stager")
CHILD_SECONDS = 300.0
LEAST_SECONDS = 0.001
"""of what is lost: less is noise"""


@dataclass(frozen=True)
class SnapshotEffort:
    """How much is measured."""

    num_bytes: int
    rounds: int
    calls: int
    """by each process with a core idle, and as many with none"""


QUICK, THOROUGH = SnapshotEffort(120_000_000, 1, 2), SnapshotEffort(1_200_000_000, 3, 3)


def run(quick: bool) -> dict[str, Any]:
    """The costs of a snapshot, by way."""
    return table.report("snapshot", rows_of(measure_all(QUICK if quick else THOROUGH)))


def measure_all(effort: SnapshotEffort) -> dict[str, list[Cost]]:
    """By way, a cost for each round."""
    found: dict[str, list[Cost]] = {way: [] for way in (OURS, *RIVALS)}
    for _ in range(effort.rounds):
        for way, costs in found.items():
            costs.append(measure_way(way, effort))
    return found


def measure_way(way: str, effort: SnapshotEffort) -> Cost:
    with tempfile.TemporaryDirectory(prefix="elastic_train-bench-") as scratch:
        order = Order(way, effort.num_bytes, effort.calls, str(Path(scratch)))
        command = [sys.executable, "-W", "ignore", "-m", "elastic_train.tools.bench.snapshot_ways"]
        done = subprocess.run(
            [*command, json.dumps(asdict(order))], capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise ElasticTrainError(f"the measurement of {way} ended with code {done.returncode}: {last[0]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(found: Mapping[str, Sequence[Cost]]) -> list[BenchRow]:
    ours = found[OURS]
    rows = []
    for name, unit, cost in _METRICS:
        mine = [cost(one) for one in ours]
        if name.startswith("held up"):
            rows.append(BenchRow.of_costs(f"{name}: memcpy", mine, [one.memcpy for one in ours], unit))
        for rival in RIVALS:
            theirs = [cost(one) for one in found[rival]]
            rows.append(BenchRow.of_costs(f"{name}: {rival}", mine, theirs, unit))
    return rows


def _lost(seconds: Sequence[float]) -> float:
    return max(LEAST_SECONDS, statistics.median(seconds))


_METRICS: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
    ("held up by the first call", "s", lambda cost: cost.blocked[0]),
    ("held up by later calls", "s", lambda cost: statistics.median(cost.blocked[1:])),
    ("until durable", "s", lambda cost: statistics.median(cost.total)),
    ("training lost, a core idle", "s", lambda cost: _lost(cost.lost_idle)),
    ("training lost, all cores busy", "s", lambda cost: _lost(cost.lost_busy)),
    ("memory at the peak", "GB", lambda cost: max(1, cost.extra_bytes) / 1e9),
)
