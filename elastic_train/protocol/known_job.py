"""A job that a worker without a world knows of, and whether it is gone: before that, who knows it begins no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.probes import Probe
from elastic_train.protocol.store import Clients
from elastic_train.world import Address

MOST_KNOWN = 16
"""of its stores"""
Probes = Callable[[Sequence[Address]], Sequence[Probe]]


@dataclass
class KnownJob:
    """What is known of it."""

    stores: tuple[Address, ...]
    """of members, rank 0's first"""
    heard_at: float
    """when any of them was last heard of, by the monotonic clock"""

    def is_gone(self, clients: Clients, run_id: str, probe_all: Probes, now: float, silence: float) -> bool:
        """Whether nobody is in it any more: nobody listens at any of its stores, or who does is in no world. Who says
        nothing may train on, until that is so for `silence` seconds. Blocks for short timeouts."""
        found = probe_all(self.stores)
        is_silent = Probe.SILENT in found
        for store, answer in zip(self.stores, found, strict=True):
            try:
                if answer is Probe.ACCEPTED and _is_in_world(clients, store, run_id):
                    self.heard_at = now
                    return False
            except StoreUnreachable:
                clients.lose(store)
                is_silent = True
        return not is_silent or now > self.heard_at + silence


def _is_in_world(clients: Clients, store: Address, run_id: str) -> bool:
    host, of = clients.at(store).get_many(["host", "run_id"])
    return bool(host) and of == run_id
