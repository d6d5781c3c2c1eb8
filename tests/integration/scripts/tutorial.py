"""A training script in the shape of PyTorch's own elastic tutorial; it knows nothing of elastic_train.

Usage: tutorial.py SNAPSHOT LOG STEPS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(snapshot: str, log: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot, weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["step"]
    for step in range(first, steps):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "step": step + 1}, f"{snapshot}.tmp")
            os.replace(f"{snapshot}.tmp", snapshot)
            with open(log, "a") as file:
                file.write(f"{step + 1} {world_size}\n")
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
