"""Which lines of a run directory are the run's: it may have others beside them, of a run that it has replaced, or of a
branch that was given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_train.runlog.reader import Line


def of_one_run(files: Sequence[Sequence[Line]], ledger: Sequence[Line]) -> tuple[list[list[Line]], list[Line]]:
    """The events of each process, and the ledger, without lines that are not the run's."""
    first = _first_of_newest_run(files)
    gone = {str(lines[0]["writer"]) for lines in files if _newest_generation(lines) < first}
    kept = [[line for line in lines if not _is_replaced(line, first, gone)] for lines in files]
    discarded = _discarded_worlds(kept)
    return (
        [[line for line in lines if not _is_discarded(line, discarded)] for lines in kept],
        [line for line in ledger if not _is_replaced(line, first, gone) and not _is_discarded(line, discarded)],
    )


def _first_of_newest_run(files: Sequence[Sequence[Line]]) -> int:
    """The generation with which --fresh has begun the run anew: a node that was not told so has the files of the run
    before it in the same directory."""
    return max((begun for lines in files if (begun := _begun_anew(lines)) is not None), default=0)


def _begun_anew(lines: Sequence[Line]) -> int | None:
    """Of one process: the generation in which it began from scratch, told to by --fresh."""
    is_fresh = any(line["event"] == "start" and (line.get("config") or {}).get("fresh") is True for line in lines)
    scratch = [int(line["generation"]) for line in lines if line["event"] == "restore" and line["source"] == "scratch"]
    return scratch[0] if is_fresh and scratch else None


def _newest_generation(lines: Sequence[Line]) -> float:
    """That of a process which came into no world may be any."""
    return max((int(line["generation"]) for line in lines if line.get("generation") is not None), default=math.inf)


def _is_replaced(line: Line, first: int, gone: set[str]) -> bool:
    """Whether it is of a run that was replaced; `gone` are the processes that were in that one alone."""
    return str(line["writer"]) in gone or (line.get("generation") is not None and int(line["generation"]) < first)


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
