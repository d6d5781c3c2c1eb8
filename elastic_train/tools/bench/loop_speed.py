"""Steady-state throughput of our training loops against hand-written plain DDP loops.

Both train the same model on the same data with the same optimizer, in alternating blocks of steps. The plain loop is
what a good user would write: DDP, the data set in memory, one `index_select` per step from a permutation (or a
DataLoader with a DistributedSampler, where items are read one by one), the optimizer in the form that torch chooses,
the loss read every 50th step. Ours is the real loop with the defaults of its flags: sampler, loader, reduction with
votes and the loss of every step, a check of each loss, an event per step, TensorBoard, the watcher with its heartbeats;
snapshots in the cases that name them. Over items it is a user's own training function.

Each loop has its own processes, which are stopped (SIGSTOP) while the other's run. So the work of our other threads
(heartbeats, writing of snapshots) is charged to ours, and so is all processor time of our processes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from elastic_train.config import Config
from elastic_train.errors import ElasticTrainError
from elastic_train.observe import reporting
from elastic_train.stopping import die_with_parent
from elastic_train.tools.bench.loops import OurLoop, PlainLoop, SmallSynthetic
from elastic_train.tools.bench.table import BenchRow
from elastic_train.training.planned_steps import steps_per_epoch

EPOCHS = 10**6  # never reached: the schedule stays flat, and nothing ends within a block
ANSWER_TIMEOUT = timedelta(minutes=10)
"""for one block of steps, or for building a case"""
PEER_TIMEOUT_SECONDS = 600.0
"""ours are silent while the others run; the interval of pings does not depend on it"""
MIN_RATIO = 0.93
"""the least lower bound of the ratio of an own loop's rate to the plain one's"""
RESAMPLES = 2000


@dataclass(frozen=True)
class LoopCase:
    """The training that a case measures."""

    model: str
    batch: int
    """samples per step over all ranks"""
    world_size: int
    dataset: str = "digits"
    snapshot_every: int = 0
    items: bool = False
    """images read one by one, in a loop of the user's own"""
    num_workers: int = 0
    """loader processes of each worker"""
    device: Literal["cpu", "cuda"] = "cpu"

    def config(self, scratch: Path) -> Config:
        config = Config(
            global_batch_size=self.batch,
            epochs=EPOCHS,
            snapshot_every=self.snapshot_every,
            num_workers=self.num_workers,
            run_dir=scratch / str(self).replace("/", "-"),
            no_progress=True,
            peer_timeout=PEER_TIMEOUT_SECONDS,
        )
        if not self.items:
            is_bundled = self.dataset == "digits"
            config = replace(
                config,
                model=self.model if is_bundled else config.model,
                task=None if is_bundled else f"{SmallSynthetic.__module__}:{SmallSynthetic.__name__}",
                micro_batch_size=-(-self.batch // self.world_size),
                eval_every=EPOCHS,
                device=self.device,
            )
        config.check()
        return config

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f", {self.device}"
        if self.items:
            read = "images on it" if where else f"{self.num_workers} loaders"
            name = f"own loop, {self.model}/items batch {self.batch} W={self.world_size}"
            return f"{name}{where}, {read}"
        name = f"{self.model}/{self.dataset} batch {self.batch} W={self.world_size}{where}"
        return f"{name}, snapshot every {self.snapshot_every}" if self.snapshot_every else name


@dataclass(frozen=True)
class Effort:
    """How long to measure a case."""

    block_seconds: float
    """approximate, for one loop; at least one step"""
    case_seconds: float
    """approximate, per launch, warm-up excluded"""
    min_pairs: int
    launches: int
    """of new processes: by its memory layout one is faster than another by a quarter, for its whole life"""


QUICK = Effort(block_seconds=0.1, case_seconds=2.0, min_pairs=3, launches=1)
THOROUGH = Effort(block_seconds=0.2, case_seconds=7.0, min_pairs=4, launches=3)
ITEMS = Effort(block_seconds=0.2, case_seconds=4.0, min_pairs=4, launches=9)


def cases_for(world_size: int) -> list[LoopCase]:
    return [
        LoopCase("cnn", 64, world_size),
        LoopCase("cnn", 64, world_size, snapshot_every=100),
        LoopCase("cnn", 256, world_size),
        LoopCase("mlp", 64, world_size),
        LoopCase("resnet18", 8, world_size, dataset="small-synthetic"),
    ]


def item_cases_for(world_size: int) -> list[LoopCase]:
    return [LoopCase("cnn", 32 * world_size, world_size, items=True, num_workers=number) for number in (0, 2)]


def cuda_cases_for(world_size: int) -> list[LoopCase]:
    """Cases with a GPU per worker. The images of an own loop are already on it: loading them is the user's own code."""
    return [
        LoopCase("resnet50", 64 * world_size, world_size, items=True, device="cuda"),
        LoopCase("resnet18", 64 * world_size, world_size, items=True, device="cuda"),
        LoopCase("resnet18", 64 * world_size, world_size, dataset="small-synthetic", device="cuda"),
    ]


def run(quick: bool) -> list[BenchRow]:
    """Measure the bundled loop in worlds of one and two workers, one thread each, and an own loop in worlds of one to
    three; if there are GPUs, also both on one to three of these. Quick: about four minutes; else about twenty."""
    rows = list[BenchRow]()
    for world_size in range(1, min(torch.cuda.device_count(), 3) + 1):
        rows += measure(cuda_cases_for(world_size), QUICK if quick else THOROUGH)
    for world_size in (1, 2):
        rows += measure(cases_for(world_size), QUICK if quick else THOROUGH)
    for world_size in (1, 2, 3):
        rows += measure(item_cases_for(world_size), QUICK if quick else ITEMS)
    return rows


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Launched:
    """The measurements of a case in one launch."""

    pairs: list[tuple[float, float]]
    """samples per second, ours and theirs, one right after the other"""
    per_cpu_second: tuple[float, float]
    """samples per second of processor time, ours and theirs"""


def measure(cases: list[LoopCase], effort: Effort) -> list[BenchRow]:
    """Measure cases of the same world size; each launch starts that many processes per loop. Return their rows."""
    launches = [launch(cases, effort) for _ in range(effort.launches)]
    rows = []
    for number, case in enumerate(cases):
        found = rows_of(case, [launched[number] for launched in launches])
        print(f"{case}: {found[0].ratio:.3f}", file=sys.stderr, flush=True)
        rows += found
    return rows


def rows_of(case: LoopCase, found: Sequence[Launched]) -> list[BenchRow]:
    """The rows of a case. A lower bound needs several launches: ratios within one launch depend on each other."""
    ours, theirs = zip(*(pair for one in found for pair in one.pairs), strict=True)
    rows = [BenchRow.of_rates(str(case), ours, theirs, "samples/s")]
    if case.items and len(found) > 1:
        bound = lower_bound([[our / their for our, their in one.pairs] for one in found])
        rows.append(BenchRow.of_rates("  at least, at 95 %", [bound], [MIN_RATIO], "ratio"))
    if case.items:
        ours, theirs = zip(*(one.per_cpu_second for one in found), strict=True)
        rows.append(BenchRow.of_rates("  of processor time", ours, theirs, "samples/s"))
    return rows


def lower_bound(ratios: Sequence[Sequence[float]]) -> float:
    """The lower bound, at 95 %, of the median of all ratios, by the percentile bootstrap (Efron, "Bootstrap methods",
    1979). It draws whole launches, because ratios within one depend on each other."""
    draws = random.Random(0)
    medians = [
        statistics.median(ratio for launched in draws.choices(ratios, k=len(ratios)) for ratio in launched)
        for _ in range(RESAMPLES)
    ]
    return statistics.quantiles(medians, n=20)[0]


def launch(cases: list[LoopCase], effort: Effort) -> list[Launched]:
    """Start new processes and measure each case in them."""
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


def measure_case(case: LoopCase, ours: Side, theirs: Side, effort: Effort) -> Launched:
    """Measure both loops in turn; the order alternates from pair to pair."""
    length = ours.begin(case)
    theirs.begin(case)
    for side in (ours, theirs):
        side.run(3)  # allocations, DDP's bucket order
    epoch_steps = steps_per_epoch(length, case.batch)
    step_seconds = min(side.run(3) for side in (ours, theirs)) / 3
    # Whole epochs if they are short, so that every block has the same steps.
    count = max(1, round(effort.block_seconds / step_seconds))
    if count > epoch_steps / 2:
        count = max(1, round(count / epoch_steps)) * epoch_steps
    num_pairs = max(effort.min_pairs, round(effort.case_seconds / (2 * count * step_seconds)))
    for side in (ours, theirs):
        side.run(count)
    seconds: dict[Side, list[float]] = {ours: [], theirs: []}
    cpu_before = [side.cpu_seconds() for side in (ours, theirs)]
    for pair in range(num_pairs):
        for side in (ours, theirs) if pair % 2 == 0 else (theirs, ours):
            seconds[side].append(side.run(count))
    samples = count * length / epoch_steps
    our_cpu, their_cpu = (
        num_pairs * samples / (side.cpu_seconds() - before)
        for side, before in zip((ours, theirs), cpu_before, strict=True)
    )
    pairs = [(samples / our, samples / their) for our, their in zip(seconds[ours], seconds[theirs], strict=True)]
    return Launched(pairs, (our_cpu, their_cpu))


class Side:
    """The processes of one loop, by rank; they are stopped (SIGSTOP) while they have no task."""

    def __init__(self, loop: type[OurLoop | PlainLoop], world_size: int, port: int, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = loop.__name__
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when a worker imports torch
            for rank in range(world_size):
                pipe, theirs = context.Pipe()
                process = context.Process(target=_work, args=(loop, rank, world_size, port, scratch, theirs))
                process.start()
                theirs.close()
                self._pipes.append(pipe)
                self._processes.append(process)

    def begin(self, case: LoopCase) -> int:
        """Begin a case and return the length of its training set. Blocks until all ranks have begun it."""
        return int(self._ask(case))

    def run(self, count: int) -> float:
        """Run `count` steps; return their seconds, from the barrier of all ranks on."""
        return self._ask(count)

    def end(self) -> None:
        """Let the processes end by themselves."""
        self._signal(signal.SIGCONT)
        self._send(None)
        for process in self._processes:
            process.join(ANSWER_TIMEOUT.total_seconds())

    def kill(self) -> None:
        for process in self._tree():
            process.kill()
        for worker in self._processes:
            worker.join()

    def _ask(self, task: LoopCase | int | None) -> float:
        self._signal(signal.SIGCONT)
        answer = self._send(task)
        self._signal(signal.SIGSTOP)
        return answer

    def _send(self, task: LoopCase | int | None) -> float:
        """Send a task to all ranks, which must be running. Return rank 0's answer when all have answered."""
        for pipe in self._pipes:
            pipe.send(task)
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        return answers[0]

    def _answer(self, rank: int) -> float:
        pipe, process = self._pipes[rank], self._processes[rank]
        if not pipe.poll(ANSWER_TIMEOUT.total_seconds()):
            raise ElasticTrainError(
                f"rank {rank} of {self._name} has not answered for {ANSWER_TIMEOUT.total_seconds():.0f} s"
            )
        try:
            return float(pipe.recv())
        except (EOFError, ConnectionError):
            process.join(10.0)
            raise ElasticTrainError(
                f"rank {rank} of {self._name} ended with code {process.exitcode}; what it printed is above"
            ) from None

    def cpu_seconds(self) -> float:
        """The processor time of its processes so far, loaders included."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._tree()))

    def _signal(self, signum: signal.Signals) -> None:
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):  # a loader process whose epoch has just ended
                process.send_signal(signum)

    def _tree(self) -> list[psutil.Process]:
        workers = [psutil.Process(process.pid) for process in self._processes if process.is_alive()]
        return [one for worker in workers for one in (worker, *worker.children(recursive=True))]


def _work(
    make_loop: Callable[[int, int, int, Path], OurLoop | PlainLoop],
    rank: int,
    world_size: int,
    port: int,
    scratch: Path,
    pipe: Connection,
) -> None:
    die_with_parent()
    import torch._dynamo  # otherwise this import would fall into the second in which all ranks connect
    import torch.utils.tensorboard  # otherwise the first case's reporter imports it in a thread, for seconds

    reporting.LOG_LINE_SECONDS = math.inf  # its lines would stand between the rows
    torch.set_num_threads(1)
    loop = make_loop(rank, world_size, port, scratch)
    order: LoopCase | int | None = pipe.recv()

    def blocks() -> Iterator[int]:
        """The step counts of the blocks. When the loop asks for the next one, send the seconds of the last."""
        nonlocal order
        while isinstance(order := pipe.recv(), int):
            dist.barrier()
            started = time.perf_counter()
            yield order
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            pipe.send(time.perf_counter() - started)

    while isinstance(order, LoopCase):
        pipe.send(loop.begin(order))
        loop.train(blocks())
    loop.close()
    pipe.send(0.0)
