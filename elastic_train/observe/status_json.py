"""A run's status for programs: `elastic-train status RUN_DIR --json`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from elastic_train.observe.status import Status
from elastic_train.runlog.strict_json import file_of


def to_json(status: Status) -> str:
    """One object, a name for each field of `Status`; null where the files tell none, or no finite number."""
    told = {entry.name: getattr(status, entry.name) for entry in dataclasses.fields(status)}
    told["capacity"] = status.capacity.as_json()
    told["snapshot"] = None if status.snapshot is None else dataclasses.asdict(status.snapshot)
    return file_of(told, default=_plain)


def _plain(value: Any) -> str:
    assert isinstance(value, Path), "all else is what JSON knows"
    return str(value)
