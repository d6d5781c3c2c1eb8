"""The phases of a run's time, on clocks of our own."""

from __future__ import annotations

import random
import time

import pytest

from elastic_train.runlog.goodput import Phase, PhaseClock, goodput, seconds_since_process_start


class Time:
    """A monotonic and a wall clock that go by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.offset = 5e8

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def clock(self, process_age: float = 0.0) -> PhaseClock:
        return PhaseClock(lambda: self.now, lambda: self.now + self.offset, process_age)


def total(clock: PhaseClock) -> float:
    return sum(clock.totals().values())


def test_every_second_belongs_to_one_phase() -> None:
    passing = Time()
    clock = passing.clock(process_age=3.0)
    passing.pass_by(1.0)
    clock.enter(Phase.FORM)
    passing.pass_by(2.0)
    clock.enter(Phase.TRAIN)
    passing.pass_by(10.0)
    with clock.during(Phase.SNAPSHOT):
        passing.pass_by(0.5)
        with clock.during(Phase.EVALUATE):
            passing.pass_by(0.25)
        passing.pass_by(0.5)
    passing.pass_by(7.0)
    assert clock.totals() == {
        "startup": 4.0, "form": 2.0, "train": 17.0, "lost": 0.0, "evaluate": 0.25, "snapshot": 1.0, "down": 0.0
    }  # fmt: skip


def test_the_phase_before_comes_back_after_an_exception() -> None:
    passing = Time()
    clock = passing.clock()
    clock.enter(Phase.TRAIN)

    def fail() -> None:
        with clock.during(Phase.SNAPSHOT):
            passing.pass_by(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    passing.pass_by(2.0)
    assert (clock.totals()[Phase.SNAPSHOT], clock.totals()[Phase.TRAIN]) == (1.0, 2.0)


def test_the_phases_sum_to_the_wall_whatever_is_done() -> None:
    rng = random.Random(0)
    passing = Time()
    started = passing.now
    clock = passing.clock(process_age=2.5)
    for _ in range(300):
        passing.pass_by(rng.expovariate(1.0))
        match rng.randrange(3):
            case 0:
                clock.enter(rng.choice(list(Phase)))
            case 1:
                with clock.during(rng.choice(list(Phase))):
                    passing.pass_by(rng.random())
            case _:
                clock.lose(rng.expovariate(0.1))
        assert all(seconds >= 0 for seconds in clock.totals().values())
    assert total(clock) == pytest.approx(passing.now - started + 2.5)


def test_lost_is_only_what_is_there() -> None:
    passing = Time()
    clock = passing.clock()
    clock.enter(Phase.TRAIN)
    passing.pass_by(2.0)
    clock.lose(0.5)
    assert (clock.totals()[Phase.TRAIN], clock.totals()[Phase.LOST]) == (1.5, 0.5)
    clock.lose(9.0)
    assert (clock.totals()[Phase.TRAIN], clock.totals()[Phase.LOST]) == (0.0, 2.0)
    passing.pass_by(1.0)
    assert clock.totals()[Phase.TRAIN] == 1.0, "the running phase is still training"


def test_a_restart_carries_the_totals_on_and_books_the_time_between_as_down() -> None:
    passing = Time()
    first = passing.clock()
    first.enter(Phase.TRAIN)
    passing.pass_by(10.0)
    saved = first.state_dict()
    passing.pass_by(4.0)  # trained on, then killed
    passing.pass_by(6.0)  # nobody there
    passing.pass_by(2.0)  # the next process starts and builds its model
    second = passing.clock(process_age=2.0)
    second.enter(Phase.FORM)
    passing.pass_by(1.0)
    second.load_state_dict(saved)
    second.enter(Phase.TRAIN)
    passing.pass_by(5.0)
    totals = second.totals()
    assert totals[Phase.DOWN] == pytest.approx(10.0)
    assert (totals[Phase.STARTUP], totals[Phase.FORM], totals[Phase.TRAIN]) == (2.0, 1.0, 15.0)
    assert total(second) == pytest.approx(10 + 4 + 6 + 2 + 1 + 5)
    saved = second.state_dict()
    passing.pass_by(3.0)
    third = passing.clock()
    third.load_state_dict(saved)
    assert (third.totals()[Phase.DOWN], third.newest_down) == pytest.approx((13.0, 3.0)), "of this restart alone"


def test_what_a_process_did_before_the_save_is_in_the_totals_that_it_continues() -> None:
    """It waited while the others trained, who then died: their time is not to be counted twice."""
    passing = Time()
    began = passing.now
    trained, waiting = passing.clock(), passing.clock()
    trained.enter(Phase.TRAIN)
    passing.pass_by(3.0)
    waiting.enter(Phase.FORM)
    passing.pass_by(7.0)
    saved = trained.state_dict()
    passing.pass_by(5.0)
    waiting.load_state_dict(saved)
    totals = waiting.totals()
    assert total(waiting) == passing.now - began
    assert (totals[Phase.TRAIN], totals[Phase.STARTUP], totals[Phase.FORM]) == (10.0, 0.0, 5.0)
    assert waiting.newest_down == 0.0
    waiting.load_state_dict(saved)
    assert waiting.totals() == totals, "the last call counts"


def test_a_clock_that_was_set_back_counts_as_no_time() -> None:
    passing = Time()
    saved = passing.clock().state_dict()
    passing.offset -= 3600
    passing.pass_by(5.0)
    clock = passing.clock()
    clock.load_state_dict(saved)
    assert clock.totals()[Phase.DOWN] == 0.0


def test_saving_changes_nothing() -> None:
    passing = Time()
    clock = passing.clock()
    passing.pass_by(1.0)
    assert clock.state_dict() == clock.state_dict()
    clock.totals()["train"] = 99.0
    assert clock.totals()["train"] == 0.0


def test_goodput_is_the_share_of_kept_steps() -> None:
    totals = {phase.value: 1.0 for phase in Phase} | {"train": 3.0}
    found = goodput(totals)
    assert found["wall"] == 9.0
    assert found["ratio"] == pytest.approx(1 / 3)
    assert goodput({phase.value: 0.0 for phase in Phase})["ratio"] == 0.0


def test_the_age_of_this_process() -> None:
    age = seconds_since_process_start()
    assert 0.0 < age < 86400.0
    started = time.monotonic()
    assert seconds_since_process_start() - age <= time.monotonic() - started + 0.05
