"""A stop in a step, or an evaluation, that does not end before SIGKILL comes: the last commit is saved all the same."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.audits import audit
from tests.integration.cluster import (
    PYTHON,
    Cluster,
    Node,
    check_ledger,
    check_steps,
    events,
    last_step,
    newest_snapshot,
    result,
    snapshot_names,
    wait_until,
)

# The step, or the evaluation, that LONG names takes until the process ends; the file `is_long` says that it has begun.
LONG_TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train.training.tasks import Task

WHAT, NUMBER = os.environ.get("LONG", "nothing 0").split()

def hang(*_arguments):
    # no save of this worker comes to an end, as on a disk that hangs
    if Path(f"hangs-{os.getpid()}").exists():
        time.sleep(120)

class Long(Task):
    count = 0

    def build_model(self):
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model.register_state_dict_post_hook(hang)
        return model

    def train_dataset(self):
        bits = torch.arange(96).unsqueeze(1).bitwise_right_shift(torch.arange(8)) % 2
        return TensorDataset(bits.float(), bits.sum(1) % 2)

    def test_dataset(self):
        return self.train_dataset()

    def _take_long(self, what):
        Long.count += what == WHAT
        if what == WHAT and Long.count >= int(NUMBER):
            Path(f"is_long-{os.getpid()}").touch()
            time.sleep(120)

    def loss(self, model, batch):
        loss = super().loss(model, batch)  # BatchNorm's statistics are those of this step from here on
        if model.training:  # else it is called by `evaluate`
            self._take_long("step")
        return loss

    def evaluate(self, model, batch):
        self._take_long("evaluation")
        return super().evaluate(model, batch)
"""
LENGTH, BATCH = 96, 16
PER_EPOCH = LENGTH // BATCH
FLAGS = ("--task", "long:Long", "--global-batch-size", str(BATCH), "--snapshot-every", "0", "--ledger")
FLAGS += ("--eval-every", "1", "--ema-decay", "0.9", "--epochs", "2")

# `-m elastic_train`, but that its patience is short.
IMPATIENT = """
import os, sys
from elastic_train.config import parse
from elastic_train.elastic.run import run
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal
from elastic_train.training.own_flags import own_flags

stop = StopSignal(late_after=1.0, hopeless_after=20.0)
stop.install()
config = parse(sys.argv[1:], own_flags(sys.argv[1:]))
sys.exit(run(config, Launch.from_environment(os.environ, config.store_endpoint), stop))
"""

# A loop of one's own. LONG names a place in it that takes so many seconds, when 8 steps are committed.
OWN_LOOP = """
import os, time
from pathlib import Path
import torch
import elastic_train
from long import Long

PLACE, SECONDS = os.environ.get("LONG", "nothing 0").split()

def take_long(training, place):
    if place == PLACE and training.state.step == 8:
        Path(f"is_long-{os.getpid()}").touch()
        time.sleep(float(SECONDS))

def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, labels in training.batches():
            training.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(inputs), labels)
            take_long(training, "step")
            loss.backward()
            training.optimizer.step()
            take_long(training, "applied")
            training.commit(loss)
            take_long(training, "committed")

task = Long()
model = task.build_model()
optimizer = torch.optim.AdamW(model.parameters())
elastic_train.run(train, model, optimizer, task.train_dataset(), elastic_train.parse_flags())
"""
OWN_FLAGS = ("--global-batch-size", str(BATCH), "--snapshot-every", "0", "--ledger")
OWN_FLAGS += ("--ema-decay", "0.9", "--epochs", "2")


@pytest.fixture(autouse=True)
def programs(cluster: Cluster) -> None:
    (cluster.path / "long.py").write_text(LONG_TASK)
    (cluster.path / "own.py").write_text(OWN_LOOP)
    (cluster.path / "impatient.py").write_text(IMPATIENT)


def wait_until_long(cluster: Cluster, workers: int) -> None:
    wait_until(lambda: len(list(cluster.path.glob("is_long-*"))) == workers, "the long step or evaluation", 120)


def wait_until_still(cluster: Cluster) -> int:
    """Until no step was committed for 3 s: what a GPU was given goes on behind a frozen process. Returns the step."""
    step, since = last_step(cluster.run_dir), time.monotonic()
    while time.monotonic() - since < 3.0:
        time.sleep(0.1)
        if last_step(cluster.run_dir) != step:
            step, since = last_step(cluster.run_dir), time.monotonic()
    return step


