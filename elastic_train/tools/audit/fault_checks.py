"""Checks of what was done to a run, and of how it recovered."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from elastic_train.runlog.reader import float_of
from elastic_train.tools.audit.finding import Found, Skip
from elastic_train.tools.audit.history import History, PastWorld
from elastic_train.tools.audit.lost_time import Outage, outages_of
from elastic_train.tools.audit.record import UNKNOWN
from elastic_train.wording import count

JOIN_LIMIT_SECONDS = 300.0
"""a newcomer's Python with torch, on a machine that may be busy with anything"""
RESTART_LIMIT_SECONDS = 600.0


def check_incidents(history: History) -> Found:
    """The job recovered from every incident within its limit, and lost no committed step without need."""
    result = history.result or {}
    incidents = [entry for entry in result.get("incidents") or [] if isinstance(entry, dict)]
    faults = [fault for fault in history.drill.faults if fault.injected_at is not None] if history.drill else []
    outages = outages_of(history)
    num_incidents = len(history.worlds[1:]) if history.final_result is None else len(incidents)
    findings = list(_untold(history))
    if not incidents and not faults and not outages and not findings:
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
        if fault.recovered_seconds is None:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): {fault.reason or 'no recovery from it'}"
            )
        elif fault.recovered_seconds > fault.limit_seconds:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): next committed step after "
                f"{fault.recovered_seconds:.2f} s, limit {fault.limit_seconds:.0f} s"
            )
    measured = (outage.seconds for outage in outages if outage.cause == "peer_lost" and outage.is_measured)
    worst = max(measured, default=None)
    told = "" if worst is None else f"; longest outage by a lost peer {worst:.2f} s"
    done_again = sum(int(entry.get("committed_steps_lost") or 0) for entry in incidents)
    told += f"; {done_again} committed steps done again" if done_again else ""
    counts = ((num_incidents, "incident"), (len(faults), "fault"), (len(outages), "outage"))
    return ", ".join(count(n, what) for n, what in counts) + told, findings


def _untold(history: History) -> Iterator[str]:
    """Worlds that trained in place of others of which result.json tells otherwise than the events, since the run was
    restored last: its incidents are of the state. Those of versions before have no generation."""
    result = history.final_result
    entries = [] if result is None else [dict(entry) for entry in result.get("incidents") or ()]
    if result is None or any("generation" not in entry for entry in entries):
        return
    worlds = list(itertools.takewhile(lambda world: not world.is_restored, reversed(history.worlds)))
    by_generation = {int(entry["generation"]): entry for entry in entries}
    for world in reversed(worlds):
        if world.generation not in history.steps_of:  # broken at once, it is told of in the next one's
            continue
        what = f"{world.cause} before generation {world.generation}"
        if (entry := by_generation.get(world.generation)) is None:
            yield f"{what}: result.json has no incident of it"
        elif missing := world.lost.difference(map(str, entry.get("lost_members") or ())):
            yield f"{what}: its incident in result.json does not name {', '.join(sorted(missing))}, lost by the events"


def _may_lose(history: History, time: float) -> bool:
    """Whether a restart at a time may have cost steps: in a drill only the first world after everything was killed."""
    if history.drill is None:
        return True
    before = max((world.time for world in history.worlds if world.time < time), default=0.0)
    return history.drill.may_lose_steps(before, time)


def _limit_of(outage: Outage, world: PastWorld | None, limits: dict[str, float]) -> float:
    """A newcomer starts before the others stop, unless they cannot go on without it (--min-nodes)."""
    limit = limits["leave"] if outage.cause == "join" else limits.get(outage.cause, math.inf)
    is_awaited = world is not None and world.joined and world.lost | world.left
    return max(limit, JOIN_LIMIT_SECONDS) if is_awaited else limit


def _limits(history: History) -> dict[str, float]:
    """Seconds by cause. How long a run stays down outside of a drill is its user's affair."""
    peer_timeout = float(history.config.get("peer_timeout") or 10.0)
    limits = {"peer_lost": 3 * peer_timeout + 30, "leave": 30.0, "join": JOIN_LIMIT_SECONDS}
    if history.drill is not None:
        limits |= {"restart": RESTART_LIMIT_SECONDS}
    standstill = history.drill.standstill if history.drill is not None else _standstill(history)
    return {cause: limit + standstill for cause, limit in limits.items()}


def _standstill(history: History) -> float:
    """The longest that the job was without a step by itself, seconds: from its start to its first step, as where it
    compiles; by the word of its events, evaluating or saving; or from a step to the next one of the same world.

    What a job does by itself comes again: of each kind the longest does not count, for it may be a hang. An evaluation
    or a snapshot that is the only one does: events say what it was.
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
    if len(faults) < planned:
        findings.append(f"only {len(faults)} of {planned} faults were tried")
    injected = Counter(fault.name for fault in faults if fault.injected_at is not None)
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in sorted(injected.items())) or "none", findings
