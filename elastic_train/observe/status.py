"""Where a run stands, from the files in its run directory alone: `elastic-train status RUN_DIR`.

It reads files that workers may be writing, and never locks or changes anything. Event files can have millions of
lines; only the head of each (its `start` event) and the tail are read. Imports neither torch nor numpy.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from pathlib import Path

from elastic_train.errors import RunDirectoryError, SnapshotError
from elastic_train.observe.bill import newest_with_bill
from elastic_train.observe.capacity import Capacity, capacity_of, quarantines_of
from elastic_train.observe.status_files import IsAlive, WorkerLines, is_alive_in, read_workers
from elastic_train.observe.status_past import incidents_of, warnings_of
from elastic_train.runlog.events import FINISHED
from elastic_train.runlog.reader import Line, dict_of, float_of, int_of, read_json, time_of
from elastic_train.storage.places import folder_by
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots
from elastic_train.storage.store_urls import is_url
from elastic_train.training.planned_steps import planned_steps, steps_per_epoch
from elastic_train.wording import duration

SILENT_AFTER_SECONDS = 30.0
RATE_SECONDS = 30.0
"""the end of a run over which its samples per second are computed"""


class RunState(StrEnum):
    STARTING = "starting"
    """workers meet; no world of this start stands yet"""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """by SIGTERM, SIGINT or SIGHUP, state saved"""
    FAILED = "failed"
    DEAD = "dead"
    """ended without a `done` event: every worker that wrote last is gone from this machine"""
    SILENT = "silent"
    """no `done` event and no line for a while, of workers on other machines: dead, or in a long step"""


THERE = (RunState.STARTING, RunState.RUNNING, RunState.SILENT)
"""the states in which nodes train, or may"""
OVER = (RunState.FINISHED, RunState.FAILED)
"""the states from which the run is not to be continued"""


@dataclass(frozen=True)
class NewestSnapshot:
    """The newest snapshot that is whole by its size (checksums are not read); below a URL, that of its event."""

    step: int | None
    time: float
    """Unix seconds"""
    bytes: int | None
    path: Path | str


@dataclass(frozen=True)
class Status:
    """The state of a run from its files; None for what they do not have."""

    run_dir: Path
    state: RunState
    last_line_time: float | None = None
    """Unix seconds of the newest event"""
    error: str | None = None
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
    """None if training ends before, at --max-steps"""
    samples_done: int | None = None
    """in that epoch"""
    length: int | None = None
    """samples of an epoch"""
    loss: float | None = None
    samples_per_second: float | None = None
    test_accuracy: float | None = None
    accuracy_step: int | None = None
    """committed steps when it was measured"""
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    """of the newest evaluation, by name"""
    best: Line | None = None
    """`step` and `metric` of the best model so far, of result.json or the newest event that says it"""
    snapshot: NewestSnapshot | None = None
    bucket: str | None = None
    """URL of --snapshot-dir; None for a folder"""
    incidents: tuple[Line, ...] = ()
    """oldest first, as result.json has them"""
    warnings: tuple[str, ...] = ()
    """oldest first; of those that differ in numbers only, as in the step of a snapshot, the newest, with a count"""
    is_drill: bool = False
    capacity: Capacity = field(default_factory=Capacity)
    quarantined: tuple[Line, ...] = ()
    """hosts that died again and again and are not admitted yet: `host`, `deaths`, and `until` in Unix seconds"""
    result_path: Path | None = None
    goodput_ratio: float | None = None
    bill: Line | None = None
    """of result.json, else of the newest event that has one"""
    bill_step: int | None = None
    """committed steps at the time of the bill"""
    notes: tuple[str, ...] = ()


def missing(run_dir: Path) -> RunDirectoryError:
    if is_url(run_dir):
        url = str(run_dir).replace(":/", "://", 1)  # of two slashes a Path keeps one
        return RunDirectoryError(f"{url} is no run directory; elastic-train snapshot list {url} shows what is there")
    what = "is not a directory" if run_dir.exists() else "does not exist"
    return RunDirectoryError(f"{run_dir} {what}; --run-dir of the training says where the run is")


def read_status(run_dir: Path, now: float, is_alive: IsAlive | None = None) -> Status:
    """Return the status of the run in `run_dir` at `now` (Unix seconds).

    Raises:
        RunDirectoryError: the directory has no run, or cannot be read.
    """
    try:
        names = set(os.listdir(run_dir))
        is_alive = is_alive or is_alive_in(run_dir)
        workers, num_unread = read_workers(run_dir / "events", now, is_alive)
    except FileNotFoundError as error:
        raise missing(run_dir) from error
    except OSError as error:
        raise RunDirectoryError(f"{run_dir} cannot be read: {error.strerror}") from error
    if not workers and not names & {"drill", "snapshots", "result.json"}:  # a folder of snapshots has a claim, too
        raise RunDirectoryError(f"{run_dir} holds no run: there is no events/ in it")
    return _status(run_dir, workers, num_unread, now, is_alive)


def _status(run_dir: Path, workers: list[WorkerLines], num_unread: int, now: float, is_alive: IsAlive) -> Status:
    is_drill = (run_dir / "drill").is_dir()
    generation, current, newcomers = _newest_start(workers)
    state, notes = _state(run_dir, generation, current, newcomers, now, is_alive, is_drill=is_drill)
    world = [line for worker in current for line in worker.lines if int_of(line, "generation") == generation]
    newest = max(world, key=time_of, default=None)
    is_there = state in THERE and _classify(current) in THERE  # newcomers wait where the others are dead
    coming = [worker for worker in newcomers if all(line["event"] != "done" for line in worker.lines)]  # not refused
    start = max((line for worker in current + coming for line in worker.lines if line["event"] == "start"),
                key=time_of, default={})  # fmt: skip
    config = dict_of(start, "config")
    problems: list[str] = []
    snapshot = _newest_snapshot(run_dir, config, problems)
    step_lines = sorted((line for line in world if line["event"] == "step"), key=lambda line: int_of(line, "step") or 0)
    step = max((s for line in world if (s := int_of(line, "step")) is not None), default=None)
    if step is None and snapshot is not None:
        step = snapshot.step
    batch, num_epochs = int_of(config, "global_batch_size"), int_of(config, "epochs")
    length = _length(start, snapshot, step_lines)
    last_step = planned_steps(length, batch, num_epochs, int_of(config, "max_steps"))
    epoch, samples_done = _position(step, step_lines, length, batch)
    result = read_json(run_dir / "result.json")
    current_result = result if result is not None and (step is None or int_of(result, "step") == step) else None
    quarantined = quarantines_of(world, now) if is_there else ()
    billed = newest_with_bill(current_result, world)
    accuracy_step, test_metrics = _newest_evaluation(workers, step, result)
    return Status(
        run_dir=run_dir,
        state=state,
        # By a worker's own clock, unless that is ahead: no line is newer than its file.
        last_line_time=max((min(float(worker.last["time"]), worker.written) for worker in workers), default=None),
        error=_error(current) if state is RunState.FAILED else None,
        generation=generation,
        world_size=int_of(newest, "world_size") if newest and generation is not None else None,
        members=_members(world, current) if generation is not None else (),
        step=step,
        last_step=last_step,
        epoch=epoch,
        num_epochs=num_epochs if last_step == planned_steps(length, batch, num_epochs, None) else None,
        samples_done=samples_done,
        length=length,
        loss=float_of(step_lines[-1], "loss") if step_lines else None,
        samples_per_second=_rate(step_lines, length, batch),
        test_accuracy=test_metrics.get("accuracy"),
        accuracy_step=accuracy_step,
        test_metrics=test_metrics,
        best=_best(world, current_result),
        snapshot=_newest_remote_snapshot(workers) if snapshot is None else _as_newest(snapshot),
        bucket=str(config["snapshot_dir"]) if is_url(config.get("snapshot_dir")) else None,
        incidents=incidents_of(workers, current_result),
        warnings=tuple(dict.fromkeys([*warnings_of(workers), *problems])),
        is_drill=is_drill,
        capacity=capacity_of(workers, world, quarantined, is_there=is_there, is_over=state in OVER),
        quarantined=quarantined,
        result_path=run_dir / "result.json" if result is not None else None,
        goodput_ratio=float_of(dict_of(current_result or {}, "goodput"), "ratio"),
        bill=dict_of(billed, "bill") or None,
        bill_step=int_of(billed, "step"),
        notes=(*notes, *_unsaved(current), *_missing(world, result, current_result, num_unread)),
    )


def _unsaved(workers: list[WorkerLines]) -> Iterator[str]:
    ends = (worker.last for worker in workers if worker.outcome is not None and worker.last.get("unsaved"))
    for step in sorted({int_of(end, "step") or 0 for end in ends}):
        yield f"the state of step {step}, the last one, could not be saved: a warning says why"


def _missing(world: list[Line], result: Line | None, current_result: Line | None, num_unread: int) -> Iterator[str]:
    if world and not any(int_of(line, "rank") == 0 for line in world):
        yield (
            "rank 0 writes its events elsewhere: what it alone knows (steps, loss) is missing here; give its run "
            "directory, too"
        )
    if result is not None and current_result is None:
        yield f"result.json is of an earlier end, at step {int_of(result, 'step')}"
    if num_unread:
        what = "warnings" if current_result is not None and "incidents" in current_result else "incidents and warnings"
        yield f"the oldest event files, {num_unread}, were not read: {what} of which they alone tell are missing here"


def _newest_start(workers: list[WorkerLines]) -> tuple[int | None, list[WorkerLines], list[WorkerLines]]:
    """Return (the newest generation, its workers, later workers without a generation). The order is by file times,
    the one clock that all workers share."""
    generation = max((g for worker in workers if (g := worker.generation) is not None), default=None)
    current = [worker for worker in workers if worker.generation == generation]
    newest = max((worker.written for worker in current), default=0.0)
    newcomers = [
        worker for worker in workers if generation is not None and worker.generation is None and worker.written > newest
    ]
    return generation, current, newcomers


def _state(
    run_dir: Path,
    generation: int | None,
    current: list[WorkerLines],
    newcomers: list[WorkerLines],
    now: float,
    is_alive: IsAlive,
    *,
    is_drill: bool,
) -> tuple[RunState, list[str]]:
    """Return the state of the run, and a note about a later start that failed, if any."""
    state = _classify(current)
    if state is RunState.RUNNING and generation is None:
        state = RunState.STARTING
    if not current and (owner := read_json(run_dir / "owner.json") or ({} if is_drill else None)) is not None:
        state = RunState.DEAD if is_alive(owner) is False else state
    attempt = _classify(newcomers) if newcomers and state is not RunState.RUNNING else None
    if attempt is RunState.RUNNING:
        return RunState.STARTING, []
    return state, [] if attempt is None else [_attempt_note(attempt, newcomers, now)]


def _classify(workers: list[WorkerLines]) -> RunState:
    """Return the state of the workers of one generation, or of one start. A worker that has ended decides it only if it
    has finished the run: its peers may go on."""
    if not workers:
        return RunState.STARTING
    outcomes = {worker.outcome for worker in workers}
    if not FINISHED.isdisjoint(outcomes):
        return RunState.FINISHED
    age = min(worker.age for worker in workers)
    lives = {worker.lives for worker in workers if worker.outcome is None}
    if True in lives or (None in lives and age <= SILENT_AFTER_SECONDS):
        return RunState.RUNNING
    for outcome in (RunState.FAILED, RunState.STOPPED):
        if outcome.value in outcomes:
            return outcome
    return RunState.SILENT if None in lives else RunState.DEAD


def _attempt_note(attempt: RunState, newcomers: list[WorkerLines], now: float) -> str:
    newest = max(newcomers, key=lambda worker: time_of(worker.last))
    what = {
        RunState.FAILED: f"failed: {_error(newcomers)}",
        RunState.STOPPED: "was stopped before training",
    }.get(attempt, "came to no world")
    return f"a later start, {duration(now - float(newest.first['time']))} ago, {what}"


def _error(workers: list[WorkerLines]) -> str | None:
    """Return the message of the first worker that failed: later failures are mostly consequences of it."""
    failed = [worker.last for worker in workers if worker.outcome == "failed"]
    first = min(failed, key=time_of, default=None)
    return None if first is None or first.get("error") is None else str(first["error"]).strip().splitlines()[0]


def _members(world: list[Line], current: list[WorkerLines]) -> tuple[str, ...]:
    for line in world:
        if line["event"] == "world" and isinstance(line.get("members"), list):
            return tuple(str(member) for member in line["members"])
    return tuple(sorted(f"{worker.last.get('host')}/?/{worker.last.get('pid')}" for worker in current if world))


def _newest_snapshot(run_dir: Path, config: Line, problems: list[str]) -> SnapshotInfo | None:
    try:
        return next(iter(find_snapshots(folder_by(config, run_dir), warn=problems.append)), None)
    except SnapshotError as error:
        problems.append(str(error))
        return None


def _as_newest(info: SnapshotInfo) -> NewestSnapshot:
    path = info.path if isinstance(info.path, Path) else str(info.path)
    return NewestSnapshot(info.step, info.time, sum(file.bytes for file in info.files.values()), path)


def _newest_remote_snapshot(workers: list[WorkerLines]) -> NewestSnapshot | None:
    written = (line for worker in workers for line in worker.lines if line["event"] == "snapshot")
    remote = [line for line in written if is_url(line.get("path"))]
    if not remote:
        return None
    newest = max(remote, key=lambda line: (int_of(line, "generation") or 0, int_of(line, "snapshot_step") or 0))
    step, size = int_of(newest, "snapshot_step"), int_of(newest, "bytes")
    return NewestSnapshot(step, time_of(newest), size, str(newest["path"]))


def _length(start: Line, snapshot: SnapshotInfo | None, step_lines: list[Line]) -> int | None:
    """Return the samples of an epoch: by the start, else by the newest snapshot, else by the last step of an epoch."""
    for task in (dict_of(start, "task"), {} if snapshot is None else dict(snapshot.task)):
        if (length := int_of(task, "train_length")) is not None:
            return length
    for line, following in itertools.pairwise(step_lines):
        if (int_of(following, "epoch") or 0) == (int_of(line, "epoch") or 0) + 1:
            return int_of(line, "samples_done")
    return None


def _position(
    step: int | None, step_lines: list[Line], length: int | None, batch: int | None
) -> tuple[int | None, int | None]:
    """Return (epoch, samples done in it) of the newest committed step."""
    if step_lines and int_of(step_lines[-1], "step") == step:
        return int_of(step_lines[-1], "epoch"), int_of(step_lines[-1], "samples_done")
    if not step or not length or not batch:
        return (None, None) if step is None or step else (0, 0)
    epoch, steps_done = divmod(step - 1, steps_per_epoch(length, batch))
    return epoch, min(length, (steps_done + 1) * batch)


def _rate(step_lines: list[Line], length: int | None, batch: int | None) -> float | None:
    """Return samples per second over the newest writer's last steps, with all pauses between them."""
    if len(step_lines) < 2:
        return None
    newest = step_lines[-1]
    writer = [newest.get("host"), newest.get("pid")]  # in a list NaN equals itself
    own = [line for line in step_lines if [line.get("host"), line.get("pid")] == writer]
    own = [line for line in own if float_of(line, "monotonic") is not None]
    if not own:
        return None
    newest, now = own[-1], float(own[-1]["monotonic"])
    oldest = next(line for line in own if now - float(line["monotonic"]) <= RATE_SECONDS)
    seconds = now - float(oldest["monotonic"])
    if seconds <= 0:
        return None
    ends = (oldest, newest)
    if length and all(int_of(line, name) is not None for line in ends for name in ("epoch", "samples_done")):
        before, after = (line["epoch"] * length + line["samples_done"] for line in ends)
        return float(after - before) / seconds
    last, first = int_of(newest, "step"), int_of(oldest, "step")
    return None if last is None or first is None or not batch else (last - first) * batch / seconds


