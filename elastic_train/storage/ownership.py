"""Who may write into the run directory, and into the folder of a --snapshot-dir.

All workers of one job write into it at once, from one node or from several, and say so with one `job_token`. Another
job is refused while a process of the first one lives; once none does, or all of them are stopped (SIGSTOP), it takes
over. Two things in the directory hold this together:

- `.owner-<job_token>.lock`, one per job, under a shared flock for as long as a worker of the job lives. The kernel
  drops the flock with the process, however it ends, so there is nothing to clean up after SIGKILL. The file holds one
  line per worker (host, pid, time); the claim of the next job removes it.
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
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from elastic_train.errors import (
    NewerGeneration,
    OwnershipLost,
    RunDirectoryError,
    RunDirectoryGone,
    RunDirectoryInUse,
    cause_of,
)
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.storage.holders import Holder, Owner, owner_of, process_state, read_holders
from elastic_train.system import flock_holder, local_flock, process_stat, try_flock
from elastic_train.world import host_name

CLAIM_LOCK = ".claim.lock"
OWNER_RECORD = "owner.json"
CLAIM_TIMEOUT = timedelta(seconds=30)
"""while others claim the directory, each for milliseconds"""
_OWNER_LOCK = re.compile(r"\.owner-(?P<token>.+)\.lock")
_LEFT_CHILD_TIMEOUT = timedelta(seconds=6)  # a DataLoader child looks for its parent every 5 s
_FLOCK_MISSING = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})

# Descriptors that carry an flock of this process; see above what a fork does with them.
_locked_fds: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _locked_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked_fds.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def open_for_lock(path: Path) -> int:
    # read and write: NFS wants the first for a shared lock and the second for an exclusive one
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if path.parent.stat().st_mode & 0o022:
            with contextlib.suppress(OSError):  # another user's, which can be written already; or no modes there
                os.fchmod(fd, 0o666)  # NFS gives no exclusive lock on what can only be read, as a umask leaves it
    except PermissionError:
        if not path.exists():
            raise
        # Another user's, in a folder that a group shares.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _locked_fds.add(fd)
    return fd


def close_lock(fd: int) -> None:
    """Drop the flock, also where a child that another thread forked right now has a copy of this open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    _locked_fds.discard(fd)
    os.close(fd)


