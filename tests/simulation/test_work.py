"""Members that are busy for longer than the peer timeout: none is expelled, whichever others die or join."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from elastic_train.protocol import contacts, heartbeat
from elastic_train.protocol.neighbours import STANDARD, Topology
from elastic_train.rules import Activity
from elastic_train.world import World
from tests.simulation import checks
from tests.simulation.faults import RING
from tests.simulation.plan import Fault, Plan
from tests.simulation.processes import two_processes
from tests.simulation.simulator import Simulation
from tests.simulation.work import KINDS, Work

NUM_HISTORIES = int(os.environ.get("ELASTIC_TRAIN_WORKING_HISTORIES", "50"))
"""of each kind and form; of very long steps, in which most happens, two in five"""
FIRST_SEED = int(os.environ.get("ELASTIC_TRAIN_FIRST_SEED", "0"))
CHUNK = 10
FORMS = {"endpoints": None, "etcd": 60.0}
"""where members find each other: as `Plan.lease`"""


def draw(kind: str, seed: int, lease: float | None = None) -> Plan:
    """Two to five members; up to three die, leave or come, at moments of any kind. Etcd may be away for a while."""
    work, chance = KINDS[kind], random.Random(f"{kind} {seed}")
    hosts = tuple(1 for _ in range(chance.randint(2, 5)))
    founders = chance.choice([len(hosts), len(hosts), max(1, len(hosts) - 1)])
    faults: list[Fault] = []
    at, left = 1.0, len(hosts)
    for _ in range(chance.randint(0, 3)):
        at += work.commit_seconds * chance.uniform(0.0, 2.0)
        kind = chance.choice(["kill", "leave", "back"])
        if kind == "back" and left < len(hosts):
            faults.append((at, "back", chance.randrange(len(hosts)), False))
        elif left > 1:
            faults.append((at, "kill" if kind == "back" else kind, chance.randrange(len(hosts))))
            left -= 1
    if lease is not None and chance.random() < 0.5:
        away_at, everybody = chance.uniform(1.0, at), tuple(range(len(hosts)))
        faults.append((away_at, "lose_store", everybody))
        faults.append((away_at + chance.uniform(0.0, 7.0), "find_store", everybody))
        faults.sort(key=lambda fault: fault[0])
    recovers_at = at + 3 * work.commit_seconds + 10.0
    return Plan(
        seed,
        hosts,
        tuple(faults),
        recovers_at,
        founders=founders,
        min_nodes=1,
        stall_timeout=None,
        work=work,
        directories=(0,) * len(hosts) if seed % 3 == 0 and lease is None else (),
        lease=lease,
    )


def failures_of(plan: Plan) -> list[str]:
    simulation = Simulation(plan)
    simulation.run()
    checks.check_nobody_expelled(simulation)
    return simulation.failures


def failing_seeds(kind: str, lease: float | None, first: int) -> list[int]:
    return [seed for seed in range(first, first + CHUNK) if failures_of(draw(kind, seed, lease))]


def describe(plan: Plan) -> str:
    simulation = Simulation(plan)
    simulation.run()
    checks.check_nobody_expelled(simulation)
    return f"{simulation.failures[:1]}\n{plan}\n{simulation.describe()}"


@pytest.mark.timeout(0)  # the number of histories says how long it takes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_who_works_is_expelled(kind: str, form: str, record_property: Callable[[str, object], None]) -> None:
    lease = FORMS[form]
    is_long = kind == "very long steps" or lease is not None  # a client of etcd takes its time here
    number = max(1, NUM_HISTORIES * 2 // 5) if is_long else NUM_HISTORIES
    chunks = [(kind, lease, first) for first in range(FIRST_SEED, FIRST_SEED + number, CHUNK)]
    with two_processes() as pool:
        for seeds in pool.starmap(failing_seeds, chunks, chunksize=1):
            for seed in seeds:
                pytest.fail(f"seed {seed}: {describe(draw(kind, seed, lease))}")
    record_property("histories", f"{len(chunks) * CHUNK} of work, seeds from {FIRST_SEED} on: {kind}, {form}")


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_host_of_the_endpoint_comes_back_while_the_others_compute(hosts: int) -> None:
    """It joins them, though nobody has noticed yet that their rank 0 is gone."""
    work = KINDS["long steps"]
    faults: tuple[Fault, ...] = ((14.0, "kill", 0), (14.3, "back", 0, False))
    plan = Plan(1, (1,) * hosts, faults, 60.0, min_nodes=1, stall_timeout=None, work=work)
    assert failures_of(plan) == []


@pytest.mark.parametrize("killed", range(3))
def test_one_dies_among_steps_of_half_a_millisecond(killed: int) -> None:
    """Beside which pings, looks at the clock, and the agreement are long."""
    faults: tuple[Fault, ...] = ((0.5, "kill", killed),)
    plan = Plan(1, (1,) * 3, faults, 1.0, min_nodes=1, stall_timeout=None, work=Work(step=0.0001))
    assert failures_of(plan) == []


@pytest.mark.parametrize("activity", [Activity.COMPUTE, Activity.STEP])
@pytest.mark.parametrize("topology", [STANDARD, RING], ids=["dense", "sparse"])
@pytest.mark.parametrize("busy", range(6))
def test_whoever_is_busy_the_others_wait_for_it(busy: int, topology: Topology, activity: Activity) -> None:
    """For much longer than for one that does not come; by a claim of the run directory each could go on alone.
    It is as busy with that step when it is done again."""
    work = Work(busy=(busy, 10, 60.0), activity=activity)
    faults: tuple[Fault, ...] = ((5.0, "kill", 6),)
    plan = Plan(
        1, (1,) * 7, faults, 135.0, min_nodes=1, stall_timeout=None, work=work, directories=(0,) * 7, topology=topology
    )
    assert failures_of(plan) == []


@pytest.mark.parametrize("busy", range(3))
def test_who_ends_its_work_while_etcd_is_away_is_waited_for(busy: int) -> None:
    """Another one has died meanwhile, and no decision can be claimed."""
    work = Work(busy=(busy, 10, 14.0))
    faults: list[Fault] = [(8.0, "kill", (busy + 1) % 3)]
    faults += [(14.0, "lose_store", (0, 1, 2)), (23.0, "find_store", (0, 1, 2))]
    plan = Plan(1, (1,) * 3, tuple(faults), 60.0, min_nodes=1, stall_timeout=None, work=work, lease=FORMS["etcd"])
    assert failures_of(plan) == []


def by_the_step_before(self: heartbeat.Pace, activity: Activity) -> float:
    """The rule that this one replaces: ten times the slowest step."""
    return self.peer_timeout + 10 * self.slowest_step if self.slowest_step else 6 * self.peer_timeout


def nobody_is_at_work(*_arguments: object) -> bool:
    return False


def is_outside_and_in_time(self: contacts.Contacts, world: World, rank: int) -> bool:
    """As if all that may wait for its peers did."""
    found = self.activity_of(world, rank)
    is_here = found is not None and found.generation == world.generation
    return is_here and not found.activity.is_inside and not found.is_late  # type: ignore[union-attr]


PLANTED: dict[str, tuple[object, str, Callable[..., object], str]] = {
    "judged by the steps before": (heartbeat.Pace, "limit", by_the_step_before, "long evaluations"),
    "a first step like any other": (heartbeat.Pace, "limit", by_the_step_before, "a first step that compiles"),
    "a step on a GPU taken for a wait": (
        contacts.Contacts,
        "is_at_work",
        is_outside_and_in_time,
        "passes on a GPU that compile anew",
    ),
    "no time to come to the agreement": (contacts.Contacts, "is_at_work", nobody_is_at_work, "long evaluations"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted, kind = PLANTED[name]
    monkeypatch.setattr(owner, attribute, planted)
    assert any(failures_of(draw(kind, seed)) for seed in range(60)), "the error was not found"
