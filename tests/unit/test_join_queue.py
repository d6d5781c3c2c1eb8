"""The nodes in the join queue, and which of them are admitted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.finder import Size
from elastic_train.protocol.join_queue import (
    CHECK_SECONDS,
    QUEUE_AGAIN_SECONDS,
    UNCALLED_SECONDS,
    Entrance,
    Waiting,
    by_newest,
    is_start_due,
    ready_nodes,
    without_nodes_of,
)
from elastic_train.protocol.launcher import Launcher
from elastic_train.protocol.probes import Probe
from elastic_train.protocol.store import Clients
from elastic_train.world import Address, Member
from tests.memory_store import MemoryClient, MemoryStore


def member(node: str, local_rank: int = 0, newest: tuple[int, int] | None = None) -> Member:
    return Member(
        host=node,
        local_rank=local_rank,
        pid=100 + local_rank,
        agent_pid=1,
        address=("10.0.0.1", 4000 + local_rank),
        directory_id="d",
        backend="gloo",
        max_generation=None,
        agreement={"--seed": 0},
        store=("10.0.0.1", 5000),
        uid=f"{node}{local_rank}",
        newest=newest,
    )


def waiting(node: str, local_rank: int = 0, size: int = 1) -> Waiting:
    return Waiting(member(node, local_rank), size)


@pytest.mark.parametrize("one", [waiting("a"), waiting("a", 1, 2), Waiting(member("a", 0, (3, 40)), 1, order=7)])
def test_what_is_written_is_read(one: Waiting) -> None:
    assert Waiting.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    "text", ["", "null", "{}", "[1, 2]", '[{"host": "a"}, 1, 0]', '[{"of": "the future"}, 1, 0, 2]']
)
def test_what_another_version_has_written_is_nobody(text: str) -> None:
    own = MemoryStore()
    own.add("queue/count", 2)
    own.put("queue/1", text)
    own.put("queue/2", waiting("a").to_json())
    assert entrance_of(own, lambda: 0.0).queue() == [waiting("a")]
    assert sorted(own.values) == ["queue/count"]
    later = {"member": {**vars(member("a")), "colour": "red"}, "local_world_size": 1, "order": 0}
    assert Waiting.from_json(json.dumps(later)) == waiting("a"), "it is refused for its version, by name"
    del later["member"]["uid"]  # type: ignore[attr-defined]
    assert Waiting.from_json(json.dumps(later)) is None


ANY_SIZE = Size(1, 4, 0.0)


def entrance_of(
    own: MemoryStore,
    clock: Callable[[], float],
    finder: Any = None,
    size: Size = ANY_SIZE,
    refused: Callable[[Sequence[Member]], list[Member]] = lambda _members: [],
    begin: Callable[[tuple[Member, ...]], None] = lambda _members: None,
    **knowledge: Any,
) -> Entrance:
    return Entrance(
        Clients(own, "host", lambda _address: own),
        ("10.0.0.1", 5000),
        finder,
        size,
        run_id="run",
        refused=refused,
        begin=begin,
        clock=clock,
        **{"probe_all": nobody_listens, **knowledge},
    )


def nobody_listens(addresses: Sequence[Address]) -> list[Probe]:
    return [Probe.REFUSED] * len(addresses)


def in_a_fixed_world(*orders: int, gone: Sequence[int] = ()) -> list[list[str]]:
    """The worlds that rank 0 of three has begun when those of `orders` have come after it, one after the other, and
    those at the places `gone` of these are dead."""
    own, now, begun = MemoryStore(), [100.0], list[list[str]]()
    dead = {f"w{place}-0" for place in gone}
    entrance = entrance_of(
        own,
        lambda: now[0],
        Launcher(None, rank=0, start="restart-0"),
        Size(1, 3, 0.0, fixed=3),
        lambda members: [one for one in members if one.uid in dead],
        lambda members: begun.append([one.uid for one in members]),
    )
    mine = Waiting(member("first"), 1, order=0)
    entrance.look(mine)
    for place, order in enumerate(orders):
        number = own.add("queue/count", 1)
        own.put(f"queue/{number}", Waiting(replace(member("w"), uid=f"w{place}-0"), 1, order).to_json())
        now[0] += CHECK_SECONDS
        for _ in range(2):
            entrance.look(mine)
    return begun


def test_a_fixed_world_begins_with_each_of_its_ranks_once() -> None:
    assert in_a_fixed_world(1) == []
    assert in_a_fixed_world(2, 1) == [["first0", "w1-0", "w0-0"]]
    assert in_a_fixed_world(1, 1) == [], "two workers of one rank"
    assert in_a_fixed_world(1, 0) == []
    assert in_a_fixed_world(1, 7) == [], "another world's"
    assert in_a_fixed_world(1, 1, 2) == [], "one of the two is a stranger, and nobody knows which"
    assert in_a_fixed_world(1, 1, 2, gone=[0]) == [["first0", "w1-0", "w2-0"]], "it was started again"


def test_who_was_to_begin_begins_nothing_beside_a_job_that_cannot_be_reached() -> None:
    """Its sign has come since, as in etcd."""
    own, now, begun = MemoryStore(), [100.0], list[tuple[Member, ...]]()
    finder = SimpleNamespace(
        is_beginner=lambda: not signs, addresses=lambda: signs, show=lambda *_arguments: None, describe=lambda: "etcd",
        called_by=tuple,
    )  # fmt: skip
    signs: list[tuple[str, int]] = []
    entrance = entrance_of(own, lambda: now[0], finder, begin=begun.append)
    assert entrance.look(Waiting(member("host"), 1)) == "waiting for nodes: 1 of at least 1 are ready"
    signs.append(("10.0.0.9", 5000))
    entrance._clients._connect = unreachable
    for _ in range(20):
        now[0] += CHECK_SECONDS
        assert entrance.look(Waiting(member("host"), 1)) == "waiting for the job at etcd"
    assert begun == []
    signs.clear()
    for _ in range(20):
        now[0] += CHECK_SECONDS
        entrance.look(Waiting(member("host"), 1))
    assert begun[0] == (member("host"),)


A, B = ("10.0.0.8", 5000), ("10.0.0.9", 5000)
MAY_RUN = "waiting for a sign of the job that this node knows of: it may train on"


class Knowing:
    """A node at the first endpoint that may know of a job, and what a connection to its members' stores tells."""

    def __init__(self, *knows: Address, silence: float = math.inf) -> None:
        self.now, self.begun, self.called_by = 100.0, list[tuple[Member, ...]](), list[Address]()
        self.stores = {A: MemoryStore(), B: MemoryStore()}
        for store in self.stores.values():
            store.put("run_id", "run")
        self.probes = {A: Probe.REFUSED, B: Probe.REFUSED}
        finder = SimpleNamespace(
            is_beginner=lambda: True, addresses=tuple, show=lambda *_arguments: None, describe=lambda: "the endpoints",
            called_by=lambda: self.called_by,
        )  # fmt: skip
        self.entrance = entrance_of(
            MemoryStore(), lambda: self.now, finder, replace(ANY_SIZE, silence=silence), begin=self.begun.append,
            knows=knows, probe_all=lambda addresses: [self.probes[one] for one in addresses],
        )  # fmt: skip
        self.entrance._clients._connect = self.stores.__getitem__

    def looks(self, seconds: float) -> str:
        """For so long; what it says last."""
        until, said = self.now + seconds, ""
        while self.now < until:
            self.now += CHECK_SECONDS
            said = self.entrance.look(Waiting(member("host"), 1))
        return said


