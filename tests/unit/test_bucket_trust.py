"""Snapshots below a URL and untrusted writers: forged ones, a replaced owner, a lost
answer, an object that the store keeps to itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastic_train import cli
from elastic_train.errors import (
    NewerGeneration,
    ObjectStoreError,
    OwnershipLost,
    SnapshotDamaged,
    SnapshotDenied,
    SnapshotError,
)
from elastic_train.storage import places
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.bucket_owner import BucketOwner, BucketRecord
from elastic_train.storage.object_store import ObjectStore, Tries
from elastic_train.storage.ownership import OWNER_RECORD
from elastic_train.storage.places import copy_snapshot, place_at
from elastic_train.storage.retention import Retention
from elastic_train.storage.snapshot import find_snapshots, read_info, verify
from elastic_train.storage.store_arms import MemoryArm, Stored
from elastic_train.storage.store_urls import parse_url
from tests.unit.test_bucket import KEY, bucket_of, newest, save, url, writer_to

__all__ = ["url"]


class LosingArm(MemoryArm):
    """Puts a manifest and loses the answer, then refuses every question."""

    before_put: Callable[[], None] = staticmethod(lambda: None)
    loses = 0
    is_gone = False

    def read(self, key: str, limit: int | None = None) -> Any:
        if self.is_gone:
            raise ConnectionResetError
        return super().read(key, limit)

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        self.before_put()
        if self.loses:
            self.loses -= 1
            with_answer = super().put_if(key, data, version)
            self.is_gone = self.loses == 0
            raise ConnectionResetError(with_answer)
        return super().put_if(key, data, version)


def losing(url: str, **options: Any) -> tuple[Bucket, LosingArm]:
    arm = LosingArm(fsspec.filesystem("memory"), parse_url(url))
    store = ObjectStore(parse_url(url), Tries(longest_wait=0.01, **options), arm)
    store._is_conditional = True
    return Bucket(store, part_bytes=4096), arm


class WithholdingArm(MemoryArm):
    """Refuses to give some objects, as a store does whose old ones are archived."""

    withheld = re.compile("(?!)")
    status, code = 403, "InvalidObjectState"
    """0 is an error of the store's library"""

    def read(self, key: str, limit: int | None = None) -> Stored:
        if self.withheld.search(key):
            if not self.status:
                raise RuntimeError(self.code)
            error = OSError("refused")
            error.response = {  # type: ignore[attr-defined]
                "Error": {"Code": self.code},
                "ResponseMetadata": {"HTTPStatusCode": self.status},
            }
            raise error
        return super().read(key, limit)


def withholding(url: str) -> tuple[Bucket, WithholdingArm]:
    arm = WithholdingArm(fsspec.filesystem("memory"), parse_url(url))
    return bucket_of(url, arm), arm


def forge(bucket: Bucket, step: int, generation: int) -> None:
    save(writer_to(bucket, host="forger", keep=99), step, generation)


@pytest.mark.parametrize("is_folder", [True, False])
def test_forged_ones_do_not_push_out_what_is_signed(url: str, tmp_path: Path, is_folder: bool) -> None:
    place: Any = tmp_path if is_folder else bucket_of(url)
    for step in (1, 2):
        save(writer_to(place, key=KEY), step)
    for step in (1, 2, 3):
        forge(place, step, generation=9000)
    save(writer_to(place, key=KEY), 3)
    found = find_snapshots(place, warn=lambda _unsigned: None, key=KEY)
    assert [info.step for info in found] == [3, 2]


def test_what_was_just_written_stays_whatever_is_there(url: str) -> None:
    bucket = bucket_of(url)
    for step in (1, 2, 3):
        forge(bucket, step, generation=9000)
    result = save(writer_to(bucket), 3)
    assert bucket.snapshot(result.path.name).read_info().step == 3


def test_a_forged_one_in_its_place_is_replaced(url: str, tmp_path: Path) -> None:
    for place in (bucket_of(url), tmp_path):
        save(writer_to(place), 7)  # type: ignore[arg-type]  # a folder is one, too
        save(writer_to(place, key=KEY), 7)  # type: ignore[arg-type]
        assert [info.step for info in find_snapshots(place, warn=pytest.fail, key=KEY)] == [7]


