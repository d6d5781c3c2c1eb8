"""The members that train together, and the World that they form for one generation."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Address = tuple[str, int]
"""(IP or name, port)"""
Point = Literal["meet", "init", "sync", "send", "step", "commit", "finish", "exit", "proposed", "planned", "formed"]
"""point of a worker's life at which a drill may inject a fault; elastic/fault_seam.py describes each"""


def host_name() -> str:
    """Return the name of this node, fit for file names."""
    name = platform.node() or "localhost"
    return "".join(c if c.isalnum() or c in "._" else "_" for c in name)


@dataclass(frozen=True)
class Member:
    """One worker's description of itself when it asks to be in the next world."""

    host: str
    local_rank: int
    """index of this worker on its node: chooses the device, nothing else"""
    pid: int
    agent_pid: int
    """pid of the node's agent (torchrun); 0 without one"""
    address: Address
    """(IP, port) at which it listens, for probes only"""
    directory_id: str
    """id of its run directory; members that share a run directory have the same id"""
    backend: str
    """process group backend that suits its device: `gloo` or `cpu:gloo,cuda:nccl`"""
    max_generation: int | None
    """largest generation that it has been in, or that its run directory shows"""
    agreement: Mapping[str, Any] = field(default_factory=dict)
    """entries that must be equal for all members: task, flags, versions"""
    store: Address | None = None
    """(IP, port) of the store that it serves; if it is rank 0, the process group forms over that store"""
    min_nodes: int = 1
    """fewest nodes with which it trains"""
    gpu: str | None = None
    """UUID of its GPU: it shows that two workers share one GPU, even if each numbers it differently"""
    uid: str = ""
    """drawn by its process: a host that comes back is another member"""
    node_id: str = ""
    """id shared by the workers of one agent only; "" if `host` and `agent_pid` are enough to tell nodes apart"""
    newest: tuple[int, int] | None = None
    """(generation, step) of the furthest snapshot that it can see"""
    forms_ahead: bool = False
    """whether it can form a process group beside the present one"""
    was: tuple[tuple[str, str], ...] = ()
    """uids that its process had before, as members that were left out, each with that of the world that left it out"""

    @property
    def name(self) -> str:
        return f"{self.host}/{self.local_rank}/{self.pid}"

    @property
    def node(self) -> tuple[str, int, str]:
        """The identity of the node, equal for its members only."""
        return self.host, self.agent_pid, self.node_id


@dataclass(frozen=True)
class World:
    """The members of one generation, as one of them sees it; immutable, so that no value outlives its generation."""

    rank: int
    """index of this worker, 0 .. world_size - 1; changes from generation to generation"""
    generation: int
    """number of this world, larger than that of every world before it"""
    members: tuple[Member, ...]
    """all members, by rank: first the workers that train, then the spares"""
    max_world_size: int | None = None
    """number of members that a step has work for; None if that is not limited"""
    uid: str = ""
    """drawn when the world was decided: two branches may use one generation number, never one uid"""

    @property
    def key(self) -> str:
        """The prefix of the keys that belong to this world."""
        return f"world-{self.generation}-{self.uid}"

    @property
    def uids(self) -> frozenset[str]:
        """The uids of the members."""
        return frozenset(member.uid for member in self.members)

    @property
    def world_size(self) -> int:
        """The number of workers that train; they form the process group."""
        return len(self.members) if self.max_world_size is None else min(len(self.members), self.max_world_size)

    @property
    def workers(self) -> tuple[Member, ...]:
        """The members that train, by rank."""
        return self.members[: self.world_size]

    @property
    def num_spares(self) -> int:
        """The number of members beyond the work that a step has, ranked after the workers that train."""
        return len(self.members) - self.world_size

    @property
    def is_spare(self) -> bool:
        """Whether this member stands by until a worker that trains is lost."""
        return self.rank >= self.world_size

    @property
    def me(self) -> Member:
        """This worker."""
        return self.members[self.rank]

    @property
    def local_rank(self) -> int:
        """The index of this worker on its node, from 0."""
        return self.me.local_rank

    @property
    def num_nodes(self) -> int:
        """The number of nodes that have a member, spares included."""
        return len({member.node for member in self.members})

    @property
    def num_training_nodes(self) -> int:
        """The number of nodes that have a worker that trains."""
        return len({member.node for member in self.workers})

    @property
    def min_nodes(self) -> int:
        """The fewest nodes with which this world trains: the largest number that a member requires."""
        return max(member.min_nodes for member in self.members)

    @property
    def first_of_node(self) -> Member:
        """The member of this node that has its lowest rank."""
        return next(other for other in self.members if other.node == self.me.node)

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the lowest rank on its node."""
        return self.first_of_node is self.me

    @property
    def is_directory_leader(self) -> bool:
        """Whether this is the lowest rank among those that share its run directory."""
        mine = self.me.directory_id
        return next(rank for rank, other in enumerate(self.members) if other.directory_id == mine) == self.rank


Reach = Callable[[Point, World], None]
"""called when this worker reaches a point, on any thread"""


def to_runs(ranks: Iterable[int]) -> str:
    """Return ranks as text such as `0-3,7`, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_runs(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of `to_runs`. Raises: ValueError."""
    found: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


Plain = TypeVar("Plain")


def to_json(told: Any) -> str:
    """Return a dataclass, or a container of dataclasses, as JSON with the names of the fields."""
    return json.dumps(told, default=_plain, separators=(",", ":"))


def _plain(told: Any) -> Any:
    return sorted(told) if isinstance(told, frozenset) else vars(told)  # `asdict` would copy it all


def from_json(kind: type[Plain], text: str) -> Plain:
    """Return the dataclass of a text of `to_json`. Raises: as `value_of`; ValueError."""
    told: Plain = value_of(kind, json.loads(text))
    return told


def value_of(kind: Any, value: Any) -> Any:
    """Return the value of type `kind`, such as a dataclass, that JSON turned into `value`; unknown fields are ignored.
    Raises: KeyError, TypeError, ValueError or OverflowError if `value` is not of that kind."""
    return _reading(kind)(value)


def value_or_none(kind: type[Plain], value: Any) -> Plain | None:
    """Return `value_of`; None if `value` is not of that kind."""
    try:
        told: Plain = value_of(kind, value)
        return told
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


@cache
def _reading(kind: Any) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        fields = {name: _reading(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: kind(**{name: read(value[name]) for name, read in fields.items()})  # type: ignore[operator]
    origin, kinds = get_origin(kind), get_args(kind)
    reads = [_reading(one) for one in kinds if one not in (NoneType, Ellipsis)]
    if origin is tuple and kinds[-1] is Ellipsis:
        return lambda value: tuple(map(reads[0], value))
    if origin is tuple:
        return lambda value: tuple(read(one) for read, one in zip(reads, value, strict=True))
    if NoneType in kinds:
        return lambda value: None if value is None else reads[0](value)
    return dict if origin is Mapping else origin or kind
