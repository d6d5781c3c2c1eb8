"""A task of one's own, with flags of its own: trained under torchrun, it survives a killed node, every sample once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.cluster import (
    PYTHON,
    Cluster,
    check_ledger,
    check_steps,
    events,
    last_step,
    newest_snapshot,
    result,
    wait_for_step,
    wait_until,
    worlds,
)

EXAMPLES = Path(__file__).parents[2] / "elastic_train" / "examples"


@pytest.mark.slow
def test_a_task_with_flags_survives_a_killed_node(cluster: Cluster) -> None:
    fault = "kill-node@step:rank=1,step=60,generation=0"
    flags = ("--task", "parity_task:Parity", "--bits", "10", "--epochs", "10", "--ledger", "--peer-timeout", "2")
    env = {"PYTHONPATH": str(EXAMPLES), "ELASTIC_TRAIN_FAULT": fault}
    nodes = cluster.start(*flags, nodes=3, env=env)
    wait_until(lambda: any("fault:" in node.text() for node in nodes), "fault")
    cluster.finish([node for node in nodes if "fault:" not in node.text()])
    end = result(cluster.run_dir)
    assert [incident["cause"] for incident in end["incidents"]] == ["peer_lost"]
    assert (end["config"]["bits"], end["config"]["hidden"]) == (10, 64)
    assert not {"dataset", "model"} & end["config"].keys(), "they say nothing of this one"
    check_ledger([cluster.run_dir], length=1024, batch=64, steps=160)


OWN_EVERYTHING = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train import Task


@dataclass
class Flags:
    gain: float = 0.5
    scratch: Path = Path("here")


class Everything(Task):
    def __init__(self, flags: Flags):
        self.flags = flags

    def build_model(self):
        return nn.Linear(4, 2)

    def train_dataset(self):
        inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    test_dataset = train_dataset

    def build_optimizer(self, model):
        return torch.optim.RMSprop(model.parameters(), lr=self.flags.gain)

    def schedule(self):
        return lambda step, last_step: 0.5 if step > 1 else 1.0

    def collate(self, samples):
        return torch.utils.data.default_collate(samples)

    def evaluate(self, model, batch):
        return {"margin": model(batch[0]).abs().sum(), **super().evaluate(model, batch)}

    def summarize(self, means):
        return {"squared_margin": means["margin"] ** 2}
"""


def test_optimizer_schedule_collate_and_metrics_of_ones_own(cluster: Cluster) -> None:
    (cluster.path / "mine.py").write_text(OWN_EVERYTHING)
    flags = ("--task", "mine:Everything", "--epochs", "2", "--global-batch-size", "32", "--gain", "0.25")
    node = cluster.start_alone(*flags)
    cluster.finish([node])
    _, state = newest_snapshot(cluster.run_dir)
    assert "square_avg" in state["optimizer"]["state"][0], "RMSprop's"
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.125
    measured = result(cluster.run_dir)["test_metrics"]
    assert list(measured) == ["squared_margin"]
    assert f", test squared_margin {measured['squared_margin']:.4g}, " in node.text()
    strange = [line for line in node.text().splitlines() if not line.startswith("elastic_train: ")]
    assert strange == [], "imports without garbage collection leave no trace at the end"


def test_an_error_in_a_users_module_shows_the_users_traceback_first(cluster: Cluster) -> None:
    (cluster.path / "mine.py").write_text("def broken():\n    return 1 / 0\n\nbroken()\n")
    node = cluster.launch([PYTHON, "-m", "elastic_train", "--task", "mine:Mine"], {})
    assert node.wait() == 1
    lines = node.text().splitlines()
    assert lines[0].startswith("Traceback")
    assert 'mine.py", line 4' in lines[1], "the user's code comes first, not ours"
    assert lines[-1] == "ZeroDivisionError: division by zero"


