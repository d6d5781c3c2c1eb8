"""The faults of a history, and histories drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_train.protocol.neighbours import STANDARD, Topology
from tests.simulation.etcd import STORE_HOST
from tests.simulation.plan import Fault, Plan

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation
    from tests.simulation.worker import Worker


class Faults:
    """Each public method is one, by the name that a plan has."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._is_over = simulation, False

    def cause(self, name: str, *arguments: Any) -> None:
        self._simulation.note(f"fault: {name}{arguments}")
        self._simulation.last_fault_at = self._simulation.kernel.now
        getattr(self, name)(*arguments)

    def _worker(self, index: int) -> Worker:
        workers = self._simulation.workers
        return workers[index % len(workers)]

    def kill(self, index: int) -> None:
        self._simulation.end(self._worker(index), "killed")

    def freeze(self, index: int) -> None:
        self._worker(index).process.freeze()

    def thaw(self, index: int) -> None:
        self._worker(index).process.thaw()

    def thaw_before_it_reads(self, index: int) -> None:
        """Its threads look at what they know before they know what has come meanwhile."""
        self._worker(index).process.thaw(seconds_before_reading=0.02)

    def stick(self, index: int) -> None:
        """Its training thread alone is held up."""
        self._worker(index).process.training_task.is_stuck = True  # type: ignore[attr-defined]

    def unstick(self, index: int) -> None:
        task = self._worker(index).process.training_task  # type: ignore[attr-defined]
        task.is_stuck = False
        task.unpark()

    def power_off(self, host: int) -> None:
        simulation = self._simulation
        name = f"h{host}"
        simulation.network.off.add(name)
        for worker in simulation.workers:
            if worker.process.host == name and worker.process.is_alive:
                worker.process.is_alive, worker.process.ending = False, "power off"

    def back(self, host: int, same_address: bool) -> None:
        """A new process on a host that has none."""
        simulation, name = self._simulation, f"h{host}"
        simulation.network.off.discard(name)
        workers = [worker for worker in simulation.workers if worker.process.host == name]
        if any(worker.process.is_alive for worker in workers):
            return
        for local_rank in range(simulation.plan.workers_of(name)):
            port = workers[local_rank].process.address[1] if same_address and local_rank < len(workers) else None
            simulation.start(name, local_rank, port)

    def back_ahead(self, host: int) -> None:
        """The same, and it sees a snapshot of more steps than those who train have."""
        self.back(host, same_address=False)
        worker = self._simulation.workers[-1]
        worker.member = replace(worker.member, newest=(1, 1000_000))

    def cut(self, one: int, other: int) -> None:
        """One way."""
        if one != other:
            self._simulation.network.cut(f"h{one}", f"h{other}")

    def cut_off_after(self, note: str, seconds: float) -> None:
        """The link of the next worker of which there is such a note fails so long after that, if before `recover`."""
        simulation = self._simulation

        def cut_off(*sides: tuple[int, ...]) -> None:
            if not self._is_over:
                self.cause("partition", *sides)

        def look(text: str) -> None:
            if note in text:
                simulation.on_note.remove(look)
                host = int(text.partition("@h")[2].partition(" ")[0])
                others = {int(worker.process.host[1:]) for worker in simulation.workers} - {host}
                simulation.kernel.after(seconds, cut_off, (host,), tuple(sorted(others)))

        simulation.on_note.append(look)

    def heal(self, one: int, other: int) -> None:
        self._simulation.network.heal(f"h{one}", f"h{other}")

    def partition(self, *sides: tuple[int, ...]) -> None:
        for one in sides:
            for other in sides:
                if one is not other:
                    for source in one:
                        for target in other:
                            self._simulation.network.cut(f"h{source}", f"h{target}")

    def heal_all(self) -> None:
        self._simulation.network.heal_all()

    def recover(self) -> None:
        """All that can be mended is."""
        self._is_over = True
        self.heal_all()
        self.unstall()
        for worker in self._simulation.workers:
            if worker.process.is_alive:
                task = worker.process.training_task  # type: ignore[attr-defined]
                task.is_stuck = False
                if worker.process.is_frozen:
                    worker.process.thaw()
                else:
                    task.unpark()

    def lose_replies(self, index: int, number: int) -> None:
        self._worker(index).process.loses_replies += number

    def stall(self, *hosts: int) -> None:
        """The run directory answers these no more."""
        directory = self._simulation.directory
        directory.stalled |= {f"h{host}" for host in hosts}
        directory.has_stalled = True

    def unstall(self) -> None:
        self._simulation.directory.stalled.clear()

    def lose_store(self, hosts: tuple[int, ...], ways: str = "both") -> None:
        """These hosts and etcd hear each other no more, or one of them the other (`to`, `from`)."""
        network = self._simulation.network
        for host in hosts:
            if ways != "from":
                network.cut(f"h{host}", STORE_HOST)
            if ways != "to":
                network.cut(STORE_HOST, f"h{host}")

    def find_store(self, hosts: tuple[int, ...]) -> None:
        for host in hosts:
            self._simulation.network.heal(f"h{host}", STORE_HOST)
            self._simulation.network.heal(STORE_HOST, f"h{host}")

    def empty_store(self) -> None:
        """Etcd comes back with nothing in it."""
        self._simulation.form.lose_all()

    def lose_store_replies(self, number: int) -> None:
        self._simulation.form.lose_replies(number)

    def lose_claims(self, host: int, number: int) -> None:
        replies = self._simulation.directory.loses_replies
        replies[f"h{host}"] = replies.get(f"h{host}", 0) + number

    def leave(self, index: int) -> None:
        self._worker(index).wants_to_leave = True


