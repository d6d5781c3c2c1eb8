"""The parts of a history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_train.protocol.finder import Size
from elastic_train.protocol.neighbours import STANDARD, Topology
from tests.simulation.work import Work

Fault = tuple[Any, ...]
"""(seconds, name of a method of faults.Faults, its arguments)"""


@dataclass(frozen=True)
class Plan:
    """A history: all of it follows from this."""

    seed: int
    """of latencies, clocks and the lengths of steps"""
    hosts: tuple[int, ...] = (1, 1, 1)
    """workers of each host"""
    faults: tuple[Fault, ...] = ()
    recovers_at: float | None = None
    """when all that can be mended is; five seconds later all must be well"""
    seconds: float = 12.0
    """its length, where it does not recover"""
    peer_timeout: float = 2.0
    wait_timeout: float = 1e9
    is_formed: bool = True
    """whether it begins with a first world that everybody is told, and no queue"""
    founders: int | None = None
    """how many hosts the first world has; the others come as newcomers. All by default"""
    min_nodes: int | None = None
    """all hosts by default"""
    trains_with: int = 1
    """`--min-nodes`"""
    max_nodes: int = 16
    quarantine: bool = False
    """`--quarantine on`"""
    max_world_size: int | None = None
    max_steps: int = 10**9
    has_equal_names: bool = False
    num_endpoints: int = 1
    directories: tuple[int, ...] = ()
    """by host: the number of its run directory; none where no run directory counts"""
    topology: Topology = STANDARD
    """who pings whom"""
    begins_twice: bool = False
    """whether a host begins a second job of the same run id while it is cut off: a state is lost then, and that job is
    to stop"""
    goes_on: bool = False
    """`--on-split go-on`"""
    lease: float | None = None
    """seconds after which what a process has written in etcd is gone; None where there is none"""
    stall_timeout: float | None = 3.0
    """`--stall-timeout`"""
    work: Work = field(default_factory=Work)
    """what the steps take"""

    @property
    def has_place(self) -> bool:
        """Whether there is one where decisions are claimed."""
        return bool(self.directories) or self.lease is not None

    @property
    def silence_seconds(self) -> float:
        """Within so many it is found out who is silent. In a sparse world the proposer may have to begin to ping one
        whose neighbours are all on the other side."""
        return self.peer_timeout * (1 if self.topology.is_dense(sum(self.hosts)) else 2)

    def workers_of(self, host: str) -> int:
        index = int(host[1:])
        return self.hosts[index] if index < len(self.hosts) else 1

    def size(self) -> Size:
        silence = self.wait_timeout if self.lease is None else self.lease
        return Size(self.min_nodes or len(self.hosts), max_nodes=self.max_nodes, last_call=0.0, silence=silence)
