"""The load of the drills' own task: set by its flags, and none after the drill lets the job run free."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_train.tools.audit.record import PACE_VARIABLE
from elastic_train.tools.drills.task import BusyFlags, PacedDigits


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


class Model(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def passes(task: PacedDigits, slept: list[float], number: int, *, training: bool = True) -> list[float]:
    """Seconds that each of some forward passes of four samples takes."""
    model, took = Model().train(training), []
    for _ in range(number):
        slept.clear()
        task.forward(model, torch.zeros(4, 1, 8, 8))
        took.append(round(sum(slept), 6))
    return took


def test_it_is_busy_by_its_flags(slept: list[float]) -> None:
    flags = BusyFlags(first_step_seconds=9.0, step_seconds=1.0, hiccup_seconds=5.0, hiccup_every=3)
    assert passes(PacedDigits(flags), slept, 6) == [10.0, 1.0, 6.0, 1.0, 1.0, 6.0]
    assert passes(PacedDigits(), slept, 3) == [0.0, 0.0, 0.0]


def test_a_member_is_busy_for_its_part_of_an_evaluation(slept: list[float]) -> None:
    task = PacedDigits(BusyFlags(evaluation_seconds=9.0))
    num_samples = int(task.describe()["test_length"])
    assert passes(task, slept, 1, training=False) == [round(9.0 * 4 / num_samples, 6)]
    assert passes(task, slept, 1) == [0.0]


def test_only_one_may_be_busy(slept: list[float]) -> None:
    assert passes(PacedDigits(BusyFlags(step_seconds=1.0, busy_rank=0)), slept, 1) == [1.0]
    assert passes(PacedDigits(BusyFlags(step_seconds=1.0, busy_rank=1)), slept, 1) == [0.0]


def test_a_job_that_runs_free_is_not_busy(tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACE_VARIABLE, str(tmp_path / "pace"))
    task = PacedDigits(BusyFlags(step_seconds=1.0, evaluation_seconds=9.0))
    (tmp_path / "pace").write_text("0.5")
    assert passes(task, slept, 1) == [3.0]
    (tmp_path / "pace").write_text("0.0")
    assert passes(task, slept, 1) == [0.0]
    assert passes(task, slept, 1, training=False) == [0.0]


def test_a_large_state_is_trained() -> None:
    torch.manual_seed(0)
    task = PacedDigits(BusyFlags(state_mb=2))
    model = task.build_model()
    ballast = dict(model.named_parameters())["ballast"]
    assert 2 * ballast.numel() * ballast.element_size() == 2 * 2**20, "weights and momentum"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    before = ballast.detach().clone()
    inputs, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    task.loss(model, (inputs, labels)).backward()
    optimizer.step()
    assert ballast.grad is not None
    assert not torch.equal(before, ballast)
