"""The bucket of --snapshot-dir URL; a check leaves nothing in it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from elastic_train.errors import ObjectStoreError
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.store_urls import StoreUrl


class TrialBucket:
    """A bucket with the interface of `TrialDirectory`, as far as a check uses it."""

    free_bytes = 2**53
    """unknown; a large number that JSON carries exactly"""

    def __init__(self, url: StoreUrl) -> None:
        self.path = url
        self.error: str | None = None
        """why the bucket is not writable"""
        self._store = ObjectStore(url)
        self._marks: list[str] = []
        with self._noting_errors():
            self._store.require_writable()

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except ObjectStoreError as error:
            self.error = str(error)

    @contextlib.contextmanager
    def trial(self) -> Iterator[Bucket]:
        """Yield a place for snapshots, and remove it afterwards."""
        store = ObjectStore(self.path.below(f"check-{secrets.token_hex(8)}"))
        try:
            yield Bucket(store)
        finally:
            with self._noting_errors():
                for key in store.list():
                    store.delete(key)

    def leave_mark(self, token: str, rank: int) -> None:
        """Write an object that shows the other workers whether they have the same bucket."""
        if self.error is None:
            with self._noting_errors():
                self._store.put(self._mark(token, rank), b"")
                self._marks.append(self._mark(token, rank))

    def sees_mark(self, token: str, rank: int) -> bool:
        with self._noting_errors():
            return self.error is None and self._store.get(self._mark(token, rank)) is not None
        return False

    @staticmethod
    def _mark(token: str, rank: int) -> str:
        return f"check-{token}-{rank}"

    def remove_marks(self) -> None:
        with self._noting_errors():
            for mark in self._marks:
                self._store.delete(mark)
        self._marks.clear()
