"""A fault that is not injected, or not recovered from, leaves nothing behind, and the drill goes on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console

from elastic_train.tools.audit.audit import CHECKS
from elastic_train.tools.audit.record import FaultRecord, Record, read_drill
from elastic_train.tools.drills import conductor as conductor_module
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.cluster import Cluster, NodeState, Place
from elastic_train.tools.drills.conductor import Conductor
from elastic_train.tools.drills.drill import _Ends, _judge
from elastic_train.tools.drills.faults import Hang
from elastic_train.tools.drills.injection import Fault, NotInjected
from elastic_train.tools.drills.jobs import JOBS
from elastic_train.tools.drills.live import Timeline
from elastic_train.tools.drills.nodes import CommandFailed, TooSlow
from elastic_train.tools.drills.schedule import Planned, Settings
from elastic_train.tools.drills.watch import SeenWorld

PLANNED = Planned(0.0, "kill")


class HalfDone(Fault):
    name = "half-done"
    undo_after = 1.0

    error: Exception | None = None
    undo_error: Exception | None = None
    num_undone = 0

    def choose(self) -> list[Place]:
        return self.cluster.places[:1]

    def inject(self) -> str:
        self.place.effect = NodeState.FROZEN
        if self.error is not None:
            raise self.error
        return "frozen"

    def undo(self) -> None:
        self.num_undone += 1
        if self.undo_error is not None:
            raise self.undo_error
        self.place.effect = NodeState.OUT


def settings_in(run_dir: Path) -> Settings:
    return Settings(
        run_dir=run_dir, seed=1, plan=[PLANNED], flags=[], num_nodes=2, num_workers=1, global_batch_size=64,
        peer_timeout=5.0, last_step=None, wants_network=False, backend="c10d", etcd_endpoint=None,
    )  # fmt: skip


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[Conductor]:
    record = Record(tmp_path)
    record.add_setting(seed=1)
    cluster = Cluster(tmp_path, record, [], num_nodes=2)
    with Timeline(cluster, last_step=None, seconds=10.0, file=io.StringIO()) as timeline:
        yield Conductor(settings_in(tmp_path), cluster, record, timeline)
    record.close()
    cluster.close()


def half_done(conductor: Conductor, **errors: Exception) -> HalfDone:
    fault = conductor.new_fault(HalfDone, 0)
    assert isinstance(fault, HalfDone)
    for name, error in errors.items():
        setattr(fault, name, error)
    return fault


def recorded(run_dir: Path) -> FaultRecord:
    drill = read_drill(run_dir)
    assert drill is not None
    (fault,) = drill.faults
    return fault


@pytest.mark.parametrize(
    "error",
    [
        NotInjected("it did not stop"),
        psutil.NoSuchProcess(7),
        psutil.AccessDenied(7),
        CommandFailed("etcdctl hangs"),
        TooSlow("no end of the killed processes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_was_done_in_part_is_undone(tmp_path: Path, conductor: Conductor, error: Exception) -> None:
    fault = half_done(conductor, error=error, undo_error=CommandFailed("no such link"))
    conductor._inject(fault)
    assert fault.num_undone == 1
    assert conductor._cluster.places[0].effect is None
    found = recorded(tmp_path)
    assert (found.injected_at, found.target, found.reason) == (None, "node1", str(error))


def injected(conductor: Conductor, **errors: Exception) -> HalfDone:
    fault = half_done(conductor, **errors)
    conductor._inject(fault)
    assert conductor._open == [fault]
    return fault


def test_what_the_job_does_not_get_over_is_undone(tmp_path: Path, conductor: Conductor) -> None:
    """Else a node stays frozen, or without its network, under all that follows, and never ends."""
    fault = injected(conductor)
    fault.injected_at -= 1000.0
    conductor._follow(fault)
    assert fault.is_closed
    assert fault.num_undone == 1
    assert conductor._cluster.places[0].effect is NodeState.OUT
    conductor._give_up_the_rest()
    assert fault.num_undone == 1
    found = recorded(tmp_path)
    assert (found.recovered_seconds, found.undone_at is not None) == (None, True)


def test_an_endpoint_whose_host_has_left_gets_it_back(conductor: Conductor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job trains to its end before the host of its endpoint can be killed."""
    cluster, started = conductor._cluster, list[Place]()
    monkeypatch.setattr(Cluster, "is_settled", True)
    monkeypatch.setattr(Cluster, "hosting", [])
    monkeypatch.setattr(cluster, "start", started.append)
    for name, inside, expected in (("kill-endpoint", 2, 1), ("kill", 2, 0), ("kill-two", 2, 1), ("kill-two", 3, 0)):
        monkeypatch.setattr(Cluster, "inside", cluster.places[1:] * inside)
        conductor._plan = [(0, Planned(0.0, name))]
        conductor._replace_lost(conductor.new_fault(FAULTS[name], 0))
        assert started == cluster.places[:expected], name
        started.clear()


