"""Ownership of a run directory, and of the folder of --snapshot-dir: which job may write there.

All workers of one job write into the directory at once, from one or several nodes; they share one `job_token`. Another
job is refused while a process of the first job lives. It takes over once none lives, or all are stopped (SIGSTOP). Two
files in the directory implement this:

- `.owner-<job_token>.lock`, one per job, under a shared flock as long as a worker of the job lives. The kernel drops
  the flock when the process ends in any way, so SIGKILL leaves nothing to clean up. The file holds one line per worker
  (host, pid, time); the claim of the next job deletes it.
- `owner.json`: the job and generation that own the directory now. A claim replaces it. `check_owner` reads it before
  each write that a process must not make if it was replaced while it was stopped or cut off.

An flock belongs to the open file, not to the process, and fork() passes it on: a DataLoader child that outlives its
worker would make the directory look in use for some seconds. Therefore a child of `os.fork` (multiprocessing,
DataLoader) closes its copy as soon as it runs, and O_CLOEXEC does the same at exec. A child that C code forks without
Python keeps the lock until it ends. A claim waits some seconds for that, and then reports that the process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from elastic_train.world import host_name, to_json

CLAIM_LOCK = ".claim.lock"
OWNER_RECORD = "owner.json"
CLAIM_TIMEOUT = timedelta(seconds=30)
"""The longest wait for claims of other processes, each of which takes milliseconds."""
_OWNER_LOCK = re.compile(r"\.owner-(?P<token>.+)\.lock")
_LEFT_CHILD_TIMEOUT = timedelta(seconds=6)  # a DataLoader child looks for its parent every 5 s
_FLOCK_MISSING = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})

# Descriptors that carry an flock of this process; a forked child closes them, as described above.
_locked_fds: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _locked_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked_fds.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def open_for_lock(path: Path) -> int:
    # O_RDWR: NFS needs read permission for a shared lock, and write permission for an exclusive one
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if path.parent.stat().st_mode & 0o022:
            with contextlib.suppress(OSError):  # owned by another user, and writable already; or no modes there
                os.fchmod(fd, 0o666)  # against a umask: NFS gives no exclusive lock on a read-only file
    except PermissionError:
        if not path.exists():
            raise
        # A file of another user, in a folder that a group shares.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _locked_fds.add(fd)
    return fd


def close_lock(fd: int) -> None:
    """Drop the flock, even if a child that another thread has just forked holds a copy of this open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    _locked_fds.discard(fd)
    os.close(fd)


