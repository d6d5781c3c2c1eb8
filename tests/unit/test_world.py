"""World: what a member knows of its place among the others, by definition over every way to share nodes."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic.barriers import Surroundings
from elastic_train.protocol.agreement import Decision
from elastic_train.world import Member, World, from_json, to_json
from tests.bare_membership import bare_membership


def member(node: int, directory: int, local_rank: int = 0) -> Member:
    return Member(
        host=f"node-{node}",
        local_rank=local_rank,
        pid=100 + local_rank,
        agent_pid=1,
        address=("127.0.0.1", 1),
        directory_id=f"directory-{directory}",
        backend="gloo",
        max_generation=None,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_node_and_each_directory_has_exactly_one_first(size: int) -> None:
    for nodes in itertools.product(range(size), repeat=size):
        for directories in itertools.product(range(2), repeat=size):
            members = tuple(member(node, directory) for node, directory in zip(nodes, directories, strict=True))
            worlds = [World(rank, 0, members) for rank in range(size)]
            assert [world.is_first_of_node for world in worlds] == [nodes.index(nodes[r]) == r for r in range(size)]
            leaders = [world.rank for world in worlds if world.is_directory_leader]
            assert leaders == sorted(directories.index(directory) for directory in set(directories))
            assert {world.num_nodes for world in worlds} == {len(set(nodes))}
            assert {world.world_size for world in worlds} == {size}


def test_two_agents_on_one_host_are_two_nodes() -> None:
    one, other = member(0, 0), Member(**{**vars(member(0, 0)), "agent_pid": 2})
    world = World(1, 0, (one, other))
    assert world.num_nodes == 2
    assert world.is_first_of_node
    assert not world.is_directory_leader


def test_all_members_wait_for_as_many_nodes_as_any_of_them_was_told() -> None:
    members = tuple(Member(**{**vars(member(node, 0)), "min_nodes": least}) for node, least in ((0, 1), (1, 3), (2, 2)))
    assert {World(rank, 0, members).min_nodes for rank in range(3)} == {3}


def test_a_world_knows_itself_by_rank() -> None:
    world = World(1, 5, (member(0, 0, local_rank=0), member(0, 0, local_rank=1)))
    assert world.me is world.members[1]
    assert world.local_rank == 1
    assert world.me.name == "node-0/1/101"
    assert world.me.node == ("node-0", 1, "")


def test_a_world_cannot_be_changed() -> None:
    world = World(0, 0, (member(0, 0),))
    with pytest.raises(FrozenInstanceError):
        world.rank = 1  # type: ignore[misc]


def test_members_survive_json_and_pass_unknown_fields_over() -> None:
    """Of another version, say: it is refused for that, by name."""
    someone = replace(member(1, 0), newest=(3, 40), agreement={"--seed": 1})
    assert from_json(Member, to_json(someone)) == someone
    assert from_json(Member, to_json(someone)[:-1] + ',"surprise":1}') == someone
    with pytest.raises(KeyError):
        from_json(Member, '{"host":"a"}')


def test_the_first_world_of_a_thousand_workers_fits_into_a_request_of_etcd() -> None:
    """1.5 MiB. Each brings the text that must be equal for all, of more than 1,000 bytes."""
    flags = {f"--flag-{number}": "value" for number in range(50)}
    many = tuple(
        replace(
            member(number, number),
            host=f"node-{number}.trainers.cluster.local",
            address=("10.100.200.100", 40000),
            store=("10.100.200.100", 40001),
            directory_id="d" * 40,
            backend="cpu:gloo,cuda:nccl",
            gpu=f"GPU-{'a' * 36}",
            uid=f"uid{number:09}",
            node_id="n" * 12,
            agreement=flags,
        )
        for number in range(1024)
    )
    decision = Decision(0, "first", ranks=(), new=many)
    assert len(decision.to_json()) < 1_000_000
    assert Decision.from_json(decision.to_json()) == decision
    assert many[0].agreement == flags, "the worker itself keeps its own"


def test_the_same_members_that_have_failed_to_form_a_group_may_take_longer_the_next_time() -> None:
    members = tuple(replace(member(number, number), uid=f"uid{number}", store=("h", number)) for number in range(3))
    place = SimpleNamespace(has_moved=lambda _uid: False)
    job: Any = SimpleNamespace(facts=SimpleNamespace(known={}), place=place, world=None)
    job.enter = lambda world, *_: setattr(job, "world", world)
    watcher, found = SimpleNamespace(adopt=lambda _world: None), []
    membership = bare_membership(job, members[0], watcher, surroundings=Surroundings())
    for inside, steps_then in [(3, False), (3, False), (3, False), (2, False), (2, True), (2, False)]:
        membership._enter(World(0, len(found), members[:inside]), {}, None)
        found.append(round(membership.forming_timeout.total_seconds()))
        if steps_then:
            membership.vote()
    assert found == [1, 2, 4, 1, 2, 1], "until one is lost, or a group has stood"
