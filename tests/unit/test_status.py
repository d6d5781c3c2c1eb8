"""`elastic-train status`: a run's status from its files, also of a silent run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.cli import main
from elastic_train.errors import RunDirectoryError
from elastic_train.observe import status, status_files
from elastic_train.observe.status import RunState, Status
from elastic_train.observe.status_files import process_is_alive
from elastic_train.observe.status_table import describe, to_json
from elastic_train.runlog import reader
from elastic_train.runlog.goodput import process_identity, process_start_ticks
from elastic_train.runlog.reader import read_events
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.snapshot import FORMAT_VERSION
from elastic_train.wording import duration, human_bytes
from elastic_train.world import host_name

NOW = 1_700_000_000.0
LENGTH, BATCH, EPOCHS = 1437, 64, 30
STEPS_PER_EPOCH = 23


class Files:
    """Writes event files as workers would."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "events").mkdir(parents=True)

    def worker(self, rank: int, host: str = "node", *, started: float, start_number: int = 0, **fields: Any) -> Worker:
        pid = 100 + rank + 10 * start_number
        config = {"epochs": EPOCHS, "global_batch_size": BATCH, "max_steps": None, "snapshot_dir": None}
        worker = Worker(self.run_dir / "events" / f"{host}-0-{pid}.jsonl", rank, host, pid)
        worker.write("start", started, config=config, **fields)
        return worker

    def result(self, **fields: Any) -> None:
        (self.run_dir / "result.json").write_text(json.dumps(fields))


class Worker:
    def __init__(self, path: Path, rank: int, host: str, pid: int) -> None:
        self.path = path
        self.line: dict[str, Any] = {"rank": rank, "world_size": 2, "generation": None, "step": 0}
        self.line |= {"pid": pid, "host": host}
        self.ahead = 0.0
        """seconds, its clock"""

    def write(self, event: str, time: float, **fields: Any) -> None:
        with self.path.open("a") as file:
            moment = {"time": time + self.ahead, "monotonic": time - NOW + 1e4}
            file.write(json.dumps({**moment, "event": event, **self.line, **fields}) + "\n")
        os.utime(self.path, (time, time))

    def enter(
        self,
        generation: int,
        time: float,
        cause: str = "start",
        members: tuple[str, ...] = ("a", "b"),
        incidents: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.line |= {"generation": generation, "world_size": len(members)}
        self.write("world", time, cause=cause, members=list(members), incidents=list(incidents))

    def train(self, first: int, last: int, time: float, seconds_per_step: float = 0.01) -> None:
        """Step events so that the last one is written at `time`."""
        for step in range(first, last + 1):
            self.line["step"] = step
            epoch, before = divmod(step - 1, STEPS_PER_EPOCH)
            self.write(
                "step",
                time - (last - step) * seconds_per_step,
                epoch=epoch,
                loss=1 / step,
                samples_done=min(LENGTH, (before + 1) * BATCH),
            )


def read(files: Files, alive: bool | None = None) -> Status:
    return status.read_status(files.run_dir, NOW, lambda start: alive)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "run")


def incident(cause: str, generation: int, time: float, **fields: Any) -> dict[str, Any]:
    """As result.json and `world` events have it."""
    nobody: dict[str, list[str]] = {f"{how}_members": [] for how in ("lost", "left", "joined")}
    found = {"cause": cause, "time": time, "generation": generation, "step": 9, "world_size": 2, **nobody}
    return {**found, "committed_steps_lost": 0, "seconds": {}, **fields}


PEER_LOST = incident("peer_lost", 1, NOW - 8.7, step=143, lost_members=["b/0/7"], joined_members=["c/0/8", "c/1/9"])
RESTART = incident("restart", 2, NOW - 6, world_size=1, committed_steps_lost=3)
LEAVE = incident("leave", 3, NOW - 5, lost_members=["a/0/3"], left_members=["a/0/3"])
BOTH = incident("peer_lost", 4, NOW - 4, lost_members=["d/0/1"], left_members=["e/0/2"], committed_steps_lost=1)
OLDER = {"cause": "leave", "time": NOW - 2, "lost_members": ["x/0/1"], "committed_steps_lost": 0, "seconds": {}}
TOLD = {
    "peer_lost, 8.7 s ago: lost b/0/7; c/0/8, c/1/9 joined; generation 1: 2 workers go on at step 144": PEER_LOST,
    "restart, 6.0 s ago: generation 2: 1 worker goes on at step 10; 3 committed steps lost": RESTART,
    "leave, 5.0 s ago: a/0/3 left; generation 3: 2 workers go on at step 10": LEAVE,
    "peer_lost, 4.0 s ago: lost d/0/1; e/0/2 left; generation 4: 2 workers go on at step 10; "
    "1 committed step lost": BOTH,
    "leave, 2.0 s ago: x/0/1 left": OLDER,
    "join, 1.0 s ago": {"cause": "join", "time": NOW - 1},
}


