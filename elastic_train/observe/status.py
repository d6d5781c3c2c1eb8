"""Where a run stands, from the files in its run directory alone: `elastic-train status RUN_DIR`.

It reads what others may be writing at the moment, and never locks or changes anything. Event files can have millions
of lines; only the head of each (its `start` event) and the tail are read. Imports neither torch nor numpy.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from elastic_train.errors import RunDirectoryError, SnapshotError
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots
from elastic_train.wording import count, duration, human_bytes
from elastic_train.world import host_name

if TYPE_CHECKING:
    from rich.table import Table

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 256 * 1024
NEWEST_FILES = 64
"""event files that are read at most; a run that was restarted often has one per worker and start"""
SILENT_AFTER_SECONDS = 30.0
RATE_SECONDS = 30.0
"""how much of the end of a run its samples per second are taken over"""
SHOWN_MESSAGES = 3

Line = dict[str, Any]
IsAlive = Callable[[Line], bool | None]
"""a process's `start` event -> whether it lives; None where this machine cannot tell"""


class RunState(StrEnum):
    STARTING = "starting"
    """workers meet; no world of this start stands yet"""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """by SIGTERM or SIGINT, state saved"""
    FAILED = "failed"
    DEAD = "dead"
    """ended without a `done` event: every worker that wrote last is gone from this machine"""
    SILENT = "silent"
    """no `done` event and no line for a while, of workers on other machines: dead, or in a long step"""


@dataclass(frozen=True)
class Status:
    """What the files tell. None where they do not."""

    run_dir: Path
    state: RunState
    last_line_time: float | None = None
    """Unix seconds of the newest event"""
    error: str | None = None
    """why the run failed"""
    generation: int | None = None
    world_size: int | None = None
    members: tuple[str, ...] = ()
    """`host/local_rank/pid` by rank"""
    step: int | None = None
    last_step: int | None = None
    """the step with which training ends"""
    epoch: int | None = None
    """of the newest committed step, from 0"""
    num_epochs: int | None = None
    """None where training ends before, at --max-steps"""
    samples_done: int | None = None
    """in that epoch"""
    length: int | None = None
    """samples of an epoch"""
    loss: float | None = None
    samples_per_second: float | None = None
    test_accuracy: float | None = None
    accuracy_step: int | None = None
    """committed steps when it was measured"""
    snapshot: SnapshotInfo | None = None
    """the newest whole one by its size; its checksum is not verified"""
    incidents: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """oldest first; of those that differ in numbers only, as in the step of a snapshot, the newest, with a count"""
    is_drill: bool = False
    result_path: Path | None = None
    goodput_ratio: float | None = None
    notes: tuple[str, ...] = ()


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    """What one event file tells: one process."""

    lines: list[Line]
    """head and tail, in the order of writing; not empty"""
    written: float
    """when the newest was, Unix seconds by the clock of the file system, which is the same for all"""
    first: Line = field(init=False)
    last: Line = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.last = self.lines[0], self.lines[-1]

    @property
    def generation(self) -> int | None:
        return max((g for line in self.lines if (g := _int(line, "generation")) is not None), default=None)

    @property
    def outcome(self) -> str | None:
        """Of its `done` event."""
        return str(self.last.get("outcome")) if self.last["event"] == "done" else None

    @property
    def last_time(self) -> float:
        """Of its last line by its own clock, unless that is ahead: no line is newer than its file."""
        return min(float(self.last["time"]), self.written)

    def is_alive(self, ask: IsAlive) -> bool | None:
        starts = [line for line in self.lines if line["event"] == "start"]
        return ask(starts[-1] if starts else self.first)  # in containers a later process may have the name of an older


