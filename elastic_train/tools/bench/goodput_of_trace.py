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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from elastic_train.runlog.reader import newest_first
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lives import Step
from elastic_train.tools.audit.record import PACE_VARIABLE
from elastic_train.tools.bench import table
from elastic_train.tools.bench.table import BenchRow
from elastic_train.tools.drills.backends import C10d, Etcd3, backend_of
from elastic_train.tools.drills.jobs import BUNDLED_TASK
from elastic_train.tools.drills.nodes import (
    Node,
    clean_environment,
    dying_with_parent,
    free_port,
    is_listening,
    kill_at_once,
    wait_until,
)

SEED = 1
NUM_NODES = 3
SECONDS_PER_SAMPLE = 0.0023
"""about twenty steps per second with three nodes"""
BACK_AFTER = 5.0
"""seconds from a death to the start of the node that replaces it"""
START_SECONDS = 120.0
UNDISTURBED_SECONDS = 8.0
"""for each world size before the first death"""
LIMIT = 0.97


@dataclass(frozen=True)
class Trace:
    """The deaths of nodes in a job."""

    seconds: float
    every: float
    """seconds, from one death to the next"""


@dataclass(frozen=True)
class Quiet:
    """A time, in Unix seconds, in which no node of a world of this size starts or dies."""

    size: int
    since: float
    until: float


THOROUGH = Trace(120.0, 20.0)
QUICK = Trace(20.0, 20.0)


class Ours:
    """This package under torchrun, with a backend of its drills."""

    def __init__(self, backend: str, run_dir: Path) -> None:
        self.name = backend
        self.run_dir = run_dir
        self._backend = backend_of(backend, None, run_id="goodput")
        self.start, self.close = self._backend.start, self._backend.close

    def command(self, number: int) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", *self._backend.torchrun_flags(), f"--nnodes=1:{NUM_NODES}",
            "-m", "elastic_train", "--run-dir", str(self.run_dir), "--task", BUNDLED_TASK,
            "--epochs", "1000000", "--eval-every", "1000000", "--no-progress",
        ]  # fmt: skip


class AtServer:
    """A contender whose nodes meet at a server process outside of all nodes."""

    server: ClassVar[str]
    """the server's name"""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._port = free_port()
        self._node: Node | None = None

    def server_command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start the server; blocks until it accepts connections."""
        command = [*dying_with_parent(), *self.server_command()]
        self._node = Node(command, self.run_dir / f"{self.server}.log", Path.cwd(), clean_environment())
        wait_until(lambda: is_listening(self._port), self.server, START_SECONDS)

    def close(self) -> None:
        if self._node is not None:
            self._node.end()


class Restarts(AtServer):
    """The standard tutorial's script: `restarts` of rivals.py."""

    server = "store"
    name = "torchrun's restarts"
    environment = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    """otherwise every restart waits for a store that died with its node"""

    def server_command(self) -> list[str]:
        program = "import signal, sys; from torch.distributed import TCPStore\n"
        program += "store = TCPStore('localhost', int(sys.argv[1]), is_master=True, wait_for_workers=False)\n"
        return [sys.executable, "-c", f"{program}signal.pause()", str(self._port)]

    def command(self, number: int) -> list[str]:
        return [
            "env", self.environment, sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{self._port}", "--rdzv-id=goodput", f"--nnodes=1:{NUM_NODES}",
            "--max-restarts=1000", "--monitor-interval=0.1",
            "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1",
            "--no-python", sys.executable, "-m", "elastic_train.tools.bench.rivals", "restarts", str(self.run_dir),
        ]  # fmt: skip


class Torchft(AtServer):
    """Replicas of torchft, and its lighthouse off the nodes: `replicas` of rivals.py."""

    server = "lighthouse"
    name = "torchft"
    flags = ("--min_replicas=1", "--heartbeat_timeout_ms=1000", "--join_timeout_ms=100", "--quorum_tick_ms=100")

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("torchft") is not None

    def server_command(self) -> list[str]:
        program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) or "torchft_lighthouse"
        return [program, f"--bind=[::]:{self._port}", *self.flags]

    def command(self, number: int) -> list[str]:
        return [
            sys.executable, "-m", "elastic_train.tools.bench.rivals", "replicas", str(self.run_dir),
            f"http://localhost:{self._port}", str(number), str(NUM_NODES),
        ]  # fmt: skip


Contender: TypeAlias = Ours | Restarts | Torchft
"""a way to train on nodes that come and go; `command` is that of a node, numbered from 0"""


def start_node(contender: Contender, number: int, environment: Mapping[str, str]) -> Node:
    log = contender.run_dir / f"node{number}-{time.time_ns()}.log"
    return Node([*dying_with_parent(), *contender.command(number)], log, Path.cwd(), environment)


