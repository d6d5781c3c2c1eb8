"""The job of a drill: its nodes, where they meet (backends.py), and what is known of who is in."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path

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
from elastic_train.tools.drills.program import BUNDLED_PROGRAM, DrilledProgram
from elastic_train.tools.drills.watch import RunWatch

LOOK_SECONDS = 0.3
"""between two looks for the workers of the nodes, which go through all processes of the machine"""


class NodeState(StrEnum):
    """What a person sees of a node."""

    STARTING = "starting"
    IN = "in"
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    OUT = "left out"
    """it runs and is in no world: about to come, or about to end"""
    ENDED = "ended"


class Place:
    """A machine of the drill, on which one node after the other can run."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"node{index + 1}"
        self.node: Node | None = None
        self.num_started = 0
        self.effect: NodeState | None = None
        """what a fault does to it at the moment"""
        self.members: tuple[str, ...] = ()
        """its workers by their names in the events"""

    @property
    def is_running(self) -> bool:
        return self.node is not None

    def workers(self) -> list[psutil.Process]:
        """Those of its node that run."""
        return self.node.workers() if self.node is not None else []


class Cluster:
    """Everything that a drill starts; `close` ends it all."""

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
        program: DrilledProgram = BUNDLED_PROGRAM,
        hears_notices: bool = False,
    ) -> None:
        """`flags` are the worker's; `num_workers` counts the workers of a node; by default they meet under c10d.
        `hears_notices`: `give_notice` tells a node that it is taken away."""
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
        """for what each torchrun leaves in TMPDIR, and who is killed cannot remove"""

    # --- starting -----------------------------------------------------------------------------------------------------

    def start(self, place: Place) -> None:
        """Start a node there; returns at once."""
        place.num_started += 1
        notices = self._notice_of(place)
        notices.unlink(missing_ok=True)  # of the node before
        command = [
            sys.executable, "-m", "torch.distributed.run", *self.backend.torchrun_flags(),
            f"--nnodes=1:{len(self.places)}", f"--nproc-per-node={self._num_workers}",
            *self._program.words, "--run-dir", str(self.run_dir), *self._flags,
            *(["--notices", f"file:{notices}"] if self._hears_notices else []),
        ]  # fmt: skip
        network = self.network
        if network is not None:
            network.heal(place.index)  # not before: sockets of dead processes would say farewell after all
        place.node = Node(
            command,
            self._record.path / f"{place.name}-{place.num_started}.log",
            Path.cwd(),
            clean_environment()
            | self._program.environment
            | {PACE_VARIABLE: str(self._pace_file), "TMPDIR": self._temporary.name}
            | {"NCCL_HOSTID": place.name},  # as a machine of its own: NCCL then has nodes share this one's GPU
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
        """A node there is taken away at that time, in Unix seconds."""
        write_atomic(self._notice_of(place), json.dumps({"deadline": deadline, "reason": "trace"}).encode())

    def set_pace(self, seconds_per_sample: float) -> None:
        set_pace(self._pace_file, seconds_per_sample)

    # --- looking ------------------------------------------------------------------------------------------------------

    def poll(self) -> list[Place]:
        """Read the events and look after the nodes; returns those that have ended since the last call."""
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
        """Whether all workers of a node are in the newest world."""
        world = self.watch.world
        return (
            world is not None and len(place.members) == self._num_workers and set(place.members) <= set(world.members)
        )

    @property
    def running(self) -> list[Place]:
        return [place for place in self.places if place.is_running]

    @property
    def inside(self) -> list[Place]:
        """Nodes in the newest world that nothing is wrong with."""
        return [place for place in self.running if place.effect is None and self.is_in(place)]

    @property
    def hosting(self) -> list[Place]:
        """The healthy node that hosts the c10d endpoint: of several addresses the first."""
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
        """Whether every running node without an effect is in the newest world, and it has committed a step."""
        world = self.watch.world
        if world is None or world.first_step_at is None:
            return False
        healthy = [place for place in self.running if place.effect is None]
        members = {member for place in self.running for member in place.members}
        return all(map(self.is_in, healthy)) and set(world.members) <= members

    def settle(self, num_nodes: int, num_steps: int, timeout: float) -> None:
        """Wait until so many nodes train together, and then until they have committed so many steps more.

        Raises: TooSlow naming what did not come about in `timeout` seconds, of the one or of the other.
        """

        def is_settled() -> bool:
            self.poll()
            return len(self.inside) == num_nodes and self.is_settled

        wait_until(is_settled, f"world of {num_nodes} nodes", timeout)
        enough = self.watch.step + num_steps

        def has_trained() -> bool:
            self.poll()
            return self.watch.step >= enough

        wait_until(has_trained, f"step {enough}", timeout)

    def rank_of(self, place: Place) -> int | None:
        """The lowest rank of a node's workers in the newest world."""
        world = self.watch.world
        ranks = [world.members.index(member) for member in place.members if member in world.members] if world else []
        return min(ranks, default=None)

    def last_words(self) -> str:
        """What a node said of its end, and where the logs are."""
        for node in self._seen:
            lines = node.log.read_text(errors="replace").splitlines()
            errors = [line.split(": ", 2)[-1] for line in lines if line.startswith("elastic_train: error")]
            if errors:
                return f"{errors[-1]} (all logs: {self._record.path})"
        return f"their logs are in {self._record.path}"

    # --- ending -------------------------------------------------------------------------------------------------------

    def kill(self, places: Sequence[Place]) -> float:
        """SIGKILL to every process of some nodes at once; they are gone when it returns. Returns when that began."""
        nodes = [place.node for place in places if place.node is not None]
        began = kill_at_once(nodes)
        for place in places:
            if place.node is not None:
                self._note_end(place)
        return began

    def leftovers(self) -> list[str]:
        """What is left of all that was started, once it had ENDING_SECONDS to end; stops the backend."""
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            processes = {process.pid: "a node" for process in self._strays()}
            processes |= {process.pid: node.name for node in self._seen for process in node.all_processes()}
            if not processes or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [f"process {pid} of {name} still runs" for pid, name in sorted(processes.items())] + self.backend.stop()

    def _strays(self) -> list[psutil.Process]:
        """Whatever came of the nodes and runs, those included whose parents are gone: a DataLoader's processes."""
        return processes_with(PACE_VARIABLE, str(self._pace_file))

    def close(self) -> None:
        """End whatever still runs, all of it, though one of them may not go."""
        with ExitStack() as ends:
            ends.callback(self.backend.close)
            ends.callback(self._temporary.cleanup)
            ends.callback(lambda: end_processes(self._strays()))
            for node in self._seen:
                ends.callback(node.end)
