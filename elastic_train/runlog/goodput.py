"""Where the wall time of a run went: every second belongs to exactly one phase, so the phases sum to the wall."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from elastic_train.system import pid_namespace, process_stat


class Phase(StrEnum):
    """What a second was spent on. Time that cannot be attributed counts as lost (`DOWN`)."""

    STARTUP = "startup"
    """from the start of the process to its readiness: imports, data, model"""
    FORM = "form"
    """agreeing on a world, its process group, and the state that everybody starts from"""
    TRAIN = "train"
    """steps that were kept, their data included: the numerator of goodput"""
    LOST = "lost"
    """a step that was begun and not committed"""
    EVALUATE = "evaluate"
    SNAPSHOT = "snapshot"
    """the training thread waiting for a snapshot"""
    DOWN = "down"
    """no process of the run was alive, or what it did after its last snapshot was lost with it"""


class PhaseClock:
    """Seconds by phase over the whole life of a run. Another thread than the one
    whose time it is may read and reassign it.

    The totals travel with the training state: they survive restarts and the death of any one process.
    `monotonic` and `wall` (Unix seconds) are parameters for tests.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        process_age: float | None = None,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.RLock()
        age = seconds_since_process_start() if process_age is None else process_age
        self._totals: dict[str, float] = {phase.value: 0.0 for phase in Phase}
        self._inherited: dict[str, float] = {}
        self._node_totals = dict(self._totals)
        self._inherited_nodes: dict[str, float] = {}
        self._num_nodes = 0
        """0 until a world has told"""
        self._phase = Phase.STARTUP
        self._since = monotonic() - age
        self._process_started_at = wall() - age
        self.newest_down = 0.0
        """seconds between the save of what was continued and the start of this process"""

    def begin_anew(self) -> None:
        """As of a process that starts now: what this one did before is in the run's totals, which are to be loaded."""
        self._totals, self._node_totals = (dict.fromkeys(self._totals, 0.0) for _ in range(2))
        self._inherited, self._inherited_nodes, self._num_nodes, self.newest_down = {}, {}, 0, 0.0
        self._phase, self._since, self._process_started_at = Phase.FORM, self._monotonic(), self._wall()

    def enter(self, phase: Phase) -> None:
        """The running phase ends now and `phase` begins."""
        with self._lock:
            now = self._monotonic()
            self._totals[self._phase] += now - self._since
            self._node_totals[self._phase] += (now - self._since) * self._num_nodes
            self._phase, self._since = phase, now

    def count_nodes(self, number: int) -> None:
        """So many nodes are in the run from now on; the first number counts from the start of this process."""
        with self._lock:
            self.enter(self._phase)
            if self._num_nodes == 0:
                self._node_totals = {phase: seconds * number for phase, seconds in self._totals.items()}
            self._num_nodes = number

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """`phase` inside the block, and the phase that ran before it again afterwards."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def reassign(self, seconds: float, source: Phase, target: Phase) -> None:
        """Seconds booked on `source` turn out to belong to `target`, e.g. a step that was lost after all."""
        with self._lock:
            self.enter(self._phase)
            seconds = min(seconds, self._totals[source])
            for totals, moved in ((self._totals, seconds), (self._node_totals, seconds * self._num_nodes)):
                moved = min(moved, totals[source])
                totals[source] -= moved
                totals[target] += moved

    def totals(self) -> dict[str, float]:
        """Seconds by phase up to this moment."""
        return dict(self.state_dict()["totals"])

    def node_seconds(self) -> tuple[float, float]:
        """(paid, kept): of all phases, and of steps that were kept. Nobody pays while no process is alive."""
        totals = self.state_dict()["node_totals"]
        return sum(totals.values()), totals[Phase.TRAIN]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            self.enter(self._phase)
            own, inherited = (self._totals, self._node_totals), (self._inherited, self._inherited_nodes)
            totals, nodes = ({p: s[p] + i.get(p, 0.0) for p in s} for s, i in zip(own, inherited, strict=True))
            return {"totals": totals, "node_totals": nodes, "saved_at": self._wall()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run whose totals these are, on top of this process's own seconds; the last call counts.

        The time between the save and the start of this process is `DOWN`, by wall clock: it spans processes, and
        perhaps machines. What this process did before the save, while it waited for a place, is in the totals already.
        A clock set back counts as no time.
        """
        with self._lock:
            self.enter(self._phase)
            self._inherit(state)
            since_save = self._process_started_at - float(state["saved_at"])
            self.newest_down = max(0.0, since_save)
            self._inherited[Phase.DOWN] = self._inherited.get(Phase.DOWN, 0.0) + self.newest_down
            if -since_save < sum(self._totals.values()):  # else a clock is wrong: it has not lived as long
                self._forget_first(-since_save)

    def _forget_first(self, seconds: float) -> None:
        """The first seconds of this process are no part of the run's."""
        if seconds <= 0:
            return
        for phase in Phase:  # in the order in which a process begins
            dropped = min(seconds, self._totals[phase])
            if dropped > 0:
                self._node_totals[phase] *= 1 - dropped / self._totals[phase]
            self._totals[phase] -= dropped
            seconds -= dropped
        self._process_started_at = self._wall() - sum(self._totals.values())

    def take_over(self, state: dict[str, Any]) -> None:
        """A run that never stopped is joined: its totals stand, and what this process did before is no part of it."""
        self.enter(self._phase)
        self._inherit(state)
        self._totals, self._node_totals = (dict.fromkeys(self._totals, 0.0) for _ in range(2))

    def _inherit(self, state: dict[str, Any]) -> None:
        self._inherited = {phase: float(seconds) for phase, seconds in state["totals"].items()}
        self._inherited_nodes = {phase: float(seconds) for phase, seconds in state["node_totals"].items()}


def goodput(totals: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, their sum `wall` and `ratio`, the share of it spent in steps that were kept."""
    wall = sum(totals.values())
    return {**totals, "wall": wall, "ratio": totals[Phase.TRAIN] / wall if wall > 0 else 0.0}


def bill(*, paid: float, kept: float, samples: int, price: float | None) -> dict[str, Any]:
    """What was paid and kept, in node-seconds, and what it cost; None where no price is known.

    Args:
        samples: of the steps that were kept.
        price: of a node for an hour.
    """
    cost = None if price is None else paid / 3600 * price
    return {
        "node_seconds": {"paid": paid, "kept": kept},
        "kept_samples": samples,
        "node_price": price,
        "cost": cost,
        "cost_per_million_samples": cost / samples * 1e6 if cost is not None and samples else None,
    }


def seconds_since_process_start() -> float:
    """How long this process has lived, imports included; 0.0 where /proc does not tell."""
    ticks = process_start_ticks()
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def process_start_ticks() -> int | None:
    """When this process started, in the kernel's ticks since the machine did; None where /proc does not tell."""
    _, ticks = process_stat(os.getpid())
    return int(ticks) if ticks else None


def process_identity() -> dict[str, int | str | None]:
    """What a file says of this process beside host and pid, so that its reader knows it from all others:
    `started_ticks` and `pid_namespace`; see status_files.py."""
    return {"started_ticks": process_start_ticks(), "pid_namespace": pid_namespace()}
