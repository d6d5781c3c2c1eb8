"""The moment in which a snapshot below a URL becomes visible, until which it may be given up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from elastic_train.errors import ObjectStoreError, OwnershipLost, SnapshotError, StoreFault
from elastic_train.storage.object_store import ObjectStore

MOST_MANIFEST_BYTES = 2**25
"""some 100,000 parts; whatever is larger is none"""


class Flight:
    """One snapshot on its way, for who would have the line, or the thread, for a newer one.

    Args:
        check: raises OwnershipLost where another job, or a newer generation, has the place.
        is_awaited: whether somebody waits for its end: what is old is left then.
    """

    def __init__(self, check: Callable[[], None] | None = None, *, is_awaited: bool = False) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._is_given_up = self._may_be_there = False
        self.is_awaited = is_awaited

    def is_given_up(self) -> bool:
        return self._is_given_up

    def give_up(self) -> bool:
        """False, and nothing done, where it may be visible by now."""
        with self._lock:
            self._is_given_up = not self._may_be_there
            return self._is_given_up

    def check(self) -> None:
        """It becomes visible next. Raises: SnapshotError: it was given up. What `check` raises."""
        with self._lock:
            if self._is_given_up:
                raise SnapshotError("it was given up on its way")
            self._may_be_there = True
        if self._check is not None:
            self._check()


class Appearance:
    """The manifest of one snapshot on its way. Each try to put it follows a look at who owns the bucket: one that was
    tried again and again would come long after the last look.

    Args:
        check: raises OwnershipLost where another job, or a newer generation, has the bucket.
    """

    def __init__(self, store: ObjectStore, key: str, data: bytes, check: Callable[[], None]) -> None:
        self._store, self._key, self._data, self._check = store, key, data, check
        self.may_be_there = False
        """whether a put was tried that was not refused: its answer may have been lost"""

    def make(self, note: Callable[[], Callable[[], None]]) -> bool:
        """Whether it is there; False where another one is. `note` is called once it is; what it returns, where that is
        taken back.

        Raises:
            OwnershipLost: before, or while it was put; then it is not there. ObjectStoreError: it cannot be put.
        """

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and error.fault is StoreFault.TRANSIENT

        once = self._store.impatient()
        forget: Callable[[], None] | None = None
        try:
            if self._store.tries.call(lambda: self._try(once), may_pass):
                forget = note()
                with contextlib.suppress(ObjectStoreError):  # the next renewal finds it out
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