@pytest.mark.parametrize(("told", "one"), TOLD.items())
@pytest.mark.parametrize("is_over", [False, True])
def test_an_incident_is_told_in_the_same_words_while_the_run_lasts_and_after_it(
    files: Files, told: str, one: dict[str, Any], is_over: bool
) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.enter(4, NOW - 8, "leave", incidents=[] if is_over else [one])
    worker.train(1, 2, NOW)
    if is_over:
        worker.write("done", NOW, outcome="finished")
        files.result(step=2, incidents=[one])
    found = read(files)
    rows = [row for row in describe(found, NOW) if row[0].startswith("incident")]
    assert rows == [("incidents", "1"), ("incident", told)]
    assert json.loads(to_json(found))["incidents"] == [one], "an object, as in result.json"


def test_each_incident_is_told_once_the_newest_first(files: Files) -> None:
    """By all members; what rank 0 says of it will be in the result."""
    for rank in (1, 0):
        worker = files.worker(rank, started=NOW - 900)
        worker.enter(0, NOW - 890)
        for one in (PEER_LOST, RESTART, LEAVE, BOTH):
            own = one | {"time": one["time"] + rank}
            worker.enter(one["generation"], own["time"], one["cause"], incidents=[own])
    found = read(files)
    assert found.incidents == (PEER_LOST, RESTART, LEAVE, BOTH)
    rows = [text for name, text in describe(found, NOW) if name.startswith("incident")]
    assert [row.partition(",")[0] for row in rows] == ["4", "peer_lost", "leave", "restart"]


def test_a_url_is_no_run_directory() -> None:
    with pytest.raises(RunDirectoryError, match=r"^s3://bucket/run-1 is no .* snapshot list s3://bucket/run-1 shows"):
        status.read_status(Path("s3://bucket/run-1"), NOW)


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_a_last_state_that_could_not_be_saved_is_noted(files: Files, outcome: str) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.train(1, 12, NOW - 700)
    worker.write("done", NOW - 690, outcome=outcome, unsaved=True)
    assert "the state of step 12, the last one, could not be saved: a warning says why" in read(files).notes
    worker.write("done", NOW - 600, outcome=outcome)
    assert not any("could not be saved" in note for note in read(files).notes)


def test_a_run_that_is_alive(files: Files) -> None:
    leader, other = files.worker(0, started=NOW - 60), files.worker(1, "far", started=NOW - 60)
    for worker in (leader, other):
        worker.enter(0, NOW - 50)
    leader.train(1, 50, NOW - 1)
    found = read(files)
    assert found.state is RunState.RUNNING
    assert (found.generation, found.world_size, found.members) == (0, 2, ("a", "b"))
    assert (found.step, found.last_step) == (50, EPOCHS * STEPS_PER_EPOCH)
    assert (found.epoch, found.samples_done, found.length) == (2, 4 * BATCH, LENGTH)
    assert found.loss == pytest.approx(0.02)
    # 49 steps, two of which close an epoch with 29 samples
    assert found.samples_per_second == pytest.approx((47 * 64 + 2 * 29) / 0.49, rel=1e-3)
    assert found.last_line_time == NOW - 1
    assert found.snapshot is None
    assert found.incidents == found.warnings == found.notes == ()


@pytest.mark.parametrize(
    ("age", "alive", "state"),
    [
        (2.0, None, RunState.RUNNING),
        (2.0, False, RunState.DEAD),
        (29.0, None, RunState.RUNNING),
        (31.0, None, RunState.SILENT),
        (3600.0, True, RunState.RUNNING),
        (3600.0, False, RunState.DEAD),
        (3600.0, None, RunState.SILENT),
        (-5.0, None, RunState.RUNNING),  # the clock of another machine is ahead
    ],
)
def test_what_is_made_of_silence(files: Files, age: float, alive: bool | None, state: RunState) -> None:
    worker = files.worker(0, started=NOW - 5000)
    worker.enter(0, NOW - 4999)
    worker.train(1, 3, NOW - age)
    found = read(files, alive)
    assert found.state is state
    told = dict(describe(found, NOW))
    assert told["last event"].startswith(f"{duration(age)} ago")
    assert ("dead" in told["last event"]) == (state is RunState.SILENT)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_clock_that_is_off_neither_hides_silence_nor_makes_it(files: Files, ahead: float) -> None:
    worker = files.worker(0, "far", started=NOW - 5000)
    worker.ahead = ahead
    worker.enter(0, NOW - 4999)
    worker.train(1, 3, NOW - 29)
    found = read(files)
    assert found.state is RunState.RUNNING
    assert found.last_line_time == NOW - 29 + min(0.0, ahead), "never ahead; behind it may as well be right"
    os.utime(worker.path, (NOW - 31, NOW - 31))
    assert read(files).state is RunState.SILENT


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_the_rate_of_one_whose_clock_is_set(files: Files, ahead: float) -> None:
    worker = files.worker(0, started=NOW - 60)
    worker.enter(0, NOW - 50)
    for step in range(1, 11):
        worker.ahead = ahead if step > 5 else 0.0
        worker.train(step, step, NOW - 20 + step)
    assert read(files).samples_per_second == pytest.approx(BATCH)


