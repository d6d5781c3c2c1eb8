"""The ends of a ledger: the last steps of an abandoned generation may lack the lines of some ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from elastic_train.runlog.reader import newest_first, worker_files

_TAIL_BYTES = 64 * 1024
"""Bytes read from the end of a file at first: enough if its process has written nothing in those generations."""


def newest_steps(ledger_dir: Path, after: int) -> dict[int, int]:
    """The newest step with a line, for each generation later than `after`."""
    found: dict[int, int] = {}
    for path in worker_files(ledger_dir):
        for generation, step in _later(path, after):
            found[generation] = max(step, found.get(generation, step))
    return found


def unfinished(found: Iterable[Mapping[int, int]], committed: int) -> list[int]:
    """The steps, up to `committed`, for which a generation may have written the lines of only some ranks.

    A rank begins a step after all ranks have written their lines of the previous one. So at most two steps can be
    incomplete: the newest visible one, and the next one, which ranks with other run directories may have begun.

    Args:
        found: the `newest_steps` of each run directory.
    """
    newest = {step for steps in found for step in steps.values()}
    return sorted(step for step in newest | {step + 1 for step in newest} if step <= committed)


def _later(path: Path, after: int) -> list[tuple[int, int]]:
    size, tail = path.stat().st_size, _TAIL_BYTES
    while True:
        lines = [(int(line["generation"]), int(line["step"])) for line in newest_first(path, tail)]
        later = [line for line in lines if line[0] > after]
        if len(later) < len(lines) or tail >= size:
            return later
        tail *= 16
