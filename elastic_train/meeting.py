"""Workers agree on the next World through a store, with no leader: any of them may die at any moment.

The protocol, on keys of the world that ends (`<key>`):

1. Who wants to be in the next world writes `<key>/join/<rank>`; who leaves on purpose writes `<key>/left/<rank>`.
2. Everybody looks until each old rank has joined, has left, or is known to be dead.
3. Whoever is through writes the list to `<key>/next`, if nobody has: the first one counts. Who is not on it must not
   train on.

So there is one next world and never two, whatever the members believe of each other; a death between the list and the
process group only costs another round. The first world of a torchrun round is formed in the same way, the ranks being
those that torchrun gave.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_train.rules import next_generation, next_members
from elastic_train.store import KeyValueStore
from elastic_train.world import Member, World


class Sight(StrEnum):
    """What is known of an old member that has neither joined nor left."""

    ALIVE = "alive"
    """or not known to be dead: it is waited for"""
    DEAD = "dead"


@dataclass(frozen=True)
class Decision:
    """The value of `<key>/next`."""

    generation: int
    ranks: tuple[int, ...]
    """ranks in the world before, by rank in the next one"""
    lost: tuple[int, ...]
    """old ranks that are dead, or were given up"""
    left: tuple[int, ...]
    """old ranks that left on purpose"""

    def to_json(self) -> str:
        return json.dumps([self.generation, self.ranks, self.lost, self.left])

    @staticmethod
    def from_json(text: str) -> Decision:
        generation, ranks, lost, left = json.loads(text)
        return Decision(int(generation), tuple(ranks), tuple(lost), tuple(left))


def meet(
    store: KeyValueStore,
    key: str,
    rank: int,
    size: int,
    me: Member,
    sight: Callable[[int], Sight],
    fits: Callable[[Member, Member], bool],
    joined: dict[int, Member],
) -> Generator[tuple[int, ...], None, tuple[Decision, dict[int, Member]]]:
    """Agree on the next world of `size` old ranks, of which this is `rank`.

    A generator: it yields the ranks that it waits for, between any two operations on the store, and the caller decides
    how long to wait. It returns the decision, which may leave `rank` out, and the members by old rank.

    Args:
        sight: what the caller knows of an old member.
        fits: whether the second member may train with the first one, which has the lowest rank of all that joined.
        joined: filled with the members that have joined, by old rank, so that `sight` can look at it.
    """
    store.put(f"{key}/join/{rank}", me.to_json())
    joined[rank] = me
    left: set[int] = set()
    dead: set[int] = set()
    while True:
        yield ()
        text = store.get(f"{key}/next")
        if text is not None:
            break
        open_ranks = [other for other in range(size) if other not in joined and other not in left]
        yield ()
        for other, value in zip(open_ranks, store.get_many([f"{key}/join/{r}" for r in open_ranks]), strict=True):
            if value is not None:
                joined[other] = Member.from_json(value)
        yield ()
        for other, value in zip(open_ranks, store.get_many([f"{key}/left/{r}" for r in open_ranks]), strict=True):
            if value is not None:
                left.add(other)
        # Who has joined may have died since: the list should not begin with a dead member.
        dead = {other for other in range(size) if other != rank and other not in left and sight(other) is Sight.DEAD}
        verdict = next_members(size, joined, left, dead)
        if verdict.waiting_for:
            yield verdict.waiting_for
            continue
        first = joined[verdict.members[0]]
        ranks = tuple(other for other in verdict.members if fits(first, joined[other]))
        decision = Decision(
            generation=next_generation([joined[other].max_generation for other in verdict.members]),
            ranks=ranks,
            lost=tuple(other for other in range(size) if other not in ranks and other not in left),
            left=tuple(sorted(left)),
        )
        yield ()
        text = store.create(f"{key}/next", decision.to_json())
        break
    decided = Decision.from_json(text)
    unknown = [other for other in decided.ranks if other not in joined]
    yield ()
    for other, value in zip(unknown, store.get_many([f"{key}/join/{r}" for r in unknown]), strict=True):
        if value is not None:
            joined[other] = Member.from_json(value)
        # A member is on the list only after it has joined; who comes late and is not on it may find all swept up.
        assert value is not None or rank not in decided.ranks
    return decided, joined


def world_of(
    decision: Decision, joined: dict[int, Member], rank: int, max_world_size: int | None = None
) -> World | None:
    """The decided world as old rank `rank` sees it; None where it is not in it."""
    if rank not in decision.ranks:
        return None
    members = tuple(
        replace(joined[other], unreachable=(), max_generation=decision.generation) for other in decision.ranks
    )
    return World(decision.ranks.index(rank), decision.generation, members, max_world_size)
