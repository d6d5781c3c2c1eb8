"""Nodes die, hang, leave and join; the survivors go on in their own processes, and no committed step is lost."""

from __future__ import annotations

import re
import signal
from typing import Any

import psutil
import pytest

from tests.audits import audit
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_lines,
    events,
    last_step,
    result,
    wait_for_step,
    wait_until,
    worlds,
)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True),
]
LENGTH, BATCH = 1437, 64
ENDLESS = ("--epochs", "1000", "--ledger", "--eval-every", "1000", "--peer-timeout", "2")


def start_world(
    cluster: Cluster, nodes: int, *flags: str, nproc: int = 1, steps: int = 600, nnodes: str | None = None
) -> list[Node]:
    """A world of `nodes` nodes that has committed some steps."""
    started = cluster.start(*ENDLESS, "--max-steps", str(steps), *flags, nodes=nodes, nproc=nproc, nnodes=nnodes)
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", 300)
    wait_until(
        lambda: any(e["world_size"] == nodes * nproc for e in events(cluster.run_dir, "world")),
        f"world of {nodes * nproc}",
        300,
    )
    wait_for_step(cluster.run_dir, 40, 300)
    return started


def start_after_its_host(
    cluster: Cluster,
    max_steps: int,
    *flags: str,
    nnodes: str = "1:3",
    conf: str = "last_call_timeout=60",
    env: dict[str, str] | None = None,
    step: int = 40,
) -> list[Node]:
    """A world of three, by rank, that has come to `step`. Under c10d the first one, started alone, hosts the endpoint
    and has rank 0."""

    def start() -> list[Node]:
        return cluster.start(*ENDLESS, "--max-steps", str(max_steps), *flags, nnodes=nnodes, conf=conf, env=env)

    nodes = start()
    if cluster.etcd is None:
        wait_until(lambda: nodes[0].listens_at(cluster.port), "endpoint", 300)
    nodes += [node for _ in range(2) for node in start()]
    wait_until(lambda: last_step(cluster.run_dir) >= step, f"step {step}", 300)
    assert {e["world_size"] for e in events(cluster.run_dir, "world")} == {3}
    assert cluster.etcd is not None or rank_of(cluster, nodes[0]) == 0
    return sorted(nodes, key=lambda node: rank_of(cluster, node))


def rank_of(cluster: Cluster, node: Node) -> int:
    """The newest rank of a node's first worker."""
    pids = {worker.pid for worker in node.workers()}
    return int([e["rank"] for e in events(cluster.run_dir, "world") if e["pid"] in pids][-1])


def node_with_rank(cluster: Cluster, nodes: list[Node], rank: int) -> Node:
    return next(node for node in nodes if rank_of(cluster, node) == rank)


