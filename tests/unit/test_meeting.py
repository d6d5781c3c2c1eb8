"""The protocol of meeting.py under a scheduler that interleaves, delays, kills, freezes and misleads its members.

Everything is a function of the seed: members are generators, the store is a dictionary, time is a number. A failing
seed fails again: `simulate(seed, is_honest)`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elastic_train.meeting import Decision, Sight, meet, world_of
from elastic_train.store import MemoryStore
from elastic_train.world import Member, World

NUM_SEEDS = 1500
MAX_SIZE = 6
MAX_MEETINGS = 12
PEER_TIMEOUT = 0.5
PATIENCE = 3.0
DEADLINE = 60.0
"""virtual seconds; every schedule is over long before if nobody waits for ever"""

Meeting = Generator[tuple[int, ...], None, tuple[Decision, dict[int, Member]]]


def member(rank: int, **fields: Any) -> Member:
    values: dict[str, Any] = {
        "host": f"node-{rank}",
        "local_rank": 0,
        "pid": rank,
        "agent_pid": 1,
        "address": ("127.0.0.1", 1 + rank),
        "directory_id": "run",
        "backend": "gloo",
        "max_generation": None,
    }
    return Member(**(values | fields))


def always_fits(_first: Member, _other: Member) -> bool:
    return True


def agrees(first: Member, other: Member) -> bool:
    return first.agreement == other.agreement


class RecordingStore(MemoryStore):
    """Remembers what had been written when a decision was, and that none is ever written over."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: dict[str, Decision] = {}
        self.joined_before: dict[str, dict[int, Member]] = {}

    def put(self, key: str, value: str) -> None:
        assert not key.endswith("/next"), "a decision is created, never put"
        super().put(key, value)

    def create(self, key: str, value: str) -> str:
        is_first = key not in self.values
        standing = super().create(key, value)
        if key.endswith("/next"):
            meeting = key.removesuffix("/next")
            if is_first:
                prefix = f"{meeting}/join/"
                self.decisions[meeting] = Decision.from_json(value)
                self.joined_before[meeting] = {
                    int(name.removeprefix(prefix)): Member.from_json(text)
                    for name, text in self.values.items()
                    if name.startswith(prefix)
                }
            assert Decision.from_json(standing) == self.decisions[meeting]
        return standing


# --- the simulation ---------------------------------------------------------------------------------------------------


@dataclass
class Actor:
    """One worker's life: meeting after meeting, until it is left out, leaves, dies, or is the last."""

    name: int
    script: Iterator[float]
    """yields how long it sleeps, in virtual seconds"""
    died_at: float | None = None
    frozen_since: float | None = None
    ending: str = "running"
    """`running`, `killed`, `left`, `left_out` or `done`"""
    worlds: list[World] = field(default_factory=list)


