"""The rendezvous backends of a drill: c10d on its own nodes, or an etcd cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.drills.etcd_cluster import EtcdCluster
from elastic_train.tools.drills.network import HUB_ADDRESS, Network
from elastic_train.tools.drills.nodes import TooSlow, free_port, is_listening, wait_until

PORT = 29400
"""torchrun's default, for nodes with their own addresses"""
ANSWER_SECONDS = 10.0
ENDING_SECONDS = 60.0
"""for processes that were asked to end, or whose node has ended; it takes tenths of a second on an idle machine"""
ETCD_MEMBERS = 3


class C10d:
    """c10d on the nodes. The endpoint lists all their addresses; nodes as processes share one."""

    name = "c10d"
    members = None
    """there is no etcd cluster to inject faults into"""

    def __init__(self, network: Network | None) -> None:
        self._network = network
        self.port = free_port() if network is None else PORT

    def launcher(self, _number: int, num_nodes: int, num_workers: int) -> list[str]:
        """What starts node `_number`, counted from 0, before its program; once the backend has been started."""
        hosts = ["localhost"] if self._network is None else self._network.addresses
        return torchrun("c10d", ",".join(f"{host}:{self.port}" for host in hosts), num_nodes, num_workers)

    def start(self) -> None:
        """Do nothing: the first node starts the store."""

    def stop(self) -> list[str]:
        """Stop the backend after the job; return what the job left in it, and what it left on this machine."""
        return [f"port {self.port} is still open"] if self._network is None and is_listening(self.port) else []

    def close(self) -> None:
        """Do nothing: only the nodes run."""


class Etcd3:
    """An etcd cluster of three members on this machine, or the user's own.

    Args:
        run_id: of the drill's job; after it, no key of this run may be left.
        endpoint: of the user's cluster, as --rdzv-endpoint takes it; None for a cluster of the drill's own.
    """

    name = "etcd3"

    def __init__(self, network: Network | None, run_id: str, endpoint: str | None) -> None:
        self._network, self._run_id, self._endpoint = network, run_id, endpoint
        self.members: EtcdCluster | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-train-etcd-")
        if endpoint is None:
            where = {"host": HUB_ADDRESS, "prefix": network.hub_prefix()} if network else {}
            self.members = EtcdCluster(Path(self._folder.name), ETCD_MEMBERS, **where)  # type: ignore[arg-type]

    def launcher(self, _number: int, num_nodes: int, num_workers: int) -> list[str]:
        endpoint = self._endpoint if self.members is None else self.members.endpoint
        return [*torchrun("etcd3", str(endpoint), num_nodes, num_workers), f"--rdzv-id={self._run_id}"]

    def start(self) -> None:
        if self.members is None:
            self._keys(ANSWER_SECONDS)  # fail at once: nodes would wait a minute for it
        else:
            self.members.start()

    def stop(self) -> list[str]:
        keys: list[str] = []

        def is_empty() -> bool:
            keys[:] = self._keys(ENDING_SECONDS)
            return not keys

        # The keys stay, under their leases, if a worker that did not leave gives no answer: its host has no power.
        if self._network is None or not self._network.unplugged:
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
        with contextlib.ExitStack() as ends:
            ends.callback(self._folder.cleanup)
            if self.members is not None:
                ends.callback(self.members.end)


def torchrun(backend: str, endpoint: str, num_nodes: int, num_workers: int) -> list[str]:
    """torchrun for at most so many nodes, and with so many workers per node."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}",
        f"--nnodes=1:{num_nodes}", f"--nproc-per-node={num_workers}",
    ]  # fmt: skip


def keys_of(endpoint: str, run_id: str, seconds: float) -> Sequence[str]:
    """The keys of a run in a user's cluster, which must answer in `seconds`. Raises like all calls of etcd.py."""
    from elastic_train.rendezvous.etcd import Etcd
    from elastic_train.rendezvous.etcd_connections import Connections

    settings = EtcdSettings.from_torchrun(endpoint, {}, os.environ, min_nodes=1, max_nodes=1)
    with contextlib.closing(Connections(settings)) as connections:
        entries, _ = Etcd(connections, deadline=seconds).below(f"{settings.prefix}/{run_id}/")
    return [entry.key for entry in entries]


def backend_of(
    name: str, network: Network | None, *, run_id: str = "drill", endpoint: str | None = None
) -> C10d | Etcd3:
    """Return the backend that `--backend` names. `endpoint`: of an existing etcd cluster."""
    return Etcd3(network, run_id, endpoint) if name == Etcd3.name else C10d(network)
