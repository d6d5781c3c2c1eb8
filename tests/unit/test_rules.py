"""The rules of membership, exhaustively over small worlds and by property over larger ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.errors import Refused
from elastic_train.rules import (
    DATA_BY,
    ITEMS,
    Activity,
    MemberActivity,
    agreeing,
    common_backend,
    connected,
    disagreement,
    freshest,
    is_cut_off,
    next_generation,
    next_members,
    require_agreement,
    seconds_before_return,
    seconds_to_form,
    stalled,
)
from tests.unit.test_liveness import make_member

LIMIT = 2.0
GENERATION = 5

MEMBER = make_member(0)

ranks_strategy = st.lists(st.integers(0, 9), unique=True).map(sorted)
edges_strategy = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)))


# --- the next world ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_next_members_for_every_state_of_every_rank(size: int) -> None:
    """Each rank has joined or not, has left or not, is known to be dead or not: eight states."""
    for states in itertools.product(range(8), repeat=size):
        joined = {rank: () for rank, state in enumerate(states) if state & 1}
        left = {rank for rank, state in enumerate(states) if state & 2}
        dead = {rank for rank, state in enumerate(states) if state & 4}
        verdict = next_members(size, joined, left, dead)
        assert verdict.members == tuple(rank for rank, state in enumerate(states) if state == 1)
        assert verdict.waiting_for == tuple(rank for rank, state in enumerate(states) if state == 0)


def test_next_members_waits_for_nobody_outside_of_the_world() -> None:
    verdict = next_members(2, {0: (), 1: (), 7: ()}, {9}, {8})
    assert (verdict.members, verdict.waiting_for) == ((0, 1), ())


def test_of_two_that_cannot_reach_each_other_one_is_expelled() -> None:
    assert next_members(3, {0: (), 1: (2,), 2: (1,)}, (), ()).members == (0, 1)


def test_a_dead_member_is_no_reason_to_expel_the_one_that_missed_it() -> None:
    assert next_members(4, dict.fromkeys(range(3), (3,)), (), {3}).members == (0, 1, 2)


def test_every_graph_of_four_members() -> None:
    pairs = list(itertools.combinations(range(4), 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        edges = {pair for pair, is_cut in zip(pairs, chosen, strict=True) if is_cut}
        rest = connected(range(4), edges)
        assert rest, "somebody always goes on"
        assert not any({one, other} <= set(rest) for one, other in edges)
        lonely = {rank for pair in edges for rank in pair}
        assert set(range(4)) - lonely <= set(rest)
        if len(edges) == 1:
            assert set(range(4)) - set(rest) == {max(next(iter(edges)))}


def test_who_is_cut_off_from_most_goes_first() -> None:
    assert connected(range(4), {(0, 1), (0, 2), (0, 3)}) == [1, 2, 3]


@given(ranks_strategy, edges_strategy)
def test_connected_leaves_no_pair_that_is_cut(ranks: list[int], edges: set[tuple[int, int]]) -> None:
    rest = connected(ranks, edges)
    assert rest == sorted(rest)
    assert set(rest) <= set(ranks)
    assert not any(one in rest and other in rest for one, other in edges if one != other)
    assert bool(rest) == bool(ranks)


@given(ranks_strategy, edges_strategy)
def test_connected_removes_only_who_is_cut_off(ranks: list[int], edges: set[tuple[int, int]]) -> None:
    present = {(one, other) for one, other in edges if one in ranks and other in ranks and one != other}
    for gone in set(ranks) - set(connected(ranks, edges)):
        assert any(gone in pair for pair in present)


@given(ranks_strategy, edges_strategy)
def test_connected_sees_an_edge_from_either_end(ranks: list[int], edges: set[tuple[int, int]]) -> None:
    assert connected(ranks, edges) == connected(ranks, {(other, one) for one, other in edges})
    assert connected(ranks, edges) == connected(ranks, edges | {(other, one) for one, other in edges})


# --- small rules ------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.integers(0, 50)))
def test_a_generation_is_beyond_all_that_anybody_has_seen(seen: list[int | None]) -> None:
    following = next_generation(seen)
    known = [generation for generation in seen if generation is not None]
    assert all(following > generation for generation in known)
    assert following == 0 or following - 1 in known


@pytest.mark.parametrize(
    ("backends", "common"),
    [
        (["gloo"], "gloo"),
        (["gloo", "gloo"], "gloo"),
        (["cpu:gloo,cuda:nccl"] * 3, "cpu:gloo,cuda:nccl"),
        (["cpu:gloo,cuda:nccl", "gloo"], "gloo"),
        (["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"], "gloo"),
    ],
)
def test_nccl_only_where_all_have_it(backends: list[str], common: str) -> None:
    members = [
        replace(MEMBER, pid=rank, backend=backend, gpu=f"GPU-{rank}" if "nccl" in backend else None)
        for rank, backend in enumerate(backends)
    ]
    assert common_backend(members) == common


def test_gloo_where_two_share_a_gpu() -> None:
    """Each may see it as number 0 of one: launchers hide the others."""
    nccl = "cpu:gloo,cuda:nccl"
    members = [replace(MEMBER, pid=rank, backend=nccl, gpu=gpu) for rank, gpu in enumerate("aba")]
    assert common_backend(members[:2]) == nccl
    assert common_backend(members) == "gloo"


@given(st.lists(st.integers(0, 5), min_size=1))
def test_the_freshest_is_the_lowest_rank_with_the_most_steps(steps: list[int]) -> None:
    source = freshest(steps)
    assert steps[source] == max(steps)
    assert all(step < steps[source] for step in steps[:source])


def test_disagreement_names_the_first_entry_and_both_values() -> None:
    assert disagreement({}, {}) is None
    assert disagreement({"classes": 10, "task": "digits", "--task": None}, {"task": "Own", "--task": "a:Own"}) == (
        "task", "digits", "Own"
    )  # fmt: skip
    assert disagreement({"a": 1, "b": [2]}, {"b": [2], "a": 1}) is None
    assert disagreement({"b": 1, "a": 1}, {"b": 2, "a": 2}) == ("a", 1, 2)
    assert disagreement({"--epochs": 1, "data": 1}, {"--epochs": 2, "data": 2}) == ("data", 1, 2), "not its flags"
    assert disagreement({"a": 1}, {}) == ("a", 1, None)
    assert disagreement({}, {"a": 1}) == ("a", None, 1)
    assert disagreement({"a": {"x": 1}}, {"a": {"x": 2}}) == ("a", {"x": 1}, {"x": 2})


def test_items_count_where_both_have_read_them() -> None:
    """Where loader processes read, they are not, and one node may have some and another one none."""
    unread, cats, dogs = {"a": 1}, {"a": 1, ITEMS: "cats"}, {"a": 1, ITEMS: "dogs"}
    assert disagreement(unread, cats) is None
    assert disagreement(cats, unread) is None
    assert disagreement(cats, dogs) == (ITEMS, "cats", "dogs")
    assert disagreement(cats, {**unread, f"{DATA_BY}names": "n"}) == (f"{DATA_BY}names", None, "n")
    assert disagreement({**cats, "a": 2}, unread) == ("a", 2, 1)


def test_those_agree_whose_items_nobody_contradicts() -> None:
    unread, cats, dogs, other = {"a": 1}, {"a": 1, ITEMS: "cats"}, {"a": 1, ITEMS: "dogs"}, {"a": 2, ITEMS: "cats"}

    def found(*agreements: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        members = [replace(MEMBER, agreement=one) for one in agreements]
        common, fitting = agreeing(members, agreements[0])
        return common, [dict(one.agreement) for one in fitting]

    assert found(unread, unread) == (unread, [unread, unread])
    assert found(unread, cats, dogs, unread, cats) == (cats, [unread, cats, unread, cats])
    assert found(dogs, unread, cats) == (dogs, [dogs, unread])
    assert found(unread, other, dogs) == (dogs, [unread, dogs])


@given(*[st.dictionaries(st.sampled_from("abc"), st.integers(0, 1))] * 2)
def test_disagreement_is_symmetric(ours: dict[str, int], theirs: dict[str, int]) -> None:
    found, mirrored = disagreement(ours, theirs), disagreement(theirs, ours)
    assert (found is None) == (ours == theirs)
    assert found is None or (mirrored is not None and (found[0], found[2], found[1]) == mirrored)


def test_a_misfit_is_refused_by_name() -> None:
    require_agreement({"seed": 1}, {"seed": 1})
    with pytest.raises(Refused, match=r"seed is 1 here and 2 on the run"):
        require_agreement({"seed": 1}, {"seed": 2})


# --- who keeps the others waiting -------------------------------------------------------------------------------------

INSIDE = (Activity.REDUCE, Activity.STEP)
BEATS = [
    MemberActivity(generation, activity, seconds, limit)
    for generation in (GENERATION, GENERATION - 1)
    for activity in Activity
    for seconds in (LIMIT, LIMIT * 2)
    for limit in (LIMIT, LIMIT * 2)
]


def test_stalled_for_every_triple_of_beats() -> None:
    """Who is inside of the collective, or in another world, is not; and nobody whom none has waited for as long."""
    for triple in itertools.product(BEATS, repeat=3):
        present = {rank: one for rank, one in enumerate(triple) if one.generation == GENERATION}
        waits = [one.seconds for one in present.values() if one.activity in INSIDE]
        late = {rank for rank, one in present.items() if one.activity not in INSIDE and one.is_late}
        named = stalled(dict(enumerate(triple)), GENERATION)
        assert named == {rank for rank in late if waits and max(waits) > present[rank].limit}


def test_cut_off_for_every_triple_of_beats() -> None:
    for triple in itertools.product(BEATS, repeat=3):
        activities = dict(enumerate(triple))
        all_wait = all(one.generation == GENERATION and one.activity in INSIDE for one in triple)
        assert is_cut_off(activities, GENERATION) == (all_wait and all(one.is_late for one in triple))
        assert not (is_cut_off(activities, GENERATION) and stalled(activities, GENERATION))


def test_nobody_is_cut_off_where_nobody_beats() -> None:
    assert not is_cut_off({}, GENERATION)
    assert stalled({}, GENERATION) == frozenset()


# --- waits ------------------------------------------------------------------------------------------------------------


def test_who_is_left_out_again_and_again_comes_back_ever_later() -> None:
    waits = [seconds_before_return(number, peer_timeout=2.0) for number in (0, 1, 2, 3, 6, 1000)]
    assert waits == [0.0, 2.0, 4.0, 8.0, 60.0, 60.0]


def test_a_group_may_take_longer_to_form_the_more_members_it_has_and_the_more_often_they_have_failed() -> None:
    assert [seconds_to_form(size) for size in (1, 2, 8, 30)] == pytest.approx([1.0] * 4, abs=0.1), "as dear as ever"
    assert seconds_to_form(128) == pytest.approx(2.6, abs=0.1)
    assert seconds_to_form(512) > 2 * 512**2 * 36e-6, "that rank 0's store takes to answer"
    sizes = range(1, 1025)
    assert all(seconds_to_form(size) < seconds_to_form(size + 1) for size in sizes)
    assert [seconds_to_form(2, number) / seconds_to_form(2) for number in (0, 1, 2, 3, 4, 5, 1000)] == [
        1, 2, 4, 8, 16, 16, 16
    ]  # fmt: skip
