"""Checks of what a run left on the disk and on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_train.drills.finding import Found, Skip
from elastic_train.drills.history import History
from elastic_train.errors import SnapshotDamaged, SnapshotError


def check_snapshots(history: History) -> Found:
    """No torn snapshot lies there, and none was ever restored."""
    from elastic_train.snapshot import verify

    infos, problems = find_snapshots_of(history)
    planted = {str(fault.target) for fault in (history.drill.faults if history.drill else []) if fault.name == "damage"}
    whole_steps, damaged_steps = set(), set()
    for info in infos:
        try:
            verify(info)
            whole_steps.add(info.step)
        except SnapshotDamaged as error:
            damaged_steps.add(info.step)
            problems.append(str(error))
    findings = [text for text in problems if not any(name in text for name in planted)]
    findings += [
        f"{line['writer']} restored the snapshot of step {line['restored_step']}, which is damaged"
        for line in history.of("restore")
        if line["source"] == "snapshot" and line["restored_step"] in damaged_steps - whole_steps
    ]
    if not infos and not problems:
        raise Skip("no snapshot in the run directory")
    on_purpose = f", {len(planted)} damaged on purpose" if planted else ""
    return f"{len(infos)} snapshots{on_purpose}", findings


def find_snapshots_of(history: History) -> tuple[list[Any], list[str]]:
    """(those with a readable manifest and the right size, what is wrong with the others)."""
    from elastic_train.snapshot import find_snapshots

    problems: list[str] = []
    given = history.config.get("snapshot_dir")
    directory = Path(given) if isinstance(given, str) else history.run_dir / "snapshots"
    try:
        return find_snapshots(directory, warn=problems.append), problems
    except SnapshotError as error:
        return [], [str(error)]


def check_leftovers(history: History) -> Found:
    """Nothing is left of a run that has ended: no process, no temporary file, no handoff, no port."""
    if not history.is_finished:
        raise Skip("the run has not finished")
    from elastic_train.status import process_is_alive

    findings = [f"{name} is a temporary file" for name in history.names if _is_temporary(name)]
    for line in history.of("start"):
        if process_is_alive(str(line["host"]), int(line["pid"]), float(line["time"])):
            findings.append(f"process {line['pid']}, a worker of this run, still runs")
    findings += [f"{path} is a handoff that nobody will take" for path in _handoffs(history)]
    if history.drill is not None and history.drill.leftovers is not None:
        findings += history.drill.leftovers
    return "processes and shared memory of this machine, temporary files", findings


def _is_temporary(name: str) -> bool:
    last = Path(name).name
    return last.startswith((".tmp-", ".owner-")) or last.endswith(".tmp")


def _handoffs(history: History) -> list[Path]:
    from elastic_train.run_directory import RunDirectory
    from elastic_train.saving import handoff_directory

    if ".directory-id" not in history.names:  # asking for it would make one
        return []
    path = handoff_directory(RunDirectory(history.run_dir))
    return [path] if path.exists() else []