RING = Topology(dense=2, degree=2, spare_degree=2)
"""so that a few members are as sparse as hundreds"""


def draw_sparse(seed: int) -> Plan:
    """The same history, where each member pings two others."""
    return draw(seed, RING)


def draw_going_on(seed: int) -> Plan:
    """The same history where each side goes on, and has the time for it: most cuts and freezes last to the end."""
    plan, chance = draw(seed), random.Random(f"split {seed}")
    mends = () if chance.random() < 0.2 else ("heal", "heal_all", "thaw")
    faults = tuple(fault for fault in plan.faults if fault[1] not in mends)
    last = max((fault[0] for fault in faults), default=1.0)
    return replace(plan, faults=faults, recovers_at=last + 3 * plan.silence_seconds + 2.5, goes_on=True)


def draw_few(seed: int) -> Plan:
    """The same history with few nodes, spares, an end of training, or no room for a newcomer."""
    chance = random.Random(f"few {seed}")
    plan = draw_with_etcd(seed) if chance.random() < 0.3 else draw(seed)
    hosts = len(plan.hosts)
    if plan.is_formed and chance.random() < 0.4:
        plan = replace(plan, founders=hosts - 1, max_nodes=hosts - chance.randint(0, 1), min_nodes=1)
    return replace(
        plan,
        trains_with=chance.randint(1, min(4, hosts)),
        max_world_size=chance.choice([None, 1, 2, 3]),
        max_steps=chance.choice([10, 20, 30, 10**9, 10**9]),
    )


LEASE_SECONDS = 60.0
"""longer than any host is away from etcd: else a newcomer may begin a second job, and a state is lost"""


def draw_with_etcd(seed: int) -> Plan:
    """The same history with etcd, which hosts may lose; mostly a side of a partition does."""
    plan, chance = draw(seed), random.Random(f"etcd {seed}")
    left_out = ("stall", "unstall", "lose_claims")
    is_long = chance.random() < 0.4  # then a side that has not the votes comes to claim
    left_out += ("heal", "heal_all", "thaw") if is_long else ()
    faults = [fault for fault in plan.faults if fault[1] not in left_out]
    for at, kind, *sides in tuple(faults):
        if kind == "partition" and chance.random() < 0.6:
            faults.append((at + chance.choice([0.0, 0.0, 0.01, 0.5]), "lose_store", chance.choice(sides)))
    at, hosts = chance.uniform(0.2, 2.0), range(len(plan.hosts))
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        some = tuple(chance.sample(hosts, chance.randint(1, len(hosts))))
        if chance.random() < 0.3:
            faults.append((at, "lose_store_replies", chance.randint(1, 4)))
        else:
            faults.append((at, "lose_store", some, chance.choice(["both", "both", "to", "from"])))
            faults.append((at + chance.choice([0.3, 1.0, 3.0, 6.0]) * chance.uniform(0.7, 1.3), "find_store", some))
        at += chance.choice([0.03, 0.3, 2.0]) * chance.random()
    if plan.is_formed and chance.random() < 0.2 and not {fault[1] for fault in faults} & {"back", "lose_store"}:
        faults.append((chance.uniform(0.2, at + 2.0), "empty_store"))  # else a newcomer may begin a second job
    faults = faults or [(1.0, "kill", 0)]
    last = max(fault[0] for fault in faults)
    return replace(
        plan,
        faults=tuple(sorted(faults, key=lambda fault: fault[0])),
        recovers_at=last + plan.silence_seconds * (3 if is_long else 1) + 1.5,
        directories=(),
        lease=LEASE_SECONDS,
    )


def draw(seed: int, topology: Topology = STANDARD) -> Plan:
    """A history of 4 to 7 members with one to four troubles."""
    chance = random.Random(f"plan {seed}")
    hosts: tuple[int, ...] = tuple(1 for _ in range(chance.randint(4, 7)))
    if chance.random() < 0.15:
        hosts = (2, 2, *(1 for _ in range(chance.randint(0, 2))))
    plan = Plan(
        seed,
        hosts=hosts,
        is_formed=chance.random() < 0.9,
        max_steps=chance.choice([30] + [10**9] * 9),
        max_world_size=chance.choice([3] + [None] * 9),
        has_equal_names=chance.random() < 0.2,
        num_endpoints=chance.choice([1, 2, 3]),
        topology=topology,
    )
    make = chance.choice([_scattered, _scattered, _in_a_row])
    faults = make(chance, plan) or [(1.0, "kill", 0)]
    if not plan.is_formed:
        faults = [(at + chance.choice([0.0, 2.0]), *what) for at, *what in faults]
    if not seed % 3:
        plan, more = _with_directory(seed, plan)
        faults = [*faults, *more]
    return replace(
        plan, faults=tuple(sorted(faults)), recovers_at=max(fault[0] for fault in faults) + plan.silence_seconds + 1.5
    )


