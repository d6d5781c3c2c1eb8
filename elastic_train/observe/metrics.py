"""`--metrics-port`: the metrics of a run for Prometheus, served by the first worker of every node.

Each node reports the whole run: step, loss, members, incidents and goodput are the same on all nodes. So one node is
enough to scrape, and no target changes when rank 0 does. A spare, which has no state, reports the world alone. Only
snapshots are reported by their writer, and `may_be_taken` by each node for itself. Nodes of a host share the port: one
of them has it, and another takes over with the next world.

The training thread stores its numbers here, at most once a second; a separate thread answers.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elastic_train.errors import UsageError, cause_of
from elastic_train.runlog.goodput import goodput
from elastic_train.system import close_in_forked_children
from elastic_train.training.state import TrainState
from elastic_train.world import World

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

UPDATE_SECONDS = 1.0
CAUSES = ("peer_lost", "leave", "join", "restart")
"""of incidents; exported as 0 from the start, so that the first of each is seen as an increase"""


Family = tuple[str, str, str, Mapping[str, float]]
"""name, help, the label beside `run`, and the values by label; without a label the only key is """ ""


def _one(name: str, what: str, value: float | None) -> Family:
    """Return a family with one value, or without a value if it is None."""
    return name, what, "", {} if value is None else {"": value}


class Metrics:
    """The endpoint of one worker. Its methods are for the training thread, and do not block.

    Args:
        run: name of the run, as a label.
        max_nodes: the job's number of nodes, by --nnodes.
        log: prints a message.
        warn: reports a problem.
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
        self._of_run: tuple[Family, ...] = ()
        """replaced as a whole, so that it needs no lock; so is `_of_snapshot`"""
        self._of_snapshot: tuple[Family, ...] = ()
        """of the newest snapshot that this worker has written"""
        self._committed_at: float | None = None
        """Unix seconds; None before the first step of this process"""
        self._samples_per_second = 0.0
        self._world: World | None = None
        self._updated_at = 0.0
        self._started_at: float | None = None
        self.quarantines: Sequence[Mapping[str, Any]] = ()
        """as of `EventLog`"""
        self._has_logged = self._has_warned = False
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
                where = f"--metrics-host {self._host}, --metrics-port {self._port}"
                raise UsageError(f"{where}: {cause_of(error)}") from error
            if not self._has_logged:
                self._has_logged = True
                self._log(
                    f"--metrics-port {self._port} is taken, perhaps by another node of this host, which then tells of "
                    "this run too; it is tried again every second"
                )
            return
        # A forked DataLoader process would keep the port beyond this process's death.
        close_in_forked_children(self._port, self._server)

    # --- called by the training thread --------------------------------------------------------------------------------

    def enter(self, world: World, state: TrainState) -> None:
        """Enter a world that stands and whose members all hold `state`; a spare's is ignored."""
        self._started_at = self._started_at or time.time()
        self._world, self._samples_per_second = world, 0.0
        self._update(state, state.last_loss)
        here = {member.node for member in world.members if member.host == world.me.host}
        if self._server is None and len(here) == 1 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"--metrics-port {self._port} is taken, and no other node that trains in this run is on this host: "
                "free the port or give another one, unless a node of this run that waits has it"
            )

    def step(self, state: TrainState, loss: float | None, samples_per_second: float) -> None:
        """Record a committed step."""
        self._samples_per_second = samples_per_second
        if time.monotonic() - self._updated_at >= UPDATE_SECONDS or state.is_finished:
            self._update(state, loss, committed_at=time.time())

    def snapshot(self, *, step: int, num_bytes: int, stall_seconds: float, total_seconds: float) -> None:
        """Record a snapshot that this worker has just written."""
        self._of_snapshot = (
            _one("snapshot_time_seconds", "Unix time of the newest snapshot", time.time()),
            _one("snapshot_step", "of the newest snapshot", step),
            _one("snapshot_bytes", "of the newest snapshot", num_bytes),
            _one("snapshot_stall_seconds", "that training waited for it", stall_seconds),
            _one("snapshot_write_seconds", "until it was durable", total_seconds),
        )

    def _update(self, state: TrainState, loss: float | None, committed_at: float | None = None) -> None:
        world = self._world
        if world is None:
            return
        if self._server is None:  # a process that was killed keeps its port for a moment
            with suppress(UsageError):  # the address was good at the start; a later failure must not end training
                self._serve()
        self._updated_at = time.monotonic()
        self._committed_at = committed_at or self._committed_at
        self._of_run = (*self._of_world(world), *(() if world.is_spare else self._of_state(state, loss)))

    def _of_world(self, world: World) -> Iterator[Family]:
        nodes = world.num_nodes
        yield _one("started_time_seconds", "Unix time of this worker's first world", self._started_at)
        yield _one("generation", "number of the present world", world.generation)
        yield _one("members", "workers that train", world.world_size)
        yield _one("nodes", "nodes in the world, which could train: spares too", nodes)
        yield _one("training_nodes", "nodes that train", world.num_training_nodes)
        yield _one("max_nodes", "nodes that the job is to have, by --nnodes", self._max_nodes)
        yield _one("wanted_nodes", "that would find a place", max(0, self._max_nodes - nodes))

    def _of_state(self, state: TrainState, loss: float | None) -> Iterator[Family]:
        recoveries = [(str(entry["cause"]), sum(entry["seconds"].values())) for entry in state.incidents]
        incidents: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        recovery_seconds = dict.fromkeys(CAUSES, 0.0)
        for cause, seconds in recoveries:
            incidents[cause] += 1
            recovery_seconds[cause] = recovery_seconds.get(cause, 0.0) + seconds
        phases, committed_at = state.clock.totals(), self._committed_at
        yield _one("step", "committed steps of the run", state.step)
        yield _one("loss", "of the last step, over its whole batch", loss)
        yield _one("step_committed_time_seconds", "Unix time at which a step was last committed", committed_at)
        yield _one("samples_per_second", "over all workers, the last few seconds", self._samples_per_second)
        ratio = goodput(phases)["ratio"]
        yield _one("goodput_ratio", "share of the wall time of the run in steps that were kept", ratio)
        yield "phase_seconds", "where the wall time of the run went", "phase", phases
        yield "incidents", "over the whole run", "cause", incidents
        yield "recovery_seconds", "over the whole run", "cause", recovery_seconds
        last = recoveries[-1][1] if recoveries else None
        yield _one("last_recovery_seconds", "from what interrupted training last to its going on", last)

    def close(self) -> None:
        """Stop the server and free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    # --- called by the server's thread at a scrape --------------------------------------------------------------------

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all families; prometheus_client calls this at every scrape."""
        from prometheus_client.core import GaugeMetricFamily

        of_run = self._of_run
        if not of_run:
            return
        left = {str(one["host"]): one["until"] - time.time() for one in self.quarantines}
        waits = {host: seconds for host, seconds in left.items() if seconds > 0}
        of_now: tuple[Family, ...] = (
            _one("may_be_taken", "1 where this node has a standing notice", int(self._is_noticed())),
            ("quarantine_seconds", "until the host is admitted again", "host", waits),
        )
        for name, what, label, values in (*of_run, *of_now, *self._of_snapshot):
            family = GaugeMetricFamily(f"elastic_train_{name}", what, labels=["run", label] if label else ["run"])
            for key, value in values.items():
                family.add_metric([self._run, key] if label else [self._run], value)
            yield family
