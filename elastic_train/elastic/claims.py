"""An arbiter (protocol/arbiter.py) for a job, with claims in `claims/` of its run directory, or of its bucket."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from elastic_train.errors import ObjectStoreError
from elastic_train.protocol.arbiter import Arbiter, ArbiterSilent, Claims, Folder
from elastic_train.storage.atomic_files import fsync_directory
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore
from elastic_train.system import answer_of

ANSWER_SECONDS = 2.0
"""time limit of a claim in a shared file system or a bucket"""
MOST_CLAIM_BYTES = 2**20
"""limit of its size: a decision has some hundred bytes for each member"""
Found = TypeVar("Found")


class Directory:
    """As arbiter.Folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        self._path.mkdir(exist_ok=True)
        draft = self._path / f"draft-{secrets.token_hex(8)}"
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        try:
            os.link(draft, self._path / name)
            if is_durable:
                fsync_directory(self._path)
        finally:
            with suppress(OSError):  # a leftover draft harms nothing
                draft.unlink()

    def read(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self._path / name).unlink()

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def written_at(self, name: str) -> float:
        return (self._path / name).stat().st_mtime


class Objects:
    """As arbiter.Folder, below a URL whose store has conditional puts."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        with _translated_to_os_errors():
            if not self._store.is_conditional:
                raise OSError(f"{self._store} has no conditional put")
            if self._store.put_if(_key(name), json.dumps([time.time(), text]).encode(), None) is None:
                raise FileExistsError(name)

    def read(self, name: str) -> str | None:
        found = self._read(name)
        return None if found is None else found[1]

    def remove(self, name: str) -> None:
        with _translated_to_os_errors():
            self._store.delete(_key(name))

    def names(self) -> list[str]:
        with _translated_to_os_errors():
            return [key.removeprefix(_key("")) for key in self._store.list(_key(""))]

    def written_at(self, name: str) -> float:
        """Return the time by the writer's clock. If it is an hour off, needed claims are removed, and votes decide."""
        found = self._read(name)
        if found is None:
            raise FileNotFoundError(name)
        return found[0]

    def _read(self, name: str) -> tuple[float, str] | None:
        with _translated_to_os_errors():
            found = self._store.get(_key(name), limit=MOST_CLAIM_BYTES)
        if found is None:
            return None
        try:
            written_at, text = json.loads(found.data)
            return float(written_at), str(text)
        except (ValueError, TypeError) as error:
            raise OSError(f"{name} in {self._store} is no claim") from error


def _key(name: str) -> str:
    return f"claims/{name}"


@contextmanager
def _translated_to_os_errors() -> Iterator[None]:
    try:
        yield
    except ObjectStoreError as error:
        raise OSError(str(error)) from error


class Bounded:
    """As arbiter.Arbiter: calls another one on a side thread, for a limited time. While a call hangs, no further one is
    made. Any thread may call it."""

    def __init__(self, arbiter: Arbiter, seconds: float = ANSWER_SECONDS) -> None:
        self._arbiter, self._seconds = arbiter, seconds
        self._is_asked = threading.Lock()
        self._tidying: threading.Thread | None = None

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        return self._ask(lambda: self._arbiter.claim(job, generation, decision))

    def show(self, name: str) -> None:
        self._ask(lambda: self._arbiter.show(name))

    def sees(self, name: str) -> bool:
        return self._ask(lambda: self._arbiter.sees(name))

    def tidy(self) -> None:
        """Tidy in the background; returns at once."""
        if self._tidying is None or not self._tidying.is_alive():
            self._tidying = threading.Thread(target=self._arbiter.tidy, name="tidy", daemon=True)
            self._tidying.start()

    def _ask(self, call: Callable[[], Found]) -> Found:
        if not self._is_asked.acquire(timeout=self._seconds):
            raise ArbiterSilent("it has not answered the call before")

        def ask() -> Found:
            try:
                return call()
            finally:
                self._is_asked.release()

        answer = answer_of(ask, "arbiter")
        if not wait([answer], self._seconds).done:
            raise ArbiterSilent(f"no answer in {self._seconds:.0f} s")
        return answer.result()


def arbiter_of(run_dir: Path, bucket: Bucket | None) -> Arbiter:
    """Return an arbiter in the bucket of --snapshot-dir, which all members use, or in the run directory, if shared."""
    folder: Folder = Directory(run_dir / "claims")
    if bucket is not None and bucket.store.may_be_conditional:
        folder = Objects(bucket.store.impatient(ANSWER_SECONDS / 2))  # over its connections: they take long to make
    return Bounded(Claims(folder, lambda: secrets.token_hex(8)))
