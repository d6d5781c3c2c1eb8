"""Which members ping which: few, in both directions, on other nodes, with short ways between any two."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection

import pytest

from elastic_train.protocol.neighbours import Topology, by_turns

SPARSE = Topology()
RING = Topology(dense=3, degree=2)
SIZES = [10, 11, 16, 31, 64, 100, 257, 512]


def graph(topology: Topology, nodes: list[int], num_workers: int | None = None) -> list[tuple[int, ...]]:
    workers = len(nodes) if num_workers is None else num_workers
    return [topology.neighbours(nodes, workers, rank) for rank in range(len(nodes))]


def distances_from(edges: list[tuple[int, ...]], start: int, gone: Collection[int] = ()) -> dict[int, int]:
    found, queue = {start: 0}, deque([start])
    while queue:
        rank = queue.popleft()
        for other in edges[rank]:
            if other not in found and other not in gone:
                found[other] = found[rank] + 1
                queue.append(other)
    return found


@pytest.mark.parametrize("size", range(1, 10))
def test_in_a_small_world_each_pings_every_other(size: int) -> None:
    for rank, others in enumerate(graph(SPARSE, list(range(size)))):
        assert others == tuple(other for other in range(size) if other != rank)


@pytest.mark.parametrize("topology", [SPARSE, RING])
@pytest.mark.parametrize("size", SIZES)
def test_a_member_pings_no_more_in_a_larger_world(topology: Topology, size: int) -> None:
    edges = graph(topology, list(range(size)))
    assert {len(others) for others in edges} == {topology.degree}
    for rank, others in enumerate(edges):
        assert rank not in others
        assert all(rank in edges[other] for other in others), "both ways"


@pytest.mark.parametrize("topology", [SPARSE, RING])
@pytest.mark.parametrize("size", SIZES)
def test_everybody_is_near(topology: Topology, size: int) -> None:
    reached = distances_from(graph(topology, list(range(size))), 0)
    assert len(reached) == size
    assert max(reached.values()) <= topology.hops(size)


def test_ten_thousand_are_near() -> None:
    assert SPARSE.hops(10_000) <= 21
    assert len(SPARSE.neighbours(range(10_000), 10_000, 5)) == 8


@pytest.mark.parametrize("size", SIZES)
def test_it_holds_together_whichever_few_are_gone(size: int) -> None:
    edges, chance = graph(SPARSE, list(range(size))), random.Random(size)
    victims = [chance.sample(range(1, size), 5) for _ in range(50)] + [list(edges[size // 2][:5])]
    for gone in victims:
        start = next(rank for rank in range(size) if rank not in gone)
        assert len(distances_from(edges, start, gone)) == size - len(gone), gone


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("num_nodes", [3, 8, 33, 64])
def test_a_node_is_watched_from_others(num_nodes: int, workers: int) -> None:
    nodes = [node for node in range(num_nodes) for _ in range(workers)]
    if len(nodes) <= SPARSE.dense:
        return
    for rank, others in enumerate(graph(SPARSE, nodes)):
        assert sum(nodes[other] != nodes[rank] for other in others) >= 4
    edges = graph(SPARSE, nodes)
    gone = range(workers)
    assert len(distances_from(edges, workers, gone)) == len(nodes) - workers, "without the first node"


@pytest.mark.parametrize(("size", "num_workers"), [(12, 10), (12, 2), (40, 20), (11, 1), (64, 63)])
def test_a_spare_watches_workers_and_no_other_spare(size: int, num_workers: int) -> None:
    edges = graph(SPARSE, list(range(size)), num_workers)
    for rank, others in enumerate(edges):
        assert all(rank in edges[other] for other in others)
        if rank >= num_workers:
            assert others
            assert all(other < num_workers for other in others)
    assert len(distances_from(edges, 0)) == size


def test_by_turns() -> None:
    assert by_turns(["a", "a", "a", "b", "b", "c"]) == [0, 3, 5, 1, 4, 2]
