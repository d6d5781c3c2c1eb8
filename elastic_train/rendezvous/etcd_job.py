"""One job in etcd, from its first worker to its last: its key, and its lease.

`<prefix>/<run id>/job` names the present job of the run id: a token, which begins all its keys, and the lease of these
keys. Every worker of the job keeps the lease alive. When the last one is gone, the lease runs out and etcd deletes all
keys. A start of the same run id before that continues the job, with what killed workers have left there. Each write
requires that the key is still the one that its writer knows (the guard of etcd_store.py). Besides, each worker
(etcd_finder.py), or each of torchrun's agents in mode `agents` (etcd_handler.py), has a lease of its own.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.protocol.heartbeat import LONGEST_PAUSE, AwakeTime
from elastic_train.protocol.probes import Probe
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Entry
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore, text_of
from elastic_train.world import Address

MIN_LEASE_SECONDS = 60.0
MOST_PROBED = 16
"""workers whose addresses are probed at a time"""
MOST_TURNS = 100
"""attempts to open a job that other workers open and end at the same time"""
MOST_BETWEEN = 15.0
"""seconds after which each worker reads the entry again; so all notice a new one within arbiter.MOVED_SECONDS"""
Entered = TypeVar("Entered")
NO_STAMP = b"-" * 12
"""replaces a stamp (etcd_store.py): the token is unique to its writer"""


@dataclass(frozen=True)
class JobEntry:
    """The job of this worker."""

    prefix: str
    """of all its keys"""
    lease: int
    lease_seconds: float
    guard: Entry
    """that names it"""

    def store(self, etcd: Etcd) -> EtcdStore:
        """Return the store of its keys."""
        return EtcdStore(etcd, lease=self.lease, guard=self.guard)

    def keep(self, etcd: Etcd) -> None:
        """Start the lease's time anew.

        Raises:
            LeftOut: the lease has run out, and all keys of the job are gone.
        """
        if not etcd.refresh(self.lease):
            raise LeftOut("this worker's job is over, or was taken over: its lease in etcd has run out")


def open_job(
    etcd: Etcd, settings: EtcdSettings, run_id: str, enter: Callable[[JobEntry], Entered], lease_seconds: float = 0.0
) -> Entered:
    """Open the job of a run id, or begin one, with a lease of at least `lease_seconds`. Blocks as calls of `etcd` do.

    Args:
        enter: writes a first key of the job. Where it raises LeftOut, the last worker has just deleted the job, and the
            next one is opened.

    Returns: what `enter` returned.

    Raises:
        StoreUnreachable, StoreRefused: as every call.
    """
    key = f"{settings.prefix}/{run_id}/job"
    lease_seconds = max(MIN_LEASE_SECONDS, 2 * settings.grace, lease_seconds)
    for _ in range(MOST_TURNS):
        # One number, so that a slow etcd grants one lease for all requests, in this call and the next ones.
        lease = etcd.connections.drawn_lease = etcd.connections.drawn_lease or secrets.randbits(62) | 1
        entry = etcd.get(key)
        if entry is None:
            token = secrets.token_hex(6)
            etcd.grant(lease_seconds, lease)
            value = NO_STAMP + json.dumps([token, lease, lease_seconds]).encode()
            etcd.transact([etcd.is_at(key, 0)], [etcd.put_request(key, value, lease)])
            # This read shows whether this entry or another worker's was written.
            entry = etcd.get(key)
            if entry is None or entry.value != value:
                etcd.revoke(lease)
                continue
        token, of_job, seconds = json.loads(text_of(entry) or "")
        job = JobEntry(f"{settings.prefix}/{run_id}/{token}", int(of_job), float(seconds), guard=entry)
        try:
            job.keep(etcd)
            entered = enter(job)
        except LeftOut:  # the lease ran out, or the last worker has deleted the job meanwhile, and revokes its lease
            etcd.connections.drawn_lease = 0
            continue
        etcd.connections.drawn_lease = 0
        return entered
    raise StoreUnreachable(f"no job can be opened under {key} in etcd: others come and go faster than it can be read")


def delete_job(etcd: Etcd, job: JobEntry, unless_below: Sequence[str] = ()) -> None:
    """Delete a job and all its keys, if it is still the run id's. A worker that wakes up in it can write nothing.

    An agent calls this while its interpreter ends; since Python 3.12 no thread starts then.

    Args:
        unless_below: prefixes of the keys of living members; with such a key the job is kept.
    """
    guard = job.guard
    # In a cluster that came back empty, the same revision may have created another entry, under another lease.
    is_there = [etcd.is_created_at(guard.key, guard.create_revision), etcd.is_under(guard.key, job.lease)]
    conditions = [*is_there, *map(etcd.is_empty, unless_below)]
    keys = [etcd.delete_request(guard.key), etcd.delete_request(f"{job.prefix}/", is_prefix=True)]
    has_deleted, _ = etcd.transact(conditions, keys)
    if has_deleted or not unless_below:
        etcd.revoke(job.lease)


def note_worker(store: EtcdStore, job: JobEntry, worker: str, address: Address) -> None:
    """Note a worker in the entry for as long as the job lasts, even if the worker's own lease runs out."""
    store.under(job.lease).put(f"{job.prefix}/workers/{worker}", json.dumps(address))


