"""The goodput of a job while nodes die and are replaced, compared with its rivals.

Three nodes of this machine train the bundled digits at a pace that leaves a core idle, as a GPU would. Every twenty
seconds one of them, drawn by a seed, is killed (SIGKILL to all of its processes) and started again five seconds later.
Goodput is the time that the kept steps take undisturbed, divided by the wall. A step is undisturbed if no node starts
or dies meanwhile; such steps are taken from the whole run, since a machine's speed changes with its neighbours. A step
that is lost and computed again counts once.

The rivals are in rivals.py: torchft, and torchrun's restarts with a store off the nodes and the shortest timeouts that
survive this. Each row compares ours with the promised limit or with a rival.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore

from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lives import Step
from elastic_train.tools.audit.record import Record
from elastic_train.tools.bench.recovery_time import ENDLESS
from elastic_train.tools.bench.table import BenchRow
from elastic_train.tools.drills.backends import C10d, Etcd3, backend_of
from elastic_train.tools.drills.cluster import Cluster
from elastic_train.tools.drills.jobs import BUNDLED_TASK
from elastic_train.tools.drills.nodes import Node, clean_environment, dying_with_parent, is_listening, wait_until
from elastic_train.tools.program import BUNDLED_PROGRAM, Program

SEED = 1
NUM_NODES = 3
SECONDS_PER_SAMPLE = 0.0023
"""about twenty steps per second with three nodes"""
EVERY_SECONDS = 20.0
"""from one death to the next"""
QUICK, THOROUGH = 1, 6
"""deaths"""
BACK_AFTER = 5.0
"""seconds from a death to the start of the node that replaces it"""
START_SECONDS = 120.0
UNDISTURBED_SECONDS = 8.0
"""for each world size before the first death"""
LIMIT = 0.97
RIVALS = "elastic_train.tools.bench.rivals"


@dataclass(frozen=True)
class Quiet:
    """A time, in Unix seconds, in which no node of a world of this size starts or dies."""

    size: int
    since: float
    until: float


class Restarts(C10d):
    """The standard tutorial's script, `restarts` of rivals.py; its nodes meet at a store in this process."""

    name = "torchrun's restarts"
    program: Program = ("--no-python", sys.executable, "-m", RIVALS, "restarts")
    environment = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    """otherwise every restart waits for a store that died with its node"""

    def start(self) -> None:
        self._store = TCPStore("localhost", self.port, is_master=True, wait_for_workers=False)

    def launcher(self, number: int, num_nodes: int, num_workers: int) -> list[str]:
        return [
            "env", self.environment, *super().launcher(number, num_nodes, num_workers), "--rdzv-id=goodput",
            "--max-restarts=1000", "--monitor-interval=0.1",
            "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1",
        ]  # fmt: skip


class Torchft(C10d):
    """Replicas of torchft, `replicas` of rivals.py, which meet at its lighthouse off the nodes, without torchrun."""

    name = "torchft"
    program: Program = ()
    flags = ("--min_replicas=1", "--heartbeat_timeout_ms=1000", "--join_timeout_ms=100", "--quorum_tick_ms=100")

    def __init__(self, log: Path) -> None:
        """`log`: a file for what the lighthouse prints."""
        super().__init__(None)
        self._log = log

    def start(self) -> None:
        program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) or "torchft_lighthouse"
        command = [*dying_with_parent(), program, f"--bind=[::]:{self.port}", *self.flags]
        self._lighthouse = Node(command, self._log, Path.cwd(), clean_environment())
        wait_until(lambda: is_listening(self.port), "lighthouse", START_SECONDS)

    def close(self) -> None:
        self._lighthouse.kill()

    def launcher(self, number: int, num_nodes: int, _num_workers: int) -> list[str]:
        lighthouse = f"http://localhost:{self.port}"
        return [sys.executable, "-m", RIVALS, "replicas", lighthouse, str(number), str(num_nodes)]


