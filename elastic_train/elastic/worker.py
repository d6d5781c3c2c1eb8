"""One worker: what it builds from its flags before it contacts other workers, so that wrong flags show here, alone."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_train.config import Config, NodeFlags, PlaceFlags, as_json, flag, names_of, own_values
from elastic_train.elastic.fault_seam import VARIABLE as FAULT_VARIABLE
from elastic_train.elastic.fault_seam import FaultSeam
from elastic_train.elastic.membership import versions
from elastic_train.elastic.process_group import choose_device
from elastic_train.errors import UsageError
from elastic_train.observe.metrics import Metrics
from elastic_train.observe.reporting import Reporter
from elastic_train.protocol.addresses import parse_endpoints
from elastic_train.rendezvous.launch import Launch, alone_warning, max_nodes_of
from elastic_train.rendezvous.slurm import unused_tasks_warning
from elastic_train.rules import DATA_BY, NAMES
from elastic_train.runlog.events import EventLog, Ledger
from elastic_train.stopping import StopSignal
from elastic_train.storage.atomic_files import require_writable
from elastic_train.storage.places import OwnedBucket, bucket_at
from elastic_train.storage.run_directory import SNAPSHOTS, RunDirectory, default_run_dir
from elastic_train.storage.signature import fingerprint, read_key
from elastic_train.storage.snapshot import SnapshotFolder
from elastic_train.storage.store_urls import is_url
from elastic_train.storage.weights import initialise, require_there
from elastic_train.system import keep_freed_memory, num_cores
from elastic_train.training import determinism
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.data_identity import KIND_OF, ORDER_OF, identify, identify_state
from elastic_train.training.datasets import download
from elastic_train.training.epoch_dataset import length_of
from elastic_train.training.optimizers import build_optimizer, require_in_model, require_values
from elastic_train.training.ordered import check_model
from elastic_train.training.state import TrainState
from elastic_train.training.tasks import ImageClassification, Task, load_task, make_own_task
from elastic_train.wording import count, kind_of
from elastic_train.world import Point, World, host_name

LOCAL_FLAGS = names_of(PlaceFlags, NodeFlags)
"""flags that members need not agree on"""


@dataclass(frozen=True)
class Worker:
    """The parts of this process that last through all worlds."""

    config: Config
    launch: Launch
    stop: StopSignal
    host: str
    device: torch.device
    task: Task
    state: TrainState
    directory: RunDirectory
    reporter: Reporter
    faults: FaultSeam
    imported_at: float
    """when the build began, by the monotonic clock"""
    built_at: float
    identity: dict[str, str]
    """hashes by which members see that they have equal training sets and models, as built"""

    @property
    def snapshots_dir(self) -> SnapshotFolder:
        """A folder, or the bucket of --snapshot-dir URL."""
        return self.bucket or self.directory.snapshots_dir

    @property
    def bucket(self) -> OwnedBucket | None:
        """The bucket of the snapshots; None where they go to a folder."""
        return bucket_of(self.config)

    @property
    def snapshot_key(self) -> bytes | None:
        return key_of(self.config)

    def reach(self, point: Point, world: World) -> None:
        """Inject the faults that a drill has set for this point."""
        self.faults.reach(
            point,
            rank=world.rank,
            generation=world.generation,
            step=self.state.step,
            local_rank=world.local_rank,
            host=world.me.host,
        )

    def set_environment(self, world: World) -> None:
        """Set the environment variables of `world`: the trained code may read its rank there."""
        os.environ.update(self.launch.variables_in(world))

    def share_cores(self, world: World) -> None:
        """Share this host's cores among its workers of `world`, where the user has not set OMP_NUM_THREADS.

        Ordered mode uses one thread in any case: the bits depend on it.

        torchrun sets the variable only when one agent starts several workers. Without this, several terminals on one
        machine would each run as many threads as there are cores.
        """
        if self.config.reduction == "ordered":
            torch.set_num_threads(determinism.THREADS_PER_WORKER)
        elif "OMP_NUM_THREADS" not in os.environ:
            on_this_host = sum(member.host == world.me.host for member in world.workers)
            torch.set_num_threads(max(1, num_cores() // on_this_host))

    def agreement(self) -> dict[str, Any]:
        """Return what must be equal on all members of a world."""
        local = LOCAL_FLAGS | {name for name, value in own_values(self.config).items() if isinstance(value, Path)}
        flags = {flag(name): value for name, value in as_json(self.config).items() if name not in local}
        bucket = bucket_of(self.config)  # one member writes there for all, and all look there for what it has written
        return {
            **flags,
            **({} if bucket is None else {"--snapshot-dir": str(bucket)}),
            "--snapshot-key": fingerprint(key_of(self.config)),  # else a new rank 0 might sign nothing
            **self.task.describe(),
            **self.identity,
            **{f"version of {name}": version for name, version in versions().items()},
            "device": self.device.type,
        }

    def must_agree_with_snapshot(self) -> dict[str, Any]:
        """Return what must be equal for a snapshot to be continued, and the names of the data, which should be."""
        config = self.config
        return {
            **self.task.describe(),
            "--seed": config.seed,
            "--global-batch-size": config.global_batch_size,
            "optimizer": type(self.state.optimizer).__name__,
            **{name: value for name, value in self.identity.items() if name.startswith((ORDER_OF, KIND_OF, NAMES))},
            **({"--virtual-ranks": config.virtual_ranks} if config.reduction == "ordered" else {}),
        }


@dataclass(frozen=True)
class Parts:
    """Task, state and device of a caller that has made them already."""

    task: Task
    state: TrainState
    device: torch.device


def build(config: Config, launch: Launch, stop: StopSignal, parts: Parts | None = None) -> Worker:
    """Build everything that needs no other member. `parts` are given where the flags do not say what is trained. Blocks
    for a download, if --download asks for one.

    Raises:
        UsageError, DatasetMissing, RunDirectoryError: one line each. Any error of the user's own task.
    """
    imported_at = time.monotonic()
    keep_freed_memory(os.environ)
    check_start(config, launch)
    if launch.shutdown_seconds is not None:
        stop.expect_kill(launch.shutdown_seconds)
    faults = FaultSeam(os.environ.get(FAULT_VARIABLE, ""), launch.agent_pid)
    device = choose_device(config.device, launch.local_rank) if parts is None else parts.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    directory = make_directory(config, launch.run_id)
    host = host_name()
    reporter = make_reporter(config, launch, directory, host)
    try:
        if launch.local_rank == 0:
            require_bucket(config, reporter)
        if config.metrics_port is not None and launch.local_rank == 0:
            reporter.metrics = Metrics(
                config.metrics_host, config.metrics_port, run=directory.path.name,
                max_nodes=max_nodes_of(launch, os.environ), log=reporter.log, warn=reporter.warn,
                is_noticed=lambda: reporter.events.is_noticed,
            )  # fmt: skip
        if config.reduction == "ordered":
            determinism.switch_on(strict=config.strict, warn=reporter.warn)
        task = make_task(config) if parts is None else parts.task
        state = make_state(config, task, device) if parts is None else parts.state
        check_state(config, task, state)
        warn_of_flags(config, launch, task, state.length, reporter)
        task.describe()  # reads the test set too, so that an error in it shows now
        data = identify(task.train_set, seed=config.seed, collate=task.collate, may_read=config.num_workers == 0)
        identity = {f"{DATA_BY}{name}": value for name, value in data.items()} | identify_state(state)
    except BaseException as error:
        reporter.failed(error)
        raise
    built_at = time.monotonic()
    return Worker(
        config, launch, stop, host, device, task, state, directory, reporter, faults, imported_at, built_at, identity
    )


def check_start(config: Config, launch: Launch) -> None:
    """Check what can be checked before a directory is made for the run.

    Raises:
        UsageError: the flags do not suit this launch, or an address among them does not work.
        SnapshotError: --init-from names no file.
    """
    if config.store_endpoint is not None:  # also in a launch that does not use it
        parse_endpoints(config.store_endpoint, "--store-endpoint")
    most = max_nodes_of(launch, os.environ)
    is_known = launch.is_open or launch.agent_pid is None  # else --nnodes may be given elsewhere
    if config.min_nodes is not None and config.min_nodes > most and is_known:
        raise UsageError(
            f"--min-nodes {config.min_nodes}: this job has {count(most, 'node')} at most and would never train; "
            "torchrun's --nnodes MIN:MAX says how many"
        )
    if config.parallel == "dp" and launch.world_size > 1:
        raise UsageError(
            f"--parallel dp is one process for all GPUs, and this is one of {launch.world_size}: leave one out"
        )
    if config.static_graph and config.micro_batch_size is not None:
        raise UsageError(
            f"--static-graph --micro-batch-size {config.micro_batch_size}: DDP makes one pass a step over a static "
            "graph: leave one out"
        )
    bucket_of(config)
    key_of(config)
    if config.init_from is not None:
        require_there(config.init_from)


def bucket_of(config: Config) -> OwnedBucket | None:
    """Return the bucket of --snapshot-dir, if any. Raises: UsageError: the URL is unusable, or a package is missing."""
    given = None if config.snapshot_dir is None else str(config.snapshot_dir)
    return bucket_at(given) if given is not None and is_url(given) else None


def key_of(config: Config) -> bytes | None:
    """Return the key of --snapshot-key. Raises: UsageError: it names no key."""
    return None if config.snapshot_key is None else read_key(config.snapshot_key)


def make_directory(config: Config, run_id: str) -> RunDirectory:
    """Create the run directory. Raises: RunDirectoryError where it, or the snapshot directory, is not writable."""
    path = Path(config.run_dir or default_run_dir(run_id))
    folder = None if bucket_of(config) is not None else Path(config.snapshot_dir or path / SNAPSHOTS)
    directory = RunDirectory(path, folder)
    directory.create()
    if folder is not None:
        what = "snapshot directory" if config.snapshot_dir is None else "--snapshot-dir"
        require_writable(directory.snapshots_dir, what)
    return directory


def require_bucket(config: Config, reporter: Reporter) -> None:
    """Raise ObjectStoreError where the bucket of --snapshot-dir cannot be written to."""
    bucket = bucket_of(config)
    if bucket is None:
        return
    bucket.store.require_writable()
    if not bucket.store.is_conditional:
        reporter.warn(
            f"{bucket} has no conditional put that can be relied on: a second job with the same --snapshot-dir may be "
            "noticed late, or not at all"
        )


def make_reporter(config: Config, launch: Launch, directory: RunDirectory, host: str) -> Reporter:
    events = EventLog(
        directory.events_dir, host=host, local_rank=launch.local_rank, rank=launch.rank, world_size=launch.world_size
    )
    ledger = Ledger(directory.ledger_dir, events=events, host=host, local_rank=launch.local_rank)
    return Reporter(
        events=events,
        ledger=ledger if config.ledger else None,
        tensorboard_dir=directory.tensorboard_dir,
        wants_bar=not config.no_progress,
        debug=config.debug,
        node_price=config.node_price,
    )


def check_state(config: Config, task: Task, state: TrainState) -> None:
    """Raise UsageError where there is no training set, or the model cannot be trained, or not in ordered mode."""
    if state.length == 0:
        raise UsageError(f"the training set of {task.name} is empty: there is nothing to train on")
    for name, module in state.kept.modules.items():
        require_values(module, f"extras[{name!r}]" if name else "the model")
    if config.reduction == "ordered":
        check_model(state.model)


def warn_of_flags(config: Config, launch: Launch, task: Task, length: int, reporter: Reporter) -> None:
    """Warn where the machines could do more than the flags ask for, and where flags do less than they say.

    Args:
        length: of the training set, in samples.
    """
    plain = Config()
    for name in (name for name in sorted(task.unused_flags) if getattr(config, name) != getattr(plain, name)):
        reporter.warn(f"{flag(name)} is for the bundled tasks: {task.name} does not see it; give it a flag of its own")
    if length < config.global_batch_size:
        reporter.warn(
            f"--global-batch-size {config.global_batch_size} is more than the {length} samples of the training set: "
            f"each step has {length}"
        )
    for warning in filter(None, (unused_tasks_warning(os.environ), alone_warning(launch, os.environ))):
        reporter.warn(warning)
    if config.parallel == "dp":
        reporter.warn(
            "--parallel dp copies the model to every GPU in each step and computes the loss on one: "
            "torchrun --standalone --nproc-per-node GPUS, or --spawn GPUS, is faster"
        )


def make_task(config: Config) -> Task:
    """Return the task of the flags. Raises: UsageError, DatasetMissing, or any error of the user's own task."""
    if config.task is not None:
        return make_own_task(load_task(config.task), config.own_flags)
    if config.download:
        download(config.dataset, config.data_dir)
    return ImageClassification(config.dataset, config.model, config.data_dir, config.seed)


