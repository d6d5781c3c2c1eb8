"""The flags of a user's own task."""

from __future__ import annotations

from elastic_train.config import value_of


def own_flags(arguments: list[str]) -> type | None:
    """Import the task of `--task`, and return the dataclass of its flags; None if there is none."""
    spec = value_of(arguments, "--task")  # before all other flags, because the task may define some
    if spec is None:
        return None
    from elastic_train.training.tasks import (  # imports torch, which --help without a task does not need
        flags_class,
        load_task,
    )

    return flags_class(load_task(spec))