@pytest.mark.parametrize("is_disk_full", [False, True])
@pytest.mark.parametrize("outcome", ["finished", "already_finished", "stopped", "failed"])
def test_outcomes(files: Files, outcome: str, is_disk_full: bool) -> None:
    workers = [files.worker(rank, started=NOW - 900) for rank in range(2)]
    for worker in workers:
        worker.enter(3, NOW - 890)
    workers[0].train(1, 5, NOW - 800)
    for worker in workers:
        worker.write(
            "done", NOW - 700 + worker.line["rank"], outcome=outcome, error=f"boom {worker.line['rank']}\nmore"
        )
        if is_disk_full:  # for a while: what was missed is reported when the file is closed
            worker.write("unwritten", NOW - 690, what="events")
            worker.write("warning", NOW - 690, message="TensorBoard scalars are missing")
    found = read(files, False)
    assert found.state.value == ("finished" if outcome == "already_finished" else outcome)
    assert found.error == ("boom 0" if outcome == "failed" else None)


def test_one_worker_failed_and_the_others_train_on(files: Files) -> None:
    workers = [files.worker(rank, started=NOW - 60) for rank in range(2)]
    for worker in workers:
        worker.enter(0, NOW - 50)
    workers[1].write("done", NOW - 40, outcome="failed", error="its own fault")
    workers[0].train(1, 9, NOW - 1)
    assert read(files).state is RunState.RUNNING


def test_a_worker_that_died_does_not_hide_that_the_rest_finished(files: Files) -> None:
    workers = [files.worker(rank, started=NOW - 900) for rank in range(3)]
    for worker in workers:
        worker.enter(0, NOW - 890, members=("a", "b", "c"))
    for worker in workers[:2]:
        worker.enter(1, NOW - 700, cause="peer_lost")
        worker.write("done", NOW - 600, outcome="finished")
    found = read(files, False)
    assert found.state is RunState.FINISHED
    assert found.members == ("a", "b")


def test_the_largest_generation_counts_though_its_step_is_lower(files: Files) -> None:
    first = files.worker(0, started=NOW - 900)
    first.enter(0, NOW - 890)
    first.train(1, 60, NOW - 800)
    second = files.worker(0, started=NOW - 20, start_number=1)
    second.line["step"] = 46
    second.enter(1, NOW - 10)
    found = read(files)
    assert (found.state, found.generation, found.step) == (RunState.RUNNING, 1, 46)


def test_starting(files: Files) -> None:
    files.worker(0, started=NOW - 3)
    found = read(files)
    assert (found.state, found.world_size, found.members) == (RunState.STARTING, None, ())
    assert read(files, True).state is RunState.STARTING
    assert read(files, False).state is RunState.DEAD


def test_a_new_start_of_a_stopped_run(files: Files) -> None:
    first = files.worker(0, started=NOW - 900)
    first.enter(0, NOW - 890)
    first.train(1, 5, NOW - 850)
    first.write("done", NOW - 800, outcome="stopped")
    second = files.worker(0, started=NOW - 3, start_number=1)
    assert read(files, True).state is RunState.STARTING
    second.write("start", NOW - 2.5, config={"epochs": EPOCHS + 1})
    second.write("done", NOW - 2, outcome="failed", error="TaskMismatch: --seed differs")
    found = read(files, False)
    assert (found.state, found.step) == (RunState.STOPPED, 5)
    assert found.notes == ("a later start, 3.0 s ago, failed: TaskMismatch: --seed differs",)
    assert found.num_epochs == EPOCHS, "the run's own"


