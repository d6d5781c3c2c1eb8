"""The bundled jobs of a drill: the paced one, and variants as busy as real jobs are, scaled to two minutes."""

from __future__ import annotations

from dataclasses import dataclass

BUNDLED_TASK = "elastic_train.tools.drills.task:PacedDigits"
SHORT = ("--peer-timeout", "2")
"""a fifth of the default; the busy times of the jobs are scaled by the same factor"""


SLOW_SHARE = 0.1
"""share of its rate at which a job waits for late faults when it has nearly reached its end"""
SLOW_FROM = 0.9
"""share of the steps after which it waits"""


@dataclass(frozen=True)
class DrillJob:
    """A row of the table below."""

    says: str
    flags: tuple[str, ...] = ()
    """flags of the worker, besides those of every job"""
    busy: tuple[str, ...] = ()
    """flags of the nodes only: they cost time, and the weights do not depend on them"""
    steps_per_second: float = 20.0
    """with all nodes, while faults are still to come"""
    standstill: float = 0.0
    """seconds that it may be without a step though there is no fault"""
    snapshot_every: int = 100
    """steps"""
    num_nodes: int = 4
    num_steps: int | None = None
    """steps at its pace, whenever the last fault is; None: as many as the schedule takes, the rest unpaced"""
    hears_notices: bool = False
    """whether a trace's notice comes by --notices, with its deadline; else it is SIGTERM"""

    @property
    def _can_wait(self) -> bool:
        """Whether the job may slow down for late faults: a tenth of its pace must not look like a standstill."""
        return self.num_steps is None and self.steps_per_second > 1.0

    @property
    def spare(self) -> float:
        """Steps of the job per step of the schedule. After the last fault it runs the remaining ones without pauses."""
        return 1.2 if self._can_wait else 2.5

    def rate_at(self, step: int, last_step: int) -> float:
        """Steps per second while faults are still to come."""
        waits = self._can_wait and step >= SLOW_FROM * last_step
        return self.steps_per_second * (SLOW_SHARE if waits else 1.0)


PACED = "paced"
JOBS = {
    PACED: DrillJob("digits, 20 steps a second"),
    "long": DrillJob(
        "1,600 steps of 0.15 s to the end", steps_per_second=10.0, num_nodes=3, num_steps=1600, hears_notices=True
    ),
    "first-step": DrillJob(
        "the first step of each process takes 14 s", SHORT, ("--first-step-seconds", "14"), standstill=14.0
    ),
    "long-steps": DrillJob("steps of 3 s", SHORT, steps_per_second=1 / 3, standstill=12.0, snapshot_every=5),
    "large-state": DrillJob(
        "a state of 1.2 GB", ("--state-mb", "1200", "--virtual-ranks", "4"), steps_per_second=0.2, standstill=20.0,
        snapshot_every=4, num_nodes=3,
    ),
    "hiccups": DrillJob(
        "the loader of each node stops for 8 s now and then", SHORT, ("--hiccup-seconds", "8", "--hiccup-every", "400"),
        steps_per_second=10.0, standstill=16.0,
    ),
    "evaluation": DrillJob(
        "12 to 17 s of evaluation after each 46 steps", (*SHORT, "--eval-every", "2"), ("--evaluation-seconds", "12"),
        steps_per_second=5.0, standstill=18.0, snapshot_every=50,
    ),
}  # fmt: skip
"""by the name that --job takes"""
