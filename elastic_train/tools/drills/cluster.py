"""The job of a drill: its nodes, their rendezvous (backends.py), and which nodes are in the world."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from elastic_train.storage.atomic_files import write_atomic
from elastic_train.tools.audit.record import PACE_FILE, PACE_VARIABLE, Record, set_pace
from elastic_train.tools.drills.backends import ENDING_SECONDS, C10d, Etcd3
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import (
    Node,
    clean_environment,
    dying_with_parent,
    end_processes,
    kill_at_once,
    processes_with,
    wait_until,
)
from elastic_train.tools.drills.watch import RunWatch
from elastic_train.tools.program import BUNDLED_PROGRAM, Program

LOOK_SECONDS = 0.3
"""between two searches for the nodes' workers, which read all processes of the machine"""


class NodeState(StrEnum):
    """The state of a node, as the timeline shows it."""

    STARTING = "starting"
    IN = "in"
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    OUT = "left out"
    """it runs and is in no world: about to join, or about to end"""
    ENDED = "ended"


class Place:
    """A machine of the drill; nodes run on it one after the other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"node{index + 1}"
        self.node: Node | None = None
        self.num_started = 0
        self.effect: NodeState | None = None
        """the state in which a fault keeps it at the moment"""
        self.members: tuple[str, ...] = ()
        """the names of its workers in the events"""

    @property
    def is_running(self) -> bool:
        return self.node is not None

    def workers(self) -> list[psutil.Process]:
        """The running workers of its node."""
        return self.node.workers() if self.node is not None else []


class Cluster:
    """All processes that a drill starts; `close` ends them."""

    def __init__(
        self,
        run_dir: Path,
        record: Record,
        flags: Sequence[str],
        *,
        num_nodes: int,
        num_workers: int = 1,
        network: Network | None = None,
        backend: C10d | Etcd3 | None = None,
        program: Program = BUNDLED_PROGRAM,
        hears_notices: bool = False,
    ) -> None:
        """`flags` are the worker's; `num_workers` is per node; the default backend is c10d. `hears_notices`: nodes take
        notices by --notices, from `give_notice`."""
        self.run_dir = run_dir
        self.watch = RunWatch(run_dir)
        self.network = network
        self.places = [Place(index) for index in range(num_nodes)]
        self._flags, self._num_workers, self._program = list(flags), num_workers, program
        self._hears_notices = hears_notices
        self._record = record
        self._pace_file = record.path / PACE_FILE
        self.backend = backend or C10d(network)
        self._looked_at = 0.0
        self._seen: list[Node] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="elastic-train-nodes-")
        """TMPDIR of the nodes: a torchrun that is killed cannot remove its files"""

    # --- starting -----------------------------------------------------------------------------------------------------

    def start(self, place: Place) -> None:
        """Start a node at a place; returns at once."""
        place.num_started += 1
        notices = self._notice_of(place)
        notices.unlink(missing_ok=True)  # of the node before
        command = [
            *self.backend.launcher(place.index, len(self.places), self._num_workers),
            *self._program, "--run-dir", str(self.run_dir), *self._flags,
            *(["--notices", f"file:{notices}"] if self._hears_notices else []),
        ]  # fmt: skip
        network = self.network
        if network is not None:
            network.heal(place.index)  # not earlier: the sockets of dead processes would still send a FIN
        place.node = Node(
            command,
            self._record.path / f"{place.name}-{place.num_started}.log",
            Path.cwd(),
            clean_environment()
            | {PACE_VARIABLE: str(self._pace_file), "TMPDIR": self._temporary.name}
            | {"NCCL_HOSTID": place.name},  # NCCL takes each node for a machine, and so lets them share the GPU
            name=place.name,
            host=network.host_name(place.index) if network else None,
            prefix=[*dying_with_parent(), *(network.node_prefix(place.index) if network else ())],
            is_wrapped=network is not None,
        )
        self._seen.append(place.node)
        place.members, place.effect = (), None
        self._record.node("started", place.name, pid=place.node.process.pid, log=place.node.log.name)

    def _notice_of(self, place: Place) -> Path:
        return self._record.path / f"{place.name}-notice.json"

    def give_notice(self, place: Place, deadline: float) -> None:
        """Give the node at a place notice that it is taken away at `deadline`, Unix seconds."""
        write_atomic(self._notice_of(place), json.dumps({"deadline": deadline, "reason": "trace"}).encode())

    def set_pace(self, seconds_per_sample: float) -> None:
        set_pace(self._pace_file, seconds_per_sample)

    # --- looking ------------------------------------------------------------------------------------------------------

    def poll(self) -> list[Place]:
        """Read the events and the nodes' states; return the places whose nodes have ended since the last call."""
        self.watch.poll()
        is_time_to_look = time.monotonic() - self._looked_at > LOOK_SECONDS
        if is_time_to_look:
            self._looked_at = time.monotonic()
        ended = []
        for place in self.places:
            node = place.node
            if node is None:
                continue
            if node.process.poll() is not None:
                ended.append(place)
                self._note_end(place)
                continue
            if is_time_to_look:
                self._find_workers(place, node)
        return ended

    def _find_workers(self, place: Place, node: Node) -> None:
        names = sorted(self.watch.names)
        found = {name for worker in node.workers() if (name := node.member_of(worker, names))}
        for name in sorted(found - set(place.members)):
            self._record.node("worker", place.name, member=name)
        place.members = tuple(sorted(found))

    def state_of(self, place: Place) -> NodeState:
        if not place.is_running:
            return NodeState.ENDED
        if place.effect is not None:
            return place.effect
        if self.is_in(place):
            return NodeState.IN
        return NodeState.OUT if place.members else NodeState.STARTING

    def _note_end(self, place: Place) -> None:
        assert place.node is not None
        self._record.node("ended", place.name, code=place.node.process.returncode)
        place.node, place.members, place.effect = None, (), None

    def is_in(self, place: Place) -> bool:
        """Return whether all workers of a node are in the newest world."""
        world = self.watch.world
        return (
            world is not None and len(place.members) == self._num_workers and set(place.members) <= set(world.members)
        )

    @property
    def running(self) -> list[Place]:
        return [place for place in self.places if place.is_running]

    @property
    def inside(self) -> list[Place]:
        """Healthy nodes in the newest world."""
        return [place for place in self.running if place.effect is None and self.is_in(place)]

    @property
    def hosting(self) -> list[Place]:
        """The node that hosts the c10d endpoint (of several addresses the first), if it is healthy."""
        assert isinstance(self.backend, C10d)
        if self.network is not None:
            return [place for place in self.inside if place.index == 0]
        port = self.backend.port
        return [place for place in self.inside if place.node is not None and place.node.listens_at(port)]

    @property
    def vacant(self) -> list[Place]:
        return [place for place in self.places if not place.is_running]

    @property
    def is_settled(self) -> bool:
        """Whether all healthy nodes are in the newest world, which has only members of running nodes and a step."""
        world = self.watch.world
        if world is None or world.first_step_at is None:
            return False
        healthy = [place for place in self.running if place.effect is None]
        members = {member for place in self.running for member in place.members}
        return all(map(self.is_in, healthy)) and set(world.members) <= members

    def settle(self, num_nodes: int, num_steps: int, timeout: float) -> None:
        """Wait until `num_nodes` nodes train together, and then until they have committed `num_steps` more steps.

        Raises: TooSlow naming the one that took more than `timeout` seconds; each has its own.
        """
        self.wait_until(
            lambda: len(self.inside) == num_nodes and self.is_settled, f"world of {num_nodes} nodes", timeout
        )
        enough = self.watch.step + num_steps
        self.wait_until(lambda: self.watch.step >= enough, f"step {enough}", timeout)

    def wait_until(self, condition: Callable[[], Any], what: str, timeout: float) -> Any:
        """Wait as `wait_until` of nodes.py does, and poll before each look at `condition`."""

        def is_so() -> Any:
            self.poll()
            return condition()

        return wait_until(is_so, what, timeout)

    def rank_of(self, place: Place) -> int | None:
        """The lowest rank of a node's workers in the newest world."""
        world = self.watch.world
        ranks = [world.members.index(member) for member in place.members if member in world.members] if world else []
        return min(ranks, default=None)

    def last_words(self) -> str:
        """The last error in the log of a node that reported one, and where the logs are."""
        for node in self._seen:
            lines = node.log.read_text(errors="replace").splitlines()
            errors = [line.split(": ", 2)[-1] for line in lines if line.startswith("elastic_train: error")]
            if errors:
                return f"{errors[-1]} (all logs: {self._record.path})"
        return f"their logs are in {self._record.path}"

    # --- ending -------------------------------------------------------------------------------------------------------

    def kill(self, places: Sequence[Place]) -> float:
        """Kill every process of some nodes at once. They are gone when it returns; returns when the kill began."""
        nodes = [place.node for place in places if place.node is not None]
        began = kill_at_once(nodes)
        for place in places:
            if place.node is not None:
                self._note_end(place)
        return began

    def leftovers(self) -> list[str]:
        """Stop the backend and return what is left of all that was started, after at most ENDING_SECONDS each."""
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            processes = {process.pid: "a node" for process in self._strays()}
            processes |= {process.pid: node.name for node in self._seen for process in node.all_processes()}
            if not processes or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [f"process {pid} of {name} still runs" for pid, name in sorted(processes.items())] + self.backend.stop()

    def _strays(self) -> list[psutil.Process]:
        """Running processes that the nodes started, also orphans: a DataLoader's processes, for example."""
        return processes_with(PACE_VARIABLE, str(self._pace_file))

    def close(self) -> None:
        """End everything that still runs, and go on if one end fails."""
        with ExitStack() as ends:
            ends.callback(self.backend.close)
            ends.callback(self._temporary.cleanup)
            ends.callback(lambda: end_processes(self._strays()))
            for node in self._seen:
                ends.callback(node.kill)
