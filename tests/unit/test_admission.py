"""The choice of newcomers from the join queue by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic.barriers import Surroundings
from elastic_train.elastic.joins import IN_QUEUE, SETTLE_SECONDS, Arrival
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.next_world import REPORT_SECONDS
from elastic_train.elastic.run import require_unfinished
from elastic_train.elastic.whole_steps import is_tried_first, why_closed_in
from elastic_train.errors import JobFinished, Stopped
from elastic_train.protocol import join_queue
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.known_worlds import Admitted
from elastic_train.protocol.plan import Plan
from elastic_train.rules import NOW
from elastic_train.world import Member, World
from tests.bare_membership import bare_membership


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Queue:
    """What membership asks of the job here."""

    world: World | None = None

    def __init__(self, waiting: list[Waiting], agreement: dict[str, Any]) -> None:
        self.waiting = waiting
        self.facts = SimpleNamespace(known={"agreement": json.dumps(agreement)})
        self.entrance = SimpleNamespace(drop=lambda _members: None)
        self.place = SimpleNamespace(has_moved=lambda _world: False)

    def queue(self) -> list[Waiting]:
        return self.waiting

    def ask_beside(self, _member: Member, _question: Callable[[Any], None]) -> None: ...


def member(number: int, **agreement: Any) -> Member:
    address = ("10.0.0.1", number)
    return Member(
        f"node{number}", 0, number, 1, address, "d", "gloo", None, agreement, uid=f"uid{number}", store=address
    )


def enter(here: Membership, world: World) -> None:
    """As `Membership` does when a world is agreed on."""
    job: Any = here.job
    job.world = world
    here.joins.enter(world)


def newcomers(*waiting: Member, agreement: dict[str, Any]) -> tuple[Membership, Clock, World]:
    clock = Clock()
    job = Queue([Waiting(one, 1) for one in waiting], agreement)
    found = bare_membership(job, member(0), surroundings=Surroundings(monotonic=clock))
    world = World(0, 0, (member(0),))
    enter(found, world)
    return found, clock, world


def test_only_those_who_agree_with_the_run_are_admitted() -> None:
    here, clock, world = newcomers(member(1, lr=0.1), member(2, lr=0.2), member(3, lr=0.1), agreement={"lr": 0.1})
    here.joins.consider(world)
    assert not here.joins.vote(), "others may become ready in the same moment"
    clock.now += 2 * SETTLE_SECONDS
    here.joins.consider(world)
    assert [one.uid for one in here.joins._admits] == ["uid1", "uid3"]


def test_a_look_parses_the_agreement_of_the_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has some kilobytes, and hundreds may wait."""
    here, _, world = newcomers(*(member(number, lr=0.1) for number in range(1, 9)), agreement={"lr": 0.1})
    parsed = []
    monkeypatch.setattr(join_queue, "json", SimpleNamespace(loads=lambda text: parsed.append(text) or json.loads(text)))
    here.joins.consider(world)
    assert len(parsed) == 1


def test_those_for_whom_there_is_no_room_are_told_once() -> None:
    here, _, world = newcomers(member(1), member(2), member(3), agreement={})
    told: list[tuple[str, str]] = []
    here.joins.news.send = lambda node, why: told.extend((one.uid, why) for one in node)  # type: ignore[method-assign]
    here.joins._max_nodes = 2
    here.joins.consider(world)
    here.joins.consider(world)
    why = (
        "1 of at most 2 nodes train: this one waits for a place (the --nnodes MIN:MAX of those that train says how "
        "many, not this node's; start all of them again to change it)"
    )
    assert told == [("uid2", why), ("uid3", why)]


@pytest.mark.parametrize("answers", [True, False])
def test_a_spare_that_is_gone_keeps_nobody_out(answers: bool) -> None:
    """It is in nobody's step, so that its death ends no world."""
    here, clock, _ = newcomers(member(2), agreement={})
    world = World(0, 0, (member(0), member(1)), max_world_size=1)
    enter(here, world)
    here.joins._max_nodes = 2
    here.joins._answering = lambda members: members if answers else tuple(one for one in members if one.uid != "uid1")
    for _ in range(2):
        here.joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert [one.uid for one in here.joins._admits] == ([] if answers else ["uid2"])


