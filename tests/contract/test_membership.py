"""What every form of the job must do for membership: begin, join, lose, leave, and decide once.

A form is a class with the methods of `Form`; one more in FORMS runs all of these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Agreement, Decided, Decision, Presence, Status, Wait
from elastic_train.protocol.central import CentralJob
from elastic_train.protocol.clients import Address
from elastic_train.protocol.entrance import Size
from elastic_train.protocol.job import Admitted, Denied, Job
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.store import MemoryStore
from elastic_train.world import Member, World

MIN_NODES = 3
PEER_TIMEOUT = 2.0


class Clock:
    """Seconds that pass when a test says so; and names."""

    def __init__(self) -> None:
        self.now = 100.0
        self._num_uids = 0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def draw_uid(self) -> str:
        self._num_uids += 1
        return f"world{self._num_uids}"


class Form(Protocol):
    """One way to keep a job."""

    clock: Clock

    def job(self, number: int) -> Job:
        """A new worker's."""

    def kill(self, number: int) -> None:
        """Nothing that this worker serves answers any more."""


def member(number: int) -> Member:
    address = ("host", number)
    return Member(f"node{number}", 0, number, 1, address, "run", "gloo", None, store=address, uid=f"uid{number}")


class _Finder:
    """All members find the first worker."""

    shown: Sequence[Address] = ()

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def is_beginner(self) -> bool:
        return self._is_first

    def addresses(self) -> Sequence[Address]:
        return () if self._is_first else (("host", 0),)

    def show(self, addresses: Sequence[Address], job_token: str) -> None: ...
    def keep(self, *, has_world: bool) -> None: ...
    def describe(self) -> str:
        return "the first worker"

    def close(self) -> None: ...


class _Client(MemoryStore):
    """One worker's view of a store that may be gone; `before_call` lets others go first."""

    def __init__(self, store: MemoryStore, is_gone: Callable[[], bool], before_call: Callable[[], None]) -> None:
        super().__init__()
        self.values = store.values
        self._is_gone, self._before_call = is_gone, before_call

    def _reach(self) -> None:
        self._before_call()
        if self._is_gone():
            raise StoreUnreachable("gone")

    def get(self, key: str) -> str | None:
        self._reach()
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        self._reach()
        return super().get_many(keys)

    def put(self, key: str, value: str) -> None:
        self._reach()
        super().put(key, value)

    def create(self, key: str, value: str) -> str:
        self._reach()
        return super().create(key, value)

    def swap(self, key: str, expected: str, value: str) -> bool:
        self._reach()
        return super().swap(key, expected, value)


class PeersInMemory:
    def __init__(self) -> None:
        self.clock = Clock()
        self.interrupt: Callable[[], None] = lambda: None
        self._stores: dict[Address, MemoryStore] = {}
        self._gone: set[Address] = set()

    def job(self, number: int) -> PeerJob:
        own = self._stores[("host", number)] = MemoryStore()
        return PeerJob(
            self._client(own, ("host", number)),
            ("host", number),
            lambda address: self._client(self._stores[address], address),
            _Finder(number == 0),
            Size(min_nodes=MIN_NODES, max_nodes=8, last_call=0.0),
            uid=f"uid{number}",
            run_id="run",
            peer_timeout=PEER_TIMEOUT,
            max_world_size=None,
            refused=lambda _members: [],
            draw_uid=self.clock.draw_uid,
            clock=self.clock,
        )

    def _client(self, store: MemoryStore, address: Address) -> _Client:
        return _Client(store, lambda: address in self._gone, lambda: self.interrupt())

    def kill(self, number: int) -> None:
        self._gone.add(("host", number))


class ListingMemoryStore(MemoryStore):
    def below(self, prefix: str) -> dict[str, str]:
        return {key: text for key, text in self.values.items() if key.startswith(prefix)}

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def delete_prefix(self, prefix: str) -> None:
        for key in self.below(prefix):
            del self.values[key]


class CentralInMemory:
    def __init__(self) -> None:
        self.clock = Clock()
        self._store = ListingMemoryStore()

    def job(self, number: int) -> CentralJob:
        return CentralJob(
            self._store,
            self._store,
            "job",
            Size(min_nodes=MIN_NODES, max_nodes=8, last_call=0.0),
            peer_timeout=PEER_TIMEOUT,
            longest_silence=10.0,
            max_world_size=None,
            refused=lambda _members: [],
            draw_uid=self.clock.draw_uid,
            clock=self.clock,
        )

    def kill(self, number: int) -> None: ...


FORMS: list[Callable[[], Form]] = [PeersInMemory, CentralInMemory]


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request: pytest.FixtureRequest) -> Form:
    made: Form = request.param()
    return made


def begin(form: Form) -> tuple[list[Job], list[World]]:
    """The first world of MIN_NODES workers, each with its job, by rank."""
    jobs = {number: form.job(number) for number in range(MIN_NODES)}
    worlds: dict[int, World] = {}
    for _ in range(1000):
        for number, job in jobs.items():
            if number not in worlds and job.find():
                place = job.look_from_queue(Waiting(member(number), 1))
                if isinstance(place, Admitted):
                    assert not place.came_later
                    job.enter(place.world, place.facts, None)
                    job.leave_queue()
                    worlds[number] = place.world
        if len(worlds) == MIN_NODES:
            by_rank = sorted(worlds, key=lambda number: worlds[number].rank)
            return [jobs[number] for number in by_rank], [worlds[number] for number in by_rank]
        form.clock.now += 0.1
    raise AssertionError("it never begins")


