"""A job's entry in etcd, its lease and its end, where etcd loses it or is slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.protocol.arbiter import MOVED_SECONDS
from elastic_train.rendezvous import etcd_job
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease
from elastic_train.rendezvous.etcd_store import Guard


@pytest.mark.parametrize(
    ("seconds", "entry", "between"), [(60.0, 86400.0, 15.0), (3600.0, 86400.0, 15.0), (3600.0, 40.0, 10.0)]
)
def test_each_looks_at_the_entry_in_time_to_find_another_one(seconds: float, entry: float, between: float) -> None:
    """However long etcd may be away."""
    store: Any = SimpleNamespace()
    job = JobEntry("prefix", lease=1, lease_seconds=entry, guard=Guard("key", 1))
    assert NodeLease(store, job, "node", "address", seconds).seconds_between == between
    assert etcd_job.MOST_BETWEEN < MOVED_SECONDS / 2
