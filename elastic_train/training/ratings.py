"""Ratings of the model by evaluations: a part of the state, so that a later start can compare with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_train.world import value_of

Rated = tuple[int, float]
"""committed steps, and the model's metric there"""


class Ratings:
    """The newest and the best rating; a larger metric is better."""

    def __init__(self) -> None:
        self.newest: Rated | None = None
        self.best: Rated | None = None
        """of equal ratings the earliest"""

    def note(self, step: int, metric: float) -> bool:
        """Record the metric of a step's model; return whether it is the best so far. Ignore one that is not finite."""
        if not math.isfinite(metric):
            return False
        self.newest = (step, metric)
        is_best = self.best is None or metric > self.best[1]
        if is_best:
            self.best = self.newest
        return is_best

    def best_as_json(self) -> dict[str, Any] | None:
        """Return the best rating in the form of result.json and events."""
        return None if self.best is None else dict(zip(("step", "metric"), self.best, strict=True))

    def at(self, step: int) -> float | None:
        """Return the metric of exactly this step's model, if it is the newest, else None."""
        return self.newest[1] if self.newest is not None and self.newest[0] == step else None

    def state_dict(self) -> dict[str, Any]:
        return {name: list(value) if value else None for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ratings, also from a state that has none."""
        self.newest, self.best = (value_of(Rated | None, state.get(name)) for name in ("newest", "best"))


def latest(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state dict with the newest step, among those of one run; the first of several."""
    return max(states, key=lambda state: (value_of(Rated | None, state["newest"]) or (-1, 0.0))[0])
