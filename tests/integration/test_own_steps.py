"""Training functions of one's own whose steps are computed by the flags: the same bits, clipped, averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.cluster import (
    PYTHON,
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_line,
    newest_snapshot,
    result,
    wait_for_step,
)
from tests.own_steps import SCRIPT

LENGTH, BATCH, EPOCHS = 98, 16, 40
STEPS = 7 * EPOCHS


def write_script(cluster: Cluster, text: str = SCRIPT) -> Path:
    path = cluster.path / "script.py"
    path.write_text(text)
    return path


def run_alone(cluster: Cluster, *flags: str, text: str = SCRIPT) -> tuple[Node, Path]:
    run_dir = cluster.path / "alone"
    base = ("--run-dir", str(run_dir), "--epochs", str(EPOCHS), "--global-batch-size", str(BATCH))
    return cluster.launch([PYTHON, str(write_script(cluster, text)), *base, *flags], {}), run_dir


@pytest.mark.slow
def test_the_bits_are_those_of_one_worker_whatever_dies(cluster: Cluster) -> None:
    flags = ("--reduction", "ordered", "--clip-grad-norm", "0.5", "--ema-decay", "0.9", "--ledger")
    alone, run_dir = run_alone(cluster, *flags)
    cluster.finish([alone])
    common = ("--epochs", str(EPOCHS), "--global-batch-size", str(BATCH), "--peer-timeout", "2")
    nodes = cluster.start(*flags, *common, nodes=3, program=(str(write_script(cluster)),))
    wait_for_step(cluster.run_dir, 30)
    nodes[2].kill()
    cluster.finish(nodes[:2])
    assert result(cluster.run_dir)["state_sha256"] == result(run_dir)["state_sha256"]
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=STEPS)
    check_steps(cluster.run_dir, STEPS)
    (_, one), (_, other) = newest_snapshot(run_dir), newest_snapshot(cluster.run_dir)
    averages = one["extras"]["ema"], other["extras"]["ema"]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_the_norm_of_a_step_is_limited(cluster: Cluster) -> None:
    alone, run_dir = run_alone(cluster, "--clip-grad-norm", "1e-9", "--precision", "bf16", "--micro-batch-size", "5")
    cluster.finish([alone])
    _, state = newest_snapshot(run_dir)
    torch.manual_seed(0)
    first = torch.nn.Linear(1, 8)
    assert torch.allclose(state["model"]["0.weight"], first.weight, atol=1e-5), "the weights have hardly moved"
    assert result(run_dir)["step"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--reduction", "ordered"), ("--precision", "bf16")], ids=" ".join)
def test_a_step_of_ones_own_is_not_computed_by_flags(cluster: Cluster, flags: tuple[str, ...]) -> None:
    text = SCRIPT.replace("training.shares()", "training.batches()")
    alone, _ = run_alone(cluster, *flags, text=text)
    cluster.finish([alone], code=2)
    assert f"{' '.join(flags)} is for steps that training.step(share, loss) computes" in error_line(alone)
