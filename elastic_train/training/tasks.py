"""What is trained. `Task` is the one thing a user writes; `ImageClassification` is the bundled one.

# mytask.py, trained with  -m elastic_train --task mytask:Parity
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train.training.tasks import Task

class Parity(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def train_dataset(self):
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)) % 2
        return TensorDataset(bits.float(), bits.sum(1) % 2)
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from elastic_train.errors import UsageError
from elastic_train.training import datasets, models


class OptimizerDefaults(TypedDict):
    """Values for the flags of the same names that were left out."""

    optimizer: str
    """`sgd` or `adamw`."""
    lr: float
    """Peak, for the default global batch of 64."""
    momentum: float
    """For `sgd` only."""
    weight_decay: float
    schedule: str
    """`constant` or `cosine`."""


class Task:
    """A model, its data and its loss. The trainer knows nothing else about what it trains.

    Only `build_model` and `train_dataset` must be written; the rest fits the classification of `(inputs, labels)`.
    The trainer makes one instance per worker. A constructor may take one argument, annotated with a dataclass: its
    fields become flags of the command line, with their docstrings as help. All members must give the same values,
    except those of type Path, which are each node's own. Every worker must make the same data and the same model: draw
    random numbers only in `build_model`, which is called with torch seeded.
    """

    name: str = "Task"
    """The class's name, unless the class sets its own."""
    unused_flags: frozenset[str] = frozenset({"dataset", "model", "data_dir", "download"})
    """fields of Config that the task does not use"""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @property
    def title(self) -> str:
        """The task's name in messages."""
        return self.name

    def build_model(self) -> nn.Module:
        """A freshly initialised model on the CPU. Called once, with torch seeded."""
        raise UsageError(f"{type(self).__name__} must define build_model()")

    def train_dataset(self) -> Dataset[Any]:
        """A map-style data set: `__len__` and `__getitem__`, the same on every worker. Called once.

        Its `__getitem__` may draw from torch, random and numpy: they are seeded by (seed, epoch, index) before each
        call. A method `gather(indices: Tensor, epoch: int) -> batch`, if there is one, replaces it, and may draw as
        `collate` may. A method `set_epoch(epoch)` is called in each process before that reads an epoch.
        """
        raise UsageError(f"{type(self).__name__} must define train_dataset()")

    def test_dataset(self) -> Dataset[Any] | None:
        """Like `train_dataset`; None, the default, means that nothing is evaluated. Called once."""
        return None

    @cached_property
    def train_set(self) -> Dataset[Any]:
        """`train_dataset()`, made at the first use. The trainer reads this."""
        return self.train_dataset()

    @cached_property
    def test_set(self) -> Dataset[Any] | None:
        """`test_dataset()`, made at the first use. The trainer reads this."""
        return self.test_dataset()

    collate = staticmethod(default_collate)
    """`(samples: list) -> batch`, for at least one item; not called for a data set with `gather`.

    A method may override it, and may draw from generators seeded by (seed, epoch, first index). The default is torch's
    own function, by which a TensorDataset is known to need no collating.
    """

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        """The outputs that the default `loss` and `evaluate` judge. Call `model` itself: it may be DDP's wrapper."""
        outputs: Tensor = model(inputs)
        return outputs

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean over the batch's samples, a differentiable scalar. The default is the cross-entropy.

        Raises:
            UsageError: the default, if outputs or labels are not of classes, as in a regression.
        """
        inputs, labels = batch
        outputs = self.forward(model, inputs)
        are_shares = labels.is_floating_point() and labels.shape == outputs.shape  # of each class
        if outputs.ndim < 2 or outputs.shape[1] == 1 or (labels.is_floating_point() and not are_shares):
            raise UsageError(
                f"the loss of {self.name} is the default, the cross-entropy over classes, which outputs of shape "
                f"{tuple(outputs.shape)} with {labels.dtype} labels of shape {tuple(labels.shape)} are not for: give "
                "the task a loss(self, model, batch)"
            )
        return F.cross_entropy(outputs, labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return sums over the batch's samples: scalars; a name that a batch lacks counts 0. Called without gradients.

        The trainer adds them up, divides by the number of samples, and reports "correct" as the accuracy. The default
        returns "loss" and "correct", or "loss" alone if the task has a loss of its own. The first batch and its halves
        are tried first, and a value that is no sum over samples, such as a mean, causes a warning.
        """
        if type(self).loss is not Task.loss:
            return {"loss": self.loss(model, batch) * self.num_samples(batch)}
        inputs, labels = batch
        outputs = self.forward(model, inputs)
        return {
            "loss": F.cross_entropy(outputs.float(), labels, reduction="sum"),
            "correct": (outputs.argmax(dim=1) == labels).sum(),
        }

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Return the numbers to report, from the means over the test set of what `evaluate` returns: a perplexity, R2
        or F1, say, which are no means. The default returns the means. "correct" is reported as the accuracy."""
        return means

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch. The default is the length of its first tensor."""
        for tensor in tensors_in(batch):
            return len(tensor)
        raise TypeError(
            f"{type(self).__name__}: no tensor in a batch of type {type(batch).__name__}; define num_samples(batch)"
        )

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch with its tensors on `device`; handles tuples, lists, dicts and objects with a `to`."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            return value.to(device) if hasattr(value, "to") else value

        return mapped(batch, moved)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's groups, always in the same order. The default is all that require a gradient."""
        return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer of the task's own; None, the default, builds the one of `--optimizer`. `model` is on its
        device."""
        return None

    def schedule(self) -> Callable[[int, int], float] | None:
        """A learning rate schedule of the task's own: from (committed steps, steps of the whole training) to the share
        of what the optimizer's groups were given. None, the default, is `--schedule`."""
        return None

    def defaults(self, optimizer: str | None = None) -> OptimizerDefaults:
        """Return values for flags that the user left out; `optimizer` is the given one, if any."""
        if optimizer == "sgd":
            return _defaults("sgd", lr=0.01)
        return _defaults("adamw", lr=1e-3)

    def describe(self) -> dict[str, str | int | float]:
        """Return the facts that must be equal on all members, and in a snapshot that they continue."""
        test_set = self.test_set
        return {
            "task": self.name,
            "train_length": len(self.train_set),  # type: ignore[arg-type]  # Dataset declares no __len__
            "test_length": 0 if test_set is None else len(test_set),  # type: ignore[arg-type]
        }


