"""What every fault of a drill is: it says when it may be injected, does it, knows when it is over, and is undone.

A fault is injected once (`inject`, which returns what shows that it really was). It says what it waits for (`not_yet`)
and when the job has recovered from it (`is_over`). What has to be put right again, it puts right in `undo`.
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
    """That which alone does something."""

    does: str
    find: Callable[[Cluster], list[Place]]
    """that node, if it is healthy"""


RANK_ZERO = OneNode("has rank 0", lambda cluster: [one for one in cluster.inside if cluster.rank_of(one) == 0])
ENDPOINT_HOST = OneNode("hosts the endpoint", lambda cluster: cluster.hosting)


class NotInjected(Exception):
    """A fault found that it could not do what it is for; the message says why."""


class Fault:
    """Base of all: the class is a kind of fault, an instance one that is injected and watched."""

    name: str
    says: str
    """one line for --list"""
    size = -1
    """by how much it changes the number of nodes"""
    needs_company = False
    """whether it has no effect on a node that trains alone"""
    needs_network = False
    """whether its nodes must be network namespaces"""
    holder: OneNode | None = None
    """it is for that node and no other"""
    backend: str | None = None
    """the only one that it goes with; None: any"""
    undo_after: float | None = None
    """seconds to `undo`: from the recovery, or without `changes_world` from the end of `inject`; None: never"""
    snapshots = 0
    """that are written while it lasts"""
    effects: frozenset[Effect] = frozenset()
    """what the audit has to know of it"""
    changes_world = True
    """whether a new generation is what it leads to"""

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
        """`peer_timeout` is the worker's flag, in seconds; `standstill` are those that the job may be without a step by
        itself; `number` counts the faults of a drill from 0. Without `targets` it chooses them."""
        self.cluster, self.rng, self.number = cluster, rng, number
        self.peer_timeout, self.standstill = peer_timeout, standstill
        self.targets = targets or []
        self.detail = ""
        """what it was done to, where that is not the targets"""
        self.generation = -1
        """of the world that it met"""
        self.members: tuple[str, ...] = ()
        """of the targets before it"""
        self.injected_at = self.in_force_at = 0.0
        """Unix seconds when its injection began, and when that was through: what passes lasts from then on"""
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

    # --- what kinds do in ways of their own ---------------------------------------------------------------------------

    @classmethod
    def why_not(cls) -> str | None:
        """What else it needs that this machine lacks; None if it lacks nothing."""
        return None

    @classmethod
    def least_nodes(cls) -> int:
        """How many healthy ones there must be."""
        return max(1 - cls.size, 2 if cls.needs_company else 1)

    def limit_seconds(self) -> float:
        """From the injection to the next step, at most."""
        return RECOVERY_LIMIT_SECONDS + self.standstill

    def not_yet(self) -> str | None:
        """What it waits for; None when it may be injected."""
        if not self.cluster.is_settled:
            return "the world is not settled"
        if len(self.cluster.inside) < self.least_nodes():
            return f"only {len(self.cluster.inside)} healthy nodes are in"
        if self.holder is not None and not self.holder.find(self.cluster):
            return f"nobody healthy {self.holder.does}"
        return None

    def choose(self) -> list[Place]:
        """The nodes that it is for. Raises NotInjected."""
        if self.holder is not None:
            return self.holder.find(self.cluster)
        return self.rng.sample(self.cluster.inside, max(1, -self.size))

    def inject(self) -> str:
        """Do it; returns what shows that it happened. Raises NotInjected."""
        raise NotImplementedError

    def may_take(self) -> list[Place]:
        """The nodes that the job may lose by it; the audit reports every other that is lost."""
        return self.targets

    def is_over(self) -> bool:
        """Whether a step was committed that this fault stood in the way of: here, in a world without the targets."""
        world = self.cluster.watch.world
        return world is not None and self.has_stepped_anew() and not set(world.members) & set(self.members)

    def undo(self) -> None:
        """Put right what can be."""

    def is_cleared(self) -> bool:
        """Whether nothing of it is left, so that the job may be counted as healthy again."""
        return True

    def why_never(self) -> str | None:
        """Why what is to follow cannot come any more; None while it may."""
        return None

    # --- what they have in common -------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What the record of the drill says of one that was injected."""
        return {
            "name": self.name,
            "target": self.target,
            "limit_seconds": self.limit_seconds(),
            "may_take": [place.name for place in self.may_take()],
            "effects": sorted(self.effects),
            "injected_at": self.injected_at,
        }

    def has_stepped_anew(self) -> bool:
        """Whether a later generation, of any members, has committed a step."""
        world = self.cluster.watch.world
        return world is not None and world.generation > self.generation and world.first_step_at is not None

    def workers(self) -> list[psutil.Process]:
        """The target's that run; not empty. Raises: NotInjected where none is left."""
        if not (found := self.place.workers()):
            raise NotInjected("it had no worker any more")
        return found

    def agent(self) -> psutil.Process:
        """The target's. Raises: NotInjected where it has ended."""
        agent = self.place.node.agent() if self.place.node is not None else None
        if agent is None:
            raise NotInjected("its agent had ended")
        return agent

    def newest_snapshots(self) -> list[SnapshotInfo]:
        """Newest first."""
        from elastic_train.storage.snapshot import find_snapshots

        return find_snapshots(self.cluster.run_dir / "snapshots", warn=lambda _: None)


class Silence(Fault):
    """A node says nothing any more, and nobody can tell whether it lives."""

    def limit_seconds(self) -> float:
        return 3 * self.peer_timeout + super().limit_seconds()

    def choose(self) -> list[Place]:
        """Under c10d, of two nodes the one with the higher rank: where the other is silent it waits for that one."""
        found = sorted(self.cluster.inside, key=lambda place: self.cluster.rank_of(place) or 0)
        has_arbiter = self.cluster.backend.name != C10d.name
        return [self.rng.choice(found[1:] if len(found) == 2 and not has_arbiter else found)]


class Absence(Silence):
    """Silence that ends: the node finds out that it was left out, and comes back in its own processes."""

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
        self.cluster.watch.poll()  # at the end of the job all may go
        return None if self.cluster.watch.is_finished else f"{self.place.name} ended instead of coming back"


class Disturbance(Fault):
    """Something that passes: the job goes on with everybody, or has recovered, when it is undone."""

    size = 0
    undo_after = 3.0
    changes_world = False

    def may_take(self) -> list[Place]:
        return []

    def is_over(self) -> bool:
        return self.undone_at_step is not None and self.cluster.watch.step > self.undone_at_step


def wait_gone(process: psutil.Process) -> None:
    """Raises: TooSlow where it does not end."""
    wait_until(lambda: not is_running(process), f"end of process {process.pid}", 10.0)
