"""A heartbeat: one line, whose size does not grow with the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.protocol.heartbeat import (
    LONGEST_PAUSE,
    AwakeTime,
    Heartbeat,
    LastOutside,
    describe,
    has_ended_by_vote,
    head_of,
    is_readable,
    is_silence,
    verdicts_of,
)
from elastic_train.protocol.neighbours import head
from elastic_train.rules import Activity
from elastic_train.world import Member, World, from_runs, to_runs

MEMBER = Member("host one", 0, 7, 1, ("127.0.0.1", 1), "run", "gloo", None)


def world(size: int) -> World:
    return World(0, 3, (MEMBER,) * size, None, "w3")


def test_what_a_suspension_takes_is_not_counted() -> None:
    now = 100.0
    awake = AwakeTime(lambda: now)
    for _ in range(8):
        now += LONGEST_PAUSE / 2
        assert awake.look() == 0.0
    assert awake.seconds == 4 * LONGEST_PAUSE
    now += 3600.0
    assert awake.look() == 3600.0 - LONGEST_PAUSE
    assert awake.look() == 0.0
    assert awake.seconds == 5 * LONGEST_PAUSE, "it is told from a long pause by nothing"
    now += LONGEST_PAUSE + 1.0
    awake.restart()
    assert (awake.look(), awake.seconds) == (0.0, 0.0)


@given(st.lists(st.integers(0, 50), unique=True))
def test_runs_there_and_back(ranks: list[int]) -> None:
    assert from_runs(to_runs(ranks)) == tuple(ranks)
    assert from_runs(to_runs(sorted(ranks))) == tuple(sorted(ranks))


def test_runs_are_short() -> None:
    assert to_runs([*range(500), *range(501, 10_000)]) == "0-499,501-9999"
    assert to_runs([]) == ""


OTHERS = ["-{} [1, 2]", "-{} {}", "-{} null", "-{}", '-{} [3, "asleep", 0, 1, 2, 3, 4]', "![] ", '!{"died":1} ']


@pytest.mark.parametrize("line", OTHERS)
def test_what_another_build_says_is_not_readable(line: str) -> None:
    if line.endswith(" "):
        line += Heartbeat(3, Activity.REDUCE, 0.0, 1.0, 0.0, (0, 1)).to_line("").strip()
    assert not is_readable(line)


@pytest.mark.parametrize("verdicts", [None, {}, {1: describe(world(2), 1, "died at last")}])
def test_what_this_build_says_is_readable(verdicts: dict[int, str] | None) -> None:
    for head_of_it in (head_of(world(2), verdicts), head_of(world(2), verdicts, is_by_vote=True)):
        assert is_readable(Heartbeat(3, Activity.REDUCE, 0.0, 1.0, 0.0, (0, 1)).to_line(head_of_it))
    assert is_readable(""), "nothing is said yet"


def test_a_heartbeat_there_and_back() -> None:
    heartbeat = Heartbeat(3, Activity.REDUCE, 0.031, 10.2, 0.044, (7, 512))
    line = heartbeat.to_line("-{}")
    assert Heartbeat.from_line(line) == heartbeat
    assert head(line) == "-{}"
    assert verdicts_of(world(2), line) is None


def test_the_head_names_who_is_out_and_why() -> None:
    large = world(512)
    verdicts = {
        rank: describe(large, rank, "died" if rank < 300 else "was silent for 10.2 s") for rank in range(100, 400)
    }
    text = head_of(large, verdicts)
    line = Heartbeat(3, Activity.COMPUTE, 0.0, 0.0, 0.0, (-1, 0)).to_line(text)
    assert " " not in text
    assert len(line) < 150
    assert head(line) == text
    assert verdicts_of(large, line) == verdicts
    assert verdicts[107] == "host one/0/7 (rank 107) died"
    assert [rank for rank, why in verdicts.items() if is_silence(why)] == list(range(300, 400))


def test_a_world_that_is_over_without_blame() -> None:
    assert verdicts_of(world(2), head_of(world(2), {}) + " []") == {}
    assert head_of(None, {}) == "!{}"


def test_a_world_that_a_vote_has_ended() -> None:
    line = head_of(world(2), {}, is_by_vote=True) + " []"
    assert has_ended_by_vote(line)
    assert verdicts_of(world(2), line) == {}
    died = head_of(world(2), {1: describe(world(2), 1, "died")}, is_by_vote=True) + " []"
    assert not has_ended_by_vote(died), "then somebody has to be told"
    assert not has_ended_by_vote("-{} []")


def test_the_last_moment_outside_is_the_newest_heard_of() -> None:
    last = LastOutside(0.0)
    last.hear((1, 5), 10.0)
    last.hear((2, 9), 8.0)
    assert (last.witness, last.at) == ((1, 5), 10.0)
    last.hear((2, 10), 12.0)
    assert (last.witness, last.at) == ((2, 10), 12.0)


def test_no_moment_grows_younger_on_its_way() -> None:
    """It comes round again by others, and seems newer by what the messages took."""
    last = LastOutside(0.0)
    last.hear((1, 5), 10.0)
    last.hear((1, 5), 10.3)
    assert last.at == 10.0
    last.hear((1, 5), 9.9)
    assert last.at == 9.9
    last.hear((1, 4), 10.5)
    assert last.at == 9.9, "an older heartbeat, on a longer way"


def test_moments_of_two_members_do_not_drive_each_other() -> None:
    last = LastOutside(0.0, slack=0.1)
    last.hear((1, 5), 10.0)
    last.hear((2, 3), 10.05)
    assert last.witness == (1, 5)
    last.hear((2, 4), 10.2)
    assert last.witness == (2, 4)
