"""Checks of the faults that were injected into a run, and of how it recovered."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from elastic_train.runlog.reader import float_of
from elastic_train.tools.audit.finding import Found, Skip
from elastic_train.tools.audit.history import History, PastWorld
from elastic_train.tools.audit.lost_time import Outage, outages_of
from elastic_train.tools.audit.record import UNKNOWN, DrillRecord, FaultRecord
from elastic_train.wording import count

JOIN_LIMIT_SECONDS = 300.0
"""how long a newcomer may take to import torch and to join, on a busy machine"""
RESTART_LIMIT_SECONDS = 600.0
ROUNDING_SECONDS = 1e-3


def check_incidents(history: History) -> Found:
    """The job recovered from every incident within its limit, and lost committed steps only by a permitted restart."""
    result = history.result or {}
    incidents = [entry for entry in result.get("incidents") or [] if isinstance(entry, dict)]
    faults = [fault for fault in history.drill.faults if fault.injected_at is not None] if history.drill else []
    outages = outages_of(history)
    num_incidents = len(history.worlds[1:]) if history.final_result is None else len(incidents)
    findings = list(_unreported(history))
    is_calm = not num_incidents and not (incidents and history.worlds)
    if is_calm and not faults and not outages and not findings:
        raise Skip("nothing happened")
    limits = _limits(history)
    worlds = {world.generation: world for world in history.worlds}
    for outage in outages:
        limit = _limit_of(outage, worlds.get(outage.generation), limits)
        if outage.is_measured and outage.seconds > limit:
            findings.append(
                f"{outage.cause} before generation {outage.generation}: {outage.seconds:.2f} s without a step, "
                f"limit {limit:.0f} s"
            )
    for entry in incidents:
        lost = int(entry.get("committed_steps_lost") or 0)
        if lost and not (entry.get("cause") == "restart" and _may_lose(history, float(entry.get("time") or 0.0))):
            findings.append(f"{entry.get('cause')}: {lost} committed steps lost")
        seconds, limit = sum(dict(entry.get("seconds") or {}).values()), limits.get(str(entry.get("cause")), math.inf)
        if seconds > limit:
            findings.append(f"{entry.get('cause')}: result.json says {seconds:.2f} s, limit {limit:.0f} s")
    for fault in faults:
        if fault.is_withdrawn:
            continue
        took = fault.recovered_seconds
        if took is None:
            findings.append(f"{fault.described}: {fault.reason or 'no recovery from it'}")
        elif took > fault.limit_seconds:
            late = f"next committed step after {took:.2f} s, limit {fault.limit_seconds:.0f} s"
            findings.append(f"{fault.described}: {late}")
    measured = (outage.seconds for outage in outages if outage.cause == "peer_lost" and outage.is_measured)
    worst = max(measured, default=None)
    told = "" if worst is None else f"; longest outage by a lost peer {worst:.2f} s"
    done_again = sum(int(entry.get("committed_steps_lost") or 0) for entry in incidents)
    told += f"; {done_again} committed steps done again" if done_again else ""
    counts = ((num_incidents, "incident"), (len(faults), "fault"), (len(outages), "outage"))
    return ", ".join(count(n, what) for n, what in counts) + told, findings


def _unreported(history: History) -> Iterator[str]:
    """Yield where result.json and the events disagree about worlds that re-formed in place. Only worlds since the last
    restore count: incidents are part of the state. Incidents of older versions have no generation."""
    result = history.final_result
    entries = [] if result is None else [dict(entry) for entry in result.get("incidents") or ()]
    if result is None or any("generation" not in entry for entry in entries):
        return
    worlds = list(itertools.takewhile(lambda world: not world.is_restored, reversed(history.worlds)))
    by_generation = {int(entry["generation"]): entry for entry in entries}
    for world in reversed(worlds):
        if world.generation not in history.steps_of:  # broke before its first step: the next incident covers it
            continue
        what = f"{world.cause} before generation {world.generation}"
        if (entry := by_generation.get(world.generation)) is None:
            yield f"{what}: result.json has no incident of it"
        elif missing := world.lost.difference(map(str, entry.get("lost_members") or ())):
            yield f"{what}: its incident in result.json does not name {', '.join(sorted(missing))}, lost by the events"


def _may_lose(history: History, time: float) -> bool:
    """Return whether a restart at `time` may have lost steps: in a drill only the first one after a kill of all."""
    if history.drill is None:
        return True
    before = max((world.time for world in history.worlds if world.time < time), default=0.0)
    return history.drill.may_lose_steps(before, time)


def _limit_of(outage: Outage, world: PastWorld | None, limits: dict[str, float]) -> float:
    """The limit of an outage, seconds. A newcomer's start counts only where members have to wait (--min-nodes)."""
    limit = limits["leave"] if outage.cause == "join" else limits.get(outage.cause, math.inf)
    is_awaited = world is not None and world.joined and world.lost | world.left
    return max(limit, JOIN_LIMIT_SECONDS) if is_awaited else limit


