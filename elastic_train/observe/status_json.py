"""A run's status for programs: `elastic-train status RUN_DIR --json`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from elastic_train.observe.status import Status
from elastic_train.runlog.reader import Line
from elastic_train.storage.snapshot import SnapshotInfo


def to_json(status: Status) -> str:
    """One object, a name for each field of `Status`; null where the files tell none, or no finite number."""
    told = {entry.name: getattr(status, entry.name) for entry in dataclasses.fields(status)}
    remote = told.pop("remote_snapshot")
    told["capacity"] = status.capacity.as_json()
    told["snapshot"] = _snapshot(status.snapshot, remote)
    return json.dumps(_finite(told), indent=2, default=_plain, allow_nan=False)


def _finite(value: Any) -> Any:
    """With null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


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
