"""The owner of a run directory: real processes, stopped and killed by their pid."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import elastic_train
from elastic_train.config import Config
from elastic_train.elastic.earlier_run import newest_of
from elastic_train.elastic.worker import make_directory
from elastic_train.errors import OwnershipLost, RunDirectoryError, RunDirectoryGone, RunDirectoryInUse
from elastic_train.storage import atomic_files, ownership
from elastic_train.storage.atomic_files import require_writable, write_atomic
from elastic_train.storage.past_snapshots import read_past_snapshots
from elastic_train.storage.run_directory import SNAPSHOTS, RunDirectory, Traces
from elastic_train.system import process_stat
from tests.processes import freeze

DEADLINE = 30.0
HOST = "node-a"

WORKER = """
import json, os, sys
from elastic_train.errors import ElasticTrainError
from elastic_train.storage.run_directory import RunDirectory

directory = RunDirectory(sys.argv[1])
for line in sys.stdin:
    call, arguments = json.loads(line)
    try:
        if call == "fork":  # a child that lives on, as a DataLoader's would
            child = os.fork()
            if child == 0:
                import time
                time.sleep(60)
                os._exit(0)
            answer = ["ok", child]
        else:
            answer = ["ok", getattr(directory.ownership, call)(*arguments)]
    except ElasticTrainError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """A process that has a RunDirectory and does what it is told."""

    def __init__(self, path: Path) -> None:
        root = str(Path(elastic_train.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        self.pid = self.process.pid

    def send(self, call: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([call, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, Any]:
        assert self.process.stdout is not None  # pytest's timeout is the deadline of this read
        kind, value = json.loads(self.process.stdout.readline())
        return kind, value

    def call(self, call: str, *arguments: object) -> tuple[str, Any]:
        self.send(call, *arguments)
        return self.answer()

    def stop(self) -> None:
        freeze(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(tmp_path / "run"))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    yield directory
    directory.ownership.release()


def owner_record(directory: RunDirectory) -> Path:
    return directory.path / "owner.json"


def owner_of(directory: RunDirectory) -> dict[str, Any]:
    owner: dict[str, Any] = json.loads(owner_record(directory).read_bytes())
    return owner


# --- paths and creation -----------------------------------------------------------------------------------------


def test_create_makes_parents_and_is_repeatable(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.create()
    directory.create()
    assert directory.path.is_dir()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_create_where_a_file_is_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"file.*choose another --run-dir$") as caught:
        RunDirectory(tmp_path / "file" / below).create()
    assert "\n" not in str(caught.value)


def test_create_where_it_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(RunDirectoryError, match=r"Permission denied; choose another --run-dir$"):
        RunDirectory(tmp_path).create()


# --- one job ----------------------------------------------------------------------------------------------------


def test_claim_writes_the_owner_and_a_newer_generation_replaces_it(directory: RunDirectory) -> None:
    assert directory.ownership.claim("job", 3, HOST) is None
    owner = owner_of(directory)
    assert (owner["job_token"], owner["generation"]) == ("job", 3)
    assert (owner["host"], owner["pid"]) == (HOST, os.getpid())
    assert abs(owner["time"] - time.time()) < 60
    directory.ownership.claim("job", 2, HOST)
    assert owner_of(directory) == owner
    directory.ownership.claim("job", 4, HOST)
    assert owner_of(directory)["generation"] == 4


def test_check_owner(directory: RunDirectory) -> None:
    directory.ownership.claim("job", 3, HOST)
    directory.ownership.check_owner("job", 3)
    directory.ownership.check_owner("job", 4)  # claimed by this one and not yet by a slower one: no reason to leave
    with pytest.raises(OwnershipLost, match=rf"generation 3 \(host {HOST}, pid {os.getpid()}, since .* UTC\)"):
        directory.ownership.check_owner("job", 2)
    with pytest.raises(OwnershipLost, match="belongs to another job"):
        directory.ownership.check_owner("other", 3)
    owner_record(directory).write_text("{")
    with pytest.raises(OwnershipLost, match=r"no valid owner\.json"):
        directory.ownership.check_owner("job", 3)
    owner_record(directory).unlink()
    with pytest.raises(RunDirectoryGone, match="was removed or moved"):
        directory.ownership.check_owner("job", 3)
    owner_record(directory).mkdir()
    with pytest.raises(RunDirectoryError, match="Is a directory"):
        directory.ownership.check_owner("job", 3)
    owner_record(directory).rmdir()


def remove(path: Path) -> None:
    shutil.rmtree(path)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


@pytest.mark.parametrize("lose", [remove, move])
def test_a_directory_that_is_gone_is_made_anew(directory: RunDirectory, lose: Callable[[Path], None]) -> None:
    """By each worker of the job, which has its lock again."""
    second = RunDirectory(directory.path)
    identity = directory.identity("job")
    assert second.identity("job") == identity
    for worker in (directory, second):
        worker.ownership.claim("job", 3, HOST)
    lose(directory.path)
    with pytest.raises(RunDirectoryGone):
        directory.ownership.check_owner("job", 3)
    directory.make_anew("job", 3, HOST)
    directory.ownership.check_owner("job", 3)
    assert RunDirectory(directory.path).identity("job") == identity
    with pytest.raises(RunDirectoryGone):  # the record is there, and its lock is not
        second.ownership.claim("job", 4, HOST, is_leader=False)
    second.make_anew("job", 4, HOST)
    second.ownership.claim("job", 4, HOST, is_leader=False)
    assert owner_of(directory)["generation"] == 4
    directory.ownership.release()
    with pytest.raises(RunDirectoryInUse):  # the second worker still has it
        RunDirectory(directory.path).ownership.claim("other", 0, HOST)
    second.ownership.release()
    RunDirectory(directory.path).ownership.claim("other", 0, HOST)


def test_who_has_not_noticed_takes_no_lock_of_another_worker_with_it(directory: RunDirectory) -> None:
    second = RunDirectory(directory.path)
    directory.identity("job")
    for worker in (directory, second):
        worker.ownership.claim("job", 3, HOST)
    remove(directory.path)
    directory.make_anew("job", 3, HOST)
    second.ownership.release()
    with pytest.raises(RunDirectoryInUse):
        RunDirectory(directory.path).ownership.claim("other", 0, HOST)


def test_a_job_that_comes_first_to_a_directory_that_was_removed_has_it(directory: RunDirectory) -> None:
    directory.identity("job")
    directory.ownership.claim("job", 3, HOST)
    remove(directory.path)
    other = RunDirectory(directory.path)
    other.create()
    other.ownership.claim("other", 0, HOST)  # between the other one's look and its claim
    with pytest.raises(OwnershipLost, match="belongs to another job"):
        directory.make_anew("job", 3, HOST)
    other.ownership.release()
    with pytest.raises(OwnershipLost, match="belongs to another job"):  # for good
        directory.ownership.claim("job", 4, HOST)


def test_a_job_token_must_be_a_file_name(directory: RunDirectory) -> None:
    for token in ("", "a/b", "..\0", "a b"):
        with pytest.raises(ValueError, match="job_token"):
            directory.ownership.claim(token, 0, HOST)


def test_the_next_job_removes_the_lock_of_one_that_is_over(directory: RunDirectory) -> None:
    first, second = RunDirectory(directory.path), RunDirectory(directory.path)
    first.ownership.claim("job", 0, HOST)
    second.ownership.claim("job", 0, HOST)
    for worker in (first, second, second):
        worker.ownership.release()
    assert (directory.path / ".owner-job.lock").exists()
    directory.ownership.claim("next", 1, HOST)
    found = sorted(path.name for path in directory.path.iterdir())
    assert found == [".claim.lock", ".owner-next.lock", "owner.json"]


def test_who_leaves_takes_no_lock_along_that_only_other_hosts_see(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose flock holds for one host alone: each host gets every lock there."""
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: None)
    here, there = RunDirectory(directory.path), RunDirectory(directory.path)
    here.ownership.claim("job", 3, HOST)
    there.ownership.claim("job", 3, "node-b")
    here.ownership.release()
    there.ownership.claim("job", 4, "node-b")
    there.ownership.check_owner("job", 4)
    there.ownership.release()


def test_many_workers_of_one_job_at_once(directory: RunDirectory, start_worker: Callable[[], Worker]) -> None:
    workers = [start_worker() for _ in range(8)]
    for generation in range(5):
        for worker in workers:
            worker.send("claim", "job", generation, HOST)
        assert [worker.answer() for worker in workers] == [("ok", None)] * len(workers)
        assert owner_of(directory)["generation"] == generation
        for worker in workers:
            assert worker.call("check_owner", "job", generation) == ("ok", None)


def test_claim_removes_what_a_killed_claim_left(directory: RunDirectory) -> None:
    leftover = directory.path / ".owner.json.tmp-0123abcd"
    leftover.write_bytes(b"{")
    directory.ownership.claim("job", 0, HOST)
    assert not leftover.exists()


# --- two jobs ---------------------------------------------------------------------------------------------------


def test_a_second_live_job_is_refused_by_name(directory: RunDirectory, start_worker: Callable[[], Worker]) -> None:
    worker = start_worker()
    assert worker.call("claim", "first", 0, "node-b") == ("ok", None)
    before = sorted(directory.path.iterdir())
    with pytest.raises(RunDirectoryInUse) as caught:
        directory.ownership.claim("second", 0, HOST)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(directory.path), "host node-b", f"pid {worker.pid}", "since 20", "--run-dir"):
        assert part in message
    assert sorted(directory.path.iterdir()) == before
    assert worker.call("check_owner", "first", 0) == ("ok", None)


def test_a_killed_owner_is_replaced(directory: RunDirectory, start_worker: Callable[[], Worker]) -> None:
    worker = start_worker()
    assert worker.call("claim", "first", 7, HOST) == ("ok", None)
    worker.kill()
    directory.ownership.claim("second", 0, HOST)
    assert owner_of(directory)["job_token"] == "second"
    assert not (directory.path / ".owner-first.lock").exists()


def test_a_forked_child_does_not_hold_the_directory(
    directory: RunDirectory, start_worker: Callable[[], Worker]
) -> None:
    worker = start_worker()
    assert worker.call("claim", "first", 0, HOST) == ("ok", None)
    _, child = worker.call("fork")
    try:
        worker.kill()
        directory.ownership.claim("second", 0, HOST)
    finally:
        os.kill(child, signal.SIGKILL)


def test_who_keeps_others_from_claiming_is_named(directory: RunDirectory) -> None:
    with open(directory.path / ".claim.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=rf"pid {os.getpid()} of .* has held \.claim\.lock for 0\.02 s"):
            directory.ownership.claim("job", 0, HOST, timeout=timedelta(seconds=0.02))
    directory.ownership.claim("job", 0, HOST)


FORKED_AS_IT_OPENS = """
import os, sys
from datetime import timedelta
from elastic_train.storage.run_directory import RunDirectory

real_open, children = os.open, []

def open_and_fork(path, *rest, **options):  # as another thread does that starts DataLoader processes
    fd = real_open(path, *rest, **options)
    if str(path).endswith(".claim.lock"):
        child = os.fork()
        if child == 0:
            sys.stdin.read()
            os._exit(0)
        children.append(child)
    return fd

first, second = RunDirectory(sys.argv[1]).ownership, RunDirectory(sys.argv[1]).ownership
os.open = open_and_fork
first.claim("job", 0, "here")
os.open = real_open
print(len(children))
second.claim("job", 0, "here", timeout=timedelta(seconds=1))
"""


def test_a_child_that_is_forked_as_the_lock_is_opened_does_not_keep_it(directory: RunDirectory) -> None:
    """Python registers the descriptor a moment after the kernel has opened it: a child of that moment has a copy."""
    root = str(Path(elastic_train.__file__).parent.parent)
    command = [sys.executable, "-W", "ignore", "-c", FORKED_AS_IT_OPENS, str(directory.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": root}, **pipes) as process:
        try:
            status = process.wait(DEADLINE)  # the children live until their input ends
        finally:
            assert process.stdin is not None
            process.stdin.close()
        assert process.stdout is not None
        assert process.stderr is not None
        assert (status, process.stdout.read()) == (0, "1\n"), process.stderr.read()


def test_a_child_that_did_keep_the_lock_is_named(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_LEFT_CHILD_TIMEOUT", timedelta(seconds=0.02))
    started = process_stat(os.getpid())[1]
    lock = directory.path / ".owner-first.lock"
    lock.write_text(json.dumps({"host": HOST, "pid": os.getpid(), "time": 0, "started": started + "0"}))
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RunDirectoryInUse, match="left a child process behind"):
            directory.ownership.claim("second", 0, HOST)


def test_a_stopped_owner_is_replaced_and_finds_out(directory: RunDirectory, start_worker: Callable[[], Worker]) -> None:
    worker = start_worker()
    assert worker.call("claim", "first", 5, HOST) == ("ok", None)
    worker.stop()
    directory.ownership.claim("second", 0, HOST)
    worker.go_on()
    kind, message = worker.call("check_owner", "first", 5)
    assert kind == "OwnershipLost"
    assert f"another job (host {HOST}, pid {os.getpid()}" in message
    # nor can it take the directory back, now or when the other job is over
    assert worker.call("claim", "first", 6, HOST)[0] == "OwnershipLost"
    # and being alive again it does not stand in the way of the job that replaced it
    directory.ownership.claim("second", 1, HOST)
    RunDirectory(directory.path).ownership.claim("second", 1, HOST)
    directory.ownership.release()
    assert worker.call("claim", "first", 7, HOST)[0] == "OwnershipLost"
    assert owner_of(directory)["job_token"] == "second"


def test_a_stopped_process_of_another_host_is_not_judged(
    directory: RunDirectory, start_worker: Callable[[], Worker]
) -> None:
    worker = start_worker()
    worker.call("claim", "first", 0, "node-b")
    worker.stop()
    with pytest.raises(RunDirectoryInUse, match="node-b"):
        directory.ownership.claim("second", 0, HOST)


def test_one_stopped_worker_does_not_make_its_job_stale(
    directory: RunDirectory, start_worker: Callable[[], Worker]
) -> None:
    stopped, living = start_worker(), start_worker()
    for worker in (stopped, living):
        assert worker.call("claim", "first", 0, HOST) == ("ok", None)
    assert owner_of(directory)["pid"] == stopped.pid
    stopped.stop()
    with pytest.raises(RunDirectoryInUse, match=f"pid {living.pid}"):
        directory.ownership.claim("second", 0, HOST)
    # the job goes on without it, and it finds that out
    assert living.call("claim", "first", 1, HOST) == ("ok", None)
    stopped.go_on()
    kind, message = stopped.call("check_owner", "first", 0)
    assert kind == "NewerGeneration"
    assert f"generation 1 (host {HOST}, pid {living.pid}" in message


def test_of_two_jobs_at_once_exactly_one_wins(directory: RunDirectory, start_worker: Callable[[], Worker]) -> None:
    workers = {"left": start_worker(), "right": start_worker()}
    wins = {"left": 0, "right": 0}
    order = random.Random(0)
    for round_number in range(40):
        tokens = order.sample(["left", "right"], 2)
        for token in tokens:
            workers[token].send("claim", f"{token}-{round_number}", round_number, HOST)
        answers = {token: workers[token].answer()[0] for token in tokens}
        assert sorted(answers.values()) == ["RunDirectoryInUse", "ok"]
        winner = next(token for token in tokens if answers[token] == "ok")
        wins[winner] += 1
        assert owner_of(directory)["job_token"] == f"{winner}-{round_number}"
        assert workers[winner].call("check_owner", f"{winner}-{round_number}", round_number) == ("ok", None)
        assert workers[winner].call("release") == ("ok", None)
    assert sum(wins.values()) == 40


def test_one_claims_each_generation_for_all_who_have_claimed(directory: RunDirectory) -> None:
    """Hundreds would wait for each other's lock in a recovery, and none but the first would change anything."""
    first, second = RunDirectory(directory.path), RunDirectory(directory.path)
    first.ownership.claim("job", 0, HOST)
    second.ownership.claim("job", 0, HOST, is_leader=False)
    first.ownership.release()
    with pytest.raises(RunDirectoryInUse):
        RunDirectory(directory.path).ownership.claim("other", 0, HOST)
    with directory.ownership._claim_lock(timedelta(0)):  # somebody is at it
        second.ownership.claim("job", 1, HOST, is_leader=False, timeout=timedelta(0))
        with pytest.raises(RunDirectoryError, match="held"):
            second.ownership.claim("job", 1, HOST, timeout=timedelta(0))
    assert json.loads(owner_record(directory).read_text())["generation"] == 0
    second.ownership.claim("job", 1, HOST)
    assert json.loads(owner_record(directory).read_text())["generation"] == 1
    second.ownership.release()


def test_who_does_not_claim_for_the_others_finds_out_that_it_was_replaced(directory: RunDirectory) -> None:
    directory.ownership.claim("job", 0, HOST, is_leader=False)
    record = json.loads(owner_record(directory).read_text())
    owner_record(directory).write_text(json.dumps({**record, "job_token": "other"}))
    with pytest.raises(OwnershipLost):
        directory.ownership.claim("job", 1, HOST, is_leader=False)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_flock_a_warning(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def no_flock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    warning = directory.ownership.claim("job", 0, HOST)
    assert warning is not None
    assert str(directory.path) in warning
    directory.ownership.check_owner("job", 0)
    RunDirectory(directory.path).ownership.claim("other", 1, HOST)
    with pytest.raises(OwnershipLost):
        directory.ownership.check_owner("job", 0)
    with pytest.raises(OwnershipLost):
        directory.ownership.claim("job", 1, HOST)


def test_with_flock_for_one_host_alone_a_warning(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "local_flock", {directory.path: "localflock"}.get)
    warning = directory.ownership.claim("job", 0, HOST)
    assert warning is not None
    assert f"flock below {directory.path} holds for one host alone (mount option localflock)" in warning


def test_a_full_disk_leaves_no_claim(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunDirectoryError, match=r"No space left on device; choose another --run-dir"):
            directory.ownership.claim("job", 0, HOST)
    assert not list(directory.path.glob("*.tmp*"))
    directory.ownership.release()
    RunDirectory(directory.path).ownership.claim("other", 0, HOST)


# --- moving aside -----------------------------------------------------------------------------------------------


def test_move_aside(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", now=lambda: 1_700_000_000.0)
    directory.create()
    directory.ownership.claim("job", 0, HOST)
    assert directory.move_aside() is None
    asides = []
    for number in range(3):
        directory.events_dir.mkdir()
        (directory.events_dir / "x.jsonl").write_text(str(number))
        directory.result_path.write_text("{}")
        aside = directory.move_aside()
        assert aside is not None
        asides.append(aside)
        assert sorted(path.name for path in aside.iterdir()) == ["events", "result.json"]
        assert (aside / "events" / "x.jsonl").read_text() == str(number)
        directory.ownership.check_owner("job", 0)
    names = ["run.20231114T221320Z", "run.20231114T221320Z.2", "run.20231114T221320Z.3"]
    assert [aside.name for aside in asides] == names
    kept = sorted(path.name for path in directory.path.iterdir())
    assert kept == [".claim.lock", ".owner-job.lock", "owner.json"]
    with pytest.raises(RunDirectoryInUse):
        RunDirectory(directory.path).ownership.claim("other", 0, HOST)
    directory.ownership.release()


def test_a_new_runs_own_folder_of_snapshots_is_nothing_to_move(tmp_path: Path) -> None:
    """It is made before anybody claims it, and holds the claim then. Where the run directory is a mount point, a start
    with --fresh could not move it."""
    directory = make_directory(Config(run_dir=tmp_path / "run"), "none")
    directory.ownership.claim("job", 0, HOST)
    assert directory.snapshots_dir.is_dir()
    assert directory.move_aside() is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    directory.ownership.check_owner("job", 0)
    (directory.snapshots_dir / "step-1").mkdir()
    aside = directory.move_aside()
    assert aside is not None
    assert (aside / SNAPSHOTS / "step-1").is_dir()
    directory.ownership.release()


def test_move_aside_that_cannot_leaves_everything(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory.snapshots_dir / "step-1").mkdir(parents=True)

    def across(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", across)
    with pytest.raises(RunDirectoryError, match=r"--fresh: Invalid cross-device link; choose another --run-dir"):
        directory.move_aside()
    assert directory.snapshots_dir.is_dir()
    assert [path.name for path in directory.path.parent.iterdir()] == ["run"]


# --- event files ------------------------------------------------------------------------------------------------


def test_last_generation_and_step(directory: RunDirectory) -> None:
    assert directory.traces().generation is None
    directory.events_dir.mkdir()
    (directory.events_dir / "a.jsonl").write_text(
        '{"event": "start", "generation": null, "step": 0}\n'
        '{"event": "step", "generation": 4, "step": 90, "time": "x"}\n'
    )
    (directory.events_dir / "b.jsonl").write_text(
        'junk\n[1]\n{"generation": true, "step": "x"}\n{"generation": 6, "step": 80}\n{"generation": 77, "st'
    )
    (directory.events_dir / "empty.jsonl").write_text("")
    (directory.events_dir / "c.jsonl.bak").write_text('{"generation": 99, "step": 99}\n')
    assert directory.traces() == Traces(generation=6, reached=(6, 80), logged=(4, 90))


@pytest.mark.parametrize(
    ("owned", "seconds_before", "found"),
    [
        pytest.param(3, 7200.0, 3, id="not-read"),
        pytest.param(3, 1800.0, 7, id="clocks-differ"),
        pytest.param(4, 7200.0, 7, id="no-step-of-the-owner"),
        pytest.param(None, 7200.0, 7, id="no-owner"),
    ],
)
def test_event_files_that_can_say_nothing_new_are_not_read(
    directory: RunDirectory, owned: int | None, seconds_before: float, found: int
) -> None:
    """A run of many joins leaves thousands of them. Where the older one was read shows by what cannot be in it."""
    directory.events_dir.mkdir()
    if owned is not None:
        directory.ownership.claim("job", owned, HOST)
    step_at = 1_700_000_000.0
    new, old = directory.events_dir / "new.jsonl", directory.events_dir / "old.jsonl"
    new.write_text(json.dumps({"event": "step", "generation": 3, "step": 12, "time": step_at}) + "\n")
    old.write_text('{"event": "world", "generation": 7, "step": 90}\n')
    os.utime(new, (step_at, step_at))
    os.utime(old, (step_at - seconds_before, step_at - seconds_before))
    assert directory.traces().generation == found
    directory.ownership.release()


def test_a_start_does_not_begin_anew_where_the_events_cannot_be_listed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.events_dir.mkdir()
    (directory.events_dir / "a.jsonl").write_text('{"event": "world", "generation": 7, "step": 90}\n')

    def denied(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    told = f"{directory.events_dir} cannot be read: Permission denied; make it readable"
    for read in (directory.traces, lambda: read_past_snapshots(directory.events_dir)):
        with pytest.raises(RunDirectoryError, match=told):
            read()


def test_a_file_in_place_of_the_folder_of_events_ends_no_training(directory: RunDirectory) -> None:
    """The events are not written then, with a warning. Nothing of an earlier run can be in it."""
    directory.events_dir.touch()
    assert directory.traces() == Traces(None, None, None)


def test_a_file_server_that_fails_once_ends_no_training(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members list the folder also where they restore a state in mid-run."""
    directory.events_dir.mkdir()
    (directory.events_dir / "a.jsonl").write_text('{"event": "world", "generation": 7, "step": 90}\n')
    listed, fails = Path.iterdir, [True]

    def list_once_more(path: Path) -> Iterator[Path]:
        if fails:
            fails.clear()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", list_once_more)
    assert directory.traces().generation == 7
    assert fails == []


def test_steps_that_a_restart_lost_are_lost_once() -> None:
    """The join after it begins where the restart had come to, and not where the run had been before."""
    assert newest_of([[11, 1285], [12, 1127], None]) == (12, 1127)
    assert newest_of([None]) is None


@pytest.mark.parametrize("padding", range(0, 64 * 1024, 7919))
def test_only_the_tail_of_an_event_file_is_read(directory: RunDirectory, padding: int) -> None:
    directory.events_dir.mkdir()
    last = json.dumps({"generation": 3, "step": 12, "pad": "x" * padding}) + "\n"
    (directory.events_dir / "a.jsonl").write_text('{"generation": 1, "step": 1}\n' * 5000 + last)
    assert directory.traces() == Traces(generation=3, reached=(3, 12), logged=None)


def test_a_line_that_begins_at_the_border_counts(directory: RunDirectory) -> None:
    directory.events_dir.mkdir()
    body = '{"generation": 3, "pad": "'
    line = body + "x" * (64 * 1024 - len(body) - 3) + '"}\n'
    assert len(line) == 64 * 1024
    (directory.events_dir / "a.jsonl").write_text('{"generation": 1}\n' + line)
    assert directory.traces().generation == 3


# --- files ------------------------------------------------------------------------------------------------------


def test_write_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, b"old")
    for name in ("fsync", "rename"):
        with monkeypatch.context() as patch:

            def fail(*arguments: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_fsync_of_a_directory_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    code = errno.EINVAL
    atomic_files.fsync_directory(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        atomic_files.fsync_directory(tmp_path)


def test_a_folder_that_is_made_stays_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable: list[Path] = []
    monkeypatch.setattr(atomic_files, "fsync_directory", durable.append)
    for _ in range(2):  # the second time nothing is missing
        atomic_files.make_folder(tmp_path / "run" / "snapshots")
        assert durable == [tmp_path / "run", tmp_path]


# --- its name ---------------------------------------------------------------------------------------------------------


def test_a_directory_keeps_its_name_within_a_job(tmp_path: Path) -> None:
    one, other = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "other")
    for directory in (one, other):
        directory.create()
    assert one.identity("job") == RunDirectory(one.path).identity("job")
    assert one.identity("job") != other.identity("job")


def test_copies_of_a_directory_are_several(tmp_path: Path) -> None:
    """On machines of one image, say: else one of them alone would save, and would be moved aside by --fresh."""
    one = RunDirectory(tmp_path / "one")
    one.create()
    one.identity("job")
    os.utime(one.path / ".directory-id-job", (0, 0))
    shutil.copytree(one.path, tmp_path / "copy")
    names = {RunDirectory(tmp_path / name).identity("next") for name in ("one", "one", "copy")}
    assert len(names) == 2
    assert sorted(path.name for path in one.path.iterdir()) == [".claim.lock", ".directory-id-next"]


def test_the_name_stays_as_long_as_its_job(tmp_path: Path) -> None:
    """One that joins it would pass for a node with a directory of its own if a start of another job had removed it."""
    one = RunDirectory(tmp_path)
    name = one.identity("job")
    one.ownership.claim("job", 0, HOST)
    os.utime(tmp_path / ".directory-id-job", (0, 0))
    RunDirectory(tmp_path).identity("refused")
    assert RunDirectory(tmp_path).identity("job") == name
    one.ownership.release()
    RunDirectory(tmp_path).ownership.claim("next", 0, HOST)
    RunDirectory(tmp_path).identity("next")
    assert not (tmp_path / ".directory-id-job").exists()


def refuse_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_paths: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.__getitem__)
def test_a_file_system_without_links_gives_one_name_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_links(monkeypatch, code)
    everybody = threading.Barrier(8)

    def ask(_number: int) -> str:
        everybody.wait(DEADLINE)
        return RunDirectory(tmp_path).identity("job")

    with ThreadPoolExecutor(8) as threads:
        names = set(threads.map(ask, range(8)))
    assert len(names) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".directory-id-job"], "no draft is left"


def test_a_link_that_fails_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(RunDirectoryError, match="cannot be written to"):
        RunDirectory(tmp_path).identity("job")
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_being_made_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".directory-id-job"
    path.touch()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(RunDirectory(tmp_path).identity, "job", timeout=timedelta(seconds=DEADLINE))
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.1)
        path.write_bytes(b"0123456789abcdef")
        assert asked.result(DEADLINE) == "0123456789abcdef"


@pytest.mark.parametrize("data", [b"", b"0123", b"../../../../home"])
def test_a_damaged_name_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".directory-id-job").write_bytes(data)
    with pytest.raises(RunDirectoryError, match=r"\.directory-id-job is damaged .*: remove it"):
        RunDirectory(tmp_path).identity("job", timeout=timedelta(0))


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    require_writable(tmp_path / "made" / "here", "folder")
    assert list((tmp_path / "made" / "here").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"folder .*file/below cannot be written to: Not a directory"):
        require_writable(tmp_path / "file" / "below", "folder")
