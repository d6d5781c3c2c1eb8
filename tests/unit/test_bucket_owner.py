"""The owner of snapshots below a URL, with a fake clock."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from elastic_train.elastic.run_files import RunFiles
from elastic_train.errors import NewerGeneration, ObjectStoreError, OwnershipLost, SnapshotsInUse, Stopped, StoreFault
from elastic_train.stopping import StopSignal
from elastic_train.storage import bucket_owner
from elastic_train.storage.bucket_owner import RENEWAL_SECONDS, RENEWALS_MISSED, BucketOwner
from elastic_train.storage.object_store import ObjectStore, Tries
from elastic_train.storage.ownership import OWNER_RECORD
from elastic_train.storage.store_arms import MemoryArm, Stored
from elastic_train.storage.store_urls import parse_url
from elastic_train.tools.drills.nodes import wait_until

TIMEOUT = RENEWAL_SECONDS * RENEWALS_MISSED


class Machine:
    """A worker that may own, on a clock of its own; `while_waiting` happens between two looks."""

    def __init__(self, store: ObjectStore, host: str, clock: float = 0.0) -> None:
        self.clock = clock
        self.while_waiting: Callable[[], None] = lambda: None
        self.owner = BucketOwner(store, host, clock=lambda: self.clock, sleep=self.sleep, now=lambda: 1.7e9)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.while_waiting()

    def take(self, token: str, generation: int) -> float:
        """Returns how long it waited."""
        began = self.clock
        self.owner.take(token, generation, lambda: None)
        self.enter(token, generation)
        return self.clock - began

    def enter(self, token: str, generation: int) -> None:
        self.owner.enter(token, generation, f"run of {token}", ("an older run",), is_writer=False)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(parse_url(f"memory://{request.node.name.replace('[', '/').rstrip(']')}"))


def test_the_first_job_takes_it_at_once(store: ObjectStore) -> None:
    one = Machine(store, "one")
    assert one.take("job", 0) == 0
    one.owner.check()
    record = one.owner.read()
    assert record is not None
    assert (record.job_token, record.generation, record.run_uid, record.host) == ("job", 0, "run of job", "one")
    assert record.superseded == ("an older run",)


def test_a_job_that_lives_is_not_replaced(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two", clock=5e6)
    one.take("job", 3)
    two.while_waiting = one.owner.check
    with pytest.raises(SnapshotsInUse, match=r"in use by another job \(host one, pid \d+, generation 3"):
        two.take("other", 4)
    one.owner.check()


def test_one_that_renews_late_is_not_replaced_either(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)

    def renew_late() -> None:
        if two.clock >= TIMEOUT - 2:
            one.owner.check()

    two.while_waiting = renew_late
    with pytest.raises(SnapshotsInUse):
        two.take("other", 4)


@pytest.mark.parametrize("is_conditional", [True, False])
def test_one_that_is_gone_is_replaced_after_three_renewals(store: ObjectStore, is_conditional: bool) -> None:
    store._is_conditional = is_conditional
    one, two = Machine(store, "one"), Machine(store, "two", clock=7e6)
    one.take("job", 3)
    assert two.take("other", 4) == pytest.approx(TIMEOUT, abs=2)
    with pytest.raises(OwnershipLost, match=r"now belong to another job \(host two.*writes nothing more"):
        one.owner.check()
    with pytest.raises(OwnershipLost):
        one.owner.raise_if_lost()
    two.owner.check()


def test_a_first_look_that_takes_long_is_no_wait(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)
    get = store.get

    def slow_get(key: str, limit: int | None = None) -> Stored | None:
        monkeypatch.setattr(store, "get", get)
        two.clock += 10 * TIMEOUT
        return get(key, limit)

    two.while_waiting = one.owner.check
    monkeypatch.setattr(store, "get", slow_get)
    with pytest.raises(SnapshotsInUse):
        two.take("other", 4)


def test_one_that_has_left_is_replaced_at_once(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)
    one.owner.leave()
    assert two.take("other", 4) == 0


def test_the_same_job_goes_on_at_once(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)
    assert two.take("job", 4) == 0
    with pytest.raises(NewerGeneration, match="now belong to generation 4"):
        one.owner.check()


def test_the_same_job_does_not_go_back(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 4)
    with pytest.raises(NewerGeneration, match="now belong to generation 4"):
        two.take("job", 3)
    one.owner.check()


def test_another_worker_of_the_job_becomes_the_writer(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)
    two.enter("job", 3)
    two.owner.check()
    one.owner.check()  # both at the same generation, as where all save for the next start
    two.enter("job", 4)
    two.owner.check()
    with pytest.raises(NewerGeneration):
        one.owner.check()
    one.enter("job", 4)
    one.owner.raise_if_lost()
    one.owner.check()


def test_a_start_whose_generation_is_no_higher_is_refused(store: ObjectStore) -> None:
    """The owner came further between this start's look and its claim."""
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 7)
    with pytest.raises(SnapshotsInUse):
        two.take("other", 7)


