"""The command line of a worker: typed, documented, checked once and before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from elastic_train.errors import UsageError
from elastic_train.preemption import notices_flag
from elastic_train.snapshot_interval import interval_of, steps_or_text
from elastic_train.wording import empty_values, flags_in, nearest_multiples, no_value, of_torchrun, unrecognized

DOWNLOADABLE = ("mnist", "fashion-mnist", "cifar10")
IS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash is enough: `Path` reduces the two of a URL to one
_FORK_OR_SPAWN = {"custom_args": {"type": str, "nargs": "?", "choices": ("fork", "spawn")}}
PLAIN_TYPES = (str, int, float, bool, type(None), list)


def switch() -> bool:
    """A boolean field, off by default. Its flag takes no value and has no `--no...` form."""
    off: bool = dataclasses.field(default=False, metadata={"custom_args": {"action": "store_true"}})
    return off


def at_least(least: float, default: Any) -> Any:
    """A field for a number of at least `least`."""
    return dataclasses.field(default=default, metadata={"least": least})


def positive(default: float | None) -> Any:
    """A field for a finite number above 0."""
    return dataclasses.field(default=default, metadata={"is_positive": True})


@dataclass(frozen=True)
class TaskFlags:
    """What the bundled trainer trains, and how its model is made: the same on every node."""

    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic"] = "digits"
    """what to train on; digits comes with the installation"""
    model: str = "cnn"
    """cnn, mlp, or any torchvision classification model, e.g. resnet18"""
    task: str | None = None
    """MODULE:NAME of your own Task, instead of --dataset and --model"""
    optimizer: Literal["auto", "sgd", "adamw"] = "auto"
    """auto: the optimizer that suits the task"""
    lr: float | None = positive(None)
    """peak learning rate; default: what suits the task"""
    momentum: float | None = at_least(0, None)
    """momentum of sgd; default: what suits the task"""
    weight_decay: float | None = at_least(0, None)
    """weight decay of the optimizer; default: what suits the task"""
    schedule: Literal["auto", "constant", "cosine"] = "auto"
    """learning rate over the committed steps; auto: what suits the task"""
    channels_last: bool = switch()
    """keep convolution weights in channels-last memory format, which tensor cores prefer"""
    compile: bool = switch()
    """compile the model with torch.compile; the first step of each process takes longer"""
    parallel: Literal["ddp", "dp"] = "ddp"
    """dp: one process drives all GPUs by nn.DataParallel, without torchrun; slower than ddp"""
    eval_every: int = at_least(1, 5)
    """epochs between evaluations on the test set; the last one is always at the end"""

    def check(self) -> None:
        """Raises: UsageError: names the flag, its value and what would work."""
        if self.optimizer == "adamw" and self.momentum is not None:
            raise UsageError(f"--momentum {self.momentum}: adamw has none; it belongs to --optimizer sgd")
        if self.task is not None and ":" not in self.task:
            raise UsageError(f"--task {self.task}: write MODULE:NAME, e.g. my_package.my_task:MyTask")


@dataclass(frozen=True)
class StepFlags:
    """How a step is computed from a loss: the same on every node."""

    reduction: Literal["fast", "ordered"] = "fast"
    """fast: DDP's own all-reduce; ordered: bit-equal weights for every world size"""
    virtual_ranks: int = at_least(1, 8)
    """fixed shards of each step in ordered mode; must divide --global-batch-size"""
    strict: bool = switch()
    """in ordered mode, treat an operator without a deterministic form as an error instead of a warning"""
    micro_batch_size: int | None = at_least(1, None)
    """most samples per forward pass on a rank; default: the samples of a rank in the first world"""
    clip_grad_norm: float | None = positive(None)
    """largest gradient norm of a step, over the whole batch; default: no limit"""
    ema_decay: float | None = None
    """also keep averaged weights, in which each step has weight 1 - EMA_DECAY, and evaluate these"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 by autocast; fp16 with a GradScaler that is part of the state"""
    find_unused_parameters: bool = switch()
    """DDP's option: some parameters get no gradient in some steps"""
    static_graph: bool = switch()
    """DDP's option: every step uses the same parameters in the same way; a rank's share is one pass, of any size"""

    def check(self) -> None:
        """Raises: UsageError: names the flag, its value and what would work."""
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise UsageError(f"--ema-decay {self.ema_decay}: must be between 0 and 1, such as 0.999")
        if self.strict and self.reduction != "ordered":
            raise UsageError("--strict belongs to --reduction ordered; fast promises no bits")


