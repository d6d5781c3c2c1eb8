"""Benchmarks: ours against what a good user would write by hand, interleaved in one run.

One module per benchmark, imported only when it is asked for; each has `run(quick) -> dict` with the keys of
`elastic-train bench --json`, as `table.report` makes them.
"""

from __future__ import annotations

import importlib
from typing import Any

BENCHMARKS = {
    "goodput": "elastic_train.tools.bench.goodput_of_trace",
    "loop": "elastic_train.tools.bench.loop_speed",
    "membership": "elastic_train.tools.bench.membership_load",
    "recovery": "elastic_train.tools.bench.recovery_time",
    "recovery-etcd": "elastic_train.tools.bench.recovery_time_etcd",
    "reduction": "elastic_train.tools.bench.reduction_speed",
    "snapshot": "elastic_train.tools.bench.snapshot_cost",
    "startup": "elastic_train.tools.bench.startup",
}
"""name on the command line -> module"""


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run the benchmark `name`, one of BENCHMARKS. Blocks for seconds (quick) to minutes."""
    report: dict[str, Any] = importlib.import_module(BENCHMARKS[name]).run(quick)
    return report
