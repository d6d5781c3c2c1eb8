"""When a worker saves which state: a real worker in a world of one, with a fake clock."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import evaluations, saving_together
from elastic_train.elastic.evaluations import Evaluations
from elastic_train.elastic.exits import Exits
from elastic_train.elastic.loading import load
from elastic_train.elastic.result import config_of
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.saving_together import (
    begin_to_save,
    save_in_place_of_others,
    save_soon,
    save_together,
    warned_before_kill,
)
from elastic_train.elastic.worker import Worker, build, make_state
from elastic_train.errors import SnapshotError
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import Activity
from elastic_train.runlog.goodput import Phase
from elastic_train.runlog.reader import read_all
from elastic_train.snapshot_interval import FIRST_SECONDS
from elastic_train.stopping import StopSignal
from elastic_train.storage import shares
from elastic_train.storage.bucket_owner import BucketOwner
from elastic_train.storage.shares import Fleet
from elastic_train.storage.snapshot import SnapshotResult, find_snapshots
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.state_bytes import HostBuffers
from elastic_train.storage.store_arms import PlainArm
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.world import World
from tests.unit.test_admission import member


class Training:
    """One worker that commits steps of a second each and saves where that is due."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.state = worker, worker.state
        self.now = 0.0
        files = RunFiles(worker, "job")
        me = replace(member(0), host=worker.host, pid=os.getpid())
        self.world = World(rank=0, generation=0, members=(me,))
        files.claim(self.world, has_state=False)
        self.state.run_uid = "run"
        self.written: list[int] = []
        self.saver = Saver(
            worker, files, written=lambda it, _num_nodes: self.written.append(it.step), now=lambda: self.now
        )
        self.saver.enter(self.world)
        worker.reporter.enter(self.world, self.state)
        self.state.clock.enter(Phase.TRAIN)

    def steps(self, count: int) -> list[float]:
        """The moments of those after which a snapshot was begun."""
        begun = []
        for _ in range(count):
            self.now += 1.0
            self.state.commit(0.5)
            if self.saver.is_due(self.state):
                begun.append(self.now)
                self.saver.save(self.state)
                self.saver.wait()
        return begun

    def rate(self, metric: float) -> None:
        self.state.ratings.note(self.state.step, metric)

    def save_if_due(self) -> list[int]:
        if not self.saver.is_due(self.state):
            return []
        self.saver.save(self.state)
        self.saver.wait()
        return [self.state.step]

    def events(self, name: str) -> list[dict[str, Any]]:
        files = self.worker.directory.events_dir.glob("*.jsonl")
        return [line for path in files for line in read_all(path) if line.get("event") == name]


Start = Callable[..., Training]


def with_bucket(start: Start, name: str, **flags: Any) -> Training:
    """A worker that owns a bucket."""
    training = start(snapshot_dir=f"memory://{name}", snapshot_every=1, **flags)
    assert training.worker.bucket is not None
    training.worker.bucket.owner.take("job", 0, lambda: None)
    return training


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def make(**flags: Any) -> Training:
            config = Config(
                run_dir=tmp_path / "run", model="mlp", global_batch_size=8, no_progress=True, device="cpu", **flags
            )
            worker = build(config, Launch(), StopSignal())
            stack.callback(worker.directory.ownership.release)
            stack.callback(worker.reporter.close)
            return Training(worker)

        yield make


def test_what_may_be_a_secret_in_a_url_is_not_written_down(start: Start) -> None:
    worker = start(notices="https://host/gone?token=secret").worker
    assert config_of(worker)["notices"] == "https://host/gone"


def test_a_folder_is_the_one_of_the_start_wherever_the_code_that_is_trained_goes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    training = start(snapshot_every=2, snapshot_dir="named")
    monkeypatch.chdir(elsewhere)
    training.steps(2)
    assert [info.step for info in find_snapshots(tmp_path / "named", warn=pytest.fail)] == [2]
    assert list(elsewhere.iterdir()) == []
    assert config_of(training.worker)["snapshot_dir"] == str(tmp_path / "named")


def test_a_run_directory_that_fails_keeps_no_snapshot_from_a_folder_elsewhere(start: Start, tmp_path: Path) -> None:
    """Which is there to outlive it. The folder's own record decides who may write."""
    training = start(snapshot_every=2, snapshot_dir=str(tmp_path / "elsewhere"))
    training.steps(2)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").touch()
    training.steps(4)
    assert training.written == [2, 4, 6]
    files = (tmp_path / "moved" / "events").glob("*.jsonl")
    warnings = [line["message"] for path in files for line in read_all(path) if line.get("event") == "warning"]
    assert [("Not a directory" in warning, "run directory" in warning) for warning in warnings] == [(True, True)]
    shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch()
    assert not training.saver.save_and_wait(training.state)


