"""What the steps of a history take: those of small models, and those of real jobs, in which a member may be busy for
longer than the peer timeout. Seconds are scaled with it: 2 s here are the 10 s of the default."""

from __future__ import annotations

import random
from dataclasses import dataclass

from elastic_train.rules import Activity


@dataclass(frozen=True)
class Work:
    """A kind of job; all times in seconds."""

    step: float = 0.2
    """half as much may be added or missing"""
    first: float = 0.0
    """the first step of each process takes so much more: it compiles"""
    hiccup: float = 0.0
    """now and then the data of a member come so much later"""
    evaluation: float = 0.0
    """after each tenth step a member is busy for up to so long"""
    snapshot: float = 0.0
    """after each fifth step rank 0 is"""
    busy: tuple[int, int, float] = (-1, -1, 0.0)
    """a rank, after which step, and for how many seconds it is"""
    activity: Activity = Activity.COMPUTE
    """what a member tells meanwhile"""

    def seconds(self, chance: random.Random, rank: int, step: int, *, is_first: bool) -> float:
        """That a member computes, from a commit to the next collective."""
        found = self.step * chance.uniform(0.5, 1.5)
        if is_first:
            found += self.first
        if self.hiccup and chance.random() < 0.05:
            found += self.hiccup * chance.uniform(0.5, 1.0)
        if self.evaluation and step % 10 == 0 and step > 0:
            found += self.evaluation * chance.uniform(0.1, 1.0)
        if self.snapshot and step % 5 == 0 and step > 0 and rank == 0:
            found += self.snapshot
        if self.busy[:2] == (rank, step):
            found += self.busy[2]
        return found

    @property
    def commit_seconds(self) -> float:
        """Within which a world that trains commits again."""
        return 1.5 * self.step + self.first + self.hiccup + self.evaluation + self.snapshot + self.busy[2] + 0.7


KINDS = {
    "tiny steps": Work(step=0.02),
    "long steps": Work(step=6.0),
    "very long steps": Work(step=60.0),
    "a first step that compiles": Work(first=14.0),
    "passes on a GPU that compile anew": Work(evaluation=24.0, activity=Activity.STEP),
    "a loader that hiccups": Work(hiccup=6.0),
    "long evaluations": Work(evaluation=24.0),
    "large snapshots": Work(snapshot=4.0),
}
