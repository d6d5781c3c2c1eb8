"""A running job that a worker without a world knows of. The worker begins no other job before this one is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.probes import Probe
from elastic_train.protocol.store import Clients
from elastic_train.world import Address

MOST_KNOWN = 16
"""stores of its members, one of each node"""
Probes = Callable[[Sequence[Address]], Sequence[Probe]]


@dataclass
class KnownJob:
    """The stores of a job, and when one of them last answered."""

    stores: tuple[Address, ...]
    """of members, that of rank 0 first"""
    heard_at: float
    """when it was noted, or a store last answered as that of a member; by the monotonic clock"""

    def is_gone(self, clients: Clients, run_id: str, probe_all: Probes, now: float, silence: float) -> bool:
        """Return whether the job has ended: each of its stores refuses connections, or is not that of a worker in a
        world. A store that does not answer counts as alive for `silence` seconds. Blocks for short timeouts."""
        found = probe_all(self.stores)
        is_silent = Probe.SILENT in found
        for store, answer in zip(self.stores, found, strict=True):
            try:
                if answer is Probe.ACCEPTED and _is_in_world(clients, store, run_id):
                    self.heard_at = now
                    return False
            except StoreUnreachable:
                is_silent = True
        return not is_silent or now > self.heard_at + silence


def _is_in_world(clients: Clients, store: Address, run_id: str) -> bool:
    host, of = clients.ask(store, lambda asked: asked.get_many(["host", "run_id"]))
    return bool(host) and of == run_id
