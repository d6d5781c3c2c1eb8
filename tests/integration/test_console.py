"""The console script beside a real training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, last_step, result, wait_for_step


def console(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_train.cli", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(run_dir: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in console("status", run_dir).splitlines())


@pytest.mark.slow
def test_status_over_the_life_of_a_run(cluster: Cluster) -> None:
    flags = ("--epochs", "20", "--eval-every", "1", "--snapshot-every", "20")
    nodes = cluster.start(*flags, nodes=2)
    wait_for_step(cluster.run_dir, 60)
    for node in nodes:
        for worker in node.workers():
            worker.suspend()  # so that what is read is what is looked at
    alive = status(cluster.run_dir)
    step = last_step(cluster.run_dir)
    assert alive["state"] == "running"
    assert (alive["generation"], alive["world size"]) == ("0", "2")
    assert len(alive["members"].split(", ")) == 2
    assert alive["step"] == f"{step} of 460"
    assert alive["epoch"].startswith(f"{(step - 1) // 23 + 1} of 20, ")
    assert float(alive["samples/s"].replace(",", "")) > 0
    assert alive["snapshot"].startswith("step ")
    assert "%" in alive["test accuracy"]
    assert "result" not in alive

    for node in nodes:
        node.kill()
    dead = status(cluster.run_dir)
    assert dead["state"] == "dead"
    assert dead["step"] == alive["step"]

    nodes = cluster.start(*flags, nodes=1)
    wait_for_step(cluster.run_dir, step + 20)
    nodes[0].signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    stopped = status(cluster.run_dir)
    assert (stopped["state"], stopped["generation"], stopped["world size"]) == ("stopped", "1", "1")
    assert stopped["incidents"] == "1"
    told = r"restart, .* ago: generation 1: 1 worker goes on at step \d+(; \d+ .* lost)?"
    assert re.fullmatch(told, stopped["incident"])

    cluster.finish(cluster.start(*flags, nodes=1))
    finished = status(cluster.run_dir)
    end = result(cluster.run_dir)
    assert (finished["state"], finished["step"]) == ("finished", "460 of 460")
    assert finished["test accuracy"] == f"{end['test_accuracy']:.2%}"
    assert finished["result"] == str(cluster.run_dir / "result.json")
    assert finished["incidents"] == "2"
    assert finished["incident"].partition(" ago: ")[2] == stopped["incident"].partition(" ago: ")[2], "the same words"

    assert console("snapshot", "hash", cluster.run_dir).strip() == end["state_sha256"]
    assert "damaged" not in console("snapshot", "verify", cluster.run_dir)
    assert console("snapshot", "list", cluster.run_dir).splitlines()[1].split()[0] == "460"


@pytest.mark.slow
def test_status_of_a_start_that_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_train", "--run-dir", "run", "--lr", "1e30", "--optimizer", "sgd"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    found = status(tmp_path / "run")
    assert found["state"] == "failed"
    assert found["error"].startswith("TrainingDiverged: the loss of step ")
