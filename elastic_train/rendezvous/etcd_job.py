"""One job in etcd, from its first worker to its last: its key, and its lease.

`<prefix>/<run id>/job` names the job that has the run id now: a token, below which all its keys are, and the lease
that they are put under. Everybody in it keeps the lease alive; when the last one is gone it runs out and leaves
nothing. A start of the same run id before that goes on in it, with what the killed have left there. Nothing is written
unless the key is still the one that its writer knows (the guard of etcd_store.py). Each worker (etcd_finder.py), and
each of torchrun's agents where those meet in it (etcd_handler.py), has a lease of its own besides.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.protocol.heartbeat import LONGEST_PAUSE, AwakeTime
from elastic_train.protocol.probes import Probe
from elastic_train.rendezvous.etcd import Etcd, Transaction
from elastic_train.rendezvous.etcd_connections import Entry
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore, Guard, text_of
from elastic_train.world import Address

MIN_LEASE_SECONDS = 60.0
MOST_PROBED = 16
"""others of whom it is looked at one time who is dead"""
MOST_TURNS = 100
"""of others who open and end the job in the same moments"""
MOST_BETWEEN = 15.0
"""seconds after which each worker looks at the entry again; all find another one in arbiter.MOVED_SECONDS"""
NO_STAMP = b"-" * 12
"""in place of a stamp (etcd_store.py): the token is unique to its writer"""


@dataclass(frozen=True)
class JobEntry:
    """A job that this worker is of."""

    prefix: str
    """begins all its keys"""
    lease: int
    lease_seconds: float
    guard: Guard

    def keep(self, etcd: Etcd) -> None:
        """Start the lease's time anew.

        Raises:
            LeftOut: it has run out, and everything of the job with it.
        """
        if not etcd.refresh(self.lease):
            raise LeftOut("this worker's job is over, or was taken over: its lease in etcd has run out")


def open_job(etcd: Etcd, settings: EtcdSettings, run_id: str, lease_seconds: float = 0.0) -> JobEntry:
    """The job of a run id, or a new one, with a lease of so many seconds at least. Blocks as calls of `etcd` do.

    Raises:
        StoreUnreachable, StoreRefused: as every call.
    """
    key = f"{settings.prefix}/{run_id}/job"
    lease_seconds = max(MIN_LEASE_SECONDS, 2 * settings.grace, lease_seconds)
    # One, however often a slow etcd is asked for it, in this call or the next one.
    lease = etcd.connections.drawn_lease = etcd.connections.drawn_lease or secrets.randbits(62) | 1
    for _ in range(MOST_TURNS):
        entry = etcd.get(key)
        if entry is None:
            token = secrets.token_hex(6)
            etcd.grant(lease_seconds, lease)
            value = NO_STAMP + json.dumps([token, lease, lease_seconds]).encode()
            etcd.transact(
                Transaction([etcd.is_at(key, 0)], [etcd.put_request(key, value, lease)], [])
            )  # ours or another's: the next look tells
            entry = etcd.get(key)
            if entry is None or entry.value != value:
                etcd.revoke(lease)
                continue
        job = read_job(entry, settings, run_id)
        try:
            job.keep(etcd)
        except LeftOut:  # it ran out, or was taken away, at this very moment
            continue
        now = etcd.get(key)
        if now is not None and now.create_revision == entry.create_revision:
            etcd.connections.drawn_lease = 0
            return job  # else the last one has taken it away meanwhile
    raise StoreUnreachable(f"no job can be opened under {key} in etcd: others come and go faster than it can be read")


def read_job(entry: Entry, settings: EtcdSettings, run_id: str) -> JobEntry:
    token, lease, lease_seconds = json.loads(text_of(entry) or "")
    return JobEntry(
        prefix=f"{settings.prefix}/{run_id}/{token}",
        lease=int(lease),
        lease_seconds=float(lease_seconds),
        guard=Guard(entry.key, entry.create_revision),
    )


def delete_job(etcd: Etcd, job: JobEntry, unless_below: Sequence[str] = ()) -> None:
    """Remove a job and all its keys, if it still is the one; a worker that wakes up in it can write nothing any more.

    Args:
        unless_below: not where a key begins with one of these, as the members that live have.
    """
    guard = job.guard
    conditions = [etcd.is_created_at(guard.key, guard.create_revision), *map(etcd.is_empty, unless_below)]
    outcome = etcd.transact(
        Transaction(conditions, [etcd.delete_request(guard.key), etcd.delete_request(f"{job.prefix}/", is_prefix=True)])
    )
    if outcome.succeeded or not unless_below:
        etcd.revoke(job.lease)


def note_worker(store: EtcdStore, job: JobEntry, worker: str, address: Address) -> None:
    """Note a worker in the entry for as long as that lasts, also while its own lease has run out."""
    store.under(job.lease).put(f"{job.prefix}/workers/{worker}", json.dumps(address))


def leave_job(
    etcd: Etcd, job: JobEntry, worker: str, probe_all: Callable[[Sequence[Address]], Sequence[Probe]]
) -> None:
    """Cross a worker out, and others at whose address nobody listens, until one is met that lives; remove the job where
    no other is left. Who lives may have heard nothing of etcd for long; so an entry with one that does not answer is
    left to its lease.

    Raises:
        LeftOut: the entry was lost. Another one may have been created by the same revision, in a cluster that came
            back empty.
    """
    job.keep(etcd)
    noted = f"{job.prefix}/workers/"
    etcd.delete(noted + worker)
    others, is_anybody_there = etcd.below(noted)[0], False
    others.sort(key=lambda other: (other.key < noted + worker, other.key))  # not all who leave look at the same ones
    while others and not is_anybody_there:
        looked_at, others = others[:MOST_PROBED], others[MOST_PROBED:]
        places = [json.loads(text_of(other) or "") for other in looked_at]
        found = probe_all([(host, port) for host, port in places])
        gone = [other.key for other, answer in zip(looked_at, found, strict=True) if answer is Probe.REFUSED]
        if gone:
            etcd.transact(Transaction((), [etcd.delete_request(key) for key in gone]))
        is_anybody_there = len(gone) < len(looked_at)
    delete_job(etcd, job, unless_below=(noted,))


class NodeLease:
    """A sign of life of a node, or of a worker: its key below `nodes/`, under a lease of its own. It keeps the job's
    lease, too.

    For any thread: a lock of its own lets one at a time keep the lease of the node.

    Args:
        store: of the job's keys.
        seconds: after which the lease runs out that nobody keeps.

    Raises, from `keep` and `put`:
        StoreUnreachable, StoreRefused, LeftOut: as every call of `store`; LeftOut where the job's lease is gone.
    """

    def __init__(self, store: EtcdStore, job: JobEntry, node: str, address: str, seconds: float) -> None:
        self.store, self.job = store, job
        self.key, self._address = f"{job.prefix}/nodes/{node}", address
        self._seconds = seconds
        self.seconds_between = min(seconds / 4, job.lease_seconds / 4, MOST_BETWEEN)
        """two calls of `keep`; who opened the job may have given it a shorter lease"""
        self.lease = 0
        """its own; 0 before the first `keep`"""
        self._lock = threading.Lock()
        self._is_ended = False
        self.silence = AwakeTime(longest=seconds / 2 + LONGEST_PAUSE)
        """since etcd last confirmed both leases"""

    def keep(self) -> None:
        """Start the time of both leases anew; the node's is taken anew where it has run out. Each call of etcd
        blocks for half of the shorter one at most."""
        self.silence.look()
        turn = self.seconds_between
        store = self.store.with_timeouts(2 * turn, min(2.0, turn), lambda _why: None)
        self.job.keep(store.etcd)
        with self._lock:
            lease = self.lease
            if not lease or not store.etcd.refresh(lease):
                if self._is_ended:
                    raise LeftOut("this worker has left the job")
                lease = store.etcd.grant(self._seconds)
            # Every time, also where it stands there: what comes back tells that the mirror's stream is alive.
            store.under(lease).put(self.key, self._address)
            self.lease = lease  # not before: a lease without the key would be refreshed for ever
        self.silence.restart()

    def put(self, key: str, value: str) -> None:
        """Put a key under the lease, so that it goes with the node."""
        try:
            self.store.under(self.lease).put(key, value)
        except LeftOut:  # on a machine that hung for a while, this node's own lease may have run out
            self.keep()
            self.store.under(self.lease).put(key, value)

    def end(self, etcd: Etcd) -> None:
        """Remove all keys under it at once. It is taken anew by no `keep`, nor by one that is under way."""
        self._is_ended = True
        if self.lease:
            etcd.revoke(self.lease)
