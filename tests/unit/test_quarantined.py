"""The record and the report of deaths, and the hosts that rank 0 leaves in the queue for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.config import parse
from elastic_train.elastic import resume
from elastic_train.elastic.earlier_run import note_restart
from elastic_train.elastic.joins import SETTLE_SECONDS, Node
from elastic_train.elastic.membership import Change
from elastic_train.elastic.next_world import QueueNews
from elastic_train.elastic.quarantined import admissible, run_seconds
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.resume import Holding, Resume, Resumed
from elastic_train.elastic.world_report import Interruption, WorldReport
from elastic_train.observe.reporting import Reporter
from elastic_train.runlog.events import EventLog
from elastic_train.runlog.reader import read_all
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.unit.test_admission import member, newcomers
from tests.unit.test_events import WARNING
from tests.unit.test_state import make_state

FIRST, BAD = member(0), member(1)


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    events = EventLog(tmp_path / "events", host="node0", local_rank=0, rank=0, world_size=1)
    made = Reporter(events=events, ledger=None, tensorboard_dir=tmp_path, wants_bar=False, debug=False)
    yield made
    made.close()


def report_of(reporter: Reporter, state: TrainState, quarantine: str) -> WorldReport:
    worker: Any = SimpleNamespace(
        reporter=reporter, state=state, config=parse(["--quarantine", quarantine]), device=torch.device("cpu"),
        task=SimpleNamespace(title="it"), reach=lambda _point, _world: None,
    )  # fmt: skip
    return WorldReport(worker)


def die(report: WorldReport, generation: int, *, again: bool = True) -> None:
    """The second of two members is lost, and perhaps admitted again."""
    alone, pair = World(0, generation, (FIRST,)), World(0, generation + 1, (FIRST, BAD))
    enter(report, alone, Change(lost=(BAD,)), "peer_lost")
    if again:
        enter(report, pair, Change(joined=(BAD,)), "join")


def enter(report: WorldReport, world: World, change: Change, why: str) -> None:
    """Without getting a state."""
    report.begins(world, change, Interruption(why))
    report.stands(world, None, change, Interruption(why), None, 0.0, 0.0)


def lines(reporter: Reporter) -> list[dict[str, Any]]:
    [path] = reporter.events.directory.iterdir()
    return read_all(path)


def last_line(reporter: Reporter) -> dict[str, Any]:
    reporter.events.write(WARNING)
    return lines(reporter)[-1]


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
    enter(report, inside, Change(joined=(BAD,)), "join")
    assert "quarantined" not in last_line(reporter), "it was needed, and is in"


def test_nothing_is_written_down_where_they_do_not_count(reporter: Reporter) -> None:
    state = make_state()
    report = report_of(reporter, state, "off")
    for turn in range(4):
        die(report, 2 * turn, again=turn < 3)
    assert len(state.incidents) == 7
    assert not [one for one in state.incidents if "dead_hosts" in one]
    assert "quarantined" not in last_line(reporter)


class Entering:
    """The two members of a world that enter it at once, as far as they tell each other anything; each on a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._meet, self._told, self.states = threading.Barrier(2, timeout=10.0), [{}, {}], [make_state(), make_state()]
        self._here = threading.local()
        monkeypatch.setattr(resume, "gather_json", self._gather)
        monkeypatch.setattr(resume, "sync_from_freshest", self._take)
        monkeypatch.setattr(resume, "set_group_timeout", lambda _timeout: None)

    def _gather(self, value: Any) -> list[Any]:
        self._told[self._here.rank] = json.loads(json.dumps(value))
        self._meet.wait()
        return list(self._told)

    def _take(self, *arguments: Any) -> int:
        self.states[1].incidents = list(self.states[0].incidents)
        if self._here.rank == 1:
            arguments[-1](self.states[0].clock.state_dict())
        self._meet.wait()
        return 0

    def enter(self, rank: int, world: World, change: Change, why: Interruption, report: WorldReport) -> None:
        """The first one has the state, the second one does not."""
        self._here.rank, nothing = rank, lambda *_arguments: None
        files: Any = SimpleNamespace(finish_claim=nothing, note_run=nothing)
        membership: Any = SimpleNamespace(
            job=SimpleNamespace(place=SimpleNamespace(sees=lambda _world: True, note=lambda _world, is_shared: None)),
            sockets=SimpleNamespace(require_unbroken=nothing), watcher=SimpleNamespace(do=nothing),
            side=SimpleNamespace(branch=None),
        )  # fmt: skip
        trainer: Any = SimpleNamespace(states=SimpleNamespace(comparison=nothing))
        earlier: Any = SimpleNamespace(warn_of_parted=nothing)
        held = Resume(report._worker, membership, trainer, earlier, files, report)
        held.holding = Holding.STATE if rank == 0 else Holding.NOTHING
        report.begins(world, change, why)
        found: Resumed = held.into(world, change, is_formed_ahead=False)
        report.stands(world, None, change, why, found.restored, 8.0, 16.0)


