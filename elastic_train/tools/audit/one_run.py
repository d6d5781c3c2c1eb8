"""Which lines of a run directory are the run's: it may have others beside them, of processes that had ended before
--fresh began the run anew on another node, or of a branch that was given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_train.runlog.reader import Line
from elastic_train.tools.audit.lives import Life


def of_one_run(lives: Sequence[Life], ledger: Sequence[Line]) -> tuple[list[Life], list[Line]]:
    """The events of each process, by one clock, and the ledger, without lines that are not the run's."""
    anew = (float(line["time"]) for life in lives for line in life.lines if line.get("is_anew"))
    began = max(anew, default=-math.inf)
    own = {life.member for life in lives if life.ended >= began}
    replaced = {life.member for life in lives} - own
    kept = [life for life in lives if life.member in own]
    kept_ledger = [line for line in ledger if str(line["writer"]) not in replaced] if replaced else list(ledger)
    if discarded := _discarded_worlds(kept):
        for life in kept:
            life.lines = [line for line in life.lines if not _is_discarded(line, discarded)]
            life.steps = [step for step in life.steps if (step.writer, step.generation) not in discarded]
        kept_ledger = [line for line in kept_ledger if not _is_discarded(line, discarded)]
    return [life for life in kept if life.lines or life.steps], kept_ledger


_Place = tuple[str, int]
"""who wrote a line, and in which generation"""


def _discarded_worlds(lives: Sequence[Life]) -> set[_Place]:
    """Of branches that have stopped where they met one with more steps: as their members have said."""
    lines = [line for life in lives for line in life.lines]
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
