"""What a manifest's fields may hold; it may come from anybody."""

from __future__ import annotations

import math
from typing import Any

LAST_SECOND = 2.5e11
"""of the year 9892: what is later cannot be shown as a date"""


def whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def moment(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < LAST_SECOND:
        raise ValueError(f"{value!r} is no time")
    return seconds


def finite_number(value: Any) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return None if value is None else float(value)


def plain_file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in the snapshot")
    return name
