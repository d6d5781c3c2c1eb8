"""Deaths, freezes and joins on NCCL, with a real GPU. There the other tests of this folder run on NCCL too: each node
has another NCCL_HOSTID."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.audits import audit
from tests.integration.cluster import (
    Cluster,
    Node,
    check_steps,
    events,
    last_step,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import ENDLESS, check_run, freeze_and_thaw, rank_of
from tests.integration.test_joins import stop_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
NCCL = "cpu:gloo,cuda:nccl"


def start_on_nccl(cluster: Cluster, nodes: int, *flags: str, steps: int) -> list[Node]:
    """Nodes that share a GPU; returns at once."""
    conf = "last_call_timeout=60"
    return cluster.start(*ENDLESS, "--max-steps", str(steps), *flags, nodes=nodes, nnodes="1:3", conf=conf)


def world_on_nccl(cluster: Cluster, *flags: str, steps: int) -> list[Node]:
    """A world of three that has committed some steps."""
    nodes = start_on_nccl(cluster, 3, *flags, steps=steps)
    wait_until(lambda: last_step(cluster.run_dir) >= 40, "step 40", 120)
    assert {(e["world_size"], e["backend"]) for e in events(cluster.run_dir, "world")} == {(3, NCCL)}
    return nodes


def print_seconds(cluster: Cluster) -> None:
    for event in events(cluster.run_dir, "world"):
        if event["rank"] == 0:
            seconds = ", ".join(f"{phase} {taken:.3f}" for phase, taken in event["seconds"].items())
            print(f"{event['cause']} to {event['world_size']} workers: {seconds} s; torch {torch.__version__}")


@pytest.mark.parametrize(
    ("rank", "flags", "steps"), [(0, (), 1_000_000), (1, ("--reduction", "ordered"), 1200)], ids=["fast", "ordered"]
)
def test_a_kill_and_a_join_on_nccl(cluster: Cluster, flags: tuple[str, ...], rank: int, steps: int) -> None:
    """In fast mode two workers of an H100 would be through before a third one has started, so they are stopped."""
    nodes = world_on_nccl(cluster, *flags, steps=steps)
    victim = next(node for node in nodes if rank_of(cluster, node) == rank)
    victim.kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2", 30)
    nodes = [node for node in nodes if node is not victim] + start_on_nccl(cluster, 1, *flags, steps=steps)
    if flags:
        cluster.finish(nodes)
        end = check_run(cluster, steps)
    else:
        wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 3, "world of 3", 120)
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        stop_all(cluster, nodes)
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 2, 3]
    assert {e["backend"] for e in events(cluster.run_dir, "world")} == {NCCL}
    print_seconds(cluster)
    if flags:
        path = cluster.path / "undisturbed"
        path.mkdir()
        with running(path) as alone:
            alone.finish([alone.start_alone(*ENDLESS, "--max-steps", str(steps), *flags)])
            expected = result(alone.run_dir)
        assert end["state_sha256"] == expected["state_sha256"]


def test_a_frozen_worker_on_nccl_is_left_behind_and_comes_back(cluster: Cluster) -> None:
    nodes = world_on_nccl(cluster, steps=1_000_000)
    freeze_and_thaw(cluster, next(node for node in nodes if rank_of(cluster, node) == 1), 30)
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait(60)
    print_seconds(cluster)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)
    check_steps(cluster.run_dir, last_step(cluster.run_dir))
