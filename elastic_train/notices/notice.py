"""Convert the answers of notice sources into a `PreemptionNotice`; the interface of a source. Pure functions.

These pages define the answers, by title:

- AWS: "Spot Instance interruption notices" and "EC2 instance rebalance recommendations" (Amazon EC2 User Guide)
- GCP: "Spot VMs" (Preemption process), "Monitor and plan for a host maintenance event" and "Handle GPU host
  maintenance events" (Compute Engine)
- Azure: "Azure Metadata Service: Scheduled Events for Linux VMs" (Azure Virtual Machines)
- Kubernetes: "Disruptions" (Pod disruption conditions) and "Taints and Tolerations"
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from elastic_train.preemption import PreemptionNotice
from elastic_train.runlog.reader import dict_of, parse

AZURE_LOSING = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events that end the processes of a machine. A `Freeze` is only a pause of some seconds."""
LOSING_TAINTS = {
    "node.kubernetes.io/out-of-service": "the node is out of service",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler deletes the node",
    "cloud.google.com/impending-node-termination": "the node is about to be terminated",
    "aws-node-termination-handler/spot-itn": "the spot instance is interrupted",
    "karpenter.sh/disrupted": "Karpenter disrupts the node",
}
"""Keys of taints on nodes that go away. A cordoned node (`unschedulable`) keeps its pods."""


LATEST = 253402300800
"""The year 10000, in Unix seconds."""


class NoticeUnreadable(Exception):
    """A source gave no answer, or a meaningless one. Its previous answer still counts."""


class NoticeSource(Protocol):
    """A source of notices that this node is taken away."""

    name: str
    poll_seconds: float

    def look(self) -> PreemptionNotice | None:
        """Ask the source; return its notice, or None if it clearly has none. May block for some seconds.

        Raises: NoticeUnreadable.
        """
        ...


# --- AWS --------------------------------------------------------------------------------------------------------------


def from_instance_action(text: str) -> PreemptionNotice:
    """Parse `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`. Actions are terminate, stop and hibernate."""
    fields = json_object(text)
    return PreemptionNotice("aws", f"spot instance {_text(fields, 'action')}", _unix_seconds(_text(fields, "time")))


def from_rebalance(text: str) -> PreemptionNotice:
    """Parse `{"noticeTime": "2020-10-27T08:22:00Z"}`: an interruption is likely, at an unknown time."""
    _unix_seconds(_text(json_object(text), "noticeTime"))
    return PreemptionNotice("aws", "rebalance recommendation", is_certain=False)


# --- GCP --------------------------------------------------------------------------------------------------------------


def from_preempted(text: str) -> PreemptionNotice | None:
    """Parse TRUE or FALSE. After TRUE the machine ends within 30 s."""
    match text.strip().upper():
        case "TRUE":
            return PreemptionNotice("gcp", "the VM is preempted")
        case "FALSE":
            return None
    raise NoticeUnreadable(f"neither TRUE nor FALSE: {text[:40]!r}")


def from_maintenance_event(text: str) -> PreemptionNotice | None:
    """Parse NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE. A migration keeps the processes. The
    answer does not contain the time at which the machine ends."""
    match text.strip():
        case "NONE":
            return None
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return PreemptionNotice("gcp", "the VM is migrated to another host", is_certain=False)
        case "TERMINATE_ON_HOST_MAINTENANCE":
            return PreemptionNotice("gcp", "the VM is terminated for maintenance of its host")
    raise NoticeUnreadable(f"no maintenance event: {text[:40]!r}")


# --- Azure ------------------------------------------------------------------------------------------------------------


def from_scheduled_events(text: str, machine: str) -> PreemptionNotice | None:
    """Parse `{"DocumentIncarnation": 1, "Events": [{"EventType": "Preempt", "Resources": ["vm-1"], "EventStatus":
    "Scheduled", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", ...}]}`; `NotBefore` is empty once the event has started.

    Args:
        machine: the name of this VM; a VM of a scale set also sees events of the others. An unreadable event raises
            only if no readable one is of this VM.
    """
    events = json_object(text).get("Events")
    if not isinstance(events, list):
        raise NoticeUnreadable("no list of Events")
    ours: list[PreemptionNotice] = []
    unread: NoticeUnreadable | None = None
    for event in events:
        try:
            if machine in _resources(event):
                ours.append(_from_event(event))
        except NoticeUnreadable as error:
            unread = error
    if unread is not None and not ours:
        raise unread
    # The event to act on: the earliest of the certain ones, if there are any.
    return min(ours, key=lambda one: (not one.is_certain, one.deadline or 0.0), default=None)


