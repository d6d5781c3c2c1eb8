"""What a worker sees of an earlier run where its snapshots lie below a URL: what the bucket says beats its disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic.earlier_run import EarlierRun
from elastic_train.storage.places import OwnedBucket
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.run_record import RUN_FILE, RunRecord
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.store_urls import parse_url


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> OwnedBucket:
    return OwnedBucket(parse_url(f"memory://{request.node.name}"))


def own(bucket: OwnedBucket, uid: str, superseded: tuple[str, ...] = ()) -> None:
    bucket.owner.take("job of " + uid, 0, lambda: None)
    bucket.owner.enter("job of " + uid, 0, uid, superseded, is_writer=False)
    bucket.owner.check()


def look(
    bucket: OwnedBucket, run_dir: Path, *, back: Any = None, published: str | None = None, warnings: list[str]
) -> EarlierRun:
    directory = RunDirectory(run_dir)
    directory.create()
    worker: Any = SimpleNamespace(
        directory=directory,
        snapshots_dir=bucket,
        bucket=bucket,
        snapshot_key=None,
        reporter=SimpleNamespace(warn=warnings.append),
        state=SimpleNamespace(run_uid=""),
    )
    membership: Any = SimpleNamespace(published=lambda _name: published)
    files: Any = None
    earlier = EarlierRun(worker, membership, files, back)
    earlier._look()
    return earlier


def save(bucket: OwnedBucket, uid: str, step: int) -> None:
    writer = SnapshotWriter(bucket, keep=3, host="n2", run_uid=uid, task={}, before_rename=bucket.owner.check)
    writer.save({"model": {}}, step=step, epoch=0, samples_done=0, generation=0, world_size=1)


def test_a_disk_that_was_away_does_not_bring_a_superseded_run_back(bucket: OwnedBucket, tmp_path: Path) -> None:
    own(bucket, "Y", ("X",))
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.replace_file(RUN_FILE, RunRecord("X").to_json())
    earlier = look(bucket, tmp_path / "run", warnings=[])
    assert earlier._record == RunRecord("Y", ("X",))
    events = tmp_path / "run" / "events"
    events.mkdir(exist_ok=True)
    (events / "n1.jsonl").write_text('{"event": "snapshot", "snapshot_step": 5, "generation": 0, "host": "n1"}\n')
    assert earlier._past(is_leader=True) is None, "what the disk tells is of the run before"
