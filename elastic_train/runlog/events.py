"""The JSON lines of a run: `events/` and `ledger/` of a run directory.

One object per line, written by a single `write(2)` to a file opened for appending, so a killed process leaves whole
lines. Only SIGKILL within that call may cut off the last line: Linux copies a write page by page and checks for a fatal
signal between two pages. Such a line has no newline at its end, and reader.py skips it. Each worker process has its own
file. In containers a later process may have the same name; it appends to the file after a newline.

An event has two times: `time`, Unix seconds of a clock that may be wrong or be set, and `monotonic`, seconds of a clock
of this machine that never goes back.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.errors import DISK_FULL, write_line
from elastic_train.runlog.event_types import LEFT_OUT, Done, Event, LinesMissing, Started
from elastic_train.runlog.strict_json import line_of

if TYPE_CHECKING:
    import numpy as np

    from elastic_train.world import World

FINISHED = frozenset({"finished", "already_finished"})
"""the outcomes in the `done` event of a worker that reached the end"""
PAUSE_SECONDS, PAUSE_FACTOR = 60.0, 20.0
"""a mount that fails only after a timeout, perhaps of minutes, costs at most a twentieth of the time"""


class JsonLines:
    """An append-only file of JSON objects, made at the first line; every line is in the kernel before `write` returns.

    A file system that is full or gone must not end the training. Lines are lost meanwhile: one line on stderr warns,
    and an event `unwritten` follows later. A full file system is tried at every line. Any other failure may take long,
    so writing pauses for PAUSE_SECONDS or PAUSE_FACTOR times its duration, whichever is longer. A file handle that an
    NFS server's restart made stale is opened again.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[LinesMissing], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report`: is called with an event when lines can be written again; called again later if it returns False."""
        self.path, self._report, self._clock = path, report, clock
        self._lost: dict[str, list[list[int]]] = {}
        """event -> generation, first and last step of lines that were lost; those of a ledger are `samples`"""
        self._num_torn = 0
        """lines that were written only in part"""
        self._is_reporting = False
        self._fd: int | None = None
        self._has_failed = False
        self._paused_until = -math.inf
        self._lock = threading.RLock()
        """a thread may write while another closes; a signal handler may write within a write"""

    def write(self, line: dict[str, Any]) -> bool:
        """Write a line and return whether it is in the file."""
        data = line_of(line)
        with self._lock:
            if line.get("event") == Done.name:  # there may be no later one
                self._paused_until = -math.inf
            is_written = self._try(data)
            if is_written:
                self.report_lost()
            elif self._report is not None:
                self._note(line)
            return is_written

    def report_lost(self) -> None:
        """Report the lines that were lost, if any were since the last report."""
        with self._lock:
            if self._report is None or self._is_reporting or not (self._lost or self._num_torn):
                return
            self._is_reporting = True  # `report` may write into this file
            if self._report(LinesMissing(file=self.path.parent.name, lines=self._lost, torn=self._num_torn)):
                self._lost, self._num_torn = {}, 0
            self._is_reporting = False

    def _note(self, line: dict[str, Any]) -> None:
        generation, step = line["generation"], line["step"]
        if generation is None or line.get("event") == LinesMissing.name:
            return
        ranges = self._lost.setdefault(line.get("event", "samples"), [])
        if ranges and ranges[-1][0] == generation and ranges[-1][1] <= step <= ranges[-1][2] + 1:
            ranges[-1][2] = max(step, ranges[-1][2])
        else:
            ranges.append([generation, step, step])

    def _try(self, data: bytes) -> bool:
        began = self._clock()
        if began < self._paused_until:
            return False
        try:
            is_whole = self._append(data)
        except OSError as error:
            self.close()  # the next line begins behind a newline, where this one was cut off
            if error.errno not in DISK_FULL:
                took = self._clock() - began
                self._paused_until = began + took + max(PAUSE_SECONDS, PAUSE_FACTOR * took)
            if not self._has_failed:
                until = "there is room" if error.errno in DISK_FULL else "it can be written to"
                write_line(f"warning: {self.path} misses lines until {until}: {error.strerror}; training goes on")
            self._has_failed = True
            return False
        self._has_failed = False
        return is_whole

    def _append(self, data: bytes) -> bool:
        """Raises: OSError."""
        try:
            return self._append_once(data)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.close()
            return self._append_once(data)

    def _append_once(self, data: bytes) -> bool:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
        is_whole = os.write(self._fd, data) == len(data)
        if not is_whole:
            self._num_torn += 1
            os.write(self._fd, b"\n")  # the disk filled up within the line: end it, so that readers skip only it
        return is_whole

    def is_elsewhere(self) -> bool:
        """Return whether the open file is no longer at its path, because it was moved or removed."""
        with self._lock:
            try:
                return self._fd is not None and not os.path.samestat(os.fstat(self._fd), self.path.stat())
            except FileNotFoundError:
                return True
            except OSError:  # it cannot be told: a write will
                return False

    def close(self) -> None:
        with self._lock:
            fd, self._fd, self._paused_until = self._fd, None, -math.inf
            if fd is not None:
                with suppress(OSError):  # NFS tells here what has become of earlier lines
                    os.close(fd)


