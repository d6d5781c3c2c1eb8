"""Old runs that appear again, and runs whose snapshots are lost: each is reported."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from elastic_train.storage.snapshot import find_snapshots
from elastic_train.tools.audit.record import PACE_VARIABLE, set_pace
from elastic_train.tools.drills.nodes import wait_until
from tests.integration.cluster import (
    Cluster,
    check_ledger,
    error_line,
    events,
    lines,
    snapshot_names,
    wait_for_step,
)

TIMES = ("--snapshot-every", "10", "--eval-every", "1000")
FLAGS = ("--model", "mlp", *TIMES)


def train(cluster: Cluster, run_dir: Path, steps: int, *flags: str) -> str:
    node = cluster.start_alone(*FLAGS, "--max-steps", str(steps), *flags, run_dir=run_dir)
    cluster.finish([node])
    return node.text()


def refusal(cluster: Cluster, run_dir: Path, *flags: str) -> str:
    node = cluster.start_alone(*FLAGS, "--max-steps", "90", *flags, run_dir=run_dir)
    cluster.finish([node], code=1)
    return error_line(node)


def starts(run_dir: Path) -> list[tuple[str, int]]:
    return [(event["source"], event["restored_step"]) for event in events(run_dir, "restore")]


@pytest.mark.slow
def test_fresh_is_fresh_where_snapshots_lie_elsewhere(cluster: Cluster) -> None:
    elsewhere = cluster.path / "elsewhere"
    train(cluster, cluster.run_dir, 40, "--snapshot-dir", str(elsewhere))
    before = sorted(info.path.name for info in find_snapshots(elsewhere, warn=pytest.fail))
    told = train(cluster, cluster.run_dir, 20, "--snapshot-dir", str(elsewhere), "--fresh")
    assert starts(cluster.run_dir) == [("scratch", 0)]
    [aside] = [path for path in elsewhere.iterdir() if path.name.startswith("before-")]
    assert sorted(path.name for path in aside.iterdir()) == before
    assert f"{len(before)} snapshots in {elsewhere} moved to {aside.name}/" in told
    assert {info.step for info in find_snapshots(elsewhere, warn=pytest.fail)} == {10, 20}


@pytest.mark.slow
def test_a_run_directory_does_not_become_another_runs(cluster: Cluster) -> None:
    """Its own snapshots would be lost sight of."""
    mine, theirs = cluster.path / "mine", cluster.path / "theirs"
    train(cluster, theirs, 30)
    train(cluster, mine, 20, "--lr", "0.01")
    record = (mine / "run.json").read_bytes()
    told = refusal(cluster, mine, "--snapshot-dir", str(theirs / "snapshots"))
    assert "wrote a snapshot of step 20 of this run" in told
    assert "those that are seen here are of another run: give the --snapshot-dir of this run" in told
    assert (mine / "run.json").read_bytes() == record


@pytest.mark.slow
def test_two_jobs_at_one_folder_of_snapshots(cluster: Cluster) -> None:
    """A node with a wrong endpoint and a run directory of its own would go on from the other job's snapshot."""
    elsewhere, other = cluster.path / "elsewhere", cluster.path / "other"
    flags = (*FLAGS, "--snapshot-dir", str(elsewhere), "--epochs", "100000")
    first = cluster.start_alone(*flags)
    wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "a snapshot", 60.0)
    second = cluster.start_alone(*flags, run_dir=other)
    cluster.finish([second], code=1)
    assert f"snapshot directory {elsewhere} is in use by another job (host " in error_line(second)
    assert events(other, "step") == []
    first.signal(signal.SIGTERM)
    cluster.finish([first], code=143)
    third = cluster.start_alone(*flags, "--max-steps", "1", run_dir=cluster.path / "third")
    cluster.finish([third])
    [found] = starts(cluster.path / "third")
    assert found == ("snapshot", max(int(event["step"]) for event in events(cluster.run_dir, "step")))


@pytest.mark.slow
def test_what_is_done_again_is_told(cluster: Cluster) -> None:
    """The newest snapshots lie elsewhere, and the flag that says where was forgotten."""
    elsewhere = cluster.path / "elsewhere"
    train(cluster, cluster.run_dir, 20)
    shutil.copytree(cluster.run_dir / "snapshots", elsewhere)
    train(cluster, cluster.run_dir, 50, "--snapshot-dir", str(elsewhere))
    told = train(cluster, cluster.run_dir, 60)
    assert "from the snapshot of step 20" in told
    assert "(30 committed steps that came after it are done again)" in told


