"""How many steps a training has: arithmetic without numpy, which `status` has no time to import."""

from __future__ import annotations

from typing import overload


def steps_per_epoch(length: int, global_batch_size: int) -> int:
    """Return the steps of a whole epoch; the last one is smaller unless the global batch divides the length."""
    return -(-length // global_batch_size)


@overload
def planned_steps(length: int, batch: int, epochs: int, max_steps: int | None) -> int: ...
@overload
def planned_steps(length: int | None, batch: int | None, epochs: int | None, max_steps: int | None) -> int | None: ...
def planned_steps(length: int | None, batch: int | None, epochs: int | None, max_steps: int | None) -> int | None:
    """Return the number of committed steps after which training is finished; `max_steps` if another is unknown."""
    if length is None or not batch or epochs is None:
        return max_steps
    steps = epochs * steps_per_epoch(length, batch)
    return steps if max_steps is None else min(steps, max_steps)
