"""After a loss survivors can differ by a step: what is sent then, and that a stop may save meanwhile. Two processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elastic_train.elastic import handover
from elastic_train.elastic.restore import sync_from_freshest
from elastic_train.training.state import TrainState, state_sha256
from tests.ranks import on_each_rank

FROZEN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Case:
    """Rank 1 is further, or has the same step as rank 0; its rate is another one."""

    steps: tuple[int, int]
    is_written: bool = False
    """a forward pass has written into rank 0's frozen weights"""
    apart: tuple[int, ...] = ()


CASES = {
    "behind": Case((2, 3)),
    "apart": Case((3, 3), apart=(1,)),
    "written": Case((2, 3), is_written=True),
    "newcomer": Case((-1, 3)),
}


def make_state(steps: int) -> TrainState:
    torch.manual_seed(1)
    frozen = nn.Linear(1024, FROZEN_BYTES // 4096, bias=False).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model, optimizer, length=100, global_batch_size=10, epochs=3)
    for _ in range(steps):
        optimizer.zero_grad()
        model[1](torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.commit(0.5)
    return state


def survivors(rank: int, path: Path) -> None:
    for name, case in CASES.items():
        (path / f"{name}-{rank}.json").write_text(json.dumps(survive(rank, case)))


def survive(rank: int, case: Case) -> dict[str, Any]:
    state = make_state(max(case.steps[rank], 0))
    if case.is_written and rank == 0:
        with torch.no_grad():
            state.model[0].weight[3, 3] += 1.0
    state.optimizer.param_groups[0]["lr"] /= 1 + rank
    sent: list[int] = []
    send = handover.Link.send

    def counted(link: handover.Link, tensor: torch.Tensor, targets: Sequence[int]) -> None:
        sent.append(tensor.nbytes * len(targets))
        send(link, tensor, targets)

    could_save: list[bool] = []
    loaded: list[dict[str, Any]] = []

    def check() -> None:
        """As a late stop does, on a thread of its own."""
        could_save.append(state.lock.acquire(0.0))
        if could_save[-1]:
            state.lock.give_back()

    with mock.patch.object(handover.Link, "send", counted):
        source = sync_from_freshest(state, case.steps, check, lambda: None, case.apart, loaded.append)
    return {
        "source": source,
        "step": state.step,
        "lr": state.optimizer.param_groups[0]["lr"],
        "sent": sum(sent),
        "could_save": could_save,
        "loaded": len(loaded),
        "is_held": not state.lock.acquire(0.0),
        "hash": state_sha256(state.model.state_dict()),
        "momentum": state_sha256({"0": state.optimizer.state_dict()["state"][0]["momentum_buffer"]}),
    }


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes had after each case."""
    path = tmp_path_factory.mktemp("survived")
    on_each_rank(survivors, path, size=2)
    return {name: [json.loads((path / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_both_have_the_same_then(survived: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = CASES[name]
    for rank, told in enumerate(survived[name]):
        source, lr = (0, 0.1) if case.apart else (1, 0.05)
        assert told["loaded"] == (rank != source)
        assert (told["source"], told["step"], told["lr"]) == (source, case.steps[1], lr)
        assert told["hash"] == survived[name][1]["hash"]
        assert told["momentum"] == survived[name][1]["momentum"]
        assert told["is_held"], "by the thread that trains"


def test_frozen_weights_that_both_have_are_not_sent(survived: dict[str, list[dict[str, Any]]]) -> None:
    behind, source = survived["behind"]
    assert 0 < source["sent"] < 100_000
    assert behind["sent"] == 0


def test_one_with_the_same_step_and_another_rate_takes_over_the_first_ones(
    survived: dict[str, list[dict[str, Any]]],
) -> None:
    source, apart = survived["apart"]
    assert 0 < source["sent"] < 100_000
    assert apart["sent"] == 0


@pytest.mark.parametrize("name", ["written", "newcomer"])
def test_others_are_and_a_stop_may_save_what_is_there_meanwhile(
    survived: dict[str, list[dict[str, Any]]], name: str
) -> None:
    told = survived[name]
    assert told[1]["sent"] > FROZEN_BYTES
    for one in told:
        assert one["could_save"], "it took a while"
        assert all(one["could_save"])
