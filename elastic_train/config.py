"""The command line of a worker: typed, documented, checked once and before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

from elastic_train.errors import UsageError
from elastic_train.wording import unrecognized

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic")
DOWNLOADABLE = ("mnist", "fashion-mnist", "cifar10")
IS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""also where a path has made one slash of two"""
PLAIN_TYPES = (str, int, float, bool, type(None), list)


def switch() -> bool:
    """A field that is off until its flag is given; it takes no value and has no `--no...` twin."""
    off: bool = dataclasses.field(default=False, metadata={"custom_args": {"action": "store_true"}})
    return off


@dataclass(frozen=True)
class Config:
    """Train a model with PyTorch DDP; stop, resume and change the number of machines at any step."""

    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10", "imagefolder", "synthetic"] = "digits"
    """what to train on; digits comes with the installation"""
    data_dir: Path = Path("data")
    """where torchvision's data lies (imagefolder: the folder that holds train/ and test/)"""
    download: bool = switch()
    """let torchvision download the data set into --data-dir, once per node"""
    num_workers: int = 0
    """DataLoader processes per rank; 0 loads in the training process, right for data in memory. They live as long as a
    world, not an epoch"""
    prefetch_factor: int | None = None
    """batches that each of these reads ahead; default: torch's, 2"""
    multiprocessing_context: Literal["fork", "spawn"] | None = None
    """how these are started; default: Python's; spawn for data sets that hold what must not be forked"""
    model: str = "cnn"
    """cnn, mlp, or any torchvision classification model, e.g. resnet18"""
    task: str | None = None
    """MODULE:NAME of your own Task, instead of --dataset and --model"""

    init_from: Path | None = None
    """start a new run from these weights: a snapshot, a run, or a file of torch.save or safetensors"""

    epochs: int = 30
    """passes over the training set"""
    max_steps: int | None = None
    """end after this many optimizer steps, if that comes before --epochs"""
    global_batch_size: int = 64
    """samples per optimizer step over all ranks; the same for every world size"""
    virtual_ranks: int = 8
    """fixed shards of a step in ordered mode; must divide --global-batch-size"""
    reduction: Literal["fast", "ordered"] = "fast"
    """fast: DDP's own all-reduce; ordered: the same bits for every world size"""
    strict: bool = switch()
    """in ordered mode: an operator without a deterministic form is an error, not a warning"""
    micro_batch_size: int | None = None
    """most samples per forward pass on a rank; default: what a rank has in the first world"""
    eval_every: int = 5
    """epochs between evaluations on the test set; there is always one at the end"""

    optimizer: Literal["auto", "sgd", "adamw"] = "auto"
    """auto: what suits the task"""
    lr: float | None = None
    """peak learning rate; default: what suits the task"""
    momentum: float | None = None
    """of sgd; default: what suits the task"""
    weight_decay: float | None = None
    """default: what suits the task"""
    schedule: Literal["auto", "constant", "cosine"] = "auto"
    """learning rate by committed step; auto: what suits the task"""
    clip_grad_norm: float | None = None
    """largest norm of the gradient of a step, over the whole batch; default: no limit"""
    ema_decay: float | None = None
    """keep averaged weights too, each step weighing 1 - this; they are what is evaluated"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 by autocast; fp16 with a GradScaler that is part of the state"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one"""
    channels_last: bool = switch()
    """keep convolutions' weights in the memory format that tensor cores like"""
    compile: bool = switch()
    """torch.compile the model; the first step of a process takes long"""
    parallel: Literal["ddp", "dp"] = "ddp"
    """dp: all GPUs from one process by nn.DataParallel, without torchrun; slower than ddp"""
    spawn: int | None = None
    """start this many workers on this machine, without torchrun"""
    find_unused_parameters: bool = switch()
    """DDP's: some parameters get no gradient in some steps"""
    static_graph: bool = switch()
    """DDP's: the same parameters are used in the same way in every step"""
    seed: int = 0
    """seeds the weights, the order of samples, augmentation and dropout"""

    run_dir: Path | None = None
    """everything a run leaves is here, and an existing run is continued; default: runs/<run id>"""
    fresh: bool = switch()
    """start anew: an existing run in --run-dir is moved aside"""
    snapshot_every: int = 100
    """steps between snapshots; 0 keeps only those at a stop and at the end"""
    snapshot_dir: Path | None = None
    """where snapshots go; default: <run-dir>/snapshots"""
    keep_snapshots: int = 3
    """newest snapshots kept"""
    peer_timeout: float = 10.0
    """seconds: a peer silent this long is taken for dead (hang, partition)"""
    stall_timeout: float | None = None
    """seconds: a member that is alive and outside the collective in which all others wait is expelled after this, but
    1,800 s at least before its first commit; default: the larger of 300 s and 20 median steps"""
    min_nodes: int | None = None
    """fewer nodes than this wait for others instead of training; default: from --nnodes"""
    wait_timeout: float = 600.0
    """seconds to wait for --min-nodes, or for silent nodes without which it may not go on, before giving up"""
    on_split: Literal["wait", "go-on"] = "wait"
    """members are silent and not proven dead: wait for contact where the others may train on, or go on as a branch"""
    store_endpoint: str | None = None
    """HOST:PORT of the rendezvous, where it cannot be found out from torchrun's own flags"""
    local_rank: int | None = None
    """given by torch.distributed.launch; what counts is LOCAL_RANK in the environment"""
    formation_timeout: float = 300.0
    """seconds to wait for all members when a world forms: for imports, and for the state that one reads or sends"""
    ledger: bool = switch()
    """also write which samples each step used, under <run-dir>/ledger"""
    metrics_port: int | None = None
    """answer Prometheus at this port of every node; needs the extra `metrics`"""
    metrics_host: str = "127.0.0.1"
    """address that --metrics-port listens at; 0.0.0.0 is every interface, with neither password nor encryption"""
    no_progress: bool = switch()
    """plain log lines instead of a progress bar (always so when stderr is no terminal)"""
    debug: bool = switch()
    """tracebacks of expected errors, and verbose logs"""

    own_flags: Any = dataclasses.field(default=None, metadata={"cmd": False})
    """the values of the task's own flags, a dataclass; None where it has none"""