def test_who_knows_of_a_job_begins_when_nobody_listens_at_any_of_its_stores() -> None:
    node = Knowing(A, B)
    node.probes[B] = Probe.SILENT
    assert node.looks(1000.0) == MAY_RUN
    assert node.begun == [], "one of them may train on"
    node.probes[B] = Probe.REFUSED
    node.looks(2 * CHECK_SECONDS)
    assert node.begun


def test_who_knows_of_no_job_begins_when_none_has_called() -> None:
    node = Knowing()
    node.looks(UNCALLED_SECONDS)
    assert not node.begun
    node.looks(2 * CHECK_SECONDS)
    assert node.begun


def test_silence_counts_after_the_time_that_was_given_for_it() -> None:
    node = Knowing(A, B, silence=60.0)
    node.probes[A] = Probe.SILENT
    node.looks(59.0)
    assert not node.begun
    node.looks(2.0)
    assert node.begun


def test_a_member_that_answers_trains_on_for_however_long_others_are_silent() -> None:
    """This node cannot reach rank 0, whose queue that member names, and so does not get in."""
    node = Knowing(A, B, silence=60.0)
    node.probes = {A: Probe.SILENT, B: Probe.ACCEPTED}
    node.stores[B].put("host", '["x", 1]')
    assert node.looks(200.0) == MAY_RUN
    node.probes[B] = Probe.SILENT
    assert node.looks(50.0) == MAY_RUN, "that long after it was heard last"
    assert not node.begun
    node.looks(70.0)
    assert node.begun


