"""Snapshots below a URL: in parts, whole or absent wherever a writer ends, read with limits, pruned by the owner."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from elastic_train.errors import OwnershipLost, SnapshotError, UsageError
from elastic_train.storage import parts as parts_module
from elastic_train.storage import places
from elastic_train.storage.appearance import Flight
from elastic_train.storage.bucket import Bucket, BucketSnapshot
from elastic_train.storage.object_store import PROBE_SECONDS, ObjectStore, Tries
from elastic_train.storage.parts import AT_ONCE, PartStream
from elastic_train.storage.places import copy_snapshot, place_at
from elastic_train.storage.signature import read_key
from elastic_train.storage.snapshot import (
    SnapshotFolder,
    SnapshotInfo,
    SnapshotResult,
    find_snapshots,
    first_whole,
    open_verified,
    verify,
)
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.store_arms import MemoryArm, Stored, version_of
from elastic_train.storage.store_urls import parse_url
from elastic_train.tools.drills.nodes import wait_until

PART_BYTES = 4096
KEY = b"0123456789abcdef"


POSITION = {"epoch": 0, "generation": 0, "world_size": 1}


class Stops(BaseException):
    """The process is killed here."""


class CountingArm(MemoryArm):
    """Ends the process before or after the n-th call that changes something; then it does nothing any more."""

    calls = 0
    lock = threading.Lock()
    stops_before: int | None = None
    stops_after: int | None = None
    has_stopped = False

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        with self.lock:
            self.calls += 1
            number = self.calls
        self.has_stopped |= number == self.stops_before
        if self.has_stopped:
            raise Stops
        yield
        if number == self.stops_after:
            self.has_stopped = True
            raise Stops

    def put(self, key: str, data: bytes | bytearray) -> None:
        with self._one_call():
            super().put(key, data)

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        with self._one_call():
            self._require_version(key, version)
            super().put(key, data)
        return version_of(data)

    def remove(self, key: str) -> None:
        with self._one_call():
            super().remove(key)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name.replace('[', '/').rstrip(']')}"


def bucket_of(url: str, arm: MemoryArm | None = None) -> Bucket:
    store = ObjectStore(parse_url(url), Tries(total=0.0), arm)
    store._is_conditional = True
    return Bucket(store, part_bytes=PART_BYTES)


def writer_to(bucket: SnapshotFolder, **options: Any) -> SnapshotWriter:
    return SnapshotWriter(bucket, **{"keep": 2, "host": "one", "run_uid": "run", "task": {}, **options})


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), float(step))}, "run": {"step": step}}


def save(writer: SnapshotWriter, step: int, generation: int = 0) -> SnapshotResult:
    return writer.save(state_of(step), step=step, epoch=0, samples_done=step, generation=generation, world_size=1)


def newest(bucket: Bucket, warnings: list[str] | None = None) -> int | None:
    warn = [].append if warnings is None else warnings.append
    found = first_whole(find_snapshots(bucket, warn=warn), warn)
    if found is None:
        return None
    assert torch.equal(found[1]["model"]["w"], state_of(found[0].step)["model"]["w"])
    return found[0].step


def test_what_is_written_is_read(url: str) -> None:
    bucket = bucket_of(url)
    result = save(writer_to(bucket), 3)
    assert str(result.path) == f"{url}/step-000000000003-gen-0000-one"
    assert newest(bucket) == 3
    files = bucket.store.list()
    part_sizes = [size for key, size in sorted(files.items()) if "/state.pt." in key]
    assert len(part_sizes) == 6
    assert set(part_sizes[:-1]) == {PART_BYTES}
    [info] = find_snapshots(bucket, warn=pytest.fail)
    verify(info)
    manifest = json.loads(bucket.store.get(f"{info.name}/manifest.json").data)  # type: ignore[union-attr]
    assert manifest["format_version"] == 3
    assert [part["host"] for part in manifest["parts"]] == ["one"] * 6
    joined = b"".join(bucket.store.get(f"{info.name}/{part['name']}").data for part in manifest["parts"])  # type: ignore[union-attr]
    assert hashlib.sha256(joined).hexdigest() == manifest["files"]["state.pt"]["sha256"]


def calls_of_a_save(url: str) -> int:
    arm = CountingArm(fsspec.filesystem("memory"), parse_url(f"{url}/counted"))
    bucket = bucket_of(f"{url}/counted", arm)
    writer = writer_to(bucket)
    for step in (1, 2):
        save(writer, step)
    arm.calls = 0
    save(writer, 3)
    return arm.calls


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_every_boundary_it_is_whole_or_absent(url: str, moment: str) -> None:
    """A third snapshot is written, and the first one pruned, with a kill before or after each change."""
    num_calls = calls_of_a_save(url)
    assert num_calls > 10
    seen = set()
    for number in range(1, num_calls + 1):
        arm = CountingArm(fsspec.filesystem("memory"), parse_url(f"{url}/{number}"))
        bucket = bucket_of(f"{url}/{number}", arm)
        writer = writer_to(bucket)
        for step in (1, 2):
            save(writer, step)
        arm.calls = 0
        setattr(arm, f"stops_{moment}", number)
        with pytest.raises(Stops):
            save(writer, 3)
        other = bucket_of(f"{url}/{number}")
        warnings: list[str] = []
        seen.add(newest(other, warnings))
        steps = [info.step for info in find_snapshots(other, warn=warnings.append)]
        assert 2 in steps
        assert warnings == [], "what is not whole has no manifest"
        save(writer_to(other, host="two"), 4, generation=1)
        left = {key.partition("/")[0] for key in other.store.list()}
        assert left == {info.name for info in find_snapshots(other, warn=pytest.fail)}, "leftovers are deleted"
    assert seen == {2, 3}


def test_parts_are_on_their_way_while_others_are_made_and_few_at_once() -> None:
    running, most, release = [0], [0], threading.Event()
    lock = threading.Lock()

    def put(name: str, data: bytearray) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        release.wait(10.0)
        with lock:
            running[0] -= 1

    stream = PartStream(str, put, "host", part_bytes=10)
    writing = threading.Thread(target=stream.write, args=(bytes(100),))
    writing.start()
    writing.join(0.3)
    assert writing.is_alive(), "it waits for those on their way"
    assert len(stream.names) <= AT_ONCE
    release.set()
    writing.join(10.0)
    assert [part.bytes for part in stream.finish()] == [10] * 10
    assert most[0] == AT_ONCE


def test_a_part_that_fails_ends_the_stream() -> None:
    def put(name: str, data: bytearray) -> None:
        raise SnapshotError("no")

    stream = PartStream(str, put, "host", part_bytes=10)
    assert stream.write(bytes(1000)) == 1000
    with pytest.raises(SnapshotError, match="no"):
        stream.finish()
    assert len(stream.names) <= AT_ONCE + 1, "what follows is not sent"


def test_without_a_thread_for_a_part_it_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes, which may be reached for a while."""
    sent, start, starts = dict[str, bytes](), threading.Thread.start, itertools.count()

    def may_start(thread: threading.Thread) -> None:
        if next(starts) % 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    def put(name: str, data: bytearray) -> None:
        sent[name] = bytes(data)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    stream = PartStream(str, put, "host", part_bytes=10)
    stream.write(bytes(range(200)))
    assert b"".join(sent[part.name] for part in stream.finish()) == bytes(range(200))


