"""Hints at probable mistakes in a loop of one's own: rank 0 logs each once, and none for a correct loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic.loop_hints import LoopHints
from elastic_train.training.state import Stateful, TrainState

ALONE: Any = SimpleNamespace(rank=0)
SECOND: Any = SimpleNamespace(rank=1)


class Told:
    """A worker, and the warnings that it has got."""

    def __init__(self, *, is_open: bool = True, with_gradients: bool = True, **extras: Stateful) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = TrainState(
            self.model, self.optimizer, None, schedule=None, length=8, global_batch_size=4, epochs=1, extras=extras
        )
        self.warnings: list[str] = []
        reporter = SimpleNamespace(warn=self.warnings.append, report=self.warnings.append)
        worker: Any = SimpleNamespace(state=state, reporter=reporter, launch=SimpleNamespace(is_open=is_open))
        self.hints = LoopHints(worker)
        if with_gradients:
            self.add_up(0.5)

    def add_up(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)


def test_gradients_that_add_up_over_commits() -> None:
    told = Told()
    told.add_up(0.5)
    told.hints.note_unstepped(SECOND)
    assert told.warnings == []
    for _ in range(3):
        told.hints.note_unstepped(ALONE)
    [warning] = told.warnings
    assert warning.startswith("step 1 is committed without a step of the optimizer")
    assert "--global-batch-size" in warning


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_a_message_that_waits_no_longer_than_the_group_took_to_form(operation: str) -> None:
    told = Told()
    told.hints.note_lost(RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:51633"))
    assert told.warnings == []
    late = f"[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for {operation} operation to complete"
    for _ in range(2):
        told.hints.note_lost(RuntimeError(late))
    [warning] = told.warnings
    assert late in warning
    assert "dist.new_group()" in warning


def test_a_step_without_a_backward_pass() -> None:
    told = Told(with_gradients=False)
    for world in (SECOND, ALONE, ALONE):
        told.hints.note_stepped(world, is_in_hand=True)
    [warning] = told.warnings
    assert "loss.backward()" in warning


def test_a_model_that_is_called_beside_its_ddp() -> None:
    """The backward pass fills the gradients, and nobody averages them."""
    told = Told()
    for rank, world_size in ((0, 1), (1, 2), (0, 2), (0, 2)):
        world: Any = SimpleNamespace(rank=rank, world_size=world_size)
        told.hints.note_unreduced(world)
    [warning] = told.warnings
    assert warning.startswith("the optimizer has stepped in step 1, and no gradient came through a module")


def test_a_step_that_a_scaler_has_skipped_adds_nothing_up() -> None:
    told = Told(with_gradients=False)
    told.hints.note_unstepped(ALONE)
    for value in (float("inf"), 0.0):  # or, after `zero_grad`, nothing
        told.add_up(value)
        told.hints.note_unstepped(ALONE)
    assert told.warnings == []
    told.add_up(1.0)
    told.hints.note_unstepped(ALONE)
    assert len(told.warnings) == 1, "it goes on looking"


def test_sparse_gradients_are_looked_at_too() -> None:
    told = Told()
    told.hints._worker.state.model = model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1, 1])).sum().backward()
    told.hints.note_unstepped(ALONE)
    assert len(told.warnings) == 1


def test_where_another_optimizer_may_have_stepped_nothing_is_said() -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    told = Told(other=other)
    told.hints.note_unstepped(ALONE)
    assert told.warnings == []


@pytest.mark.parametrize(("is_open", "count"), [(True, 1), (False, 0)])
def test_who_trains_alone_without_ddp_is_told_before_another_one_joins(is_open: bool, count: int) -> None:
    told = Told(is_open=is_open)
    for _ in range(2):
        told.hints.note_unwrapped()
    assert len(told.warnings) == count
    assert all("training.parallel()" in warning for warning in told.warnings)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_scheduler_that_is_not_saved(is_given: bool) -> None:
    told = Told()
    scheduler = torch.optim.lr_scheduler.StepLR(told.optimizer, 1)
    if is_given:
        told.hints._worker.state.extras["scheduler"] = scheduler
    for world in (SECOND, ALONE, ALONE):
        told.hints.note_stepped(world, is_in_hand=True)
    assert len(told.warnings) == (not is_given)


def test_a_scheduler_of_another_optimizer_that_is_not_saved() -> None:
    """Though that of the first one is, which leads to the whole state by our hooks."""
    other = torch.optim.Adam(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    told = Told(other=other)
    state = told.hints._worker.state
    state.kept.updates.call_before_steps(lambda *_: state.extras["none"])  # type: ignore[arg-type,return-value]
    state.extras["scheduler"] = torch.optim.lr_scheduler.StepLR(told.optimizer, 1)
    told.hints.note_stepped(ALONE, is_in_hand=True)
    [warning] = told.warnings
    assert warning.startswith("Adam in the extras has a scheduler of torch's, which is not saved")
    assert scheduler.optimizer is other, "it is there yet"


@pytest.mark.parametrize("has_read", [False, True], ids=["", "its dict is an object"])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_scheduler_by_a_metric_that_is_not_saved(is_given: bool, has_read: bool) -> None:
    """It leaves no note in the groups, as the others do."""
    told = Told()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(told.optimizer)
    if has_read:
        scheduler.state_dict()
    if is_given:
        told.hints._worker.state.extras["scheduler"] = scheduler
    told.hints.note_stepped(ALONE, is_in_hand=True)
    assert len(told.warnings) == (not is_given)
    assert all("a scheduler of torch's, which is not saved" in warning for warning in told.warnings)
    assert scheduler.optimizer is told.optimizer, "it is there yet"


def test_a_scheduler_by_a_metric_of_another_optimizer() -> None:
    told = Told()
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    told.hints.note_stepped(ALONE, is_in_hand=True)
    assert told.warnings == []
    assert other.optimizer is not told.optimizer, "it is there yet"


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("given", [None, lambda scaler: scaler, lambda scaler: Holder({"it": [scaler]})])
def test_a_scaler_that_is_not_saved(given: Callable[[Any], Any] | None, is_enabled: bool) -> None:
    """Ranks with other scales would bend each other's gradients."""
    told, scaler = Told(), torch.amp.GradScaler("cpu", enabled=is_enabled)
    if given is not None:
        told.hints._worker.state.extras["scaler"] = given(scaler)
    told.optimizer.register_step_post_hook(lambda *_: told.hints.note_stepped(ALONE, is_in_hand=True))
    for _ in range(2):
        scaler.scale(told.model(torch.ones(1, 2)).sum()).backward()
        scaler.step(told.optimizer)
        scaler.update()
    assert len(told.warnings) == (given is None and is_enabled)
    assert all(warning.startswith("the optimizer is stepped by a GradScaler") for warning in told.warnings)


