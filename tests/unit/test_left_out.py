"""A worker that was left out comes back as a newcomer: what of its time is in the totals of a run already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic.exits import Exits
from elastic_train.errors import LeftOut
from elastic_train.runlog.goodput import Phase, PhaseClock
from tests.unit.test_state import make_state


@pytest.mark.parametrize(("generation", "counted"), [(None, 30.0), (4, 0.0)], ids=["it had no run", "it trained"])
def test_its_time_counts_once(generation: int | None, counted: float) -> None:
    state, now = make_state(), [0.0]
    state.clock = PhaseClock(lambda: now[0], lambda: now[0], process_age=10.0)
    state.clock.enter(Phase.FORM)
    state.generation = generation
    now[0] = 20.0
    nothing: Any = SimpleNamespace(leave=lambda: None, release=lambda: None, stand_down=lambda: None)
    worker: Any = SimpleNamespace(
        state=state, host="here", launch=SimpleNamespace(local_rank=0), config=SimpleNamespace(wait_timeout=60.0),
        reporter=SimpleNamespace(warn=lambda _message, **_fields: None, void_commits=lambda _state: {}, leave=print),
    )  # fmt: skip
    membership: Any = SimpleNamespace(watcher=nothing, job=nothing, uid="uid0", has_settled=False)
    exits = Exits(worker, membership, nothing, nothing, nothing)
    exits.give_way(LeftOut("the others went on"), None, None, has_state=False)
    assert sum(state.clock.totals().values()) == counted
    assert state.generation is None, "a snapshot's clock is loaded again"