def run(quick: bool) -> list[BenchRow]:
    """Measure goodput. Quick: a minute and a half, only ours beside the limits; else a quarter of an hour."""
    num_deaths = QUICK if quick else THOROUGH
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch:
        folder = Path(scratch)
        ours = {name: measure(backend_of(name, None), folder / name, num_deaths) for name in (C10d.name, Etcd3.name)}
        rows = [row(name, found, "the limit", LIMIT) for name, found in ours.items()]
        if quick:
            return rows
        rivals: list[Restarts | Torchft] = [Restarts(None)]
        if importlib.util.find_spec("torchft") is not None:
            rivals.append(Torchft(folder / "lighthouse.log"))
        else:
            print("torchft is not installed (pip install 'elastic_train[bench]'): without its rows", file=sys.stderr)
        for rival in rivals:
            theirs = measure(rival, folder / rival.name, num_deaths)
            rows += [row(name, found, rival.name, theirs) for name, found in ours.items()]
        return rows


def row(name: str, ours: float, rival: str, theirs: float) -> BenchRow:
    return BenchRow.of_rates(f"{name} beside {rival}", [ours], [theirs], "goodput")


def measure(backend: C10d | Etcd3, run_dir: Path, num_deaths: int) -> float:
    """Run a job, ours or a rival's, and return its goodput: 1.0 is the undisturbed job at the world sizes that were
    present. Blocks for EVERY_SECONDS for each death, and for the start of its nodes.

    Raises:
        TooSlow: the nodes never train together.
    """
    chance, seconds = random.Random(SEED), num_deaths * EVERY_SECONDS
    program, flags = BUNDLED_PROGRAM, ["--task", BUNDLED_TASK, *ENDLESS]
    if isinstance(backend, Restarts | Torchft):
        program, flags = backend.program, []
    quiet: list[Quiet] = []
    with (
        closing(Record(run_dir)) as record,
        closing(Cluster(run_dir, record, flags, num_nodes=NUM_NODES, backend=backend, program=program)) as cluster,
    ):
        cluster.set_pace(SECONDS_PER_SAMPLE)
        backend.start()
        for size, place in enumerate(cluster.places, 1):
            cluster.start(place)
            has_size = partial(lambda size: cluster.watch.world_size == size, size)
            cluster.wait_until(has_size, f"world of {size} nodes", START_SECONDS)
            quiet.append(Quiet(size, time.time(), time.time() + UNDISTURBED_SECONDS))
            time.sleep(UNDISTURBED_SECONDS)
        began = time.time()
        for cycle in range(num_deaths):
            killed_at = began + cycle * EVERY_SECONDS
            back_at = killed_at + BACK_AFTER
            sleep_until(killed_at)
            report_ends(cluster)
            victim = chance.choice(cluster.places)
            cluster.kill([victim])
            quiet.append(Quiet(NUM_NODES - 1, killed_at, back_at))
            sleep_until(back_at)
            cluster.start(victim)
            quiet.append(Quiet(NUM_NODES, back_at, killed_at + EVERY_SECONDS))  # full size: the victim has joined
        sleep_until(began + seconds)
        report_ends(cluster)
        cluster.kill(cluster.places)  # one after the other they would make further worlds
    history = read_history(run_dir)
    kept = [step for step in history.kept if began < step.time <= began + seconds]
    step_seconds = undisturbed(history.kept, quiet)
    goodput = sum(step_seconds[step.world_size] for step in kept) / seconds
    alone = ", ".join(f"{of_step * 1e3:.1f} ms with {size}" for size, of_step in step_seconds.items())
    print(f"{backend.name}: {goodput:.3f}; undisturbed a step takes {alone}", file=sys.stderr, flush=True)
    return goodput


def undisturbed(kept: Sequence[Step], quiet: Sequence[Quiet]) -> dict[int, float]:
    """Map each world size to the mean seconds of a step: between two commits of the same world in a quiet time."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for before, step in itertools.pairwise(kept):
        world, world_before = ((one.world_size, one.generation, one.writer) for one in (step, before))
        if world == world_before and any(
            one.size == step.world_size and one.since <= before.time and step.time <= one.until for one in quiet
        ):
            seconds[step.world_size].append(step.time - before.time)
    return {size: statistics.fmean(found) for size, found in seconds.items()}


def report_ends(cluster: Cluster) -> None:
    """Report nodes that ended by themselves: only the benchmark should. They start again after their turn to die."""
    for place in cluster.poll():
        told = f"{cluster.backend.name}: {place.name} has ended by itself: {cluster.last_words()}"
        print(told, file=sys.stderr, flush=True)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
