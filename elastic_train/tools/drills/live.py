"""The output of a drill: a line per event, and in a terminal the timeline of the nodes below the lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from elastic_train.tools.drills.cluster import Cluster, NodeState
from elastic_train.wording import count

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

COLUMNS = 60
"""width of the timeline"""
MARKS = {
    NodeState.STARTING: ("░", "cyan"),
    NodeState.IN: ("█", "green"),
    NodeState.FROZEN: ("▒", "blue"),
    NodeState.CUT_OFF: ("▒", "magenta"),
    NodeState.OUT: ("░", "yellow"),
    NodeState.ENDED: (" ", "dim"),
}


class Timeline:
    """A context manager that shows the state of a cluster. Without a terminal it prints only the lines."""

    def __init__(self, cluster: Cluster, *, last_step: int | None, seconds: float, file: TextIO | None = None) -> None:
        """`seconds`: the expected length of the drill, which the timeline's columns divide."""
        self._cluster, self._last_step = cluster, last_step
        self._file = file or sys.stdout
        self._started = time.monotonic()
        self._column_seconds = max(1.0, seconds / COLUMNS)
        self._columns: dict[str, list[NodeState]] = {place.name: [] for place in cluster.places}
        self._live: Live | None = None

    def __enter__(self) -> Timeline:
        if self._file.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._table(), console=Console(file=self._file), refresh_per_second=4, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def log(self, line: str) -> None:
        text = f"{int(self.elapsed // 60):02d}:{self.elapsed % 60:04.1f}  {line}"
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    def refresh(self) -> None:
        """Update the timeline; to be called several times per second."""
        column = int(self.elapsed / self._column_seconds)
        for place in self._cluster.places:
            states = self._columns[place.name]
            state = self._cluster.state_of(place)
            states += [state] * (column + 1 - len(states))
            states[column] = state
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        watch = self._cluster.watch
        step = f"step {watch.step}" + (f" of {self._last_step}" if self._last_step else "")
        loss = "" if watch.loss is None else f", loss {watch.loss:.4f}"
        world = watch.world
        told = f"generation {world.generation}, {count(len(world.members), 'worker')}" if world else "no world yet"
        grid = Table.grid(padding=(0, 1))
        for place in self._cluster.places:
            bar = Text()
            for state in self._columns[place.name][-COLUMNS:]:
                mark, style = MARKS[state]
                bar.append(mark, style=style)
            rank = self._cluster.rank_of(place)
            state = self._cluster.state_of(place)
            label = f"{state}" + (f", rank {rank}" if rank is not None and state is NodeState.IN else "")
            grid.add_row(Text(place.name), bar, Text(label, style=MARKS[state][1]))
        # Not the grid's own title, which is wrapped to the width of the grid.
        return Group(Text(f"{self.elapsed:.0f} s, {told}, {step}{loss}", no_wrap=True, overflow="ellipsis"), grid)