def parse(arguments: Sequence[str], own_flags: type | None = None, *, left_out: Collection[str] = ()) -> Config:
    """The checked configuration; `own_flags` is a dataclass whose fields are flags too. Fields that are `left_out` are
    no flags, and their names are free for own ones.

    Raises:
        UsageError: an unknown flag or a bad value. `--help` prints and raises SystemExit(0).
    """
    # Imported here, for these two are needed only where a command line is read.
    from simple_parsing import ArgumentParser
    from simple_parsing.wrappers.field_wrapper import DashVariant

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (--help lists all flags)")

    parser = Parser(
        prog="elastic_train",
        allow_abbrev=False,
        add_option_string_dash_variants=DashVariant.DASH,
    )
    flags = _without(left_out) if left_out else Config
    parser.add_arguments(flags, dest="config")
    if own_flags is not None:
        check_own_flags(own_flags, flags)
        parser.add_arguments(own_flags, dest="own_flags")
    _require_values(arguments)
    parsed, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        raise UsageError(unrecognized(unknown, known, "--help lists all flags"))
    config = Config(**{**vars(parsed.config), "own_flags": getattr(parsed, "own_flags", None)})
    check(config)
    if "task" not in left_out:
        check_task_stands_alone(arguments)
    return config


def _require_values(arguments: Sequence[str]) -> None:
    """Raises: UsageError for `--task ""`, `--task=`: a variable of the shell was not set, no default is meant."""
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if (equals and not value and name.startswith("--")) or (not argument and before.startswith("--")):
            raise UsageError(
                f"{name or before} has no value: is a variable not set? Leave the flag out for the default"
            )
        before = argument


def _without(left_out: Collection[str]) -> type:
    """`Config` with fewer fields, for a parser."""
    from simple_parsing.docstring import get_attribute_docstring

    hints = get_type_hints(Config)
    kept = []
    for entry in dataclasses.fields(Config):
        if entry.name not in left_out:
            text = get_attribute_docstring(Config, entry.name).docstring_below
            arguments = {**entry.metadata.get("custom_args", {}), "help": text}
            metadata = {**entry.metadata, "custom_args": arguments}
            kept.append((entry.name, hints[entry.name], dataclasses.field(default=entry.default, metadata=metadata)))
    return dataclasses.make_dataclass(Config.__name__, kept, namespace={"__doc__": Config.__doc__}, frozen=True)


