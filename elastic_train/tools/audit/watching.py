"""`elastic-train status RUN_DIR --watch`: a live run in the terminal, until it has ended or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from elastic_train.observe.status import THERE, Status
from elastic_train.observe.status_past import describe_incident
from elastic_train.observe.status_table import as_table, describe
from elastic_train.tools.audit.node_directories import read_status_of

if TYPE_CHECKING:
    from rich.live import Live

REFRESH_SECONDS = 1.0
LINE = ("state", "generation", "world size", "members", "step", "epoch", "loss", "samples/s", "snapshot", "incidents")
"""the facts of a line, where there is no terminal"""


def watch_status(
    run_dirs: Sequence[Path],
    file: TextIO,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Status:
    """Show a run's status until the run has ended; return the last one. Blocks.

    On a terminal it updates one table; elsewhere it prints a line when the state, the generation or the step changes.

    Raises:
        RunDirectoryError: there is no run in it, or it cannot be read.
    """
    last = None
    with _live(file) if file.isatty() else nullcontext() as live:
        while True:
            status = read_status_of(run_dirs, now())
            key = (status.state, status.generation, status.step)
            if live is not None or key != last:
                rows = describe(status, now())
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
    """Short forms of the rows that are too long for a line."""
    rows = {}
    if status.snapshot is not None:
        rows["snapshot"] = f"step {status.snapshot.step}"
    if status.incidents:
        rows["incidents"] = f"{len(status.incidents)}, the last: {describe_incident(status.incidents[-1], now)}"
    return rows