def check_run(cluster: Cluster, steps: int, batch: int = BATCH) -> dict[str, Any]:
    """What must hold of every run: the ledger's law, every committed step once, generations a chain, phases sum up."""
    end = result(cluster.run_dir)
    assert end["step"] == steps
    check_ledger([cluster.run_dir], length=LENGTH, batch=batch, steps=steps)
    check_steps(cluster.run_dir, steps)
    worlds: dict[int, set[tuple[str, ...]]] = {}
    for event in events(cluster.run_dir, "world"):
        worlds.setdefault(event["generation"], set()).add(tuple(event["members"]))
    assert all(len(memberships) == 1 for memberships in worlds.values()), "two worlds of one generation"
    assert all(incident["committed_steps_lost"] == 0 for incident in end["incidents"])
    assert sum(v for k, v in end["goodput"].items() if k not in ("wall", "ratio")) == pytest.approx(
        end["wall_seconds"], abs=0.05
    )
    epochs, in_epoch = divmod(steps, -(-LENGTH // batch))
    assert end["bill"]["kept_samples"] == epochs * LENGTH + in_epoch * batch
    assert end["bill"]["node_seconds"]["paid"] >= end["wall_seconds"] - end["goodput"]["down"] - 0.05, "one at least"
    assert end["bill"]["node_seconds"]["kept"] >= end["goodput"]["train"] - 0.05
    return end


@pytest.mark.slow
def test_a_killed_node_costs_the_others_no_step(cluster: Cluster) -> None:
    nodes = start_world(cluster, 3)
    pids = [node.workers()[0].pid for node in nodes]
    victim = nodes[1] if rank_of(cluster, nodes[1]) != 0 else nodes[2]
    victim.kill()
    survivors = [node for node in nodes if node is not victim]
    cluster.finish(survivors)
    end = check_run(cluster, 600)
    assert [incident["cause"] for incident in end["incidents"]] == ["peer_lost"]
    assert sum(end["incidents"][0]["seconds"].values()) < 2.0
    writers = {e["pid"] for e in events(cluster.run_dir, "done") if e["outcome"] == "finished"}
    assert writers == {pid for pid, node in zip(pids, nodes, strict=True) if node is not victim}, "the same processes"


@pytest.mark.slow
def test_the_node_of_rank_0_is_killed(cluster: Cluster) -> None:
    nodes = start_world(cluster, 3, steps=400)
    first = node_with_rank(cluster, nodes, 0)
    first.kill()
    cluster.finish([node for node in nodes if node is not first])
    check_run(cluster, 400)


@pytest.mark.slow
def test_two_nodes_are_killed_at_once(cluster: Cluster) -> None:
    nodes = start_world(cluster, 4)
    for node in nodes[2:]:
        for worker in node.workers():
            worker.kill()
    for node in nodes[2:]:
        node.kill()
    cluster.finish(nodes[:2])
    check_run(cluster, 600)


@pytest.mark.slow
def test_one_worker_of_a_node_with_two_is_killed(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, "--num-workers", "1", nproc=2)
    nodes[1].workers()[1].kill()
    assert nodes[1].wait(60) != 0
    cluster.finish(nodes[:1])
    end = check_run(cluster, 600)
    assert end["incidents"][0]["cause"] == "peer_lost"
    detect = end["incidents"][0]["seconds"]["detect"]
    assert detect < 1.0, "no forked child kept the dead worker's sockets open"


@pytest.mark.slow
def test_only_the_agent_is_killed(cluster: Cluster) -> None:
    nodes = start_world(cluster, 3)
    worker = nodes[2].workers()[0]
    nodes[2].process.kill()
    psutil.wait_procs([worker], timeout=5)
    assert not worker.is_running(), "the worker died with its agent"
    cluster.finish(nodes[:2])
    check_run(cluster, 600)


def freeze_and_thaw(cluster: Cluster, node: Node, patience: float) -> psutil.Process:
    """One of three nodes is left behind, and comes back, each followed by some steps. Returns its worker, the same.

    Args:
        patience: seconds that the others may take to go on, and half of what it may take to come back.
    """
    [worker] = node.workers()
    frozen = [worker, psutil.Process(node.process.pid)]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2", patience)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 50)
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 3, "world of 3 again", 2 * patience)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 50)
    assert [one.pid for one in node.workers()] == [worker.pid]
    return worker


def test_a_frozen_node_is_left_behind_and_comes_back_in_its_own_process(cluster: Cluster) -> None:
    nodes = start_world(cluster, 3, steps=1_000_000)
    victim = next(node for node in nodes[1:] if rank_of(cluster, node) != 0)
    worker = freeze_and_thaw(cluster, victim, 15)
    stay = [one for node in nodes if node is not victim for one in node.workers()]
    for count in (psutil.Process.num_threads, psutil.Process.num_fds):
        assert count(worker) <= max(map(count, stay)) + 2, "nothing of the member that it was is left"
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait(60)
    assert "the others went on" in victim.text()
    assert "comes back as a newcomer" in victim.text()
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)
    [second] = [e for e in events(cluster.run_dir, "start") if "was" in e]
    assert second["pid"] == worker.pid
    causes = [e["cause"] for e in events(cluster.run_dir, "world") if e["rank"] == 0]
    assert causes == ["start", "peer_lost", "join"]
    check_steps(cluster.run_dir, last_step(cluster.run_dir))


