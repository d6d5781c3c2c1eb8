"""A run's status as a table, for people, and as JSON, for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from elastic_train.observe.bill import describe_bill
from elastic_train.observe.capacity import describe_capacity
from elastic_train.observe.status import SILENT_AFTER_SECONDS, NewestSnapshot, RunState, Status
from elastic_train.observe.status_past import describe_incident
from elastic_train.protocol.quarantine import describe_deaths
from elastic_train.runlog.strict_json import file_of
from elastic_train.wording import duration, human_bytes, main_metrics

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_MESSAGES = 3


def describe(status: Status, now: float) -> list[tuple[str, str]]:
    """Return the rows for people as (name, text). Unknown values are left out."""
    rows = [("run", str(status.run_dir)), ("state", status.state.value)]

    def row(name: str, text: str | None) -> None:
        if text is not None:
            rows.append((name, text))

    row("error", status.error)
    if status.last_line_time is None and status.state is RunState.DEAD:
        row("note", "no worker has written anything, and its processes are gone")
    if status.last_line_time is not None:
        row("last event", f"{duration(now - status.last_line_time)} ago{_meaning_of_silence(status, now)}")
    if status.generation is not None:
        row("generation", str(status.generation))
    if status.world_size is not None:
        row("world size", str(status.world_size))
    row("members", ", ".join(status.members) or None)
    row("nodes", describe_capacity(status.capacity))
    for one in status.quarantined:
        deaths = describe_deaths(one.get("deaths", "several"))
        row("quarantine", f"{one['host']}, for {duration(one['until'] - now)} more: {deaths}")
    row("step", _of(status.step, status.last_step))
    if status.epoch is not None:
        position = _of(status.samples_done, status.length)
        row("epoch", f"{_of(status.epoch + 1, status.num_epochs)}" + (f", {position} samples" if position else ""))
    row("loss", None if status.loss is None else f"{status.loss:.4f}")
    row("samples/s", None if status.samples_per_second is None else f"{status.samples_per_second:,.0f}")
    at = f" at step {status.accuracy_step}" if status.accuracy_step != status.step else ""
    for name, value in main_metrics(status.test_metrics).items():
        row(f"test {name}", f"{value}{at}")
    if (best := status.best) is not None:
        row("best", f"{best['metric']:g} at step {best['step']}")
    row("snapshot", _describe_snapshot(status.snapshot, status.bucket, now))
    row("training", None if status.goodput_ratio is None else f"{status.goodput_ratio:.0%} of the wall time")
    at = f" at step {status.bill_step}" if status.bill_step != status.step else ""
    row("bill", (told := describe_bill(status.bill)) and f"{told}{at}")
    row("incidents", str(len(status.incidents)) if status.incidents else None)
    for incident in reversed(status.incidents[-SHOWN_MESSAGES:]):
        row("incident", describe_incident(incident, now))
    row("warnings", _some(status.warnings))
    row("result", None if status.result_path is None else str(status.result_path))
    for note in status.notes:
        row("note", note)
    return rows


def _meaning_of_silence(status: Status, now: float) -> str:
    if status.is_drill and status.state in (RunState.DEAD, RunState.SILENT):
        return "; it was a drill, and its nodes are gone" if status.state is RunState.DEAD else "; it is a drill"
    if status.state is RunState.DEAD:
        if status.snapshot is None:
            return (
                "; its processes are gone, and the same command continues from the newest snapshot that a node sees, "
                "or begins anew where there is none"
            )
        return "; its processes are gone, and the same command continues from the snapshot"
    if status.state is RunState.SILENT:
        return "; its processes are on other machines: they are dead, or in a long step"
    is_quiet = status.last_line_time is not None and now - status.last_line_time > SILENT_AFTER_SECONDS
    if is_quiet and status.state in (RunState.RUNNING, RunState.STARTING):
        return "; a process of it lives, waiting or in a long step"
    return ""


def _of(value: int | None, total: int | None) -> str | None:
    if value is None:
        return None
    if total is None:
        return str(value)
    return f"{value} of {total}" if value <= total else f"{value}, more than the {total} asked for"


def _describe_snapshot(snapshot: NewestSnapshot | None, bucket: str | None, now: float) -> str:
    if snapshot is None and bucket is not None:  # new machines have no events of snapshots
        return f"none in these files; elastic-train snapshot list {bucket} shows what is there"
    if snapshot is None:
        return "none"
    size = human_bytes(snapshot.bytes or 0)
    return f"step {snapshot.step}, {duration(now - snapshot.time)} ago, {size}, {snapshot.path}"


def _some(messages: tuple[str, ...]) -> str | None:
    """Return the number of messages, and the last of them; None if there are none."""
    if not messages:
        return None
    shown = messages[-SHOWN_MESSAGES:]
    earlier = f"; {len(messages) - len(shown)} earlier" if len(messages) > len(shown) else ""
    return f"{len(messages)}: " + "; ".join(reversed(shown)) + earlier


_COLOURS = {
    RunState.STARTING: "cyan",
    RunState.RUNNING: "green",
    RunState.FINISHED: "bold green",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "bold red",
    RunState.DEAD: "bold red",
    RunState.SILENT: "yellow",
}


def show(status: Status, now: float, file: TextIO) -> None:
    """Print the status: a table on a terminal, `name: text` lines elsewhere."""
    rows = describe(status, now)
    if not file.isatty():
        print("\n".join(f"{name}: {text}" for name, text in rows), file=file)
        return
    from rich.console import Console

    Console(file=file).print(as_table(status, rows))


def as_table(status: Status, rows: Iterable[tuple[str, str]]) -> Table:
    """Return the rows of `describe` as a table for a terminal, with a bar below the step."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text(text, style=_COLOURS[status.state] if name == "state" else ""))
        if name == "step" and status.step is not None and status.last_step:
            grid.add_row("", ProgressBar(total=status.last_step, completed=status.step, width=40))
    return grid


def to_json(status: Status) -> str:
    """Return one object with the fields of `Status`. Unknown values and numbers that are not finite are null."""
    told = {entry.name: getattr(status, entry.name) for entry in dataclasses.fields(status)}
    told["capacity"] = status.capacity.as_json()
    told["snapshot"] = None if status.snapshot is None else dataclasses.asdict(status.snapshot)
    return file_of(told, default=str)  # only for paths: JSON has all other types