def agreement(
    form: Form, job: Job, world: World, status: dict[int, Status], newcomers: Sequence[Member] = ()
) -> Agreement:
    return Agreement(
        job,
        world,
        Presence(world.generation),
        status=lambda rank: status.get(rank, Status.ALIVE),
        is_heard=lambda _rank: True,
        newcomers=lambda: newcomers,
        facts={"token": "t"},
        draw_uid=form.clock.draw_uid,
    )


def agree(
    form: Form,
    jobs: list[Job],
    worlds: list[World],
    ranks: Sequence[int],
    status: dict[int, Status] | None = None,
    newcomers: Sequence[Member] = (),
) -> Decision:
    """What `ranks` decide, each of them the same."""
    parts = {rank: agreement(form, jobs[rank], worlds[rank], status or {}, newcomers) for rank in ranks}
    found: dict[int, Decision] = {}
    for _ in range(20):
        for rank, part in parts.items():
            part.asks_others = True
            outcome = part.look()
            if isinstance(outcome, Decided):
                found[rank] = outcome.decision
        if len(found) == len(parts):
            assert len(set(map(Decision.to_json, found.values()))) == 1
            return next(iter(found.values()))
    raise AssertionError(f"no decision: {found}")


def test_a_job_begins_with_one_list(form: Form) -> None:
    _, worlds = begin(form)
    assert [world.rank for world in worlds] == [0, 1, 2]
    assert all(world.uid == worlds[0].uid and world.members == worlds[0].members for world in worlds)


def test_a_newcomer_is_admitted(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer = form.job(7)
    assert newcomer.find()
    assert not isinstance(newcomer.look_from_queue(Waiting(member(7), 1)), Admitted)
    ready = [waiting.member for waiting in jobs[0].queue() if waiting.member.uid == "uid7"]
    decision = agree(form, jobs, worlds, [0, 1, 2], newcomers=ready)
    for job, world in zip(jobs, worlds, strict=True):
        following = decision.world_for(world.me.uid, world, None)
        assert following is not None
        job.enter(following, decision.facts, decision)
    place = newcomer.look_from_queue(Waiting(member(7), 1))
    assert isinstance(place, Admitted)
    assert place.came_later
    assert place.world.rank == 3
    assert place.world.uid == decision.uid


@pytest.mark.parametrize("dead", [{0}, {2}, {0, 1}, {1, 2}])
def test_the_others_go_on_without_the_dead(form: Form, dead: set[int]) -> None:
    jobs, worlds = begin(form)
    for rank in dead:
        form.kill(worlds[rank].me.pid)
    rest = [rank for rank in range(3) if rank not in dead]
    decision = agree(form, jobs, worlds, rest, dict.fromkeys(dead, Status.DEAD))
    assert decision.ranks == tuple(rest)
    assert decision.lost == tuple(sorted(dead))
    assert set(decision.dead) == {worlds[rank].me.uid for rank in dead}


def test_who_leaves_is_not_lost(form: Form) -> None:
    jobs, worlds = begin(form)
    jobs[1].announce(worlds[1], "left/1", "stopped")
    decision = agree(form, jobs, worlds, [0, 2])
    assert (decision.ranks, decision.left, decision.lost) == ((0, 2), (1,), ())


def test_who_is_left_out_learns_it(form: Form) -> None:
    jobs, worlds = begin(form)
    decision = agree(form, jobs, worlds, [0, 1], {2: Status.UNKNOWN})
    assert decision.lost == (2,)
    late = agreement(form, jobs[2], worlds[2], {})
    late.asks_others = True
    found = late.look()
    assert isinstance(found, Decided)
    assert found.decision == decision
    assert found.decision.world_for(worlds[2].me.uid, worlds[2], None) is None


def test_one_of_three_without_the_silent_waits_where_nobody_arbitrates() -> None:
    form = PeersInMemory()
    jobs, worlds = begin(form)
    found = agreement(form, jobs[2], worlds[2], {0: Status.UNKNOWN, 1: Status.UNKNOWN}).look()
    assert found == Wait(votes=(worlds[0].me.uid, worlds[1].me.uid))


def decide(job: Job, world: World, uid: str, reachable: Sequence[int]) -> str | Denied:
    return job.decide(world, Decision(1, uid, tuple(reachable)).to_json(), reachable=reachable, dead=())


@pytest.mark.parametrize("reachable", [(0, 1), (0, 2), (0, 1, 2)])
def test_two_proposers_decide_the_same(form: Form, reachable: tuple[int, ...]) -> None:
    jobs, worlds = begin(form)
    first = decide(jobs[0], worlds[0], "a", reachable)
    second = decide(jobs[1], worlds[1], "b", (1, 2))
    if isinstance(second, Denied):  # its ballot was older
        second = decide(jobs[1], worlds[1], "b", (1, 2))
    assert first == second


def interleaved(at: int) -> list[str | Denied] | None:
    """What three proposers are told, the second one before the first one's operation number `at`; None where it has
    fewer."""
    form = PeersInMemory()
    jobs, worlds = begin(form)
    calls = 0
    outcomes: list[str | Denied] = []

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            outcomes.append(decide(jobs[1], worlds[1], "b", (1, 2)))

    form.interrupt = interrupt
    outcomes.append(decide(jobs[0], worlds[0], "a", (0, 1)))
    form.interrupt = lambda: None
    outcomes += [decide(jobs[2], worlds[2], "c", (2, 1)) for _ in range(3)]
    return outcomes if calls >= at else None


def test_two_proposers_decide_the_same_however_they_interleave() -> None:
    for at in range(1, 200):
        outcomes = interleaved(at)
        if outcomes is None:
            assert at > 10
            return
        decided = {outcome for outcome in outcomes if not isinstance(outcome, Denied)}
        assert len(decided) == 1, f"interrupted before operation {at}"
    raise AssertionError("it never ends")
