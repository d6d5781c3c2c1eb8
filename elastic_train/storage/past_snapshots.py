"""Traces of missing snapshots in the events of run directories: a run that had snapshots must not begin anew.

Only rank 0 writes the regular snapshots, and logs them in its own events. If run directories are not shared, the events
`snapshot_due` and `world` of the other members show only how far the run had come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import SnapshotError, cause_of
from elastic_train.runlog.reader import Line, read_all, worker_files
from elastic_train.world import from_runs, to_runs


@dataclass(frozen=True)
class Reached:
    """The newest moment of a worker that was past its first due snapshot."""

    generation: int
    step: int
    every: int
    """Steps between two snapshots; 1 if they are due by time, at unknown steps."""
    host: str


@dataclass(frozen=True)
class PastSnapshots:
    """The evidence for snapshots in the events of one run directory."""

    known: tuple[int, int, str] | None
    """Generation and step of the newest snapshot that certainly existed, and the evidence in words."""
    reached: Reached | None
    logged: str
    """Steps with an event `step`, as runs. Only rank 0 logs this event, and would have logged a snapshot, too."""


NOTHING_SEEN = PastSnapshots(None, None, "")


def read_past_snapshots(events_dir: Path) -> PastSnapshots:
    """Read all events of a run directory. A file that cannot be read counts as evidence of a snapshot, because it may
    contain some."""
    known: list[tuple[int, int, str]] = []
    reached: list[Reached] = []
    logged: set[int] = set()
    for path in worker_files(events_dir):
        try:
            lines = read_all(path)
        except OSError as error:
            how = f"{path}, which may tell of a snapshot of this run, cannot be read: {cause_of(error)}"
            known.append((-1, -1, how))
            continue
        known += _known(lines)
        reached += _reached(lines)
        logged |= {_step(line) for line in lines if line.get("event") == "step"}
    newest = max(reached, key=lambda one: (one.generation, one.step), default=None)
    return PastSnapshots(max(known, default=None), newest, to_runs(sorted(logged)))


def require_none_written(found: Sequence[PastSnapshots]) -> None:
    """Call this if no snapshot can be found; `found` is the evidence of all members' directories.

    A run that ended before its first snapshot may begin anew. That is certain if events `step` for every due snapshot
    are here, without a snapshot. If some are missing, a rank 0 that is not here may have written one.

    Raises:
        SnapshotError: the run had snapshots, or may have had.
    """
    known = max((one.known for one in found if one.known is not None), default=None)
    if known is not None:
        raise SnapshotError(
            f"{known[2]}, and no whole one can be seen from here: start where it is and with the --snapshot-key that "
            "it is signed with, or give --fresh to begin anew"
        )
    logged = {step for one in found for step in from_runs(one.logged)}
    for one in found:
        past = one.reached
        if past is not None and not logged.issuperset(range(past.every, past.step, past.every)):
            how = f"with a snapshot due every {past.every} steps" if past.every > 1 else "when a snapshot had been due"
            raise SnapshotError(
                f"host {past.host} had come to step {past.step} of this run at least (generation {past.generation}), "
                f"{how}, and none can be seen from here: start where they are, or give --fresh to begin anew"
            )


def _known(lines: Iterable[Line]) -> Iterable[tuple[int, int, str]]:
    for line in lines:
        generation = int(line.get("generation") or 0)
        if line.get("event") == "snapshot":
            step = int(line.get("snapshot_step") or 0)
            how = f"host {line.get('host')} wrote a snapshot of step {step} of this run, {line.get('path')}"
            yield generation, step, how
        elif line.get("event") == "restore" and line.get("source") == "snapshot":
            step = int(line.get("restored_step") or 0)
            yield generation, step, f"host {line.get('host')} went on from a snapshot of step {step} of this run"


def _reached(lines: Sequence[Line]) -> Iterable[Reached]:
    """Where one process was past a due snapshot: by its flag in steps, or if due by time, by events `snapshot_due`."""
    configs = (line.get("config") for line in lines if line.get("event") == "start")
    flag = next((config.get("snapshot_every") for config in configs if isinstance(config, dict)), 0)
    every = flag if isinstance(flag, int) else None
    for line in lines:
        generation = line.get("generation")
        if every is None:
            is_past, between = line.get("event") == "snapshot_due", 1
        else:
            is_past, between = every > 0 and _step(line) > every, every
        if is_past and generation is not None:
            yield Reached(int(generation), _step(line), between, str(line.get("host")))


def _step(line: Line) -> int:
    return int(line.get("step") or 0)
