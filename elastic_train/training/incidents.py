"""A run's incidents as one text: a long run has thousands, and each snapshot would copy and pickle them one by one."""

from __future__ import annotations

import json
from typing import Any


class IncidentsText:
    """The text of a list of incidents; encodes each once, because the list only grows or is replaced as a whole."""

    def __init__(self) -> None:
        self._known: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._text = "[]"

    def of(self, incidents: list[dict[str, Any]]) -> str:
        """Return the incidents as JSON, for `incidents_of`."""
        if incidents is not self._known or len(incidents) < len(self._lines):
            self._known, self._lines, self._text = incidents, [], "[]"
        if len(incidents) > len(self._lines):
            self._lines += map(json.dumps, incidents[len(self._lines) :])
            self._text = f"[{','.join(self._lines)}]"
        return self._text


def incidents_of(saved: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents of a saved state; earlier versions have saved a list."""
    return json.loads(saved) if isinstance(saved, str) else list(saved)