@pytest.mark.parametrize("quarantine", ["on", "off"])
@pytest.mark.parametrize("what", ["lost", "left", "joined"])
def test_who_enters_in_the_very_reform_of_a_death_knows_of_it(
    what: str, quarantine: str, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be rank 0 later, and write the result; and admit the host that has died."""
    newcomer = replace(member(2), uid="new")
    gone = {"lost": (BAD,)} if what == "lost" else {"left": (BAD,)} if what == "left" else {}
    entering, members = Entering(monkeypatch), (FIRST, newcomer)
    changes = [Change(joined=(newcomer,), seconds_meet=4.0, **gone), Change(seconds_meet=5000.0)]
    whys = [Interruption("join", 1.0, 2.0), Interruption("start")]
    reports = [report_of(reporter, state, quarantine) for state in entering.states]
    with ThreadPoolExecutor(2) as threads:
        for done in [
            threads.submit(entering.enter, rank, World(rank, 3, members), changes[rank], whys[rank], reports[rank])
            for rank in range(2)
        ]:
            done.result(timeout=10.0)
    there, here = (state.incidents for state in entering.states)
    told = [{name: one[name] for name in one if name not in ("time", "run_seconds")} for one in (*there, *here)]
    cause = {"lost": "peer_lost", "left": "leave", "joined": "join"}[what]
    dead = {"dead_hosts": ["node1"]} if (what, quarantine) == ("lost", "on") else {}
    seconds = {"detect": 1.0, "abort": 2.0, "meet": 4.0, "init": 8.0, "sync": 16.0}
    lost = [BAD.name] if gone else []
    expected = {
        "cause": cause, "generation": 3, "step": 0, "world_size": 2, "lost_members": lost,
        "left_members": lost if what == "left" else [], "joined_members": [newcomer.name],
        "committed_steps_lost": 0, "seconds": seconds, **dead,
    }  # fmt: skip
    assert told == [expected] * 2
    written = [line for line in lines(reporter) if line["event"] == "world"]
    assert [line["incidents"] for line in written] in ([there, here], [here, there]), "the run's end says no more"
    assert all(0 < one["run_seconds"] <= run_seconds(entering.states[1]) for one in here if dead)


def test_a_death_counts_though_the_next_world_has_the_host_again(
    reporter: Reporter,
) -> None:
    """The world waited for it, below --min-nodes: its death and its return are one change."""
    state = make_state()
    report = report_of(reporter, state, "on")
    back = replace(BAD, uid="back")
    change = Change(lost=(BAD,), joined=(back,))
    enter(report, World(0, 2, (FIRST, back)), change, "peer_lost")
    assert state.incidents[0]["dead_hosts"] == ["node1"]


def quarantined(
    state: TrainState | None,
) -> tuple[Callable[[World, list[Node]], list[Node]], list[str], list[tuple[str, ...]]]:
    warned: list[str] = []
    told: list[tuple[str, ...]] = []

    job: Any = None
    around: Any = None
    news = QueueNews(job, around)
    news.send = lambda node, _why: told.append(tuple(one.uid for one in node))  # type: ignore[method-assign]
    return partial(admissible, lambda: state, warned.append, news.send_once), warned, told


def state_after(*deaths: float) -> TrainState:
    """Of a run in which the second host died so many seconds ago."""
    state = make_state()
    state.generation, now = 7, run_seconds(state)
    state.incidents = [{"dead_hosts": ["node1"], "run_seconds": now - ago} for ago in deaths]
    return state


def test_rank_0_leaves_the_node_in_the_queue_and_takes_the_next_one() -> None:
    here, clock, world = newcomers(BAD, member(2), agreement={})
    gate, warned, told = quarantined(state_after(30.0, 20.0, 10.0))
    here.joins.admissible = gate
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
    assert gate(World(0, 7, (FIRST,)), [(BAD,)]) == [(BAD,)]
    assert not warned


def test_rank_0_without_the_state_keeps_nobody_waiting() -> None:
    gate, _, _ = quarantined(None)
    assert gate(World(0, 7, (FIRST,)), [(BAD,)]) == [(BAD,)]


def test_who_died_before_a_world_that_never_stood_is_in_the_incident_of_the_next_one(reporter: Reporter) -> None:
    """It breaks as its members come to one state."""
    state, other = make_state(), member(2)
    report = report_of(reporter, state, "on")
    report.begins(World(0, 2, (FIRST, other)), Change(lost=(BAD,)), Interruption("peer_lost"))
    enter(report, World(0, 3, (FIRST,)), Change(lost=(other,)), "peer_lost")
    enter(report, World(0, 4, (FIRST, other)), Change(joined=(other,)), "join")
    assert [(one["lost_members"], one.get("dead_hosts")) for one in state.incidents] == [
        ([BAD.name, other.name], ["node1", "node2"]),
        ([], None),
    ]


def test_an_incident_took_the_time_of_all_rounds_that_it_took(reporter: Reporter) -> None:
    """What the first one took to come together interrupted nothing."""
    state, other = make_state(), member(2)
    report = report_of(reporter, state, "on")
    three, two, one = World(0, 0, (FIRST, BAD, other)), World(0, 1, (FIRST, other)), World(0, 2, (FIRST,))
    report.begins(three, Change(seconds_meet=5000.0), Interruption("start"))
    report.begins(two, Change(lost=(BAD,), seconds_meet=4.0), Interruption("peer_lost", 1.0, 2.0))
    change, why = Change(lost=(other,), seconds_meet=0.5), Interruption("peer_lost", 0.125, 0.25)
    report.begins(one, change, why)
    report.stands(one, None, change, why, None, 8.0, 16.0)
    enter(report, replace(two, generation=3), Change(joined=(other,)), "join")
    in_all = {"detect": 1.125, "abort": 2.25, "meet": 4.5, "init": 8.0, "sync": 16.0}
    assert [one["seconds"] for one in state.incidents] == [in_all, dict.fromkeys(in_all, 0.0)]


def test_who_was_told_of_the_rounds_before_counts_them_as_well(reporter: Reporter) -> None:
    """With the state, in a world that breaks before it stands."""
    other = member(2)
    first, newcomer = (report_of(reporter, make_state(), "on") for _ in range(2))
    world = World(0, 1, (FIRST, other))
    first.begins(world, Change(joined=(other,), seconds_meet=4.0), Interruption("join", 1.0, 2.0))
    newcomer.begins(world, Change(seconds_meet=5000.0), Interruption("start"))
    newcomer.interrupted = first.interrupted
    for report in (first, newcomer):
        report.begins(replace(world, generation=2), Change(seconds_meet=0.5), Interruption("peer_lost", 0.125, 0.25))
        assert report.interrupted["seconds"] == {"detect": 1.125, "abort": 2.25, "meet": 4.5}


def test_the_first_world_that_stands_tells_of_a_restart_for_one_that_broke(reporter: Reporter) -> None:
    state, other = make_state(), member(2)
    report = report_of(reporter, state, "on")
    broken = World(0, 2, (FIRST, other))
    report.begins(broken, Change(), Interruption("start"))
    note_restart(state, Restored("snapshot", 0, 0), (1, 5), broken)
    enter(report, World(0, 3, (FIRST,)), Change(lost=(other,)), "peer_lost")
    enter(report, World(0, 4, (FIRST, other)), Change(joined=(other,)), "join")
    told = [line["incidents"] for line in lines(reporter) if line["event"] == "world"]
    assert [[(one["cause"], one["generation"]) for one in some] for some in told] == [
        [("restart", 2), ("peer_lost", 3)],
        [("join", 4)],
    ]
    assert [one for some in told for one in some] == state.incidents


def test_who_joined_a_world_that_broke_and_was_lost_with_it_has_not_joined(reporter: Reporter) -> None:
    state, other, third = make_state(), member(2), member(3)
    report = report_of(reporter, state, "on")
    report.begins(World(0, 2, (FIRST, other, third)), Change(joined=(other, third)), Interruption("join"))
    enter(report, World(0, 3, (FIRST, third)), Change(lost=(other,)), "peer_lost")
    [one] = state.incidents
    assert (one["lost_members"], one["joined_members"]) == ([other.name], [third.name])
