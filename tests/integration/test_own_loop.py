"""A plain DDP script made elastic: its own loop survives a killed node and takes in a new one, every sample once."""

from __future__ import annotations

import difflib
from pathlib import Path

from tests.integration.cluster import Cluster, check_ledger, events, outcomes, result, wait_for_step, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH, BATCH = 1024, 64


def wait_for_world(cluster: Cluster, size: int) -> None:
    wait_until(
        lambda: any(e["world_size"] == size for e in events(cluster.run_dir, "world")), f"world of {size} workers"
    )


def test_a_node_is_killed_and_another_one_joins(cluster: Cluster) -> None:
    cluster.host_store()
    flags = ("--epochs", "100", "--ledger", "--peer-timeout", "2")
    program = (str(EXAMPLES / "elastic_ddp.py"),)
    nodes = cluster.start(*flags, nodes=3, program=program)
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events")
    wait_for_world(cluster, 3)
    wait_for_step(cluster.run_dir, 40)
    nodes[2].kill()
    wait_for_world(cluster, 2)
    cluster.start(*flags, program=program)
    cluster.finish([nodes[0], nodes[1], cluster.nodes[-1]])
    end = result(cluster.run_dir)
    steps = 100 * LENGTH // BATCH
    assert end["step"] == steps
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=steps)
    assert sorted(e["step"] for e in events(cluster.run_dir, "step")) == list(range(1, steps + 1))
    assert [incident["cause"] for incident in end["incidents"]] == ["peer_lost", "join"]
    assert all(incident["committed_steps_lost"] == 0 for incident in end["incidents"])
    assert outcomes(cluster.run_dir).count("finished") == 3


def test_it_takes_at_most_ten_lines() -> None:
    plain, elastic = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_ddp.py", "elastic_ddp.py"))
    changed = [line for line in difflib.ndiff(plain, elastic) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 10 + 1, changed  # and the docstring