@pytest.mark.slow
def test_an_absent_node_does_not_bring_back_the_run_that_fresh_has_replaced(cluster: Cluster) -> None:
    here, there = cluster.path / "here", cluster.path / "there"
    train(cluster, here, 50)
    shutil.copytree(here, there)
    train(cluster, here, 20, "--fresh")
    nodes = [
        *cluster.start(*FLAGS, "--max-steps", "40", run_dir=here, nnodes="2:2"),
        *cluster.start(*FLAGS, "--max-steps", "40", run_dir=there, nnodes="2:2"),
    ]
    cluster.finish(nodes)
    assert ("snapshot", 20) in starts(here)
    assert "snapshots of another run are not used" in nodes[1].text()


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine each start takes a minute
@pytest.mark.parametrize(("others", "remedy"), [(20, "are done again. To go on from that"), (80, "were done again")])
def test_a_node_that_comes_too_late_with_newer_steps_says_so(cluster: Cluster, others: int, remedy: str) -> None:
    """Without a directory in common the others could not know, and do those steps again, or have done them."""
    here, there, pace = cluster.path / "here", cluster.path / "there", cluster.path / "pace"
    task = ("--task", "elastic_train.tools.drills.task:PacedDigits")
    alone = partial(cluster.start_alone, *task, *TIMES, "--max-steps")
    cluster.finish([alone("20", run_dir=here)])
    shutil.copytree(here, there)
    cluster.finish([alone("60", run_dir=there), *([alone(f"{others}", run_dir=here)] if others > 20 else [])])
    set_pace(pace, 0.05)  # seconds per sample: the other one comes long before the next 40 steps
    flags, env = (*task, *TIMES, "--max-steps", f"{others + 60}"), {PACE_VARIABLE: str(pace)}
    nodes = cluster.start(*flags, run_dir=here, env=env, nnodes="1:2")
    wait_for_step(here, others + 1)
    nodes += cluster.start(*flags, run_dir=there, env=env, nnodes="1:2")
    wait_until(lambda: "has a snapshot of step 60 of this run" in nodes[1].text(), "the warning", 120.0)
    set_pace(pace, 0.0)
    cluster.finish(nodes)
    assert "has a snapshot of step 60" not in nodes[0].text()
    [warning] = [event for event in events(there, "warning") if "of step 60" in event["message"]]
    assert others < warning["step"] < others + 40
    assert remedy in warning["message"]


@pytest.mark.slow
def test_two_runs_that_know_nothing_of_each_other_are_refused(cluster: Cluster) -> None:
    here, there = cluster.path / "here", cluster.path / "there"
    train(cluster, here, 20)
    train(cluster, there, 50)
    for path in (there / "snapshots").glob("step-*"):
        path.rename(here / "snapshots" / path.name)
    (here / "run.json").unlink()
    line = refusal(cluster, here)
    assert "snapshots of two runs" in line
    assert "of step 20" in line
    assert "of step 50" in line


@pytest.mark.slow
def test_a_run_whose_snapshots_are_gone_does_not_begin_anew_without_a_word(cluster: Cluster) -> None:
    train(cluster, cluster.run_dir, 20)
    names = snapshot_names(cluster.run_dir)
    shutil.move(cluster.run_dir / "snapshots", cluster.path / "away")
    line = refusal(cluster, cluster.run_dir)
    assert "wrote a snapshot of step 20" in line
    assert names[-1] in line
    assert "--fresh" in line
    shutil.rmtree(cluster.run_dir / "snapshots", ignore_errors=True)
    shutil.move(cluster.path / "away", cluster.run_dir / "snapshots")
    train(cluster, cluster.run_dir, 30)
    assert starts(cluster.run_dir)[-1] == ("snapshot", 20)
    train(cluster, cluster.run_dir, 10, "--fresh")
    assert starts(cluster.run_dir) == [("scratch", 0)]


@pytest.mark.slow
def test_what_a_generation_had_in_hand_below_a_snapshot_is_written_again(cluster: Cluster) -> None:
    """Its snapshots were away when two workers went on from an older one, and were killed in a step of which only one
    of them had written its line: those of the largest generation would be a half of it for ever."""
    train(cluster, cluster.run_dir, 30, "--ledger")
    away = [path for path in (cluster.run_dir / "snapshots").glob("step-*") if "-000000000010-" not in path.name]
    assert len(away) == 2, snapshot_names(cluster.run_dir)
    for path in away:
        path.rename(cluster.path / path.name)
    faults = {"ELASTIC_TRAIN_FAULT": "kill@step:rank=1,step=14;kill@meet:rank=0"}
    pair = cluster.start_alone(*FLAGS, "--max-steps", "90", "--ledger", "--spawn", "2", env=faults)
    cluster.finish([pair], code=137)
    in_hand = [line for line in lines(cluster.run_dir / "ledger") if (line["step"], line["generation"]) == (15, 1)]
    assert [line["rank"] for line in in_hand] == [0]
    for path in away:
        (cluster.path / path.name).rename(path)
    train(cluster, cluster.run_dir, 40, "--ledger")
    assert starts(cluster.run_dir)[-1] == ("snapshot", 30)
    check_ledger([cluster.run_dir], length=1437, batch=64, steps=40)
