"""What the queue entry of a member that was left out, and is back, tells those who wait for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.protocol.laws import Voters, may_go_on
from elastic_train.world import Member, World, from_json, to_json
from tests.memory_store import MemoryStore
from tests.unit.test_world import member


def one(uid: str, *was: tuple[str, str]) -> Member:
    return replace(member(1, 1), uid=uid, was=was)


def known_to_c(*, has_state: bool = True) -> KnownWorlds:
    """`a` has trained alone, three others were admitted, and `b` was left out. Now `a` is dead."""
    own: Any = MemoryStore()
    known = KnownWorlds(own)
    known.voters = tuple(
        Voters(f"w{number}", tuple(uids), members=tuple(uids)) for number, uids in enumerate(("a", "abcd", "acd"))
    )
    known.has_state = has_state
    return known


def outside(
    known: KnownWorlds, *after: Member, holding: tuple[str, ...] = (), ended: bool = False, most: int | None = None
) -> set[str]:
    world = World(rank=0, generation=2, members=(one("a"), one("c"), one("d")), max_world_size=most)
    return known.holders_outside(world, after, {"a"}, holding, ended)


def test_a_side_without_the_state_waits_for_each_that_may_have_it_and_is_not_back() -> None:
    c, d, known = one("c"), one("d"), known_to_c()
    assert outside(known, c, d) == {"b"}
    assert outside(known, c, one("e", ("b", "w2"))) == {"d"}, "a third one is silent"
    assert outside(known, c, d, one("e", ("b", "w2"))) == set()
    assert outside(known, c, d, one("f", ("b", "w2"), ("e", "w9"))) == set(), "it was left out again"
    assert outside(known, c, d, one("e", ("b", "w9"))) == {"b"}, "by a world of others: that may have gone on"
    assert outside(known, c, d, one("e", ("b", "w2")), most=2) == {"b"}, "a spare hands over no state"
    assert outside(known, c, holding=("c",)) == set()
    assert outside(known, c, ended=True) == {"b"}, "no member of the present world is silent; it was left out before"
    assert outside(known_to_c(has_state=False), c) == set(), "nobody ever had one"


def test_the_vote_of_who_is_back_is_not_waited_for() -> None:
    c, known = one("c"), known_to_c()
    waiting = [Waiting(one("e", ("b", "w2")), 1)]
    assert not may_go_on(known.voters_without("ad"), {"c"})
    assert may_go_on(known.voters_without("ad", [c], lambda: waiting), {"c"})
    assert may_go_on(known.voters_without("ad", [c, waiting[0].member]), {"c"}), "once it is admitted"
    assert not may_go_on(known.voters_without("ad", [c], lambda: [Waiting(one("e", ("b", "w9")), 1)]), {"c"})


def test_what_a_newcomer_was_is_told_on() -> None:
    assert from_json(Member, to_json(one("e", ("b", "w2"), ("x", "y")))) == one("e", ("b", "w2"), ("x", "y"))
