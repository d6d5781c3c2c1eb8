"""Which lines of a run directory are the run's: it may have others beside them, of processes that had ended before
--fresh began the run anew on another node, or of a branch that was given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_train.runlog.reader import Line


def of_one_run(files: Sequence[Sequence[Line]], ledger: Sequence[Line]) -> tuple[list[list[Line]], list[Line]]:
    """The events of each process, by one clock, and the ledger, without lines that are not the run's."""
    began = max((float(line["time"]) for lines in files for line in lines if line.get("is_anew")), default=-math.inf)
    replaced = {str(lines[0]["writer"]) for lines in files if lines and float(lines[-1]["time"]) < began}
    kept = [list(lines) for lines in files if lines and str(lines[0]["writer"]) not in replaced]
    kept_ledger = [line for line in ledger if str(line["writer"]) not in replaced] if replaced else list(ledger)
    if discarded := _discarded_worlds(kept):
        kept = [[line for line in lines if not _is_discarded(line, discarded)] for lines in kept]
        kept_ledger = [line for line in kept_ledger if not _is_discarded(line, discarded)]
    return kept, kept_ledger


_Place = tuple[str, int]
"""who wrote a line, and in which generation"""


def _discarded_worlds(files: Sequence[Sequence[Line]]) -> set[_Place]:
    """Of branches that have stopped where they met one with more steps: as their members have said."""
    lines = [line for file in files for line in file]
    said = [line["discarded"] for line in lines if line["event"] == "warning" and line.get("discarded")]
    return {
        (str(line["writer"]), int(line["generation"]))
        for line in lines
        if line["event"] == "world"
        and any(line.get("branch") == one["branch"] and int(line["step"]) >= int(one["first"]) - 1 for one in said)
    }


def _is_discarded(line: Line, worlds: set[_Place]) -> bool:
    if line.get("event") in ("start", "warning", "signal", "done") or line.get("generation") is None:
        return False
    return (str(line["writer"]), int(line["generation"])) in worlds
