from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import OwnEtcd, etcd_running
from tests.integration.cluster import Cluster, running

HAS_FAILED = pytest.StashKey[bool]()
SHOWN_CHARACTERS = 4000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[HAS_FAILED] = item.stash.get(HAS_FAILED, False) or report.failed
    return report


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Nodes that end with the test, under c10d or, as an indirect parameter says, `etcd3`; where it failed, what each
    of them last said is shown."""
    etcd = request.getfixturevalue("etcd") if getattr(request, "param", "c10d") == "etcd3" else None
    with running(tmp_path, etcd) as nodes:
        yield nodes
        if request.node.stash.get(HAS_FAILED, False):
            for node in nodes.nodes:
                print(f"--- {node.log.name}, exit code {node.process.poll()}\n{node.text()[-SHOWN_CHARACTERS:]}")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OwnEtcd]:
    """Three real etcd members."""
    path = tmp_path / "etcd"
    path.mkdir()
    with etcd_running(path, 3) as members:
        yield members
