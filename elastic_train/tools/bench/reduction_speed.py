"""A step with ordered reduction against plain DDP at the same global batch, in two comparisons.

DDP that runs the same micro-batches, accumulated under `no_sync`, shows the cost of the fixed tree and its exchange.
DDP with one batch per rank shows the cost, or the gain, of micro-batches as well.

All three train the same model from the same weights in the same processes over one process group. Their steps take
turns, so that other load on the machine hits all of them. Further rows compare the time from the last backward pass to
the finished gradient, including the wait for peers, with an all-reduce of the same bytes alone; and the memory held,
in gradients, with its bound.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from elastic_train.stopping import die_with_parent
from elastic_train.tools.bench.table import BenchRow
from elastic_train.training.models import build_model
from elastic_train.training.ordered import OrderedReduction
from elastic_train.training.reduction import Share
from elastic_train.training.sampler import MicroBatch, split
from elastic_train.training.step import seed_model_draws
from elastic_train.world import Member, World

VIRTUAL_RANKS = 8
NUM_CLASSES = 10
CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class ReductionCase:
    """The model that is trained, on made-up images."""

    model: str
    batch: int
    channels: int
    image_size: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "mlp 7M":
            sizes = (self.channels * self.image_size**2, 1700, 1700, 1300)
            layers: list[nn.Module] = [nn.Flatten()]
            for inputs, outputs in pairwise(sizes):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], NUM_CLASSES))
        return build_model(self.model, channels=self.channels, classes=NUM_CLASSES, image_size=self.image_size)

    def samples(self) -> tuple[Tensor, Tensor]:
        """Return one global batch of images and labels."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, self.channels, self.image_size, self.image_size, generator=generator)
        return images, torch.randint(0, NUM_CLASSES, (self.batch,), generator=generator)


CASES = (
    ReductionCase("cnn", batch=96, channels=1, image_size=8),
    ReductionCase("resnet18", batch=32, channels=3, image_size=32),
    ReductionCase("mlp 7M", batch=96, channels=1, image_size=32),
)


def run(quick: bool) -> list[BenchRow]:
    """Measure worlds of two and four workers on this machine, one thread each. Quick: about a minute."""
    rows: list[BenchRow] = []
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            spawn(_work, args=(world_size, store.port, quick, out), nprocs=world_size)  # type: ignore[no-untyped-call]
            rows += [BenchRow(**values) for values in json.loads((out / "rows.json").read_text())]
    return rows


def local_world(rank: int, world_size: int) -> World:
    """A world with only the parts that a reduction needs: processes of this machine, without watchers."""
    members = tuple(
        Member(
            host="localhost",
            local_rank=member,
            pid=member,
            agent_pid=0,
            address=("127.0.0.1", 0),
            directory_id="",
            backend="gloo",
            max_generation=None,
        )
        for member in range(world_size)
    )
    return World(rank=rank, generation=0, members=members)


