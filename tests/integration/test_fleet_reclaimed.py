"""The whole fleet is reclaimed: three nodes with a slow line each, told 30 s before, save a state that one of them
could not send in that time; three new ones with empty disks go on. The S3 server is moto, a fake.

The state is 150 MB and the lines have 25 Mbit/s: of 1.2 GB at 200 Mbit/s that is an eighth of both, for a machine whose
two cores do the work of all; one node alone would take 50 s. ELASTIC_TRAIN_TEST_FLEET=whole has the whole size. Most of
it are weights that nobody trains: a step's gradients would not go through such lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_train.tools.audit.record import PACE_VARIABLE, set_pace
from elastic_train.tools.drills.network import HUB_ADDRESS, Network
from elastic_train.tools.drills.nodes import clean_environment
from tests.audits import audit
from tests.integration.cluster import (
    TORCHRUN,
    Cluster,
    Node,
    check_ledger,
    events,
    last_step,
    outcomes,
    result,
    wait_until,
)
from tests.object_stores import BUCKET, environment, s3_server_in

IS_WHOLE = os.environ.get("ELASTIC_TRAIN_TEST_FLEET") == "whole"
MEGABYTES, RATE = (1200, "200mbit") if IS_WHOLE else (150, "25mbit")
NOTICE_SECONDS = 30.0
URL = f"s3://{BUCKET}/run"
FLAGS = (
    "--task", "elastic_train.tools.drills.task:PacedDigits", "--frozen-mb", str(MEGABYTES), "--reduction", "ordered",
    "--schedule", "constant", "--ledger", "--eval-every", "100000", "--epochs", "100000", "--no-progress",
)  # fmt: skip
PACE = 0.01
"""seconds for a sample: some four steps a second"""
FEW_STEPS = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture
def network() -> Iterator[Network]:
    """Of three nodes that are reclaimed, and three new ones."""
    missing = Network.why_not() or Network.why_no(lambda network: network.slow_down(0, RATE))
    if missing is not None:
        pytest.skip(f"no network namespaces with slow lines: {missing}")
    with contextlib.closing(Network(6)) as network:
        yield network


class Fleet:
    """Nodes of one network, each with a disk of its own, that have a bucket in common."""

    def __init__(self, network: Network, cluster: Cluster, endpoint: str) -> None:
        self.network, self._cluster = network, cluster
        self.held_back: dict[int, Callable[[], int]] = {}
        """by node: what counts its packets that had to wait"""
        self.path = cluster.path
        self._pace = self.path / "pace"
        set_pace(self._pace, PACE)
        self._env = environment(endpoint) | {PACE_VARIABLE: str(self._pace)}

    def start(self, *indices: int, steps: int, every: str = "0") -> list[Node]:
        """One job of these nodes."""
        return [self._start(index, indices, steps, every) for index in indices]

    def _start(self, index: int, indices: tuple[int, ...], steps: int, every: str) -> Node:
        command = [
            *TORCHRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint={self.network.address(indices[0])}:29400",
            f"--nnodes=1:{len(indices)}", f"--rdzv-conf={self._cluster.last_call(60)}", "-m", "elastic_train", *FLAGS,
            "--run-dir", str(self.disk(index)), "--snapshot-dir", URL, "--snapshot-every", every,
            "--max-steps", str(steps), "--notices", f"file:{self.gone(index)}",
        ]  # fmt: skip
        node = Node(
            command, self.path / f"node-{index}.log", self.path, clean_environment() | self._env,
            host=self.network.host_name(index), prefix=self.network.node_prefix(index), is_wrapped=True,
        )  # fmt: skip
        self._cluster.nodes.append(node)
        return node

    def disk(self, index: int) -> Path:
        return self.path / f"disk-{index}"

    def gone(self, index: int) -> Path:
        """What says that a node is taken away."""
        return self.path / f"gone-{index}"

    def run_free(self) -> None:
        set_pace(self._pace, 0.0)

    def events(self, indices: Sequence[int], name: str) -> list[dict[str, Any]]:
        return [event for index in indices for event in events(self.disk(index), name)]

    def manifests(self) -> list[dict[str, Any]]:
        """Of what lies in the bucket, by step; whole or not is for the next start to say."""
        code = (
            "import json\n"
            "from elastic_train.storage.places import place_at\n"
            "from elastic_train.storage.snapshot import find_snapshots, verify\n"
            f"found = find_snapshots(place_at({URL!r}), warn=print)\n"
            "[verify(info) for info in found]\n"
            "print(json.dumps([info.path.read_manifest() for info in found]))\n"
        )
        command = [*self.network.hub_prefix(), sys.executable, "-c", code]
        done = subprocess.run(command, env=clean_environment() | self._env, capture_output=True, text=True, check=True)
        return list(json.loads(done.stdout))


@pytest.fixture
def fleet(network: Network, cluster: Cluster) -> Iterator[Fleet]:
    with s3_server_in(network.hub_prefix(), HUB_ADDRESS) as endpoint:
        yield Fleet(network, cluster, endpoint)
        cluster.end()


OLD, NEW = range(3), range(3, 6)


def train(fleet: Fleet, every: str = "0") -> None:
    """What is sent around at the start does not wait for the slow lines."""
    fleet.start(*OLD, steps=100000, every=every)

    def have_trained() -> bool:
        return max(map(last_step, map(fleet.disk, OLD))) >= FEW_STEPS

    wait_until(have_trained, "steps of three nodes", 120)
    for index in OLD:
        fleet.held_back[index] = fleet.network.slow_down(index, RATE)


def give_notice(fleet: Fleet, seconds: float) -> float:
    """Returns when the nodes are taken away."""
    deadline = time.time() + seconds
    for index in OLD:
        fleet.gone(index).write_text(json.dumps({"deadline": deadline, "reason": "spot"}))
    return deadline


def check_left(fleet: Fleet, indices: Sequence[int], deadline: float) -> int:
    """All of these have left in time, at the newest committed step. Returns it."""
    step = max(int(event["step"]) for event in fleet.events(OLD, "step"))
    left = [event for event in fleet.events(indices, "notice") if event["state"] == "left"]
    print("seconds left:", [round(event["seconds_left"], 1) for event in left])
    assert [event["step"] for event in left] == [step] * len(indices)
    assert [event["deadline"] for event in left] == [deadline] * len(indices)
    assert all(event["seconds_left"] > 0 for event in left)
    return step


def bytes_by_host(manifest: dict[str, Any]) -> Counter[str]:
    found = Counter[str]()
    for part in manifest["parts"]:
        found[part["host"]] += part["bytes"]
    print("megabytes by host:", {host: round(size / 2**20) for host, size in found.items()})
    return found


def test_nothing_is_lost(fleet: Fleet, cluster: Cluster) -> None:
    train(fleet)
    deadline = give_notice(fleet, NOTICE_SECONDS)
    for node in cluster.nodes:
        node.wait(60)
    step = check_left(fleet, OLD, deadline)
    [manifest] = fleet.manifests()
    assert manifest["step"] == step
    by_host = bytes_by_host(manifest)
    assert set(by_host) == {fleet.network.host_name(index) for index in OLD}
    assert max(by_host.values()) < 0.4 * by_host.total()
    go_on_to_the_end(fleet, cluster, step)


def test_the_notice_comes_while_a_snapshot_is_on_its_way(fleet: Fleet, cluster: Cluster) -> None:
    """Rank 0 alone would need 50 s for it. It is given up: the last state takes its place in the line, once three parts
    of 16 MiB are through. Here they take 15 s, at 200 Mbit/s 2 s; so there is more time."""
    train(fleet, every=str(FEW_STEPS))
    [members] = {tuple(event["members"]) for event in fleet.events(OLD, "world")}
    [first] = [index for index in OLD if fleet.network.host_name(index) == members[0].partition("/")[0]]
    wait_until(lambda: fleet.held_back[first]() > 5000, "some megabytes of a regular one", 60)
    deadline = give_notice(fleet, 1.5 * NOTICE_SECONDS)
    for node in cluster.nodes:
        node.wait(60)
    step = check_left(fleet, OLD, deadline)
    assert "is given up for that of step" in cluster.nodes[first].text()
    assert max(manifest["step"] for manifest in fleet.manifests()) == step


def test_one_dies_while_it_sends_its_share(fleet: Fleet, cluster: Cluster) -> None:
    """The two others send what is missing of it, and then end as well: what they have is saved."""
    train(fleet)
    [members] = {tuple(event["members"]) for event in fleet.events(OLD, "world")}
    hosts = [member.partition("/")[0] for member in members]
    [dead] = [index for index in OLD if fleet.network.host_name(index) == hosts[2]]
    rest = [index for index in OLD if index != dead]
    deadline = give_notice(fleet, 1.5 * NOTICE_SECONDS)
    wait_until(lambda: fleet.held_back[dead]() > 1000, "some megabytes of its share", 30)
    cluster.nodes[dead].kill()
    for index in rest:
        cluster.nodes[index].wait(60)
    step = check_left(fleet, rest, deadline)
    [manifest] = fleet.manifests()
    assert manifest["step"] == step
    assert bytes_by_host(manifest)[hosts[2]] < MEGABYTES * 2**20 / 6


def go_on_to_the_end(fleet: Fleet, cluster: Cluster, step: int) -> None:
    """On new nodes with empty disks: no committed step is lost, and all that comes of it is as if nothing had been."""
    steps = step + 15
    fleet.run_free()
    cluster.finish(fleet.start(*NEW, steps=steps))
    for index in NEW:
        [restored] = events(fleet.disk(index), "restore")
        assert (restored["source"], restored["restored_step"]) == ("snapshot", step)
        assert {event["generation"] for event in events(fleet.disk(index), "world")} == {1}
    undisturbed = fleet.path / "undisturbed"
    alone = cluster.start_alone(*FLAGS, "--max-steps", str(steps), "--snapshot-every", "0", run_dir=undisturbed)
    cluster.finish([alone])
    for index in NEW:
        assert result(fleet.disk(index))["state_sha256"] == result(undisturbed)["state_sha256"]
    disks = [fleet.disk(index) for index in (*OLD, *NEW)]
    check_ledger(disks, length=1437, batch=64, steps=steps)
    together = fleet.path / "together"
    for disk in disks:
        shutil.copytree(disk, together, dirs_exist_ok=True)
    found = audit(together)
    assert found.passed, "\n".join(found.reasons)
    assert sorted(int(event["step"]) for event in events(together, "step")) == list(range(1, steps + 1))
    assert outcomes(together)[-1] == "finished"
