"""`--rdzv-backend=etcd3` for a script that is not ours: nodes die and join, torchrun's agents restart the workers."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.cluster import TORCHRUN, Cluster, Node, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "tutorial.py"
CONF = "last_call=2,lease=5"
PATIENCE = 300.0
"""seconds: a restart of all workers takes the start of a Python process with torch on each node"""
pytestmark = [pytest.mark.timeout(1200), pytest.mark.parametrize("cluster", ["etcd3"], indirect=True)]


def start(cluster: Cluster, *, steps: int, count: int = 1, nnodes: str = "1:4", conf: str = CONF) -> list[Node]:
    assert cluster.etcd is not None
    command = [
        *TORCHRUN, "--rdzv-backend=etcd3", f"--rdzv-endpoint={cluster.etcd.endpoint}", "--rdzv-id=tutorial",
        f"--nnodes={nnodes}", f"--rdzv-conf={conf}", "--max-restarts=10", str(SCRIPT),
        str(cluster.path / "snapshot.pt"), str(cluster.path / "log.txt"), str(steps),
    ]  # fmt: skip
    return [cluster.launch(command, {}) for _ in range(count)]


def progress(cluster: Cluster) -> list[tuple[int, int]]:
    """(step, world size) of every step, in the order in which they were done."""
    path = cluster.path / "log.txt"
    if not path.exists():
        return []
    return [(int(step), int(size)) for step, size in (line.split() for line in path.read_text().splitlines())]


def wait_for_world(cluster: Cluster, size: int, timeout: float = PATIENCE) -> None:
    wait_until(lambda: progress(cluster)[-1:] and progress(cluster)[-1][1] == size, f"world of {size}", timeout)


@pytest.mark.slow
def test_nodes_of_any_script_die_and_join(cluster: Cluster) -> None:
    assert cluster.etcd is not None
    nodes = start(cluster, steps=900, count=3)
    wait_for_world(cluster, 3)
    nodes[0].kill()
    wait_for_world(cluster, 2)
    nodes += start(cluster, steps=900)
    wait_for_world(cluster, 3)
    cluster.finish(nodes[1:])
    done = progress(cluster)
    assert done[-1][0] == 900
    assert not cluster.etcd.keys(), "the last one took everything away"


@pytest.mark.slow
def test_a_dead_node_at_the_end_holds_nobody_up(cluster: Cluster) -> None:
    """torchrun's exit barrier waits 300 s for it."""
    nodes = start(cluster, steps=60, count=2, nnodes="2:2", conf="last_call=2,lease=20")
    wait_until(lambda: progress(cluster)[-1:] == [(60, 2)], "last step", PATIENCE)
    nodes[1].signal(signal.SIGSTOP)  # the agent alone: it must not arrive at the barrier before it dies
    wait_until(lambda: not nodes[0].workers(), "end of the other's worker", 18)
    nodes[1].process.kill()
    ended = time.monotonic()
    assert nodes[0].wait(100) == 0
    assert time.monotonic() - ended < 60


@pytest.mark.slow
def test_all_who_are_told_to_stop_leave_nothing_behind(cluster: Cluster) -> None:
    """Else a start within the next minutes would join a round of theirs."""
    assert cluster.etcd is not None
    nodes = start(cluster, steps=9000, count=2, conf="last_call=2,lease=60")
    wait_for_world(cluster, 2)
    for node in nodes:
        node.signal(signal.SIGINT)
    assert [node.wait(60) for node in nodes] == [1, 1]
    assert not cluster.etcd.keys()


@pytest.mark.slow
def test_a_spare_node_steps_in(cluster: Cluster) -> None:
    nodes = start(cluster, steps=600, count=2, nnodes="2:2")
    wait_for_world(cluster, 2)
    nodes += start(cluster, steps=600, nnodes="2:2")
    nodes[0].kill()
    before = progress(cluster)[-1][0]
    wait_until(lambda: progress(cluster)[-1][0] > before + 20, "steps with the spare", PATIENCE)
    cluster.finish(nodes[1:])


@pytest.mark.slow
def test_the_death_of_rank_0_costs_one_round(cluster: Cluster) -> None:
    """Its agent served the round's store, which the others' agents must not wait for while their leases run out."""
    assert cluster.etcd is not None
    nodes = start(cluster, steps=100_000, count=3, nnodes="2:3")
    wait_for_world(cluster, 3)
    before = rounds(cluster)
    first = next(node for node in nodes if any(worker.environ()["RANK"] == "0" for worker in node.workers()))
    first.kill()
    wait_for_world(cluster, 2)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert rounds(cluster) == before + 1
        time.sleep(0.5)
    for node in nodes:
        if node is not first:
            node.signal(signal.SIGTERM)
            node.wait(60)


@pytest.mark.slow
def test_a_node_that_dies_while_it_waits_is_not_waited_for(cluster: Cluster) -> None:
    """Its keys outlive it for as long as its lease, and the round is decided with it."""
    assert cluster.etcd is not None
    options = {"nnodes": "3:3", "conf": "last_call=2,lease=30"}
    [first, dead] = start(cluster, steps=100, count=2, **options)
    wait_until(lambda: waiting(cluster) == 2, "two nodes that wait", PATIENCE)
    dead.kill()
    others = start(cluster, steps=100, count=2, **options)
    wait_until(lambda: rounds(cluster) >= 1, "a round with the dead one", PATIENCE)
    cluster.finish([first, *others], timeout=PATIENCE)
    assert {size for _, size in progress(cluster)} == {3}


def waiting(cluster: Cluster) -> int:
    assert cluster.etcd is not None
    return sum("/waiting/" in key for key in cluster.etcd.keys())  # noqa: SIM118


def rounds(cluster: Cluster) -> int:
    """The number of rounds so far; etcd has the newest, and perhaps the one before."""
    assert cluster.etcd is not None
    found = (key.rpartition("/") for key in cluster.etcd.keys())  # noqa: SIM118
    return max((int(number) + 1 for place, _, number in found if place.endswith("/rounds")), default=0)
