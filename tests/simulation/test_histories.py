"""Random and exhaustive histories of the real membership code; a failing one prints its seed and its fewest faults."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator

import pytest

from tests.simulation.faults import draw, draw_going_on, draw_sparse
from tests.simulation.plan import Fault, Plan
from tests.simulation.simulator import Simulation, failures_of, shrink

NUM_HISTORIES = int(os.environ.get("ELASTIC_TRAIN_HISTORIES", "6000"))
FIRST_SEED = int(os.environ.get("ELASTIC_TRAIN_FIRST_SEED", "0"))
CHUNK = 50
STRIDE = int(os.environ.get("ELASTIC_TRAIN_STRIDE", "16"))
"""of the moments of a second fault in the small cases; 1 is every one, by hand"""


def failing_seeds(first: int) -> list[int]:
    return [seed for seed in range(first, first + CHUNK) if failures_of(draw(seed))]


def failing_sparse_seeds(first: int) -> list[int]:
    return [seed for seed in range(first, first + CHUNK) if failures_of(draw_sparse(seed))]


def failing_seeds_going_on(first: int) -> list[int]:
    return [seed for seed in range(first, first + CHUNK) if failures_of(draw_going_on(seed))]


def report(plan: Plan) -> str:
    simulation = Simulation(shrink(plan))
    simulation.run()
    return f"{simulation.failures[:1]}\n{simulation.plan}\n{simulation.describe()}"


def run_all(failing: Callable[[int], list[int]], draw: Callable[[int], Plan], number: int) -> None:
    chunks = range(FIRST_SEED, FIRST_SEED + number, CHUNK)
    with multiprocessing.get_context("fork").Pool(2, initializer=gc.freeze) as pool:
        for seeds in pool.imap_unordered(failing, chunks):
            for seed in seeds:
                pytest.fail(f"seed {seed}: {report(draw(seed))}")


@pytest.mark.timeout(0)  # the number of histories says how long it takes
def test_no_history_breaks_a_law() -> None:
    run_all(failing_seeds, draw, NUM_HISTORIES)


@pytest.mark.timeout(0)
def test_no_history_breaks_a_law_where_each_pings_two_others() -> None:
    run_all(failing_sparse_seeds, draw_sparse, NUM_HISTORIES // 3)


@pytest.mark.timeout(0)
def test_no_history_breaks_a_law_where_each_side_goes_on() -> None:
    run_all(failing_seeds_going_on, draw_going_on, NUM_HISTORIES // 3)


def turns_of(plan: Plan, first: float, last: float) -> list[float]:
    """The moments at which a thread of any process goes on: its operations; between two of them no fault can differ."""
    simulation = Simulation(plan)
    moments: set[float] = set()
    simulation.kernel.on_turn = lambda _task: moments.add(simulation.kernel.now)
    simulation.run()
    return sorted(moment for moment in moments if first < moment < last)


def faults_of(hosts: int) -> list[Fault]:
    """What may befall at a moment, but for its time."""
    cuts = [("cut", one, other) for one in range(hosts) for other in range(hosts) if one != other]
    return [(kind, victim) for kind in ("kill", "freeze") for victim in range(hosts)] + cuts


def small_plan(hosts: int, faults: tuple[Fault, ...]) -> Plan:
    last = max((fault[0] for fault in faults), default=1.0)
    return Plan(seed=1, hosts=(1,) * hosts, faults=faults, recovers_at=last + 3.5)


def pairs(hosts: int, stride: int) -> Iterator[Plan]:
    """Every first fault between any two operations of a few steps, every second one between any two after it."""
    for at in turns_of(small_plan(hosts, ()), 0.30, 0.55):
        for first in faults_of(hosts):
            one = (at, *first)
            for later in turns_of(small_plan(hosts, (one,)), at, at + 3.0)[::stride]:
                for second in faults_of(hosts):
                    if second != first:
                        yield small_plan(hosts, (one, (later, *second)))


@pytest.mark.parametrize(("hosts", "stride"), [(2, STRIDE), (3, 16 * STRIDE)])
@pytest.mark.timeout(0)
def test_every_pair_of_faults_in_a_small_world(hosts: int, stride: int) -> None:
    states = 0
    with multiprocessing.get_context("fork").Pool(2, initializer=gc.freeze) as pool:
        for plan, failed in pool.imap_unordered(judge, pairs(hosts, stride), CHUNK):
            states += 1
            if failed:
                pytest.fail(report(plan))
    print(f"{hosts} members, every {stride}th second moment: {states} histories")


def judge(plan: Plan) -> tuple[Plan, bool]:
    return plan, bool(failures_of(plan))
