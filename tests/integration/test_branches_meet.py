"""Sides of a run with real nodes: two namespaces without a shared run directory, cut off and brought together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.storage.snapshot import find_snapshots
from elastic_train.tools.audit.audit import audit
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import Node, clean_environment, dying_with_parent, wait_until
from tests.integration.cluster import events

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
GO_ON = ("--on-split", "go-on")
FLAGS = (
    "--peer-timeout", "2", "--ledger", "--epochs", "100000", "--eval-every", "100000",
    "--no-progress",
)  # fmt: skip
NUM_STEPS = 20
"""that a world must commit before the next thing happens"""


@pytest.fixture
def network() -> Iterator[Network]:
    missing = Network.why_not()
    if missing is not None:
        pytest.skip(f"no network namespaces: {missing}")
    network = Network(2)
    yield network
    network.close()


class Pair:
    """A node in each of two namespaces, with a run directory of its own."""

    def __init__(self, network: Network, path: Path, flags: tuple[str, ...] = GO_ON) -> None:
        self.path, self._flags = path, flags
        self.run_dirs = [path / f"run{index}" for index in range(2)]
        self._network = network
        self.nodes = [self.start(index, seconds=60) for index in range(2)]

    def start(self, index: int, seconds: int = 1) -> Node:
        """`seconds` to wait for the other one."""
        command = [
            sys.executable, "-m", "torch.distributed.run", *C10d(self._network).torchrun_flags(), "--nnodes=1:2",
            f"--rdzv-conf=last_call_timeout={seconds}", "-m", "elastic_train", "--run-dir", str(self.run_dirs[index]),
            *FLAGS, *self._flags,
        ]  # fmt: skip
        temporary = self.path / f"tmp{index}"
        temporary.mkdir(exist_ok=True)
        prefix = [*dying_with_parent(), *self._network.node_prefix(index)]
        env = clean_environment() | {"TMPDIR": str(temporary)}
        return Node(command, self.path / f"node{index}.log", self.path, env, prefix=prefix, is_wrapped=True)

    def train(self, num_members: int) -> list[dict[str, Any]]:
        """Wait until each is in a world of so many, and all these have committed; their `world` events."""

        def found() -> list[dict[str, Any]] | None:
            worlds = [(events(run_dir, "world") or [{}])[-1] for run_dir in self.run_dirs]
            if any(len(world.get("members", ())) != num_members for world in worlds):
                return None
            steps = [line for run_dir in self.run_dirs for line in events(run_dir, "step")]
            ours = [
                {line["step"] for line in steps if line["generation"] == world["generation"]
                 and f"{line['host']}/0/{line['pid']}" in world["members"]}
                for world in worlds
            ]  # fmt: skip
            return worlds if all(len(one) >= NUM_STEPS for one in ours) else None

        return wait_until(found, f"world of {num_members} on each node", 120)  # type: ignore[no-any-return]

    def train_alone(self, index: int) -> None:
        """Wait until a node has committed so many steps in a world of its own."""
        run_dir = self.run_dirs[index]

        def found() -> bool:
            world = (events(run_dir, "world") or [{}])[-1]
            steps = [one for one in events(run_dir, "step") if one["generation"] == world.get("generation")]
            return len(world.get("members", ())) == 1 and len(steps) >= NUM_STEPS

        wait_until(found, f"a world of node {index} alone", 60)

    def stop(self) -> None:
        for node in self.nodes:
            node.signal(15)
        for node in self.nodes:
            node.wait(60)


@pytest.fixture
def pair(network: Network, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(network, tmp_path, getattr(request, "param", GO_ON))
    yield pair
    for node in pair.nodes:
        node.end()


def test_both_go_on_and_when_they_meet_one_remains(network: Network, pair: Pair) -> None:
    pair.train(2)
    network.pull_cable(1)
    branches = [world["branch"] for world in pair.train(1)]
    assert sum(branch is None for branch in branches) == 1, "one goes on by the laws"
    network.heal(1)
    pair.train(2)
    pair.stop()
    warnings = [line for run_dir in pair.run_dirs for line in events(run_dir, "warning") if "discarded" in line]
    assert len(warnings) == 1, "one of them stops"
    lost = warnings[0]["discarded"]
    assert lost["branch"] in branches
    assert f"steps {lost['first']} to {lost['last']}" in warnings[0]["message"]
    assert lost["last"] - lost["first"] >= NUM_STEPS - 2
    together = pair.path / "together"
    for run_dir in pair.run_dirs:
        remains = {offer.branches for offer in find_snapshots(run_dir / "snapshots", warn=pytest.fail)}
        assert len(remains) <= 2, "of before the split, and of the side that remained"
        shutil.copytree(run_dir, together, dirs_exist_ok=True)
    found = audit(together)
    assert found.passed, "\n".join(found.reasons)


def test_a_node_that_comes_back_with_its_branch_is_refused(network: Network, pair: Pair) -> None:
    pair.train(2)
    network.pull_cable(1)
    pair.train(1)
    pair.stop()
    network.heal(1)
    alone = {run_dir: len(events(run_dir, "step")) for run_dir in pair.run_dirs}
    pair.nodes[0] = pair.start(0)
    first = pair.run_dirs[0]
    wait_until(lambda: len(events(first, "step")) > alone[first] + NUM_STEPS, "training of the first one", 60)
    pair.nodes[1] = pair.start(1)
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
def test_a_second_job_stops_when_it_meets_the_first(network: Network, pair: Pair) -> None:
    """The first endpoint's host dies, comes back cut off from the others, and begins anew."""
    first = pair.train(2)[0]
    pair.nodes[0].kill()
    pair.train_alone(1)
    network.pull_cable(0)
    shutil.rmtree(pair.run_dirs[0])  # a new disk: it has nothing to go on from
    pair.nodes[0] = pair.start(0)
    pair.train_alone(0)
    network.heal(0)
    assert pair.nodes[0].wait(60) == 1
    said = pair.nodes[0].text()
    pattern = "this one, at step ([0-9]+) of the main line on node1, stops for the one at step ([0-9]+) of .* on node2"
    found = re.search(pattern, said)
    assert found is not None, said
    assert int(found[1]) < int(found[2])
    pair.nodes[0] = pair.start(0)
    members = pair.train(2)[1]["members"]
    assert first["members"][1] in members, "the one that went on was never disturbed"
    pair.stop()