class ImageClassification(Task):
    """A bundled data set with a model by name. `seed` is for augmentation."""

    name = "image-classification"
    unused_flags = frozenset()

    def __init__(
        self,
        dataset: str = "digits",
        model: str = "cnn",
        data_dir: str | os.PathLike[str] = "data",
        seed: int = 0,
    ) -> None:
        """Reads no data yet. Raises: UsageError for unknown names."""
        datasets.check_dataset_name(dataset)
        models.check_model_name(model)
        self.dataset = dataset
        self.model = model
        self.data_dir = Path(data_dir)
        self.seed = seed

    @cached_property
    def data(self) -> datasets.ImageData:
        """Read at the first use. Raises: DatasetMissing."""
        return datasets.load(self.dataset, self.data_dir, self.seed)

    @cached_property
    def input_form(self) -> models.InputForm:
        return models.input_form(self.model, self.data.channels, self.data.image_size)

    def build_model(self) -> nn.Module:
        data = self.data
        return models.build_model(self.model, channels=data.channels, classes=data.classes, image_size=data.image_size)

    def train_dataset(self) -> Dataset[Any]:
        return self.data.train

    def test_dataset(self) -> Dataset[Any] | None:
        return self.data.test

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Use torch's fused optimizer on the CPU: the default takes several times as long for a small model. Not for
        users' models: with momentum the fused form needs dense gradients, and each of them from the first step on."""
        [group] = super().parameter_groups(model)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
        return [{**group, "fused": True} if is_on_cpu else group]

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        outputs: Tensor = model(models.fit_images(inputs, self.input_form))
        return outputs

    def defaults(self, optimizer: str | None = None) -> OptimizerDefaults:
        if optimizer is None:
            optimizer = "adamw" if self.model.startswith(models.TRANSFORMER_LIKE) else "sgd"
        return _defaults(optimizer, models.learning_rate(self.model, optimizer))

    def describe(self) -> dict[str, str | int | float]:
        return {
            **super().describe(),
            "dataset": self.dataset,
            "model": self.model,
            "classes": self.data.classes,
            "image_size": self.data.image_size,
        }


