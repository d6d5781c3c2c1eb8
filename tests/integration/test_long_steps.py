"""Workers that are busy for longer than --peer-timeout: none of them is expelled, and deaths are noticed."""

from __future__ import annotations

import pytest

from elastic_train.tools.drills.jobs import BUNDLED_TASK
from elastic_train.tools.drills.task import HICCUP
from tests.integration.cluster import Cluster, Node, events, wait_until, worlds
from tests.integration.test_in_place import check_run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True),
]
PEER_TIMEOUT = 1.0
FLAGS = ("--task", BUNDLED_TASK, "--peer-timeout", str(PEER_TIMEOUT), "--ledger", "--epochs", "1000")


def busy_one(nodes: list[Node]) -> Node:
    [found] = wait_until(lambda: [node for node in nodes if HICCUP in node.text()], "the busy one", 60)
    return found


def assert_nobody_was_expelled(cluster: Cluster, nodes: list[Node], sizes: list[int]) -> None:
    assert [size for _, size in worlds(cluster.run_dir)] == sizes
    assert not any("went on" in node.text() and "without this worker" in node.text() for node in nodes)
    assert not any("kept the others" in (event["reason"] or "") for event in events(cluster.run_dir, "peer_lost"))


@pytest.mark.slow
@pytest.mark.parametrize("hiccup", [4 * PEER_TIMEOUT, 12 * PEER_TIMEOUT])
def test_one_is_busy_when_another_one_dies(cluster: Cluster, hiccup: float) -> None:
    """The others wait for it with the next world: for three times the peer timeout before anybody asks what it does."""
    is_busy = ("--busy-rank", "1", "--hiccup-seconds", str(hiccup), "--hiccup-every", "60")
    nodes = cluster.start(*FLAGS, "--eval-every", "1000", "--max-steps", "100", *is_busy, nodes=3)
    busy = busy_one(nodes)
    [_, killed] = [node for node in nodes if node is not busy]
    killed.kill()
    nodes.remove(killed)
    cluster.finish(nodes)
    check_run(cluster, 100)
    assert_nobody_was_expelled(cluster, nodes, [3, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--first-step-seconds", "12", "--busy-rank", "1"), 46),
        (("--step-seconds", "3"), 6),
        (("--evaluation-seconds", "12", "--busy-rank", "0"), 46),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_long_steps_and_evaluations(cluster: Cluster, flags: tuple[str, ...], steps: int) -> None:
    nodes = cluster.start(*FLAGS, "--eval-every", "1", "--max-steps", str(steps), *flags, nodes=3)
    cluster.finish(nodes)
    check_run(cluster, steps)
    assert_nobody_was_expelled(cluster, nodes, [3])
