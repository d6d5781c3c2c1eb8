"""A cluster of etcd, in which members find each other and claim what follows a world.

What etcd_store.py, etcd_job.py, etcd_finder.py and etcd_arbiter.py give a worker is here in virtual time: calls that
are tried again until their deadline, so that a request may be executed whose reply is lost, or long after it was given
up; leases, and an entry of the job behind which all is written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbiter, Claims
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS
from elastic_train.rendezvous.etcd_finder import FRESH_SECONDS, KEEP_SECONDS, LOOK_SECONDS, REFUSED_SECONDS, stores_in
from tests.simulation.peers import PeersForm
from tests.simulation.process import Address, Machines, Process

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation
    from tests.simulation.worker import Worker

STORE_HOST = "store"
PROBE_SECONDS = 0.5


class EtcdServer:
    """The cluster itself: one answer after the other, as one with a majority gives them. Its methods are requests."""

    def __init__(self, machines: Machines) -> None:
        self._kernel = machines.kernel
        self.values: dict[str, tuple[str, int]] = {}
        """by key: text and lease"""
        self.loses_replies = 0
        """how many of its next replies are lost"""
        self._leases: dict[int, tuple[float, float]] = {}
        """seconds of each, and when it runs out"""
        self._num_leases = self._entry = 0

    def open(self, seconds: float) -> int:
        """The lease of the job's entry as it stands, or of a new one."""
        if not self.refresh(self._entry):
            self._entry = self.grant(seconds)
        return self._entry

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values[key][0] if key in self.values else None for key in keys]

    def names(self, prefix: str) -> list[str]:
        return [key.removeprefix(prefix) for key in self.values if key.startswith(prefix)]

    def transact(
        self, entry: int, expected: Mapping[str, str | None], changes: Mapping[str, str | None], lease: int
    ) -> bool:
        """Whether all stood as expected, and is changed. Raises: LeftOut where the entry, or the lease, is gone."""
        if not {entry, lease} <= self._leases.keys():
            raise LeftOut("its lease has run out")
        if self.get_many(list(expected)) != list(expected.values()):
            return False
        for key, text in changes.items():
            self.values.pop(key, None)
            if text is not None:
                self.values[key] = text, lease
        return True

    def create(self, entry: int, key: str, text: str, lease: int) -> str:
        """Raises: as `transact`."""
        self.transact(entry, {key: None}, {key: text}, lease)
        return self.values[key][0]

    def grant(self, seconds: float) -> int:
        self._num_leases += 1
        self._leases[self._num_leases] = seconds, self._kernel.now + seconds
        self._kernel.after(seconds, self._expire, self._num_leases)
        return self._num_leases

    def refresh(self, lease: int) -> bool:
        if lease in self._leases:
            seconds = self._leases[lease][0]
            self._leases[lease] = seconds, self._kernel.now + seconds
        return lease in self._leases

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        self.values = {key: one for key, one in self.values.items() if one[1] != lease}

    def _expire(self, lease: int) -> None:
        if lease not in self._leases:
            return
        left = self._leases[lease][1] - self._kernel.now
        if left > 0:
            self._kernel.after(left, self._expire, lease)
        else:
            self.revoke(lease)


