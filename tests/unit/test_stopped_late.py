"""The end of a worker that was told to stop and whose training thread hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic.exits import Exits
from elastic_train.elastic.late_stop import LateStop
from elastic_train.elastic.noticed import Noticed, relay_path
from elastic_train.elastic.run_files import RunFiles
from elastic_train.errors import NewerGeneration, OwnershipLost, StoreUnreachable, TrainingDiverged
from elastic_train.preemption import PreemptionNotice
from elastic_train.rendezvous.launch import Launch
from elastic_train.runlog.goodput import Phase, PhaseClock
from elastic_train.stopping import StopSignal
from elastic_train.storage.places import OwnedBucket
from elastic_train.storage.store_urls import parse_url
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.unit.test_events import fields_of
from tests.unit.test_liveness import make_member
from tests.unit.test_state import BATCH, LENGTH, STEPS_PER_EPOCH, make_state

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 0.01
ME = make_member(0)
SINGLE = World(rank=0, generation=3, members=(ME,), uid="single")
ALONE = Launch()
SECOND_OF_NODE = World(rank=1, generation=3, members=(ME, replace(ME, local_rank=1, pid=2)), uid="two of a node")


class Life:
    """A worker of which all parts note what they are asked; each raises what `raises` has under its name."""

    def __init__(
        self,
        state: TrainState,
        world: World | None = SINGLE,
        launch: Launch = ALONE,
        run_dir: Path | None = None,
        **raises: Exception,
    ) -> None:
        self.calls: list[Any] = []
        self.reported: list[str] = []
        self._raises = raises
        self.state = state
        events = SimpleNamespace(write=lambda event: self.calls.append((event.name, *fields_of(event).values())))
        reporter = SimpleNamespace(
            events=events, warn=lambda message: self.calls.append(("warning", message)), report=self.reported.append,
            log=lambda message: self.calls.append(("log", message)), world=world,
            report_for_node=lambda _message: None, close=self.part("close"),
            failed=lambda error: self.calls.append(("failed", str(error))),
        )  # fmt: skip
        self.stop = SimpleNamespace(
            cause=signal.SIGTERM, why="SIGTERM", notice=None, settle=lambda: None, is_requested=True,
            is_settled=False, settle_if_requested=lambda: self.stop.is_requested, seconds_left=lambda: 30.0,
        )  # fmt: skip
        self.worker: Any = SimpleNamespace(
            state=state, reporter=reporter, stop=self.stop, launch=launch, host="n1", snapshots_dir="snapshots",
            config=SimpleNamespace(epochs=3, debug=False, notices="off"),
            directory=SimpleNamespace(path=run_dir, ownership=SimpleNamespace(release=self.part("release"))),
        )  # fmt: skip
        trainer: Any = SimpleNamespace(
            settle=self.part("settle"), abandon=self.part("abandon"), step_started=0.0
        )  # fmt: skip
        membership: Any = SimpleNamespace(leave=self.part("leave"))
        saver: Any = SimpleNamespace(
            save_beside=self.part("save"), save_and_wait=self.part("save and wait"), unsaved=lambda _state: "",
            enter=lambda _world: None, wait=lambda: None, newest=None, expected_seconds=0.0, step_on_the_way=-2,
            give_up_in_flight=lambda _state: None,
        )  # fmt: skip
        files: Any = SimpleNamespace(leave_bucket_alone=self.part("leave the bucket"))
        self.exits = exits = Exits(self.worker, membership, saver, trainer, files)
        self.noticed = Noticed(self.worker)
        self.late = LateStop(
            self.worker,
            trainer,
            exits,
            lambda: world,
            self.noticed.close,
            lambda code: self.calls.append(("end", code)),
        )

    def part(self, name: str) -> Any:
        def call(*_arguments: Any, **_options: Any) -> None:
            self.calls.append(name)
            if name in self._raises:
                raise self._raises[name]

        return call

    def run(self) -> list[Any]:
        self.late.save(TIMEOUT)
        return self.calls

    @property
    def is_given_back(self) -> bool:
        return self.state.lock.acquire(0.0)


def make_stepping(steps: int = 1) -> TrainState:
    """A state in the middle of a step, after some commits."""
    state = make_state()
    for _ in range(steps):
        state.commit(1.0)
    state.remember()
    state.lock.let_go()
    return state


def test_the_last_commit_is_saved() -> None:
    life = Life(make_stepping())
    stopped = [("signal", "SIGTERM"), ("done", "stopped")]
    assert life.run() == [
        "settle", "save", "leave the bucket", *stopped, "leave", "close", "release", ("end", 143)
    ]  # fmt: skip
    assert not life.is_given_back


@pytest.mark.parametrize(("steps", "position"), [
    (0, "epoch 1 of 3, 0 of"), (1, f"epoch 1 of 3, {BATCH} of"), (STEPS_PER_EPOCH, f"epoch 1 of 3, {LENGTH} of"),
    (STEPS_PER_EPOCH + 1, f"epoch 2 of 3, {BATCH} of"),
])  # fmt: skip
def test_the_end_of_an_epoch_is_of_that_epoch(steps: int, position: str) -> None:
    """As in the events, and so in `status`."""
    life = Life(make_stepping(steps))
    life.run()
    [line] = life.reported
    assert f"({position} {LENGTH} samples)" in line


def test_the_next_start_need_not_wait_for_the_bucket(request: pytest.FixtureRequest) -> None:
    """Each node writes what it has, and so that it lives; whichever was the last has left."""
    url = parse_url(f"memory://{request.node.name}")
    buckets = [OwnedBucket(url) for _ in range(2)]
    state = SimpleNamespace(run_uid="run", superseded=())
    nodes = []
    for rank, bucket in enumerate(buckets):
        reporter = SimpleNamespace(warn=pytest.fail, log=print)
        directory = SimpleNamespace(replace_file=lambda *_: None)
        worker: Any = SimpleNamespace(bucket=bucket, state=state, reporter=reporter, directory=directory)
        nodes.append((RunFiles(worker, "job"), World(rank, 3, (ME, replace(ME, host="b", uid="other")), uid="two")))
    buckets[0].owner.take("job", 3, lambda: None)
    for files, world in nodes:
        files.note_run(world)
    for (files, world), bucket in zip(nodes, buckets, strict=True):
        bucket.owner.check()
        files.leave_bucket_alone(world)
        record = bucket.owner.read()
        assert record is not None
        assert record.has_left


def test_the_step_in_hand_is_lost_time() -> None:
    state, now = make_stepping(), [0.0]
    state.clock = PhaseClock(lambda: now[0], lambda: now[0], process_age=0.0)
    state.clock.enter(Phase.TRAIN)
    now[0] = 30.0
    Life(state).run()
    totals = state.clock.totals()
    assert totals[Phase.LOST] == 30.0, "of the monotonic clock there is more since 0"
    assert sum(totals.values()) == 30.0


@pytest.mark.parametrize("is_between_worlds", [False, True])
def test_it_stays_while_that_one_saves(is_between_worlds: bool) -> None:
    """Its agent would end the one that saves, 30 s after the first of its workers has gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        first = replace(ME, address=listener.getsockname())
        life = Life(make_stepping(), replace(SECOND_OF_NODE, members=(first, SECOND_OF_NODE.members[1])))
        world = life.late._world()
        assert world is not None

        def stop_between_worlds() -> None:
            life.calls.append(("end", life.exits.stop_between_worlds(world)))

        thread = threading.Thread(target=stop_between_worlds if is_between_worlds else life.run, daemon=True)
        thread.start()
        for _ in range(3):
            listener.accept()[0].close()  # it looks whether the other one is there still
        assert life.calls[-1] == "leave", "the others know already"
    thread.join(20)
    assert life.calls[-1] == ("end", 143)
    assert not {"save", "save and wait"}.intersection(map(str, life.calls))