def test_an_owner_that_was_replaced_makes_nothing_visible(url: str) -> None:
    def replaced() -> None:
        raise OwnershipLost("another job")

    bucket = bucket_of(url)
    with pytest.raises(OwnershipLost):
        save(writer_to(bucket, before_rename=replaced), 1)
    assert bucket.store.list() == {}


def test_a_moment_that_is_there_already_stays(url: str) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket), 1)
    before = bucket.store.list()
    save(writer_to(bucket), 1)
    assert bucket.store.list() == before
    with pytest.raises(SnapshotError, match="another run has one of that name"):
        save(writer_to(bucket, run_uid="other"), 1)


@pytest.mark.parametrize("version", [3, 99])
def test_one_of_another_run_that_this_key_has_not_signed_stays(url: str, version: int) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket, run_uid="theirs"), 1)
    key = "step-000000000001-gen-0000-one/manifest.json"
    found = bucket.store.get(key)
    assert found is not None
    manifest = json.dumps({**json.loads(found.data), "format_version": version}).encode()
    bucket.store.put(key, manifest)
    before = bucket.store.list()
    with pytest.raises(SnapshotError, match="another run has one of that name"):
        save(writer_to(bucket, key=KEY), 1)
    assert bucket.store.list() == before


def test_a_damaged_one_is_skipped_and_written_anew(url: str) -> None:
    bucket = bucket_of(url)
    writer = writer_to(bucket, keep=5)
    for step in (1, 2):
        save(writer, step)
    part = next(key for key in bucket.store.list() if "000002-gen" in key and ".00001." in key)
    bucket.store.put(part, bytes(PART_BYTES))
    warnings: list[str] = []
    assert newest(bucket, warnings) == 1
    assert "is damaged: it is not what its manifest says" in warnings[0]
    bucket.store.delete(part)
    assert newest(bucket, warnings) == 1
    assert warnings[-1].endswith(f"{part.rpartition('/')[2]} is missing, its manifest says {PART_BYTES}")
    save(writer, 2)
    assert newest(bucket) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../other/state.pt.00000"}, "is not the name of a part"),
        ({"name": "manifest.json"}, "is not the name of a part"),
        ({"name": "state.pt./../../x"}, "is not the name of a part"),
        ({"bytes": 2**40}, "bytes"),
        ({"bytes": -1}, "bytes"),
        ({"bytes": True}, "bytes"),
        ({"bytes": 4095}, "its parts have not the"),
    ],
)
def test_a_manifest_that_lies_allocates_nothing(
    url: str, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket), 1)
    key = next(key for key in bucket.store.list() if key.endswith("manifest.json"))
    manifest = json.loads(bucket.store.get(key).data)  # type: ignore[union-attr]
    manifest["parts"][0] |= change
    bucket.store.put(key, json.dumps(manifest).encode())
    read: list[str] = []

    def get(self: ObjectStore, key: str, limit: int | None = None) -> Stored | None:
        read.append(key)
        return original(self, key, limit)

    original = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", get)
    warnings: list[str] = []
    assert newest(bucket, warnings) is None
    assert message in warnings[0]
    assert read == [key]


