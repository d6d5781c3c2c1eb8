"""The warnings of a worker that is stuck."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from elastic_train.elastic.stuck import AGAIN_SECONDS, StuckThread, is_main_thread_in_collective, place_of_main_thread
from elastic_train.protocol.heartbeat import OwnHeartbeat, Pace
from elastic_train.rules import Activity
from elastic_train.world import World
from tests.unit.test_liveness import make_member

MEMBER = make_member(0)
ALONE = World(rank=0, generation=0, members=(MEMBER,))
OF_TWO = replace(ALONE, members=(MEMBER, MEMBER))


SPARE = replace(OF_TWO, rank=1, max_world_size=1)


def settled(said: list[str]) -> list[str]:
    """What was said, once that is done."""
    for thread in threading.enumerate():
        if thread.name == "stuck":
            thread.join(10.0)
    return said


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_where_all_wait_for_each_other_it_says_once_where_it_waits() -> None:
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0), clock)
    stuck = StuckThread(own, said.append, lambda _world: 0.0, where=lambda: "it is at mine.py:3 (train)")
    limit = own.pace.limit(Activity.REDUCE)
    own.turn_to(Activity.REDUCE)
    clock.now += limit
    own.outside.hear((1, 1), clock.now - 1.0)
    stuck.look_apart()
    assert settled(said) == [], "another one has come a moment ago"
    for activity, seconds in ((Activity.COMPUTE, limit), (Activity.REDUCE, 1.0), (Activity.REDUCE, limit)):
        own.turn_to(activity)
        clock.now += seconds
        stuck.look_apart()
        stuck.look_apart()
    assert settled(said) == [
        f"a collective has not ended in {limit:.0f} s though all take part in one: it is at mine.py:3 (train). Where "
        "another worker names another place, the code that is trained calls a collective on some ranks alone"
    ]


@pytest.mark.parametrize(("seconds", "is_told"), [(200, False), (300, True)])
def test_who_may_have_computed_until_now_says_nothing_of_a_wait(seconds: int, is_told: bool) -> None:
    """In a pass on a GPU, which may take 300 s; then all have waited, as far as anybody knows."""
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0), clock)
    own.pace.note_step(0.1)
    own.begin(0, slack=0.1)
    stuck = StuckThread(own, said.append, lambda _world: 0.0, where=lambda: "")
    own.turn_to(Activity.STEP)
    for _ in range(seconds):
        clock.now += 1.0
        own.line("-{}", OF_TWO)
    stuck.look_apart()
    assert len(settled(said)) == is_told


@pytest.mark.parametrize("world", [ALONE, OF_TWO])
def test_it_says_once_where_it_stands_still(world: World) -> None:
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0, stall_timeout=20.0), clock)
    own.pace.note_step(0.1)
    stuck = StuckThread(own, said.append, lambda _world: 0.0, where=lambda: "it is at data.py:3 (read)")
    own.turn_to(Activity.COMPUTE)
    returned = []
    for seconds in (1.0, 18.0, 2.0, 5.0, 5.0, 300.0):
        clock.now += seconds
        returned.append(stuck.look(world))
    assert settled(said) == [
        "this worker has been at one thing for 21 s, and 20 s are allowed (--stall-timeout): it is at data.py:3 (read)"
    ]
    assert [line is not None for line in returned] == [False, False, True, False, True, True], "for who comes meanwhile"
    own.turn_to(Activity.COMPUTE)
    clock.now += 30.0
    stuck.look(world)
    assert len(settled(said)) == 2, "another thing, and as long"


def test_it_says_that_others_wait_where_it_takes_longer_than_it_may() -> None:
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0, stall_timeout=20.0), clock)
    own.pace.note_step(0.1)
    stuck = StuckThread(own, said.append, lambda _world: 61.4, where=lambda: "it is at judge.py:3 (look)")
    own.turn_to(Activity.COMPUTE)
    clock.now += 90.0
    assert stuck.look(OF_TWO) == (
        "others have waited for it for 61 s; this worker has been at one thing for 90 s, and 20 s are allowed "
        "(--stall-timeout): it is at judge.py:3 (look)"
    )
    assert len(settled(said)) == 1


@pytest.mark.parametrize(("waited", "is_told"), [(59.0, False), (61.0, True)])
def test_it_says_early_that_others_wait(waited: float, is_told: bool) -> None:
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0), clock)  # before its first commit it may take half an hour
    stuck = StuckThread(own, said.append, lambda _world: waited, where=lambda: "it is at judge.py:3 (look)")
    own.turn_to(Activity.COMPUTE)
    for seconds in (1.0, 60.0, 30.0):
        clock.now += seconds
        assert stuck.look(OF_TWO) is None, "who comes to the queue is told nothing yet"
    expected = (
        "others have waited for it for 61 s; this worker has been at one thing for 61 s, and 1800 s are allowed "
        "(--stall-timeout): it is at judge.py:3 (look)"
    )
    assert settled(said) == ([expected] if is_told else []), "once"


@pytest.mark.parametrize(
    ("activity", "world"),
    [(Activity.FORM, OF_TWO), (Activity.REDUCE, OF_TWO), (Activity.COMPUTE, None), (Activity.COMPUTE, SPARE)],
)
def test_who_waits_for_others_is_not_stuck(activity: Activity, world: World | None) -> None:
    clock, said = Clock(), list[str]()
    own = OwnHeartbeat(Pace(10.0, stall_timeout=20.0), clock)
    stuck = StuckThread(own, said.append, lambda _world: 10_000.0)
    own.turn_to(activity)
    clock.now += 10_000.0
    stuck.look(world)
    assert settled(said) == []


def test_the_place_is_the_innermost_line_of_the_users_own_code() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(place_of_main_thread()))
    thread.start()
    thread.join()  # where the main thread stands meanwhile
    here, called = found[0].split(", in a call to ")
    assert here.startswith(f"it is at {__file__}:")
    assert here.endswith("(test_the_place_is_the_innermost_line_of_the_users_own_code)")
    assert "threading.py:" in called


class Looking:
    """Is pickled by the main thread, inside of a function of torch's."""

    def __reduce__(self) -> tuple[type[list[None]], tuple[()]]:
        looks = threading.Thread(target=lambda: self.found.append(is_main_thread_in_collective()))
        looks.start()
        looks.join(10.0)
        return list, ()

    def __init__(self) -> None:
        self.found: list[bool] = []


