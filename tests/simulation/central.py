"""A store that decides by itself, as etcd's cluster does, and the real CentralJob over it.

What etcd_store.py, etcd_members.py and etcd_job.py give a worker is here in virtual time: a mirror of the job's keys
that answers reads, and may lag; calls that are tried again until their deadline, so that a request may be executed
whose reply is lost, or long after it was given up; and leases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.central import CentralJob
from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.protocol.liveness import TEND_SECONDS
from elastic_train.protocol.store import ListingStore
from elastic_train.rendezvous.etcd import MAX_PAUSE
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS
from elastic_train.rendezvous.etcd_job import NOTICE_SECONDS
from elastic_train.rendezvous.etcd_members import CLOSE_SECONDS
from elastic_train.rendezvous.etcd_store import MIRROR_LAG_SECONDS
from elastic_train.world import World
from tests.simulation.kernel import Task
from tests.simulation.process import Machines, Process

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation
    from tests.simulation.worker import Worker

STORE_HOST = "store"
LEAST_LEASE_SECONDS = 12.0
"""of the job; scaled as the peer timeout is"""
QUEUE_LEASE_SECONDS = 5.0


class CentralServer:
    """The store itself: one answer after the other, as a cluster with a majority gives them."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._kernel = machines, machines.kernel
        self.values: dict[str, tuple[str, int]] = {}
        """by key: text and lease"""
        self.log: list[tuple[str, str | None]] = []
        """all changes; how many there are is the revision"""
        self.mirrors: list[Mirror] = []
        self.loses_replies = 0
        """how many of its next replies are lost"""
        self._leases: dict[int, tuple[float, float]] = {}
        """seconds of each, and when it runs out"""
        self._num_leases = 0
        self.job_lease = 0
        """of the job that stands"""

    def job(self, seconds: float) -> tuple[str, int]:
        """(prefix, lease) of the job that stands, or of a new one."""
        if not self.refresh(self.job_lease)[0]:
            self.job_lease = self.grant(seconds)[0]
        return f"job-{self.job_lease}", self.job_lease

    # --- requests: each returns its answer, and the revision that its reader has seen by it --------------------------

    def get_many(self, keys: Sequence[str]) -> tuple[list[str | None], int]:
        return [self.values[key][0] if key in self.values else None for key in keys], len(self.log)

    def below(self, prefix: str) -> tuple[dict[str, str], int]:
        return {key: one[0] for key, one in self.values.items() if key.startswith(prefix)}, len(self.log)

    def put(self, key: str, text: str, lease: int) -> tuple[None, int]:
        """Raises: LeftOut where the lease is gone."""
        if not self._is_there(lease):
            raise LeftOut("its lease has run out")
        self.values[key] = text, lease
        self._note(key, text)
        return None, len(self.log)

    def create(self, key: str, text: str, lease: int) -> tuple[str, int]:
        """Raises: as `put`."""
        standing = self.values.get(key)
        if standing is None or not standing[0]:
            self.put(key, text, lease)
        return self.values[key][0], len(self.log)

    def delete(self, key: str) -> tuple[None, int]:
        if self.values.pop(key, None) is not None:
            self._note(key, None)
        return None, len(self.log)

    def delete_prefix(self, prefix: str) -> tuple[None, int]:
        for key in self.below(prefix)[0]:
            self.delete(key)
        return None, len(self.log)

    def grant(self, seconds: float) -> tuple[int, int]:
        self._num_leases += 1
        self._leases[self._num_leases] = seconds, self._kernel.now + seconds
        self._kernel.after(seconds, self._expire, self._num_leases)
        return self._num_leases, 0

    def refresh(self, lease: int) -> tuple[bool, int]:
        if not self._is_there(lease):
            return False, 0
        seconds = self._leases[lease][0]
        self._leases[lease] = seconds, self._kernel.now + seconds
        return True, 0

    def revoke(self, lease: int) -> tuple[None, int]:
        self._leases.pop(lease, None)
        for key in [key for key, one in self.values.items() if one[1] == lease]:
            self.delete(key)
        return None, 0

    def _is_there(self, lease: int) -> bool:
        return lease in self._leases

    def _expire(self, lease: int) -> None:
        if not self._is_there(lease):
            return
        left = self._leases[lease][1] - self._kernel.now
        if left > 0:
            self._kernel.after(left, self._expire, lease)
        else:
            self.revoke(lease)

    def _note(self, key: str, text: str | None) -> None:
        self.log.append((key, text))
        self.mirrors = [mirror for mirror in self.mirrors if mirror.process.is_alive]
        for mirror in self.mirrors:
            process = mirror.process
            process.network.send(STORE_HOST, process.host, process.take, mirror.follow, len(self.log))


