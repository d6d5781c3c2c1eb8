"""The flags that a task of one's own brings along."""

from __future__ import annotations

from elastic_train.config import task_of


def own_flags(arguments: list[str]) -> type | None:
    """The dataclass of flags that the task of `--task` brings along; the task is imported for it."""
    spec = task_of(arguments)
    if spec is None:
        return None
    from elastic_train.training.tasks import (  # imports torch, which a --help without a task need not
        flags_class,
        load_task,
    )

    return flags_class(load_task(spec))
