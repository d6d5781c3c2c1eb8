"""`elastic-train status RUN_DIR --watch`: a live run in the terminal, until it has ended or Ctrl-C."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from elastic_train.errors import RunDirectoryError
from elastic_train.observe.status import THERE, Status
from elastic_train.observe.status_past import describe_incident
from elastic_train.observe.status_table import as_table, describe
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.node_directories import as_one_run, read_status_of

if TYPE_CHECKING:
    from rich.live import Live

REFRESH_SECONDS = 1.0
GOODPUT_EVERY_SECONDS = 5.0
GOODPUT_SHARE = 0.05
"""of its time that this may spend on reading all of a long run's events"""
GOODPUT_BYTES = 500_000_000
"""of events that are read for it: two million steps, which take as much memory"""
LINE = (
    "state", "generation", "world size", "members", "step", "epoch", "loss", "samples/s", "snapshot", "goodput",
    "incidents",
)  # fmt: skip
"""the facts of a line where there is no terminal"""


class GoodputSoFar:
    """The goodput of a live run, taken anew now and then: it takes all events, and the more there are the longer."""

    def __init__(
        self, run_dirs: Sequence[Path], now: Callable[[], float] = time.monotonic, most_bytes: int = GOODPUT_BYTES
    ) -> None:
        self._run_dirs, self._now, self._most_bytes = run_dirs, now, most_bytes
        self._text: str | None = None
        self._next = now()

    def read(self, *, is_over: bool = False) -> str | None:
        """As text, the figure that `audit` and `report` tell; None before the second step. Of a run that is over it is
        taken anew. Above so many bytes of events it says who tells it."""
        started = self._now()
        if started < self._next and not is_over:
            return self._text
        try:
            with as_one_run(self._run_dirs) as run_dir:
                if sum(path.stat().st_size for path in run_dir.glob("events/*.jsonl")) > self._most_bytes:
                    self._text = "too long a run to read again and again; elastic-train audit tells it"
                    self._next = math.inf
                    return self._text
                lost = lost_time(read_history(run_dir))
        except (RunDirectoryError, FileNotFoundError):  # moved aside by a new start
            return self._text
        told = [f"{cause} {seconds:.1f} s" for cause, seconds in lost.by_cause.items() if seconds >= 0.05]
        ratio = f"{lost.ratio:.3f}{'' if is_over else ' so far'}"
        self._text = f"{ratio} (lost: {', '.join(told) or 'nothing'})" if lost.wall else None
        self._next = self._now() + max(GOODPUT_EVERY_SECONDS, (self._now() - started) / GOODPUT_SHARE)
        return self._text


def watch_status(
    run_dirs: Sequence[Path],
    file: TextIO,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Status:
    """Show where a run stands, again and again, until it has ended; what it was then. Blocks.

    On a terminal one table that changes, elsewhere a line whenever the step has.

    Raises:
        RunDirectoryError: there is no run in it, or it cannot be read.
    """
    goodput, last = GoodputSoFar(run_dirs), None
    with _live(file) if file.isatty() else nullcontext() as live:
        while True:
            status = read_status_of(run_dirs, now())
            key = (status.state, status.generation, status.step)
            if live is not None or key != last:
                rows = describe(status, now())
                if (so_far := goodput.read(is_over=status.state not in THERE)) is not None:
                    rows.append(("goodput", so_far))
                if live is not None:
                    live.update(as_table(status, rows), refresh=True)
                else:
                    facts = dict(rows) | _in_brief(status, now())
                    print("; ".join(f"{name}: {facts[name]}" for name in LINE if name in facts), file=file, flush=True)
            if status.state not in THERE:
                return status
            last = key
            sleep(REFRESH_SECONDS)


def _live(file: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=file), auto_refresh=False)


def _in_brief(status: Status, now: float) -> dict[str, str]:
    """The rows that are too long for a line."""
    rows = {}
    if status.snapshot is not None:
        rows["snapshot"] = f"step {status.snapshot.step}"
    if status.incidents:
        rows["incidents"] = f"{len(status.incidents)}, the last: {describe_incident(status.incidents[-1], now)}"
    return rows
