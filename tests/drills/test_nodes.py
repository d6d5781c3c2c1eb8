"""Nodes of a drill are ended whole, by pid, and never a process that only has the pid of one; and their network."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from elastic_train.tools.audit.record import PACE_FILE, PACE_VARIABLE, Record
from elastic_train.tools.drills import environment_faults
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.environment_faults import PacketLoss, SlowLink
from elastic_train.tools.drills.injection import Fault
from elastic_train.tools.drills.network import HUB_ADDRESS, NAMESPACES, Network
from elastic_train.tools.drills.nodes import TooSlow, clean_environment, inner_pid, is_running, kill_at_once, wait_until
from tests.cuts import cut_pair, split
from tests.nodes import Node

# An agent with a worker in a session of its own that has a child; the worker survives the agent.
AGENT = """
import subprocess, sys, time
child = "import time; time.sleep(600)"
worker = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
time.sleep(600)
"""
needs_network = pytest.mark.skipif(Network.why_not() is not None, reason=f"no network namespaces: {Network.why_not()}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node([sys.executable, "-c", AGENT], tmp_path / "node.log", tmp_path, clean_environment())
    yield node
    node.kill()


def whole(node: Node) -> list[psutil.Process]:
    """All three processes, once they are there."""
    wait_until(lambda: len(node.all_processes()) == 3, "agent, worker and its child", 60)
    return node.all_processes()


def test_a_killed_node_is_gone_with_all_of_its_processes(node: Node) -> None:
    processes = whole(node)
    node.kill()
    assert not any(map(is_running, processes))
    assert node.process.returncode == -signal.SIGKILL
    assert node.all_processes() == []


def test_a_frozen_node_can_be_killed(node: Node) -> None:
    processes = whole(node)
    for process in processes:
        process.suspend()
    kill_at_once([node])
    assert not any(map(is_running, processes))


def test_a_worker_that_outlives_its_agent_is_seen_and_ended(node: Node) -> None:
    whole(node)
    worker = node.workers()[0]
    children = worker.children()
    node.process.kill()
    node.wait(10)
    assert node.agent() is None
    assert node.workers() == [worker]
    assert set(node.all_processes()) == {worker, *children}
    node.kill()
    assert not any(map(is_running, [worker, *children]))


def test_an_orphan_of_a_worker_is_seen_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent and worker are killed, and a child of the worker runs on; its parent is not known any more."""
    monkeypatch.setattr("elastic_train.tools.drills.cluster.ENDING_SECONDS", 0.1)
    record = Record(tmp_path)
    cluster = Cluster(tmp_path, record, [], num_nodes=1)
    mark = {PACE_VARIABLE: str(record.path / PACE_FILE)}
    node = Node([sys.executable, "-c", AGENT], tmp_path / "node.log", tmp_path, clean_environment() | mark)
    orphan = next(iter(set(whole(node)) - {node.agent(), *node.workers()}))
    for process in (node.process, *node.workers()):
        process.kill()  # type: ignore[attr-defined]
    wait_until(lambda: node.all_processes() == [], "end of agent and worker", 10)
    assert cluster.leftovers() == [f"process {orphan.pid} of a node still runs"]
    cluster.close()
    assert not is_running(orphan)
    node.kill()
    record.close()


def test_under_c10d_nodes_meet_at_each_other(tmp_path: Path) -> None:
    apart = C10d(Mock(addresses=["10.0.0.1", "10.0.0.2"]))
    flags = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400,10.0.0.2:29400", "--nnodes=1:2"]
    assert apart.launcher(0, 2, 3)[-4:] == [*flags, "--nproc-per-node=3"]
    backend = C10d(None)
    assert f"--rdzv-endpoint=localhost:{backend.port}" in backend.launcher(0, 2, 1)
    assert backend.stop() == []
    listen = f"import socket, time; s = socket.create_server(('localhost', {backend.port})); time.sleep(600)"
    node = Node([sys.executable, "-c", listen], tmp_path / "node.log", tmp_path, clean_environment())
    try:
        wait_until(lambda: node.listens_at(backend.port), "listener", 60)
        assert not node.listens_at(backend.port + 1)
        assert backend.stop() == [f"port {backend.port} is still open"]
    finally:
        node.kill()


def test_the_pid_of_an_ended_node_is_nobodys(tmp_path: Path) -> None:
    node = Node([sys.executable, "-c", ""], tmp_path / "node.log", tmp_path, clean_environment())
    node.wait(60)
    node.process.pid = psutil.Process().pid  # as if the kernel had given it out again
    assert node.all_processes() == []
    node.kill()


def test_nodes_have_the_environment_but_for_what_launchers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "CIFAR_ROOT", "RANK", "PET_NNODES"):
        monkeypatch.setenv(name, "1")
    assert {"CI", "CIFAR_ROOT", "RANK", "PET_NNODES"} & clean_environment().keys() == {"CIFAR_ROOT"}


def test_waiting_too_long_is_an_error_that_says_for_what(node: Node) -> None:
    with pytest.raises(TooSlow, match="no rain within 0 s"):
        wait_until(lambda: False, "rain", 0.1)
    with pytest.raises(TooSlow, match="node still runs"):
        node.wait(0.1)


