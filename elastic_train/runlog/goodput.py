"""The use of a run's wall time: every second belongs to exactly one phase, so the phases sum to the wall time."""

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
    """The activity of a second. Time that cannot be attributed counts as lost (`DOWN`)."""

    STARTUP = "startup"
    """From the start of the process until it is ready: imports, data, model."""
    FORM = "form"
    """Agreement on a world, its process group, and the common state."""
    TRAIN = "train"
    """Steps that were kept, including their data: the numerator of goodput."""
    LOST = "lost"
    """Steps that were begun and not committed."""
    EVALUATE = "evaluate"
    SNAPSHOT = "snapshot"
    """The training thread waits for a snapshot."""
    DOWN = "down"
    """No process of the run was alive, or its work since the last snapshot was lost."""


class PhaseClock:
    """Seconds by phase over the whole life of a run, measured by the training thread. Other threads may read and
    move them.

    The totals travel with the training state, so they survive restarts and the death of any process. `monotonic` and
    `wall` (Unix seconds) are parameters for tests.
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
        """0 before the first world."""
        self._phase = Phase.STARTUP
        self._since = monotonic() - age
        self._process_started_at = wall() - age
        self.newest_down = 0.0
        """Seconds between the save of the state that was continued and the start of this process."""

    def begin_anew(self) -> None:
        """Reset the clock, as for a process that starts now. The time before is in the run's totals, loaded next."""
        self._totals, self._node_totals = (dict.fromkeys(self._totals, 0.0) for _ in range(2))
        self._inherited, self._inherited_nodes, self._num_nodes, self.newest_down = {}, {}, 0, 0.0
        self._phase, self._since, self._process_started_at = Phase.FORM, self._monotonic(), self._wall()

    def enter(self, phase: Phase) -> None:
        """End the running phase now and begin `phase`."""
        with self._lock:
            now = self._monotonic()
            self._totals[self._phase] += now - self._since
            self._node_totals[self._phase] += (now - self._since) * self._num_nodes
            self._phase, self._since = phase, now

    def count_nodes(self, number: int) -> None:
        """Set the number of nodes in the run from now on; the first number counts from the start of this process."""
        with self._lock:
            self.enter(self._phase)
            if self._num_nodes == 0:
                self._node_totals = {phase: seconds * number for phase, seconds in self._totals.items()}
            self._num_nodes = number

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` inside the block, and afterwards return to the phase before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def lose(self, seconds: float) -> None:
        """Move seconds of training to `LOST`: those of a step that was lost after all."""
        with self._lock:
            self.enter(self._phase)
            seconds = min(seconds, self._totals[Phase.TRAIN])
            for totals, moved in ((self._totals, seconds), (self._node_totals, seconds * self._num_nodes)):
                moved = min(moved, totals[Phase.TRAIN])
                totals[Phase.TRAIN] -= moved
                totals[Phase.LOST] += moved

    def totals(self) -> dict[str, float]:
        """Seconds by phase up to this moment."""
        return dict(self.state_dict()["totals"])

    def node_seconds(self) -> tuple[float, float]:
        """Node-seconds (paid, kept): of all phases, and of kept steps. Time without a live process is not paid."""
        totals = self.state_dict()["node_totals"]
        return sum(totals.values()), totals[Phase.TRAIN]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            self.enter(self._phase)
            own, inherited = (self._totals, self._node_totals), (self._inherited, self._inherited_nodes)
            totals, nodes = ({p: s[p] + i.get(p, 0.0) for p in s} for s, i in zip(own, inherited, strict=True))
            return {"totals": totals, "node_totals": nodes, "saved_at": self._wall()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run: add its totals to this process's own seconds. The last call counts.

        The time between the save and the start of this process is `DOWN`. It is by wall clock, because it spans
        processes and perhaps machines. The totals already contain the time of this process before the save, when it
        waited for admission. A clock that was set back counts as no time.
        """
        with self._lock:
            self.enter(self._phase)
            self._inherit(state)
            since_save = self._process_started_at - float(state["saved_at"])
            self.newest_down = max(0.0, since_save)
            self._inherited[Phase.DOWN] = self._inherited.get(Phase.DOWN, 0.0) + self.newest_down
            if -since_save < sum(self._totals.values()):  # else a clock is wrong: the process is not that old
                self._forget_first(-since_save)

    def _forget_first(self, seconds: float) -> None:
        """Remove the first seconds of this process from its totals."""
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
        """Join a run that never stopped: take its totals, and drop the time of this process before."""
        self.enter(self._phase)
        self._inherit(state)
        self._totals, self._node_totals = (dict.fromkeys(self._totals, 0.0) for _ in range(2))

    def _inherit(self, state: dict[str, Any]) -> None:
        self._inherited = {phase: float(seconds) for phase, seconds in state["totals"].items()}
        self._inherited_nodes = {phase: float(seconds) for phase, seconds in state["node_totals"].items()}


def goodput(totals: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, their sum `wall`, and `ratio`, the share of kept steps in it."""
    wall = sum(totals.values())
    return {**totals, "wall": wall, "ratio": totals[Phase.TRAIN] / wall if wall > 0 else 0.0}


def bill(*, paid: float, kept: float, samples: int, price: float | None) -> dict[str, Any]:
    """The paid and kept node-seconds, and their cost; None for the cost without a price.

    Args:
        samples: the number of samples in kept steps.
        price: the price of a node for an hour.
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
    """The age of this process, imports included; 0.0 if /proc does not tell."""
    ticks = process_start_ticks()
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def process_start_ticks() -> int | None:
    """The start of this process in kernel ticks since boot; None if /proc does not tell."""
    _, ticks = process_stat(os.getpid())
    return int(ticks) if ticks else None


def process_identity() -> dict[str, Any]:
    """Fields of a file that identify this process among all others, with host and pid; see status_files.py."""
    return {"started_ticks": process_start_ticks(), "pid_namespace": pid_namespace()}
