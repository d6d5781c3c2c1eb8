"""Checks of what was done to a run, and of how it got over that."""

from __future__ import annotations

from collections import Counter

from elastic_train.drills.finding import Found, Skip
from elastic_train.drills.history import History
from elastic_train.drills.lost_time import lost_time

JOIN_LIMIT_SECONDS = 300.0
"""the start of Python processes with torch on a loaded machine"""


def check_incidents(history: History) -> Found:
    """Every incident was got over within its limit, and cost no committed step that did not have to be lost."""
    result = history.result or {}
    incidents = [entry for entry in result.get("incidents") or [] if isinstance(entry, dict)]
    faults = [fault for fault in history.drill.faults if fault.struck_at is not None] if history.drill else []
    outages = lost_time(history).outages
    if not incidents and not faults and not outages:
        raise Skip("nothing happened")
    findings = []
    peer_timeout = float(history.config.get("peer_timeout") or 10.0)
    limits = {"peer_lost": 3 * peer_timeout + 30, "leave": 30.0, "join": JOIN_LIMIT_SECONDS}
    for outage in outages:
        limit = limits.get(outage.cause)
        if limit is not None and outage.seconds > limit:
            findings.append(
                f"{outage.cause} before generation {outage.generation}: {outage.seconds:.2f} s without a step, "
                f"limit {limit:.0f} s"
            )
    # Who kills everything at once loses what came after the last snapshot; no other harm of a drill does.
    may_lose = history.drill is None or any(fault.name in ("kill-all", "damage") for fault in faults)
    for entry in incidents:
        lost = int(entry.get("committed_steps_lost") or 0)
        if lost and not (entry.get("cause") == "restart" and may_lose):
            findings.append(f"{entry.get('cause')}: {lost} committed steps lost")
    for fault in faults:
        if fault.recovered_seconds is None:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): {fault.reason or 'never got over'}"
            )
        elif fault.recovered_seconds > fault.limit_seconds:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): next committed step after "
                f"{fault.recovered_seconds:.2f} s, limit {fault.limit_seconds:.0f} s"
            )
    worst = max((outage.seconds for outage in outages if outage.cause == "peer_lost"), default=None)
    told = "" if worst is None else f"; longest outage by a lost peer {worst:.2f} s"
    return f"{len(incidents)} incidents, {len(faults)} faults, {len(outages)} outages{told}", findings


def check_faults(history: History) -> Found:
    """Every fault of the drill really struck."""
    if history.drill is None:
        raise Skip("not a drill")
    faults = history.drill.faults
    planned = int(history.drill.settings.get("num_faults", len(faults)))
    findings = [
        f"fault {fault.number} ({fault.name}) did not strike: {fault.reason}"
        for fault in faults
        if fault.struck_at is None
    ]
    if len(faults) < planned:
        findings.append(f"only {len(faults)} of {planned} faults were tried")
    struck = Counter(fault.name for fault in faults if fault.struck_at is not None)
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in sorted(struck.items())) or "none", findings
