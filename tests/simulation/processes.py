"""Processes that run histories in parallel."""

from __future__ import annotations

import gc
from multiprocessing.pool import Pool
from types import ModuleType

from elastic_train.elastic import barriers, joins
from elastic_train.protocol import arbiter, known_worlds
from elastic_train.rendezvous import etcd_finder, etcd_job
from tests.processes import forkserver
from tests.simulation import worker

SHORT: list[tuple[ModuleType, str, float]] = [
    (barriers, "SPARE_POLL_SECONDS", 0.1),
    (joins, "QUEUE_POLL_SECONDS", 0.1),
    (worker, "POLL_SECONDS", 0.05),
    (arbiter, "OUTDATED", 1),
    (arbiter, "OLD_SECONDS", 3.0),
    (known_worlds, "KEPT_DECISIONS", 1),
    (arbiter, "MOVED_SECONDS", 3.0),
    (etcd_job, "MIN_LEASE_SECONDS", 2.0),
    (etcd_finder, "ENTRY_SECONDS", 6.0),
]
"""Constants for short histories: longer polls make fewer events, and of few worlds old ones are to be
removed."""


def two_processes() -> Pool:
    return forkserver().Pool(2, initializer=_begin)


def _begin() -> None:
    for module, name, value in SHORT:
        setattr(module, name, value)
    gc.freeze()
    gc.set_threshold(100_000)  # a history leaves cycles, and few of them
