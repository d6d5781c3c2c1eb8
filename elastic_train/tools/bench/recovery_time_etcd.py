"""The same as recovery_time.py where nodes meet in an etcd cluster of three members, started for it."""

from __future__ import annotations

from typing import Any

from elastic_train.tools.bench import recovery_time as recovery
from elastic_train.tools.bench import table
from elastic_train.tools.drills.backends import Etcd3


def run(quick: bool) -> dict[str, Any]:
    """As long as recovery_time.py takes."""
    return table.report("recovery-etcd", recovery.measure_all(Etcd3.name, quick))
