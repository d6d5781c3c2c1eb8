"""The moment in which a snapshot below a URL becomes visible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from elastic_train.errors import ObjectStoreError, OwnershipLost, StoreFault
from elastic_train.storage.object_store import ObjectStore

MOST_MANIFEST_BYTES = 2**25
"""some 100,000 parts; whatever is larger is none"""


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

    def make(self, note: Callable[[], None]) -> bool:
        """Whether it is there; False where another one is. `note` is called once it is.

        Raises:
            OwnershipLost: before, or while it was put; then it is not there. ObjectStoreError: it cannot be put.
        """
        import tenacity

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and error.fault is StoreFault.TRANSIENT

        tries = self._store.tries
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            stop=tenacity.stop_after_delay(tries.total),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=tries.longest_wait),
            reraise=True,
        )
        once = self._store.impatient()
        try:
            if retrying(self._try, once):
                note()
                with contextlib.suppress(ObjectStoreError):  # the next renewal finds it out
                    self._check()
        except OwnershipLost:
            self._take_back(once)
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
