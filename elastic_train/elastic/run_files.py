"""What a worker writes into its run directory on the way from world to world: its owner, and the members' stores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

from elastic_train.branches import is_on
from elastic_train.elastic.connect import MEMBERS_FILE, describe_members
from elastic_train.elastic.worker import Worker
from elastic_train.errors import (
    ObjectStoreError,
    OwnershipLost,
    RunDirectoryError,
    RunDirectoryGone,
    RunDirectoryInUse,
    SnapshotError,
    SnapshotsInUse,
    first_line,
)
from elastic_train.storage.ownership import CLAIM_TIMEOUT
from elastic_train.storage.run_record import RUN_FILE, RunRecord
from elastic_train.storage.snapshot import SnapshotInfo, set_aside
from elastic_train.training.side_thread import SideThread
from elastic_train.world import World

DISCARDED = "discarded"
"""folder beside the snapshots"""
CLAIM_SECONDS_OF_MEMBERS = 5.0
"""instead of CLAIM_TIMEOUT: a member with a state trains on with a warning, and all wait that long"""


class RunFiles:
    """One worker's part in its run directory.

    Args:
        job_token: the name of the job, by which the directory is claimed.
    """

    def __init__(self, worker: Worker, job_token: str) -> None:
        self._worker = worker
        self.job_token = job_token
        self._warned: set[str] = set()
        """the warnings so far, also those about an earlier run's snapshots"""
        self._claiming: SideThread | None = None
        """the thread that claims the run directory for the present generation"""
        self._warning: str | None = None
        """the warnings of the newest claim, one a line"""
        self._remaking = threading.Lock()
        """held while one of two threads, the training or the saving one, looks if the run directory is there"""
        self._noted: RunRecord | None = None
        self.replaced: frozenset[str] = frozenset()
        """uids of runs of which this node has snapshots, and which it gave up by --fresh as it joined the job"""
        self._bucket = worker.bucket
        if self._bucket is not None:
            self._bucket.owner.warn = worker.reporter.warn

    def take_bucket(self, world: World, check: Callable[[], None]) -> str | None:
        """Take the snapshots below --snapshot-dir URL for this job, as rank 0, while its workers have no state. Blocks
        as `BucketOwner.take`. Returns why it cannot, or None. Raises: Stopped: told to stop meanwhile."""
        if self._bucket is None or world.rank != 0:
            return None

        def check_both() -> None:
            self._worker.stop.check()
            check()

        try:
            self._bucket.owner.take(self.job_token, world.generation, check_both, self._worker.reporter.log)
            self._bucket.owner.renew_in_background()
        except (SnapshotsInUse, ObjectStoreError) as error:
            return str(error)
        return None

    def hold_bucket(self, world: World, *, has_state: bool) -> None:
        """Report that the job lives while there is no world: the worker that did may be lost. Returns at once."""
        if self._bucket is not None and has_state and world.rank == 0:
            self._bucket.owner.hold()

    def raise_if_replaced(self) -> None:
        """Raise OwnershipLost where another job, or a newer generation, has taken the bucket. Costs nothing."""
        if self._bucket is not None:
            self._bucket.owner.raise_if_lost()

    def leave_bucket(self, world: World) -> None:
        """Report in the bucket that the job has ended, after all have saved: the next job need not wait."""
        if self._bucket is not None and world.rank == 0:
            self._bucket.owner.leave()

    def leave_bucket_alone(self, world: World) -> None:
        """Do the same where it is unknown which other nodes end: the last report is right. Members that go on take the
        bucket again with their next world, which they form as this worker leaves."""
        if self._bucket is not None and world.is_first_of_node:
            self._bucket.owner.leave()

    def take_token(self, token: str) -> None:
        """Take the world's token: that of the first host of this worker's join queue may be another one."""
        if token != self.job_token:
            self._worker.directory.ownership.release()  # --fresh has claimed it
            self._worker.directory.identity(token)  # who comes later and shares it finds the same name
            self.job_token = token

    def check_owner(self, generation: int) -> None:
        """Check the owner before a write; warns where that fails. Waits for a claim that is under way.

        Raises: OwnershipLost: another job, or a newer generation, owns the run directory, or the bucket as far as this
        worker knows.
        """
        why = self._why_no_owner(generation)
        if why is not None:
            self._worker.reporter.warn(f"{why}; training goes on")

    def _why_no_owner(self, generation: int) -> str | None:
        self.wait_for_claim()
        why = self._why_not(self._worker.directory.ownership.check_owner, generation)
        if why is None:
            self.raise_if_replaced()
        return why

    def _why_not(self, check: Callable[[str, int], None], generation: int) -> str | None:
        """Return why the owner cannot be read; None if it can. Raises: OwnershipLost."""
        try:
            self._in_directory(generation, lambda: check(self.job_token, generation))
        except OwnershipLost:
            raise
        except RunDirectoryError as error:
            return str(error)
        return None

    def check_before_visible(self, generation: int) -> None:
        """Check the owner of the snapshot's place before the snapshot becomes visible. An unusable run directory only
        causes a warning. Raises: as `check_owner`. SnapshotError: the folder cannot be written. ObjectStoreError: the
        bucket does not answer."""
        why = self._why_no_owner(generation)
        if self._bucket is not None:
            self._bucket.owner.check()
        elif why is not None:
            folder = self._why_not(self._worker.directory.ownership.check_snapshots, generation)
            if folder is not None:
                raise SnapshotError(folder)
            self.warn_once(why)

    def release(self) -> None:
        """Release run directory and bucket: this worker is no member of the job any more."""
        self.wait_for_claim()
        self._worker.directory.ownership.release()
        if self._bucket is not None:
            self._bucket.owner.release()

    def claim(self, world: World, *, has_state: bool) -> None:
        """Begin to claim the run directory for this generation, on a thread, as disks may flush a record slowly. Blocks
        only for the claim of the previous world.

        Raises: as `finish_claim`, for that claim.
        """
        self.finish_claim()
        self.hold_bucket(world, has_state=has_state)
        self._claiming = SideThread(partial(self._claim, world, has_state=has_state), "claim", is_daemon=False)

    def finish_claim(self) -> None:
        """Block until the run directory is claimed, before a write that another job must not see. A full disk does not
        end a run that is under way.

        Raises:
            RunDirectoryInUse, OwnershipLost: another job, or a newer generation, owns it.
            RunDirectoryError: it cannot be written, and this worker has no state that would be lost.
        """
        claiming = self._claiming
        if claiming is None:
            return
        try:
            claiming.finish(lambda: None)
        finally:
            self._claiming = None  # only now: the saving thread waits for it as well
        if self._warning is not None:
            self.warn_once(self._warning)

    def warn_once(self, warnings: str) -> None:
        """Warn with each line that was not a warning before."""
        for warning in warnings.splitlines():
            if warning not in self._warned:
                self._warned.add(warning)
                self._worker.reporter.warn(warning)

    def wait_for_claim(self) -> None:
        """Block until a claim that is under way has ended. Its error is left to the training thread."""
        claiming = self._claiming
        if claiming is not None:
            claiming.wait()

    def _claim(self, world: World, *, has_state: bool) -> None:
        worker, is_leader = self._worker, world.is_directory_leader
        timeout = timedelta(seconds=CLAIM_SECONDS_OF_MEMBERS) if has_state else CLAIM_TIMEOUT
        try:
            claim = partial(worker.directory.ownership.claim, is_leader=is_leader, timeout=timeout)
            self._warning = self._in_directory(
                world.generation, lambda: claim(self.job_token, world.generation, worker.host)
            )
        except (RunDirectoryInUse, OwnershipLost):
            raise
        except RunDirectoryError as error:
            if not has_state:
                raise
            self._warning = str(error)
        if is_leader:
            with suppress(OSError):  # it only saves newcomers a look at the endpoints
                worker.directory.replace_file(MEMBERS_FILE, describe_members(world, worker.launch.run_id))

    def _in_directory(self, generation: int, call: Callable[[], str | None]) -> str | None:
        """Return the result of `call`; where the directory is gone, make it anew instead. One thread at a time."""
        with self._remaking:
            try:
                return call()
            except RunDirectoryGone:
                self._make_directory(generation)
                return None

    def _make_directory(self, generation: int) -> None:
        """Make the run directory again, so that its loss costs no computed step."""
        worker, state = self._worker, self._worker.state
        worker.directory.make_anew(self.job_token, generation, worker.host)
        if state.run_uid:
            with suppress(OSError):
                worker.directory.replace_file(RUN_FILE, RunRecord(state.run_uid, state.superseded).to_json())
        worker.reporter.begin_files_again()
        worker.reporter.warn(
            f"run directory {worker.directory.path} was removed or moved while this job trains: it is made anew; what "
            "it had, earlier events and snapshots, is not in it"
        )

    def note_run(self, world: World) -> None:
        """Write which run the directory belongs to; the worker that writes reports in the bucket, from now on, that the
        job lives. This worker has the run's state."""
        state, directory = self._worker.state, self._worker.directory
        if self._bucket is not None:
            self._bucket.owner.enter(
                self.job_token, world.generation, state.run_uid, state.superseded, is_writer=world.rank == 0
            )
        record = RunRecord(state.run_uid, tuple(sorted({*state.superseded, *self.replaced})))
        if not world.is_directory_leader or record == self._noted:
            return
        try:
            directory.replace_file(RUN_FILE, record.to_json())
        except OSError as error:
            self._worker.reporter.warn(f"{directory.path / RUN_FILE} cannot be written: {first_line(error)}")
        self._noted = record

    def set_branch_aside(self) -> None:
        """Move the snapshots of a branch that has stopped out of sight of later starts, now that this worker has the
        state of the side that goes on."""
        worker, state, folder = self._worker, self._worker.state, self._worker.snapshots_dir
        if worker.config.on_split == "wait" or worker.launch.local_rank != 0 or not isinstance(folder, Path):
            return

        def is_discarded(offer: SnapshotInfo) -> bool:
            is_mine = offer.run_uid == state.run_uid and offer.host == worker.host
            return is_mine and not is_on(offer.branches, offer.step, state.branches)

        try:
            moved = set_aside(folder, DISCARDED, is_discarded)
        except SnapshotError as error:
            worker.reporter.warn(str(error))
            return
        if moved:
            worker.reporter.warn(f"moved to {DISCARDED}/ in {folder}: {', '.join(moved)}")
