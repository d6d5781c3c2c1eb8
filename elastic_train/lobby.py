"""Who waits to be taken into a job that meets in etcd, and the rule that says who is taken in. Values, no effects.

A worker that has imported, built its model and read its data writes `<prefix>/lobby/<node>/<local rank>`: it is ready.
A node is ready when all its workers are. The nodes that the next world takes in are written to `<key>/admit`, once, by
whoever comes first, `<key>` being that of the world that ends (meeting.py); they are then ranks of the meeting that
follow the world's own, and the protocol goes on as ever. The first world is the one that an empty one takes in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from elastic_train.errors import FormationFailed
from elastic_train.meeting import Decision
from elastic_train.rules import next_generation
from elastic_train.world import Member


@dataclass(frozen=True)
class Waiting:
    """A worker that is ready: the value of its key in the lobby."""

    member: Member
    node_id: str
    """the same for the workers of one agent, and for no others"""
    local_world_size: int
    """how many workers its node has"""

    def to_json(self) -> str:
        return json.dumps([asdict(self.member), self.node_id, self.local_world_size], separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Waiting:
        member, node_id, local_world_size = json.loads(text)
        return Waiting(Member.from_json(json.dumps(member)), str(node_id), int(local_world_size))


@dataclass(frozen=True)
class Admission:
    """The value of `<key>/admit`: the meeting's ranks are first `present`, then `new`."""

    present: tuple[Member, ...]
    """members of the world that ends"""
    new: tuple[Member, ...]

    @property
    def everyone(self) -> tuple[Member, ...]:
        return (*self.present, *self.new)

    def to_json(self) -> str:
        bare = [replace(member, agreement={}) for member in self.present]  # theirs is known, and long
        return json.dumps([[asdict(member) for member in part] for part in (bare, self.new)], separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Admission:
        present, new = (tuple(Member.from_json(json.dumps(one)) for one in part) for part in json.loads(text))
        return Admission(present, new)


def ready_nodes(waiting: Sequence[Waiting], world: Collection[str]) -> list[list[Member]]:
    """The nodes all of whose workers wait, each with its workers by local rank; in the order of `waiting`.

    Args:
        world: names of the members of the present world, who may not have left the lobby yet.
    """
    nodes: dict[str, dict[int, Waiting]] = {}
    for one in waiting:
        if one.member.name not in world:
            nodes.setdefault(one.node_id, {})[one.member.local_rank] = one
    return [
        [workers[local_rank].member for local_rank in sorted(workers)]
        for workers in nodes.values()
        if len(workers) == next(iter(workers.values())).local_world_size
    ]


def without_nodes_of(gone: Iterable[Member], members: Sequence[Member]) -> tuple[Member, ...]:
    """Those of `members` on whose nodes none of `gone` is: a node takes part with all of its workers or not at all."""
    nodes = {member.node for member in gone}
    return tuple(member for member in members if member.node not in nodes)


def is_start_due(num_ready: int, *, min_nodes: int, max_nodes: int, seconds_enough: float, last_call: float) -> bool:
    """Whether the first world is to be formed now.

    Args:
        seconds_enough: for how long there have been `min_nodes`.
        last_call: how long more nodes are waited for then.
    """
    return num_ready >= max_nodes or (num_ready >= min_nodes and seconds_enough >= last_call)


@dataclass(frozen=True)
class Standing:
    """Where a job stands, by what is written of it."""

    key: str
    """of the world that stands, or is about to"""
    members: tuple[Member, ...]
    """who is in it; nobody before the first one, and where all who should have formed it died"""
    admission: Admission | None
    """whom the next one takes in, where that is decided"""
    generation: int | None
    """of that world; None before the first one"""

    @property
    def everyone(self) -> tuple[Member, ...]:
        """Who may still decide how it goes on."""
        return self.members if self.admission is None else self.admission.everyone


def standing(prefix: str, texts: Mapping[str, str]) -> Standing:
    """Follow the chain of decisions to its end.

    Args:
        texts: the values of all keys below `prefix`, by key.

    Raises:
        FormationFailed: the decisions contradict each other, and have no end.
    """
    key, members = f"{prefix}/start", tuple[Member, ...]()
    generation: int | None = None
    while True:
        text = texts.get(f"{key}/admit")
        admission = Admission.from_json(text) if text is not None and f"{key}/next" not in texts else None
        if f"{key}/next" not in texts:
            return Standing(key, members, admission, generation)
        decision = Decision.from_json(texts[f"{key}/next"])
        if generation is not None and decision.generation <= generation:
            raise FormationFailed(
                f"below {prefix} in etcd generation {decision.generation} follows {generation}: please report this, "
                "and give another --rdzv-id"
            )
        generation = decision.generation
        following = f"{prefix}/world-{decision.generation}"
        if f"{following}/next" not in texts and text is not None:  # what is older has been swept up
            everyone = Admission.from_json(text).everyone
            members = tuple(everyone[rank] for rank in decision.ranks)
        key = following


def nobody(everyone: Sequence[Member], after: int | None) -> Decision:
    """The decision for members who died before they could make one: an empty world, so that others can go on.

    Args:
        after: the generation of the world that they should have followed; None if there was none.
    """
    generation = next_generation([after, *(member.max_generation for member in everyone)])
    return Decision(generation, ranks=(), lost=tuple(range(len(everyone))), left=())
