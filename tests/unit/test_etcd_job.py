"""A job's entry in etcd, its lease and its end, where etcd loses it or is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.arbiter import MOVED_SECONDS
from elastic_train.protocol.probes import Probe
from elastic_train.rendezvous import etcd_connections, etcd_job
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections, Entry
from elastic_train.rendezvous.etcd_finder import EtcdFinder
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.world import Address
from tests.simulation.etcd import EtcdServer, Failed


@pytest.mark.parametrize(
    ("seconds", "entry", "between"), [(60.0, 86400.0, 15.0), (3600.0, 86400.0, 15.0), (3600.0, 40.0, 10.0)]
)
def test_each_looks_at_the_entry_in_time_to_find_another_one(seconds: float, entry: float, between: float) -> None:
    """However long etcd may be away."""
    etcd: Any = SimpleNamespace()
    job = JobEntry("prefix", lease=1, lease_seconds=entry, guard=Entry("key", b"", 1, 1, 1, 0))
    assert NodeLease(etcd, job, "node", "address", seconds).seconds_between == between
    assert etcd_job.MOST_BETWEEN < MOVED_SECONDS / 2


class Near(Connections):
    """To a simulated cluster; where it is slow its replies to grants come too late."""

    metadata = None

    def __init__(self) -> None:
        super().__init__(EtcdSettings(("etcd",), grace=60.0))
        self.now = 0.0
        self.is_slow = self.is_full = False
        self.granted: list[int] = []
        self.server = server = EtcdServer(SimpleNamespace(kernel=SimpleNamespace(now=0.0, after=lambda *_: None)))  # type: ignore[arg-type]
        self.clock, self.sleep = lambda: self.now, self._pass  # type: ignore[method-assign]
        self.kvstub = SimpleNamespace(Range=self._stub(server.range), Txn=self._transact)
        self.leasestub = SimpleNamespace(
            LeaseGrant=self._stub(self._grant, is_slow=True),
            LeaseRevoke=self._stub(server.revoke),
            LeaseKeepAlive=self._stub(server.keep_alive),
        )
        self.channel = SimpleNamespace(unary_unary=lambda *_: self.leasestub.LeaseKeepAlive)

    def client(self) -> Any:
        return 0, self

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _grant(self, request: Any) -> Any:
        response = self.server.grant(request)
        self.granted.append(response.ID)
        return response

    def _transact(self, request: Any, timeout: float = 0.0, metadata: object = None) -> Any:
        if self.is_full:
            self.now += timeout
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "never")
        return self.server.txn(request)

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
    job = etcd_job.open_job(etcd, near.settings, "run", lambda job: job, 86400.0)
    assert near.granted == [job.lease]


def test_a_keeper_that_etcd_does_not_answer_for_long_draws_one_lease_of_a_day() -> None:
    near, turns = Near(), list[Callable[[], None]]()
    near.is_full = True

    def repeat(_seconds: float, turn: Callable[[], None]) -> Callable[[float], None]:
        turns.append(turn)
        return lambda _timeout: None

    told: list[str] = []
    finder = EtcdFinder(
        near, "run", uid="u", address=("h", 1), lease=60.0, check=lambda: None, log=told.append, warn=told.append,
        earlier=lambda: [("h", 2)], repeat=repeat,
    )  # fmt: skip
    for _ in range(5):
        turns[0]()
    assert len(near.granted) == 1
    near.is_full = False
    turns[0]()
    own: Any = finder._own
    assert [near.granted[0], near.granted[-1]] == [own.job.lease, own.lease]
    assert len(near.server._leases) == 2


def test_a_start_waits_the_grace_where_etcd_reads_and_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while it has no leader, or its disk stalls: that the entry is there already ends nobody."""
    near = Near()
    etcd_job.open_job(Etcd(near, deadline=2.0), near.settings, "run", lambda job: job, 86400.0)
    near.is_full = True

    def sleep(seconds: float) -> None:
        near.now += seconds
        near.is_full = near.now < 40.0

    monkeypatch.setattr(near, "sleep", sleep)
    finder = EtcdFinder(
        near, "run", uid="u", address=("h", 1), lease=60.0, check=lambda: None, log=print, warn=print,
        repeat=lambda _seconds, _turn: lambda _timeout: None,
    )  # fmt: skip
    assert 40.0 <= near.now < 60.0
    assert finder.is_beginner()


