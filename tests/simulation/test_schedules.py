"""Schedules that a naive majority rule gets wrong (membership.md): the real code gets them right."""

from __future__ import annotations

import pytest

from tests.simulation import directed
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation


def run(plan: Plan) -> Simulation:
    simulation = Simulation(plan)
    simulation.run()
    assert not simulation.failures, simulation.describe()
    return simulation


def last_steps(simulation: Simulation) -> dict[str, int]:
    """By host: the last committed step of the last process there."""
    return {one.process.host: one.last_step for one in simulation.workers}


def test_1_late_proof_is_silence() -> None:
    simulation = run(directed.late_proof())
    assert {worker.activity for worker in simulation.workers[:2]} == {"agrees"}, "they wait"


def test_2_voters_without_the_state_begin_nothing() -> None:
    simulation = run(directed.voters_without_state())
    assert len(simulation.starts) == 1


@pytest.mark.parametrize("at", [1.0, 1.33, 1.39, 1.45])
def test_3_expelled_behind_its_back(at: float) -> None:
    run(directed.expelled_behind_its_back(at))
    run(directed.expelled_and_slow(at))


@pytest.mark.parametrize("turn", range(60))
def test_4_the_collector_dies_between_any_two_operations(turn: int) -> None:
    run(directed.moving_register(0.005 * turn))


def test_5_a_host_that_comes_back_begins_nothing() -> None:
    simulation = run(directed.first_host_comes_back())
    assert len(simulation.starts) == 1
    worlds = {worker.world.uid for worker in simulation.living if worker.world is not None}
    assert len(worlds) == 1, "it has joined"


def test_6_of_two_machines_the_lowest_rank_goes_on() -> None:
    assert last_steps(run(directed.two_machines(loses=1)))["h0"] > 10
    simulation = run(directed.two_machines(loses=0))
    assert [worker.activity for worker in simulation.living] == ["agrees"]


def test_7_a_restarted_container_is_somebody_else() -> None:
    simulation = run(directed.restarted_container())
    assert len(simulation.starts) == 1