class Ownership:
    """Which job has one directory, and this process's claim on it. Not for use by several threads at once, except
    `check_owner`, which any thread may call; one at a time where snapshots lie elsewhere (`OwnershipWithSnapshots`).

    Args:
        name: of the directory in messages; `flag`, by which another one is chosen.
    """

    def __init__(
        self, path: Path, name: str | None = None, flag: str = "--run-dir", *, now: Callable[[], float] = time.time
    ) -> None:
        self._path, self._flag = path, flag
        self._name = name or f"run directory {path}"
        self._record_path = path / OWNER_RECORD
        self._now = now
        self._lock_fd: int | None = None
        self._lock_pid = 0
        self._token: str | None = None

    def claim(
        self,
        job_token: str,
        generation: int,
        host: str,
        *,
        is_leader: bool = True,
        timeout: timedelta = CLAIM_TIMEOUT,
    ) -> str | None:
        """Take the directory for a job, or join the workers of the job that has it. Called by every worker at every
        generation; holds the lock of the job until `release` or the end of the process. Blocks for milliseconds, one
        worker after the other.

        Args:
            is_leader: whether this worker speaks for all in its world that share the directory. The others only look
                whether their job still has it, once they have claimed it: the generation is the same for all.
            timeout: for a claim of another process that hangs half-way.

        Returns:
            A warning for the log where the file system has no flock, or one for each host alone, so that a second job
            cannot be noticed; where snapshots have a claim of their own, one of each, in a line.

        Raises:
            RunDirectoryInUse: a live process of another job has it.
            OwnershipLost: this process had it, and another job has taken it over since. RunDirectoryGone: it had, and
                the directory was removed or moved (`claim_anew`).
            RunDirectoryError: it cannot be written to.
        """
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", job_token):
            raise ValueError(f"job_token {job_token!r} cannot be part of a file name")
        if self._token not in (None, job_token):
            raise ValueError(f"{self._name} is claimed for job {self._token} already, not for {job_token}")
        try:
            self._refuse_if_replaced(job_token, generation)  # said also where the lock cannot be had
            if self._token is not None and not is_leader:
                return None
            warning = self._take_in_turn(job_token, generation, host, timeout, self._refuse_if_replaced)
        except OSError as error:
            if self._token is None and self._lock_fd is not None:
                close_lock(self._lock_fd)
                self._lock_fd = None
            raise unusable(self._name, "cannot be claimed", error, self._flag) from error
        self._token = job_token
        return warning

    def claim_anew(self, job_token: str, generation: int, host: str) -> None:
        """As `claim`, of a directory that was removed or moved while this process had it, and that is there again.

        Raises: OwnershipLost: another job has it by now. RunDirectoryError: it cannot be written to.
        """
        try:
            self._take_in_turn(job_token, generation, host, CLAIM_TIMEOUT, self._let_go_of_gone)
        except RunDirectoryInUse as error:
            raise OwnershipLost(f"{error}; {stops(generation)}") from error
        except OSError as error:
            raise unusable(self._name, "cannot be claimed", error, self._flag) from error
        self._token = job_token

    def check_owner(self, job_token: str, generation: int) -> None:
        """Called right before something becomes visible that a replaced process must not write (a snapshot,
        result.json). One small read.

        Raises:
            OwnershipLost: another job has the directory. NewerGeneration: this one has, in a newer generation.
            RunDirectoryGone: nobody has; it was removed or moved.
            RunDirectoryError: the record of the owner cannot be read.
        """
        try:
            owner = self._require_own(job_token, generation)
        except OSError as error:
            raise unusable(self._name, "does not let its owner record be read", error, self._flag) from error
        if owner.generation > generation:
            raise NewerGeneration(
                f"{self._name} now belongs to generation {owner.generation} ({owner}); {stops(generation)}"
            )

    def check_snapshots(self, job_token: str, generation: int) -> None:
        """As `check_owner`, where snapshots lie, and nowhere else."""
        self.check_owner(job_token, generation)

    def read(self) -> Owner | None:
        """The owner, as its record says; None where there is no valid one. Raises OSError other than for a missing
        file."""
        try:
            return owner_of(self._record_path.read_bytes())
        except FileNotFoundError:
            return None

    def release(self) -> None:
        """Give the claim up. `owner.json` stays as a record, and the lock file for the next job to remove: where flock
        holds for one host alone, this worker cannot tell whether it is the last one of its job."""
        if self._lock_fd is not None and self._lock_pid == os.getpid():
            close_lock(self._lock_fd)
        self._lock_fd = self._token = None

    def _require_own(self, job_token: str, generation: int) -> Owner:
        """Raises: OwnershipLost, RunDirectoryGone, and OSError where the record cannot be read."""
        try:
            owner = owner_of(self._record_path.read_bytes())
        except FileNotFoundError:
            raise self._gone(generation) from None
        if owner is None:
            raise OwnershipLost(f"{self._name} has no valid {OWNER_RECORD} any more; {stops(generation)}")
        if owner.job_token != job_token:
            raise OwnershipLost(f"{self._name} now belongs to another job ({owner}); {stops(generation)}")
        return owner

    def _gone(self, generation: int) -> RunDirectoryGone:
        return RunDirectoryGone(f"{self._name} was removed or moved; {stops(generation)}")

    @property
    def _has_its_lock(self) -> bool:
        """Whether the lock of this process is on the file that others look at."""
        if self._lock_fd is None or self._token is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock_fd), self._owner_lock_path(self._token).stat())
        except OSError:  # it is not there any more, or a file server has forgotten it
            return False

    def _owner_lock_path(self, token: str) -> Path:
        return self._path / f".owner-{token}.lock"

    @contextlib.contextmanager
    def _claim_lock(self, timeout: timedelta) -> Iterator[None]:
        """Hold `.claim.lock`. Raises OSError where flock is not supported, RunDirectoryError after `timeout`."""
        fd = open_for_lock(self._path / CLAIM_LOCK)
        try:
            if not try_flock(fd, fcntl.LOCK_EX, timeout):
                pid = flock_holder(fd)
                who = "a process of another host or container" if pid is None else f"pid {pid} of {host_name()}"
                raise RunDirectoryError(
                    f"{self._name} cannot be claimed: {who} has held {CLAIM_LOCK} "
                    f"for {timeout.total_seconds():g} s; stop that process, or choose another {self._flag}"
                )
            yield
        finally:
            close_lock(fd)

    def _take_in_turn(
        self, job_token: str, generation: int, host: str, timeout: timedelta, look: Callable[[str, int], None]
    ) -> str | None:
        """One process after the other, each after its `look`. Returns as `claim`. Raises: OSError; what `look` does."""
        try:
            with self._claim_lock(timeout):
                look(job_token, generation)
                self._take(job_token, generation, host)
        except OSError as error:
            if error.errno not in _FLOCK_MISSING:
                raise
            self._record_owner(job_token, generation, host)
            return (
                f"the file system of {self._path} has no flock ({error.strerror}): nothing can notice a second "
                f"job with the same {self._flag}"
            )
        option = local_flock(self._path)
        return option and (
            f"flock below {self._path} holds for one host alone (mount option {option}): a second job with the same "
            f"{self._flag} on another host is not refused, and this one ends by it"
        )

    def _let_go_of_gone(self, job_token: str, generation: int) -> None:
        """Of the lock in a directory that is gone. Raises: OwnershipLost: another job has what is in its place."""
        with contextlib.suppress(RunDirectoryGone):
            self._require_own(job_token, generation)
        if self._lock_fd is not None and not self._has_its_lock:
            close_lock(self._lock_fd)
            self._lock_fd = None

    def _take(self, job_token: str, generation: int, host: str) -> None:
        owner = self.read()
        if owner is None or owner.job_token != job_token:
            # Where the record is ours the others were judged before; one of them may have been stopped then and
            # run now, on its way to finding out.
            other = _living_other(self._path, job_token, owner, host)
            if other is not None:
                raise RunDirectoryInUse(
                    f"{self._name} is in use by another job ({other}); stop that job, or choose another {self._flag}; "
                    "to join it, give its --rdzv-endpoint"
                )
        if self._lock_fd is None:
            self._lock_job(job_token, host)
        for leftover in self._path.glob(f".{OWNER_RECORD}.tmp-*"):  # of a process killed during its claim
            leftover.unlink(missing_ok=True)
        self._record_owner(job_token, generation, host)

    def _refuse_if_replaced(self, job_token: str, generation: int) -> None:
        """A process that has lost the directory does not get it back, even when the job that replaced it has ended:
        that job has trained further."""
        if self._token is None:
            return
        self._require_own(job_token, generation)
        if self._lock_fd is not None and not self._has_its_lock:  # and another worker has made it anew
            raise self._gone(generation)

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
        owner = self.read()
        if owner is not None and owner.job_token == job_token and owner.generation >= generation:
            return
        record = {
            "job_token": job_token,
            "generation": generation,
            "host": host,
            "pid": os.getpid(),
            "time": self._now(),
        }
        write_atomic(self._record_path, json.dumps(record).encode() + b"\n")


def _living_other(directory: Path, job_token: str, owner: Owner | None, host: str) -> str | None:
    """Remove the locks of jobs that are over; tell of one that lives."""
    for path in sorted(directory.iterdir()):
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
            if holders and not living and try_flock(fd, fcntl.LOCK_EX, _LEFT_CHILD_TIMEOUT):
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
        elif "?" in states:
            who += "; if that machine is gone, a file server keeps its lock for a minute or two"
        return who
    return None


def unusable(name: str, what: str, error: OSError, flag: str = "--run-dir") -> RunDirectoryError:
    """The error to raise where a directory cannot be used."""
    return RunDirectoryError(f"{name} {what}: {cause_of(error)}; choose another {flag}")


def stops(generation: int) -> str:
    return f"this process (pid {os.getpid()}, generation {generation}) writes nothing more"