def task_of(arguments: Sequence[str]) -> str | None:
    """The value of `--task`, which may have flags of its own, so that it has to be known before the others."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--task")
    try:
        task: str | None = finder.parse_known_args(list(arguments))[0].task
    except argparse.ArgumentError:  # the whole parser words it
        return None
    return task


def check_task_stands_alone(arguments: Sequence[str]) -> None:
    """Raises: UsageError where `--task` is given and another flag, too, says what is trained; though it be the default,
    for whoever types it expects it to count."""
    task = task_of(arguments)
    if task is None:
        return
    for name in (argument.partition("=")[0] for argument in arguments):
        if name in ("--dataset", "--model"):
            raise UsageError(
                f"{name} goes without --task: {task} brings its own data and model; leave one out (a dataclass in the "
                "task's constructor gives it flags of its own)"
            )


def check_own_flags(own_flags: type, flags: type = Config) -> None:
    """Raises: UsageError where a field is named like one of our flags."""
    ours = {entry.name for entry in dataclasses.fields(flags)}
    for entry in dataclasses.fields(own_flags):
        if entry.name in ours:
            raise UsageError(f"{own_flags.__name__}.{entry.name}: {flag(entry.name)} exists already; rename the field")


def check(config: Config) -> None:
    """Every check on a value or between two values.

    Raises:
        UsageError: names the flag, its value and what would work.
    """
    at_least = {
        "epochs": 1, "max_steps": 1, "global_batch_size": 1, "virtual_ranks": 1, "micro_batch_size": 1,
        "eval_every": 1, "min_nodes": 1, "spawn": 1, "keep_snapshots": 1, "snapshot_every": 0, "num_workers": 0,
        "prefetch_factor": 1, "seed": 0, "momentum": 0.0, "weight_decay": 0.0,
    }  # fmt: skip
    for name, least in at_least.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise UsageError(f"{flag(name)} {value}: must be at least {least}")
    for name in ("lr", "clip_grad_norm", "formation_timeout", "peer_timeout", "stall_timeout", "wait_timeout"):
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{flag(name)} {value}: must be a positive number")
    if config.metrics_port is not None and not 1 <= config.metrics_port <= 65535:
        raise UsageError(f"--metrics-port {config.metrics_port}: must be a port, 1 to 65535")
    if config.seed >= 2**63:
        raise UsageError(f"--seed {config.seed}: must be below 2**63")
    if config.reduction == "ordered" and config.global_batch_size % config.virtual_ranks:
        near = nearest_multiples(config.global_batch_size, config.virtual_ranks)
        raise UsageError(
            f"--virtual-ranks {config.virtual_ranks} does not divide --global-batch-size "
            f"{config.global_batch_size}: take a batch of {' or '.join(map(str, near))}"
        )
    for name in ("prefetch_factor", "multiprocessing_context"):
        if config.num_workers == 0 and (value := getattr(config, name)) is not None:
            raise UsageError(f"{flag(name)} {value} is for DataLoader processes: give --num-workers, 1 at least")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise UsageError(f"--ema-decay {config.ema_decay}: must be between 0 and 1, such as 0.999")
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(config, name) and (config.reduction == "ordered" or config.parallel == "dp"):
            raise UsageError(f"{flag(name)} is for DDP: --reduction fast and --parallel ddp")
    if config.parallel == "dp" and (config.reduction == "ordered" or config.spawn is not None):
        raise UsageError("--parallel dp is one process that reduces by itself: without --spawn and --reduction ordered")
    if config.strict and config.reduction != "ordered":
        raise UsageError("--strict belongs to --reduction ordered; fast promises no bits")
    if config.micro_batch_size is not None and config.micro_batch_size > config.global_batch_size:
        raise UsageError(
            f"--micro-batch-size {config.micro_batch_size} is larger than --global-batch-size "
            f"{config.global_batch_size}: a rank never has more than the global batch"
        )
    if config.download and config.task is None and config.dataset not in DOWNLOADABLE:
        raise UsageError(f"--download: {config.dataset} is not downloaded; that is for {', '.join(DOWNLOADABLE)}")
    for name in ("run_dir", "snapshot_dir"):
        if (path := getattr(config, name)) is not None and IS_URL.match(str(path)):
            raise UsageError(
                f"{flag(name)} {path}: no URL works here, only a folder; mount what it names, and give that"
            )
    if config.optimizer == "adamw" and config.momentum is not None:
        raise UsageError(f"--momentum {config.momentum}: adamw has none; it belongs to --optimizer sgd")
    if config.task is not None and ":" not in config.task:
        raise UsageError(f"--task {config.task}: write MODULE:NAME, e.g. my_package.my_task:MyTask")


def max_world_size(config: Config) -> int:
    """How many workers a step has work for: one for each virtual rank, in fast mode one for each sample."""
    return config.virtual_ranks if config.reduction == "ordered" else config.global_batch_size


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """The multiples of `divisor` next to `value`, below and above, without zero."""
    below = value // divisor * divisor
    return [m for m in (below, below + divisor) if m > 0]


def flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def as_json(config: Config) -> dict[str, Any]:
    """The configuration for result.json and snapshots: plain values only, those of own flags beside ours."""
    values = {**vars(config), **own_values(config)}
    del values["own_flags"]
    return {name: value if isinstance(value, PLAIN_TYPES) else str(value) for name, value in values.items()}


def own_values(config: Config) -> dict[str, Any]:
    """The task's own flags and their values, by field name."""
    return {} if config.own_flags is None else dict(vars(config.own_flags))
