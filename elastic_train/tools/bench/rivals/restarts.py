"""DDP as PyTorch's tutorial on fault-tolerant training has it: snapshots, and torchrun restarts everybody.

https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html. Unlike there a snapshot is written every
second or so, and never torn.

    torchrun ... --no-python python -m elastic_train.tools.bench.rivals.restarts RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic_train.tools.bench.rivals.rival_job import (
    BATCH_PER_RANK,
    StepLog,
    build_model,
    build_optimizer,
    endless,
    task,
)

SNAPSHOT_EVERY = 20
"""steps"""


def main() -> None:
    run_dir = Path(sys.argv[1])
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


if __name__ == "__main__":
    main()
