"""Real etcd members for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elastic_train.tools.drills.etcd_cluster import EtcdCluster, Tls


@contextlib.contextmanager
def etcd_running(path: Path, size: int = 1, tls: Tls | None = None) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(path, size, tls, flags=("--auth-token-ttl", "3"))  # so that a test lives to see one expire
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