def read_status(run_dir: Path, now: float, is_alive: IsAlive | None = None) -> Status:
    """Where the run in `run_dir` stood at `now` (Unix seconds).

    Raises:
        RunDirectoryError: there is no run in it, or it cannot be read.
    """
    try:
        names = set(os.listdir(run_dir))
        workers = _read_workers(run_dir / "events")
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{run_dir} does not exist; --run-dir of the training says where the run is") from error
    except OSError as error:
        raise RunDirectoryError(f"{run_dir} cannot be read: {error.strerror}") from error
    if not workers and not names & {"owner.json", "drill", "snapshots", "result.json", ".claim.lock"}:
        raise RunDirectoryError(f"{run_dir} holds no run: there is no events/ in it")
    if is_alive is None and "drill" in names:  # whose nodes may have host names of their own, and are here
        lives = drill_is_alive(run_dir / "drill")

        def is_alive(start: Line) -> bool | None:
            known = process_is_alive(start)
            return lives if known is None else known

    return _status(run_dir, workers, now, is_alive or process_is_alive)


def _status(run_dir: Path, workers: list[_Worker], now: float, is_alive: IsAlive) -> Status:
    is_drill = (run_dir / "drill").is_dir()
    generation = max((g for worker in workers if (g := worker.generation) is not None), default=None)
    current = [worker for worker in workers if worker.generation == generation]
    newest_time = max((float(worker.last["time"]) for worker in current), default=0.0)
    newcomers = [
        worker
        for worker in workers
        if generation is not None and worker.generation is None and float(worker.last["time"]) > newest_time
    ]
    state, notes = _classify(current, now, is_alive), []
    if state is RunState.RUNNING and generation is None:
        state = RunState.STARTING
    if not workers and (owner := _read_json(run_dir / "owner.json") or ({} if is_drill else None)) is not None:
        state = RunState.DEAD if is_alive(owner) is False else state
    attempt = _classify(newcomers, now, is_alive) if newcomers and state is not RunState.RUNNING else None
    if attempt is RunState.RUNNING:
        state = RunState.STARTING
    elif attempt is not None:
        notes.append(_attempt_note(attempt, newcomers, now))

    world = [line for worker in current for line in worker.lines if _int(line, "generation") == generation]
    newest = max(world, key=_time, default=None)
    start = max((line for worker in current + newcomers for line in worker.lines if line["event"] == "start"),
                key=_time, default={})  # fmt: skip
    config = _dict(start, "config")
    problems: list[str] = []
    snapshot = _newest_snapshot(run_dir, config, problems)
    step_lines = sorted((line for line in world if line["event"] == "step"), key=lambda line: _int(line, "step") or 0)
    step = max((s for line in world if (s := _int(line, "step")) is not None), default=None)
    if step is None and snapshot is not None:
        step = snapshot.step
    batch, num_epochs = _int(config, "global_batch_size"), _int(config, "epochs")
    length = _length(start, snapshot, step_lines)
    last_step = _last_step(length, batch, num_epochs, _int(config, "max_steps"))
    epoch, samples_done = _position(step, step_lines, length, batch)
    result = _read_json(run_dir / "result.json")
    result_is_current = result is not None and (step is None or _int(result, "step") == step)
    accuracy, accuracy_step = _accuracy(world, result)
    if world and not any(_int(line, "rank") == 0 for line in world):
        notes.append("rank 0 writes its events elsewhere: what it alone knows (steps, loss) is missing here")
    if result is not None and not result_is_current:
        notes.append(f"result.json is of an earlier end, at step {_int(result, 'step')}")
    return Status(
        run_dir=run_dir,
        state=state,
        last_line_time=max((worker.last_time for worker in workers), default=None),
        error=_error(current) if state is RunState.FAILED else None,
        generation=generation,
        world_size=_int(newest, "world_size") if newest and generation is not None else None,
        members=_members(world, current) if generation is not None else (),
        step=step,
        last_step=last_step,
        epoch=epoch,
        num_epochs=num_epochs if last_step == _last_step(length, batch, num_epochs, None) else None,
        samples_done=samples_done,
        length=length,
        loss=_float(step_lines[-1], "loss") if step_lines else None,
        samples_per_second=_rate(step_lines, length, batch),
        test_accuracy=accuracy,
        accuracy_step=accuracy_step,
        snapshot=snapshot,
        incidents=_incidents(workers, result if result_is_current else None, now),
        warnings=tuple(dict.fromkeys([*_warnings(workers), *problems])),
        is_drill=is_drill,
        result_path=run_dir / "result.json" if result is not None else None,
        goodput_ratio=_float(_dict(result, "goodput"), "ratio") if result is not None and result_is_current else None,
        notes=tuple(notes),
    )


