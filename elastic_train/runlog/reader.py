"""The only reader of a run's files: JSON lines (all, the last ones, or new ones as they come), and whole JSON files.

Another process may be writing a file. A line that is no JSON object is skipped: a kill or a full disk has cut it off,
or its write is not finished; see events.py.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_train.errors import RunDirectoryError, cause_of
from elastic_train.system import twice

Line = dict[str, Any]
TAIL_BYTES = 64 * 1024
"""Bytes read from the end of a file if only the newest lines are needed."""
TORN = "is torn"
"""what is wrong with a line that is no JSON object"""


def parse(raw: bytes | str) -> Line | None:
    """Parse a JSON object from a line or a whole file; None if it is no object."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def worker_files(folder: Path) -> list[Path]:
    """The files in `events/` or `ledger/`; none without such a folder.

    Raises: RunDirectoryError: it cannot be listed. `glob` would take it for empty, and a start would begin anew.
    """
    try:
        return sorted(path for path in twice(lambda: [*folder.iterdir()], OSError) if path.suffix == ".jsonl")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what = f"{os.path.realpath(folder)} cannot be read: {cause_of(error)}"
        raise RunDirectoryError(f"{what}; make it readable, or choose another run directory") from error


def read_all(path: Path) -> list[Line]:
    """All lines of a file; an empty list if it is missing. Raises other OSErrors."""
    try:
        return list(_objects(path.read_bytes().split(b"\n")))
    except FileNotFoundError:
        return []


def read_with_torn(
    path: Path, torn: dict[int, str], fault_of: Callable[[Line], str | None] = lambda _: None
) -> Iterator[Line]:
    """Yield the lines of a file. Raises OSError.

    Bytes after the last newline are left out: a kill cut them off, or their write is not finished.

    Args:
        torn: gets the numbers (from 1) of lines that are not yielded, and what is wrong with them; not a line that a
            kill cut off and after which a later process of the same name went on.
        fault_of: returns what is wrong with a line; None if nothing is.
    """
    generation: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break
            if raw == b"\n":
                continue
            if (line := parse(raw)) is None:
                torn[number] = TORN
                continue
            if torn.get(number - 1) == TORN and _begins_anew(line, generation):
                del torn[number - 1]
            if fault := fault_of(line):
                torn[number] = fault
                continue
            generation = int_of(line, "generation")
            yield line


def _begins_anew(line: Line, generation: int | None) -> bool:
    """Whether a line may be the first of a process; `generation` is that of the line before. The first event is
    `start`, or has no generation, before the first world. The first line in a ledger has a later generation."""
    own = int_of(line, "generation")
    if "event" in line:
        return bool(line["event"] == "start") or (own is None and generation is not None)
    return own is not None and (generation is None or own > generation)


def read_events(path: Path, tail_bytes: int = 256 * 1024) -> list[Line]:
    """Read a worker's events, without `step` lines more than `tail_bytes` before the end, of which there may be
    millions. Later calls in this process read only new lines and the tail. Raises OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        rare = _rare_lines.setdefault((path.resolve(), status.st_ino), _RareLines())
        if status.st_size < rare.offset:  # it was cut off, or began again
            rare.offset, rare.lines = 0, []
        file.seek(rare.offset)
        while rare.offset < status.st_size - tail_bytes:
            raw = file.readline()
            if not raw.endswith(b"\n"):
                break
            if not _STEP.search(raw):
                rare.lines += _objects([raw])
            rare.offset += len(raw)
        file.seek(rare.offset)
        return [*rare.lines, *_objects(file.read().split(b"\n"))]


@dataclass
class _RareLines:
    offset: int = 0
    """Of the first byte that was not read."""
    lines: list[Line] = field(default_factory=list)


_STEP = re.compile(rb'"event": ?"step"')
_rare_lines: dict[tuple[Path, int], _RareLines] = {}
"""By path and inode, because --fresh moves files aside, and pids repeat."""


def newest_first(path: Path, tail_bytes: int = TAIL_BYTES) -> Iterator[Line]:
    """Yield the lines at the end of a file, the last one first; none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) - tail_bytes
            file.seek(max(0, start - 1))  # one byte more, to recognise a line that begins exactly at `start`
            raw_lines = file.read().split(b"\n")
    except OSError:
        return
    yield from _objects(reversed(raw_lines[1:] if start > 0 else raw_lines))


@dataclass
class Cursor:
    """A reader of a file of lines that grows."""

    path: Path
    offset: int = 0
    """Of the first byte that was not read."""

    def read(self) -> list[Line]:
        """Read the lines completed since the last call; none if the file was moved aside. Raises other OSErrors."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.offset += len(whole) + len(newline)
        return list(_objects(whole.split(b"\n")))


def read_json(path: Path) -> Line | None:
    """The object in a JSON file; None if the file is missing or torn, or holds no object."""
    found = read_value(path)
    return found if isinstance(found, dict) else None


def read_value(path: Path) -> Any:
    """The value in a JSON file; None if the file is missing or torn."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def member_of(path: Path) -> str:
    """The writer of a file NODE-LOCAL_RANK-PID.jsonl, as NODE/LOCAL_RANK/PID."""
    return "/".join(path.stem.rsplit("-", 2))


def int_of(line: Line, name: str) -> int | None:
    """A field that may hold anything, as a whole number; None if it is none."""
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_of(line: Line, name: str) -> float | None:
    """A field that may hold anything, as a finite number; None if it is none."""
    value = line.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def dict_of(line: Line, name: str) -> Line:
    value = line.get(name)
    return value if isinstance(value, dict) else {}


def time_of(line: Line) -> float:
    """The time of a line in Unix seconds; 0 if it has none."""
    return float_of(line, "time") or 0.0


def _objects(raw_lines: Iterable[bytes]) -> Iterator[Line]:
    return (line for raw in raw_lines if (line := parse(raw)) is not None)
