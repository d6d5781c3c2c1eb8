"""A node that is told in advance that it goes away: it leaves at a step's end, and nothing is lost or done again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Node, error_lines, events, wait_for_step, worlds
from tests.integration.test_in_place import ENDLESS
from tests.integration.test_joins import stop_all

pytestmark = pytest.mark.timeout(240)


def notices(run_dir: Path, state: str) -> list[dict[str, Any]]:
    return [event for event in events(run_dir, "notice") if event["state"] == state]


def start_two(cluster: Cluster, gone: Path, **of_noticed: Any) -> tuple[Node, Node]:
    """One node that is told by a file, and one that is told nothing. They train until they are stopped."""
    flags, common = (*ENDLESS, "--max-steps", "1000000"), {"nnodes": "1:2", "conf": cluster.last_call(60)}
    [noticed] = cluster.start(*flags, "--notices", f"file:{gone}", **common, **of_noticed)
    [other] = cluster.start(*flags, **common)
    return noticed, other


def causes(cluster: Cluster) -> list[str]:
    """Of the worlds, as rank 0 of each tells it."""
    return [event["cause"] for event in events(cluster.run_dir, "world") if event["rank"] == 0]


def test_a_noticed_node_leaves_as_a_whole(cluster: Cluster) -> None:
    """Both of its workers leave at one step, and its agent starts no others, though --max-restarts would let it."""
    gone = cluster.path / "gone"
    noticed, other = start_two(cluster, gone, nproc=2, max_restarts=3)
    wait_for_step(cluster.run_dir, 20)
    pids = {worker.pid for worker in noticed.workers()}
    deadline = time.time() + 60
    gone.write_text(json.dumps({"deadline": deadline, "reason": "spot"}))
    assert noticed.wait(40) == 1, "as after a SIGTERM to it"
    stopped = [event for event in events(cluster.run_dir, "done") if event["outcome"] == "stopped"]
    left = notices(cluster.run_dir, "left")
    assert {event["pid"] for event in left} == {event["pid"] for event in stopped} == pids
    assert len({event["step"] for event in left}) == 1
    assert all(0 < event["seconds_left"] < 60 for event in left)
    wait_for_step(cluster.run_dir, left[0]["step"] + 20)
    stop_all(cluster, [other])
    assert causes(cluster) == ["start", "leave"]
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 1]
    [given] = notices(cluster.run_dir, "given")
    assert (given["source"], given["reason"], given["deadline"], given["certain"]) == ("file", "spot", deadline, True)
    assert len(events(cluster.run_dir, "start")) == 3, "nobody was started again"
    assert events(cluster.run_dir, "peer_lost") == []
    assert "is taken away in " in noticed.text()
    assert not error_lines(other)
