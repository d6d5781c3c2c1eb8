"""The sums of a step that may come late, while another thread saves the last commit."""

from __future__ import annotations

import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import step_sums
from elastic_train.elastic.step_sums import LateTotals, StepSums
from elastic_train.world import World
from tests.unit.test_liveness import make_member
from tests.unit.test_state import make_state

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
    observer: Any = SimpleNamespace(report_commit=lambda *_commit: told.append(state.step))
    worker: Any = SimpleNamespace(state=state, config=Config())
    sums = StepSums(worker, nothing, PAIR, observer, nothing, nothing, lambda: (0, 0, 0))
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda *_limit: None)
    first: Any = None
    sums.late = LateTotals(first, 1.0, True, True, torch.zeros(7, dtype=torch.float64), work)
    other = AtLine(number, sums.give_up)
    sys.settrace(other.trace)
    try:
        sums.settle()
    finally:
        sys.settrace(None)
    if other.thread.ident is not None:
        other.thread.join()
    assert told == [1]