@dataclass(frozen=True)
class PlaceFlags:
    """Where a node has what the bundled trainer needs; nodes may differ."""

    data_dir: Path = Path("data")
    """folder of torchvision's data sets; for imagefolder: the folder that contains train/ and test/"""
    download: bool = switch()
    """let torchvision download the data set into --data-dir, once per node"""
    init_from: Path | None = None
    """start a new run from these weights: a snapshot, a run, a file of torch.save or safetensors, or a DCP folder"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if available, else the CPU"""
    spawn: int | None = at_least(1, None)
    """start this many workers on this machine, without torchrun"""


@dataclass(frozen=True)
class JobFlags:
    """A job, whatever it trains: the same on every node."""

    epochs: int = at_least(1, 30)
    """passes over the training set"""
    max_steps: int | None = at_least(1, None)
    """end after this many optimizer steps, if --epochs does not end training earlier"""
    global_batch_size: int = at_least(1, 64)
    """samples per optimizer step over all ranks; the same for every world size"""
    seed: int = at_least(0, 0)
    """seeds the weights, the order of samples, augmentation and dropout"""
    snapshot_every: int | str = dataclasses.field(default=100, metadata={"custom_args": {"type": steps_or_text}})
    """steps between snapshots, or a time such as 30s, or auto; 0: only at a stop and at the end"""
    keep_snapshots: int = at_least(1, 3)
    """how many of the newest snapshots to keep"""
    keep_every: int | None = at_least(1, None)
    """keep for good the first snapshot of every so many steps; default: none"""
    keep_best: int = at_least(0, 0)
    """how many best snapshots to keep, by test accuracy (else loss) or training.keep(); each new best writes one"""
    peer_timeout: float = positive(10.0)
    """seconds of silence after which a peer is taken for dead (hang, partition)"""
    stall_timeout: float | None = positive(None)
    """seconds until a live member that does not enter the collective in which all others wait is expelled, but at least
    1,800 s before its first commit; default: the larger of 300 s and 20 median steps"""
    on_split: Literal["wait", "go-on"] = "wait"
    """if members are silent but perhaps alive, and may train on: wait for contact, or go on as a branch"""
    quarantine: Literal["off", "on"] = "off"
    """on: a host that died without notice 3 times within 10 min has to wait before it is admitted again"""

    def check(self) -> None:
        """Raises: UsageError: names the flag, its value and what would work."""
        if self.seed >= 2**63:
            raise UsageError(f"--seed {self.seed}: must be below 2**63")
        interval_of(self.snapshot_every)


@dataclass(frozen=True)
class NodeFlags:
    """What a node brings along, whatever it trains; nodes may differ."""

    run_dir: Path | None = None
    """folder for all files of the run; continues a run that is already there; default: runs/<run id>"""
    fresh: bool = switch()
    """start a new run, and move an existing run in --run-dir aside"""
    snapshot_dir: str | None = None
    """folder or URL for snapshots; a URL, such as s3://bucket/run-1, must be the same on all nodes; default:
    <run-dir>/snapshots"""
    snapshot_key: Path | None = None
    """file with a key that signs snapshots; snapshots without its signature are not restored"""
    num_workers: int = at_least(0, 0)
    """DataLoader processes per rank, which live as long as a world, not an epoch; 0: load in the training process,
    right for data in memory"""
    prefetch_factor: int | None = at_least(1, None)
    """batches that each DataLoader process reads ahead; default: torch's, 2"""
    multiprocessing_context: Literal["fork", "spawn"] | None = dataclasses.field(default=None, metadata=_FORK_OR_SPAWN)
    """how DataLoader processes start: spawn if the data set must not be forked; default: Python's"""
    wait_timeout: float = positive(600.0)
    """seconds to wait for --min-nodes, or for silent nodes that are needed to go on, before giving up"""
    formation_timeout: float = positive(300.0)
    """seconds to wait for all members when a world forms, e.g. for imports; transfers of a state have 1,800 s"""
    min_nodes: int | None = at_least(1, None)
    """with fewer nodes, wait for others instead of training on; default: the minimum of --nnodes, which a job always
    needs to begin"""
    notices: str = "off"
    """source of notices that this node goes away: off, auto, aws, gcp, azure, kubernetes, slurm, file:PATH or a URL"""
    store_endpoint: str | None = None
    """HOST:PORT of the rendezvous, if it cannot be found from torchrun's own flags"""
    local_rank: int | None = None
    """set by torch.distributed.launch and ignored: LOCAL_RANK in the environment counts"""
    node_price: float | None = positive(None)
    """price of a node per hour; result.json, status and report then show the cost of a million kept samples"""
    ledger: bool = switch()
    """also record the samples of each step, under <run-dir>/ledger"""
    metrics_port: int | None = None
    """serve metrics for Prometheus at this port of every node; needs the extra `metrics`; default: none"""
    metrics_host: str = "127.0.0.1"
    """address on which --metrics-port listens; 0.0.0.0: all interfaces, without password or encryption"""
    no_progress: bool = switch()
    """plain log lines instead of a progress bar (always so when stderr is no terminal)"""
    debug: bool = switch()
    """show tracebacks of expected errors, and verbose logs"""

    def check(self) -> None:
        """Raises: UsageError: names the flag, its value and what would work."""
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65535:
            raise UsageError(f"--metrics-port {self.metrics_port}: must be a port, 1 to 65535")
        notices_flag(self.notices)
        for name in ("prefetch_factor", "multiprocessing_context"):
            if self.num_workers == 0 and (value := getattr(self, name)) is not None:
                raise UsageError(f"{flag(name)} {value} is for DataLoader processes: give --num-workers, 1 at least")
        if self.run_dir is not None and IS_URL.match(str(self.run_dir)):
            raise UsageError(f"--run-dir {self.run_dir}: no URL works here, only a folder; --snapshot-dir takes one")


