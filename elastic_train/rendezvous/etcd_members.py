"""A job whose members share an etcd cluster: any node may die, and a minority of etcd's own members.

The protocol is that of protocol/central.py. Here are the leases under which the job's keys and a worker's place in the
join queue stand, and how long each thread waits for an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable
from elastic_train.protocol.central import CentralJob
from elastic_train.protocol.join_queue import Size
from elastic_train.protocol.store import ListingStore
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS, Connections
from elastic_train.rendezvous.etcd_job import NOTICE_SECONDS, delete_job, open_job
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore, Mirror
from elastic_train.world import Member, World

REPORT_SECONDS = 10.0
"""between two lines to the person who waits with us"""
CLOSE_SECONDS = 3.0
"""for tidying up at the end; what is left then runs out with the lease"""


class EtcdJob(CentralJob):
    """As CentralJob. Connects, and opens the job, when it is made.

    Args:
        check: raises Stopped where this worker was told to stop.

    Raises:
        StoreUnreachable, StoreRefused: as every call.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        run_id: str,
        *,
        uid: str,
        peer_timeout: float,
        max_world_size: int | None,
        check: Callable[[], None],
        log: Callable[[str], None],
        refused: Callable[[Sequence[Member]], list[Member]],
        draw_uid: Callable[[], str],
    ) -> None:
        self._settings, self._check, self._log = settings, check, log
        self._next_report = 0.0
        self._queue_lock = threading.Lock()
        self._queue_lease = 0
        self._next_keep = 0.0
        self.connections = Connections(settings)
        etcd = Etcd(self.connections, deadline=settings.grace, before_retry=self._before_retry)
        self._job = open_job(
            etcd, settings, run_id, peer_timeout=peer_timeout, check=check, log=log, mark=f"here/{uid}"
        )
        prefix = self._job.prefix
        self._mirror = Mirror(replace(etcd, before_retry=lambda _why: None), f"{prefix}/")
        self._own = EtcdStore(etcd, lease=self._job.lease, guard=self._job.guard, mirror=self._mirror)
        seconds = max(0.5, min(ATTEMPT_SECONDS, peer_timeout / 4))  # the watcher must not miss its own tasks for long
        self._watching = self._own.with_timeouts(seconds, min(ATTEMPT_SECONDS, seconds), lambda _why: None)
        super().__init__(
            self._own,
            self._watching,
            prefix,
            Size(settings.min_nodes, settings.max_nodes, settings.last_call),
            peer_timeout=peer_timeout,
            longest_silence=settings.grace + NOTICE_SECONDS,
            max_world_size=max_world_size,
            refused=refused,
            draw_uid=draw_uid,
            clock=time.monotonic,
            parting=self._last_words(),
        )
        self._queue_seconds = max(5.0, peer_timeout)
        self._keep_seconds = min(self._job.lease_seconds / 4, peer_timeout / 3, 5.0)
        self.open(uid)

    def where(self) -> str:
        return ",".join(self._settings.endpoints)

    def _before_retry(self, why: str) -> None:
        """Between two attempts of the training thread: it can be stopped, and says what it waits for."""
        self._check()
        now = time.monotonic()
        if now > self._next_report + REPORT_SECONDS:
            if self._next_report:
                self._log(f"waiting for etcd, {self._settings.grace:.0f} s at most: {why}")
            self._next_report = now

    def expect_answer(self, silence: float) -> None:
        """What the watcher has waited for etcd counts for the training thread too."""
        left = max(0.5, self._settings.grace - silence)
        try:
            briefly = self._own.with_timeouts(left, min(ATTEMPT_SECONDS, left), self._before_retry)
            briefly.etcd.get(f"{self._prefix}/over")
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{error}, after {silence:.0f} s without an answer") from error

    # --- the join queue -----------------------------------------------------------------------------------------------

    def renew_queue_place(self, store: ListingStore) -> None:
        assert isinstance(store, EtcdStore), "both of them are"
        with self._queue_lock:
            self._renew_queue_place(store)

    def _renew_queue_place(self, store: EtcdStore) -> None:
        """Under the lock."""
        mine = self._mine
        if mine is None or (self._queue_lease and store.etcd.refresh(self._queue_lease)):
            return
        lease = store.etcd.grant(self._queue_seconds)
        store.under(lease).put(self._queue_key, mine.to_json())
        self._queue_lease = lease  # not before: a lease without the key would be refreshed for ever

    def leave_queue(self) -> None:
        with self._queue_lock:
            self._mine, self._is_queued = None, False
            if self._queue_lease:
                self._own.etcd.revoke(self._queue_lease)
                self._queue_lease = 0

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, is_spokesman: bool, headless: World | None = None) -> None:
        now = time.monotonic()
        if now >= self._next_keep:
            self._job.keep(self._watching.etcd)
            self._next_keep = now + self._keep_seconds
            # Else the training thread takes or leaves the place this moment, and may wait long for etcd in that.
            if self._mine is not None and self._queue_lock.acquire(blocking=False):
                try:
                    self._renew_queue_place(self._watching)
                finally:
                    self._queue_lock.release()
        super().tend(world, is_spokesman=is_spokesman, headless=headless)

    def _last_words(self) -> EtcdStore:
        """The store for what a worker says as it ends: it waits for no long answer, and is not stopped by the stop
        that it tells of."""
        return self._own.with_timeouts(CLOSE_SECONDS, CLOSE_SECONDS / 2, lambda _why: None)

    def finish(self, world: World) -> None:
        store = self._last_words()
        self.forget(store)
        store.put(f"{self._prefix}/over", "finished")

    def close(self, me: Member | None) -> None:
        """Leave nothing behind: the last one out takes the job away. Not long where etcd does not answer."""
        store = self._last_words()
        with suppress(StoreUnreachable, StoreRefused, LeftOut):
            if self._queue_lease:
                store.etcd.revoke(self._queue_lease)
            self.forget(store)  # one that died in this very second
            store.delete(f"{self._prefix}/heartbeat/{self._uid}")
            store.delete(f"{self._prefix}/here/{self._uid}")
            delete_job(store.etcd, self._job, unless_below=(f"{self._prefix}/here/",))
        self._mirror.close()
        self.connections.close()
