"""Lists of ranks as text: what is told of a large world names runs, not members."""

from __future__ import annotations

from collections.abc import Iterable


def to_runs(ranks: Iterable[int]) -> str:
    """Such as `0-3,7`; in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_runs(text: str) -> tuple[int, ...]:
    """Raises: ValueError."""
    found: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