def test_a_manifest_of_an_absurd_size_is_not_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_train.storage import bucket as bucket_module

    bucket = bucket_of(url)
    save(writer_to(bucket), 1)
    monkeypatch.setattr(bucket_module, "MOST_MANIFEST_BYTES", 100)
    warnings: list[str] = []
    assert newest(bucket, warnings) is None
    assert "which no manifest has" in warnings[0]


def test_the_newest_of_a_run_stay_whoever_wrote_them(url: str) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket, run_uid="other", host="elsewhere"), 1)
    for step, host in ((2, "one"), (3, "two"), (4, "three")):
        save(writer_to(bucket, host=host), step)
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [4, 3, 1]


def test_one_that_is_not_whole_does_not_push_out_one_that_is(url: str) -> None:
    bucket = bucket_of(url)
    writer = writer_to(bucket)
    for step in (1, 2):
        save(writer, step)
    part = next(key for key in bucket.store.list() if "000002-gen" in key and ".00001." in key)
    bucket.store.delete(part)
    save(writer, 3)
    assert newest(bucket) == 3
    assert [info.step for info in find_snapshots(bucket, warn=lambda _damaged: None)] == [3, 1]


def test_what_a_failed_attempt_could_not_delete_goes_with_the_next_one(url: str) -> None:
    """Of the same generation: what has no manifest there may have a writer, but not these."""

    class Outage(MemoryArm):
        is_on = False

        def put(self, key: str, data: bytes | bytearray) -> None:
            super().put(key, data)
            if self.is_on:
                raise TimeoutError("no answer in time")

        def remove(self, key: str) -> None:
            if self.is_on:
                raise TimeoutError("no answer in time")
            super().remove(key)

    arm = Outage(fsspec.filesystem("memory"), parse_url(url))
    bucket = bucket_of(url, arm)
    writer = writer_to(bucket)
    arm.is_on = True
    with pytest.raises(SnapshotError):
        save(writer, 3)
    assert bucket.store.list() != {}
    arm.is_on = False
    assert save(writer, 4).warnings == ()
    assert {key.partition("/")[0] for key in bucket.store.list()} == {"step-000000000004-gen-0000-one"}


