"""Snapshots in a folder: write to a temporary directory and rename; delete old ones and leftovers of killed writers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from elastic_train.errors import SnapshotDamaged, SnapshotError, cause_of
from elastic_train.storage.appearance import Flight
from elastic_train.storage.atomic_files import fsync_directory, make_folder, write_durably
from elastic_train.storage.direct_file import DirectFile
from elastic_train.storage.ownership import close_lock, open_for_lock
from elastic_train.storage.retention import Retention
from elastic_train.storage.shares import SharedState
from elastic_train.storage.signature import sign
from elastic_train.storage.snapshot import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SNAPSHOT_NAME,
    STATE_FILE,
    SnapshotInfo,
    read_info,
    read_manifest,
    require_same_run,
    snapshot_paths,
    verify,
)
from elastic_train.storage.state_bytes import HashingFile, SnapshotFile
from elastic_train.system import is_there, try_flock

_TEMPORARY_NAME = re.compile(r"\.tmp-(?:old-)?step-\d{12,}-gen-\d{4,}-(?P<host>.+)-(?P<pid>\d{1,9})(?:\.[0-9a-f]{8})?")

# Temporary directories that a writer of this process uses now. Any other with our pid in its name is a leftover of an
# earlier process with the same pid, as is usual in containers.
_IN_HAND: set[Path] = set()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Protect a temporary folder, inside the block, from writers of other containers, which may have the same host name
    and pids. Locks the state file; without effect if the file system has no flock."""
    fd = open_for_lock(folder / STATE_FILE)
    try:
        with contextlib.suppress(OSError):
            try_flock(fd, fcntl.LOCK_SH, timedelta(seconds=1))  # another writer may hold it briefly, in `_is_held`
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


