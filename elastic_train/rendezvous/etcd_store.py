"""A key-value store on etcd v3, for a job's entry; and listings of all its keys.

Every write is under one lease and behind one **guard**: a key that exists only until the job is over, or another has
taken its place. A process that was frozen meanwhile can write nothing after that.

Each value begins with a stamp unique to its write. A transaction without an answer may have been applied: the stored
value then has its stamp.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from elastic_train.errors import LeftOut
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Entry
from elastic_train.rendezvous.etcd_errors import LeaseLost

STAMP_BYTES = 12


@dataclass(frozen=True, eq=False)
class EtcdStore:
    """The store of a job's entry. For any thread: the connections serve many at once.

    Args:
        lease: of all keys; 0 for none.
        guard: condition of every write: its key must still be the one that was created then; None for none.

    Raises, from every call:
        StoreUnreachable: no answer within `etcd.deadline`.
        StoreRefused: etcd does not allow it.
        LeftOut: the guard, or the lease, is gone.
    """

    etcd: Etcd
    lease: int = 0
    guard: Entry | None = None

    def get(self, key: str) -> str | None:
        return text_of(self.etcd.get(key))

    def put(self, key: str, value: str) -> None:
        self._write([], key, stamp() + value.encode())

    def create(self, key: str, value: str) -> str:
        stamped = stamp() + value.encode()
        standing = self._write([self.etcd.is_at(key, 0)], key, stamped)
        while standing is not None:
            text = text_of(standing)
            if text:
                return text
            standing = self._write([self.etcd.is_at(key, standing.mod_revision)], key, stamped)
        return value

    def with_timeouts(self, deadline: float, attempt_seconds: float) -> EtcdStore:
        """Return the same store with other timeouts."""
        return replace(self, etcd=replace(self.etcd, deadline=deadline, attempt_seconds=attempt_seconds))

    def under(self, lease: int) -> EtcdStore:
        """Return the same store with another lease for its keys."""
        return replace(self, lease=lease)

    def delete(self, key: str) -> None:
        self.etcd.delete(key)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, conditions: Sequence[object], key: str, stamped: bytes) -> Entry | None:
        """Put under conditions. Return None if it was written, else the present entry (version 0: no key)."""
        etcd, guard = self.etcd, self.guard
        compare, failure = list(conditions), [etcd.get_request(key)]
        if guard is not None:
            compare.append(etcd.is_created_at(guard.key, guard.create_revision))
            failure.append(etcd.get_request(guard.key))
        try:
            has_written, found = etcd.transact(compare, [etcd.put_request(key, stamped, self.lease)], failure)
        except LeaseLost as error:
            raise LeftOut("this worker's job is over, or was taken over: its lease in etcd has run out") from error
        if has_written:
            return None
        if guard is not None and [one.create_revision for one in found[1]] != [guard.create_revision]:
            raise LeftOut("this worker's job is over, or was taken over by a later start")
        if not found[0]:
            return Entry(key, b"", 0, 0, 0, 0)
        standing = found[0][0]
        return None if standing.value == stamped else standing  # same stamp: an attempt without answer was applied


def stamp() -> bytes:
    return os.urandom(STAMP_BYTES // 2).hex().encode()


def text_of(entry: Entry | None) -> str | None:
    return None if entry is None or not entry.version else entry.value[STAMP_BYTES:].decode()


class Listing:
    """All keys below a prefix, by the newest listing of this process. For any thread.

    Args:
        prefix: ends with a slash.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._newest: tuple[float, dict[str, Entry]] = 0.0, {}
        """when it began, and the entries in the order of their creation"""
        self._lock = threading.Lock()

    def look(self, store: EtcdStore) -> None:
        """List the keys. Of two listings at once the one that began later counts: revisions are lower where etcd came
        back empty. Raises: StoreUnreachable."""
        began = time.monotonic()
        entries, _ = store.etcd.below(self._prefix)
        entries.sort(key=lambda entry: entry.create_revision)
        with self._lock:
            self._newest = max(self._newest, (began, {entry.key: entry for entry in entries}), key=itemgetter(0))

    def look_again(self, store: EtcdStore) -> None:
        """Pause and list the keys. The more keys, the longer: etcd is asked 1,000 times a second by all at most."""
        time.sleep(max(0.1, len(self._newest[1]) / 1000))
        self.look(store)

    def below(self, folder: str, since: int = 0) -> dict[str, Entry]:
        """Return the entries of a folder that changed after a revision, by name, oldest first."""
        prefix = f"{self._prefix}{folder}/"
        found = (one for one in self._newest[1].values() if one.key.startswith(prefix) and one.mod_revision > since)
        return {one.key.removeprefix(prefix): one for one in found}
