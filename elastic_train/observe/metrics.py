"""`--metrics-port`: what a run is doing, for Prometheus to scrape, from the first worker of every node.

Each node tells of the whole run: step, loss, members, incidents and goodput are the same on all of them, so any one is
enough, and none of them has to move when rank 0 does. Only the snapshots are told by who wrote them, and
`may_be_taken` by each node of itself. Several nodes of one host share the port: one of them has it, and another takes
over with the next world.

The training thread leaves its numbers here, at most once a second; a thread of its own answers.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_train.errors import UsageError, cause_of
from elastic_train.observe.rate import Rate
from elastic_train.runlog.goodput import goodput
from elastic_train.system import close_in_forked_children
from elastic_train.training.state import TrainState
from elastic_train.world import World

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

UPDATE_SECONDS = 1.0
CAUSES = ("peer_lost", "leave", "join", "restart")
"""of incidents; told from the start, so that the first of each is seen as an increase"""


@dataclass(frozen=True)
class Snapshot:
    """The newest snapshot that this worker has written."""

    written_at: float
    """Unix seconds"""
    step: int
    bytes: int
    stall_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Numbers:
    """What a scrape tells; replaced as a whole, so that no lock is needed."""

    step: int
    loss: float | None
    step_committed_at: float | None
    """Unix seconds; None before the first step of this process"""
    samples_per_second: float
    generation: int
    members: int
    nodes: int
    training_nodes: int
    phase_seconds: dict[str, float]
    incidents: dict[str, int]
    recovery_seconds: dict[str, float]
    """over the run, by cause"""
    last_recovery_seconds: float | None


class Metrics:
    """The endpoint of one worker. Its methods are for the training thread, and block for nothing.

    Args:
        run: names the run, as a label.
        max_nodes: how many nodes the job is to have.
        log: tells what a person may want to know.
        warn: tells what is not as it should be.
        is_noticed: whether this node has a standing notice that it may be taken away.

    Raises:
        UsageError: prometheus_client is not installed, or `host` is no address of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        run: str,
        max_nodes: int,
        log: Callable[[str], None],
        warn: Callable[[str], None],
        is_noticed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._host, self._port = host, port
        self._run, self._max_nodes = run, max_nodes
        self._log, self._warn, self._is_noticed = log, warn, is_noticed
        self._numbers: Numbers | None = None
        self._snapshot: Snapshot | None = None
        self._rate = Rate()
        self._world: World | None = None
        self._updated_at = 0.0
        self._started_at: float | None = None
        self.quarantines: Sequence[Mapping[str, Any]] = ()
        """as of `EventLog`"""
        self._has_told = self._has_warned = False
        self._server: Any = None
        self._serve()

    def _serve(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise UsageError(
                f"--metrics-port needs prometheus_client ({error}): pip install 'elastic_train[metrics]'"
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(self._port, self._host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"--metrics-host {self._host}: {cause_of(error)}") from error
            if not self._has_told:
                self._has_told = True
                self._log(
                    f"--metrics-port {self._port} is taken, perhaps by another node of this host, which then tells of "
                    "this run too; it is tried again every second"
                )
            return
        # A forked DataLoader process would keep the port beyond this process's death.
        close_in_forked_children(self._server.fileno())

    # --- what the training thread tells -------------------------------------------------------------------------------

    def enter(self, world: World, state: TrainState) -> None:
        """A world stands, and `state` is everybody's."""
        self._started_at = self._started_at or time.time()
        self._world = world
        self._rate.restart()
        self._update(state, state.last_loss)
        here = {member.node for member in world.members if member.host == world.me.host}
        if self._server is None and len(here) == 1 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"--metrics-port {self._port} is taken, and no other node that trains in this run is on this host: "
                "unless one that waits has it, free the port, or give another one"
            )

    def step(self, state: TrainState, loss: float, samples: int) -> None:
        """A step of so many samples was committed."""
        self._rate.add(samples)
        if time.monotonic() - self._updated_at >= UPDATE_SECONDS or state.is_finished:
            self._update(state, loss, committed_at=time.time())

    def snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def _update(self, state: TrainState, loss: float | None, committed_at: float | None = None) -> None:
        world = self._world
        if world is None:
            return
        if self._server is None:  # a process that was killed keeps its port for a moment
            with suppress(UsageError):  # the address was good at the start; it is no reason to end the training
                self._serve()
        now = self._updated_at = time.monotonic()
        self._rate.update(now)
        recoveries = [(str(entry["cause"]), sum(entry["seconds"].values())) for entry in state.incidents]
        incidents: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        recovery_seconds = dict.fromkeys(CAUSES, 0.0)
        for cause, seconds in recoveries:
            incidents[cause] += 1
            recovery_seconds[cause] = recovery_seconds.get(cause, 0.0) + seconds
        before = self._numbers
        self._numbers = Numbers(
            step=state.step,
            loss=loss,
            step_committed_at=committed_at or (before.step_committed_at if before else None),
            samples_per_second=self._rate.per_second,
            generation=world.generation,
            members=world.world_size,
            nodes=world.num_nodes,
            training_nodes=world.num_training_nodes,
            phase_seconds=state.clock.totals(),
            incidents=dict(incidents),
            recovery_seconds=recovery_seconds,
            last_recovery_seconds=recoveries[-1][1] if recoveries else None,
        )

    def close(self) -> None:
        """Stop answering, and give the port back."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    # --- what a scrape gets, on the server's thread -------------------------------------------------------------------

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """prometheus_client calls it at every scrape."""
        numbers, snapshot = self._numbers, self._snapshot
        if numbers is None:
            return
        ratio = goodput(numbers.phase_seconds)["ratio"]
        yield self._gauge("step", "committed steps of the run", numbers.step)
        yield self._gauge("loss", "of the last step, over its whole batch", numbers.loss)
        yield self._gauge(
            "step_committed_time_seconds", "Unix time at which a step was last committed", numbers.step_committed_at
        )
        yield self._gauge("started_time_seconds", "Unix time of this worker's first world", self._started_at)
        yield self._gauge("samples_per_second", "over all workers, the last few seconds", numbers.samples_per_second)
        yield self._gauge("generation", "number of the present world", numbers.generation)
        yield self._gauge("members", "workers that train", numbers.members)
        yield self._gauge("nodes", "nodes in the world, which could train: spares too", numbers.nodes)
        yield self._gauge("training_nodes", "nodes that train", numbers.training_nodes)
        yield self._gauge("max_nodes", "nodes that the job is to have, by --nnodes", self._max_nodes)
        yield self._gauge("wanted_nodes", "that would find a place", max(0, self._max_nodes - numbers.nodes))
        yield self._gauge("may_be_taken", "1 where this node has a standing notice", int(self._is_noticed()))
        yield self._gauge("goodput_ratio", "share of the wall time of the run in steps that were kept", ratio)
        left = {str(one["host"]): one["until"] - time.time() for one in self.quarantines}
        waits = {host: seconds for host, seconds in left.items() if seconds > 0}
        yield self._by("quarantine_seconds", "until the host is admitted again", "host", waits)
        yield self._by("phase_seconds", "where the wall time of the run went", "phase", numbers.phase_seconds)
        yield self._by("incidents", "over the whole run", "cause", numbers.incidents)
        yield self._by("recovery_seconds", "over the whole run", "cause", numbers.recovery_seconds)
        yield self._gauge(
            "last_recovery_seconds",
            "from what interrupted training last to its going on",
            numbers.last_recovery_seconds,
        )
        if snapshot is not None:
            yield self._gauge("snapshot_time_seconds", "Unix time of the newest snapshot", snapshot.written_at)
            yield self._gauge("snapshot_step", "of the newest snapshot", snapshot.step)
            yield self._gauge("snapshot_bytes", "of the newest snapshot", snapshot.bytes)
            yield self._gauge("snapshot_stall_seconds", "that training waited for it", snapshot.stall_seconds)
            yield self._gauge("snapshot_write_seconds", "until it was durable", snapshot.total_seconds)

    def _gauge(self, name: str, what: str, value: float | None) -> GaugeMetricFamily:
        """With no value where there is none yet."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"elastic_train_{name}", what, labels=["run"])
        if value is not None:
            family.add_metric([self._run], value)
        return family

    def _by(self, name: str, what: str, label: str, values: dict[str, Any]) -> GaugeMetricFamily:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"elastic_train_{name}", what, labels=["run", label])
        for key, value in values.items():
            family.add_metric([self._run, key], value)
        return family
