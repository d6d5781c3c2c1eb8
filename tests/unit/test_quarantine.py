"""Quarantine: which deaths count, and how long a host waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.protocol.quarantine import Deaths, Quarantine, quarantine_after, quarantines, waits
from elastic_train.world import Member, World
from tests.unit.test_join_queue import member

MINUTE = 60.0


def other(one: Member, agent_pid: int) -> Member:
    """Of another node of the same host."""
    return replace(one, agent_pid=agent_pid, uid=f"{one.uid}-{agent_pid}")


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "deaths", [[], [5.0], [5.0, 6.0], [0.0, 300.0, 601.0], [0.0, 1.0, 602.0], [0.0, 400.0, 800.0, 1200.0]]
)
def test_few_deaths_lead_to_nothing(deaths: list[float]) -> None:
    assert quarantine_after(deaths) is None


@pytest.mark.parametrize("deaths", [[0.0, 1.0, 2.0], [0.0, 300.0, 600.0], [-500.0, 200.0, 300.0, 500.0]])
def test_three_within_ten_minutes_lead_to_one_minute(deaths: list[float]) -> None:
    assert quarantine_after(deaths) == Quarantine(3, MINUTE, deaths[-1] + MINUTE)
    assert quarantine_after(reversed(deaths)) == quarantine_after(deaths)


def test_each_further_death_doubles_it_up_to_half_an_hour() -> None:
    """Though the host was away for longer than ten minutes: that it waited is no good conduct."""
    deaths, waited = [0.0, 10.0, 20.0], []
    for _ in range(8):
        found = quarantine_after(deaths)
        assert found is not None
        waited.append(found.seconds)
        deaths.append(found.until + 5.0)
    assert waited == [MINUTE * minutes for minutes in (1, 2, 4, 8, 16, 30, 30, 30)]
    assert found.deaths == len(deaths) - 1


def test_who_dies_before_it_is_over_has_waited_too_little() -> None:
    """It was admitted all the same, for there were too few nodes."""
    assert quarantine_after([0.0, 10.0, 20.0, 30.0]) == Quarantine(4, 2 * MINUTE, 30.0 + 2 * MINUTE)


@pytest.mark.parametrize(("good_seconds", "is_forgiven"), [(599.0, False), (600.0, False), (601.0, True)])
def test_ten_minutes_of_good_conduct_are_forgiveness(good_seconds: float, is_forgiven: bool) -> None:
    deaths = [0.0, 10.0, 20.0, 20.0 + MINUTE + good_seconds]
    found = quarantine_after(deaths)
    assert (found is None) == is_forgiven
    if is_forgiven:
        again = quarantine_after([*deaths, deaths[-1] + 1.0, deaths[-1] + 2.0])
        assert again == Quarantine(3, MINUTE, deaths[-1] + 2.0 + MINUTE), "as if it were the first time"


def incident(at: float, *hosts: str) -> dict[str, Any]:
    return {"cause": "peer_lost", "time": 1e9, "dead_hosts": list(hosts), "run_seconds": at}


def test_each_host_has_its_own_and_other_incidents_count_for_none() -> None:
    incidents = [
        incident(0.0, "a", "b"), {"cause": "leave", "lost_members": ["c/0/1"]}, incident(10.0, "a"),
        {"cause": "restart"}, incident(20.0, "a", "c"), incident(30.0, "b"),
    ]  # fmt: skip
    assert quarantines(incidents, 30.0) == {"a": Quarantine(3, MINUTE, 80.0)}
    assert quarantines(incidents, 79.9) == {"a": Quarantine(3, MINUTE, 80.0)}
    assert quarantines(incidents, 80.0) == {}


def test_a_run_that_has_gone_back_in_time_waits_no_longer_than_as_a_whole() -> None:
    incidents = [incident(1000.0 + at, "a") for at in range(3)]
    assert quarantines(incidents, 500.0) == {"a": Quarantine(3, MINUTE, 500.0 + MINUTE)}


# --- what a death is --------------------------------------------------------------------------------------------------


def test_a_host_dies_once_with_all_its_workers() -> None:
    a0, a1, b = member("a"), member("a", 1), member("b")
    assert Deaths().note([a0, a1], [b]) == ["a"]
    assert Deaths().note([], [a0, a1, b]) == []


def test_a_worker_that_is_lost_is_the_death_of_its_node_whose_others_are_ended() -> None:
    """torchrun ends them: they leave, or are seen to die a little later, perhaps in two worlds."""
    a0, a1, a2, b = member("a"), member("a", 1), member("a", 2), member("b")
    deaths = Deaths()
    assert deaths.note([a0], [a1, a2, b]) == ["a"]
    assert deaths.note([a1], [a2, b]) == []
    assert deaths.note([a2], [b]) == []
    assert deaths.note([replace(a0, uid="came back")], [b]) == ["a"]


def test_a_host_lives_while_another_of_its_nodes_does() -> None:
    """Four terminals of one machine, closed one after the other."""
    nodes = [other(member("a"), number) for number in range(4)]
    deaths = Deaths()
    for gone in range(3):
        assert deaths.note([nodes[gone]], nodes[gone + 1 :]) == []
    assert deaths.note([nodes[3]], [member("b")]) == ["a"], "the last one"


# --- who waits --------------------------------------------------------------------------------------------------------


def world(*members: Member, min_nodes: int = 1) -> World:
    return World(0, 7, tuple(replace(one, min_nodes=min_nodes) for one in members))


def test_who_waits() -> None:
    node = (member("a"), member("a", 1))
    assert waits(node, world(member("b")), 100)
    assert not waits(node, world(member("b"), min_nodes=2), 100), "there are too few without it"
    assert waits(node, world(member("b"), member("c"), min_nodes=2), 100)
    assert not waits(node, world(member("b"), other(member("a"), 9)), 100), "its host lives"


@pytest.mark.parametrize(("newest", "it_waits"), [(None, True), ((7, 100), True), ((7, 101), False), ((8, 1), True)])
def test_who_has_come_further_than_the_others_does_not_wait(newest: tuple[int, int] | None, it_waits: bool) -> None:
    assert waits((member("a", newest=newest),), world(member("b")), 100) == it_waits
