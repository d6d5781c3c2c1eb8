"""The results of an evaluation, in a world of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastic_train.config import Config
from elastic_train.training import evaluation
from elastic_train.training.evaluation import evaluate, find_no_sum
from elastic_train.training.step import seed_model_draws
from elastic_train.training.tasks import Task
from elastic_train.world import World
from tests.unit.test_liveness import make_member

WORLD = World(rank=0, generation=0, members=(make_member(0),))
CPU = torch.device("cpu")


class RunsDry(Dataset[Any]):
    """An iterator of its own ends before its samples do."""

    def __init__(self) -> None:
        self._held = iter(range(100))

    def __len__(self) -> int:
        return 128

    def __getitem__(self, _index: int) -> tuple[torch.Tensor, int]:
        next(self._held)
        return torch.ones(4), 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_runs_dry_ends_no_evaluation_early(num_workers: int) -> None:
    """A loop over its batches would take StopIteration for their end, and count the others as zeros."""
    with pytest.raises(RuntimeError, match=r"StopIteration.* item 100 of the data set could not be read"):
        evaluate(
            nn.Linear(4, 2), Task(), RunsDry(), WORLD, CPU,
            Config(num_workers=num_workers, micro_batch_size=32),
        )  # fmt: skip


class Late(TensorDataset):
    """Its items are there when it knows the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.is_ready = True

    def __getitem__(self, index: int) -> Any:
        assert self.is_ready
        return super().__getitem__(index)


class Counting(Task):
    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return {"mean": batch[0].mean() + 1.0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whether_a_task_gives_sums_is_asked_of_a_test_set_that_is_told_its_epoch(num_workers: int) -> None:
    found = find_no_sum(
        nn.Linear(4, 2), Counting(), Late(torch.ones(8, 4)), CPU,
        Config(num_workers=num_workers, micro_batch_size=4),
    )  # fmt: skip
    assert found is not None
    assert found.startswith("Counting.evaluate gives 'mean' = 2 for 4 samples, and 2 and 2 for its halves: no sum")


class Noisy(Task):
    """As the loss of a VAE, which draws in eval mode too."""

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": (batch[0] + torch.randn_like(batch[0])).square().sum()}


def test_what_an_evaluation_draws_is_the_same_in_every_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was drawn before; by block, and by no number of a step."""

    def run(world: World) -> float:
        data = TensorDataset(torch.ones(100, 4))
        return evaluate(nn.Linear(4, 2), Noisy(), data, world, CPU, Config(seed=3, micro_batch_size=32))["loss"]

    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(run(WORLD))
    assert losses[0] == losses[1]
    table = torch.zeros(1, 4, dtype=torch.float64)
    monkeypatch.setattr(evaluation, "gather_json", lambda _names: [["loss"]])
    monkeypatch.setattr(evaluation, "all_reduce", table.add_)
    for rank in (0, 1):
        run(World(rank=rank, generation=0, members=(make_member(0), make_member(1))))
    expected = []
    for block, samples in enumerate((32, 32, 32, 4)):
        seed_model_draws(3, 0, block, CPU)
        expected.append((1 + torch.randn(samples, 4)).square().sum().double().item())
    assert table.tolist() == [expected]
    assert losses[0] == sum(expected) / 100


class OfClasses(Task):
    """Has sums of the classes that a batch has alone."""

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return {f"of {label}": (batch[0] == label).sum() for label in batch[0].unique().tolist()}


def test_a_sum_that_only_another_rank_has_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.tensor([0, 0, 1, 2]))
    monkeypatch.setattr(evaluation, "gather_json", lambda names: [names, ["of 2", "of 1"]])
    monkeypatch.setattr(evaluation, "all_reduce", lambda table: table[1:, 1].add_(1))
    pair = World(rank=0, generation=0, members=(make_member(0), make_member(1)))
    found = evaluate(nn.Linear(1, 1), OfClasses(), data, pair, CPU, Config(micro_batch_size=2))
    assert found == {"of 0": 0.5, "of 1": 0.25, "of 2": 0.25}
    assert found == evaluate(nn.Linear(1, 1), OfClasses(), data, WORLD, CPU, Config(micro_batch_size=2))


def test_what_is_drawn_on_any_gpu_of_a_model_is_a_function_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes. `--parallel dp` has replicas on all of them, whose draws would go on from what was drawn before."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda _seed: pytest.fail("of the present GPU alone"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    for step, device in ((1, "cuda:0"), (2, "cuda:0"), (1, "cuda:1"), (1, "cpu")):
        seed_model_draws(3, step, 0, torch.device(device))
    assert seeds[0] == seeds[2] == torch.initial_seed()
    assert len(set(seeds)) == 2
