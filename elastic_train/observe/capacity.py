"""The numbers of nodes that a run has, could have, wants and may lose, for an autoscaler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_train.observe.status_files import WorkerLines
from elastic_train.runlog.reader import Line, float_of, int_of, time_of


@dataclass(frozen=True)
class Capacity:
    """Nodes, by what they do."""

    train: int = 0
    spare: int = 0
    """in the world, without work in a step"""
    waiting: int = 0
    """in the join queue, or on their way to it"""
    max_nodes: int | None = None
    """of --nnodes; None if the run's files do not have it"""
    may_be_taken: int = 0
    """with a standing notice"""
    quarantined: int = 0
    """in the join queue, not admitted yet because of earlier deaths on their host"""
    is_over: bool = False
    """whether the run needs no more nodes"""

    @property
    def could_train(self) -> int:
        """Nodes that are here and could train, within --nnodes."""
        here = self.train + self.spare + self.waiting
        return here if self.max_nodes is None else min(here, self.max_nodes)

    @property
    def wanted(self) -> int:
        """Number of further nodes that the run would use."""
        if self.is_over or self.max_nodes is None:
            return 0
        return self.max_nodes - self.could_train

    def as_json(self) -> dict[str, int | None]:
        names = ("train", "could_train", "wanted", "may_be_taken", "quarantined", "max_nodes")
        return {name: getattr(self, name) for name in names}


def describe_capacity(capacity: Capacity) -> str | None:
    """`3 train, 5 could, 1 more wanted, 2 may be taken away`; None without nodes, present or wanted."""
    parts = [f"{capacity.train} train"]
    if capacity.could_train != capacity.train:
        parts.append(f"{capacity.could_train} could")
    if capacity.wanted:
        parts.append(f"{capacity.wanted} more wanted")
    if capacity.may_be_taken:
        parts.append(f"{capacity.may_be_taken} may be taken away")
    if capacity.quarantined:
        parts.append(f"{capacity.quarantined} quarantined")
    return ", ".join(parts) if capacity.could_train or capacity.wanted else None


def capacity_of(
    workers: list[WorkerLines], world: list[Line], quarantined: Iterable[Line], *, is_there: bool, is_over: bool
) -> Capacity:
    """Return the capacity by the files of all workers.

    Args:
        world: the lines of the newest world.
        is_there: whether the world's nodes seem to be alive.
        is_over: whether the run has ended and is not to be continued.
    """
    starts = [line for worker in workers for line in worker.lines if line["event"] == "start"]
    max_nodes = [number for line in starts if (number := int_of(line, "max_nodes")) is not None]
    present = [worker for worker in workers if worker.is_first_of_node and worker.outcome is None]
    outside = [worker for worker in present if worker.is_outside and worker.may_wait]
    kept = {one["host"] for one in quarantined}
    waiting = [worker for worker in outside if worker.first.get("host") not in kept]
    told = next((line for line in reversed(world) if is_there and int_of(line, "nodes") is not None), {})
    generation = max((int_of(line, "generation") or 0 for line in world), default=None)
    members = [worker for worker in present if is_there and not worker.is_outside and worker.generation == generation]
    return Capacity(
        int_of(told, "nodes") or 0,
        int_of(told, "spare_nodes") or 0,
        waiting=len(waiting),
        max_nodes=max_nodes[-1] if max_nodes else None,
        may_be_taken=sum(worker.last.get("noticed") is True for worker in [*members, *waiting]),
        quarantined=len(outside) - len(waiting),
        is_over=is_over,
    )


def quarantines_of(world: list[Line], now: float) -> tuple[Line, ...]:
    """Return the quarantines of hosts by the newest world, from its newest line that has any."""
    told = max((line for line in world if isinstance(line.get("quarantined"), list)), key=time_of, default={})
    entries = [one for one in told.get("quarantined", ()) if isinstance(one, dict) and isinstance(one.get("host"), str)]
    return tuple(one for one in entries if (float_of(one, "until") or 0.0) > now)
