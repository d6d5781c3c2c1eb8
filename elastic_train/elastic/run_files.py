"""What a worker writes into its run directory as it goes from world to world: whose it is, and where members are."""

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
"""in place of CLAIM_TIMEOUT: who has the state trains on with a warning, and all wait that long"""


class RunFiles:
    """One worker's part in its run directory.

    Args:
        job_token: the name of the job, by which the directory is claimed.
    """

    def __init__(self, worker: Worker, job_token: str) -> None:
        self._worker = worker
        self.job_token = job_token
        self._told: set[str] = set()
        """warnings, of an earlier run's snapshots too"""
        self._claiming: SideThread | None = None
        """what makes the run directory that of the present generation"""
        self._warning: str | None = None
        """what is to be said of the newest claim, each in a line"""
        self._remaking = threading.Lock()
        """whether the run directory is there is looked at by two threads: that which trains, and that which saves"""
        self._noted: RunRecord | None = None
        self._bucket = worker.bucket
        if self._bucket is not None:
            self._bucket.owner.warn = worker.reporter.warn

    def take_bucket(self, world: World, check: Callable[[], None]) -> str | None:
        """Make the snapshots below --snapshot-dir URL this job's, whose workers have no state yet; rank 0 does. Blocks
        as `BucketOwner.take`. Returns why it may not, None where it may. Raises: Stopped: told to stop meanwhile."""
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

    def enter_bucket(self, world: World) -> None:
        """The worker that writes says from now on that the job lives. This worker has the run's state."""
        if self._bucket is not None:
            state = self._worker.state
            self._bucket.owner.enter(
                self.job_token, world.generation, state.run_uid, state.superseded, is_writer=world.rank == 0
            )

    def hold_bucket(self, world: World, *, has_state: bool) -> None:
        """Say that the job lives while there is no world: who said so may be lost. Returns at once."""
        if self._bucket is not None and has_state and world.rank == 0:
            self._bucket.owner.hold()

    def raise_if_replaced(self) -> None:
        """Costs nothing. Raises: OwnershipLost: another job, or a newer generation, has taken the bucket."""
        if self._bucket is not None:
            self._bucket.owner.raise_if_lost()

    def leave_bucket(self, world: World) -> None:
        """All have ended, and what they have is saved: the next job need not wait."""
        if self._bucket is not None and world.rank == 0:
            self._bucket.owner.leave()

    def leave_bucket_alone(self, world: World) -> None:
        """The same where nobody knows who else ends: the last one to say so is right. Others that go on take it again
        with their next world, which they form as this worker leaves."""
        if self._bucket is not None and world.is_first_of_node:
            self._bucket.owner.leave()

    def leave_bucket_between_worlds(self, world: World) -> None:
        """The same where the next world of others may take its time: only where there are none."""
        if world.num_nodes == 1:
            self.leave_bucket_alone(world)

    def take_token(self, token: str) -> None:
        """The world's: it may not be that of the host at which this worker stood in the queue first."""
        if token != self.job_token:
            self._worker.directory.ownership.release()  # --fresh has claimed it
            self.job_token = token

    def check_owner(self, generation: int) -> None:
        """Warns where that cannot be told, or nothing be written. Waits for a claim that is under way.

        Raises: OwnershipLost: another job, or a newer generation, owns the run directory; or the bucket, as far as is
        known.
        """
        why = self._why_no_owner(generation)
        if why is not None:
            self._worker.reporter.warn(f"{why}; training goes on")

    def _why_no_owner(self, generation: int) -> str | None:
        self.wait_for_claim()
        why = self._why_not(self._worker.directory.ownership.check_owner, generation)
        if why is None and self._bucket is not None:
            self._bucket.owner.raise_if_lost()
        return why

    def _why_not(self, check: Callable[[str, int], None], generation: int) -> str | None:
        """What keeps from telling who the owner is. Raises: OwnershipLost."""
        try:
            self._in_directory(generation, lambda: check(self.job_token, generation))
        except OwnershipLost:
            raise
        except RunDirectoryError as error:
            return str(error)
        return None

    def check_before_visible(self, generation: int) -> None:
        """Called when a snapshot is about to become visible. Where it goes decides: a run directory that fails costs no
        more than a warning. Raises: as `check_owner`. SnapshotError: the folder cannot be written. ObjectStoreError:
        the bucket does not answer."""
        why = self._why_no_owner(generation)
        if self._bucket is not None:
            self._bucket.owner.check()
        elif why is not None:
            folder = self._why_not(self._worker.directory.ownership.check_snapshots, generation)
            if folder is not None:
                raise SnapshotError(folder)
            self.warn_once(why)

    def release(self) -> None:
        """This worker is no member of the job any more."""
        self.wait_for_claim()
        self._worker.directory.ownership.release()
        if self._bucket is not None:
            self._bucket.owner.release()

    def claim(self, world: World, *, has_state: bool) -> None:
        """Begin to make the run directory this generation's, on a thread: disks take their time to flush a record.
        Blocks only for the claim of the world before.

        Raises: as `finish_claim`, of that one.
        """
        self.finish_claim()
        self.hold_bucket(world, has_state=has_state)
        self._claiming = SideThread(partial(self._claim, world, has_state=has_state), "claim", is_daemon=False)

    def finish_claim(self) -> None:
        """Block until the directory is this generation's, before anything is written that another job must not see; a
        full disk does not end a run that is under way.

        Raises:
            RunDirectoryInUse, OwnershipLost: others own it.
            RunDirectoryError: it cannot be written, and this worker has no state that would be lost.
        """
        claiming = self._claiming
        if claiming is None:
            return
        try:
            claiming.finish(lambda: None)
        finally:
            self._claiming = None  # not before: the thread that saves waits for it as well
        if self._warning is not None:
            self.warn_once(self._warning)

    def warn_once(self, warnings: str) -> None:
        """Of each line, where it was not yet warned of."""
        for warning in warnings.splitlines():
            if warning not in self._told:
                self._told.add(warning)
                self._worker.reporter.warn(warning)

    def wait_for_claim(self) -> None:
        """Block until a claim that is under way has ended. Its error is for the thread that trains."""
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
            with suppress(OSError):  # it only spares newcomers a look at the endpoints
                worker.directory.replace_file(MEMBERS_FILE, describe_members(world, worker.launch.run_id))

    def _in_directory(self, generation: int, call: Callable[[], str | None]) -> str | None:
        """What `call` gives, where the directory is there; else it is made anew. One thread at a time."""
        with self._remaking:
            try:
                return call()
            except RunDirectoryGone:
                self._make_directory(generation)
                return None

    def _make_directory(self, generation: int) -> None:
        """Once more, for nothing that is computed may be lost with it."""
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
        """Write down which run the directory belongs to. This worker has the run's state."""
        state, directory = self._worker.state, self._worker.directory
        self.enter_bucket(world)
        record = RunRecord(state.run_uid, state.superseded)
        if not world.is_directory_leader or record == self._noted:
            return
        try:
            directory.replace_file(RUN_FILE, record.to_json())
        except OSError as error:
            self._worker.reporter.warn(f"{directory.path / RUN_FILE} cannot be written: {first_line(error)}")
        self._noted = record

    def set_branch_aside(self) -> None:
        """Move the snapshots of a branch that has stopped to where only a person looks: this worker has the state of
        the side that goes on."""
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