def _work(rank: int, world_size: int, port: int, quick: bool, out: Path) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    world = local_world(rank, world_size)
    rows: list[BenchRow] = []
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        for case in CASES:
            rows += measure(case, world, seconds=3.0 if quick else 25.0)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (out / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def measure(case: ReductionCase, world: World, seconds: float) -> list[BenchRow]:
    """Measure one case for about `seconds`, and return its rows; every rank calls it."""
    ordered = Ordered(case, world)
    gradient = torch.zeros(sum(parameter.numel() for parameter in ordered.model.parameters()))
    steps: dict[str, Callable[[], object]] = {
        "ordered": ordered.step,
        "accumulated": plain_step(case, world, is_accumulating=True),
        "whole": plain_step(case, world, is_accumulating=False),
        "all-reduce": partial(dist.all_reduce, gradient),  # of a gradient's bytes, without anything to overlap
    }
    for step in steps.values():
        for _ in range(3):  # warm-up: DDP's bucket order, allocations
            step()
    round_seconds = sum(timed(step) for step in steps.values())
    num_rounds = torch.tensor(max(8, round(seconds / round_seconds)))
    dist.broadcast(num_rounds, 0)
    found: dict[str, list[float]] = {name: [] for name in [*steps, "exchange"]}
    names = list(steps)
    for turn in range(int(num_rounds)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            before = ordered.reduction.exchange_seconds
            found[name].append(timed(steps[name]))
            if name == "ordered":
                found["exchange"].append(ordered.reduction.exchange_seconds - before)
    label = f"{case.model} batch {case.batch} V={VIRTUAL_RANKS} W={world.world_size}"
    grad_bytes = sum(parameter.nbytes for parameter in ordered.model.parameters())
    held = 1 + ordered.reduction.memory_bytes / grad_bytes  # plus the gradient that autograd makes for a leaf
    bound = math.log2(VIRTUAL_RANKS) + 2  # includes the one in `.grad`
    rows = [
        row(f"{label}: DDP, same micro-batches", found["ordered"], found["accumulated"]),
        row(f"{label}: DDP, one batch a rank", found["ordered"], found["whole"]),
        row(f"{label}: exchange, all-reduce", found["exchange"], found["all-reduce"]),
        BenchRow.within(f"{label}: memory at the peak, bound", [held], bound, "gradients"),
    ]
    if world.rank == 0:
        share = statistics.median(found["exchange"]) / statistics.median(found["ordered"])
        print(f"{label}: {rows[0].ratio:.3f}, exchange {share:.0%} of a step", file=sys.stderr, flush=True)
    return rows


def row(case: str, ours: list[float], theirs: list[float]) -> BenchRow:
    """Make a row of milliseconds from seconds."""
    return BenchRow.of_costs(case, [1e3 * seconds for seconds in ours], [1e3 * seconds for seconds in theirs], "ms")


def timed(step: Callable[[], object]) -> float:
    """Time a step, in seconds, after a barrier of all ranks."""
    dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


class Ordered:
    """Training steps with ordered reduction."""

    def __init__(self, case: ReductionCase, world: World) -> None:
        self.model = case.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.reduction = OrderedReduction(self.model, world, CPU, VIRTUAL_RANKS)
        self.share = micro_batches(case, world)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.reduction.run(self.share, seeded_loss, lambda loss: loss, votes=(0,))
        self.optimizer.step()


def seeded_loss(module: nn.Module, micro_batch: MicroBatch, batch: tuple[Tensor, Tensor]) -> Tensor:
    seed_model_draws(0, micro_batch.step, micro_batch.shard, CPU)
    return F.cross_entropy(module(batch[0]), batch[1])


def micro_batches(case: ReductionCase, world: World) -> Share:
    """The micro-batches of this rank's virtual ranks."""
    images, labels = case.samples()
    first, end = split(VIRTUAL_RANKS, world.rank, world.world_size)
    found = []
    for shard in range(first, end):
        start, stop = split(case.batch, shard, VIRTUAL_RANKS)
        micro_batch = MicroBatch(
            epoch=0,
            step=1,
            shard=shard,
            indices=np.arange(start, stop),
            step_samples=case.batch,
            is_last=shard == end - 1,
        )
        found.append((micro_batch, (images[start:stop], labels[start:stop])))
    return found


def plain_step(case: ReductionCase, world: World, *, is_accumulating: bool) -> Callable[[], None]:
    """Return a plain training step, with a rank's samples in micro-batches or in one batch."""
    ddp = DistributedDataParallel(case.build(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    batches = [batch for _, batch in micro_batches(case, world)]
    if not is_accumulating:
        batches = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for position, (images, labels) in enumerate(batches):
            is_last = position == len(batches) - 1
            with nullcontext() if is_last else ddp.no_sync():
                (F.cross_entropy(ddp(images), labels) / len(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
