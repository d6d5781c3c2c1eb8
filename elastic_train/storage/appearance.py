"""The moment at which a snapshot below a URL becomes visible. It can be given up until then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from elastic_train.errors import ObjectStoreError, OwnershipLost, SnapshotError, StoreFault
from elastic_train.storage.object_store import ObjectStore

MOST_MANIFEST_BYTES = 2**25
"""Enough for some 100,000 parts. A larger object is no manifest."""


class Flight:
    """The state of one snapshot in flight. Another thread can give it up, to free the network for a newer snapshot.

    Args:
        check: raises OwnershipLost if another job, or a newer generation, owns the place.
        is_awaited: whether a thread waits for its end: old snapshots are not deleted then.
    """

    def __init__(self, check: Callable[[], None] | None = None, *, is_awaited: bool = False) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._is_given_up = self._may_be_there = False
        self.is_awaited = is_awaited

    def is_given_up(self) -> bool:
        return self._is_given_up

    def give_up(self) -> bool:
        """Give the snapshot up. Returns False and does nothing if it may be visible by now."""
        with self._lock:
            self._is_given_up = not self._may_be_there
            return self._is_given_up

    def check(self) -> None:
        """Call right before the snapshot becomes visible. Raises: SnapshotError: it was given up; errors of `check`."""
        with self._lock:
            if self._is_given_up:
                raise SnapshotError("it was given up before it was complete")
            self._may_be_there = True
        if self._check is not None:
            self._check()


class Appearance:
    """The manifest of one snapshot in flight. Each attempt to put it first checks the owner of the bucket, because a
    put with retries inside could arrive long after the check.

    Args:
        check: raises OwnershipLost if another job, or a newer generation, owns the bucket.
    """

    def __init__(self, store: ObjectStore, key: str, data: bytes, check: Callable[[], None]) -> None:
        self._store, self._key, self._data, self._check = store, key, data, check
        self.may_be_there = False
        """Whether a put was tried and not refused. It may have succeeded even if its answer was lost."""

    def make(self, note: Callable[[], Callable[[], None]]) -> bool:
        """Put the manifest; return False if another manifest exists. Calls `note` after the put, and the function that
        `note` returned if the manifest is taken back.

        Raises:
            OwnershipLost: before or during the put; then no manifest is visible. ObjectStoreError: the put failed.
        """

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and error.fault is StoreFault.TRANSIENT

        once = self._store.impatient()
        forget: Callable[[], None] | None = None
        try:
            if self._store.tries.call(lambda: self._try(once), may_pass):
                forget = note()
                with contextlib.suppress(ObjectStoreError):  # the next renewal of ownership notices
                    self._check()
        except OwnershipLost:
            self._take_back(once)
            if forget is not None:
                forget()
            raise
        return self.may_be_there

    def _try(self, once: ObjectStore) -> bool:
        self._check()
        self.may_be_there = True
        self.may_be_there = once.put_if(self._key, self._data, None) is not None
        return self.may_be_there

    def _take_back(self, once: ObjectStore) -> None:
        if not self.may_be_there:
            return
        with contextlib.suppress(ObjectStoreError):
            found = once.get(self._key, limit=MOST_MANIFEST_BYTES)
            if found is not None and found.data == self._data:
                once.delete(self._key)
            self.may_be_there = False