def check_saved(run_dir: Path, step: int, *, frozen_at: int | None = None) -> None:
    """The state of `step` lies there, and nothing of the step after it; where rank 0 froze its last line is older."""
    assert last_step(run_dir) == (step if frozen_at is None else frozen_at)
    info, state = newest_snapshot(run_dir)
    assert (info.step, info.epoch, info.samples_done) == (step, step // PER_EPOCH, step % PER_EPOCH * BATCH)
    assert int(state["model"]["1.num_batches_tracked"]) == step
    assert int(state["extras"]["ema"]["1.num_batches_tracked"]) == step
    assert [name for name in snapshot_names(run_dir) if name.startswith(".")] == []


def check_stopped(run_dir: Path, step: int, workers: int, signum: signal.Signals = signal.SIGTERM) -> None:
    assert [(e["outcome"], e["step"]) for e in events(run_dir, "done")] == [("stopped", step)] * workers
    assert [e["signal"] for e in events(run_dir, "signal")] == [signum.name] * workers


def check_continued(cluster: Cluster, nodes: list[Node]) -> None:
    """To the end of training, as if nothing had been."""
    cluster.finish(nodes)
    end = result(cluster.run_dir)
    assert [incident["committed_steps_lost"] for incident in end["incidents"]] == [0]
    check_steps(cluster.run_dir, 2 * PER_EPOCH)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=2 * PER_EPOCH)
    found = audit(cluster.run_dir)
    assert found.passed, found.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("long", "step", "signum"), [("step 9", 8, signal.SIGTERM), ("evaluation 3", 6, signal.SIGINT)]
)
def test_stop_in_a_long_step_or_evaluation(cluster: Cluster, long: str, step: int, signum: signal.Signals) -> None:
    command = [PYTHON, "impatient.py", "--run-dir", str(cluster.run_dir), *FLAGS]
    node = cluster.launch(command, {"LONG": long})
    wait_until_long(cluster, 1)
    node.signal(signum)
    assert node.wait(20) == 128 + signum, node.text()
    assert f"stopped by {signum.name} at step {step}" in node.text()
    check_saved(cluster.run_dir, step)
    check_stopped(cluster.run_dir, step, 1, signum)
    _, state = newest_snapshot(cluster.run_dir)
    seconds = state["run"]["clock"]["totals"]
    assert seconds["lost" if long == "step 9" else "evaluate"] > 1.0, "what was begun and did not end"
    check_continued(cluster, [cluster.start_alone(*FLAGS)])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step", "committed"])
def test_stop_in_a_loop_of_ones_own(cluster: Cluster, place: str) -> None:
    """Within a step, or in what the loop does between two."""
    step = 8
    command = [PYTHON, "own.py", "--run-dir", str(cluster.run_dir), *OWN_FLAGS]
    node = cluster.launch(command, {"LONG": f"{place} 120"})
    wait_until_long(cluster, 1)
    node.signal(signal.SIGTERM)
    assert node.wait(28) == 143, node.text()
    check_saved(cluster.run_dir, step)
    check_stopped(cluster.run_dir, step, 1)
    check_continued(cluster, [cluster.launch(command, {})])


@pytest.mark.slow
def test_a_commit_is_waited_for(cluster: Cluster) -> None:
    """The optimizer has stepped when the time comes: the state is not that of a commit before 5 s later."""
    command = [PYTHON, "own.py", "--run-dir", str(cluster.run_dir), *OWN_FLAGS]
    node = cluster.launch(command, {"LONG": "applied 20"})
    wait_until_long(cluster, 1)
    node.signal(signal.SIGTERM)
    assert node.wait(28) == 143, node.text()
    check_saved(cluster.run_dir, 9)
    check_stopped(cluster.run_dir, 9, 1)
    check_continued(cluster, [cluster.launch(command, {})])


@pytest.mark.slow
@pytest.mark.parametrize(("long", "step", "seconds"), [("step 9", 8, 30), ("evaluation 3", 6, 30), ("step 9", 8, 10)])
def test_agent_is_told_to_stop(cluster: Cluster, long: str, step: int, seconds: int) -> None:
    """By torchrun, which kills its worker after 30 s, or as it is told."""
    [node] = cluster.start(*FLAGS, env={"LONG": long, "PET_SHUTDOWN_TIMEOUT": str(seconds)})
    wait_until_long(cluster, 1)
    told_at = time.monotonic()
    node.signal(signal.SIGTERM)
    assert node.wait(60) == 1
    assert time.monotonic() - told_at < seconds - 1
    check_saved(cluster.run_dir, step)
    check_stopped(cluster.run_dir, step, 1)
    check_continued(cluster, cluster.start(*FLAGS))