class EtcdClient:
    """Of one process; its threads share it."""

    def __init__(self, process: Process, server: EtcdServer) -> None:
        self.process, self.server = process, server

    def call(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        """Raises: StoreUnreachable, LeftOut."""
        process = self.process
        if process.kernel.current is None:  # while the worker is made
            return execute(*arguments)
        give_up_at, attempt = process.clock() + ATTEMPT_SECONDS, 0
        while True:
            attempt += 1
            timeout = max(0.05, min(ATTEMPT_SECONDS / 2, give_up_at - process.clock()))
            outcome = self._attempt(timeout, execute, arguments)
            if outcome:
                if isinstance(outcome[0], LeftOut):
                    raise LeftOut(str(outcome[0]))
                return outcome[0]
            if process.clock() >= give_up_at:
                raise StoreUnreachable(f"etcd does not answer ({ATTEMPT_SECONDS:g} s)")
            process.sleep(process.machines.random.uniform(0.02, min(0.5, 0.02 * 2 ** min(attempt, 10))))

    def _attempt(self, seconds: float, execute: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """The answer, if one came in time; a request that is under way then may still be executed."""
        process, server, network = self.process, self.server, self.process.network
        kernel, task = process.kernel, process.kernel.current
        assert task is not None, "only tasks call"
        outcome: list[Any] = []

        def finish(found: Any) -> None:
            outcome.append(found)  # a frozen process takes it later
            task.wake()

        def arrive() -> None:
            try:
                found = execute(*arguments)
            except LeftOut as error:
                found = error
            if server.loses_replies > 0:
                server.loses_replies -= 1
            else:
                network.send(STORE_HOST, process.host, finish, found)

        network.send(process.host, STORE_HOST, arrive)
        deadline = kernel.now + seconds / process.rate
        while not outcome and kernel.now < deadline:
            task.wait(deadline - kernel.now)
        return outcome


class SimKeys:
    """As etcd_arbiter.Keys."""

    def __init__(self, client: EtcdClient, entry: Callable[[], int]) -> None:
        self._client, self._find_entry = client, entry

    @property
    def _entry(self) -> int:
        if not self._find_entry():
            raise OSError("no entry has been opened yet")
        return self._find_entry()

    def _call(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._client.call(execute, *arguments)
        except (StoreUnreachable, LeftOut) as error:
            raise OSError(str(error)) from error

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        server, key = self._client.server, f"{self._entry}/claims/{name}"
        if self._call(server.create, self._entry, key, text, self._entry) != text:
            raise FileExistsError(name)

    def read(self, name: str) -> str | None:
        return self._call(self._client.server.get_many, [f"{self._entry}/claims/{name}"])[0]  # type: ignore[no-any-return]

    def remove(self, name: str) -> None:
        self._call(self._client.server.transact, self._entry, {}, {f"{self._entry}/claims/{name}": None}, self._entry)

    def names(self) -> list[str]:
        return self._call(self._client.server.names, f"{self._entry}/claims/")  # type: ignore[no-any-return]

    def written_at(self, name: str) -> float:
        return 0.0


class SimEtcdFinder:
    """As etcd_finder.EtcdFinder, of one process."""

    def __init__(self, process: Process, server: EtcdServer, seconds: float, known: tuple[Address, ...]) -> None:
        self._process, self._seconds, self._known = process, seconds, known
        self.client = EtcdClient(process, server)
        self.entry = self._lease = self._first_entry = 0
        """none, where it cannot reach etcd and knows members"""
        self._next_keep = 0.0
        network = process.network
        if not known or (network.is_open(process.host, STORE_HOST) and network.is_open(STORE_HOST, process.host)):
            self._open()
        self._seen: tuple[float, tuple[Address, ...]] = (-1e9, ())
        self._stood: tuple[list[str], float] = ([], 0.0)
        self._sign: tuple[str, Sequence[Address], str, bool] | None = None
        self._shown_at, self._num_shown = -1e9, 0
        self._other_jobs: tuple[Address, ...] = ()
        self._last_read: str | None = None
        self._is_kept = self._is_closed = False

    def _open(self) -> None:
        client, server = self.client, self.client.server
        self.entry = client.call(server.open, 2 * self._seconds)
        self._lease = client.call(server.grant, self._seconds)
        self._first_entry = self._first_entry or self.entry
        self._next_keep = self._process.clock() + self._seconds / 4

    def arbiter(self) -> Arbiter:
        return Claims(SimKeys(self.client, lambda: self._first_entry), self._process.machines.draw_uid)

    def _keys(self) -> list[str]:
        return [f"{self.entry}/sign", f"{self.entry}/begin"]

    def _shown(self) -> list[str | None]:
        return self.client.call(self.client.server.get_many, self._keys())  # type: ignore[no-any-return]

    def _text(self, stores: Sequence[Address], token: str) -> str:
        self._num_shown += 1
        stores = list(dict.fromkeys([self._process.address, *stores]))
        return json.dumps({"stores": stores, "job": token, "by": self._process.uid, "number": self._num_shown})

    def addresses(self) -> Sequence[Address]:
        process = self._process
        if process.clock() < self._seen[0] + LOOK_SECONDS:
            return self._seen[1]
        found: list[Address] = []
        try:
            for text in self._shown():
                found += stores_in(text)
        except StoreUnreachable:
            pass
        self._seen = process.clock(), tuple(dict.fromkeys([*found, *self._known]))
        return self._seen[1]

    def is_beginner(self) -> bool:
        try:
            sign, begin = self._shown()
            is_mine = begin is not None and json.loads(begin)["by"] == self._process.uid
            if sign is None and is_mine:
                return True
            theirs = [text for text in (sign, None if is_mine else begin) if text is not None]
            if theirs and not self._are_gone(theirs):
                return False
            keys = self._keys()
            changes = {keys[0]: None, keys[1]: self._text([self._process.address], "")}
            expected = dict(zip(keys, [sign, begin], strict=True))
            return bool(self.client.call(self.client.server.transact, self.entry, expected, changes, self._lease))
        except (StoreUnreachable, LeftOut):
            return False

    def _are_gone(self, texts: list[str]) -> bool:
        if texts != self._stood[0]:
            self._stood = texts, self._process.clock()
        if self._process.clock() - self._stood[1] < REFUSED_SECONDS:
            return False
        return all(self._is_refused(store) for text in texts for store in stores_in(text))

    def _is_refused(self, store: Address) -> bool:
        process, network = self._process, self._process.network
        target = process.machines.at[store]
        if not (network.is_open(process.host, target.host) and network.is_open(target.host, process.host)):
            process.sleep(PROBE_SECONDS)
            return False
        process.sleep(0.002)
        return not target.newest.is_alive

    # --- for who keeps the job ----------------------------------------------------------------------------------------

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        self._shown_at = self._process.clock()
        self._sign = ("sign" if job_token else "begin", addresses, job_token, if_missing)

    def keep(self, *, has_world: bool) -> None:
        is_of_job = self._sign is not None and self._sign[0] == "sign"
        if (has_world or is_of_job) and self._process.clock() - self._shown_at > FRESH_SECONDS:
            self._sign = None
        if not self._is_kept:
            self._is_kept = True
            self._process.start("signs", self._keep)

    def _keep(self) -> None:
        while self._process.is_alive and not self._is_closed:
            try:
                self._keep_once()
            except StoreUnreachable:
                pass
            except LeftOut:
                if not self._is_closed:
                    self._open_again()
            self._process.sleep(KEEP_SECONDS)

    def _open_again(self) -> None:
        try:
            self.client.call(self.client.server.revoke, self._lease)
            self._open()
        except StoreUnreachable:
            pass

    def _keep_once(self) -> None:
        client, server = self.client, self.client.server
        if self._process.clock() >= self._next_keep:
            for lease in (self.entry, self._lease):
                if not client.call(server.refresh, lease):
                    raise LeftOut("a lease has run out")
            self._next_keep = self._process.clock() + self._seconds / 4
        if self._sign is None:
            return
        name, stores, token, if_missing = self._sign
        key = f"{self.entry}/{name}"
        [text] = client.call(server.get_many, [key])
        there = None if text is None else json.loads(text)
        if there is None:
            client.call(server.create, self.entry, key, self._text(stores, token), self._lease)
            return
        if name == "sign" and there["job"] != token:
            self._other_jobs = stores_in(text)
        is_old, self._last_read = text == self._last_read, text
        if (is_old or not if_missing) if name == "sign" else there["by"] == self._process.uid:
            client.call(server.transact, self.entry, {}, {key: self._text(stores, token)}, self._lease)

    def other_jobs(self) -> Sequence[Address]:
        found, self._other_jobs = self._other_jobs, ()
        return found

    def describe(self) -> str:
        return "etcd"

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(StoreUnreachable):
            self.client.call(self.client.server.revoke, self._lease)


class EtcdForm(PeersForm):
    """The same members, which find each other in etcd, and claim there; as simulator.Form."""

    def __init__(self, simulation: Simulation, lease: float) -> None:
        super().__init__(simulation)
        self._lease = lease
        self.server = EtcdServer(simulation.machines)

    def begin(self, founders: Sequence[Worker], decision: Decision) -> None:
        super().begin(founders, decision)
        first = founders[0].finder
        assert isinstance(first, SimEtcdFinder), "made by this"
        first.is_beginner()  # else a newcomer would find nothing of theirs until rank 0 has shown its sign

    def finder(self, worker: Worker) -> SimEtcdFinder:
        return SimEtcdFinder(worker.process, self.server, self._lease, worker.known)

    def arbiter(self, worker: Worker) -> Arbiter | None:
        assert isinstance(worker.finder, SimEtcdFinder), "made by this"
        return worker.finder.arbiter()

    def may_go_on(self, worker: Worker, side: Sequence[Worker]) -> bool:
        """Where the place is silent, who is silent may have claimed."""
        return all(map(self._reaches, side)) and super().may_go_on(worker, side)

    def _reaches(self, worker: Worker) -> bool:
        """Whether its host and etcd hear each other."""
        network, host = self._simulation.network, worker.process.host
        return network.is_open(host, STORE_HOST) and network.is_open(STORE_HOST, host)

    def finds(self, newcomer: Worker, _trainers: Sequence[Worker]) -> bool:
        return self._reaches(newcomer)

    def has_signpost(self) -> bool:
        return True

    def lose_replies(self, number: int) -> None:
        self.server.loses_replies += number