@pytest.mark.parametrize("num_dead", [3, 40, 500])
@pytest.mark.parametrize("last", [Probe.REFUSED, Probe.ACCEPTED, Probe.SILENT])
def test_the_last_worker_removes_the_entry_however_many_were_killed(num_dead: int, last: Probe) -> None:
    near = Near()
    etcd = Etcd(near, deadline=2.0)
    job = etcd_job.open_job(etcd, near.settings, "run", lambda job: job, 86400.0)
    store = job.store(etcd)
    for number in range(num_dead):
        etcd_job.note_worker(store, job, f"w{number:03}", ("h", number))
    etcd_job.note_worker(store, job, "x", ("h", 1000))
    looks: list[int] = []

    def probe_all(places: Sequence[Address]) -> list[Probe]:
        looks.append(len(places))
        return [last if port == 1000 else Probe.REFUSED for _, port in places]

    etcd_job.leave_job(etcd, job, "w000", probe_all)
    assert max(looks) <= etcd_job.MOST_PROBED
    left = {one.key.rpartition("/")[2] for one in etcd.below(f"{job.prefix}/workers/")[0]}
    assert left == (set() if last is Probe.REFUSED else {"x"})
    assert (etcd.get(job.guard.key) is None) == (last is Probe.REFUSED)


def test_who_leaves_many_that_live_looks_at_some_of_them() -> None:
    near = Near()
    etcd = Etcd(near, deadline=2.0)
    job = etcd_job.open_job(etcd, near.settings, "run", lambda job: job, 86400.0)
    store = job.store(etcd)
    for number in range(100):
        etcd_job.note_worker(store, job, f"w{number:03}", ("h", number))
    looked_at: list[int] = []

    def probe_all(places: Sequence[Address]) -> list[Probe]:
        looked_at.extend(port for _, port in places)
        return [Probe.ACCEPTED for _ in places]

    etcd_job.leave_job(etcd, job, "w090", probe_all)
    assert looked_at == [*range(91, 100), *range(7)]
    assert etcd.get(job.guard.key) is not None


def test_a_lease_that_runs_out_within_a_turn_of_its_keeper_is_granted_again() -> None:
    """As on a machine that is frozen between two calls; agents took it for the end of the job."""
    near = Near()
    etcd = Etcd(near, deadline=2.0)
    job = etcd_job.open_job(etcd, near.settings, "run", lambda job: job)
    own = NodeLease(etcd, job, "node", "address", 10.0)
    own.keep()
    before, transact = own.lease, near.kvstub.Txn

    def late(*arguments: Any, **named: Any) -> Any:
        near.kvstub.Txn = transact
        etcd.revoke(before)
        return transact(*arguments, **named)

    near.kvstub.Txn = late
    own.keep()
    entry = etcd.get(own.key)
    assert entry is not None
    assert entry.lease == own.lease != before


def leave_as_worker(etcd: Etcd, job: JobEntry) -> None:
    etcd_job.leave_job(etcd, job, "worker", lambda _places: [])


def leave_as_agent(etcd: Etcd, job: JobEntry) -> None:
    etcd_job.delete_job(etcd, job, unless_below=(f"{job.prefix}/nodes/",))


@pytest.mark.parametrize("leave", [leave_as_worker, leave_as_agent])
def test_who_leaves_a_lost_entry_leaves_the_next_one_alone(leave: Callable[[Etcd, JobEntry], None]) -> None:
    """In a cluster that came back empty, both may have been created by the same revision."""
    near = Near()
    etcd = Etcd(near, deadline=2.0)
    lost = etcd_job.open_job(etcd, near.settings, "run", lambda job: job, 86400.0)
    near.server.clear()
    job = etcd_job.open_job(etcd, near.settings, "run", lambda job: job, 86400.0)
    assert lost.guard.create_revision == job.guard.create_revision
    assert lost.prefix != job.prefix
    leave(etcd, lost)
    assert etcd.get(job.guard.key) is not None
    leave(etcd, job)
    assert etcd.below("/elastic_train/")[0] == []


def test_a_password_is_checked_once_however_many_attempts_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd checks those of all workers at once. Checks that were broken off would keep it busy for ever."""
    checked: list[float] = []

    def client(*_where: Any, timeout: float, **_how: Any) -> Any:
        checked.append(timeout)
        time.sleep(min(timeout, 1.0))
        if timeout < 1.0:
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "busy")
        return Near()

    monkeypatch.setattr(etcd_connections, "ATTEMPT_SECONDS", 0.1)
    connections = Connections(EtcdSettings(("etcd:1",)))
    connections.etcd3 = SimpleNamespace(client=client, etcdrpc=connections.etcd3.etcdrpc)
    with pytest.raises(StoreUnreachable, match="has not authenticated"):
        Etcd(connections, deadline=0.2).get("key")
    assert Etcd(connections, deadline=60.0).get("key") is None
    assert len(checked) == 1
