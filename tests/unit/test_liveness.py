"""Who is alive: listeners of real processes, and watchers whose clock is a number and whose turns are calls."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from elastic_train.errors import StoreUnreachable
from elastic_train.liveness import Listener, Probe, Watcher, announce_broken, probe, unreachable_members
from elastic_train.meeting import Sight
from elastic_train.rules import Activity
from elastic_train.store import MemoryStore
from elastic_train.world import Member, World

PEER_TIMEOUT = 2.0
INTERVAL = 0.25
KEY = "job/world-0"


def make_member(rank: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> Member:
    return Member(
        host=f"node-{rank}",
        local_rank=0,
        pid=100 + rank,
        agent_pid=1,
        address=address,
        directory_id="run",
        backend="gloo",
        max_generation=None,
    )


# --- listener and probe -----------------------------------------------------------------------------------------------

LISTENING_PROCESS = """
import sys
from elastic_train.liveness import Listener

listener = Listener("127.0.0.1")
print(listener.address[1], flush=True)
sys.stdin.read()
"""


class Process:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENING_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.process.kill()
    process.process.communicate()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()


def test_a_frozen_process_still_accepts_and_a_killed_one_refuses(process: Process) -> None:
    assert probe(process.address) is Probe.ACCEPTED
    process.signal(signal.SIGSTOP)
    assert probe(process.address) is Probe.ACCEPTED, "the kernel answers: only its heart tells that it is frozen"
    process.signal(signal.SIGCONT)
    process.signal(signal.SIGKILL)
    process.process.wait(10)
    started = time.monotonic()
    assert probe(process.address) is Probe.REFUSED
    assert time.monotonic() - started < 0.2


def test_no_answer_is_silence_and_takes_no_longer_than_it_may() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # the kernel drops what does not fit, as a firewall would
        address = full.getsockname()
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(address)
        started = time.monotonic()
        assert probe(address, timeout=0.2) is Probe.SILENT
        assert 0.1 < time.monotonic() - started < 1.0
        for caller in callers:
            caller.close()


def test_a_closed_listener_refuses(listener: Listener) -> None:
    listener.close()
    assert probe(listener.address) is Probe.REFUSED


def test_probes_do_not_fill_a_drained_listener(listener: Listener) -> None:
    for _ in range(5):
        for _ in range(100):
            assert probe(listener.address) is Probe.ACCEPTED
        listener.drain()


def test_a_listener_that_is_not_drained_stays_alive_for_a_while(listener: Listener) -> None:
    """A frozen process is probed by everybody in a meeting; it must not look like a cut cable at once."""
    for _ in range(100):
        assert probe(listener.address) is Probe.ACCEPTED


def test_drain_does_not_wait(listener: Listener) -> None:
    started = time.monotonic()
    listener.drain()
    assert time.monotonic() - started < 0.1


def test_a_forked_child_does_not_keep_the_listener_open() -> None:
    code = """
import os, time
from elastic_train.liveness import Listener, probe

listener = Listener("127.0.0.1")
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
deadline = time.monotonic() + 10
while listener.fileno() >= 0 and time.monotonic() < deadline:
    names = set()
    for fd in os.listdir(f"/proc/{child}/fd"):
        try:
            names.add(os.readlink(f"/proc/{child}/fd/{fd}"))
        except FileNotFoundError:  # closed between the two looks
            continue
    if os.readlink(f"/proc/self/fd/{listener.fileno()}") not in names:
        listener.close()