class EventLog:
    """The events of one worker; every line has its writer and the position of the run."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        local_rank: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.directory = directory
        self._lines = JsonLines(directory / file_name(host, local_rank, os.getpid()), self.write)
        self._identity = {"pid": os.getpid(), "host": host}
        self._rank, self._world_size = rank, world_size
        self._generation: int | None = None
        self._nodes: dict[str, int] = {}
        self._start: dict[str, Any] | None = None
        """the newest line of that event"""
        self.step = 0
        """committed steps so far; the training loop keeps it current"""
        self.is_noticed = False
        """whether this node has a standing notice that it may be taken away. Each line has it, because the line of the
        notice itself is soon far from both ends of the file"""
        self.quarantines: Sequence[Mapping[str, Any]] = ()
        """of hosts that this run keeps waiting: lines have those that are not over (`until`, Unix seconds)"""

    def enter(self, world: World) -> None:
        """Write this world's rank, sizes and generation into all later lines. If the file was moved, begin a new one:
        a member started with --fresh may have moved this worker's earlier file aside."""
        if self._lines.is_elsewhere():
            self.begin_again()
        self._rank, self._world_size, self._generation = world.rank, world.world_size, world.generation
        self._nodes = {"nodes": world.num_training_nodes}
        if num_spare := world.num_nodes - world.num_training_nodes:
            self._nodes["spare_nodes"] = num_spare

    def leave(self) -> None:
        """Leave the world. Another run may move the files aside, so the next line opens its file again."""
        self._generation, self._nodes = None, {}
        self._lines.close()

    def begin_again(self) -> None:
        """Begin a new file with this worker's `start` event, because the old one was removed or moved."""
        self._lines.close()
        if self._start is not None:
            self._lines.write(self._start)

    def write(self, event: Event) -> bool:
        """Write a line and return whether it is in the file."""
        now = time.time()
        line: dict[str, Any] = {
            "time": now,
            "monotonic": time.monotonic(),
            "event": event.name,
            "rank": self._rank,
            "world_size": self._world_size,
            **self._nodes,
            "generation": self._generation,
            "step": self.step,
            **self._identity,
        }
        for field in event.__slots__:
            if (value := getattr(event, field)) is not LEFT_OUT:
                line[field] = value
        if self.is_noticed:
            line["noticed"] = True
        if self.quarantines and (lasting := [one for one in self.quarantines if one["until"] > now]):
            line["quarantined"] = lasting
        if isinstance(event, Started):
            self._start = line
        return self._lines.write(line)

    def close(self) -> None:
        self._lines.close()


class Ledger:
    """Which samples each step used: a line per rank and step, written before the rank enters the step's reduction.

    A reduction cannot complete without every rank, so the lines of a committed step are complete even where a rank
    died right after it.
    """

    def __init__(self, directory: Path, *, events: EventLog, host: str, local_rank: int) -> None:
        """`events`: the event log of this worker, which reports lines missing here."""
        self._lines = JsonLines(directory / file_name(host, local_rank, os.getpid()), events.write)

    def write(self, *, epoch: int, step: int, world: World, indices: list[np.ndarray]) -> None:
        """`indices`: the sample indices of this rank's micro-batches, int64, one array each."""
        self._lines.write(
            {
                "epoch": epoch,
                "step": step,
                "generation": world.generation,
                "rank": world.rank,
                "indices": [int(index) for part in indices for index in part],
            }
        )

    def close(self) -> None:
        """Close the file, and report lines that are missing, as no later line would. `events` is still open."""
        self._lines.report_lost()
        self._lines.close()


def file_name(host: str, local_rank: int, pid: int) -> str:
    return f"{host}-{local_rank}-{pid}.jsonl"
