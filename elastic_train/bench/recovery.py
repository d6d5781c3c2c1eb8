"""How long a job stands still when a node is killed or joins, by phase, against the limits that are promised.

Real torchrun nodes of this machine train the bundled digits over gloo, with the rendezvous endpoint off the nodes. One
node after the other, drawn by a seed, is killed (SIGKILL to its agent and all its workers) and started again, so that
deaths and joins take turns. All times are from the run's own event files:

- *killed*: from the SIGKILL to the first step that the survivors' next world commits. Its phases are those of the
  `world` event, as the slowest survivor wrote them; `redo` is the rest: the sight of the death, and the step again.
- *joined*: from the last step of the old world to the first of the new one. `stop`: the agents see the newcomer and end
  their workers, which hand the state over; `agents`: torchrun's rendezvous, its last call included; `start`: Python,
  torch and the building of the task in the new processes; `form`: meeting, process group, state, first step. In etcd
  nobody starts anew: the phases are those of a death.

A row's `theirs` is the limit, so that a ratio above 1.0 is within it; phases have that of their sum.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_train.bench import table
from elastic_train.bench.table import Row, iqr
from elastic_train.drills.backends import C10d, backend_of
from elastic_train.drills.cluster import Cluster, Place
from elastic_train.drills.nodes import wait_until
from elastic_train.drills.record import Record
from elastic_train.errors import ElasticTrainError
from elastic_train.events import newest_events

SEED = 1
SETTLE_SECONDS = 120.0
MIN_STEPS = 20
"""committed in a world before the next change"""
JOIN_MARGIN = 2.0
"""seconds that a join may take beyond the start of a process and the agents' last call"""
LAST_CALL = 2.0
"""seconds; what torchrun's is set to for this program"""


@dataclass(frozen=True)
class Case:
    nodes: int
    workers: int
    """of a node"""
    kills: int
    limit: float
    """seconds, of the median"""
    worst: float
    backend: str = C10d.name
    join_limit: float | None = None
    """seconds, of the median; None: what a start takes, and a margin"""

    def __str__(self) -> str:
        total = self.nodes * self.workers
        return f"{self.backend}, {total} workers on {self.nodes} nodes"


THOROUGH = (Case(3, 1, 20, limit=0.2, worst=1.0), Case(4, 2, 5, limit=0.4, worst=1.0))
QUICK = (Case(3, 1, 3, limit=0.2, worst=1.0),)


def run(quick: bool) -> dict[str, Any]:
    """Quick: under a minute; else about a quarter of an hour."""
    return table.report("recovery", measure_all(QUICK if quick else THOROUGH))


def measure_all(cases: Sequence[Case]) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch:
        for number, case in enumerate(cases):
            rows += measure(case, Path(scratch) / f"run-{number}")
    return rows


def measure(case: Case, run_dir: Path) -> list[Row]:
    """Kill and bring back, so often as the case says."""
    chance = random.Random(SEED)
    record = Record(run_dir)
    flags = ("--epochs", "1000000", "--eval-every", "1000000", "--no-progress")
    backend = backend_of(case.backend, record.path, None)
    cluster = Cluster(run_dir, record, flags, num_nodes=case.nodes, num_workers=case.workers, backend=backend)
    kills: list[dict[str, float]] = []
    joins: list[dict[str, float]] = []
    try:
        cluster.backend.start()
        for place in cluster.places:
            cluster.start(place)
        cluster.settle(case.nodes, MIN_STEPS, SETTLE_SECONDS)
        for number in range(case.kills):
            victim = chance.choice(cluster.places)
            kills.append(kill(cluster, victim))
            cluster.settle(case.nodes - 1, MIN_STEPS, SETTLE_SECONDS)
            joins.append(join(cluster, victim) if case.join_limit is None else join_in_place(cluster, victim))
            cluster.settle(case.nodes, MIN_STEPS, SETTLE_SECONDS)
            told = f"{case}, {number + 1} of {case.kills}: killed {kills[-1]['all']:.3f} s"
            print(f"{told}, joined {joins[-1]['all']:.2f} s", file=sys.stderr, flush=True)
    finally:
        cluster.close()
        record.close()
    join_limit = case.join_limit
    if join_limit is None:
        join_limit = statistics.median(found["start"] for found in joins) + LAST_CALL + JOIN_MARGIN
    return [
        *rows_of(f"{case}, one node killed", kills, case.limit),
        Row(f"{case}, one node killed, worst of {case.kills}", worst := max(k["all"] for k in kills), case.worst, "s",
            case.worst / worst, 0.0),
        *rows_of(f"{case}, a node joined", joins, join_limit),
    ]  # fmt: skip


