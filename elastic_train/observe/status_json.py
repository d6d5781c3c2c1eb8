"""A run's status for programs: `elastic-train status RUN_DIR --json`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from elastic_train.observe.status import Status
from elastic_train.runlog.reader import Line
from elastic_train.runlog.strict_json import file_of
from elastic_train.storage.snapshot import SnapshotInfo


def to_json(status: Status) -> str:
    """One object, a name for each field of `Status`; null where the files tell none, or no finite number."""
    told = {entry.name: getattr(status, entry.name) for entry in dataclasses.fields(status)}
    remote = told.pop("remote_snapshot")
    told["capacity"] = status.capacity.as_json()
    told["snapshot"] = _snapshot(status.snapshot, remote)
    return file_of(told, default=_plain)


def _plain(value: Any) -> str:
    assert isinstance(value, Path), "all else is what JSON knows"
    return str(value)


def _snapshot(info: SnapshotInfo | None, remote: Line | None) -> dict[str, Any] | None:
    if info is not None:
        size = sum(file.bytes for file in info.files.values())
        return {"step": info.step, "time": info.time, "bytes": size, "path": str(info.path)}
    if remote is not None:
        return {"step": remote.get("snapshot_step")} | {name: remote.get(name) for name in ("time", "bytes", "path")}
    return None
