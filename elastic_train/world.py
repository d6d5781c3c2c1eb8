"""Who trains together: members, and the World that they form for one generation."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


def host_name() -> str:
    """This node's name, fit for file names."""
    name = platform.node() or "localhost"
    return "".join(c if c.isalnum() or c in "._" else "_" for c in name)


@dataclass(frozen=True)
class Member:
    """What one worker says of itself when it asks to be in the next world."""

    host: str
    local_rank: int
    """index of this worker on its node: chooses the device, nothing else"""
    pid: int
    agent_pid: int
    """pid of the node's agent (torchrun); 0 without one"""
    address: tuple[str, int]
    """where it listens, for nothing but being probed: (IP, port)"""
    directory_id: str
    """names its run directory; members that share one have the same"""
    backend: str
    """process group backend that suits its device: `gloo` or `cpu:gloo,cuda:nccl`"""
    max_generation: int | None
    """largest generation that it has been in, or that its run directory shows"""
    agreement: Mapping[str, Any] = field(default_factory=dict)
    """what must be equal for all members: task, flags, versions"""
    unreachable: tuple[int, ...] = ()
    """ranks of the last world whose listener it could not reach, where it had reason to look"""
    group_store: tuple[str, int] | None = None
    """(IP, port) of a TCPStore of its own, at which a world meets whose rank 0 it is; None under c10d"""
    min_nodes: int = 1
    """with fewer nodes than this it does not train"""
    gpu: str | None = None
    """UUID of its GPU, by which two workers that share one are found out, whatever number each sees it under"""

    @property
    def name(self) -> str:
        return f"{self.host}/{self.local_rank}/{self.pid}"

    @property
    def node(self) -> tuple[str, int]:
        """What members of one node have in common."""
        return self.host, self.agent_pid

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Member:
        fields = json.loads(text)
        for name in ("address", "group_store"):
            if fields[name] is not None:
                host, port = fields[name]
                fields[name] = (host, int(port))
        return Member(unreachable=tuple(fields.pop("unreachable")), **fields)


@dataclass(frozen=True)
class World:
    """The members of one process group, as one of them sees it; immutable: nothing can outlive its generation."""

    rank: int
    """index of this worker, 0 .. world_size - 1; changes from generation to generation"""
    generation: int
    """how many worlds this run had before this one"""
    members: tuple[Member, ...]
    """all members, by rank: first those who train, then the spares"""
    max_world_size: int | None = None
    """how many members a step has work for, where that is limited"""

    @property
    def world_size(self) -> int:
        """How many train; they are the process group."""
        return len(self.members) if self.max_world_size is None else min(len(self.members), self.max_world_size)

    @property
    def workers(self) -> tuple[Member, ...]:
        """Those who train, by rank."""
        return self.members[: self.world_size]

    @property
    def num_spares(self) -> int:
        """Members beyond the work that a step has, behind those who train."""
        return len(self.members) - self.world_size

    @property
    def is_spare(self) -> bool:
        """Whether this member stands by until one that trains is lost."""
        return self.rank >= self.world_size

    @property
    def me(self) -> Member:
        """This worker."""
        return self.members[self.rank]

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its node, from 0."""
        return self.me.local_rank

    @property
    def num_nodes(self) -> int:
        """Nodes that have a member, spares included."""
        return len({member.node for member in self.members})

    @property
    def min_nodes(self) -> int:
        """How many nodes must be there for it to train: of members that were told different numbers, the largest."""
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
