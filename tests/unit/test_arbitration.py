"""When a claim is needed, and when it makes up for votes."""

from __future__ import annotations

import pytest

from elastic_train.protocol.arbiter import ArbiterSilent, Arbitration, Claim, silent_members
from elastic_train.protocol.laws import Voters


class Place:
    """Shows everything."""

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        return decision

    def show(self, name: str) -> None: ...

    def sees(self, name: str) -> bool:
        return not name.startswith("hidden")


def voters(world: str, *members: str) -> Voters:
    return Voters(world, members, members=members)


def told(**worlds: bool | None) -> Arbitration:
    """What all have told of some worlds; None where this member was not told it."""
    made = Arbitration(Place(), 1.0, lambda: 0.0)
    for name, is_shared in worlds.items():
        made.sees(name)
        if is_shared is not None:
            made.note(name, is_shared=is_shared)
    return made


@pytest.mark.parametrize(
    ("worlds", "is_needed", "is_enough"),
    [
        ({}, False, False),
        ({"a": True}, True, True),
        ({"a": False}, False, False),
        ({"a": None}, True, False),
        ({"hidden": None}, False, False),
        ({"a": True, "b": True}, True, True),
        ({"a": True, "b": False}, True, False),
        ({"a": False, "b": True}, True, False),
        ({"a": True, "b": None}, True, False),
    ],
)
def test_what_it_takes(worlds: dict[str, bool | None], is_needed: bool, is_enough: bool) -> None:
    made = told(**worlds)
    since = [voters(name, "x", "y") for name in (*worlds, "not formed yet")]
    assert (made.is_needed(since), made.is_enough(since)) == (is_needed, is_enough)


def test_without_a_place_nothing_is_needed() -> None:
    made = Arbitration(None, 1.0, lambda: 0.0)
    assert not made.sees("a")
    made.note("a", is_shared=True)
    assert not made.is_needed([voters("a", "x")])


def test_who_has_not_seen_it_may_not_claim() -> None:
    made = Arbitration(Place(), 1.0, lambda: 0.0)
    made.take_over({"a": True})
    assert made.is_needed([voters("a", "x")])
    with pytest.raises(ArbiterSilent):
        made.claim("job", 0, Claim("a", "decision", "a"))
    made.sees("b")
    assert made.claim("job", 0, Claim("a", "decision", "a")) == Claim("a", "decision", "a")


def test_a_side_without_the_votes_gives_the_others_time() -> None:
    now = [10.0]
    made = Arbitration(Place(), 2.0, lambda: now[0])
    assert not made.has_given_way("a")
    now[0] = 12.5
    assert made.has_given_way("a")
    assert not made.has_given_way("b"), "another world begins anew"


def test_who_is_silent() -> None:
    worlds = [voters("a", "x", "y", "z").without(["z"]), voters("b", "x", "w")]
    assert silent_members(worlds, {"x"}) == ("y", "w")
    assert silent_members(worlds, {"x", "y", "w"}) == ()
