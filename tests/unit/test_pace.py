"""How long a member may take, by its own heartbeats."""

import pytest

from elastic_train.protocol.heartbeat import FIRST_SECONDS, LEAST_SECONDS, Pace
from elastic_train.rules import Activity

PEER_TIMEOUT = 10.0


def paced(step: float, collective: float, stall_timeout: float | None = None) -> Pace:
    pace = Pace(PEER_TIMEOUT, stall_timeout, formation_timeout=77.0)
    for _ in range(10):
        pace.note_collective(collective / 1000)  # of the votes, say
        pace.note_collective(collective)
        pace.note_collective(collective / 1000)
        pace.note_step(step)
    return pace


@pytest.mark.parametrize("stall_timeout", [None, 5.0, 9000.0])
def test_nobody_knows_what_the_first_step_takes(stall_timeout: float | None) -> None:
    pace = Pace(PEER_TIMEOUT, stall_timeout)
    assert pace.limit(Activity.COMPUTE) == max(FIRST_SECONDS, stall_timeout or 0.0)
    assert pace.limit(Activity.REDUCE) == FIRST_SECONDS
    pace.note_collective(0.1)
    assert pace.limit(Activity.REDUCE) == FIRST_SECONDS, "that was the buffers, perhaps"
    pace.note_step(1.0)
    assert pace.limit(Activity.COMPUTE) == (stall_timeout or LEAST_SECONDS)
    pace.expect_first_step()
    assert pace.limit(Activity.COMPUTE) == max(FIRST_SECONDS, stall_timeout or 0.0)


@pytest.mark.parametrize(("step", "limit"), [(0.0005, 300.0), (15.0, 300.0), (30.0, 600.0), (300.0, 6000.0)])
def test_it_may_be_outside_of_the_collective_for_twenty_steps(step: float, limit: float) -> None:
    pace = paced(step, 0.01)
    pace.note_step(50 * step)  # a slow one makes nobody more patient
    assert pace.limit(Activity.COMPUTE) == pytest.approx(limit)
    assert pace.between_steps == max(FIRST_SECONDS, limit)


@pytest.mark.parametrize("stall_timeout", [None, 20.0])
def test_where_nobody_knows_whether_it_waits_it_may_take_what_its_own_work_may(stall_timeout: float | None) -> None:
    pace = paced(30.0, 0.01, stall_timeout)
    assert pace.limit(Activity.STEP) == pace.last_limit(Activity.STEP) == pace.limit(Activity.COMPUTE)
    pace.expect_first_step()
    assert pace.limit(Activity.STEP) == FIRST_SECONDS


def test_what_the_user_says_counts() -> None:
    pace = paced(30.0, 0.01, stall_timeout=20.0)
    assert pace.limit(Activity.COMPUTE) == pace.between_steps == 20.0


def test_a_collective_may_take_ten_times_as_long_as_usual() -> None:
    pace = paced(30.0, 0.5)
    pace.note_collective(100.0)  # somebody was waited for
    pace.note_step(130.0)
    assert pace.limit(Activity.REDUCE) == PEER_TIMEOUT + 10 * 0.5


def test_what_forms_a_world_has_a_limit_of_its_own() -> None:
    assert paced(1.0, 0.1).limit(Activity.FORM) == Pace(PEER_TIMEOUT, None, 77.0).limit(Activity.FORM) == 77.0


def test_the_last_steps_count() -> None:
    pace = paced(600.0, 0.1)
    for _ in range(64):
        pace.note_step(0.1)
    assert pace.limit(Activity.COMPUTE) == LEAST_SECONDS
    assert pace.slowest_step < 600.0