@pytest.mark.parametrize(("first_ahead", "second_ahead"), [(3600.0, 0.0), (0.0, -3600.0), (-3600.0, 3600.0)])
def test_a_new_start_on_a_host_whose_clock_is_another(files: Files, first_ahead: float, second_ahead: float) -> None:
    first = files.worker(0, "far", started=NOW - 900)
    first.ahead = first_ahead
    first.enter(0, NOW - 890)
    first.write("done", NOW - 800, outcome="failed", error="x")
    second = files.worker(0, started=NOW - 3, start_number=1)
    second.ahead = second_ahead
    second.write("warning", NOW - 2, message="waits")
    found = read(files, True)
    assert (found.state, found.error) == (RunState.STARTING, None)
    second.write("done", NOW - 1, outcome="failed", error="y")
    found = read(files, False)
    assert found.state is RunState.FAILED
    assert found.notes == ("a later start, 3.0 s ago, failed: y",)


def test_a_refused_second_job_does_not_hide_the_first(files: Files) -> None:
    first = files.worker(0, started=NOW - 900)
    first.enter(0, NOW - 890)
    second = files.worker(0, started=NOW - 30, start_number=1)
    second.write("done", NOW - 20, outcome="failed", error="in use")
    first.train(1, 50, NOW - 1)
    found = read(files)
    assert (found.state, found.notes) == (RunState.RUNNING, ())


def test_a_directory_without_rank_0(files: Files) -> None:
    worker = files.worker(1, started=NOW - 20)
    worker.enter(0, NOW - 10)
    found = read(files)
    assert found.state is RunState.RUNNING
    assert [note for note in found.notes if "rank 0" in note]


def test_result_and_evaluation(files: Files) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.train(1, 40, NOW - 800)
    worker.write("evaluation", NOW - 799, accuracy=0.9, metrics={"accuracy": 0.9, "loss": 0.3})
    worker.train(41, 46, NOW - 790)
    found = read(files, True)
    assert (found.test_accuracy, found.accuracy_step) == (0.9, 40)
    assert dict(describe(found, NOW))["test accuracy"] == "90.00% at step 40"

    worker.write("done", NOW - 780, outcome="finished")
    files.result(step=46, test_metrics={"accuracy": 0.97}, goodput={"ratio": 0.5}, incidents=[])
    found = read(files, False)
    assert (found.test_accuracy, found.accuracy_step, found.goodput_ratio) == (0.97, 46, 0.5)
    assert dict(describe(found, NOW))["training"] == "50% of the wall time"
    assert found.result_path == files.run_dir / "result.json"

    files.result(step=20, test_metrics={"accuracy": 0.95}, goodput={"ratio": 0.4}, incidents=[])
    found = read(files, False)
    assert (found.test_accuracy, found.goodput_ratio) == (0.9, None)
    assert found.notes == ("result.json is of an earlier end, at step 20",)


def test_an_evaluation_outlasts_the_world_in_which_it_was(files: Files) -> None:
    first, second = (files.worker(rank, started=NOW - 900) for rank in range(2))
    for worker in (first, second):
        worker.enter(0, NOW - 890)
    first.train(1, 40, NOW - 800)
    first.write("evaluation", NOW - 799, accuracy=0.9, metrics={"accuracy": 0.9, "loss": 0.3})
    second.enter(1, NOW - 700, "peer_lost", members=("b",))
    second.train(41, 46, NOW - 690)
    found = read(files, True)
    assert (found.test_accuracy, found.accuracy_step) == (0.9, 40)
    assert found.test_metrics == {"accuracy": 0.9, "loss": 0.3}
    assert dict(describe(found, NOW))["test accuracy"] == "90.00% at step 40"
    second.line["step"] = 30
    second.enter(2, NOW - 600, members=("b",))
    second.train(31, 35, NOW - 590)
    found = read(files, True)
    assert (found.test_accuracy, found.test_metrics) == (None, {}), "it was of a step that is undone"
    second.train(36, 40, NOW - 580)
    second.write("evaluation", NOW - 579, accuracy=0.8, metrics={"accuracy": 0.8})
    assert read(files, True).test_accuracy == 0.8, "of one step the newest counts"


def test_the_best_metric_is_that_of_the_newest_line_that_has_one_and_of_the_result(files: Files) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.train(1, 20, NOW - 800)
    assert (read(files).best, "best" in dict(describe(read(files), NOW))) == (None, False)
    worker.write("best", NOW - 780, best={"step": 20, "metric": -0.5})
    assert dict(describe(read(files), NOW))["best"] == "-0.5 at step 20"
    again = files.worker(0, started=NOW - 700, start_number=1)
    again.enter(1, NOW - 690)
    again.train(11, 30, NOW - 600)
    again.write("world", NOW - 599, best={"step": 10, "metric": -1.38380})
    found = read(files)
    assert json.loads(to_json(found))["best"] == {"step": 10, "metric": -1.3838}, "that of step 20 was lost"
    assert dict(describe(found, NOW))["best"] == "-1.3838 at step 10"
    files.result(step=30, best={"step": 28, "metric": 12345678.0})
    assert dict(describe(read(files), NOW))["best"] == "1.23457e+07 at step 28"
    files.result(step=30)
    assert read(files).best == {"step": 10, "metric": -1.3838}, "of an older version"


