from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

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
    """Nodes that end with the test; where it failed, what each of them last said is shown."""
    with running(tmp_path) as nodes:
        yield nodes
        if request.node.stash.get(HAS_FAILED, False):
            for node in nodes.nodes:
                print(f"--- {node.log.name}, exit code {node.process.poll()}\n{node.text()[-SHOWN_CHARACTERS:]}")
