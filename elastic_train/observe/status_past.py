"""The incidents and warnings of a run so far."""

from __future__ import annotations

import re
from collections import Counter

from elastic_train.observe.status_files import WorkerLines
from elastic_train.runlog.reader import Line, float_of, int_of, time_of
from elastic_train.wording import count, duration, workers_go_on


def incidents_of(workers: list[WorkerLines], result: Line | None) -> tuple[Line, ...]:
    """Return the run's incidents in the form of result.json, oldest first. They are from result.json if it belongs to
    this end, else from the events `world`. Older versions have fewer fields there, and no incidents in events."""
    if result is not None and isinstance(result.get("incidents"), list):
        return tuple(filter(_is_incident, result["incidents"]))
    worlds = [line for worker in workers for line in worker.lines if line["event"] == "world"]
    found: dict[tuple[int | None, str], Line] = {}
    for line in sorted(worlds, key=lambda line: int_of(line, "rank") or 0):  # rank 0's first: the result has these
        for one in line["incidents"] if isinstance(line.get("incidents"), list) else ():
            if _is_incident(one):
                found.setdefault((int_of(one, "generation"), one["cause"]), one)
    return tuple(sorted(found.values(), key=lambda one: (int_of(one, "generation") or 0, time_of(one))))


def _is_incident(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("cause"), str) and float_of(one, "time") is not None


def describe_incident(one: Line, now: float) -> str:
    """Return a line such as `peer_lost, 8.7 s ago: lost a/0/12; generation 2: 2 workers go on at step 144`. Unknown
    parts are left out."""
    lost, left, joined = (_names(one, f"{how}_members") for how in ("lost", "left", "joined"))
    if one["cause"] == "leave":  # an older version has members that left in `lost_members`
        lost, left = "", left or lost
    step, lost_steps, size = (int_of(one, name) for name in ("step", "committed_steps_lost", "world_size"))
    who = [f"lost {lost}" if lost else "", f"{left} left" if left else "", f"{joined} joined" if joined else ""]
    where = ""
    if size is not None and step is not None:
        where = f"generation {one.get('generation')}: {workers_go_on(size, step)}"
    steps = f"{count(lost_steps, 'committed step')} lost" if lost_steps else ""
    if one.get("committed_steps_lost", 0) is None:
        steps = "committed steps may be lost"
    told = "; ".join(filter(None, [*who, where, steps]))
    return f"{one['cause']}, {duration(now - time_of(one))} ago{': ' if told else ''}{told}"


def _names(one: Line, name: str) -> str:
    found = one.get(name)
    return ", ".join(map(str, found)) if isinstance(found, list) else ""


_NUMBER = re.compile(r"\b\d+")


def warnings_of(workers: list[WorkerLines]) -> list[str]:
    lines = [line for worker in workers for line in worker.lines if line["event"] == "warning"]
    counts: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for line in sorted(lines, key=time_of):
        message = str(line.get("message"))
        kind = _NUMBER.sub("", message)
        counts[kind] += 1
        newest.pop(kind, None)  # so that the kind of the newest warning is last
        newest[kind] = message
    return [message if counts[kind] == 1 else f"{message} ({counts[kind]} times)" for kind, message in newest.items()]
