"""A file that is written past the kernel's page cache.

To fill the page cache costs more of a processor than all else of a large snapshot, and nobody reads one back soon.
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
"""bytes of one write: whole blocks of any disk, as O_DIRECT wants it of memory, offset and length"""


class DirectFile:
    """A file that is written once from its beginning, by O_DIRECT (open(2)) where the file system has it. Durable once
    its `with` block has ended without an error; until then part of it is in memory alone. All of it raises OSError."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o666)
        self._piece = mmap.mmap(-1, PIECE)  # at the beginning of a page
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
        """For what is no multiple of a block. Returns whether it was not taken before."""
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
