"""What a check says: what it looked at, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

WALL_TOLERANCE = 2.0
"""seconds: the moment between result.json and the last event, and a clock that is corrected by little"""


class Skip(Exception):
    """A check has nothing to look at; the message says what is missing."""


Found = tuple[str, Iterable[str]]
"""what was looked at, and what is wrong"""