def test_all_that_was_measured_where_there_is_no_accuracy(files: Files) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.train(1, 40, NOW - 800)
    worker.write("evaluation", NOW - 799, accuracy=None, metrics={"loss": 0.012345, "r2": 0.9876, "broken": None})
    found = read(files, True)
    rows = dict(describe(found, NOW))
    assert (rows["test loss"], rows["test r2"], rows["test broken"]) == ("0.01235", "0.9876", "nan")
    assert json.loads(to_json(found))["test_metrics"] == {"loss": 0.012345, "r2": 0.9876, "broken": None}


def test_what_was_measured_beside_an_accuracy(files: Files) -> None:
    worker = files.worker(0, started=NOW - 900)
    worker.enter(0, NOW - 890)
    worker.train(1, 40, NOW - 800)
    worker.write("evaluation", NOW - 799, accuracy=0.9, metrics={"loss": 0.1, "f1": 0.38121, "accuracy": 0.9})
    rows = [row for row in describe(read(files, True), NOW) if row[0].startswith("test ")]
    assert rows == [("test accuracy", "90.00%"), ("test f1", "0.3812")]


def test_warnings_are_counted_and_shown_newest_first(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 10)
    for number in range(5):
        worker.write("warning", NOW - 9 + number, message=f"w{number}")
    worker.write("warning", NOW - 1, message="w4")
    found = read(files)
    assert found.warnings == ("w0", "w1", "w2", "w3", "w4 (2 times)")
    assert dict(describe(found, NOW))["warnings"] == "5: w4 (2 times); w3; w2; 2 earlier"


def test_snapshots_are_found_and_damaged_ones_named(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 10)
    for step in (7, 14):
        folder = files.run_dir / "snapshots" / f"step-{step:012d}-gen-0000-node"
        folder.mkdir(parents=True)
        (folder / "state.pt").write_bytes(b"x" * (5000 if step == 7 else 4))
        manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "epoch": 0,
            "samples_done": step * BATCH,
        }
        manifest |= {"generation": 0, "run_uid": "u", "host": "node", "time": NOW - 100, "world_size": 1}
        manifest |= {"torch_version": "2", "elastic_train_version": "0", "task": {"train_length": LENGTH}}
        manifest |= {"files": {"state.pt": {"bytes": 5000, "sha256": ""}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    found = read(files)
    assert found.snapshot is not None
    assert found.snapshot.step == 7
    assert dict(describe(found, NOW))["snapshot"].startswith("step 7, 1 min 40 s ago, 5.0 kB, ")
    assert [line for line in found.warnings if "step-000000000014" in line]
    assert (found.length, found.last_step) == (LENGTH, EPOCHS * STEPS_PER_EPOCH)


def test_new_machines_are_told_where_snapshots_below_a_url_are(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    config = {"epochs": EPOCHS, "global_batch_size": BATCH, "max_steps": None, "snapshot_dir": "s3://bucket/run"}
    worker.write("start", NOW - 19, config=config)
    worker.enter(0, NOW - 15)
    told = "none in these files; elastic-train snapshot list s3://bucket/run shows what is there"
    assert dict(describe(read(files), NOW))["snapshot"] == told


def test_snapshots_below_a_url_are_told_by_the_events_alone(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 15)
    for step, at in ((14, NOW - 9), (7, NOW - 8)):
        worker.write("snapshot", at, path=f"s3://bucket/run/step-{step}", snapshot_step=step, bytes=5000)
    assert dict(describe(read(files), NOW))["snapshot"] == "step 14, 9.0 s ago, 5.0 kB, s3://bucket/run/step-14"


def test_torn_and_foreign_lines_are_skipped(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 10)
    worker.train(1, 3, NOW - 1)
    with worker.path.open("a") as file:
        file.write('[1]\n"text"\n{"event": "step"}\n{"event": 7, "time": 1}\n\xff\n{"time": 1700000, "event": "ste')
    (files.run_dir / "events" / "empty.jsonl").touch()
    (files.run_dir / "result.json").write_text('{"step": ')
    found = read(files)
    assert (found.state, found.step) == (RunState.RUNNING, 3)


def test_of_a_million_steps_the_newest_are_read_and_all_else(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 10)
    worker.train(1, 100, NOW - 5)
    line = worker.path.read_bytes().splitlines(keepends=True)[-1]
    for generation in (1, 2):
        worker.enter(generation, NOW - 4, incidents=[incident("leave", generation, NOW - 4)])
        with worker.path.open("ab") as file:
            for _ in range(5):
                file.write(line * 10_000)
    worker.train(101, 150, NOW - 1)
    found = read(files)
    assert (found.step, found.world_size, found.length) == (150, 2, LENGTH)
    assert len(found.incidents) == 2, "the worlds after the first, wherever they stand"
    before = psutil.Process().io_counters().read_chars
    assert read(files) == found
    assert psutil.Process().io_counters().read_chars - before < worker.path.stat().st_size / 10, "its end alone"


@pytest.mark.parametrize("tail_bytes", range(1, 400, 7))
def test_lines_of_a_file_that_grows_are_read_once(tmp_path: Path, tail_bytes: int) -> None:
    path = tmp_path / "lines.jsonl"
    events = ["start", "step", "world", "step", "step", "step", "world", "step"]
    lines = [{"time": number, "event": event} for number, event in enumerate(events)]
    for number in range(1, 9):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[:number]) + '{"time": ')
        found = read_events(path, tail_bytes)
        size = path.stat().st_size
        starts = [len("".join(json.dumps(line) + "\n" for line in lines[:n])) for n in range(number)]
        is_near = [start >= size - tail_bytes for start in starts]
        assert found == [line for line, near in zip(lines, is_near, strict=False) if near or line["event"] != "step"]


def test_a_file_that_was_cut_off_in_place_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"time": 1, "event": "start"}\n' * 50)
    assert len(read_events(path, tail_bytes=40)) == 50
    path.write_text('{"time": 2, "event": "start"}\n')
    assert read_events(path, tail_bytes=40) == [{"time": 2, "event": "start"}]


