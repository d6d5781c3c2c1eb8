"""Event and ledger files: whole lines, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic_train.observe.reporting import Reporter
from elastic_train.runlog.event_types import (
    LEFT_OUT,
    Done,
    Evaluated,
    Event,
    NoticeChanged,
    Started,
    StateRestored,
    StepCommitted,
    Warned,
)
from elastic_train.runlog.events import EventLog, JsonLines, Ledger
from elastic_train.runlog.reader import Cursor, read_all, read_with_torn
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.world import World
from tests.unit.test_admission import member
from tests.unit.test_state import make_state

MEMBERS = tuple(replace(member(pid), host=host) for pid, host in enumerate("abcd", start=1))
WORLD = World(rank=2, generation=7, members=MEMBERS)


RESTORE, WARNING = StateRestored(source="peer", restored_step=0), Warned(message="")


def a_start(**fields: Any) -> Started:
    some: dict[str, Any] = {"config": {}, "versions": {}, "device": "cpu", "task": {}, "max_nodes": 1, "seconds": {}}
    return Started(**{**some, "started_ticks": None, "pid_namespace": "", **fields})


def a_step(step: int = 0, loss: float = 1.0) -> StepCommitted:
    return StepCommitted(step=step, generation=7, epoch=0, loss=loss, samples_done=8)


def fields_of(event: Event) -> dict[str, Any]:
    """As in its line."""
    return {name: value for name in event.__slots__ if (value := getattr(event, name)) is not LEFT_OUT}


def strictly(text: str) -> Any:
    """As a reader in another language reads it."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def event_log(directory: Path) -> EventLog:
    return EventLog(directory, host="node", local_rank=1, rank=0, world_size=1)


def event_log_of_world(directory: Path) -> EventLog:
    log = event_log(directory)
    log.write(a_start())
    log.enter(WORLD)
    return log


def reporter(path: Path, *, wants_bar: bool = False) -> Reporter:
    return Reporter(
        events=event_log(path / "events"), ledger=None, tensorboard_dir=path, wants_bar=wants_bar, debug=False
    )


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_what_is_no_finite_number_is_null(tmp_path: Path) -> None:
    log = event_log(tmp_path / "events")
    metrics: Any = {"loss": math.nan, "all": [math.inf, 1.5]}
    log.write(Evaluated(epoch=0, metrics=metrics, accuracy=-math.inf))
    log.close()
    [line] = only_file(tmp_path / "events").read_text().splitlines()
    found = strictly(line)
    assert (found["metrics"], found["accuracy"]) == ({"loss": None, "all": [None, 1.5]}, None)