def rows_of(case: str, found: Sequence[dict[str, float]], limit: float) -> list[Row]:
    """The median of the whole, then of every phase; `spread` in seconds."""
    rows = []
    for phase in found[0]:
        seconds = [one[phase] for one in found]
        median = statistics.median(seconds)
        name = case if phase == "all" else f"  {phase}"
        rows.append(Row(name, median, limit, "s", limit / max(median, 1e-6), iqr(seconds)))
    return rows


def kill(cluster: Cluster, victim: Place) -> dict[str, float]:
    """Seconds from the SIGKILL to the survivors' next step: `all`, then by phase."""
    generation = cluster.watch.generation
    started = time.time()
    cluster.kill([victim])
    return in_phases(cluster, generation, first_step_after(cluster, generation) - started)


def in_phases(cluster: Cluster, generation: int, total: float) -> dict[str, float]:
    """What those who went on from `generation` in place did in `total` seconds."""
    pids = {e["pid"] for e in all_events(cluster) if e["event"] == "world" and e["generation"] == generation}
    world = [e for e in all_events(cluster) if e["event"] == "world" and e["generation"] == generation + 1]
    stayed = [event for event in world if event["pid"] in pids]
    if cluster.watch.generation != generation + 1 or not stayed:
        raise ElasticTrainError(f"the survivors needed more than one attempt after generation {generation}")
    slowest = max(stayed, key=lambda event: sum(event["seconds"].values()))["seconds"]
    # `detect` counts from the start of the step in hand, of which a part may lie before the harm.
    phases = {name: float(slowest[name]) for name in ("abort", "meet", "init", "sync")}
    return {"all": total, **phases, "redo": max(0.0, total - sum(phases.values()))}


def join_in_place(cluster: Cluster, place: Place) -> dict[str, float]:
    """The same for a join that restarts nobody."""
    generation, before = cluster.watch.generation, time.time()
    cluster.start(place)
    first_step = first_step_after(cluster, generation)
    events = [event for event in all_events(cluster) if event["time"] > before]
    last_step = max(e["time"] for e in events if e["event"] == "step" and e["generation"] == generation)
    return in_phases(cluster, generation, first_step - last_step)


def join(cluster: Cluster, place: Place) -> dict[str, float]:
    """Seconds that the others stand still for a newcomer: `all`, then by phase."""
    generation, before = cluster.watch.generation, time.time()
    cluster.start(place)
    first_step = first_step_after(cluster, generation)
    world = cluster.watch.world
    assert world is not None
    events = [event for event in all_events(cluster) if event["time"] > before]
    last_step = max(e["time"] for e in events if e["event"] == "step" and e["generation"] == generation)
    ended = max(e["time"] for e in events if e["event"] == "done")
    pids = {int(member.rsplit("/", 1)[1]) for member in world.members}
    created = max(psutil.Process(pid).create_time() for pid in pids)
    ready = max(e["time"] for e in events if e["event"] == "start" and e["pid"] in pids)
    return {
        "all": first_step - last_step,
        "stop": ended - last_step,
        "agents": created - ended,
        "start": ready - created,
        "form": first_step - ready,
    }


def first_step_after(cluster: Cluster, generation: int) -> float:
    """When a world after `generation` committed its first step; waits for it."""

    def first_step() -> float | None:
        cluster.watch.poll()
        world = cluster.watch.world
        return world.first_step_at if world is not None and world.generation > generation else None

    return float(wait_until(first_step, f"step after generation {generation}", SETTLE_SECONDS))


def all_events(cluster: Cluster) -> list[dict[str, Any]]:
    """The newest of every event file."""
    return [line for path in (cluster.run_dir / "events").glob("*.jsonl") for line in newest_events(path)]
