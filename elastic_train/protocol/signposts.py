"""The signs by which newcomers find a job, at its endpoints; any member on the machine of an endpoint may serve it.

A sign names the stores of some members. Training does not need it: when its server dies the job goes on, another member
of that machine serves the endpoint, and rank 0 renews the sign. Only the process that serves the first endpoint may
begin a job, since no other process can be sure that none runs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import TCPStore

from elastic_train.errors import StoreUnreachable, first_line, going_on
from elastic_train.protocol.addresses import OwnEndpoints
from elastic_train.protocol.names import look_up
from elastic_train.protocol.probes import first_accepting
from elastic_train.protocol.store import KeyValueStore, TorchStore, stores_in
from elastic_train.system import answer_of, close_in_forked_children
from elastic_train.world import Address

CONNECT_SECONDS = 0.5
GREETING_SECONDS = 2.0
"""time that a store may take for its first answer"""
AGAIN_SECONDS = 0.2
"""the same after one such timeout: the greeting goes on, and other endpoints wait to be read"""
CALL_SECONDS = 2.0
"""time that a store may take for each further answer"""
STRANGER_SECONDS = 5.0
"""time after which it is an error that a stranger listens at an endpoint, or another run: that may have taken the port
of a dead host, and members of this run may be about to write their sign there"""
MUTE_SECONDS = 60.0
"""the same if the listener does not answer: a busy or frozen store may come back"""
LOOK_SECONDS = 0.3
"""time between two looks at the endpoints"""
KEEP_SECONDS = 0.5
"""time between two looks at the content of the signs"""
RARELY = 10
"""one of this many looks tries a further endpoint that does not answer"""
FRESH_SECONDS = 3.0
"""time after its last `show` for which a member repeats its sign: it may be out of the job then"""
HANGING_SECONDS = 30.0
"""time after which an unanswered greeting is begun anew; each greeting keeps a thread"""
HOLDER = "elastic_train/holder"
"""key of the run id that serves this sign; it is set within milliseconds after the start"""

_hanging: dict[Address, tuple[float, Future[TCPStore]]] = {}
"""unanswered greetings, each with its begin: a frozen host answers when it wakes"""


class Stranger(StoreUnreachable):
    """The listener answers, but not as a sign."""


class OtherRun(StoreUnreachable):
    """The listener is a job of elastic_train, but of another run."""


class Mute(StoreUnreachable):
    """The listener does not answer: another program, or a frozen one."""


def reach(address: Address) -> TorchStore:
    """Return a client of the store at an address. Blocks for LOOK_UP_SECONDS if no name server answers, for
    CONNECT_SECONDS if no process listens, for GREETING_SECONDS if the listener does not answer.

    Raises:
        StoreUnreachable: no process listens. Stranger: the listener is no store. Mute: it does not answer.
    """
    host, port = address
    try:
        ip = first_accepting(look_up(host), port, CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"nobody answers at {host}:{port}: {error}") from error
    # For this time TCPStore repeats its greeting if a stranger answers or hangs up; it waits for a silent listener.
    timeout = timedelta(seconds=CONNECT_SECONDS)
    now = time.monotonic()
    began_at, making = _hanging.pop((ip, port), (now, None))
    was_mute = making is not None
    if making is None or now - began_at > HANGING_SECONDS:
        began_at = now
        # The constructor greets the server without a deadline.
        making = answer_of(
            lambda: TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timeout), "connect"
        )
    try:
        store = making.result(AGAIN_SECONDS if was_mute else GREETING_SECONDS)
    except TimeoutError:
        _hanging[ip, port] = began_at, making
        raise Mute(f"what listens at {host}:{port} does not answer") from None
    except RuntimeError as error:
        raise Stranger(f"what listens at {host}:{port} is no store: {first_line(error)}") from error
    return TorchStore(store, timedelta(seconds=CALL_SECONDS))


def reach_sign(address: Address) -> TorchStore:
    """As `reach`, for a sign of elastic_train only: any torchrun has the same port by default."""
    store = reach(address)
    if store.get(HOLDER) is None:
        raise Stranger(f"what listens at {address[0]}:{address[1]} is a store of another kind")
    return store


def serve(host: str, port: int) -> TCPStore | None:
    """Serve an endpoint; None if its port is taken. Listens on all interfaces, since other machines may resolve the
    name to another address (Debian maps a host's own name to 127.0.1.1); for `localhost` only on the loopback one.

    Raises:
        StoreUnreachable: this process may not serve the endpoint.
    """
    where = "127.0.0.1" if host in ("localhost", "127.0.0.1") else "::1" if host == "::1" else ""
    is_dual = not where and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((where, port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        why = os.strerror(error.errno or 0)
        raise StoreUnreachable(f"cannot serve {host}:{port} ({why}): choose another --rdzv-endpoint") from error
    seen_by_us = where or ("::1" if ":" in host else "127.0.0.1")
    timeout = timedelta(seconds=CALL_SECONDS)
    port = int(listener.getsockname()[1])
    fd = listener.detach()
    server = TCPStore(seen_by_us, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
    # A forked DataLoader process would serve in place of a dead parent, and would keep connections open on which other
    # processes wait for answers of the parent.
    close_in_forked_children(port, server)
    return server


class Signposts:
    """The finder of `--rdzv-endpoint`.

    Args:
        endpoints: (host, port) each; the job begins at the first one.
        is_host: whether the first endpoint is on this machine; None if unknown.
        timeout: seconds after which it is an error that no endpoint answers.
        earlier: returns stores of members that the run directory names.
    """

    def __init__(
        self,
        endpoints: Sequence[Address],
        run_id: str,
        *,
        is_host: bool | None,
        timeout: float,
        earlier: Callable[[], Sequence[Address]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints, self._run_id, self._timeout, self._clock = tuple(endpoints), run_id, timeout, clock
        self._name, self._earlier = uuid.uuid4().hex, earlier
        self._list = ",".join(f"{host}:{port}" for host, port in endpoints)
        self._own = OwnEndpoints([host for host, _ in endpoints], is_host, clock)
        self._key, self._key_of_beginning = f"elastic_train/{run_id}/sign", f"elastic_train/{run_id}/beginning"
        """two keys: a beginning job must not overwrite the sign of a running job, which it has to read"""
        self._key_of_first = f"elastic_train/{run_id}/first"
        """at a first endpoint: the name of the process that serves it, and its list of endpoints"""
        self._servers: dict[int, TCPStore] = {}
        self._clients: dict[int, KeyValueStore] = {}
        self._silent: set[int] = set()
        """further endpoints that did not answer when a sign was to be written"""
        self._lock = threading.RLock()
        self._alone_since: float | None = None
        self._strange_since: dict[int, float] = {}
        self._is_taken = False
        """whether the port of the first endpoint was taken on this machine; then a process should answer there"""
        self._looked_at = -1e9
        self._seen: tuple[Address, ...] = ()
        self._sign: tuple[str, str, bool] | None = None
        """the sign that this process shows: key, text, and whether only if there is none"""
        self._other_jobs: tuple[Address, ...] = ()
        """stores found since the last call of `other_jobs`"""
        self._shown_at = -1e9
        self._has_world = False
        self._is_closed = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether no endpoint answered when `addresses` looked last."""
        return self._alone_since is not None

    def is_beginner(self) -> bool:
        with self._lock:
            return self._serve(0)

    def addresses(self) -> Sequence[Address]:
        with self._lock:
            now = self._clock()
            if now < self._looked_at + LOOK_SECONDS:
                return self._seen
            found: list[Address] = []
            is_anybody_there, wrong = False, None
            for number in range(len(self._endpoints)):
                try:
                    store = self._client(number)
                    holder, *texts = store.get_many([HOLDER, self._key, self._key_of_beginning])
                    if texts == [None, None]:
                        self._require_own(number, holder)
                    is_asked = texts[0] is None and number > 0 and 0 in self._servers and not self._has_world
                    first = store.get(self._key_of_first) if is_asked else None
                except StoreUnreachable as error:
                    self._clients.pop(number, None)
                    wrong = wrong or self._lasting(number, now, error)
                    continue
                is_anybody_there = True
                self._strange_since.pop(number, None)
                self._require_same_list(first)
                for text in texts:
                    found += stores_in(text)
            self._alone_since = None if is_anybody_there else self._alone_since or now
            self._seen = tuple(dict.fromkeys([*found, *self._earlier()]))
            self._looked_at = self._clock()
            if wrong is not None and not (found or self._has_world or 0 in self._servers):
                raise wrong
            if self._alone_since is not None and now - self._alone_since > self._timeout and not self._own.has(0):
                raise StoreUnreachable(
                    f"nobody answers at {self.describe()} for {self._timeout:.0f} s: start a node on the machine of "
                    "the first endpoint, or check the address (--rdzv-endpoint)"
                )
            return self._seen

    def _require_own(self, number: int, holder: str | None) -> None:
        """Raise OtherRun if another run has the first endpoint while this process has no world."""
        if holder != self._run_id and number == 0 and number not in self._servers and not self._has_world:
            host, port = self._endpoints[number]
            raise OtherRun(
                f"run id {holder!r} has {host}:{port}, and this is run id {self._run_id!r}: give each job a port of "
                "its own (--rdzv-endpoint), or both the same --rdzv-id"
            )

    def _require_same_list(self, first: str | None) -> None:
        """Raise StoreUnreachable if another machine is about to begin this job too, at an endpoint that is not the
        first in this process's list."""
        if first is None:
            return
        name, theirs = json.loads(first)
        if name != self._name:
            raise StoreUnreachable(
                f"this node was started with --rdzv-endpoint={self._list} and another one with "
                f"--rdzv-endpoint={theirs}: each would begin a job; give all nodes the same list"
            )

    def _lasting(self, number: int, now: float, error: StoreUnreachable) -> StoreUnreachable | None:
        """Return the error to raise for an endpoint if the fault has lasted too long and will not pass, else None."""
        is_taken = number == 0 and self._is_taken and not self._has_world
        if not is_taken and not isinstance(error, Stranger | OtherRun | Mute):
            self._strange_since.pop(number, None)
            return None
        since = self._strange_since.setdefault(number, now)
        if now - since <= (min(MUTE_SECONDS, self._timeout) if isinstance(error, Mute) else STRANGER_SECONDS):
            return None
        host, port = self._endpoints[number]
        if isinstance(error, OtherRun):
            return error
        if isinstance(error, Stranger | Mute):
            return StoreUnreachable(
                f"what listens at {host}:{port} is no rendezvous of elastic_train: another program has that port; "
                "choose another --rdzv-endpoint"
            )
        return StoreUnreachable(
            f"port {port} of this machine is taken on another address than {host}: choose another --rdzv-endpoint"
        )

    def called_by(self) -> Sequence[Address]:
        with self._lock:  # reads no other endpoint: a mute one would take seconds
            sign = self._client(0).get(self._key) if 0 in self._servers else None
        return stores_in(sign)

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        key = self._key if job_token else self._key_of_beginning
        sign = (key, json.dumps({"stores": list(addresses), "job": job_token}), if_missing)
        self._shown_at = self._clock()
        if sign != self._sign:
            self._sign = sign
            for number in list(self._servers):  # endpoints on other machines may take long to answer
                self._write(number, sign)
        self._keep_on_thread()

    def keep(self, *, has_world: bool) -> None:
        self._has_world = has_world
        is_of_job = self._sign is not None and self._sign[0] == self._key
        if (has_world or is_of_job) and self._clock() - self._shown_at > FRESH_SECONDS:
            self._sign = None
        self._keep_on_thread()

    def _keep_on_thread(self) -> None:
        """Start the thread that keeps the endpoints: the watcher must not wait for a silent host."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="signposts", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        told: set[str] = set()
        for turn in itertools.count():
            if self._is_closed.wait(KEEP_SECONDS):
                return
            for number in range(len(self._endpoints)):
                with going_on(told, f"endpoint {self.describe()}"), self._lock:
                    if number > 0 or self._has_world:
                        with contextlib.suppress(StoreUnreachable):
                            self._serve(number)
                    if number in self._silent and turn % RARELY:  # never the first: a host back there must find a sign
                        continue
                    if (sign := self._sign) is not None:  # the watcher thread may withdraw it meanwhile
                        self._write(number, sign)

    def _write(self, number: int, sign: tuple[str, str, bool]) -> None:
        key, text, if_missing = sign
        for _ in range(2):  # once more, since another process may serve the endpoint by now
            try:
                store = self._client(number)
                there = store.get(key)
                if there is not None and key == self._key:
                    self._note_other_job(there, text)
                if there != text and not (if_missing and there is not None):
                    store.put(key, text)
                self._silent.discard(number)
                return
            except StoreUnreachable:
                if number > 0:
                    self._silent.add(number)
                if self._clients.pop(number, None) is None:
                    return

    def _note_other_job(self, there: str, text: str) -> None:
        """Note the stores of another job of this run id. Two such jobs take turns at an endpoint: each sees the other's
        sign where it writes its own."""
        theirs = json.loads(there)
        if theirs.get("job") != json.loads(text)["job"]:
            self._other_jobs = stores_in(there)

    def other_jobs(self) -> Sequence[Address]:
        found, self._other_jobs = self._other_jobs, ()
        return found

    def describe(self) -> str:
        if not (sharing := self._own.sharing.get(0)):
            return self._list
        return (
            f"{self._list} (no node begins it: the first name leads to other machines, too, {sharing}; list "
            "the machines one by one, or give one of them is_host=true in --rdzv-conf)"
        )

    def close(self) -> None:
        self._is_closed.set()
        if self._keeper is not None:
            self._keeper.join(CONNECT_SECONDS + GREETING_SECONDS + 2 * CALL_SECONDS)
        self._clients.clear()
        self._servers.clear()

    def _serve(self, number: int) -> bool:
        """Serve an endpoint if that is possible. Return whether this process serves it."""
        if number in self._servers:
            return True
        if not self._own.has(number) or (number > 0 and self._own.sharing[number] and self._sign is None):
            return False  # of several machines of one name newcomers ask the first that answers: it must show a sign
        server = serve(*self._endpoints[number])
        self._is_taken = server is None if number == 0 else self._is_taken
        if server is None:
            return False
        store = TorchStore(server, timedelta(seconds=CALL_SECONDS))
        store.put(HOLDER, self._run_id)  # if this fails the server is dropped: it would look like a stranger
        if number == 0:
            store.put(self._key_of_first, json.dumps([self._name, self._list]))
        self._servers[number], self._clients[number] = server, store
        return True

    def _client(self, number: int) -> KeyValueStore:
        store = self._clients.get(number)  # read once: another thread may drop it meanwhile
        if store is None:
            store = self._clients[number] = reach_sign(self._endpoints[number])
        return store
