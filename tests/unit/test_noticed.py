"""The actions of a worker after a notice, and their order."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train import stopping
from elastic_train.elastic import noticed as noticing
from elastic_train.elastic import run as running
from elastic_train.elastic.noticed import Noticed, relay_path
from elastic_train.elastic.run import run_worker
from elastic_train.notices import watcher as watching
from elastic_train.notices.clouds import find_cloud
from elastic_train.notices.notice import NoticeSource
from elastic_train.notices.own_sources import FileSource, Relay
from elastic_train.notices.watcher import NoticeWatcher
from elastic_train.preemption import PreemptionNotice
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal
from elastic_train.storage.snapshot import SnapshotResult
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.world import World
from tests.metadata_server import learn, serving
from tests.unit.test_liveness import make_member

NOTICE = PreemptionNotice("file", "spot", host="n1")


def make_worker(run_dir: Path, **launch: Any) -> Any:
    """The first of two of a node."""
    events = SimpleNamespace(is_noticed=False, write=lambda *_, **__: None)
    said = SimpleNamespace(log=print, warn=print, events=events)
    return SimpleNamespace(
        launch=Launch(local_world_size=2, **launch), host="n1", bucket="s3://b/run", stop=StopSignal(), reporter=said,
        directory=SimpleNamespace(path=run_dir), config=SimpleNamespace(notices="off", min_nodes=None),
    )  # fmt: skip


def test_a_notice_counts_before_the_others_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system by which they are may hang."""
    worker = make_worker(tmp_path)
    noticed, seen = Noticed(worker), []
    monkeypatch.setattr(Relay, "write", lambda _relay, _notice: seen.append(worker.stop.is_requested))
    noticed.leave(NOTICE)
    noticed.withdraw(NOTICE)
    assert seen == [True, False]
    worker.stop.uninstall()


def test_a_notice_counts_though_the_run_directory_hangs(tmp_path: Path) -> None:
    """The snapshots may lie elsewhere."""
    worker, is_back = make_worker(tmp_path), threading.Event()
    worker.reporter.events.write = lambda *_, **__: is_back.wait()
    source: Any = SimpleNamespace(look=lambda: NOTICE)
    thread = threading.Thread(target=NoticeWatcher(lambda: None, Noticed(worker)).look, args=(source,))
    thread.start()
    try:
        wait_until(lambda: worker.stop.is_requested, "the notice", 5)
    finally:
        is_back.set()
        thread.join()
    worker.stop.uninstall()


