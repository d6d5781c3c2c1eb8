"""Ways to stop a run, and how it stops by itself."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from elastic_train.training.sampler import EpochOrder
from tests.integration.cluster import (
    Cluster,
    check_ledger,
    error_line,
    error_lines,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    result,
    snapshot_names,
    wait_for_step,
    wait_until,
)

ENDLESS = ("--epochs", "100000", "--snapshot-every", "0")

# Step 4 takes until the file `go` is there; the loop counts in the file `ticks`.
SLOW_TASK = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train.training.tasks import Task

class Slow(Task):
    steps = 0

    def build_model(self):
        return nn.Linear(8, 2)

    def train_dataset(self):
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)) % 2
        return TensorDataset(bits.float(), bits.sum(1) % 2)

    def loss(self, model, batch):
        self.steps += 1
        ticks = 0
        while self.steps == 4 and not Path("go").exists():
            ticks += 1
            Path("ticks").write_text(str(ticks))
            time.sleep(0.01)
        return super().loss(model, batch)
"""

# In epoch 1, sample 100 is not a number, until the file `cured` is there.
POISONED_TASK = """
from pathlib import Path
import torch
from torch import nn
from elastic_train.training.tasks import Task

class Bits(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def gather(self, indices, epoch):
        bits = indices.unsqueeze(1).bitwise_right_shift(torch.arange(8)) % 2
        inputs = bits.float()
        if epoch == 1 and not Path("cured").exists():
            inputs[indices == 100] = float("nan")
        return inputs, bits.sum(1) % 2

class Poisoned(Task):
    def build_model(self):
        return nn.Linear(8, 2)

    def train_dataset(self):
        return Bits()
"""


@pytest.fixture
def at_hangup() -> Iterator[Callable[[signal.Handlers], object]]:
    """Sets what SIGHUP does to processes that are started from then on: nohup ignores it."""
    inherited = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, inherited)


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_signal_saves_and_stops(
    cluster: Cluster, signum: int, code: int, at_hangup: Callable[[signal.Handlers], object]
) -> None:
    at_hangup(signal.SIG_DFL)
    node = cluster.start_alone(*ENDLESS)
    wait_for_step(cluster.run_dir, 30)
    node.signal(signum)
    assert node.wait(30) == code, node.text()
    step = last_step(cluster.run_dir)
    assert newest_snapshot(cluster.run_dir)[0].step == step
    assert [(e["outcome"], e["step"]) for e in events(cluster.run_dir, "done")] == [("stopped", step)]
    assert f"stopped by {signal.Signals(signum).name} at step {step}" in node.text()
    assert "error" not in node.text()
    assert not (cluster.run_dir / "result.json").exists()


@pytest.mark.slow
def test_a_terminal_that_closes_under_nohup_and_without(
    cluster: Cluster, at_hangup: Callable[[signal.Handlers], object]
) -> None:
    """torchrun handles SIGHUP, whatever it was left as, and sends it to its workers."""
    at_hangup(signal.SIG_IGN)
    [node] = cluster.start(*ENDLESS)
    wait_for_step(cluster.run_dir, 5)
    node.signal(signal.SIGHUP)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 100)
    node.signal(signal.SIGTERM)
    assert node.wait(30) == 1, node.text()
    assert [event["signal"] for event in events(cluster.run_dir, "signal")] == ["SIGTERM"]

    at_hangup(signal.SIG_DFL)
    began_at = last_step(cluster.run_dir)
    [node] = cluster.start(*ENDLESS)
    wait_for_step(cluster.run_dir, began_at + 5)
    node.signal(signal.SIGHUP)
    assert node.wait(30) == 1, node.text()
    assert [event["signal"] for event in events(cluster.run_dir, "signal")] == ["SIGTERM", "SIGHUP"]
    assert outcomes(cluster.run_dir) == ["stopped"] * 2
    assert newest_snapshot(cluster.run_dir)[0].step == last_step(cluster.run_dir)


@pytest.mark.slow
def test_signal_to_one_worker_alone(cluster: Cluster) -> None:
    """It leaves with its own code. The other goes on, until torchrun ends it because a worker has ended."""
    [node] = cluster.start(*ENDLESS, "--ledger", nproc=2)
    wait_for_step(cluster.run_dir, 5)
    node.workers()[1].terminate()
    assert node.wait(60) == 1
    assert outcomes(cluster.run_dir) == ["stopped"] * 2
    stopped_at = max(event["step"] for event in events(cluster.run_dir, "done"))
    assert stopped_at == last_step(cluster.run_dir) == newest_snapshot(cluster.run_dir)[0].step
    codes = re.findall(r"exitcode\s*: (-?\d+)", node.text())
    assert codes, "torchrun names the workers' exit codes"
    assert set(codes) == {"143"}
    assert [event["step"] for event in events(cluster.run_dir, "step")] == list(range(1, stopped_at + 1))
    check_ledger([cluster.run_dir], length=1437, batch=64, steps=stopped_at)


