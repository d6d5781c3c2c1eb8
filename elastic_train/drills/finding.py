"""What a check says: what it looked at, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

WALL_TOLERANCE = 2.0
"""seconds: two machines' clocks, and the moment between result.json and the last event"""


class Skip(Exception):
    """A check has nothing to look at; the message says what is missing."""


Found = tuple[str, Iterable[str]]
"""what was looked at, and what is wrong"""


def counted(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