def test_a_call_that_cannot_be_read_may_be_there() -> None:
    node = Knowing()

    def unread() -> list[Address]:
        raise StoreUnreachable("busy")

    node.entrance._finder.called_by = unread  # type: ignore[method-assign]
    node.looks(10.0)
    assert not node.begun
    node.entrance._finder.called_by = list  # type: ignore[method-assign]
    node.looks(2 * CHECK_SECONDS)
    assert node.begun


@pytest.mark.parametrize(
    ("host", "run_id", "may_run"), [('["x", 1]', "run", True), ("", "run", False), ('["x", 1]', "other", False)]
)
def test_who_listens_there_may_be_in_no_world_any_more(host: str, run_id: str, may_run: bool) -> None:
    """Or be another job's process, which has got the port."""
    node = Knowing(A, B)
    node.probes[A] = Probe.ACCEPTED
    node.stores[A].put("host", host)
    node.stores[A].put("run_id", run_id)
    node.looks(10.0)
    assert bool(node.begun) is not may_run


def test_who_listens_there_and_does_not_answer_may_train_on() -> None:
    node = Knowing(A)
    node.probes[A] = Probe.ACCEPTED
    node.entrance._clients._connect = unreachable
    assert node.looks(100.0) == MAY_RUN
    assert not node.begun


def test_a_call_that_comes_as_it_is_about_to_begin_is_heard() -> None:
    """It was not there yet when the endpoints were read, which one of them had made slow."""
    node = Knowing()
    node.looks(UNCALLED_SECONDS)
    node.called_by.append(A)
    node.probes[A] = Probe.SILENT
    assert node.looks(10.0) == MAY_RUN
    assert not node.begun
    node.probes[A] = Probe.REFUSED
    node.looks(2 * CHECK_SECONDS)
    assert node.begun, "who had called is dead"


def unreachable(_address: tuple[str, int]) -> MemoryStore:
    raise StoreUnreachable("gone")


def test_a_node_is_ready_when_all_its_workers_are() -> None:
    queue = [waiting("a", 0, 2), waiting("b", 1, 2), waiting("b", 0, 2), waiting("c")]
    assert ready_nodes(queue, ()) == [(member("b", 0), member("b", 1)), (member("c"),)]


def test_nodes_stand_in_the_order_in_which_their_first_worker_came_and_workers_by_local_rank() -> None:
    workers = [waiting("a", 0, 2), waiting("a", 1, 2), waiting("b", 0, 2), waiting("b", 1, 2)]
    for queue in permutations(workers):
        found = ready_nodes(queue, ())
        assert [node[0].host for node in found] == list(dict.fromkeys(one.member.host for one in queue))
        assert all([one.local_rank for one in node] == [0, 1] for node in found)


def test_who_stands_there_twice_is_one() -> None:
    assert ready_nodes([waiting("a", 0, 2), waiting("a", 0, 2)], ()) == []


def test_who_is_in_the_world_already_is_not_admitted_again() -> None:
    assert ready_nodes([waiting("a"), waiting("b")], [member("a")]) == [(member("b"),)]