def test_of_two_that_wait_one_gets_it(store: ObjectStore) -> None:
    one, two, three = (Machine(store, name) for name in ("one", "two", "three"))
    one.take("job", 3)
    two.while_waiting = lambda: three.take("third", 4) if two.clock == TIMEOUT - 2 else None
    with pytest.raises(SnapshotsInUse, match="host three"):
        two.take("second", 4)


def test_a_record_that_cannot_be_read_is_replaced(store: ObjectStore) -> None:
    store.put(OWNER_RECORD, b"{")
    one = Machine(store, "one")
    assert one.take("job", 0) == 0
    store.put(OWNER_RECORD, b"{}")
    with pytest.raises(OwnershipLost, match=r"no valid owner\.json any more"):
        one.owner.check()


class Broken(MemoryArm):
    is_broken = False
    num_failed = 0

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        if self.is_broken:
            self.num_failed += 1
            raise ConnectionResetError
        return super().put_if(key, data, version)


def broken_machine(request: pytest.FixtureRequest) -> tuple[Broken, Machine]:
    url = parse_url(f"memory://{request.node.name}")
    arm = Broken(fsspec.filesystem("memory"), url)
    return arm, Machine(ObjectStore(url, Tries(total=0.0), arm), "one")


def test_a_store_that_fails_neither_loses_nor_confirms(request: pytest.FixtureRequest) -> None:
    arm, one = broken_machine(request)
    one.take("job", 3)
    arm.is_broken = True
    with pytest.raises(ObjectStoreError) as raised:
        one.owner.check()
    assert raised.value.fault is StoreFault.TRANSIENT
    one.owner.raise_if_lost()
    arm.is_broken = False
    one.owner.check()


def test_the_writer_renews_by_itself(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_owner, "RENEWAL_SECONDS", 0.01)
    one = Machine(store, "one")
    one.take("job", 3)
    one.owner.enter("job", 5, "run", (), is_writer=True)

    def record() -> dict[str, object]:
        found = store.get(OWNER_RECORD)
        assert found is not None
        return dict(json.loads(found.data))

    wait_until(lambda: record()["renewals"] >= 3, "three renewals", 10.0)  # type: ignore[operator]
    assert record()["generation"] == 5
    one.owner.leave()
    assert record()["has_left"]
    before = record()["renewals"]
    one.owner.take("job", 6, lambda: None)
    one.owner.renew_in_background()  # what is restored meanwhile may take long
    wait_until(lambda: not record()["has_left"] and record()["renewals"] > before, "a renewal", 10.0)  # type: ignore[operator]
    one.owner.leave()
    Machine(store, "two").take("other", 7)
    one.owner.enter("job", 6, "run", (), is_writer=True)
    wait_until(lambda: one.owner._lost is not None, "it finds out that it was replaced", 10.0)


def test_a_renewal_that_waits_for_its_turn_has_the_newest_world(store: ObjectStore) -> None:
    """The thread that saves waits while the first renewal of a newer world is under way."""
    one = Machine(store, "one")
    one.take("job", 3)
    one.owner.check()
    with one.owner._lock:
        saving = threading.Thread(target=one.owner.check)
        saving.start()
        saving.join(0.2)
        assert saving.is_alive()
        one.enter("job", 4)
    saving.join(10.0)
    record = one.owner.read()
    assert record is not None
    assert record.generation == 4


class EnteredLate(BucketOwner):
    """Enters a world in the moment in which it notes that it has lost the one before."""

    late: Callable[[], None] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_lost" and value is not None and self.late is not None:
            late, self.late = self.late, None
            late()
        super().__setattr__(name, value)