class LocalFolder:
    """The snapshots in a local folder, with the interface of a `Bucket`, for the single thread that writes there. Only
    snapshots of the host that is named in the written one are ever deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._verified: set[str] = set()
        """Names of snapshots that were verified, or written by this object."""
        self._unread: set[str] = set()
        """Names of snapshots that the disk did not return: they stay, because nobody knows whether they are whole."""
        self._warnings: list[str] = []
        """The warnings of the newest write."""

    def snapshot(self, name: str) -> Path:
        return self._path / name

    def remove_leftovers(self, host_in_name: str) -> None:
        """Delete the temporary directories that killed writers of a host have left."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._path):
                match = _TEMPORARY_NAME.fullmatch(name)
                if match is None or match["host"] != host_in_name:
                    continue
                path, pid = self._path / name, int(match["pid"])
                if (path not in _IN_HAND if pid == os.getpid() else not is_there(pid)) and not _is_held(path):
                    shutil.rmtree(path, ignore_errors=True)

    def write(
        self,
        name: str,
        fill: Callable[[IO[bytes]], None],
        manifest: dict[str, Any],
        *,
        key: bytes | None = None,
        flight: Flight | None = None,
        shared: SharedState | None = None,
    ) -> SnapshotFile:
        """Write a snapshot, as `Bucket.write`, but without other nodes. Raises also: OSError."""
        path, run_uid, self._warnings = self.snapshot(name), str(manifest["run_uid"]), []
        existing = _existing(path, run_uid, key, self._warnings.append)
        if existing is not None:
            return existing
        mine = f"{name}-{os.getpid()}.{secrets.token_hex(4)}"  # two containers may have the same host name and pids
        temporary, displaced = path.with_name(f".tmp-{mine}"), path.with_name(f".tmp-old-{mine}")
        _IN_HAND.update((temporary, displaced))
        in_hand = contextlib.ExitStack()
        try:
            make_folder(path.parent)
            os.mkdir(temporary)
            in_hand.enter_context(held(temporary))
            written = _write_state(temporary / STATE_FILE, fill)
            whole = sign({**manifest, "format_version": FORMAT_VERSION, "files": {STATE_FILE: vars(written)}}, key)
            write_durably(temporary / MANIFEST_FILE, json.dumps(whole, indent=2).encode() + b"\n")
            fsync_directory(temporary)
            if flight is not None:
                flight.check()
            _put_in_place(
                temporary, path, displaced, lambda: _existing(path, run_uid, key, lambda _damaged: None) is not None
            )
            fsync_directory(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(displaced, ignore_errors=True)
            in_hand.close()
            _IN_HAND.difference_update((temporary, displaced))
        return written

    def prune(
        self, written: str, *, keep: Retention, run_uid: str, key: bytes | None = None, flight: Flight | None = None
    ) -> list[str]:
        """Delete old snapshots of the host of `written`, as `Bucket.prune`, but fast. A moment counts if one of its
        snapshots is verified in full; snapshots of other writers are read once for that. Several writers are safe: a
        snapshot that this one does not see could only raise the limit below which it deletes."""
        self._verified.add(written)
        self._unread.clear()
        host = _host_in(written)
        if host is not None:  # also of the previous writer, which may have been killed after this one was built
            self.remove_leftovers(host)
        try:
            of_run = self._readable(run_uid, key)
            removable = [info for info in self._own(of_run, host) if info.name != written]
            for info in keep.expired(of_run, removable, partial(self._is_whole, key)):
                if info.name not in self._unread:
                    self._remove(self._path / info.name)
        except (OSError, SnapshotError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else error
            return [*self._warnings, f"old snapshots in {self._path} cannot be removed: {cause}"]
        return self._warnings

    def make_room(
        self, num_bytes: int, host_in_name: str, *, keep: Retention, run_uid: str, key: bytes | None
    ) -> list[str]:
        """Delete more than `prune` on a full disk, until there is room for a state of `num_bytes`; return the names.
        Deletes snapshots of this host before its newest whole one, the oldest first, but never pinned ones; deletes
        nothing if all of these would not make room enough."""
        is_whole = partial(self._is_whole, key)
        of_run = self._readable(run_uid, key)
        own = sorted(self._own(of_run, host_in_name), key=lambda info: info.age_key)
        newest = next(filter(is_whole, reversed(own)), None)
        if newest is None:
            return []
        pinned = keep.pinned(of_run, is_whole)
        missing = _on_disk(num_bytes)
        free = shutil.disk_usage(self._path).free
        missing -= free if free < missing else 0  # else a quota is full, say, and not the disk
        removed = []
        older = [info for info in own[: own.index(newest)] if info.age_key not in pinned]
        older = [info for info in older if info.name not in self._unread]
        if sum(_on_disk(info.files[STATE_FILE].bytes) for info in older) < missing:
            return []
        for info in older:
            if missing <= 0:
                break
            try:
                self._remove(self._path / info.name)
            except OSError:  # another worker may delete it at the same time, or the disk may refuse
                continue
            removed.append(info.name)
            missing -= _on_disk(info.files[STATE_FILE].bytes)
        return removed

    def _readable(self, run_uid: str, key: bytes | None) -> list[SnapshotInfo]:
        """Every snapshot of a run whose manifest can be read, even if its other files are missing."""
        readable = []
        for path in snapshot_paths(self._path):
            with contextlib.suppress(SnapshotDamaged):
                readable.append(read_manifest(path, key))
        return [info for info in readable if info.run_uid == run_uid]

    def _is_whole(self, key: bytes | None, info: SnapshotInfo) -> bool:
        """Whether a snapshot is undamaged; each of another writer is read in full once. A damaged snapshot must not
        displace one that a restart could use."""
        try:
            read_info(info.path, key)
            if info.name not in self._verified:
                verify(info)
                self._verified.add(info.name)
        except SnapshotDamaged as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                self._unread.add(info.name)
            return False
        return True

    @staticmethod
    def _own(infos: Iterable[SnapshotInfo], host_in_name: str | None) -> list[SnapshotInfo]:
        return [info for info in infos if _host_in(info.name) == host_in_name]

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        _IN_HAND.add(doomed)
        try:
            os.rename(path, doomed)  # first, so that a reader never finds half of it
            shutil.rmtree(doomed)
        finally:
            _IN_HAND.discard(doomed)


def _host_in(name: str) -> str | None:
    match = SNAPSHOT_NAME.fullmatch(name)
    return None if match is None else match["host"]


def _on_disk(num_bytes: int) -> int:
    """The space on disk, in the whole blocks of most file systems."""
    return -(-num_bytes // 4096) * 4096


def _existing(path: Path, run_uid: str, key: bytes | None, warn: Callable[[str], None]) -> SnapshotFile | None:
    """The state file of the snapshot at `path` if it is there already and whole, else None. Raises: SnapshotError: a
    snapshot of another run is there."""
    if not path.exists():
        return None
    with contextlib.suppress(OSError):
        require_same_run((path / MANIFEST_FILE).read_bytes(), path, run_uid)
    try:
        info = read_info(path, key)
        verify(info)
    except SnapshotDamaged as error:
        warn(f"replaced: {error}")
        return None
    return info.files[STATE_FILE]


def _put_in_place(temporary: Path, path: Path, displaced: Path, is_there: Callable[[], bool]) -> None:
    """Rename a snapshot to its final name, unless another worker of this host has written the same one meanwhile."""
    if is_there():
        return
    if path.exists():
        os.rename(path, displaced)
    try:
        os.rename(temporary, path)
    except OSError:
        if not is_there():
            raise


def _write_state(path: Path, fill: Callable[[IO[bytes]], None]) -> SnapshotFile:
    with DirectFile(path) as file:
        hashing = HashingFile(cast("IO[bytes]", file))
        fill(cast("IO[bytes]", hashing))
        if hashing.error is not None:
            raise hashing.error
    return hashing.written()
