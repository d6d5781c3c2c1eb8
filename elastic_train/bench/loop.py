"""Steady-state throughput of our training loop against a hand-written plain DDP loop.

Both train the same model on the same tensors with the same optimizer, a block of steps of the one after a block of the
other. The plain loop is what a good user would write: DDP, the data set in memory, one `index_select` per step from a
permutation, the optimizer in the form that torch chooses, the loss read every 50th step. Ours is the real thing with
the defaults of its flags: sampler, loader, reduction with votes and the loss of every step, a check of each loss, an
event per step, TensorBoard, the watcher with its heartbeats; snapshots in the cases that say so.

Each loop has processes of its own, which are stopped (SIGSTOP) while the other's run: what ours does in threads beside
the loop, heartbeats and the writing of snapshots, is then charged to ours.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elastic_train import reporting
from elastic_train.batches import steps
from elastic_train.bench import table
from elastic_train.bench.table import Row
from elastic_train.config import Config, check
from elastic_train.connect import Waits, connect_worker
from elastic_train.datasets import ImageData, TensorImages, synthetic
from elastic_train.errors import ElasticTrainError
from elastic_train.goodput import Phase
from elastic_train.loop import Loop
from elastic_train.membership import new_token
from elastic_train.process_group import process_group, use_interface_of
from elastic_train.rules import Activity
from elastic_train.sampler import steps_per_epoch
from elastic_train.saving import Saver
from elastic_train.stopping import StopSignal, die_with_parent
from elastic_train.tasks import ImageClassification
from elastic_train.torchrun import Launch
from elastic_train.worker import build, make_state, make_task
from elastic_train.world import Member, host_name

EPOCHS = 10**6  # never reached: the schedule stays flat, and nothing ends within a block
LOSS_READ_EVERY = 50
ANSWER_TIMEOUT = timedelta(minutes=10)
"""for one block of steps, or for building a case"""
PEER_TIMEOUT = timedelta(minutes=10)
"""ours are silent while the others run; how often a heart beats does not depend on it"""


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    batch: int
    """samples per step over all ranks"""
    world_size: int
    dataset: str = "digits"
    snapshot_every: int = 0

    def config(self, scratch: Path) -> Config:
        is_bundled = self.dataset == "digits"
        config = Config(
            dataset="digits",
            model=self.model if is_bundled else "cnn",
            task=None if is_bundled else f"{__name__}:{SmallSynthetic.__name__}",
            global_batch_size=self.batch,
            micro_batch_size=-(-self.batch // self.world_size),
            epochs=EPOCHS,
            eval_every=EPOCHS,
            snapshot_every=self.snapshot_every,
            device="cpu",
            run_dir=scratch / str(self).replace("/", "-"),
            no_progress=True,
        )
        check(config)
        return config

    def __str__(self) -> str:
        name = f"{self.model}/{self.dataset} batch {self.batch} W={self.world_size}"
        return f"{name}, snapshot every {self.snapshot_every}" if self.snapshot_every else name


@dataclass(frozen=True)
class Effort:
    """How long to measure a case."""

    block_seconds: float
    """about, of one loop; at least one step"""
    case_seconds: float
    """about, warm-up excluded, in each launch"""
    min_pairs: int
    launches: int
    """of new processes: where its memory comes to lie makes one faster than another by a quarter, for its whole life"""


QUICK = Effort(block_seconds=0.1, case_seconds=2.0, min_pairs=3, launches=1)
THOROUGH = Effort(block_seconds=0.2, case_seconds=7.0, min_pairs=4, launches=3)


def cases_for(world_size: int) -> list[Case]:
    return [
        Case("cnn", 64, world_size),
        Case("cnn", 64, world_size, snapshot_every=100),
        Case("cnn", 256, world_size),
        Case("mlp", 64, world_size),
        Case("resnet18", 8, world_size, dataset="small-synthetic"),
    ]


def run(quick: bool) -> dict[str, Any]:
    """Measure all cases in worlds of one and two workers, one thread each. Quick: under a minute; else about six."""
    rows = []
    for world_size in (1, 2):
        rows += measure(cases_for(world_size), QUICK if quick else THOROUGH)
    return table.report("loop", rows)


class SmallSynthetic(ImageClassification):
    """A few made-up images of 32 x 32, held in memory like real ones."""

    name = "small-synthetic"

    def __init__(self) -> None:
        super().__init__(dataset="synthetic", model="resnet18")

    @cached_property
    def data(self) -> ImageData:
        made = synthetic(0, train_length=64, test_length=8)

        def in_memory(part: Any) -> TensorImages:
            images, labels = part.gather(torch.arange(len(part)), 0)
            pixels = images.mul(40).add(128).clamp(0, 255).to(torch.uint8)
            return TensorImages(pixels, labels, mean=(128.0,) * 3, std=(40.0,) * 3)

        return ImageData(in_memory(made.train), in_memory(made.test), made.channels, made.classes, made.image_size)


# --- the two loops ----------------------------------------------------------------------------------------------------


class OurLoop:
    """`recovery.Run` without the ways in and out: the real parts, driven a block of steps at a time."""

    def __init__(self, rank: int, world_size: int, port: int, scratch: Path) -> None:
        self._launch = Launch(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            run_id="bench",
            agent_pid=os.getppid(),
            master=("127.0.0.1", port),
            is_agent_store=True,
        )
        self._scratch = scratch
        self._membership = connect_worker(
            self._launch,
            StopSignal(),
            Waits(120.0, PEER_TIMEOUT.total_seconds(), 120.0),
            max_world_size=None,
            run_dir=None,
            say=print,
            warn=print,
        )
        address = self._membership.address[0]
        use_interface_of(address)
        self._world = self._membership.first_world(
            Member(
                host=host_name(),
                local_rank=rank,
                pid=os.getpid(),
                agent_pid=os.getppid(),
                address=(address, 0),
                directory_id="bench",
                backend="gloo",
                max_generation=None,
            )
        )
        self._cleanup = ExitStack()
        self._cleanup.callback(self._membership.close)
        self._cleanup.enter_context(
            process_group(
                self._world,
                lambda: self._membership.group_store(self._world),
                "gloo",
                self._membership.sockets,
            )
        )
        self._membership.watcher.enter(self._world)
        self._case_cleanup = ExitStack()

    def begin(self, case: Case) -> int:
        """Build the parts of a case; the length of its training set. Every rank calls it."""
        self._case_cleanup.close()
        world, membership = self._world, self._membership
        worker = build(case.config(self._scratch), self._launch, StopSignal())
        self._case_cleanup.callback(worker.directory.release)
        self._case_cleanup.callback(worker.reporter.close)
        job_token = membership.agreed_once("job_token", new_token())
        worker.directory.claim(job_token, world.generation, worker.host)
        state = worker.state
        state.run_uid = "bench"
        saver = Saver(worker, job_token)
        saver.enter(world)
        worker.reporter.events.enter(world)
        worker.reporter.enter(world, state)
        state.clock.enter(Phase.TRAIN)
        membership.watcher.do(Activity.COMPUTE)
        self._loop = Loop(worker, membership, saver).over(world)
        task = worker.task
        self._steps = steps(task.train_set, task.collate, state, world, worker.config, worker.device)
        return state.length

    def block(self, count: int) -> None:
        self._loop(itertools.islice(self._steps, count))

    def close(self) -> None:
        self._case_cleanup.close()
        self._membership.watcher.leave()
        self._cleanup.close()


class PlainLoop:
    """A plain loop over the same tensors, from the same weights, with the same optimizer."""

    def __init__(self, rank: int, world_size: int, port: int, scratch: Path) -> None:
        self._scratch = scratch
        use_interface_of("127.0.0.1")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=world_size)

    def begin(self, case: Case) -> int:
        config = case.config(self._scratch)
        task = make_task(config)
        ours = make_state(config, task, torch.device("cpu"))
        optimizer = type(ours.optimizer)(ours.model.parameters(), **ours.optimizer.defaults)
        images, labels = _all_samples(task.train_set)
        self._steps = plain_ddp_loop(ours.model, optimizer, images, labels, case.batch)
        return ours.length

    def block(self, count: int) -> None:
        for _ in itertools.islice(self._steps, count):
            pass

    def close(self) -> None:
        dist.destroy_process_group()


def plain_ddp_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch: int,
) -> Iterator[None]:
    """What one would write by hand; endless, one step per `next`."""
    ddp = DistributedDataParallel(model)
    ddp.train()  # type: ignore[no-untyped-call]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_steps = 0
    for epoch in itertools.count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step_indices in order.split(batch):  # type: ignore[no-untyped-call]
            indices = step_indices[rank::world_size]
            optimizer.zero_grad(set_to_none=True)
            outputs = ddp(images.index_select(0, indices))
            loss = F.cross_entropy(outputs, labels.index_select(0, indices))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            num_steps += 1
            if num_steps % LOSS_READ_EVERY == 0:
                loss.item()
            yield


def _all_samples(train_set: Any) -> tuple[Tensor, Tensor]:
    images, labels = train_set.gather(torch.arange(len(train_set)), 0)
    return images, labels


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(cases: list[Case], effort: Effort) -> list[Row]:
    """The rows of cases that have one world size, from that many processes for each loop in each launch."""
    launches = [launch(cases, effort) for _ in range(effort.launches)]
    rows = []
    for number, case in enumerate(cases):
        pairs = [pair for found in launches for pair in found[number]]
        ours, theirs = zip(*pairs, strict=True)
        rows.append(Row.of_rates(str(case), ours, theirs, "samples/s"))
        print(f"{case}: {rows[-1].ratio:.3f}", file=sys.stderr, flush=True)
    return rows


def launch(cases: list[Case], effort: Effort) -> list[list[tuple[float, float]]]:
    """Of each case the pairs of rates, ours and theirs, from new processes."""
    world_size = cases[0].world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch, ExitStack() as ends:
        sides = []
        for loop in (OurLoop, PlainLoop):
            sides.append(Side(loop, world_size, store.port, Path(scratch)))
            ends.callback(sides[-1].kill)
        ours, theirs = sides
        for case in cases:
            found.append(measure_case(case, ours, theirs, effort))
        for side in sides:
            side.end()
    return found


def measure_case(case: Case, ours: Side, theirs: Side, effort: Effort) -> list[tuple[float, float]]:
    """Both loops in turn, the first one changing from pair to pair; their rates in samples per second."""
    length = ours.begin(case)
    theirs.begin(case)
    for side in (ours, theirs):
        side.run(3)  # allocations, DDP's bucket order
    epoch_steps = steps_per_epoch(length, case.batch)
    step_seconds = min(side.run(3) for side in (ours, theirs)) / 3
    # Whole epochs where they are short, so that every block has the same steps in it.
    count = max(1, round(effort.block_seconds / step_seconds))
    if count > epoch_steps / 2:
        count = max(1, round(count / epoch_steps)) * epoch_steps
    num_pairs = max(effort.min_pairs, round(effort.case_seconds / (2 * count * step_seconds)))
    for side in (ours, theirs):
        side.run(count)
    seconds: dict[Side, list[float]] = {ours: [], theirs: []}
    for pair in range(num_pairs):
        for side in (ours, theirs) if pair % 2 == 0 else (theirs, ours):
            seconds[side].append(side.run(count))
    samples = count * length / epoch_steps
    return [(samples / our, samples / their) for our, their in zip(seconds[ours], seconds[theirs], strict=True)]


class Side:
    """The processes of one loop, by rank; they are stopped whenever they are not asked for anything."""

    def __init__(self, loop: type[OurLoop | PlainLoop], world_size: int, port: int, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = loop.__name__
        self._tasks: list[Connection] = []
        self._answers: list[Connection] = []
        self._processes: list[Any] = []
        saved = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker imports torch
        try:
            for rank in range(world_size):
                task_reader, task_writer = context.Pipe(duplex=False)
                answer_reader, answer_writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(loop, rank, world_size, port, scratch, task_reader, answer_writer), daemon=True
                )
                process.start()
                task_reader.close()
                answer_writer.close()
                self._tasks.append(task_writer)
                self._answers.append(answer_reader)
                self._processes.append(process)
        finally:
            if saved is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = saved

    def begin(self, case: Case) -> int:
        """Take up a case; the length of its training set. Blocks until all ranks have."""
        return int(self._ask(case))

    def run(self, count: int) -> float:
        """Seconds that so many steps take, from the moment at which all ranks have come."""
        return self._ask(count)

    def end(self) -> None:
        """Let the processes end by themselves."""
        self._ask(None)
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.join(ANSWER_TIMEOUT.total_seconds())

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()

    def _ask(self, task: Case | int | None) -> float:
        self._signal(signal.SIGCONT)
        for connection in self._tasks:
            connection.send(task)
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        self._signal(signal.SIGSTOP)
        return answers[0]

    def _answer(self, rank: int) -> float:
        connection, process = self._answers[rank], self._processes[rank]
        if not connection.poll(ANSWER_TIMEOUT.total_seconds()):
            raise ElasticTrainError(
                f"rank {rank} of {self._name} has not answered for {ANSWER_TIMEOUT.total_seconds():.0f} s"
            )
        try:
            return float(connection.recv())
        except EOFError:
            process.join(10.0)
            raise ElasticTrainError(
                f"rank {rank} of {self._name} ended with code {process.exitcode}; what it printed is above"
            ) from None

    def _signal(self, signum: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signum)


def _work(
    make_loop: Callable[[int, int, int, Path], OurLoop | PlainLoop],
    rank: int,
    world_size: int,
    port: int,
    scratch: Path,
    tasks: Connection,
    answers: Connection,
) -> None:
    die_with_parent()
    import torch.utils.tensorboard  # else the first case's reporter does so in a thread, for seconds

    reporting.LOG_LINE_SECONDS = math.inf  # its lines would stand between the rows
    torch.set_num_threads(1)
    loop = make_loop(rank, world_size, port, scratch)
    while (task := tasks.recv()) is not None:
        if isinstance(task, Case):
            answers.send(loop.begin(task))
        else:
            dist.barrier()
            started = time.perf_counter()
            loop.block(task)
            answers.send(time.perf_counter() - started)
    loop.close()
    answers.send(0.0)
