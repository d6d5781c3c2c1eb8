"""Ownership of the snapshots below a URL: the record `owner.json` there.

The record names the job and the generation. Only conditional puts replace it: right before each manifest, and every
10 s by the worker that writes snapshots. Another job takes over if the last owner wrote that it left, or if the record
has not changed for three renewal periods by the new job's clock. Clocks of two machines are never compared. An owner
that was replaced while stopped or cut off notices at its next put, before any of its writes becomes visible.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from elastic_train.errors import NewerGeneration, ObjectStoreError, OwnershipLost, SnapshotsInUse, StoreFault
from elastic_train.runlog.reader import parse
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.ownership import OWNER_RECORD, stops
from elastic_train.storage.store_arms import Stored
from elastic_train.world import to_json, value_or_none

RENEWAL_SECONDS = 10.0
RENEWALS_MISSED = 3
POLL_SECONDS = 2.0
FORMAT_VERSION = 1
MOST_RECORD_BYTES = 2**20
"""A larger object is no record."""
LEAVE_SECONDS = 5.0
"""The longest wait, at the end of a job, for a renewal that hangs."""


@dataclass(frozen=True)
class BucketRecord:
    """The content of `owner.json`."""

    job_token: str
    generation: int
    run_uid: str
    superseded: tuple[str, ...]
    """The runs that this run replaces: an empty run directory does not know them."""
    host: str
    pid: int
    time: float
    renewals: int = 0
    has_left: bool = False
    newest: tuple[int, int] | None = None
    """Generation and step of the run's newest snapshot: a run that had snapshots must not begin anew."""
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"host {self.host}, pid {self.pid}, generation {self.generation}, last at {since}"

    def to_json(self) -> bytes:
        return to_json(self).encode() + b"\n"

    @staticmethod
    def of(stored: Stored | None) -> BucketRecord | None:
        """Parse a record; None if missing or invalid. Raises: ObjectStoreError: a newer elastic_train wrote it."""
        fields: dict[str, Any] = {} if stored is None else parse(stored.data) or {}
        version = fields.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ObjectStoreError(
                f"{OWNER_RECORD} has format_version {str(version)[:20]!r}, and this elastic_train reads "
                f"{FORMAT_VERSION}: take the one that wrote it, or choose another --snapshot-dir",
                StoreFault.OTHER,
            )
        record = value_or_none(BucketRecord, {"newest": None, "format_version": version, **fields})
        with contextlib.suppress(ValueError, OverflowError, OSError):
            str(record)  # raises if the time is invalid
            return record
        return None


