"""`elastic-train check` on real nodes: two that can train together, and some that could not."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment, wait_until
from tests.cuts import cut_pair
from tests.etcd_cluster import OwnEtcd
from tests.integration.cluster import PYTHON, TORCHRUN, Cluster, free_port
from tests.nodes import Node

pytestmark = pytest.mark.timeout(900)
PATIENCE = 600.0


def start(cluster: Cluster, *flags: str, port: int | None = None, run_dir: Path | None = None) -> Node:
    """A node that checks, as the README says."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port or cluster.port}"]
    conf = [] if "--nodes" in flags else ["--rdzv-conf=last_call_timeout=60"]
    if cluster.etcd is not None:
        rendezvous = ["--rdzv-backend=etcd3", f"--rdzv-endpoint={cluster.etcd.endpoint}"]
    command = [
        *TORCHRUN, *rendezvous, *conf, "--nnodes=1:2", "-m", "elastic_train.check", *flags,
        "--", "--run-dir", str(run_dir or cluster.run_dir),
    ]  # fmt: skip
    return cluster.launch(command, {})


def findings(node: Node, level: str) -> list[str]:
    return [line.removeprefix(level).strip() for line in node.text().splitlines() if line.startswith(f"{level} ")]


def verdict(node: Node) -> str:
    return next(line for line in node.text().splitlines() if line in ("PASS", "FAIL"))


@pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True)
def test_two_nodes_pass_and_leave_nothing(cluster: Cluster) -> None:
    nodes = [start(cluster, "--nodes", "2") for _ in range(2)]
    cluster.finish(nodes, timeout=PATIENCE)
    for node in nodes:
        assert verdict(node) == "PASS"
        assert not findings(node, "BREAKS")
        text = node.text()
        assert "world: 2 workers on 2 nodes, as asked" in text
        assert "writable and the same for all" in text
        assert re.search(r"reaches every other one, and [a-z:,]+ works: an all-reduce of .* takes [\d.]+ ms", text)
        assert re.search(r"rendezvous: .*(localhost:\d+ .*answers|may write below /elastic_train)", text)
    ranks = [
        re.search(r"^\[\d+\] rank = (\d), world_size = 2, backend = [a-z:,]+$", node.text(), re.M) for node in nodes
    ]
    assert sorted(found[1] for found in ranks if found) == ["0", "1"]
    assert list(cluster.run_dir.rglob("*")) == [cluster.run_dir / "snapshots"]
    if cluster.etcd is not None:
        wait_until(lambda: not cluster.etcd or not cluster.etcd.keys(), "tidy etcd")


STANDS_STILL = """
import time
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train import Task


class Model(nn.Linear):
    def get_extra_state(self):
        if any(path.is_dir() for path in Path("SNAPSHOTS").glob(".check-*")):
            print("the snapshot is being written", flush=True)
            time.sleep(600)

    def set_extra_state(self, state):
        pass


class Still(Task):
    def build_model(self):
        return Model(1, 1)

    def train_dataset(self):
        return TensorDataset(self.build_model().weight.detach())
"""


def test_a_check_that_is_ended_leaves_nothing(cluster: Cluster) -> None:
    """As torchrun ends it where another worker fails."""
    snapshots = cluster.run_dir / "snapshots"
    (cluster.path / "still.py").write_text(STANDS_STILL.replace("SNAPSHOTS", str(snapshots)))
    node = cluster.launch(
        [PYTHON, "-m", "elastic_train.check", "--", "--run-dir", str(cluster.run_dir), "--task", "still:Still"], {}
    )
    wait_until(lambda: "the snapshot is being written" in node.text(), "snapshot", PATIENCE)
    node.signal(signal.SIGTERM)
    cluster.finish([node], code=128 + signal.SIGTERM, timeout=PATIENCE)
    assert list(cluster.run_dir.rglob("*")) == [snapshots]


@pytest.mark.slow
def test_a_node_with_another_snapshot_directory_fails(cluster: Cluster) -> None:
    others = [cluster.path / name for name in ("mounted", "not-mounted")]
    nodes = [start(cluster, "--nodes", "2", run_dir=run_dir) for run_dir in others]
    cluster.finish(nodes, code=1, timeout=PATIENCE)
    for node in nodes:
        assert verdict(node) == "FAIL"
        (found,) = findings(node, "BREAKS")
        assert found.startswith("the snapshot directory is not the same for all")
        assert all(str(run_dir) in found for run_dir in others)
    assert all(list(run_dir.rglob("*")) == [run_dir / "snapshots"] for run_dir in others)