def test_a_line_that_comes_long_after_its_commit_says_by_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank 0 that was lost could not write it: the next one does, as its world begins."""
    now = [100.0]
    monkeypatch.setattr("elastic_train.observe.reporting.time.monotonic", lambda: now[0])
    made = reporter(tmp_path)
    commits = [fields_of(a_step(step)) for step in (6, 7)]
    for step in (6, 7):
        made.note_commit(step)
        now[0] += 0.05
    now[0] += 11.0
    state: Any = SimpleNamespace(step=7, last_commits=commits)
    made.write_missing_commits(state, 5)
    made.note_commit(7)  # anew: from a snapshot of before
    made.write_missing_commits(state, 6)
    made.close()
    lines = [strictly(line) for line in only_file(tmp_path / "events").read_text().splitlines()]
    late = [(line["step"], line.get("late_seconds")) for line in lines if line["event"] == "step"]
    assert late == [(6, pytest.approx(11.1)), (7, pytest.approx(11.05)), (7, None)]


def test_what_was_written_before_a_restore_says_nothing_of_the_steps_after_it(tmp_path: Path) -> None:
    """They may have the same numbers."""
    made = reporter(tmp_path)
    me = replace(MEMBERS[0], host="node", local_rank=1, pid=os.getpid())
    commit = fields_of(a_step(100))
    state: Any = SimpleNamespace(step=99, last_commits=[{**commit, "generation": 0}], is_finished=True)
    made.enter(World(0, 0, (me,)), state)
    made.write_missing_commits(state, 99)
    assert made.last_logged_step() == 100
    state.step = 80  # a snapshot was restored
    made.enter(World(0, 1, (me,)), state)
    assert made.last_logged_step() == 80
    state.step, state.last_commits = 81, [{**commit, "step": 81, "generation": 1}]
    made.write_missing_commits(state, 80)
    assert made.last_logged_step() == 81
    made.close()


def test_what_is_void_are_the_own_lines_of_the_newest_steps(tmp_path: Path) -> None:
    """Of a member that is left out right after a commit: the others may not have applied it."""
    one, other = (
        Reporter(events=event_log(tmp_path / name), ledger=None, tensorboard_dir=tmp_path, wants_bar=False, debug=False)
        for name in ("one", "other")
    )
    state = make_state(max_steps=3)
    state.generation = 4
    one.enter(World(0, 4, (member(0), member(1))), state)
    other.enter(World(1, 4, (member(0), member(1))), state)
    assert one.void_commits(state) == []
    for _ in range(3):
        state.commit(0.5)
        for reporter in (one, other):
            reporter.step(state, 0.5, epoch=0, samples=8)
    assert one.void_commits(state) == [{"generation": 4, "step": step} for step in (2, 3)]
    assert other.void_commits(state) == [], "rank 0 writes"
    state.last_commits = [dict(commit) for commit in state.last_commits]
    assert one.void_commits(state) == [], "it was given them by another"
    for reporter in (one, other):
        reporter.close()


@pytest.mark.parametrize(("loss", "told"), [(None, "loss=unknown"), (0.5, "loss=0.5000")])
def test_a_step_without_a_loss_or_a_learning_rate_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float | None, told: str
) -> None:
    """An error of the user's code came between the optimizer's step and the first commit."""
    made = reporter(tmp_path)
    drawn: list[dict[str, float]] = []
    made._add_scalars = lambda _step, values: drawn.append(values)  # type: ignore[method-assign]
    state = make_state(max_steps=1)
    made.enter(World(0, 0, (member(0),)), state)
    state.commit(loss)
    rate = None if loss is None else 0.25
    state.optimizer.param_groups[0]["lr"] = rate  # Adafactor may have none
    made.step(state, loss, epoch=0, samples=8)
    made.close()
    [line] = [strictly(line) for line in only_file(tmp_path / "events").read_text().splitlines()]
    assert (line["event"], line["loss"]) == ("step", loss)
    assert told in capsys.readouterr().err
    assert [(values.get("train/loss"), values.get("train/learning_rate")) for values in drawn] == [(loss, rate)]


@pytest.mark.parametrize("has_bar_before", [True, False])
def test_a_terminal_that_has_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bar_before: bool
) -> None:
    """A shell was left, and the job goes on in the background: its lines are lost, each once."""
    screen, terminal = pty.openpty()
    written: list[str] = []

    class Stderr(io.TextIOWrapper):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    stderr, stdout = Stderr(io.FileIO(terminal, "w"), write_through=True), sys.stdout
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    made = reporter(tmp_path, wants_bar=True)
    made._add_scalars = lambda _step, _values: None  # type: ignore[method-assign]
    state = make_state(max_steps=1)
    if not has_bar_before:
        os.close(screen)
    made.enter(World(0, 0, (member(0),)), state)
    if has_bar_before:
        assert b"\x1b[?25l" in os.read(screen, 4096), "a bar hides the cursor"
        os.close(screen)
    made.log("one")
    print("of the user")  # a bar stands between
    state.commit(0.5)
    made.step(state, 0.5, epoch=0, samples=8)
    made.warn("two")
    made.leave()
    made.log("three")
    made.close()
    assert (sys.stderr, sys.stdout) == (stderr, stdout)
    for line in ("elastic_train: one\n", "elastic_train: warning: two\n", "elastic_train: three"):
        assert [text.count(line) for text in written if line in text] == [1]
    lines = [strictly(line) for line in only_file(tmp_path / "events").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "warning"]


def test_training_needs_no_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`2>&-` leaves Python without one."""
    monkeypatch.setattr(sys, "stderr", None)
    made = reporter(tmp_path, wants_bar=True)
    state = make_state(max_steps=1)
    made.enter(World(0, 0, (member(0),)), state)
    made.log("one")
    made.warn("two")
    made.leave()
    made.close()


