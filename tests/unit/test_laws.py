"""Which side may go on: every world of up to five nodes, every set of dead ones, every side."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import pytest

from elastic_train.protocol.laws import IN_TIME, Voters, is_dead_in_time, may_go_on, missing_votes
from elastic_train.world import Member, from_json, to_json

A, B, C, D, E = "abcde"
SIZES = range(1, 6)


def subsets(nodes: tuple[str, ...]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(nodes, size) for size in range(len(nodes) + 1)))


def world(size: int, dead: frozenset[str] = frozenset(), name: str = "w") -> Voters:
    return Voters(name, tuple("abcde"[:size]), dead)


def cases() -> Iterator[tuple[Voters, frozenset[str]]]:
    """Every world with every set of dead voters, and every side of those that live."""
    for size in SIZES:
        for dead in subsets(world(size).nodes):
            voters = world(size, dead)
            for side in subsets(voters.living):
                yield voters, side


# --- one world --------------------------------------------------------------------------------------------------------


def test_two_sides_that_may_go_on_have_a_voter_in_common() -> None:
    """Also where one has proven fewer deaths than the other: who is dead for the one votes in no side."""
    count = 0
    for size in SIZES:
        for dead in subsets(world(size).nodes):
            for known in subsets(tuple(sorted(dead))):
                less, more = world(size, known), world(size, dead)
                if not more.living:
                    continue
                for side in subsets(more.living):
                    for other in subsets(more.living):
                        if may_go_on([less], side) and may_go_on([more], other):
                            count += 1
                            assert side & other, f"{side} knows {known}, {other} knows {dead}, {more.living} live"
    assert count > 300


def test_of_two_sides_of_all_the_living_exactly_one_may_go_on() -> None:
    for voters, side in cases():
        rest = frozenset(voters.living) - side
        if voters.living:
            assert may_go_on([voters], side) != may_go_on([voters], rest), (voters, side)


def test_more_voters_never_stop_a_side() -> None:
    for voters, side in cases():
        if may_go_on([voters], side):
            assert all(may_go_on([voters], side | {node}) for node in voters.nodes), (voters, side)


def test_who_is_dead_or_a_newcomer_has_no_vote() -> None:
    for voters, side in cases():
        assert may_go_on([voters], side) == may_go_on([voters], side | voters.dead | {"newcomer"}), (voters, side)


def test_all_the_living_may_go_on_however_few() -> None:
    for size in SIZES:
        for dead in subsets(world(size).nodes):
            voters = world(size, dead)
            assert may_go_on([voters], voters.living)
            assert missing_votes([voters], voters.living) == ()


def test_for_whom_a_side_waits() -> None:
    for voters, side in cases():
        missing = missing_votes([voters], side)
        assert bool(missing) != may_go_on([voters], side), (voters, side)
        if missing:
            assert missing == tuple(node for node in voters.living if node not in side)
            assert may_go_on([voters], side | set(missing))


@pytest.mark.parametrize(
    ("size", "dead", "side", "goes_on"),
    [
        (2, "", "a", True),  # the lowest rank
        (2, "", "b", False),
        (2, "a", "b", True),  # killed, not silent
        (3, "", "a", False),
        (3, "", "ab", True),
        (3, "a", "b", True),
        (3, "a", "c", False),
        (4, "", "ab", True),
        (4, "", "ac", True),
        (4, "", "bc", False),
        (4, "a", "cd", True),
        (4, "ab", "c", True),
        (4, "ab", "d", False),
        (5, "", "ab", False),
        (5, "", "cde", True),
        (5, "e", "ab", True),
        (5, "e", "cd", False),
    ],
)
def test_killed_silent_and_ties(size: int, dead: str, side: str, goes_on: bool) -> None:
    assert may_go_on([world(size, frozenset(dead))], set(side)) is goes_on


def test_a_world_whose_voters_are_all_dead_stops_nobody() -> None:
    assert may_go_on([world(2, frozenset("ab"))], set())
    assert may_go_on([], set())


# --- several worlds that nobody has settled ---------------------------------------------------------------------------


def test_every_unsettled_world_must_let_a_side_go_on() -> None:
    for size in range(1, 5):
        first = world(size)
        for members in subsets(first.nodes):
            second = Voters("v", (*sorted(members), "x"))
            for side in subsets((*first.nodes, "x")):
                both = may_go_on([first, second], side)
                assert both == (may_go_on([first], side) and may_go_on([second], side))
                missing = missing_votes([first, second], side)
                assert bool(missing) != both
                assert set(missing) == set(missing_votes([first], side)) | set(missing_votes([second], side))
                assert len(missing) == len(set(missing))


def test_no_two_disjoint_sides_may_both_go_on_from_worlds_that_share_one() -> None:
    """What follows the second world and what follows the first without it have a voter of the first in common."""
    first = world(4)
    for members in subsets(first.nodes):
        if not may_go_on([first], members):
            continue
        second = Voters("v", (*sorted(members), "x", "y"))
        for side in subsets(first.nodes):
            for newcomers in (set(), {"x"}, {"x", "y"}):
                if may_go_on([first, second], side | newcomers):
                    rest = frozenset(first.nodes) - side
                    assert not any(may_go_on([first], other) for other in subsets(tuple(rest)))


def test_newcomers_do_not_outvote_those_who_hold_the_state() -> None:
    settled, joined = Voters("v", (A,)), Voters("w", (A, B, C, D))
    assert not may_go_on([settled, joined], {B, C, D}), "of the first world nobody is there"
    assert missing_votes([settled, joined], {B, C, D}) == (A,)
    assert may_go_on([settled, joined], {A, B})
    assert may_go_on([joined], {B, C, D}), "once it is settled they may"


def test_a_death_counts_in_every_world() -> None:
    settled, joined = Voters("v", (A,)), Voters("w", (A, B))
    gone = [one.without({A, "stranger"}) for one in (settled, joined)]
    assert [sorted(one.dead) for one in gone] == [[A], [A]]
    assert may_go_on(gone, {B})


# --- voters -----------------------------------------------------------------------------------------------------------


def member(node: str, local_rank: int, agent_pid: int = 1) -> Member:
    return Member(node, local_rank, 100 + local_rank, agent_pid, ("h", 1), "d", "gloo", None, uid=f"{node}{local_rank}")


def test_a_node_has_one_vote_that_of_its_first_member() -> None:
    members = [member("a", 1), member("a", 0), member("b", 0), member("c", 0), member("b", 1)]
    uids = tuple(one.uid for one in members)
    assert Voters.of("w", members) == Voters("w", ("a1", "b0", "c0"), members=uids)


def test_two_agents_on_one_host_are_two_nodes() -> None:
    assert len(Voters.of("w", [member("a", 0, 1), member("a", 0, 2)]).nodes) == 2


@pytest.mark.parametrize("dead", [frozenset(), frozenset("b"), frozenset("abc")])
def test_what_is_written_is_read(dead: frozenset[str]) -> None:
    voters = world(3, dead)
    assert from_json(Voters, to_json(voters)) == voters


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer_timeout", [1.0, 10.0, 600.0])
def test_a_death_counts_only_in_time(peer_timeout: float) -> None:
    limit = IN_TIME * peer_timeout
    assert is_dead_in_time(0.0, peer_timeout)
    assert is_dead_in_time(limit, peer_timeout)
    assert not is_dead_in_time(limit + 0.001, peer_timeout)
    assert not is_dead_in_time(peer_timeout, peer_timeout)


def test_who_never_answered_is_silent() -> None:
    assert not is_dead_in_time(None, 10.0)


@pytest.mark.parametrize(
    ("dead", "side", "may"),
    [
        ("a", "cde", False),
        ("ab", "cd", True),
        ("ab", "de", True),
        ("ab", "e", False),
        ("abe", "c", True),
        ("abe", "d", False),
        ("abde", "c", True),
    ],
)
def test_spares_vote_once_no_member_that_trains_is_left(dead: str, side: str, may: bool) -> None:
    """Else each of them could go on alone, from a snapshot."""
    voters = Voters("w", ("a",), members=("a", "b"), spares=("c", "d", "e")).without(dead)
    assert may_go_on([voters], side) == may
