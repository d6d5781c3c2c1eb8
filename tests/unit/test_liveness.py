"""Liveness: probes of real processes, and watchers with a fake clock whose rounds and pings are calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic.connect import answering
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Liveness
from elastic_train.protocol.heartbeat import FIRST_SECONDS, Pace, verdicts_of
from elastic_train.protocol.laws import IN_TIME
from elastic_train.protocol.links import Links
from elastic_train.protocol.liveness import Watcher, WatcherThread
from elastic_train.protocol.neighbours import STANDARD, Heard, Topology
from elastic_train.protocol.probes import Probe, probe, probe_all, refusing
from elastic_train.rules import Activity
from elastic_train.world import Address, Member, World
from tests.processes import refuse_threads

PEER_TIMEOUT = 2.0
STALL_TIMEOUT = 5.0
INTERVAL = 0.25
DEADLINE = 30.0
"""of every wait for a thread or a process"""


def make_member(rank: int, address: Address = ("127.0.0.1", 0)) -> Member:
    return Member(
        host=f"node-{rank}",
        local_rank=0,
        pid=100 + rank,
        agent_pid=1,
        address=address,
        directory_id="run",
        backend="gloo",
        max_generation=None,
        uid=f"uid-{rank}",
    )


# --- probe ------------------------------------------------------------------------------------------------------------

LISTENING_PROCESS = """
import socket, sys

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
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


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.process.kill()
    process.process.communicate()


def test_a_frozen_process_still_accepts_and_a_killed_one_refuses(process: Process) -> None:
    assert probe(process.address) is Probe.ACCEPTED
    process.signal(signal.SIGSTOP)
    assert probe(process.address) is Probe.ACCEPTED, "the kernel answers: only its pings tell that it is frozen"
    process.signal(signal.SIGCONT)
    process.signal(signal.SIGKILL)
    process.process.wait(DEADLINE)
    assert probe(process.address) is Probe.REFUSED


@pytest.fixture
def full_address() -> Iterator[Address]:
    """Of a listener that answers nobody: the kernel drops what does not fit, as a firewall would."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        yield full.getsockname()
        for caller in callers:
            caller.close()


def test_no_answer_is_silence_and_takes_no_longer_than_it_may(full_address: Address) -> None:
    seconds = []
    for timeout in (0.1, 1.0):
        started = time.monotonic()
        assert probe(full_address, timeout) is Probe.SILENT
        seconds.append(time.monotonic() - started)
    assert seconds[0] < seconds[1]


def test_newcomers_that_are_silent_hold_up_the_pings_for_a_part_of_the_peer_timeout(full_address: Address) -> None:
    """Asked for on the watcher's thread, twice where there are spares: else a healthy rank 0 would be missed."""
    peer_timeout, members = 1.0, tuple(make_member(rank, full_address) for rank in range(20))
    seconds = []
    for _ in range(3):  # a busy machine may stand still for once
        started = time.monotonic()
        assert answering(members, peer_timeout) == ()
        seconds.append(time.monotonic() - started)
    assert min(seconds) < peer_timeout / 3


def test_many_are_probed_at_once(full_address: Address) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # a bound port that does not listen refuses, and nobody else gets it
        addresses = [listener.getsockname(), nobody.getsockname(), full_address]
        members = [make_member(rank, address) for rank, address in enumerate(10 * addresses)]
        started = time.monotonic()
        assert probe(full_address) is Probe.SILENT
        began = time.monotonic()
        assert probe_all(10 * addresses) == 10 * [Probe.ACCEPTED, Probe.REFUSED, Probe.SILENT]
        assert time.monotonic() - began < 10 * (began - started), "each silent one takes that long"
        assert refusing(members[:3]) == [members[1]]
    assert probe_all([]) == []


