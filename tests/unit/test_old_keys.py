"""The keys of past worlds that a member deletes from its own store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_train.protocol import known_worlds
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.ballots import Ballots
from elastic_train.protocol.known_worlds import DELETED_AT_ONCE, KnownWorlds, OldKeys, outdated
from elastic_train.protocol.store import Clients
from elastic_train.world import World
from tests.memory_store import MemoryStore
from tests.unit.test_world import member

PARTS = ("present", "next", "register", "left/1")


def keys_of(generation: int) -> list[str]:
    world = World(0, generation, (member(0, 0),), uid=f"u{generation}")
    return [f"{world.key}/{part}" for part in PARTS] + [f"group/{world.key}/0", f"ahead/{world.key}/1"]


def test_the_last_two_worlds_are_kept_whole_and_of_some_before_them_what_was_decided() -> None:
    generations = [*range(20), 40]  # a newcomer had seen a larger one
    keys = ["host", "queue/3", "fact/run_uid", *(key for number in generations for key in keys_of(number))]
    found, forgotten = outdated(keys, 40)
    left = set(keys) - set(found)
    whole = {*keys_of(40), *keys_of(19)}
    decided = {key for number in range(19) for key in keys_of(number) if key.endswith(("/next", "/register"))}
    old = {key for number in range(20 - known_worlds.KEPT_DECISIONS) for key in keys_of(number)}
    assert forgotten == 19 - known_worlds.KEPT_DECISIONS
    assert left == {"host", "queue/3", "fact/run_uid"} | whole | (decided - old)


def test_marks_of_plans_that_came_to_nothing_take_the_place_of_no_world() -> None:
    keys = [key for number in (1, 2, 3, 40) for key in keys_of(number)]
    marks = [f"go/world-{number}-u{number}" for number in range(4, 4 + 2 * known_worlds.KEPT_DECISIONS)]
    found, forgotten = outdated([*keys, *marks], 40)
    assert forgotten is None
    assert not {key for key in found if key.endswith(("/next", "/register"))}
    assert not set(keys_of(3)) & set(found), "the world before the settled one is kept whole"


def test_nothing_is_deleted_of_a_world_beyond_the_settled_one() -> None:
    keys = [key for number in range(12) for key in keys_of(number)]
    assert not {key for number in range(7, 12) for key in keys_of(number)} & set(outdated(keys, 8)[0])


def test_a_little_is_deleted_at_a_time_and_in_the_end_all() -> None:
    own = MemoryStore()
    old_keys = OldKeys(own)
    for generation in range(4):
        own.put(f"world-{generation}-u/next", "decided")
        for number in range(DELETED_AT_ONCE):
            own.put(f"ready/world-{generation}-u/{number}", "done")
        old_keys.note_settled(World(0, generation, (member(0, 0),), uid="u"))
    counts = []
    for _ in range(4):
        old_keys.tend()
        counts.append(sum(key.startswith("ready/") for key in own.values))
    assert counts == [number * DELETED_AT_ONCE for number in (3, 2, 2, 2)]


def test_a_spare_that_hears_what_is_settled_keeps_no_more_than_those_who_settle_it() -> None:
    """It casts no votes, and so settles nothing itself."""
    own = MemoryStore()
    known, spare = KnownWorlds(own), (member(0, 0), member(1, 0))
    sizes = []
    for generation in range(300):
        world = World(1, generation, spare, max_world_size=1, uid=f"u{generation}")
        known.enter(world, Decision(generation, world.uid, ranks=(0, 1)))
        for key in keys_of(generation):
            own.put(key, "")
        known.note_settled(f"u{generation - 1}")
        known.note_settled(f"u{generation - 1}")
        known.old_keys.tend()
        sizes.append((len(known.past), len(known.voters), len(own.values)))
    assert list(known.past) == ["u298", "u299"]
    assert known.past["u299"] is world
    assert sizes[-1] == sizes[100], "nothing grows"


def test_what_is_told_of_worlds_before_its_time_a_newcomer_leaves_alone() -> None:
    known, world = KnownWorlds(MemoryStore()), World(0, 7, (member(0, 0),), uid="u7")
    known.enter(world, Decision(7, "u7", ranks=(0,)))
    known.note_settled("u3")
    assert list(known.past) == ["u7"]


def test_who_was_left_out_and_says_so_is_remembered_for_as_long_as_its_votes_may_count() -> None:
    """Each world leaves one out, which wakes up at once, or when two more worlds are settled."""
    nothing: Any = None
    stores = {("10.0.0.1", rank): MemoryStore() for rank in range(2000)}
    own = stores["10.0.0.1", 0]
    own.put("uid", "m0")
    known = KnownWorlds(own)
    first = replace(member(0, 0), uid="m0", store=("10.0.0.1", 0))

    def leave_out(world: World, decision: Decision) -> None:
        left = world.members[1]
        left_one = replace(world, rank=1)
        there = stores[left.store]
        there.put("uid", left.uid)
        Ballots(nothing, nothing, nothing, {}).release(
            Clients(there, left.uid, lambda address: stores[address]), left_one, decision
        )

    worlds, sizes = [], []
    for generation in range(300):
        other = replace(member(1, 0), uid=f"m{generation + 1}", store=("10.0.0.1", generation + 1))
        world = World(0, generation, (first, other), uid=f"u{generation}")
        decision = Decision(generation, world.uid, ranks=(0,), new=(other,))
        if worlds and generation % 2:
            before = worlds[-1]
            assert before.members[1].uid in known.voters_without(())[0].electors
            leave_out(before, decision)
            known.enter(world, decision)
            assert known.voters_without(())[0].electors == ("m0",)
            assert known.left_out(world) == set()
        else:
            known.enter(world, decision)
        own.put(f"{world.key}/next", "decided")
        known.settle(world)
        if len(worlds) > 3 and not generation % 2:
            leave_out(worlds[-3], Decision(generation - 2, "late", ranks=(0,)))
        known.old_keys.tend()
        worlds.append(world)
        sizes.append(len(own.values))
    assert sizes[-2:] == sizes[100:102], "nothing grows"