def test_one_that_is_given_up_between_two_parts_is_none() -> None:
    """What is written then goes nowhere: what has gone before is whole parts, and must not be taken for all."""
    is_given_up = [False]
    stream = PartStream(str, lambda _name, _data: None, "host", 10, lambda: is_given_up[0])
    stream.write(bytes(20))
    is_given_up[0] = True
    with pytest.raises(SnapshotError, match="given up"):
        stream.finish()


def test_one_that_is_given_up_on_its_way_is_deleted_and_not_told(url: str) -> None:
    """The others of a job have stopped too, and a newer state is to be sent."""
    sending, let_go = threading.Event(), threading.Event()

    class Slow(MemoryArm):
        def put(self, key: str, data: bytes | bytearray) -> None:
            sending.set()
            assert let_go.wait(10.0)
            super().put(key, data)

    bucket = bucket_of(url, Slow(fsspec.filesystem("memory"), parse_url(url)))
    writer = writer_to(bucket)
    assert not writer.give_up(state_of(3), 3)
    assert writer.save_in_background(state_of(3), step=3, samples_done=3, **POSITION)
    assert sending.wait(10.0)
    assert not writer.give_up({"model": {"w": torch.full((2,), float("nan"))}}, 4), "the last good one"
    assert writer.give_up(state_of(4), 4)
    let_go.set()
    save(writer, 4)
    assert writer.collect() == []
    assert {key.partition("/")[0] for key in bucket.store.list()} == {"step-000000000004-gen-0000-one"}
    assert writer.save_in_background(state_of(5), step=5, samples_done=5, **POSITION), "and the next one is not"
    assert writer.wait(10.0)
    assert newest(bucket) == 5


class WatchedArm(MemoryArm):
    """Counts what is read and deleted. While it is held up, no part is deleted to the end."""

    def __init__(self, url: str) -> None:
        super().__init__(fsspec.filesystem("memory"), parse_url(url))
        self.read_keys: Counter[str] = Counter()
        self.deleted: list[str] = []
        self.is_deleting, self.let_go = threading.Semaphore(0), threading.Event()
        self.let_go.set()

    def read(self, key: str, limit: int | None = None) -> Stored | None:
        self.read_keys[key] += 1
        return super().read(key, limit)

    def remove(self, key: str) -> None:
        self.deleted.append(key)
        if "/state.pt." in key:
            self.is_deleting.release()
            assert self.let_go.wait(10.0)
        super().remove(key)


def test_a_manifest_is_read_once_however_long_its_snapshot_stays(url: str) -> None:
    arm = WatchedArm(url)
    bucket = bucket_of(url, arm)
    writer = writer_to(bucket, keep=9)
    for step in range(1, 9):
        assert save(writer, step).warnings == ()
    assert max(arm.read_keys.values()) <= 2, "once by who looks, and once where the fake creates it"
    [part, *_] = [key for key in bucket.store.list() if "000003-gen" in key and "/state.pt." in key]
    bucket.store.delete(part)
    save(writer, 9)
    save(writer, 10)
    steps = [info.step for info in find_snapshots(bucket, warn=lambda _damaged: None)]
    assert steps == [10, 9, 8, 7, 6, 5, 4, 2, 1], "the one that was damaged since pushes none out"


