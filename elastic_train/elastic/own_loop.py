"""A user's own training loop, made elastic: `run` calls a training function anew for every world.

    def train(training: elastic_train.Training) -> None:
        ddp = training.parallel()
        for epoch in training.epochs():
            for inputs, labels in training.batches():
                ...
                training.commit(loss)

    elastic_train.run(train, model, optimizer, dataset)

Everything around the loop is as in `-m elastic_train`: membership, re-forming, snapshots, events, exits.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from elastic_train.config import BUNDLED, PLAIN_TYPES, SHARED, Config, flag, names_of, own_values, parse
from elastic_train.elastic.exits import UNSAVED
from elastic_train.elastic.run import run_worker
from elastic_train.elastic.trainer import Program, TrainingFunction
from elastic_train.elastic.worker import Parts, Worker, build
from elastic_train.errors import ElasticTrainError, UsageError, report
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal, die_with_agent
from elastic_train.storage.run_directory import default_run_dir
from elastic_train.system import require_system_for_training
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.epoch_dataset import length_of
from elastic_train.training.state import Stateful, TrainState
from elastic_train.training.tasks import Task
from elastic_train.wording import kind_of

NOT_FOR_OWN_LOOPS = names_of(*BUNDLED)


class OwnTask(Task):
    """What the code around the loop needs to know of a user's own training."""

    unused_flags = frozenset(NOT_FOR_OWN_LOOPS)

    def __init__(self, name: str, model: nn.Module, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.name = name
        self._model = model
        self._dataset = dataset
        self.collate = collate

    @property
    def title(self) -> str:
        return f"by {self.name}()"

    def build_model(self) -> nn.Module:
        return self._model

    def train_dataset(self) -> Dataset[Any]:
        return self._dataset


F = TypeVar("F")


@overload
def parse_flags() -> Config: ...
@overload
def parse_flags(own_flags: type[F]) -> tuple[Config, F]: ...
def parse_flags(own_flags: type[F] | None = None) -> Config | tuple[Config, F]:
    """Return the flags of `-m elastic_train` that concern a user's own run, from this script's command line. With
    `own_flags`, a dataclass whose fields become flags too, return the pair of both.

    Raises:
        SystemExit: a bad flag, after one line about it (2), or `--help`, which lists all (0).
    """
    try:
        if own_flags is not None and not (isinstance(own_flags, type) and is_dataclass(own_flags)):
            raise UsageError(
                f"parse_flags takes a dataclass, whose fields become flags, and got a {type(own_flags).__name__}; the "
                "command line it reads itself"
            )
        _check_arguments(sys.argv[1:], own_flags)
        config = parse(sys.argv[1:], own_flags, scopes=SHARED)
    except UsageError as error:
        _exit(error, is_debug=False)
    return config if own_flags is None else (config, config.own_flags)


def run(
    train: TrainingFunction,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    config: Config | None = None,
    *,
    collate: Callable[[list[Any]], Any] = default_collate,
    extras: Mapping[str, Stateful] | None = None,
) -> TrainState:
    """Run a training function to the end of training, through as many worlds as it takes. Every worker calls this, with
    equal arguments, from the main thread, once per process and run directory. Blocks until training is over.

    Args:
        train: called with a `Training` in every world; returns at the end of training, or earlier to end it there.
        model: not wrapped in DDP, on its device; every worker starts with rank 0's weights, or a snapshot.
        optimizer: of the model's parameters.
        dataset: map-style, the same on every worker. Its `__getitem__` may draw from torch, random and numpy, which
            are seeded by (seed, epoch, index). If it restores the state of Python's or numpy's generator, or only reads
            that state, it has to seed the generator itself.
        config: the flags of `-m elastic_train`, see `parse_flags`; for example `Config(epochs=3, ledger=True)`.
        collate: makes a batch of a list of items.
        extras: all else that belongs to the state (schedulers, a GradScaler, averaged weights), by name.

    Returns:
        The state at the end, equal on every rank. It is returned with a warning if it could not be saved.

    Raises:
        SystemExit: training is not finished: a signal has stopped it and the state is saved (143, 130, 129), or it
            cannot go on after an error, reported in one line (1, 2). Or other workers have finished it (0): this worker
            was a spare, came too late or was left out, and lacks their state.
        Errors of the training function, in the worker where they arose; other workers go on without it, or stop with
            SystemExit(1). Let it end the process: torchrun takes a worker that exits 0 for finished.
    """
    require_system_for_training(os.environ)
    config = Config() if config is None else config
    stop = StopSignal()
    stop.install()
    if "RANK" in os.environ:
        die_with_agent()
    try:
        with ExitStack() as ends:
            worker = _build_worker(train, model, optimizer, dataset, config, collate, extras, stop, ends)
            code = run_worker(worker, Program(train))
    except ElasticTrainError as error:
        _exit(error, is_debug=isinstance(config, Config) and config.debug)
    except BaseException:
        stop.uninstall()
        raise
    if code not in (0, UNSAVED) or not worker.state.is_finished:
        sys.exit(code)  # keeps the signal handlers: another signal must not change the exit code
    stop.uninstall()
    _trained.add(worker.directory.path.resolve())
    return worker.state


def _build_worker(
    train: TrainingFunction,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    config: Config,
    collate: Callable[[list[Any]], Any],
    extras: Mapping[str, Stateful] | None,
    stop: StopSignal,
    ends: ExitStack,
) -> Worker:
    """Build the worker from the arguments of `run`, as `build`; `ends` gives its optimizers back. Raises:
    ElasticTrainError."""
    _check_kinds(train, model, optimizer, config, collate)
    _check_config(config)
    config.check()
    _check_parts(model, extras or {})
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    task = OwnTask(_name_of(train), model, dataset, collate)
    state = TrainState(
        model,
        optimizer,
        torch.amp.GradScaler(device.type) if config.precision == "fp16" else None,
        length=length_of(dataset),
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
        micro_batch_size=config.micro_batch_size,
        extras=_with_average(extras or {}, model, config.ema_decay),
    )
    ends.callback(state.kept.updates.leave_to_owner)  # the caller of run() may live on
    state.plan |= {name: value for name, value in own_values(config).items() if isinstance(value, PLAIN_TYPES)}
    launch = Launch.from_environment(os.environ, config.store_endpoint)
    _require_untrained(Path(config.run_dir or default_run_dir(launch.run_id)), config)
    return build(config, launch, stop, Parts(task, state, device))


_trained: set[Path] = set()
"""run directories in which this process has trained to the end"""


def _require_untrained(run_dir: Path, config: Config) -> None:
    """Raise UsageError where this process has trained to the end in `run_dir`, and would only get that state again."""
    if run_dir.resolve() in _trained and not config.fresh:
        raise UsageError(
            f"run() has trained to its end in {run_dir} in this process, and would give those weights back: give each "
            "training its own --run-dir, or --fresh"
        )


def _name_of(train: TrainingFunction) -> str:
    return getattr(train, "__name__", type(train).__name__)


def _with_average(extras: Mapping[str, Stateful], model: nn.Module, decay: float | None) -> dict[str, Stateful]:
    """Return `extras` with the averaged weights. Raises: UsageError where their name is taken."""
    if decay is None:
        return dict(extras)
    if "ema" in extras:
        raise UsageError(f"extras['ema'] is the name of the averaged weights of --ema-decay {decay}: leave one out")
    return {**extras, "ema": AveragedWeights(model, decay)}


def _check_arguments(arguments: list[str], own_flags: type | None) -> None:
    """Raise UsageError for a flag of the bundled loop, which users often try."""
    own = set() if own_flags is None else {entry.name for entry in fields(own_flags)}
    given = {argument.partition("=")[0] for argument in arguments}
    for name in sorted(NOT_FOR_OWN_LOOPS):
        if name not in own and flag(name) in given:
            _refuse(name)


def _check_kinds(train: Any, model: Any, optimizer: Any, config: Any, collate: Any) -> None:
    """Raise UsageError for an argument of a wrong kind, which may be in the place of another one."""
    for name, value, is_right, wanted in (
        ("train", train, callable(train), "give a function that takes a Training"),
        ("model", model, isinstance(model, nn.Module), "give an nn.Module"),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "give one of torch's, made with "
         "model.parameters()"),
        ("config", config, isinstance(config, Config), "give what parse_flags() gives (with a dataclass the first of "
         "the two), or a Config, such as Config(epochs=3)"),
        ("collate", collate, callable(collate), "give a function from a list of samples to a batch"),
    ):  # fmt: skip
        if not is_right:
            raise UsageError(
                f"run() was given {kind_of(value)} as {name}: {wanted}; the order is run(train, model, optimizer, "
                "dataset, config)"
            )
    try:
        signature = inspect.signature(train)
    except ValueError:  # raised for some callables that are not written in Python
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"{_name_of(train)}{signature} cannot be called with a Training alone ({error}): it must take one argument"
        ) from error


