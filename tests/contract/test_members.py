"""The real Membership over every form of a job; only the pings are faked."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.membership import Change, Membership
from elastic_train.errors import JobFinished, LeftOut
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.neighbours import Heard
from elastic_train.rules import NOW
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.world import World
from tests.bare_membership import bare_membership
from tests.contract.forms import MIN_NODES, PATIENCE, PEER_TIMEOUT, Form

WAITS = Waits(formation_timeout=60.0, peer_timeout=PEER_TIMEOUT, wait_timeout=60.0)


class Pings:
    """As links.Links: the test sets which members are dead or silent; all others have just answered."""

    def __init__(self, dead: set[str], silent: set[str]) -> None:
        self._dead, self._silent = dead, silent

    def heard(self, uid: str) -> Heard | None:
        now = time.monotonic()
        if uid in self._dead:
            return Heard(now, pinged_at=now - 0.1, refused_at=now)
        return Heard(now - 2 * PEER_TIMEOUT) if uid in self._silent else None

    def watch(
        self, members: Iterable[tuple[str, tuple[str, int]]], epoch: str, answered: Collection[str] | None = None
    ) -> None: ...
    def announce(self, status: str, *, at_once: bool = False) -> None: ...
    def answered(self) -> dict[str, float]:
        return {}

    def wake(self) -> None: ...
    def turn(self, seconds: float) -> bool:
        return False

    def close(self) -> None: ...


class Members:
    """Workers of one job, each with a thread of its own."""

    def __init__(self, form: Form, threads: ThreadPoolExecutor) -> None:
        self._form, self._threads = form, threads
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self._is_over = threading.Event()
        self.of: dict[int, Membership] = {}

    def first_world(self, number: int) -> Future[World]:
        """A new worker's."""
        job, form = self._form.job(number), self._form
        me = form.member(number)
        watcher = Watcher(Pings(self.dead, self.silent), PEER_TIMEOUT, lambda: None, lambda _world: None)
        made = bare_membership(
            job,
            me,
            watcher,
            WAITS,
            check=self._check,
            answering=lambda members: tuple(one for one in members if one.uid not in self.dead),
            surroundings=Surroundings(sleep=self._sleep, draw_uid=form.draw_uid),
        )
        self.of[number] = made

        def arrive() -> World:
            made.arrival.find()
            return made.first_world(me)

        return self._threads.submit(arrive)

    def next_worlds(self, worlds: Sequence[World], **how: bool) -> list[tuple[World, Change]]:
        """What these members agree on together, each about its own world."""
        asked = [
            self._threads.submit(self.of[world.me.pid].next_world, world, has_formed=True, **how) for world in worlds
        ]
        return [one.result(PATIENCE) for one in asked]

    def stop(self) -> None:
        """Whoever still waits gives up."""
        self._is_over.set()

    def _sleep(self, _seconds: float) -> None:
        self._form.pass_time()
        time.sleep(0.005)  # the clock of a form may be the test's, twenty times as fast: heartbeats must keep up

    def _check(self) -> None:
        if self._is_over.is_set():
            raise TimeoutError("the test is over")


@pytest.fixture
def members(form: Form) -> Iterator[Members]:
    with ThreadPoolExecutor(8) as threads:
        made = Members(form, threads)
        yield made
        made.stop()


def begin(members: Members) -> list[World]:
    """The first world, as each of its members sees it, by rank."""
    asked = [members.first_world(number) for number in range(MIN_NODES)]
    return sorted((one.result(PATIENCE) for one in asked), key=lambda world: world.rank)


def test_all_are_in_one_first_world(members: Members) -> None:
    worlds = begin(members)
    assert [world.rank for world in worlds] == [0, 1, 2]
    assert len({world.uid for world in worlds}) == 1
    assert not any(one.came_later for one in members.of.values())


@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_lose_one_that_dies(members: Members, form: Form, rank: int) -> None:
    worlds = begin(members)
    gone = worlds.pop(rank).me
    members.dead.add(gone.uid)
    form.kill(gone.pid)
    found = members.next_worlds(worlds)
    assert len({world.uid for world, _ in found}) == 1
    assert [world.rank for world, _ in found] == [0, 1]
    for _, change in found:
        assert [one.uid for one in change.lost] == [gone.uid]
        assert (change.left, change.joined) == ((), ())


def test_one_that_leaves_is_not_lost(members: Members) -> None:
    worlds = begin(members)
    leaving = worlds.pop(1)
    members.of[leaving.me.pid].leave(leaving)
    for world, change in members.next_worlds(worlds, is_by_vote=True):
        assert world.world_size == 2
        assert [one.uid for one in change.left] == [leaving.me.uid]
        assert change.lost == ()


def test_a_newcomer_joins(members: Members) -> None:
    worlds = begin(members)
    newcomer = members.first_world(7)
    first = members.of[worlds[0].me.pid]

    def is_due() -> bool:
        first.tend(worlds[0])
        return first.joins.vote() == NOW

    wait_until(is_due, "the newcomer is chosen", PATIENCE)
    found = members.next_worlds(worlds, is_by_vote=True)
    world = newcomer.result(PATIENCE)
    assert {one.uid for one, _ in found} == {world.uid}
    assert (world.rank, world.world_size) == (3, 4)
    assert members.of[7].came_later
    assert all([one.uid for one in change.joined] == [world.me.uid] for _, change in found)


def test_one_that_was_silent_is_left_out(members: Members) -> None:
    worlds = begin(members)
    late = worlds.pop(2)
    members.silent.add(late.me.uid)
    found = members.next_worlds(worlds)
    assert all(world.world_size == 2 for world, _ in found)
    with pytest.raises(LeftOut, match=f"generation {found[0][0].generation} without this worker"):
        members.next_worlds([late])


def test_a_newcomer_knows_the_run_that_was_named_while_it_waited(members: Members) -> None:
    """It came before the first world, which had no place for it: what is trained of that run is on others' disks."""
    worlds = begin(members)
    members.first_world(7)
    first = members.of[worlds[0].me.pid]
    wait_until(first.job.queue, "the newcomer waits", PATIENCE)
    first.agreed_once("run_uid", "r")
    wait_until(lambda: members.of[7].awaited == "r", "it has heard of the run", PATIENCE)


def test_a_newcomer_learns_that_the_job_is_over(members: Members) -> None:
    worlds = begin(members)
    newcomer = members.first_world(7)
    first = members.of[worlds[0].me.pid]
    wait_until(first.job.queue, "the newcomer waits", PATIENCE)
    first.barriers.finish(worlds[0], "{}")
    with pytest.raises(JobFinished):
        newcomer.result(PATIENCE)


def test_a_newcomer_that_could_not_be_told_learns_it_from_its_host(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = begin(members)
    newcomer = members.first_world(7)
    first = members.of[worlds[0].me.pid]
    wait_until(first.job.queue, "the newcomer waits", PATIENCE)
    monkeypatch.setattr(first.job.entrance, "queue", lambda: [])
    first.barriers.finish(worlds[0], "{}")
    with pytest.raises(JobFinished):
        newcomer.result(PATIENCE)