def test_a_copy_destroys_nothing_of_another_run(url: str, tmp_path: Path) -> None:
    """Nor what its key has not signed, which others may have."""
    source = str(tmp_path / "source")
    for theirs, options in ((f"{url}/other", {"run_uid": "other"}), (f"{url}/unsigned", {}), (tmp_path / "folder", {})):
        place = theirs if isinstance(theirs, Path) else bucket_of(theirs)
        save(writer_to(Path(source), key=KEY), 7)
        save(writer_to(place, **options), 7)  # type: ignore[arg-type]  # a folder is one, too
        [before] = find_snapshots(place, warn=pytest.fail)
        for key, message in ((KEY, "it has no signature.*move it out of the way first"), (None, "is another one")):
            with pytest.raises(SnapshotError, match=message) if key or options else nullcontext():
                copy_snapshot(source, str(theirs), warn=pytest.fail, key=key)
            assert find_snapshots(place, warn=pytest.fail) == [before]


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_copy_that_has_rotted_is_no_copy(url: str, tmp_path: Path, is_folder: bool) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "copies") if is_folder else url
    save(writer_to(Path(source)), 7)
    info, place = copy_snapshot(source, target, warn=pytest.fail)
    if is_folder:
        (Path(place) / "state.pt").write_bytes(bytes((Path(place) / "state.pt").stat().st_size))
    else:
        bucket = bucket_of(url)
        [part] = [key for key in bucket.store.list() if "/state.pt." in key]
        bucket.store.put(part, bytes(bucket.store.list()[part]))
    warnings: list[str] = []
    copy_snapshot(source, target, warn=warnings.append)
    assert [warning.partition("snapshot ")[0] for warning in warnings] == ["replaced: "]
    [copied] = find_snapshots(place_at(target), warn=pytest.fail)
    verify(copied)
    assert copied.files == info.files
    if is_folder:
        assert [path.name for path in (tmp_path / "copies").iterdir()] == [info.name]
    else:
        assert len(bucket.store.list()) == 2, "nothing is left of the damaged one"


def test_a_copy_that_a_job_has_taken_for_a_leftover_is_not_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(writer_to(tmp_path, run_uid="copied"), 7)
    bucket, arm = losing(url)
    monkeypatch.setattr(places, "place_at", lambda text: bucket if text == url else place_at(text))

    def prune() -> None:
        arm.before_put = lambda: None
        assert save(writer_to(bucket_of(url)), 9, generation=5).warnings == ()

    arm.before_put = prune
    with pytest.raises(SnapshotError, match=r"state.pt.00000.\w+ is missing.*; .* copy it once more"):
        copy_snapshot(str(tmp_path), url, warn=pytest.fail)
    assert {key.partition("/")[0] for key in bucket.store.list()} == {"step-000000000009-gen-0005-one"}
    copy_snapshot(str(tmp_path), url, warn=pytest.fail)
    for info in find_snapshots(bucket, warn=pytest.fail):
        verify(info)


class LateArm(MemoryArm):
    """Does something between a listing and its answer."""

    after_listing: Callable[[], None] | None = None

    def list(self, prefix: str) -> dict[str, int]:
        found = super().list(prefix)
        late, self.after_listing = self.after_listing, None
        if late is not None:
            late()
        return found


def test_what_the_store_refused_to_give_for_a_moment_is_no_leftover(url: str) -> None:
    """Credentials that have just been given do not work at once for every request."""

    class HesitantArm(WithholdingArm):
        def read(self, key: str, limit: int | None = None) -> Stored:
            try:
                return super().read(key, limit)
            finally:
                if self.withheld.search(key):
                    self.withheld = re.compile("(?!)")

    for step in (1, 2):
        save(writer_to(bucket_of(url), keep=9), step)
    arm = HesitantArm(fsspec.filesystem("memory"), parse_url(url))
    arm.withheld, arm.code = re.compile("step-000000000001.*manifest"), "AccessDenied"
    save(writer_to(bucket_of(url, arm), keep=9), 3, generation=1)
    assert arm.withheld.pattern == "(?!)"
    found = find_snapshots(bucket_of(url), warn=pytest.fail)
    assert [info.step for info in found] == [3, 2, 1]
    for info in found:
        verify(info)