def test_a_loss_is_of_the_world_in_which_it_was_found(store: ObjectStore) -> None:
    one, two = EnteredLate(store, "one"), Machine(store, "two")
    one.take("job", 0, lambda: None)
    one.enter("job", 0, "run", (), is_writer=False)
    two.take("job", 1)  # the writer of the next world, which `one` enters as well
    one.late = lambda: one.enter("job", 1, "run", (), is_writer=False)
    with pytest.raises(NewerGeneration):
        one.check()
    assert one.late is None
    one.raise_if_lost()
    one.check()
    two.take("job", 2)
    for look in (one.check, one.raise_if_lost, one.raise_if_lost):
        with pytest.raises(NewerGeneration, match="generation 2"):
            look()


def test_a_survivor_holds_it_between_worlds(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is lost, and the next world takes longer to form than the next job waits."""
    monkeypatch.setattr(bucket_owner, "RENEWAL_SECONDS", 0.01)
    gone, survivor, other = Machine(store, "gone"), Machine(store, "survivor"), Machine(store, "other")
    survivor.owner.hold()
    gone.take("job", 3)
    survivor.enter("job", 3)
    bucket: Any = SimpleNamespace(owner=survivor.owner)
    worker: Any = SimpleNamespace(bucket=bucket, reporter=SimpleNamespace(warn=None))
    files = RunFiles(worker, "job")
    for rank, has_state in ((1, True), (0, False)):
        world: Any = SimpleNamespace(rank=rank)
        files.hold_bucket(world, has_state=has_state)
    assert survivor.owner._stop is None
    world = SimpleNamespace(rank=0)
    files.hold_bucket(world, has_state=True)

    def holder() -> str:
        record = survivor.owner.read()
        assert record is not None
        assert record.generation == 3, "the next world does not count before it stands"
        return record.host

    wait_until(lambda: holder() == "survivor", "it renews", 10.0)
    files.hold_bucket(world, has_state=True)
    other.while_waiting = lambda: time.sleep(0.1)
    with pytest.raises(SnapshotsInUse):
        other.owner.take("other", 4, lambda: None)
    survivor.owner.leave()


def test_who_waits_says_so_once_and_may_be_stopped(store: ObjectStore) -> None:
    one, two = Machine(store, "one"), Machine(store, "two")
    one.take("job", 3)
    said: list[str] = []
    stop = StopSignal()
    bucket: Any = SimpleNamespace(owner=two.owner)
    reporter = SimpleNamespace(warn=pytest.fail, log=said.append)
    worker: Any = SimpleNamespace(bucket=bucket, reporter=reporter, stop=stop)
    world: Any = SimpleNamespace(rank=0, generation=4)

    def be_told() -> None:
        if two.clock >= 10:
            stop.signum = signal.SIGTERM

    two.while_waiting = be_told
    with pytest.raises(Stopped):
        RunFiles(worker, "other").take_bucket(world, lambda: None)
    assert two.clock == 10
    assert [line.partition(" (")[0] for line in said] == [f"the snapshots in {store} belong to another job"]
    assert "waiting 30 s" in said[0]


def test_an_outage_of_renewals_is_told_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_owner, "RENEWAL_SECONDS", 0.01)
    arm, one = broken_machine(request)
    told: list[str] = []
    one.owner.warn = told.append
    one.take("job", 3)
    one.owner.renew_in_background()
    for outage in (1, 2):
        arm.is_broken, arm.num_failed = True, 0
        wait_until(lambda: arm.num_failed > 5, "it is tried again and again", 10.0)
        assert len(told) == outage
        arm.is_broken = False
        before = one.owner.read()
        wait_until(lambda before=before: one.owner.read() != before, "it works again", 10.0)  # type: ignore[misc]
    one.owner.release()
    assert "another job may take the snapshots over" in told[0]


@pytest.mark.parametrize("data", [b'{"format_version": 7}', b" " * (2**20 + 1)], ids=["newer", "large"])
def test_a_record_that_may_be_somebodys_is_not_free(store: ObjectStore, data: bytes) -> None:
    store.put(OWNER_RECORD, data)
    one = Machine(store, "one")
    with pytest.raises(ObjectStoreError, match=r"format_version '7'.*another --snapshot-dir|none of more than"):
        one.take("job", 0)
    with pytest.raises(ObjectStoreError):
        one.owner.read()
