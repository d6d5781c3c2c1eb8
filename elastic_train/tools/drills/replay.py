"""A drill that replays an availability trace: nodes come and go at its times, whatever the job makes of that.

Other drills wait with a fault until the one before is over; here several may be open at once.
"""

from __future__ import annotations

import signal
import time

from elastic_train.tools.audit.fault_checks import RESTART_LIMIT_SECONDS
from elastic_train.tools.audit.record import Effect, Record
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.conductor import Conductor
from elastic_train.tools.drills.faults import Join
from elastic_train.tools.drills.injection import Fault, Injection, has_stepped_anew
from elastic_train.tools.drills.live import Timeline
from elastic_train.tools.drills.schedule import Planned, Settings
from elastic_train.tools.drills.trace import Act, AvailabilityTrace, Move


class Departure(Fault):
    """A node goes, at once or after a notice."""

    def is_over(self, injection: Injection) -> bool:
        """Whether others train without it; of a node that was in no world, whether anybody does."""
        world = injection.cluster.watch.world
        if world is None or world.first_step_at is None or set(world.members) & set(injection.members):
            return False
        return has_stepped_anew(injection) or not injection.members


class Taken(Departure):
    name = "kill"

    def inject(self, injection: Injection) -> str:
        injection.cluster.kill(injection.targets)
        return "all of its processes are gone"


class LastTaken(Taken):
    """With it goes the state: what came after the newest snapshot is done again."""

    name = "kill-all"
    effects = frozenset({Effect.LOSES_STEPS})

    def limit_seconds(self, injection: Injection) -> float:
        return RESTART_LIMIT_SECONDS


class NoticeGiven(Departure):
    name = "stop"
    effects = frozenset({Effect.ASKS_TO_LEAVE})

    def inject(self, injection: Injection) -> str:
        assert injection.place.node is not None, "it runs"
        injection.place.node.signal(signal.SIGTERM)
        return "SIGTERM sent"


class LastNoticed(NoticeGiven):
    """It saves the state before it goes."""

    limit_seconds = LastTaken.limit_seconds


class Replay(Conductor):
    """Goes through a trace while the job runs."""

    def __init__(
        self, settings: Settings, trace: AvailabilityTrace, cluster: Cluster, record: Record, timeline: Timeline
    ) -> None:
        super().__init__(settings, cluster, record, timeline)
        self._trace, self._moves = trace, list(trace.moves)
        self._beginners = [cluster.places[index] for index in trace.first]
        self._noticed: set[int] = set()
        """places whose node is to go"""
        self._num_faults = 0

    def conduct(self) -> None:
        """From the first nodes to the end of the last. Blocks."""
        names = ", ".join(f"{name} is node{index}" for index, name in enumerate(self._trace.nodes, 1))
        self._timeline.log(f"trace at speed {self._trace.speed:g}: {names}")
        self._start()
        self._zero = time.monotonic()
        self._record.add_setting(trace_began=time.time())
        while (self._moves or self._open) and not self._cluster.watch.is_finished and self._has_nodes:
            self._look()
            self._adapt_pace()
            if not self._cluster.running:
                self._cluster.watch.forget_world()
            for pending in self._open:
                self._follow(pending)
            while self._moves and time.monotonic() - self._zero >= self._moves[0].at:
                self._do(self._moves.pop(0))
        self._plan = self._plan[self._num_faults :]  # which it did not come to
        self._give_up_the_rest()
        self._release()
        self._finish()

    @property
    def _has_nodes(self) -> bool:
        return bool(self._cluster.running) or any(move.act is Act.START for move in self._moves)

    def _do(self, move: Move) -> None:
        place = self._cluster.places[move.place]
        if not move.is_fault:
            if place.is_running:
                self._timeline.log(f"{place.name} is still there at its time, and is killed")
                self._cluster.kill([place])
            return
        number, self._num_faults = self._num_faults, self._num_faults + 1
        fault: Fault
        if move.act is Act.START:
            self._noticed.discard(move.place)
            fault = Join()
        else:
            self._close_arrival(place)
            self._noticed.add(move.place)
            is_last = not [other for other in self._cluster.inside if other.index not in self._noticed]
            if move.act is Act.TAKE:
                fault = LastTaken() if is_last else Taken()
            else:
                fault = LastNoticed() if is_last else NoticeGiven()
        planned = Planned(move.at, move.act.value)
        if place.is_running is (move.act is Act.START):
            self._skip(number, planned, "the node runs still" if place.is_running else "its node had ended", place.name)
            return
        self._inject(number, planned, fault, [place])

    def _close_arrival(self, place: Place) -> None:
        """One that goes before it has come is not waited for; it had its time to come, or it had not."""
        for pending in self._open:
            if pending.planned.fault == Act.START.value and pending.injection.targets == [place]:
                pending.is_closed = True
                seconds = time.time() - pending.injected_at
                if pending.recovered_at is not None:
                    continue
                if seconds > pending.fault.limit_seconds(pending.injection):
                    self._fail(pending, f"{place.name} had not come after {seconds:.0f} s, when it was taken")
                    continue
                self._record.fault("withdrawn", pending.number)
                self._timeline.log(f"{place.name} goes before it has come")