def _best(world: list[Line], result: Line | None) -> Line | None:
    told = [line for line in world if "best" in line]
    newest = max(told, key=time_of, default={})
    found = dict_of(newest if result is None or "best" not in result else result, "best")
    return found if int_of(found, "step") is not None and float_of(found, "metric") is not None else None


def _newest_evaluation(
    workers: list[WorkerLines], last: int | None, result: Line | None
) -> tuple[int | None, dict[str, float]]:
    """Return (committed steps, metrics by name) of the newest evaluation in any world, of a step that was not undone.

    Args:
        last: committed steps of the run.
    """
    lines = (line for worker in workers for line in worker.lines if line["event"] == "evaluation")
    in_order = sorted(lines, key=lambda line: int_of(line, "generation") or 0)
    found = [(int_of(line, "step") or 0, dict_of(line, "metrics")) for line in in_order]
    if result is not None:
        found.append((int_of(result, "step") or 0, dict_of(result, "test_metrics")))
    known = [(step, metrics) for step, metrics in found if metrics and (last is None or step <= last)]
    if not known:
        return None, {}
    step, metrics = max(reversed(known), key=itemgetter(0))
    numbers = {name: float_of(metrics, name) for name in metrics}
    return step, {name: math.nan if value is None else value for name, value in numbers.items()}  # null: not finite