def leave_job(
    etcd: Etcd, job: JobEntry, worker: str, probe_all: Callable[[Sequence[Address]], Sequence[Probe]]
) -> None:
    """Delete this worker from the entry, and workers whose addresses refuse a connection, until one lives. Delete the
    job if no worker is left. A living worker may have been without etcd for long, so its entry must stay: an entry with
    a worker that does not answer is left to its lease.
    """
    noted = f"{job.prefix}/workers/"
    etcd.delete(noted + worker)
    others, is_anybody_there = etcd.below(noted)[0], False
    others.sort(key=lambda other: (other.key < noted + worker, other.key))  # leaving workers probe different ones
    while others and not is_anybody_there:
        looked_at, others = others[:MOST_PROBED], others[MOST_PROBED:]
        places = [json.loads(text_of(other) or "") for other in looked_at]
        found = probe_all([(host, port) for host, port in places])
        gone = [other.key for other, answer in zip(looked_at, found, strict=True) if answer is Probe.REFUSED]
        if gone:
            etcd.transact((), [etcd.delete_request(key) for key in gone])
        is_anybody_there = len(gone) < len(looked_at)
    delete_job(etcd, job, unless_below=(noted,))


class NodeLease:
    """The sign of life of a node or a worker: a key below `nodes/`, under a lease of its own. It keeps the job's lease
    alive, too. For any thread: under a lock one at a time keeps the lease.

    Args:
        etcd: by which `store`, that of the job's keys, is asked.
        seconds: after which the node's lease runs out without `keep`.

    Raises, from `keep` and `put`:
        StoreUnreachable, StoreRefused, LeftOut: as every call of `store`; LeftOut if the job's lease is gone.
    """

    def __init__(self, etcd: Etcd, job: JobEntry, node: str, address: str, seconds: float) -> None:
        self.store, self.job = job.store(etcd), job
        self.key, self._address = f"{job.prefix}/nodes/{node}", address
        self._seconds = seconds
        self.seconds_between = min(seconds / 4, job.lease_seconds / 4, MOST_BETWEEN)
        """seconds between two calls of `keep`; the worker that opened the job may have given it a shorter lease"""
        self.lease = 0
        """number of the node's lease; 0 before the first `keep`"""
        self._lock = threading.Lock()
        self._is_ended = False
        self.silence = AwakeTime(longest=seconds / 2 + LONGEST_PAUSE)
        """since etcd last confirmed both leases"""

    def keep(self) -> None:
        """Start the time of both leases anew; grant the node's again if it has run out. Each call of etcd blocks for
        half of the shorter lease at most."""
        self.silence.look()
        turn = self.seconds_between
        store = self.store.with_timeouts(2 * turn, min(2.0, turn))
        self.job.keep(store.etcd)
        with self._lock:
            lease = self.lease if self.lease and store.etcd.refresh(self.lease) else self._grant(store.etcd)
            try:
                # Every time, though the key exists: the write also checks the guard.
                store.under(lease).put(self.key, self._address)
            except LeftOut:  # on a machine that hung for a while, the lease may have run out since
                lease = self._grant(store.etcd)
                store.under(lease).put(self.key, self._address)
            self.lease = lease  # not earlier: a lease without the key would be refreshed for ever
        self.silence.restart()

    def _grant(self, etcd: Etcd) -> int:
        if self._is_ended:
            raise LeftOut("this worker has left the job")
        return etcd.grant(self._seconds)

    def put(self, key: str, value: str) -> None:
        """Put a key under the node's lease, so that etcd deletes it when the node is gone."""
        try:
            self.store.under(self.lease).put(key, value)
        except LeftOut:  # on a machine that hung for a while, the node's own lease may have run out
            self.keep()
            self.store.under(self.lease).put(key, value)

    def end(self, etcd: Etcd) -> None:
        """Delete all keys under the node's lease at once. No `keep` grants it again, not even one in progress."""
        self._is_ended = True
        if self.lease:
            etcd.revoke(self.lease)
