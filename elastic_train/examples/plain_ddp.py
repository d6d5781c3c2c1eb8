"""Learns the parity of binary numbers with DDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset) -> None:
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")


def parity(bits: int) -> TensorDataset:
    numbers = torch.arange(2**bits).unsqueeze(1).bitwise_right_shift(torch.arange(bits)) % 2
    return TensorDataset(numbers.float(), numbers.sum(1) % 2)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, parity(bits=10))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
