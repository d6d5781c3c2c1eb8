"""Training with ordered reduction ends in the same bits, whatever worlds it went through.

One set of processes runs all scenarios, each over real gloo groups, with the parts that a worker is made of; the
tests below compare what they wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastic_train.config import Config
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.tools.bench.reduction_speed import local_world
from elastic_train.training import determinism
from elastic_train.training.batches import steps
from elastic_train.training.models import build_model
from elastic_train.training.optimizers import build_optimizer
from elastic_train.training.ordered import OrderedReduction
from elastic_train.training.reduction import Loss
from elastic_train.training.state import TrainState, state_sha256
from elastic_train.training.step import task_loss, train_step
from elastic_train.training.tasks import Task
from elastic_train.world import World
from tests.processes import forkserver

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scenario:
    """What is trained, and in which worlds: (world size, steps) one after the other."""

    worlds: tuple[tuple[int, int], ...]
    model: str = "cnn"
    optimizer: str = "sgd"
    precision: str = "fp32"
    virtual_ranks: int = 8
    batch: int = 24
    length: int = 53
    """the last step of an epoch has 5 samples: some virtual ranks have none"""
    clip: float | None = None
    dies: int | None = None
    """the last rank dies in the middle of this step; the others go on with one fewer"""

    @property
    def file_name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16] + ".json"


class Images(Task):
    """Random images and labels for a model by name."""

    def __init__(self, model: str, length: int) -> None:
        self.model_name, self.length = model, length
        self.size = 32 if model == "resnet18" else 8
        self.channels = 3 if model == "resnet18" else 1

    def build_model(self) -> nn.Module:
        if self.model_name == "forked":
            return Forked()
        return build_model(self.model_name, channels=self.channels, classes=10, image_size=self.size)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.length, self.channels, self.size, self.size, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (self.length,), generator=generator))


class Forked(nn.Module):
    """Which branch a micro-batch takes depends on its samples: gradients differ in presence. One is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 10) for _ in range(5))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = int(images.double().sum().abs() * 1000) % 4
        outputs: torch.Tensor = self.branches[branch](self.stem(images.flatten(1)).relu())
        return outputs


def make_state(scenario: Scenario, config: Config, task: Task) -> TrainState:
    torch.manual_seed(0)
    model = task.build_model()
    return TrainState(
        model,
        build_optimizer(
            task.parameter_groups(model), name=scenario.optimizer, lr=0.05, momentum=0.9, weight_decay=1e-3
        ),
        torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3) if scenario.precision == "fp16" else None,
        schedule="cosine",
        length=scenario.length,
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
        micro_batch_size=config.micro_batch_size,
    )


def digest(state: TrainState) -> str:
    """Of the optimizer's state."""
    found = hashlib.sha256()
    for index, values in sorted(state.optimizer.state_dict()["state"].items()):
        for name, value in sorted(values.items()):
            array = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            found.update(f"{index}{name}".encode() + array)
    return found.hexdigest()


@contextmanager
def group(store: dist.Store, name: str, rank: int, world_size: int) -> Iterator[World]:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        yield local_world(rank, world_size)
    finally:
        dist.destroy_process_group()


