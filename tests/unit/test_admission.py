"""Whom rank 0 chooses from the join queue."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic import joins
from elastic_train.elastic.barriers import Surroundings
from elastic_train.elastic.joins import SETTLE_SECONDS
from elastic_train.elastic.membership import Membership
from elastic_train.protocol.join_queue import Waiting
from elastic_train.world import Member, World
from tests.bare_membership import bare_membership


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """What membership asks of the job here."""

    def __init__(self, waiting: list[Waiting], agreement: dict[str, Any]) -> None:
        self.waiting, self._agreement = waiting, json.dumps(agreement)

    def create_fact(self, _name: str, _proposal: str) -> str:
        return self._agreement

    def queue(self) -> list[Waiting]:
        return self.waiting

    def drop(self, _members: list[Member]) -> None: ...

    def beside(self, _member: Member) -> Any:
        return SimpleNamespace(put=lambda _key, _value: None)


def member(number: int, **agreement: Any) -> Member:
    address = ("10.0.0.1", number)
    return Member(
        f"node{number}", 0, number, 1, address, "d", "gloo", None, agreement, uid=f"uid{number}", store=address
    )


def newcomers(*waiting: Member, agreement: dict[str, Any]) -> tuple[Membership, Clock, World]:
    clock = Clock()
    job = Queue([Waiting(one, 1) for one in waiting], agreement)
    found = bare_membership(job, member(0), surroundings=Surroundings(monotonic=clock))
    world = World(0, 0, (member(0),))
    found.joins.enter(world)
    found.agreed_once("agreement", "")
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
    monkeypatch.setattr(joins, "json", SimpleNamespace(loads=lambda text: parsed.append(text) or json.loads(text)))
    here.joins.consider(world)
    assert len(parsed) == 1


def test_those_for_whom_there_is_no_room_are_told_once() -> None:
    here, _, world = newcomers(member(1), member(2), member(3), agreement={})
    told: list[tuple[str, str]] = []
    here.joins.tell_why = lambda node, why: told.extend((one.uid, why) for one in node)  # type: ignore[method-assign]
    here.joins._max_nodes = 2
    here.joins.consider(world)
    here.joins.consider(world)
    why = "1 of at most 2 nodes train: this one waits for a place"
    assert told == [("uid2", why), ("uid3", why)]


def test_all_who_wait_are_told_why() -> None:
    here, _, world = newcomers(member(1), member(2), agreement={})
    told: list[tuple[str, str]] = []
    here.joins.tell_why = lambda node, why: told.extend((one.uid, why) for one in node)  # type: ignore[method-assign]
    here.joins.tell_queue(world, "rank 0 is stuck")
    assert told == [("uid1", "rank 0 is stuck"), ("uid2", "rank 0 is stuck")]