@pytest.mark.parametrize("is_between_worlds", [False, True], ids=["late", "between worlds"])
@pytest.mark.parametrize("is_noticed", [False, True], ids=["signal", "notice"])
def test_it_stays_no_longer_than_its_node_does(is_noticed: bool, is_between_worlds: bool) -> None:
    """A worker may be told alone, and the one that saves goes on."""
    stop = StopSignal()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = replace(ME, address=listener.getsockname())
        world = replace(SECOND_OF_NODE, members=(first, SECOND_OF_NODE.members[1]))
        life = Life(make_stepping(), world)
        life.worker.stop = stop
        if is_noticed:
            stop.give_notice(PreemptionNotice("file", "spot", time.time() + 0.5), 0.5)
        else:
            stop.expect_kill(0.5)
            stop._remember(signal.SIGTERM, None)
        began = time.monotonic()
        if is_between_worlds:
            assert life.exits.stop_between_worlds(world) == 143
        else:
            assert life.run()[-1] == ("end", 143)
        assert 0.3 < time.monotonic() - began < 10.0
    stop.uninstall()


# A process of its own forks: with the threads of a test's process a child may wait for a lock that nobody releases.
AGENT_AND_WORKER = """
import os, sys
from elastic_train.preemption import PreemptionNotice
from elastic_train.rendezvous.launch import Launch
from tests.unit.test_stopped_late import Life, make_stepping

agent_pid = os.getpid()
worker = os.fork()
if worker == 0:
    life = Life(make_stepping())
    life.stop.notice, life.stop.is_settled = PreemptionNotice("file", "spot"), True
    life.worker.launch = Launch(agent_pid=agent_pid, local_rank=int(sys.argv[1]))
    os._exit(0 if life.run()[-1] == ("end", 143) else 3)
os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


@pytest.mark.parametrize(("local_rank", "code"), [(0, -signal.SIGTERM), (1, 0)])
def test_by_a_notice_its_agent_ends_as_well(local_rank: int, code: int) -> None:
    """Or it would start new workers, by --max-restarts, on a node that goes away. One worker of a node tells it."""
    program = [sys.executable, "-c", AGENT_AND_WORKER, str(local_rank)]
    agent = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert agent.returncode == code, agent.stderr


@pytest.mark.parametrize(("error", "logs"), [(ProcessLookupError(), 0), (PermissionError(), 1)])
def test_it_ends_though_its_agent_cannot_be_told(error: OSError, logs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread waits for the state, and nobody else would end the process."""
    life = Life(make_stepping())
    life.stop.notice, life.stop.is_settled = PreemptionNotice("file", "spot"), True
    life.worker.launch = Launch(agent_pid=os.getppid())

    def refuse(*_arguments: int) -> None:
        raise error

    monkeypatch.setattr(os, "kill", refuse)
    calls = life.run()
    line = "to end: with --max-restarts it starts new ones on this node"
    log = ("log", f"warning: this worker may not signal the agent, pid {os.getppid()}, {line}")
    assert calls[calls.index("release") + 1 :] == [log] * logs + [("end", 143)]