class Simulation:
    """Members 0 .. size - 1 through up to MAX_MEETINGS meetings.

    An honest schedule has deaths, departures and delays, and nobody takes a living member for dead. The others have
    frozen members, members that believe lies about each other, cut pairs, and misfits in the first meeting besides.
    """

    def __init__(self, seed: int, is_honest: bool) -> None:
        self.random = random.Random(seed)
        self.is_honest = is_honest
        self.size = self.random.randint(1, MAX_SIZE)
        self.store = RecordingStore()
        self.now = 0.0
        self.queue: list[tuple[float, int, int]] = []
        self.ticket = itertools.count()
        self.death_rate = self.random.choice([0.0, 0.002, 0.01, 0.05])
        self.leave_rate = self.random.choice([0.0, 0.05, 0.2])
        self.freeze_rate = 0.0 if is_honest else self.random.choice([0.0, 0.005, 0.03])
        self.lie_rate = 0.0 if is_honest else self.random.choice([0.0, 0.1, 0.5])
        self.cut_rate = 0.0 if is_honest else self.random.choice([0.0, 0.1])
        self.misfit_rate = 0.0 if is_honest else self.random.choice([0.0, 0.3])
        self.lies = {
            (one, other): self.random.uniform(0.0, 1.0)
            for one in range(self.size)
            for other in range(self.size)
            if one != other and self.random.random() < self.lie_rate
        }
        """(who believes it, of whom) -> since when"""
        self.notice = {
            (one, other): self.random.choice([0.0, 0.003, 0.03, 0.3])
            for one in range(self.size)
            for other in range(self.size)
        }
        """how long `one` needs to see that `other` is dead"""
        self.actors = [Actor(name, self.life(name)) for name in range(self.size)]

    def run(self) -> None:
        for actor in self.actors:
            self.wake(actor, self.random.choice([0.0, 0.0, 0.01, 0.2]))
        while self.queue:
            self.now, _, name = heapq.heappop(self.queue)
            assert self.now < DEADLINE, f"waiting for ever: {[actor.ending for actor in self.actors]}"
            actor = self.actors[name]
            actor.frozen_since = None
            if self.random.random() < self.death_rate:
                actor.died_at, actor.ending = self.now, "killed"
                continue
            pause = next(actor.script, None)
            if pause is None:
                continue
            if self.random.random() < self.freeze_rate:
                actor.frozen_since = self.now
                pause += self.random.choice([0.1, 1.0, 10.0])
            self.wake(actor, pause)

    def wake(self, actor: Actor, after: float) -> None:
        heapq.heappush(self.queue, (self.now + after, next(self.ticket), actor.name))

    def life(self, name: int) -> Iterator[float]:
        """What recovery.py and membership.py do around the protocol, in short."""
        actor = self.actors[name]
        me = member(name, agreement={"seed": int(self.random.random() < self.misfit_rate)})
        key, rank, old = "start", name, tuple(range(self.size))
        for turn in range(MAX_MEETINGS):
            if turn > 0 and self.random.random() < self.leave_rate:
                self.store.put(f"{key}/left/{rank}", "stopped")
                actor.died_at, actor.ending = self.now, "left"
                return
            me = replace(
                me,
                unreachable=tuple(
                    other for other in range(len(old)) if other != rank and self.random.random() < self.cut_rate
                ),
            )
            joined: dict[int, Member] = {}
            sight = self.sight(name, old, joined)
            fits = agrees if turn == 0 else always_fits
            meeting = meet(self.store, key, rank, len(old), me, sight, fits, joined)
            decision = yield from self.drive(meeting)
            world = world_of(decision, joined, rank)
            assert decision == self.store.decisions[key], "everybody who is through sees the same"
            assert (world is not None) == (rank in decision.ranks)
            if world is None:
                actor.ending = "left_out"
                return
            assert world.me == replace(me, unreachable=(), max_generation=world.generation)
            assert me.max_generation is None or world.generation > me.max_generation
            actor.worlds.append(world)
            me, key, rank = world.me, f"world-{world.generation}", world.rank
            old = tuple(other.pid for other in world.members)
            if world.world_size == 1:
                break
            yield self.random.choice([0.0, 0.0, 0.02, 0.2])  # training, until it notices that the world has broken
        actor.died_at, actor.ending = self.now, "done"
        self.store.put(f"{key}/left/{rank}", "done")

    def drive(self, meeting: Meeting) -> Generator[float, None, Decision]:
        while True:
            try:
                waiting_for = next(meeting)
            except StopIteration as end:
                decision: Decision = end.value[0]
                return decision
            yield 0.003 if waiting_for else self.random.choice([0.0, 0.0001, 0.001, 0.02])

    def sight(self, observer: int, old: tuple[int, ...], joined: dict[int, Member]) -> Any:
        started = self.now

        def look(rank: int) -> Sight:
            other = self.actors[old[rank]]
            if other.died_at is not None and self.now - other.died_at >= self.notice[observer, other.name]:
                return Sight.DEAD
            if other.frozen_since is not None and self.now - other.frozen_since > PEER_TIMEOUT:
                return Sight.DEAD
            since = self.lies.get((observer, other.name))
            if since is not None and self.now >= since:
                return Sight.DEAD
            if not self.is_honest and rank not in joined and self.now - started > PATIENCE:
                return Sight.DEAD
            return Sight.ALIVE

        return look

    # --- what must hold in the end ---

    def check(self) -> None:
        assert not any(actor.ending == "running" for actor in self.actors)
        self.check_decisions()
        self.check_fencing()
        if self.is_honest:
            self.check_that_nobody_is_forgotten()

    def check_decisions(self) -> None:
        sizes = {"start": self.size} | {
            f"world-{world.generation}": world.world_size for actor in self.actors for world in actor.worlds
        }
        for key, decision in self.store.decisions.items():
            parts = [*decision.ranks, *decision.lost, *decision.left]
            assert sorted(parts) == list(range(sizes[key])), "each old rank is in, lost, or has left"
            assert list(decision.ranks) == sorted(decision.ranks)
            joined = self.store.joined_before[key]
            assert set(decision.ranks) <= joined.keys(), "every member on the list has joined"
            for one in decision.ranks:
                assert not set(joined[one].unreachable) & set(decision.ranks), "nobody is cut off from a member"
                assert joined[one].agreement == joined[decision.ranks[0]].agreement

    def check_fencing(self) -> None:
        """A generation is one list of members, whatever anybody believed, and each comes out of an older one."""
        worlds: dict[int, tuple[Member, ...]] = {}
        for actor in self.actors:
            generations = [world.generation for world in actor.worlds]
            assert generations == sorted(set(generations))
            for world in actor.worlds:
                assert worlds.setdefault(world.generation, world.members) == world.members
                assert world.members[world.rank].pid == actor.name
        assert sorted(decision.generation for decision in self.store.decisions.values()) == sorted(
            {decision.generation for decision in self.store.decisions.values()}
        ), "no two meetings lead to the same generation"
        ordered = [{other.pid for other in worlds[generation]} for generation in sorted(worlds)]
        assert all(later <= earlier for earlier, later in itertools.pairwise(ordered)), "who is out stays out"

    def check_that_nobody_is_forgotten(self) -> None:
        """Without lies and frozen members, whoever lives is in every world until the end."""
        assert not any(actor.ending == "left_out" for actor in self.actors)
        alive = {actor.name for actor in self.actors if actor.ending == "done"}
        for actor in self.actors:
            assert all(alive <= {other.pid for other in world.members} for world in actor.worlds)


