"""Availability traces: the form of a file, the drill made from it, and a replay of a real one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.cli import main, make_parser
from elastic_train.errors import UsageError
from elastic_train.snapshot_interval import num_failures
from elastic_train.tools import drills
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.record import fault_records, read_drill
from elastic_train.tools.audit.trace_bill import bill_of_run, node_lives
from elastic_train.tools.drills.drill_command import settings_of
from elastic_train.tools.drills.faults import Join
from elastic_train.tools.drills.jobs import JOBS
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import TooSlow
from elastic_train.tools.drills.replay import Replay
from elastic_train.tools.drills.schedule import Planned
from elastic_train.tools.drills.trace import Act, AvailabilityTrace, Move, Stay, read_trace
from tests.drills.small_run import mark_as_drill, write_lines
from tests.drills.test_drill import drill
from tests.integration.cluster import check_steps, events

GOOD = """\
node,from,to,notice,price
a,100,,,0.40
b,100,160,30,0.12
c,130,190,0,0.12
b,190,,0,0.12
"""


RECLAIMS = Path(drills.__file__).parent / "data" / "reclaims.csv"
"""of three nodes one is taken away four times, each time 10 s after it was told"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_what_a_trace_does(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, GOOD), speed=10.0)
    assert trace.nodes == ("a", "b", "c")
    assert trace.first == (0, 1)
    assert trace.moves == (
        Move(3.0, Act.START, 2),
        Move(3.0, Act.NOTICE, 1),
        Move(6.0, Act.TAKE, 1, is_fault=False),
        Move(9.0, Act.TAKE, 2),
        Move(9.0, Act.START, 1),
    )
    assert trace.plan == [Planned(3.0, "join"), Planned(3.0, "stop"), Planned(9.0, "kill"), Planned(9.0, "join")]
    assert trace.new_beginnings == []
    assert [row["place"] for row in trace.as_json()["trace"]] == ["node1", "node2", "node3", "node2"]  # type: ignore[attr-defined]


def test_a_job_with_a_length_of_its_own(tmp_path: Path) -> None:
    words = ["drill", "--trace", str(RECLAIMS), "--job", "long", "--run-dir", str(tmp_path / "run")]
    settings = settings_of(make_parser().parse_args([*words, "--nodes-as", "processes"]))
    assert settings.trace is not None
    assert (settings.last_step, settings.num_nodes) == (1600, 3)
    assert settings.flags[settings.flags.index("--max-steps") + 1] == "1600"
    gone = [(move.at, move.place) for move in settings.trace.moves if move.act is Act.NOTICE]
    assert gone == [(30.0, 1), (75.0, 2), (120.0, 0), (165.0, 1)]
    assert settings.trace.first == (0, 1, 2)


def test_notice_and_price_may_be_left_out(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "to,node,from\n,a,0\n5,b,0\n"), speed=1.0)
    assert trace.stays == (Stay("a", 0.0, float("inf")), Stay("b", 0.0, 5.0))


