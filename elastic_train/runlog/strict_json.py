"""JSON by its standard: without NaN and infinities, which Python writes but other languages do not read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

# dumps() would build one for each line
_encode_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def line_of(value: dict[str, Any]) -> bytes:
    """Encode an object as one line, with null for numbers that are not finite."""
    try:
        text = _encode_line(value)
    except ValueError:
        text = _encode_line(_finite(value))
    return text.encode() + b"\n"


def file_of(value: dict[str, Any], *, default: Callable[[Any], Any] | None = None) -> str:
    """Encode an object in the same way over several lines, readable for people; `default` as in `json.dumps`."""
    return json.dumps(_finite(value), indent=2, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
