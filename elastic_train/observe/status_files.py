"""What event files hold, where a line may hold anything, and whether their writers live."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from elastic_train.runlog.reader import Line, float_of, int_of, member_of, read_events, read_json, time_of
from elastic_train.system import pid_namespace, process_stat
from elastic_train.world import host_name

NEWEST_FILES = 64
"""event files that are read in any case; a run that was restarted often has one per worker and start, of which most are
of no use any more"""
HEARD_SECONDS = 600.0
"""a newcomer on another machine counts this long after its last line; --wait-timeout's default"""

IsAlive = Callable[[Line], bool | None]
"""a process's `start` event -> whether it lives; None where this machine cannot tell"""


@dataclass
class WorkerLines:
    """What one event file tells: one process."""

    lines: list[Line]
    """head and tail, in the order of writing; not empty"""
    member: str
    """NODE/LOCAL_RANK/PID"""
    written: float
    """when the newest was, Unix seconds by the clock of the file system, which is the same for all"""
    age: float
    """seconds since then"""
    lives: bool | None
    """None where this machine cannot tell"""
    first: Line = field(init=False)
    last: Line = field(init=False)

    def __post_init__(self) -> None:
        starts = [place for place, line in enumerate(self.lines) if line["event"] == "start"]
        ended = [line for line in self.lines[max(starts, default=0) :] if line["event"] == "done"]
        # What could not be written before, and a warning about it, may follow the end.
        self.first, self.last = self.lines[0], (ended or self.lines)[-1]

    @property
    def generation(self) -> int | None:
        return max((g for line in self.lines if (g := int_of(line, "generation")) is not None), default=None)

    @property
    def is_outside(self) -> bool:
        """Whether the worker is in no world: not yet, or no more, because it was left out (`was`)."""
        return int_of(self.last, "generation") is None or "was" in self.last

    @property
    def is_first_of_node(self) -> bool:
        """Whether the worker represents its node: each node has one with this local rank."""
        return self.member.split("/")[-2:-1] == ["0"]  # a file of another name has no such part

    @property
    def outcome(self) -> str | None:
        """The outcome in its `done` event; None without one."""
        return str(self.last.get("outcome")) if self.last["event"] == "done" else None

    @property
    def may_wait(self) -> bool:
        return self.age <= HEARD_SECONDS if self.lives is None else self.lives


def is_event(line: Line) -> bool:
    return isinstance(line.get("event"), str) and float_of(line, "time") is not None


def read_workers(directory: Path, now: float, is_alive: IsAlive) -> tuple[list[WorkerLines], int]:
    """Return the event files that decide a run's status, oldest first: the newest ones, those of workers that may wait,
    and those of all members of the newest world, most of which write nothing for hours; and the number of the others,
    which were not read. Raises: OSError, but not for a missing directory."""
    unread = {member_of(Path(entry.path)): entry for entry in _newest_files(directory)}
    found: list[WorkerLines] = []

    def read(members: Iterable[str]) -> bool:
        """Read members' files, and return whether any of them had not been read yet."""
        chosen = {member: unread.pop(member) for member in list(members) if member in unread}
        for member, entry in chosen.items():
            lines: list[Line] = []
            with suppress(FileNotFoundError):
                lines = list(filter(is_event, read_events(Path(entry.path))))
            if lines:
                written = entry.stat().st_mtime
                starts = [line for line in lines if line["event"] == "start"]
                lives = is_alive((starts or lines[:1])[-1])  # in containers an older process may have had its name
                found.append(WorkerLines(lines, member, written, now - written, lives))
        return bool(chosen)

    read(itertools.islice(unread, NEWEST_FILES))
    read([member for member, entry in unread.items() if now - entry.stat().st_mtime <= HEARD_SECONDS])
    while not _newest_members(found) and read(itertools.islice(unread, NEWEST_FILES)):
        pass  # later starts that failed must not hide the run
    while read(_newest_members(found)):
        pass  # these members may know of a newer world
    return sorted(found, key=lambda worker: time_of(worker.first)), len(unread)


def _newest_files(directory: Path) -> list[os.DirEntry[str]]:
    """Return the event files, newest first; without those that --fresh is moving aside."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            with suppress(FileNotFoundError):
                if entry.name.endswith(".jsonl"):
                    found.append((entry.stat().st_mtime, entry))
    return [entry for _, entry in sorted(found, key=itemgetter(0), reverse=True)]


def _newest_members(workers: Iterable[WorkerLines]) -> set[str]:
    """Return the members of the newest world in the lines."""
    worlds = [line for worker in workers for line in worker.lines if line["event"] == "world"]
    newest = max((int_of(line, "generation") or 0 for line in worlds), default=0)
    told = (line.get("members") for line in worlds if int_of(line, "generation") == newest)
    return {str(member) for members in told if isinstance(members, list) for member in members}


def process_is_alive(start: Line) -> bool | None:
    """Return whether the process that wrote this `start` event lives; None if it is on another machine, or in a
    container with its own pids, whatever its host name."""
    pid = int_of(start, "pid")
    if pid is None or start.get("host") != host_name() or start.get("pid_namespace") not in (None, pid_namespace()):
        return None
    state, ticks = process_stat(pid)
    if state == "?":
        return None
    if state in ("Z", "X", None):
        return False
    if (own := int_of(start, "started_ticks")) is not None:
        return own == int(ticks)  # if not, a later process has its pid
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")
    return started <= time_of(start) + 2.0  # of an older version: right as long as the clock has not been set


def is_alive_in(run_dir: Path) -> IsAlive:
    """Return the check for workers of a run. A drill's workers may have invented host names, but run here,
    and end with the drill."""
    if not (run_dir / "drill").is_dir():
        return process_is_alive
    settings = read_json(run_dir / "drill" / "drill.json") or {}
    is_over = "interrupted" in settings or (run_dir / "drill" / "leftovers.json").exists()  # which it writes at its end
    drill_lives = False if is_over else process_is_alive({**settings, "time": settings.get("started")})
    return lambda start: drill_lives if (known := process_is_alive(start)) is None else known