def make_state(config: Config, task: Task, device: torch.device) -> TrainState:
    """Return a freshly initialised state; the seed makes it equal on all members."""
    torch.manual_seed(config.seed)
    model = task.build_model()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{type(task).__name__}.build_model gave {kind_of(model)}: it must return an nn.Module")
    if config.init_from is not None:
        initialise(model, config.init_from, warn=warnings.warn, key=key_of(config))
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if len({parameter.device for parameter in model.parameters()}) < 2:  # else the task has spread the model
        require_values(model)
        model = model.to(device)
    defaults = task.defaults(None if config.optimizer == "auto" else config.optimizer)
    own = task.build_optimizer(model)
    if own is not None:
        require_no_optimizer_flags(config, task)
    optimizer = own or build_optimizer(
        task.parameter_groups(model),
        name=defaults["optimizer"] if config.optimizer == "auto" else config.optimizer,
        lr=defaults["lr"] if config.lr is None else config.lr,
        momentum=defaults["momentum"] if config.momentum is None else config.momentum,
        weight_decay=defaults["weight_decay"] if config.weight_decay is None else config.weight_decay,
    )
    require_in_model(optimizer, model)
    state = TrainState(
        model,
        optimizer,
        torch.amp.GradScaler(device.type) if config.precision == "fp16" else None,
        schedule=own_schedule(config, task) or (defaults["schedule"] if config.schedule == "auto" else config.schedule),
        length=length_of(task.train_set),
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
        micro_batch_size=config.micro_batch_size,
        extras={} if config.ema_decay is None else {"ema": AveragedWeights(model, config.ema_decay)},
        has_own_optimizer=own is not None,
    )
    if config.compile:
        model.compile()  # in place: no name gets `_orig_mod.`; after the averaged copy was made
    return state


def require_no_optimizer_flags(config: Config, task: Task) -> None:
    """Raise UsageError where a flag would change an optimizer that the task builds itself."""
    for name in ("optimizer", "lr", "momentum", "weight_decay"):
        if getattr(config, name) not in (None, "auto"):
            raise UsageError(f"{flag(name)}: {task.name} builds its own optimizer; give it a flag of its own")


def own_schedule(config: Config, task: Task) -> Callable[[int, int], float] | None:
    """Return the task's own schedule, if any. Raises: UsageError: it is no function, or a flag asks for another one."""
    schedule = task.schedule()
    if schedule is None:
        return None
    gave = kind_of(schedule)
    if callable(schedule):
        factor = schedule(0, 1)
        gave = "" if hasattr(factor, "__float__") else f"a function that gives {kind_of(factor)}"
    if gave:
        raise UsageError(
            f"{type(task).__name__}.schedule gave {gave}: it must give a function of (committed steps, all steps) to a "
            "factor of the learning rate; a scheduler of torch's goes into a loop of your own"
        )
    if config.schedule != "auto":
        raise UsageError(f"--schedule: {task.name} has a schedule of its own; give it a flag of its own")
    return schedule
