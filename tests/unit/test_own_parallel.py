"""The activity of a rank in a step of a loop of one's own: it decides how long the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.elastic.own_parallel import OwnParallel
from elastic_train.elastic.session_steps import StepInHand
from elastic_train.errors import UsageError
from elastic_train.protocol.heartbeat import FIRST_SECONDS, OwnHeartbeat, Pace
from elastic_train.rules import Activity
from elastic_train.training.sampler import MicroBatch
from elastic_train.world import World
from tests.unit.test_liveness import make_member

PAIR = World(rank=0, generation=0, members=(make_member(0), make_member(1)), uid="pair")


class Step:
    """One in hand, after some that were fast, in a world of two; the group is this process's alone."""

    def __init__(self) -> None:
        pace = Pace(peer_timeout=10.0)
        pace.note_step(0.05)
        self.own, self.done = OwnHeartbeat(pace, lambda: 0.0), list[Activity]()
        self.hand = StepInHand(MicroBatch(0, 1, 0, np.arange(2), 4, is_last=True), 2)
        steps: Any = SimpleNamespace(in_hand=None, required=lambda: self.hand, turn_to_function=lambda: None)
        watcher: Any = SimpleNamespace(do=self.do, pace=pace)
        sums: Any = SimpleNamespace(settle=lambda: None)
        self.parallel = OwnParallel(PAIR, torch.device("cpu"), watcher, steps, sums, lambda: None, lambda: None)
        self.steps = steps

    def do(self, activity: Activity, limit: float | None = None) -> None:
        self.own.turn_to(activity, limit)
        self.done.append(activity)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        ddp = self.parallel.wrap(module, **options)
        self.steps.in_hand = self.hand
        self.done.clear()
        return ddp

    @property
    def at(self) -> tuple[Activity, float]:
        activity, _, limit = self.own.at()
        return activity, limit


@pytest.fixture
def step(group_of_one: None) -> Iterator[Step]:
    step = Step()
    yield step
    step.parallel.close()


def layers() -> nn.Module:
    """Whose gradients DDP sums in two buckets."""
    return nn.Sequential(nn.Linear(4, 80_000), nn.Linear(80_000, 1))


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"static_graph": True, "find_unused_parameters": True}], ids=str
)
def test_what_follows_a_backward_pass_is_this_ranks_own(step: Step, options: dict[str, bool]) -> None:
    """Where gradients are looked at before the optimizer steps (histograms, say) that takes 10 to 30 s."""
    ddp = step.wrap(layers(), **options)
    for _ in range(3):
        if not options:  # torch's static graph has no pass before its first sum
            with ddp.no_sync():
                ddp(torch.ones(2, 4)).sum().backward()
            assert step.at == (Activity.COMPUTE, 300.0), "it has waited for nobody"
        step.done.clear()
        ddp(torch.ones(2, 4)).sum().backward()
        assert step.done == [Activity.REDUCE, Activity.COMPUTE, Activity.REDUCE, Activity.COMPUTE]
        assert step.at == (Activity.COMPUTE, 300.0)


def test_where_ddp_looks_for_unused_parameters_it_may_wait_yet_and_may_pause(step: Step) -> None:
    ddp = step.wrap(layers(), find_unused_parameters=True)
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
        assert step.at == (Activity.STEP, 300.0)


def test_a_backward_pass_through_two_modules_waits_for_the_sums_of_both(step: Step) -> None:
    head, body = step.wrap(nn.Linear(3, 1)), step.wrap(nn.Linear(4, 3))
    leave_head = step.parallel._end_backward(step.hand, is_on_gpu=False)
    leave_body = step.parallel._end_backward(step.hand, is_on_gpu=False)
    leave_head()
    assert step.own.at()[0] is Activity.REDUCE
    leave_body()
    assert step.own.at()[0] is Activity.COMPUTE
    head(body(torch.ones(2, 4))).sum().backward()
    assert step.at == (Activity.COMPUTE, 300.0)


def test_a_module_of_a_world_that_is_over_says_so(step: Step) -> None:
    """Its group is gone, and so is its step: that is no missing commit."""
    ddp = step.wrap(nn.Linear(4, 1))
    step.parallel.close()
    with pytest.raises(UsageError, match=r"^a DDP module of an earlier world was trained: make it with training\.par"):
        ddp(torch.ones(2, 4)).sum().backward()


def test_an_evaluation_before_the_steps_pass_has_the_time_of_one_between_steps(step: Step) -> None:
    """It stands at the top of the loop, which has its batch already, and passes through the module itself."""
    model = layers()
    ddp = step.wrap(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert step.at == (Activity.COMPUTE, FIRST_SECONDS)
    ddp(torch.ones(2, 4))
    assert step.at == (Activity.COMPUTE, 300.0)
