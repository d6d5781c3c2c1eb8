"""An arbiter (protocol/arbiter.py) in etcd: a claim is one transaction, which creates a key where there is none."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable
from elastic_train.protocol.arbiter import Arbiter, Claims
from elastic_train.rendezvous.etcd_store import EtcdStore


class Keys:
    """As arbiter.Folder: keys below a prefix.

    They are those of one job's entry, behind its guard (etcd_job.py). Where that has run out, because all its members
    were away from etcd for long, no claim can be made any more, and the members go by their votes alone: others may
    not have a second one made where the first has gone.
    """

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        del is_durable  # all that etcd has answered is
        text = text or "-"  # an empty one is as good as none
        with _told_as_os_error():
            standing = self._store.create(self._prefix + name, text)
        if standing != text:
            raise FileExistsError(name)

    def read(self, name: str) -> str | None:
        with _told_as_os_error():
            return self._store.get(self._prefix + name)

    def remove(self, name: str) -> None:
        with _told_as_os_error():
            self._store.delete(self._prefix + name)

    def names(self) -> list[str]:
        with _told_as_os_error():
            found, _ = self._store.etcd.below(self._prefix, keys_only=True)
        return [entry.key.removeprefix(self._prefix) for entry in found]

    def written_at(self, name: str) -> float:
        """Nothing here grows old: each name is a few bytes, and goes with the job."""
        return 0.0


@contextmanager
def _told_as_os_error() -> Iterator[None]:
    try:
        yield
    except (StoreUnreachable, StoreRefused, LeftOut) as error:
        raise OSError(str(error)) from error


def arbiter_in(store: EtcdStore, prefix: str) -> Arbiter:
    """Whose claims are below `prefix`. Blocks as calls of `store` do."""
    return Claims(Keys(store, f"{prefix}/claims/"), lambda: secrets.token_hex(8))
