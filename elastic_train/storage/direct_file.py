"""A file that is written past the kernel's page cache.

Filling the page cache costs more CPU time than the rest of a large snapshot, and no process reads a snapshot soon.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

PIECE = 2**22
"""Bytes of one write. O_DIRECT needs memory, offset and length in whole blocks; this is a multiple for any disk."""


class DirectFile:
    """A file that is written once from start to end, with O_DIRECT (open(2)) if the file system supports it. Durable
    once its `with` block has ended without an error; before, part is only in memory. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o666)
        self._piece = mmap.mmap(-1, PIECE)  # starts at a page boundary
        self._filled = 0

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        num_bytes = left.nbytes
        while left:
            part = left[: PIECE - self._filled]
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == PIECE:
                self._write_out()
        return num_bytes

    def _write_out(self) -> None:
        with memoryview(self._piece) as whole:
            done = 0
            while done < self._filled:
                try:
                    with whole[done : self._filled] as rest:
                        done += os.write(self._fd, rest)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._take_page_cache():
                        raise
        self._filled = 0

    def _take_page_cache(self) -> bool:
        """Switch O_DIRECT off, for a length that is no multiple of a block. Return whether it was on."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._take_page_cache()
                self._write_out()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._piece.close()
