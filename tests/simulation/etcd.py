"""A cluster of etcd, in which members find each other and claim what follows a world.

The package's client of etcd is the real one, with all that is built on it; below it there is a server in virtual time,
and a wire that may execute a request whose reply is lost, or one long after it was given up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbiter, silent_members
from elastic_train.protocol.laws import Voters
from elastic_train.rendezvous.etcd_connections import Connections, import_etcd3
from elastic_train.rendezvous.etcd_finder import EtcdFinder
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from tests.simulation.peers import PeersForm
from tests.simulation.process import Machines, Process

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation
    from tests.simulation.worker import Worker

STORE_HOST = "store"


class Failed(grpc.RpcError):
    """A call, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


class EtcdServer:
    """The cluster itself: one answer after the other, as one with a majority gives them. Its methods are etcd's."""

    def __init__(self, machines: Machines) -> None:
        self._kernel = machines.kernel
        self._rpc, self._key_value = import_etcd3().etcdrpc, sys.modules["etcd3.etcdrpc.kv_pb2"].KeyValue
        self.loses_replies = 0
        """how many of its next replies are lost"""
        self._keys: dict[bytes, Any] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        """seconds of each, and when it runs out"""
        self._num_leases, self._revision = 0, 1

    def clear(self) -> None:
        """Another cluster, without a key, takes its place."""
        self._keys, self._leases, self._revision = {}, {}, 1

    def has(self, key: str, text: str) -> bool:
        """Whether it stands at a key."""
        found = self._keys.get(key.encode())
        return found is not None and text.encode() in found.value

    def _found(self, request: Any) -> list[Any]:
        """Keys of a request that names one, or a range."""
        if not request.range_end:
            return [self._keys[request.key]] if request.key in self._keys else []
        return [found for key, found in sorted(self._keys.items()) if request.key <= key < request.range_end]

    def range(self, request: Any) -> Any:
        return self._rpc.RangeResponse(header={"revision": self._revision}, kvs=self._found(request))

    def _delete_range(self, request: Any) -> None:
        self._revision += 1
        for one in self._found(request):
            del self._keys[one.key]

    def _put(self, request: Any) -> None:
        before = self._keys.get(request.key)
        self._revision += 1
        self._keys[request.key] = self._key_value(
            key=request.key,
            value=request.value,
            lease=request.lease,
            mod_revision=self._revision,
            create_revision=self._revision if before is None else before.create_revision,
            version=1 if before is None else before.version + 1,
        )

    def _holds(self, compare: Any) -> bool:
        name = {compare.MOD: "mod_revision", compare.CREATE: "create_revision", compare.LEASE: "lease"}[compare.target]
        found = self._found(compare) or [self._key_value()]
        return all(getattr(one, name) == getattr(compare, name) for one in found)

    def txn(self, request: Any) -> Any:
        succeeded = all(map(self._holds, request.compare))
        parts = request.success if succeeded else request.failure
        for part in parts:
            if part.HasField("request_put") and part.request_put.lease not in {0, *self._leases}:
                raise Failed(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        responses = []
        for part in parts:
            if part.HasField("request_put"):
                self._put(part.request_put)
            elif part.HasField("request_delete_range"):
                self._delete_range(part.request_delete_range)
            else:
                responses.append({"response_range": self.range(part.request_range)})
        return self._rpc.TxnResponse(header={"revision": self._revision}, succeeded=succeeded, responses=responses)

    def grant(self, request: Any) -> Any:
        self._num_leases += 1
        lease = request.ID or self._num_leases
        if lease in self._leases:
            raise Failed(grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists")
        self._leases[lease] = request.TTL, self._kernel.now + request.TTL
        self._kernel.after(request.TTL, self._expire, lease)
        return self._rpc.LeaseGrantResponse(ID=lease, TTL=request.TTL)

    def keep_alive(self, request: Any) -> Any:
        seconds, _ = self._leases.get(request.ID, (0, 0))
        if seconds:
            self._leases[request.ID] = seconds, self._kernel.now + seconds
        return self._rpc.LeaseKeepAliveResponse(ID=request.ID, TTL=int(seconds))

    def revoke(self, request: Any) -> Any:
        if request.ID not in self._leases:
            raise Failed(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self._end(request.ID)
        return self._rpc.LeaseRevokeResponse()

    def _end(self, lease: int) -> None:
        del self._leases[lease]
        self._keys = {key: one for key, one in self._keys.items() if one.lease != lease}

    def _expire(self, lease: int) -> None:
        if lease not in self._leases:
            return
        left = self._leases[lease][1] - self._kernel.now
        if left > 0:
            self._kernel.after(left, self._expire, lease)
        else:
            self._end(lease)


class SimConnections(Connections):
    """Of one process, whose threads share them: in place of gRPC's channels the simulated network.

    Args:
        is_known: whether the process knows other members; who knows none is made as if it reached etcd.
    """

    metadata = None

    def __init__(self, process: Process, server: EtcdServer, settings: EtcdSettings, *, is_known: bool) -> None:
        super().__init__(settings)
        self._process, self._server, self._is_known = process, server, is_known
        self.clock, self.sleep = process.clock, process.sleep  # type: ignore[method-assign]
        self.kvstub = SimpleNamespace(Range=self._stub(server.range), Txn=self._stub(server.txn))
        self.leasestub = SimpleNamespace(
            LeaseGrant=self._stub(server.grant),
            LeaseRevoke=self._stub(server.revoke),
            LeaseKeepAlive=self._stub(server.keep_alive),
        )

    def client(self) -> tuple[int, Any]:
        if self._process.kernel.current is None and self._is_known and not reaches(self._process):
            raise StoreUnreachable("etcd does not answer")
        return 0, self

    def _stub(self, execute: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(request: Any, seconds: float, metadata: object) -> Any:
            del metadata
            found = self._call(execute, request, seconds)
            if isinstance(found, Failed):
                raise found
            return found

        return call

    def _call(self, execute: Callable[[Any], Any], request: Any, seconds: float) -> Any:
        """The answer, if one comes in time; a request that is under way then may still be executed."""
        process, server, network = self._process, self._server, self._process.network
        kernel, task = process.kernel, process.kernel.current
        if task is None:  # while the worker is made
            return execute(request)
        outcome: list[Any] = []

        def finish(found: Any) -> None:
            outcome.append(found)  # a frozen process takes it later
            task.wake()

        def arrive() -> None:
            try:
                found = execute(request)
            except Failed as error:
                found = error
            if server.loses_replies > 0:
                server.loses_replies -= 1
            else:
                network.send(STORE_HOST, process.host, finish, found)

        network.send(process.host, STORE_HOST, arrive)
        deadline = kernel.now + seconds / process.rate
        while not outcome and kernel.now < deadline:
            task.wait(deadline - kernel.now)
        return outcome[0] if outcome else Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")


def reaches(process: Process) -> bool:
    """Whether its host and etcd hear each other."""
    network, host = process.network, process.host
    return network.is_open(host, STORE_HOST) and network.is_open(STORE_HOST, host)


class EtcdForm(PeersForm):
    """The same members, which find each other in etcd, and claim there; as simulator.Form."""

    def __init__(self, simulation: Simulation, lease: float) -> None:
        super().__init__(simulation)
        self._settings = EtcdSettings(("etcd",), grace=lease)
        self.server = EtcdServer(simulation.machines)

    def begin(self, founders: Sequence[Worker], decision: Decision) -> None:
        super().begin(founders, decision)
        founders[0].finder.is_beginner()  # else a newcomer would find nothing until rank 0 has shown its sign

    def finder(self, worker: Worker) -> EtcdFinder:
        process, simulation = worker.process, self._simulation

        def repeat(seconds: float, turn: Callable[[], None]) -> Callable[[float], None]:
            is_over: list[bool] = []

            def run() -> None:
                try:
                    while not is_over:
                        process.sleep(seconds)
                        turn()
                except Exception as error:
                    simulation.fail_of(worker, error)

            process.start("signs", run)
            return lambda _timeout: is_over.append(True)

        return EtcdFinder(
            SimConnections(process, self.server, self._settings, is_known=bool(worker.known)),
            "run",
            uid=worker.uid,
            address=process.address,
            lease=self._settings.grace,
            check=lambda: None,
            log=lambda text: simulation.note(f"{worker} is told: {text}"),
            warn=lambda text: simulation.note(f"{worker} warns: {text}"),
            earlier=lambda: worker.known,
            repeat=repeat,
            probe_all=worker.probe_stores,
        )

    def arbiter(self, worker: Worker) -> Callable[[], Arbiter] | None:
        assert isinstance(worker.finder, EtcdFinder), "made by this"
        return worker.finder.arbiter

    def may_go_on(self, worker: Worker, side: Sequence[Worker]) -> bool:
        """Where the place is silent, who is silent may have claimed."""
        return all(reaches(one.process) for one in side) and super().may_go_on(worker, side)

    def suffices(self, worker: Worker, worlds: Sequence[Voters], side: set[str]) -> bool:
        """Likewise where it is lost to any of them: one that was not told who sees it has nothing to lose."""
        of_side = [one for one in self._simulation.living if one.uid in side]
        if any(map(self._has_lost_place, of_side)) and silent_members(worlds, side):
            return False
        return super().suffices(worker, worlds, side)

    def _has_lost_place(self, worker: Worker) -> bool:
        """Whether claims of one of the worlds whose voters count can be made no more."""
        places = worker.job.place._places
        seen_in = [places.get(voters.world) for voters in worker.job.worlds.voters]  # type: ignore[attr-defined]
        entries = [place._folder._entry.job for place in seen_in if place is not None]  # type: ignore[attr-defined]
        return any(not self.server.has(job.guard.key, job.prefix.rpartition("/")[2]) for job in entries)

    def finds(self, newcomer: Worker, _trainers: Sequence[Worker]) -> bool:
        return reaches(newcomer.process)

    def has_signpost(self) -> bool:
        return True

    def lose_all(self) -> None:
        self.server.clear()

    def lose_replies(self, number: int) -> None:
        self.server.loses_replies += number