print(probe(listener.address), flush=True)
os.kill(child, 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "refused", done.stderr


# --- watchers ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FlakyStore(MemoryStore):
    """Answers, unless it is down."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__()
        self.values = shared.values
        self.is_down = False

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnreachable("down")

    def get(self, key: str) -> str | None:
        self._check()
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        self._check()
        return super().get_many(keys)

    def put(self, key: str, value: str) -> None:
        self._check()
        super().put(key, value)

    def create(self, key: str, value: str) -> str:
        self._check()
        return super().create(key, value)


class Group:
    """The watchers of one world, in one process and with one clock; nothing runs but what a test lets run."""

    def __init__(self, size: int, store_grace: float | None = None) -> None:
        self.clock = Clock()
        self.warnings: list[str] = []
        self.given_up: list[str] = []
        self.shared = MemoryStore()
        self.stores = [FlakyStore(self.shared) for _ in range(size)]
        self.cuts = [0] * size
        self.watchers = [
            Watcher(
                self.stores[rank],
                "job",
                make_member(rank),
                PEER_TIMEOUT,
                self.cutter(rank),
                lambda: None,
                self.clock,
                store_grace,
                self.warnings.append,
                self.given_up.append,
            )
            for rank in range(size)
        ]
        self.members = tuple(make_member(rank, watcher.listener.address) for rank, watcher in enumerate(self.watchers))
        self.worlds = [World(rank=rank, generation=0, members=self.members) for rank in range(size)]
        self.alive = list(range(size))
        for watcher in self.watchers:
            watcher.turn()
            watcher.observe(self.members)

    def cutter(self, rank: int) -> Callable[[], None]:
        def cut() -> None:
            self.cuts[rank] += 1

        return cut

    def enter(self) -> None:
        for watcher, world in zip(self.watchers, self.worlds, strict=True):
            watcher.expect(world, KEY)
            watcher.enter(world, KEY)
            watcher.do(Activity.COMPUTE)

    def turn(self) -> None:
        self.clock.now += INTERVAL
        for rank in self.alive:
            self.watchers[rank].turn()

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / INTERVAL)):
            self.turn()

    def close(self) -> None:
        for watcher in self.watchers:
            watcher.listener.close()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(3)
    group.enter()
    yield group
    group.close()


def test_a_healthy_world_is_left_alone(group: Group) -> None:
    group.pass_time(60)
    assert group.cuts == [0, 0, 0]
    assert f"{KEY}/broken" not in group.shared.values


def test_silence_is_seen_after_the_peer_timeout_and_not_before(group: Group) -> None:
    group.turn()
    group.alive = [0, 1]
    group.pass_time(PEER_TIMEOUT - INTERVAL)
    assert group.cuts == [0, 0, 0]
    assert group.watchers[0].sight(group.members[2], 2, patience_is_over=False) is Sight.ALIVE
    group.pass_time(3 * INTERVAL)
    assert min(group.cuts[:2]) >= 1
    for rank in (0, 1):
        assert group.watchers[rank].verdicts.keys() == {2}
        assert "node-2/0/102 (rank 2) was silent for 2." in (group.watchers[rank].reason or "")
        assert group.watchers[rank].sight(group.members[2], 2, patience_is_over=False) is Sight.DEAD


def test_a_beating_heart_is_enough_whatever_the_clock_says(group: Group) -> None:
    group.clock.now += 1e6
    group.pass_time(10)
    assert group.cuts == [0, 0, 0]


def test_a_verdict_is_shared_with_who_has_not_seen_it(group: Group) -> None:
    group.shared.create(f"{KEY}/broken", '{"2": "node-2 is out"}')
    group.turn()
    assert group.cuts == [1, 1, 1]
    assert [watcher.verdicts for watcher in group.watchers] == [{2: "node-2 is out"}] * 3
    assert [watcher.reason for watcher in group.watchers] == ["node-2 is out"] * 3


def test_a_broken_key_cuts_the_world_of_all_though_nobody_is_blamed(group: Group) -> None:
    announce_broken(group.shared, KEY)
    group.turn()
    assert group.cuts == [1, 1, 1]
    assert [watcher.verdicts for watcher in group.watchers] == [{}] * 3
    assert all(watcher.reason for watcher in group.watchers)


def test_an_announcement_does_not_take_a_verdict_back(group: Group) -> None:
    group.shared.create(f"{KEY}/broken", '{"2": "node-2 is out"}')
    announce_broken(group.shared, KEY)
    group.turn()
    assert group.watchers[0].verdicts.keys() == {2}


def test_after_leaving_nothing_is_cut(group: Group) -> None:
    group.watchers[0].leave()
    announce_broken(group.shared, KEY)
    group.turn()
    assert group.cuts == [0, 1, 1]
    assert not group.watchers[0].is_spokesman


def test_a_verdict_on_a_world_is_not_carried_into_the_next(group: Group) -> None:
    group.shared.create(f"{KEY}/broken", '{"2": "node-2 is out"}')
    group.turn()
    watcher = group.watchers[0]
    watcher.leave()
    following = World(rank=0, generation=1, members=group.members[:2])
    watcher.observe(following.members)
    watcher.expect(following, "job/world-1")
    assert (watcher.verdicts, watcher.reason) == ({}, None)


def test_a_stuck_training_thread_is_named(group: Group) -> None:
    for watcher in group.watchers:
        watcher.slowest_step = 0.1
    patience = PEER_TIMEOUT + 10 * 0.1
    group.watchers[0].do(Activity.REDUCE)
    group.watchers[1].do(Activity.REDUCE)
    group.watchers[2].do(Activity.COMPUTE)
    group.pass_time(patience - INTERVAL)
    assert group.cuts == [0, 0, 0]
    group.pass_time(3 * INTERVAL)
    assert min(group.cuts) >= 1, "the stuck one is broken off too: it may come back, to find itself left out"
    for watcher in group.watchers:
        assert watcher.verdicts.keys() == {2}
        assert watcher.reason == "node-2/0/102 (rank 2) kept the others waiting"


def test_before_any_step_was_timed_a_training_thread_gets_longer(group: Group) -> None:
    group.watchers[0].do(Activity.REDUCE)
    group.pass_time(5 * PEER_TIMEOUT)
    assert group.cuts == [0, 0, 0]
    group.pass_time(2 * PEER_TIMEOUT)
    blamed = group.watchers[0].verdicts.keys()
    assert blamed, "one at least; the verdict comes from whoever sees the first of them"
    assert blamed <= {1, 2}


def test_where_a_step_may_compile_nobody_is_judged_by_the_steps_before(group: Group) -> None:
    for watcher in group.watchers:
        watcher.slowest_step, watcher.least_patience = 0.1, 600.0
        watcher.do(Activity.REDUCE)
    group.pass_time(590)
    assert group.cuts == [0, 0, 0]
    group.pass_time(20)
    assert min(group.cuts) >= 1, "not for ever"


def test_a_new_world_is_judged_by_the_steps_before(group: Group) -> None:
    group.watchers[0].least_patience = 600.0
    group.enter()
    assert group.watchers[0].least_patience == 0.0


def test_a_reduction_that_cannot_end_is_broken_off_without_blame(group: Group) -> None:
    for watcher in group.watchers:
        watcher.slowest_step = 0.1
        watcher.do(Activity.REDUCE)
    group.pass_time(PEER_TIMEOUT + 1.0 + 3 * INTERVAL)
    assert min(group.cuts) >= 1
    assert [watcher.verdicts for watcher in group.watchers] == [{}] * 3


def test_who_waits_on_in_a_broken_world_is_ended(group: Group) -> None:
    """And nobody who computes, or has left the world to meet for the next one."""
    for rank, watcher in enumerate(group.watchers):
        watcher.slowest_step = 0.1
        watcher.do(Activity.COMPUTE if rank == 0 else Activity.REDUCE)
    group.shared.values[f"{KEY}/broken"] = "{}"
    group.pass_time(PEER_TIMEOUT)
    group.watchers[1].leave()
    assert group.given_up == []
    group.pass_time(2.0)
    assert group.given_up
    assert "has not ended here" in group.given_up[0]
    assert group.watchers[2].reason is not None


def test_who_is_stuck_in_anything_else_is_ended_at_last(group: Group) -> None:
    group.watchers[0].do(Activity.FORM)
    group.shared.values[f"{KEY}/broken"] = "{}"
    for watcher in group.watchers[1:]:
        watcher.leave()
    group.pass_time(1790.0)
    assert group.given_up == []
    group.pass_time(20.0)
    assert "what it was doing has not ended here in 1800 s" in group.given_up[0]


def test_who_still_forms_is_not_judged(group: Group) -> None:
    group.watchers[0].do(Activity.REDUCE)
    group.watchers[1].do(Activity.REDUCE)
    group.watchers[2].do(Activity.FORM)
    group.pass_time(60)
    assert group.cuts == [0, 0, 0]


def test_a_death_in_the_formation_is_seen_by_the_probe() -> None:
    group = Group(3)
    for watcher, world in zip(group.watchers, group.worlds, strict=True):
        watcher.expect(world, KEY)
    group.turn()
    assert group.cuts == [0, 0, 0]
    group.watchers[2].listener.close()
    group.alive = [0, 1]
    group.turn()
    assert group.cuts == [1, 1, 0]
    assert group.watchers[0].verdicts.keys() == group.watchers[1].verdicts.keys() == {2}
    group.close()


def test_an_outage_of_the_store_blames_no_peer(group: Group) -> None:
    """It is the store that is silent: its world ends at a step, or is broken off where none ends, and every member gets
    all its time anew."""
    group.turn()
    for store in group.stores:
        store.is_down = True
    group.pass_time(PEER_TIMEOUT - 2 * INTERVAL)
    assert not any(watcher.is_store_lost for watcher in group.watchers)
    group.pass_time(2 * PEER_TIMEOUT)
    assert all(watcher.is_store_lost for watcher in group.watchers)
    assert group.cuts == [0, 0, 0]
    group.pass_time(6 * PEER_TIMEOUT)
    assert min(group.cuts) >= 1
    assert [watcher.verdicts for watcher in group.watchers] == [{}] * 3
    assert group.watchers[0].reason == "down"
    assert group.watchers[0].sight(group.members[1], 1, patience_is_over=False) is Sight.ALIVE


def test_who_comes_back_later_than_others_from_a_stall_is_not_blamed(group: Group) -> None:
    """A store that is frozen raises nothing: all calls return late, for some members later than for others."""
    group.turn()
    group.clock.now += 5 * PEER_TIMEOUT
    group.alive = [0, 1]
    group.pass_time(PEER_TIMEOUT - 2 * INTERVAL)
    assert group.cuts == [0, 0, 0]
    group.alive = [0, 1, 2]
    group.pass_time(10)
    assert group.cuts == [0, 0, 0]
    assert f"{KEY}/broken" not in group.shared.values


def test_a_frozen_member_that_wakes_up_blames_nobody_else(group: Group) -> None:
    group.turn()
    group.alive = [0, 1]
    group.pass_time(2 * PEER_TIMEOUT)
    group.alive = [0, 1, 2]
    group.watchers[2].turn()
    assert group.watchers[2].verdicts.keys() == {2}, "it learns that it was given up"
    assert "node-2/0/102 (rank 2) was silent" in (group.watchers[2].reason or "")
    assert group.cuts[2] == 1


def test_a_world_of_one_is_never_broken() -> None:
    group = Group(1)
    group.enter()
    group.stores[0].is_down = True
    group.pass_time(60)
    announce_broken(group.shared, KEY)
    group.stores[0].is_down = False
    group.pass_time(60)
    assert group.cuts == [0]
    group.close()


def test_a_store_with_a_grace_may_be_away_for_so_long() -> None:
    group = Group(2, store_grace=30.0)
    group.enter()
    group.turn()
    for store in group.stores:
        store.is_down = True
    group.pass_time(29)
    assert group.cuts == [0, 0]
    assert len(group.warnings) == 2, "each member says it once"
    assert "training goes on for up to 30 s" in group.warnings[0]
    for store in group.stores:
        store.is_down = False
    group.pass_time(29)
    assert group.cuts == [0, 0]
    assert [text for text in group.warnings if "answers again" in text] == group.warnings[2:]
    assert all(watcher.answering_since > 29 for watcher in group.watchers), "nobody could come before"
    for store in group.stores:
        store.is_down = True
    group.pass_time(31)
    assert all(watcher.is_store_lost for watcher in group.watchers), "their next step is the last"
    assert group.cuts == [0, 0], "of a world whose members all live"
    group.pass_time(7 * PEER_TIMEOUT)
    assert min(group.cuts) >= 1, "no step has ended since"
    group.close()


def test_a_store_that_is_back_at_the_end_of_its_grace_is_lost_no_more() -> None:
    """The training thread has an answer first, and forms the next world before the watchers' next turn."""
    group = Group(2, store_grace=30.0)
    group.enter()
    for store in group.stores:
        store.is_down = True
    group.pass_time(31)
    assert all(watcher.is_store_lost for watcher in group.watchers)
    for watcher in group.watchers:
        watcher.leave()
        watcher.note_answer()
    group.enter()
    group.pass_time(1)  # the stores of the watchers are still away
    assert not any(watcher.is_store_lost for watcher in group.watchers)
    group.close()


def test_the_step_in_hand_ends_within_the_grace() -> None:
    group = Group(2, store_grace=30.0)
    group.enter()
    for store, watcher in zip(group.stores, group.watchers, strict=True):
        store.is_down = True
        watcher.slowest_step = 10.0
    group.pass_time(19)
    assert not any(watcher.is_store_lost for watcher in group.watchers)
    group.pass_time(2)
    assert all(watcher.is_store_lost for watcher in group.watchers)
    group.close()


def test_a_lone_member_meets_the_end_of_the_grace_at_its_next_step() -> None:
    """It cannot know whether another start has taken its place."""
    group = Group(1, store_grace=30.0)
    group.enter()
    group.stores[0].is_down = True
    group.pass_time(29)
    assert not group.watchers[0].is_store_lost
    group.pass_time(3)
    assert group.watchers[0].is_store_lost
    group.pass_time(20 * PEER_TIMEOUT)
    assert group.cuts == [0], "it waits for nobody, however long its step takes"
    group.close()


def test_who_is_patient_no_longer_gives_up_the_living(group: Group) -> None:
    watcher = group.watchers[0]
    assert watcher.sight(group.members[1], 1, patience_is_over=False) is Sight.ALIVE
    assert watcher.sight(group.members[1], 1, patience_is_over=True) is Sight.DEAD
    group.watchers[1].listener.close()
    assert watcher.sight(group.members[1], 1, patience_is_over=False) is Sight.DEAD


def test_the_thread_beats_drains_runs_errands_and_stops() -> None:
    store, errands = MemoryStore(), threading.Event()
    watcher = Watcher(store, "job", make_member(0), PEER_TIMEOUT, lambda: None, errands.set)
    before = threading.active_count()
    watcher.start(store)
    beat = store.get("job/beat/node-0/0/100")
    assert beat is not None, "it beats before start() returns"
    assert errands.wait(5)
    for _ in range(300):  # as often as members in a meeting do; more than its backlog
        time.sleep(0.001)
        assert probe(watcher.listener.address) is Probe.ACCEPTED
    deadline = time.monotonic() + 5
    while store.get("job/beat/node-0/0/100") == beat:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watcher.stop()
    assert threading.active_count() == before
    assert probe(watcher.listener.address) is Probe.REFUSED


def test_only_silent_members_are_unreachable(group: Group) -> None:
    assert unreachable_members(group.worlds[0]) == ()
    group.watchers[1].listener.close()
    assert unreachable_members(group.worlds[0]) == (), "a refusal is an answer: that one is dead, not cut off"
