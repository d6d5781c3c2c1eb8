"""The run directory: the paths in it, its name, and how far the run in it came."""

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
from elastic_train.runlog.reader import int_of, newest_first, time_of
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
"""the folder of them where no --snapshot-dir says otherwise"""
_IDENTITY_LENGTH = 16
"""characters"""
_CLOCKS_DIFFER = 3600.0
"""seconds, between two machines, or between one and a file server; where it is more, a start may miss the last step of
the last generation, and never a generation"""


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


class OwnershipWithSnapshots(Ownership):
    """Which job has a run directory, and the folder of its snapshots: another job, which has another run directory,
    would restore this one's and prune them. The folder has a record of its own, also within the run directory: others
    come to it by a link, or by --snapshot-dir.

    Args:
        snapshots: the folder; made where it is missing.
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
        if not self._folder.is_dir():  # of a new run, or moved aside by --fresh
            require_writable(self._folder, self._called)
        try:
            # No leader: once it is claimed a look is enough, for its generation says nothing (`check_owner`).
            told = self._snapshots.claim(job_token, generation, host, is_leader=False, timeout=left)
        except RunDirectoryGone:
            self._claim_folder_anew(job_token, generation)
            return warning
        if self._folder.is_relative_to(self._path):
            return warning  # which says the same of all that lies in it
        return "\n".join(filter(None, (warning, told))) or None  # two, for the second comes only once

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
            pass  # of this job: whether this worker is in it is not said by a folder that all nodes may share
        except RunDirectoryGone:
            self._claim_folder_anew(job_token, generation)

    def release(self) -> None:
        self._snapshots.release()
        super().release()

    def _claim_folder_anew(self, job_token: str, generation: int) -> None:
        """It was removed or moved: who writes the next snapshot would make it as well."""
        require_writable(self._folder, self._called)
        self._snapshots.claim_anew(job_token, generation, self._host)


class RunDirectory:
    """The paths in one run directory, and what is done to all of it; `ownership` says who may write into it. Not for
    use by several threads at once, except `ownership.check_owner`, which any thread may call.

    Args:
        snapshots: the folder where they lie, which is owned with the directory; None where they go to a URL.
    """

    def __init__(
        self, path: str | os.PathLike[str], snapshots: Path | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        # Resolved once: the code that is trained may change the working directory, and a later launch a link.
        self.path = Path(os.path.realpath(path))
        self._now = now
        self.snapshots_dir = self.path / SNAPSHOTS
        self.ownership = Ownership(self.path, now=now)
        if snapshots is not None:
            self.snapshots_dir = Path(os.path.realpath(snapshots))
            self.ownership = OwnershipWithSnapshots(self.path, self.snapshots_dir, now=now)
        self._known_identity = ""

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    @property
    def ledger_dir(self) -> Path:
        return self.path / "ledger"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    def create(self) -> None:
        """Make the directory where it is missing and check that files can be made in it. The folders below
        are made by those who write into them.

        Raises:
            RunDirectoryError: it cannot be made, or not be written to.
        """
        try:
            make_folder(self.path)
            close_lock(open_for_lock(self.path / CLAIM_LOCK))
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise unusable(f"run directory {self.path}", "cannot be written to", error) from error

    def replace_file(self, name: str, data: bytes) -> None:
        """Write a file that only helps: readers see it whole, and a power cut may lose it. Raises OSError."""
        draft = self.path / f".{name}.{os.getpid()}"
        draft.write_bytes(data)
        os.replace(draft, self.path / name)

    def identity(self, *, timeout: timedelta = timedelta(seconds=5)) -> str:
        """A name that the directory keeps for life, made at the first call: workers that read the same one share it.
        Blocks for milliseconds; for `timeout` where another worker ended while it made the name.

        Raises:
            RunDirectoryError: it cannot be written to, or holds something else in place of the name.
        """
        path = self.path / _IDENTITY
        try:
            if not path.exists():
                with contextlib.suppress(FileExistsError):
                    create_once(path, secrets.token_hex(_IDENTITY_LENGTH // 2).encode())
            deadline = time.monotonic() + timeout.total_seconds()
            while len(data := path.read_bytes()) < _IDENTITY_LENGTH and time.monotonic() < deadline:
                time.sleep(0.01)  # its maker is about to write it, see `create_once`
        except OSError as error:
            raise unusable(f"run directory {self.path}", "cannot be written to", error) from error
        identity = data.decode(errors="replace")
        if not re.fullmatch(f"[0-9a-f]{{{_IDENTITY_LENGTH}}}", identity):  # it becomes part of a path
            raise RunDirectoryError(f"{path} is damaged ({identity!r}): remove it, or choose another --run-dir")
        self._known_identity = identity
        return identity

    def make_anew(self, job_token: str, generation: int, host: str) -> None:
        """Make it once more, of the same identity, for a worker of the job that has it: it was removed or moved.

        Raises: as `create` and `Ownership.claim`.
        """
        self.create()
        try:
            with contextlib.suppress(FileExistsError):
                create_once(self.path / _IDENTITY, self._known_identity.encode())
        except OSError as error:
            raise unusable(f"run directory {self.path}", "cannot be written to", error) from error
        self.ownership.claim_anew(job_token, generation, host)

    def move_aside(self) -> Path | None:
        """Move what the directory holds, all but the locks and the owner's record, into a new sibling named
        `<name>.<UTC time>`. A link to where snapshots lie stays, and they with it, and so does a folder that has none.
        Called after `ownership.claim`, by one worker of the job, before anybody opens a file in it.

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
                    target.rmdir()  # succeeds where nothing was moved
            raise unusable(f"run directory {self.path}", "cannot be moved aside for --fresh", error) from error
        return target

    def traces(self) -> Traces:
        """By the tails of the event files, each read once, the last written first.

        A run of many joins leaves thousands. Once a step of the owner's generation was found, those that were written
        long before it are left out: generations and steps only grow.
        """
        owner = None
        with contextlib.suppress(OSError):  # then all are read
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
        """When each was last written."""
        for path in self.events_dir.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # moved aside
                yield path.stat().st_mtime, path

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


def _is_of_claim(entry: Path) -> bool:
    return entry.name.startswith((CLAIM_LOCK, OWNER_RECORD, _IDENTITY, ".owner"))


def _stays(snapshots: Path) -> bool:
    """Where --fresh finds nothing to move there: a new run's folder is made and claimed before, and a run directory
    that is a mount point could not have it moved."""
    return snapshots.is_symlink() or (snapshots.is_dir() and all(map(_is_of_claim, snapshots.iterdir())))


def default_run_dir(run_id: str) -> Path:
    """Where no --run-dir says so, of torchrun's id."""
    name = "default" if run_id == "none" else "".join(c if c.isalnum() or c in "._-" else "_" for c in run_id)
    return Path("runs") / name
