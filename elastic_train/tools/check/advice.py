"""The findings of rules, and helpers for their texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elastic_train.tools.check.facts import Gathered


class Level(StrEnum):
    BREAKS = "BREAKS"
    """it would end the job, keep it from starting, or break a promise"""
    MATTERS = "warning"
    """the job would be slow or fragile"""
    FINE = "ok"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    what: str
    why: str = ""
    """why it matters; set together with `do` if the level is BREAKS or MATTERS"""
    do: str = ""


def fine(what: str) -> list[Finding]:
    return [Finding(Level.FINE, what)]


def breaks(what: str, why: str, do: str) -> list[Finding]:
    return [Finding(Level.BREAKS, what, why, do)]


def matters(what: str, why: str, do: str) -> list[Finding]:
    return [Finding(Level.MATTERS, what, why, do)]


def skipped(what: str) -> list[Finding]:
    return [Finding(Level.SKIPPED, what)]


def by_value(values: Iterable[str]) -> dict[str, list[int]]:
    """Map each value to the ranks that have it; the values are by rank."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def errors(of_ranks: Iterable[str | None]) -> list[tuple[str, list[int]]]:
    """Return each distinct error and the ranks that have it."""
    return [(error, ranks) for error, ranks in by_value(error or "" for error in of_ranks).items() if error]


def nodes_of(gathered: Gathered, ranks: Iterable[int]) -> str:
    """The nodes of ranks, in words; of many only the first few."""
    names = list(dict.fromkeys(gathered.name(rank) for rank in ranks))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more nodes" if len(names) > 5 else "")


def listing(values: dict[str, list[int]]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
