"""Benchmarks: ours against what a good user would write by hand, interleaved in one run.

One module per benchmark, imported only when it is asked for; each has `run(quick) -> dict` with the keys of
`elastic-train bench --json`, as `table.report` makes them.
"""

from __future__ import annotations

import importlib
from typing import Any

BENCHMARKS = {
    "goodput": "elastic_train.bench.goodput",
    "loop": "elastic_train.bench.loop",
    "membership": "elastic_train.bench.membership",
    "recovery": "elastic_train.bench.recovery",
    "recovery-etcd": "elastic_train.bench.recovery_etcd",
    "reduction": "elastic_train.bench.reduction",
    "startup": "elastic_train.bench.startup",
}
"""name on the command line -> module"""


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run the benchmark `name`, one of BENCHMARKS. Blocks for seconds (quick) to minutes."""
    report: dict[str, Any] = importlib.import_module(BENCHMARKS[name]).run(quick)
    return report
