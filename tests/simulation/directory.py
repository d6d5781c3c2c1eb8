"""A directory that hosts share, which may stall or lose replies; or a copy of it that one host has alone."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.process import Process

STALL_SECONDS = 2.0
"""after which a call is given up, as claims.ANSWER_SECONDS"""
LATENCY = 0.003


class Directory:
    """The files, by directory."""

    def __init__(self) -> None:
        self.files: dict[int, dict[str, str]] = {}
        self.written_at: dict[int, dict[str, float]] = {}
        self.stalled: set[str] = set()
        """hosts that get no answer"""
        self.has_stalled = False
        self.loses_replies: dict[str, int] = {}
        """by host: how many of its next links are not acknowledged"""


class SimFolder:
    """As arbiter.Folder, of one process."""

    def __init__(self, process: Process, directory: Directory, number: int) -> None:
        self._process, self._directory = process, directory
        self._files = directory.files.setdefault(number, {})
        self._written_at = directory.written_at.setdefault(number, {})

    def _call(self) -> None:
        process = self._process
        process.sleep(LATENCY * (0.5 + process.machines.random.random()))
        if process.host in self._directory.stalled:
            process.sleep(STALL_SECONDS)
            raise OSError(errno.ETIMEDOUT, "no answer")

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        self._call()  # the draft
        self._call()
        left = self._directory.loses_replies.get(self._process.host, 0)
        is_there = name in self._files
        if not is_there and (left == 0 or left % 3):
            self._files[name], self._written_at[name] = text, self._process.machines.kernel.now
        if left > 0:
            self._directory.loses_replies[self._process.host] = left - 1
            # The client repeats a call that was executed, or gives up; or it never was executed.
            raise OSError(errno.EEXIST if left % 3 == 1 else errno.EIO, "the reply was lost")
        if is_there:
            raise FileExistsError(errno.EEXIST, name)

    def read(self, name: str) -> str | None:
        self._call()
        return self._files.get(name)

    def remove(self, name: str) -> None:
        self._call()
        self._files.pop(name, None)

    def names(self) -> list[str]:
        self._call()
        return list(self._files)

    def written_at(self, name: str) -> float:
        self._call()
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, name)
        return self._written_at[name]
