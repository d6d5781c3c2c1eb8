"""Who waits in the lobby, and whom the next world takes in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.errors import FormationFailed
from elastic_train.lobby import Admission, Waiting, is_start_due, nobody, ready_nodes, standing
from elastic_train.meeting import Decision
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


def texts_of(admissions: dict[str, Admission], decisions: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, str]:
    """What a job has written: who was admitted, and (generation, ranks) that were decided, by world."""
    texts = {f"p/{key}/admit": admission.to_json() for key, admission in admissions.items()}
    for key, (generation, ranks) in decisions.items():
        texts[f"p/{key}/next"] = Decision(generation, ranks, (), ()).to_json()
    return texts


def names(members: tuple[Member, ...]) -> list[str]:
    return [one.host for one in members]


A, B, C = member("a"), member("b"), member("c")


def test_before_the_first_world_nobody_is_in() -> None:
    stands = standing("p", {})
    assert (stands.key, stands.members, stands.admission, stands.everyone) == ("p/start", (), None, ())


def test_those_who_are_about_to_form_the_first_world() -> None:
    stands = standing("p", texts_of({"start": Admission((), (A, B))}, {}))
    assert stands.key == "p/start"
    assert names(stands.everyone) == ["a", "b"]


def test_the_members_are_those_on_the_last_list() -> None:
    first = ({"start": Admission((), (A, B, C))}, {"start": (7, (0, 2))})
    stands = standing("p", texts_of(*first))
    assert (stands.key, names(stands.members), stands.admission) == ("p/world-7", ["a", "c"], None)


def test_whom_the_present_world_takes_in() -> None:
    admissions = {"start": Admission((), (A,)), "world-7": Admission((A,), (B, C))}
    stands = standing("p", texts_of(admissions, {"start": (7, (0,))}))
    assert (stands.key, names(stands.members), names(stands.everyone)) == ("p/world-7", ["a"], ["a", "b", "c"])


def test_old_worlds_may_have_been_swept_up() -> None:
    admissions = {"world-8": Admission((A, B), (C,))}
    decisions = {"start": (7, (0, 1)), "world-7": (8, (0, 1)), "world-8": (9, (1, 2))}
    stands = standing("p", texts_of(admissions, decisions))
    assert (stands.key, names(stands.members)) == ("p/world-9", ["b", "c"])


def test_an_empty_world_takes_the_place_of_one_that_died_before_it_was_decided() -> None:
    texts = texts_of({"start": Admission((), (A, B))}, {"start": (7, (0, 1))})
    texts |= texts_of({"world-7": Admission((A, B), (C,))}, {})
    everyone = tuple(replace(one, max_generation=7) for one in standing("p", texts).everyone)
    texts["p/world-7/next"] = nobody(everyone, 7).to_json()
    stands = standing("p", texts)
    assert (stands.key, stands.members, stands.admission, stands.generation) == ("p/world-8", (), None, 8)


def test_generations_grow_though_nobody_who_came_knows_of_any() -> None:
    assert nobody((A, B), None).generation == 0
    assert nobody((A, B), 5).generation == 6


def test_decisions_that_contradict_each_other_are_no_endless_loop() -> None:
    texts = texts_of({"start": Admission((), (A,)), "world-0": Admission((A,), (B,))}, {"start": (0, (0,))})
    texts |= texts_of({}, {"world-0": (0, (1,))})
    with pytest.raises(FormationFailed, match="generation 0 follows 0"):
        standing("p", texts)
