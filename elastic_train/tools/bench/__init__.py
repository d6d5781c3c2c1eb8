"""Benchmarks: ours against what a good user would write by hand, interleaved in one run.

One module per benchmark, imported only when it is run. Each has a function `(quick) -> rows`, of the table in table.py.
"""

from __future__ import annotations

import pkgutil
from typing import Any

BENCHMARKS = {
    "goodput": "elastic_train.tools.bench.goodput_of_trace:run",
    "loop": "elastic_train.tools.bench.loop_speed:run",
    "membership": "elastic_train.tools.bench.membership_load:run",
    "recovery": "elastic_train.tools.bench.recovery_time:run",
    "recovery-etcd": "elastic_train.tools.bench.recovery_time:run_etcd",
    "reduction": "elastic_train.tools.bench.reduction_speed:run",
    "snapshot": "elastic_train.tools.bench.snapshot_cost:run",
    "startup": "elastic_train.tools.bench.startup:run",
}
"""name on the command line -> MODULE:FUNCTION"""


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run the benchmark `name`, one of BENCHMARKS, and report it. Blocks for seconds (quick) to minutes."""
    from elastic_train.tools.bench.table import report

    return report(name, pkgutil.resolve_name(BENCHMARKS[name])(quick))
