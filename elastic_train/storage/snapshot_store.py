"""Snapshots for any program: a folder of states, each whole or absent, usable without the rest of this package."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.errors import SnapshotError
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots, first_whole
from elastic_train.storage.snapshot_writer import SnapshotPosition, SnapshotWriter
from elastic_train.world import host_name

if TYPE_CHECKING:
    import torch


class SnapshotStore:
    """A folder of snapshots that one process writes to, and any process reads.

    Each is written under a temporary name, flushed, checksummed and renamed. So a kill or a full disk at any moment
    leaves the whole snapshot or none. Loading never runs code from a snapshot. The first `save` creates the folder.

    The newest snapshot is that of the highest step, whichever process wrote it, and when. So a training that starts
    again from a lower step needs another folder.

    Args:
        directory: the folder; `elastic-train snapshot list|verify|export` understand it.
        keep: how many of the newest snapshots of this host stay.

    Raises:
        ValueError: keep is less than 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.directory = Path(directory)
        self._writer = SnapshotWriter(self.directory, keep=keep, host=host_name(), run_uid="", task={})

    def save(self, state: dict[str, Any], *, step: int) -> Path:
        """Write a state dict of tensors and plain values; blocks until it is durable. Each step is written once: an
        existing whole snapshot of `step` stays, even if `state` differs.

        Raises:
            SnapshotError: the state cannot be written, or holds anything else; older snapshots are untouched.
        """
        return self.directory / self._writer.save(state, **_position(step)).path.name

    def save_in_background(self, state: dict[str, Any], *, step: int) -> bool:
        """As `save`, but on a thread: blocks only for a copy in memory. Returns False and does nothing if the previous
        snapshot is still being written.

        Raises:
            SnapshotError: the state holds something that cannot be saved.
        """
        return self._writer.save_in_background(state, **_position(step))

    def wait(self, timeout_seconds: float = 300.0) -> None:
        """Wait until the background snapshot is durable; call it before the process ends.

        Raises:
            SnapshotError: a snapshot since the last call could not be written, or is not finished in time.
        """
        if not self._writer.wait(timeout_seconds):
            raise SnapshotError(f"a snapshot is still being written to {self.directory} after {timeout_seconds:g} s")
        for outcome in self._writer.collect():
            if isinstance(outcome, Exception):
                raise outcome

    def load_newest(self, map_location: str | torch.device = "cpu") -> tuple[SnapshotInfo, dict[str, Any]] | None:
        """Load the newest whole snapshot, tensors on `map_location`; None if there is none. Issues a Python warning for
        each damaged one and tries the next older one.

        Raises:
            SnapshotError: the folder cannot be listed, or a whole snapshot was not written by this package.
        """

        def warn(message: str) -> None:
            warnings.warn(message, stacklevel=4)

        return first_whole(find_snapshots(self.directory, warn=warn), warn, map_location)


def _position(step: int) -> SnapshotPosition:
    return {"step": step, "epoch": 0, "samples_done": 0, "generation": 0, "world_size": 1}
