"""A drill that replays an availability trace: nodes come and go at its times, whether the job has recovered or not.

In other drills a fault waits until the one before is over; here several may be open at once.
"""

from __future__ import annotations

import signal
import time

from elastic_train.tools.audit.fault_checks import RESTART_LIMIT_SECONDS
from elastic_train.tools.audit.record import Effect, Record
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.conductor import Conductor
from elastic_train.tools.drills.faults import Join, Kill
from elastic_train.tools.drills.live import Timeline
from elastic_train.tools.drills.schedule import Settings
from elastic_train.tools.drills.trace import Act, AvailabilityTrace, Move


class Departure(Kill):
    """A node goes, at once or after a notice. The state goes with the last node: steps after the newest snapshot are
    repeated, unless a notice leaves time to save them."""

    name = "kill"
    is_last = False
    deadline: float | None = None
    """Unix seconds, of a notice that the node gets by --notices; None: no such notice"""

    def limit_seconds(self) -> float:
        return RESTART_LIMIT_SECONDS if self.is_last else super().limit_seconds()

    def inject(self) -> str:
        if self.deadline is not None:
            self.cluster.give_notice(self.place, self.deadline)
            return "notice given"
        evidence = super().inject()
        if self.is_last and self.victim is None:
            self.name, self.effects = "kill-all", frozenset({Effect.LOSES_STEPS})
        return evidence

    def is_over(self) -> bool:
        """Return whether a world without the node trains; for a node that was in no world, any world that trains."""
        world = self.cluster.watch.world
        if world is None or world.first_step_at is None or set(world.members) & set(self.members):
            return False
        return self.has_stepped_anew() or not self.members


class Replay(Conductor):
    """Replays a trace while the job runs."""

    def __init__(
        self, settings: Settings, trace: AvailabilityTrace, cluster: Cluster, record: Record, timeline: Timeline
    ) -> None:
        super().__init__(settings, cluster, record, timeline)
        self._trace, self._moves = trace, list(trace.moves)
        self._beginners = [cluster.places[index] for index in trace.first]
        self._noticed: set[int] = set()
        """places whose node is about to go"""

    def _start(self) -> None:
        names = ", ".join(f"{name} is node{index}" for index, name in enumerate(self._trace.nodes, 1))
        self._timeline.log(f"trace at speed {self._trace.speed:g}: {names}")
        super()._start()
        self._record.add_setting(trace_began=time.time())

    def _look(self) -> None:
        super()._look()
        if not self._cluster.running:
            self._cluster.watch.forget_world()

    def _goes_on(self) -> bool:
        has_nodes = self._cluster.running or any(move.act is Act.START for move in self._moves)
        return bool((self._moves or self._open) and has_nodes)

    def _do_what_is_due(self, seconds: float) -> None:
        while self._moves and seconds >= self._moves[0].at:
            self._do(self._moves.pop(0))

    def _do(self, move: Move) -> None:
        place = self._cluster.places[move.place]
        if not move.is_fault:
            if place.is_running:
                self._timeline.log(f"{place.name} is still there at its time, and is killed")
                self._cluster.kill([place])
            return
        number, _ = self._plan.pop(0)  # the plan has the moves that are faults
        comes = move.act is Act.START
        if comes:
            self._noticed.discard(move.place)
        else:
            self._close_arrival(place)
            self._noticed.add(move.place)
        fault = self.new_fault(Join if comes else Departure, number, [place])
        if isinstance(fault, Departure):
            fault.is_last = not [other for other in self._cluster.inside if other.index not in self._noticed]
            if move.act is Act.NOTICE:
                fault.name, fault.effects = "stop", frozenset({Effect.ASKS_TO_LEAVE})
                fault.victim, fault.signum = "agent", signal.SIGTERM
                if self._settings.job.hears_notices:
                    taken = (one.at for one in self._moves if one.place == move.place and one.act is Act.TAKE)
                    fault.deadline = time.time() + next(taken) - move.at
        if place.is_running is comes:
            self._skip(fault, "the node runs still" if comes else "its node had ended")
        else:
            self._inject(fault)

    def _close_arrival(self, place: Place) -> None:
        """Close the join of a node that is taken before it has come: failed if its limit has passed, else withdrawn."""
        for fault in self._open:
            if isinstance(fault, Join) and fault.targets == [place]:
                fault.is_closed = True
                seconds = time.time() - fault.injected_at
                if fault.recovered_at is not None:
                    continue
                if seconds > fault.limit_seconds():
                    self._fail(fault, f"{place.name} had not come after {seconds:.0f} s, when it was taken")
                    continue
                self._record.fault("withdrawn", fault.number)
                self._timeline.log(f"{place.name} goes before it has come")
