"""How long a job stands still when a node is killed or joins, by phase, against the promised limits.

Real torchrun nodes of this machine train the bundled digits over gloo. One node after the other (drawn by a seed, or
the host of the endpoint) is killed (SIGKILL to its agent and all its workers) and started again, so that deaths and
joins alternate. Or it falls silent first (SIGSTOP to the same). All times are from the run's own event files:

- *killed*: from the SIGKILL to the first step that the survivors' next world commits. Its phases are those of the
  `world` event, as the slowest survivor wrote them; `redo` is the rest: noticing the death, and repeating the step.
- *silent*: from the SIGSTOP to a node without the lowest rank to the same step, minus `--peer-timeout`. It may be
  below 0, since the timeout counts from the last ping.
- *joined*: from the last step of the old world to the first of the new one, with the same phases; `net` is that minus
  the median step of the new world.

A row's `theirs` is the limit, so a ratio above 1.0 is within it. The indented rows below a row have the same limit.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_train.errors import ElasticTrainError
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.record import Record
from elastic_train.tools.bench.table import BenchRow
from elastic_train.tools.drills.backends import C10d, Etcd3, backend_of
from elastic_train.tools.drills.cluster import Cluster, NodeState, Place
from elastic_train.tools.drills.nodes import wait_until

SEED = 1
SETTLE_SECONDS = 120.0
MIN_STEPS = 20
"""steps that a world commits before the next change"""
ENDLESS = ("--epochs", "1000000", "--eval-every", "1000000", "--no-progress")
JOIN_LIMIT = 0.01
"""seconds that a join may cost the other nodes beyond one step"""
LARGE_JOIN_LIMIT = 0.1
"""the same with a state of 200 MB"""
LARGE_TASK = "elastic_train.examples.parity_task:Parity"
LARGE_FLAGS = ("--task", LARGE_TASK, "--bits", "14", "--hidden", "1470000", "--global-batch-size", "12")
"""25 M parameters in float32, and momentum of the same size"""


@dataclass(frozen=True)
class RecoveryCase:
    nodes: int
    workers: int
    """per node"""
    kills: int
    limit: float
    """limit of the median, in seconds"""
    worst: float
    of_endpoint: bool = False
    """whether the killed node is the host of the endpoint"""
    silent_for: float | None = None
    """--peer-timeout, after which a frozen node is lost; None: the node is killed at once"""
    flags: tuple[str, ...] = ()
    join_limit: float = JOIN_LIMIT

    def __str__(self) -> str:
        state = ", 200 MB of state" if self.flags == LARGE_FLAGS else ""
        return f"{self.nodes * self.workers} workers on {self.nodes} nodes{state}"

    @property
    def incident(self) -> str:
        if self.silent_for is not None:
            return "one node silent, beyond --peer-timeout"
        return f"{'the host of the endpoint' if self.of_endpoint else 'one node'} killed"

    def victims(self, cluster: Cluster) -> list[Place]:
        """The nodes from which the victim is drawn."""
        if self.of_endpoint:
            return wait_until(lambda: cluster.hosting, "host", SETTLE_SECONDS)  # type: ignore[no-any-return]
        if self.silent_for is not None:
            return [place for place in cluster.places if cluster.rank_of(place) != 0]
        return cluster.places


THREE = RecoveryCase(3, 1, 20, limit=0.08, worst=0.2)
EIGHT = RecoveryCase(4, 2, 5, limit=0.25, worst=0.5)
ENDPOINT = RecoveryCase(3, 1, 20, limit=0.15, worst=0.3, of_endpoint=True)
SILENT = RecoveryCase(3, 1, 5, limit=0.3, worst=0.3, silent_for=2.0)
LARGE = RecoveryCase(3, 1, 5, limit=2.0, worst=4.0, flags=LARGE_FLAGS, join_limit=LARGE_JOIN_LIMIT)
THOROUGH = {C10d.name: (THREE, ENDPOINT, SILENT, EIGHT, LARGE), Etcd3.name: (THREE, EIGHT)}


def run_etcd(quick: bool) -> list[BenchRow]:
    """Measure recovery with an etcd cluster of three members, which it starts."""
    return run(quick, Etcd3.name)


def run(quick: bool, backend: str = C10d.name) -> list[BenchRow]:
    """Measure recovery. Quick: a minute or two; else about ten."""
    cases = THOROUGH[backend]
    if quick:
        cases = tuple(replace(case, kills=3) for case in cases if case.workers == 1 and not case.flags)
    rows = []
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch:
        for number, case in enumerate(cases):
            rows += measure(backend, case, Path(scratch) / f"run-{number}")
    return rows


def measure(backend: str, case: RecoveryCase, run_dir: Path) -> list[BenchRow]:
    """Kill nodes and bring them back, as often as the case asks for."""
    chance = random.Random(SEED)
    timeout = () if case.silent_for is None else ("--peer-timeout", str(case.silent_for))
    kills: list[dict[str, float]] = []
    joins: list[dict[str, float]] = []
    with training_nodes(
        run_dir, case.nodes, (*timeout, *case.flags), num_workers=case.workers, backend=backend_of(backend, None)
    ) as cluster:
        for number in range(case.kills):
            victim = chance.choice(case.victims(cluster))
            kills.append(kill(cluster, victim) if case.silent_for is None else freeze(cluster, victim, case.silent_for))
            cluster.settle(case.nodes - 1, MIN_STEPS, SETTLE_SECONDS)
            joins.append(join(cluster, victim))
            told = f"{case}, {number + 1} of {case.kills}: {case.incident} {kills[-1]['all']:.3f} s"
            print(f"{told}, joined {joins[-1]['all']:.3f} s", file=sys.stderr, flush=True)
    killed = f"{backend}, {case}, {case.incident}"
    worst = max(found["all"] for found in kills)
    return [
        *rows_of(killed, kills, case.limit),
        BenchRow.within(f"{killed}, worst of {case.kills}", [worst], case.worst),
        *rows_of(
            f"{backend}, {case}, a node joined", joins, case.join_limit, statistics.median(j["step"] for j in joins)
        ),
    ]


@contextmanager
def training_nodes(
    run_dir: Path, number: int, flags: Sequence[str] = (), *, num_places: int | None = None, **more: Any
) -> Iterator[Cluster]:
    """Yield `number` nodes that train together as fast as they can; end all of them on exit. A `num_places` above
    `number` leaves room for joins; `more` is for `Cluster`."""
    with (
        closing(Record(run_dir)) as record,
        closing(Cluster(run_dir, record, [*ENDLESS, *flags], num_nodes=num_places or number, **more)) as cluster,
    ):
        cluster.backend.start()
        for place in cluster.places[:number]:
            cluster.start(place)
        cluster.settle(number, MIN_STEPS, SETTLE_SECONDS)
        yield cluster


def rows_of(case: str, found: Sequence[dict[str, float]], limit: float, step: float = 0.0) -> list[BenchRow]:
    """The median of the whole, then of every phase; `spread` in seconds. The limit of the whole is longer by `step`."""
    rows = []
    for phase in found[0]:
        name, its_limit = (case, limit + step) if phase == "all" else (f"  {phase}", limit)
        rows.append(BenchRow.within(name, [one[phase] for one in found], its_limit))
    return rows


def kill(cluster: Cluster, victim: Place) -> dict[str, float]:
    """Kill a node; return the seconds until the survivors' next step: `all`, then by phase."""
    generation = cluster.watch.generation
    killed = cluster.kill([victim])
    return in_phases(cluster, generation, first_step_after(cluster, generation) - killed)