def _classify(workers: list[_Worker], now: float, is_alive: IsAlive) -> RunState:
    """The state of the workers of one generation, or of one start. A worker that ended proves nothing about a run
    that others carry on; one that finished it does."""
    if not workers:
        return RunState.STARTING
    outcomes = {worker.outcome for worker in workers}
    if outcomes & {"finished", "already_finished"}:
        return RunState.FINISHED
    age = now - max(worker.written for worker in workers)
    lives = {worker.is_alive(is_alive) for worker in workers if worker.outcome is None}
    if True in lives or (None in lives and age <= SILENT_AFTER_SECONDS):
        return RunState.RUNNING
    for outcome in (RunState.FAILED, RunState.STOPPED):
        if outcome.value in outcomes:
            return outcome
    return RunState.SILENT if None in lives else RunState.DEAD


def _attempt_note(attempt: RunState, newcomers: list[_Worker], now: float) -> str:
    newest = max(newcomers, key=lambda worker: _time(worker.last))
    what = {
        RunState.FAILED: f"failed: {_error(newcomers)}",
        RunState.STOPPED: "was stopped before training",
    }.get(attempt, "came to no world")
    return f"a later start, {duration(now - float(newest.first['time']))} ago, {what}"


def _error(workers: list[_Worker]) -> str | None:
    """The message of the first worker that failed: the others' are mostly consequences of it."""
    failed = [worker.last for worker in workers if worker.outcome == "failed"]
    first = min(failed, key=_time, default=None)
    return None if first is None or first.get("error") is None else str(first["error"]).strip().splitlines()[0]


def _members(world: list[Line], current: list[_Worker]) -> tuple[str, ...]:
    for line in world:
        if line["event"] == "world" and isinstance(line.get("members"), list):
            return tuple(str(member) for member in line["members"])
    return tuple(sorted(f"{worker.last.get('host')}/?/{worker.last.get('pid')}" for worker in current if world))


def _newest_snapshot(run_dir: Path, config: Line, problems: list[str]) -> SnapshotInfo | None:
    given = config.get("snapshot_dir")
    directory = Path(given) if isinstance(given, str) else run_dir / "snapshots"
    try:
        return next(iter(find_snapshots(directory, warn=problems.append)), None)
    except SnapshotError as error:
        problems.append(str(error))
        return None


def _length(start: Line, snapshot: SnapshotInfo | None, step_lines: list[Line]) -> int | None:
    """Samples of an epoch: as the start says, else the newest snapshot, else the last step of an epoch."""
    for task in (_dict(start, "task"), {} if snapshot is None else dict(snapshot.task)):
        if (length := _int(task, "train_length")) is not None:
            return length
    for line, following in itertools.pairwise(step_lines):
        if (_int(following, "epoch") or 0) == (_int(line, "epoch") or 0) + 1:
            return _int(line, "samples_done")
    return None


