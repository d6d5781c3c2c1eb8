"""Where the snapshots of a run are, by its directory."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from elastic_train.errors import SnapshotError
from elastic_train.runlog.reader import dict_of, read_events, time_of
from elastic_train.storage.snapshot import RemoteFolder, SnapshotFolder, SnapshotPlace
from elastic_train.storage.store_urls import is_url


def snapshots_in(path: SnapshotPlace | SnapshotFolder) -> SnapshotFolder:
    """The folder of snapshots that a path, which is no snapshot, names: itself, or that of a run directory, which may
    be elsewhere (--snapshot-dir).

    Raises:
        SnapshotError: there is no such folder, or the run has its snapshots at a URL.
    """
    if not isinstance(path, Path):
        return cast("RemoteFolder", path)
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory; give a run directory or its snapshots/")
    if (path / "snapshots").is_dir():
        return path / "snapshots"
    elsewhere = _told_snapshot_dir(path)
    if is_url(elsewhere):
        raise SnapshotError(f"the snapshots of {path} are at {elsewhere} (--snapshot-dir): give that")
    return path if elsewhere is None else Path(elsewhere)


def _told_snapshot_dir(run_dir: Path) -> str | None:
    """The --snapshot-dir of the newest start of a run; None where it had none, or there is no run."""
    lines = [line for path in (run_dir / "events").glob("*.jsonl") for line in read_events(path)]
    newest = max((line for line in lines if line.get("event") == "start"), key=time_of, default={})
    told = dict_of(newest, "config").get("snapshot_dir")
    return told if isinstance(told, str) else None
