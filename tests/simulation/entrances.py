"""Histories of workers that come into a job, or back to it, while a link fails; and those drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.directed import plan, when
from tests.simulation.faults import LEASE_SECONDS
from tests.simulation.plan import Fault, Plan

IN_QUEUE = "is told: in the join queue"
LEFT_OUT = "ends: left_out"


def left_out_and_cut_off(heals_at: float, seed: int = 1) -> Plan:
    """The first endpoint's host was frozen for so long that the others went on; its link fails as it finds that out."""
    frozen = ((1.0, "freeze", 0), (4.5, "thaw", 0))
    made = plan(3, *frozen, recovers_at=heals_at, seed=seed, min_nodes=1, num_endpoints=3)
    cut = (when(made, LEFT_OUT) + 0.006, "partition", (0,), (1, 2))
    return replace(made, faults=(*frozen, cut))


def cut_off_in_the_queue(cut_at: float, heals_at: float, seed: int = 1) -> Plan:
    """That host has come back, and is in the join queue."""
    faults = ((1.0, "kill", 0), (3.0, "back", 0, False), (cut_at, "partition", (0,), (1, 2)))
    return plan(3, *faults, recovers_at=heals_at, seed=seed, min_nodes=1)


def alone_in_the_queue(ending: str, wait_timeout: float = 600.0) -> Plan:
    """All who train are killed, or lose their power, while that host is in the join queue."""
    gone = ((3.3, ending, 1), (3.3, ending, 2))
    made = plan(3, (1.0, "kill", 0), (3.0, "back", 0, False), *gone, recovers_at=0.0, min_nodes=1)
    return replace(made, recovers_at=None, seconds=20.0, wait_timeout=wait_timeout)


def newcomer_of_two_sides(seed: int = 1, hosts: int = 4, alone: tuple[int, ...] = (0,), starts_at: float = 4.0) -> Plan:
    """A side that lacks votes is cut off from the others; a newcomer hears both."""
    others = tuple(host for host in range(hosts) if host not in alone)
    faults = ((1.0, "partition", alone, others), (starts_at, "back", hosts, False))
    made = plan(hosts, *faults, recovers_at=0.0, seed=seed, min_nodes=1, num_endpoints=hosts)
    return replace(made, recovers_at=None, seconds=starts_at + 8.0)


def newcomer_beside_one_that_holds_back(endpoints: int) -> Plan:
    """That host is cut off as it stands in the queue; a newcomer hears it, and those who train."""
    faults = ((1.0, "kill", 0), (3.0, "back", 0, False), (3.5, "partition", (0,), (1, 2)), (10.0, "back", 3, False))
    made = plan(3, *faults, recovers_at=0.0, min_nodes=1, num_endpoints=endpoints)
    return replace(made, recovers_at=None, seconds=20.0)


def draw_entrances(seed: int) -> Plan:
    """`--nnodes 1:4`: any node may begin. One comes in, or back, and its link fails about then."""
    chance = random.Random(f"entrance {seed}")
    num_hosts = chance.randint(2, 5)
    made = Plan(seed, (1,) * num_hosts, min_nodes=1, num_endpoints=chance.randint(1, num_hosts))
    victim = chance.choice([0, 0, 0, chance.randrange(num_hosts)])
    at, note = chance.uniform(0.5, 1.5), chance.choice([LEFT_OUT, IN_QUEUE, IN_QUEUE])
    faults: list[Fault] = [(at, "cut_off_after", note, chance.choice([0.0, 0.1, 1.0]) * chance.random())]
    if note == LEFT_OUT:
        faults += [(at, "freeze", victim), (at + chance.uniform(3.2, 5.0), "thaw", victim)]
    else:
        faults += [(at, "kill", victim), (at + chance.choice([0.1, 1.0, 3.0]), "back", victim, False)]
    end = max(fault[0] for fault in faults)
    kind = chance.choice(["", "", "kill", "kill all", "freeze", "back", "partition", "off", "two sides"])
    later, other = end + chance.uniform(0.0, 4.0), (victim + 1) % num_hosts
    if kind in ("kill", "freeze"):
        faults.append((later, kind, other))
    elif kind == "kill all":
        faults += [(later, "kill", host) for host in range(num_hosts) if host != victim]
    elif kind == "back":
        faults.append((later, "back", num_hosts, False))
    elif kind == "off":
        faults.append((later, "power_off", other))
    elif kind == "partition":
        faults.append((later, "partition", (other,), tuple(host for host in range(num_hosts) if host != other)))
    elif kind == "two sides":  # one at least lacks votes, and a newcomer hears both
        some = tuple(chance.sample(range(num_hosts), chance.randint(1, num_hosts - 1)))
        faults = [(at, "partition", some, tuple(host for host in range(num_hosts) if host not in some))]
        end, later = at, at + chance.uniform(0.0, 5.0)
        faults.append((later, "back", num_hosts, False))
    lease = LEASE_SECONDS if chance.random() < 0.3 else None
    recovers_at = max(end, later) + chance.choice([3.0, 8.0, 12.0])
    return replace(made, faults=tuple(sorted(faults, key=lambda one: one[0])), recovers_at=recovers_at, lease=lease)