def simulate(seed: int, is_honest: bool) -> Simulation:
    simulation = Simulation(seed, is_honest)
    simulation.run()
    simulation.check()
    return simulation


@pytest.mark.parametrize("is_honest", [True, False], ids=["deaths", "lies"])
def test_thousands_of_schedules(is_honest: bool) -> None:
    endings: dict[str, int] = {}
    longest = 0
    for seed in range(NUM_SEEDS):
        try:
            simulation = simulate(seed, is_honest)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        longest = max(longest, *(len(actor.worlds) for actor in simulation.actors))
        for actor in simulation.actors:
            endings[actor.ending] = endings.get(actor.ending, 0) + 1
    # The schedules are worth something only if all of this happens in them.
    expected = {"done", "killed", "left"} | (set() if is_honest else {"left_out"})
    assert expected == set(endings)
    assert min(endings.values()) > NUM_SEEDS / 50
    assert longest == MAX_MEETINGS


def test_a_schedule_is_a_function_of_its_seed() -> None:
    first, second = (simulate(seed=11, is_honest=False) for _ in range(2))
    assert first.store.values == second.store.values
    assert first.now == second.now


# --- every interleaving of two ----------------------------------------------------------------------------------------

STEPS_OF_A_MEETING = 6
"""of a member that waits for nobody: join, read the decision, the joined, the left, decide, read the members"""


@dataclass
class Outcome:
    store: RecordingStore
    worlds: dict[int, World | None]


def interleave(order: tuple[int, ...], dead: dict[int, set[int]], killed_after: dict[int, int]) -> Outcome:
    """Two members that take turns as `order` says; `dead[rank]` are the ranks that `rank` takes for dead."""
    store = RecordingStore()
    joined: dict[int, dict[int, Member]] = {0: {}, 1: {}}
    worlds: dict[int, World | None] = {}
    steps = {0: 0, 1: 0}

    def sight_of(observer: int) -> Any:
        return lambda rank: Sight.DEAD if rank in dead[observer] else Sight.ALIVE

    meetings = [
        meet(store, "start", rank, 2, member(rank), sight_of(rank), always_fits, joined[rank]) for rank in (0, 1)
    ]
    for rank in (*order, *[0, 1] * 2 * STEPS_OF_A_MEETING):
        if rank in worlds or steps[rank] >= killed_after.get(rank, 1000):
            continue
        steps[rank] += 1
        try:
            next(meetings[rank])
        except StopIteration as end:
            worlds[rank] = world_of(end.value[0], joined[rank], rank)
    return Outcome(store, worlds)


def orders() -> Iterator[tuple[int, ...]]:
    for positions in itertools.combinations(range(2 * STEPS_OF_A_MEETING), STEPS_OF_A_MEETING):
        yield tuple(int(position in positions) for position in range(2 * STEPS_OF_A_MEETING))


