"""A job's entry in etcd, its lease and its end, where etcd loses it or is slow."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elastic_train.errors import LeftOut
from elastic_train.protocol.arbiter import MOVED_SECONDS
from elastic_train.rendezvous import etcd_job
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import Guard
from tests.simulation.etcd import EtcdServer, Failed


@pytest.mark.parametrize(
    ("seconds", "entry", "between"), [(60.0, 86400.0, 15.0), (3600.0, 86400.0, 15.0), (3600.0, 40.0, 10.0)]
)
def test_each_looks_at_the_entry_in_time_to_find_another_one(seconds: float, entry: float, between: float) -> None:
    """However long etcd may be away."""
    store: Any = SimpleNamespace()
    job = JobEntry("prefix", lease=1, lease_seconds=entry, guard=Guard("key", 1))
    assert NodeLease(store, job, "node", "address", seconds).seconds_between == between
    assert etcd_job.MOST_BETWEEN < MOVED_SECONDS / 2


class Near(Connections):
    """To a simulated cluster; where it is slow its replies to grants come too late."""

    metadata = None

    def __init__(self) -> None:
        super().__init__(EtcdSettings(("etcd",), grace=60.0))
        self.now = 0.0
        self.is_slow = False
        self.granted: list[int] = []
        self.server = server = EtcdServer(SimpleNamespace(kernel=SimpleNamespace(now=0.0, after=lambda *_: None)))  # type: ignore[arg-type]
        self.clock, self.sleep = lambda: self.now, self._pass  # type: ignore[method-assign]
        self.kvstub = SimpleNamespace(
            Range=self._stub(server.range), Txn=self._stub(server.txn), DeleteRange=self._stub(server.delete_range)
        )
        keep_alive = self._stub(server.keep_alive)
        self.leasestub = SimpleNamespace(
            LeaseGrant=self._stub(self._grant, is_slow=True),
            LeaseRevoke=self._stub(server.revoke),
            LeaseKeepAlive=lambda requests, *_others, **_named: iter([keep_alive(next(requests))]),
        )

    def client(self) -> Any:
        return 0, self

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _grant(self, request: Any) -> Any:
        response = self.server.grant(request)
        self.granted.append(response.ID)
        return response

    def _stub(self, answer: Callable[[Any], Any], *, is_slow: bool = False) -> Callable[..., Any]:
        def call(request: Any, timeout: float = 0.0, metadata: object = None) -> Any:
            found = answer(request)
            if is_slow and self.is_slow:
                self.now += timeout
                raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
            return found

        return call


def test_a_slow_etcd_is_left_with_one_lease_of_an_entry() -> None:
    """Each call is made, and repeated as its reply comes too late; who repeats it is told that the lease is there."""
    near = Near()
    near.is_slow = True
    etcd = Etcd(near, deadline=60.0)
    job = etcd_job.open_job(etcd, near.settings, "run", 86400.0)
    assert near.granted == [job.lease]


def test_who_leaves_a_lost_entry_leaves_the_next_one_alone() -> None:
    """In a cluster that came back empty, both may have been created by the same revision."""
    near = Near()
    etcd = Etcd(near, deadline=2.0)
    lost = etcd_job.open_job(etcd, near.settings, "run", 86400.0)
    near.server.clear()
    job = etcd_job.open_job(etcd, near.settings, "run", 86400.0)
    assert (lost.guard, lost.prefix != job.prefix) == (job.guard, True)
    with pytest.raises(LeftOut):
        etcd_job.leave_job(etcd, lost, "worker", lambda _places: [])
    assert etcd.get(job.guard.key) is not None
    etcd_job.leave_job(etcd, job, "worker", lambda _places: [])
    assert etcd.below("/elastic_train/")[0] == []
