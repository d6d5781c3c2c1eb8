"""Sides of a run with real nodes: two namespaces without a shared run directory, cut off and brought together."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.storage.snapshot import find_snapshots
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment, wait_until
from tests.integration.apart import Apart, ending
from tests.integration.cluster import events

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
GO_ON = ("--on-split", "go-on")
FLAGS = (
    "--peer-timeout", "2", "--ledger", "--epochs", "100000", "--eval-every", "100000",
    "--no-progress",
)  # fmt: skip
NUM_STEPS = 20
"""that a world must commit before the next thing happens"""
BOTH = {0: 2, 1: 2}
EACH = {0: 1, 1: 1}


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Two nodes that have trained together."""
    missing = Network.why_not()
    if missing is not None:
        pytest.skip(f"no network namespaces: {missing}")
    flags = (*FLAGS, *getattr(request, "param", GO_ON))
    with (
        contextlib.closing(Network(2)) as network,
        ending(Apart(network, tmp_path, flags, num_steps=NUM_STEPS)) as pair,
    ):
        pair.start(0, 1)
        pair.train(BOTH)
        yield pair


def test_both_go_on_and_when_they_meet_one_remains(pair: Apart) -> None:
    pair.network.pull_cable(1)
    branches = [world["branch"] for world in pair.train(EACH)]
    assert sum(branch is None for branch in branches) == 1, "one goes on by the laws"
    pair.network.heal(1)
    pair.train(BOTH)
    pair.stop()
    warnings = [line for run_dir in pair.run_dirs for line in events(run_dir, "warning") if "discarded" in line]
    assert len(warnings) == 1, "one of them stops"
    lost = warnings[0]["discarded"]
    assert lost["branch"] in branches
    assert f"steps {lost['first']} to {lost['last']}" in warnings[0]["message"]
    assert lost["last"] - lost["first"] >= NUM_STEPS - 2
    for run_dir in pair.run_dirs:
        remains = {offer.branches for offer in find_snapshots(run_dir / "snapshots", warn=pytest.fail)}
        assert len(remains) <= 2, "of before the split, and of the side that remained"
    found = pair.audit()
    assert found.passed, "\n".join(found.reasons)


def test_a_node_that_comes_back_with_its_branch_is_refused(pair: Apart) -> None:
    pair.network.pull_cable(1)
    pair.train(EACH)
    pair.stop()
    pair.network.heal(1)
    alone = {run_dir: len(events(run_dir, "step")) for run_dir in pair.run_dirs}
    pair.start(0, last_call=1)
    first = pair.run_dirs[0]
    wait_until(lambda: len(events(first, "step")) > alone[first] + NUM_STEPS, "training of the first one", 60)
    pair.start(1)
    assert pair.nodes[1].wait(60) == 1
    said = pair.nodes[1].text()
    assert re.search("host node2 has a snapshot of step [0-9]+ on .* at step [0-9]+ of .* on node1: .* refused", said)
    pair.nodes[0].signal(15)
    pair.nodes[0].wait(60)
    shutil.copytree(pair.run_dirs[1] / "snapshots", first / "snapshots", dirs_exist_ok=True)
    command = [sys.executable, "-m", "elastic_train", "--run-dir", str(first), *FLAGS, *GO_ON]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "BranchesMixed" in events(first, "done")[-1]["error"]
    assert re.search("host node1 has a snapshot of step .* and host node2 one of step", done.stderr)


@pytest.mark.parametrize("pair", [()], indirect=True)
def test_a_second_job_stops_when_it_meets_the_first(pair: Apart) -> None:
    """The first endpoint's host dies, comes back cut off from the others, and begins anew."""
    first = pair.train(BOTH)[0]
    pair.nodes[0].kill()
    pair.train({1: 1})
    pair.network.pull_cable(0)
    shutil.rmtree(pair.run_dirs[0])  # a new disk: it has nothing to go on from
    pair.start(0, last_call=1)
    pair.train({0: 1})
    pair.network.heal(0)
    assert pair.nodes[0].wait(60) == 1
    said = pair.nodes[0].text()
    pattern = "this one, at step ([0-9]+) of the main line on node1, stops for the one at step ([0-9]+) of .* on node2"
    found = re.search(pattern, said)
    assert found is not None, said
    assert int(found[1]) < int(found[2])
    pair.start(0, last_call=1)
    members = pair.train(BOTH)[1]["members"]
    assert first["members"][1] in members, "the one that went on was never disturbed"
    pair.stop()