class Judge:
    """An extra whose state cannot be saved, from some time on."""

    best: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


def test_an_extra_that_cannot_be_saved_any_more_costs_a_warning(start: Start) -> None:
    """Not the worker, after which the next rank 0 would meet it as well. Each snapshot that is due is tried again."""
    training = start(snapshot_every=2)
    judge = training.state.extras["judge"] = Judge()
    assert training.steps(3) == [2.0]
    judge.best = np.zeros(1)
    assert training.steps(4) == [4.0, 6.0], "in no other step"
    [warning] = training.events("warning")
    assert warning["message"].startswith(
        "no snapshot of this state can be made: state['extras']['judge']['best'] is a "
    )
    judge.best = 1.0
    assert training.steps(1) == [8.0]
    assert training.written == [2, 8]


def test_a_host_without_memory_for_a_copy_costs_a_warning(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the worker, after which each other host would try in turn."""
    training = start(snapshot_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(HostBuffers, "_allocate", Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate")))
        assert training.steps(3) == [2.0]
        assert not training.saver.save_and_wait(training.state)
    first, last = (warning["message"] for warning in training.events("warning"))
    assert first.startswith("no snapshot of this state can be made: there is no memory for a copy of it: DefaultCPU")
    assert last.startswith("there is no memory for a copy")
    assert training.steps(1) == [4.0]
    assert training.written == [4]


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_cannot_be_saved_from_the_first_step_on_is_an_error_at_once(start: Start, takes_over: bool) -> None:
    training = start()
    training.state.extras["judge"] = judge = Judge()
    judge.best = np.zeros(1)
    if takes_over:  # another one was rank 0, and did not die of it
        [member] = training.world.members
        training.saver.enter(World(rank=1, generation=1, members=(member, member)))
        training.saver.enter(replace(training.world, generation=2))
    with nullcontext() if takes_over else pytest.raises(SnapshotError, match=r"\['judge'\]\['best'\] is a numpy"):
        training.steps(2)
    assert len(training.events("warning")) == takes_over


def test_a_buffer_that_no_start_has_is_told_before_one_fails(start: Start) -> None:
    training = start(snapshot_every=2)
    model = training.state.model
    training.steps(1)
    assert not training.events("warning")
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model.register_buffer("queue", torch.ones(2))
    assert training.steps(4) == [2.0, 4.0], "it may be loaded by hand"
    [warning] = training.events("warning")
    assert ": queue. Make" in warning["message"]
    assert warning["message"].startswith("no restart and no newcomer can load this state, ")
    with pytest.raises(SnapshotError, match=r"it has 1 tensor too many \(queue\)"):
        load(
            make_state(Config(model="mlp"), training.worker.task, torch.device("cpu")),
            training.state.state_dict(),
            "it",
        )


@pytest.mark.parametrize(
    ("every", "begun"), [(10, [10.0, 20.0, 30.0]), ("12s", [12.0, 24.0]), ("0.5m", [30.0]), (0, [])]
)
def test_by_steps_and_by_time(start: Start, every: int | str, begun: list[float]) -> None:
    training = start(snapshot_every=every)
    assert training.steps(35) == begun
    assert [line["snapshot_step"] for line in training.events("snapshot")] == begun
    assert training.written == begun
    assert training.events("snapshot_interval") == []


def test_auto_says_what_interval_it_takes(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    training = start(snapshot_every="auto")
    saved = training.state.clock.state_dict()
    training.state.clock.load_state_dict(saved | {"saved_at": 0.0})  # down for decades, or by a clock that was wrong
    assert training.steps(int(FIRST_SECONDS) + 1) == [FIRST_SECONDS]
    [told] = training.events("snapshot_interval")
    [written] = training.events("snapshot")
    assert told["cost_seconds"] == written["stall_seconds"], "no step beside it was slower"
    assert told["failures"] == 0
    found = re.findall(r"s of training, and a failure is expected every 6 h \d+ min", capsys.readouterr().err)
    assert len(found) == 1, "six hours, and the age of this process"
    training.state.incidents += [{"cause": "peer_lost", "seconds": {}}] * 99
    training.steps(1)
    assert training.events("snapshot_interval")[1]["seconds"] < told["seconds"] / 5


def kept(training: Training) -> dict[int, float | None]:
    infos = find_snapshots(training.worker.directory.snapshots_dir, warn=pytest.fail)
    return {info.step: info.metric for info in infos}


def test_the_best_so_far_is_written_and_kept(start: Start) -> None:
    training = start(snapshot_every=0, keep_snapshots=1, keep_best=2)
    written = []
    for metric in (0.5, 0.7, 0.6, 0.9, 0.8, float("nan"), 0.9):
        training.steps(4)
        training.rate(metric)
        written += training.save_if_due()
    assert written == [4, 8, 16]
    assert kept(training) == {16: 0.9, 8: 0.7}
    training.steps(1)
    assert training.saver.save_and_wait(training.state)
    assert kept(training) == {29: None, 16: 0.9, 8: 0.7}, "that of another step says nothing of this one"
    again = training.state.state_dict()
    training.state.ratings.note(29, 1.0)
    training.state.load_state_dict(again)
    assert (training.state.ratings.best, training.state.ratings.newest) == ((16, 0.9), (28, 0.9))
    del again["run"]["ratings"]
    training.state.load_state_dict(again)  # of before there were any
    assert training.state.ratings.best is None


def test_nothing_is_written_for_the_best_where_it_is_not_to_be_kept(start: Start) -> None:
    training = start(snapshot_every=0)
    training.steps(4)
    training.rate(0.5)
    assert training.save_if_due() == []


def test_the_best_waits_for_the_one_in_flight(start: Start) -> None:
    training = start(snapshot_every=10, keep_best=1)
    training.steps(9)
    training.now += 1.0
    training.state.commit(0.5)
    training.rate(0.5)
    assert training.saver.is_due(training.state)
    training.saver.save(training.state)  # and perhaps it is being written
    training.state.commit(0.5)
    training.rate(0.6)
    assert training.save_if_due() == [11]
    assert kept(training) == {10: 0.5, 11: 0.6}


def test_the_best_is_owed_by_the_next_world_where_one_has_ended_before_its_snapshot(start: Start) -> None:
    """A member that dies between the evaluation and the save must not cost the best model."""
    training = start(snapshot_every=0, keep_best=1)
    training.steps(4)
    training.rate(0.5)
    training.saver.begin(training.state)
    assert not training.saver.owes_best(training.state), "what a run begins with has a snapshot"
    training.steps(1)
    training.rate(0.6)
    training.saver.begin(training.state)
    assert training.saver.owes_best(training.state)
    assert training.save_if_due() == [5]
    assert not training.saver.owes_best(training.state)


@pytest.mark.parametrize(("every", "steps", "begun"), [(10, 15, [16.0, 20.0]), (10, 9, [10.0, 20.0]), (0, 15, [])])
def test_who_becomes_rank_0_writes_a_snapshot_soon(start: Start, every: int, steps: int, begun: list[float]) -> None:
    """The one of the rank 0 before may have died with it, or be seen by nobody; but the first is due where it is."""
    training = start(snapshot_every=every)
    [member] = training.world.members
    training.saver.enter(World(rank=1, generation=1, members=(member, member)))
    training.steps(steps)
    training.saver.enter(World(rank=0, generation=2, members=(member,)))
    found = training.steps(20 - steps)
    training.saver.enter(World(rank=0, generation=3, members=(member,)))
    assert found + training.steps(1) == begun, "once"


def test_the_best_does_not_wait_for_the_deletion_of_old_ones(start: Start) -> None:
    training = start(snapshot_every=10, keep_best=1)
    training.steps(10)
    asked = []
    training.saver.writer().wait = lambda _seconds, **how: asked.append(how) or True  # type: ignore[method-assign]
    training.state.commit(0.5)
    training.rate(0.6)
    assert training.saver.is_due(training.state)
    training.saver.save(training.state)
    assert asked == [{"prunes": False}]


def test_another_rank_notes_that_one_was_due(start: Start) -> None:
    training = start(snapshot_every="12s")
    [member] = training.world.members
    training.saver.enter(World(rank=1, generation=1, members=(member, replace(member, directory_id="of another node"))))
    training.steps(24)
    assert training.events("snapshot_due") == []
    training.steps(5)
    [due] = training.events("snapshot_due")
    assert (due["every"], due["by"]) == (None, member.name)
    assert training.events("snapshot") == []


OWN_LOOP = """
import torch
from torch.utils.data import TensorDataset

import elastic_train


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, labels in training.batches():
            training.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(inputs), labels)
            loss.backward()
            training.optimizer.step()
            training.commit(loss)
        training.keep([0.5, 0.9, 0.7, 0.6][epoch])


