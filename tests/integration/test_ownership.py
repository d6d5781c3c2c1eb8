"""Owners of run directories: jobs that share one by mistake, and nodes that share none."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_train.examples import elastic_ddp
from elastic_train.training.state import state_sha256
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    error_line,
    error_lines,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    result,
    snapshot_names,
    wait_for_step,
    wait_until,
    worlds,
)

LENGTH, BATCH = 1437, 64
ENDLESS = ("--epochs", "100000", "--snapshot-every", "5")


def stop_workers(node: Node, signum: int = signal.SIGSTOP) -> list[psutil.Process]:
    workers = node.workers()
    for worker in workers:
        worker.send_signal(signum)
    if signum == signal.SIGSTOP:
        wait_until(lambda: all(worker.status() == psutil.STATUS_STOPPED for worker in workers), "stopped workers")
    return workers


def whole_snapshots(run_dir: Path) -> list[str]:
    return [name for name in snapshot_names(run_dir) if not name.startswith(".")]


@pytest.mark.slow
def test_two_jobs_on_one_run_directory_and_a_stale_writer(cluster: Cluster) -> None:
    """While the first job lives the second is refused. While it is stopped (SIGSTOP) the second takes over; the first
    finds that out when it wakes up, and does no harm."""
    [first] = cluster.start(*ENDLESS, nproc=2)
    wait_for_step(cluster.run_dir, 10)
    second = cluster.start_alone(*ENDLESS)
    assert second.wait() == 1
    line = error_line(second)
    assert str(cluster.run_dir) in line
    assert "in use" in line
    assert any(f"pid {worker.pid}" in line for worker in first.workers()), "the refusal names the owner"
    at = last_step(cluster.run_dir)
    wait_for_step(cluster.run_dir, at + 5)  # the first goes on undisturbed

    stale = stop_workers(first)
    newest = newest_snapshot(cluster.run_dir)[0]
    third = cluster.start_alone("--epochs", "100000", "--snapshot-every", "5", "--max-steps", str(newest.step + 60))
    cluster.finish([third])
    names = whole_snapshots(cluster.run_dir)  # the stopped writer may have been in the middle of one
    written = (cluster.run_dir / "result.json").read_bytes()
    assert worlds(cluster.run_dir) == [(0, 2), (1, 1)]
    own = [line for line in events(cluster.run_dir, "restore") if line["generation"] == 1]
    assert [line["restored_step"] for line in own] == [newest.step]

    for worker in stale:
        worker.send_signal(signal.SIGCONT)
    assert first.wait() == 1
    errors = error_lines(first)
    assert errors, first.text()
    assert any("now belongs to another job" in line and f"pid {third.process.pid}" in line for line in errors)
    assert "Traceback" not in "\n".join(line for line in first.text().splitlines() if "elastic_train" in line)
    assert whole_snapshots(cluster.run_dir) == names
    assert newest_snapshot(cluster.run_dir)[0].step == newest.step + 60
    assert (cluster.run_dir / "result.json").read_bytes() == written
    # rank 1 had no time to find out: torchrun stopped it when rank 0 had ended
    assert outcomes(cluster.run_dir)[-2:] in (["failed", "failed"], ["failed", "stopped"])

    again = cluster.start_alone("--epochs", "100000", "--max-steps", str(newest.step + 60))
    cluster.finish([again])
    assert outcomes(cluster.run_dir)[-1] == "already_finished"


@pytest.mark.slow
def test_run_directories_that_are_local_to_each_node(cluster: Cluster) -> None:
    """Regular snapshots lie on the node of rank 0 alone, those of a stop on every node; the one that has the newest
    leads, and hands it to the others."""
    run_dirs = {host: cluster.path / host for host in ("a", "b")}
    flags = ("--ledger", *ENDLESS)

    def start(hosts: str, *more: str) -> dict[str, Node]:
        started = {}
        for host in hosts:
            nnodes = f"{len(hosts)}:{len(hosts)}"
            [started[host]] = cluster.start(*flags, *more, run_dir=run_dirs[host], nnodes=nnodes)
        return started

    def newest_world() -> tuple[int, str]:
        """(generation, node of rank 0) of the last one"""
        found = [(generation, host) for host, run_dir in run_dirs.items() for generation, world_size in worlds(run_dir)]
        return max(found, default=(-1, ""))

    def restored_in_second_world(host: str) -> list[dict[str, Any]]:
        return [e for e in events(run_dirs[host], "restore") if e["generation"] == 1]

    # 1. The disk of rank 0 alone has snapshots.
    start("ab")
    wait_until(lambda: newest_world()[0] == 0, "first world")
    had_rank_0 = newest_world()[1]
    other = "b" if had_rank_0 == "a" else "a"
    wait_for_step(run_dirs[had_rank_0], 17)
    cluster.kill()
    assert snapshot_names(run_dirs[other]) == []
    newest = newest_snapshot(run_dirs[had_rank_0])[0]
    # Without it nothing begins anew, though the other has never heard of a snapshot.
    [alone] = start(other, "--max-steps", "60").values()
    cluster.finish([alone], code=1)
    [line] = error_lines(alone)
    assert "of this run at least (generation 0), with a snapshot due every 5 steps" in line

    # 2. It leads again, though it comes last, and the other goes on from what it has never seen.
    nodes = start(other + had_rank_0)
    wait_until(lambda: newest_world()[0] == 1, "second world")
    assert newest_world()[1] == had_rank_0
    for host in "ab":
        # The other one may write this a moment later.
        wait_until(lambda host=host: restored_in_second_world(host), "the second world's state")
        [restored] = restored_in_second_world(host)
        assert (restored["source"], restored["restored_step"]) == ("snapshot", newest.step)

    def newest_step() -> int:
        """Of the second world: the killed processes may have come further than their newest snapshot."""
        found = [e["step"] for e in events(run_dirs[had_rank_0], "step") if e["generation"] == 1]
        return max(found, default=0)

    wait_until(lambda: newest_step() >= newest.step + 7, "some steps of the second world")
    for node in nodes.values():
        node.signal(signal.SIGTERM)
    cluster.finish(list(nodes.values()), code=1)
    stopped_at = newest_step()
    assert {newest_snapshot(run_dir)[0].step for run_dir in run_dirs.values()} == {stopped_at}

    # 3. The node that never was rank 0 goes on alone: the stop left it a snapshot of its own.
    end = stopped_at + 20
    moved = run_dirs[had_rank_0].with_name("switched-off")
    shutil.move(run_dirs[had_rank_0], moved)
    [last] = start(other, "--max-steps", str(end)).values()
    cluster.finish([last])
    assert events(run_dirs[other], "restore")[-1]["restored_step"] == stopped_at
    summary = result(run_dirs[other])
    assert (summary["step"], summary["generations"]) == (end, 3)
    generations = [event["generation"] for event in events(run_dirs[other], "world")]
    assert generations == [0, 1, 2]
    check_ledger([run_dirs[other], moved], length=LENGTH, batch=BATCH, steps=end)


@pytest.mark.slow
def test_every_node_gets_the_same_result(cluster: Cluster) -> None:
    """Nodes without a shared directory; one lost its result.json and gets back the bytes of the other."""
    run_dirs = [cluster.path / host for host in "ab"]

    def run() -> None:
        cluster.finish(
            [
                *cluster.start("--max-steps", "12", run_dir=run_dirs[0], nnodes="2:2"),
                *cluster.start("--max-steps", "12", run_dir=run_dirs[1], nnodes="2:2"),
            ]
        )

    run()
    files = [run_dir / "result.json" for run_dir in run_dirs]
    data = files[0].read_bytes()
    assert files[1].read_bytes() == data
    assert result(run_dirs[0])["step"] == 12
    files[0].unlink()
    run()
    assert [file.read_bytes() for file in files] == [data, data]
    assert [outcomes(run_dir) for run_dir in run_dirs] == [["finished", "already_finished"]] * 2


OWN_LOOP = (str(Path(elastic_ddp.__file__)),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "program"),
    [
        (("--max-steps", "12"), OWN_LOOP),
        (("--max-steps", "12", "--ema-decay", "0.9"), ("-m", "elastic_train")),
    ],
    ids=["own loop", "averaged"],
)
def test_the_last_snapshot_of_each_node_has_the_weights_of_the_result(
    cluster: Cluster, flags: tuple[str, ...], program: tuple[str, ...]
) -> None:
    """BatchNorm's statistics are each rank's own while it trains. Here no evaluation makes rank 0's everybody's: there
    is no test set, or it is the averaged weights that are evaluated."""
    run_dirs = [cluster.path / host for host in "ab"]
    nodes = [cluster.start(*flags, run_dir=run_dir, nnodes="2:2", program=program)[0] for run_dir in run_dirs]
    cluster.finish(nodes)
    first, second = (newest_snapshot(run_dir)[1] for run_dir in run_dirs)
    hashes = [result(run_dir)["state_sha256"] for run_dir in run_dirs]
    assert [state_sha256(state["model"]) for state in (first, second)] == hashes
    torch.testing.assert_close(second["extras"], first["extras"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_directory_that_is_removed_while_it_trains(cluster: Cluster) -> None:
    """It is made anew by all who share it: nothing that is computed is lost, and the same command goes on."""
    flags = ("--reduction", "ordered", "--max-steps", "3000", "--epochs", "200", "--snapshot-every", "20")
    undisturbed = cluster.start_alone(*flags, run_dir=cluster.path / "undisturbed")
    assert undisturbed.wait() == 0
    first, second = cluster.start(*flags, nodes=2)
    wait_for_step(cluster.run_dir, 100)
    shutil.rmtree(cluster.run_dir, ignore_errors=True)  # they write into it meanwhile
    wait_until(lambda: any("was removed or moved" in node.text() for node in (first, second)), "that it is told")
    wait_for_step(cluster.run_dir, 200)
    second.kill()
    wait_until(lambda: any(e["world_size"] == 1 for e in events(cluster.run_dir, "world")), "the world of one")
    first.signal(signal.SIGTERM)
    assert first.wait() == 1
    again = cluster.start_alone(*flags)
    assert again.wait() == 0
    assert [event["source"] for event in events(cluster.run_dir, "restore")][-1] == "snapshot"
    assert result(cluster.run_dir)["state_sha256"] == result(cluster.path / "undisturbed")["state_sha256"]