def test_without_threads_they_are_probed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes. Else the watcher would end with an error as soon as a peer dies."""

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # as above
        refuse_threads(monkeypatch)
        assert probe_all([listener.getsockname(), nobody.getsockname()]) == [Probe.ACCEPTED, Probe.REFUSED]


# --- watchers ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLinks:
    """As Links, of what a Group says that is heard."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.epoch = self.status = ""
        self.peers: dict[str, Heard] = {}
        self.is_closed = False

    def watch(
        self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None = None
    ) -> None:
        uids = [uid for uid, _ in members]
        self.peers = {uid: self.peers.get(uid, Heard(self.clock())) for uid in uids}
        for heard in self.peers.values():
            heard.heard_at = self.clock()
            if epoch != self.epoch:
                heard.pinged_at = None
        self.epoch = epoch

    def announce(self, status: str, *, at_once: bool = False) -> None:
        self.status = status

    def heard(self, uid: str) -> Heard | None:
        return self.peers.get(uid)

    def answered(self) -> dict[str, float]:
        return {}

    def wake(self) -> None: ...

    def turn(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


class Group:
    """The watchers of one world, in one process and with one clock; nothing runs but what a test lets run."""

    def __init__(
        self,
        size: int,
        max_world_size: int | None = None,
        topology: Topology = STANDARD,
    ) -> None:
        self.clock = Clock()
        self.warnings: list[str] = []
        self.given_up: list[str] = []
        self.tended: list[World | None] = []
        self.cuts = [0] * size
        self.is_store_down = False
        self.links = [FakeLinks(self.clock) for _ in range(size)]
        self.watchers = [
            Watcher(
                self.links[rank],
                PEER_TIMEOUT,
                self.cutter(rank),
                self.tend,
                self.clock,
                self.given_up.append,
                topology,
                pace=Pace(PEER_TIMEOUT, STALL_TIMEOUT),
            )
            for rank in range(size)
        ]
        self.members = tuple(make_member(rank) for rank in range(size))
        self.worlds = [World(rank, 0, self.members, max_world_size, "w0") for rank in range(size)]
        self.alive = list(range(size))
        self.killed: set[int] = set()
        self.cut_off: set[tuple[int, int]] = set()
        """(one, other): one hears nothing of the other"""
        for watcher, world in zip(self.watchers, self.worlds, strict=True):
            watcher.adopt(world)

    def cutter(self, rank: int) -> Callable[[], None]:
        def cut() -> None:
            self.cuts[rank] += 1

        return cut

    def tend(self, world: World | None) -> None:
        if self.is_store_down:
            raise StoreUnreachable("down")
        self.tended.append(world)

    def note_step(self, seconds: float) -> None:
        """All have committed a step that took so long, and so did its collective."""
        for watcher in self.watchers:
            watcher.pace.note_collective(seconds)
            watcher.pace.note_step(seconds)

    def enter(self) -> None:
        for watcher, world in zip(self.watchers, self.worlds, strict=True):
            watcher.expect(world)
            watcher.enter(world)
            watcher.do(Activity.COMPUTE)

    def ping(self) -> None:
        now = self.clock()
        for rank, links in enumerate(self.links):
            for uid, heard in links.peers.items():
                other = int(uid.removeprefix("uid-"))
                if rank not in self.alive or (rank, other) in self.cut_off:
                    continue
                if other in self.killed:
                    heard.refused_at = heard.refused_at or now
                elif other in self.alive:
                    heard.heard_at, heard.has_answered = now, True
                    if self.links[other].epoch == links.epoch:
                        heard.status, heard.epoch, heard.pinged_at = self.links[other].status, links.epoch, now
                        heard.elsewhere_since = None
                    else:
                        heard.elsewhere_since = heard.elsewhere_since or now

    def turn(self) -> None:
        self.clock.now += INTERVAL
        self.ping()
        for rank in self.alive:
            self.watchers[rank].turn()

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / INTERVAL)):
            self.turn()

    def kill(self, rank: int) -> None:
        self.alive.remove(rank)
        self.killed.add(rank)

    def status(self, of: int, *, by: int = 0, time_is_up: bool = False) -> Liveness:
        watcher = self.watchers[by]
        return watcher.contacts.status(self.members[of], watcher.verdicts.get(of), time_is_up)


@pytest.fixture
def group() -> Group:
    group = Group(3)
    group.enter()
    return group


def test_a_healthy_world_is_left_alone(group: Group) -> None:
    group.pass_time(60)
    assert group.cuts == [0, 0, 0]
    assert all(links.status.startswith("-") for links in group.links)
    assert [group.status(rank) for rank in (1, 2)] == [Liveness.ALIVE, Liveness.ALIVE]
    assert group.watchers[0].contacts.unreachable(group.worlds[0]) == ()


def test_what_a_member_says_of_itself_is_one_line(group: Group) -> None:
    group.watchers[0].do(Activity.REDUCE)
    group.pass_time(2 * INTERVAL)
    head, text = group.links[0].status.split(" ", 1)
    assert (head, json.loads(text)[:3]) == ("-{}", [0, "reduce", 2 * INTERVAL])
    assert "\n" not in text