def test_a_file_whose_name_is_none_of_a_worker(files: Files) -> None:
    files.worker(0, started=NOW - 9).path.rename(files.run_dir / "events" / "copied.jsonl")
    files.worker(0, started=NOW - 9).enter(0, NOW - 1)
    assert read(files).state is RunState.RUNNING


@pytest.mark.parametrize("is_over", [False, True])
def test_of_a_run_that_was_restarted_often_it_is_said_that_the_oldest_files_are_not_read(
    files: Files, is_over: bool
) -> None:
    num_starts = status_files.NEWEST_FILES + 7
    incidents = [incident("restart", number, NOW - 9000 + number) for number in range(num_starts)]
    for number in range(num_starts):
        worker = files.worker(0, started=NOW - 9000 + number, start_number=number)
        worker.enter(number, NOW - 9000 + number, incidents=incidents[number : number + 1], members=(f"node/0/{100}",))
    if is_over:
        files.result(step=0, incidents=incidents)
    found = read(files)
    what = "warnings" if is_over else "incidents and warnings"
    number = 6  # the member of the newest world is the oldest
    assert len(found.incidents) == (num_starts if is_over else num_starts - number)
    assert found.notes == (
        f"the oldest event files, {number}, were not read: {what} of which they alone tell are missing here",
    )