def deleting_the_first(url: str) -> tuple[WatchedArm, Bucket, SnapshotWriter]:
    """The second of two snapshots is there, and the parts of the first are deleted as soon as the arm lets go."""
    arm = WatchedArm(url)
    bucket = bucket_of(url, arm)
    writer = writer_to(bucket, keep=1)
    save(writer, 1)
    arm.let_go.clear()
    assert writer.save_in_background(state_of(2), step=2, samples_done=2, **POSITION)
    return arm, bucket, writer


def test_old_ones_are_deleted_several_parts_at_a_time(url: str) -> None:
    arm, bucket, writer = deleting_the_first(url)
    for _ in range(AT_ONCE):
        assert arm.is_deleting.acquire(timeout=10.0)
    assert arm.deleted[0].endswith("/manifest.json"), "a reader finds the whole snapshot or none"
    arm.let_go.set()
    assert writer.wait(10.0)
    assert {key.partition("/")[0] for key in bucket.store.list()} == {"step-000000000002-gen-0000-one"}


def test_the_last_state_does_not_wait_until_old_ones_are_deleted(url: str) -> None:
    """Nor is the one before, which is there, told to be given up."""
    arm, bucket, writer = deleting_the_first(url)
    assert arm.is_deleting.acquire(timeout=10.0)
    assert not writer.give_up(state_of(3), 3)
    flight = writer._flight

    def let_go_when_awaited() -> None:
        wait_until(lambda: flight.is_awaited, "who waits for it")
        arm.let_go.set()

    threading.Thread(target=let_go_when_awaited).start()
    writer.save(state_of(3), step=3, samples_done=3, is_stop=True, **POSITION)
    assert len(arm.deleted) <= 1 + AT_ONCE, "its manifest, and what was on its way"
    [second] = writer.collect()
    assert isinstance(second, SnapshotResult)
    assert (second.step, second.warnings) == (2, ())
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [3, 2]
    save(writer, 4)
    assert {key.partition("/")[0] for key in bucket.store.list()} == {"step-000000000004-gen-0000-one"}


def test_a_job_that_saves_at_stops_alone_deletes_old_ones_then(url: str) -> None:
    for step in (1, 2, 3):
        writer_to(bucket_of(url)).save(state_of(step), step=step, samples_done=step, is_stop=True, **POSITION)
    assert [info.step for info in find_snapshots(bucket_of(url), warn=pytest.fail)] == [3, 2]


def test_one_is_given_up_or_there() -> None:
    checks: list[str] = []
    flight = Flight(lambda: checks.append("owner"))
    assert flight.give_up()
    with pytest.raises(SnapshotError, match="given up"):
        flight.check()
    flight = Flight(lambda: checks.append("owner"))
    flight.check()
    assert not flight.give_up()
    assert not flight.is_given_up()
    flight.check()
    assert checks == ["owner", "owner"]


def test_parts_of_this_generation_may_have_a_writer(url: str) -> None:
    bucket = bucket_of(url)
    for generation in (4, 5):
        bucket.store.put(f"step-000000000001-gen-{generation:04d}-two/state.pt.00000.ab", b"x")
    save(writer_to(bucket), 7, generation=5)
    assert {key.partition("/")[0] for key in bucket.store.list()} == {
        "step-000000000001-gen-0005-two",
        "step-000000000007-gen-0005-one",
    }


def test_with_a_key_only_what_it_has_signed_is_read(url: str, tmp_path: Path) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket, key=KEY, keep=5), 1)
    save(writer_to(bucket, keep=5), 2)
    save(writer_to(bucket, key=b"another key of 16", keep=5), 3)
    save(SnapshotWriter(tmp_path, keep=5, host="one", run_uid="run", task={}, key=KEY), 4)
    save(SnapshotWriter(tmp_path, keep=5, host="one", run_uid="run", task={}), 5)
    for place, signed, unsigned in ((bucket, [1], 2), (tmp_path, [4], 1)):
        warnings: list[str] = []
        assert [info.step for info in find_snapshots(place, warn=warnings.append, key=KEY)] == signed
        assert len(warnings) == unsigned
        told = "\n".join(warnings)
        assert "it has no signature, and --snapshot-key asks for one" in told
        assert ("its signature is not of --snapshot-key" in told) == (place is bucket)
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [3, 2, 1], "without a key all are"