def test_silence_is_seen_after_the_peer_timeout_and_not_before(group: Group) -> None:
    group.turn()
    group.alive = [0, 1]
    group.pass_time(PEER_TIMEOUT - INTERVAL)
    assert group.cuts == [0, 0, 0]
    assert group.status(2) is Liveness.ALIVE
    group.pass_time(3 * INTERVAL)
    assert min(group.cuts[:2]) >= 1
    for rank in (0, 1):
        assert group.watchers[rank].verdicts.keys() == {2}
        assert "node-2/0/102 (rank 2) was silent for 2." in (group.watchers[rank].reason or "")
        assert group.status(2, by=rank) is Liveness.UNKNOWN, "it may live"


def test_who_answers_is_heard_whatever_the_clock_says(group: Group) -> None:
    group.clock.now += 1e6
    group.pass_time(10)
    assert group.cuts == [0, 0, 0]


def test_a_death_is_seen_at_once(group: Group) -> None:
    group.turn()
    group.kill(2)
    group.turn()
    assert group.cuts[:2] == [1, 1]
    assert group.watchers[0].reason == "node-2/0/102 (rank 2) died"
    assert group.watchers[0].contacts.is_refused(group.members[2])
    assert not group.watchers[0].contacts.is_refused(group.members[1])


def test_a_verdict_is_shared_with_who_has_not_seen_it(group: Group) -> None:
    group.cut_off = {(1, 2)}
    group.pass_time(PEER_TIMEOUT + 2 * INTERVAL)
    assert min(group.cuts) >= 1
    assert [watcher.verdicts.keys() for watcher in group.watchers] == [{2}, {2}, {2}], "the blamed one learns it too"
    assert len({watcher.reason for watcher in group.watchers}) == 1
    assert "node-2/0/102 (rank 2) was silent" in (group.watchers[0].reason or "")


def test_a_member_that_is_out_ends_the_world_of_all_though_nobody_is_blamed(group: Group) -> None:
    group.turn()
    group.watchers[1].announce_broken()
    group.turn()
    assert min(group.cuts[0], group.cuts[2]) >= 1
    assert [watcher.verdicts for watcher in group.watchers] == [{}] * 3
    assert group.watchers[0].reason == group.watchers[2].reason == "another worker has broken it off, or has left"


def test_a_vote_breaks_off_nobody_who_is_still_to_read_it(group: Group) -> None:
    group.turn()
    group.watchers[2].do(Activity.REDUCE)
    for watcher in group.watchers[:2]:
        watcher.do(Activity.FORM)
        watcher.announce_broken(is_by_vote=True)
        watcher.leave()
    group.pass_time(PEER_TIMEOUT - 2 * INTERVAL)
    assert group.cuts[2] == 0
    assert group.watchers[2].reason is None
    group.pass_time(4 * INTERVAL)
    assert group.cuts[2] >= 1, "it should have read it by now"


def test_who_leaves_by_vote_and_is_gone_breaks_off_nobody_who_is_still_to_read_it(group: Group) -> None:
    group.turn()
    group.watchers[2].do(Activity.REDUCE)
    group.watchers[0].announce_broken(is_by_vote=True)
    group.turn()
    group.kill(0)
    group.pass_time(2 * INTERVAL)
    assert group.cuts[2] == 0
    group.pass_time(PEER_TIMEOUT + INTERVAL)
    assert group.cuts[2] >= 1, "it should have read it by now"
    assert group.watchers[2].verdicts.keys() == {0}


def test_who_was_left_behind_finds_out_though_its_collective_does_not_end(group: Group) -> None:
    group.turn()
    group.watchers[2].do(Activity.REDUCE)
    group.alive.remove(2)  # frozen
    group.pass_time(PEER_TIMEOUT + 2 * INTERVAL)
    for rank in (0, 1):
        group.watchers[rank].leave()
        group.watchers[rank].adopt(World(rank, 1, group.members[:2], None, "w1"))
    group.alive.append(2)
    group.pass_time(PEER_TIMEOUT - 2 * INTERVAL)
    assert group.cuts[2] == 0, "a vote may have ended its world, which it is about to read"
    group.pass_time(4 * INTERVAL)
    assert group.cuts[2] >= 1
    assert group.watchers[2].verdicts == {}


def test_a_vote_ends_the_world_of_a_spare() -> None:
    group = Group(3, max_world_size=2)
    group.enter()
    group.watchers[0].announce_broken(is_by_vote=True)
    group.turn()
    assert group.watchers[2].reason == "another worker has broken it off, or has left"
    assert group.cuts[1] == 0