def test_files_that_cannot_be_written_need_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events").write_text("no folder")
    screen, terminal = pty.openpty()
    os.close(screen)
    with io.TextIOWrapper(io.FileIO(terminal, "w"), write_through=True) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        event_log(tmp_path / "events").write(WARNING)


def test_every_line_says_who_wrote_it_and_where_the_run_stood(tmp_path: Path) -> None:
    log = event_log(tmp_path / "events")
    before, began = time.time(), time.monotonic()
    log.write(a_start(config={"seed": 0}))
    log.enter(WORLD)
    log.step = 12
    log.write(a_step(12))
    log.is_noticed = True
    log.write(NoticeChanged(state="given", source="aws", reason="", deadline=None, certain=True))
    log.close()
    path = only_file(tmp_path / "events")
    assert path.name == f"node-1-{os.getpid()}.jsonl"
    start, step, notice = read_all(path)
    assert (notice["noticed"], notice["nodes"]) == (True, 4)
    assert notice["deadline"] is None
    assert not notice.keys() & {"seconds_left", "save_seconds"}, "absent is not null"
    assert before <= start["time"] <= step["time"] <= time.time()
    same = {"pid": os.getpid(), "host": "node"}
    assert began <= start["monotonic"] <= step["monotonic"] <= time.monotonic()
    for line in (start, step):
        del line["time"], line["monotonic"]
    assert start == {
        "event": "start", "rank": 0, "world_size": 1, "generation": None, "step": 0, "config": {"seed": 0}, **same,
        "versions": {}, "device": "cpu", "task": {}, "max_nodes": 1, "started_ticks": None, "pid_namespace": "",
        "seconds": {},
    }  # fmt: skip
    assert step == {
        "event": "step", "rank": 2, "world_size": 4, "nodes": 4, "generation": 7, "step": 12, "loss": 1.0, **same,
        "epoch": 0, "samples_done": 8,
    }  # fmt: skip


def test_lines_tell_of_a_quarantine_until_it_is_over(tmp_path: Path) -> None:
    log = event_log(tmp_path)
    lasting = {"host": "a", "deaths": 3, "until": time.time() + 100}
    log.quarantines = [{**lasting, "host": "b", "until": time.time() - 1}, lasting]
    log.write(WARNING)
    log.quarantines = [{**lasting, "until": time.time() - 1}]
    log.write(WARNING)
    first, second = read_all(only_file(tmp_path))
    assert first["quarantined"] == [lasting]
    assert "quarantined" not in second


def test_no_file_before_the_first_line(tmp_path: Path) -> None:
    event_log(tmp_path / "events").close()
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, events=event_log(tmp_path / "events"), host="node", local_rank=0)
    parts = [np.array([5, 3]), np.array([], dtype=np.int64), np.array([2**40])]
    ledger.write(epoch=1, step=9, world=WORLD, indices=parts)
    ledger.close()
    assert read_all(only_file(tmp_path)) == [
        {"epoch": 1, "step": 9, "generation": 7, "rank": 2, "indices": [5, 3, 2**40]}
    ]


