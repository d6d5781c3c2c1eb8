"""An arbiter (protocol/arbiter.py) in etcd: a claim is one transaction that creates a key if it does not exist."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable
from elastic_train.protocol.arbiter import ArbiterLost, Claims
from elastic_train.rendezvous.etcd_job import NodeLease
from elastic_train.rendezvous.etcd_store import EtcdStore


class Keys:
    """As arbiter.Folder: keys below a prefix, of one job's entry and behind its guard (etcd_job.py).

    The entry is lost when etcd comes back empty, or has not heard of any member for long. No worker can make a claim in
    it then. But one may have made a claim before, may have gone on by it, and may be silent now. So a world that saw
    the entry treats the loss as an arbiter that does not answer: it waits for its silent members. A later world sees
    another entry.

    Raises, from `create`: ArbiterLost: the entry is lost.

    Args:
        entry: None if none could be opened yet.
    """

    def __init__(self, entry: NodeLease | None) -> None:
        self._entry = entry

    @contextmanager
    def _keys(self) -> Iterator[tuple[EtcdStore, str]]:
        """Yield the store and the prefix of all claims in it."""
        entry = self._entry
        if entry is None:
            raise OSError("no entry of the job has been opened yet")
        try:
            yield entry.store, f"{entry.job.prefix}/claims/"
        except LeftOut as error:
            raise ArbiterLost(str(error)) from error
        except (StoreUnreachable, StoreRefused) as error:
            raise OSError(str(error)) from error

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        del is_durable  # etcd answers durable writes only
        text = text or "-"  # `EtcdStore.create` overwrites an empty value
        with self._keys() as (store, prefix):
            standing = store.create(prefix + name, text)
        if standing != text:
            raise FileExistsError(name)

    def read(self, name: str) -> str | None:
        with self._keys() as (store, prefix):
            return store.get(prefix + name)

    def remove(self, name: str) -> None:
        with self._keys() as (store, prefix):
            store.delete(prefix + name)

    def names(self) -> list[str]:
        with self._keys() as (store, prefix):
            found, _ = store.etcd.below(prefix, keys_only=True)
        return [entry.key.removeprefix(prefix) for entry in found]

    def written_at(self, name: str) -> float:
        """Return 0: no claim here is deleted for its age. Each is a few bytes, and is deleted with the entry."""
        return 0.0


def arbiter_in(entry: NodeLease | None) -> Claims:
    """Return an arbiter with its claims in an entry; without an entry it never answers. Blocks as the entry's store."""
    return Claims(Keys(entry), lambda: secrets.token_hex(8))
