from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, etcd_running
from tests.integration.cluster import Cluster, running


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """The nodes of a test; under c10d, or as an indirect parameter says, `etcd3`."""
    if getattr(request, "param", "c10d") == "c10d":
        with running(tmp_path) as nodes:
            yield nodes
    else:
        with running(tmp_path, request.getfixturevalue("etcd")) as nodes:
            yield nodes


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three real etcd members."""
    path = tmp_path / "etcd"
    path.mkdir()
    with etcd_running(path, 3) as members:
        yield members


@pytest.fixture
def etcd_nodes(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Cluster]:
    """The nodes of a test that meet in etcd."""
    with running(tmp_path, etcd) as nodes:
        yield nodes
