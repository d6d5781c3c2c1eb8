"""A job listens on no socket that is open to all interfaces."""

from __future__ import annotations

import json

import psutil
import pytest

from elastic_train.elastic.connect import MEMBERS_FILE
from tests.integration.cluster import Cluster, Node, events, free_port, is_listening, wait_until, worlds

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


@pytest.mark.slow
def test_each_node_is_reached_at_the_address_that_it_was_given(cluster: Cluster) -> None:
    """The endpoint's own leads to another one."""
    nodes = cluster.start("--max-steps", "3", nodes=2, env={"PET_LOCAL_ADDR": "127.0.0.2"})
    wait_until((cluster.run_dir / MEMBERS_FILE).exists, "the members' places", 120)
    cluster.finish(nodes)
    assert worlds(cluster.run_dir) == [(0, 2)]
    stores = json.loads((cluster.run_dir / MEMBERS_FILE).read_text())["stores"]
    assert [host for host, _port in stores] == ["127.0.0.2"] * 2
