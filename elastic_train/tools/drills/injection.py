"""What every fault of a drill is: it says when it may be injected, does it, knows when it is over, and is undone.

A fault is injected once (`inject`, which returns what shows that it really was). It says what it waits for (`not_yet`)
and when the job has recovered from it (`is_over`). What has to be put right again, it puts right in `undo`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

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


class NotInjected(Exception):
    """A fault found that it could not do what it is for; the message says why."""


@dataclass
class Injection:
    """One fault at work."""

    cluster: Cluster
    rng: random.Random
    peer_timeout: float
    """seconds, the worker's flag"""
    standstill: float = 0.0
    """seconds that the job may be without a step by itself"""
    targets: list[Place] = field(default_factory=list)
    generation: int = -1
    """of the world that it met"""
    members: tuple[str, ...] = ()
    """of the targets before it"""
    undone_at_step: int | None = None
    """committed steps when it was undone; None before"""
    detail: str = ""
    """what it was done to, where that is not the targets"""

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


class Fault:
    """Base of all. `size` says by how much it changes the number of nodes."""

    name: ClassVar[str]
    says: ClassVar[str]
    """one line for --list"""
    size: ClassVar[int] = -1
    needs_company: ClassVar[bool] = False
    """whether it has no effect on a node that trains alone"""
    needs_network: ClassVar[bool] = False
    """whether its nodes must be network namespaces"""
    needs_clocks: ClassVar[bool] = False
    """whether its nodes must have clocks of their own (faketime.py)"""
    backend: ClassVar[str | None] = None
    """the only one that it goes with; None: any"""
    undo_after: ClassVar[float | None] = None
    """seconds to `undo`: from the recovery, or without `changes_world` from the end of `inject`; None: never"""
    snapshots: ClassVar[int] = 0
    """that are written while it lasts"""
    effects: ClassVar[frozenset[Effect]] = frozenset()
    """what the audit has to know of it"""
    changes_world: ClassVar[bool] = True
    """whether a new generation is what it leads to"""

    @classmethod
    def why_not(cls) -> str | None:
        """What else it needs that this machine lacks; None if it lacks nothing."""
        return None

    @classmethod
    def least_nodes(cls) -> int:
        """How many healthy ones there must be."""
        return max(1 - cls.size, 2 if cls.needs_company else 1)

    def limit_seconds(self, injection: Injection) -> float:
        """From the injection to the next step, at most."""
        return RECOVERY_LIMIT_SECONDS + injection.standstill

    def not_yet(self, cluster: Cluster) -> str | None:
        """What it waits for; None when it may be injected."""
        if not cluster.is_settled:
            return "the world is not settled"
        if len(cluster.inside) < self.least_nodes():
            return f"only {len(cluster.inside)} healthy nodes are in"
        return None

    def choose(self, injection: Injection) -> list[Place]:
        """The nodes that it is for. Raises NotInjected."""
        return injection.rng.sample(injection.cluster.inside, max(1, -self.size))

    def inject(self, injection: Injection) -> str:
        """Do it; returns what shows that it happened. Raises NotInjected."""
        raise NotImplementedError

    def may_take(self, injection: Injection) -> list[Place]:
        """The nodes that the job may lose by it; the audit reports every other that is lost."""
        return injection.targets

    def is_over(self, injection: Injection) -> bool:
        """Whether a step was committed that this fault stood in the way of: here, in a world without the targets."""
        world = injection.cluster.watch.world
        return world is not None and has_stepped_anew(injection) and not set(world.members) & set(injection.members)

    def undo(self, injection: Injection) -> None:
        """Put right what can be."""

    def is_cleared(self, injection: Injection) -> bool:
        """Whether nothing of it is left, so that the job may be counted as healthy again."""
        return True


class Silence(Fault):
    """A node says nothing any more, and nobody can tell whether it lives."""

    def limit_seconds(self, injection: Injection) -> float:
        return 3 * injection.peer_timeout + super().limit_seconds(injection)

    def choose(self, injection: Injection) -> list[Place]:
        """Under c10d, of two nodes the one with the higher rank: where the other is silent it waits for that one."""
        found = sorted(injection.cluster.inside, key=lambda place: injection.cluster.rank_of(place) or 0)
        has_arbiter = injection.cluster.backend.name != C10d.name
        return [injection.rng.choice(found[1:] if len(found) == 2 and not has_arbiter else found)]


class Absence(Silence):
    """Silence that ends: the node finds out that it was left out, and comes back in its own processes."""

    size = 0
    needs_company = True
    undo_after = 1.0

    def is_cleared(self, injection: Injection) -> bool:
        place = injection.place
        if place.is_running and not injection.cluster.is_in(place):
            return False
        place.effect = None
        return True


class Disturbance(Fault):
    """Something that passes: the job goes on with everybody, or has recovered, when it is undone."""

    size = 0
    undo_after = 3.0
    changes_world = False

    def may_take(self, injection: Injection) -> list[Place]:
        return []

    def is_over(self, injection: Injection) -> bool:
        return injection.undone_at_step is not None and injection.cluster.watch.step > injection.undone_at_step


def has_stepped_anew(injection: Injection) -> bool:
    """Whether a later generation, of any members, has committed a step."""
    world = injection.cluster.watch.world
    return world is not None and world.generation > injection.generation and world.first_step_at is not None


def with_rank_zero(cluster: Cluster) -> list[Place]:
    """The healthy node that has rank 0, if there is one."""
    return [place for place in cluster.inside if cluster.rank_of(place) == 0]


def workers_of(place: Place) -> list[psutil.Process]:
    return place.node.workers() if place.node is not None else []


def some_workers(place: Place) -> list[psutil.Process]:
    """Raises: NotInjected where none is left."""
    if not (workers := workers_of(place)):
        raise NotInjected("it had no worker any more")
    return workers


def choose_worker(injection: Injection) -> psutil.Process:
    """One of the target's. Raises: NotInjected where none is left."""
    return injection.rng.choice(some_workers(injection.place))


def agent_of(injection: Injection) -> psutil.Process:
    """The target's. Raises: NotInjected where it has ended."""
    agent = injection.place.node.agent() if injection.place.node is not None else None
    if agent is None:
        raise NotInjected("its agent had ended")
    return agent


def wait_gone(process: psutil.Process) -> None:
    """Raises: TooSlow where it does not end."""
    wait_until(lambda: not is_running(process), f"end of process {process.pid}", 10.0)


def snapshots_of(cluster: Cluster) -> list[SnapshotInfo]:
    """Newest first."""
    from elastic_train.storage.snapshot import find_snapshots

    return find_snapshots(cluster.run_dir / "snapshots", warn=lambda _: None)
