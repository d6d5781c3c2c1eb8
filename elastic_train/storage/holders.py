"""Locks that the kernel drops with their process (flock), and the workers that hold them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Descriptors that carry an flock of this process; run_directory.py says what a fork does with them.
_locked_fds: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _locked_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked_fds.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


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


def open_for_lock(path: Path) -> int:
    # read and write: NFS wants the first for a shared lock and the second for an exclusive one
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _locked_fds.add(fd)
    return fd


def close_lock(fd: int) -> None:
    _locked_fds.discard(fd)
    os.close(fd)


def try_flock(fd: int, operation: int, patience: timedelta = timedelta(0)) -> bool:
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        else:
            return True


def read_holders(fd: int) -> list[Holder]:
    holders = []
    os.lseek(fd, 0, os.SEEK_SET)
    with open(os.dup(fd), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                holder = Holder(
                    host=str(record["host"]),
                    pid=int(record["pid"]),
                    time=float(record["time"]),
                    started=str(record["started"]),
                )
                holders.append(holder)
    return holders


def process_state(holder: Holder) -> str | None:
    """The state letter of a process of this host: 'T' is stopped. None where it has ended, '?' where unknown."""
    state, started = process_stat(holder.pid)
    is_another = bool(started and holder.started) and started != holder.started
    return None if state in ("Z", "X") or is_another else state


def process_stat(pid: int) -> tuple[str | None, str]:
    """State letter and start time of a process; (None, "") where there is none, ("?", "") without a /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name in parentheses may itself hold parentheses and spaces
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return (None if os.path.isdir("/proc/self") else "?"), ""
    except (OSError, IndexError):
        return "?", ""
