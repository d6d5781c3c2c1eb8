"""An ordinary torchrun rendezvous on etcd v3, for any training script: `--rdzv-conf membership=agents`.

PyTorch's own etcd backend speaks the v2 API, which etcd 3.6 removed (pytorch/pytorch#158326, #170707). The job's entry
(etcd_job.py) is `<run id>/agents`: workers under the same run id, which have their own, do not end it. Its keys:

- `nodes/<node>`: a living agent, under a lease of its own. No clock of one machine is compared with another's.
- `waiting/<node>`: an agent that wants to be in the next round.
- `rounds/<n>`: the nodes of round n by rank; created once, by the first waiting agent that finds it due.
- `masters/<n>`: HOST:PORT of the TCPStore that the round's rank 0 serves, for agents and workers.

A round ends when one of its nodes waits for the next round, a newcomer waits and there is room, or a node is gone.
Every agent sees that in `num_nodes_waiting` and restarts its workers, as under c10d, at no cost in --max-restarts.
Once an agent of the round has finished, a newcomer waits until all of them have.
A node that leaves does not close the job. Nothing is ever unpickled.
Every agent lists the job's keys once a second, and more often while it waits for a round.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable, first_line
from elastic_train.protocol.addresses import address_towards, split_endpoint
from elastic_train.protocol.group_store import GroupStoreServer
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease, delete_job, open_job
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import Listing, text_of
from elastic_train.system import answer_of

SETTLE_SECONDS = 1.0
"""how long rounds after the first wait for more nodes; the first waits for the last call"""
FAREWELL_SECONDS = 5.0
"""how long rank 0, which serves the round's store, waits at the end until the other nodes have finished"""


def next_round(
    current: Sequence[str],
    alive: Collection[str],
    waiting: Sequence[str],
    *,
    min_nodes: int,
    max_nodes: int,
    seconds_enough: float,
    last_call: float,
) -> list[str] | None:
    """Return the nodes of the next round by rank, or None while the round is not due.

    Args:
        current: nodes of the present round, by rank.
        waiting: nodes that want to be in the next round, in the order of their arrival.
        seconds_enough: for how long at least `min_nodes` of them have waited.
    """
    if any(node in alive and node not in waiting for node in current):
        return None
    stayed = [node for node in current if node in waiting]
    nodes = [*stayed, *(node for node in waiting if node not in stayed)][:max_nodes]
    is_due = len(nodes) == max_nodes or (len(nodes) >= min_nodes and seconds_enough >= last_call)
    return nodes if is_due else None


def num_waiting(me: str, current: Sequence[str], alive: Collection[str], waiting: Collection[str], limit: int) -> int:
    """Return the number of nodes that require a new round: they wait for the next one, or are gone from this one."""
    gone = sum(node not in alive for node in current)
    again = sum(node in waiting and node != me for node in current)
    room = limit - len(current) + gone
    return gone + again + min(max(0, room), sum(node not in current for node in waiting))


def exit_barrier_keys(run_id: str, round_: int) -> tuple[str, str]:
    """Return the keys of the agents' exit barrier: (counter of arrived agents, flag that releases them). They are below
    the prefix of torchrun's own c10d rendezvous (c10d_rendezvous_backend.py).

    `torch/distributed/elastic/utils/store.py` counts arrivals up to the number of agents of the last rendezvous, and
    waits 300 s for dead agents.
    """
    prefix = f"torch.rendezvous.{run_id}.{round_}/torchelastic/agent/terminal_state"
    return f"{prefix}/num_members", f"{prefix}/last_member"