@pytest.mark.slow
def test_second_interrupt_exits_at_once(cluster: Cluster) -> None:
    """In the middle of a step that does not end; the first one waits for the end of the step in hand."""
    (cluster.path / "slow.py").write_text(SLOW_TASK)
    flags = ("--task", "slow:Slow", "--global-batch-size", "16", *ENDLESS)
    node = cluster.start_alone(*flags)

    def ticks() -> int:
        try:
            return int((cluster.path / "ticks").read_text() or 0)
        except FileNotFoundError:
            return 0

    wait_until(ticks, "the slow step")
    node.signal(signal.SIGINT)
    seen = ticks()
    wait_until(lambda: ticks() >= seen + 120, "the step in hand to go on")  # 1.2 s: the next one is another Ctrl-C
    assert node.process.poll() is None
    assert last_step(cluster.run_dir) == 3
    node.signal(signal.SIGINT)
    assert node.wait(5) == 130
    assert last_step(cluster.run_dir) == 3
    assert snapshot_names(cluster.run_dir) == []

    # The same again, but the step gets to its end.
    (cluster.path / "ticks").unlink()
    node = cluster.start_alone(*flags)
    wait_until(ticks, "the slow step")
    node.signal(signal.SIGINT)
    seen = ticks()
    wait_until(lambda: ticks() >= seen + 5, "the step in hand to go on")
    (cluster.path / "go").touch()
    assert node.wait(30) == 130
    stopped_at = [event["step"] for event in events(cluster.run_dir, "done")]
    # a vote that was cast before the signal came lets one more step through
    assert stopped_at in ([4], [5])
    assert newest_snapshot(cluster.run_dir)[0].step == stopped_at[0]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_loss_that_is_not_finite(cluster: Cluster, nproc: int) -> None:
    (cluster.path / "poisoned.py").write_text(POISONED_TASK)
    order = EpochOrder(seed=0, epoch=1, length=256).indices(np.arange(256)).tolist()
    bad_step = 16 + order.index(100) // 16 + 1
    flags = ("--task", "poisoned:Poisoned", "--global-batch-size", "16", "--epochs", "3", "--snapshot-every", "1")
    if nproc == 1:
        node = cluster.start_alone(*flags)
        assert node.wait() == 1
        line = error_line(node)
        assert f"step {bad_step} " in line
        assert "nan" in line
        assert "--lr" in line
    else:
        [node] = cluster.start(*flags, nproc=nproc)
        assert node.wait() == 1
        lines = error_lines(node)
        assert lines, node.text()
        assert all(f"step {bad_step} " in line for line in lines), lines
    assert last_step(cluster.run_dir) == bad_step - 1
    assert set(outcomes(cluster.run_dir)) == {"failed"}
    newest, state = newest_snapshot(cluster.run_dir)
    assert 1 <= newest.step < bad_step
    assert all(bool(np.isfinite(tensor.numpy()).all()) for tensor in state["model"].values())
    assert not (cluster.run_dir / "result.json").exists()
    if nproc == 1:
        (cluster.path / "cured").touch()
        cluster.finish([cluster.start_alone(*flags)])
        assert events(cluster.run_dir, "restore")[-1]["restored_step"] == newest.step
        assert result(cluster.run_dir)["step"] == 48


@pytest.mark.slow
def test_learning_rate_that_is_too_high(cluster: Cluster) -> None:
    node = cluster.start_alone("--model", "mlp", "--lr", "1e9", "--snapshot-every", "1")
    assert node.wait() == 1
    line = error_line(node)
    step = re.search(r"the loss of step (\d+) ", line)
    assert step is not None
    assert last_step(cluster.run_dir) == int(step[1]) - 1
    if snapshot_names(cluster.run_dir):
        assert newest_snapshot(cluster.run_dir)[0].step < int(step[1])


@pytest.mark.slow
def test_the_end_does_not_wait_for_a_worker_that_is_slow_to_go(cluster: Cluster) -> None:
    nodes = cluster.start(*ENDLESS, "--max-steps", "100", nodes=2, nnodes="1:3")
    nodes += cluster.start(
        *ENDLESS, "--max-steps", "100", nnodes="1:3", conf=cluster.last_call(60),
        env={"ELASTIC_TRAIN_FAULT": "freeze@exit"},
    )  # fmt: skip
    wait_until(lambda: "fault: freeze" in nodes[2].text(), "the end of training", 60)
    (slow,) = nodes[2].workers()
    try:
        cluster.finish(nodes[:2], timeout=60)
    finally:
        slow.send_signal(signal.SIGCONT)
    cluster.finish(nodes[2:])
