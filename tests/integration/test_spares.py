"""More workers than a step has work for: the surplus wait, replace lost ones, and do not disturb the others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_train.tools.audit.record import PACE_FILE, PACE_VARIABLE, set_pace
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    events,
    is_listening,
    kill_at_once,
    last_step,
    newest_snapshot,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)

LENGTH, BATCH = 1437, 64
ENDLESS = ("--epochs", "1000", "--ledger", "--eval-every", "1000", "--peer-timeout", "2")
TWO_SHARDS = (*ENDLESS, "--reduction", "ordered", "--virtual-ranks", "2")


def spare_of(cluster: Cluster, nodes: list[Node]) -> Node:
    """The node whose worker says that it is a spare."""
    return wait_until(lambda: next((n for n in nodes if "this worker is a spare" in n.text()), None), "spare")


@pytest.mark.slow
def test_a_spare_steps_in_for_a_killed_worker(cluster: Cluster) -> None:
    """In ordered mode, with two virtual ranks and three workers: the same bits, in a world as large as before."""
    nodes = cluster.start(*TWO_SHARDS, "--max-steps", "600", nodes=3, nnodes="1:3")
    spare = spare_of(cluster, nodes)
    wait_for_step(cluster.run_dir, 40)
    victim = next(node for node in nodes if node is not spare)
    victim.kill()
    cluster.finish([node for node in nodes if node is not victim])
    end = result(cluster.run_dir)
    assert worlds(cluster.run_dir) == [(0, 2), (1, 2)]
    assert [len(e["members"]) for e in events(cluster.run_dir, "world") if e["rank"] == 0] == [3, 2]
    [pid] = {e["pid"] for e in events(cluster.run_dir, "warning") if "spare" in e["message"]}
    [restored] = [e for e in events(cluster.run_dir, "restore") if e["pid"] == pid]
    assert restored["source"] == "peer"
    assert restored["restored_step"] >= 40
    assert [incident["committed_steps_lost"] for incident in end["incidents"]] == [0]
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=600)

    path = cluster.path / "undisturbed"
    path.mkdir()
    with running(path) as alone:
        alone.finish([alone.start_alone(*TWO_SHARDS, "--max-steps", "600")])
        expected = result(alone.run_dir)
    assert end["state_sha256"] == expected["state_sha256"]


@pytest.mark.slow
def test_who_waited_to_be_admitted_goes_on_from_what_was_saved_meanwhile(cluster: Cluster) -> None:
    """Of one node at most, the second waits; the first is told to stop, and writes its first snapshot then."""
    flags = (*ENDLESS, "--task", "elastic_train.tools.drills.task:PacedDigits", "--snapshot-every", "0")
    pace_file = cluster.path / PACE_FILE
    set_pace(pace_file, 0.001)
    env = {PACE_VARIABLE: str(pace_file)}
    [first] = cluster.start(*flags, "--max-steps", "300", nodes=1, nnodes="1:1", env=env)
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events")
    wait_for_step(cluster.run_dir, 5)
    [second] = cluster.start(*flags, "--max-steps", "300", nodes=1, nnodes="1:1", env=env)
    wait_until(lambda: len(events(cluster.run_dir, "start")) == 2, "the second in the queue", 60)
    first.signal(signal.SIGTERM)
    assert first.wait(60) != 0
    [stopped_at] = [event["step"] for event in events(cluster.run_dir, "done")]
    set_pace(pace_file, 0.0)
    cluster.finish([second])
    restored = events(cluster.run_dir, "restore")[-1]
    assert (restored["source"], restored["restored_step"]) == ("snapshot", stopped_at)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=300)


@pytest.mark.slow
@pytest.mark.parametrize("is_early", [False, True])
def test_who_waited_to_be_admitted_does_not_begin_anew_what_lies_on_the_disk_of_the_dead(
    cluster: Cluster, is_early: bool
) -> None:
    """It would take the run's name, and the snapshots of the other one would go with that one's return. `is_early`: it
    came with the other one, and the run had no name yet."""
    dirs = cluster.path / "one", cluster.path / "two"
    flags = (*ENDLESS, "--snapshot-every", "10")
    nodes = cluster.start(*flags, nodes=1, nnodes="1:1", run_dir=dirs[0])
    if not is_early:
        wait_for_step(dirs[0], 25)
    nodes += cluster.start(*flags, nodes=1, nnodes="1:1", run_dir=dirs[1])
    first = wait_until(lambda: next((i for i in (0, 1) if last_step(dirs[i]) >= 25), -1) + 1, "a step", 120) - 1
    second = nodes[1 - first]
    wait_until(lambda: "this one waits for a place" in second.text(), "the second in the queue", 60)
    nodes[first].kill()
    assert second.wait(60) == 1
    assert "all workers that had the state are gone, and no snapshot of their run can be seen here" in second.text()
    assert events(dirs[1 - first], "restore") == []


@pytest.mark.slow
def test_a_spare_is_all_that_is_left(cluster: Cluster) -> None:
    """The only worker is killed: its spare has no state, and goes on from the newest snapshot of that very run."""
    flags = (*ENDLESS, "--reduction", "ordered", "--virtual-ranks", "1", "--snapshot-every", "10")
    nodes = cluster.start(*flags, "--max-steps", "300", nodes=2, nnodes="1:2")
    spare = spare_of(cluster, nodes)
    wait_for_step(cluster.run_dir, 60)
    [victim] = [node for node in nodes if node is not spare]
    victim.kill()
    cluster.finish([spare])
    end = result(cluster.run_dir)
    restored = events(cluster.run_dir, "restore")[-1]
    assert (restored["source"], restored["generation"]) == ("snapshot", 1)
    assert restored["restored_step"] >= 10
    assert end["step"] == 300
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=300)


@pytest.mark.slow
def test_a_spare_does_not_begin_anew_what_others_had_trained(cluster: Cluster) -> None:
    flags = (*ENDLESS, "--reduction", "ordered", "--virtual-ranks", "1", "--snapshot-every", "0")
    nodes = cluster.start(*flags, "--max-steps", "100000", nodes=2, nnodes="1:2")
    spare = spare_of(cluster, nodes)
    wait_for_step(cluster.run_dir, 20)
    [victim] = [node for node in nodes if node is not spare]
    victim.kill()
    assert spare.wait(60) == 1
    assert "all workers that had the state are gone" in spare.text()
    assert worlds(cluster.run_dir)[-1] == (0, 1)


@pytest.mark.slow
def test_a_spare_that_was_left_out_goes_on_with_a_node_that_is_started_again(cluster: Cluster) -> None:
    """There is no place for it, as other nodes have come meanwhile, and all of these are killed."""
    flags = (*TWO_SHARDS, "--snapshot-every", "10", "--min-nodes", "1", "--max-steps", "1000000")
    conf = cluster.last_call(30)
    [first] = cluster.start(*flags, nodes=1, nnodes="2:3", conf=conf)
    wait_until(lambda: is_listening(cluster.port), "endpoint")
    nodes = cluster.start(*flags, nodes=2, nnodes="2:3", conf=conf)
    spare = spare_of(cluster, nodes)
    wait_for_step(cluster.run_dir, 20)
    [worker] = spare.workers()
    worker.send_signal(signal.SIGSTOP)
    [second] = (node for node in nodes if node is not spare)
    second.kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 1, "a world of one", 60)
    later = cluster.start(*flags, nodes=2, nnodes="2:3")
    spare_of(cluster, later)
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: "this one waits for a place" in spare.text(), "left out", 60)
    kill_at_once([first, *later])
    saved = newest_snapshot(cluster.run_dir)[0].step
    cluster.start(*flags, nodes=1, nnodes="2:3", conf=conf)
    wait_for_step(cluster.run_dir, saved + 20, 150)
    restored = events(cluster.run_dir, "restore")[-1]
    assert (restored["source"], restored["restored_step"]) == ("snapshot", saved)
    assert worlds(cluster.run_dir)[-1][1] == 2


@pytest.mark.slow
def test_a_spare_comes_and_goes_and_sees_the_end(cluster: Cluster) -> None:
    """In fast mode, two samples per step and four workers on disks of their own: one spare is stopped, one stays."""
    flags = (*ENDLESS, "--global-batch-size", "2")
    nodes = [
        node
        for number in range(4)
        for node in cluster.start(
            *flags, "--max-steps", "700", conf=cluster.last_call(60), run_dir=cluster.path / f"run-{number}"
        )
    ]
    wait_until(lambda: sum("this worker is a spare" in node.text() for node in nodes) == 2, "two spares")
    spares = [node for node in nodes if "this worker is a spare" in node.text()]
    active = [node for node in nodes if node not in spares]
    writer = wait_until(lambda: next((d for d in run_dirs(cluster) if last_step(d) > 5), None), "first steps")
    spares[0].signal(signal.SIGTERM)
    assert spares[0].wait(60) != 0
    assert "a spare leaves" in spares[0].text()
    cluster.finish([*active, spares[1]])
    assert "this spare was not needed" in spares[1].text()
    results = [(d / "result.json").read_bytes() for d in run_dirs(cluster) if (d / "result.json").exists()]
    assert len(results) == 3
    assert len(set(results)) == 1, "the same bytes on every node that saw the end"
    assert result(writer)["incidents"] == [], "nobody was disturbed by the spare that left"
    check_ledger([*run_dirs(cluster)], length=LENGTH, batch=2, steps=700)


def run_dirs(cluster: Cluster) -> list[Path]:
    return [path for path in cluster.path.glob("run-*") if (path / "events").is_dir()]
