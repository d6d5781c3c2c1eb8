"""Who may write the snapshots below a URL: `owner.json` there.

It names the job and the generation, and is replaced by conditional puts alone: with each snapshot right before its
manifest, and every 10 s in between by the worker that writes. Another job takes over where the last owner wrote that it
left, or once the record has not changed for three renewals on that job's own clock; no two machines' clocks are ever
compared. An owner that was replaced while it was stopped or cut off finds out at its next put, before anything of it
becomes visible.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from elastic_train.errors import NewerGeneration, ObjectStoreError, OwnershipLost, SnapshotsInUse, StoreFault
from elastic_train.runlog.reader import parse
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.ownership import OWNER_RECORD, stops
from elastic_train.storage.store_arms import Stored
from elastic_train.world import value_of

RENEWAL_SECONDS = 10.0
RENEWALS_MISSED = 3
POLL_SECONDS = 2.0
FORMAT_VERSION = 1
MOST_RECORD_BYTES = 2**20
"""whatever is larger is no record"""
LEAVE_SECONDS = 5.0
"""that the end of a job waits for a renewal which hangs"""


@dataclass(frozen=True)
class BucketRecord:
    """What `owner.json` says."""

    job_token: str
    generation: int
    run_uid: str
    superseded: tuple[str, ...]
    """runs that this one is in the place of: an empty run directory does not know them"""
    host: str
    pid: int
    time: float
    renewals: int = 0
    has_left: bool = False
    newest: tuple[int, int] | None = None
    """generation and step of the run's newest snapshot: one that had some does not begin anew"""
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"host {self.host}, pid {self.pid}, generation {self.generation}, last at {since}"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def of(stored: Stored | None) -> BucketRecord | None:
        """None where there is none that can be read. Raises: ObjectStoreError: a newer elastic_train wrote it."""
        fields: dict[str, Any] = {} if stored is None else parse(stored.data) or {}
        version = fields.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ObjectStoreError(
                f"{OWNER_RECORD} has format_version {str(version)[:20]!r}, and this elastic_train reads "
                f"{FORMAT_VERSION}: take the one that wrote it, or choose another --snapshot-dir",
                StoreFault.OTHER,
            )
        try:
            record: BucketRecord = value_of(BucketRecord, {"newest": None, "format_version": version, **fields})
            str(record)  # a time that is none shows here
            return record
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            return None


class BucketOwner:
    """This process's part in who owns the snapshots below a URL. Any thread may call it.

    Args:
        clock: monotonic, in seconds; `sleep` waits by it.
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
        """of the version, while the store is asked"""
        self._mine: BucketRecord | None = None
        """what this process writes next, but for time and number"""
        self._newest: dict[str, tuple[int, int]] = {}
        """of each run that this process has heard of"""
        self._renewals = 0
        self._version: str | None = None
        self._lost: tuple[BucketRecord, OwnershipLost] | None = None
        """with what was `_mine` then: a world may be entered at any moment, also in that in which this is set"""
        self._stop: threading.Event | None = None
        self.warn: Callable[[str], None] = lambda _outage: None

    def read(self) -> BucketRecord | None:
        """The owner, as the store says. Raises: ObjectStoreError."""
        return BucketRecord.of(self._store.get(OWNER_RECORD, MOST_RECORD_BYTES))

    def take(
        self,
        job_token: str,
        generation: int,
        check: Callable[[], None],
        say: Callable[[str], None] = lambda _wait: None,
    ) -> None:
        """Make the snapshots this job's; called once by one worker of a job, when it starts. Blocks for three renewals
        where the last owner has not written that it left.

        Args:
            check: is called every other second meanwhile; what it raises ends the wait.
            say: is told once that there is a wait, and for whom.

        Raises:
            SnapshotsInUse: another job has them, and lives. NewerGeneration: the others of this job have gone on.
            ObjectStoreError: the store cannot be asked.
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
                raise self._in_use(record)  # it came further between this start's look and now
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
        """Whether the record is ours now; what a run is called is not known yet, so that its last name stays."""
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
        """A world stands: from now on its generation is the one that writes. Returns at once; the worker that writes
        renews the record from now on."""
        # Without the lock: who re-forms does not wait for a store that hangs.
        self._mine = BucketRecord(job_token, generation, run_uid, superseded, self._host, os.getpid(), self._now())
        self.release()
        if is_writer:
            self.renew_in_background()

    def note_snapshot(self, run_uid: str, generation: int, step: int) -> Callable[[], None]:
        """One has become visible: the next renewal says so. Returns what to call where it is taken back."""
        before = self._newest.get(run_uid)
        noted = self._newest[run_uid] = max((generation, step), before or (generation, step))

        def forget() -> None:
            if self._newest.get(run_uid) == noted != before:  # else another one is the newest by now
                self._newest.pop(run_uid)
                if before is not None:
                    self._newest[run_uid] = before

        return forget

    def _learn(self, record: BucketRecord) -> None:
        if record.newest is not None:
            self.note_snapshot(record.run_uid, *record.newest)

    def hold(self) -> None:
        """Renew what the world that was entered last has: its own writer may be gone, and the next world stands later,
        whose generation does not count before."""
        if self._mine is not None and self._stop is None:
            self.renew_in_background()

    def renew_in_background(self) -> None:
        """Say from now on that the job lives: once `take` has made the snapshots its own, a large state is read. What
        keeps it from saying so goes to `warn`, once until it can again."""
        self.release()
        self._stop = threading.Event()
        threading.Thread(target=self._renew, args=(self._stop,), name="bucket-owner", daemon=True).start()

    def release(self) -> None:
        """Renew it no more: this process is no member of the job any more, and others may be."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _renew(self, stop: threading.Event) -> None:
        is_told = False
        while not stop.is_set():
            try:
                self._put(stop)
                is_told = False
            except OwnershipLost:  # the thread that trains finds it in `_lost`
                return
            except ObjectStoreError as error:  # a job that takes over is found out by the next put that goes through
                if not is_told and not stop.is_set():
                    self.warn(f"{error}; another job may take the snapshots over until that works again")
                is_told = True
            stop.wait(RENEWAL_SECONDS)

    def raise_if_lost(self) -> None:
        """Costs nothing. Raises: OwnershipLost: found out since the last world."""
        lost = self._lost
        if lost is not None and lost[0] is self._mine:
            raise lost[1]

    def check(self) -> None:
        """Renew the record now; called right before something becomes visible.

        Raises:
            OwnershipLost: another job has the snapshots. NewerGeneration: this one has, in a newer generation.
            ObjectStoreError: it cannot be found out.
        """
        self._put(None)

    def leave(self) -> None:
        """Say that the job has left, so that the next one need not wait. One try: that one waits otherwise."""
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
        mine = self._mine  # not before: a world that was entered meanwhile has put its own generation
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
        """The version that may be replaced."""
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
