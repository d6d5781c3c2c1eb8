"""What interrupted a run so far, and what its workers warned of."""

from __future__ import annotations

import re
from collections import Counter

from elastic_train.observe.status_files import WorkerLines
from elastic_train.runlog.reader import Line, int_of, time_of
from elastic_train.wording import count, duration


def incidents_of(workers: list[WorkerLines], result: Line | None, now: float) -> tuple[str, ...]:
    """What interrupted the run: the list of result.json, where it is of this end; else the worlds after the first."""
    if result is not None and isinstance(result.get("incidents"), list):
        return tuple(
            f"{entry.get('cause')}, {duration(now - time_of(entry))} ago, "
            f"{entry.get('committed_steps_lost', 0)} committed steps lost"
            for entry in result["incidents"]
            if isinstance(entry, dict)
        )
    lines = sorted((line for worker in workers for line in worker.lines), key=time_of)
    worlds: dict[int, Line] = {}
    got_state = {
        int_of(line, "generation") for line in lines if line["event"] == "restore" and line.get("source") == "peer"
    }
    for line in lines:
        # Not the first; and of a newcomer, for which each is a start, only where there is no other's.
        if line["event"] == "world" and int_of(line, "generation"):
            before = worlds.setdefault(line["generation"], line)
            worlds[line["generation"]] = line if before.get("cause") == "start" else before

    def cause(line: Line) -> str:
        start = "join" if line["generation"] in got_state else "restart"
        return start if line.get("cause") == "start" else str(line.get("cause"))

    return tuple(
        f"{cause(line)}, {duration(now - time_of(line))} ago, "
        f"generation {line['generation']} with {count(int_of(line, 'world_size'), 'worker')} at step {line.get('step')}"
        for line in worlds.values()
    )


_NUMBER = re.compile(r"\b\d+")


def warnings_of(workers: list[WorkerLines]) -> list[str]:
    lines = [line for worker in workers for line in worker.lines if line["event"] == "warning"]
    counts: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for line in sorted(lines, key=time_of):
        message = str(line.get("message"))
        kind = _NUMBER.sub("", message)
        counts[kind] += 1
        newest.pop(kind, None)  # so that the newest kind is the last
        newest[kind] = message
    return [message if counts[kind] == 1 else f"{message} ({counts[kind]} times)" for kind, message in newest.items()]
