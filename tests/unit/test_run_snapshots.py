"""Where the snapshots of a run directory are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.errors import SnapshotError
from elastic_train.storage.run_snapshots import snapshots_in


def run_of(run_dir: Path, *snapshot_dirs: str | None) -> Path:
    """A run that was started so often, each time with another --snapshot-dir."""
    (run_dir / "events").mkdir(parents=True)
    for number, told in enumerate(snapshot_dirs):
        start = {"time": 1000.0 + number, "event": "start", "config": {"snapshot_dir": told}}
        (run_dir / "events" / f"host-0-{9 - number}.jsonl").write_text(json.dumps(start) + "\n")
    return run_dir


def test_they_are_in_it_or_where_the_newest_start_says(tmp_path: Path) -> None:
    assert snapshots_in(run_of(tmp_path / "a", None)) == tmp_path / "a", "none yet"
    elsewhere = run_of(tmp_path / "b", "/of/before", str(tmp_path / "snapshots"))
    assert snapshots_in(elsewhere) == tmp_path / "snapshots"
    (elsewhere / "snapshots").mkdir()
    assert snapshots_in(elsewhere) == elsewhere / "snapshots"
    assert snapshots_in(tmp_path) == tmp_path, "a folder of snapshots"


def test_a_url_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="are at s3://bucket/job \\(--snapshot-dir\\): give that"):
        snapshots_in(run_of(tmp_path / "run", "s3://bucket/job"))
    with pytest.raises(SnapshotError, match="no directory"):
        snapshots_in(tmp_path / "nowhere")