@needs_network
def test_a_node_in_a_namespace_has_a_name_pids_and_memory_of_its_own(tmp_path: Path) -> None:
    network = Network(2)
    try:
        program = (
            "import os, socket, time; print(socket.gethostname(), os.getpid(), os.listdir('/dev/shm'), flush=True)"
        )
        command = [sys.executable, "-uc", f"{program}; time.sleep(600)"]
        node = Node(
            command, tmp_path / "node.log", tmp_path, clean_environment(), host=network.host_name(1),
            prefix=network.node_prefix(1), is_wrapped=True,
        )  # fmt: skip
        wait_until(lambda: "\n" in node.text(), "word of the node", 60)
        assert node.text() == "node2 1 []\n"
        agent = node.agent()
        assert agent is not None
        assert inner_pid(agent.pid) == 1
        node.kill()
        assert not is_running(agent)
    finally:
        network.close()


@needs_network
def test_what_is_done_to_a_network_is_undone_again() -> None:
    network = Network(2)
    try:
        assert network.can_reach(0)
        network.pull_cable(0)
        assert not network.can_reach(0, seconds=0.3)
        network.heal(0)
        wait_until(lambda: network.can_reach(0), f"way to {HUB_ADDRESS}", 20)
        network.drop_outgoing(0)
        assert not network.can_reach(0, seconds=0.3)
        assert network.can_reach(1), "only that node"
        network.heal(0)
        wait_until(lambda: network.can_reach(0), f"way to {HUB_ADDRESS}", 20)
    finally:
        network.close()


def reached(network: Network) -> set[frozenset[int]]:
    """The pairs of nodes that hear each other: a connection attempt and its answer go both ways."""
    pairs = combinations(range(network.num_nodes), 2)
    return {frozenset(pair) for pair in pairs if network.can_reach(pair[0], network.address(pair[1]), seconds=0.3)}


@needs_network
def test_a_network_is_split_and_whole_again() -> None:
    with contextlib.closing(Network(4)) as network:
        split(network, [0, 3], [1], [2])
        assert reached(network) == {frozenset((0, 3))}
        assert [network.can_reach(index, seconds=0.3) for index in range(4)] == [True, False, False, True]
        split(network, [0, 2], [1, 3])
        pairs = {frozenset((0, 2)), frozenset((1, 3))}
        wait_until(lambda: reached(network) == pairs, "network of two pairs", 20)  # ARP asks again after a second
        for index in range(4):
            network.heal(index)
        wait_until(lambda: len(reached(network)) == 6, "network that is whole", 20)


@needs_network
def test_two_nodes_lose_only_each_other() -> None:
    with contextlib.closing(Network(3)) as network:
        assert len(reached(network)) == 3, "they have known each other"
        cut_pair(network, 0, 2)
        assert reached(network) == {frozenset((0, 1)), frozenset((1, 2))}
        network.heal(0)
        network.heal(2)
        wait_until(lambda: len(reached(network)) == 3, "network that is whole", 20)


@needs_network
def test_what_a_machine_cannot_do_to_a_network_is_said() -> None:
    assert Network.why_no(lambda network: network.pull_cable(0)) is None
    why = Network.why_no(lambda network: network.slow_down(0, "2 apples"))
    assert why is not None
    assert "2 apples" in why


@needs_network
@pytest.mark.parametrize(
    ("kind", "what"), [(PacketLoss, "no packet was dropped"), (SlowLink, "no packet was held back")]
)
def test_a_fault_of_a_network_that_meets_with_no_packet_was_not_injected(
    kind: type[Fault], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (missing := kind.why_not()) is not None:
        pytest.skip(missing)
    monkeypatch.setattr(environment_faults, "EFFECT_SECONDS", 0.5)
    network = Network(2)
    sender = receiver = None
    try:
        fault = kind(Mock(network=network), random.Random(1), 5.0, targets=[Place(0)])
        with pytest.raises(TooSlow, match=what):
            fault.inject()
        network.heal(0)
        # Datagrams in both directions: what the one fault takes comes in, what the other slows down goes out.
        send = "import socket, sys, time; s = socket.socket(type=socket.SOCK_DGRAM)\nwhile True:"
        send += " s.sendto(bytes(1400), (sys.argv[1], 9)); time.sleep(0.001)"
        python = [sys.executable, "-c", send]
        monkeypatch.setattr(environment_faults, "EFFECT_SECONDS", 20.0)
        sender = subprocess.Popen(["ip", "netns", "exec", network._name(0), *python, network.address(1)])
        receiver = subprocess.Popen(["ip", "netns", "exec", network._name(1), *python, network.address(0)])
        assert "the first packet" in fault.inject()
    finally:
        for process in filter(None, (sender, receiver)):
            process.kill()
            process.wait()
        network.close()


@needs_network
def test_namespaces_of_a_drill_that_was_killed_are_removed_by_the_next() -> None:
    dead, alive = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    names = [f"et{process.pid}-hub" for process in (dead, alive)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        dead.kill()
        dead.wait()
        Network(1).close()
        assert [(NAMESPACES / name).exists() for name in names] == [False, True]
    finally:
        alive.kill()
        alive.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