HEAD = "node,from,to,notice,price\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: nothing: write a line with node,from,to"),
        ("node,from\na,0\n", "line 1: node,from: write"),
        ("node,from,to,cost\na,0,,1\n", "line 1: node,from,to,cost: write"),
        (HEAD + "a,0,,0,1\nb,0,5s,0,1\n", "line 3: to = '5s' is no number of seconds: write 0 or more"),
        (HEAD + "a,-1,,0,1\n", "line 2: from = '-1' is no number of seconds"),
        (HEAD + "a,0,inf,0,1\n", "line 2: to = 'inf' is no number of seconds"),
        (HEAD + "a,0,,0,cheap\n", "line 2: price = 'cheap' is no price: write 0 or more"),
        (HEAD + "a,0\n", "line 2: it has not as many values as line 1 has names"),
        (HEAD + "a,0,,0,1,2\n", "line 2: it has not as many values as line 1 has names"),
        (HEAD + ",0,,0,1\n", "line 2: node is empty: write its name"),
        (HEAD + "a,5,5,0,1\n", "line 2: to = 5 is not after from = 5: write a later one"),
        (HEAD + "a,5,8,4,1\n", "line 2: notice = 4 is longer than the node is there"),
        (HEAD + "a,5,,4,1\n", "line 2: notice = 4 is longer than the node is there, or it stays"),
        (HEAD + "a,0,,0,1\n", "it has 1 nodes: a drill needs two"),
        (HEAD + "a,0,,0,1\nb,0,5,0,\n", "some rows have a price and some none"),
        (HEAD + "a,0,,0,1\nb,0,9,0,1\nb,8,,0,1\n", "b comes at 8 and is there until 9: end the earlier row before"),
        (HEAD + "a,0,7,0,1\nb,0,9,0,1\n", "nobody is left after 9 s: leave one `to` empty"),
        (HEAD + "a,0,,0,1\nb,0,,0,1\n", "nothing happens in it: write a row with `to`"),
    ],
)
def test_what_it_may_not_say(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_trace(path, 1.0)
    assert f"--trace {path}" in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", 1.0)


@st.composite
def traces(draw: st.DrawFn) -> AvailabilityTrace:
    stays = [Stay("stays", 0.0, float("inf"))]
    for name in ("a", "b", "c"):
        times = sorted(draw(st.sets(st.integers(0, 50), max_size=8)))
        for start, end in zip(times[::2], times[1::2], strict=False):
            notice = draw(st.integers(0, end - start))
            stays.append(Stay(name, float(start), float(end), float(notice)))
    return AvailabilityTrace(tuple(sorted(stays, key=lambda stay: stay.start)), draw(st.sampled_from([0.5, 1.0, 7.0])))


@given(traces())
def test_nobody_starts_twice_or_goes_unstarted(trace: AvailabilityTrace) -> None:
    running = set(trace.first)
    times = [move.at for move in trace.moves]
    assert times == sorted(times)
    for move in trace.moves:
        if move.act is Act.START:
            assert move.place not in running
            running.add(move.place)
        else:
            assert move.place in running
            running -= {move.place} if move.act is Act.TAKE else set()
    assert running == {trace.nodes.index("stays")}
    assert trace.new_beginnings == []


def test_a_job_that_all_have_left(tmp_path: Path) -> None:
    text = "node,from,to\na,0,10\nb,0,20\nb,30,\na,40,\n"
    trace = read_trace(write(tmp_path, text), 1.0)
    assert trace.new_beginnings == [(30.0, ["b"])]
    words = ["drill", "--trace", str(tmp_path / "trace.csv"), "--run-dir", str(tmp_path / "run")]
    assert settings_of(make_parser().parse_args([*words, "--nodes-as", "processes"])).trace is not None
    if Network.why_not() is None:
        with pytest.raises(UsageError, match="under c10d b cannot begin the job anew, only a, the first"):
            settings_of(make_parser().parse_args(words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speed", "2"], "--speed 2: is of a trace: it goes with --trace FILE"),
        (["--trace", "FILE", "--speed", "0"], "--speed 0.0: must be a positive number"),
        (["--trace", "FILE", "--nodes", "3"], "--trace says which nodes are there when: it goes without --nodes"),
        (["--trace", "FILE", "--faults", "kill"], "it goes without --faults"),
    ],
)
def test_flags_that_do_not_go_with_it(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, GOOD)
    given_words = [str(path) if word == "FILE" else word for word in words]
    assert main(["drill", "--nodes-as", "processes", *given_words]) == 2
    assert says in capsys.readouterr().err


def test_the_lives_of_the_nodes() -> None:
    lines = [
        {"what": what, "node": node, "time": float(at)}
        for what, node, at in (
            ("started", "node1", 0), ("started", "node2", 1), ("worker", "node2", 2), ("ended", "node2", 11),
            ("started", "node2", 20), ("ended", "node2", 25), ("ended", "node1", 30),
        )
    ]  # fmt: skip
    assert node_lives(lines) == [("node2", 1.0, 10.0), ("node2", 20.0, 5.0), ("node1", 0.0, 30.0)]


def test_each_node_costs_its_own(run_dir: Path) -> None:
    """By the prices of its rows, and not by the one that the run was told."""
    own = bill_of_run(read_history(run_dir))
    assert own is not None
    assert own["node_price"] == 0.24
    stays = [
        {"place": "node1", "from": 100.0, "price": 36.0},
        {"place": "node2", "from": 100.0, "price": 3.6},
        {"place": "node2", "from": 101.0, "price": 99.0},  # which did not start
        {"place": "node2", "from": 108.0, "price": 0.0},
        {"place": "node2", "from": 121.0, "price": 99.0},
    ]
    mark_as_drill(run_dir, trace=stays, speed=1.0, trace_began=12.0)
    write_lines(
        run_dir / "drill" / "nodes.jsonl",
        [
            {"what": what, "node": node, "time": float(at)}
            for what, node, at in (
                ("started", "node1", 0), ("started", "node2", 0), ("ended", "node2", 10), ("started", "node2", 20.5),
                ("ended", "node2", 25.5), ("ended", "node1", 30),
            )
        ],
    )  # fmt: skip
    told = bill_of_run(read_history(run_dir))
    assert told is not None
    assert told["node_seconds"] == {"paid": 45.0, "kept": own["node_seconds"]["kept"]}
    assert told["cost"] == pytest.approx(30 * 0.01 + 10 * 0.001)
    assert told["cost_per_million_samples"] == pytest.approx(told["cost"] / own["kept_samples"] * 1e6)


def replayed(cwd: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = write(cwd, text)
    return drill(cwd, "--trace", str(path), "--seed", "5", *words, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trace_is_replayed(tmp_path: Path) -> None:
    """A node that is noticed, one that is killed, one that comes back: nothing is lost, and each costs its own."""
    done = replayed(tmp_path, GOOD, "--speed", "2", "--nodes-as", "processes")
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert [fault.name for fault in record.faults] == ["join", "stop", "kill", "join"]
    assert [round(fault.injected_at - record.faults[0].injected_at) for fault in record.faults] == [0, 0, 30, 30]  # type: ignore[operator]
    history = read_history(tmp_path / "run")
    told = bill_of_run(history)
    assert told is not None
    lives = node_lives(record.nodes)
    assert len(lives) == 4, "every start has its end"
    prices = {"node1": 0.40, "node2": 0.12, "node3": 0.12}
    assert told["cost"] == pytest.approx(sum(prices[node] * seconds / 3600 for node, _, seconds in lives))
    epochs, steps = divmod(history.last_step, -(-1437 // 64))
    assert told["kept_samples"] == epochs * 1437 + steps * 64
    assert f"{told['node_seconds']['paid']:,.0f} node-seconds paid" in done.stdout
    assert not [incident for incident in json.loads((tmp_path / "run" / "result.json").read_text())["incidents"]
                if incident["committed_steps_lost"]]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["c10d", "etcd3"])
def test_nodes_that_are_taken_after_a_notice_cost_no_step(tmp_path: Path, backend: str) -> None:
    """And next to no time: the wall is that of the steps undisturbed at the world sizes that were there, within 2 %,
    newcomers' imports included. The notices come by --notices."""
    words = ("--trace", str(RECLAIMS), "--job", "long", "--backend", backend, "--nodes-as", "processes")
    done = drill(tmp_path, *words, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    record, history = read_drill(run_dir), read_history(run_dir)
    assert record is not None
    assert sorted(fault.name for fault in record.faults) == ["join"] * 4 + ["stop"] * 4
    check_steps(run_dir, 1600)
    begun = {(line.step, line.generation) for line in history.ledger}
    assert len(begun) == 1600, "no step was begun twice"
    incidents = json.loads((run_dir / "result.json").read_text())["incidents"]
    assert sorted(incident["cause"] for incident in incidents) == ["join"] * 4 + ["leave"] * 4
    assert not any(incident["committed_steps_lost"] for incident in incidents)
    assert num_failures(incidents) == 0
    given, left = ([one for one in events(run_dir, "notice") if one["state"] == state] for state in ("given", "left"))
    assert sorted(one["deadline"] for one in given) == sorted(one["deadline"] for one in left)
    assert [one["source"] for one in left] == ["file"] * 4
    assert all(one["seconds_left"] > 0 for one in left), "before its deadline"
    assert events(run_dir, "signal") == events(run_dir, "peer_lost") == []
    found = lost_time(history)
    print(f"{backend}: {found.wall:.1f} s, of which undisturbed steps take {found.useful:.1f} s; {found}")
    assert min(found.step_seconds.values()) >= 0.1
    assert found.wall <= 1.02 * found.useful


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trace_in_which_everybody_goes(tmp_path: Path) -> None:
    """Without notice: all goes on from the newest snapshot, with a new first node."""
    text = "node,from,to,notice\na,0,20,0\nb,0,22,0\nb,24,,0\na,30,,0\n"
    done = replayed(tmp_path, text, "--nodes-as", "processes")
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert [fault.name for fault in record.faults] == ["kill", "kill-all", "join", "join"]


@pytest.mark.parametrize("hears_notices", [True, False])
def test_how_a_node_is_told_that_it_goes(*, hears_notices: bool) -> None:
    """By --notices with the moment at which it is taken, sped up as all else, where the job listens."""
    done: list[tuple[str, float]] = []
    agent = SimpleNamespace(send_signal=lambda signum: done.append((signal.Signals(signum).name, 0.0)))
    place: Any = SimpleNamespace(
        name="node2", index=1, is_running=True, members=("b/0/2",), effect=None,
        node=SimpleNamespace(agent=lambda: agent),
    )  # fmt: skip
    cluster: Any = SimpleNamespace(places=[None, place], inside=[], is_in=lambda _: True, rank_of=lambda _: 1)
    cluster.watch = SimpleNamespace(generation=0, step=5)
    cluster.give_notice = lambda told, deadline: done.append((told.name, deadline - time.time()))
    trace = AvailabilityTrace((Stay("a", 0.0, float("inf")), Stay("b", 0.0, 60.0, 30.0)), 2.0)
    job = replace(JOBS["paced"], hears_notices=hears_notices)
    settings: Any = SimpleNamespace(plan=trace.plan, seed=1, peer_timeout=2.0, job=job)
    record: Any = SimpleNamespace(fault=lambda *_, **__: None)
    replay = Replay(settings, trace, cluster, record, Untold())  # type: ignore[arg-type]
    replay._do_what_is_due(15.0)
    [(what, seconds)] = done
    assert what == ("node2" if hears_notices else "SIGTERM")
    assert seconds == (pytest.approx(15.0, abs=1.0) if hears_notices else 0.0)


class Untold:
    """A timeline that nobody reads."""

    def log(self, text: str) -> None:
        pass


def test_a_departure_that_meets_with_trouble_does_not_end_the_drill() -> None:
    written: list[dict[str, Any]] = []
    record: Any = SimpleNamespace(fault=lambda what, number, **more: written.append({"what": what, **more}))
    place: Any = SimpleNamespace(name="node2", index=1, is_running=True, members=("b/0/2",), effect=None)

    def kill(_places: list[Any]) -> None:
        raise TooSlow("no end of the killed processes")

    cluster: Any = SimpleNamespace(places=[place], inside=[], kill=kill, is_in=lambda _: True, rank_of=lambda _: 1)
    cluster.watch = SimpleNamespace(generation=0, step=5)
    settings: Any = SimpleNamespace(plan=[Planned(1.0, "kill")], seed=1, peer_timeout=2.0, job=JOBS["paced"])
    trace = AvailabilityTrace((Stay("b", 0.0, float("inf")),), 1.0)
    replay = Replay(settings, trace, cluster, record, Untold())  # type: ignore[arg-type]
    replay._do(Move(1.0, Act.TAKE, 0))
    reason = "no end of the killed processes"
    assert written == [{"what": "skipped", "name": "kill", "target": "node2", "reason": reason}]


@pytest.mark.parametrize(
    ("ago", "recovered_at", "told"),
    [(1000.0, None, ["recovered"]), (1.0, None, ["withdrawn"]), (1000.0, 5.0, [])],
    ids=["too late", "in time", "it had come"],
)
def test_a_join_whose_node_goes_before_it_is_through(ago: float, recovered_at: float | None, told: list[str]) -> None:
    """It has not recovered from what never came; one that has come is not told twice."""
    written: list[dict[str, Any]] = []
    place: Any = SimpleNamespace(name="node2", index=1)
    record = SimpleNamespace(
        fault=lambda what, number, **more: written.append({"what": what, "number": number, **more})
    )
    trace = AvailabilityTrace((Stay("a", 0.0, float("inf")),), 1.0)
    cluster: Any = SimpleNamespace(places=[SimpleNamespace(name="node1", index=0), place])
    settings: Any = SimpleNamespace(plan=[])
    replay = Replay(settings, trace, cluster, record, Untold())  # type: ignore[arg-type]
    fault = Join(cluster, random.Random(1), 5.0, targets=[place])
    fault.injected_at, fault.recovered_at = time.time() - ago, recovered_at
    replay._injected.append(fault)
    replay._close_arrival(place)
    assert [line["what"] for line in written] == told
    for found in fault_records(written):
        assert found.recovered_seconds is None
        assert found.is_withdrawn == (told == ["withdrawn"])
    assert fault.is_closed
