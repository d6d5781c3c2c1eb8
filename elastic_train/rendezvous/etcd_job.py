"""One job in etcd, from its first worker to its last: its key, its lease, and how it is taken over when all are dead.

`<prefix>/<run id>/job` names the job that has the run id now: a token, below which all its keys are, and the lease
that they are put under. Every worker keeps the lease alive; when the last one is gone it runs out and leaves nothing.
Nothing is written unless the key is still the one that its writer knows (the guard of etcd_store.py). Where torchrun's
agents meet in it (etcd_handler.py), each has a lease of its own, too.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.protocol.agreement import Standing
from elastic_train.protocol.heartbeat import LONGEST_PAUSE, AwakeTime
from elastic_train.protocol.probes import Probe, probe
from elastic_train.rendezvous.etcd import Etcd, Transaction
from elastic_train.rendezvous.etcd_connections import Entry
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore, Guard, text_of

MIN_LEASE_SECONDS = 60.0
NOTICE_SECONDS = 5.0
"""that those who train may need to notice that their grace is over: a call that is under way, and a heartbeat"""
REFUSED_SECONDS = 3.0
"""without a heartbeat, where nobody listens at any member's address either"""
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


def open_job(
    etcd: Etcd,
    settings: EtcdSettings,
    run_id: str,
    *,
    peer_timeout: float,
    check: Callable[[], None],
    log: Callable[[str], None],
    mark: str | None = None,
) -> JobEntry:
    """The living job of a run id, or a new one. Blocks for the grace where dead members cannot be told at once.

    Args:
        check: called now and then; raises to give up.
        mark: a key that is put below the job's prefix, for a last worker that leaves to see that another one has come.

    Raises:
        StoreUnreachable, StoreRefused: as every call.
    """
    key = f"{settings.prefix}/{run_id}/job"
    lease_seconds = max(MIN_LEASE_SECONDS, 2 * settings.grace)
    timeout = max(peer_timeout, settings.grace) + NOTICE_SECONDS
    deadline = time.monotonic() + 4 * timeout + 60
    while time.monotonic() < deadline:
        check()
        entry = etcd.get(key)
        if entry is None:
            token, lease = secrets.token_hex(6), etcd.grant(lease_seconds)
            value = NO_STAMP + json.dumps([token, lease, lease_seconds]).encode()
            etcd.transact(
                Transaction([etcd.is_at(key, 0)], [etcd.put_request(key, value, lease)], [])
            )  # ours or another's: the next look tells
            entry = etcd.get(key)
            if entry is None or entry.value != value:
                etcd.revoke(lease)
                continue
        job = read_job(entry, settings, run_id)
        if is_over(etcd, job, timeout=timeout, check=check):
            log(f"every worker of an earlier start of run id {run_id!r} is gone: a new start begins")
            delete_job(etcd, job)
            continue
        try:
            job.keep(etcd)
            if mark is not None:
                EtcdStore(etcd, lease=job.lease, guard=job.guard).put(f"{job.prefix}/{mark}", "")
        except LeftOut:  # it ran out, or was taken away, at this very moment
            continue
        now = etcd.get(key)
        if now is not None and now.create_revision == entry.create_revision:
            return job  # else another start has taken it away meanwhile, which looks like a sign of life
    raise StoreUnreachable(f"no job can be opened under {key} in etcd: others come and go faster than it can be read")


def read_job(entry: Entry, settings: EtcdSettings, run_id: str) -> JobEntry:
    token, lease, lease_seconds = json.loads(text_of(entry) or "")
    return JobEntry(
        prefix=f"{settings.prefix}/{run_id}/{token}",
        lease=int(lease),
        lease_seconds=float(lease_seconds),
        guard=Guard(entry.key, entry.create_revision),
    )


def is_over(etcd: Etcd, job: JobEntry, *, timeout: float, check: Callable[[], None]) -> bool:
    """Whether a job has reached its end, or has a world and every member of it is dead.

    Nobody listens any more where a process was killed, and it sends no heartbeat. One that cannot be reached from here
    may train on without etcd for as long as its grace lasts: it is dead when no heartbeat was seen for longer.
    """
    if etcd.get(f"{job.prefix}/over") is not None:
        return True

    def look() -> tuple[Standing, dict[str, str]]:
        texts = {entry.key: text_of(entry) or "" for entry in etcd.below(f"{job.prefix}/")[0]}
        heartbeats = {key: text for key, text in texts.items() if key.startswith(f"{job.prefix}/heartbeat/")}
        return Standing().follow(lambda key: texts.get(f"{job.prefix}/{key}")), heartbeats

    stood, heartbeats = look()
    if not stood.members:
        return False
    # Perhaps it is only from here that nobody can be reached: a heartbeat says more, and comes twice a second.
    is_refused = all(probe(member.address) is Probe.REFUSED for member in stood.members)
    silence, limit = AwakeTime(), REFUSED_SECONDS if is_refused else timeout
    while silence.seconds < limit:
        check()
        stands, heartbeat = look()
        # Anybody's: a node that waits to be admitted goes on where all who trained have died.
        if stands != stood or any(heartbeats.get(key) != text for key, text in heartbeat.items()):
            return False
        time.sleep(0.1)
    return True


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


class NodeLease:
    """A node's sign of life: its key below `nodes/`, under a lease of its own. It keeps the job's lease, too.

    For any thread: a lock of its own lets one at a time keep the lease of the node.

    Args:
        store: of the job's keys.
        seconds: after which the lease runs out that nobody keeps.

    Raises, from `keep` and `put`:
        StoreUnreachable, StoreRefused, LeftOut: as every call of `store`; LeftOut where the job's lease is gone.
    """

    def __init__(self, store: EtcdStore, job: JobEntry, node: str, address: str, seconds: float) -> None:
        self._store, self._job = store, job
        self._key, self._address = f"{job.prefix}/nodes/{node}", address
        self._seconds = seconds
        self._lease = 0
        self._lock = threading.Lock()
        self.silence = AwakeTime(longest=seconds / 2 + LONGEST_PAUSE)
        """since etcd last confirmed both leases"""

    def keep(self) -> None:
        """Start the time of both leases anew; the node's is taken anew where it has run out. Each call of etcd
        blocks for half of that time at most."""
        self.silence.look()
        attempt = min(2.0, self._seconds / 4)
        store = self._store.with_timeouts(self._seconds / 2, attempt, lambda _why: None)
        self._job.keep(store.etcd)
        with self._lock:
            lease = self._lease
            if not lease or not store.etcd.refresh(lease):
                lease = store.etcd.grant(self._seconds)
            # Every time, also where it stands there: what comes back tells that the mirror's stream is alive.
            store.under(lease).put(self._key, self._address)
            self._lease = lease  # not before: a lease without the key would be refreshed for ever
        self.silence.restart()

    def put(self, key: str, value: str) -> None:
        """Put a key under the lease, so that it goes with the node."""
        try:
            self._store.under(self._lease).put(key, value)
        except LeftOut:  # on a machine that hung for a while, this node's own lease may have run out
            self.keep()
            self._store.under(self._lease).put(key, value)

    def end(self, etcd: Etcd) -> None:
        """Remove all keys under it at once."""
        if self._lease:
            etcd.revoke(self._lease)