def test_what_becomes_whole_behind_a_listing_is_no_leftover(url: str) -> None:
    arm = LateArm(fsspec.filesystem("memory"), parse_url(url))
    bucket = bucket_of(url, arm)
    save(writer_to(bucket, run_uid="copied"), 7)
    key = "step-000000000007-gen-0000-one/manifest.json"
    manifest = bucket.store.get(key)
    assert manifest is not None
    bucket.store.delete(key)

    def appear() -> None:
        bucket.store.put(key, manifest.data)

    arm.after_listing = appear
    assert bucket.prune("step-000000000009-gen-0005-one", keep=Retention(1), run_uid="run") == []
    [whole] = find_snapshots(bucket, warn=pytest.fail)
    verify(whole)


def test_one_snapshot_by_its_url_is_asked_for_its_signature(url: str) -> None:
    bucket = bucket_of(url)
    place = save(writer_to(bucket), 1).path
    with pytest.raises(SnapshotDamaged, match="it has no signature"):
        read_info(place, KEY)


def test_an_owner_that_is_replaced_between_two_tries_makes_nothing_visible(url: str) -> None:
    bucket, arm = losing(url, total=5.0)
    owners: list[str] = []

    def check() -> None:
        if owners:
            raise OwnershipLost("another job")

    def fail_once() -> None:
        owners.append("another job")
        raise ConnectionResetError

    arm.before_put = fail_once
    with pytest.raises(OwnershipLost):
        save(writer_to(bucket, before_rename=check), 1)
    assert bucket.store.list() == {}


@pytest.mark.parametrize("error", [OwnershipLost("another job"), NewerGeneration("the others")])
def test_one_that_is_replaced_while_it_puts_takes_it_back(url: str, error: OwnershipLost) -> None:
    bucket, arm = losing(url)
    owners: list[str] = []

    def check() -> None:
        if owners:
            raise error

    arm.before_put = lambda: owners.append("another job")
    with pytest.raises(OwnershipLost):
        save(writer_to(bucket, before_rename=check), 1)
    assert bucket.store.list() == {}


def test_a_lost_answer_destroys_no_snapshot(url: str) -> None:
    bucket, arm = losing(url, total=0.0)
    arm.loses = 1
    with pytest.raises(SnapshotError, match="cannot be written"):
        save(writer_to(bucket), 5)
    arm.is_gone = False
    assert newest(bucket) == 5


def test_a_lost_answer_that_is_asked_again_is_found(url: str) -> None:
    bucket, arm = losing(url, total=5.0)
    arm.loses = 1
    checks = iter([None, None, None])

    def check() -> None:
        arm.is_gone = False
        next(checks)

    assert save(writer_to(bucket, before_rename=check), 5).step == 5
    assert newest(bucket) == 5


def test_manifests_of_this_run_whose_parts_are_gone_are_deleted_once_their_generation_is_over(url: str) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket), 1, generation=3)
    save(writer_to(bucket, run_uid="other", host="elsewhere"), 1, generation=3)
    for key in bucket.store.list():
        if ".00001." in key:
            bucket.store.delete(key)
    save(writer_to(bucket), 2, generation=3)
    assert len({key.partition("/")[0] for key in bucket.store.list()}) == 3
    save(writer_to(bucket, keep=9), 3, generation=4)
    left = {key.partition("/")[0] for key in bucket.store.list()}
    assert left == {
        "step-000000000001-gen-0003-elsewhere",
        "step-000000000002-gen-0003-one",
        "step-000000000003-gen-0004-one",
    }


DEEP = b"[" * 200_000
RECORD = BucketRecord("job", 1, "run", (), "host", 1, 1.7e9)


