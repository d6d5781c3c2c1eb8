"""When a claim is needed, and when it makes up for votes."""

from __future__ import annotations

import pytest

from elastic_train.protocol.arbiter import MOVED_SECONDS, ArbiterLost, ArbiterSilent, Arbitration, Claim, silent_members
from elastic_train.protocol.laws import Voters


class Place:
    """Has all names but hidden ones."""

    def __init__(self) -> None:
        self.claims: list[str] = []
        self.names: list[str] = []
        self.is_lost = self.is_silent = False

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        if self.is_silent:
            raise ArbiterSilent("no answer")
        if self.is_lost:
            raise ArbiterLost("gone")
        self.claims += [decision] if decision is not None else []
        return decision

    def show(self, name: str) -> None:
        self.names.append(name)

    def tidy(self) -> None: ...

    def sees(self, name: str) -> bool:
        return not name.startswith("hidden")


def voters(world: str, *members: str) -> Voters:
    return Voters(world, members, members=members)


def told(**worlds: bool | None) -> Arbitration:
    """What all have told of some worlds; None where this member was not told it."""
    made = Arbitration(Place, 1.0, lambda: 0.0)
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
    made = Arbitration(Place, 1.0, lambda: 0.0)
    made.take_over({"a": True})
    worlds = [voters("a", "x"), voters("b", "x")]
    assert made.is_needed(worlds)
    with pytest.raises(ArbiterSilent):
        made.claim("job", 0, Claim("a", "decision", "a"), worlds)
    made.sees("b")
    assert made.claim("job", 0, Claim("a", "decision", "a"), worlds) == Claim("a", "decision", "a")


def test_what_follows_a_world_is_claimed_where_its_name_was_seen() -> None:
    """In another place nobody knows of an earlier claim, and who has not seen it claims where it would have before."""
    old, new = Place(), Place()
    places, worlds = [old], [voters("a", "x"), voters("hidden", "x")]
    made = Arbitration(lambda: places[-1], 1.0, lambda: 0.0)
    made.sees("a")
    places.append(new)
    made.sees("hidden")
    made.sees("planned for later")
    made.claim("job", 1, Claim("hidden", "decision", "a"), worlds)
    made.claim("job", 2, Claim("seen", "decision", "a"), [*worlds, voters("planned for later", "x")])
    assert (len(old.claims), len(new.claims)) == (1, 1)


def test_a_place_is_lost_to_all_where_this_member_saw_the_name_of_the_world_there() -> None:
    """Others may have seen a name that it has not in another place."""
    place, worlds = Place(), [voters("a", "x"), voters("hidden", "x")]
    made = Arbitration(lambda: place, 1.0, lambda: 0.0)
    made.sees("a")
    made.sees("hidden")
    place.is_lost = True
    with pytest.raises(ArbiterLost):
        made.claim("job", 0, Claim("a", "decision", "a"), worlds[:1])
    with pytest.raises(ArbiterSilent) as error:
        made.claim("job", 1, Claim("hidden", "decision", "a"), worlds)
    assert not isinstance(error.value, ArbiterLost)


def test_a_name_is_shown_in_a_place_that_is_older_than_the_world() -> None:
    """Before its place was lost somebody may have claimed what follows a world that was decided already."""
    old, new = Place(), Place()
    places = [old]
    made = Arbitration(lambda: places[-1], 1.0, lambda: 0.0)
    made.note_end("a")
    places.append(new)
    made.note_end("a")
    made.show("b", is_decided=True)
    made.show("planned", is_decided=False)
    made.note_end("b")
    made.show("c", is_decided=True)
    assert (old.names, new.names) == (["b"], ["planned", "c"])


