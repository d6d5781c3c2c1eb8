"""--metrics-port of a real job: it serves the whole run, also after rank 0 or the node with the port dies."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.observe.status import read_status
from elastic_train.tools.drills.nodes import free_port
from tests.integration.cluster import Cluster, wait_until
from tests.integration.test_in_place import start_world

PATIENCE = 240.0


def scrape(port: int) -> dict[str, float]:
    """By name, for what has no label but the run's; empty where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels == {"run": "run"}}


@pytest.mark.timeout(600)
def test_the_endpoint_outlives_the_node_that_had_it(cluster: Cluster) -> None:
    port = free_port()
    nodes = start_world(cluster, 2, "--metrics-port", str(port), steps=100000)
    before = wait_until(
        lambda: (found := scrape(port)).get("elastic_train_samples_per_second", 0) > 0 and found, "a rate", PATIENCE
    )
    assert before["elastic_train_members"] == before["elastic_train_nodes"] == 2
    assert before["elastic_train_max_nodes"] == 2
    assert before["elastic_train_step"] > 0
    assert 0 < before["elastic_train_goodput_ratio"] < 1
    assert (before["elastic_train_training_nodes"], before["elastic_train_wanted_nodes"]) == (2, 0)
    told = read_status(cluster.run_dir, time.time())
    assert (told.capacity.train, told.capacity.wanted, told.capacity.max_nodes) == (2, 0, 2)
    assert told.bill is not None
    assert told.bill["node_seconds"]["paid"] > 0
    (victim,) = [node for node in nodes if node.listens_at(port)]
    victim.kill()
    after = wait_until(
        lambda: (
            (found := scrape(port)).get("elastic_train_step", 0) > before["elastic_train_step"]
            and "elastic_train_last_recovery_seconds" in found
            and found
        ),
        "the other node at the port",
        PATIENCE,
    )
    assert after["elastic_train_members"] == 1
    assert (after["elastic_train_training_nodes"], after["elastic_train_wanted_nodes"]) == (1, 1)
    told = read_status(cluster.run_dir, time.time())
    assert (told.capacity.train, told.capacity.could_train, told.capacity.wanted) == (1, 1, 1)
    assert after["elastic_train_generation"] > before["elastic_train_generation"]
    assert 0 < after["elastic_train_last_recovery_seconds"] < PATIENCE
