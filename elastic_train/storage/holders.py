"""Who has a run directory, or had: what its lock files and its record of the owner say."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime

from elastic_train.runlog.reader import parse
from elastic_train.system import process_stat
from elastic_train.world import value_of


@dataclass(frozen=True)
class Holder:
    """One worker that has, or had, the lock of its job."""

    host: str
    pid: int
    time: float
    started: str = ""
    """When the process started, in the kernel's own count; tells it from a later one with the same pid."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"host {self.host}, pid {self.pid}, since {since}"


@dataclass(frozen=True, kw_only=True)
class Owner(Holder):
    """The job and the generation that own a run directory, and the worker that claimed it for them."""

    job_token: str
    generation: int


def read_holders(fd: int) -> list[Holder]:
    holders = []
    os.lseek(fd, 0, os.SEEK_SET)
    with open(os.dup(fd), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                holders.append(value_of(Holder, parse(line) or {}))
    return holders


def process_state(holder: Holder) -> str | None:
    """The state letter of a process of this host: 'T' is stopped. None where it has ended, '?' where unknown."""
    state, started = process_stat(holder.pid)
    is_another = bool(started and holder.started) and started != holder.started
    return None if state in ("Z", "X") or is_another else state


def owner_of(data: bytes) -> Owner | None:
    """What a record says; None where it is none."""
    try:
        owner: Owner = value_of(Owner, {"started": "", **(parse(data) or {})})
    except (ValueError, KeyError, TypeError):
        return None
    return owner