def test_what_it_has_told_its_node_of_a_notice_is_removed(tmp_path: Path) -> None:
    life = Life(make_stepping(), launch=Launch(local_world_size=2), run_dir=tmp_path)
    life.stop.give_notice = lambda *_: None
    life.noticed.leave(PreemptionNotice("file", "spot"))
    assert relay_path(life.worker).exists()
    assert life.run()[-1] == ("end", 143)
    assert not relay_path(life.worker).exists()


def test_it_is_known_where_it_stopped() -> None:
    """The next start at that step is none after a failure."""
    state = make_stepping(2)
    Life(state).run()
    assert state.stopped_at == 2


def test_before_the_first_commit_there_is_nothing_to_save() -> None:
    calls = Life(make_stepping(0)).run()
    assert "save" not in calls
    assert calls[-1] == ("end", 143)


@pytest.mark.parametrize("raises", [{"save": OwnershipLost("theirs")}, {"leave": StoreUnreachable("gone")}])
def test_others_have_gone_on(raises: dict[str, Exception]) -> None:
    calls = Life(make_stepping(), **raises).run()
    assert ("done", "stopped") in calls
    assert calls[-1] == ("end", 143)


def test_what_belongs_to_another_job_by_now_is_told() -> None:
    calls = Life(make_stepping(), save=OwnershipLost("another job has it")).run()
    assert ("warning", "another job has it") in calls
    calls = Life(make_stepping(), save=NewerGeneration("the others have it")).run()
    assert not any(call[0] == "warning" for call in calls), "they save it"


def test_a_state_that_cannot_be_saved_is_no_orderly_stop() -> None:
    life = Life(make_stepping())
    life.late._exits._saver.unsaved = lambda _state: "; NOT SAVED"  # type: ignore[method-assign]
    assert life.run()[-1] == ("end", 1)


def test_weights_of_no_commit_are_not_saved_for_the_next_start() -> None:
    """An error has ended the run within an optimizer's step."""
    state = make_stepping()
    next(iter(state.model.parameters())).grad = None
    state.optimizer.step()
    life = Life(state)
    assert life.late._exits.save_for_next_start(SINGLE, "again") == "its state is of no commit, and is not saved"
    assert "save and wait" not in life.calls


def test_a_bug_ends_it_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    calls = Life(make_stepping(), save=ValueError("a bug")).run()
    assert calls[-2:] == [("failed", "a bug"), ("end", 1)]
    assert "a bug" in capsys.readouterr().err


def test_who_ends_by_itself_is_left_alone() -> None:
    state = make_state()
    state.commit(1.0)
    life = Life(state)
    life.stop.is_settled = True
    assert life.run() == [], "it saves"
    assert Life(state, world=None).run() == [], "it has nothing to save"
    state.last_step = 1
    assert Life(state).run() == [], "it is through"