def _with_directory(seed: int, plan: Plan) -> tuple[Plan, list[Fault]]:
    """The hosts share a run directory, but for one of them perhaps; it stalls, or loses replies."""
    chance = random.Random(f"directory {seed}")
    hosts = range(len(plan.hosts))
    directories = [0 for _ in hosts]
    if chance.random() < 0.2:
        directories[-1] = 1
    faults: list[Fault] = []
    at = chance.uniform(0.2, 4.0)
    kind = chance.choice(["well", "well", "stall all", "stall some", "lose"])
    if kind == "stall all":
        faults = [(at, "stall", *hosts), (at + chance.uniform(0.5, 4.0), "unstall")]
    elif kind == "stall some":
        faults = [(at, "stall", *chance.sample(hosts, chance.randint(1, len(hosts)))), (at + 2.0, "unstall")]
    elif kind == "lose":
        faults = [(at, "lose_claims", host, chance.randint(1, 3)) for host in hosts]
    return replace(plan, directories=tuple(directories)), faults


def _scattered(chance: random.Random, plan: Plan) -> list[Fault]:
    faults: list[Fault] = []
    start = chance.uniform(0.2, 1.2)
    for _ in range(chance.randint(1, 4)):
        start += chance.choice([0.0, 0.003, 0.03, 0.3, 1.0, 2.0, 3.0]) * chance.random()
        faults += _trouble(chance, plan, start)
    return faults


def _trouble(chance: random.Random, plan: Plan, at: float) -> list[Fault]:
    num_hosts = len(plan.hosts)
    index, host, other = chance.randrange(sum(plan.hosts)), chance.randrange(num_hosts), chance.randrange(num_hosts)
    seconds = chance.choice([0.05, 0.5, 1.0, 2.0, 3.0]) * chance.uniform(0.7, 1.3)
    kind = chance.choice(
        ["kill", "kill", "freeze", "freeze", "cut", "cut", "both", "partition", "off", "stick", "back", "lose", "leave"]
    )
    if kind == "kill":
        return [(at, "kill", index)]
    if kind == "freeze":
        return [(at, "freeze", index), (at + seconds, "thaw", index)]
    if kind == "stick":
        return [(at, "stick", index), (at + 2 * seconds, "unstick", index)]
    if kind == "cut":
        return [(at, "cut", host, other), (at + seconds, "heal", host, other)]
    if kind == "both":
        return [(at, "partition", (host,), (other,)), (at + seconds, "heal_all")] if host != other else []
    if kind == "partition":
        return [(at, "partition", *_sides(chance, num_hosts)), (at + seconds, "heal_all")]
    if kind == "off":
        return [(at, "power_off", host)]
    if kind == "back":
        return [(at, "kill", index), (at + seconds, "back", host, chance.random() < 0.5)]
    if kind == "lose":
        return [(at, "lose_replies", index, chance.randint(1, 3)), (at, "kill", chance.randrange(sum(plan.hosts)))]
    return [(at, "leave", index)]


def _sides(chance: random.Random, num_hosts: int) -> list[tuple[int, ...]]:
    hosts = list(range(num_hosts))
    chance.shuffle(hosts)
    first = chance.randint(1, num_hosts - 1)
    return [tuple(hosts[:first]), tuple(hosts[first:])]


def _in_a_row(chance: random.Random, plan: Plan) -> list[Fault]:
    """A cut, a freeze, a wake-up and a kill, about one peer timeout apart: what random faults rarely hit upon."""
    timeout = plan.peer_timeout
    num_workers, num_hosts = sum(plan.hosts), len(plan.hosts)
    sides = _sides(chance, num_hosts)
    at = chance.uniform(0.2, 1.2)
    gaps = [timeout * chance.choice([0.05, 0.5, 0.8, 1.0, 1.1, 1.3]) * chance.uniform(0.9, 1.1) for _ in range(4)]
    frozen = chance.randrange(num_workers)
    order = [("partition", *sides), ("freeze", frozen)]
    chance.shuffle(order)
    faults: list[Fault] = []
    for what, gap in zip(order, gaps, strict=False):
        faults.append((at, *what))
        at += gap
    for _ in range(chance.randint(1, len(sides[1]) + 1)):
        faults.append((at, "kill", chance.randrange(num_workers)))
        at += chance.choice([0.0, 0.01, gaps[2]])
    faults += [(at, "thaw", frozen), (at + chance.choice([0.0, gaps[3]]), "heal_all")]
    if chance.random() < 0.3:
        faults.append((at + gaps[2], "kill", chance.randrange(num_workers)))
    return faults
