"""What a drill does while its job runs: start the nodes, inject the planned faults, watch each recovery."""

from __future__ import annotations

import contextlib
import random
import time

import psutil

from elastic_train.errors import ElasticTrainError, RunDirectoryError
from elastic_train.observe.status import read_status
from elastic_train.tools.audit.record import Record
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.injection import Fault, NotInjected
from elastic_train.tools.drills.live import Timeline
from elastic_train.tools.drills.nodes import CommandFailed, TooSlow
from elastic_train.tools.drills.schedule import Settings
from elastic_train.tools.program import BUNDLED_PROGRAM
from elastic_train.wording import count, duration

TICK_SECONDS = 0.03
START_LIMIT_SECONDS = 600.0
PRECONDITION_LIMIT_SECONDS = 300.0
END_LIMIT_SECONDS = 600.0
FIRST_REST_SECONDS, REST_SECONDS = 10.0, 60.0
"""until the first line about the job's way to its end, and between two such lines"""
TROUBLE = (NotInjected, CommandFailed, TooSlow, psutil.Error)
"""errors by which an injection may fail without ending the drill"""


class DrillFailed(ElasticTrainError):
    """The drill could not be carried out; this is no verdict on the job."""


class Conductor:
    """Runs the schedule while the job runs."""

    def __init__(self, settings: Settings, cluster: Cluster, record: Record, timeline: Timeline) -> None:
        self._settings, self._cluster = settings, cluster
        self._record, self._timeline = record, timeline
        self._plan = list(enumerate(settings.plan))
        self._injected: list[Fault] = []
        self._beginners = cluster.places
        """the places whose nodes run before the first fault"""
        self._due_since: float | None = None
        self._zero = 0.0
        self._paces: list[tuple[float, float]] = []
        """Unix seconds, seconds per sample from then on"""

    def conduct(self) -> None:
        """Run the job from its first node to the end of the last. Blocks."""
        self._start()
        self._zero = time.monotonic()
        while self._goes_on() and not self._cluster.watch.is_finished:
            self._look()
            self._adapt_pace()
            for fault in self._open:
                self._follow(fault)
            self._do_what_is_due(time.monotonic() - self._zero)
        self._give_up_the_rest()
        self._release()
        self._finish()

    @property
    def _open(self) -> list[Fault]:
        return [fault for fault in self._injected if not fault.is_closed]

    def _start(self) -> None:
        cluster, log = self._cluster, self._timeline.log
        self._set_pace_by_rate(self._settings.job.steps_per_second)
        cluster.backend.start()
        for place in self._beginners:
            cluster.start(place)
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not (cluster.is_settled and len(cluster.inside) == len(self._beginners)):
            self._look()
            if not cluster.running:
                raise DrillFailed(f"every node ended before the first step: {cluster.last_words()}{self._hint()}")
            if time.monotonic() > deadline:
                raise DrillFailed(
                    f"no world of {len(self._beginners)} nodes after {START_LIMIT_SECONDS:.0f} s; "
                    f"the nodes' logs are in {self._record.path}{self._hint()}"
                )
        log(f"{len(self._beginners)} of {len(cluster.places)} nodes train, step {cluster.watch.step}")

    def _hint(self) -> str:
        """What a script may lack if no worker wrote into the drill's run directory."""
        if self._settings.program == BUNDLED_PROGRAM or self._cluster.watch.names:
            return ""
        script = self._settings.program[-1]
        return f"; does {script} give its training function and elastic_train.parse_flags() to elastic_train.run?"

    def _look(self) -> None:
        time.sleep(TICK_SECONDS)
        for place in self._cluster.poll():
            self._timeline.log(f"{place.name} has ended")
        self._timeline.refresh()

    # --- faults -------------------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Return whether faults are planned or open, and a node runs."""
        return bool((self._plan or self._open) and self._cluster.running)

    def _do_what_is_due(self, seconds: float) -> None:
        """Inject the next fault if it is due, `seconds` after the first settled world."""
        if not self._plan or seconds < self._plan[0][1].at:
            return
        number, planned = self._plan[0]
        fault = self.new_fault(FAULTS[planned.fault], number)
        now = time.monotonic()
        self._due_since = self._due_since or now
        missing = "an earlier fault is not over" if self._open else fault.not_yet()
        if missing is None:
            self._inject(fault)
        elif now - self._due_since > PRECONDITION_LIMIT_SECONDS + fault.limit_seconds():
            self._skip(fault, f"in {now - self._due_since:.0f} s it found no moment: {missing}")
        else:
            self._replace_lost(fault)
            return
        self._plan.pop(0)
        self._due_since = None

    def _replace_lost(self, fault: Fault) -> None:
        """Start a node if the fault lacks one: a fault has taken the host of the endpoint, or an overloaded machine has
        caused the loss of nodes without a fault. The audit reports these."""
        cluster = self._cluster
        if cluster.is_settled and cluster.vacant and not self._open and (missing := fault.lacks_node()) is not None:
            place = cluster.vacant[0]
            self._timeline.log(f"{place.name} starts for {fault.name}: {missing}")
            cluster.start(place)

    def new_fault(self, kind: type[Fault], number: int, targets: list[Place] | None = None) -> Fault:
        settings = self._settings
        rng, standstill = random.Random(f"{settings.seed}/{number}"), settings.job.standstill
        return kind(self._cluster, rng, settings.peer_timeout, number=number, standstill=standstill, targets=targets)

    def _inject(self, fault: Fault) -> None:
        cluster = self._cluster
        try:
            fault.targets = fault.targets or fault.choose()
        except NotInjected as error:
            self._skip(fault, str(error))
            return
        fault.generation = cluster.watch.generation
        there = [place for place in fault.targets if cluster.is_in(place)]
        fault.members = tuple(member for place in there for member in place.members)
        ranks = [rank for place in fault.targets if (rank := cluster.rank_of(place)) is not None]
        at_rank = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        self._timeline.log(f"{fault.name}: {fault.target}{at_rank}, step {cluster.watch.step}")
        fault.injected_at, step = time.time(), cluster.watch.step
        try:
            evidence = fault.inject()
        except TROUBLE as error:
            self._skip(fault, str(error))
            self._try_undo(fault)  # it may have been injected in part
            for place in fault.targets:
                place.effect = None
            return
        fault.in_force_at = time.time()
        self._record.fault("injected", fault.number, step=step, evidence=evidence, **fault.facts())
        self._injected.append(fault)

    def _skip(self, fault: Fault, reason: str) -> None:
        self._timeline.log(f"{fault.name} was not injected: {reason}")
        self._record.fault("skipped", fault.number, name=fault.name, target=fault.target, reason=reason)

    def _follow(self, fault: Fault) -> None:
        watch, now = self._cluster.watch, time.time()
        if fault.has_to_be_undone:
            since = fault.recovered_at if fault.changes_world else fault.in_force_at
            if since is not None and now - since >= (fault.undo_after or 0.0):
                self._undo(fault)
        if fault.recovered_at is None:
            if fault.is_over() and watch.world is not None:
                stepped_at = watch.world.first_step_at if fault.changes_world else now
                fault.recovered_at = stepped_at or now
                seconds = max(0.0, fault.recovered_at - fault.injected_at)
                self._record.fault("recovered", fault.number, seconds=seconds)
                told = f"{count(len(watch.world.members), 'worker')}, generation {watch.generation}"
                self._timeline.log(f"{fault.name}: next step after {seconds:.2f} s, {told}")
            elif now - fault.injected_at > 2 * fault.limit_seconds() + 30:
                self._fail(fault, f"no step within {now - fault.injected_at:.0f} s")
        elif (reason := fault.why_never()) is not None:
            self._fail(fault, reason)
        elif not fault.has_to_be_undone and fault.is_cleared():
            fault.is_closed = True
        elif now - fault.recovered_at > END_LIMIT_SECONDS:
            self._fail(fault, _not_back(fault, now))

    def _undo(self, fault: Fault) -> None:
        """Undo a fault, only once, even if that fails."""
        fault.is_undone = True
        if self._try_undo(fault):
            fault.undone_at_step = self._cluster.watch.step
            self._record.fault("undone", fault.number)
            self._timeline.log(f"{fault.name} of {fault.target} is undone")

    def _try_undo(self, fault: Fault) -> bool:
        try:
            fault.undo()
        except TROUBLE as error:
            self._timeline.log(f"{fault.name} of {fault.target} could not be undone: {error}")
            return False
        return True

    def _fail(self, fault: Fault, reason: str) -> None:
        """Record that the job did not recover, and close the fault, so that it does not block the next one."""
        self._timeline.log(f"{fault.name}: {reason}")
        self._record.fault("recovered", fault.number, seconds=None, reason=reason)
        if fault.has_to_be_undone:
            self._undo(fault)
        fault.is_closed = True

    def _give_up_the_rest(self) -> None:
        ended = "training had ended" if self._cluster.watch.is_finished else "no node was left"
        for number, planned in self._plan:
            more = "; give it more to do, e.g. --epochs" if self._settings.last_step is None else ""
            self._skip(self.new_fault(FAULTS[planned.fault], number), f"{ended} before its time{more}")
        self._plan.clear()
        now = time.time()
        for fault in self._open:
            if fault.recovered_at is None:
                self._fail(fault, f"{ended} before the next step")
            elif fault.has_to_be_undone:
                self._undo(fault)
            elif not fault.is_cleared() and now - fault.recovered_at > fault.limit_seconds():
                self._fail(fault, f"{_not_back(fault, now)}, when {ended}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait until every node has ended, or no step came for too long. Log how far a user's job is from its end."""
        cluster, log, last_step = self._cluster, self._timeline.log, self._settings.last_step
        if last_step is None:  # of a user's job only its events tell it
            with contextlib.suppress(RunDirectoryError):
                last_step = read_status(self._settings.run_dir, time.time()).last_step
        began, first = time.monotonic(), cluster.watch.step
        step, stepped_at, due_at = first, began, began + FIRST_REST_SECONDS
        log(f"no more faults; the job goes on to its end, {_rest(step, last_step)}")
        while cluster.running:
            self._look()
            now = time.monotonic()
            if cluster.watch.step > step:
                step, stepped_at = cluster.watch.step, now
            if last_step is not None and step > first and now >= due_at:
                due_at = now + REST_SECONDS
                rate = (step - first) / (stepped_at - began)
                left = duration(max(0, last_step - step) / rate)
                log(f"{_rest(step, last_step)}, at {rate:.2g} steps/s some {left}")
            if now > stepped_at + END_LIMIT_SECONDS:
                names = ", ".join(place.name for place in cluster.running)
                log(f"{names} did not end within {END_LIMIT_SECONDS:.0f} s after the last step")
                return
        log(f"every node has ended, step {cluster.watch.step}")

    # --- the pace of the bundled job ----------------------------------------------------------------------------------

    def _adapt_pace(self) -> None:
        last = self._settings.last_step
        if last is not None:
            self._set_pace_by_rate(self._settings.job.rate_at(self._cluster.watch.step, last))

    def _release(self) -> None:
        """Let the job run without pauses after the last fault. A job with a fixed number of steps keeps its pace."""
        if self._settings.job.num_steps is None:
            self._set_pace(0.0)
            self._record.add_setting(released=time.time())

    def _set_pace_by_rate(self, steps_per_second: float) -> None:
        """Set the pace that gives this rate with all nodes; fewer nodes are slower, as in real training."""
        workers = self._settings.num_nodes * self._settings.num_workers
        self._set_pace(workers / (steps_per_second * self._settings.global_batch_size))

    def _set_pace(self, seconds_per_sample: float) -> None:
        if not self._paces or seconds_per_sample != self._paces[-1][1]:
            self._cluster.set_pace(seconds_per_sample)
            self._paces.append((time.time(), seconds_per_sample))
            self._record.add_setting(paces=self._paces)


def _not_back(fault: Fault, now: float) -> str:
    """Describe, at the time `now` (Unix seconds), that the target is not back."""
    return f"{fault.target} was not back {now - (fault.recovered_at or now):.0f} s after the others were through"


def _rest(step: int, last_step: int | None) -> str:
    """The step, and the steps that are left, in words."""
    return f"step {step}" + ("" if last_step is None else f" of {last_step}: {max(0, last_step - step)} left")