@pytest.mark.slow
def test_two_worlds_of_one_fail(cluster: Cluster) -> None:
    """Each node names itself as the endpoint, as torchrun's default does."""
    nodes = [start(cluster, "--nodes", "2", "--wait", "60", port=free_port()) for _ in range(2)]
    cluster.finish(nodes, code=1, timeout=PATIENCE)
    for node in nodes:
        (found,) = findings(node, "BREAKS")
        assert found == "the world is 1 worker on 1 node, and 2 nodes were asked for (--nodes)"
        assert "2 worlds of one" in node.text()


def test_alone_with_a_store_that_refuses_and_a_world_that_is_too_small(cluster: Cluster) -> None:
    """All in one process, for its imports take longest; the directory's parent is a file, and there is no key."""
    (cluster.path / "file").touch()
    node = cluster.launch(
        [PYTHON, "-m", "elastic_train.check", "--nodes", "2", "--rdzv-endpoint", "no-such-host.invalid:29400",
         "--", "--run-dir", str(cluster.path / "file" / "run"), "--min-nodes", "2", "--snapshot-key", "missing.key"],
        {},
    )  # fmt: skip
    cluster.finish([node], code=1, timeout=PATIENCE)
    found = findings(node, "BREAKS")
    assert len(found) == 4
    assert any("2 worlds of one" in line for line in node.text().splitlines())
    assert any("no-such-host.invalid:29400 does not resolve" in line for line in found)
    assert any("cannot write to" in line and "Not a directory" in line for line in found)
    assert any("--snapshot-key missing.key cannot be read" in line for line in found)


@pytest.mark.slow
def test_alone_with_a_stranger_at_the_port_and_a_task_that_fails(cluster: Cluster) -> None:
    (cluster.path / "broken.py").write_text(
        "from elastic_train.training.tasks import Task\n\n\nclass Broken(Task):\n    def build_model(self):\n"
        "        raise FileNotFoundError('no corpus.bin')\n"
    )
    with socket.create_server(("localhost", 0)) as stranger:
        port = stranger.getsockname()[1]
        node = cluster.launch(
            [PYTHON, "-m", "elastic_train.check", "--rdzv-endpoint", f"localhost:{port}",
             "--", "--run-dir", str(cluster.run_dir), "--task", "broken:Broken"],
            {},
        )  # fmt: skip
        cluster.finish([node], code=1, timeout=PATIENCE)
    found = findings(node, "BREAKS")
    assert len(found) == 2
    assert any("is no rendezvous of elastic_train" in line for line in found)
    assert any("FileNotFoundError: no corpus.bin" in line for line in found)
    assert "broken.py" in node.text(), "the traceback, for whoever wrote it"
    assert node.text().rstrip().endswith("FAIL")


@pytest.mark.slow
class TestInNamespaces:
    """Nodes with an address and a network of their own."""

    @pytest.fixture
    def network(self) -> Iterator[Network]:
        missing = Network.why_not()
        if missing is not None:
            pytest.skip(f"no network namespaces: {missing}")
        network = Network(3)
        yield network
        network.close()

    def check(self, network: Network, path: Path, num_nodes: int, *flags: str) -> list[Node]:
        endpoint = ",".join(f"{address}:29400" for address in network.addresses)
        return [
            Node(
                [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
                 "--rdzv-conf=last_call_timeout=60", f"--nnodes=1:{num_nodes}", "-m", "elastic_train.check",
                 "--nodes", str(num_nodes), *flags, "--", "--run-dir", str(path / "run")],
                path / f"node-{index}.log",
                path,
                clean_environment(),
                prefix=network.node_prefix(index),
                is_wrapped=True,
            )
            for index in range(num_nodes)
        ]  # fmt: skip

    def test_a_pair_that_cannot_reach_each_other(self, network: Network, tmp_path: Path) -> None:
        cut_pair(network, 1, 2)
        nodes = self.check(network, tmp_path, 3)
        try:
            assert [node.wait(PATIENCE) for node in nodes] == [1, 1, 1], nodes[0].text()
            found = [line for line in findings(nodes[0], "BREAKS") if line.startswith("no TCP connection")]
            assert network.host_name(1) in found[0]
            assert network.host_name(2) in found[0]
        finally:
            for node in nodes:
                node.kill()


@pytest.mark.slow
def test_etcd_before_any_job(etcd: OwnEtcd, tmp_path: Path) -> None:
    """One member away is a warning; two of three, and nobody could meet."""
    from elastic_train.tools.check.endpoint import look_at_etcd

    assert look_at_etcd(etcd.settings(), "none/check").problems == ()
    etcd.members[0].kill()
    one_away = look_at_etcd(etcd.settings(), "none/check")
    assert one_away.is_usable
    assert len(one_away.problems) == 1
    assert etcd.members[0].endpoint in one_away.problems[0].what
    etcd.members[1].kill()
    assert not look_at_etcd(etcd.settings(), "none/check").is_usable