def test_a_host_that_came_back_is_somebody_else() -> None:
    earlier = replace(member("a"), uid="a-of-an-earlier-process")
    assert ready_nodes([waiting("a")], [earlier]) == [(member("a"),)]


def test_who_was_left_out_comes_back_to_the_others_of_its_node() -> None:
    back = replace(waiting("a", 1, 2), member=replace(member("a", 1), uid="another"))
    assert ready_nodes([back], ()) == []
    assert ready_nodes([back], [member("a", 0), member("b")]) == [(back.member,)]
    assert ready_nodes([back], [member("b")]) == []


def test_a_node_takes_part_with_all_of_its_workers_or_not_at_all() -> None:
    members = (member("a", 0), member("a", 1), member("b", 0), member("b", 1))
    assert without_nodes_of([member("a", 1)], members) == members[2:]
    assert without_nodes_of([], members) == members
    assert without_nodes_of([member("c")], members) == members
    assert without_nodes_of([member("a"), member("b")], members) == ()


def test_who_sees_the_furthest_snapshot_leads_and_the_others_keep_their_order() -> None:
    old, none = (member("a", 0, (1, 90)),), (member("b"),)
    newest = (member("c", 0), member("c", 1, (2, 100)))
    parted = (member("e", 0, (7, 80)),)
    other = (member("d"),)
    assert by_newest([parted, old, none, newest, other]) == [newest, old, parted, none, other]
    assert by_newest([none, other]) == [none, other]
    assert by_newest([]) == []


@pytest.mark.parametrize(
    ("num_ready", "seconds", "is_due"),
    [
        (0, 99.0, False),
        (1, 99.0, False),
        (2, 1.9, False),
        (2, 2.0, True),
        (3, 2.5, True),
        (4, 0.0, True),
        (5, 0.0, True),
    ],
)
def test_the_first_world_starts_when_all_or_enough_are_there(num_ready: int, seconds: float, is_due: bool) -> None:
    assert is_start_due(num_ready, min_nodes=2, max_nodes=4, seconds_enough=seconds, last_call=2.0) is is_due


def test_one_that_was_cut_off_while_it_queued_keeps_no_other_out() -> None:
    """It has drawn its number, and what it was to write there was lost."""
    own, now = MemoryStore(), [100.0]
    entrance = entrance_of(own, lambda: now[0])

    def write(number: int, one: Waiting) -> None:
        own.put(f"queue/{number}", one.to_json())

    for _ in range(3):
        own.add("queue/count", 1)
    write(1, waiting("a"))
    write(3, waiting("c"))
    assert [one.member.host for one in entrance.queue()] == ["a", "c"]
    assert sorted(own.values) == ["queue/count"], "what was read is deleted"
    write(2, waiting("b"))
    assert [one.member.host for one in entrance.queue()] == ["a", "c", "b"], "it was only slow"
    own.add("queue/count", 1)
    entrance.queue()
    now[0] += QUEUE_AGAIN_SECONDS + 0.1
    entrance.queue()
    write(4, waiting("d"))
    assert len(entrance.queue()) == 3, "nobody looks there any more: it has queued again"


def test_a_host_that_was_silent_for_a_moment_is_found_again_through_another_member() -> None:
    """The newcomer knows only that other member, as from a list in its run directory that is older than the host."""
    known, host, now, silence = MemoryStore(), MemoryStore(), [0.0], [False]
    for store in (known, host):
        store.values |= {"run_id": "run", "host": json.dumps(B), "begun": "w"}
    clients = {A: lambda: MemoryClient(known), B: lambda: MemoryClient(host, lambda: silence[0])}
    finder = SimpleNamespace(addresses=lambda: [A], is_beginner=lambda: False, describe=lambda: "A")
    entrance = entrance_of(MemoryStore(), lambda: now[0], finder)
    entrance._clients._connect = lambda address: clients[address]()
    said = []
    for silence[0] in (False, True, False, False):
        now[0] += CHECK_SECONDS
        said.append(entrance.look(waiting("a")))
    assert said[:2] == ["waiting to be admitted", "waiting for the job at A"]
    assert said[-1] == "waiting to be admitted"
