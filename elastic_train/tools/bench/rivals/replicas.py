"""DDP over torchft's replicas: who dies costs a step, and who comes is healed by the others while they train.

After the example of its README; its timeouts are as short as it still works with.

    python -m elastic_train.tools.bench.rivals.replicas RUN_DIR LIGHTHOUSE NUMBER NUM_REPLICAS
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from elastic_train.tools.bench.rivals.rival_job import (
    BATCH_PER_RANK,
    StepLog,
    build_model,
    build_optimizer,
    endless,
    task,
)

TIMEOUT = timedelta(seconds=5)


def main() -> None:
    run_dir, lighthouse, number, num_replicas = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = build_model()
    inner = build_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
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
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    sampler = DistributedSampler(task.train_set, number, num_replicas, group_rank=0, num_replicas=1)
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
    main()