class Holder:
    """Anything with a state."""

    __slots__ = ("held", "more")

    def __init__(self, held: object = None) -> None:
        self.held = held
        self.more = [0] * 4

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_scheduler_that_is_not_saved_beside_what_is() -> None:
    """A stopper, say, or the scheduler of another optimizer."""
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    told = Told(stopper=Holder([math.inf]), scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(told.optimizer, lambda step: 0.1)
    told.hints.note_stepped(ALONE, is_in_hand=True)
    assert len(told.warnings) == 1
    assert scheduler.optimizer is told.optimizer, "it is there yet"


@pytest.mark.parametrize("wrapped", [
    lambda scheduler: Holder({"it": [scheduler]}),
    lambda scheduler: Holder(scheduler.step),
    lambda scheduler: Holder(lambda: scheduler.step()),
    lambda scheduler: Holder(scheduler.optimizer),  # one that is not torch's
    lambda scheduler: Holder(SimpleNamespace(param_groups=scheduler.optimizer.param_groups)),  # one around SAM's base
    lambda scheduler: Holder([SimpleNamespace() for _ in range(100_000)]),  # too large to tell
])  # fmt: skip
def test_a_scheduler_that_another_extra_holds(wrapped: Callable[[Any], Holder]) -> None:
    told = Told()
    scheduler = torch.optim.lr_scheduler.StepLR(told.optimizer, 1)
    told.hints._worker.state.extras["wrapped"] = wrapped(scheduler)
    told.hints.note_stepped(ALONE, is_in_hand=True)
    assert told.warnings == []


def test_a_commit_before_the_step_of_the_optimizer() -> None:
    told = Told()
    for is_in_hand in (True, False, False):
        told.hints.note_stepped(ALONE, is_in_hand=is_in_hand)
    [warning] = told.warnings
    assert warning.startswith("the optimizer has stepped between two steps (after step 0)")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "Adam, which trains too, is no part of the state"),
        (("d",), "Adam, which trains too, is no part of the state"),
        (("d_optimizer",), "the parameters that Adam trains are no part of the state"),
        (("d", "d_optimizer"), None),
        (("d_optimizer", "anything"), None),
    ],
)
def test_a_second_optimizer_or_its_module_that_was_forgotten(given: tuple[str, ...], words: str | None) -> None:
    d = nn.Linear(2, 1)
    d_optimizer = torch.optim.Adam(d.parameters())
    anything = SimpleNamespace(state_dict=dict, load_state_dict=lambda _state: None)  # may hold the module
    extras: dict[str, Any] = {"d": d, "d_optimizer": d_optimizer, "anything": anything}
    told = Told(**{name: extras[name] for name in given})
    for _ in range(5):
        for world in (SECOND, ALONE, ALONE):
            told.hints.note_other_stepped(world, d_optimizer)
            told.hints.note_other_stepped(world, told.optimizer)
        told.hints._worker.state.commit(0.0)
    assert len(told.warnings) == (words is not None)
    assert all(words in warning for warning in told.warnings)


