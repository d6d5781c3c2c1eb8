"""Random and exhaustive histories of the real membership code; a failing one prints its seed and its fewest faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from tests.simulation.entrances import draw_entrances
from tests.simulation.faults import draw, draw_few, draw_going_on, draw_sparse, draw_with_etcd
from tests.simulation.plan import Fault, Plan
from tests.simulation.processes import two_processes
from tests.simulation.simulator import Simulation, failures_of, shrink

NUM_HISTORIES = int(os.environ.get("ELASTIC_TRAIN_HISTORIES", "2700"))
"""of all forms together"""
FIRST_SEED = int(os.environ.get("ELASTIC_TRAIN_FIRST_SEED", "0"))
CHUNK = 50
DRAWN: dict[str, tuple[Callable[[int], Plan], float]] = {
    "members keep the job": (draw, 0.25),
    "each pings two others": (draw_sparse, 0.15),
    "each side goes on": (draw_going_on, 0.15),
    "etcd is there": (draw_with_etcd, 0.25),
    "a worker comes in": (draw_entrances, 0.1),
    "few nodes, spares, an end": (draw_few, 0.1),
}
"""each with its share of the histories"""


STRIDES = os.environ.get("ELASTIC_TRAIN_STRIDES", "")
"""`2:1:1` and the like, by hand: of the small worlds of so many members every such first and second moment"""
LIFE_SECONDS = 0.8
"""of a small world: it begins, and commits some steps"""


@dataclass(frozen=True)
class Small:
    """A world of which histories are taken one by one."""

    hosts: int
    lease: float | None
    first_stride: int
    second_stride: int


SMALL = [Small(2, None, 8, 16), Small(2, 60.0, 16, 32), Small(3, None, 32, 128), Small(3, 60.0, 128, 128)]
if STRIDES:
    chosen, every_first, every_second = map(int, STRIDES.split(":"))
    SMALL = [Small(chosen, lease, every_first, every_second) for lease in (None, 60.0)]


def failing_seeds(kind: str, first: int) -> list[int]:
    return [seed for seed in range(first, first + CHUNK) if failures_of(DRAWN[kind][0](seed))]


def report(plan: Plan) -> str:
    simulation = Simulation(shrink(plan))
    simulation.run()
    return f"{simulation.failures[:1]}\n{simulation.plan}\n{simulation.describe()}"


@pytest.mark.timeout(0)  # the number of histories says how long it takes
@pytest.mark.parametrize("kind", DRAWN)
def test_no_history_breaks_a_law(kind: str, record_property: Callable[[str, object], None]) -> None:
    chunks = range(FIRST_SEED, FIRST_SEED + round(DRAWN[kind][1] * NUM_HISTORIES), CHUNK)
    with two_processes() as pool:
        for seeds in pool.imap_unordered(partial(failing_seeds, kind), chunks):
            for seed in seeds:
                pytest.fail(f"seed {seed}: {report(DRAWN[kind][0](seed))}")
    record_property("histories", f"{len(chunks) * CHUNK} drawn histories, seeds from {FIRST_SEED} on: {kind}")


@pytest.mark.parametrize("kind", DRAWN)
def test_a_wait_that_is_skipped_changes_nothing(kind: str) -> None:
    found = []
    for on_turn in (None, lambda _task: None):  # nothing is skipped where each turn is looked at
        simulation = Simulation(DRAWN[kind][0](FIRST_SEED))
        simulation.kernel.on_turn = on_turn
        simulation.run()
        found.append((simulation.notes, simulation.kernel.turns, simulation.kernel.random.random()))
    assert found[0] == found[1]


def turns_of(plan: Plan, first: float, last: float) -> list[float]:
    """The moments at which a thread of any process goes on: its operations; between two of them no fault can differ."""
    simulation = Simulation(plan)
    moments: set[float] = set()
    simulation.kernel.on_turn = lambda _task: moments.add(simulation.kernel.now)
    simulation.run()
    return sorted(moment for moment in moments if first < moment < last)


def faults_of(hosts: int, lease: float | None) -> list[Fault]:
    """What may befall at a moment, but for its time."""
    cuts = [("cut", one, other) for one in range(hosts) for other in range(hosts) if one != other]
    away = [] if lease is None else [("lose_store", (host,)) for host in range(hosts)]
    return [(kind, victim) for kind in ("kill", "freeze") for victim in range(hosts)] + cuts + away


def small_plan(hosts: int, lease: float | None, faults: tuple[Fault, ...]) -> Plan:
    last = max((fault[0] for fault in faults), default=1.0)
    return Plan(seed=1, hosts=(1,) * hosts, faults=faults, recovers_at=last + 3.5, lease=lease)


def pairs(small: Small, until: float = LIFE_SECONDS) -> Iterator[Plan]:
    """Every first fault between any two operations of a world, from its beginning on; every second one between any two
    in the seconds after it: those that the strides leave."""
    hosts, lease = small.hosts, small.lease
    kinds = faults_of(hosts, lease)
    for at in turns_of(small_plan(hosts, lease, ()), 0.0, until)[:: small.first_stride]:
        for first in kinds:
            one = (at, *first)
            for later in turns_of(small_plan(hosts, lease, (one,)), at, at + 3.0)[:: small.second_stride]:
                for second in kinds:
                    if second != first:
                        yield small_plan(hosts, lease, (one, (later, *second)))


def name_of(small: Small) -> str:
    return f"{small.hosts} members, {'endpoints' if small.lease is None else 'etcd'}"


@pytest.mark.parametrize("small", SMALL, ids=name_of)
@pytest.mark.timeout(0)
def test_every_pair_of_faults_in_a_small_world(small: Small, record_property: Callable[[str, object], None]) -> None:
    states = 0
    with two_processes() as pool:
        for plan, failed in pool.imap_unordered(judge, pairs(small), CHUNK):
            states += 1
            if failed:
                pytest.fail(report(plan))
    which = f"one of {small.first_stride} first moments, one of {small.second_stride} second ones"
    record_property("histories", f"{states} pairs of faults: {name_of(small)}; {which}")


def judge(plan: Plan) -> tuple[Plan, bool]:
    return plan, bool(failures_of(plan))