# Notes which process reads which sample. A train epoch of 17 leaves one rank of two a step without samples.
NOTING = """
import os

import torch
from torch import nn
from torch.utils.data import Dataset
from elastic_train import Task


class Noted(Dataset):
    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with open("reads", "a") as file:
            file.write(f"{self.name} {os.getpid()}\\n")
        return torch.full((4,), float(index)), index % 2


class Noting(Task):
    def build_model(self):
        return nn.Linear(4, 2)

    def train_dataset(self):
        return Noted("train", 17)

    def test_dataset(self):
        return Noted("test", 6)

    def evaluate(self, model, batch):
        return super().evaluate(model, batch)
"""


def test_with_loader_processes_no_sample_is_read_in_the_process_that_trains(cluster: Cluster) -> None:
    """Not in a join, in a step without samples, or in the first look at an evaluation: loader processes that are forked
    later would share the file that a data set opens then, and its position."""
    (cluster.path / "mine.py").write_text(NOTING)
    flags = ("--task", "mine:Noting", "--num-workers", "1", "--global-batch-size", "8", "--epochs", "1000")
    nodes = cluster.start(*flags, "--eval-every", "1", nnodes="1:2")
    wait_for_step(cluster.run_dir, 1)
    nodes += cluster.start(*flags, "--eval-every", "1", nnodes="1:2")
    wait_until(lambda: (1, 2) in worlds(cluster.run_dir), "join", 60.0)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 6)
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    trainers = {event["pid"] for event in events(cluster.run_dir, "start")}
    assert len(trainers) == 2
    reads = {(name, int(pid)) for name, pid in map(str.split, (cluster.path / "reads").read_text().splitlines())}
    assert {name for name, _ in reads} == {"train", "test"}
    assert {(name, pid) for name, pid in reads if pid in trainers} == set()


PARTLY_USED = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train import Task


class Model(nn.ModuleDict):
    def forward(self, inputs):
        return self["used"](inputs)


class PartlyUsed(Task):
    def build_model(self):
        return Model({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})

    def train_dataset(self):
        return TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))


class Late(PartlyUsed):
    def loss(self, module, batch):
        while not Path("go").exists():
            time.sleep(0.01)
        return super().loss(module, batch)
"""


@pytest.mark.slow
def test_a_model_with_unused_parameters_trains_alone_and_a_second_node_waits(cluster: Cluster) -> None:
    """With it the first step would fail, and end the job."""
    (cluster.path / "mine.py").write_text(PARTLY_USED)
    flags = ("--task", "mine:PartlyUsed", "--global-batch-size", "16", "--epochs", "1000000", "--eval-every", "1000000")
    [first] = cluster.start(*flags, nnodes="1:2")
    wait_for_step(cluster.run_dir, 1)
    why = "2 parameters (unused.weight, unused.bias) got no gradient, and with several workers DDP waits for all: no"
    assert f"elastic_train: warning: {why}" in first.text()
    [second] = cluster.start(*flags, nnodes="1:2")
    wait_until(lambda: f"elastic_train: {why}" in second.text(), "reason", 60.0)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    assert worlds(cluster.run_dir) == [(0, 1)]
    for node in (second, first):
        node.signal(signal.SIGTERM)
        cluster.finish([node], code=1)
    check_steps(cluster.run_dir, last_step(cluster.run_dir))


@pytest.mark.slow
def test_a_second_node_that_comes_before_the_first_step_waits_as_well(cluster: Cluster) -> None:
    (cluster.path / "mine.py").write_text(PARTLY_USED)
    flags = ("--task", "mine:Late", "--global-batch-size", "16", "--epochs", "1000000", "--eval-every", "1000000")
    [first] = cluster.start(*flags, nnodes="1:2")
    wait_until(lambda: worlds(cluster.run_dir) == [(0, 1)], "world of one")
    [second] = cluster.start(*flags, nnodes="1:2")
    # It says so after 10 s: by then it would have been chosen.
    wait_until(lambda: "waiting to be admitted" in second.text(), "newcomer", 60.0)
    (cluster.path / "go").touch()
    wait_until(lambda: "elastic_train: 2 parameters (unused.weight" in second.text(), "reason", 60.0)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    assert worlds(cluster.run_dir) == [(0, 1)]
    for node in (second, first):
        node.signal(signal.SIGTERM)
        cluster.finish([node], code=1)