def run(quick: bool) -> dict[str, Any]:
    """Measure goodput. Quick: a minute and a half, only ours beside the limits; else a quarter of an hour."""
    return table.report("goodput", measure_all(QUICK if quick else THOROUGH, with_rivals=not quick))


def measure_all(trace: Trace, with_rivals: bool) -> list[BenchRow]:
    with tempfile.TemporaryDirectory(prefix="elastic-train-bench-") as scratch:
        folder = Path(scratch)
        ours = {name: measure(Ours(name, folder / name), trace) for name in (C10d.name, Etcd3.name)}
        rows = [row(name, found, "the limit", LIMIT) for name, found in ours.items()]
        if not with_rivals:
            return rows
        rivals: list[Contender] = [Restarts(folder / "restarts")]
        if Torchft.is_installed():
            rivals.append(Torchft(folder / "torchft"))
        else:
            print("torchft is not installed (pip install 'elastic_train[bench]'): without its rows", file=sys.stderr)
        for rival in rivals:
            theirs = measure(rival, trace)
            rows += [row(name, found, rival.name, theirs) for name, found in ours.items()]
        return rows


def row(name: str, ours: float, rival: str, theirs: float) -> BenchRow:
    return BenchRow.of_rates(f"{name} beside {rival}", [ours], [theirs], "goodput")


def measure(contender: Contender, trace: Trace) -> float:
    """Run a contender and return its goodput: 1.0 is the undisturbed job at the world sizes that were present. Blocks
    for the trace and the start of its nodes.

    Raises:
        TooSlow: the nodes never train together.
    """
    chance = random.Random(SEED)
    run_dir = contender.run_dir
    run_dir.mkdir()
    pace = run_dir / "pace"
    pace.write_text(str(SECONDS_PER_SAMPLE))
    environment = clean_environment() | {PACE_VARIABLE: str(pace)}
    nodes: dict[int, Node] = {}
    quiet: list[Quiet] = []
    with ExitStack() as ends:
        ends.callback(contender.close)
        contender.start()

        def start(number: int) -> None:
            nodes[number] = start_node(contender, number, environment)
            ends.callback(nodes[number].end)

        for number in range(NUM_NODES):
            start(number)
            size = number + 1
            wait_for_world(run_dir, size)
            quiet.append(Quiet(size, time.time(), time.time() + UNDISTURBED_SECONDS))
            time.sleep(UNDISTURBED_SECONDS)
        began = time.time()
        for cycle in range(round(trace.seconds / trace.every)):
            killed_at = began + cycle * trace.every
            back_at = killed_at + BACK_AFTER
            sleep_until(killed_at)
            tell_of_ends(contender, nodes)
            victim = chance.randrange(NUM_NODES)
            kill_at_once([nodes[victim]])
            quiet.append(Quiet(NUM_NODES - 1, killed_at, back_at))
            sleep_until(back_at)
            start(victim)
            quiet.append(Quiet(NUM_NODES, back_at, killed_at + trace.every))  # full size: the victim has joined
        sleep_until(began + trace.seconds)
        tell_of_ends(contender, nodes)
    history = read_history(run_dir)
    kept = [step for step in history.kept if began < step.time <= began + trace.seconds]
    step_seconds = undisturbed(history.kept, quiet)
    goodput = sum(step_seconds[step.world_size] for step in kept) / trace.seconds
    alone = ", ".join(f"{seconds * 1e3:.1f} ms with {size}" for size, seconds in step_seconds.items())
    print(f"{contender.name}: {goodput:.3f}; undisturbed a step takes {alone}", file=sys.stderr, flush=True)
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


def wait_for_world(run_dir: Path, size: int) -> None:
    wait_until(lambda: world_size(run_dir) == size, f"world of {size} nodes", START_SECONDS)


def world_size(run_dir: Path) -> int | None:
    """The world size of the newest step."""
    newest = [
        next((line for line in newest_first(path) if line["event"] == "step"), None)
        for path in (run_dir / "events").glob("*.jsonl")
    ]
    last = max((line for line in newest if line is not None), key=lambda line: float(line["time"]), default=None)
    return int(last["world_size"]) if last is not None else None


def tell_of_ends(contender: Contender, nodes: Mapping[int, Node]) -> None:
    """Report nodes that ended by themselves: only the benchmark should. They start again after their turn to die."""
    for number, node in nodes.items():
        code = node.process.poll()
        if code is not None:
            told = f"{contender.name}: node {number} has ended by itself, with code {code}:\n{node.text()[-1000:]}"
            print(told, file=sys.stderr, flush=True)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