def test_where_the_world_ends_for_others_no_plan_is_begun_or_followed() -> None:
    """One of the newcomers vanishes in the step that has admitted it; the next plan would be rank 0's alone."""
    here, clock, world = newcomers(member(1), agreement={})
    joins = here.joins
    joins._form = lambda _world: None  # type: ignore[assignment, return-value]
    joins._admits = (member(9),)
    assert joins.vote() == NOW
    for _ in range(3):
        joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert joins.prepared is None
    assert [one.uid for one in joins._admits] == ["uid1"], "in the agreement, which is to come"
    enter(here, replace(world, uid="next"))
    joins._plan, joins._preparation = Plan("next", (), None), SimpleNamespace(is_ready=False, plan="it")  # type: ignore
    assert joins.prepared is None, "it is not decided"
    joins._preparation.is_ready = True
    assert joins.prepared == "it"


def test_all_who_wait_are_told_why() -> None:
    here, _, world = newcomers(member(1), member(2), agreement={})
    told: list[tuple[str, str]] = []
    here.joins.news.send = lambda node, why: told.extend((one.uid, why) for one in node)  # type: ignore[method-assign]
    here.joins.news.send_to_all(world, "rank 0 is stuck")
    assert told == [("uid1", "rank 0 is stuck"), ("uid2", "rank 0 is stuck")]


def test_nobody_is_admitted_to_a_world_that_nobody_could_train_in_and_who_waits_is_told_once() -> None:
    here, clock, world = newcomers(member(1), agreement={})
    told: list[str] = []
    here.joins.news.send = lambda _node, why: told.append(why)  # type: ignore[method-assign]
    here.joins.why_closed = "a parameter got no gradient"
    for _ in range(3):
        here.joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert here.joins._admits == ()
    assert told == ["a parameter got no gradient"]
    enter(here, world)  # whatever holds there is found out there
    for _ in range(2):
        here.joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert [one.uid for one in here.joins._admits] == ["uid1"]


def test_until_a_world_of_one_has_done_a_step_whoever_comes_waits_and_is_told_nothing() -> None:
    """Only that step shows whether another one could train in it."""
    here, clock, world = newcomers(member(1), agreement={})
    told: list[str] = []
    here.joins.news.send = lambda _node, why: told.append(why)  # type: ignore[method-assign]

    def look_for_long() -> None:
        for _ in range(3):
            here.joins.consider(world)
            clock.now += 2 * SETTLE_SECONDS

    here.joins.why_closed_in = lambda entered: "" if entered is world else None
    enter(here, world)
    look_for_long()
    assert here.joins.vote() == 0
    here.joins.why_closed = "a parameter got no gradient"  # found in its first step, before the commit
    here.joins.follow_vote(world, 0)
    look_for_long()
    assert (here.joins.vote(), told) == (0, ["a parameter got no gradient"])
    enter(here, world)
    look_for_long()
    here.joins.follow_vote(world, 0)
    look_for_long()
    assert here.joins.vote() == NOW


def test_nobody_is_admitted_where_that_is_found_out_while_they_are_asked_to_answer() -> None:
    here, clock, world = newcomers(member(1), agreement={})

    def answering(members: tuple[Member, ...]) -> tuple[Member, ...]:
        here.joins.why_closed = "a parameter got no gradient"
        return members

    here.joins._answering = answering
    here.joins.consider(world)
    clock.now += 2 * SETTLE_SECONDS
    here.joins.consider(world)
    assert here.joins.vote() == 0


@pytest.mark.parametrize(
    ("members", "flags", "is_open", "is_tried"),
    [
        ((member(0),), {}, True, True),
        ((member(0),), {}, False, False),
        ((member(0), member(1)), {}, True, False),
        ((replace(member(0), min_nodes=2),), {}, True, False),
        ((member(0),), {"find_unused_parameters": True}, True, False),
        ((member(0),), {"static_graph": True}, True, False),
        ((member(0),), {"reduction": "ordered"}, True, False),
    ],
    ids=["alone", "a fixed world", "two", "it waits for a second node", "flag", "static", "ordered"],
)
def test_which_world_has_to_try_first(
    members: tuple[Member, ...], flags: dict[str, Any], is_open: bool, is_tried: bool
) -> None:
    worker: Any = SimpleNamespace(config=Config(**flags), launch=SimpleNamespace(is_open=is_open))
    assert is_tried_first(worker, World(0, 0, members)) is is_tried


@pytest.mark.parametrize("flags", [{}, {"find_unused_parameters": True}], ids=["", "unused parameters"])
def test_a_model_on_several_devices_admits_nobody(flags: dict[str, Any]) -> None:
    """By fakes: a second worker would end the job, which works."""
    parts = [SimpleNamespace(device=torch.device("cuda", number)) for number in range(2)]
    model = SimpleNamespace(parameters=lambda: iter(parts))
    launch = SimpleNamespace(is_open=True)
    worker: Any = SimpleNamespace(config=Config(**flags), launch=launch, state=SimpleNamespace(model=model))
    alone = World(0, 0, (member(0),))
    here, clock, _ = newcomers(member(1), agreement={})
    told: list[str] = []
    here.joins.news.send = lambda _node, why: told.append(why)  # type: ignore[method-assign]
    here.joins.why_closed_in = partial(why_closed_in, worker)
    enter(here, alone)
    for _ in range(3):
        here.joins.consider(alone)
        here.joins.follow_vote(alone, 0)
        clock.now += 2 * SETTLE_SECONDS
    assert here.joins.vote() == 0
    assert told == ["the model has parts on cuda:0 and cuda:1: train it in one worker, or put all parts on one device"]