@dataclass
class Trainer:
    """One rank's part of a scenario."""

    scenario: Scenario
    handoff: Path
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    buffers_restored: bool = True

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.task = Images(scenario.model, scenario.length)
        self.config = Config(
            global_batch_size=scenario.batch, virtual_ranks=scenario.virtual_ranks, reduction="ordered", epochs=9
        )
        self.state = make_state(scenario, self.config, self.task)
        self.loss: Loss = task_loss(
            self.task, seed=0, precision=scenario.precision, device=CPU, stand_in=lambda: None, loss=self.task.loss
        )

    def train(self, world: World, num_steps: int, dies_at: int | None = None) -> None:
        state = self.state
        reduction = OrderedReduction(state.model, world, CPU, self.scenario.virtual_ranks)
        if self.scenario.clip is not None:
            reduction = clipping(reduction, state, self.scenario.clip)
        for micro_batches in steps(self.task.train_set, self.task.collate, state, world, self.config, CPU):
            loss = self.loss
            if dies_at == state.step + 1:
                loss = dying_loss(loss, last_shard=micro_batches[-1][0].shard) if is_last(world) else loss
            before = [buffer.clone() for buffer in state.model.buffers()]
            try:
                result = train_step(state, micro_batches, reduction, loss, votes=(1, int(is_last(world))))
            except RuntimeError as error:
                if dies_at != state.step + 1 or not is_communication_error(error):
                    raise
                after = list(state.model.buffers())
                self.buffers_restored = all(map(torch.equal, before, after))
                state.optimizer.zero_grad(set_to_none=True)
                return
            assert result.votes == (world.world_size, 1)
            self.losses.append(result.loss)
            self.scales.append(state.scaler.get_scale() if state.scaler else 1.0)
            self.unused = [name for name, p in state.model.named_parameters() if p.grad is None]
            state.commit(result.loss)
            num_steps -= 1
            if num_steps == 0:
                return

    def hand_over(self, world: World) -> None:
        """Write rank 0's state to a file, for the members of the next world."""
        if world.rank == 0:
            history = {"losses": self.losses, "scales": self.scales}
            torch.save({"state": self.state.state_dict(), "history": history}, self.handoff)
        dist.barrier()

    def take_over(self) -> None:
        saved = torch.load(self.handoff, weights_only=True)
        self.state.load_state_dict(saved["state"])
        self.losses, self.scales = saved["history"]["losses"], saved["history"]["scales"]

    def outcome(self) -> dict[str, Any]:
        return {
            "state_sha256": state_sha256(self.state.model.state_dict()),
            "optimizer": digest(self.state),
            "losses": [loss.hex() for loss in self.losses],
            "scales": self.scales,
            "unused": self.unused,
            "buffers_restored": self.buffers_restored,
            "step": self.state.step,
        }


def is_last(world: World) -> bool:
    return world.rank == world.world_size - 1


def dying_loss(loss: Loss, last_shard: int) -> Loss:
    """Ends this process after a forward pass of its last micro-batch, while the others wait in the exchange."""

    def die(module: nn.Module, micro_batch: Any, batch: Any) -> torch.Tensor:
        value = loss(module, micro_batch, batch)
        if micro_batch.shard == last_shard:
            os._exit(7)
        return value

    return die


def clipping(reduction: OrderedReduction, state: TrainState, norm: float) -> Any:
    def run(*arguments: Any, **more: Any) -> Any:
        totals = reduction.run(*arguments, **more)
        nn.utils.clip_grad_norm_(state.model.parameters(), norm)
        return totals

    return SimpleNamespace(run=run)


def run_scenarios(rank: int, port: int, out: Path, scenarios: list[Scenario]) -> None:
    """The life of one process: its rank's part of every scenario."""
    sys.stderr = (out / f"rank-{rank}.log").open("w", buffering=1)
    determinism.switch_on(strict=True, warn=print)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=120))
    for number, scenario in enumerate(scenarios):
        trainer = Trainer(scenario, out / f"{number}.pt")
        for phase, (world_size, num_steps) in enumerate(scenario.worlds):
            if rank >= world_size or num_steps == 0:
                continue
            # Everybody but the first world's members comes with a state of its own, until it takes over rank 0's.
            with group(store, f"{number}/{phase}", rank, world_size) as world:
                if phase:
                    trainer.take_over()
                trainer.train(world, num_steps)
                trainer.hand_over(world)
        if scenario.dies is not None and rank < scenario.worlds[0][0]:
            go_through_death(trainer, store, number, rank, scenario.worlds[0][0], scenario.dies)
        if rank < scenario.worlds[-1][0] - (scenario.dies is not None):
            path = out / f"rank-{rank}" / scenario.file_name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(trainer.outcome()))


def go_through_death(
    trainer: Trainer, store: dist.Store, number: int, rank: int, world_size: int, dies_at: int
) -> None:
    """Train into the step in which the last rank dies, then redo it with one rank fewer, to the seventh step."""
    with group(store, f"{number}/whole", rank, world_size) as world:
        trainer.train(world, dies_at, dies_at)
    with group(store, f"{number}/survivors", rank, world_size - 1) as world:
        trainer.train(world, 7 - trainer.state.step)


