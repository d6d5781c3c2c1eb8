"""Checks of what a run left on the disk and on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from elastic_train.errors import SnapshotError, SnapshotUnread
from elastic_train.observe.status_files import process_is_alive
from elastic_train.runlog.events import FINISHED
from elastic_train.runlog.reader import Line
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots, is_there, verify
from elastic_train.tools.audit.finding import Found, Skip
from elastic_train.tools.audit.history import History
from elastic_train.tools.audit.record import Effect
from elastic_train.wording import count


def check_snapshots(history: History) -> Found:
    """The last step has a snapshot, no snapshot is torn, and no torn one was ever restored."""
    infos, problems = find_snapshots_of(history)
    planted = history.drill.damaged if history.drill is not None else frozenset()
    whole_steps, damaged_steps = set(), set()
    for info in infos:
        try:
            verify(info)
            whole_steps.add(info.step)
        except SnapshotUnread as error:
            if not is_there(info.path):  # the running job has pruned it since
                continue
            damaged_steps |= {info.step} if info.name not in planted else set()
            problems.append(str(error))
    findings = [text for text in problems if not any(name in text for name in planted)]
    findings += [
        f"{line['writer']} restored the snapshot of step {line['restored_step']}, which is damaged"
        for line in history.of("restore")
        if line["source"] == "snapshot" and line["restored_step"] in damaged_steps - whole_steps
    ]
    findings += _restored_although_damaged(history)
    if history.is_finished and history.last_step not in {info.step for info in infos}:
        # A folder outside of the run directory may be on another machine, except in a drill.
        if history.drill is not None or not _folders_elsewhere(history):
            findings.append(f"finished, but there is no snapshot of step {history.last_step}")
        elif history.last_step not in {int(line["snapshot_step"]) for line in history.of("snapshot")}:
            findings.append(f"finished, but no worker has written a snapshot of step {history.last_step}")
    if not infos and not findings:
        raise Skip(f"no snapshot in the run directory{history.in_bucket}")
    on_purpose = f", {len(planted)} damaged on purpose" if planted else ""
    elsewhere = [] if history.in_bucket else _folders_elsewhere(history)
    absent = [str(folder) for folder in elsewhere if not folder.is_dir()]
    not_here = f"; not on this machine: {', '.join(absent)}" if absent else ""
    return count(len(infos), "snapshot") + on_purpose + not_here, findings


def _restored_although_damaged(history: History) -> Iterator[str]:
    """Yield restores of a snapshot that the drill had damaged, up to the next snapshot of the same step."""
    for fault in history.drill.faults if history.drill is not None else ():
        if not fault.has_done(Effect.DAMAGES):
            continue
        since = [line for line in history.events if float(line["time"]) > (fault.injected_at or 0.0)]
        for line in since:
            if line["event"] == "snapshot" and _is_of_step(fault.target, int(line["snapshot_step"])):
                break
            is_restored = line["event"] == "restore" and line["source"] == "snapshot"
            if is_restored and _is_of_step(fault.target, int(line["restored_step"])):
                yield f"{line['writer']} restored {fault.target}, which the drill had damaged"


def _is_of_step(name: str, step: int) -> bool:
    return name.startswith(f"step-{step:012d}-")


def find_snapshots_of(history: History) -> tuple[list[SnapshotInfo], list[str]]:
    """Return (snapshots with a readable manifest and the right size, what is wrong with the others)."""
    infos, problems = list[SnapshotInfo](), list[str]()
    for folder in history.snapshot_folders:
        try:
            infos += find_snapshots(folder, warn=problems.append)
        except SnapshotError as error:
            problems.append(str(error))
    return infos, problems


def check_leftovers(history: History) -> Found:
    """Nothing is left of a run that has ended: no process, no temporary file, no port."""
    if not history.is_finished:
        raise Skip("the run has not finished")
    folders = [folder for folder in _folders_elsewhere(history) if folder.is_dir()]
    names = (*history.names, *(str(path) for folder in folders for path in sorted(folder.iterdir())))
    findings = [f"{name} is a temporary file" for name in names if _is_temporary(name)]
    for line in history.of("start"):
        if process_is_alive(line) and (history.drill is not None or not _is_through(history, line)):
            findings.append(f"process {line['pid']}, a worker of this run, still runs")
    if history.drill is not None:
        own = history.drill.leftovers
        findings += ["the drill did not look for what it left"] if own is None else own
    return "processes of this machine, temporary files", findings


def _is_through(history: History, start: Line) -> bool:
    """Return whether the process has trained to the end: a script with its own loop may go on after `run`. In
    containers an earlier process may have had the same name, so only a later `done` counts."""
    return any(
        line["writer"] == start["writer"] and line["time"] >= start["time"] and line.get("outcome") in FINISHED
        for line in history.of("done")
    )


def _is_temporary(name: str) -> bool:
    last = Path(name).name
    return (last.startswith(".") and ".tmp-" in last) or last.endswith(".tmp")


def _folders_elsewhere(history: History) -> list[Path]:
    """The folders of snapshots outside of the run directory."""
    return [folder for folder in history.snapshot_folders if not folder.is_relative_to(history.run_dir)]
