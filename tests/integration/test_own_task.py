"""A task of one's own, with flags of its own: trained under torchrun, it survives a killed node, every sample once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import PYTHON, Cluster, check_ledger, newest_snapshot, result, wait_until

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


def test_an_error_in_a_users_module_shows_the_users_traceback_first(cluster: Cluster) -> None:
    (cluster.path / "mine.py").write_text("def broken():\n    return 1 / 0\n\nbroken()\n")
    node = cluster.launch([PYTHON, "-m", "elastic_train", "--task", "mine:Mine"], {})
    assert node.wait() == 1
    lines = node.text().splitlines()
    assert lines[0].startswith("Traceback")
    assert 'mine.py", line 4' in lines[1], "the user's code comes first, not ours"
    assert lines[-1] == "ZeroDivisionError: division by zero"