@dataclass(frozen=True)
class Config(NodeFlags, JobFlags, PlaceFlags, StepFlags, TaskFlags):
    """Train a model with PyTorch DDP; stop, resume and change the number of machines at any step.

    The values of all flags in one class. Each base class is a scope: one group in `--help` with its own `check`.
    """

    own_flags: Any = None
    """the values of the task's own flags, a dataclass; None if the task has no flags"""

    def check(self) -> None:
        """Check every value, and every pair of values that depend on each other.

        Raises: UsageError: names the flag, its value and what would work."""
        for entry in dataclasses.fields(self):
            if {"least", "is_positive"} & entry.metadata.keys():
                check_number(flag(entry.name), getattr(self, entry.name), least=entry.metadata.get("least"))
            if str(value := getattr(self, entry.name)).startswith("~"):
                raise UsageError(f"{flag(entry.name)} {value}: the shell has left the ~ as it is: write $HOME for it")
        for scope in (TaskFlags, StepFlags, JobFlags, NodeFlags):
            scope.check(self)
        if self.reduction == "ordered" and self.global_batch_size % self.virtual_ranks:
            near = nearest_multiples(self.global_batch_size, self.virtual_ranks)
            raise UsageError(
                f"--virtual-ranks {self.virtual_ranks} does not divide --global-batch-size "
                f"{self.global_batch_size}: take a batch of {' or '.join(map(str, near))}"
            )
        if self.on_split == "go-on" and self.snapshot_dir is not None and IS_URL.match(str(self.snapshot_dir)):
            raise UsageError(
                "--on-split go-on: both sides of a split would write to one --snapshot-dir, which has one owner; give "
                "a folder there"
            )
        if self.micro_batch_size is not None and self.micro_batch_size > self.global_batch_size:
            raise UsageError(
                f"--micro-batch-size {self.micro_batch_size} is larger than --global-batch-size "
                f"{self.global_batch_size}: a rank never has more than the global batch"
            )
        for name in ("find_unused_parameters", "static_graph"):
            if getattr(self, name) and (self.reduction == "ordered" or self.parallel == "dp"):
                raise UsageError(f"{flag(name)} is for DDP: --reduction fast and --parallel ddp")
        if self.parallel == "dp" and (self.spawn is not None or self.reduction == "ordered"):
            raise UsageError("--parallel dp is one process that reduces alone: without --spawn and --reduction ordered")
        if self.download and self.task is None and self.dataset not in DOWNLOADABLE:
            raise UsageError(f"--download: {self.dataset} is not downloaded; that is for {', '.join(DOWNLOADABLE)}")


BUNDLED = (TaskFlags, PlaceFlags)
"""Scopes of the bundled trainer only. A user's own training function decides these things in code."""
SHARED = (JobFlags, StepFlags, NodeFlags)
"""Scopes of the bundled trainer and of a user's own training function."""


def names_of(*scopes: type) -> frozenset[str]:
    """The names of all fields of these scopes."""
    return frozenset(entry.name for scope in scopes for entry in dataclasses.fields(scope))