def test_where_it_does_not_let_go_of_the_state_that_is_told() -> None:
    state = make_state()
    state.commit(1.0)
    [(event, message)] = Life(state).run()
    assert event == "warning"
    assert "between two worlds: it is not saved before that ends" in message


def test_between_step_and_commit_it_says_why_nothing_is_saved() -> None:
    state = make_stepping()
    state.optimizer.step()
    [(event, message)] = Life(state).run()
    assert event == "warning"
    assert "the commit of step 2" in message


def test_a_notice_that_ends_when_it_is_late_ends_nobody() -> None:
    """The timer has fired, and cannot be called off."""
    life = Life(make_stepping())
    life.stop.is_requested = False
    assert life.run() == [], "nor takes a step's votes away"
    assert life.is_given_back
    state = make_stepping()
    state.optimizer.step()
    life = Life(state)
    life.stop.is_requested = False
    assert life.run() == [], "nor is it told to stop"


def test_a_notice_that_ends_in_that_very_moment_takes_no_votes_away() -> None:
    life = Life(make_stepping())
    life.stop.settle_if_requested = lambda: False
    assert life.run() == []
    assert life.is_given_back


def test_without_a_state_of_the_run_nothing_is_saved() -> None:
    life = Life(make_stepping(), world=None)
    assert life.run() == []
    assert life.is_given_back


def test_a_commit_that_is_worth_nothing_is_not_saved() -> None:
    life = Life(make_stepping(), settle=TrainingDiverged("the loss of step 1 is nan"))
    assert life.run() == ["settle", ("warning", "the loss of step 1 is nan")]
    assert life.is_given_back


def test_a_thread_that_comes_back_at_last_changes_nothing_that_is_being_saved() -> None:
    """A member whose training thread is taken for lost ends, whoever has told it so."""
    life = Life(make_stepping())
    assert "the state" in life.late.save_at_last()
    assert life.calls == ["abandon", "save and wait"]
    assert not life.is_given_back, "it waits before the optimizer's step"


def test_a_thread_that_waits_for_a_late_stop_counts_as_lost_and_no_other_saves_meanwhile() -> None:
    """Both would write into one folder: the snapshot would be torn, and the last line would say that it is there."""
    life, may_end = Life(make_stepping()), threading.Event()
    save = life.exits._saver.save_beside
    life.exits._saver.save_beside = lambda state: (save(state), may_end.wait(20))[1]  # type: ignore[method-assign]
    threads = [threading.Thread(target=one, daemon=True) for one in (life.run, life.late.save_at_last)]
    threads[0].start()
    while "save" not in life.calls:
        time.sleep(0.01)
    threads[1].start()
    threads[1].join(0.5)
    assert life.calls == ["settle", "save"]
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert life.calls.index(("end", 143)) < life.calls.index("abandon"), "by then the process has ended"


@pytest.mark.parametrize(("is_open", "is_updating"), [(True, False), (True, True), (False, False)])
def test_at_last_a_gpu_is_not_waited_for_that_hangs_within_the_step(is_open: bool, is_updating: bool) -> None:
    """All that is copied, the buffers that are put back too, is what was there as the step began. The weights of an
    update that is under way are not."""
    state = make_stepping() if is_open else make_state()
    state._is_updating = is_updating
    life = Life(state)
    state.step_start = SimpleNamespace(copy_beside=life.part("copy beside"))  # type: ignore[assignment]
    life.late.save_at_last()
    beside = ["copy beside"] if is_open and not is_updating else []
    assert life.calls == [*beside, "abandon"] + ["save and wait"] * (not is_updating)


def test_at_last_what_is_in_the_commit_is_saved_as_well() -> None:
    """That thread hangs in the collective of a commit, and has the lock: no other comes to it."""
    state = make_state()
    state.commit(1.0)
    life = Life(state)
    life.late.save_at_last()
    assert life.calls == ["abandon", "save and wait"]


@pytest.mark.parametrize(
    ("world", "raises", "said"),
    [
        (None, {}, "there is nothing to save"),
        (SINGLE, {"abandon": TrainingDiverged("the loss of step 1 is nan")}, "the loss of step 1 is nan"),
    ],
)
def test_at_last_what_is_worth_nothing_is_not_saved(
    world: World | None, raises: dict[str, Exception], said: str
) -> None:
    life = Life(make_stepping(), world, **raises)
    assert life.late.save_at_last() == said
    assert "save and wait" not in life.calls
