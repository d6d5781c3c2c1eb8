"""What one member does in the agreement on what follows a world, as an automaton made of its real ballots.

A look of a member is a function of what its operations on stores and place have answered so far: it is run with these
answers until it asks for one more. So where it stands is a value, a `Point`, and what comes next is found only once.

The read of a register and the swap after it are one step: where another one comes between them the swap fails, and the
member reads again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import ArbiterSilent, Arbitration
from elastic_train.protocol.ballots import Ballots, Elsewhere, Register, Round
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.protocol.laws import Voters
from elastic_train.protocol.store import Clients
from elastic_train.world import Member, World, from_json, to_json

PARENT, GENERATION = "w", 5
FAILED = object()
"""the answer of what does not answer"""
PLACE = -1
"""in place of the rank whose store is asked"""


class Asks(BaseException):
    """A look needs one more answer; nothing in it catches this."""


class Answers:
    """What a look was answered so far, in order."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._rest = list(reversed(answers))

    def take(self, *op: Any) -> Any:
        if not self._rest:
            raise Asks(op)
        answer = self._rest.pop()
        if answer is FAILED:
            raise ArbiterSilent("no answer") if op[1] == PLACE else StoreUnreachable("no answer")
        return answer


class AnsweringStore:
    """One member's store, as a look sees it; each operation but that for its uid is (kind, rank, key, values...)."""

    def __init__(self, rank: int, answers: Answers) -> None:
        self._rank, self._answers = rank, answers

    def get(self, key: str) -> str | None:
        if key == "uid":
            return uid_of(self._rank)
        if not key.endswith(("/register", "/next")):
            return None
        found: str | None = self._answers.take("get", self._rank, key)
        return found

    def put(self, key: str, value: str) -> None:
        self._answers.take("put", self._rank, key, value)

    def swap(self, key: str, expected: str, value: str) -> bool:
        return bool(self._answers.take("swap", self._rank, key, expected, value))


