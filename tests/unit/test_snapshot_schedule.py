"""How often snapshots are written: --snapshot-every by steps, by time, and by what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config import Config, as_json, parse
from elastic_train.elastic.snapshot_schedule import BUSY_STEPS, SaveTime, SnapshotSchedule
from elastic_train.errors import UsageError
from elastic_train.runlog.goodput import PhaseClock
from elastic_train.snapshot_interval import (
    FIRST_SECONDS,
    PRIOR_FAILURE_SECONDS,
    SnapshotInterval,
    best_interval,
    interval_of,
    mean_failure_seconds,
    num_failures,
)
from elastic_train.storage.shares import LEAST_BYTES
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.unit.test_liveness import make_member


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_state() -> TrainState:
    model = nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=64, global_batch_size=8, epochs=1)
    state.clock = PhaseClock(process_age=0.0)  # a test process may be old
    return state


@pytest.mark.parametrize(
    ("text", "value", "interval"),
    [
        ("100", 100, SnapshotInterval(steps=100)),
        ("0", 0, SnapshotInterval(steps=0)),
        ("30s", "30s", SnapshotInterval(seconds=30.0)),
        ("1.5m", "1.5m", SnapshotInterval(seconds=90.0)),
        ("2h", "2h", SnapshotInterval(seconds=7200.0)),
        ("auto", "auto", SnapshotInterval()),
    ],
)
def test_what_the_flag_says(text: str, value: int | str, interval: SnapshotInterval) -> None:
    config = parse(["--snapshot-every", text])
    assert as_json(config)["snapshot_every"] == value
    assert interval_of(config.snapshot_every) == interval
    assert interval.is_auto == (text == "auto")


def test_a_config_made_by_hand_is_checked_too() -> None:
    with pytest.raises(UsageError, match=r"^--snapshot-every 30 s: must be steps such as 100, a time such as 30s"):
        Config(snapshot_every="30 s").check()


def test_the_best_interval_is_where_the_time_lost_is_least() -> None:
    """Against the time that is lost by the model itself: C of each interval, and half an interval with each failure."""
    for cost, failure in ((0.01, 3600.0), (1.0, 3600.0), (20.0, 86400.0)):
        found = best_interval(cost, failure)

        def lost(interval: float, cost: float = cost, failure: float = failure) -> float:
            return cost / interval + interval / (2 * failure)

        assert lost(found + cost) <= min(lost((found + cost) * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert best_interval(1.0, 3600.0) == pytest.approx(math.sqrt(7200) - 1)
    assert best_interval(100.0, 10.0) == 100.0, "no snapshot can begin while another is written"


def test_failures_are_deaths_and_restarts() -> None:
    causes = ["peer_lost", "leave", "join", "restart", "peer_lost"]
    assert num_failures({"cause": cause} for cause in causes) == 3
    assert num_failures([{"cause": "restart", "planned": True}, {"cause": "restart"}]) == 1, "all were told to stop"
    assert mean_failure_seconds(0.0, 0) == PRIOR_FAILURE_SECONDS
    assert mean_failure_seconds(7 * 86400.0, 700) == pytest.approx(864, rel=0.05), "many outweigh what was believed"


def test_by_steps() -> None:
    schedule = SnapshotSchedule(SnapshotInterval(steps=10), now=Clock())
    schedule.enter()
    due = []
    for step in range(1, 31):
        schedule.note_step(step, is_writing=11 <= step < 23)
        if schedule.is_overdue and not 11 <= step < 23:
            due.append(step)
            schedule.note_start(0.0)
    assert due == [10, 23, 30], "the one of step 20 was put off"


def test_the_step_after_which_a_peer_was_lost_is_made_up_for() -> None:
    """It was due, and the world ended before it could be looked at."""
    schedule = SnapshotSchedule(SnapshotInterval(steps=10), now=Clock())
    schedule.enter()
    schedule.note_step(9, is_writing=False)
    schedule.enter(step=10)
    schedule.note_step(11, is_writing=False)
    assert schedule.is_overdue
    schedule.note_start(0.0)
    for step in (12, 19, 13):  # the newest world goes on from an older state
        schedule.note_step(step, is_writing=False)
        assert not schedule.is_overdue


def test_by_time_from_the_start_of_the_last_one() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(SnapshotInterval(seconds=30.0), now=clock)
    schedule.enter()
    started = []
    for step in range(1, 107):
        clock.now += 1.0
        schedule.note_step(step, is_writing=False)
        if step == 50:
            schedule.enter()  # a new world does not count from zero
        if schedule.is_overdue:
            started.append(clock.now)
            schedule.note_start(clock.now)
            clock.now += 5.0  # the copy
    assert started == [30.0, 60.0, 90.0, 120.0]


def run(schedule: SnapshotSchedule, clock: Clock, steps: int, seconds: float, *, is_writing: bool) -> None:
    for step in range(steps):
        clock.now += seconds
        schedule.note_step(step, is_writing=is_writing)


def test_the_cost_is_the_stall_and_what_the_steps_beside_it_lose() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(SnapshotInterval(), now=clock)
    schedule.enter()
    run(schedule, clock, 20, 0.1, is_writing=False)
    clock.now += 60.0  # an evaluation
    run(schedule, clock, 1, 0.1, is_writing=False)
    assert schedule.cost_seconds is None
    schedule.note_start(clock.now)
    run(schedule, clock, 9, 0.15, is_writing=True)
    run(schedule, clock, 1, 0.15, is_writing=False)  # it ended within this one
    schedule.note_written(stall_seconds=0.2)
    assert schedule.cost_seconds == pytest.approx(0.2 + 10 * 0.05)


def test_auto_follows_costs_and_failures_and_tells_what_changes_much() -> None:
    clock, state = Clock(), make_state()
    schedule = SnapshotSchedule(SnapshotInterval(), now=clock)
    schedule.enter()
    assert schedule.adapt(state) is None, "nothing is known yet"
    run(schedule, clock, 300, 0.1 + 1e-9, is_writing=False)
    assert schedule.is_overdue, "the first"
    assert clock.now == pytest.approx(FIRST_SECONDS)
    schedule.note_start(clock.now)
    schedule.note_written(stall_seconds=0.5)
    told = schedule.adapt(state)
    assert told is not None
    assert told.cost_seconds == 0.5
    assert told.failures == 0
    assert schedule.seconds == told.seconds == pytest.approx(best_interval(0.5, PRIOR_FAILURE_SECONDS), rel=0.01)
    assert schedule.adapt(state) is None, "as before"
    state.incidents += [{"cause": "join"}, {"cause": "leave"}]
    assert schedule.adapt(state) is None
    state.incidents += [{"cause": "peer_lost"}] * 9
    told = schedule.adapt(state)
    assert told is not None
    assert told.failures == 9
    assert schedule.seconds == pytest.approx(best_interval(0.5, PRIOR_FAILURE_SECONDS / 10), rel=0.01)


def test_auto_keeps_an_interval_that_costs_of_some_noise_put_near_the_best_one() -> None:
    """A new failure is no noise: with it the best one is taken."""
    clock, state = Clock(), make_state()
    schedule = SnapshotSchedule(SnapshotInterval(), now=clock)
    told = []
    for cost in (0.02, 0.05, 0.03, 0.01, 0.02, 0.04, 0.03):  # medians of 0.02 to 0.035
        schedule.note_written(stall_seconds=cost)
        told.append(schedule.adapt(state))
    assert [one is not None for one in told] == [True] + [False] * 6
    state.incidents.append({"cause": "peer_lost"})
    changed = schedule.adapt(state)
    assert changed is not None
    assert changed.cost_seconds == 0.03
    for _ in range(3):
        schedule.note_written(stall_seconds=0.5)
    changed = schedule.adapt(state)
    assert changed is not None
    assert changed.cost_seconds == 0.5


class Read(list[dict[str, Any]]):
    """Notes how often its entries are read."""

    times = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.times += 1
        return super().__iter__()


def test_the_incidents_of_a_long_run_are_counted_when_there_are_new_ones() -> None:
    """It is asked in every step. A state that is restored may have as many others."""
    schedule, state = SnapshotSchedule(SnapshotInterval(), now=Clock()), make_state()
    schedule.note_written(stall_seconds=0.5)
    state.incidents = incidents = Read([{"cause": "join"}] * 99)
    for _ in range(3):
        schedule.adapt(state)
    assert incidents.times == 1
    state.incidents.append({"cause": "peer_lost"})
    told = [schedule.adapt(state) for _ in range(3)]
    assert told[0] is not None
    assert told[0].failures == 1
    assert incidents.times == 2
    state.incidents = [{"cause": "restart"}] * 100
    changed = schedule.adapt(state)
    assert changed is not None
    assert changed.failures == 100


def test_a_time_is_not_adapted() -> None:
    schedule = SnapshotSchedule(SnapshotInterval(seconds=30.0), now=Clock())
    schedule.note_written(stall_seconds=9.0)
    assert schedule.adapt(make_state()) is None
    assert schedule.seconds == 30.0


def test_what_is_remembered_of_a_snapshot_that_hangs_does_not_grow() -> None:
    """Its cost is that of all steps beside it."""
    clock = Clock()
    schedule = SnapshotSchedule(SnapshotInterval(), now=clock)
    schedule.enter()
    run(schedule, clock, 100, 0.5, is_writing=False)
    schedule.note_start(clock.now)
    run(schedule, clock, BUSY_STEPS, 0.75, is_writing=True)
    remembered = len(schedule._busy)
    run(schedule, clock, 10 * BUSY_STEPS, 0.75, is_writing=True)
    assert len(schedule._busy) == remembered
    schedule.note_written(stall_seconds=3.0)
    assert schedule.cost_seconds == 3.0 + 11 * BUSY_STEPS * 0.25
    schedule.note_start(clock.now)
    run(schedule, clock, 2, 0.75, is_writing=True)
    schedule.note_written(stall_seconds=3.0)
    assert schedule.cost_seconds == (3.0 + 11 * BUSY_STEPS * 0.25 + 3.0 + 2 * 0.25) / 2, "the median of two"


@pytest.mark.parametrize(
    ("is_bucket", "num_bytes", "is_shared"),
    [(True, LEAST_BYTES, True), (True, LEAST_BYTES - 1, False), (False, LEAST_BYTES, False)],
    ids=["a share of each node", "too small for shares", "in a folder"],
)
def test_what_rank_0_has_measured_all_of_its_world_know(*, is_bucket: bool, num_bytes: int, is_shared: bool) -> None:
    """Newcomers too, and where the one that has measured it is gone: until the next one has measured anew."""
    times = [SaveTime(is_bucket=is_bucket) for _ in range(3)]

    def enter(generation: int, *of_ranks: SaveTime) -> None:
        members = tuple(map(make_member, range(len(of_ranks))))
        for rank, one in enumerate(of_ranks):
            one.enter(World(rank=rank, generation=generation, members=members))

    def step(*of_ranks: SaveTime) -> int:
        told = sum(one.vote() for one in of_ranks)
        for one in of_ranks:
            one.note_vote(told)
        return told

    enter(0, *times)
    assert step(*times) == 0
    times[1].note_written(400.0, num_bytes)  # of a state that it has saved for itself
    times[0].note_written(150.2, num_bytes)
    told = 151 if is_shared else -151
    assert [step(*times) for _ in range(2)] == [told, 0], "told once"
    assert [one.seconds for one in times] == [151 / 3 if is_shared else 151.0] * 3
    newcomer = SaveTime(is_bucket=is_bucket)
    enter(1, times[2], newcomer)
    assert [step(times[2], newcomer) for _ in range(2)] == [told, 0]
    assert newcomer.seconds == (151 / 2 if is_shared else 151.0)
    times[2].note_written(20.0, num_bytes)
    step(times[2], newcomer)
    assert newcomer.seconds == (10.0 if is_shared else 20.0)
    alone = SaveTime(is_bucket=is_bucket)
    enter(0, alone)
    alone.note_written(20.0, num_bytes)
    step(alone)
    enter(1, alone, newcomer)
    assert alone.seconds == (10.0 if is_shared else 20.0), "before the first step of the larger world, too"
