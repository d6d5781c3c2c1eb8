"""Write snapshots in the background: whole or absent, one at a time, the oldest ones deleted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.branches import Branches
from elastic_train.errors import SnapshotDamaged, SnapshotError, cause_of
from elastic_train.storage.atomic_files import fsync_directory
from elastic_train.storage.snapshot import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SNAPSHOT_NAME,
    STATE_FILE,
    SnapshotInfo,
    SnapshotResult,
    read_info,
    read_manifest,
    snapshot_paths,
    verify,
)
from elastic_train.storage.state_bytes import (
    HashingFile,
    HostBuffers,
    SnapshotFile,
    require_numbers,
    write_state,
)
from elastic_train.version import VERSION

_TEMPORARY_NAME = re.compile(r"\.tmp-(?:old-)?step-\d{12,}-gen-\d{4,}-(?P<host>.+)-(?P<pid>\d{1,9})")


# Temporary directories that a writer of this process has in hand; one that bears our pid and is not among them was
# left by an earlier process with the same pid, as is usual in containers.
_in_hand: set[Path] = set()


@dataclass(frozen=True)
class _Position:
    """What the manifest says about where in training the state stands."""

    step: int
    epoch: int
    samples_done: int
    generation: int
    world_size: int
    branches: Branches = ()


class SnapshotWriter:
    """Writes the snapshots of one process, one at a time. Its methods are for one thread, the one that trains.

    `keep` is how many moments, by (generation, step), stay on disk of a run; only those of this host are ever
    removed. `before_rename` is called by the thread that writes, when a snapshot is complete but not yet visible; what
    it raises (OwnershipLost) ends that snapshot. `task` is JSON: what must agree with a run that continues.

    A process that ends while a snapshot is being written loses that snapshot; call `wait` before.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        host: str,
        run_uid: str,
        task: Mapping[str, Any],
        before_rename: Callable[[], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: the newest snapshot is never removed")
        self.directory = directory
        self._keep = keep
        self._host = host
        self._host_in_name = re.sub(r"[^A-Za-z0-9._-]", "_", host)
        self._run_uid = run_uid
        self._task = json.loads(json.dumps(task))
        self._before_rename = before_rename
        self._now = now
        self._verified: set[str] = set()
        """names of snapshots that were found to be whole, or written here"""
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._outcomes: list[SnapshotResult | BaseException] = []  # append and pop are atomic
        self._remove_leftovers()

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate what the first snapshot of a state of this shape is copied into, beside the caller's work.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        self._buffers.prepare(state)

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        samples_done: int,
        generation: int,
        world_size: int,
        branches: Branches = (),
        in_flight_timeout: float = 300.0,
    ) -> SnapshotResult:
        """Write a snapshot and return when it is durable. Waits first for the one in flight, whose outcome is left
        for `collect`.

        Raises:
            SnapshotError: it cannot be written; the older ones are untouched. Or the one in flight has not ended
                after `in_flight_timeout` seconds.
            OwnershipLost, or whatever else `before_rename` raises.
        """
        start = time.perf_counter()
        if not self.wait(in_flight_timeout):
            raise SnapshotError(
                f"snapshot of step {step} not written: the one before it is still being written to "
                f"{self.directory} after {in_flight_timeout:g} s"
            )
        position = _Position(step, epoch, samples_done, generation, world_size, branches)
        return self._write(self._buffers.copy(state), position, start, stall_seconds=None)

    def save_in_background(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        samples_done: int,
        generation: int,
        world_size: int,
        branches: Branches = (),
    ) -> bool:
        """Copy the state into the host buffers, start writing it and return; the caller may change the state at once.
        Blocks for the copy, the first time also for allocating the buffers, where `prepare` has not.

        Returns:
            False where the one before is still being written: nothing was done. Else the outcome comes from `collect`.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        if self.is_busy():
            return False
        start = time.perf_counter()
        copied = self._buffers.copy(state)
        position = _Position(step, epoch, samples_done, generation, world_size, branches)
        stall_seconds = time.perf_counter() - start

        def write() -> None:
            try:
                self._outcomes.append(self._write(copied, position, start, stall_seconds))
            except BaseException as error:  # not handled here: collect() gives it to the thread that trains
                self._outcomes.append(error)

        self._thread = threading.Thread(target=write, name="snapshot-writer", daemon=True)
        self._thread.start()
        return True

    def is_busy(self) -> bool:
        """Whether a snapshot is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout: float) -> bool:
        """Wait for the snapshot in flight, if there is one, `timeout` seconds at most; False if it has not ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy()

    def collect(self) -> list[SnapshotResult | SnapshotError]:
        """The outcomes of the background since the last call, without blocking. A SnapshotError is a snapshot that
        was not written, over which no training need end.

        Raises:
            OwnershipLost, or whatever else ended a snapshot in the background, once each.
        """
        collected: list[SnapshotResult | SnapshotError] = []
        while self._outcomes:
            outcome = self._outcomes[0]
            if not isinstance(outcome, SnapshotResult | SnapshotError):
                if collected:
                    break  # first hand over what came before it; the next call raises
                raise self._outcomes.pop(0)  # type: ignore[misc]
            collected.append(outcome)
            self._outcomes.pop(0)
        return collected

    def _write(
        self, state: dict[str, Any], position: _Position, start: float, stall_seconds: float | None
    ) -> SnapshotResult:
        """`state` is already the writer's own copy."""
        name = f"step-{position.step:012d}-gen-{position.generation:04d}-{self._host_in_name}"
        path = self.directory / name
        warnings: list[str] = []
        num_bytes = self._existing_bytes(path, warnings)
        if num_bytes is None:
            num_bytes = self._write_new(state, position, path)
        self._verified.add(name)
        total_seconds = time.perf_counter() - start
        self._prune(path, warnings)
        return SnapshotResult(
            path=path,
            step=position.step,
            generation=position.generation,
            bytes=num_bytes,
            stall_seconds=total_seconds if stall_seconds is None else stall_seconds,
            total_seconds=total_seconds,
            warnings=tuple(warnings),
        )

    def _existing_bytes(self, path: Path, warnings: list[str]) -> int | None:
        """The size of the state where this very snapshot is there already and whole."""
        if not path.exists():
            return None
        try:
            info = read_info(path)
            verify(info)
        except SnapshotDamaged as error:
            warnings.append(f"replaced: {error}")
            return None
        if info.run_uid != self._run_uid:
            raise SnapshotError(
                f"snapshot {path} cannot be written: another run has one of that name there; "
                "choose another --snapshot-dir"
            )
        return info.files[STATE_FILE].bytes

    def _write_new(self, state: dict[str, Any], position: _Position, path: Path) -> int:
        require_numbers(state.get("model"), position.step)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        displaced = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        _in_hand.update((temporary, displaced))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            os.mkdir(temporary)
            written = _write_state(temporary / STATE_FILE, state)
            _write_bytes(temporary / MANIFEST_FILE, self._manifest(position, written))
            fsync_directory(temporary)
            if self._before_rename is not None:
                self._before_rename()
            # Another worker of this host may have written the same moment of the same run meanwhile: one is enough.
            if self._existing_bytes(path, []) is None:
                if path.exists():
                    shutil.rmtree(displaced, ignore_errors=True)
                    os.rename(path, displaced)
                try:
                    os.rename(temporary, path)
                except OSError:
                    if self._existing_bytes(path, []) is None:
                        raise
            fsync_directory(self.directory)
        except OSError as error:
            raise SnapshotError(
                f"snapshot {path} cannot be written: {cause_of(error)}; older snapshots are untouched; "
                f"{_advice(error)}choose another --snapshot-dir"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(displaced, ignore_errors=True)
            _in_hand.difference_update((temporary, displaced))
        return written.bytes

    def _manifest(self, position: _Position, state_file: SnapshotFile) -> bytes:
        import torch

        manifest = {
            "format_version": FORMAT_VERSION,
            **vars(position),
            "run_uid": self._run_uid,
            "host": self._host,
            "time": self._now(),
            "torch_version": str(torch.__version__),
            "elastic_train_version": VERSION,
            "task": self._task,
            "files": {STATE_FILE: vars(state_file)},
        }
        return json.dumps(manifest, indent=2).encode() + b"\n"

    def _prune(self, written: Path, warnings: list[str]) -> None:
        try:
            of_run = [info for info in self._readable() if info.run_uid == self._run_uid]
            for path in self._to_remove(of_run, written):
                self._remove(path)
        except (OSError, SnapshotError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else error
            warnings.append(f"old snapshots in {self.directory} cannot be removed: {cause}")

    def _readable(self) -> list[SnapshotInfo]:
        """Every snapshot whose manifest can be read, its other files being there or not."""
        readable = []
        for path in snapshot_paths(self.directory):
            with contextlib.suppress(SnapshotDamaged):
                readable.append(read_manifest(path))
        return readable

    def _to_remove(self, of_run: Iterable[SnapshotInfo], written: Path) -> list[Path]:
        """The snapshots of this host beyond the `keep` newest moments of the run. A moment counts when one of its
        snapshots is whole; several hosts may have written the same one. With several writers none removes what
        another counts on: more snapshots only push the border up, where the newest are."""
        of_run = list(of_run)
        removable = [info for info in of_run if self._is_own(info.path) and info.path != written]
        moments = sorted({info.age_key for info in of_run}, reverse=True)
        if len(moments) <= self._keep or all(info.age_key >= moments[self._keep - 1] for info in removable):
            return []  # nor need any be read
        kept: list[tuple[int, int]] = []
        for moment in moments:
            if any(self._is_whole(info) for info in of_run if info.age_key == moment):
                kept.append(moment)
            if len(kept) == self._keep:
                return [info.path for info in removable if info.age_key < moment]
        return []

    def _is_whole(self, info: SnapshotInfo) -> bool:
        """To the last byte, of those that others have written; each is read once. One that is damaged must not push
        out one that a restart could use."""
        try:
            read_info(info.path)
            if info.name not in self._verified:
                verify(info)
                self._verified.add(info.name)
        except SnapshotDamaged:
            return False
        return True

    def _is_own(self, path: Path) -> bool:
        match = SNAPSHOT_NAME.fullmatch(path.name)
        return match is not None and match["host"] == self._host_in_name

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        _in_hand.add(doomed)
        try:
            os.rename(path, doomed)  # out of sight first: a reader never meets half of it
            shutil.rmtree(doomed)
        finally:
            _in_hand.discard(doomed)

    def _remove_leftovers(self) -> None:
        """Remove what writers of this host left behind that were killed."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                match = _TEMPORARY_NAME.fullmatch(name)
                if match is None or match["host"] != self._host_in_name:
                    continue
                path, pid = self.directory / name, int(match["pid"])
                if path not in _in_hand if pid == os.getpid() else not _is_alive(pid):
                    shutil.rmtree(path, ignore_errors=True)


def _write_state(path: Path, state: dict[str, Any]) -> SnapshotFile:
    with open(path, "wb") as file:
        hashing = HashingFile(file)
        write_state(state, hashing)
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    return hashing.written()


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _advice(error: OSError) -> str:
    """What helps, beside another folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there or "
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable for this user or "
    return ""