model = torch.nn.Linear(1, 1)
data = TensorDataset(torch.ones(32, 1), torch.ones(32, 1))
elastic_train.run(train, model, torch.optim.SGD(model.parameters(), lr=0.1), data, elastic_train.parse_flags())
"""


def test_what_a_start_begins_with_is_kept_where_it_turns_out_to_be_the_best(tmp_path: Path) -> None:
    """As in a world that follows one which was broken off in an evaluation: it is rated before any commit."""
    script = tmp_path / "own.py"
    top = "for epoch in training.epochs():\n        if epoch == 2: training.keep(0.5)"
    text = OWN_LOOP.replace("for epoch in training.epochs():", top)
    text = text.replace("        training.keep([0.5, 0.9, 0.7, 0.6][epoch])", "        if epoch == 1 and stops: return")
    flags = ("--epochs", "4", "--global-batch-size", "8", "--snapshot-every", "0", "--keep-snapshots", "1")
    for stops in (True, False):
        script.write_text(f"stops = {stops}\n{text}")
        command = [sys.executable, script, *flags, "--keep-best", "1", "--run-dir", tmp_path / "run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    infos = find_snapshots(tmp_path / "run" / "snapshots", warn=pytest.fail)
    assert [(info.step, info.metric) for info in infos] == [(16, None), (8, 0.5)]


def test_where_all_stop_each_node_sends_its_share_to_the_bucket(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_BYTES", 0)
    monkeypatch.setattr(shares, "LEAST_SILENCE_SECONDS", 60.0)  # none is given up because it is slow
    training = start(snapshot_dir="memory://all-stop")
    training.steps(3)
    saver, state, bucket = training.saver, training.state, training.worker.bucket
    assert bucket is not None
    monkeypatch.setattr(bucket, "_part_bytes", 2**13)
    [me] = training.world.members
    other = replace(me, host="other", agent_pid=1)
    world = World(rank=1, generation=0, members=(other, me, replace(other, local_rank=1), replace(me, local_rank=1)))
    saver.enter(world)
    first = SnapshotWriter(bucket, keep=3, host="other", run_uid="run", task={})
    names = frozenset(name for name, _ in state.model.named_parameters())
    fleet = Fleet(("other", me.host), 0, names, lambda: None)
    position = {"step": 3, "epoch": 0, "samples_done": 24, "generation": 0, "world_size": 4}
    writing = threading.Thread(target=lambda: first.save(state.state_dict(), **position, fleet=fleet))
    writing.start()
    save_together(training.worker, saver, world, lambda: False)
    writing.join(30.0)
    [info] = find_snapshots(bucket, warn=pytest.fail)
    parts = info.path.read_manifest()["parts"]  # type: ignore[union-attr]
    by_host = Counter(part["host"] for part in parts if ".share-" in part["name"])
    assert by_host[me.host] >= 2
    assert abs(by_host["other"] - by_host[me.host]) <= 1
    before = bucket.store.list()
    assert saver.save_and_wait(state), "should the others be lost now, it is there"
    assert bucket.store.list() == before
    saver.enter(replace(world, rank=3))
    save_together(training.worker, saver, replace(world, rank=3), lambda: False)
    assert bucket.store.list() == before, "its node's first one sends for both"
    assert training.events("warning") == []


@pytest.mark.parametrize(("took", "left", "is_given_up"), [(None, 5.0, False), (4.0, 5.0, True), (9.0, 5.0, False)])
def test_the_last_state_does_not_wait_for_the_one_in_flight(
    start: Start, monkeypatch: pytest.MonkeyPatch, took: float | None, left: float, is_given_up: bool
) -> None:
    """Unless by what the newest one took it could not be there in time, and the one in flight may. Of the first one
    nobody knows how long it takes: as long again as it is on its way."""
    training = start(snapshot_dir=f"memory://in-flight-{took}")
    training.steps(1)
    training.now += 3.0
    saver, worker = training.saver, training.worker
    assert worker.bucket is not None
    worker.bucket.owner.take("job", 0, lambda: None)
    calls: list[str] = []
    monkeypatch.setattr(SnapshotWriter, "give_up", lambda _writer, _state, _step: not calls.append("given up"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(StopSignal, "seconds_left", lambda _stop: left)
    saver.writer()
    if took is not None:
        saver.newest = SnapshotResult(Path("nowhere"), 1, 1, took, took, ())
    save_together(worker, saver, training.world, lambda: False)
    assert calls == (["given up"] if is_given_up else [])
    assert [info.step for info in find_snapshots(worker.bucket, warn=pytest.fail)] == [1]


@pytest.mark.parametrize(("left", "extra", "is_given_up"), [(30.0, 1, True), (30.0, 0, False), (2.0, 1, False)])
@pytest.mark.parametrize("how", ["stop_late", "stop_between_worlds"])
def test_what_a_node_saves_alone_does_not_wait_for_the_one_in_flight(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str, left: float, extra: int, is_given_up: bool
) -> None:
    """Unless that is of the last commit, or of the two it alone can be there in time."""
    training = with_bucket(start, f"in-flight-{how}-{left}-{extra}")
    saver, worker = training.saver, training.worker
    assert worker.bucket is not None
    training.steps(1)
    saver.newest = SnapshotResult(Path("nowhere"), 1, 1, 4.0, 4.0, ())
    for _ in range(extra):
        training.state.commit(0.5)
    given_up: list[int] = []
    monkeypatch.setattr(SnapshotWriter, "give_up", lambda _writer, _state, step: given_up.append(step))
    monkeypatch.setattr(StopSignal, "seconds_left", lambda _stop: left)
    membership: Any = SimpleNamespace(leave=lambda *_, **__: None)
    leaving = Exits(worker, membership, saver, SimpleNamespace(step_started=0.0), saver._files)  # type: ignore[arg-type]
    worker.stop._remember(signal.SIGTERM, None)
    assert getattr(leaving, how)(training.world) == 143
    assert given_up == ([1 + extra] if is_given_up else [])
    newest = find_snapshots(worker.bucket, warn=pytest.fail)[0]
    assert newest.step == 1 + extra


@pytest.mark.parametrize(("is_stop", "left"), [(True, [4, 3]), (False, [4])])
def test_what_is_old_in_a_bucket_stays_at_a_stop(start: Start, is_stop: bool, left: list[int]) -> None:
    training = start(snapshot_dir=f"memory://at-a-stop-{is_stop}", keep_snapshots=1)
    saver, bucket = training.saver, training.worker.bucket
    assert bucket is not None
    bucket.owner.take("job", 0, lambda: None)
    for _ in range(4):
        training.steps(1)
        if is_stop and training.state.step == 4:
            training.state.stopped_at = 4
        assert saver.save_and_wait(training.state)
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == left


def take_store_away(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """When the event is set, stores take objects again."""
    is_back, put = threading.Event(), PlainArm.put

    def put_at_last(arm: PlainArm, key: str, data: bytes) -> None:
        assert is_back.wait(60.0)
        put(arm, key, data)

    monkeypatch.setattr(PlainArm, "put", put_at_last)
    return is_back


def test_a_node_that_waits_for_others_does_not_wait_for_a_store(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    training = with_bucket(start, "begin-to-save")
    worker, saver, state, world = training.worker, training.saver, training.state, training.world
    is_back = take_store_away(monkeypatch)
    state.commit(0.5)
    saver.save(state)
    state.commit(0.5)
    assert begin_to_save(worker, saver, world) is None, "the line is not free"
    is_back.set()
    assert saver.writer().wait(60.0)
    is_back.clear()
    said = begin_to_save(worker, saver, world)
    assert said == "the state of step 2 is on its way to memory://begin-to-save, in case that no other is left"
    assert begin_to_save(worker, saver, world) is None
    assert saver.writer().is_busy()
    is_back.set()
    saver.wait()
    assert training.written == [1, 2]
    assert begin_to_save(worker, saver, world) is None, "it is saved"


@pytest.mark.parametrize("is_away", [False, True])
def test_who_was_left_out_waits_for_a_store_for_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    monkeypatch.setattr(saving_together, "SOON_SECONDS", 0.01 if is_away else 60.0)
    training = with_bucket(start, f"soon-{is_away}")
    is_back = take_store_away(monkeypatch)
    if not is_away:
        is_back.set()
    training.state.commit(0.5)
    assert save_soon(training.worker, training.saver) is not is_away
    is_back.set()
    training.saver.wait()
    assert training.written == [1]


def test_who_was_left_out_does_not_lose_the_snapshot_in_flight_and_its_state(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_together, "SOON_SECONDS", 0.01)
    training = with_bucket(start, "neither")
    is_back = take_store_away(monkeypatch)
    training.state.commit(0.5)
    training.saver.save(training.state)
    wait_until(lambda: any(one.name == "snapshot-part" for one in threading.enumerate()), "a part on its way")
    training.state.commit(0.5)
    assert not save_soon(training.worker, training.saver)
    is_back.set()
    training.saver.wait()
    assert training.written == [1]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_state_whose_snapshot_has_failed_is_saved_by_who_waits_or_was_left_out(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_left_out: bool
) -> None:
    training = with_bucket(start, f"again-{is_left_out}")
    worker, saver, state, world = training.worker, training.saver, training.state, training.world
    state.commit(0.5)
    with monkeypatch.context() as during:
        during.setattr(PlainArm, "put", Mock(side_effect=PermissionError("refused")))
        saver.save(state)
        saver.wait()
    assert ["refused" in str(one["message"]) for one in training.events("warning")] == [True]
    if is_left_out:
        assert save_soon(worker, saver)
    else:
        assert begin_to_save(worker, saver, world) is not None
        assert begin_to_save(worker, saver, world) is None, "once: an error that lasts would be told every second"
    saver.wait()
    assert training.written == [1]


def test_who_waits_hears_that_another_job_has_the_bucket(start: Start) -> None:
    training = with_bucket(start, "taken")
    training.state.commit(0.5)
    assert training.worker.bucket is not None
    BucketOwner(training.worker.bucket.store, "other").take("newer", 1, lambda: None)
    begin_to_save(training.worker, training.saver, training.world)
    assert training.saver.writer().wait(60.0)
    said = begin_to_save(training.worker, training.saver, training.world)
    assert said is not None
    assert "another job" in said


def test_a_rank_that_saved_while_it_waited_reports_that_as_it_goes_on(start: Start) -> None:
    training = with_bucket(start, "goes-on")
    me = training.world.members[0]
    training.saver.enter(World(rank=1, generation=0, members=(replace(me, host="first", uid="first"), me)))
    training.state.commit(0.5)
    training.saver.save(training.state)
    assert training.saver.writer().wait(60.0)
    assert not training.saver.is_due(training.state)
    assert training.written == [1]


def test_what_is_not_saved_shortly_before_a_kill_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(snapshot_every=0)
    training.steps(3)
    for left, is_told in ((30.0, False), (saving_together.LAST_WORDS_SECONDS, True)):
        monkeypatch.setattr(StopSignal, "seconds_left", lambda _stop, left=left: left)
        training.worker.stop._remember(signal.SIGTERM, None)
        with warned_before_kill(training.worker, training.saver):
            if is_told:
                wait_until(lambda: training.events("warning"), "the warning")
        assert len(training.events("warning")) == is_told
    told = str(training.events("warning")[0]["message"])
    assert told.startswith("told to stop by SIGTERM, and the state of step 3 is not in ")
    assert told.endswith("the newest snapshot known here: none")


def test_a_snapshot_that_does_not_come_to_an_end_is_told_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(snapshot_every=10)
    training.steps(10)
    is_busy = [True]
    monkeypatch.setattr(SnapshotWriter, "is_busy", lambda _writer: is_busy[0])
    for seconds, num_warnings in ((200.0, 0), (150.0, 1), (500.0, 1)):
        training.now += seconds
        training.steps(1)
        assert len(training.events("warning")) == num_warnings
    [warning] = training.events("warning")
    assert "for 5 min 52 s, and the next one waits for it: the newest that is there is of step 10" in warning["message"]
    is_busy[0] = False
    training.steps(10)
    is_busy[0] = True
    training.now += 400.0
    training.steps(1)
    assert len(training.events("warning")) == 2


def test_a_share_that_cannot_be_sent_ends_no_node(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(snapshot_dir="memory://no-share")
    training.steps(1)
    saver, [me] = training.saver, training.world.members
    other = replace(me, host="other", agent_pid=1)
    world = World(rank=1, generation=0, members=(other, me))
    saver.enter(world)

    def fails(*_arguments: object, **_options: object) -> bool:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(SnapshotWriter, "save_share", fails)
    save_together(training.worker, saver, world, lambda: False)
    [warning] = training.events("warning")
    assert warning["message"] == "no pinned memory; the other nodes write it"


@pytest.mark.parametrize(
    ("metrics", "best"), [({"loss": 2.0}, -2.0), ({"loss": 2.0, "accuracy": 0.5}, 0.5), ({"perplexity": 2.0}, None)]
)
def test_a_task_without_an_accuracy_is_rated_by_its_loss_or_told_once(
    metrics: dict[str, float], best: float | None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(keep_best=1, eval_every=1)
    membership: Any = SimpleNamespace(watcher=SimpleNamespace(do=lambda _activity: None), sockets=None)
    monkeypatch.setattr(evaluations, "evaluate", lambda *_arguments, **_options: metrics)
    each = Evaluations(training.worker, membership)
    each.if_due(training.world)
    each.if_due(training.world)
    assert training.worker.state.ratings.at(training.worker.state.step) == best
    told = [warning["message"] for warning in training.events("warning")]
    assert [one.startswith("--keep-best keeps nothing") for one in told] == ([] if best is not None else [True])


def test_what_is_kept_is_drawn_and_what_rates_nothing_is_told_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(keep_best=1)
    drawn: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(training.worker.reporter, "_add_scalars", lambda *scalars: drawn.append(scalars))
    each = Evaluations(training.worker, SimpleNamespace(watcher=None))  # type: ignore[arg-type]
    for metric in (math.nan, 0.5, math.inf):
        each.keep(training.world, metric)
    assert training.state.ratings.best == (0, 0.5)
    assert [event["best"] for event in training.events("best")] == [{"step": 0, "metric": 0.5}], "of one that is better"
    assert drawn == [(0, {"kept/metric": 0.5})]
    [warning] = training.events("warning")
    assert warning["message"] == "keep() was given nan at step 0: no finite number, so it rates nothing"


@pytest.mark.usefixtures("group_of_one")
def test_rank_0_says_for_all(start: Start) -> None:
    training = start()
    told: list[Activity] = []
    membership: Any = SimpleNamespace(watcher=SimpleNamespace(do=told.append))
    [member] = training.world.members
    Evaluations(training.worker, membership).keep(World(rank=0, generation=1, members=(member, member)), 0.5)
    assert training.state.ratings.best == (0, 0.5)
    assert told == [Activity.REDUCE, Activity.COMPUTE], "the watcher knows that it waits for others"


def failing(*_arguments: object, **_options: object) -> None:
    raise SnapshotError("No space left on device")


def test_a_last_line_says_where_the_state_is_not_saved(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(snapshot_every=0)
    saver, state = training.saver, training.state
    training.steps(1)
    with monkeypatch.context() as full:
        full.setattr(SnapshotWriter, "save", failing)
        assert not saver.save_and_wait(state)
        assert "THIS STATE IS NOT SAVED" in saver.unsaved(state)
    assert saver.save_and_wait(state)
    assert saver.unsaved(state) == "", "there was room at the next try"


@pytest.mark.parametrize(
    ("failed", "place", "is_asked"),
    [(0, "shared", True), (0, "own", False), (0, "bucket", True), (1, "shared", False), (None, "shared", False)],
)
def test_what_the_first_host_cannot_save_another_one_does(
    start: Start, monkeypatch: pytest.MonkeyPatch, failed: int | None, place: str, is_asked: bool
) -> None:
    """This worker is the first of the second host."""
    training = start(snapshot_every=0, **({"snapshot_dir": "memory://in-place"} if place == "bucket" else {}))
    saver, worker, [me] = training.saver, training.worker, training.world.members
    if worker.bucket is not None:
        worker.bucket.owner.take("job", 0, lambda: None)
    first = replace(me, host="other", agent_pid=1, directory_id="other" if place == "own" else me.directory_id)
    world = World(rank=1, generation=0, members=(first, me, replace(me, local_rank=1)))
    saver.enter(world)
    told: list[bool] = []

    def gather(mine: bool) -> list[bool]:
        told.append(mine)
        return [failed == 0, failed == 1, False] if len(told) == 1 else [False, mine, False]

    monkeypatch.setattr(saving_together, "gather_json", gather)
    training.steps(3)
    save_in_place_of_others(worker, saver, world)
    assert told == ([False] if not told[1:] else [False, False, is_asked])
    assert len(told) == (3 if failed == 0 else 1), "each of two nodes is asked, or none"
    steps = [info.step for info in find_snapshots(worker.snapshots_dir, warn=pytest.fail)]
    assert steps == ([3] if is_asked else [])


@pytest.mark.parametrize("second_saves", [False, True])
def test_of_hosts_that_could_save_one_after_the_other_tries(
    start: Start, monkeypatch: pytest.MonkeyPatch, second_saves: bool
) -> None:
    """This worker is the first of the third host. The disk may have room for one snapshot."""
    training = start(snapshot_every=0)
    saver, [me] = training.saver, training.world.members
    others = [replace(me, host=host, agent_pid=1) for host in ("first", "second")]
    saver.enter(world := World(rank=2, generation=0, members=(*others, me)))
    told: list[bool] = []

    def gather(mine: bool) -> list[bool]:
        told.append(mine)
        return [[True, False, False], [False] * 3, [False, second_saves, mine], [False, False, mine]][len(told) - 1]

    monkeypatch.setattr(saving_together, "gather_json", gather)
    training.steps(3)
    save_in_place_of_others(training.worker, saver, world)
    assert told == ([False] * 3 if second_saves else [False, False, False, True])
    assert len(find_snapshots(training.worker.snapshots_dir, warn=pytest.fail)) == (not second_saves)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("is_saved", [False, True])
def test_all_that_share_a_place_tell_the_same_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_saved: bool, rank: int
) -> None:
    """Scripts read the last event `done`, and exit code 143 says that the state is saved."""
    training = start(snapshot_every=0)
    saver, [me] = training.saver, training.world.members
    monkeypatch.setattr(SnapshotWriter, "save", failing)
    training.steps(1)
    if rank == 0:
        assert not saver.save_and_wait(training.state)
    other = replace(me, host="other", agent_pid=1)
    members = (me, replace(me, local_rank=1), other, replace(me, host="apart", agent_pid=2, directory_id="apart"))
    answers = iter([[True, False, False, False], [False] * 4, [False, False, is_saved, False], [False] * 4])
    monkeypatch.setattr(saving_together, "gather_json", lambda _mine: next(answers))
    save_in_place_of_others(training.worker, saver, World(rank, 0, members))
    assert bool(saver.unsaved(training.state)) == (not is_saved and rank < 3)


@pytest.mark.parametrize(
    ("is_told", "took", "may_save"),
    [(True, 2, True), (True, 9, False), (True, 0, False), (False, 2, False)],
)
def test_a_late_stop_saves_where_the_first_worker_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_told: bool, took: int, may_save: bool
) -> None:
    """A disk that is lost to one host mostly hangs, and raises nothing. But where a snapshot takes long, or none knows
    how long it takes, a second one would only make it slower."""
    training = start(snapshot_every=0)
    saver, worker, lock = training.saver, training.worker, training.state.lock
    training.steps(1)
    saver.save_time.note_vote(-took)
    if is_told:
        worker.stop._remember(signal.SIGTERM, None)
        worker.stop.settle()
    other = replace(training.world.me, host="other", agent_pid=1)
    saver.enter(world := World(rank=1, generation=0, members=(other, training.world.me, replace(other, host="third"))))
    found: list[bool] = []

    def gather(_mine: bool) -> list[bool]:
        found.append(lock.acquire(0.0))
        if found[-1]:
            lock.give_back()
        return [len(found) == 1, False, False]

    monkeypatch.setattr(SnapshotWriter, "save", failing)
    monkeypatch.setattr(saving_together, "gather_json", gather)
    save_in_place_of_others(worker, saver, world)
    assert found == [may_save] * 4, "each one that saves for all may hang"
    assert not lock.acquire(0.0), "what follows may change the state"


def test_where_the_room_for_the_last_state_is_taken_again_more_is_made(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events and the ledger lie on the same disk, and a snapshot that was removed has exactly the size of the next."""
    training = start(snapshot_every=1, keep_snapshots=5)
    training.steps(4)
    save, num_full = SnapshotWriter.save, iter((1, 2))

    def save_unless_full(writer: SnapshotWriter, *arguments: Any, **position: Any) -> SnapshotResult:
        assert not training.events("warning"), "its line would take the room"
        if next(num_full, None) is None:
            return save(writer, *arguments, **position)
        raise SnapshotError("the disk is full") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SnapshotWriter, "save", save_unless_full)
    training.state.commit(0.5)
    assert training.saver.save_and_wait(training.state)
    assert sorted(kept(training)) == [3, 4, 5]
    [warning] = training.events("warning")
    removed = ", ".join(f"step-00000000000{step}-gen-0000-{training.worker.host}" for step in (1, 2))
    assert warning["message"] == f"no room for the state of step 5: removed {removed}"