def check_number(name: str, value: float | None, *, least: float | None = None) -> None:
    """Raises: UsageError: the value of flag `name` is not finite, below `least`, or without `least` not above 0."""
    if value is None:
        return
    if least is None and not 0 < value < math.inf:
        raise UsageError(f"{name} {value}: must be a positive number")
    if least is not None and not least <= value < math.inf:
        wanted = "a finite number" if value == math.inf else f"at least {least}"
        raise UsageError(f"{name} {value}: must be {wanted}")


def parse(
    arguments: Sequence[str], own_flags: type | None = None, *, scopes: Sequence[type] = (*BUNDLED, *SHARED)
) -> Config:
    """Parse a command line and return the checked configuration.

    Only fields of `scopes` are flags; a task may use the names of other fields for its own. The fields of the dataclass
    `own_flags` become flags too.

    Raises:
        UsageError: an unknown flag or a bad value. `--help` prints and raises SystemExit(0).
    """
    # Imported here, because only a process that reads a command line needs these two.
    from simple_parsing import ArgumentParser
    from simple_parsing.wrappers.field_wrapper import DashVariant

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (--help lists all flags)")

        def add_argument_group(self, title: Any = None, *rest: Any, **options: Any) -> Any:
            # "TaskFlags ['task']" is simple_parsing's title; `--help` shows "task flags".
            title = title and re.sub(r".+ \['(\w+?)(_flags)?'\]", r"\1 flags", title)
            return super().add_argument_group(title, *rest, **options)

    parser = Parser(prog="elastic_train", allow_abbrev=False, add_option_string_dash_variants=DashVariant.DASH)
    for scope in scopes:
        parser.add_arguments(scope, dest=_dest(scope))
    if own_flags is not None:
        check_own_flags(own_flags, names_of(*scopes))
        parser.add_arguments(own_flags, dest="own_flags")
    if empty := [name for name in empty_values(arguments) if name]:
        raise UsageError(no_value(empty[0]))
    parsed, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        hint = of_torchrun(unknown)
        known = [] if hint else [name for action in parser._actions for name in action.option_strings]
        raise UsageError(unrecognized(unknown, known, f"{hint}--help lists all flags"))
    given = {name: value for scope in scopes for name, value in vars(getattr(parsed, _dest(scope))).items()}
    unset = {flag(name) for name, value in given.items() if value is None}
    if alone := [name for name in flags_in(arguments) if name in unset]:  # `--task` without a value
        raise UsageError(no_value(alone[0]))
    config = Config(**given, own_flags=getattr(parsed, "own_flags", None))
    config.check()
    if TaskFlags in scopes:
        check_task_stands_alone(arguments)
    return config


def _dest(scope: type) -> str:
    """The name of the scope's group in `--help`, such as `step`."""
    return scope.__name__.removesuffix("Flags").lower()


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value of flag `name` on a command line whose other flags are unknown; None if absent or without a value."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(name, dest="value")
    try:
        value: str | None = finder.parse_known_args(list(arguments))[0].value
    except argparse.ArgumentError:  # parse() reports it later, with a better message
        return None
    return value


def check_task_stands_alone(arguments: Sequence[str]) -> None:
    """Raises: UsageError: `--task` is given together with `--dataset` or `--model`. The value of the latter does not
    matter: a person that types a flag, even with its default, expects an effect."""
    task = value_of(arguments, "--task")
    if task is None:
        return
    for name in (argument.partition("=")[0] for argument in arguments):
        if name in ("--dataset", "--model"):
            raise UsageError(
                f"{name} goes without --task: {task} brings its own data and model; leave one out (a dataclass in the "
                "task's constructor gives it flags of its own)"
            )


def check_own_flags(own_flags: type, ours: Collection[str]) -> None:
    """Raises: UsageError: a field of `own_flags` has the name of one in `ours`, the fields of elastic_train."""
    for entry in dataclasses.fields(own_flags):
        if entry.name in ours:
            raise UsageError(f"{own_flags.__name__}.{entry.name}: {flag(entry.name)} exists already; rename the field")


def max_world_size(config: Config) -> int:
    """The most workers that one step can occupy: one per virtual rank in ordered mode, one per sample in fast mode."""
    return config.virtual_ranks if config.reduction == "ordered" else config.global_batch_size


def flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def as_json(config: Config) -> dict[str, Any]:
    """The configuration for result.json and snapshots: plain values, the task's own flags among ours."""
    values = {**vars(config), **own_values(config)}
    del values["own_flags"]
    return {name: value if isinstance(value, PLAIN_TYPES) else str(value) for name, value in values.items()}


def own_values(config: Config) -> dict[str, Any]:
    """The task's own flags and their values, by field name."""
    return {} if config.own_flags is None else dict(vars(config.own_flags))