class AnsweringPlace:
    """As arbiter.Arbiter."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        found: str | None = self._answers.take("claim", PLACE, generation, decision)
        return found

    def show(self, name: str) -> None: ...

    def sees(self, name: str) -> bool:
        return True


class View(NamedTuple):
    """What a member finds out as its look begins."""

    hears: tuple[int, ...]
    """ranks, this one first"""
    dead: frozenset[str]
    asks_others: bool = False


@dataclass(frozen=True, eq=False)
class Point:
    """Where a member stands. There is one object for each (`Looks.point`)."""

    rank: int
    look: int = 0
    """its number"""
    attempt: int = 0
    view: View | None = None
    """None between two looks"""
    answers: tuple[Any, ...] = ()
    acted: str | None = None
    """uid of the world that it goes on in"""


@dataclass(frozen=True)
class NextStep:
    """What a look asks next."""

    kind: str
    """`change` a register, `read` or `tell` what is announced, `claim`"""
    target: int
    """rank of the store, or PLACE"""
    op: tuple[Any, ...]


def uid_of(rank: int) -> str:
    return f"m{rank}"


def member_of(rank: int) -> Member:
    address = ("10.0.0.1", rank)
    return Member(f"h{rank}", 0, 1, 1, address, "d", "gloo", GENERATION, store=address, uid=uid_of(rank))


class Looks:
    """The automata of the members of one world.

    Args:
        shared: whether each was told that all see the place; None where it was told nothing.
    """

    def __init__(self, shared: Sequence[bool | None]) -> None:
        self._shared = shared
        self._members = tuple(member_of(rank) for rank in range(len(shared)))
        self.point = cache(Point)
        self.step = cache(self._step)
        """what comes next at a point inside a look"""
        self.after = cache(self._after)
        """(what stands afterwards where the step was made, the point after it) by what stood there before"""
        self.after_failure = cache(self._after_failure)
        """the point after a step that was not answered"""

    def _step(self, point: Point) -> NextStep:
        op = self._run(point)
        assert not isinstance(op, Point), "a look ends with an answer"
        kind, target, key = op[:3]
        if target == PLACE:
            return NextStep("claim", target, op)
        if key.endswith("/register"):
            return NextStep("change", target, op)
        return NextStep("read" if kind == "get" else "tell", target, op)

    def _after(self, point: Point, standing: str | None) -> tuple[str | None, Point]:
        step = self.step(point)
        if step.kind == "tell":
            return str(step.op[3]), self._at(point, None)
        if step.kind == "claim":
            now = standing or step.op[3]
            return now, self._at(point, now)
        if step.kind == "read":
            return standing, self._at(point, standing)
        swap = self._run(self._answered(point, standing))
        if isinstance(swap, Point) or swap[:3] != ("swap", *step.op[1:]):
            return standing, self._at(point, standing)
        return swap[4], self._at(self._answered(point, self._needed(point, swap)), True)

    def _needed(self, point: Point, swap: tuple[Any, ...]) -> str | None:
        """Of what was read in a register, what the look uses: it goes on by what it writes."""
        written = from_json(Register, swap[4])
        for less in (None, to_json(Register(ballot=written.ballot, decision=written.decision))):
            same = self._run(self._answered(point, less))
            if not isinstance(same, Point) and same[0] == "swap" and (same[1:3], same[4]) == (swap[1:3], swap[4]):
                return less
        return str(swap[3])

    def _after_failure(self, point: Point) -> Point:
        return self._at(point, FAILED)

    def _at(self, point: Point, answer: Any) -> Point:
        after = self._answered(point, answer)
        found = self._run(after)
        return found if isinstance(found, Point) else after

    def _answered(self, point: Point, answer: Any) -> Point:
        return self.point(point.rank, point.look, point.attempt, point.view, (*point.answers, answer), None)

    def _run(self, point: Point) -> tuple[Any, ...] | Point:
        """The operation that comes next; or how the look ends."""
        assert point.view is not None, "it looks"
        (hears, dead, asks_others), answers = point.view, Answers(point.answers)
        world = World(point.rank, GENERATION, self._members, uid=PARENT)
        own: Any = AnsweringStore(point.rank, answers)
        known = KnownWorlds(own)
        known.voters, known.has_state = (Voters.of(PARENT, self._members),), True
        ballots = self._ballots(point, AnsweringPlace(answers), known)
        connect: Any = lambda address: AnsweringStore(address[1], answers)  # noqa: E731
        clients = Clients(own, uid_of(point.rank), connect)
        ranks, gone = tuple(sorted(hears)), tuple(sorted(dead))
        proposal = Decision(GENERATION + 1, f"{point.rank}.{point.look}", ranks, dead=gone).to_json()
        try:
            found = ballots.decided(clients, world, hears[1:] if asks_others else ())
            if found is None:
                voters = [one.without(dead) for one in known.voters]
                found = ballots.decide(Round(clients, world, voters, proposal, hears, dead))
        except Asks as asks:
            return asks.args[0]  # type: ignore[no-any-return]
        acted = _world_of(found) if isinstance(found, str) else None
        return self.point(point.rank, point.look + 1, ballots._attempt, None, (), acted)

    def _ballots(self, point: Point, place: AnsweringPlace, known: KnownWorlds) -> Ballots:
        times = iter((0.0, 10.0))
        arbitration = Arbitration(lambda: place, 1.0, lambda: next(times))
        arbitration.has_given_way(PARENT)  # a minority has waited already
        arbitration.sees(PARENT)
        arbitration.note(PARENT, is_shared=self._shared[point.rank])
        finder: Any = SimpleNamespace(addresses=list)
        facts = {"job_token": "job"}
        elsewhere = Elsewhere(finder, known, facts, run_id="run", goes_on=False)
        ballots = Ballots(known, arbitration, elsewhere, facts)
        ballots._attempt = point.attempt
        return ballots


@cache
def _world_of(decision: str) -> str:
    return Decision.from_fields(json.loads(decision)).uid