def test_who_was_absent_is_tried_again_where_nobody_else_has_room() -> None:
    """It comes back to a node that is inside; the other one is a node too many."""
    back, other = replace(member(2), host=member(0).host), member(1)
    here, clock, world = newcomers(other, back, agreement={})
    here.joins._absent, here.joins._max_nodes = (back,), 1
    for _ in range(2):
        here.joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert [one.uid for one in here.joins._admits] == [back.uid]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_newcomer_says_once_that_it_waits(is_first: bool) -> None:
    """It has said nothing for as long as it took to import and build all: who waits for it would think that it hangs.
    Where the job begins there is nobody to be admitted by."""
    world: Any = None
    places = iter(["waiting", "waiting", Admitted(world, {}, came_later=not is_first)])
    job: Any = SimpleNamespace(
        entrance=SimpleNamespace(is_first=is_first, leave=lambda: None),
        look_from_queue=lambda _mine: next(places),
        told=lambda _key: None,
    )
    nothing: Any = SimpleNamespace(do=lambda _activity: None, monotonic=lambda: 0.0, sleep=lambda _seconds: None)
    said: list[str] = []
    arrival = Arrival(job, nothing, nothing, check=lambda: None, log=said.append)
    mine: Any = None
    assert isinstance(arrival.wait_in_queue(mine, lambda: None), Admitted)
    assert said == [IN_QUEUE] * (not is_first)


def test_who_finds_nobody_is_through_where_the_run_is_finished() -> None:
    """It looks as often as it says what it waits for."""
    clock, asked = Clock(), []
    began = clock()

    def look() -> None:
        asked.append(clock() - began)
        if len(asked) == 2:
            raise JobFinished("the run is finished")

    job: Any = SimpleNamespace(
        entrance=SimpleNamespace(find=lambda: False, host_store=None), finder=SimpleNamespace(describe=lambda: "")
    )
    around: Any = SimpleNamespace(monotonic=clock, sleep=clock.sleep, require_unfinished=look)
    watcher: Any = None
    arrival = Arrival(job, watcher, around, check=lambda: None, log=lambda _line: None)
    with pytest.raises(JobFinished):
        arrival.find()
    assert len(asked) == 2
    assert asked[0] >= REPORT_SECONDS


def test_who_stands_in_a_queue_does_not_ask_whether_the_run_is_finished() -> None:
    """A job begins, or runs: what an earlier one has left says nothing of it."""
    clock, places = Clock(), iter(["waiting"] * 1000)
    stopped = Stopped(15)

    def check() -> None:
        if clock.now > 200.0:
            raise stopped

    entrance = SimpleNamespace(is_first=True, host_store="a store")
    job: Any = SimpleNamespace(entrance=entrance, look_from_queue=lambda _mine: next(places), told=lambda _key: None)
    around: Any = SimpleNamespace(monotonic=clock, sleep=lambda _: clock.sleep(1.0), require_unfinished=pytest.fail)
    watcher: Any = SimpleNamespace(do=lambda _activity: None)
    mine: Any = None
    with pytest.raises(Stopped):
        Arrival(job, watcher, around, check=check, log=lambda _line: None).wait_in_queue(mine, lambda: None)


@pytest.mark.parametrize(
    ("step", "age", "is_finished"), [(4, -1.0, True), (3, -1.0, False), (4, 1e6, False), (None, 0.0, False)]
)
def test_a_run_is_finished_where_its_directory_has_got_the_result_of_this_end_meanwhile(
    tmp_path: Path, step: int | None, age: float, is_finished: bool
) -> None:
    """One that is older may be of an end whose state could not be saved, or of this node's own disk alone."""
    path = tmp_path / "result.json"
    if step is not None:
        path.write_text(json.dumps({"step": step}))
        os.utime(path, (time.time() - age,) * 2)
    worker: Any = SimpleNamespace(directory=SimpleNamespace(result_path=path), state=SimpleNamespace(last_step=4))
    with pytest.raises(JobFinished) if is_finished else nullcontext():
        require_unfinished(worker)
