"""Numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


def count(number: int | None, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(given: Iterable[str], known: Collection[str]) -> str:
    """`did you mean --epochs? `, for flags that are not known; "" where nothing is like one of them."""
    found: list[str] = []
    for flag in given:
        longer = sorted(name for name in known if name.endswith(flag[1:]) and flag.startswith("--"))
        found += longer or get_close_matches(flag, known, n=1)
    return f"did you mean {' or '.join(found)}? " if found else ""


def duration(seconds: float) -> str:
    """Two units at most; a time that lies ahead, by a clock of another machine, is none."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def human_bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"