def test_a_killed_process_leaves_whole_lines_and_at_most_its_last_one_cut_off(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from elastic_train.runlog.events import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "number = 0\n"
        "while True:\n"
        "    lines.write({'number': number, 'padding': 'x' * 3000}); number += 1\n"
    )
    path = tmp_path / "lines.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    try:
        wait_until(lambda: path.exists() and path.stat().st_size > 1_000_000, "megabyte of lines", 30)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    *whole, _cut_off = path.read_bytes().split(b"\n")
    assert [json.loads(line)["number"] for line in whole] == list(range(len(whole)))
    assert [line["number"] for line in read_all(path)][: len(whole)] == list(range(len(whole))), "readers go on"


def test_a_full_disk_ends_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines(Path("/dev/full"))
    for _ in range(3):
        lines.write({"event": "step"})
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning == (
        "elastic_train: warning: /dev/full misses lines until there is room: No space left on device; training goes on"
    )
    lines.close()


def limit_room(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> list[float]:
    """How many bytes the disk still takes."""
    room, write = [math.inf], os.write

    def limited(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(number, os.strerror(number))
        written = write(fd, data[: int(min(room[0], len(data)))])
        room[0] -= written
        return written

    monkeypatch.setattr("elastic_train.runlog.events.os.write", limited)
    return room


def test_a_disk_that_fills_up_within_a_line_spoils_only_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, whole = JsonLines(tmp_path / "lines.jsonl"), os.write
    with monkeypatch.context() as patched:
        patched.setattr("elastic_train.runlog.events.os.write", lambda fd, data: whole(fd, data[:4]))
        lines.write({"number": 1})
    lines.write({"number": 2})
    assert read_all(lines.path) == [{"number": 2}]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_when_there_is_room_again_lines_are_written_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How a run ended is told by its last line."""
    lines, room = JsonLines(tmp_path / "lines.jsonl"), limit_room(monkeypatch, number)
    for count in range(7):
        room[0] = {1: 4.0, 3: math.inf, 4: 0.0, 5: math.inf}.get(count, room[0])
        lines.write({"number": count})
    lines.close()
    torn: dict[int, str] = {}
    assert list(read_with_torn(lines.path, torn)) == [{"number": count} for count in (0, 3, 5, 6)]
    assert list(torn) == [2]
    assert len(capsys.readouterr().err.splitlines()) == 2, "one for each time that it was full"


def test_what_found_no_room_is_told_of_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the audit: which lines are missing, and how many are torn. An event that tells it may find no room either."""
    log, room = event_log(tmp_path / "events"), limit_room(monkeypatch)
    ledger = Ledger(tmp_path / "ledger", events=log, host="node", local_rank=1)
    log.write(a_start())
    log.enter(WORLD)
    for step in range(1, 8):
        room[0] = {2: 5.0, 3: 0.0, 5: 100.0, 6: math.inf}.get(step, room[0])  # at step 5 for a line of the ledger alone
        ledger.write(epoch=0, step=step, world=WORLD, indices=[np.array([step])])
        log.step = step
        log.write(a_step(step))
        log.write(WARNING)
    log.close()
    ledger.close()
    lines = read_all(only_file(tmp_path / "events"))
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 6, 7]
    assert [line["step"] for line in read_all(only_file(tmp_path / "ledger"))] == [1, 5, 6, 7]
    told = {line["file"]: (line["torn"], line["lines"]) for line in lines if line["event"] == "unwritten"}
    assert told["ledger"] == (1, {"samples": [[7, 2, 4]]})
    torn: dict[int, str] = {}
    list(read_with_torn(only_file(tmp_path / "events"), torn))
    assert told["events"][0] == len(torn)
    assert told["events"][1] == {"step": [[7, 2, 5]], "warning": [[7, 2, 5]]}
    assert len([line for line in lines if line["event"] == "unwritten"]) == 2, "once for each file"


@pytest.mark.parametrize("failing", ["write", "open"])
def test_a_stale_handle_is_opened_anew(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An NFS server has failed over: the path is good again at the next open."""
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.write({"number": 0})
    if failing == "open":
        lines.close()
    fail_once(failing, errno.ESTALE, monkeypatch)
    for number in (1, 2):
        lines.write({"number": number})
    assert read_all(lines.path) == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert capsys.readouterr().err == ""


def test_the_last_line_is_tried_though_the_mount_has_just_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no later one, and what has become of the run is read from it."""
    log = event_log_of_world(tmp_path / "events")
    fail_once("write", errno.EIO, monkeypatch)
    for event in (a_step(), a_step(), Done(outcome="stopped")):
        log.write(event)
    log.close()
    assert [line["event"] for line in read_all(only_file(tmp_path / "events"))] == ["start", "done", "unwritten"]


def test_what_is_missing_in_a_ledger_is_told_though_the_run_ends_in_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = event_log_of_world(tmp_path / "events")
    ledger = Ledger(tmp_path / "ledger", events=log, host="node", local_rank=1)
    fail_once("write", errno.EIO, monkeypatch)
    for step in (1, 2):
        ledger.write(epoch=0, step=step, world=WORLD, indices=[np.array([step])])
    for closed in (ledger, log):
        closed.close()
    [told] = [line for line in read_all(only_file(tmp_path / "events")) if line["event"] == "unwritten"]
    assert (told["file"], told["lines"]) == ("ledger", {"samples": [[7, 1, 2]]})


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_failing_mount_is_left_alone_for_a_while_and_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each try may take minutes: training is held up for a twentieth of the time at most."""
    now, tries, write, is_failing = [100.0], [0], os.write, True

    def write_late(fd: int, data: bytes) -> int:
        tries[0] += 1
        if is_failing:
            now[0] += 10.0
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    lines = JsonLines(tmp_path / "lines.jsonl", clock=lambda: now[0])
    monkeypatch.setattr("elastic_train.runlog.events.os.write", write_late)
    for _ in range(3):
        lines.write({"number": 0})
    assert tries == [1]
    now[0] += 200.0
    lines.write({"number": 1})
    assert tries == [2]
    is_failing = False
    now[0] += 199.0
    lines.write({"number": 2})
    now[0] += 1.0
    lines.write({"number": 3})
    lines.write({"number": 4})
    assert read_all(lines.path) == [{"number": 3}, {"number": 4}]
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"misses lines until it can be written to: {os.strerror(number)}; training goes on" in warning


def test_an_error_as_a_file_is_closed_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS tells there of what it could not write before."""
    log = EventLog(tmp_path / "events", host="a", local_rank=0, rank=0, world_size=1)
    log.write(a_start())
    fail_once("close", errno.EDQUOT, monkeypatch)
    log.begin_again()
    log.close()
    assert [line["event"] for line in read_all(only_file(tmp_path / "events"))] == ["start", "start"]


def fail_once(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of a function of `os` by the log raises."""
    whole, has_failed = getattr(os, name), [False]

    def fail(*args: Any) -> Any:
        if not has_failed[0]:
            has_failed[0] = True
            raise OSError(number, os.strerror(number))
        return whole(*args)

    monkeypatch.setattr(f"elastic_train.runlog.events.os.{name}", fail)


def test_a_directory_that_cannot_be_made_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events").touch()
    log = event_log(tmp_path / "events")
    log.write(a_start())
    log.write(a_step())
    (warning,) = capsys.readouterr().err.splitlines()
    assert "misses lines until it can be written to: " in warning


def test_a_file_whose_folder_was_removed_is_begun_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", host="a", local_rank=0, rank=0, world_size=1)
    log.write(a_start())
    log.write(a_step())
    (tmp_path / "events").rename(tmp_path / "moved")
    log.begin_again()
    log.write(a_step())
    log.close()
    [path] = (tmp_path / "events").iterdir()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "step"]
    [path] = (tmp_path / "moved").iterdir()
    assert len(path.read_text().splitlines()) == 2


def test_a_world_s_events_go_where_the_run_directory_is_now(tmp_path: Path) -> None:
    """Two nodes start together, one of them with --fresh, which moves aside what the other one has written."""
    log = EventLog(tmp_path / "events", host="a", local_rank=0, rank=0, world_size=1)
    log.enter(WORLD)  # nothing is written yet, and so nothing is moved
    log.write(a_start())
    log.enter(WORLD)
    (tmp_path / "events").rename(tmp_path / "moved")
    log.enter(WORLD)
    log.write(RESTORE)
    log.enter(WORLD)
    log.close()
    [path] = (tmp_path / "events").iterdir()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "restore"]


def test_a_later_process_of_the_same_name_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    """In containers pids repeat."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"event":"world"}\n{"event":"st')
    for event in ("start", "step"):
        lines = JsonLines(path)
        lines.write({"event": event})
        lines.close()
    torn: dict[int, str] = {}
    assert list(read_with_torn(path, torn)) == [{"event": "world"}, {"event": "start"}, {"event": "step"}]
    assert not torn


@pytest.mark.parametrize(
    ("text", "torn"),
    [
        ('{"event":"step"}\n{"ev\n{"event":"start"}\n', []),
        ('{"event":"step"}\n{"ev\n{"event":"step"}\n{"event":"start"}\n', [2]),
        ('{"event":"step","generation":1}\n{"ev\n{"event":"warning","generation":null}\n{"event":"start"}\n', []),
        ('{"event":"step","generation":1}\n{"ev\n{"event":"warning","generation":1}\n', [2]),
        ('{"event":"step"}\n{"ev\n\n', [2]),
        ('{"generation":1}\n{"ge\n{"generation":2}\n', []),
        ('{"generation":1}\n{"ge\n{"generation":1}\n', [2]),
        ('{"generation":2}\n{"ge\n{"generation":1}\n', [2]),
        ('{"ge\n{"generation":1}\n', []),
        ('{"a":1}\n{"a"\n\n[1]\n{"a":2}\n{"a":3', [2, 4]),  # one that is not ended is none
    ],
)
def test_a_line_is_torn_unless_a_later_process_goes_on_behind_it(text: str, torn: list[int], tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(text)
    found: dict[int, str] = {}
    for _ in read_with_torn(tmp_path / "lines", found):
        pass
    assert list(found) == torn


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ('{"a":1}\n{"a":2}\n', [{"a": 1}, {"a": 2}]),
        ('{"a":1}\n{"a":', [{"a": 1}]),
        ('{"a"\n\n[1]\n7\n{"a":2}', [{"a": 2}]),
    ],
)
def test_reading_skips_what_is_no_whole_object(tmp_path: Path, text: str, found: list[Any]) -> None:
    (tmp_path / "lines").write_text(text)
    assert read_all(tmp_path / "lines") == found


def test_a_cursor_reads_every_line_once_and_none_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "node-0-1.jsonl"
    cursor = Cursor(path)
    assert cursor.read() == []
    for written, found in (("", []), ('{"a":1}\n{"a":', [{"a": 1}]), ("2}\n{", [{"a": 2}]), ('"a\n', [])):
        with path.open("a") as file:
            file.write(written)
        assert cursor.read() == found


def test_one_thread_may_close_what_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notices' thread writes while the worker leaves its world: never to a file that is closed, or is another's."""
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.write({"number": 0})
    is_writing, may_write = threading.Event(), threading.Event()
    write = os.write

    def slow(fd: int, data: bytes) -> int:
        is_writing.set()
        assert may_write.wait(30.0)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    writer = threading.Thread(target=lines.write, args=({"number": 1},))
    writer.start()
    assert is_writing.wait(30.0)
    closer = threading.Thread(target=lines.close)
    closer.start()
    closer.join(0.2)
    closed_early = not closer.is_alive()
    may_write.set()
    writer.join(30.0)
    closer.join(30.0)
    assert not closed_early
    assert [line["number"] for line in read_all(tmp_path / "lines.jsonl")] == [0, 1]
