"""Check of whom a drill's job lost: nobody whom no fault had touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from elastic_train.runlog.events import FINISHED
from elastic_train.tools.audit.finding import Found, Skip
from elastic_train.tools.audit.history import History
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.record import DrillRecord, Effect, FaultRecord

STANDSTILL_SECONDS = 1.0
"""what a fault that takes nobody may cost at once, beyond two ordinary steps"""


def check_losses(history: History) -> Found:
    """Workers that were lost, left or failed are of nodes with a fault injected; others were not even held up."""
    if history.drill is None:
        raise Skip("not a drill")
    drill = history.drill
    findings = []
    gone = sorted(set(_gone(history)), key=lambda found: found[1])
    for member, time, what in gone:
        node = drill.node_of.get(member)
        if node is None or not _had_fault(drill, node, time):
            findings.append(f"{member} of {node or 'no node that was seen'} {what}, and no fault was injected there")
    findings += _ended_unasked(history, drill, [(drill.node_of.get(member), time) for member, time, _ in gone])
    times = sorted(step.time for step in history.steps)
    step_seconds = max(lost_time(history).step_seconds.values(), default=0.0)
    limit = STANDSTILL_SECONDS + 2 * step_seconds + drill.standstill
    for fault in drill.faults:
        name = f"fault {fault.number} ({fault.name} of {fault.target})"
        found = (_standstill(times, limit, fault, drill.faults), *_crashed(history, fault))
        findings += [f"{name}: {what}" for what in found if what]
    return f"{len(gone)} were lost, left or failed", findings


def _gone(history: History) -> Iterator[tuple[str, float, str]]:
    """(member, when, how). A worker that others went on without says so itself; it is lost in their next world, whether
    that names it or not; unless it said that it stops. New processes go on without those of an earlier start, and lose
    none of them."""
    on_the_way, before = _lost_on_the_way(history), frozenset[str]()
    ends = [line for line in history.of("done") if line.get("outcome") == "stopped"]
    stopped = {str(line["writer"]): float(line["time"]) for line in ends}
    for world in history.worlds:
        missed = frozenset() if world.is_restored else before.difference(world.members, world.left)
        lost = {**dict.fromkeys(missed.difference(stopped), world.time), **on_the_way.get(world.generation, {})}
        for member, time in {**lost, **dict.fromkeys(world.lost, world.time)}.items():
            yield member, time, f"was lost before generation {world.generation}"
        before = frozenset(world.members)
        left = {member: stopped[member] for member in missed.intersection(stopped)}
        for member, time in {**left, **dict.fromkeys(world.left, world.time)}.items():
            yield member, time, f"left before generation {world.generation}"
    for line in history.of("done"):
        error = str(line.get("error"))
        if line.get("outcome") == "failed" and not error.startswith("LeftOut"):
            yield str(line["writer"]), float(line["time"]), f"failed: {error}"


def _lost_on_the_way(history: History) -> dict[int, dict[str, float]]:
    """Generation of a world that stood -> whom its members had lost since the one before -> when: a world that was
    agreed on, and broke before it stood, has no event of its own. By the word of those that are in the next one; who
    was cut off has lost all others."""
    found: dict[int, dict[str, float]] = {}
    for line in history.of("peer_lost"):
        before, time = line["generation"], float(line["time"])
        if before is None:  # of a process that was in no world that stood
            later = [world for world in history.worlds if world.time >= time and line["writer"] in world.members]
        else:
            later = [world for world in history.worlds if world.generation > before]
        for world in later[:1]:
            if world.generation - 1 != before and line["writer"] in world.members:  # else that world says it
                for member in line.get("lost_members", ()):
                    found.setdefault(world.generation, {}).setdefault(str(member), time)
    return found


def _ended_unasked(history: History, drill: DrillRecord, gone: list[tuple[str | None, float]]) -> Iterator[str]:
    """Nodes that ended before the job, or in error, and that no event reports as lost: a world of new processes reports
    no losses. Nodes of the last world are check_end's."""
    last = {drill.node_of.get(member) for member in history.worlds[-1].members} if history.is_finished else set()
    last_ends = {line["node"]: line for line in drill.nodes if line["what"] == "ended"}
    last_step_at = history.kept[-1].time if history.kept else 0.0
    for line in drill.nodes:
        if line["what"] != "ended" or (line["node"] in last and line is last_ends[line["node"]]):
            continue
        node, time = line["node"], float(line["time"])
        is_known = any(found == node and _started(drill, node, time) <= at <= time for found, at in gone)
        if not is_known and (line.get("code") != 0 or time < last_step_at) and not _had_fault(drill, node, time):
            yield f"{node} ended with code {line.get('code')}, and no fault was injected there"


def _had_fault(drill: DrillRecord, node: str, time: float) -> bool:
    """Whether a fault was injected into a node since its start, and not so long ago that it explains nothing."""
    started = _started(drill, node, time)
    return any(
        fault.injected_at is not None
        and started <= fault.injected_at <= time
        and (fault.undone_at is None or time <= fault.undone_at + fault.limit_seconds)
        for fault in drill.faults
        if node in fault.may_take
    )


def _started(drill: DrillRecord, node: str, by: float) -> float:
    """When it had started last."""
    starts = (line["time"] for line in drill.nodes if (line["node"], line["what"]) == (node, "started"))
    return max((time for time in starts if time <= by), default=0.0)


def _standstill(times: Sequence[float], limit: float, fault: FaultRecord, faults: Sequence[FaultRecord]) -> str | None:
    """How long the steps, whose `times` these are, stood still around a fault that is to pass unnoticed; None where
    they did not. What comes after the next fault is of that one."""
    if fault.injected_at is None or fault.undone_at is None or fault.may_take:
        return None
    later = [
        other.injected_at for other in faults if other.injected_at is not None and other.injected_at > fault.injected_at
    ]
    end = min(later, default=math.inf)
    gaps = [
        min(after, end) - before
        for before, after in itertools.pairwise(times)
        if before < fault.undone_at and after > fault.injected_at
    ]
    longest = max(gaps, default=0.0)
    if fault.has_done(Effect.HOLDS_UP):
        limit += fault.undone_at - fault.injected_at
    return f"{longest:.2f} s without a step while it lasted, limit {limit:.2f} s" if longest > limit else None


def _crashed(history: History, fault: FaultRecord) -> Iterator[str]:
    """The workers that were asked to leave and were lost instead."""
    injected_at = fault.injected_at
    if Effect.ASKS_TO_LEAVE not in fault.effects or injected_at is None or history.drill is None:
        return
    before = [world for world in history.worlds if world.time <= injected_at][-1:]
    after = [world for world in history.worlds if world.time > injected_at][:1]
    said = {
        str(line["writer"])
        for line in history.of("done")
        if line["time"] >= injected_at and line.get("outcome") in ("stopped", *FINISHED)
    }
    on_the_way = _lost_on_the_way(history)
    lost = {member for world in after for member in (*world.lost, *on_the_way.get(world.generation, ()))}
    for member in (member for world in before for member in world.members):
        if history.drill.node_of.get(member) in fault.may_take and (member not in said or member in lost):
            yield f"{member} was asked to leave, and was lost"
