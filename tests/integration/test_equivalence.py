"""What a world of any size computes is what a plain loop over the same samples computes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.training.datasets import load
from elastic_train.training.models import build_model
from elastic_train.training.sampler import EpochOrder
from tests.integration.cluster import (
    TORCHRUN,
    Cluster,
    Node,
    check_ledger,
    events,
    free_port,
    newest_snapshot,
    result,
    snapshot_names,
)

LENGTH = 1437
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
FLAGS = (
    "--model", "mlp", "--optimizer", "sgd", "--lr", "0.05", "--momentum", "0.9", "--weight-decay", "5e-4",
    "--schedule", "constant", "--snapshot-every", "0", "--seed", "3",
)  # fmt: skip

# The loop that anybody would write with DDP alone; sampler and model are the same, nothing else of ours.
PLAIN_DDP = """
import json, os, sys
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from elastic_train.training.datasets import load
from elastic_train.training.models import build_model
from elastic_train.training.sampler import EpochOrder

batch_size, num_steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = DistributedDataParallel(build_model("mlp", channels=1, classes=10, image_size=8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
data = load("digits", None).train
share = batch_size // world_size
order = EpochOrder(3, 0, len(data)).indices(np.arange(len(data)))
losses = []
for step in range(num_steps):
    start = step * batch_size + rank * share
    images, labels = data.gather(torch.from_numpy(order[start : start + share]), 0)
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float(mean) / world_size)
if rank == 0:
    print("LOSSES", json.dumps(losses), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that ends the usual way
"""


def samples(batch_size: int, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batch of each step."""
    data = load("digits", Path()).train
    epoch, step = 0, 0
    while True:
        order = EpochOrder(3, epoch, LENGTH).indices(np.arange(LENGTH))
        for start in range(0, LENGTH, batch_size):
            if step == num_steps:
                return
            step += 1
            yield data.gather(torch.from_numpy(order[start : start + batch_size]), epoch)  # type: ignore[attr-defined]
        epoch += 1


def plain_loop(batch_size: int, num_steps: int) -> tuple[list[float], nn.Module]:
    """One process, one forward and one backward pass per step."""
    torch.manual_seed(3)
    model = build_model("mlp", channels=1, classes=10, image_size=8)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for images, labels in samples(batch_size, num_steps):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def ours(cluster: Cluster, name: str, world_size: int, batch_size: int, num_steps: int, *more: str) -> Node:
    flags = (*FLAGS, "--global-batch-size", str(batch_size), "--max-steps", str(num_steps), "--ledger", *more)
    run_dir = cluster.path / name
    if world_size == 1:
        return cluster.start_alone(*flags, run_dir=run_dir)
    [node] = cluster.start(*flags, run_dir=run_dir, nnodes="1:1", nproc=world_size, port=free_port())
    return node


def losses_of(run_dir: Path) -> list[float]:
    steps = events(run_dir, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event["loss"] for event in steps]


def assert_same_run(run_dir: Path, world_size: int, batch_size: int, num_steps: int) -> None:
    assert events(run_dir, "world")[0]["world_size"] == min(world_size, batch_size), "the others are spares"
    expected, model = plain_loop(batch_size, num_steps)
    assert losses_of(run_dir) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights = newest_snapshot(run_dir)[1]["model"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)
    check_ledger([run_dir], length=LENGTH, batch=batch_size, steps=num_steps)


@pytest.mark.slow
def test_every_world_size_agrees_with_plain_ddp(cluster: Cluster) -> None:
    """Of 64 samples a step, over the smaller last step of the first epoch."""
    (cluster.path / "plain_ddp.py").write_text(PLAIN_DDP)
    steps = 26
    nodes = [ours(cluster, f"world-{world_size}", world_size, 64, steps) for world_size in (1, 2, 4)]
    cluster.finish(nodes)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "plain_ddp.py", "64", "22"]
    plain = cluster.launch(command, {"PYTHONPATH": ":".join(path for path in sys.path if path)})
    cluster.finish([plain])
    [line] = [line for line in plain.text().splitlines() if line.startswith("LOSSES ")]
    by_plain_ddp = json.loads(line.removeprefix("LOSSES "))
    assert len(by_plain_ddp) == 22
    for world_size in (1, 2, 4):
        run_dir = cluster.path / f"world-{world_size}"
        assert losses_of(run_dir)[:22] == pytest.approx(by_plain_ddp, rel=1e-4, abs=1e-5)
        assert_same_run(run_dir, world_size, 64, steps)


@pytest.mark.slow
def test_batch_that_the_world_does_not_divide(cluster: Cluster) -> None:
    """359 samples over 4 ranks, in micro-batches of at most 40; the epoch's fifth step has one sample for 4 ranks."""
    node = ours(cluster, "run", 4, 359, 11, "--micro-batch-size", "40")
    cluster.finish([node])
    assert LENGTH % 359 == 1
    assert_same_run(cluster.run_dir, 4, 359, 11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "batch_size", "micro_batch_size"),
    [(1, 64, 5), (2, 64, 7), (2, 65, None), (3, 64, None), (3, 50, 4), (4, 359, None), (4, 718, 100), (4, 3, None)],
)
def test_agrees_with_a_plain_loop(
    cluster: Cluster, world_size: int, batch_size: int, micro_batch_size: int | None
) -> None:
    more = ("--micro-batch-size", str(micro_batch_size)) if micro_batch_size else ()
    steps = min(60, 2 * -(-LENGTH // batch_size) + 3)
    cluster.finish([ours(cluster, "run", world_size, batch_size, steps, *more)])
    assert_same_run(cluster.run_dir, world_size, batch_size, steps)


@pytest.mark.slow
def test_evaluation_is_exact_for_every_world_size(cluster: Cluster) -> None:
    """One snapshot, evaluated by 1, 2 and 3 workers (one of them has no part of the 360 images)."""
    source = cluster.path / "source"
    cluster.finish([cluster.start_alone("--snapshot-every", "20", "--max-steps", "21", run_dir=source)])
    [name] = [name for name in snapshot_names(source) if name.startswith("step-000000000020-")]
    nodes = []
    for world_size in (1, 2, 3):
        run_dir = cluster.path / str(world_size)
        shutil.copytree(source / "snapshots" / name, run_dir / "snapshots" / name)
        if world_size == 1:
            nodes.append(cluster.start_alone("--max-steps", "20", run_dir=run_dir))
        else:
            nodes += cluster.start("--max-steps", "20", run_dir=run_dir, nproc=world_size, port=free_port())
    cluster.finish(nodes)

    info_state = newest_snapshot(cluster.path / "1")[1]
    model = build_model("cnn", channels=1, classes=10, image_size=8)
    model.load_state_dict(info_state["model"])
    model.eval()
    test = load("digits", Path()).test
    assert test is not None
    images, labels = test.gather(torch.arange(360), 0)  # type: ignore[attr-defined]
    with torch.no_grad():
        correct = int((model(images).argmax(1) == labels).sum())
    said = set()
    for node, world_size in zip(nodes, (1, 2, 3), strict=True):
        run_dir = cluster.path / str(world_size)
        assert events(run_dir, "world")[0]["world_size"] == world_size
        assert result(run_dir)["test_accuracy"] == correct / 360
        said.add(next(line for line in node.text().splitlines() if "test_loss=" in line))
    assert len(said) == 1, "the loss is the same to its last printed digit too"
    assert len({result(cluster.path / str(world_size))["state_sha256"] for world_size in (1, 2, 3)}) == 1
