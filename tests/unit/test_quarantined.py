"""Where deaths are written down, what is told of them, and that rank 0 leaves a node in the queue for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.config import parse
from elastic_train.elastic.joins import SETTLE_SECONDS
from elastic_train.elastic.membership import Change
from elastic_train.elastic.quarantined import Quarantined, run_seconds
from elastic_train.elastic.world_report import Interruption, WorldReport
from elastic_train.observe.reporting import Reporter
from elastic_train.runlog.events import EventLog
from elastic_train.runlog.reader import read_all
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.unit.test_admission import member, newcomers
from tests.unit.test_state import make_state

FIRST, BAD = member(0), member(1)


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    events = EventLog(tmp_path / "events", host="node0", local_rank=0, rank=0, world_size=1)
    made = Reporter(events=events, ledger=None, tensorboard_dir=tmp_path, wants_bar=False, debug=False)
    yield made
    made.close()


def report_of(reporter: Reporter, state: TrainState, quarantine: str) -> WorldReport:
    worker: Any = SimpleNamespace(reporter=reporter, state=state, config=parse(["--quarantine", quarantine]))
    return WorldReport(worker)


def die(report: WorldReport, generation: int, *, again: bool = True) -> None:
    """The second of two members is lost, and perhaps admitted again."""
    alone, pair = World(0, generation, (FIRST,)), World(0, generation + 1, (FIRST, BAD))
    report.stands(alone, None, Change(lost=(BAD,)), Interruption("peer_lost"), None, 0.0, 0.0)
    if again:
        report.stands(pair, None, Change(joined=(BAD,)), Interruption("join"), None, 0.0, 0.0)


def last_line(reporter: Reporter) -> dict[str, Any]:
    reporter.events.write("warning")
    [path] = reporter.events.directory.iterdir()
    return read_all(path)[-1]


def test_deaths_are_written_down_where_they_count(reporter: Reporter) -> None:
    state = make_state()
    report = report_of(reporter, state, "on")
    for turn in range(2):
        die(report, 2 * turn)
        assert "quarantined" not in last_line(reporter)
    die(report, 4, again=False)
    deaths = [one for one in state.incidents if "dead_hosts" in one]
    assert [one["dead_hosts"] for one in deaths] == [["node1"]] * 3
    assert all(0 < one["run_seconds"] <= run_seconds(state) for one in deaths)
    [told] = last_line(reporter)["quarantined"]
    assert (told["host"], told["deaths"]) == ("node1", 3)
    assert 50 < told["until"] - time.time() <= 60
    inside = World(0, 5, (FIRST, BAD))
    report.stands(inside, None, Change(joined=(BAD,)), Interruption("join"), None, 0.0, 0.0)
    assert "quarantined" not in last_line(reporter), "it was needed, and is in"


def test_nothing_is_written_down_where_they_do_not_count(reporter: Reporter) -> None:
    state = make_state()
    report = report_of(reporter, state, "off")
    for turn in range(4):
        die(report, 2 * turn, again=turn < 3)
    assert len(state.incidents) == 7
    assert not [one for one in state.incidents if "dead_hosts" in one]
    assert "quarantined" not in last_line(reporter)


def test_a_death_counts_though_the_next_world_has_the_host_again(
    reporter: Reporter,
) -> None:
    """The world waited for it, below --min-nodes: its death and its return are one change."""
    state = make_state()
    report = report_of(reporter, state, "on")
    back = replace(BAD, uid="back")
    change = Change(lost=(BAD,), joined=(back,))
    report.stands(World(0, 2, (FIRST, back)), None, change, Interruption("peer_lost"), None, 0.0, 0.0)
    assert state.incidents[0]["dead_hosts"] == ["node1"]


def quarantined(state: TrainState | None) -> tuple[Quarantined, list[str], list[tuple[str, ...]]]:
    warned: list[str] = []
    told: list[tuple[str, ...]] = []

    def tell(node: Any, _why: str) -> None:
        told.append(tuple(one.uid for one in node))

    return Quarantined(lambda: state, warned.append, tell), warned, told


def state_after(*deaths: float) -> TrainState:
    """Of a run in which the second host died so many seconds ago."""
    state = make_state()
    state.generation, now = 7, run_seconds(state)
    state.incidents = [{"dead_hosts": ["node1"], "run_seconds": now - ago} for ago in deaths]
    return state


def test_rank_0_leaves_the_node_in_the_queue_and_takes_the_next_one() -> None:
    here, clock, world = newcomers(BAD, member(2), agreement={})
    gate, warned, told = quarantined(state_after(30.0, 20.0, 10.0))
    here.joins.admissible = gate.admissible
    for _ in range(3):
        here.joins.consider(world)
        clock.now += 2 * SETTLE_SECONDS
    assert [one.uid for one in here.joins._admits] == ["uid2"]
    assert len(warned) == 1, "once"
    assert warned[0].startswith("node1 waits ")
    assert "died unannounced 3 times" in warned[0]
    assert told == [("uid1",)]


@pytest.mark.parametrize("deaths", [(30.0, 20.0), (90.0, 80.0, 61.0)])
def test_rank_0_admits_who_has_not_to_wait(deaths: tuple[float, ...]) -> None:
    gate, warned, _ = quarantined(state_after(*deaths))
    assert gate.admissible(World(0, 7, (FIRST,)), [(BAD,)]) == [(BAD,)]
    assert not warned


def test_rank_0_without_the_state_keeps_nobody_waiting() -> None:
    gate, _, _ = quarantined(None)
    assert gate.admissible(World(0, 7, (FIRST,)), [(BAD,)]) == [(BAD,)]