def freeze(cluster: Cluster, victim: Place, peer_timeout: float) -> dict[str, float]:
    """Freeze a node, and kill it after the other nodes' next step; return the seconds to it, minus the peer timeout."""
    assert victim.node is not None
    generation = cluster.watch.generation
    victim.effect = NodeState.FROZEN
    frozen = time.time()
    for process in victim.node.all_processes():
        process.send_signal(signal.SIGSTOP)
    found = first_step_after(cluster, generation) - frozen - peer_timeout
    cluster.kill([victim])
    return {"all": found}


def in_phases(cluster: Cluster, generation: int, total: float) -> dict[str, float]:
    """Divide `total` seconds into the phases of the members that went on from `generation` in place."""
    worlds = read_history(cluster.run_dir).of("world")
    pids = {event["pid"] for event in worlds if event["generation"] == generation}
    world = [event for event in worlds if event["generation"] == generation + 1]
    stayed = [event for event in world if event["pid"] in pids]
    if cluster.watch.generation != generation + 1 or not stayed:
        raise ElasticTrainError(f"the survivors needed more than one attempt after generation {generation}")
    slowest = max(stayed, key=lambda event: sum(event["seconds"].values()))["seconds"]
    # Without `detect`: it counts from the start of the current step, which may be before the fault.
    phases = {name: float(slowest[name]) for name in ("abort", "meet", "init", "sync")}
    return {"all": total, **phases, "redo": max(0.0, total - sum(phases.values()))}


def join(cluster: Cluster, place: Place) -> dict[str, float]:
    """Start a newcomer; return the seconds of standstill: `all`, by phase, `net` and the median `step` afterwards."""
    generation = cluster.watch.generation
    cluster.start(place)
    first_step = first_step_after(cluster, generation)
    cluster.settle(len(cluster.places), MIN_STEPS, SETTLE_SECONDS)
    steps_of = read_history(cluster.run_dir).steps_of
    outage = first_step - steps_of[generation][-1].time
    pairs = itertools.pairwise(steps_of[generation + 1])
    step = statistics.median(after.time - before.time for before, after in pairs)
    return {**in_phases(cluster, generation, outage), "net": max(0.0, outage - step), "step": step}


def first_step_after(cluster: Cluster, generation: int) -> float:
    """Wait until a world after `generation` has committed its first step; return that time."""

    def first_step() -> float | None:
        cluster.watch.poll()
        world = cluster.watch.world
        return world.first_step_at if world is not None and world.generation > generation else None

    return float(wait_until(first_step, f"step after generation {generation}", SETTLE_SECONDS))
