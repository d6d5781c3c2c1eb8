"""Schedules of drills: the same for the same seed, and always possible."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elastic_train.cli import make_parser
from elastic_train.errors import UsageError
from elastic_train.tools.audit.record import fault_records
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.drill_command import num_steps, settings_of
from elastic_train.tools.drills.environment_faults import DiskFull
from elastic_train.tools.drills.jobs import JOBS, SLOW_FROM
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import CommandFailed
from elastic_train.tools.drills.schedule import (
    DEFAULT_FAULTS,
    Planned,
    default_plan,
    fits,
    random_plan,
    read_scenario,
)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_lasts_until_its_last_fault(name: str) -> None:
    """Each fault waits until the one before is over. A fast job waits for them, a slow one has twice the steps."""
    job, plan = JOBS[name], [Planned(50.0, "join")]
    if job.num_steps is None:
        steps = num_steps(plan, job, is_long=False)
        waited = (1 - SLOW_FROM) * steps / job.rate_at(steps, steps)
        assert SLOW_FROM * steps / job.steps_per_second + waited >= 100.0


def test_the_default_plan_has_its_five_faults_in_a_possible_order() -> None:
    orders = set()
    for seed in range(200):
        plan = default_plan(seed, 60.0, 4)
        assert plan == default_plan(seed, 60.0, 4)
        order = tuple(planned.fault for planned in plan)
        assert sorted(order) == sorted(DEFAULT_FAULTS)
        assert fits(order, 4)
        assert [planned.at for planned in plan] == [10.0, 20.0, 30.0, 40.0, 50.0]
        orders.add(order)
    assert len(orders) > 20, "the seed decides"


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_long_plan_never_runs_out_of_nodes_or_places(nodes: int) -> None:
    for seed in range(50):
        plan = random_plan(seed, list(FAULTS), 900.0, 5.0, nodes)
        assert plan == random_plan(seed, list(FAULTS), 900.0, 5.0, nodes)
        assert len(plan) == 180
        assert fits([planned.fault for planned in plan], nodes)
        assert plan[-1].at == 900.0
        present = nodes
        for planned in plan:
            assert present >= FAULTS[planned.fault].least_nodes(), "a slow line needs somebody at its other end"
            present += FAULTS[planned.fault].size


def test_faults_that_no_job_of_this_size_survives() -> None:
    with pytest.raises(UsageError, match="none of them leaves a node of 2"):
        random_plan(0, ["kill-two"], 60.0, 10.0, 2)


def test_a_scenario_file(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text('[[fault]]\nat = 20\nname = "join"\n[[fault]]\nat = 5.5\nname = "kill"\n')
    assert [(planned.at, planned.fault) for planned in read_scenario(path)] == [
        (5.5, "kill"),
        (20, "join"),
    ]
    for text, message in (
        ("", r"write \[\[fault\]\] tables"),
        ("[[faults]]\nat = 1\n", r"write \[\[fault\]\] tables"),
        ('[fault]\nat = 1\nname = "kill"\n', r"write \[\[fault\]\] tables"),
        ('seed = 3\n[[fault]]\nat = 1\nname = "kill"\n', r"write \[\[fault\]\] tables"),
        ('[[fault]]\nat = 1\nname = "earthquake"\n', "no fault earthquake"),
        ('[[fault]]\nat = 1\nname = "kill"\n[[fault]]\nname = "kill"\n', "fault 2: .*check at"),
        ('[[fault]]\nat = 1\nname = "kill"\nnode = 2\n', "fault 1: .*check node"),
        ('[[fault]]\nat = -5\nname = "kill"\n', "at = -5"),
        ('[[fault]]\nat = "5"\nname = "kill"\n', "at = '5'"),
        ("[[fault]]\nat = nan\nname = 'kill'\n", "at = nan"),
        ("[[fault]]\nat = 1\nname = 3\n", "name = 3"),
        ("fault = [3]\n", "fault 1: "),
        ("not toml", "is no TOML"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_scenario(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_scenario(tmp_path / "missing")


def settings(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["drill", "--nodes-as", "processes", *arguments])


def test_flags_after_the_dashes_are_the_workers(tmp_path: Path) -> None:
    found = settings_of(settings("--seed", "3", "--run-dir", str(tmp_path / "run"), "--", "--lr", "0.1"))
    assert list(found.flags[-2:]) == ["--lr", "0.1"]
    assert found.last_step == 1200
    flagged = ("--task", "tests.unit.test_tasks:_Flagged", "--width", "7")
    own = settings_of(settings("--", *flagged, "--epochs", "3", "--peer-timeout=5"))
    assert own.last_step is None, "it has its own end"
    assert own.peer_timeout == 5.0
    assert "elastic_train.tools.drills.task:PacedDigits" not in own.flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "1"), "--nodes 1"),
        (("--duration", "0"), "--duration"),
        (("--duration", "nan"), "--duration nan: must be a positive number"),
        (("--duration", "inf"), "--duration inf: must be a positive number"),
        (("--every", "inf"), "--every inf: must be a positive number"),
        (("--every", "1e-300"), "--duration 60: is longer than 100,000 faults"),
        (("--every", "5", "--duration", "1e300"), "faults, one every 5 s"),
        (("--faults", "kill,join", "--duration", "1e300"), "faults, one every 5 s"),
        (("--faults", "earthquake"), "no 'earthquake'"),
        (("--faults", "partition"), "needs network namespaces"),
        (("--scenario", "x.toml", "--every", "5"), "goes without"),
        (("--faults", ""), "--faults has no value"),
        (("--", "--task", "nosuch:Task"), "no module named nosuch"),
        (("--", "--task", "tests.unit.test_tasks:_Flagged", "--height", "7"), "unrecognized arguments: --height 7"),
        (("--faults", "kill,kill-etcd"), "kill-etcd: goes with --backend etcd3 only"),
        (("--backend", "etcd3", "--faults", "kill-endpoint"), "kill-endpoint: goes with --backend c10d only"),
        (("--rdzv-endpoint", "h1:2379"), "goes with --backend etcd3"),
        (("--", "--run-dir", "x"), "the drill sets that itself"),
        (("--", "--no-such-flag"), "no-such-flag"),
        (("--", "--lr", "-1"), "--lr"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(settings(*arguments))


def test_each_backend_draws_from_the_faults_that_go_with_it() -> None:
    drawn = {}
    for backend in ("c10d", "etcd3"):
        plan = settings_of(settings("--backend", backend, "--seed", "1", "--every", "1", "--duration", "500")).plan
        drawn[backend] = {planned.fault for planned in plan}
    assert drawn["c10d"] - drawn["etcd3"] == {"kill-endpoint"}
    assert drawn["etcd3"] - drawn["c10d"] == {"kill-etcd", "freeze-etcd-leader"}


def test_nodes_in_namespaces_cannot_reach_a_users_etcd() -> None:
    arguments = ["drill", "--backend", "etcd3", "--rdzv-endpoint", "h1:2379"]
    assert not settings_of(make_parser().parse_args(arguments)).wants_network
    with pytest.raises(UsageError, match="leave out --rdzv-endpoint"):
        settings_of(make_parser().parse_args([*arguments, "--nodes-as", "namespaces"]))


def test_where_there_are_no_namespaces_the_drill_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "why_not", lambda: "not root")
    found = settings_of(make_parser().parse_args(["drill"]))
    assert (found.wants_network, found.why_no_network) == (False, "not root")
    assert settings_of(settings()).why_no_network is None, "as it was told"


@pytest.mark.skipif(Network.why_not() is not None, reason=f"no network namespaces: {Network.why_not()}")
def test_what_the_machine_cannot_do_to_a_network_is_refused_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(network: Network, *_: object) -> None:
        raise CommandFailed("Specified qdisc kind is unknown")

    missing = {"drop_some": "packet-loss", "slow_down": "slow-link"}
    for method, fault in missing.items():
        monkeypatch.setattr(Network, method, fail)
        with pytest.raises(UsageError, match=f"{fault}: not on this machine: Specified qdisc"):
            settings_of(make_parser().parse_args(["drill", "--faults", f"kill,{fault}"]))
    words = ["drill", "--seed", "1", "--every", "1", "--duration", "500"]
    drawn = settings_of(make_parser().parse_args(words)).plan
    assert "partition" in {planned.fault for planned in drawn}
    assert not {planned.fault for planned in drawn} & set(missing.values())


def test_a_job_is_long_enough_for_the_snapshots_that_a_fault_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Network, "why_not", lambda: None)
    monkeypatch.setattr(DiskFull, "why_not", lambda: None)
    found = []
    for faults in (("pause",) * 3, ("pause", "disk-full", "disk-full")):
        file = tmp_path / "scenario.toml"
        file.write_text("".join(f'[[fault]]\nat = {5 * n}\nname = "{name}"\n' for n, name in enumerate(faults)))
        found.append(settings_of(make_parser().parse_args(["drill", "--scenario", str(file)])).last_step)
    assert found == [240, 640], "one that finds no room, and one that does, after each 100 steps"


def test_a_run_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="is there already"):
        settings_of(settings("--run-dir", str(tmp_path)))


def test_every_fault_says_what_it_does() -> None:
    for name, kind in FAULTS.items():
        assert kind.name == name
        assert kind.says
        assert (kind.undo_after is None) == (kind.undo is FAULTS["kill"].undo), name


def test_lines_of_a_fault_become_one_record() -> None:
    injected = {"what": "injected", "number": 1, "name": "hang", "target": "node2", "step": 7, "injected_at": 10.0}
    lines = [
        injected | {"limit_seconds": 21.0, "evidence": "1 stopped"},
        {"what": "skipped", "number": 0, "name": "kill", "reason": "too late"},
        {"what": "recovered", "number": 1, "seconds": 2.5},
        {"what": "undone", "number": 1, "time": 14.0},
    ]
    first, second = fault_records(lines)
    assert (first.name, first.injected_at, first.reason) == ("kill", None, "too late")
    assert (second.recovered_seconds, second.undone_at, second.limit_seconds) == (2.5, 14.0, 21.0)