def test_an_optimizer_that_is_thrown_away_after_a_step_is_no_news() -> None:
    told = Told()
    for _ in range(5):
        for _ in range(5):
            told.hints.note_other_stepped(ALONE, torch.optim.Adam([nn.Parameter(torch.zeros(1))]))
        told.hints._worker.state.commit(0.0)
    assert told.warnings == []


@pytest.mark.parametrize("is_known", [True, False])
def test_an_optimizer_that_the_known_one_is_made_of(is_known: bool) -> None:
    """It is saved with that where it is an attribute of it, or there is nothing to save."""
    told = Told()
    inner, plain = torch.optim.Adam(told.model.parameters()), torch.optim.SGD(told.model.parameters())
    if is_known:
        told.optimizer.base = inner  # type: ignore[attr-defined]
    told.add_up(1.0)
    for _ in range(5):
        for optimizer in (plain, inner):
            optimizer.step()
            told.hints.note_other_stepped(ALONE, optimizer)
        told.hints._worker.state.commit(0.0)
    assert [line.split(" no part")[0] for line in told.warnings] == ["Adam, which trains too, is"] * (not is_known)


@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("change", ["by the present rate", "by the epoch", "in the epoch"])
@pytest.mark.parametrize("begins", ["within an epoch", "in the first step of one", "at one"])
def test_a_rate_that_the_top_of_an_epoch_changes_a_second_time(begins: str, change: str, is_other: bool) -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    told = Told(other=other)
    [group] = (other if is_other else told.optimizer).param_groups
    state = told.hints._worker.state
    if begins == "in the first step of one":  # a peer was lost in it
        told.hints.enter(ALONE)
        told.hints.note_begun()
    state.samples_done = 4 if begins == "within an epoch" else 0
    told.hints.enter(ALONE)
    if change != "in the epoch":
        group["lr"] = group["lr"] * 0.5 if change == "by the present rate" else 0.1
    told.hints.note_begun()
    group["lr"] = 0.01
    told.hints.note_begun()
    if begins == "at one" or change != "by the present rate":
        assert told.warnings == []
        return
    [warning] = told.warnings
    assert warning.startswith("the function has changed the learning rate from 0.1 to 0.05 before its first batch")
