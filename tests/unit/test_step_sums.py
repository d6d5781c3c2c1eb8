"""The sums of a step that may come late, while another thread saves the last commit."""

from __future__ import annotations

import math
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import step_sums
from elastic_train.elastic.session import Training
from elastic_train.elastic.session_steps import StepInHand
from elastic_train.elastic.step_sums import LateTotals, StepSums
from elastic_train.errors import FormationFailed, TrainingDiverged
from elastic_train.training.step import NO_VOTES
from elastic_train.world import World
from tests.unit.test_liveness import make_member
from tests.unit.test_state import make_state

ALONE = World(rank=0, generation=0, members=(make_member(0),), uid="alone")
PAIR = World(rank=0, generation=0, members=(make_member(0), make_member(1)), uid="pair")


class AtLine:
    """Runs `task` on another thread when this one comes to the `number`-th line of the module."""

    def __init__(self, number: int, task: Any) -> None:
        self._left, self.thread = number, threading.Thread(target=task)

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != step_sums.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.thread.start()
                self.thread.join(0.2)  # it may wait for this one
        return self.trace


@pytest.mark.parametrize("number", range(1, 21))
def test_a_step_is_told_once_however_settling_and_giving_up_interleave(number: int) -> None:
    state, told = make_state(), []
    state.commit(1.0)
    nothing: Any = SimpleNamespace(lost=None, follow=lambda _votes: None, do=lambda _activity: None)
    reporter = SimpleNamespace(step=lambda *_commit, **_of: told.append(state.step))
    worker: Any = SimpleNamespace(state=state, config=Config(), reporter=reporter)
    sums = StepSums(worker, nothing, PAIR, nothing, lambda: (0, 0, 0))
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda *_limit: None)
    first: Any = SimpleNamespace(epoch=0, step_samples=1)
    sums.late = LateTotals(first, 1.0, True, True, torch.zeros(5, dtype=torch.float64), work)
    other = AtLine(number, sums.give_up)
    sys.settrace(other.trace)
    try:
        sums.settle()
    finally:
        sys.settrace(None)
    if other.thread.ident is not None:
        other.thread.join()
    assert told == [1]


class Loss:
    """As `LateNumbers`, of a GPU that has it once it is waited for."""

    def __init__(self, value: float) -> None:
        self._value, self.have_come = value, False

    def read(self) -> float:
        self.have_come = True
        return self._value


def sums_of_one(told: list[float]) -> StepSums:
    """Of the only worker, whose steps are short."""
    state = make_state()
    end: Any = SimpleNamespace(
        lost=None, is_due=False, is_announced=False, enter_sums=lambda: None, follow=lambda _votes: None
    )
    reporter = SimpleNamespace(step=lambda _state, loss, **_of: told.append(loss))
    worker: Any = SimpleNamespace(state=state, config=Config(), reporter=reporter)
    watcher: Any = SimpleNamespace(do=lambda _activity: None)
    return StepSums(worker, watcher, ALONE, end, lambda: NO_VOTES)


def commit(sums: StepSums, loss: Loss) -> LateTotals:
    """The next step, as `Training.commit`."""
    first: Any = SimpleNamespace(epoch=0, step_samples=1)
    unread: Any = loss
    sums.settle()
    sums.require_finite()
    totals = sums.begin(first, 0.0, 0.0, 0.1, has_stepped=True, has_reduced=False, unread=unread)
    if not totals.may_be_late:
        assert sums.wait_for(totals)
    sums._state.commit(totals.mean_loss)
    sums.late = totals if totals.may_be_late else None
    return totals


def test_the_only_worker_reads_its_loss_one_step_later() -> None:
    told: list[float] = []
    sums, losses = sums_of_one(told), [Loss(1.0), Loss(2.0), Loss(math.nan)]
    commit(sums, losses[0])
    assert losses[0].have_come, "how long its steps are, no one knew"
    commit(sums, losses[1])
    assert (losses[1].have_come, told) == (False, [])
    commit(sums, losses[2])
    assert (losses[2].have_come, told, sums._state.last_loss) == (False, [2.0], 0.0)
    sums.settle()
    with pytest.raises(TrainingDiverged, match="the loss of step 3"):
        sums.require_finite()


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_what_the_device_of_the_only_worker_does_not_have_yet_is_waited_for_at_the_end(loss: float) -> None:
    """It will: there is no peer to be lost."""
    told: list[float] = []
    sums = sums_of_one(told)
    commit(sums, Loss(1.0))
    commit(sums, Loss(loss))
    sums.give_up()
    assert told == ([loss] if math.isfinite(loss) else [])
    assert sums.is_sound is math.isfinite(loss)


@pytest.mark.parametrize(("last_loss", "shown"), [(None, None), (0.5, 0.5)])
def test_what_stands_for_a_loss_that_never_comes_is_the_one_before_if_there_is_one(
    last_loss: float | None, shown: float | None
) -> None:
    """Of a rank without samples in the first step of a run, whose peer is lost within it."""
    assert commit_stand_in(last_loss, FormationFailed("a peer is lost")) == shown


@pytest.mark.parametrize("last_loss", [None, 0.5, math.inf, math.nan])
def test_a_rank_without_samples_adds_nothing_to_the_mean_whatever_came_before(last_loss: float | None) -> None:
    """The loss before may be infinite: of a step that a GradScaler has skipped."""
    assert commit_stand_in(last_loss, None) == 0.0


def commit_stand_in(last_loss: float | None, lost: Exception | None) -> float | None:
    """The loss that is noted for a step in which this rank has no sample."""
    told: list[float] = []
    sums = sums_of_one(told)
    state: Any = sums._state
    state.last_loss = last_loss
    micro_batch: Any = SimpleNamespace(epoch=0, step_samples=1)
    in_hand = StepInHand(micro_batch, num_samples=0)
    sums._end.lost = lost
    steps: Any = SimpleNamespace(
        required=lambda: in_hand, begin_commit=lambda: True, turn_to_function=lambda: None,
        commit=lambda loss, *_late: state.commit(loss), seconds_since_commit=0.1,
    )  # fmt: skip
    anything: Any = SimpleNamespace(
        state=state, device=None, config=Config(), require_made=lambda: None, owes_best=lambda _state: False,
        bring_forward=lambda: None, call_off=lambda: None, follow=lambda _votes: None,
    )  # fmt: skip
    training = Training(
        anything, PAIR, anything, steps, sums, anything, anything, anything,
        evaluations=anything, check_states=lambda: None,
    )  # fmt: skip
    training.commit(math.nan)
    assert state.last_commits[-1]["loss"] == state.last_loss
    noted: float | None = state.last_loss
    return noted