@pytest.mark.slow
def test_by_a_notice_no_worker_is_started_again(cluster: Cluster) -> None:
    """Though --max-restarts would let its agent."""
    gone = cluster.path / "gone"
    [node] = cluster.start(*FLAGS, "--notices", f"file:{gone}", max_restarts=3, env={"LONG": "step 9"})
    wait_until_long(cluster, 1)
    gone.write_text(json.dumps({"deadline": time.time() + 12}))
    assert node.wait(60) == 1
    check_saved(cluster.run_dir, 8)
    assert len(events(cluster.run_dir, "start")) == 1
    [left] = [event for event in events(cluster.run_dir, "notice") if event["state"] == "left"]
    assert left["seconds_left"] > 0


@pytest.mark.slow
def test_all_nodes_are_told_to_stop(cluster: Cluster) -> None:
    """Each saves, because none can know whether all have got the signal."""
    nodes = cluster.start(*FLAGS, nodes=2, program=("impatient.py",), env={"LONG": "step 9"})
    wait_until_long(cluster, 2)
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait(30) for node in nodes] == [1, 1]
    check_saved(cluster.run_dir, 8)
    check_stopped(cluster.run_dir, 8, 2)
    check_continued(cluster, cluster.start(*FLAGS, nodes=2))


@pytest.mark.slow
def test_all_stop_while_the_one_that_saves_for_all_hangs(cluster: Cluster) -> None:
    """It is known that a save takes a second, so the other node waits for it no longer than until a late stop."""
    flags = (*FLAGS, "--snapshot-every", "12s", "--epochs", "100000")
    nodes = cluster.start(*flags, nodes=2, nnodes="2:2")
    wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "a snapshot", 120)
    [first] = {event["pid"] for event in events(cluster.run_dir, "snapshot")}
    (cluster.path / f"hangs-{first}").touch()
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait(60) for node in nodes] == [1, 1]
    [done] = events(cluster.run_dir, "done")
    assert (done["outcome"], done["pid"] != first) == ("stopped", True)
    assert done["step"] == last_step(cluster.run_dir)
    info, _ = newest_snapshot(cluster.run_dir)
    assert info.step == done["step"]


@pytest.mark.slow
def test_stop_in_a_reduction_that_waits_for_a_frozen_node(cluster: Cluster) -> None:
    flags = (*FLAGS, "--eval-every", "1000", "--epochs", "100000", "--peer-timeout", "120")
    told, frozen = cluster.start(*flags, nodes=2, program=("impatient.py",))
    wait_until(lambda: last_step(cluster.run_dir) >= 20, "step 20", 120)
    [worker] = frozen.workers()
    worker.send_signal(signal.SIGSTOP)
    step = wait_until_still(cluster)
    told.signal(signal.SIGTERM)
    assert told.wait(30) == 1
    [done] = events(cluster.run_dir, "done")
    assert done["step"] - step in (0, 1), "rank 0 may be frozen before it has written what is committed"
    check_saved(cluster.run_dir, done["step"], frozen_at=step)
    frozen.kill()
    last = (step // PER_EPOCH + 3) * PER_EPOCH
    cluster.finish(cluster.start(*flags, "--max-steps", str(last), nodes=2))
    check_steps(cluster.run_dir, last)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last)


@pytest.mark.slow
def test_stop_between_two_worlds_while_another_node_is_in_a_long_step(cluster: Cluster) -> None:
    """One was killed, and the next world waits for the one that is busy, for longer than SIGKILL would."""
    flags = (*FLAGS, "--eval-every", "1000", "--peer-timeout", "120")
    options: dict[str, Any] = {"nnodes": "1:3", "conf": cluster.last_call(60), "program": ("impatient.py",)}
    killed, told = cluster.start(*flags, nodes=2, **options)
    [busy] = cluster.start(*flags, env={"LONG": "step 9"}, **options)
    wait_until_long(cluster, 1)
    killed.kill()
    wait_until(lambda: re.search(r"waiting for .* s so far", told.text()) is not None, "the wait between worlds", 60)
    told.signal(signal.SIGTERM)
    assert told.wait(30) == 1, told.text()
    check_saved(cluster.run_dir, 8)
    busy.kill()


@pytest.mark.slow
def test_one_of_two_nodes_is_told_to_stop(cluster: Cluster) -> None:
    """The other one does the step again, and goes on."""
    options: dict[str, Any] = {"nnodes": "1:2", "conf": cluster.last_call(60), "program": ("impatient.py",)}
    [told] = cluster.start(*FLAGS, env={"LONG": "step 9"}, **options)
    [other] = cluster.start(*FLAGS, **options)
    wait_until_long(cluster, 1)
    told.signal(signal.SIGTERM)
    assert told.wait(30) == 1
    check_continued(cluster, [other])
    assert sorted(e["outcome"] for e in events(cluster.run_dir, "done")) == ["finished", "stopped"]