def _position(
    step: int | None, step_lines: list[Line], length: int | None, batch: int | None
) -> tuple[int | None, int | None]:
    """(epoch, samples done in it) of the newest committed step."""
    if step_lines and _int(step_lines[-1], "step") == step:
        return _int(step_lines[-1], "epoch"), _int(step_lines[-1], "samples_done")
    if not step or not length or not batch:
        return (None, None) if step is None or step else (0, 0)
    epoch, steps_done = divmod(step - 1, -(-length // batch))
    return epoch, min(length, (steps_done + 1) * batch)


def _last_step(length: int | None, batch: int | None, num_epochs: int | None, max_steps: int | None) -> int | None:
    if not length or not batch or not num_epochs:
        return max_steps
    steps = num_epochs * -(-length // batch)
    return steps if max_steps is None else min(steps, max_steps)


def _rate(step_lines: list[Line], length: int | None, batch: int | None) -> float | None:
    """Samples per second over the last steps of who wrote the newest, whatever came between them included."""
    if len(step_lines) < 2:
        return None
    newest = step_lines[-1]
    own = [line for line in step_lines if all(line.get(name) == newest.get(name) for name in ("host", "pid"))]
    clock = "monotonic" if all(_float(line, "monotonic") is not None for line in own) else "time"
    oldest = next(line for line in own if float(newest[clock]) - float(line[clock]) <= RATE_SECONDS)
    seconds = float(newest[clock]) - float(oldest[clock])
    if seconds <= 0:
        return None
    if length and all(_int(line, name) is not None for line in (oldest, newest) for name in ("epoch", "samples_done")):
        return float((newest["epoch"] - oldest["epoch"]) * length + newest["samples_done"] - oldest["samples_done"]) / (
            seconds
        )
    return (newest["step"] - oldest["step"]) * batch / seconds if batch else None


def _accuracy(world: list[Line], result: Line | None) -> tuple[float | None, int | None]:
    """(test accuracy, committed steps when it was measured): the newest that is known."""
    found = [(_int(line, "step") or 0, _float(line, "accuracy")) for line in world if line["event"] == "evaluation"]
    if result is not None:
        found.append((_int(result, "step") or 0, _float(result, "test_accuracy")))
    known = [(step, accuracy) for step, accuracy in found if accuracy is not None]
    if not known:
        return None, None
    step, accuracy = max(known)
    return accuracy, step


def _incidents(workers: list[_Worker], result: Line | None, now: float) -> tuple[str, ...]:
    """What interrupted the run: the list of result.json, where it is of this end; else the worlds after the first."""
    if result is not None and isinstance(result.get("incidents"), list):
        return tuple(
            f"{entry.get('cause')}, {duration(now - _time(entry))} ago, "
            f"{entry.get('committed_steps_lost', 0)} committed steps lost"
            for entry in result["incidents"]
            if isinstance(entry, dict)
        )
    lines = sorted((line for worker in workers for line in worker.lines), key=_time)
    worlds: dict[int, Line] = {}
    for line in lines:
        if line["event"] == "world" and _int(line, "generation"):  # not the first
            worlds.setdefault(line["generation"], line)

    return tuple(
        f"{'restart' if line.get('cause') == 'start' else line.get('cause')}, {duration(now - _time(line))} ago, "
        f"generation {line['generation']} with {count(_int(line, 'world_size'), 'worker')} at step {line.get('step')}"
        for line in worlds.values()
    )


_NUMBER = re.compile(r"\b\d+")


def _warnings(workers: list[_Worker]) -> list[str]:
    lines = [line for worker in workers for line in worker.lines if line["event"] == "warning"]
    counts: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for line in sorted(lines, key=_time):
        message = str(line.get("message"))
        kind = _NUMBER.sub("", message)
        counts[kind] += 1
        newest.pop(kind, None)  # so that the newest kind is the last
        newest[kind] = message
    return [message if counts[kind] == 1 else f"{message} ({counts[kind]} times)" for kind, message in newest.items()]


def _read_workers(directory: Path) -> list[_Worker]:
    """The newest event files, oldest first. Raises OSError other than for a missing directory."""
    try:
        entries = [entry for entry in os.scandir(directory) if entry.name.endswith(".jsonl")]
    except FileNotFoundError:
        return []
    newest = sorted(entries, key=lambda entry: entry.stat().st_mtime)[-NEWEST_FILES:]
    found = ((read_ends(Path(entry.path)), entry.stat().st_mtime) for entry in newest)
    workers = [_Worker(lines, written) for lines, written in found if lines]
    return sorted(workers, key=lambda worker: _time(worker.first))


def read_ends(path: Path, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> list[Line]:
    """The whole events at the beginning and at the end of a file, all of them if it is small. A line that is cut off
    or still being written is left out. Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= head_bytes + tail_bytes:
            raw = file.read().split(b"\n")
        else:
            raw = file.read(head_bytes).split(b"\n")[:-1]
            file.seek(size - tail_bytes - 1)  # a line that begins right at the border is seen to begin there
            raw += file.read().split(b"\n")[1:]
    return [line for text in raw if (line := _event(text)) is not None]


def _event(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_event = isinstance(line, dict) and isinstance(line.get("event"), str) and _float(line, "time") is not None
    return line if is_event else None


def _read_json(path: Path) -> Line | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _int(line: Line, name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _dict(line: Line, name: str) -> Line:
    value = line.get(name)
    return value if isinstance(value, dict) else {}


def _time(line: Line) -> float:
    return _float(line, "time") or 0.0


def process_is_alive(start: Line) -> bool | None:
    """Whether the process that wrote this `start` event lives; None if it is none of this machine's."""
    pid = _int(start, "pid")
    if pid is None or start.get("host") != host_name() or not os.path.isdir("/proc/self"):
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return _is_of(start, int(fields[19])) and fields[0] not in (b"Z", b"X")


def drill_is_alive(folder: Path) -> bool | None:
    """Whether the drill lives, without which its nodes do not; None if it is none of this machine's."""
    settings = _read_json(folder / "drill.json") or {}
    if "interrupted" in settings or (folder / "leftovers.json").exists():  # which it writes at its end
        return False
    return process_is_alive({**settings, "time": settings.get("started")})


def _is_of(start: Line, ticks: int) -> bool:
    """Whether it is by the process that started so long after the machine, and not by an earlier one with its pid."""
    if (own := _int(start, "started_ticks")) is not None:
        return own == ticks
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return started <= _time(start) + 2.0  # of an older version: right as long as the clock has not been set


# --- showing ----------------------------------------------------------------------------------------------------------


def describe(status: Status, now: float) -> list[tuple[str, str]]:
    """What a person is told, as (name, text); what is not known is left out."""
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
    row("step", _of(status.step, status.last_step))
    if status.epoch is not None:
        position = _of(status.samples_done, status.length)
        row("epoch", f"{_of(status.epoch + 1, status.num_epochs)}" + (f", {position} samples" if position else ""))
    row("loss", None if status.loss is None else f"{status.loss:.4f}")
    row("samples/s", None if status.samples_per_second is None else f"{status.samples_per_second:,.0f}")
    if status.test_accuracy is not None:
        at = f" at step {status.accuracy_step}" if status.accuracy_step != status.step else ""
        row("test accuracy", f"{status.test_accuracy:.2%}{at}")
    row("snapshot", _describe_snapshot(status.snapshot, now))
    row("training", None if status.goodput_ratio is None else f"{status.goodput_ratio:.0%} of the wall time")
    row("incidents", _some(status.incidents))
    row("warnings", _some(status.warnings))
    row("result", None if status.result_path is None else str(status.result_path))
    for note in status.notes:
        row("note", note)
    return rows


def _meaning_of_silence(status: Status, now: float) -> str:
    if status.is_drill and status.state in (RunState.DEAD, RunState.SILENT):
        return "; it was a drill, and its nodes are gone" if status.state is RunState.DEAD else "; it is a drill"
    if status.state is RunState.DEAD:
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
    return str(value) if total is None else f"{value} of {total}"


def _describe_snapshot(snapshot: SnapshotInfo | None, now: float) -> str:
    if snapshot is None:
        return "none"
    size = sum(file.bytes for file in snapshot.files.values())
    return f"step {snapshot.step}, {duration(now - snapshot.time)} ago, {human_bytes(size)}, {snapshot.path}"


def _some(messages: tuple[str, ...]) -> str | None:
    """How many, and the last of them."""
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
    """A small table on a terminal, `name: text` lines elsewhere."""
    rows = describe(status, now)
    if not file.isatty():
        print("\n".join(_plain(rows)), file=file)
        return
    from rich.console import Console

    Console(file=file).print(as_table(status, rows))


def as_table(status: Status, rows: Iterable[tuple[str, str]]) -> Table:
    """The rows of `describe` for a terminal, with a bar below the step."""
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


def _plain(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name}: {text}" for name, text in rows]