def test_the_main_thread_is_seen_in_a_collective() -> None:
    looking = Looking()
    dist.distributed_c10d._object_to_tensor(looking, torch.device("cpu"), None)  # as gather_object does first
    looking.__reduce__()
    assert looking.found == [True, False]


def test_who_is_late_before_it_enters_a_collective_of_its_own_counts_as_in_it_from_then_on() -> None:
    clock, said, place = Clock(), list[str](), {"is_inside": False}
    own = OwnHeartbeat(Pace(10.0, stall_timeout=20.0), clock)
    own.pace.note_step(0.1)
    stuck = StuckThread(own, said.append, lambda _world: 0.0, lambda: "", lambda: place["is_inside"])
    own.turn_to(Activity.COMPUTE)
    clock.now += 21.0
    stuck.look(OF_TWO)
    place["is_inside"] = True
    clock.now += AGAIN_SECONDS - 1.0
    stuck.look(OF_TWO)
    assert own.at()[0] is Activity.COMPUTE
    clock.now += 1.0
    stuck.look(OF_TWO)
    assert own.at()[0] is Activity.REDUCE
    assert len(settled(said)) == 1


def test_who_waits_in_a_collective_of_its_own_counts_as_such_once_it_is_late() -> None:
    """Else all would be busy, by their own word, while one hangs outside, and nobody be to blame."""
    clock, said, place = Clock(), list[str](), {"is_inside": False}
    own = OwnHeartbeat(Pace(10.0, stall_timeout=20.0), clock)
    own.pace.note_step(0.1)
    stuck = StuckThread(own, said.append, lambda _world: 0.0, lambda: "", lambda: place["is_inside"])
    for place["is_inside"], activity in ((False, Activity.COMPUTE), (True, Activity.REDUCE)):
        own.turn_to(Activity.COMPUTE)
        clock.now += 19.0
        stuck.look(OF_TWO)
        assert own.at()[0] is Activity.COMPUTE
        clock.now += 2.0
        stuck.look(OF_TWO)
        assert own.at()[0] is activity
    assert own.at() == (Activity.REDUCE, 0.0, 20.0), "it has waited for as long before another one is blamed"
    assert len(settled(said)) == 2
