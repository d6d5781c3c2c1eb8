"""An arbiter (protocol/arbiter.py) in etcd: a claim is one transaction, which creates a key where there is none."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable
from elastic_train.protocol.arbiter import ArbiterLost, Claims
from elastic_train.rendezvous.etcd_job import NodeLease
from elastic_train.rendezvous.etcd_store import EtcdStore


class Keys:
    """As arbiter.Folder: keys below a prefix.

    They are those of one job's entry, behind its guard (etcd_job.py). Where that is lost, because etcd came back empty
    or has heard of none of its members for long, no claim can be made in it any more, by anybody. But one may have been
    made before, and who made it may have gone on by it, and be silent now. So in a world that saw the entry this counts
    as a place that does not answer, whose silent members are waited for; a later world sees another entry.

    Raises, from `create`: ArbiterLost where it is.

    Args:
        entry: None where none could be opened yet.
    """

    def __init__(self, entry: NodeLease | None) -> None:
        self._entry = entry

    @contextmanager
    def _keys(self) -> Iterator[tuple[EtcdStore, str]]:
        """The store, and what all keys in it begin with."""
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
        del is_durable  # all that etcd has answered is
        text = text or "-"  # an empty one is as good as none
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
        """Nothing here grows old: each name is a few bytes, and goes with the entry, however many starts that has."""
        return 0.0


def arbiter_in(entry: NodeLease | None) -> Claims:
    """Whose claims are in an entry; silent without one. Blocks as calls of the entry's store do."""
    return Claims(Keys(entry), lambda: secrets.token_hex(8))
