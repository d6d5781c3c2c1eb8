"""Workers that are busy for longer than --peer-timeout: nobody who works is expelled, and who dies is noticed."""

from __future__ import annotations

import json

import pytest

from tests.integration.cluster import Cluster, Node, events, wait_until, worlds
from tests.integration.test_in_place import check_run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True),
]
PEER_TIMEOUT = 1.0
BUSY_TASK = """
import json, os, time
import torch.distributed as dist
from elastic_train.training.tasks import ImageClassification

SECONDS = {"first": 0, "each": 0, "hiccup": 0, "evaluation": 0} | json.loads(os.environ["BUSY"])

class Busy(ImageClassification):
    num_losses = 0
    first_rank = None  # ranks change

    def loss(self, module, batch):
        Busy.num_losses += 1
        if Busy.first_rank is None:
            Busy.first_rank = dist.get_rank()
        time.sleep(SECONDS["each"])
        if Busy.first_rank == 1:
            if Busy.num_losses == 1:
                time.sleep(SECONDS["first"])
            if Busy.num_losses == 60 and SECONDS["hiccup"]:
                print("is busy", flush=True)
                time.sleep(SECONDS["hiccup"])
        return super().loss(module, batch)

    def evaluate(self, model, batch):
        if Busy.first_rank == 0:
            time.sleep(SECONDS["evaluation"])
        return super().evaluate(model, batch)
"""
FLAGS = ("--task", "busy:Busy", "--peer-timeout", str(PEER_TIMEOUT), "--ledger", "--epochs", "1000")


@pytest.fixture
def start(cluster: Cluster) -> None:
    (cluster.path / "busy.py").write_text(BUSY_TASK)


def busy_one(nodes: list[Node]) -> Node:
    [found] = wait_until(lambda: [node for node in nodes if "is busy\n" in node.text()], "the busy one", 60)
    return found


def assert_nobody_was_expelled(cluster: Cluster, nodes: list[Node], sizes: list[int]) -> None:
    assert [size for _, size in worlds(cluster.run_dir)] == sizes
    assert not any("went on" in node.text() and "without this worker" in node.text() for node in nodes)
    assert not any("kept the others" in (event["reason"] or "") for event in events(cluster.run_dir, "peer_lost"))


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("hiccup", [4 * PEER_TIMEOUT, pytest.param(12 * PEER_TIMEOUT, marks=pytest.mark.slow)])
def test_one_is_busy_when_another_one_dies(cluster: Cluster, hiccup: float) -> None:
    """The others wait for it with the next world: for three times the peer timeout before anybody asks what it does."""
    env = {"BUSY": json.dumps({"hiccup": hiccup})}
    nodes = cluster.start(*FLAGS, "--eval-every", "1000", "--max-steps", "200", nodes=3, env=env)
    busy = busy_one(nodes)
    [_, killed] = [node for node in nodes if node is not busy]
    killed.kill()
    nodes.remove(killed)
    cluster.finish(nodes)
    check_run(cluster, 200)
    assert_nobody_was_expelled(cluster, nodes, [3, 2])


@pytest.mark.slow
@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(("busy", "seconds", "steps"), [("first", 12.0, 46), ("each", 3.0, 6), ("evaluation", 6.0, 46)])
def test_long_steps_and_evaluations(cluster: Cluster, busy: str, seconds: float, steps: int) -> None:
    env = {"BUSY": json.dumps({busy: seconds})}
    nodes = cluster.start(*FLAGS, "--eval-every", "1", "--max-steps", str(steps), nodes=3, env=env)
    cluster.finish(nodes)
    check_run(cluster, steps)
    assert_nobody_was_expelled(cluster, nodes, [3])
