"""The place of the snapshots, a directory or a bucket; a check leaves nothing in it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elastic_train.config import Config
from elastic_train.errors import SnapshotError, cause_of, first_line
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.places import folder_by
from elastic_train.storage.store_urls import StoreUrl, is_url, parse_url


class _Folder:
    """A directory by the calls of an ObjectStore that a check needs, for empty files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def require_writable(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self._path).close()

    def put(self, key: str, _nothing: bytes) -> None:
        (self._path / key).touch()

    def get(self, key: str) -> bytes | None:
        return b"" if (self._path / key).exists() else None

    def delete(self, key: str) -> None:
        (self._path / key).unlink(missing_ok=True)


class TrialPlace:
    """A directory, which is created if needed, as by a worker's start; or the bucket of --snapshot-dir URL."""

    def __init__(self, path: Path | StoreUrl) -> None:
        self.path = path.absolute() if isinstance(path, Path) else path
        self.error: str | None = None
        """why the place is not writable"""
        self._place = _Folder(self.path) if isinstance(self.path, Path) else ObjectStore(self.path)
        self._marks: list[str] = []
        with self.noting_errors():
            self._place.require_writable()

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = cause_of(error)
        except SnapshotError as error:
            self.error = first_line(error)

    @property
    def free_bytes(self) -> int:
        """Of a bucket unknown: a large number that JSON carries exactly."""
        return shutil.disk_usage(self.path).free if isinstance(self.path, Path) else 2**53

    @contextlib.contextmanager
    def trial(self) -> Iterator[Path | Bucket]:
        """Yield a place for snapshots, and remove it afterwards. Raises: OSError."""
        if isinstance(self.path, Path):
            with tempfile.TemporaryDirectory(prefix=".check-", dir=self.path) as path:
                yield Path(path)
            return
        store = ObjectStore(self.path.below(f"check-{secrets.token_hex(8)}"))
        try:
            yield Bucket(store)
        finally:
            with self.noting_errors():
                for key in store.list():
                    store.delete(key)

    def leave_mark(self, token: str, rank: int) -> None:
        """Write a file or an object that shows the other workers whether they have the same place."""
        if self.error is not None:
            return
        mark = _mark(token, rank)
        with self.noting_errors():
            self._place.put(mark, b"")
            self._marks.append(mark)

    def sees_mark(self, token: str, rank: int) -> bool:
        if self.error is None:
            with self.noting_errors():
                return self._place.get(_mark(token, rank)) is not None
        return False

    def remove_marks(self) -> None:
        with self.noting_errors():
            for mark in self._marks:
                self._place.delete(mark)
        self._marks.clear()


def _mark(token: str, rank: int) -> str:
    return f".check-{token}-{rank}"


def trial_place(config: Config, run_dir: Path) -> TrialPlace:
    """Return the place of the snapshots. Raises: UsageError: --snapshot-dir is an invalid URL."""
    if is_url(config.snapshot_dir):
        return TrialPlace(parse_url(str(config.snapshot_dir), "--snapshot-dir"))
    return TrialPlace(folder_by(vars(config), run_dir))
