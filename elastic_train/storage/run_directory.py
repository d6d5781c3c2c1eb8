"""The run directory: its paths, its identity, and how far its run has come."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from elastic_train.errors import NewerGeneration, RunDirectoryError, RunDirectoryGone
from elastic_train.runlog.reader import int_of, newest_first, time_of, worker_files
from elastic_train.storage.atomic_files import create_once, fsync_directory, make_folder, require_writable
from elastic_train.storage.ownership import (
    CLAIM_LOCK,
    CLAIM_TIMEOUT,
    OWNER_RECORD,
    Ownership,
    close_lock,
    open_for_lock,
    unusable,
)

_IDENTITY = ".directory-id"
SNAPSHOTS = "snapshots"
"""The folder for snapshots without --snapshot-dir."""
_IDENTITY_LENGTH = 16
"""In characters."""
_CLOCKS_DIFFER = 3600.0
"""The allowed difference, in seconds, between the clocks of two machines, or of a machine and a file server. With more,
a start may miss the last step of the last generation, but never a generation."""


@dataclass(frozen=True)
class Traces:
    """How far the run has come, as its event files show; None if they show nothing."""

    generation: int | None
    """The largest."""
    reached: tuple[int, int] | None
    """The largest (generation, committed steps). A generation may start at fewer steps than an earlier one had reached:
    the last steps of that one were lost."""
    logged: tuple[int, int] | None
    """The same, but only of steps with an event `step`."""


class OwnershipWithSnapshots(Ownership):
    """The ownership of a run directory and of the folder of its snapshots.

    The folder has its own record, even inside the run directory: a job with another run directory could reach it by a
    link or by --snapshot-dir, and then restore and prune these snapshots.

    Args:
        snapshots: the folder; created if missing.
    """

    def __init__(self, path: Path, snapshots: Path, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(path, now=now)
        self._folder, self._host = snapshots, ""
        self._called = "snapshot directory" if snapshots.is_relative_to(path) else "--snapshot-dir"
        self._snapshots = Ownership(snapshots, f"snapshot directory {snapshots}", "--snapshot-dir", now=now)

    def claim(
        self,
        job_token: str,
        generation: int,
        host: str,
        *,
        is_leader: bool = True,
        timeout: timedelta = CLAIM_TIMEOUT,
    ) -> str | None:
        self._host, began = host, time.monotonic()
        warning = super().claim(job_token, generation, host, is_leader=is_leader, timeout=timeout)
        left = max(timedelta(seconds=1), timeout - timedelta(seconds=time.monotonic() - began))
        if not self._folder.is_dir():  # a new run, or --fresh has moved the folder aside
            require_writable(self._folder, self._called)
        try:
            # No leader: after the first claim a check is enough, because its generation is ignored (`check_owner`).
            told = self._snapshots.claim(job_token, generation, host, is_leader=False, timeout=left)
        except RunDirectoryGone:
            self._claim_folder_anew(job_token, generation)
            return warning
        if self._folder.is_relative_to(self._path):
            return warning  # it covers the folder, too
        return "\n".join(filter(None, (warning, told))) or None  # both, because the second comes only once

    def claim_anew(self, job_token: str, generation: int, host: str) -> None:
        super().claim_anew(job_token, generation, host)
        self._claim_folder_anew(job_token, generation)  # it may have lain in the run directory

    def check_owner(self, job_token: str, generation: int) -> None:
        super().check_owner(job_token, generation)
        self.check_snapshots(job_token, generation)

    def check_snapshots(self, job_token: str, generation: int) -> None:
        try:
            self._snapshots.check_owner(job_token, generation)
        except NewerGeneration:
            pass  # of this job. All nodes may share the folder, so its generation does not exclude this worker.
        except RunDirectoryGone:
            self._claim_folder_anew(job_token, generation)

    def release(self) -> None:
        self._snapshots.release()
        super().release()

    def _claim_folder_anew(self, job_token: str, generation: int) -> None:
        """Create and claim the folder again after it was removed or moved; the next snapshot would create it anyway."""
        require_writable(self._folder, self._called)
        self._snapshots.claim_anew(job_token, generation, self._host)


class RunDirectory:
    """The paths in one run directory, and operations on all of it. `ownership` decides which job may write there. Not
    thread-safe, except `ownership.check_owner`, which any thread may call.

    Args:
        snapshots: the folder of snapshots, which is claimed with the directory; None if snapshots go to a URL.
    """

    def __init__(
        self, path: str | os.PathLike[str], snapshots: Path | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        # Resolved once: user code may change the working directory, and a later launch may change a link.
        self.path = Path(os.path.realpath(path))
        self._now = now
        self.events_dir, self.ledger_dir = self.path / "events", self.path / "ledger"
        self.tensorboard_dir, self.result_path = self.path / "tensorboard", self.path / "result.json"
        self.snapshots_dir = self.path / SNAPSHOTS
        self.ownership = Ownership(self.path, now=now)
        if snapshots is not None:
            self.snapshots_dir = Path(os.path.realpath(snapshots))
            self.ownership = OwnershipWithSnapshots(self.path, self.snapshots_dir, now=now)
        self._known_identity = ""

    def create(self) -> None:
        """Create the directory if it is missing, and check that files can be created in it. Each writer creates its own
        folder below.

        Raises:
            RunDirectoryError: the directory cannot be created or written to.
        """
        try:
            make_folder(self.path)
            close_lock(open_for_lock(self.path / CLAIM_LOCK))
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise unusable(f"run directory {self.path}", "cannot be written to", error) from error

    def replace_file(self, name: str, data: bytes) -> None:
        """Replace a file of minor importance: readers see it whole, but a power cut may lose it. Raises OSError."""
        draft = self.path / f".{name}.{os.getpid()}"
        draft.write_bytes(data)
        os.replace(draft, self.path / name)

    def identity(self, job_token: str, *, timeout: timedelta = timedelta(seconds=5)) -> str:
        """A random name of the directory in this job, created at the first call. Workers that read the same name share
        the directory. No name is for good: it would be in all copies, as on machines of one image. Blocks for
        milliseconds, or for `timeout` if another worker ended while it created the name.

        Raises:
            RunDirectoryError: the directory cannot be written to, or the file of the name is damaged.
        """
        path = self.path / f"{_IDENTITY}-{job_token}"
        try:
            if not path.exists():
                with contextlib.suppress(FileExistsError):
                    create_once(path, (self._known_identity or secrets.token_hex(_IDENTITY_LENGTH // 2)).encode())
                for other in self.path.glob(f"{_IDENTITY}*"):
                    lock = self.ownership.lock_path(other.name.removeprefix(f"{_IDENTITY}-"))
                    with contextlib.suppress(OSError):  # another user's, or gone
                        # Else its job may live and be joined, or it may be about to be read.
                        if not lock.exists() and other.stat().st_mtime < path.stat().st_mtime - 60:
                            other.unlink()
            deadline = time.monotonic() + timeout.total_seconds()
            while len(data := path.read_bytes()) < _IDENTITY_LENGTH and time.monotonic() < deadline:
                time.sleep(0.01)  # another worker is about to write it, see `create_once`
        except OSError as error:
            raise unusable(f"run directory {self.path}", "cannot be written to", error) from error
        identity = data.decode(errors="replace")
        if not re.fullmatch(f"[0-9a-f]{{{_IDENTITY_LENGTH}}}", identity):  # it becomes part of a path
            raise RunDirectoryError(f"{path} is damaged ({identity!r}): remove it, or choose another --run-dir")
        self._known_identity = identity
        return identity

    def make_anew(self, job_token: str, generation: int, host: str) -> None:
        """Create and claim the directory again, with the same identity, after it was removed or moved during the job.

        Raises: as `create`, `identity` and `Ownership.claim_anew`.
        """
        self.create()
        self.identity(job_token)
        self.ownership.claim_anew(job_token, generation, host)

    def move_aside(self) -> Path | None:
        """Move all entries, except the locks and the owner's record, into a new sibling named `<name>.<UTC time>`. A
        link to a folder of snapshots stays, and so do its snapshots; an empty folder for snapshots stays, too. One
        worker of the job calls this after `ownership.claim`, before any worker opens a file in the directory.

        Returns:
            The sibling, or None if there was nothing to move.

        Raises:
            RunDirectoryError: an entry cannot be moved. Entries that were moved before stay moved.
        """
        target: Path | None = None
        try:
            # snapshots and events first: even if the rest fails, no run can be continued without them
            entries = sorted(self.path.iterdir(), key=lambda entry: (not entry.is_dir(), entry.name))
            for entry in entries:
                if _is_of_claim(entry) or (entry.name == SNAPSHOTS and _stays(entry)):
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
                    target.rmdir()  # succeeds if nothing was moved
            raise unusable(f"run directory {self.path}", "cannot be moved aside for --fresh", error) from error
        return target

    def traces(self) -> Traces:
        """Find how far the run has come, from the ends of the event files, the newest file first; each is read once.

        A run with many joins has thousands of files. Once a step of the owner's generation is found, files that were
        last written long before it are skipped, because generations and steps only grow.

        Raises: RunDirectoryError: the folder of the event files cannot be listed.
        """
        owner = None
        with contextlib.suppress(OSError):  # all files are read then
            owner = self.ownership.read()
        generations, reached, logged = [], [], []
        last_step = (-1, -1, 0.0)
        for written_at, path in sorted(self._event_files(), reverse=True):
            is_newest = owner is not None and last_step[0] >= owner.generation
            if is_newest and written_at < last_step[2] - _CLOCKS_DIFFER:
                break
            for line in newest_first(path):
                generation, step = int_of(line, "generation"), int_of(line, "step")
                if generation is None:
                    continue
                generations.append(generation)
                if step is not None:
                    reached.append((generation, step))
                    if line.get("event") == "step":
                        logged.append((generation, step))
                        last_step = max(last_step, (generation, step, time_of(line)))
        return Traces(max(generations, default=None), max(reached, default=None), max(logged, default=None))

    def _event_files(self) -> Iterator[tuple[float, Path]]:
        """Each event file with the time of its last write."""
        for path in worker_files(self.events_dir):
            with contextlib.suppress(FileNotFoundError):  # moved aside
                yield path.stat().st_mtime, path

    def _make_sibling(self) -> Path:
        stamp = datetime.fromtimestamp(self._now(), UTC).strftime("%Y%m%dT%H%M%SZ")
        number = 1
        while True:
            suffix = "" if number == 1 else f".{number}"
            sibling = self.path.with_name(f"{self.path.name}.{stamp}{suffix}")
            with contextlib.suppress(FileExistsError):
                sibling.mkdir()
                return sibling
            number += 1


def _is_of_claim(entry: Path) -> bool:
    return entry.name.startswith((CLAIM_LOCK, OWNER_RECORD, _IDENTITY, ".owner"))


def _stays(snapshots: Path) -> bool:
    """Whether --fresh leaves the folder: it is a link or empty, as a new run creates it, and might be a mount point."""
    return snapshots.is_symlink() or (snapshots.is_dir() and all(map(_is_of_claim, snapshots.iterdir())))


def default_run_dir(run_id: str) -> Path:
    """The run directory without --run-dir, from torchrun's run id."""
    name = "default" if run_id == "none" else "".join(c if c.isalnum() or c in "._-" else "_" for c in run_id)
    return Path("runs") / name
