"""Files that are written past the page cache: the bytes are what was given, whatever the file system takes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest

from elastic_train.storage.direct_file import PIECE, DirectFile

SIZES = [(), (0,), (1,), (4096,), (PIECE,), (PIECE - 1, 2), (3, PIECE, 5), (2 * PIECE + 7,), (PIECE, PIECE)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_file_holds_what_was_written(sizes: tuple[int, ...], tmp_path: Path) -> None:
    parts = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    with DirectFile(tmp_path / "file") as file:
        for part in parts:
            assert file.write(part) == len(part)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_whole_pieces_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    seen: list[tuple[int, bool]] = []
    write = os.write

    def note(fd: int, data: memoryview) -> int:
        seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", note)
    with DirectFile(tmp_path / "file") as file:
        file.write(bytes(2 * PIECE + 7))
    assert seen == [(PIECE, True), (PIECE, True), (7, False)]


def test_a_file_system_without_it_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file, data = os.open, random.Random(0).randbytes(PIECE + 7)

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
    assert (tmp_path / "file").read_bytes() == data


def test_a_short_write_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a piece then is no multiple of a block."""
    write, data, lengths = os.write, random.Random(0).randbytes(2 * PIECE), iter([512, 4095])
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[: next(lengths, PIECE)])))
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
    assert (tmp_path / "file").read_bytes() == data


def test_an_error_of_the_disk_is_raised_and_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(PIECE))
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(7))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_block_that_fails_writes_no_more(tmp_path: Path) -> None:
    def tear() -> None:
        with DirectFile(tmp_path / "file") as file:
            file.write(b"begun")
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        tear()
    assert (tmp_path / "file").read_bytes() == b""