def test_what_comes_too_late_is_passed_on_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node leaves as a whole."""
    worker = make_worker(tmp_path)
    noticed, relay = Noticed(worker), Relay(relay_path(worker))
    noticed.leave(NOTICE)
    monkeypatch.setattr(stopping, "GRACE_SECONDS", -1.0)
    worker.stop.votes()
    noticed.withdraw(NOTICE)
    assert relay.look() is not None
    worker.stop.signum = signal.SIGTERM
    worker.stop.settle()
    noticed.leave(PreemptionNotice("file", "another"))
    found = relay.look()
    assert found is not None
    assert found.reason == "spot"
    worker.stop.uninstall()


@pytest.mark.parametrize(
    ("votes_to_leave", "what"),
    [(True, "too late: this node leaves"), (False, "training goes on, unless all nodes stop with the step in hand")],
)
def test_what_is_said_of_a_withdrawal_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, votes_to_leave: bool, what: str
) -> None:
    """All nodes may have said in the step in hand that they are told to stop."""
    worker, said = make_worker(tmp_path), list[str]()
    noticed, worker.reporter.log = Noticed(worker), said.append
    noticed.leave(NOTICE)
    if votes_to_leave:
        monkeypatch.setattr(stopping, "GRACE_SECONDS", -1.0)
    worker.stop.votes()
    noticed.withdraw(NOTICE)
    assert said == [f"notice withdrawn: n1 (file: spot); {what}"]
    worker.stop.uninstall()


@pytest.mark.parametrize(
    ("notices", "seconds", "num_nodes", "says"),
    [
        ("slurm", 41.0, 1, ["took 41 s for 1.2 GB (29.3 MB/s), and a notice of slurm leaves 40 s, less than that"]),
        (
            "slurm",
            100.0,
            2,
            ["took 1 min 40 s for 1.2 GB (12.0 MB/s; 50 s by 2 nodes together), and a notice of slurm leaves 40 s"],
        ),
        ("slurm", 51.0, 3, []),
        ("slurm", 20.0, 1, ["a notice of slurm leaves 40 s, a long step included, perhaps too little"]),
        ("slurm", 17.0, 1, []),
        ("file:gone", 4100.0, 1, []),
        ("off", 4100.0, 1, []),
    ],
)
def test_a_snapshot_that_does_not_fit_a_notice_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: str, seconds: float, num_nodes: int, says: list[str]
) -> None:
    monkeypatch.setenv("SLURM_SIGNAL", "USR1@40")
    worker, told = make_worker(tmp_path), []
    worker.config.notices, worker.reporter.warn = notices, told.append
    before = signal.getsignal(signal.SIGUSR1)
    noticed = Noticed(worker)
    try:
        for step in (100, 200):
            noticed.judge(SnapshotResult(tmp_path, step, 1_200_000_000, 0.1, seconds), num_nodes)
    finally:
        noticed.close()
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == len(says)
    for text, expected in zip(told, says, strict=True):
        assert expected in text
        assert "the snapshot of step 100" in text
        assert "lower --snapshot-every" in text


def test_what_auto_has_found_is_what_a_snapshot_is_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tmp_path / "known.json"
    learn(known, instance="", preempted="FALSE", maintenance="NONE")
    worker, told = make_worker(tmp_path), []
    worker.config.notices, worker.reporter.warn = "auto", told.append
    with serving("gcp", known) as server:
        # Nothing is ever asked at the address of a real one.
        monkeypatch.setattr(watching, "find_cloud", partial(find_cloud, ("127.0.0.1", server.server_port), 5.0))
        noticed = Noticed(worker)
        try:
            wait_until(lambda: bool(server.asked[1:]), "the first question", 20.0)
            noticed.judge(SnapshotResult(tmp_path, 100, 1_200_000_000, 0.1, 50.0), 1)
        finally:
            noticed.close()
    assert [text for text in told if "a notice of gcp leaves 30 s, less than that" in text] == told != []


def test_one_worker_of_a_node_finds_out_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others read what it passes on."""
    probes, looks = list[str](), Counter[str]()

    class Counted(FileSource):
        def look(self) -> PreemptionNotice | None:
            looks["source"] += 1
            return super().look()

    def find() -> NoticeSource:
        probes.append(threading.current_thread().name)
        return Counted(tmp_path / "gone")

    def look(_relay: Relay) -> None:
        looks["relay"] += 1

    monkeypatch.setattr(watching, "find_cloud", find)
    monkeypatch.setattr(Relay, "look", look)
    monkeypatch.setattr(Relay, "poll_seconds", 0.01)
    noticed = []
    for local_rank in (1, 0):
        worker = make_worker(tmp_path, local_rank=local_rank)
        worker.config.notices = "auto"
        noticed.append(Noticed(worker))
        enter(noticed[-1], world_of(0, 1, rank=local_rank))
    try:
        wait_until(lambda: looks["source"] > 1 and looks["relay"] > 9, "looks of both", 20.0)
    finally:
        for one in noticed:
            one.close()
    assert probes == ["notices"]


