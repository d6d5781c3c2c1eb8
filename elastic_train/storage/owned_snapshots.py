"""Who may write into a run directory whose snapshots lie in another folder (--snapshot-dir)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from elastic_train.errors import NewerGeneration, RunDirectoryGone
from elastic_train.storage.atomic_files import require_writable
from elastic_train.storage.ownership import CLAIM_TIMEOUT, Ownership


class OwnershipWithSnapshots(Ownership):
    """Which job has a run directory, and the folder of snapshots elsewhere: another job, which has another run
    directory, would restore this one's and prune them.

    Args:
        snapshots: the folder.
        place: where its owner is written down: in it, or in the run directory whose own snapshots it holds.
    """

    def __init__(self, path: Path, snapshots: Path, place: Path, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(path, now=now)
        self._folder, self._host = snapshots, ""
        self._snapshots = Ownership(place, f"snapshot directory {snapshots}", "--snapshot-dir", now=now)

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
        try:
            left = max(timedelta(seconds=1), timeout - timedelta(seconds=time.monotonic() - began))
            told = self._snapshots.claim(job_token, generation, host, is_leader=is_leader, timeout=left)
        except RunDirectoryGone:
            self._claim_folder_anew(job_token, generation)
            return warning
        return "; ".join(filter(None, (warning, told))) or None

    def claim_anew(self, job_token: str, generation: int, host: str) -> None:
        super().claim_anew(job_token, generation, host)
        self._claim_folder_anew(job_token, generation)  # it may have lain in the run directory

    def check_owner(self, job_token: str, generation: int) -> None:
        super().check_owner(job_token, generation)
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
        require_writable(self._folder, "--snapshot-dir")
        self._snapshots.claim_anew(job_token, generation, self._host)