def _limits(history: History) -> dict[str, float]:
    """Seconds by cause. Outside of a drill a restart has no limit: the user decides how long the run stays down."""
    peer_timeout = float(history.config.get("peer_timeout") or 10.0)
    limits = {"peer_lost": 3 * peer_timeout + 30, "leave": 30.0, "join": JOIN_LIMIT_SECONDS}
    if history.drill is not None:
        limits |= {"restart": RESTART_LIMIT_SECONDS}
    standstill = history.drill.standstill if history.drill is not None else _standstill(history)
    return {cause: limit + standstill for cause, limit in limits.items()}


def _standstill(history: History) -> float:
    """The longest time without a step that no fault caused, seconds: from the start to the first step (which may
    compile), in an evaluation or a snapshot, or between two steps of a world.

    First steps count in full. The other kinds recur, and the longest of each may be a hang: it does not count. A single
    evaluation or snapshot does count, since an event confirms it.
    """
    own, within, evaluating = [0.0], [0.0, 0.0], list[float]()
    evaluated = {(line["generation"], line["step"]) for line in history.of("evaluation")}
    for world in history.worlds:
        steps = history.steps_of.get(world.generation, [])
        for step in steps[:1] if world.cause == "start" else ():
            own.append(step.time - world.stood.get(step.clock, step.time))
        for before, after in itertools.pairwise(steps):
            if before.clock == after.clock and after.step == before.step + 1:
                within.append(after.time - before.time)
                evaluating += within[-1:] if (before.generation, before.step) in evaluated else []
    saving = [float_of(line, "stall_seconds") or 0.0 for line in history.of("snapshot")]
    said = (sorted(seconds)[-2:][0] for seconds in (evaluating, saving) if seconds)
    return max(*own, sorted(within)[-2], *said)


def check_faults(history: History) -> Found:
    """Every fault of the drill was really injected."""
    if history.drill is None:
        raise Skip("not a drill")
    faults = history.drill.faults
    planned = int(history.drill.settings.get("num_faults", len(faults)))
    findings = [f"{name} is missing or torn" for name in history.drill.missing]
    findings += [
        f"fault {fault.number} ({fault.name}) was not injected: {fault.reason}"
        for fault in faults
        if fault.injected_at is None and fault.name != UNKNOWN
    ]
    findings += [
        f"drill/faults.jsonl lacks the line that says what fault {fault.number} was"
        for fault in faults
        if fault.name == UNKNOWN
    ]
    findings += [what for fault in faults for what in _without_effect(history, history.drill, fault)]
    if len(faults) < planned:
        findings.append(f"only {len(faults)} of {planned} faults were tried")
    injected = Counter(fault.name for fault in faults if fault.injected_at is not None)
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in sorted(injected.items())) or "none", findings


def _without_effect(history: History, drill: DrillRecord, fault: FaultRecord) -> Iterator[str]:
    """Yield the workers that a fault was to take and that trained on in the world by which the job had recovered. After
    0 seconds it had, because the node was in no world; a fault that was undone by then was to take nobody. In a trace a
    node may get its notice before it is in any world, and then the job has recovered with the node, which leaves later.
    """
    if fault.injected_at is None or not fault.recovered_seconds:
        return
    recovered_at = fault.injected_at + fault.recovered_seconds
    if fault.undone_at is not None and fault.undone_at <= recovered_at:
        return
    by_then = (step.generation for step in history.written if step.time <= recovered_at + ROUNDING_SECONDS)
    generation = max(by_then, default=None)
    for life in history.lives:
        stood = {line["generation"]: float(line["time"]) for line in life.lines if line["event"] == "world"}
        was_in = min(stood.values(), default=math.inf) < fault.injected_at
        is_target = drill.node_of.get(life.member) in fault.may_take
        if is_target and was_in and generation in stood and life.ended > recovered_at:
            yield f"{fault.described} was injected, and {life.member} trained on in generation {generation}"