def _resources(event: Any) -> list[Any]:
    named = event.get("Resources") if isinstance(event, dict) else None
    if not isinstance(named, list):
        raise NoticeUnreadable("an event without Resources")
    return named


def _from_event(event: dict[str, Any]) -> PreemptionNotice:
    kind, not_before = _text(event, "EventType"), _text(event, "NotBefore")
    deadline = _unix_seconds(not_before, parsedate_to_datetime) if not_before else None
    return PreemptionNotice("azure", f"scheduled event {kind}", deadline, is_certain=kind in AZURE_LOSING)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def from_pod(pod: dict[str, Any]) -> PreemptionNotice | None:
    """Find the condition DisruptionTarget: the pod is about to be ended, at `deletionTimestamp` if that is set."""
    for condition in dict_of(pod, "status").get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            ends = dict_of(pod, "metadata").get("deletionTimestamp")
            reason = f"the pod is disrupted: {condition.get('reason')}"
            return PreemptionNotice("kubernetes", reason, _unix_seconds(ends) if isinstance(ends, str) else None)
    return None


def from_node(node: dict[str, Any]) -> PreemptionNotice | None:
    """Find a taint of a node that goes away; it contains no time."""
    keys = {taint.get("key") for taint in dict_of(node, "spec").get("taints") or ()}
    said = next((said for key, said in LOSING_TAINTS.items() if key in keys), None)
    return None if said is None else PreemptionNotice("kubernetes", said)


# --- a file, an endpoint of one's own ---------------------------------------------------------------------------------


def from_own(source: str, text: str) -> PreemptionNotice | None:
    """Parse `{"deadline": 1790000000, "certain": true, "reason": "...", "source": "..."}`; each field is optional. The
    deadline is in Unix seconds or as 2026-09-18T08:22:00Z. An empty text is a certain notice without a deadline, `null`
    is no notice."""
    if not text.strip():
        return PreemptionNotice(source, "notice")
    if text.strip() == "null":
        return None
    fields = json_object(text)
    deadline, is_certain = fields.get("deadline"), fields.get("certain", True)
    if isinstance(deadline, str):
        deadline = _unix_seconds(deadline)
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float)):
        raise NoticeUnreadable(f"no time: deadline {deadline!r}")
    if deadline is not None and not 0 <= deadline < LATEST:
        raise NoticeUnreadable("no time: the deadline is no Unix seconds")
    if not isinstance(is_certain, bool):
        raise NoticeUnreadable(f"neither true nor false: certain {is_certain!r}")
    named, reason = (str(fields.get(name) or default) for name, default in (("source", source), ("reason", "notice")))
    return PreemptionNotice(named, reason, deadline, is_certain)


def to_own(notice: PreemptionNotice | None) -> str:
    """Write a notice as JSON for `from_own`."""
    return json.dumps(notice and notice.to_fields())


# --- parts ------------------------------------------------------------------------------------------------------------


def json_object(text: str) -> dict[str, Any]:
    """Raises: NoticeUnreadable."""
    found = parse(text)
    if found is None:
        raise NoticeUnreadable(f"no JSON object: {text[:40]!r}")
    return found


def _text(fields: dict[str, Any], name: str) -> str:
    found = fields.get(name)
    if not isinstance(found, str):
        raise NoticeUnreadable(f"no {name} in it")
    return found


def _unix_seconds(text: str, parse: Callable[[str], datetime] = datetime.fromisoformat) -> float:
    """Parse a time of the years 1970 to 9999, by default as in ISO 8601. Raises: NoticeUnreadable."""
    try:
        moment = parse(text)
        seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        if 0 <= seconds < LATEST:
            return seconds
        raise ValueError(moment)
    except (ValueError, TypeError, OverflowError) as error:
        raise NoticeUnreadable(f"no time: {text[:40]!r}") from error
