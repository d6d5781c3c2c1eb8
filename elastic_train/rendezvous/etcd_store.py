"""A key-value store on etcd v3, for a job's entry; and, for agents, a mirror of a part of it in the process's memory.

Every write is under one lease and behind one **guard**: a key that exists only until the job is over, or another has
taken its place. A process that was frozen meanwhile can write nothing after that.

Each value begins with a stamp unique to its write. A transaction without an answer may have been applied: the stored
value then has its stamp.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_train.errors import LeftOut, StoreUnreachable
from elastic_train.rendezvous.etcd import Etcd, Transaction
from elastic_train.rendezvous.etcd_connections import Entry, Watch
from elastic_train.rendezvous.etcd_errors import Compacted, LeaseLost, Transient

STAMP_BYTES = 12
MIRROR_LAG_SECONDS = 1.0
"""how long a mirror may lack this process's own writes before etcd is read; and be silent before it is restarted"""


@dataclass(frozen=True)
class Guard:
    """A key that must still be the one that `create_revision` created."""

    key: str
    create_revision: int


@dataclass(frozen=True, eq=False)
class EtcdStore:
    """A SharedStore (store.py) on etcd. For any thread: the connections serve many at once.

    Args:
        lease: of all keys; 0 for none.
        guard: condition of every write; None for none.
        mirror: answers reads of keys below its prefix; never older than what a store with it has written or seen.

    Raises, from every call:
        StoreUnreachable: no answer within `etcd.deadline`.
        StoreRefused: etcd does not allow it.
        LeftOut: the guard, or the lease, is gone.
    """

    etcd: Etcd
    lease: int = 0
    guard: Guard | None = None
    mirror: Mirror | None = None

    def get(self, key: str) -> str | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[str | None]:
        mirror = self.mirror
        if mirror is not None and keys and mirror.covers(keys) and mirror.wait_for_known():
            return [text_of(mirror.get(key)) for key in keys]
        entries = self.etcd.get_many(keys)
        for entry in entries:
            if entry is not None:  # the mirror may lag behind this read
                self._note(entry.key, entry.mod_revision)
        return [text_of(entry) for entry in entries]

    def put(self, key: str, value: str) -> None:
        stamped = stamp() + value.encode()
        self._write([], key, stamped)

    def create(self, key: str, value: str) -> str:
        stamped = stamp() + value.encode()
        standing = self._write([self.etcd.is_at(key, 0)], key, stamped)
        while standing is not None:
            text = text_of(standing)
            if text:
                return text
            standing = self._write([self.etcd.is_at(key, standing.mod_revision)], key, stamped)
        return value

    def with_timeouts(self, deadline: float, attempt_seconds: float, before_retry: Callable[[str], None]) -> EtcdStore:
        """Return the same store with other timeouts."""
        etcd = replace(self.etcd, deadline=deadline, attempt_seconds=attempt_seconds, before_retry=before_retry)
        return replace(self, etcd=etcd)

    def under(self, lease: int) -> EtcdStore:
        """Return the same store with another lease for its keys."""
        return replace(self, lease=lease)

    def delete(self, key: str) -> None:
        self._note(key, self.etcd.delete(key))

    # --- writing ------------------------------------------------------------------------------------------------------

    def _note(self, key: str, revision: int) -> None:
        if self.mirror is not None and key.startswith(self.mirror.prefix):
            self.mirror.must_have(revision)

    def _write(self, conditions: Sequence[object], key: str, stamped: bytes) -> Entry | None:
        """Put under conditions. Return None if it was written, else the present entry (version 0: no key)."""
        etcd, guard = self.etcd, self.guard
        compare, failure = list(conditions), [etcd.get_request(key)]
        if guard is not None:
            compare.append(etcd.is_created_at(guard.key, guard.create_revision))
            failure.append(etcd.get_request(guard.key))
        try:
            outcome = etcd.transact(Transaction(compare, [etcd.put_request(key, stamped, self.lease)], failure))
        except LeaseLost as error:
            raise LeftOut("this worker's job is over, or was taken over: its lease in etcd has run out") from error
        if outcome.succeeded:
            self._note(key, outcome.revision)
            return None
        if guard is not None:
            found = outcome.entries[1]
            if not found or found[0].create_revision != guard.create_revision:
                raise LeftOut("this worker's job is over, or was taken over by a later start")
        if not outcome.entries[0]:
            return Entry(key, b"", 0, 0, 0, 0)
        standing = outcome.entries[0][0]
        self._note(standing.key, standing.mod_revision)
        return None if standing.value == stamped else standing  # same stamp: an attempt without answer was applied