def _check_config(config: Config) -> None:
    for entry in fields(Config):
        if entry.name in NOT_FOR_OWN_LOOPS and getattr(config, entry.name) != entry.default:
            _refuse(entry.name)


def _check_parts(model: nn.Module, extras: Mapping[str, Any]) -> None:
    """Raise UsageError for parts that would only fail later, or be saved under other names."""
    if dist.is_initialized():
        raise UsageError(
            "there is a process group already: leave init_process_group() out, for run() makes one for each world, and "
            "training.world has rank and world_size"
        )
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}: give model.module, and train what training.parallel() "
            "makes of it"
        )
    if not isinstance(extras, Mapping):
        raise UsageError(f"extras is {kind_of(extras)}: give a dict, such as extras={{'scheduler': scheduler}}")
    for name, extra in extras.items():
        if not callable(getattr(extra, "state_dict", None)) or not callable(getattr(extra, "load_state_dict", None)):
            raise UsageError(
                f"extras[{name!r}] is a {type(extra).__name__}: it must have state_dict() and load_state_dict(), as a "
                "scheduler has"
            )


def _refuse(name: str) -> NoReturn:
    raise UsageError(f"{flag(name)} is for the bundled loop: a training function of your own decides that itself")


def _exit(error: ElasticTrainError, *, is_debug: bool) -> NoReturn:
    report(error, rank=os.environ.get("RANK", "0"), is_debug=is_debug)
    sys.exit(error.exit_code)
