"""How the lines of a ledger end: of generations that came to nothing a step's lines may not be complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from elastic_train.runlog.reader import newest_first

_TAIL_BYTES = 64 * 1024
"""of a file, at first: the end of one whose process has seen none of those generations"""


def newest_steps(ledger_dir: Path, after: int) -> dict[int, int]:
    """The newest step that has a line, of each generation later than `after`."""
    found: dict[int, int] = {}
    for path in ledger_dir.glob("*.jsonl"):
        for generation, step in _later(path, after):
            found[generation] = max(step, found.get(generation, step))
    return found


def unfinished(found: Iterable[Mapping[int, int]], committed: int) -> list[int]:
    """The steps, up to `committed`, of which a generation may have written the lines of some ranks alone.

    A rank begins a step when all have written their lines of the one before. So the lines of two steps at most are not
    complete: the newest that can be seen, and the one after it, which others may have begun elsewhere.

    Args:
        found: what each run directory's `newest_steps` are.
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
