"""The base of all faults of a drill.

A fault is injected once by `inject`, which returns the evidence that it happened. `not_yet` names the precondition that
is missing, and `is_over` tells whether the job has recovered. `undo` reverts what does not end by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from elastic_train.tools.audit.record import Effect
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.nodes import is_running, wait_until

if TYPE_CHECKING:
    from elastic_train.storage.snapshot import SnapshotInfo
    from elastic_train.tools.drills.network import Network

RECOVERY_LIMIT_SECONDS = 30.0
"""from a death to the next committed step; measured in tenths, but machines are loaded"""


@dataclass(frozen=True)
class OneNode:
    """A role that only one node has."""

    does: str
    find: Callable[[Cluster], list[Place]]
    """returns that node if it is healthy, else nothing"""


RANK_ZERO = OneNode("has rank 0", lambda cluster: [one for one in cluster.inside if cluster.rank_of(one) == 0])
ENDPOINT_HOST = OneNode("hosts the endpoint", lambda cluster: cluster.hosting)


class NotInjected(Exception):
    """A fault could not be injected; the message says why."""


class Fault:
    """Base of all: a subclass is a kind of fault, an instance is one that is injected and watched."""

    name: str
    says: str
    """one line for --list"""
    size = -1
    """the change in the number of nodes"""
    needs_company = False
    """whether it has no effect on a node that trains alone"""
    needs_network = False
    """whether its nodes must be network namespaces"""
    holder: OneNode | None = None
    """the role of its target; None: any node"""
    backend: str | None = None
    """the only backend that it works with; None: any"""
    undo_after: float | None = None
    """seconds to `undo`: from the recovery, or without `changes_world` from the end of `inject`; None: never"""
    snapshots = 0
    """the number of snapshots that are due while it lasts"""
    effects: frozenset[Effect] = frozenset()
    """what the audit has to allow for or check"""
    changes_world = True
    """whether it leads to a new generation"""

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        peer_timeout: float,
        *,
        number: int = 0,
        standstill: float = 0.0,
        targets: list[Place] | None = None,
    ) -> None:
        """`peer_timeout` is the worker's flag, in seconds; `standstill` the seconds that the job without a fault may be
        without a step; `number` counts the faults of a drill from 0. Without `targets`, `choose` finds them."""
        self.cluster, self.rng, self.number = cluster, rng, number
        self.peer_timeout, self.standstill = peer_timeout, standstill
        self.targets = targets or []
        self.detail = ""
        """the target in words, where it is not a node"""
        self.generation = -1
        """of the world into which it was injected"""
        self.members: tuple[str, ...] = ()
        """the targets' members at the injection"""
        self.injected_at = self.in_force_at = 0.0
        """Unix seconds when the injection began, and when it was complete: a Disturbance lasts from then on"""
        self.recovered_at: float | None = None
        self.is_undone = self.is_closed = False
        self.undone_at_step: int | None = None
        """committed steps when it was undone; None before"""

    @property
    def place(self) -> Place:
        """The only target."""
        return self.targets[0]

    @property
    def network(self) -> Network:
        assert self.cluster.network is not None, "`needs_network` says so"
        return self.cluster.network

    @property
    def target(self) -> str:
        return self.detail or ", ".join(place.name for place in self.targets)

    @property
    def has_to_be_undone(self) -> bool:
        return self.undo_after is not None and not self.is_undone

    # --- overridden by kinds of faults --------------------------------------------------------------------------------

    @classmethod
    def why_not(cls) -> str | None:
        """What else it needs that this machine lacks; None if nothing."""
        return None

    @classmethod
    def least_nodes(cls) -> int:
        """The least number of healthy nodes."""
        return max(1 - cls.size, 2 if cls.needs_company else 1)

    def limit_seconds(self) -> float:
        """The most seconds from the injection to the next step."""
        return RECOVERY_LIMIT_SECONDS + self.standstill

    def not_yet(self) -> str | None:
        """The missing precondition; None when the fault may be injected."""
        return self.lacks_node() if self.cluster.is_settled else "the world is not settled"

    def lacks_node(self) -> str | None:
        """Why another node has to start first; None if those that are in suffice."""
        if len(self.cluster.inside) < self.least_nodes():
            return f"only {len(self.cluster.inside)} healthy nodes are in"
        if self.holder is not None and not self.holder.find(self.cluster):
            return f"nobody healthy {self.holder.does}"
        return None

    def choose(self) -> list[Place]:
        """Choose the targets. Raises NotInjected."""
        if self.holder is not None:
            return self.holder.find(self.cluster)
        return self.rng.sample(self.cluster.inside, max(1, -self.size))

    def inject(self) -> str:
        """Inject the fault and return the evidence that it happened. Raises NotInjected."""
        raise NotImplementedError

    def may_take(self) -> list[Place]:
        """The nodes that the job may lose by the fault; the audit reports the loss of any other."""
        return self.targets

    def is_over(self) -> bool:
        """Return whether a step was committed that the fault delayed: here, one in a world without the targets."""
        world = self.cluster.watch.world
        return world is not None and self.has_stepped_anew() and not set(world.members) & set(self.members)

    def undo(self) -> None:
        """Revert the fault as far as possible."""

    def is_cleared(self) -> bool:
        """Return whether no effect is left, so that the job counts as healthy again."""
        return True

    def why_never(self) -> str | None:
        """Why the target can never come back; None while it may."""
        return None

    # --- common to all kinds ------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The fields of its `injected` line in the drill's record."""
        return {
            "name": self.name,
            "target": self.target,
            "limit_seconds": self.limit_seconds(),
            "may_take": [place.name for place in self.may_take()],
            "effects": sorted(self.effects),
            "injected_at": self.injected_at,
        }

    def has_stepped_anew(self) -> bool:
        """Return whether a later generation, of any members, has committed a step."""
        world = self.cluster.watch.world
        return world is not None and world.generation > self.generation and world.first_step_at is not None

    def workers(self) -> list[psutil.Process]:
        """The running workers of the target, at least one. Raises: NotInjected: none is left."""
        if not (found := self.place.workers()):
            raise NotInjected("it had no worker any more")
        return found

    def agent(self) -> psutil.Process:
        """The agent of the target. Raises: NotInjected: it has ended."""
        agent = self.place.node.agent() if self.place.node is not None else None
        if agent is None:
            raise NotInjected("its agent had ended")
        return agent

    def newest_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots of the run, newest first."""
        from elastic_train.storage.snapshot import find_snapshots

        return find_snapshots(self.cluster.run_dir / "snapshots", warn=lambda _: None)


class Silence(Fault):
    """A node falls silent, and the other nodes cannot tell whether it lives."""

    def limit_seconds(self) -> float:
        return 3 * self.peer_timeout + super().limit_seconds()

    def choose(self) -> list[Place]:
        """Choose a node; of two nodes under c10d the one with the higher rank, which would wait for a silent other."""
        found = sorted(self.cluster.inside, key=lambda place: self.cluster.rank_of(place) or 0)
        has_arbiter = self.cluster.backend.name != C10d.name
        return [self.rng.choice(found[1:] if len(found) == 2 and not has_arbiter else found)]


class Absence(Silence):
    """Silence that ends: the node learns that it was left out, and comes back with the same processes."""

    size = 0
    needs_company = True
    undo_after = 1.0

    def is_cleared(self) -> bool:
        if not self.cluster.is_in(self.place):
            return False
        self.place.effect = None
        return True

    def why_never(self) -> str | None:
        if self.place.is_running:
            return None
        self.cluster.watch.poll()  # at the end of the job every node may end
        return None if self.cluster.watch.is_finished else f"{self.place.name} ended instead of coming back"


class Disturbance(Fault):
    """A fault that passes: the job keeps all its nodes, and recovers at the latest when the fault is undone."""

    size = 0
    undo_after = 3.0
    changes_world = False

    def may_take(self) -> list[Place]:
        return []

    def is_over(self) -> bool:
        return self.undone_at_step is not None and self.cluster.watch.step > self.undone_at_step


def wait_gone(process: psutil.Process) -> None:
    """Wait until a process has ended. Raises: TooSlow after 10 seconds."""
    wait_until(lambda: not is_running(process), f"end of process {process.pid}", 10.0)