def stamp() -> bytes:
    return os.urandom(STAMP_BYTES // 2).hex().encode()


def text_of(entry: Entry | None) -> str | None:
    return None if entry is None or not entry.version else entry.value[STAMP_BYTES:].decode()


class Mirror:
    """All keys below a prefix, in memory: one listing, then one watch, which is restarted whenever it breaks.

    So the cluster sends each member one message per change, and reads cost no request.
    """

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.prefix = prefix
        self._etcd = etcd
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._revision = -1
        """`_entries` has all changes up to this one; -1 before the first listing"""
        self._known = 0
        """the newest revision of any key below the prefix that this process has written or seen"""
        self._heard_at = time.monotonic()
        """when the stream last brought a change"""
        self._watch: Watch | None = None
        self._is_closed = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def covers(self, keys: Sequence[str]) -> bool:
        return all(key.startswith(self.prefix) for key in keys)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def below(self, prefix: str, *, by_age: bool = False, since: int = 0) -> dict[str, str]:
        """Return the texts of all keys that begin with `prefix` and changed after revision `since`; `by_age`: in the
        order of their creation."""
        with self._changed:
            if self._crash is not None:
                raise self._crash
            found = [
                entry for key, entry in self._entries.items() if key.startswith(prefix) and entry.mod_revision > since
            ]
        if by_age:
            found.sort(key=lambda entry: entry.create_revision)
        return {entry.key: text_of(entry) or "" for entry in found}

    def must_have(self, revision: int) -> None:
        """Record that this revision changed a key below the prefix: from now on no read may be older."""
        with self._changed:
            self._known = max(self._known, revision)

    def wait_for_known(self) -> bool:
        """Wait until the mirror has every change that this process knows of; return False after MIRROR_LAG_SECONDS.

        A stream that was silent for all that time is then restarted. A busy stream is not: that would add to its load.
        """
        with self._changed:
            if self._changed.wait_for(self._has_known, MIRROR_LAG_SECONDS):
                return True
        if time.monotonic() > self._heard_at + MIRROR_LAG_SECONDS:  # the stream's etcd member is frozen, or gone
            self.reconnect()
        return False

    def _has_known(self) -> bool:
        if self._crash is not None:
            raise self._crash
        return self._revision >= self._known

    def wait_for_change(self) -> None:
        """Wait for a change, a tenth of a second at most."""
        with self._changed:
            self._changed.wait(0.1)

    def reconnect(self) -> None:
        """Restart a stream that is silent though changes exist: with a new listing, from another endpoint."""
        watch = self._watch
        if watch is not None:
            watch.cancel()

    def close(self) -> None:
        self._is_closed = True
        self.reconnect()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._follow()
            except (Transient, Compacted, StoreUnreachable):
                with self._changed:
                    self._changed.wait(0.05)
            except BaseException as error:  # raised at the reader
                with self._changed:
                    self._crash = error
                    self._changed.notify_all()
                return

    def _follow(self) -> None:
        entries, revision = self._etcd.below(self.prefix)
        with self._changed:
            self._entries = {entry.key: entry for entry in entries}
            self._revision, self._heard_at = revision, time.monotonic()
            self._changed.notify_all()
        self._watch = watch = Watch(self._etcd.connections, self.prefix, revision + 1)
        if self._is_closed:
            return
        for changes in watch:
            with self._changed:
                for entry, is_deleted in changes:
                    if is_deleted:
                        self._entries.pop(entry.key, None)
                    else:
                        self._entries[entry.key] = entry
                    self._revision = max(self._revision, entry.mod_revision)
                self._heard_at = time.monotonic()
                self._changed.notify_all()