def test_who_is_lost_after_a_vote_is_told_of(group: Group) -> None:
    group.turn()
    group.watchers[0].announce_broken(is_by_vote=True)
    group.kill(2)
    group.turn()
    group.turn()
    assert group.watchers[1].verdicts.keys() == {2}
    assert group.cuts[1] >= 1


def test_an_announcement_does_not_take_a_verdict_back(group: Group) -> None:
    group.turn()
    group.kill(2)
    group.turn()
    group.watchers[0].announce_broken()
    group.turn()
    assert group.watchers[0].verdicts.keys() == {2}
    told = verdicts_of(group.worlds[0], group.links[0].status)
    assert told == {2: "node-2/0/102 (rank 2) died"}


def test_after_leaving_nothing_is_cut(group: Group) -> None:
    group.watchers[0].leave()
    group.watchers[1].announce_broken()
    group.turn()
    assert group.cuts[0] == 0
    assert group.cuts[2] >= 1


def test_a_verdict_on_a_world_is_not_carried_into_the_next(group: Group) -> None:
    group.turn()
    group.kill(2)
    group.turn()
    group.cuts = [0, 0, 0]
    following = World(0, 1, group.members[:2], None, "w1")
    watcher = group.watchers[0]
    watcher.leave()
    watcher.adopt(following)
    watcher.expect(following)
    assert (watcher.verdicts, watcher.reason) == ({}, None)
    group.watchers[1].leave()
    group.pass_time(1.0)
    assert group.links[1].status.startswith("!"), "the other is still in the world before"
    watcher.enter(following)
    group.pass_time(1.0)
    assert group.cuts == [0, 0, 0]
    assert group.links[0].status.startswith("-")


def test_a_stuck_training_thread_is_named(group: Group) -> None:
    group.note_step(0.1)
    group.watchers[0].do(Activity.REDUCE)
    group.watchers[1].do(Activity.REDUCE)
    group.watchers[2].do(Activity.COMPUTE)
    group.pass_time(STALL_TIMEOUT - INTERVAL)
    assert group.cuts == [0, 0, 0]
    group.pass_time(3 * INTERVAL)
    assert min(group.cuts) >= 1, "the stuck one is broken off too: it may come back, to find itself left out"
    for watcher in group.watchers:
        assert watcher.verdicts.keys() == {2}
        why = watcher.reason or ""
        assert why.startswith("node-2/0/102 (rank 2) kept the others waiting, and was stuck for "), why
    assert group.status(2) is Liveness.UNKNOWN


def test_before_its_first_step_a_training_thread_gets_longer(group: Group) -> None:
    group.watchers[0].do(Activity.REDUCE)
    for watcher in group.watchers[:2]:
        watcher.pace.note_step(0.1)
    group.watchers[1].do(Activity.REDUCE)
    group.pass_time(FIRST_SECONDS - INTERVAL)
    assert group.cuts == [0, 0, 0], "by its own account: the others have had theirs"
    group.pass_time(3 * INTERVAL)
    assert group.watchers[0].verdicts.keys() == {2}


def test_who_never_comes_into_a_world_that_was_formed_ahead_is_named(group: Group) -> None:
    """It stands still between the vote for the newcomers and their world; its watcher lives."""
    group.note_step(0.1)
    worlds = [replace(world, generation=1, uid="w1") for world in group.worlds]
    for watcher, world in zip(group.watchers[:2], worlds, strict=False):
        watcher.leave()
        watcher.adopt(world)
        watcher.expect(world)
        watcher.enter(world)
        watcher.do(Activity.REDUCE)
    group.pass_time(STALL_TIMEOUT - 1.0)
    assert group.cuts == [0, 0, 0]
    group.pass_time(2.0)
    assert [cuts > 0 for cuts in group.cuts] == [True, True, False]
    why = "uid-2 (rank 2) kept the others waiting, and did not come into their world"
    assert all(str(watcher.reason).endswith(why.partition(" ")[2]) for watcher in group.watchers[:2])


def test_who_gets_on_is_not_stuck(group: Group) -> None:
    """An evaluation has many blocks."""
    group.note_step(0.1)
    group.watchers[0].do(Activity.REDUCE)
    group.watchers[1].do(Activity.REDUCE)
    for _ in range(10):
        group.watchers[2].do(Activity.COMPUTE)
        group.pass_time(STALL_TIMEOUT - 1.0)
    assert group.cuts == [0, 0, 0]


