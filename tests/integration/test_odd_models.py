"""Models whose state is more than dense finite tensors: trained to the end, saved, and hashed alike by all who ask."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.integration.cluster import PYTHON, Cluster, newest_snapshot, result

MODELS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train import Task


class Scaled(nn.Linear):
    table = {"scale": 2}

    def forward(self, inputs):
        return super().forward(inputs) * self.table["scale"]

    def get_extra_state(self):
        return self.table

    def set_extra_state(self, state):
        self.table = state


class Neighbours(nn.Linear):
    def __init__(self, layout):
        super().__init__(8, 2)
        self.register_buffer("adjacency", torch.eye(8).to_sparse(layout=layout))

    def forward(self, inputs):
        return super().forward((self.adjacency @ inputs.t()).t())


class Unknown(nn.Linear):
    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("fill", torch.full((1,), float("nan")))

    def forward(self, inputs):
        return super().forward(torch.where(inputs > 9, self.fill, inputs))


class WithExtraState(Task):
    def build_model(self):
        return Scaled(8, 2)

    def train_dataset(self):
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    test_dataset = train_dataset


class Coo(WithExtraState):
    def build_model(self):
        return Neighbours(torch.sparse_coo)


class Csr(WithExtraState):
    def build_model(self):
        return Neighbours(torch.sparse_csr)


class WithNaN(WithExtraState):
    def build_model(self):
        return Unknown()
"""
FLAGS = ("--epochs", "1", "--global-batch-size", "32", "--snapshot-every", "1")


def hash_of_snapshot(cluster: Cluster) -> str:
    command = [PYTHON, "-m", "elastic_train.cli", "snapshot", "hash", str(cluster.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout.strip()


def train(cluster: Cluster, task: str, *flags: str, workers: int = 1) -> None:
    """Train to the end, with a snapshot of every step and no warning."""
    (cluster.path / "odd.py").write_text(MODELS)
    flags = ("--task", f"odd:{task}", *FLAGS, *flags)
    nodes = cluster.start(*flags, nproc=workers, nnodes="1:1") if workers > 1 else [cluster.start_alone(*flags)]
    cluster.finish(nodes)
    assert "warning" not in nodes[0].text()


@pytest.mark.slow
def test_extra_state_that_is_no_tensor(cluster: Cluster) -> None:
    train(cluster, "WithExtraState")
    assert newest_snapshot(cluster.run_dir)[1]["model"]["_extra_state"] == {"scale": 2}
    assert result(cluster.run_dir)["state_sha256"] == hash_of_snapshot(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "workers", "reduction"),
    [
        ("Csr", 1, "fast"),
        ("Coo", 2, "fast"),
        ("Csr", 2, "ordered"),
    ],
)
def test_a_sparse_buffer(cluster: Cluster, task: str, workers: int, reduction: str) -> None:
    train(cluster, task, "--reduction", reduction, workers=workers)
    assert newest_snapshot(cluster.run_dir)[0].step == 2
    assert newest_snapshot(cluster.run_dir)[1]["model"]["adjacency"].to_dense().equal(torch.eye(8))
    assert result(cluster.run_dir)["state_sha256"] == hash_of_snapshot(cluster)


@pytest.mark.slow
def test_a_buffer_that_is_nan_by_design(cluster: Cluster) -> None:
    train(cluster, "WithNaN")
    assert newest_snapshot(cluster.run_dir)[0].step == 2
    train(cluster, "WithNaN", "--epochs", "2")
    assert newest_snapshot(cluster.run_dir)[0].step == 4