def run_all(scenarios: list[Scenario], out: Path, timeout: float = 280) -> None:
    """Runs scenarios in as many processes as the largest world needs; at most the last one has a death."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    num_processes = max(size for scenario in scenarios for size, _ in scenario.worlds)
    context = forkserver()
    processes = [
        context.Process(target=run_scenarios, args=(rank, store.port, out, scenarios), daemon=True)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if any(process.exitcode == 1 for process in processes):
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
    logs = "".join(path.read_text()[-2000:] for path in sorted(out.glob("rank-*.log")))
    last = scenarios[-1]
    expected = {last.worlds[0][0] - 1: 7} if last.dies is not None else {}
    codes = [process.exitcode for process in processes]
    assert codes == [expected.get(rank, 0) for rank in range(num_processes)], f"exit codes {codes}\n{logs}"


def outcomes(out: Path, scenario: Scenario) -> list[dict[str, Any]]:
    """What each rank of its last world ended with."""
    return [json.loads(path.read_text()) for path in sorted(out.glob(f"rank-*/{scenario.file_name}"))]


def assert_same_bits(out: Path, scenarios: list[Scenario]) -> dict[str, Any]:
    """All ranks of all these scenarios ended with the same; returns it."""
    found = [outcomes(out, scenario) for scenario in scenarios]
    for scenario, ranks in zip(scenarios, found, strict=True):
        assert len(ranks) == scenario.worlds[-1][0] - (scenario.dies is not None), scenario
        for rank in ranks:
            assert rank == found[0][0], scenario
    return found[0][0]


def in_worlds(*sizes: int, steps: int = 4, **values: Any) -> list[Scenario]:
    return [Scenario(worlds=((size, steps),), **values) for size in sizes]


CNN = in_worlds(1, 2, 3, 4, steps=7)
CHANGING = [Scenario(worlds=((4, 2), (3, 1), (1, 1), (2, 2), (3, 1)))]
DYING = [Scenario(worlds=((4, 0),), dies=4)]
QUICK = {
    "cnn": [*CNN, *CHANGING, *DYING],
    "unused": in_worlds(1, 2, 3, model="forked", optimizer="adamw"),
    "adamw": in_worlds(1, 3, 4, optimizer="adamw", virtual_ranks=12, clip=0.5),
    "bf16": in_worlds(1, 3, precision="bf16"),
    "fp16": in_worlds(1, 2, 3, steps=7, precision="fp16"),
    "resnet18": in_worlds(1, 3, steps=2, model="resnet18", batch=8, length=13),
}
SLOW = {
    "cnn": in_worlds(1, 2, 3, 4, 5, 6, 7, 8, steps=30),
    "v12": in_worlds(1, 5, 7, 8, virtual_ranks=12, optimizer="adamw", steps=10),
    "resnet18": in_worlds(1, 2, 3, 4, 5, 8, steps=4, model="resnet18", batch=8, length=29),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ordered")
    scenarios = [scenario for name in QUICK for scenario in QUICK[name]]
    run_all(sorted(scenarios, key=lambda scenario: scenario.dies is not None), out)
    return out


def test_any_world_gives_the_same_bits(ran: Path) -> None:
    outcome = assert_same_bits(ran, CNN)
    assert outcome["step"] == 7
    assert len(set(outcome["losses"])) == 7


def test_changing_worlds_in_mid_epoch_give_the_same_bits(ran: Path) -> None:
    assert_same_bits(ran, [CNN[0], *CHANGING])


def test_a_death_inside_a_step_leaves_the_buffers_and_the_bits(ran: Path) -> None:
    outcome = assert_same_bits(ran, [CNN[0], *DYING])
    assert outcome["buffers_restored"]


def test_parameters_that_some_or_all_micro_batches_do_not_use(ran: Path) -> None:
    outcome = assert_same_bits(ran, QUICK["unused"])
    assert "branches.4.weight" in outcome["unused"], "used by nobody: no gradient, as in one process"
    assert "stem.weight" not in outcome["unused"]


def test_adamw_with_gradient_clipping(ran: Path) -> None:
    assert_same_bits(ran, QUICK["adamw"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions(ran: Path, precision: str) -> None:
    outcome = assert_same_bits(ran, QUICK[precision])
    if precision == "fp16":
        assert len(set(outcome["scales"])) > 1, "the scaler has changed its mind at least once"


def test_resnet18(ran: Path) -> None:
    assert_same_bits(ran, QUICK["resnet18"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW)
def test_larger_worlds(tmp_path: Path, name: str) -> None:
    run_all(SLOW[name], tmp_path, timeout=850)
    assert_same_bits(tmp_path, SLOW[name])
