"""Where the nodes of a drill meet: a c10d endpoint off all of them, or an etcd cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from elastic_train.drills.etcd_cluster import EtcdCluster
from elastic_train.drills.network import HUB_ADDRESS, Network
from elastic_train.drills.nodes import (
    Node,
    TooSlow,
    clean_environment,
    dying_with_parent,
    free_port,
    is_listening,
    wait_until,
)
from elastic_train.etcd_settings import EtcdSettings

ENDPOINT_SECONDS = 300.0
"""it imports torch, on a machine that may be busy with anything"""
ANSWER_SECONDS = 10.0
ENDING_SECONDS = 60.0
"""for processes that have been told to end, or whose node has; tenths of a second, where the machine is not starved"""
ETCD_MEMBERS = 3


class Backend(Protocol):
    """What torchrun's `--rdzv-backend` names, run by the drill."""

    name: str
    members: EtcdCluster | None

    def torchrun_flags(self) -> list[str]:
        """Once it has been started."""

    def start(self) -> None:
        """Blocks until it answers; nothing where it runs already."""

    def lose(self) -> None:
        """It goes along when every node is lost, if it is a part of the job."""

    def stop(self) -> list[str]:
        """Politely, when the job is over; what the job has left in it, and it on this machine."""

    def close(self) -> None:
        """End whatever still runs."""


class C10d:
    """`elastic-train store`, in a process of its own, so that each node may die."""

    name = "c10d"
    members = None
    """of an etcd cluster that faults may harm"""

    def __init__(self, folder: Path, network: Network | None) -> None:
        self._folder, self._network = folder, network
        self._host = HUB_ADDRESS if network else "localhost"
        self._port = free_port()
        self._num_started = 0
        self._process: Node | None = None
        self._seen: list[Node] = []

    def torchrun_flags(self) -> list[str]:
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._host}:{self._port}"]

    def start(self) -> None:
        if self._network is None:
            self._port = free_port()  # the last one's may be waiting for its connections to time out
        self._num_started += 1
        self._process = Node(
            [
                *dying_with_parent(), sys.executable, "-m", "elastic_train.cli", "store", "--host", self._host,
                "--port", str(self._port),
            ],
            self._folder / f"store-{self._num_started}.log",
            Path.cwd(),
            clean_environment(),
            name="endpoint",
            prefix=self._network.hub_prefix() if self._network else [],
        )  # fmt: skip
        self._seen.append(self._process)
        wait_until(self._answers, "rendezvous store", ENDPOINT_SECONDS)

    def _answers(self) -> bool:
        assert self._process is not None
        return is_listening(self._port) if self._network is None else "store at port" in self._process.text()

    def lose(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def stop(self) -> list[str]:
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            with contextlib.suppress(TooSlow):  # then it is one of those that still run
                self._process.wait(ENDING_SECONDS)
            self._process = None
        found = [f"process {one.pid} of {node.name} still runs" for node in self._seen for one in node.all_processes()]
        if self._network is None and is_listening(self._port):
            found.append(f"port {self._port} is still open")
        return found

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            for node in self._seen:
                ends.callback(node.end)


class Etcd3:
    """An etcd cluster of three members on this machine, or the user's own.

    Args:
        run_id: of the drill's job, whose keys are looked for when it is over.
        endpoint: the user's, as --rdzv-endpoint takes it; None for one of the drill's.
    """

    name = "etcd3"

    def __init__(self, network: Network | None, run_id: str, endpoint: str | None) -> None:
        self._run_id, self._endpoint = run_id, endpoint
        self.members: EtcdCluster | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-train-etcd-")
        if endpoint is None:
            where = {"host": HUB_ADDRESS, "prefix": network.hub_prefix()} if network else {}
            self.members = EtcdCluster(Path(self._folder.name), ETCD_MEMBERS, **where)  # type: ignore[arg-type]
        self._is_running = False

    def torchrun_flags(self) -> list[str]:
        endpoint = self._endpoint if self.members is None else self.members.endpoint
        return ["--rdzv-backend=etcd3", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self._run_id}"]

    def start(self) -> None:
        if self._is_running:
            return
        if self.members is None:
            self._keys(ANSWER_SECONDS)  # nodes would wait for it a minute
        else:
            self.members.start()
        self._is_running = True

    def lose(self) -> None:
        """Nothing: etcd is no part of the job, and keeps what it was told."""

    def stop(self) -> list[str]:
        keys: list[str] = []

        def is_empty() -> bool:
            keys[:] = self._keys(ENDING_SECONDS)
            return not keys

        with contextlib.suppress(TooSlow):
            wait_until(is_empty, "empty etcd", ENDING_SECONDS)
        self.close()
        return [f"key {key} is still in etcd" for key in keys]

    def _keys(self, seconds: float) -> Sequence[str]:
        if self.members is not None:
            return self.members.keys()
        assert self._endpoint is not None, "it has one or the other"
        return keys_of(self._endpoint, self._run_id, seconds)

    def close(self) -> None:
        self._is_running = False
        with contextlib.ExitStack() as ends:
            ends.callback(self._folder.cleanup)
            if self.members is not None:
                ends.callback(self.members.end)


def keys_of(endpoint: str, run_id: str, seconds: float) -> Sequence[str]:
    """The keys of a run in a user's cluster, which has so long to answer. Raises as every call of etcd.py does."""
    from elastic_train.etcd import Connections, Etcd

    settings = EtcdSettings.from_torchrun(endpoint, {}, os.environ, min_nodes=1, max_nodes=1)
    connections = Connections(settings)
    try:
        entries, _ = Etcd(connections, deadline=seconds).below(f"{settings.prefix}/{run_id}/")
    finally:
        connections.close()
    return [entry.key for entry in entries]


def backend_of(
    name: str, folder: Path, network: Network | None, *, run_id: str = "drill", endpoint: str | None = None
) -> C10d | Etcd3:
    """The one that `--backend` names; `folder` takes its logs. `endpoint`: of an etcd cluster that is there."""
    return Etcd3(network, run_id, endpoint) if name == Etcd3.name else C10d(folder, network)