class BucketOwner:
    """This process's share in the ownership of the snapshots below a URL. Thread-safe.

    Args:
        clock: monotonic, in seconds; `sleep` waits by this clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        host: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._host = store, host
        self._clock, self._sleep, self._now = clock, sleep, now
        self._lock = threading.Lock()
        """Guards `_version` during requests to the store."""
        self._mine: BucketRecord | None = None
        """The record that this process writes next, except its time, number and newest snapshot."""
        self._newest: dict[str, tuple[int, int]] = {}
        """The newest snapshot (generation, step) of each run that this process knows."""
        self._renewals = 0
        self._version: str | None = None
        self._lost: tuple[BucketRecord, OwnershipLost] | None = None
        """The error, with the `_mine` of that time: another world may be entered at the moment when this is set."""
        self._stop: threading.Event | None = None
        self.warn: Callable[[str], None] = lambda _outage: None

    def read(self) -> BucketRecord | None:
        """Read the owner's record from the store. Raises: ObjectStoreError."""
        return BucketRecord.of(self._store.get(OWNER_RECORD, MOST_RECORD_BYTES))

    def take(
        self,
        job_token: str,
        generation: int,
        check: Callable[[], None],
        say: Callable[[str], None] = lambda _wait: None,
    ) -> None:
        """Make this job the owner; called once by one worker, when the job starts. Blocks for three renewal periods
        if the last owner has not written that it left.

        Args:
            check: called every other second of the wait; an error of it ends the wait.
            say: called once at the beginning of a wait, with a line that names the owner.

        Raises:
            SnapshotsInUse: another job owns the snapshots and lives.
            NewerGeneration: this job owns them in a newer generation. ObjectStoreError: the store does not answer.
        """
        first: Stored | None = None
        since, has_said = 0.0, False
        while True:
            stored = self._store.get(OWNER_RECORD, MOST_RECORD_BYTES)
            if first is None:
                first, since = stored, self._clock()
            record = BucketRecord.of(stored)
            if record is not None and record.job_token == job_token and record.generation > generation:
                raise self._newer(record, generation)
            is_free = record is None or record.has_left or record.job_token == job_token
            if record is not None and not is_free:
                if first is not None and stored is not None and stored.version != first.version:
                    raise self._in_use(record)
                is_free = self._clock() - since >= RENEWAL_SECONDS * RENEWALS_MISSED
            if record is not None and record.job_token != job_token and record.generation >= generation and is_free:
                raise self._in_use(record)  # its generation has grown since this job chose its own
            if is_free and self._put_first(stored, job_token, generation):
                return
            if not is_free:
                check()
                if not has_said:
                    say(
                        f"the snapshots in {self._store} belong to another job ({record}), which has not said that it "
                        f"left: waiting {RENEWAL_SECONDS * RENEWALS_MISSED:.0f} s for a sign of it"
                    )
                    has_said = True
                self._sleep(POLL_SECONDS)

    def _in_use(self, record: BucketRecord) -> SnapshotsInUse:
        return SnapshotsInUse(
            f"the snapshots in {self._store} are in use by another job ({record}); stop that job, or choose another "
            "--snapshot-dir; to join it, give its --rdzv-endpoint"
        )

    def _put_first(self, stored: Stored | None, job_token: str, generation: int) -> bool:
        """Put the first record of this job and return whether that succeeded. It keeps the last run's uid, because the
        uid of this run is not known yet."""
        before = BucketRecord.of(stored)
        uid, superseded = ("", ()) if before is None else (before.run_uid, before.superseded)
        with self._lock:
            self._mine = BucketRecord(job_token, generation, uid, superseded, self._host, os.getpid(), self._now())
            if before is not None:
                self._learn(before)
            record = replace(self._mine, newest=self._newest.get(uid))
            self._version = self._store.put_if(
                OWNER_RECORD, record.to_json(), None if stored is None else stored.version
            )
            return self._version is not None

    def enter(
        self, job_token: str, generation: int, run_uid: str, superseded: tuple[str, ...], *, is_writer: bool
    ) -> None:
        """Call when a world has formed: from now on only its generation writes. Returns at once. From now on the worker
        with `is_writer` renews the record."""
        # Without the lock: re-forming must not wait for a store that hangs.
        self._mine = BucketRecord(job_token, generation, run_uid, superseded, self._host, os.getpid(), self._now())
        self.release()
        if is_writer:
            self.renew_in_background()

    def note_snapshot(self, run_uid: str, generation: int, step: int) -> Callable[[], None]:
        """Note a visible snapshot for the next renewal. Returns a function to call if the snapshot is taken back."""
        before = self._newest.get(run_uid)
        noted = self._newest[run_uid] = max((generation, step), before or (generation, step))

        def forget() -> None:
            if self._newest.get(run_uid) == noted != before:  # else another snapshot is the newest by now
                self._newest.pop(run_uid)
                if before is not None:
                    self._newest[run_uid] = before

        return forget

    def _learn(self, record: BucketRecord) -> None:
        if record.newest is not None:
            self.note_snapshot(record.run_uid, *record.newest)

    def hold(self) -> None:
        """Renew the record for the world that was entered last: its writer may be lost, and the next world may take
        long to form. Its generation counts only then."""
        if self._mine is not None and self._stop is None:
            self.renew_in_background()

    def renew_in_background(self) -> None:
        """Renew the record on a thread from now on. The first call follows `take`, before a large state is read. Passes
        a failure to `warn`, once per outage."""
        self.release()
        self._stop = threading.Event()
        threading.Thread(target=self._renew, args=(self._stop,), name="bucket-owner", daemon=True).start()

    def release(self) -> None:
        """Stop renewing: this process is no member of the job any more, while others may be."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _renew(self, stop: threading.Event) -> None:
        is_told = False
        while not stop.is_set():
            try:
                self._put(stop)
                is_told = False
            except OwnershipLost:  # the training thread finds it in `_lost`
                return
            except ObjectStoreError as error:  # the next put that succeeds notices a takeover
                if not is_told and not stop.is_set():
                    self.warn(f"{error}; another job may take the snapshots over until that works again")
                is_told = True
            stop.wait(RENEWAL_SECONDS)

    def raise_if_lost(self) -> None:
        """Check without a request. Raises: OwnershipLost: a put has noticed it since the last world was entered."""
        lost = self._lost
        if lost is not None and lost[0] is self._mine:
            raise lost[1]

    def check(self) -> None:
        """Renew the record now; called right before a snapshot becomes visible.

        Raises:
            OwnershipLost: another job owns the snapshots. NewerGeneration: this job does, in a newer generation.
            ObjectStoreError: the store does not answer.
        """
        self._put(None)

    def leave(self) -> None:
        """Record that the job has left, so that the next job need not wait. Tries only once."""
        self.release()
        if self._mine is None:
            return
        self._mine = replace(self._mine, has_left=True)
        with contextlib.suppress(ObjectStoreError, OwnershipLost):
            self._put(None, self._store.impatient(), LEAVE_SECONDS)

    def _put(
        self, stop: threading.Event | None, store: ObjectStore | None = None, timeout_seconds: float = -1.0
    ) -> None:
        store = store or self._store
        if not self._lock.acquire(timeout=timeout_seconds):
            return
        mine = self._mine  # read under the lock: a world entered meanwhile may have put its own generation
        assert mine is not None, "a world has been entered"
        try:
            while stop is None or not stop.is_set():
                if self._version is None:
                    self._version = self._judge(store.get(OWNER_RECORD, MOST_RECORD_BYTES), mine)
                self._renewals += 1
                newest = self._newest.get(mine.run_uid)
                record = replace(mine, renewals=self._renewals, time=self._now(), newest=newest)
                self._version = store.put_if(OWNER_RECORD, record.to_json(), self._version)
                if self._version is not None:
                    return
        except OwnershipLost as error:
            self._lost = mine, error
            raise
        finally:
            self._lock.release()

    def _judge(self, stored: Stored | None, mine: BucketRecord) -> str:
        """Check that this process may replace a record, and return its version. Raises: OwnershipLost."""
        record = BucketRecord.of(stored)
        if stored is None or record is None:
            raise OwnershipLost(f"{self._store} has no valid {OWNER_RECORD} any more; {stops(mine.generation)}")
        if record.job_token != mine.job_token:
            raise OwnershipLost(
                f"the snapshots in {self._store} now belong to another job ({record}); {stops(mine.generation)}"
            )
        if record.generation > mine.generation:
            raise self._newer(record, mine.generation)
        self._learn(record)
        return stored.version

    def _newer(self, record: BucketRecord, generation: int) -> NewerGeneration:
        return NewerGeneration(
            f"the snapshots in {self._store} now belong to generation {record.generation} ({record}); "
            f"{stops(generation)}"
        )