def connect(host: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


class ExitBarrier:
    """torchrun's exit barrier of one round, for the thread that keeps the leases. A frozen server answers no call, and
    torch's have no deadline there: each is on a thread of its own.

    Args:
        store: of the round.
        members: the round's nodes by rank.
    """

    def __init__(self, store: TCPStore, run_id: str, number: int, members: Sequence[str]) -> None:
        self._store, self._members = store, members
        self._counter, self._flag = exit_barrier_keys(run_id, number)
        self._arrived_for: set[str] = set()
        self._asked: Future[bool] | None = None  # by `is_begun`

    def arrive_for(self, dead: Collection[str]) -> None:
        """Count dead nodes as arrived, so that no agent waits 300 s for them. The next round has its own barrier."""
        new = {*dead} - self._arrived_for

        def arrive() -> None:  # an error: the server is gone, which has released the agents that waited there
            store = self._store.clone()
            if store.add(self._counter, len(new)) >= len(self._members):
                store.set(self._flag, "everybody who lives has arrived")

        if new and self._members[0] not in new:  # rank 0 served the barrier: its death has released all that waited
            answer_of(arrive, "exit-barrier")
        self._arrived_for |= new  # at last: where no thread can be started, the next turn tries again

    def is_begun(self, seconds: float) -> bool | None:
        """Return whether an agent has finished and waits here; None if the server is frozen or gone: then a node is
        lost, which ends the round anyway. Blocks `seconds` at most."""

        def ask() -> bool:
            return connect(self._store.host, self._store.port, seconds).add(self._counter, 0) > 0

        if self._asked is None or self._asked.done():
            self._asked = answer_of(ask, "exit-barrier")
        with suppress(RuntimeError, TimeoutError):
            return self._asked.result(seconds)
        return None


class AgentsHandler(RendezvousHandler):
    """One agent's part in the rendezvous.

    Args:
        lease: seconds after which a node without a sign of life is gone.
        join_timeout, read_timeout: as in torchrun's own rendezvous.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        settings: EtcdSettings,
        *,
        lease: float,
        join_timeout: float,
        read_timeout: float,
    ) -> None:
        self._parameters, self._settings = parameters, settings
        self._lease_seconds, self._join_seconds, self._read_seconds = lease, join_timeout, read_timeout
        self._connections = Connections(settings)
        etcd = Etcd(self._connections, deadline=settings.grace)
        self._address = parameters.local_addr or address_towards([*map(split_endpoint, settings.endpoints)], print)
        self._node = f"{self._address}-{uuid.uuid4().hex[:12]}"
        try:
            self._lease = open_job(etcd, settings, f"{parameters.run_id}/agents", partial(self._enter, etcd))
        except (StoreUnreachable, StoreRefused) as error:
            raise RendezvousConnectionError(str(error)) from error
        self._job, self._store = self._lease.job, self._lease.store
        self._prefix = self._job.prefix
        self._keys = Listing(f"{self._prefix}/")
        self._round = -1  # the newest round with this node in it
        self._members: tuple[str, ...] = ()
        self._server: GroupStoreServer | None = None
        self._barrier: ExitBarrier | None = None
        self._welcome: frozenset[str] = frozenset()  # newcomers that waited before any agent of the round had finished
        self._why_over: str | None = None
        self._is_ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="etcd-lease", daemon=True)
        # After a signal torch does not call it, because that would close its own rendezvous for good.
        atexit.register(self.shutdown)
        self._keeper.start()

    def _enter(self, etcd: Etcd, job: JobEntry) -> NodeLease:
        own = NodeLease(etcd, job, self._node, self._address, self._lease_seconds)
        own.keep()
        return own

    # --- what torchrun calls ------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return str(self._parameters.backend)

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    @property
    def use_agent_store(self) -> bool:
        """True: the workers are clients of the store that rank 0's agent serves, so that no free port is guessed."""
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: other nodes may come, and the last one deletes the job."""

    def num_nodes_waiting(self) -> int:
        """Return `num_waiting`, from memory, without blocking; 1 if a round has begun without this node.

        Raises:
            RendezvousConnectionError: etcd has been away for longer than the grace.
        """
        silence = self._lease.silence.seconds
        if self._why_over is not None:
            raise RendezvousConnectionError(self._why_over)
        if silence > self._settings.grace:
            raise RendezvousConnectionError(f"etcd has not answered for {silence:.0f} s")
        number, _, since = self._newest_round()
        if number > self._round:
            return 1  # the other nodes have gone on without this one: they took it for dead
        again = self._keys.below("waiting", since)  # who waited for this very round may not have deleted that key yet
        newcomers = self._welcome.difference(self._members).intersection(self._keys.below("waiting"))
        waiting = newcomers.union(again.keys() & self._members)
        return num_waiting(self._node, self._members, self._keys.below("nodes"), waiting, self._settings.max_nodes)

    def next_rendezvous(self) -> RendezvousInfo:
        """Enter the next round, and block until this node is in one.

        Raises:
            RendezvousTimeoutError: too few nodes came in time.
            RendezvousConnectionError: etcd does not answer.
        """
        try:
            if self._why_over is not None:
                raise LeftOut(self._why_over)
            while True:
                deadline = time.monotonic() + self._join_seconds
                info = self._enter_round(*self._wait_for_round(deadline), deadline)
                if info is not None:
                    return info
        except (StoreUnreachable, StoreRefused, LeftOut) as error:
            raise RendezvousConnectionError(str(error)) from error

    def shutdown(self) -> bool:
        """Leave the job and delete this node's keys; the last node deletes the job. Calling it again is a no-op."""
        if self._is_ending.is_set():
            return True
        self._is_ending.set()
        atexit.unregister(self.shutdown)
        self._keeper.join(2 * FAREWELL_SECONDS)  # it would grant the lease again that is ended here
        with suppress(StoreUnreachable, StoreRefused):
            store = self._store.with_timeouts(FAREWELL_SECONDS, FAREWELL_SECONDS / 2)
            self._lease.end(store.etcd)
            deadline = time.monotonic() + FAREWELL_SECONDS
            others = {*self._members} - {self._node} if self._server is not None else set()
            while others and time.monotonic() < deadline and others.intersection(self._keys.below("nodes")):
                self._keys.look_again(store)
            delete_job(store.etcd, self._job, unless_below=(f"{self._prefix}/nodes/", f"{self._prefix}/waiting/"))
        self._connections.close()
        return True

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _wait_for_round(self, deadline: float) -> tuple[tuple[str, ...], int]:
        """Wait for a new round with this node in it; return (its nodes by rank, its number)."""
        settings, store = self._settings, self._store
        before = self._round  # not the newest round: this node may be in that one, decided meanwhile
        mine = f"{self._prefix}/waiting/{self._node}"
        self._lease.put(mine, self._address)
        too_few_at = time.monotonic()
        while True:
            self._keys.look_again(store)
            number, members, _ = self._newest_round()
            if number > before and self._node in members:
                return members, number
            now = time.monotonic()
            if now > deadline:
                store.etcd.delete(mine)
                raise RendezvousTimeoutError(
                    f"{len(self._keys.below('waiting'))} nodes wait, of {settings.min_nodes} that the job needs"
                )
            waiting = [*self._keys.below("waiting")]
            too_few_at = now if len(waiting) < settings.min_nodes else too_few_at
            decided = next_round(
                members,
                self._keys.below("nodes"),
                waiting,
                min_nodes=settings.min_nodes,
                max_nodes=settings.max_nodes,
                seconds_enough=now - too_few_at,
                last_call=settings.last_call if number < 0 else min(settings.last_call, SETTLE_SECONDS),
            )
            if decided is not None:
                store.create(f"{self._prefix}/rounds/{number + 1}", json.dumps(decided))
                continue
            if self._node not in self._keys.below("waiting"):  # this node's lease had run out
                self._lease.put(mine, self._address)

    def _enter_round(self, members: tuple[str, ...], number: int, deadline: float) -> RendezvousInfo | None:
        """Connect to the store of the round's rank 0; return None if a member is gone: then another round follows."""
        store, rank = self._store, members.index(self._node)
        self._round, self._members = number, members
        store.etcd.delete(f"{self._prefix}/waiting/{self._node}")
        self._barrier = self._server = None  # of the previous round
        key = f"{self._prefix}/masters/{number}"
        if rank == 0:
            self._server = GroupStoreServer(self._address)
            host, port = self._server.address
            store.put(key, json.dumps([host, port]))
            if number > 0:
                for what in ("rounds", "masters"):  # they would make each listing longer
                    store.etcd.delete(f"{self._prefix}/{what}/{number - 1}")
        while (text := text_of(self._keys.below("masters").get(str(number)))) is None:
            if members[0] not in self._keys.below("nodes") or self._newest_round()[0] > number:
                return None
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"the agent of rank 0 of round {number} has not come to it")
            self._keys.look_again(store)
        if not self._has_everybody_entered(members, number, deadline):
            return None
        host, port = json.loads(text)
        seconds = self._read_seconds
        try:
            raw = answer_of(partial(connect, host, port, seconds), "round-store").result(seconds)
        except (RuntimeError, TimeoutError) as error:
            if members[0] in self._keys.below("nodes"):
                raise RendezvousConnectionError(f"the agent of rank 0 at {host}:{port}: {first_line(error)}") from error
            return None
        # The prefix of torchrun's own rendezvous for its rounds; its agents have their exit barrier below it.
        barrier = exit_barrier_keys(self.get_run_id(), number)[0]
        prefix, _, _ = barrier.partition("/")
        self._barrier = ExitBarrier(raw, self.get_run_id(), number, members)
        return RendezvousInfo(PrefixStore(prefix, raw), rank, len(members), RendezvousStoreInfo(host, port))

    def _has_everybody_entered(self, members: tuple[str, ...], number: int, deadline: float) -> bool:
        """Wait until all members of a round have entered it. Return False, on every member, if one died or was stopped
        before: torchrun's agents would wait for it, and all of them would end.

        A dead agent's keys below `waiting/` and `nodes/` vanish at one moment, so one in neither has not entered. So it
        is with one whose lease ran out since the round was decided: it is lost for all, though it may be back.
        """
        while True:
            self._keys.look_again(self._store)
            waiting, alive = self._keys.below("waiting"), self._keys.below("nodes")
            newest, _, since = self._newest_round()
            if newest != number or any(node not in alive or alive[node].create_revision > since for node in members):
                return False
            if not any(node in waiting for node in members):
                return True
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"not every node of round {number} has come to it")

    def _newest_round(self) -> tuple[int, tuple[str, ...], int]:
        """Return its number, its nodes by rank, and the revision of the decision on it."""
        rounds = self._keys.below("rounds")
        number = max(map(int, rounds), default=-1)
        decided = rounds.get(str(number))
        return number, tuple(json.loads(text_of(decided) or "[]")), decided.create_revision if decided else 0

    # --- the keeper's thread ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        turn = self._lease.seconds_between
        store = self._store.with_timeouts(turn, min(2.0, turn))
        while not self._is_ending.wait(min(1.0, self._lease_seconds / 3)):
            try:
                self._lease.keep()
                self._keys.look(store)
                self._arrive_for_the_dead()
                self._welcome_newcomers()
            except (StoreUnreachable, RuntimeError):  # an error of a TCPStore, or where no thread can be started
                continue  # num_nodes_waiting() raises when etcd has been away for too long
            except (StoreRefused, LeftOut) as error:
                self._why_over = str(error)
                return

    def _arrive_for_the_dead(self) -> None:
        """Arrive at the exit barrier for dead agents, if this is the first living agent of the round."""
        barrier, members, alive = self._barrier, self._members, self._keys.below("nodes")
        if barrier is not None and next((node for node in members if node in alive), None) == self._node:
            barrier.arrive_for([node for node in members if node not in alive])

    def _welcome_newcomers(self) -> None:
        """Let newcomers end the round, unless one of its agents has finished. That agent enters no other round: it
        would wait for the others in the exit barrier, and they for it in the next round."""
        barrier, newcomers = self._barrier, frozenset(self._keys.below("waiting")).difference(self._members)
        seconds = min(1.0, self._lease_seconds / 4)  # this thread keeps the leases
        is_begun = barrier is None or not newcomers or barrier.is_begun(seconds)
        if is_begun is not None:
            self._welcome = frozenset() if is_begun else newcomers
