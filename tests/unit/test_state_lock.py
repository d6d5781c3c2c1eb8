"""The state of the last commit, taken by another thread in the middle of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.training.reduction import StepTotals
from elastic_train.training.state import TrainState
from elastic_train.training.state_lock import StateLock
from elastic_train.training.step import train_step
from tests.unit.test_state import make_state

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
WAIT_SECONDS = 20.0


@contextmanager
def trainer(train: Callable[[], None]) -> Iterator[threading.Thread]:
    """`train` runs on a thread, and has ended after the block."""
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    yield thread
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def copied(state: TrainState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.state_dict()["model"].items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_it_is_taken_away_only_where_it_is_let_go_of() -> None:
    lock = StateLock()
    assert not lock.acquire(0.0)
    lock.let_go()
    lock.let_go()
    assert lock.acquire(0.0)
    assert not lock.acquire(0.0), "one of them saves"
    lock.give_back()
    lock.hold()
    lock.hold()
    with lock.released():
        assert lock.acquire(0.0)
        lock.give_back()
    assert not lock.acquire(0.0)


def test_who_has_lost_it_waits_until_it_is_given_back() -> None:
    lock, is_inside, may_go_on, has_gone_on = StateLock(), threading.Event(), threading.Event(), threading.Event()

    def train() -> None:
        with lock.released():
            is_inside.set()
            may_go_on.wait(WAIT_SECONDS)
        has_gone_on.set()

    with trainer(train):
        assert is_inside.wait(WAIT_SECONDS)
        assert lock.acquire(0.0)
        may_go_on.set()
        assert not has_gone_on.wait(0.2)
        lock.give_back()
        assert has_gone_on.wait(WAIT_SECONDS)


def test_it_is_waited_for_at_most_so_long() -> None:
    lock = StateLock()
    with trainer(lambda: None):
        assert not lock.acquire(0.05)
    waiting = threading.Timer(0.05, lock.let_go)
    waiting.start()
    assert lock.acquire(WAIT_SECONDS)


def test_a_step_in_hand_does_not_show_in_the_state() -> None:
    state = make_state()
    before = copied(state)
    state.remember()
    state.model(INPUTS)
    assert int(state.model.state_dict()["1.num_batches_tracked"]) == 1
    assert_equal(copied(state), before)
    state.optimizer.step()
    state.commit(1.0)
    assert int(copied(state)["1.num_batches_tracked"]) == 1


def test_a_buffer_under_two_names_and_one_that_is_replaced() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return inputs

    layer = Counting()
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=1)
    state.remember()
    layer(INPUTS)
    assert float(layer.seen) == 1.0
    found = copied(state)
    assert [float(found[name]) for name in ("a.seen", "b.seen")] == [0.0, 0.0]


class Halting:
    """A reduction that stays within until it is told to go on."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def run(self, *_arguments: Any, **_options: Any) -> StepTotals:
        self._state.model(INPUTS).square().mean().backward()  # type: ignore[no-untyped-call]
        self.is_inside.set()
        self.may_go_on.wait(WAIT_SECONDS)
        return StepTotals(loss=1.0, votes=(0, 0, 0))


def test_a_step_is_not_applied_once_its_state_is_taken() -> None:
    state = make_state()
    before, reduction = copied(state), Halting(state)
    optimizer_before = state.optimizer.state_dict()["state"]
    is_applied = threading.Event()

    def train() -> None:
        train_step(state, (), reduction, None, ())  # type: ignore[arg-type]
        is_applied.set()

    with trainer(train):
        assert reduction.is_inside.wait(WAIT_SECONDS)
        assert state.lock.acquire(0.0)
        reduction.may_go_on.set()
        assert not is_applied.wait(0.2)
        assert state.is_whole
        assert_equal(copied(state), before)
        assert state.optimizer.state_dict()["state"] == optimizer_before == {}
        state.lock.give_back()
    assert is_applied.is_set()
    assert not state.is_whole
    assert not state.lock.acquire(0.0), "between the optimizer's step and the commit"


@pytest.mark.parametrize("does_step", [True, False])
def test_a_loop_of_ones_own_holds_it_from_its_optimizers_step_on(does_step: bool) -> None:
    """Where a scaler skips the optimizer's step, from the commit on."""
    state = make_state()
    state.remember()
    state.lock.let_go()
    state.model(INPUTS).square().mean().backward()
    if does_step:
        state.optimizer.step()
        assert not state.lock.acquire(0.0)
    state.commit(1.0)
    assert not state.lock.acquire(0.0)


def test_who_has_taken_it_may_finish_a_step_with_it() -> None:
    """A step without an optimizer's step, whose commit hangs: the thread that trains has let go of it."""
    state = make_state()
    state.remember()
    state.lock.let_go()
    assert state.lock.acquire(0.0)
    state.commit(1.0)
    state.lock.give_back()
    with trainer(lambda: state.commit(1.0)):
        pass
    assert state.step == 2