def test_what_passes_lasts_from_when_it_was_in_force(conductor: Conductor) -> None:
    """However long it took to inject it."""
    fault = injected(conductor)
    fault.changes_world = False
    fault.injected_at -= 2.0
    conductor._follow(fault)
    assert fault.num_undone == 0
    fault.in_force_at -= 2.0
    conductor._follow(fault)
    assert fault.num_undone == 1


def test_what_cannot_be_undone_is_told_and_not_tried_again(tmp_path: Path, conductor: Conductor) -> None:
    fault = injected(conductor, undo_error=CommandFailed("no member leads"))
    fault.recovered_at = fault.injected_at - 10.0
    conductor._follow(fault)
    conductor._follow(fault)
    assert fault.num_undone == 1
    assert recorded(tmp_path).undone_at is None
    assert "half-done of node1 could not be undone: no member leads" in conductor._timeline._file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def hang(conductor: Conductor, monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Of a node that runs: the others are through, and what was done to it is undone."""
    monkeypatch.setattr(Hang, "inject", lambda fault: "stopped")
    monkeypatch.setattr(Hang, "undo", lambda fault: None)
    cluster = conductor._cluster
    place = cluster.places[0]
    place.node, place.members = Mock(), ("a/0/1",)
    cluster.watch.world = SeenWorld(1, ("b/0/2",), first_step_at=time.time())
    monkeypatch.setattr(cluster.watch, "poll", lambda: None)
    fault = conductor.new_fault(Hang, 0, [place])
    assert isinstance(fault, Hang)
    conductor._plan.clear()
    conductor._inject(fault)
    conductor._follow(fault)
    assert fault.recovered_at is not None
    fault.recovered_at -= Hang.undo_after or 0.0
    conductor._follow(fault)
    assert fault.is_undone
    assert not fault.is_closed
    return fault


def test_who_was_silent_and_comes_back(tmp_path: Path, conductor: Conductor, hang: Hang) -> None:
    conductor._cluster.watch.world = SeenWorld(2, ("b/0/2", "a/0/1"), first_step_at=time.time())
    conductor._follow(hang)
    assert hang.is_closed
    found = recorded(tmp_path)
    assert (found.reason, found.recovered_seconds is None) == (None, False)


def test_who_was_silent_and_ends_instead_of_coming_back(tmp_path: Path, conductor: Conductor, hang: Hang) -> None:
    """It is promised, and the others go on."""
    hang.place.node, hang.place.members = None, ()
    conductor._follow(hang)
    assert hang.is_closed
    found = recorded(tmp_path)
    assert (found.reason, found.recovered_seconds) == ("node1 ended instead of coming back", None)


def test_who_was_silent_may_end_with_the_job(tmp_path: Path, conductor: Conductor, hang: Hang) -> None:
    hang.place.node, hang.place.members = None, ()
    conductor._cluster.watch.outcomes["b/0/2"] = "finished"
    conductor._follow(hang)
    conductor._give_up_the_rest()
    assert recorded(tmp_path).recovered_seconds is not None


def test_who_was_silent_and_is_not_back_at_the_end_of_the_job(tmp_path: Path, conductor: Conductor, hang: Hang) -> None:
    conductor._cluster.watch.outcomes["b/0/2"] = "finished"
    assert hang.recovered_at is not None
    hang.recovered_at -= hang.limit_seconds()
    conductor._follow(hang)
    conductor._give_up_the_rest()
    found = recorded(tmp_path)
    reason = "node1 was not back 46 s after the others were through, when training had ended"
    assert (found.reason, found.recovered_seconds) == (reason, None)


def test_what_a_node_ended_with_is_said(tmp_path: Path) -> None:
    record = Record(tmp_path)
    cluster = Cluster(tmp_path, record, [], num_nodes=2)
    assert str(record.path) in cluster.last_words()
    for number, text in enumerate(
        ("a traceback\n", "waiting\nelastic_train: error (rank 1): no such: user\ntorchrun\n")
    ):
        log = tmp_path / f"{number}.log"
        log.write_text(text)
        cluster._seen.append(Mock(log=log, all_processes=list))
    assert cluster.last_words() == f"no such: user (all logs: {record.path})"
    cluster.close()
    record.close()


@pytest.mark.parametrize(("job", "paces"), [("paced", 3), ("long", 1)])
def test_a_job_with_a_length_of_its_own_keeps_its_pace(
    tmp_path: Path, conductor: Conductor, job: str, paces: int
) -> None:
    """Another one waits for late faults, and is let run free after the last."""
    conductor._settings = replace(settings_in(tmp_path), job=JOBS[job], last_step=100)
    conductor._set_pace_by_rate(JOBS[job].steps_per_second)
    conductor._cluster.watch = Mock(step=99)
    conductor._adapt_pace()
    conductor._release()
    assert len(conductor._paces) == paces
    found = read_drill(tmp_path)
    assert found is not None
    assert ("released" in found.settings) == (job == "paced")


def test_what_is_left_after_the_last_fault_is_told(
    tmp_path: Path, conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have epochs to go: minutes, of which nothing else is seen."""
    (tmp_path / "events").mkdir()
    start = {"event": "start", "generation": None, "step": 0, "time": time.time(), "host": "h", "pid": 1}
    start |= {"config": {"global_batch_size": 10, "epochs": 3}, "task": {"train_length": 100}}
    (tmp_path / "events" / "h-0-1.jsonl").write_text(json.dumps(start) + "\n")
    file = conductor._timeline._file = io.StringIO()
    watch, looks = conductor._cluster.watch, iter(range(100))
    watch.step = 10
    monkeypatch.setattr(conductor_module, "FIRST_REST_SECONDS", 0.0)
    running = property(lambda _cluster: [1] if next(looks) < 3 else [])
    monkeypatch.setattr(Cluster, "running", running)
    monkeypatch.setattr(conductor, "_look", lambda: setattr(watch, "step", watch.step + 1))
    conductor._finish()
    first, then, last = (line.split("  ", 1)[1] for line in file.getvalue().splitlines())
    assert first == "no more faults; the job goes on to its end, step 10 of 30: 20 left"
    assert re.fullmatch(r"step 11 of 30: 19 left, at \S+ steps/s some \S.*", then)
    assert last == "every node has ended, step 13"


@pytest.mark.parametrize("columns", [100, 60])
def test_what_stands_above_the_timeline_is_one_line(
    tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timeline, "elapsed", 0.0)
    record = Record(tmp_path)
    cluster = Cluster(tmp_path, record, [], num_nodes=2)
    timeline = Timeline(cluster, last_step=288, seconds=10.0, file=io.StringIO())
    console = Console(file=io.StringIO(), width=columns)
    for world, told in (
        (None, "0 s, no world yet, step 160 of 288, loss 0.0123"),
        (Mock(generation=1, members=["a"]), "0 s, generation 1, 1 worker, step 160 of 288, loss 0.0123"),
    ):
        cluster.watch = Mock(step=160, loss=0.0123, world=world)
        with console.capture() as capture:
            console.print(timeline._table())
        lines = capture.get().splitlines()
        assert (lines[0].rstrip(), len(lines)) == (told, 3)
    cluster.close()
    record.close()


def test_a_second_interrupt_leaves_nothing_behind() -> None:
    ended = []
    before = signal.getsignal(signal.SIGINT)
    ends = _Ends()
    ends.callback(ended.append, "network")
    ends.callback(os.kill, os.getpid(), signal.SIGINT)
    ends.callback(ended.append, "nodes")
    ends.close()
    assert ended == ["nodes", "network"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_node_that_does_not_go_keeps_no_other(tmp_path: Path) -> None:
    record = Record(tmp_path)
    cluster = Cluster(tmp_path, record, [], num_nodes=3, backend=Mock())
    cluster._seen = [Mock(), Mock(**{"kill.side_effect": TooSlow("it is still there")}), Mock()]
    with pytest.raises(TooSlow, match="it is still there"):
        cluster.close()
    for node in cluster._seen:
        node.kill.assert_called_once()  # type: ignore[attr-defined]
    cluster.backend.close.assert_called_once()  # type: ignore[attr-defined]
    record.close()


def test_the_verdict_and_its_reasons_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run without a goodput, too: one that never took a step."""
    (tmp_path / "events").mkdir()
    assert not _judge(settings_in(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    seed, verdict = lines.index(f"seed 1; {tmp_path / 'report.html'}"), lines.index("FAIL")
    assert seed == len(CHECKS)
    assert "checks were skipped" in lines[seed + 1]
    assert verdict == seed + 2
    assert all(line.startswith("  ") for line in lines[verdict + 1 :])
