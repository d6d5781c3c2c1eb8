"""Who may write into the run directory.

All workers of one job write into it at once, from one node or from several, and say so with one `job_token`. Another
job is refused while a process of the first one lives; once none does, or all of them are stopped (SIGSTOP), it takes
over. Two things in the directory hold this together:

- `.owner-<job_token>.lock`, one per job, under a shared flock for as long as a worker of the job lives. The kernel
  drops the flock with the process, however it ends, so there is nothing to clean up after SIGKILL. The file holds one
  line per worker (host, pid, time).
- `owner.json`: the job and the generation that own the directory now. A claim replaces it, and `check_owner` reads it
  before whatever must not be written by a process that was replaced while it was stopped or cut off.

An flock belongs to the open file and not to the process, and fork() hands it on: a DataLoader child that outlived its
worker would make the directory look in use until it noticed. A child of `os.fork` (multiprocessing, DataLoader)
therefore closes its copy as soon as it runs, and O_CLOEXEC does the same at exec. A child that C code forks behind
Python's back keeps the lock until it ends: a claim waits some seconds for that, and then says that the process itself
has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from elastic_train.errors import NewerGeneration, OwnershipLost, RunDirectoryError, RunDirectoryInUse
from elastic_train.runlog.events import newest_events
from elastic_train.storage.atomic_files import (
    create_once,
    fsync_directory,
    write_atomic,
)
from elastic_train.storage.holders import (
    Holder,
    close_lock,
    open_for_lock,
    process_stat,
    process_state,
    read_holders,
    try_flock,
)

_CLAIM_LOCK = ".claim.lock"
_OWNER_RECORD = "owner.json"
_IDENTITY = ".directory-id"
_IDENTITY_LENGTH = 16
"""characters"""
_OWNER_LOCK = re.compile(r"\.owner-(?P<token>.+)\.lock")
_LEFT_CHILD_PATIENCE = timedelta(seconds=6)  # a DataLoader child looks for its parent every 5 s
_CLOCKS_DIFFER = 3600.0
"""seconds, between two machines, or between one and a file server; where it is more, a start may miss the last step of
the last generation, and never a generation"""
_FLOCK_MISSING = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@dataclass(frozen=True, kw_only=True)
class _Owner(Holder):
    job_token: str
    generation: int


@dataclass(frozen=True)
class Traces:
    """How far the run came, by what the event files show; None where they show nothing."""

    generation: int | None
    """the largest"""
    reached: tuple[int, int] | None
    """(generation, committed steps), the largest: a generation may have begun below what an earlier one had reached,
    whose last steps were lost"""
    logged: tuple[int, int] | None
    """the same of the steps that have an event of their own"""


class RunDirectory:
    """The paths in one run directory, and this process's claim on it. Not for use by several threads at once,
    except `check_owner`, which any thread may call."""

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], float] = time.time) -> None:
        self.path = Path(path).absolute()
        self._now = now
        self._lock_fd: int | None = None
        self._lock_pid = 0
        self._token: str | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    @property
    def ledger_dir(self) -> Path:
        return self.path / "ledger"

    @property
    def snapshots_dir(self) -> Path:
        return self.path / "snapshots"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def owner_path(self) -> Path:
        return self.path / _OWNER_RECORD

    def create(self) -> None:
        """Make the directory where it is missing and check that files can be made in it. The folders below
        are made by those who write into them.

        Raises:
            RunDirectoryError: it cannot be made, or not be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            close_lock(open_for_lock(self.path / _CLAIM_LOCK))
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise self._unusable("cannot be written to", error) from error

    def replace_file(self, name: str, data: bytes) -> None:
        """Write a file that only helps: readers see it whole, and a power cut may lose it. Raises OSError."""
        draft = self.path / f".{name}.{os.getpid()}"
        draft.write_bytes(data)
        os.replace(draft, self.path / name)

    def identity(self, *, patience: timedelta = timedelta(seconds=5)) -> str:
        """A name that the directory keeps for life, made at the first call: workers that read the same one share it.
        Blocks for milliseconds; for `patience` where another worker ended while it made the name.

        Raises:
            RunDirectoryError: it cannot be written to, or holds something else in place of the name.
        """
        path = self.path / _IDENTITY
        try:
            if not path.exists():
                with contextlib.suppress(FileExistsError):
                    create_once(path, secrets.token_hex(_IDENTITY_LENGTH // 2).encode())
            deadline = time.monotonic() + patience.total_seconds()
            while len(data := path.read_bytes()) < _IDENTITY_LENGTH and time.monotonic() < deadline:
                time.sleep(0.01)  # its maker is about to write it, see `_create_once`
        except OSError as error:
            raise self._unusable("cannot be written to", error) from error
        identity = data.decode(errors="replace")
        if not re.fullmatch(f"[0-9a-f]{{{_IDENTITY_LENGTH}}}", identity):  # it becomes part of a path
            raise RunDirectoryError(f"{path} is damaged ({identity!r}): remove it, or choose another --run-dir")
        return identity

    def claim(
        self,
        job_token: str,
        generation: int,
        host: str,
        *,
        is_leader: bool = True,
        patience: timedelta = timedelta(seconds=30),
    ) -> str | None:
        """Take the directory for a job, or join the workers of the job that has it. Called by every worker at every
        generation; holds the lock of the job until `release` or the end of the process. Blocks for milliseconds, one
        worker after the other.

        Args:
            is_leader: whether this worker speaks for all in its world that share the directory. The others only look
                whether their job still has it, once they have claimed it: the generation is the same for all.
            patience: for a claim of another process that hangs half-way.

        Returns:
            A warning for the log where the file system has no flock, so that a second job cannot be noticed.

        Raises:
            RunDirectoryInUse: a live process of another job has it.
            OwnershipLost: this process had it, and another job has taken it over since.
            RunDirectoryError: it cannot be written to.
        """
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", job_token):
            raise ValueError(f"job_token {job_token!r} cannot be part of a file name")
        if self._token not in (None, job_token):
            raise ValueError(f"{self!r} is claimed for job {self._token} already, not for {job_token}")
        try:
            if self._token is not None and not is_leader:
                self._refuse_if_replaced(job_token, generation)
                return None
            try:
                with self._claim_lock(patience):
                    self._claim_locked(job_token, generation, host)
                warning = None
            except OSError as error:
                if error.errno not in _FLOCK_MISSING:
                    raise
                self._refuse_if_replaced(job_token, generation)
                self._record_owner(job_token, generation, host)
                warning = (
                    f"the file system of {self.path} has no flock ({error.strerror}): nothing can notice a second "
                    "job with the same --run-dir"
                )
        except OSError as error:
            if self._token is None and self._lock_fd is not None:
                close_lock(self._lock_fd)
                self._lock_fd = None
            raise self._unusable("cannot be claimed", error) from error
        self._token = job_token
        return warning

    def check_owner(self, job_token: str, generation: int) -> None:
        """Called right before something becomes visible that a replaced process must not write (a snapshot,
        result.json). One small read.

        Raises:
            OwnershipLost: another job has the directory. NewerGeneration: this one has, in a newer generation.
            RunDirectoryError: the record of the owner cannot be read.
        """
        try:
            owner = self._read_owner()
        except OSError as error:
            raise self._unusable("does not let its owner record be read", error) from error
        owner = self._check_job(owner, job_token, generation)
        if owner.generation > generation:
            raise NewerGeneration(
                f"run directory {self.path} now belongs to generation {owner.generation} ({owner}); "
                f"{_stops(generation)}"
            )

    def release(self) -> None:
        """Give the claim up; the last worker of the job removes its lock file. `owner.json` stays as a record."""
        fd, self._lock_fd = self._lock_fd, None
        token, self._token = self._token, None
        if fd is None or token is None or self._lock_pid != os.getpid():
            return
        # Without the claim lock another worker might be about to lock the file that is unlinked here.
        with contextlib.suppress(OSError, RunDirectoryError), self._claim_lock(timedelta(seconds=1)):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._owner_lock_path(token).unlink()
        close_lock(fd)

    def move_aside(self) -> Path | None:
        """Move what the directory holds, all but the locks and the owner's record, into a new sibling named
        `<name>.<UTC time>`. Called after `claim`, by one worker of the job, before anybody opens a file in it.

        Returns:
            The sibling, or None where there was nothing to move.

        Raises:
            RunDirectoryError: an entry cannot be moved. What was moved by then stays moved.
        """
        target: Path | None = None
        try:
            # snapshots and events go first: without them nothing is continued, should the rest fail
            entries = sorted(self.path.iterdir(), key=lambda entry: (not entry.is_dir(), entry.name))
            for entry in entries:
                if entry.name.startswith((_CLAIM_LOCK, _OWNER_RECORD, _IDENTITY, ".owner")):
                    continue
                if target is None:
                    target = self._make_sibling()
                os.rename(entry, target / entry.name)
            if target is not None:
                fsync_directory(target)
                fsync_directory(self.path)
                fsync_directory(self.path.parent)
        except OSError as error:
            if target is not None:
                with contextlib.suppress(OSError):
                    target.rmdir()  # succeeds where nothing was moved
            raise self._unusable("cannot be moved aside for --fresh", error) from error
        return target

    def traces(self) -> Traces:
        """By the tails of the event files, each read once, the last written first.

        A run of many joins leaves thousands. Once a step of the owner's generation was found, those that were written
        long before it are left out: generations and steps only grow.
        """
        owner = None
        with contextlib.suppress(OSError):  # then all are read
            owner = self._read_owner()
        generations, reached, logged = [], [], []
        last_step = (-1, -1, 0.0)
        for written_at, path in sorted(self._event_files(), reverse=True):
            is_newest = owner is not None and last_step[0] >= owner.generation
            if is_newest and written_at < last_step[2] - _CLOCKS_DIFFER:
                break
            for line in newest_events(path):
                generation, step = _whole(line.get("generation")), _whole(line.get("step"))
                if generation is None:
                    continue
                generations.append(generation)
                if step is not None:
                    reached.append((generation, step))
                    if line.get("event") == "step":
                        logged.append((generation, step))
                        last_step = max(last_step, (generation, step, _seconds(line.get("time"))))
        return Traces(max(generations, default=None), max(reached, default=None), max(logged, default=None))

    def _event_files(self) -> Iterator[tuple[float, Path]]:
        """When each was last written."""
        for path in self.events_dir.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # moved aside
                yield path.stat().st_mtime, path

    def _check_job(self, owner: _Owner | None, job_token: str, generation: int) -> _Owner:
        if owner is None:
            raise OwnershipLost(
                f"run directory {self.path} has no valid {_OWNER_RECORD} any more; {_stops(generation)}"
            )
        if owner.job_token != job_token:
            raise OwnershipLost(f"run directory {self.path} now belongs to another job ({owner}); {_stops(generation)}")
        return owner

    def _unusable(self, what: str, error: OSError) -> RunDirectoryError:
        cause = error.strerror or str(error)
        return RunDirectoryError(f"run directory {self.path} {what}: {cause}; choose another --run-dir")

    def _owner_lock_path(self, token: str) -> Path:
        return self.path / f".owner-{token}.lock"

    @contextlib.contextmanager
    def _claim_lock(self, patience: timedelta) -> Iterator[None]:
        """Hold `.claim.lock`. Raises OSError where flock is not supported, RunDirectoryError after `patience`."""
        fd = open_for_lock(self.path / _CLAIM_LOCK)
        try:
            if not try_flock(fd, fcntl.LOCK_EX, patience):
                raise RunDirectoryError(
                    f"run directory {self.path} cannot be claimed: another process has held {_CLAIM_LOCK} "
                    f"for {patience.total_seconds():g} s; stop that process, or choose another --run-dir"
                )
            yield
        finally:
            close_lock(fd)

    def _claim_locked(self, job_token: str, generation: int, host: str) -> None:
        self._refuse_if_replaced(job_token, generation)
        owner = self._read_owner()
        if owner is None or owner.job_token != job_token:
            # Where the record is ours the others were judged before; one of them may have been stopped then and
            # run now, on its way to finding out.
            self._judge_others(job_token, owner, host)
        if self._lock_fd is None:
            self._lock_job(job_token, host)
        for leftover in self.path.glob(f".{_OWNER_RECORD}.tmp-*"):  # of a process killed during its claim
            leftover.unlink(missing_ok=True)
        self._record_owner(job_token, generation, host)

    def _refuse_if_replaced(self, job_token: str, generation: int) -> None:
        """A process that had the directory and lost it does not get it back, though the job that replaced it has
        ended: that one came further."""
        if self._token is not None:
            self._check_job(self._read_owner(), job_token, generation)

    def _judge_others(self, job_token: str, owner: _Owner | None, host: str) -> None:
        """Remove the locks of jobs that are over; raise RunDirectoryInUse for one that lives."""
        for path in sorted(self.path.iterdir()):
            match = _OWNER_LOCK.fullmatch(path.name)
            if match is None or match["token"] == job_token:
                continue
            fd = open_for_lock(path)
            try:
                if try_flock(fd, fcntl.LOCK_EX):
                    path.unlink()
                    continue
                holders = read_holders(fd)
                states = [process_state(holder) if holder.host == host else "?" for holder in holders]
                if "T" in states and all(state in ("T", None) for state in states):
                    continue  # stopped; the new owner record fences it out before it can run on
                living = [holder for holder, state in zip(holders, states, strict=True) if state not in ("T", None)]
                if holders and not living and try_flock(fd, fcntl.LOCK_EX, _LEFT_CHILD_PATIENCE):
                    path.unlink()
                    continue
            finally:
                close_lock(fd)
            named: Holder | None = owner if owner is not None and owner.job_token == match["token"] else None
            if living and (named is None or not any(named.pid == one.pid for one in living)):
                named = living[0]
            who = str(named) if named is not None else f"unknown, see {path.name}"
            if holders and not living:
                who += ", which has ended but left a child process behind"
            raise RunDirectoryInUse(
                f"run directory {self.path} is in use by another job ({who}); "
                "stop that job, or choose another --run-dir"
            )

    def _lock_job(self, job_token: str, host: str) -> None:
        fd = open_for_lock(self._owner_lock_path(job_token))
        try:
            # Exclusive locks on it are only tried under the claim lock, which we have: this cannot fail for long.
            if not try_flock(fd, fcntl.LOCK_SH):
                raise OSError(errno.EWOULDBLOCK, f"{self._owner_lock_path(job_token).name} is locked exclusively")
            _, started = process_stat(os.getpid())
            line = json.dumps({"host": host, "pid": os.getpid(), "time": self._now(), "started": started})
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, line.encode() + b"\n")
        except BaseException:
            close_lock(fd)
            raise
        self._lock_fd, self._lock_pid = fd, os.getpid()

    def _record_owner(self, job_token: str, generation: int, host: str) -> None:
        owner = self._read_owner()
        if owner is not None and owner.job_token == job_token and owner.generation >= generation:
            return
        record = {
            "job_token": job_token,
            "generation": generation,
            "host": host,
            "pid": os.getpid(),
            "time": self._now(),
        }
        write_atomic(self.owner_path, json.dumps(record).encode() + b"\n")

    def _read_owner(self) -> _Owner | None:
        """Raises OSError other than for a missing file."""
        try:
            record = json.loads(self.owner_path.read_bytes())
            return _Owner(
                host=str(record["host"]),
                pid=int(record["pid"]),
                time=float(record["time"]),
                job_token=str(record["job_token"]),
                generation=int(record["generation"]),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _make_sibling(self) -> Path:
        stamp = datetime.fromtimestamp(self._now(), UTC).strftime("%Y%m%dT%H%M%SZ")
        number = 1
        while True:
            suffix = "" if number == 1 else f".{number}"
            sibling = self.path.with_name(f"{self.path.name}.{stamp}{suffix}")
            try:
                sibling.mkdir()
            except FileExistsError:
                number += 1
            else:
                return sibling


def _whole(value: Any) -> int | None:
    """A whole number, of what a file may hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any) -> float:
    """A time, of what a file may hold; 0 where it is none."""
    return float(value) if isinstance(value, int | float) else 0.0


def _stops(generation: int) -> str:
    return f"this process (pid {os.getpid()}, generation {generation}) writes nothing more"
