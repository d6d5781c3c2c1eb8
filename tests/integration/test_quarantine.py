"""A host that dies again and again, with real nodes that have host names of their own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.cli import main
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import wait_until
from tests.audits import audit
from tests.integration.apart import Apart, ending
from tests.integration.cluster import events

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
FLAGS = (
    "--quarantine", "on", "--ledger", "--epochs", "100000", "--eval-every", "100000", "--no-progress",
)  # fmt: skip
ALL, OTHERS = {0: 3, 1: 3, 2: 3}, {0: 2, 1: 2}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Apart]:
    """Three nodes that have trained together, and share a run directory."""
    missing = Network.why_not()
    if missing is not None:
        pytest.skip(f"no network namespaces: {missing}")
    with (
        contextlib.closing(Network(3)) as network,
        ending(Apart(network, tmp_path, FLAGS, num_steps=5, is_shared=True)) as three,
    ):
        three.start(0, 1, 2)
        three.train(ALL)
        yield three


def kill_and_start_again(three: Apart) -> float:
    """The third one; when, in Unix seconds."""
    killed_at = time.time()
    three.nodes[2].kill()
    three.train(OTHERS)
    three.start(2)
    return killed_at


def test_a_host_that_is_killed_three_times_waits_a_minute(three: Apart, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = three.run_dirs[0]
    for _ in range(2):
        kill_and_start_again(three)
        three.train(ALL)
    killed_at = kill_and_start_again(three)
    said = wait_until(
        lambda: [line for line in three.nodes[2].text().splitlines() if "node3 waits " in line], "it waits"
    )
    assert len(said) == 1
    assert said[0].endswith("in the join queue (--quarantine): it died unannounced 3 times, less than 10 min apart")
    [warning] = [event for event in events(run_dir, "warning") if "node3 waits " in event["message"]]
    assert (warning["rank"], warning["generation"]) == (0, three.last_world(0)["generation"])
    assert main(["status", str(run_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    capacity = {"train": 2, "could_train": 2, "wanted": 1, "may_be_taken": 0, "quarantined": 1, "max_nodes": 3}
    assert status["capacity"] == capacity
    [told] = status["quarantined"]
    assert (told["host"], told["deaths"]) == ("node3", 3)
    assert 58 < told["until"] - killed_at < 65
    assert main(["status", str(run_dir)]) == 0
    assert "node3, for " in capsys.readouterr().out
    back = three.train(ALL)[2]
    assert 60 <= back["time"] - killed_at < 70
    three.stop()
    found = audit(run_dir)
    assert found.passed, "\n".join(found.reasons)