def test_two_that_suspect_each_other_never_both_form_a_world() -> None:
    seen = set()
    for order in orders():
        outcome = interleave(order, dead={0: {1}, 1: {0}}, killed_after={})
        inside = tuple(rank for rank in (0, 1) if outcome.worlds[rank] is not None)
        assert inside == outcome.store.decisions["start"].ranks
        assert len(inside) == 1
        seen.add(inside)
    assert seen == {(0,), (1,)}


def test_two_that_trust_each_other_always_form_one_world() -> None:
    for order in orders():
        outcome = interleave(order, dead={0: set(), 1: set()}, killed_after={})
        found = [outcome.worlds[rank] for rank in (0, 1)]
        assert found[0] is not None
        assert found[1] is not None
        assert (found[0].rank, found[1].rank) == (0, 1)
        assert found[0].members == found[1].members


@pytest.mark.parametrize("num_steps", range(STEPS_OF_A_MEETING))
def test_one_that_dies_at_any_step_holds_nobody_up(num_steps: int) -> None:
    for order in orders():
        outcome = interleave(order, dead={0: {1}, 1: set()}, killed_after={1: num_steps})
        assert outcome.worlds.get(1) is None
        decision = outcome.store.decisions["start"]
        assert (outcome.worlds[0] is not None) == (0 in decision.ranks)
        assert 0 in decision.ranks, "only who suspects somebody leaves somebody out"


# --- single cases -----------------------------------------------------------------------------------------------------


def test_a_frozen_member_that_wakes_up_finds_itself_left_out() -> None:
    store = RecordingStore()
    joined: dict[int, dict[int, Member]] = {rank: {} for rank in range(3)}
    is_frozen = True

    def sight(rank: int) -> Sight:
        return Sight.DEAD if rank == 2 and is_frozen else Sight.ALIVE

    meetings = [meet(store, "k", r, 3, member(r), sight, always_fits, joined[r]) for r in range(3)]
    next(meetings[2])  # it joins, and is frozen
    for rank in (0, 1, 0, 1):
        next(meetings[rank])
    decisions = [finish(meetings[rank]) for rank in (0, 1)]
    is_frozen = False
    decisions.append(finish(meetings[2]))
    assert {decision.ranks for decision in decisions} == {(0, 1)}
    assert decisions[0].lost == (2,)
    assert world_of(decisions[2], joined[2], 2) is None


def test_it_says_for_whom_it_waits() -> None:
    meeting = meet(MemoryStore(), "k", 1, 4, member(1), lambda _rank: Sight.ALIVE, always_fits, {})
    assert next(waiting for waiting in meeting if waiting) == (0, 2, 3)


def test_who_left_is_told_from_who_was_lost() -> None:
    store = RecordingStore()
    store.put("k/left/0", "stopped")
    decision = finish(
        meet(store, "k", 1, 3, member(1), lambda rank: Sight.DEAD if rank == 2 else Sight.ALIVE, always_fits, {})
    )
    assert decision == Decision(generation=0, ranks=(1,), lost=(2,), left=(0,))


def test_a_misfit_is_left_out_and_does_not_set_the_generation_back() -> None:
    store = RecordingStore()
    members = [
        member(0, agreement={"seed": 1}),
        member(1, agreement={"seed": 2}, max_generation=9),
        member(2, agreement={"seed": 1}, max_generation=4),
    ]
    meetings = [meet(store, "k", r, 3, members[r], lambda _rank: Sight.ALIVE, agrees, {}) for r in range(3)]
    for meeting in meetings:
        next(meeting)
    assert {finish(meeting) for meeting in meetings} == {Decision(generation=10, ranks=(0, 2), lost=(1,), left=())}


def test_a_decision_survives_its_way_through_the_store() -> None:
    decision = Decision(generation=3, ranks=(0, 2), lost=(1,), left=(3, 4))
    assert Decision.from_json(decision.to_json()) == decision


def test_members_survive_their_way_through_the_store() -> None:
    someone = member(3, agreement={"seed": 1}, unreachable=(1, 2), max_generation=4)
    assert Member.from_json(someone.to_json()) == someone


def finish(meeting: Meeting) -> Decision:
    for _ in range(1000):
        try:
            next(meeting)
        except StopIteration as end:
            decision: Decision = end.value[0]
            return decision
    raise AssertionError("it waits for ever")