SRUN = {"run_id": "slurm-7", "step": "1"}


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        ({"node_id": "abc", "agent_pid": 5}, "n1-abc.json"),
        ({"agent_pid": 5, "run_id": "none"}, "n1-5-none-0.json"),
        (SRUN, "n1-1-slurm-7-0.json"),
    ],
    ids=["a node id", "a fixed world of torchrun", "srun"],
)
def test_the_workers_of_one_node_agree_on_the_file(
    launch: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each has a wrapper of its own as its parent."""
    for parent in (11, 12):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        assert relay_path(make_worker(tmp_path, **launch)).name == name


def test_no_start_reads_what_an_earlier_one_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker removes a file of its own start alone, and another one may look before."""
    starts = [
        {"agent_pid": 5}, {"agent_pid": 6}, {"agent_pid": 5, "restart_count": 1},
        SRUN, SRUN | {"step": "2"}, SRUN | {"restart_count": 1},
    ]  # fmt: skip
    assert len({relay_path(make_worker(tmp_path, **start)) for start in starts}) == len(starts)
    of_spawn = relay_path(make_worker(tmp_path))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert relay_path(make_worker(tmp_path)) != of_spawn


def enter(noticed: Noticed, world: World, *dead: int, save_seconds: float = 0.0) -> None:
    """`dead`: local ranks."""
    noticed.follow(lambda: world, lambda member: member.local_rank in dead, lambda: save_seconds)


def world_of(*local_ranks: int, rank: int = 0) -> World:
    """Of these workers of one node, and before them of one of another node."""
    here = [replace(make_member(9), local_rank=number, uid=str(number)) for number in local_ranks]
    return World(rank=1 + rank, generation=0, members=(make_member(0), *here), uid="")


@pytest.mark.parametrize("is_agreed", [True, False])
def test_the_first_that_lives_asks_for_its_node(is_agreed: bool, tmp_path: Path) -> None:
    """Under --spawn and srun the others of a node train on without the one that has asked; with it they are told.

    The next world may come late: meanwhile nobody listens at the address of who was killed.
    """
    second_s: Any = (world_of(1, 2),) if is_agreed else (world_of(0, 1, 2, rank=1), 0)
    third_s: Any = (world_of(1, 2, rank=1),) if is_agreed else (world_of(0, 1, 2, rank=2), 0)
    gone, first, second, third = tmp_path / "gone", *(make_worker(tmp_path, local_rank=rank) for rank in range(3))
    noticed = []
    for rank, worker in enumerate((first, second, third)):
        worker.config.notices, worker.given = f"file:{gone}", []
        worker.reporter.events.write = lambda event, given=worker.given: given.append(event.state)
        noticed.append(Noticed(worker))
        noticed[-1].close()  # of its thread: each look is one of this test
        enter(noticed[-1], world_of(0, 1, 2, rank=rank))
    watchers = [NoticeWatcher(lambda: None, one) for one in noticed]
    sources = [one._find() for one in noticed]

    def look() -> list[bool]:
        for watcher, source in zip(watchers, sources, strict=True):
            watcher.look(source)
        return [worker.stop.is_requested for worker in (first, second, third)]

    gone.touch()
    watchers[2].look(sources[2])
    assert not third.stop.is_requested, "only the first asks"
    assert look() == [True, True, True]
    gone.unlink()
    assert look() == [False, False, False]
    del watchers[0], sources[0]  # it is killed
    enter(noticed[1], *second_s)
    enter(noticed[2], *third_s)
    gone.touch()
    watchers[1].look(sources[1])
    assert not third.stop.is_requested, "only the first that lives asks"
    for watcher, source in zip(watchers, sources, strict=True):
        watcher.look(source)
    assert (second.stop.is_requested, third.stop.is_requested) == (True, True)
    assert (first.given, second.given, third.given) == (["given", "withdrawn"], ["given"], []), "told of once"
    for worker in (first, second, third):
        worker.stop.uninstall()


def test_where_the_state_takes_long_to_save_the_node_leaves_earlier(tmp_path: Path) -> None:
    """Between two memberships as well: there it may have to save what it has."""
    gone, worker = tmp_path / "gone", make_worker(tmp_path)
    gone.write_text(json.dumps({"deadline": time.time() + 300.0}))
    worker.config.notices = f"file:{gone}"
    for seconds, is_due in ((0.0, False), (150.0, True)):
        noticed = Noticed(worker)
        enter(noticed, world_of(0), save_seconds=seconds)
        noticed.let_go()
        assert noticed._watcher is not None
        noticed._watcher.look(FileSource(gone))
        assert worker.stop.is_requested is is_due
        noticed.close()
    worker.stop.uninstall()


def test_all_workers_of_a_node_leave_by_what_its_first_knows(tmp_path: Path) -> None:
    """By now a snapshot may have taken less."""
    first, second = make_worker(tmp_path), make_worker(tmp_path, local_rank=1)
    noticed = Noticed(second)
    Noticed(first).leave(replace(NOTICE, deadline=time.time() + 300.0))
    NoticeWatcher(lambda: None, noticed, save_seconds=lambda: 1.0).look(noticed._find())
    assert second.stop.is_requested
    left = second.stop.seconds_left()
    assert left is not None
    assert left > 200.0
    for worker in (first, second):
        worker.stop.uninstall()


def test_who_asks_does_so_until_it_is_in_a_world_again(tmp_path: Path) -> None:
    """A worker that was left out comes back as another member."""
    noticed = Noticed(make_worker(tmp_path, local_rank=1))
    assert not noticed._is_first()
    world: list[World | None] = [world_of(1)]
    noticed.follow(lambda: world[0], lambda _member: False, lambda: 0.0)
    assert noticed._is_first()
    noticed.let_go()
    world[0] = None
    noticed.follow(lambda: world[0], lambda _member: False, lambda: 0.0)
    assert noticed._is_first(), "it waits in the join queue"
    world[0] = world_of(0, 1, rank=1)
    assert not noticed._is_first()
    noticed.let_go()
    assert not noticed._is_first()


@pytest.mark.parametrize("source", ["slurm", "auto", "file", "file and none"])
def test_who_takes_the_asking_over_takes_no_notice_back(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM may have sent its signal to the other worker alone; and what answers for a cloud may not be found now."""
    gone = tmp_path / "gone"
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(watching, "find_cloud", lambda: None)
    first, second = make_worker(tmp_path), make_worker(tmp_path, local_rank=1)
    second.config.notices = f"file:{gone}" if source.startswith("file") else source
    noticed = Noticed(second)
    noticed._watcher.close()  # each look is one of this test
    watcher, found = NoticeWatcher(lambda: None, noticed), noticed._find()
    Noticed(first).leave(NOTICE)
    gone.touch()
    watcher.look(found)
    enter(noticed, world_of(1))
    if source == "file and none":
        gone.unlink()
    for _ in range(2):
        watcher.look(found)
        assert second.stop.is_requested is (source != "file and none")
    noticed.close()
    for worker in (first, second):
        worker.stop.uninstall()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["leaves", "is withdrawn"])
def test_no_file_stays_of_a_start_that_has_heard_a_notice(how: str, tmp_path: Path) -> None:
    """The others have read it long before, or ask themselves once this worker is gone."""
    worker, other = make_worker(tmp_path), make_worker(tmp_path, local_rank=1)
    worker.config.notices = other.config.notices = f"file:{tmp_path / 'gone'}"
    noticed, behind = Noticed(worker), Noticed(other)
    noticed.leave(NOTICE)
    watcher, source = NoticeWatcher(lambda: None, behind), behind._find()
    watcher.look(source)
    behind.close()
    assert relay_path(worker).exists(), "another worker of the node may have to read it"
    if how == "is withdrawn":
        noticed.withdraw(NOTICE)
    else:
        worker.stop.settle()
    noticed.close()
    assert list((tmp_path / "notices").iterdir()) == []
    watcher.look(source)
    assert other.stop.is_requested, "only what it says takes a notice back"
    for one in (worker, other):
        one.stop.uninstall()


def test_the_first_that_lives_removes_the_file_of_one_that_was_killed(tmp_path: Path) -> None:
    first, second = make_worker(tmp_path), make_worker(tmp_path, local_rank=1)
    Noticed(first).leave(NOTICE)
    noticed = Noticed(second)
    NoticeWatcher(lambda: None, noticed).look(noticed._find())
    enter(noticed, world_of(1))
    noticed.close()
    assert list((tmp_path / "notices").iterdir()) == []
    for one in (first, second):
        one.stop.uninstall()


@pytest.mark.parametrize("has_told", [False, True])
def test_the_end_waits_a_moment_for_a_file_system_that_hangs(
    has_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not ask it where this worker has told nothing: a late stop has no time for that."""
    monkeypatch.setattr(noticing, "REMOVE_SECONDS", 0.05)
    worker, asked, goes_on = make_worker(tmp_path), [], threading.Event()
    noticed = Noticed(worker)
    if has_told:
        noticed.leave(NOTICE)

    def hang(_relay: Relay) -> None:
        asked.append(threading.current_thread().daemon)
        goes_on.wait(60)

    monkeypatch.setattr(Relay, "clear", hang)
    try:
        noticed.close()
        assert not goes_on.is_set()
    finally:
        goes_on.set()
    assert asked == [True] * has_told, "no thread keeps the process"
    worker.stop.uninstall()


def test_files_that_starts_have_left_which_were_killed_go_with_the_next(tmp_path: Path) -> None:
    """A machine that is taken away does not come back under its name. What is new may be of another node's start."""
    notices = tmp_path / "notices"
    notices.mkdir()
    now = time.time()
    for name, age in {
        "n1-old.json": 3700.0,
        "n2-old.json": 3700.0,
        "n1-alive.json": 3500.0,
        "n3-ahead.json": -60,
    }.items():
        (notices / name).touch()
        os.utime(notices / name, (now - age, now - age))
    worker = make_worker(tmp_path, node_id="abc")
    relay_path(worker).touch()
    worker.config.notices = f"file:{tmp_path / 'gone'}"
    noticed = Noticed(worker)
    noticed.close()
    assert {path.name for path in notices.iterdir()} == {"n1-alive.json", "n3-ahead.json"}


def test_a_file_that_cannot_be_removed_changes_nothing_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(tmp_path)
    worker.config.notices = f"file:{tmp_path / 'gone'}"
    noticed = Noticed(worker)
    noticed.leave(NOTICE)

    def fail(_relay: Relay) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Relay, "clear", fail)
    noticed.close()
    worker.stop.uninstall()


def test_a_run_directory_that_fails_here_is_told_as_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ended = make_worker(tmp_path), []
    worker.reporter.failed = lambda error: ended.append(str(error))
    worker.reporter.close = lambda: ended.append("close")
    worker.directory.ownership = SimpleNamespace(release=lambda: ended.append("release"))
    worker.bucket, worker.config.notices = None, "file:gone"

    def fail(_relay: Relay) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Relay, "clear", fail)
    with pytest.raises(OSError, match="stale"):
        run_worker(worker, lambda *_: None)
    assert ended == ["stale file handle", "close", "release"]


@pytest.mark.parametrize("error", [ProcessLookupError(), PermissionError()])
def test_an_agent_that_cannot_be_told_changes_nothing_of_the_end(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the run is told, and the run directory is let go."""
    worker = make_worker(tmp_path, agent_pid=os.getppid())
    worker.bucket, worker.config.notices, ended = None, "file:gone", []
    worker.reporter.failed, worker.reporter.close = lambda _error: None, lambda: ended.append("close")
    worker.directory.ownership = SimpleNamespace(release=lambda: ended.append("release"))
    worker.stop.give_notice(NOTICE, 60.0)
    worker.stop.settle()

    def refuse(*_arguments: int) -> None:
        raise error

    def leave(*_arguments: Any) -> int:
        return 143

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(running, "_as_member", leave)
    assert run_worker(worker, lambda *_: None) == 143
    assert ended == ["close", "release"]
    worker.stop.uninstall()