@pytest.mark.slow
def test_a_thawed_node_goes_on_with_the_one_that_waits_for_it(cluster: Cluster) -> None:
    """One is frozen, and before that is found out rank 0 dies: the third waits, as the other may train on."""
    if cluster.etcd is not None:
        pytest.skip("under etcd the third one goes on")
    nodes = start_world(cluster, 3, "--peer-timeout", "10", steps=1_000_000)
    by_rank = {rank_of(cluster, node): node for node in nodes}
    frozen = [*by_rank[1].workers(), psutil.Process(by_rank[1].process.pid)]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    by_rank[0].kill()
    wait_until(lambda: "waiting for contact" in by_rank[2].text(), "wait", 40)
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 50, 8)
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 2]
    for rank in (1, 2):
        by_rank[rank].signal(signal.SIGTERM)
    for rank in (1, 2):
        by_rank[rank].wait(60)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.slow
def test_of_two_nodes_the_first_freezes_and_the_other_goes_on(cluster: Cluster) -> None:
    """Under c10d by a claim in the run directory that they share; the first comes back."""
    nodes = start_world(cluster, 2, steps=1_000_000)
    first = node_with_rank(cluster, nodes, 0)
    [worker] = first.workers()
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 1, "world of 1", 30)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 50)
    if cluster.etcd is None:
        assert [path.name.rpartition("-")[2] for path in (cluster.run_dir / "claims").glob("claim-*")] == ["0"]
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2 again", 30)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 50)
    assert first.workers() == [worker]
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait(60)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_node_told_to_stop_leaves_without_an_error(cluster: Cluster, signum: int) -> None:
    nodes = start_world(cluster, 3)
    [worker] = nodes[2].workers()
    nodes[2].signal(signum)
    assert nodes[2].wait(30) != 0
    cluster.finish(nodes[:2])
    end = check_run(cluster, 600)
    assert [incident["cause"] for incident in end["incidents"]] == ["leave"]
    for node in nodes[:2]:
        assert "Traceback" not in node.text()
        assert not error_lines(node)  # torch logs the frames of a store's client whose server has just left
    assert any(re.search(rf"/0/{worker.pid} left\b", node.text()) for node in nodes[:2]), "a line says who left"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_node_is_told_to_stop(cluster: Cluster, signum: int) -> None:
    """Under c10d it hosts the endpoint; the others go on to the end all the same."""
    if cluster.etcd is not None:
        pytest.skip("under etcd no node hosts anything")
    nodes = start_after_its_host(cluster, 1200)
    nodes[0].signal(signum)
    assert nodes[0].wait(30) != 0
    cluster.finish(nodes[1:])
    end = check_run(cluster, 1200)
    assert [incident["cause"] for incident in end["incidents"]] == ["leave"]


@pytest.mark.slow
def test_a_node_joins_and_no_step_is_lost(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, steps=2000, nnodes="2:3")
    nodes += cluster.start(*ENDLESS, "--max-steps", "2000")
    wait_until(lambda: any(e["world_size"] == 3 for e in events(cluster.run_dir, "world")), "world of 3", 40)
    [newcomer] = nodes[2].workers()
    cluster.finish(nodes)
    end = check_run(cluster, 2000)
    assert [incident["cause"] for incident in end["incidents"]] == ["join"]
    told = [e["incidents"] for e in events(cluster.run_dir, "world") if e["generation"] == 1]
    names = [[(one["cause"], one["step"], one["joined_members"]) for one in some] for some in told]
    assert len(names) == 3
    assert all(found == names[0] for found in names), "also to the newcomer, which may write the result"
    assert names[0][0][2][0].endswith(f"/{newcomer.pid}")
    restored = [e for e in events(cluster.run_dir, "restore") if e["generation"] == 1]
    assert [e["source"] for e in restored] == ["peer"], "the newcomer's; the others have the state"


@pytest.mark.slow
def test_a_killed_node_comes_back(cluster: Cluster) -> None:
    nodes = start_world(cluster, 3, steps=2000)
    nodes[2].kill()
    wait_until(lambda: any(e["generation"] == 1 for e in events(cluster.run_dir, "world")), "re-formed world", 15)
    nodes[2] = cluster.start(*ENDLESS, "--max-steps", "2000")[0]
    wait_until(
        lambda: any(e["generation"] == 2 and e["world_size"] == 3 for e in events(cluster.run_dir, "world")),
        "world of 3 again",
        120,
    )
    cluster.finish(nodes)
    check_run(cluster, 2000)
