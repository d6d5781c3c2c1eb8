"""How good the model was when it was evaluated: a part of the state, so that a later start knows what is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_train.world import value_of

Rated = tuple[int, float]
"""committed steps, and how good the model was there"""


class Ratings:
    """The newest one and the best; more is better."""

    def __init__(self) -> None:
        self.newest: Rated | None = None
        self.best: Rated | None = None
        """the earliest of equals"""

    def note(self, step: int, metric: float) -> bool:
        """The model of this step is so good: whether it is the best so far. What is no finite number says nothing."""
        if not math.isfinite(metric):
            return False
        self.newest = (step, metric)
        is_best = self.best is None or metric > self.best[1]
        if is_best:
            self.best = self.newest
        return is_best

    def best_as_json(self) -> dict[str, Any] | None:
        """As result.json and events have it."""
        return None if self.best is None else dict(zip(("step", "metric"), self.best, strict=True))

    def at(self, step: int) -> float | None:
        """Of the model of this very step, where it is known."""
        return self.newest[1] if self.newest is not None and self.newest[0] == step else None

    def state_dict(self) -> dict[str, Any]:
        return {name: list(value) if value else None for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also of a state that has none."""
        self.newest, self.best = (value_of(Rated | None, state.get(name)) for name in ("newest", "best"))


def latest(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of state dicts of one run: that which knows the newest step, the first of several."""
    return max(states, key=lambda state: (value_of(Rated | None, state["newest"]) or (-1, 0.0))[0])
