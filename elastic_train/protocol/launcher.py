"""The finder of the workers of a world that a launcher has fixed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from elastic_train.protocol.finder import Finder
from elastic_train.protocol.signposts import MUTE_SECONDS
from elastic_train.protocol.store import TorchStore
from elastic_train.world import Address


class Launcher(Finder):
    """The finder of a world that a launcher has fixed: rank 0 writes the address of its store at MASTER_ADDR.

    Args:
        store: a client of the store at MASTER_ADDR; None for a world of one.
        start: id of this start of the job: a launcher may restart a job, or run several starts at once.
    """

    def __init__(self, store: Store | None, *, rank: int, start: str) -> None:
        self._rank, self._key = rank, f"elastic_train/{start}/sign"
        # A host or a name server that hangs for some seconds must not end the job: after a timeout the client is lost.
        self._store = None if store is None else TorchStore(store, timedelta(seconds=MUTE_SECONDS))

    def is_beginner(self) -> bool:
        return self._rank == 0

    def addresses(self) -> Sequence[Address]:
        store = self._store  # read once: the watcher thread may drop it
        if self._rank == 0 or store is None:
            return ()
        text = store.get(self._key)
        return () if text is None else [(str(host), int(port)) for host, port in json.loads(text)]

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        if self._store is not None and self._rank == 0 and not job_token:  # once: no worker joins later
            self._store.put(self._key, json.dumps(list(addresses)))

    def other_jobs(self) -> Sequence[Address]:
        return ()

    def keep(self, *, has_world: bool) -> None:
        """Drop the store once there is a world: no worker joins, and MASTER_ADDR may hang. Rank 0 may serve it."""
        if has_world and self._rank > 0:
            self._store = None

    def describe(self) -> str:
        return "MASTER_ADDR"

    def close(self) -> None:
        self._store = None
