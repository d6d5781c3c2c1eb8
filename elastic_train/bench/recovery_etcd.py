"""The same as recovery.py where nodes meet in an etcd cluster of three members, started for it: joins are in place."""

from __future__ import annotations

from typing import Any

from elastic_train.bench import table
from elastic_train.bench.recovery import Case, measure_all
from elastic_train.drills.backends import Etcd3

THOROUGH = (Case(3, 1, 20, limit=0.25, worst=1.0, backend=Etcd3.name, join_limit=0.15),)
QUICK = (Case(3, 1, 3, limit=0.25, worst=1.0, backend=Etcd3.name, join_limit=0.15),)


def run(quick: bool) -> dict[str, Any]:
    """Quick: about a minute; else some five."""
    return table.report("recovery-etcd", measure_all(QUICK if quick else THOROUGH))