def test_a_key_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(UsageError, match=r"--snapshot-key .*/key cannot be read: No such file"):
        read_key(path)
    path.write_bytes(b"short\n")
    with pytest.raises(UsageError, match=r"holds 5 bytes: 16 at least make a key; openssl rand -hex 32 > "):
        read_key(path)
    path.write_bytes(KEY + b"\n")
    assert read_key(path) == KEY


def test_a_signature_holds_for_every_field_and_through_a_copy(url: str, tmp_path: Path) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket, key=KEY), 1)
    copy_snapshot(url, str(tmp_path / "copies"), warn=pytest.fail)
    [info] = find_snapshots(tmp_path / "copies", warn=pytest.fail, key=KEY)
    path = tmp_path / "copies" / info.name / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in set(manifest) - {"signature", "format_version"}:
        value = manifest[name]
        changed = {**value, "more": 1} if isinstance(value, dict) else f"{value}1"
        path.write_text(json.dumps({**manifest, name: changed}))
        assert find_snapshots(tmp_path / "copies", warn=lambda _: None, key=KEY) == [], name


def test_a_copy_is_the_same_bytes_there_and_back(url: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(SnapshotWriter(tmp_path, keep=5, host="one", run_uid="run", task={}), step)
    name = "step-000000000001-gen-0000-one"
    info, place = copy_snapshot(str(tmp_path / name), url, warn=pytest.fail)
    assert (info.step, place) == (1, f"{url}/{name}")
    assert newest(bucket_of(url)) == 1
    copy_snapshot(f"{url}/{name}", str(tmp_path / "back"), warn=pytest.fail)
    copy_snapshot(str(tmp_path), str(tmp_path / "back"), warn=pytest.fail)
    copy_snapshot(str(tmp_path), str(tmp_path / "back"), warn=pytest.fail)
    assert [info.step for info in find_snapshots(tmp_path / "back", warn=pytest.fail)] == [2, 1]
    for file in ("state.pt", "manifest.json"):
        assert (tmp_path / "back" / name / file).read_bytes() == (tmp_path / name / file).read_bytes()
    with pytest.raises(SnapshotError, match="no whole snapshot in memory://"):
        copy_snapshot(f"{url}/nothing", str(tmp_path / "back"), warn=pytest.fail)


@pytest.mark.parametrize("is_url", [False, True])
@pytest.mark.parametrize("typed", [".", "../mine", "../link"], ids=["inside", "renamed", "link"])
def test_a_copy_has_the_name_by_which_a_start_finds_it(
    url: str, typed: str, is_url: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = url if is_url else str(tmp_path / "copies")
    name = Path(str(save(writer_to(tmp_path / "run", host="a host"), 3).path)).name
    os.rename(tmp_path / "run" / name, tmp_path / "mine")
    (tmp_path / "link").symlink_to("mine")
    monkeypatch.chdir(tmp_path / "mine")
    for _ in range(2):
        info, place = copy_snapshot(typed, target, warn=pytest.fail)
        assert (info.step, place) == (3, f"{target}/{name}")
    [found] = find_snapshots(place_at(target), warn=pytest.fail)  # type: ignore[arg-type]  # a place of many
    assert (found.name, found.files) == (name, info.files)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("has_some", [False, True])
def test_a_copy_to_a_run_directory_lies_where_a_start_looks(tmp_path: Path, has_some: bool, is_elsewhere: bool) -> None:
    source = save(writer_to(tmp_path / "source"), 3).path
    run_dir = tmp_path / "run"
    folder = tmp_path / "elsewhere" if is_elsewhere else run_dir / "snapshots"
    (run_dir / "events").mkdir(parents=True)
    config = {"snapshot_dir": str(folder) if is_elsewhere else None}
    (run_dir / "events" / "a.jsonl").write_text(json.dumps({"event": "start", "time": 1.0, "config": config}) + "\n")
    if has_some:
        save(writer_to(folder), 1)
    _, place = copy_snapshot(str(source), str(run_dir), warn=pytest.fail)
    assert place == f"{folder}/{Path(str(source)).name}"
    assert find_snapshots(folder, warn=pytest.fail)[0].step == 3


@pytest.mark.parametrize("is_url", [False, True])
def test_a_copy_does_not_lie_in_a_snapshot(url: str, tmp_path: Path, is_url: bool) -> None:
    place = str(save(writer_to(bucket_of(url) if is_url else tmp_path), 3).path)
    with pytest.raises(SnapshotError, match=f"{place} names one snapshot: name what it is to lie in"):
        copy_snapshot(str(save(writer_to(tmp_path / "other"), 4).path), place, warn=pytest.fail)


def test_a_copy_of_the_newest_is_fetched_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(writer_to(bucket_of(url)), step)
    fetched, fetch_into = [], BucketSnapshot._fetch_into

    def count(place: BucketSnapshot, *arguments: Any) -> None:
        fetched.append(place.name)
        fetch_into(place, *arguments)

    monkeypatch.setattr(BucketSnapshot, "_fetch_into", count)
    copy_snapshot(url, str(tmp_path), warn=pytest.fail)
    assert fetched == ["step-000000000002-gen-0000-one"]


@pytest.mark.parametrize("is_url", [False, True])
def test_what_is_pruned_as_it_is_copied_is_not_the_newest(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_url: bool
) -> None:
    source: Any = bucket_of(url) if is_url else tmp_path / "source"
    for step in (1, 2):
        save(writer_to(source), step)

    def prune_and_open(info: SnapshotInfo) -> Any:
        if info.step == 2 and isinstance(info.path, Path):
            shutil.rmtree(info.path)
        elif info.step == 2:
            source.delete(info.path)
        return open_verified(info)

    monkeypatch.setattr(places, "open_verified", prune_and_open)
    info, _ = copy_snapshot(str(source), str(tmp_path / "target"), warn=pytest.fail)
    assert info.step == 1


def test_a_url_names_one_snapshot_or_many(url: str) -> None:
    save(writer_to(bucket_of(url)), 1)
    one = place_at(f"{url}/step-000000000001-gen-0000-one")
    assert not isinstance(one, Path)
    assert str(one) == f"{url}/step-000000000001-gen-0000-one"
    assert str(place_at(url)) == url
    assert place_at("runs/a") == Path("runs/a")


def test_a_full_disk_for_what_is_fetched_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket), 1)
    with open("/dev/full", "w+b", buffering=0) as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
        with pytest.raises(SnapshotError, match=r"No space left on device.*set TMPDIR"):
            newest(bucket)


