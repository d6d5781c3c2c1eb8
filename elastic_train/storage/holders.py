"""The workers that own or owned a run directory, as its lock files and its owner record name them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime

from elastic_train.runlog.reader import parse
from elastic_train.system import process_stat
from elastic_train.world import value_or_none


@dataclass(frozen=True)
class Holder:
    """A worker that holds or held the lock of its job."""

    host: str
    pid: int
    time: float
    started: str = ""
    """Start time of the process in the kernel's ticks; distinguishes it from a later process with the same pid."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"host {self.host}, pid {self.pid}, since {since}"


@dataclass(frozen=True, kw_only=True)
class Owner(Holder):
    """The job and generation that own a run directory, and the worker that claimed it for them."""

    job_token: str
    generation: int


def read_holders(fd: int) -> list[Holder]:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(os.dup(fd), "rb") as file:
        found = [value_or_none(Holder, parse(line)) for line in file]
    return [holder for holder in found if holder is not None]


def process_state(holder: Holder) -> str | None:
    """The state letter of a process of this host: 'T' for stopped, '?' for unknown; None if the process has ended."""
    state, started = process_stat(holder.pid)
    is_another = bool(started and holder.started) and started != holder.started
    return None if state in ("Z", "X") or is_another else state


def owner_of(data: bytes) -> Owner | None:
    """Parse an owner record; None if it is not valid."""
    return value_or_none(Owner, {"started": "", **(parse(data) or {})})
