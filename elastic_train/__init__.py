"""elastic_train: a PyTorch trainer that keeps training while machines come and go.

Only the names below are public; all others may change. They are imported at their first use, because agents and the
command line load this package and must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_train.version import VERSION

if TYPE_CHECKING:
    from elastic_train.config import Config
    from elastic_train.elastic.own_loop import parse_flags, run
    from elastic_train.elastic.session import Training
    from elastic_train.errors import ElasticTrainError, SnapshotError, TrainingDiverged, UsageError
    from elastic_train.storage.snapshot_store import SnapshotStore
    from elastic_train.training.sampler import MicroBatch, StepSampler
    from elastic_train.training.state import Stateful, TrainState
    from elastic_train.training.tasks import Task
    from elastic_train.world import World

__version__ = VERSION

_HOMES = {
    "Config": "config",
    "ElasticTrainError": "errors",
    "MicroBatch": "training.sampler",
    "SnapshotError": "errors",
    "SnapshotStore": "storage.snapshot_store",
    "Stateful": "training.state",
    "StepSampler": "training.sampler",
    "Task": "training.tasks",
    "TrainState": "training.state",
    "Training": "elastic.session",
    "TrainingDiverged": "errors",
    "UsageError": "errors",
    "World": "world",
    "parse_flags": "elastic.own_loop",
    "run": "elastic.own_loop",
}

__all__ = [
    "Config",
    "ElasticTrainError",
    "MicroBatch",
    "SnapshotError",
    "SnapshotStore",
    "Stateful",
    "StepSampler",
    "Task",
    "TrainState",
    "Training",
    "TrainingDiverged",
    "UsageError",
    "World",
    "parse_flags",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
