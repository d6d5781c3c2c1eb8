"""Where the snapshots of a run directory are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.errors import SnapshotError
from elastic_train.storage.places import snapshots_in


def run_of(run_dir: Path, *snapshot_dirs: str | None, refused: str | None = None) -> Path:
    """A run that was started so often, each time with another --snapshot-dir; then a worker was refused."""
    (run_dir / "events").mkdir(parents=True)
    for number, told in enumerate((*snapshot_dirs, refused)):
        start = {"time": 1000.0 + number, "event": "start", "generation": None, "config": {"snapshot_dir": told}}
        lines = [start, *([{**start, "event": "world", "generation": 0}] if number < len(snapshot_dirs) else [])]
        path = run_dir / "events" / f"host-0-{9 - number}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_they_are_where_the_newest_start_says_or_in_it(tmp_path: Path) -> None:
    assert snapshots_in(run_of(tmp_path / "a", None)) == tmp_path / "a", "none yet"
    elsewhere = run_of(tmp_path / "b", "/of/before", str(tmp_path / "snapshots"), refused="/of/another")
    (elsewhere / "snapshots").mkdir()
    assert snapshots_in(elsewhere) == tmp_path / "snapshots"
    (inside := run_of(tmp_path / "c", "/of/before", None) / "snapshots").mkdir()
    assert snapshots_in(tmp_path / "c") == inside
    assert snapshots_in(tmp_path) == tmp_path, "a folder of snapshots"


def test_a_url_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="are at s3://bucket/job \\(--snapshot-dir\\): give that"):
        snapshots_in(run_of(tmp_path / "run", "s3://bucket/job"))
    with pytest.raises(SnapshotError, match="no directory"):
        snapshots_in(tmp_path / "nowhere")