def test_who_is_inside_of_the_collective_is_not_to_blame(group: Group) -> None:
    group.note_step(0.1)
    for rank, watcher in enumerate(group.watchers):
        watcher.do(Activity.REDUCE if rank else Activity.COMPUTE)
    group.pass_time(20 * STALL_TIMEOUT)
    assert {rank for watcher in group.watchers for rank in watcher.verdicts} == {0}


def test_what_takes_its_time_has_a_limit_of_its_own(group: Group) -> None:
    group.note_step(0.1)
    group.watchers[0].do(Activity.REDUCE)
    group.watchers[1].do(Activity.REDUCE)
    group.watchers[2].do(Activity.COMPUTE, 100.0)
    group.pass_time(99.0)
    assert group.cuts == [0, 0, 0]
    group.pass_time(2.0)
    assert group.watchers[0].verdicts.keys() == {2}


def test_at_work_is_who_may_still_take_its_time(group: Group) -> None:
    """A member that has not come to the agreement on the next world."""
    group.note_step(0.1)
    watcher, world = group.watchers[0], group.worlds[0]
    group.watchers[2].do(Activity.REDUCE)
    group.turn()
    group.kill(1)
    group.pass_time(2 * INTERVAL)
    assert not watcher.contacts.is_at_work(world, 1), "it is dead"
    assert not watcher.contacts.is_at_work(world, 2), "its collective is broken off: it comes"
    group.watchers[2].do(Activity.STEP)
    group.pass_time(2 * INTERVAL)
    assert watcher.contacts.is_at_work(world, 2), "it may compile as well"
    group.watchers[2].do(Activity.COMPUTE)
    group.pass_time(2 * INTERVAL)
    assert watcher.contacts.is_at_work(world, 2)
    group.pass_time(STALL_TIMEOUT)
    assert not watcher.contacts.is_at_work(world, 2)
    group.watchers[2].do(Activity.COMPUTE)
    group.pass_time(2 * INTERVAL)
    assert watcher.contacts.is_at_work(world, 2)
    group.alive.remove(2)
    group.pass_time(PEER_TIMEOUT + INTERVAL)
    assert not watcher.contacts.is_at_work(world, 2), "it is silent"
    group.alive.append(2)
    group.watchers[2].do(Activity.COMPUTE)
    group.pass_time(2 * INTERVAL)
    assert watcher.contacts.is_at_work(world, 2)
    group.watchers[2].leave()
    group.pass_time(2 * INTERVAL)
    assert not watcher.contacts.is_at_work(world, 2), "it has come as far as the agreement"


def test_headless_is_a_world_that_has_lost_its_rank_0(group: Group) -> None:
    group.turn()
    group.kill(2)
    group.pass_time(2 * INTERVAL)
    assert [watcher.headless for watcher in group.watchers[:2]] == [None, None]
    group.kill(0)
    group.pass_time(2 * INTERVAL)
    assert group.watchers[1].headless is group.worlds[1]
    group.watchers[1].leave()
    assert group.watchers[1].headless is group.worlds[1], "until there is another one"
    group.watchers[1].adopt(World(0, 1, group.members[1:2], None, "w1"))
    assert group.watchers[1].headless is None


def test_a_reduction_that_cannot_end_is_broken_off_without_blame(group: Group) -> None:
    group.note_step(0.1)
    for watcher in group.watchers:
        watcher.do(Activity.REDUCE)
    group.pass_time(PEER_TIMEOUT + 1.0 + 3 * INTERVAL)
    assert min(group.cuts) >= 1
    assert [watcher.verdicts for watcher in group.watchers] == [{}] * 3
    [reason] = {
        watcher.reason
        for watcher in group.watchers
        if watcher.reason != "another worker has broken it off, or has left"
    }
    assert reason.startswith("a collective has not ended in 4 s though all take part: two cannot reach each other, or")


def test_a_reduction_may_end_while_a_member_was_not_heard(group: Group) -> None:
    """Not all are known to reduce."""
    group.alive = [0, 1]
    group.note_step(0.01)
    for watcher in group.watchers[:2]:
        watcher.do(Activity.REDUCE)
    group.pass_time(PEER_TIMEOUT - INTERVAL)
    assert group.cuts == [0, 0, 0]


def test_who_waits_on_in_a_broken_world_is_ended(group: Group) -> None:
    """But not a worker that computes, or has left the world to agree on the next one."""
    group.note_step(0.1)
    for rank, watcher in enumerate(group.watchers):
        watcher.do(Activity.COMPUTE if rank == 0 else Activity.REDUCE)
    group.watchers[1].announce_broken()
    group.watchers[1].leave()
    group.pass_time(PEER_TIMEOUT)
    assert group.given_up == []
    group.pass_time(2.0)
    assert group.given_up
    assert "has not ended here" in group.given_up[0]
    assert group.watchers[2].reason is not None


