"""The ends of a run's files, read without the rest, and whether their writers live."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from elastic_train.world import host_name

Line = dict[str, Any]

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 256 * 1024


def read_ends(path: Path, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> list[Line]:
    """The whole events at the beginning and at the end of a file, all of them if it is small. A line that is cut off
    or still being written is left out. Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= head_bytes + tail_bytes:
            raw = file.read().split(b"\n")
        else:
            raw = file.read(head_bytes).split(b"\n")[:-1]
            file.seek(size - tail_bytes - 1)  # a line that begins right at the border is seen to begin there
            raw += file.read().split(b"\n")[1:]
    return [line for text in raw if (line := event_of(text)) is not None]


def event_of(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_event = isinstance(line, dict) and isinstance(line.get("event"), str) and float_of(line, "time") is not None
    return line if is_event else None


def read_json(path: Path) -> Line | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def int_of(line: Line, name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_of(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def dict_of(line: Line, name: str) -> Line:
    value = line.get(name)
    return value if isinstance(value, dict) else {}


def time_of(line: Line) -> float:
    return float_of(line, "time") or 0.0


def process_is_alive(start: Line) -> bool | None:
    """Whether the process that wrote this `start` event lives; None if it is none of this machine's."""
    pid = int_of(start, "pid")
    if pid is None or start.get("host") != host_name() or not os.path.isdir("/proc/self"):
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return _is_of(start, int(fields[19])) and fields[0] not in (b"Z", b"X")


def drill_is_alive(folder: Path) -> bool | None:
    """Whether the drill lives, without which its nodes do not; None if it is none of this machine's."""
    settings = read_json(folder / "drill.json") or {}
    if "interrupted" in settings or (folder / "leftovers.json").exists():  # which it writes at its end
        return False
    return process_is_alive({**settings, "time": settings.get("started")})


def _is_of(start: Line, ticks: int) -> bool:
    """Whether it is by the process that started so long after the machine, and not by an earlier one with its pid."""
    if (own := int_of(start, "started_ticks")) is not None:
        return own == ticks
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return started <= time_of(start) + 2.0  # of an older version: right as long as the clock has not been set
