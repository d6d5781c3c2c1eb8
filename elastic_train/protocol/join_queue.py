"""Who waits to be taken into a job, and the rules that say who is admitted. Values, no effects.

A worker that has imported, built its model and read its data stands in the join queue: it is ready. A node is ready
when all its workers are, and is admitted with all of them or not at all; one that was left out comes back to those of
its node that were not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic_train.world import Member


@dataclass(frozen=True)
class Waiting:
    """A worker that is ready."""

    member: Member
    local_world_size: int
    """how many workers its node has"""
    order: int = 0
    """its rank, where a launcher has given one"""

    def to_json(self) -> str:
        return json.dumps([self.member.to_fields(), self.local_world_size, self.order], separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Waiting:
        member, local_world_size, order = json.loads(text)
        return Waiting(Member.from_fields(member), int(local_world_size), int(order))


def ready_nodes(waiting: Iterable[Waiting], inside: Collection[Member]) -> list[tuple[Member, ...]]:
    """The nodes all of whose workers wait, or are in already, each with those that wait by local rank; in the order of
    `waiting`.

    Args:
        inside: the members of the present world, who may not have left the queue yet.
    """
    uids = {member.uid for member in inside}
    nodes: dict[object, dict[int, Waiting]] = {}
    for one in waiting:
        if one.member.uid not in uids:
            nodes.setdefault(one.member.node, {})[one.member.local_rank] = one
    there: dict[object, set[int]] = {}
    for member in inside:
        there.setdefault(member.node, set()).add(member.local_rank)
    return [
        tuple(workers[local_rank].member for local_rank in sorted(workers))
        for node, workers in nodes.items()
        if len(workers.keys() | there.get(node, set())) == next(iter(workers.values())).local_world_size
    ]


def without_nodes_of(gone: Iterable[Member], members: Sequence[Member]) -> tuple[Member, ...]:
    """Those of `members` on whose nodes none of `gone` is: a node takes part with all of its workers or not at all."""
    nodes = {member.node for member in gone}
    return tuple(member for member in members if member.node not in nodes)


def by_newest(nodes: Sequence[tuple[Member, ...]]) -> list[tuple[Member, ...]]:
    """Nodes in the order of a first world: who sees the newest snapshot leads it, and is never a spare."""
    return sorted(nodes, key=lambda node: max(member.newest or (-1, -1) for member in node), reverse=True)


def is_start_due(num_ready: int, *, min_nodes: int, max_nodes: int, seconds_enough: float, last_call: float) -> bool:
    """Whether the first world is to be formed now.

    Args:
        seconds_enough: for how long there have been `min_nodes`.
        last_call: seconds that more nodes are waited for then.
    """
    return num_ready >= max_nodes or (num_ready >= min_nodes and seconds_enough >= last_call)