def of(manifest: dict[str, Any], **changes: str) -> bytes:
    """With JSON as it stands in the place of fields."""
    text = json.dumps({**manifest, **{name: f"@{name}" for name in changes}})
    for name, value in changes.items():
        text = text.replace(f'"@{name}"', value)
    return text.encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda _: DEEP,
        lambda manifest: of(manifest, time="1e300"),
        lambda manifest: of(manifest, time="Infinity"),
        lambda manifest: of(manifest, time="NaN"),
        lambda manifest: of(manifest, time="1" + "0" * 400),
        lambda manifest: of(manifest, step="1" + "0" * 4200),
        lambda manifest: of(
            {**manifest, "parts": [manifest["parts"][0], *manifest["parts"][:1], *manifest["parts"][2:]]}
        ),
        lambda manifest: of(manifest, signature='"\\ud800"'),
    ],
)
def test_what_no_writer_writes_is_damaged_and_ends_nothing(url: str, change: Callable[[dict[str, Any]], bytes]) -> None:
    bucket = bucket_of(url)
    save(writer_to(bucket), 1)
    manifest = next(key for key in bucket.store.list() if key.endswith("manifest.json"))
    bucket.store.put(manifest, change(bucket.snapshot(manifest.partition("/")[0]).read_manifest()))
    warnings: list[str] = []
    is_signed = b"ud800" in bucket.store.get(manifest).data  # type: ignore[union-attr]
    assert find_snapshots(bucket, warn=warnings.append, key=KEY if is_signed else None) == []
    assert len(warnings) == 1
    assert save(writer_to(bucket, key=KEY if is_signed else None), 2, generation=1).warnings == ()


@pytest.mark.parametrize(
    "data", [DEEP, json.dumps({**vars(RECORD), "time": 1e300}), json.dumps({**vars(RECORD), "pid": float("inf")})]
)
def test_an_owners_record_that_cannot_be_is_none(url: str, data: bytes | str) -> None:
    store = bucket_of(url).store
    store.put(OWNER_RECORD, data if isinstance(data, bytes) else data.encode())
    assert BucketOwner(store, "one").read() is None


class OddArm(MemoryArm):
    is_odd = False

    def list(self, prefix: str) -> dict[str, int]:
        if self.is_odd:
            raise MemoryError("nobody thought of it")
        return super().list(prefix)


def test_an_error_that_nobody_thought_of_costs_a_snapshot_and_not_the_training(url: str) -> None:
    arm = OddArm(fsspec.filesystem("memory"), parse_url(url))
    bucket = bucket_of(url, arm)

    def odd() -> None:
        raise RuntimeError("nobody thought of it")

    with pytest.raises(SnapshotError, match="cannot be written: RuntimeError: nobody thought of it; older ones"):
        save(writer_to(bucket, before_rename=odd), 1)

    def prune_oddly() -> None:
        arm.is_odd = True

    result = save(writer_to(bucket, before_rename=prune_oddly), 1)
    assert "cannot be deleted" in result.warnings[0]


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [(403, "InvalidObjectState", ""), (403, "AccessDenied", "; give credentials that .*")],
)
@pytest.mark.parametrize("file", ["manifest.json", "state.pt.00001"])
def test_one_object_that_the_store_withholds_costs_its_snapshot_alone(
    url: str, file: str, status: int, code: str, told: str
) -> None:
    bucket, arm = withholding(url)
    for step in (1, 2, 3):
        save(writer_to(bucket, keep=9), step)
    arm.withheld, arm.status, arm.code = re.compile(f"000003-gen.*/{file}"), status, code
    warnings: list[str] = []
    assert newest(bucket, warnings) == 2
    [warning] = warnings
    name = f"step-000000000003-gen-0000-one/{re.escape(file)}"
    assert re.fullmatch(rf"not read: {url}: cannot read {name}.*: {code} \({status}\){told}", warning)
    arm.withheld = WithholdingArm.withheld
    assert newest(bucket) == 3, "it is there"


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (400, "InvalidRequest"), (0, "Session is closed")])
@pytest.mark.parametrize("file", ["manifest.json", "state.pt.00001"])
def test_no_older_one_is_taken_because_a_store_is_busy_or_says_something_odd(
    url: str, file: str, status: int, code: str
) -> None:
    bucket, arm = withholding(url)
    for step in (1, 2):
        save(writer_to(bucket), step)
    arm.withheld, arm.status, arm.code = re.compile(f"000002-gen.*/{file}"), status, code
    with pytest.raises(ObjectStoreError, match=code):
        newest(bucket)


