"""Which worker saves the state when, and where: snapshots for the disk, handoffs for the processes that come next.

A **handoff** is a snapshot in the node's own shared memory. When a node joins a c10d job, torchrun restarts every
worker; each node hands the state to its next processes within a fraction of a second, without waiting for a disk.
Being a snapshot in form, it is written, checked and found by the same code.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from elastic_train.errors import OwnershipLost, SnapshotError
from elastic_train.goodput import Phase
from elastic_train.reporting import Reporter
from elastic_train.run_directory import RunDirectory
from elastic_train.snapshot import SnapshotInfo, SnapshotResult, SnapshotWriter, find_snapshots
from elastic_train.state import TrainState
from elastic_train.worker import Worker
from elastic_train.world import World

SHARED_MEMORY = Path("/dev/shm")


class Saver:
    """Saves the state of one worker, whatever worlds it goes through; rank 0 writes the regular snapshots."""

    def __init__(self, worker: Worker, job_token: str) -> None:
        self._worker = worker
        self._reporter: Reporter = worker.reporter
        self._job_token = job_token
        self._every = worker.config.snapshot_every
        self._is_overdue = False
        self._world: World | None = None
        self._snapshots: SnapshotWriter | None = None

    def enter(self, world: World) -> None:
        """A world stands: from now on its generation is the one that writes."""
        self._world = world

    def is_due(self, state: TrainState) -> bool:
        """Whether this worker must call `save` after the step that was just committed. Reports what was written."""
        if not self._every or self._world is None or self._world.rank != 0:
            return False
        if self._snapshots is not None:
            self.report()
        self._is_overdue = self._is_overdue or state.step % self._every == 0
        return self._is_overdue and not state.is_finished and not self._writer().is_busy()

    def save(self, state: TrainState) -> None:
        """In the background; returns when the state is copied."""
        with state.clock.during(Phase.SNAPSHOT):
            self._is_overdue = not self._writer().save_in_background(state.state_dict(), **self._position(state))

    def save_and_wait(self, state: TrainState) -> bool:
        """Durable when it returns True. A full disk costs a warning, not the job."""
        is_saved = False
        with state.clock.during(Phase.SNAPSHOT):
            try:
                self._tell(self._writer().save(state.state_dict(), **self._position(state)))
                is_saved = True
            except SnapshotError as error:
                self._reporter.warn(str(error))
        self.report()
        return is_saved

    def hand_off(self, state: TrainState) -> None:
        """Leave the state in this node's shared memory, on the disk instead where there is no room."""
        with state.clock.during(Phase.SNAPSHOT):
            try:
                directory = handoff_directory(self._worker.directory)
                for path in (directory.parent, directory):
                    path.mkdir(mode=0o700, exist_ok=True)
                    require_own(path)
                writer = SnapshotWriter(
                    directory,
                    keep=1,
                    host=self._worker.host,
                    run_uid=state.run_uid,
                    task=self._worker.must_agree_with_snapshot(),
                )
                writer.save(state.state_dict(), **self._position(state))
                return
            except (SnapshotError, OSError) as error:
                self._reporter.warn(f"no handoff in shared memory ({error}): saving to {self._worker.snapshots_dir}")
        self.save_and_wait(state)

    def report(self) -> None:
        """Tell what the background has written since the last call.

        Raises:
            OwnershipLost: another job, or a newer generation, owns the run directory.
        """
        if self._snapshots is None:
            return
        try:
            outcomes = self._snapshots.collect()
        except OwnershipLost:
            # Perhaps only the generation changed while it was written, to one that this worker is in itself.
            self._check_owner()
            self._is_overdue = True
            return
        for outcome in outcomes:
            if isinstance(outcome, SnapshotResult):
                self._tell(outcome)
            else:
                self._reporter.warn(f"{outcome}; training goes on")

    def wait(self) -> None:
        """For the snapshot in flight: the process is about to end."""
        if self._snapshots is not None:
            self._snapshots.wait(60.0)
            self.report()

    def _writer(self) -> SnapshotWriter:
        # One for the life of the process: it keeps its buffers, and one snapshot at a time is in flight.
        if self._snapshots is None:
            worker = self._worker
            self._snapshots = SnapshotWriter(
                worker.snapshots_dir,
                keep=worker.config.keep_snapshots,
                host=worker.host,
                run_uid=worker.state.run_uid,
                task=worker.must_agree_with_snapshot(),
                before_rename=self._check_owner,
            )
        return self._snapshots

    def _check_owner(self) -> None:
        assert self._world is not None
        self._worker.directory.check_owner(self._job_token, self._world.generation)

    def _tell(self, result: SnapshotResult) -> None:
        for warning in result.warnings:
            self._reporter.warn(warning)
        self._reporter.snapshot(
            step=result.step,
            path=result.path,
            num_bytes=result.bytes,
            stall_seconds=result.stall_seconds,
            total_seconds=result.total_seconds,
        )

    def _position(self, state: TrainState) -> dict[str, int]:
        assert self._world is not None
        return {
            "step": state.step,
            "epoch": state.epoch,
            "samples_done": state.samples_done,
            "generation": self._world.generation,
            "world_size": self._world.world_size,
        }


def handoff_directory(directory: RunDirectory) -> Path:
    """Where this user's workers of this node keep the handoff of a run directory.

    Named after the directory's identity, not its path: a deleted run must not come back to life in its successor.
    """
    return SHARED_MEMORY / f"elastic_train-{os.getuid()}" / directory.identity()


def find_handoffs(run_dir: RunDirectory, reporter: Reporter) -> list[SnapshotInfo]:
    """Handoffs for a run directory on this node, newest first; none from a directory that is not this user's own."""
    directory = handoff_directory(run_dir)
    for path in (directory.parent, directory):
        try:
            require_own(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            reporter.warn(f"no handoff is read: {error}")
            return []
    return find_snapshots(directory, warn=reporter.warn)


def require_own(path: Path) -> None:
    """Raises OSError where a directory in shared memory is not this user's alone, or is no directory."""
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not a directory of this user alone")


def is_handoff(path: Path) -> bool:
    """Whether a snapshot lies in shared memory."""
    return path.is_relative_to(SHARED_MEMORY / f"elastic_train-{os.getuid()}")


def remove_handoffs(run_dir: RunDirectory) -> None:
    """The state is on the disk now, or the run is over."""
    directory = handoff_directory(run_dir)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.parent.rmdir()
    except OSError:
        return  # handoffs of other runs
