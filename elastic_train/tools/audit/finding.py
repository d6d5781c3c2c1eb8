"""What a check returns: what it looked at, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

WALL_TOLERANCE = 2.0
"""seconds, for the time between result.json and the last event, and for small corrections of a clock"""


class Skip(Exception):
    """A check has nothing to look at; the message names what is missing."""


Found = tuple[str, Iterable[str]]
"""what was looked at, and what is wrong"""
