"""The loops that `bench loop` compares: ours, both bundled and a user's own, and a loop written by hand.

Each is built for one case at a time and driven by blocks of steps: when it asks for the size of the next block, the
block before is over.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastic_train.config import Config
from elastic_train.elastic.loop import bundled
from elastic_train.elastic.own_loop import run
from elastic_train.elastic.run import run_worker
from elastic_train.elastic.session import Training
from elastic_train.elastic.worker import Worker, build, make_state, make_task
from elastic_train.protocol.addresses import use_interface_of
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal
from elastic_train.training import models
from elastic_train.training.datasets import ImageData, TensorImages, synthetic
from elastic_train.training.loader_processes import start_loader_process
from elastic_train.training.reduction import Share
from elastic_train.training.tasks import ImageClassification

if TYPE_CHECKING:
    from elastic_train.tools.bench.loop_speed import LoopCase

LOSS_READ_EVERY = 50


class OurLoop:
    """The real loop, with each case as a job of its own; its training function waits between blocks of steps."""

    def __init__(self, rank: int, world_size: int, port: int, scratch: Path) -> None:
        self._scratch, self._num_cases = scratch, 0
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("MASTER_PORT", port)):
            os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def begin(self, case: LoopCase) -> int:
        """Build the parts of a case; return the length of its training set. Every rank calls it."""
        self._num_cases += 1
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self._num_cases)  # distinguishes the jobs at one store
        config = case.config(self._scratch)
        if case.items:
            items = items_of(case)
            self._train = partial(run_items, model=items.model(case.model), items=items, config=config)
            return len(items)
        worker = build(config, Launch.from_environment(os.environ, None), StopSignal())
        self._train = partial(run_bundled, worker=worker)
        return worker.state.length

    def train(self, blocks: Iterator[int]) -> None:
        orders = (number for count in blocks for number in range(count))

        def paced(whole: Callable[[], Iterator[Share]]) -> Iterator[Share]:
            for share in whole():
                if next(orders, None) is None:
                    raise _CaseIsOver
                yield share

        def hold_up(training: Training) -> None:
            training.shares = partial(paced, training.shares)  # type: ignore[method-assign]

        with suppress(_CaseIsOver):
            self._train(hold_up)

    def close(self) -> None:
        """Do nothing: a case leaves nothing behind."""


def run_bundled(hold_up: Callable[[Training], None], *, worker: Worker) -> None:
    program = bundled(worker)

    def train(training: Training) -> None:
        hold_up(training)
        program.train(training)

    run_worker(worker, replace(program, train=train))


class PlainLoop:
    """A plain loop over the same data, from the same weights, with the same optimizer."""

    def __init__(self, rank: int, world_size: int, port: int, scratch: Path) -> None:
        self._scratch = scratch
        use_interface_of("127.0.0.1")
        store = dist.PrefixStore("plain", dist.TCPStore("127.0.0.1", port, is_master=False))
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    def begin(self, case: LoopCase) -> int:
        if case.items:
            items = items_of(case)
            model = items.model(case.model)
            self._steps = plain_loop(model, item_optimizer(model), item_batches(items, case), items.loss)
            return len(items)
        config = case.config(self._scratch)
        task = make_task(config)
        device = torch.device(case.device)
        ours = make_state(config, task, device)
        optimizer = type(ours.optimizer)(ours.model.parameters(), **ours.optimizer.defaults)
        train_set: Any = task.train_set
        images, labels = train_set.gather(torch.arange(len(train_set)), 0)
        batches = tensor_batches(images, labels, case.batch, device)
        self._steps = plain_loop(ours.model, optimizer, batches, cross_entropy)
        return ours.length

    def train(self, blocks: Iterator[int]) -> None:
        for count in blocks:
            for _ in itertools.islice(self._steps, count):
                pass

    def close(self) -> None:
        self._steps.close()  # ends the loader's processes too
        dist.destroy_process_group()


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    compute: Callable[[nn.Module, Any], Tensor],
) -> Generator[None, None, None]:
    """A loop as one would write it by hand; endless, one step per `next`."""
    ddp = DistributedDataParallel(model)
    ddp.train()  # type: ignore[no-untyped-call]
    for number, batch in enumerate(batches, start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = compute(ddp, batch)
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


def tensor_batches(images: Tensor, labels: Tensor, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of this rank, on its device; endless."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in itertools.count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step_indices in order.split(batch):  # type: ignore[no-untyped-call]
            indices = step_indices[rank::world_size]
            chosen = (images.index_select(0, indices), labels.index_select(0, indices))
            if device.type == "cuda":
                chosen = tuple(one.pin_memory().to(device, non_blocking=True) for one in chosen)  # type: ignore[assignment]
            yield chosen


def cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(module(images), labels)


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

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return models.build_model(name, channels=1, classes=10, image_size=28)

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module, batch)


class ItemsOnGpu(Dataset[Any]):
    """Made-up images of 224 x 224 in this rank's GPU memory, for bf16; an item is the index of an image."""

    def __init__(self) -> None:
        self._images = torch.randn(256, 3, 224, 224, device="cuda")
        self._labels = torch.randint(1000, (256,), device="cuda")

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> int:
        return index % len(self._images)

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return models.build_model(name, channels=3, classes=1000, image_size=224).cuda()

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        chosen = batch.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            return cross_entropy(module, (self._images[chosen], self._labels[chosen]))


def items_of(case: LoopCase) -> Items | ItemsOnGpu:
    return Items() if case.device == "cpu" else ItemsOnGpu()


def item_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def item_batches(items: Items | ItemsOnGpu, case: LoopCase) -> Iterator[Any]:
    """The batches of this rank; endless."""
    sampler: DistributedSampler[Any] = DistributedSampler(items)
    loader = DataLoader(
        items,
        batch_size=case.batch // dist.get_world_size(),
        sampler=sampler,
        num_workers=case.num_workers,
        persistent_workers=case.num_workers > 0,
        pin_memory=case.device == "cuda",
        worker_init_fn=start_loader_process,
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def run_items(
    hold_up: Callable[[Training], None], *, model: nn.Module, items: Items | ItemsOnGpu, config: Config
) -> None:
    """Train on items by a user's training function."""

    def train_items(training: Training) -> None:
        hold_up(training)
        ddp = training.parallel()
        for _epoch in training.epochs():
            for batch in training.batches():
                training.optimizer.zero_grad(set_to_none=True)
                loss = items.loss(ddp, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                training.optimizer.step()
                training.commit(loss)

    run(train_items, model, item_optimizer(model), items, config)


class _CaseIsOver(BaseException):
    """Unwinds a training function whose training would go on."""
