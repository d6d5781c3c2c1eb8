"""A survivor whose state differs from the others': the next world finds it before it spreads."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.audits import audit
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    error_lines,
    events,
    last_step,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import BATCH, ENDLESS, LENGTH, check_run, start_world

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("cluster", ["c10d", "etcd3"], indirect=True),
    pytest.mark.slow,
]
# In the step in which one of four dies, in which nobody's gradient counts, some of the others' memory is changed.
BAD_MEMORY = """
import json, os, signal, time
from pathlib import Path
import torch, torch.distributed as dist
from elastic_train.training.tasks import ImageClassification

PLAN = json.loads(os.environ.get("BAD_MEMORY", "{}"))

class BadMemory(ImageClassification):
    num_losses = 0
    first_rank = None  # ranks change

    def build_optimizer(self, model):
        BadMemory.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return BadMemory.optimizer

    def loss(self, module, batch):
        BadMemory.num_losses += 1
        if BadMemory.first_rank is None:
            BadMemory.first_rank = dist.get_rank() if dist.is_initialized() else 0
        if PLAN and BadMemory.num_losses == PLAN["at"]:
            self.harm()
        return super().loss(module, batch)

    @torch.no_grad()
    def harm(self):
        parameters = self.optimizer.param_groups[0]["params"]
        change = PLAN["changes"].get(str(BadMemory.first_rank), 0.0)
        if change == "momentum":
            self.optimizer.state[parameters[-1]]["momentum_buffer"].view(-1)[0] *= -1
        else:
            parameters[0].view(-1)[5] += change
        Path(f"harmed-{BadMemory.first_rank}").touch()
        if BadMemory.first_rank == 3:
            deadline = time.monotonic() + 60  # all have committed the step before
            while len(list(Path().glob("harmed-*"))) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = 130
LAST = 60
"""committed step before the harm"""
FLAGS = (
    *("--task", "bad:BadMemory", "--ledger", "--epochs", "1000", "--eval-every", "1000", "--max-steps", str(STEPS)),
    *("--reduction", "ordered", "--virtual-ranks", "4"),
)


@pytest.fixture
def start(cluster: Cluster) -> None:
    (cluster.path / "bad.py").write_text(BAD_MEMORY)


def run(cluster: Cluster, changes: dict[str, Any], *flags: str, code: int = 0) -> list[Node]:
    """A run in which rank 3 dies in the step after `LAST`, while the memory of others changes; those others."""
    env = {"BAD_MEMORY": json.dumps({"changes": changes, "at": LAST + 1})}
    nodes = cluster.start(*FLAGS, *flags, nodes=4, env=env)
    [dead] = wait_until(lambda: [node for node in nodes if node.process.poll() is not None], "death", 120)
    others = [node for node in nodes if node is not dead]
    cluster.finish(others, code)
    return others


def undisturbed_hash(cluster: Cluster) -> str:
    path = cluster.path / "undisturbed"
    path.mkdir()
    with running(path) as alone:
        (path / "bad.py").write_text(BAD_MEMORY)
        alone.finish([alone.start_alone(*FLAGS)])
        return str(result(alone.run_dir)["state_sha256"])


def members_at_first(cluster: Cluster) -> list[str]:
    return list(events(cluster.run_dir, "world")[0]["members"])


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    "changes",
    [{"0": "momentum"}, {"1": 1e-3}],
    ids=["momentum-of-rank-0", "weight"],
)
def test_the_majority_is_right_and_the_bits_are_those_of_an_undisturbed_run(
    cluster: Cluster, changes: dict[str, Any]
) -> None:
    nodes = run(cluster, changes, "--snapshot-every", "0")
    end = check_run(cluster, STEPS)
    own = f"this worker has not the weights or optimizer state that most have after step {LAST}: it takes over theirs"
    assert [own in node.text() for node in nodes].count(True) == 1, "on its own terminal"
    found = audit(cluster.run_dir)
    assert found.passed, found.reasons
    wrong = members_at_first(cluster)[int(*changes)]
    told = events(cluster.run_dir, "states_differ")
    assert {tuple(event["wrong"]) for event in told} == {(wrong,)}
    assert all(event["has_majority"] and event["step"] == LAST for event in told)
    assert [size for _, size in worlds(cluster.run_dir)] == [4, 3, 3]
    [restored] = [event for event in events(cluster.run_dir, "restore") if event["step"] > 0]
    assert (restored["source"], restored["restored_step"]) == ("peer", LAST)
    assert [entry["cause"] for entry in end["incidents"]] == ["peer_lost", "states_differ"]
    assert end["state_sha256"] == undisturbed_hash(cluster)


@pytest.mark.usefixtures("start")
def test_without_a_majority_the_newest_snapshot_counts(cluster: Cluster) -> None:
    run(cluster, {"1": 1e-3, "2": 2e-3}, "--snapshot-every", "25")
    told = events(cluster.run_dir, "states_differ")
    assert not any(event["has_majority"] for event in told)
    restored = [event for event in events(cluster.run_dir, "restore") if event["restored_step"] > 0]
    assert {(event["source"], event["restored_step"]) for event in restored} == {("snapshot", 50)}
    end = result(cluster.run_dir)
    assert sum(entry["committed_steps_lost"] for entry in end["incidents"]) == LAST - 50
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=STEPS)
    found = audit(cluster.run_dir)
    assert found.passed, found.reasons
    assert end["state_sha256"] == undisturbed_hash(cluster)


@pytest.mark.usefixtures("start")
def test_without_a_snapshot_too_it_ends_in_one_line(cluster: Cluster) -> None:
    nodes = run(cluster, {"1": 1e-3, "2": 2e-3}, "--snapshot-every", "0", code=1)
    for node in nodes:
        [line] = error_lines(node)
        assert "states of 3 workers differ, without a majority, and no snapshot" in line


# Its optimizer warms up by a count that its state does not have: a newcomer, which is given the state, begins it anew.
COUNTS_BESIDE = """
import torch
from elastic_train.training.tasks import ImageClassification

class Warming(torch.optim.SGD):
    num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= min(1.0, self.num_steps / 20)
        return super().step(closure)

class CountsBeside(ImageClassification):
    def build_optimizer(self, model):
        return Warming(model.parameters(), lr=0.01, momentum=0.9)
"""


def test_a_newcomer_that_does_not_do_as_the_others_is_told(cluster: Cluster) -> None:
    """It has the state within its first step; in the second one it differs from those who gave it, and takes it again.
    Three are there by then: two, who had it, are right."""
    (cluster.path / "beside.py").write_text(COUNTS_BESIDE)
    flags = ("--task", "beside:CountsBeside")
    nodes = start_world(cluster, 2, *flags, steps=1000000, nnodes="2:4")
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000", *flags)
    wait_until(lambda: events(cluster.run_dir, "states_differ"), "comparison", 200)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    told = [event for event in events(cluster.run_dir, "states_differ") if event.get("is_mended", True)]
    newcomer = events(cluster.run_dir, "world")[-1]["members"][2]
    assert {(tuple(event["wrong"]), event["has_majority"]) for event in told} == {((newcomer,), True)}
    own = "this worker has not the weights or optimizer state that most have after step "
    assert [own in node.text() for node in nodes] == [False, False, True]
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    assert not any("are not compared any more" in node.text() for node in nodes)
