"""A world has one successor, also when only some members reach the store of claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elastic_train.branches import BRANCH, Branch
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import ArbiterLost, ArbiterSilent, Arbitration
from elastic_train.protocol.ballots import Ballots, Elsewhere, Round
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.protocol.laws import Voters
from elastic_train.protocol.store import Clients
from elastic_train.world import World, to_json
from tests.memory_store import MemoryStore
from tests.unit.test_world import member

MEMBERS = tuple(replace(member(rank, 0), uid=f"m{rank}", store=("10.0.0.1", rank)) for rank in range(3))
WORLD = "w"


class Place:
    """Where claims stand; `before` is called when one is about to be made there."""

    def __init__(self, claims: dict[int, str]) -> None:
        self.claims = claims
        self.jobs: set[str] = set()
        self.is_silent = self.is_lost = False
        self.before: Callable[[], None] = lambda: None

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        self.jobs.add(job)
        if self.is_silent:
            raise ArbiterSilent("no answer")
        if decision is not None:
            self.before()
            if self.is_lost:
                raise ArbiterLost("it is gone, with what was claimed")
            if self.is_silent:
                raise ArbiterSilent("no answer")
            self.claims.setdefault(generation, decision)
        return self.claims.get(generation)

    def show(self, name: str) -> None: ...

    def sees(self, name: str) -> bool:
        return True

    def tidy(self) -> None: ...


class Proposer:
    """One member of a world of three that is over; it proposes that the next one has a uid of its own."""

    def __init__(self, rank: int, stores: Sequence[MemoryStore], claims: dict[int, str], hears: Sequence[int]) -> None:
        self.place = Place(claims)
        self._world = World(rank, 5, MEMBERS, uid=WORLD)
        self._hears = hears
        known = KnownWorlds(stores[rank])
        known.voters, known.has_state = (Voters.of(WORLD, MEMBERS),), True
        arbitration = Arbitration(lambda: self.place, 1.0, lambda: 0.0)
        arbitration.sees(WORLD)
        arbitration.note(WORLD, is_shared=True)
        self.facts = facts = {"job_token": "job"}
        finder: Any = SimpleNamespace(addresses=lambda: [])
        elsewhere = Elsewhere(finder, known, facts, run_id="run", goes_on=False)
        self._clients = Clients(stores[rank], f"m{rank}", lambda address: stores[address[1]])
        self._known, self._ballots = known, Ballots(known, arbitration, elsewhere, facts)

    def decide(self) -> str | None:
        """The uid of the next world; None where it is not decided."""
        decision = Decision(6, f"of {self._world.rank}", ranks=tuple(sorted(self._hears)))
        found = self._ballots.decide(
            Round(self._clients, self._world, self._known.voters, decision.to_json(), self._hears, frozenset())
        )
        return None if isinstance(found, Denied) else Decision.from_json(found).uid


def proposers(*hears: Sequence[int]) -> list[Proposer]:
    stores = [MemoryStore() for _ in MEMBERS]
    for rank, store in enumerate(stores):
        store.put("uid", f"m{rank}")
    claims: dict[int, str] = {}
    return [Proposer(rank, stores, claims, one) for rank, one in enumerate(hears)]


def again(proposer: Proposer) -> str | None:
    """As members do: with a later ballot where another one's was found."""
    return proposer.decide() or proposer.decide()


def test_one_without_the_place_decides_between_ones_ballot_and_its_claim() -> None:
    """All have accepted what rank 0 proposes: rank 1 claims nothing else."""
    first, second, _ = proposers((0, 1, 2), (1, 0, 2), (2, 0, 1))
    first.place.is_silent = True
    found: list[str | None] = []
    second.place.before = lambda: found.append(again(first))
    later = again(second)
    decided = {uid for uid in [*found, later, again(first), again(second)] if uid is not None}
    assert len(decided) == 1


def test_two_that_cannot_hear_each_other_are_about_to_claim() -> None:
    """Nobody knows whose claim will stand: whoever hears both waits for the place."""
    first, second, third = proposers((0, 1, 2), (1, 0), (2, 0))
    first.place.is_silent = True
    found: list[str | None] = []

    def lose_claim() -> None:
        found.append(again(first))
        third.place.is_silent = True

    third.place.before = lose_claim
    second.place.before = lambda: found.append(again(third))
    found.append(again(second))
    second.place.before = lambda: None
    first.place.is_silent = third.place.is_silent = False
    decided = {uid for uid in [*found, again(first), again(second), again(third)] if uid is not None}
    assert len(decided) == 1


def test_where_the_place_is_lost_all_votes_settle_what_two_were_about_to_claim() -> None:
    members = proposers((0, 1, 2), (1, 0), (2, 0))
    for one in members:
        one.place.is_lost = True
    assert [again(members[1]), again(members[2])] == [None, None], "each has voted, and waits for one that is silent"
    decided = again(members[0])
    assert decided in ("of 1", "of 2")
    assert [again(members[1]), again(members[2])] == [None, None]


def test_a_branch_claims_by_a_name_of_its_own() -> None:
    """Both sides of a split count on from the same generation, and what one claims is not for the other."""
    main, branch, _ = proposers((0, 1, 2), (0, 1, 2), (0, 1, 2))
    branch.facts[BRANCH] = to_json(Branch("b1"))
    main.decide()
    branch.decide()
    assert (main.place.jobs, branch.place.jobs) == ({"job"}, {"job.b1"})