def test_a_message_with_a_name_that_is_no_text(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.worker(0, started=NOW - 9).write("warning", NOW - 1, message="\udcff.npy cannot be read")
    assert main(["status", str(files.run_dir)]) == 0
    assert "warnings: 1: \\udcff.npy cannot be read\n" in capsys.readouterr().out


def test_a_run_of_more_workers_than_are_newest(files: Files) -> None:
    """The oldest files are those of rank 0, which alone knows steps, and of who failed first."""
    num_workers, members = 3 * status_files.NEWEST_FILES, []
    for rank in range(num_workers):
        members.append(files.worker(rank, f"n{rank}", started=NOW - 9000, max_nodes=num_workers))
    names = tuple(f"n{rank}/0/{100 + rank}" for rank in range(num_workers))
    for rank, worker in enumerate(members):
        worker.line |= {"nodes": num_workers, "noticed": rank % 2 == 0}
        worker.enter(0, NOW - 8000, members=names)
    members[0].train(1, 20, NOW - 7000)
    for rank in range(1, num_workers):
        members[rank].write("snapshot_due", NOW - 6000 + rank)
    found = read(files, alive=True)
    assert (found.state, found.step, found.loss, found.notes) == (RunState.RUNNING, 20, 1 / 20, ())
    assert (found.capacity.train, found.capacity.may_be_taken) == (num_workers, num_workers // 2)
    for rank, worker in enumerate(members):
        worker.write("done", NOW - 5000 + rank, outcome="failed", error="it began here" if rank == 0 else "a peer")
    found = read(files, alive=False)
    assert (found.state, found.error) == (RunState.FAILED, "it began here")


def test_of_many_dead_files_few_are_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of later starts that came to nothing: behind them is the run. Whoever may wait is counted."""
    num_dead = 500
    for number in range(num_dead):
        files.worker(0, f"dead{number}", started=NOW - 90_000 + number)
    first = files.worker(0, "a", started=NOW - 9000)
    first.enter(3, NOW - 8000, members=("a/0/100", "gone/0/1"))
    first.train(1, 20, NOW - 7000)
    for number in range(100):
        files.worker(0, f"refused{number}", started=NOW - 5000 + number)
    read_paths: list[Path] = []

    def reading(path: Path) -> list[dict[str, Any]]:
        read_paths.append(path)
        return read_events(path)

    monkeypatch.setattr(status_files, "read_events", reading)
    found = read(files, alive=False)
    assert (found.generation, found.step) == (3, 20)
    assert len(read_paths) <= 100 + status_files.NEWEST_FILES
    for number in range(100):
        files.worker(0, f"waits{number}", started=NOW - 300 + number)
    assert read(files).capacity.waiting == 100


def test_no_run(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no run")):
        with pytest.raises(RunDirectoryError, match=what):
            status.read_status(path, NOW)
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be read: Not a directory"):
        status.read_status(tmp_path / "file", NOW)


def test_files_that_are_moved_aside_while_they_are_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a start with --fresh: one of them when it has been listed, one when its age is known."""
    first, second = (files.worker(rank, f"n{rank}", started=NOW - 20 + rank) for rank in (0, 1))
    first.enter(0, NOW - 15)
    (second.path.parent / "n2-0-1.jsonl").symlink_to("nowhere")

    def read_late(path: Path) -> list[dict[str, Any]]:
        second.path.unlink(missing_ok=True)
        return read_events(path)

    monkeypatch.setattr(status_files, "read_events", read_late)
    assert read(files).generation == 0


def test_the_snapshots_of_a_run_are_no_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, tmp_path / "snapshots")
    directory.ownership.claim("job-1", 0, "alpha")
    directory.ownership.release()
    with pytest.raises(RunDirectoryError, match="snapshots holds no run: there is no events/ in it"):
        status.read_status(tmp_path / "snapshots", NOW)
    assert status.read_status(tmp_path, NOW)


def test_a_run_directory_in_which_nothing_was_written_yet(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    found = status.read_status(tmp_path, NOW)
    assert (found.state, found.step, found.last_line_time) == (RunState.STARTING, None, None)
    assert describe(found, NOW)


def test_processes_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_files, "host_name", lambda: "here")

    def started(host: str, pid: int, time: float, **fields: Any) -> dict[str, Any]:
        return {"event": "start", "host": host, "pid": pid, "time": time, **fields}

    now, year = time.time(), 86400 * 365
    ticks = process_start_ticks()
    for own, later in (({}, {}), ({"started_ticks": ticks}, {"started_ticks": (ticks or 0) - 1})):
        assert process_is_alive(started("here", os.getpid(), now, **own)) is True
        is_later = process_is_alive(started("here", os.getpid(), now - year, **later))
        assert is_later is False, "a later process with the same pid"
        assert process_is_alive(started("elsewhere", os.getpid(), now, **own)) is None
    for error in (-year, year):
        found = process_is_alive(started("here", os.getpid(), now + error, started_ticks=ticks))
        assert found is True, "the clock has been set right since"
    assert process_is_alive(started("here", os.getpid(), now, **process_identity())) is True
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_is_alive(started("here", child.pid, now)) is False, "a zombie"
    child.wait()
    assert process_is_alive(started("here", child.pid, now)) is False


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["another's", "nobody's"])
def test_nobody_can_tell_of_a_container_that_has_the_name_of_its_host(pid: int) -> None:
    """Its pids are those of other processes here, or of none."""
    start = {"event": "start", "host": host_name(), "pid": pid, "time": time.time(), **process_identity()}
    assert process_is_alive({**start, "pid_namespace": "pid:[1]"}) is None


def test_durations_and_sizes() -> None:
    assert [duration(s) for s in (-3, 0, 9.94, 59, 60, 3599, 7260, 172800)] == [
        "0.0 s", "0.0 s", "9.9 s", "59 s", "1 min 0 s", "59 min 59 s", "2 h 1 min", "2 days",
    ]  # fmt: skip
    assert [human_bytes(n) for n in (0, 999, 1000, 257_222, 5_000_000, 7 * 10**12)] == [
        "0 B", "999 B", "1.0 kB", "257.2 kB", "5.0 MB", "7.0 TB",
    ]  # fmt: skip


def test_warnings_that_differ_in_a_number_are_one(files: Files) -> None:
    worker = files.worker(0, started=NOW - 20)
    worker.enter(0, NOW - 10)
    for number in range(3):
        worker.write("warning", NOW - 9 + number, message=f"snapshot /r/step-{number:012d} cannot be written")
    assert read(files).warnings == ("snapshot /r/step-000000000002 cannot be written (3 times)",)


