"""Where the snapshots of a run are, by its directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from elastic_train.errors import SnapshotError, cause_of
from elastic_train.runlog.reader import Line, dict_of, int_of, newest_first, parse, time_of
from elastic_train.storage.snapshot import RemoteFolder, SnapshotFolder, SnapshotPlace
from elastic_train.storage.store_urls import is_url

HEAD_LINES = 4
"""of a file of events, among which a process has its start"""


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
    try:
        told = _told_snapshot_dir(path)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {cause_of(error)}") from error
    if is_url(told):
        raise SnapshotError(f"the snapshots of {path} are at {told} (--snapshot-dir): give that")
    if told is not None:
        return Path(told)
    return path / "snapshots" if (path / "snapshots").is_dir() else path


def _told_snapshot_dir(run_dir: Path) -> str | None:
    """The --snapshot-dir with which the run was last trained; None where it had none, or there is no run."""
    files = list((run_dir / "events").glob("*.jsonl"))
    trained = [path for path in files if any(int_of(line, "generation") is not None for line in newest_first(path))]
    starts = [line for path in trained or files for line in _head(path) if line.get("event") == "start"]
    told = dict_of(max(starts, key=time_of, default={}), "config").get("snapshot_dir")
    return told if isinstance(told, str) else None


def _head(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for raw in itertools.islice(file, HEAD_LINES):
            if (line := parse(raw)) is not None:
                yield line
