"""What a job listens at: nothing on all interfaces."""

from __future__ import annotations

import psutil
import pytest

from tests.integration.cluster import Cluster, Node, events, free_port, is_listening, wait_until

LOOPBACK = {"127.0.0.1", "::1"}


def listening(node: Node) -> set[tuple[str, int]]:
    agent = psutil.Process(node.process.pid)
    return {
        (found.laddr.ip, found.laddr.port)
        for process in (agent, *agent.children(recursive=True))
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", ["c10d", "etcd3"], indirect=True)
def test_nothing_is_open_to_others(cluster: Cluster) -> None:
    """The endpoint is this machine's loopback, so all the rest is to listen there."""
    port = free_port()
    nodes = cluster.start("--epochs", "100000", "--no-progress", "--metrics-port", str(port), nodes=2)
    wait_until(lambda: events(cluster.run_dir, "world") and is_listening(port), "training", 300)
    found = set().union(*(listening(node) for node in nodes))
    assert {address for address, _ in found} <= LOOPBACK
    assert {port} | (set() if cluster.etcd else {cluster.port}) <= {port for _, port in found}
    assert len(found) >= 4, "liveness of both workers, metrics, and whatever the process group has"
