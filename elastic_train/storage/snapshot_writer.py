"""Write snapshots in the background: whole or absent, one at a time; delete the oldest ones."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, NotRequired, TypedDict, Unpack

from elastic_train.branches import Branches
from elastic_train.errors import DISK_FULL, SnapshotError, cause_of
from elastic_train.storage.appearance import Flight
from elastic_train.storage.local_folder import LocalFolder
from elastic_train.storage.retention import Retention
from elastic_train.storage.shares import Fleet, shared_by
from elastic_train.storage.snapshot import SnapshotFolder, SnapshotPlace, SnapshotResult, host_in_name, name_of
from elastic_train.storage.state_bytes import NO_EXTRAS, HostBuffers, require_numbers, size_of, write_state
from elastic_train.system import starts
from elastic_train.version import VERSION


class SnapshotPosition(TypedDict):
    """The position of a state in training, as its manifest records it."""

    step: int
    epoch: int
    samples_done: int
    generation: int
    world_size: int
    branches: NotRequired[Branches]
    restarts: NotRequired[Branches]
    metric: NotRequired[float | None]


NO_THREAD = "no thread can be started: raise the limit of processes"
_NO_BRANCHES = {"branches": (), "restarts": (), "metric": None}


class SnapshotWriter:
    """Writes the snapshots of one process, one at a time. Only the training thread may call its methods.

    `keep` selects the snapshots that stay, by (generation, step); a number keeps that many of the newest. In a folder
    only snapshots of this host are ever deleted. The writing thread calls `before_rename` when a snapshot is whole but
    not yet visible, and below a URL again once it is visible; an error of it (OwnershipLost) ends that snapshot. `task`
    is JSON: what a continued run must share. `key` signs manifests. `may_be_nan`: as in `require_numbers`.

    A process that ends during a write loses that snapshot; call `wait` before.
    """

    def __init__(
        self,
        directory: SnapshotFolder,
        *,
        keep: int | Retention,
        host: str,
        run_uid: str,
        task: Mapping[str, Any],
        before_rename: Callable[[], None] | None = None,
        key: bytes | None = None,
        may_be_nan: Mapping[str, Collection[str]] = NO_EXTRAS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keep = Retention(keep) if isinstance(keep, int) else keep
        self.directory = directory
        self._host = host
        self._run_uid, self._key = run_uid, key
        self._task = json.loads(json.dumps(task))
        self._before_rename, self._may_be_nan, self._now = before_rename, may_be_nan, now
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._flight = Flight(None)
        """The flight of the background snapshot."""
        self._has_pruned = False
        self._outcomes: list[SnapshotResult | BaseException] = []  # append and pop are atomic
        self._folder = LocalFolder(directory) if isinstance(directory, Path) else directory
        if isinstance(self._folder, LocalFolder):
            self._folder.remove_leftovers(host_in_name(host))

    def prepare(self, state: dict[str, Any]) -> None:
        """Start to allocate the host buffers for a state of this shape, in the background.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        self._buffers.prepare(state)

    def save(
        self,
        state: dict[str, Any],
        *,
        in_flight_timeout: float = 300.0,
        fleet: Fleet | None = None,
        is_stop: bool = False,
        **position: Unpack[SnapshotPosition],
    ) -> SnapshotResult:
        """Write a snapshot and return when it is durable; in a fleet, together with the nodes in `save_share`.

        Waits first for the snapshot in flight, whose outcome stays for `collect`. At a stop (`is_stop`) old snapshots
        below a URL stay for the next start, to save time, unless this process has not pruned yet.

        Raises:
            SnapshotError: not written, the older ones untouched; or still one in flight after `in_flight_timeout` s.
            OwnershipLost, or any other error of `before_rename`.
        """
        start = time.perf_counter()
        if not self.wait(in_flight_timeout, prunes=False):
            raise SnapshotError(
                f"snapshot of step {position['step']} not written: the one before it is still being written to "
                f"{self.directory} after {in_flight_timeout:g} s"
            )
        flight = Flight(self._before_rename, is_awaited=is_stop and self._has_pruned)
        return self._write(self._buffers.copy(state), position, start, None, flight, fleet)

    def save_share(self, state: dict[str, Any], fleet: Fleet, *, step: int, generation: int) -> bool:
        """Send this node's share of the snapshot of this step, which the first node of the fleet saves. Blocks until
        the snapshot exists. Returns False if it will not, or if the first node writes it alone.

        Raises:
            SnapshotError: this node cannot send. The other nodes send what is missing.
        """
        if isinstance(self._folder, LocalFolder) or shared_by(fleet, state) is None:
            return False
        if not self.wait(300.0, prunes=False):
            return False
        shared = shared_by(fleet, self._buffers.copy(state))
        assert shared is not None, "a copy has the same sizes"
        return self._folder.write_share(name_of(step, generation, fleet.hosts[0]), shared)

    def save_in_background(self, state: dict[str, Any], **position: Unpack[SnapshotPosition]) -> bool:
        """Copy the state into the host buffers and start to write it; the caller may change the state at once. Blocks
        for the copy, and the first time also for the allocation of the buffers, unless `prepare` was called.

        Returns:
            False if the previous snapshot is still being written: nothing was done. Else `collect` gives the outcome.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        if self.is_busy():
            return False
        start = time.perf_counter()
        copied = self._buffers.copy(state)
        stall_seconds = time.perf_counter() - start

        self._flight = flight = Flight(self._before_rename)

        def write() -> None:
            try:
                self._outcomes.append(self._write(copied, position, start, stall_seconds, flight))
            except BaseException as error:  # not handled here: collect() raises it in the training thread
                if not (flight.is_given_up() and isinstance(error, SnapshotError)):
                    self._outcomes.append(error)

        thread = threading.Thread(target=write, name="snapshot-writer", daemon=True)
        if starts(thread):
            self._thread = thread
        else:
            place = self._folder.snapshot(name_of(position["step"], position["generation"], self._host))
            self._outcomes.append(SnapshotError(f"snapshot {place} not written: {NO_THREAD}"))
        return True

    def make_room(self, state: dict[str, Any]) -> list[str]:
        """Make room in the folder for this state, as `LocalFolder.make_room`; a no-op below a URL. Raises: any error of
        `before_rename`, because another job may own the folder by now."""
        if not isinstance(self._folder, LocalFolder):
            return []
        if self._before_rename is not None:
            self._before_rename()
        host = host_in_name(self._host)
        return self._folder.make_room(size_of(state), host, keep=self._keep, run_uid=self._run_uid, key=self._key)

    def is_busy(self) -> bool:
        """Whether a snapshot is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def give_up(self, state: dict[str, Any], step: int) -> bool:
        """Abort the snapshot in flight for one of a newer `state`; parts on the way still arrive and are then deleted.
        Returns False and does nothing if none is in flight to a URL, if that one may be visible by now, or if `state`
        has weights that are NaN: then the snapshot in flight is the last good one."""
        if isinstance(self._folder, LocalFolder) or not self.is_busy():
            return False
        with contextlib.suppress(SnapshotError):
            require_numbers(state, step, self._may_be_nan)
            return self._flight.give_up()
        return False

    def wait(self, timeout: float, *, prunes: bool = True) -> bool:
        """Wait up to `timeout` seconds for the snapshot in flight, if any; return False if it has not ended. Without
        `prunes` that snapshot deletes no old ones below a URL."""
        self._flight.is_awaited |= not prunes
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy()

    def collect(self) -> list[SnapshotResult | SnapshotError]:
        """Return the outcomes of background snapshots since the last call, without blocking. A SnapshotError is a
        snapshot that was not written, which is no reason to end a training.

        Raises:
            OwnershipLost, or any other error that ended a background snapshot; each error once.
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
        self,
        state: dict[str, Any],
        position: SnapshotPosition,
        start: float,
        stall_seconds: float | None,
        flight: Flight,
        fleet: Fleet | None = None,
    ) -> SnapshotResult:
        """`state` is already the writer's own copy."""
        name, step = name_of(position["step"], position["generation"], self._host), position["step"]
        place, shared = self._folder.snapshot(name), shared_by(fleet, state)

        def fill(file: IO[bytes]) -> None:
            require_numbers(state, step, self._may_be_nan)
            if shared is None:
                write_state(state, file)
            else:
                shared(file)

        try:
            written = self._folder.write(
                name, fill, self._manifest(position), key=self._key, flight=flight, shared=shared
            )
        except OSError as error:
            raise _unwritten(place, error) from error
        total_seconds = time.perf_counter() - start
        warnings = self._folder.prune(name, keep=self._keep, run_uid=self._run_uid, key=self._key, flight=flight)
        self._has_pruned |= not flight.is_awaited
        return SnapshotResult(
            path=place,
            step=step,
            bytes=written.bytes,
            stall_seconds=total_seconds if stall_seconds is None else stall_seconds,
            total_seconds=total_seconds,
            warnings=tuple(warnings),
        )

    def _manifest(self, position: SnapshotPosition) -> dict[str, Any]:
        """The manifest without its entry `files`."""
        import torch

        whose = {"run_uid": self._run_uid, "host": self._host, "time": self._now(), "task": self._task}
        versions = {"torch_version": str(torch.__version__), "elastic_train_version": VERSION}
        return {**_NO_BRANCHES, **position, **whose, **versions}


def _unwritten(path: SnapshotPlace, error: OSError) -> SnapshotError:
    advice = ""  # what helps, beside another folder
    if error.errno in DISK_FULL:
        advice = "free some space there or "
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "make the folder writable for this user or "
    return SnapshotError(
        f"snapshot {path} cannot be written: {cause_of(error)}; the snapshots that are there are untouched; "
        f"{advice}choose another --snapshot-dir"
    )
