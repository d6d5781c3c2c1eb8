"""The loops that `bench loop` compares: ours, bundled and of a user's own, and what one would write by hand.

Each is built for one case at a time and driven by blocks: whenever it asks for the next number of steps, the block
before is over.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from elastic_train.elastic.barriers import Waits
from elastic_train.elastic.connect import Applicant, connect_worker
from elastic_train.elastic.loop import bundled
from elastic_train.elastic.membership import new_token
from elastic_train.elastic.own_loop import OwnTask
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.session import Training
from elastic_train.elastic.standing import standing_in
from elastic_train.elastic.trainer import Program, Trainer
from elastic_train.elastic.worker import Parts, build, make_state, make_task
from elastic_train.protocol.addresses import use_interface_of
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import Activity
from elastic_train.runlog.goodput import Phase
from elastic_train.stopping import StopSignal
from elastic_train.training import models
from elastic_train.training.batches import steps
from elastic_train.training.datasets import ImageData, TensorImages, synthetic
from elastic_train.training.loader_processes import start_loader_process
from elastic_train.training.reduction import Share
from elastic_train.training.state import TrainState
from elastic_train.training.tasks import ImageClassification
from elastic_train.world import Member, host_name

if TYPE_CHECKING:
    from elastic_train.tools.bench.loop_speed import LoopCase

LOSS_READ_EVERY = 50
PEER_TIMEOUT_SECONDS = 600.0
"""ours are silent while the others run; how often they ping does not depend on it"""


class OurLoop:
    """A `ring.Ring` without the ways in and out: the real parts, driven a block of steps at a time."""

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
            Applicant(
                self._launch,
                StopSignal(),
                Waits(120.0, PEER_TIMEOUT_SECONDS, 120.0),
                max_world_size=None,
                run_dir=None,
                log=print,
                warn=print,
            )
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
        self._cleanup.enter_context(standing_in(self._membership, self._world))
        self._case_cleanup = ExitStack()

    def begin(self, case: LoopCase) -> int:
        """Build the parts of a case; the length of its training set. Every rank calls it."""
        self._case_cleanup.close()
        world, membership = self._world, self._membership
        worker = build(case.config(self._scratch), self._launch, StopSignal(), _own_parts(case) if case.items else None)
        self._case_cleanup.callback(worker.directory.ownership.release)
        self._case_cleanup.callback(worker.reporter.close)
        files = RunFiles(worker, membership.agreed_once("job_token", new_token()))
        files.claim(world, has_state=False)
        state = worker.state
        state.run_uid = "bench"
        saver = Saver(worker, files)
        saver.enter(world)
        worker.reporter.enter(world, state)
        state.clock.enter(Phase.TRAIN)
        membership.watcher.do(Activity.COMPUTE)
        task = worker.task
        batches = steps(task.train_set, task.collate, state, world, worker.config, worker.device)
        program = Program(train_items) if case.items else bundled(worker)
        self._trainer = Trainer(program, worker, membership, saver)
        self._case_cleanup.callback(self._trainer.close)
        self._batches = batches
        return state.length

    def train(self, blocks: Iterator[int]) -> None:
        def paced() -> Iterator[Share]:
            for count in blocks:
                yield from itertools.islice(self._batches, count)
            raise _CaseIsOver

        with suppress(_CaseIsOver):
            self._trainer.run(self._world, paced())

    def close(self) -> None:
        self._case_cleanup.close()
        self._cleanup.close()


class PlainLoop:
    """A plain loop over the same data, from the same weights, with the same optimizer."""

    def __init__(self, rank: int, world_size: int, port: int, scratch: Path) -> None:
        self._scratch = scratch
        use_interface_of("127.0.0.1")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=world_size)

    def begin(self, case: LoopCase) -> int:
        if case.items:
            items, model = Items(), item_model(case.model)
            batches = item_batches(items, case.batch, case.num_workers)
            self._steps = plain_loop(model, item_optimizer(model), batches)
            return len(items)
        config = case.config(self._scratch)
        task = make_task(config)
        ours = make_state(config, task, torch.device("cpu"))
        optimizer = type(ours.optimizer)(ours.model.parameters(), **ours.optimizer.defaults)
        train_set: Any = task.train_set
        images, labels = train_set.gather(torch.arange(len(train_set)), 0)
        self._steps = plain_loop(ours.model, optimizer, tensor_batches(images, labels, case.batch))
        return ours.length

    def train(self, blocks: Iterator[int]) -> None:
        for count in blocks:
            for _ in itertools.islice(self._steps, count):
                pass

    def close(self) -> None:
        self._steps.close()  # and with it the loader's processes
        dist.destroy_process_group()


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]]
) -> Generator[None, None, None]:
    """What one would write by hand; endless, one step per `next`."""
    ddp = DistributedDataParallel(model)
    ddp.train()  # type: ignore[no-untyped-call]
    for number, (images, labels) in enumerate(batches, start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(ddp(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number % LOSS_READ_EVERY == 0:
            loss.item()
        yield


# --- over tensors in memory -------------------------------------------------------------------------------------------


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


def tensor_batches(images: Tensor, labels: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of this rank; endless."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in itertools.count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step_indices in order.split(batch):  # type: ignore[no-untyped-call]
            indices = step_indices[rank::world_size]
            yield images.index_select(0, indices), labels.index_select(0, indices)


# --- over items, in a loop of the user's own --------------------------------------------------------------------------


NUM_ITEMS = 4096


class Items(Dataset[Any]):
    """Made-up images of 28 x 28 bytes, read one by one as most data sets are: mirrored at random, as floats."""

    def __init__(self) -> None:
        made = np.random.default_rng(0)
        self._images = torch.from_numpy(made.integers(0, 256, (NUM_ITEMS, 1, 28, 28), dtype=np.uint8))
        self._labels = made.integers(0, 10, NUM_ITEMS).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index].float().div_(255.0)
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.sub_(0.5).div_(0.5), self._labels[index]


def item_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build_model(name, channels=1, classes=10, image_size=28)


def item_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def item_batches(items: Items, batch: int, num_workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of this rank; endless."""
    sampler: DistributedSampler[Any] = DistributedSampler(items)
    loader = DataLoader(
        items,
        batch_size=batch // dist.get_world_size(),
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=start_loader_process,
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train_items(training: Training) -> None:
    """The same as a training function."""
    ddp = training.parallel()
    for _epoch in training.epochs():
        for images, labels in training.batches():
            training.optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
            training.commit(loss)


def _own_parts(case: LoopCase) -> Parts:
    model, items = item_model(case.model), Items()
    state = TrainState(
        model,
        item_optimizer(model),
        length=len(items),
        global_batch_size=case.batch,
        epochs=case.epochs,
        micro_batch_size=case.batch,
    )
    return Parts(OwnTask("train_items", model, items, default_collate), state, torch.device("cpu"))


class _CaseIsOver(BaseException):
    """Unwinds a training function, of which the end of the training is far away."""
