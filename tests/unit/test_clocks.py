"""Lines of several machines on one clock, whatever their wall clocks say."""

from __future__ import annotations

import random
from typing import Any

import pytest

from elastic_train.tools.audit.clocks import TOLERANCE_SECONDS, set_right
from elastic_train.tools.audit.lives import lives_of

HOUR = 3600.0
Line = dict[str, Any]


class Machine:
    """Writes events; `at` is the right time, which its own wall clock is ahead of."""

    def __init__(self, boot: float, ahead: float = 0.0) -> None:
        self.boot, self.ahead = boot, ahead
        self.generation: int | None = None
        self.lines: list[Line] = []

    def write(self, event: str, at: float, generation: int | None = None) -> None:
        if event == "start":
            self.generation = None
        self.generation = self.generation if generation is None else generation
        line = {"event": event, "generation": self.generation, "at": at}
        if event == "step":
            line |= {"step": 0, "epoch": 0, "world_size": 1, "loss": at}
        self.lines.append({**line, "time": at + self.ahead, "monotonic": at - self.boot})


def errors(*machines: Machine) -> list[float]:
    """Of all lines, once they have been set right."""
    lives = [life for machine in machines for life in lives_of("a/0/1", machine.lines)]
    set_right(lives)
    found = []
    for life in lives:
        found += [line["time"] - line["at"] for line in life.lines]
        found += [step.time - (step.loss or 0.0) for step in life.steps]
    return found


def train(*machines: Machine, generation: int, at: float, jitter: float = 0.0) -> None:
    for machine in machines:
        machine.write("world", at + random.Random(machine.boot).uniform(0.0, jitter), generation)
        machine.write("step", at + 1)


def test_right_clocks_stay_as_they_are() -> None:
    """To the millisecond: members do not write at the same moment, and their clocks are what is right."""
    machines = Machine(10), Machine(20, ahead=0.004), Machine(30, ahead=-0.002)
    for generation in range(3):
        train(*machines, generation=generation, at=1000.0 + 10 * generation, jitter=0.5)
    assert errors(*machines) == pytest.approx([machine.ahead for machine in machines for _ in machine.lines], abs=1e-6)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_one_that_is_an_hour_off_from_the_start(ahead: float) -> None:
    wrong, *others = Machine(10, ahead), Machine(20), Machine(30)
    for machine in (wrong, *others):
        machine.write("start", 990.0)
    train(wrong, *others, generation=0, at=1000.0, jitter=0.05)
    assert errors(wrong, *others) == pytest.approx([0.0] * 9, abs=0.05)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_clock_that_is_set_between_two_lines(ahead: float) -> None:
    """And back again; in a world of one there is nobody to compare with."""
    machine = Machine(10)
    train(machine, generation=0, at=1000.0)
    machine.ahead = ahead
    train(machine, generation=1, at=1010.0)
    machine.ahead = 0.0
    machine.write("done", 1020.0)
    assert errors(machine) == pytest.approx([0.0] * 5, abs=1e-6)


def test_who_comes_later_is_set_right_by_those_that_are_known() -> None:
    """Though most clocks of its world are off by then."""
    first, second, third, fourth = Machine(10), Machine(20, HOUR), Machine(30, HOUR), Machine(40, -2 * HOUR)
    train(first, generation=0, at=1000.0)
    train(first, second, generation=1, at=1010.0, jitter=0.05)
    train(second, third, generation=2, at=1020.0, jitter=0.05)
    train(third, fourth, generation=3, at=1030.0, jitter=0.05)
    assert errors(first, second, third, fourth) == pytest.approx([0.0] * 14, abs=0.2)


def test_whose_word_of_a_world_is_torn_is_set_right_by_the_next() -> None:
    wrong, right = Machine(10, HOUR), Machine(20)
    train(wrong, right, generation=0, at=1000.0)
    del wrong.lines[0]
    train(wrong, right, generation=1, at=1010.0)
    assert errors(wrong, right) == pytest.approx([0.0] * 7, abs=1e-6)


@pytest.mark.parametrize("late", [4.0, 12.0])
def test_who_is_late_to_write_once_has_a_right_clock(late: float) -> None:
    """A newcomer's first step, or the state that it waits for, takes its time; the next world shows who is right."""
    first, second, third = Machine(10), Machine(20), Machine(30)
    train(first, second, generation=0, at=1000.0)
    first.write("world", 1010.0, 1)
    second.write("world", 1010.0 + late, 1)
    third.write("world", 1010.0 + late, 1)
    train(first, second, third, generation=2, at=1030.0, jitter=0.05)
    assert errors(first, second, third) == pytest.approx([0.0] * 13, abs=1e-6)


def test_who_is_late_with_one_that_is_known_has_a_right_clock() -> None:
    """Rank 0, which sends it the state, is as late; the newcomer leaves with that world, so that no other shows it."""
    gives, second, third, newcomer = Machine(10), Machine(20), Machine(30), Machine(40)
    train(gives, second, third, generation=0, at=1000.0)
    for machine in (second, third):
        machine.write("world", 1010.0, 1)
    for machine in (gives, newcomer):
        machine.write("world", 1014.0, 1)
    newcomer.write("done", 1017.0)
    train(gives, second, third, generation=2, at=1017.1)
    assert errors(gives, second, third, newcomer) == pytest.approx([0.0] * 17, abs=1e-6)


def test_new_processes_do_not_begin_before_the_old_ones() -> None:
    """Where a whole job starts again on machines whose clocks were set back, nobody ties the two together."""
    before, after = Machine(10), Machine(20, -HOUR)
    train(before, generation=0, at=1000.0)
    train(after, generation=1, at=1010.0)
    assert errors(before, after) == pytest.approx([0.0, 0.0, -10.0, -10.0], abs=1e-6)


def test_a_later_process_of_the_same_name_has_a_clock_of_its_own() -> None:
    """In containers pids repeat, and a container may come back on another machine."""
    other, first, second = Machine(10), Machine(20, HOUR), Machine(-(10.0**6))
    first.write("start", 990.0)
    train(other, first, generation=0, at=1000.0)
    second.write("start", 1010.0)
    train(other, second, generation=1, at=1020.0)
    first.lines += second.lines
    assert errors(other, first) == pytest.approx([0.0] * 10, abs=1e-6)


def test_nothing_is_known_of_who_was_in_no_world() -> None:
    right, lone = Machine(10), Machine(20, HOUR)
    train(right, generation=0, at=1000.0)
    lone.write("start", 1000.5)
    assert errors(right, lone) == [0.0, 0.0, HOUR]


def test_lines_of_older_versions_keep_their_time() -> None:
    """And newer ones are set by them."""
    old, new = Machine(10), Machine(20, HOUR)
    train(old, new, generation=0, at=1000.0)
    for line in old.lines:
        del line["monotonic"]
    assert errors(old, new) == pytest.approx([0.0] * 4, abs=1e-6)


def test_two_of_which_nobody_knows_who_is_right_agree_on_the_earlier() -> None:
    """A time that lies ahead is certain to be wrong."""
    early, late = Machine(10, -HOUR), Machine(20)
    train(early, late, generation=0, at=1000.0)
    assert errors(early, late) == pytest.approx([-HOUR] * 4, abs=TOLERANCE_SECONDS)
