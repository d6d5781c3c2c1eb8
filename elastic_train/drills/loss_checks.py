"""Check of whom a drill's job lost: nobody whom no fault had touched."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_train.drills.finding import Found, Skip
from elastic_train.drills.history import History
from elastic_train.drills.lost_time import lost_time
from elastic_train.drills.record import DrillRecord, FaultRecord

STANDSTILL_SECONDS = 1.0
"""what a fault that takes nobody may cost at once, beyond two ordinary steps; a pause is shorter"""


def check_losses(history: History) -> Found:
    """Whoever was lost, left or failed belongs to a node that a fault had struck; others were not even held up."""
    if history.drill is None:
        raise Skip("not a drill")
    drill = history.drill
    findings = []
    num_gone = 0
    for member, time, what in sorted(set(_gone(history)), key=lambda found: found[1]):
        num_gone += 1
        node = drill.node_of.get(member)
        if node is None or not _is_accounted_for(drill, node, member, time):
            findings.append(f"{member} of {node or 'no node that was seen'} {what}, and no fault had struck it")
    findings += [
        f"fault {fault.number} ({fault.name} of {fault.target}): not one step while it lasted"
        for fault in drill.faults
        if _stood_still(history, fault)
    ]
    return f"{num_gone} were lost, left or failed", findings


def _gone(history: History) -> Iterator[tuple[str, float, str]]:
    """(member, when, how). A worker that others went on without says so itself; it is lost in their next world."""
    for world in history.worlds:
        for member in world.lost:
            yield member, world.time, f"was lost before generation {world.generation}"
        for member in world.left:
            yield member, world.time, f"left before generation {world.generation}"
    for line in history.of("done"):
        error = str(line.get("error"))
        if line.get("outcome") == "failed" and not error.startswith("LeftOut"):
            yield str(line["writer"]), float(line["time"]), f"failed: {error}"


def _is_accounted_for(drill: DrillRecord, node: str, member: str, time: float) -> bool:
    """Whether a fault had struck the node since its start, or its agent restarted the worker so that others join."""
    here = [line for line in drill.nodes if line["node"] == node]
    started = max((line["time"] for line in here if line["what"] == "started" and line["time"] <= time), default=0.0)
    if any(node in fault.may_take and _is_due_to(fault, started, time) for fault in drill.faults):
        return True
    after = next((line for line in here if line["time"] > time and line.get("member") != member), None)
    return after is not None and after["what"] == "worker"


def _is_due_to(fault: FaultRecord, started: float, time: float) -> bool:
    if fault.struck_at is None or not started <= fault.struck_at <= time:
        return False
    return fault.undone_at is None or time <= fault.undone_at + fault.limit_seconds


def _stood_still(history: History, fault: FaultRecord) -> bool:
    """Whether no step was committed during a fault that is to pass unnoticed, where there was time for one."""
    if fault.struck_at is None or fault.undone_at is None or fault.may_take:
        return False
    ordinary = max(lost_time(history).step_seconds.values(), default=0.0)
    has_time = fault.undone_at - fault.struck_at > STANDSTILL_SECONDS + 2 * ordinary
    return has_time and not any(fault.struck_at < step.time < fault.undone_at for step in history.steps)
