"""Who waits in the lobby, and whom the next world takes in."""

from __future__ import annotations

import pytest

from elastic_train.lobby import Admission, Waiting, is_start_due, newest_key, ready_nodes
from elastic_train.world import Member


def member(node: str, local_rank: int = 0, **changes: object) -> Member:
    fields = {
        "host": node,
        "local_rank": local_rank,
        "pid": 100 + local_rank,
        "agent_pid": 1,
        "address": ("10.0.0.1", 4000 + local_rank),
        "directory_id": "d",
        "backend": "gloo",
        "max_generation": None,
        "agreement": {"--seed": 0},
        "group_store": ("10.0.0.1", 5000),
    }
    return Member(**fields | changes)  # type: ignore[arg-type]


def waiting(node: str, local_rank: int = 0, size: int = 1) -> Waiting:
    return Waiting(member(node, local_rank), node, size)


def test_what_is_written_is_read() -> None:
    one = waiting("a", 1, 2)
    assert Waiting.from_json(one.to_json()) == one
    admission = Admission((), (member("a"), member("b")))
    assert Admission.from_json(admission.to_json()) == admission


def test_an_admission_leaves_out_what_the_members_agreed_on_long_ago() -> None:
    found = Admission.from_json(Admission((member("a"),), (member("b"),)).to_json())
    assert [one.agreement for one in found.everyone] == [{}, {"--seed": 0}]
    assert [one.name for one in found.everyone] == [member("a").name, member("b").name]


def test_a_node_is_ready_when_all_its_workers_are() -> None:
    lobby = [waiting("a", 0, 2), waiting("b", 1, 2), waiting("b", 0, 2), waiting("c")]
    assert ready_nodes(lobby, ()) == [[member("b", 0), member("b", 1)], [member("c")]]


def test_who_is_in_the_world_already_is_not_taken_in_again() -> None:
    assert ready_nodes([waiting("a"), waiting("b")], {member("a").name}) == [[member("b")]]


@pytest.mark.parametrize(
    ("num_ready", "seconds", "is_due"),
    [
        (0, 99.0, False),
        (1, 99.0, False),
        (2, 1.9, False),
        (2, 2.0, True),
        (3, 2.5, True),
        (4, 0.0, True),
        (5, 0.0, True),
    ],
)
def test_the_first_world_starts_when_all_or_enough_are_there(num_ready: int, seconds: float, is_due: bool) -> None:
    assert is_start_due(num_ready, min_nodes=2, max_nodes=4, seconds_enough=seconds, last_call=2.0) is is_due


def test_the_newest_world_is_at_the_end_of_the_chain_of_decisions() -> None:
    assert newest_key("p", {}) == "p/start"
    assert newest_key("p", {"p/start": 7}) == "p/world-7"
    assert newest_key("p", {"p/start": 7, "p/world-7": 8, "p/world-8": 9, "p/world-3": 4}) == "p/world-9"
