"""The one reader of a run's files: lines of JSON, whole, at their ends or as they come, and whole JSON files.

Another process may be writing them. A line that is no JSON object is passed over: a kill or a full disk has cut it off,
or its writer is not done with it; events.py says when.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
TAIL_BYTES = 64 * 1024
"""of a file, where only the newest lines are wanted"""


def parse(raw: bytes) -> Line | None:
    """The object in one line, or in the bytes of a file; None where it is none."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def read_all(path: Path) -> list[Line]:
    """All lines of a file; none where it is missing. Raises other OSErrors."""
    try:
        return list(_objects(path.read_bytes().split(b"\n")))
    except FileNotFoundError:
        return []


def read_with_torn(path: Path, torn: list[int]) -> Iterator[Line]:
    """The lines of a file, one by one. Raises OSError.

    What follows the last newline is left out: it was cut off by a kill, or is still being written.

    Args:
        torn: gets the numbers (from 1) of the lines that are torn; without those that a kill cut off, behind which a
            later process of the same name goes on.
    """
    generation: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break
            if raw == b"\n":
                continue
            if (line := parse(raw)) is None:
                torn.append(number)
                continue
            if torn[-1:] == [number - 1] and _begins_anew(line, generation):
                torn.pop()
            generation = int_of(line, "generation")
            yield line


def _begins_anew(line: Line, generation: int | None) -> bool:
    """Whether a line may be the first of a process, where the one before it was of a generation. Before its first world
    an event has none. A line of the ledger does not say; a process that goes on is of a later generation."""
    own = int_of(line, "generation")
    if "event" in line:
        return bool(line["event"] == "start") or (own is None and generation is not None)
    return own is not None and (generation is None or own > generation)


def read_events(path: Path, tail_bytes: int = 256 * 1024) -> list[Line]:
    """The lines of a worker's events, without the `step` lines that lie more than `tail_bytes` before its end: millions
    of them need not be parsed. What a call has read, later ones of this process need not read again. Raises OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        rare = _rare_lines.setdefault((path.resolve(), status.st_ino), _RareLines())
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
    """of the first byte that was not read"""
    lines: list[Line] = field(default_factory=list)


_STEP = re.compile(rb'"event": ?"step"')
_rare_lines: dict[tuple[Path, int], _RareLines] = {}
"""by path and inode: --fresh moves files aside, and a pid may come again"""


def newest_first(path: Path, tail_bytes: int = TAIL_BYTES) -> Iterator[Line]:
    """The lines at the end of a file, the last one first; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) - tail_bytes
            file.seek(max(0, start - 1))  # one byte more, so that a line that begins right there is seen to begin
            raw_lines = file.read().split(b"\n")
    except OSError:
        return
    yield from _objects(reversed(raw_lines[1:] if start > 0 else raw_lines))


@dataclass
class Cursor:
    """Reads a file of lines as it grows."""

    path: Path
    offset: int = 0
    """of the first byte that was not read"""

    def read(self) -> list[Line]:
        """The lines that were ended since the last call; none of a file that was moved aside. Raises other OSErrors."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.offset += len(whole) + len(newline)
        return list(_objects(whole.split(b"\n")))


def read_json(path: Path) -> Line | None:
    """The object in a JSON file; None where the file is missing or torn, or holds something else."""
    found = read_value(path)
    return found if isinstance(found, dict) else None


def read_value(path: Path) -> Any:
    """What a JSON file holds; None where it is missing or torn."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def member_of(path: Path) -> str:
    """NODE/LOCAL_RANK/PID, who writes a file NODE-LOCAL_RANK-PID.jsonl."""
    return "/".join(path.stem.rsplit("-", 2))


def int_of(line: Line, name: str) -> int | None:
    """A whole number, of a line that may hold anything; None where it is none."""
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_of(line: Line, name: str) -> float | None:
    """A finite number, of a line that may hold anything; None where it is none."""
    value = line.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def dict_of(line: Line, name: str) -> Line:
    value = line.get(name)
    return value if isinstance(value, dict) else {}


def time_of(line: Line) -> float:
    """Unix seconds; 0 where the line has none."""
    return float_of(line, "time") or 0.0


def _objects(raw_lines: Iterable[bytes]) -> Iterator[Line]:
    return (line for raw in raw_lines if (line := parse(raw)) is not None)