def test_the_epochs_are_no_goal_where_the_steps_end_before(files: Files) -> None:
    worker = files.worker(0, started=NOW - 60)
    worker.write("start", NOW - 59, config={"epochs": 10**6, "global_batch_size": BATCH, "max_steps": 100})
    worker.enter(0, NOW - 50)
    worker.train(1, 50, NOW - 1)
    told = dict(describe(read(files), NOW))
    assert told["epoch"].split(",")[0] == "3"


def test_a_run_whose_owner_died_before_any_event(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)
    child.wait()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "owner.json").write_text(json.dumps({"host": host_name(), "pid": child.pid, "time": NOW}))
    found = status.read_status(tmp_path, NOW)
    assert found.state is RunState.DEAD
    assert "its processes are gone" in dict(describe(found, NOW))["note"]


@pytest.mark.parametrize(
    ("written", "told"), [(False, "or begins anew where there is none"), (True, "continues from the snap")]
)
def test_what_the_same_command_does_for_a_run_that_was_killed(files: Files, written: bool, told: str) -> None:
    worker = files.worker(0, started=NOW - 60)
    worker.enter(0, NOW - 50)
    worker.train(1, 3, NOW - 40)
    if written:
        worker.write("snapshot", NOW - 30, path="s3://bucket/step-3", snapshot_step=3, bytes=9)
    found = read(files, False)
    assert found.state is RunState.DEAD
    assert told in dict(describe(found, NOW))["last event"]


@pytest.mark.parametrize("has_events", [True, False])
def test_a_drill_that_was_killed(files: Files, has_events: bool) -> None:
    """Its nodes have host names of their own, and are on this machine."""
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)
    child.wait()
    if has_events:
        files.worker(0, "node1", started=NOW - 100)
    folder = files.run_dir / "drill"
    folder.mkdir()

    def state_with(pid: int, **settings: object) -> Status:
        known = {"started": time.time(), "host": host_name(), "pid": pid, **settings}
        (folder / "drill.json").write_text(json.dumps(known))
        return status.read_status(files.run_dir, NOW)

    assert state_with(os.getpid()).state is RunState.STARTING
    assert state_with(child.pid, host="another").state in (RunState.STARTING, RunState.SILENT), "nobody can tell"
    assert state_with(os.getpid(), interrupted=True).state is RunState.DEAD
    found = state_with(child.pid)
    assert found.state is RunState.DEAD
    assert "other machines" not in str(describe(found, NOW))
    (folder / "leftovers.json").write_text("[]")
    assert state_with(os.getpid()).state is RunState.DEAD


def test_any_field_of_any_line_may_be_missing_or_of_another_kind(files: Files) -> None:
    """Nothing is raised, whatever an older version, or something else, has written."""
    first, newcomer = files.worker(0, started=NOW - 900, max_nodes=4), files.worker(1, started=NOW - 850)
    first.enter(0, NOW - 890)
    first.train(1, 4, NOW - 800, seconds_per_step=1.0)
    newcomer.enter(1, NOW - 700)
    newcomer.write("restore", NOW - 700, source="peer", restored_step=4)
    first.enter(1, NOW - 700, cause="join")
    first.train(5, 8, NOW - 600, seconds_per_step=9.0)
    first.write("evaluation", NOW - 500, metrics={"accuracy": 0.5})
    first.write("best", NOW - 500, best={"step": 1, "metric": 0.5})
    first.write("snapshot", NOW - 500, path="s3://bucket/one", snapshot_step=60, bytes=7)
    first.write(
        "world", NOW - 400, cause="leave", members=["a"], nodes=1, quarantined=[{"host": "x", "until": NOW + 9}],
        incidents=[LEAVE],
    )  # fmt: skip
    newcomer.write("warning", NOW - 400, message="careful 1")
    newcomer.write("done", NOW - 300, outcome="failed", error="it: broke")
    files.result(step=60, incidents=[{"cause": "join", "time": NOW}], goodput={"ratio": 1.0}, test_metrics={"a": 1.0})
    for path in [first.path, newcomer.path]:
        lines = path.read_text().splitlines()
        for number in {json.loads(line)["event"]: number for number, line in enumerate(lines)}.values():
            line = json.loads(lines[number])
            for name in line:
                for value in (None, [], {}, "x", -1, float("nan")):
                    changed = line | {name: value}
                    if value is None:
                        del changed[name]
                    path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]) + "\n")
                    reader._rare_lines.clear()  # of files that only grow
                    describe(read(files), NOW)
        path.write_text("\n".join(lines) + "\n")