def load_task(spec: str) -> type[Task]:
    """Return the user's task class for `MODULE:NAME`; searches the current directory too, as `python -m` does.

    An error inside the user's module is raised unchanged, with its traceback.
    Raises: UsageError: there is no such module or name, or the class is no Task.
    """
    module_name, _, class_name = spec.partition(":")
    if not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"--task {spec}: write it as MODULE:NAME, such as {_as_module(spec)}")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # Only for the named module or a package above it, not for a module that the user's code imports.
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        hint = f"; a module is meant, not a file: {_as_module(spec)}" if module_name.endswith(".py") else ""
        raise UsageError(
            f"--task {spec}: no module named {exc.name} in {os.getcwd()} or elsewhere on Python's path{hint}"
        ) from exc
    found = getattr(module, class_name, None)
    if found is None:
        tasks = [name for name, value in vars(module).items() if _is_task_class(value)]
        close = get_close_matches(class_name, tasks, n=1, cutoff=0.4) or tasks[:1]
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"--task {spec}: {module.__file__} has no {class_name}{hint}")
    if not _is_task_class(found):
        raise UsageError(f"--task {spec}: {class_name} is not a subclass of elastic_train.Task")
    task_class: type[Task] = found
    return task_class


def _as_module(spec: str) -> str:
    """Return the probable MODULE:NAME for a wrong spec such as `tasks/mine.py:Mine`."""
    file, is_file, name = spec.partition(".py")
    return f"{file.strip('./').replace('/', '.') if is_file else 'mytask'}:{name.strip(':') or 'MyTask'}"


def flags_class(task_class: type[Task]) -> type | None:
    """Return the dataclass that a task's constructor takes, whose fields are flags; None if it takes nothing.

    Raises:
        UsageError: the constructor takes something that no flag can give.
    """
    wanted = _constructor_arguments(task_class)
    return next(iter(wanted.values()), None)


def make_own_task(task_class: type[Task], own_flags: Any) -> Task:
    """Make the user's task with the values of its flags. Raises: as `flags_class`, and as the task's constructor."""
    return task_class(**dict.fromkeys(_constructor_arguments(task_class), own_flags))


def _constructor_arguments(task_class: type[Task]) -> dict[str, type]:
    signature = inspect.signature(task_class)
    hints = get_type_hints(task_class.__init__)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {
        name: hints.get(name)
        for name, parameter in signature.parameters.items()
        if parameter.kind not in variadic
        and (parameter.default is inspect.Parameter.empty or dataclasses.is_dataclass(hints.get(name)))
    }
    if len(wanted) > 1 or not all(
        isinstance(hint, type) and dataclasses.is_dataclass(hint) for hint in wanted.values()
    ):
        arguments = ", ".join(signature.parameters)
        raise UsageError(
            f"--task: {task_class.__name__}({arguments}) cannot be made from flags: its constructor may take one "
            "argument, annotated with a dataclass"
        )
    return {name: hint for name, hint in wanted.items() if hint is not None}


def _is_task_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def _defaults(optimizer: str, lr: float) -> OptimizerDefaults:
    weight_decay = 5e-4 if optimizer == "sgd" else 1e-2
    return {"optimizer": optimizer, "lr": lr, "momentum": 0.9, "weight_decay": weight_decay, "schedule": "cosine"}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, or of an optimizer's state, within any dicts, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(entry)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return the batch with `function` applied to every element that is no dict, tuple or list."""
    if isinstance(batch, dict):
        return {key: mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, function) for value in batch)
    return function(batch)
