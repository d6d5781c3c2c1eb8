"""The forms of a job, and stores that are reached over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.protocol import signposts
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.drills.etcd_cluster import EtcdMissing
from tests.contract.forms import FORMS, MIN_NODES, PATIENCE, Form
from tests.etcd_cluster import etcd_running


@pytest.fixture(scope="module", autouse=True)
def _impatient_resolver() -> Iterator[None]:
    """TCPStore looks up the name of every peer, on its server's one thread too, and IPv4 ones not in /etc/hosts: a name
    server that does not answer stops the whole store for 5 s. Here for 1 s, for which a test that asks once waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        patch.setattr(signposts, "CONNECT_SECONDS", 5.0)
        yield


@pytest.fixture(scope="module")
def etcd_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdSettings]:
    try:
        with etcd_running(tmp_path_factory.mktemp("etcd")) as cluster:
            yield cluster.settings(min_nodes=MIN_NODES, max_nodes=8, last_call=0.01, grace=PATIENCE)
    except EtcdMissing as error:
        pytest.skip(str(error))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[Form]:
    made = FORMS[request.param](request)
    yield made
    made.close()