@pytest.mark.parametrize("file", ["manifest.json", "state.pt.00001"])
def test_what_is_withheld_is_not_said_to_be_damaged(
    url: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, arm = withholding(url)
    for step in (1, 2, 3):
        save(writer_to(bucket, keep=9), step)
    names = {step: f"step-{step:012}-gen-0000-one" for step in (1, 2, 3)}
    bucket.store.put(f"{names[2]}/manifest.json", b"{")
    arm.withheld = re.compile(f"000003-gen.*/{file}")
    there = {url: bucket, f"{url}/{names[3]}": bucket.snapshot(names[3])}
    monkeypatch.setattr(places, "place_at", there.__getitem__)
    not_read = f"not read: {url}: cannot read {names[3]}/{file}"
    assert cli.main(["snapshot", "verify", url]) == 1
    whole, *others = capsys.readouterr().out.splitlines()
    assert whole == f"whole: {url}/{names[1]}"
    assert {line.split(": ")[0] for line in others} == {"damaged", "not read"}
    assert [line for line in others if line.startswith(not_read)]
    assert cli.main(["snapshot", "verify", f"{url}/{names[3]}"]) == 1
    assert capsys.readouterr().out.startswith(not_read)


def test_old_ones_go_and_what_is_withheld_stays(url: str) -> None:
    bucket, arm = withholding(url)
    for step in (1, 2, 3):
        save(writer_to(bucket, keep=9), step)
    archived = {key for key in bucket.store.list() if "000001-gen" in key}
    arm.withheld = re.compile("000001-gen")
    started_anew = bucket_of(url, arm)
    assert save(writer_to(started_anew, keep=1), 4, generation=1).warnings == ()
    there = bucket.store.list().keys()
    assert archived <= there
    assert {key.partition("/")[0] for key in there - archived} == {"step-000000000004-gen-0001-one"}


def test_what_is_withheld_is_not_written_over(url: str, tmp_path: Path) -> None:
    """By another run whose snapshot has the same name; nor by who copies."""
    bucket, arm = withholding(url)
    save(writer_to(bucket), 1)
    copy_snapshot(url, str(tmp_path), warn=pytest.fail)
    before = {key: bucket.store.get(key) for key in bucket.store.list()}
    for withheld in ("manifest.json", "state.pt.00001"):
        arm.withheld = re.compile(f"000001-gen.*/{withheld}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(places, "place_at", lambda text: bucket if text == url else place_at(text))
            with pytest.raises(SnapshotError, match="InvalidObjectState"):
                copy_snapshot(str(tmp_path), url, warn=pytest.fail)
    arm.withheld = re.compile("000001-gen.*/manifest.json")
    with pytest.raises(SnapshotError, match=r"cannot be written: .*InvalidObjectState .*; older ones are untouched"):
        save(writer_to(bucket, run_uid="another"), 1)
    arm.withheld = WithholdingArm.withheld
    assert {key: bucket.store.get(key) for key in bucket.store.list()} == before


@pytest.mark.parametrize("code", ["InvalidObjectState", "AccessDenied"])
def test_a_copy_that_cannot_be_looked_at_stays(
    url: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that may write and not read, say; what was written is whole."""
    save(writer_to(tmp_path), 1)  # type: ignore[arg-type]  # a folder is one, too
    bucket, arm = withholding(url)
    arm.code = code
    monkeypatch.setattr(bucket, "note_visible", lambda _: setattr(arm, "withheld", re.compile("manifest.json")))
    monkeypatch.setattr(places, "place_at", lambda text: bucket if text == url else place_at(text))
    name = "step-000000000001-gen-0000-one"
    with pytest.raises(SnapshotDenied, match=f"{name} is written, and could not be looked at: .*{code}") as raised:
        copy_snapshot(str(tmp_path), url, warn=pytest.fail)
    assert "has deleted" not in str(raised.value)
    arm.withheld = WithholdingArm.withheld
    assert newest(bucket) == 1


def test_credentials_that_may_read_nothing_are_told_at_the_record_of_the_owner(url: str) -> None:
    bucket, arm = withholding(url)
    save(writer_to(bucket), 1)
    BucketOwner(bucket.store, "one").take("job", 0, lambda: None)
    arm.withheld, arm.code = re.compile(""), "AccessDenied"
    assert bucket.find(warn=lambda _withheld: None) == []
    with pytest.raises(ObjectStoreError, match=r"cannot read owner.json: AccessDenied \(403\); give credentials"):
        BucketOwner(bucket.store, "two").read()
    with pytest.raises(ObjectStoreError, match="AccessDenied"):
        bucket.store.require_writable()