class Mirror:
    """As etcd_store.Mirror, of one process: all keys of the store as they were a moment ago."""

    def __init__(self, process: Process, server: CentralServer) -> None:
        self.process, self._server = process, server
        self.values = {key: one[0] for key, one in server.values.items()}
        self._revision = self._known = len(server.log)
        self._waiting: list[Task] = []
        server.mirrors.append(self)

    def follow(self, revision: int) -> None:
        """A message of the stream: all changes up to here."""
        for key, text in self._server.log[self._revision : revision]:
            if text is None:
                self.values.pop(key, None)
            else:
                self.values[key] = text
        self._revision = max(self._revision, revision)
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()

    def must_have(self, revision: int) -> None:
        self._known = max(self._known, revision)

    def wait_for_known(self) -> bool:
        kernel = self.process.kernel
        if kernel.current is None:
            return True
        kernel.step()
        deadline = kernel.now + MIRROR_LAG_SECONDS
        while self._revision < self._known and kernel.now < deadline:
            task = kernel.current
            assert task is not None, "only tasks read"
            self._waiting.append(task)
            task.wait(deadline - kernel.now)
        return self._revision >= self._known


class CentralClient:
    """As EtcdStore, of one process; threads may share it.

    Args:
        deadline: seconds for a call with all its attempts.
    """

    def __init__(self, process: Process, server: CentralServer, mirror: Mirror, lease: int, deadline: float) -> None:
        self._process, self._server, self._mirror = process, server, mirror
        self._lease, self._deadline = lease, deadline
        self._attempt_seconds = min(ATTEMPT_SECONDS, deadline)

    def with_deadline(self, seconds: float) -> CentralClient:
        return CentralClient(self._process, self._server, self._mirror, self._lease, seconds)

    def under(self, lease: int) -> CentralClient:
        return CentralClient(self._process, self._server, self._mirror, lease, self._deadline)

    def get(self, key: str) -> str | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        if self._mirror.wait_for_known():
            return [self._mirror.values.get(key) for key in keys]
        return self._call("get_many", keys)  # type: ignore[no-any-return]

    def below(self, prefix: str) -> dict[str, str]:
        if self._mirror.wait_for_known():
            return {key: text for key, text in self._mirror.values.items() if key.startswith(prefix)}
        return self._call("below", prefix)  # type: ignore[no-any-return]

    def put(self, key: str, value: str) -> None:
        self._call("put", key, value, self._lease)

    def create(self, key: str, value: str) -> str:
        return self._call("create", key, value, self._lease)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def delete_prefix(self, prefix: str) -> None:
        self._call("delete_prefix", prefix)

    def grant(self, seconds: float) -> int:
        return self._call("grant", seconds)  # type: ignore[no-any-return]

    def refresh(self, lease: int) -> bool:
        return self._call("refresh", lease)  # type: ignore[no-any-return]

    def revoke(self, lease: int) -> None:
        self._call("revoke", lease)

    def ask(self) -> None:
        """The store itself. Raises: StoreUnreachable."""
        self._call("get_many", ())

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> Any:
        """Raises: StoreUnreachable, LeftOut."""
        process, execute = self._process, getattr(self._server, name)
        if process.kernel.current is None:  # while the worker is made
            return execute(*arguments)[0]
        answered_at: float = process.store_answered_at  # type: ignore[attr-defined]
        waited, attempt = AwakeTime(process.clock, self._attempt_seconds + MAX_PAUSE), 0
        while True:
            attempt += 1
            timeout = max(0.05, min(self._attempt_seconds, self._deadline - waited.seconds))
            outcome = self._attempt(timeout, execute, arguments)
            if outcome:
                found, revision, came_at = outcome[0]
                process.store_answered_at = max(process.store_answered_at, came_at)  # type: ignore[attr-defined]
                if isinstance(found, LeftOut):
                    raise LeftOut(str(found))
                self._mirror.must_have(revision)
                return found
            if waited.seconds >= self._deadline:
                process.waited_for_store = process.seconds_awake(answered_at)  # type: ignore[attr-defined]
                raise StoreUnreachable(f"the store does not answer ({self._deadline:g} s)")
            process.sleep(process.machines.random.uniform(0.02, min(MAX_PAUSE, 0.02 * 2 ** min(attempt, 10))))

    def _attempt(self, seconds: float, execute: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """The answer, if one came in time; a request that is under way then may still be executed."""
        process, server, network = self._process, self._server, self._process.network
        kernel, task = process.kernel, process.kernel.current
        assert task is not None, "only tasks call"
        outcome: list[Any] = []

        def finish(found: Any) -> None:
            outcome.append((*found, kernel.now))  # a frozen process takes it later
            task.wake()

        def arrive() -> None:
            try:
                found = execute(*arguments)
            except LeftOut as error:
                found = error, 0
            if server.loses_replies > 0:
                server.loses_replies -= 1
            else:
                network.send(STORE_HOST, process.host, finish, found)

        network.send(process.host, STORE_HOST, arrive)
        deadline = kernel.now + seconds / process.rate
        while not outcome and kernel.now < deadline:
            task.wait(deadline - kernel.now)
        return outcome


class SimEtcdJob(CentralJob):
    """With what etcd_members.EtcdJob adds: the leases, and how long each thread waits."""

    def __init__(self, worker: Worker, own: CentralClient, prefix: str, lease: int, grace: float) -> None:
        plan, process = worker.simulation.plan, worker.process
        self._process, self._own, self._job_lease, self._grace = process, own, lease, grace
        self._watching = own.with_deadline(max(0.5, min(ATTEMPT_SECONDS, plan.peer_timeout / 4)))
        super().__init__(
            own,
            self._watching,
            prefix,
            plan.size(),
            peer_timeout=plan.peer_timeout,
            longest_silence=grace + NOTICE_SECONDS,
            max_world_size=plan.max_world_size,
            refused=worker.refused,
            draw_uid=process.machines.draw_uid,
            clock=process.clock,
            parting=own.with_deadline(CLOSE_SECONDS),
        )
        self._queue_lease, self._is_locked, self._next_keep = 0, False, 0.0
        self._keep_seconds = plan.peer_timeout / 3
        self.open(worker.uid)

    def expect_answer(self, silence: float) -> None:
        self._own.with_deadline(max(0.5, self._grace - silence)).ask()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        while self._is_locked:
            self._process.sleep(0.001)
        self._is_locked = True
        try:
            yield
        finally:
            self._is_locked = False

    def renew_queue_place(self, store: ListingStore) -> None:
        assert isinstance(store, CentralClient), "both of them are"
        with self._locked():
            mine = self._mine
            if mine is None or (self._queue_lease and store.refresh(self._queue_lease)):
                return
            lease = store.grant(QUEUE_LEASE_SECONDS)
            store.under(lease).put(self._queue_key, mine.to_json())
            self._queue_lease = lease

    def leave_queue(self) -> None:
        with self._locked():
            self._mine, self._is_queued = None, False
            if self._queue_lease:
                self._own.revoke(self._queue_lease)
                self._queue_lease = 0

    def tend(self, world: World | None, *, is_spokesman: bool, headless: World | None = None) -> None:
        now = self._process.clock()
        if now >= self._next_keep:
            if not self._watching.refresh(self._job_lease):
                raise LeftOut("this worker's job is over: its lease has run out")
            self._next_keep = now + self._keep_seconds
            if self._mine is not None and not self._is_locked:
                self.renew_queue_place(self._watching)
        super().tend(world, is_spokesman=is_spokesman, headless=headless)


class CentralForm:
    """A job that is kept by one store; as simulator.Form."""

    def __init__(self, simulation: Simulation, grace: float) -> None:
        self._simulation, self.store_grace = simulation, grace
        self.server = CentralServer(simulation.machines)

    def job(self, worker: Worker) -> CentralJob:
        process, grace = worker.process, self.store_grace
        prefix, lease = self.server.job(max(LEAST_LEASE_SECONDS, 2 * grace))
        process.store_answered_at = process.kernel.now  # type: ignore[attr-defined]
        own = CentralClient(process, self.server, Mirror(process, self.server), lease, grace)
        return SimEtcdJob(worker, own, prefix, lease, grace)

    def begin(self, _founders: Sequence[Worker], decision: Decision) -> None:
        self.server.put(f"job-{self.server.job_lease}/start/next", decision.to_json(), self.server.job_lease)

    def decisions(self) -> Iterator[tuple[str, str]]:
        for key, text in self.server.log:
            if text is not None and key.endswith("/next") and "/world-" in key:
                yield key.split("-", 3)[3].removesuffix("/next"), str(json.loads(text)["uid"])

    def reaches(self, worker: Worker) -> bool:
        """Whether its host and the store hear each other."""
        network, host = self._simulation.network, worker.process.host
        return network.is_open(host, STORE_HOST) and network.is_open(STORE_HOST, host)

    def may_go_on(self, worker: Worker, side: Sequence[Worker]) -> bool:
        """One that does not reach the store is waited for, until it is given up; spares wait for those who train."""
        inside = () if worker.world is None else [member.uid for member in worker.world.members]
        awaited = [one for one in self._simulation.living if one in side or one.uid in inside]
        return all(map(self.reaches, awaited)) and not all(one.world is None or one.world.is_spare for one in side)

    def finds(self, newcomer: Worker, _trainers: Sequence[Worker]) -> bool:
        return self.reaches(newcomer)

    def has_signpost(self) -> bool:
        return True

    def lose_replies(self, number: int) -> None:
        self.server.loses_replies += number

    def may_end(self, worker: Worker, error: Exception) -> bool:
        """Whether a worker may end with this error: its grace is over."""
        if not isinstance(error, StoreUnreachable):
            return False
        waited: float = worker.process.waited_for_store  # type: ignore[attr-defined]
        return waited > 0.98 * self.store_grace - TEND_SECONDS  # the watcher notes an answer no oftener than that
