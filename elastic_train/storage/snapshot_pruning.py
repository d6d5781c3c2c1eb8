"""Which snapshots are deleted, and what killed writers have left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

from elastic_train.errors import SnapshotDamaged, SnapshotError, cause_of
from elastic_train.storage.ownership import close_lock, open_for_lock
from elastic_train.storage.retention import Retention
from elastic_train.storage.snapshot import (
    SNAPSHOT_NAME,
    STATE_FILE,
    SnapshotInfo,
    read_info,
    read_manifest,
    snapshot_paths,
    verify,
)
from elastic_train.system import try_flock

_TEMPORARY_NAME = re.compile(r"\.tmp-(?:old-)?step-\d{12,}-gen-\d{4,}-(?P<host>.+)-(?P<pid>\d{1,9})")

# Temporary directories that a writer of this process has in hand; one that bears our pid and is not among them was
# left by an earlier process with the same pid, as is usual in containers.
IN_HAND: set[Path] = set()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no writer of another container removes this folder, whose host may have this one's name and its processes
    the same pids: the file that the state goes into is locked. Without effect where the file system has no flock."""
    fd = open_for_lock(folder / STATE_FILE)
    try:
        with contextlib.suppress(OSError):
            try_flock(fd, fcntl.LOCK_SH, timedelta(seconds=1))  # another one may look, for a moment
        yield
    finally:
        close_lock(fd)


def _is_held(folder: Path) -> bool:
    try:
        fd = os.open(folder / STATE_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or without a state
        return False
    try:
        return not try_flock(fd, fcntl.LOCK_EX)
    except OSError:
        return False
    finally:
        os.close(fd)


class SnapshotPruner:
    """Deletes snapshots of one host and one run from a directory, in the thread that writes there.

    Args:
        keep: which moments, by (generation, step), stay on disk.
        host_in_name: the host as it stands in the names of its snapshots; only these are ever removed.
        key: what is not signed with it is as good as damaged.
    """

    def __init__(
        self, directory: Path, *, keep: Retention, host_in_name: str, run_uid: str, key: bytes | None = None
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._host_in_name = host_in_name
        self._run_uid, self._key = run_uid, key
        self._verified: set[str] = set()
        """names of snapshots that were found to be whole, or written here"""

    def remove_leftovers(self) -> None:
        """Remove what writers of this host left behind that were killed."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                match = _TEMPORARY_NAME.fullmatch(name)
                if match is None or match["host"] != self._host_in_name:
                    continue
                path, pid = self._directory / name, int(match["pid"])
                if (path not in IN_HAND if pid == os.getpid() else not _is_alive(pid)) and not _is_held(path):
                    shutil.rmtree(path, ignore_errors=True)

    def prune(self, written: Path) -> list[str]:
        """Remove what is old, now that `written` is durable and whole. Reads each snapshot of other writers once.

        Returns:
            Warnings: why old ones could not be removed.
        """
        self._verified.add(written.name)
        try:
            of_run = [info for info in self._readable() if info.run_uid == self._run_uid]
            for path in self._to_remove(of_run, written):
                self._remove(path)
        except (OSError, SnapshotError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else error
            return [f"old snapshots in {self._directory} cannot be removed: {cause}"]
        return []

    def make_room(self, num_bytes: int) -> list[str]:
        """Remove more than `prune` does, where the disk is full: older ones of this host than its newest whole one, but
        for what is pinned for good, the oldest first, until there is room for a state of `num_bytes`; nothing where
        all of them are not enough. Returns names."""
        of_run = [info for info in self._readable() if info.run_uid == self._run_uid]
        own = sorted((info for info in of_run if self._is_own(info.name)), key=lambda info: info.age_key)
        newest = next(filter(self._is_whole, reversed(own)), None)
        if newest is None:
            return []
        pinned = self._keep.pinned(of_run, self._is_whole)
        missing = _on_disk(num_bytes)
        free = shutil.disk_usage(self._directory).free
        missing -= free if free < missing else 0  # else it is a quota, say, that is full
        removed = []
        older = [info for info in own[: own.index(newest)] if info.age_key not in pinned]
        if sum(_on_disk(info.files[STATE_FILE].bytes) for info in older) < missing:
            return []
        for info in older:
            if missing <= 0:
                break
            try:
                self._remove(self._directory / info.name)
            except OSError:  # another one may do it at the same time, or the disk not let anybody
                continue
            removed.append(info.name)
            missing -= _on_disk(info.files[STATE_FILE].bytes)
        return removed

    def _readable(self) -> list[SnapshotInfo]:
        """Every snapshot whose manifest can be read, its other files being there or not."""
        readable = []
        for path in snapshot_paths(self._directory):
            with contextlib.suppress(SnapshotDamaged):
                readable.append(read_manifest(path, self._key))
        return readable

    def _to_remove(self, of_run: Iterable[SnapshotInfo], written: Path) -> list[Path]:
        """The snapshots of this host beyond the newest moments of the run, but for what is pinned. A moment counts when
        one of its snapshots is whole; several hosts may have written the same one. With several writers none removes
        what another counts on: more snapshots only push the border up, where the newest are."""
        of_run = list(of_run)
        removable = [info for info in of_run if self._is_own(info.name) and info.path != written]
        moments, newest = sorted({info.age_key for info in of_run}, reverse=True), self._keep.newest
        if len(moments) <= newest or all(info.age_key >= moments[newest - 1] for info in removable):
            return []  # nor need any be read
        pinned = self._keep.pinned(of_run, self._is_whole)
        kept: list[tuple[int, int]] = []
        for moment in moments:
            if any(self._is_whole(info) for info in of_run if info.age_key == moment):
                kept.append(moment)
            if len(kept) == newest:
                doomed = (info for info in removable if info.age_key < moment and info.age_key not in pinned)
                return [self._directory / info.name for info in doomed]
        return []

    def _is_whole(self, info: SnapshotInfo) -> bool:
        """To the last byte, of those that others have written; each is read once. One that is damaged must not push
        out one that a restart could use."""
        try:
            read_info(info.path, self._key)
            if info.name not in self._verified:
                verify(info)
                self._verified.add(info.name)
        except SnapshotDamaged:
            return False
        return True

    def _is_own(self, name: str) -> bool:
        match = SNAPSHOT_NAME.fullmatch(name)
        return match is not None and match["host"] == self._host_in_name

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        IN_HAND.add(doomed)
        try:
            os.rename(path, doomed)  # out of sight first: a reader never meets half of it
            shutil.rmtree(doomed)
        finally:
            IN_HAND.discard(doomed)


def _on_disk(num_bytes: int) -> int:
    """In whole blocks, as most file systems have them."""
    return -(-num_bytes // 4096) * 4096


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