def test_who_is_stuck_in_anything_else_is_ended_at_last(group: Group) -> None:
    group.watchers[0].do(Activity.FORM)
    for watcher in group.watchers[1:]:
        watcher.announce_broken()
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


@pytest.mark.parametrize(("is_killed", "why"), [(True, "died"), (False, "was silent for 2.")])
def test_a_loss_in_the_formation_is_seen(is_killed: bool, why: str) -> None:
    group = Group(3)
    for watcher, world in zip(group.watchers, group.worlds, strict=True):
        watcher.expect(world)
    group.turn()
    assert group.cuts == [0, 0, 0]
    if is_killed:
        group.kill(2)
        group.turn()
    else:
        group.alive.remove(2)
        group.pass_time(PEER_TIMEOUT + INTERVAL)
    assert min(group.cuts[:2]) >= 1
    for watcher in group.watchers[:2]:
        assert watcher.verdicts.keys() == {2}
        assert f"node-2/0/102 (rank 2) {why}" in watcher.verdicts[2]
        assert watcher.verdicts[2].endswith("before its first step")


def test_a_frozen_member_that_wakes_up_blames_nobody_else(group: Group) -> None:
    group.turn()
    group.alive = [0, 1]
    group.pass_time(2 * PEER_TIMEOUT)
    group.alive = [0, 1, 2]
    group.turn()
    assert group.watchers[2].verdicts.keys() == {2}, "it learns that it was given up"
    assert "node-2/0/102 (rank 2) was silent" in (group.watchers[2].reason or "")
    assert group.cuts[2] >= 1


def test_a_world_of_one_is_never_broken() -> None:
    group = Group(1)
    group.enter()
    group.pass_time(60)
    group.watchers[0].announce_broken()
    group.pass_time(60)
    assert group.cuts == [0]


def test_a_spare_sees_the_worker_that_it_waits_for_and_no_other_spare() -> None:
    group = Group(3, max_world_size=1)
    group.enter()
    group.note_step(0.1)
    group.watchers[0].do(Activity.COMPUTE)
    group.kill(2)
    group.pass_time(60)
    assert group.cuts == [0, 0, 0], "nobody's step needs a spare, and a spare knows not how long one takes"
    group.kill(0)
    group.turn()
    assert group.cuts[1] == 1
    assert group.watchers[1].verdicts.keys() == {0}


# --- a large world: each member pings two others ----------------------------------------------------------------------


@pytest.fixture
def ring() -> Group:
    group = Group(8, topology=Topology(dense=2, degree=2))
    group.enter()
    group.note_step(0.1)
    return group


def test_in_a_ring_each_member_pings_two(ring: Group) -> None:
    assert [sorted(watcher.contacts.watched) for watcher in ring.watchers][:3] == [[1, 7], [0, 2], [1, 3]]
    ring.pass_time(60)
    assert ring.cuts == [0] * 8


def test_a_death_is_passed_on(ring: Group) -> None:
    ring.turn()
    ring.kill(4)
    for _ in range(4):
        ring.turn()
    living = [watcher for rank, watcher in enumerate(ring.watchers) if rank != 4]
    assert all(ring.cuts[rank] for rank in ring.alive)
    assert {watcher.reason for watcher in living} == {"node-4/0/104 (rank 4) died"}
    assert all(watcher.verdicts.keys() == {4} for watcher in living)
    assert ring.status(4, by=3) is Liveness.DEAD, "it has pinged it"
    assert ring.status(4, by=0) is Liveness.UNKNOWN, "it has not"
    assert ring.watchers[0].contacts.witnesses(ring.worlds[0], 4) == (), "it does not see for itself that it is gone"
    ring.watchers[0].contacts.watch_too([4])
    ring.ping()
    assert ring.status(4, by=0) is Liveness.UNKNOWN
    assert ring.watchers[0].contacts.witnesses(ring.worlds[0], 4) == (3, 5)


def test_all_that_are_out_are_passed_on_also_while_the_next_world_is_agreed_on(ring: Group) -> None:
    ring.turn()
    ring.kill(4)
    ring.pass_time(1.0)
    for rank in ring.alive:
        ring.watchers[rank].leave()
    ring.kill(6)
    ring.pass_time(1.0)
    for rank in (0, 1, 2):
        assert ring.watchers[rank].verdicts.keys() == {4, 6}
    ring.watchers[0].forgive()
    ring.pass_time(1.0)
    assert ring.watchers[0].verdicts == {}, "nothing but silence counts from now on"


