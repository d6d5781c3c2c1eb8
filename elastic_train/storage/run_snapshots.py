"""Where the snapshots of a run are, by its directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from elastic_train.errors import SnapshotError, cause_of
from elastic_train.runlog.reader import Line, dict_of, int_of, newest_first, parse, time_of
from elastic_train.storage.snapshot import SnapshotFolder, SnapshotPlace
from elastic_train.storage.store_urls import is_url

if TYPE_CHECKING:
    from elastic_train.storage.bucket import Bucket

HEAD_LINES = 4
"""of a file of events, among which a process has its start"""


def snapshots_in(path: SnapshotPlace | SnapshotFolder) -> SnapshotFolder:
    """The folder of snapshots that a path, which is no snapshot, names: itself, or that of a run directory, which may
    be elsewhere (--snapshot-dir).

    Raises:
        SnapshotError: there is no such folder, or the run has its snapshots at a URL.
    """
    if not isinstance(path, Path):
        return cast("Bucket", path)
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory; give a run directory or its snapshots/")
    try:
        config = _newest_config(path)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {cause_of(error)}") from error
    if is_url(given := config.get("snapshot_dir")):
        raise SnapshotError(f"the snapshots of {path} are at {given} (--snapshot-dir): give that")
    folder = folder_by(config, path)
    return folder if given is not None or folder.is_dir() else path


def folder_by(config: Line, run_dir: Path) -> Path:
    """Where the snapshots of a run are by its flags; one that is not there, for a URL."""
    given = config.get("snapshot_dir")
    return Path(given) if isinstance(given, str) else run_dir / "snapshots"


def _newest_config(run_dir: Path) -> Line:
    """The flags with which the run was last trained; none where there is no run."""
    files = list((run_dir / "events").glob("*.jsonl"))
    trained = [path for path in files if any(int_of(line, "generation") is not None for line in newest_first(path))]
    starts = [line for path in trained or files for line in _head(path) if line.get("event") == "start"]
    return dict_of(max(starts, key=time_of, default={}), "config")


def _head(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for raw in itertools.islice(file, HEAD_LINES):
            if (line := parse(raw)) is not None:
                yield line