class Ownership:
    """The ownership of one directory, and this process's claim on it. Not thread-safe, except `check_owner`: any thread
    may call that, but only one at a time if snapshots are elsewhere (`OwnershipWithSnapshots`).

    Args:
        name: the directory's name in messages. `flag`: the flag that chooses another directory.
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
        """Claim the directory for a job, or join the workers of the job that owns it. Every worker calls this at every
        generation, and holds the lock of the job until `release` or the end of the process. Blocks for milliseconds,
        one worker after the other.

        Args:
            is_leader: whether this worker claims for all members of its world that share the directory. After their
                first claim the others only check that their job still owns it: the generation is the same for all.
            timeout: the longest wait for another process that hangs during its claim.

        Returns:
            A warning for the log if the file system has no flock, or a separate one for each host, so that a second
            job is not noticed. With a separate claim for snapshots, a line for each of the two.

        Raises:
            RunDirectoryInUse: a live process of another job owns the directory.
            OwnershipLost: this process owned it, and another job has taken it over since.
            RunDirectoryGone: this process owned it, and it was removed or moved (`claim_anew`).
            RunDirectoryError: the directory cannot be written to.
        """
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", job_token):
            raise ValueError(f"job_token {job_token!r} cannot be part of a file name")
        if self._token not in (None, job_token):
            raise ValueError(f"{self._name} is claimed for job {self._token} already, not for {job_token}")
        try:
            self._refuse_if_replaced(job_token, generation)  # first: it matters more than a lock that fails
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
        """Claim a directory, as `claim`, that was removed or moved while this process owned it, and exists again.

        Raises: OwnershipLost: another job owns it by now. RunDirectoryError: it cannot be written to.
        """
        try:
            self._take_in_turn(job_token, generation, host, CLAIM_TIMEOUT, self._let_go_of_gone)
        except RunDirectoryInUse as error:
            raise OwnershipLost(f"{error}; {stops(generation)}") from error
        except OSError as error:
            raise unusable(self._name, "cannot be claimed", error, self._flag) from error
        self._token = job_token

    def check_owner(self, job_token: str, generation: int) -> None:
        """Check the owner record with one small read. Called right before a file becomes visible that a replaced
        process must not write (a snapshot, result.json).

        Raises:
            OwnershipLost: another job owns the directory. NewerGeneration: this job does, in a newer generation.
            RunDirectoryGone: the directory was removed or moved. RunDirectoryError: the record cannot be read.
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
        """Check the owner as `check_owner`, but only of the folder of snapshots."""
        self.check_owner(job_token, generation)

    def read(self) -> Owner | None:
        """Read the owner record; None if there is no valid one. Raises OSError other than for a missing file."""
        try:
            return owner_of(self._record_path.read_bytes())
        except FileNotFoundError:
            return None

    def release(self) -> None:
        """Give up the claim. `owner.json` stays, and so does the lock file, which the next job deletes: with an flock
        per host this worker cannot know whether it is the last of its job."""
        if self._lock_fd is not None and self._lock_pid == os.getpid():
            close_lock(self._lock_fd)
        self._lock_fd = self._token = None

    def _require_own(self, job_token: str, generation: int) -> Owner:
        """Raises: OwnershipLost, RunDirectoryGone, or OSError if the record cannot be read."""
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
        """Whether this process has locked the file that is still at the lock's path."""
        if self._lock_fd is None or self._token is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock_fd), self.lock_path(self._token).stat())
        except OSError:  # the file was deleted, or a file server has forgotten it
            return False

    def lock_path(self, token: str) -> Path:
        """The lock of a job, which stays until the next job claims the directory."""
        return self._path / f".owner-{token}.lock"

    @contextlib.contextmanager
    def _claim_lock(self, timeout: timedelta) -> Iterator[None]:
        """Hold `.claim.lock`. Raises OSError if flock is not supported, RunDirectoryError after `timeout`."""
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
        """Call `look` and then claim, under `.claim.lock`. Returns as `claim`. Raises: OSError; errors of `look`."""
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
        """Release the lock in a directory that was removed. Raises: OwnershipLost: another job owns the new one."""
        with contextlib.suppress(RunDirectoryGone):
            self._require_own(job_token, generation)
        if self._lock_fd is not None and not self._has_its_lock:
            close_lock(self._lock_fd)
            self._lock_fd = None

    def _take(self, job_token: str, generation: int, host: str) -> None:
        owner = self.read()
        if owner is None or owner.job_token != job_token:
            # If the record is ours, other jobs were checked before. A process that was stopped then may run now; it
            # will soon find out that it was replaced.
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
        """Raise OwnershipLost if another job has replaced this one, even if that job has ended: it has trained further.
        Raises RunDirectoryGone if the directory was removed or moved."""
        if self._token is None:
            return
        self._require_own(job_token, generation)
        if self._lock_fd is not None and not self._has_its_lock:  # another worker has created it anew
            raise self._gone(generation)

    def _lock_job(self, job_token: str, host: str) -> None:
        fd = open_for_lock(self.lock_path(job_token))
        try:
            # Exclusive locks on it are only tried under the claim lock, which we hold: this cannot fail for long.
            if not try_flock(fd, fcntl.LOCK_SH):
                raise OSError(errno.EWOULDBLOCK, f"{self.lock_path(job_token).name} is locked exclusively")
            _, started = process_stat(os.getpid())
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, to_json(Holder(host, os.getpid(), self._now(), started)).encode() + b"\n")
        except BaseException:
            close_lock(fd)
            raise
        self._lock_fd, self._lock_pid = fd, os.getpid()

    def _record_owner(self, job_token: str, generation: int, host: str) -> None:
        owner = self.read()
        if owner is not None and owner.job_token == job_token and owner.generation >= generation:
            return
        record = Owner(host, os.getpid(), self._now(), job_token=job_token, generation=generation)
        write_atomic(self._record_path, to_json(record).encode() + b"\n")


def _living_other(directory: Path, job_token: str, owner: Owner | None, host: str) -> str | None:
    """Delete the locks of jobs that have ended; return a description of a job that lives, or None."""
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
                continue  # stopped; the new owner record fences it off before it can run on
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
    """The error for a directory that cannot be used."""
    return RunDirectoryError(f"{name} {what}: {cause_of(error)}; choose another {flag}")


def stops(generation: int) -> str:
    return f"this process (pid {os.getpid()}, generation {generation}) writes nothing more"
