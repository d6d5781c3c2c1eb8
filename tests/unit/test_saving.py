"""When a worker saves what: a real one, in a world of its own, with a clock that is turned by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config import Config
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.worker import Worker, build
from elastic_train.rendezvous.launch import Launch
from elastic_train.runlog.goodput import Phase
from elastic_train.runlog.reader import read_all
from elastic_train.snapshot_interval import FIRST_SECONDS
from elastic_train.stopping import StopSignal
from elastic_train.world import Member, World


class Training:
    """One worker that commits steps of a second each and saves where that is due."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.state = worker, worker.state
        self.now = 0.0
        files = RunFiles(worker, "job")
        member = Member(
            host=worker.host, local_rank=0, pid=os.getpid(), agent_pid=0, address=("127.0.0.1", 1), directory_id="",
            backend="gloo", max_generation=None,
        )  # fmt: skip
        self.world = World(rank=0, generation=0, members=(member,))
        files.claim(self.world, has_state=False)
        self.state.run_uid = "run"
        self.saver = Saver(worker, files, now=lambda: self.now)
        self.saver.enter(self.world)
        worker.reporter.events.enter(self.world)
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

    def events(self, name: str) -> list[dict[str, Any]]:
        files = self.worker.directory.events_dir.glob("*.jsonl")
        return [line for path in files for line in read_all(path) if line.get("event") == name]


Start = Callable[..., Training]


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


@pytest.mark.parametrize(
    ("every", "begun"), [(10, [10.0, 20.0, 30.0]), ("12s", [12.0, 24.0]), ("0.5m", [30.0]), (0, [])]
)
def test_by_steps_and_by_time(start: Start, every: int | str, begun: list[float]) -> None:
    training = start(snapshot_every=every)
    assert training.steps(35) == begun
    assert [line["snapshot_step"] for line in training.events("snapshot")] == begun
    assert training.events("snapshot_interval") == []


def test_auto_says_what_interval_it_takes(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    training = start(snapshot_every="auto")
    assert training.steps(int(FIRST_SECONDS) + 1) == [FIRST_SECONDS]
    [told] = training.events("snapshot_interval")
    [written] = training.events("snapshot")
    assert told["cost_seconds"] == written["stall_seconds"], "no step beside it was slower"
    assert told["failures"] == 0
    assert capsys.readouterr().err.count("s of training, and a failure is expected every 6 h 0 min") == 1
    training.state.incidents += [{"cause": "peer_lost", "seconds": {}}] * 99
    training.steps(1)
    assert training.events("snapshot_interval")[1]["seconds"] < told["seconds"] / 5


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
