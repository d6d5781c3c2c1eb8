"""Who pings whom: everybody in a small world, a fixed number of others in a large one. Pure arithmetic.

A large world is a circulant graph (Boesch and Wang, "Reliable circulant networks with minimum transmission delay",
1985): members stand in a ring, and each pings those at some fixed distances, both ways. So what a member costs does not
grow with the world; what one of them finds out reaches all others within `hops`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """How many others a member pings."""

    dense: int = 9
    """up to so many workers each pings every other"""
    degree: int = 8
    """of a worker in a larger world; even"""
    spare_degree: int = 4
    """workers that a spare of a larger world pings; they ping it too"""

    def is_dense(self, num_members: int) -> bool:
        return num_members <= self.dense

    def neighbours(self, nodes: Sequence[Hashable], num_workers: int, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` pings. Whom a member pings, that one pings back.

        Args:
            nodes: of every member, by rank: neighbours in the ring are of other nodes, for a node may die as a whole.
            num_workers: those of the lowest ranks, who train; the others are spares.
        """
        num_members = len(nodes)
        if self.is_dense(num_members):
            return tuple(other for other in range(num_members) if other != rank)
        if rank >= num_workers:
            return tuple(sorted(self._workers_of_spare(num_workers, rank)))
        found = {
            spare for spare in range(num_workers, num_members) if rank in self._workers_of_spare(num_workers, spare)
        }
        if num_workers <= self.degree + 1:
            return tuple(sorted({*range(num_workers), *found} - {rank}))
        ring = by_turns(nodes[:num_workers])
        place = ring.index(rank)
        for distance in self.distances(num_workers):
            found |= {ring[(place + distance) % num_workers], ring[(place - distance) % num_workers]}
        return tuple(sorted(found))

    def distances(self, num_workers: int) -> tuple[int, ...]:
        """In the ring of more than `degree` + 1: powers of one base, so that a few steps of each lead anywhere."""
        number, longest = self.degree // 2, (num_workers - 1) // 2
        found = [0]
        for index in range(number):
            distance = max(round(num_workers ** (index / number)), found[-1] + 1)
            found.append(min(distance, longest - (number - 1 - index)))
        return tuple(found[1:])

    def hops(self, num_workers: int) -> int:
        """At most so many from any worker to any other, while all live."""
        if self.is_dense(num_workers) or num_workers <= self.degree + 1:
            return 1
        distances = (*self.distances(num_workers), num_workers)
        return sum(math.ceil(after / before / 2) for before, after in itertools.pairwise(distances)) + 1

    def _workers_of_spare(self, num_workers: int, spare: int) -> set[int]:
        number = min(self.spare_degree, num_workers)
        return {(spare + index * num_workers // number) % num_workers for index in range(number)}


STANDARD = Topology()


def by_turns(nodes: Sequence[Hashable]) -> list[int]:
    """Ranks in an order in which one node's do not follow each other: the first of each node, then the second, ..."""
    counts: dict[Hashable, int] = {}
    turns = []
    for rank, node in enumerate(nodes):
        counts[node] = turn = counts.get(node, -1) + 1
        turns.append((turn, rank))
    return [rank for _, rank in sorted(turns)]
