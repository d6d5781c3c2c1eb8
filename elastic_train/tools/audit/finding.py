"""What a check says: what it looked at, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_train.tools.audit.lives import host_of

if TYPE_CHECKING:
    from elastic_train.tools.audit.history import History

WALL_TOLERANCE = 2.0
"""seconds: the moment between result.json and the last event, and a clock that is corrected"""


class Skip(Exception):
    """A check has nothing to look at; the message says what is missing."""


Found = tuple[str, Iterable[str]]
"""what was looked at, and what is wrong"""


def clock_of(history: History, member: str) -> str:
    """By which clock it wrote times: only those of one clock are compared. The nodes of a drill have one."""
    return "" if history.drill is not None else host_of(member)
