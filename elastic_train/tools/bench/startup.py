"""How long a newcomer takes from the start of its torchrun to its first step, by phase, against the promised limit.

Two real torchrun nodes of this machine train the bundled digits over gloo as fast as they can. A third one joins, is
killed, and joins again. Before and after each join, the unavoidable parts of a newcomer's start are measured beside the
same two nodes: an interpreter, `import torch`, and `import torch._dynamo` (DDP and the optimizers import it). The limit
of a join is twice the first two (for the agent and the worker), once the third, and ALLOWANCE_SECONDS.

A row's `theirs` is the limit, and a ratio above 1.0 is within it. Indented rows are the phases in their order. Each is
compared with its own part of the limit; phases without one share ALLOWANCE_SECONDS, and are compared with that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from elastic_train.errors import ElasticTrainError
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.bench.recovery_time import MIN_STEPS, SETTLE_SECONDS, first_step_after, training_nodes
from elastic_train.tools.bench.table import BenchRow
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.nodes import clean_environment, wait_until

NUM_TRAINING = 2
"""nodes that train while another one joins"""
ALLOWANCE_SECONDS = 1.5
"""allowed for everything except the imports of torch"""
QUICK, THOROUGH = 3, 10
"""joins"""

PROBE = """
import json, time
started = time.monotonic()
import torch
imported = time.monotonic()
import torch._dynamo
print(json.dumps([imported - started, time.monotonic() - imported]))
"""


@dataclass(frozen=True)
class Imports:
    """The unavoidable parts of a newcomer's start, in seconds."""

    interpreter: float
    torch: float
    dynamo: float

    @property
    def limit(self) -> float:
        return 2 * (self.interpreter + self.torch) + self.dynamo + ALLOWANCE_SECONDS


@dataclass(frozen=True)
class JoinTimes:
    """Seconds of each phase of one join, in order, and of the imports that were measured beside it."""

    phases: dict[str, float]
    imports: Imports

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def run(quick: bool) -> list[BenchRow]:
    """Measure joins. Quick: about two minutes; else about six."""
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch:
        return rows_of(measure(QUICK if quick else THOROUGH, Path(scratch) / "run"))


def rows_of(joins: Sequence[JoinTimes]) -> list[BenchRow]:
    """Return the row of the whole join against its limit, pair by pair, then of every phase; `spread` is in seconds."""
    whole, limits = [join.seconds for join in joins], [join.imports.limit for join in joins]
    rows = [BenchRow.of_costs("from torchrun's start to the first step", whole, limits, "s")]
    interpreter, torch, dynamo = map(statistics.median, zip(*(astuple(join.imports) for join in joins), strict=True))
    parts = {"agent: imports": interpreter + torch, "worker: imports": interpreter + torch + dynamo}
    for name in joins[0].phases:
        limit = parts.get(name, ALLOWANCE_SECONDS)
        rows.append(BenchRow.within(f"  {name}", [join.phases[name] for join in joins], limit))
    return rows


def measure(num_joins: int, run_dir: Path) -> list[JoinTimes]:
    """Measure `num_joins` joins, and the imports before and after each. Raises: TooSlow: a node did not join."""
    joins: list[JoinTimes] = []
    with training_nodes(run_dir, NUM_TRAINING, num_places=NUM_TRAINING + 1) as cluster:
        newcomer = cluster.places[-1]
        before = measure_imports()
        for number in range(num_joins):
            phases = join(cluster, newcomer)
            cluster.settle(NUM_TRAINING + 1, MIN_STEPS, SETTLE_SECONDS)
            cluster.kill([newcomer])
            cluster.settle(NUM_TRAINING, MIN_STEPS, SETTLE_SECONDS)
            after = measure_imports()
            imports = Imports(*map(statistics.fmean, zip(astuple(before), astuple(after), strict=True)))
            joins.append(JoinTimes(phases, imports))
            told = f"{joins[-1].seconds:.2f} s, limit {imports.limit:.2f} s"
            print(f"join {number + 1} of {num_joins}: {told}", file=sys.stderr, flush=True)
            before = after
    return joins


def measure_imports() -> Imports:
    """Measure the imports beside the running nodes. Blocks for two interpreters, one after the other."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    interpreter = time.monotonic() - started
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, env=clean_environment()
    )
    return Imports(interpreter, *json.loads(probe.stdout))


def join(cluster: Cluster, place: Place) -> dict[str, float]:
    """Start a node; return the seconds of each phase until the first step in which it takes part."""
    generation = cluster.watch.generation
    started = time.time()
    cluster.start(place)
    node = place.node
    assert node is not None, "started"
    # The line is by the rendezvous, which torchrun creates after all imports.
    wait_until(lambda: b"elastic_train: meeting" in node.log.read_bytes(), "line of the agent", SETTLE_SECONDS)
    announced = node.log.stat().st_mtime
    first_step = first_step_after(cluster, generation)
    pids = {worker.pid for worker in node.workers()}
    mine = {event["event"]: event for event in read_history(cluster.run_dir).events if event["pid"] in pids}
    if not {"start", "world"} <= mine.keys() or mine["world"]["generation"] != cluster.watch.generation:
        raise ElasticTrainError(f"the newcomer is not in the first world after generation {generation}")
    before, formed = mine["start"]["seconds"], mine["world"]["seconds"]
    queued = mine["start"]["time"]
    ends = {
        "agent: imports": announced,
        "agent: start of the worker": queued - sum(before.values()),
        "worker: imports": queued - before["find"] - before["build"],
        "build": queued - before["find"],
        "find the job": queued,
        "join queue": mine["world"]["time"] - formed["init"] - formed["sync"],
        "process group and state": mine["world"]["time"],
        "first step": first_step,
    }
    # The kernel's times of a process's start and of a file's last change are off by some milliseconds.
    moments = accumulate([started, *ends.values()], max)
    return {name: end - begin for name, (begin, end) in zip(ends, pairwise(moments), strict=True)}
