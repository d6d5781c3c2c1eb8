"""Check that a drill's job lost only workers whose nodes had a fault."""

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
"""how long a fault that takes no worker may stop the steps, beyond two ordinary steps"""


def check_losses(history: History) -> Found:
    """Workers that were lost, left or failed had a fault on their node; a fault that takes no worker stops no steps."""
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
        found = (_standstill(times, limit, fault, drill.faults), *_crashed(history, fault))
        findings += [f"{fault.described}: {what}" for what in found if what]
    return f"{len(gone)} were lost, left or failed", findings


def _gone(history: History) -> Iterator[tuple[str, float, str]]:
    """Yield (member, time, how). A member that the next world lacks was lost, whether that world names it or not. It
    left if its own `done` event says `stopped`. A worker that failed with LeftOut was lost, and is not counted twice.
    New processes lose none of an earlier start."""
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
    """Map the generation of a world that stood to the members lost since the one before, and each to its time. A world
    that was agreed on and broke before it stood has no event of its own. Only members of the next world are believed: a
    worker that was cut off reports all others as lost."""
    found: dict[int, dict[str, float]] = {}
    for line in history.of("peer_lost"):
        before, time = line["generation"], float(line["time"])
        if before is None:  # of a process that was in no world that stood
            later = [world for world in history.worlds if world.time >= time and line["writer"] in world.members]
        else:
            later = [world for world in history.worlds if world.generation > before]
        for world in later[:1]:
            if world.generation - 1 != before and line["writer"] in world.members:  # else that world's event names them
                for member in line.get("lost_members") or ():
                    found.setdefault(world.generation, {}).setdefault(str(member), time)
    return found


def _ended_unasked(history: History, drill: DrillRecord, gone: list[tuple[str | None, float]]) -> Iterator[str]:
    """Yield nodes that ended early or in error, with no fault and no event of a loss: a world of new processes reports
    no losses. check_end covers the nodes of the last world."""
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
    """Return whether a fault hit a node since its start. After it was undone it explains losses up to its limit."""
    started = _started(drill, node, time)
    return any(
        fault.injected_at is not None
        and started <= fault.injected_at <= time
        and (fault.undone_at is None or time <= fault.undone_at + fault.limit_seconds)
        for fault in drill.faults
        if node in fault.may_take
    )


def _started(drill: DrillRecord, node: str, by: float) -> float:
    """The time of the node's last start, at most `by`; 0.0 without one."""
    starts = (line["time"] for line in drill.nodes if (line["node"], line["what"]) == (node, "started"))
    return max((time for time in starts if time <= by), default=0.0)


def _standstill(times: Sequence[float], limit: float, fault: FaultRecord, faults: Sequence[FaultRecord]) -> str | None:
    """Describe how long the steps (at `times`) stood still around a fault that should stop none; None if they did not.
    A gap counts only up to the next fault."""
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
    """Yield the workers that were asked to leave and were lost instead."""
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
