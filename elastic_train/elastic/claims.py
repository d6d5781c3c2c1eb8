"""The run directory as an arbiter (protocol/arbiter.py): claims lie in its `claims/`."""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from elastic_train.protocol.arbiter import Arbiter, ArbiterSilent, Claims
from elastic_train.storage.atomic_files import fsync_directory

ANSWER_SECONDS = 2.0
"""that a shared file system may take for a claim"""
Found = TypeVar("Found")


class Directory:
    """As arbiter.Folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_durable = False

    def write(self, name: str, text: str, *, is_durable: bool) -> None:
        self._path.mkdir(exist_ok=True)
        self._is_durable = is_durable
        with open(self._path / name, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())

    def link(self, name: str, other: str) -> None:
        os.link(self._path / name, self._path / other)
        if self._is_durable:
            fsync_directory(self._path)

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


class Bounded:
    """As arbiter.Arbiter: another one, on a side thread, for at most so many seconds. While a call hangs there is no
    further one."""

    def __init__(self, arbiter: Arbiter, seconds: float = ANSWER_SECONDS) -> None:
        self._arbiter, self._seconds = arbiter, seconds
        self._thread: threading.Thread | None = None

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        return self._ask(lambda: self._arbiter.claim(job, generation, decision))

    def show(self, name: str) -> None:
        self._ask(lambda: self._arbiter.show(name))

    def sees(self, name: str) -> bool:
        return self._ask(lambda: self._arbiter.sees(name))

    def _ask(self, call: Callable[[], Found]) -> Found:
        if self._thread is not None and self._thread.is_alive():
            raise ArbiterSilent("it has not answered the call before")
        answer: queue.SimpleQueue[Found | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(call())
            except Exception as error:  # the caller raises it
                answer.put(error)

        self._thread = threading.Thread(target=run, name="arbiter", daemon=True)
        self._thread.start()
        try:
            found = answer.get(timeout=self._seconds)
        except queue.Empty:
            raise ArbiterSilent(f"no answer in {self._seconds:.0f} s") from None
        self._thread.join()
        if isinstance(found, Exception):
            raise found
        return found


def run_directory_arbiter(run_dir: Path) -> Arbiter:
    return Bounded(Claims(Directory(run_dir / "claims"), lambda: secrets.token_hex(8)))