def test_the_parts_of_a_large_state_are_of_a_size_that_is_read() -> None:
    assert parts_module.PART_BYTES <= parts_module.MOST_PART_BYTES


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_what_a_start_that_was_killed_has_probed_with_goes_and_never_what_one_that_lives_does(
    url: str, call: int, is_after: bool
) -> None:
    """The owner goes by its own clock, for as long as no start that lives takes."""
    arm, now = CountingArm(fsspec.filesystem("memory"), parse_url(url)), [0.0]
    arm.stops_before, arm.stops_after = (None, call) if is_after else (call, None)
    with contextlib.suppress(Stops):
        ObjectStore(parse_url(url), Tries(total=0.0), arm).require_writable()
    store = ObjectStore(parse_url(url), Tries(total=0.0), clock=lambda: now[0])
    writer = writer_to(Bucket(store, part_bytes=PART_BYTES))

    def probes() -> set[str]:
        return {key for key in ObjectStore(parse_url(url)).list() if key.startswith("probe-")}

    left, others = probes(), {"probe-results.csv", f"probe-{1:016x}/data"}  # of the person whose bucket it is
    for other in others:
        store.put(other, b"0")
    save(writer, 1)
    now[0] = PROBE_SECONDS - 1.0
    young = f"probe-{0:016x}"
    store.put(young, b"0")
    save(writer, 2)
    assert probes() == {*left, young, *others}
    now[0] = PROBE_SECONDS
    save(writer, 3)
    assert probes() == {young, *others}
