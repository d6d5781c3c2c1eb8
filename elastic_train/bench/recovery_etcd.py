"""The same as recovery.py where nodes meet in an etcd cluster of three members, started for it."""

from __future__ import annotations

from typing import Any

from elastic_train.bench import recovery, table
from elastic_train.drills.backends import Etcd3


def run(quick: bool) -> dict[str, Any]:
    """As long as recovery.py takes."""
    return table.report("recovery-etcd", recovery.measure_all(Etcd3.name, quick))