def test_who_is_silent_to_one_and_heard_by_another_is_alive(ring: Group) -> None:
    ring.cut_off = {(3, 4), (4, 3)}
    ring.pass_time(PEER_TIMEOUT + 2.0)
    assert ring.watchers[0].verdicts.keys() == {3, 4}, "each blames the other"
    assert ring.status(4) is Liveness.UNKNOWN
    ring.watchers[0].contacts.watch_too([4])
    ring.ping()
    assert ring.status(4) is Liveness.ALIVE
    assert ring.watchers[3].contacts.lost_neighbours(ring.worlds[3]) == (4,)
    assert ring.watchers[0].contacts.lost_neighbours(ring.worlds[0]) == ()


def test_a_stuck_training_thread_is_named_by_its_neighbours(ring: Group) -> None:
    for rank, watcher in enumerate(ring.watchers):
        watcher.do(Activity.COMPUTE if rank == 5 else Activity.REDUCE)
    ring.pass_time(STALL_TIMEOUT - INTERVAL)
    assert ring.cuts == [0] * 8
    ring.pass_time(6 * INTERVAL)
    assert min(ring.cuts) >= 1
    assert all(watcher.verdicts.keys() == {5} for watcher in ring.watchers)


def test_a_reduction_goes_on_while_somebody_far_away_is_still_to_come(ring: Group) -> None:
    """Neighbours of its have waited as long as anybody; it may restore its state, and is not judged."""
    for rank, watcher in enumerate(ring.watchers):
        watcher.do(Activity.FORM if rank == 5 else Activity.REDUCE)
    ring.pass_time(60)
    assert ring.cuts == [0] * 8
    ring.watchers[5].do(Activity.REDUCE)
    ring.pass_time(PEER_TIMEOUT)
    assert ring.cuts == [0] * 8
    ring.pass_time(1.0 + 2 * INTERVAL * (ring.watchers[0].contacts.topology.hops(8) + 4))
    assert min(ring.cuts) >= 1, "then it cannot end"
    assert [watcher.verdicts for watcher in ring.watchers] == [{}] * 8


def test_a_reduction_goes_on_while_somebody_far_away_may_be_computing(ring: Group) -> None:
    """In a pass on a GPU, which compiles anew, for as long as that may take by its own word."""
    for rank, watcher in enumerate(ring.watchers):
        if rank == 5:
            watcher.do(Activity.STEP, 60.0)
        else:
            watcher.do(Activity.REDUCE)
    ring.pass_time(60)
    assert ring.cuts == [0] * 8
    ring.pass_time(1.0 + 2 * INTERVAL * (ring.watchers[0].contacts.topology.hops(8) + 4))
    assert min(ring.cuts) >= 1, "then it cannot end"
    assert [watcher.verdicts for watcher in ring.watchers] == [{}] * 8


# --- what is known of who has not come --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds_late", "status"),
    [
        (0.0, Liveness.DEAD),
        (IN_TIME * PEER_TIMEOUT, Liveness.DEAD),
        (IN_TIME * PEER_TIMEOUT + INTERVAL, Liveness.UNKNOWN),
    ],
)
def test_a_death_is_proven_only_in_time(group: Group, seconds_late: float, status: Liveness) -> None:
    """Later, the dead one may have gone on in a world that this member has not seen."""
    group.turn()
    group.clock.now += seconds_late
    group.kill(1)
    group.ping()
    assert group.status(1) is status
    group.clock.now += 100 * PEER_TIMEOUT
    assert group.status(1) is status, "what counts is when it was found"


def test_a_refusal_of_who_never_answered_in_this_world_proves_nothing(group: Group) -> None:
    group.kill(1)
    group.turn()
    assert group.watchers[0].contacts.is_refused(group.members[1])
    assert group.status(1) is Liveness.UNKNOWN


def test_a_new_world_starts_no_age(group: Group) -> None:
    group.turn()
    following = World(0, 1, group.members, None, "w1")
    group.watchers[0].adopt(following)
    group.kill(1)
    group.turn()
    assert group.status(1) is Liveness.UNKNOWN, "it was heard in the world before"
    assert group.status(1, by=2) is Liveness.DEAD, "another is still in it"


def test_who_is_patient_no_longer_gives_up_the_living(group: Group) -> None:
    group.turn()
    assert group.status(1) is Liveness.ALIVE
    assert group.status(1, time_is_up=True) is Liveness.UNKNOWN
    group.kill(1)
    group.ping()
    assert group.status(1) is Liveness.DEAD
    assert group.status(1, time_is_up=True) is Liveness.DEAD


