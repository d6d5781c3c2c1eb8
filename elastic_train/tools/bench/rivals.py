"""What a good user would run in place of this package, and without it.

Each rival trains the bundled job of a drill, and writes its steps as the events of a run.

    torchrun ... --no-python python -m elastic_train.tools.bench.rivals restarts --run-dir RUN_DIR
    python -m elastic_train.tools.bench.rivals replicas LIGHTHOUSE NUMBER NUM_REPLICAS --run-dir RUN_DIR
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic_train.runlog.events import JsonLines, file_name
from elastic_train.tools.drills.task import PacedDigits
from elastic_train.world import host_name

BATCH_PER_RANK = 21
"""samples; three ranks have about our default global batch"""
SNAPSHOT_EVERY = 20
"""steps"""
TIMEOUT = timedelta(seconds=5)

task = PacedDigits()


def build_model() -> nn.Module:
    """Build the model, with the same weights on every rank."""
    torch.manual_seed(0)
    return task.build_model()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def endless(loader: DataLoader[Any], sampler: DistributedSampler[Any], epoch: int) -> Iterator[tuple[int, Any]]:
    """Yield (epoch, batch) from the beginning of an epoch on, without end: a rival trains until it is killed."""
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch
        epoch += 1


class StepLog:
    """The `step` events of one process, all of generation 0: goodput needs only times and world sizes."""

    def __init__(self, run_dir: Path) -> None:
        self._identity = {"pid": os.getpid(), "host": host_name()}
        self._lines = JsonLines(run_dir / "events" / file_name(host_name(), 0, os.getpid()))

    def write(self, step: int, epoch: int, world_size: int, loss: Tensor) -> None:
        """Write a step, once the optimizer has stepped; only one rank may call it."""
        line = {"time": time.time(), "event": "step", "rank": 0, "world_size": world_size, "generation": 0}
        self._lines.write(line | self._identity | {"step": step, "epoch": epoch, "loss": loss.item()})


def restarts(run_dir: Path) -> None:
    """DDP as in PyTorch's tutorial on fault-tolerant training: with snapshots, and torchrun restarts all workers.

    https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html. Unlike there, a snapshot is written
    about every second, and never torn.
    """
    snapshot, draft = run_dir / "snapshot.pt", run_dir / "snapshot.tmp"
    dist.init_process_group("gloo")
    model = build_model()
    optimizer = build_optimizer(model)
    step = first_epoch = 0
    if snapshot.exists():
        found = torch.load(snapshot, map_location="cpu")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step, first_epoch = found["step"], found["epoch"]
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[object] = DistributedSampler(task.train_set)
    loader = DataLoader(task.train_set, BATCH_PER_RANK, sampler=sampler)
    log = StepLog(run_dir)
    for epoch, batch in endless(loader, sampler, first_epoch):
        optimizer.zero_grad()
        loss = task.loss(ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            log.write(step, epoch, dist.get_world_size(), loss)
            if step % SNAPSHOT_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step, "epoch": epoch}, draft)
                draft.replace(snapshot)


def replicas(run_dir: Path, lighthouse: str, number: int, num_replicas: int) -> None:
    """DDP over torchft's replicas: a death costs a step, and the other replicas heal a new one while they train.

    After the example of torchft's README, with the shortest timeouts with which it still works.
    """
    import torchft

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = build_model()
    inner = build_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"node{number}",
        hostname="localhost",
    )
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    sampler = torchft.DistributedSampler(task.train_set, number, num_replicas, group_rank=0, num_replicas=1)
    loader = DataLoader(task.train_set, BATCH_PER_RANK, sampler=sampler)
    log = StepLog(run_dir)
    for epoch, batch in endless(loader, sampler, 0):
        optimizer.zero_grad()
        loss = task.loss(ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before and manager.participating_rank() == 0:
            log.write(manager.current_step(), epoch, manager.num_participants(), loss)


if __name__ == "__main__":
    name, *others, _, folder = sys.argv[1:]
    if name == "restarts":
        restarts(Path(folder))
    else:
        replicas(Path(folder), others[0], int(others[1]), int(others[2]))
