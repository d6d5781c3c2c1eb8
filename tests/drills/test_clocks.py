"""A node's clock that is set off: what the files tell of the run is the same, and the job does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_train.cli import make_parser
from elastic_train.errors import UsageError
from elastic_train.tools.audit.audit import CheckOutcome, audit
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.record import Record
from elastic_train.tools.audit.report import page
from elastic_train.tools.drills import faketime
from elastic_train.tools.drills.backends import backend_of
from elastic_train.tools.drills.cluster import Cluster
from elastic_train.tools.drills.drill_command import settings_of
from elastic_train.tools.drills.faketime import REREAD_SECONDS, NodeClocks
from elastic_train.tools.drills.nodes import wait_until
from tests.drills.planting import verdicts
from tests.drills.small_run import MEMBERS, add_monotonic, mark_as_drill, write_small_run

HOUR = 3600.0
SECONDS_PER_STEP = 0.1
"""of three workers"""
FLAGS = (
    "--task", "elastic_train.tools.drills.task:PacedDigits", "--ledger", "--epochs", "100000", "--eval-every", "100000",
    "--peer-timeout", "5", "--no-progress",
)  # fmt: skip
needs_libfaketime = pytest.mark.skipif(NodeClocks.why_not() is not None, reason=str(NodeClocks.why_not()))


def jump(by: float, at: float) -> object:
    """A clock that is set at some time into the run."""
    return lambda time: by if time >= at else 0.0


@pytest.mark.parametrize(
    "ahead",
    [
        {MEMBERS[0]: lambda time: HOUR},
        {MEMBERS[1]: lambda time: -HOUR},
        {MEMBERS[0]: jump(HOUR, 1.25)},
        {MEMBERS[0]: jump(-HOUR, 1.25)},
        {MEMBERS[0]: jump(HOUR, 1.95), MEMBERS[1]: lambda time: -HOUR},
        {MEMBERS[0]: jump(-HOUR, 2.3), MEMBERS[1]: jump(HOUR, 1.78)},
    ],
    ids=["ahead", "behind", "jumps ahead", "jumps back", "one jumps, one is behind", "both jump"],
)
def test_clocks_that_are_off_change_nothing_in_what_is_told(tmp_path: Path, ahead: dict[str, object]) -> None:
    told = []
    for name, errors in (("right", {}), ("off", ahead)):
        run_dir = tmp_path / name / "run"
        write_small_run(run_dir)
        mark_as_drill(run_dir, nodes=3, nodes_as="processes", backend="c10d")
        add_monotonic(run_dir, errors)  # type: ignore[arg-type]
        found, history = audit(run_dir), read_history(run_dir)
        assert set(verdicts(found).values()) == {CheckOutcome.PASS}, found.reasons
        lost = lost_time(history)
        times = [(world.generation, world.time) for world in history.worlds] + [(s.step, s.time) for s in history.steps]
        told.append((lost.wall, lost.useful, lost.by_cause["peer_lost"], *[time for _, time in times]))
        assert [number for number, _ in times] == [0, 1, 1, 2, 3, 4, 5, 6, 7]
        assert "<svg" in page(history, found)
    assert told[0] == pytest.approx(told[1], abs=1e-3)


def test_a_machine_without_libfaketime_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faketime, "find_library", lambda: None)
    with pytest.raises(UsageError, match="clock: not on this machine: no libfaketime here: `pip install libfaketime`"):
        settings_of(make_parser().parse_args(["drill", "--nodes-as", "processes", "--faults", "clock"]))
    drawn = ["drill", "--nodes-as", "processes", "--seed", "1", "--every", "1", "--duration", "500"]
    assert "clock" not in {planned.fault for planned in settings_of(make_parser().parse_args(drawn)).plan}


@needs_libfaketime
def test_the_clock_of_a_node_is_set_and_set_right(tmp_path: Path) -> None:
    clocks = NodeClocks(tmp_path)
    assert clocks.offset(0) == pytest.approx(0.0, abs=0.5)
    clocks.set(0, 3600)
    assert clocks.offset(0) == pytest.approx(3600.0, abs=0.5)
    assert clocks.offset(1) == pytest.approx(0.0, abs=0.5), "another node's"
    clocks.set(0, -3600)
    assert clocks.offset(0) == pytest.approx(-3600.0, abs=0.5)


@needs_libfaketime
def test_a_process_that_runs_notices_within_a_second_by_its_wall_clock_alone(tmp_path: Path) -> None:
    clocks = NodeClocks(tmp_path)
    program = "import time\nwhile True: print(time.time(), time.monotonic(), flush=True); input()"
    command = [*clocks.prefix(0), sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert not clocks.is_mapped(os.getpid())
            before = [float(word) for word in process.stdout.readline().split()]
            assert clocks.is_mapped(process.pid)
            clocks.set(0, 3600)
            time.sleep(REREAD_SECONDS)
            process.stdin.write("\n")
            process.stdin.flush()
            after = [float(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()
    clocks.forget([process.pid])
    assert not list(Path("/dev/shm").glob(f"*faketime*_{process.pid}"))
    wall, monotonic = (new - old for old, new in zip(before, after, strict=True))
    assert REREAD_SECONDS <= monotonic < 60
    assert wall - monotonic == pytest.approx(3600.0, abs=0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_libfaketime
@pytest.mark.parametrize("backend", ["c10d", "etcd3"])
@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_node_with_a_wrong_clock_leaves_and_joins(tmp_path: Path, backend: str, ahead: int) -> None:
    """Nobody compares clocks: who lives is judged by what is heard of it."""
    run_dir = tmp_path / "run"
    record = Record(tmp_path / "nodes")  # not in the run: for its audit this is no drill
    clocks, meeting = NodeClocks(record.path), backend_of(backend, None)
    cluster = Cluster(run_dir, record, FLAGS, num_nodes=3, clocks=clocks, backend=meeting)
    try:
        cluster.set_pace(3 * SECONDS_PER_STEP / 64)
        cluster.backend.start()
        for place in cluster.places:
            cluster.start(place)
        cluster.settle(3, 5, 240)
        wrong = next(place for place in cluster.places if cluster.rank_of(place) == 0)
        clocks.set(wrong.index, ahead)
        cluster.settle(3, int(12 / SECONDS_PER_STEP), 240)  # longer than any timeout
        cluster.kill([wrong])
        cluster.settle(2, 5, 60)
        cluster.start(wrong)
        cluster.settle(3, int(12 / SECONDS_PER_STEP), 240)
        assert cluster.watch.generation == 2, "the other two went on, and it was taken in"
        for place in cluster.running:
            assert place.node is not None
            place.node.signal(signal.SIGTERM)
        wait_until(lambda: cluster.poll() is not None and not cluster.running, "end of all nodes", 60)
    finally:
        cluster.close()
        record.close()
    found = audit(run_dir)
    assert found.passed, found.reasons
    assert {"ledger", "steps", "generations"} <= {
        n for n, verdict in verdicts(found).items() if verdict is CheckOutcome.PASS
    }