class Mover:
    """Rank 0, whose place moves."""

    def __init__(self) -> None:
        self.now, self.place = 0.0, Place()
        self.arbitration = Arbitration(lambda: self.place, 1.0, lambda: self.now)

    def form(self, world: str, *, is_shared: bool, is_decided: bool = True) -> None:
        self.arbitration.show(world, is_decided=is_decided)
        self.arbitration.sees(world)
        self.arbitration.note(world, is_shared=is_shared)

    def move(self) -> None:
        """It finds the new place by the vote that follows."""
        self.place = Place()
        assert not self.arbitration.has_moved("any")

    def has_moved(self, world: str, *, after: float = 0.0) -> bool:
        self.now += after
        return self.arbitration.has_moved(world)


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_place_has_moved_when_all_have_had_the_time_to_find_the_new_one(is_decided: bool) -> None:
    rank0 = Mover()
    assert not rank0.has_moved("a"), "it is not rank 0 there"
    rank0.form("a", is_shared=True, is_decided=is_decided)
    assert not rank0.has_moved("a", after=3600.0)
    rank0.place = Place()
    assert not rank0.has_moved("a")
    assert not rank0.has_moved("a", after=MOVED_SECONDS - 1.0)
    assert rank0.has_moved("a", after=2.0)
    rank0.arbitration.note_end("a")
    rank0.form("b", is_shared=True)
    assert not rank0.has_moved("b", after=3600.0)


@pytest.mark.parametrize("seconds", [0.0, 3600.0], ids=["a member dies at once", "a decision came to nothing before"])
def test_a_world_that_was_shown_in_the_lost_place_ends_too(seconds: float) -> None:
    """What follows the world before it may have been claimed there, so nobody shows it in the new place."""
    rank0 = Mover()
    rank0.form("a", is_shared=True)
    rank0.arbitration.note_end("a")
    rank0.now += seconds
    lost = rank0.place
    rank0.move()
    rank0.form("b", is_shared=False)
    assert lost.names == ["a", "b"]
    assert not rank0.has_moved("b")
    assert rank0.has_moved("b", after=MOVED_SECONDS + 1.0)
    rank0.arbitration.note_end("b")
    rank0.form("c", is_shared=True)
    assert rank0.place.names == ["c"]
    assert not rank0.has_moved("c", after=3600.0)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_world_that_was_shown_before_all_had_found_the_place_ends_once_more(is_shared: bool) -> None:
    rank0 = Mover()
    rank0.form("a", is_shared=True)
    rank0.arbitration.note_end("a")
    rank0.place = Place()
    rank0.arbitration.note_end("world before")
    rank0.form("b", is_shared=is_shared)
    assert not rank0.has_moved("b", after=MOVED_SECONDS - 1.0)
    assert rank0.has_moved("b", after=2.0) == (not is_shared)
    rank0.arbitration.note_end("b")
    rank0.form("c", is_shared=False)
    assert not rank0.has_moved("c", after=3600.0), "some cannot see it at all"


def test_a_first_place_has_not_moved() -> None:
    rank0 = Mover()
    rank0.form("a", is_shared=False)
    assert not rank0.has_moved("a", after=3600.0)


def test_who_can_claim_nothing_lacks_the_place() -> None:
    now, place, worlds = [10.0], Place(), [voters("a", "x")]
    made = Arbitration(lambda: place, 2.0, lambda: now[0])
    assert not made.is_lacking("a"), "it may have seen it before"
    made.note("a", is_shared=None)
    assert made.is_lacking("a"), "a spare"
    with pytest.raises(ArbiterSilent):
        made.claim("job", 0, None, worlds)
    made.sees("a")
    assert not made.is_lacking("a"), "it was not asked before"
    place.is_silent = True
    for _ in range(2):
        with pytest.raises(ArbiterSilent):
            made.claim("job", 0, None, worlds)
        assert made.is_lacking("a")
        now[0] += 5.0
        assert not made.is_lacking("a"), "it may answer again"
    place.is_silent, place.is_lost = False, True
    with pytest.raises(ArbiterLost):
        made.claim("job", 0, None, worlds)
    assert not made.is_lacking("a"), "it answers nobody"


def test_a_side_without_the_votes_gives_the_others_time() -> None:
    now = [10.0]
    made = Arbitration(Place, 2.0, lambda: now[0])
    assert not made.has_given_way("a")
    now[0] = 12.5
    assert made.has_given_way("a")
    assert not made.has_given_way("b"), "another world begins anew"


def test_who_is_silent() -> None:
    worlds = [voters("a", "x", "y", "z").without(["z"]), voters("b", "x", "w")]
    assert silent_members(worlds, {"x"}) == ("y", "w")
    assert silent_members(worlds, {"x", "y", "w"}) == ()