def test_of_who_is_not_watched_nothing_is_known(group: Group) -> None:
    stranger = make_member(7)
    assert group.watchers[0].contacts.status(stranger, None, time_is_up=False) is Liveness.ALIVE
    assert group.watchers[0].contacts.status(stranger, None, time_is_up=True) is Liveness.UNKNOWN
    assert not group.watchers[0].contacts.is_refused(stranger)
    assert group.watchers[0].contacts.age(stranger) == 0.0


def test_only_silent_members_are_unreachable(group: Group) -> None:
    group.turn()
    group.cut_off = {(0, 2)}
    group.pass_time(3 * INTERVAL + 0.5)
    assert group.watchers[0].contacts.unreachable(group.worlds[0]) == ()
    group.pass_time(INTERVAL)
    assert group.watchers[0].contacts.unreachable(group.worlds[0]) == (2,)
    assert group.watchers[1].contacts.unreachable(group.worlds[1]) == ()


# --- background tasks, and a store that all need ----------------------------------------------------------------------


def test_background_tasks_are_done_while_there_is_a_world_and_without_one(group: Group) -> None:
    group.pass_time(2.0)
    assert group.worlds[0] in group.tended
    assert group.worlds[1] in group.tended
    assert 3 * 3 <= len(group.tended) <= 3 * 5
    group.watchers[0].leave()
    group.tended.clear()
    group.pass_time(1.0)
    assert None in group.tended


# --- the thread -------------------------------------------------------------------------------------------------------


def test_the_thread_answers_tends_and_stops() -> None:
    links, has_tended = Links("127.0.0.1", "uid-0", INTERVAL, PEER_TIMEOUT), threading.Event()
    watcher = Watcher(links, PEER_TIMEOUT, lambda: None, lambda _world: has_tended.set())
    before = threading.active_count()
    watcher.thread.start()
    assert has_tended.wait(DEADLINE)
    watcher.adopt(World(0, 0, (make_member(0), make_member(1, ("127.0.0.1", 1))), None, "w0"))
    with socket.create_connection(links.address, DEADLINE) as caller:
        caller.sendall(b"P uid-1 w0 1 -\nP uid-7 w0 1 -\n")
        lines = caller.makefile("r")
        assert lines.readline().startswith('A uid-0 w0 1 -{} [-1, "form", ')
        assert lines.readline() == "N uid-0\n"
        lines.close()
    for _ in range(300):
        assert probe(links.address) is Probe.ACCEPTED
    watcher.thread.stop()
    assert threading.active_count() == before
    assert probe(links.address) is Probe.REFUSED


def test_a_last_word_is_sent_before_the_thread_ends() -> None:
    """A worker reports that it leaves, and ends at once. Without the report the others would count it as dead."""
    is_in_turn, is_woken, sent = threading.Event(), threading.Event(), []
    told = ["trains"]

    def turn(_seconds: float) -> bool:
        sent.append(told[-1])
        is_in_turn.set()
        assert is_woken.wait(DEADLINE)
        return False

    links: Any = SimpleNamespace(turn=turn, wake=is_woken.set, close=lambda: None)
    thread = WatcherThread(links, lambda: None, 60.0, DEADLINE, time.monotonic)
    thread.start()
    assert is_in_turn.wait(DEADLINE)
    told.append("leaves")
    thread.stop()
    thread.check()
    assert sent == ["trains", "leaves"]


def test_a_watcher_that_never_found_its_job_ends() -> None:
    links = FakeLinks(Clock())
    Watcher(links, PEER_TIMEOUT, lambda: None, lambda _world: None).thread.stop()
    assert links.is_closed


def test_what_ends_the_thread_is_raised_in_the_training_thread() -> None:
    """Else this worker would silently look dead to the others."""

    def tend(_world: World | None) -> None:
        raise ValueError("a bug")

    links = Links("127.0.0.1", "uid-0", INTERVAL, PEER_TIMEOUT)
    watcher = Watcher(links, PEER_TIMEOUT, lambda: None, tend)
    watcher.thread.start()
    watcher.thread._thread.join(DEADLINE)
    with pytest.raises(ValueError, match="a bug"):
        watcher.thread.check()
    with pytest.raises(ValueError, match="a bug"):
        watcher.do(Activity.COMPUTE)
    watcher.thread.stop()
    assert probe(links.address) is Probe.REFUSED
