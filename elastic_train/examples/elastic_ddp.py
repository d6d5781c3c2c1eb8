"""Learns the parity of binary numbers with DDP."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastic_train


def train(training: elastic_train.Training) -> None:
    ddp, optimizer = training.parallel(), training.optimizer
    for epoch in training.epochs():
        for inputs, labels in training.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            training.commit(loss)
        if training.world.rank == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")


def parity(bits: int) -> TensorDataset:
    numbers = torch.arange(2**bits).unsqueeze(1).bitwise_right_shift(torch.arange(bits)) % 2
    return TensorDataset(numbers.float(), numbers.sum(1) % 2)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    elastic_train.run(train, model, optimizer, parity(bits=10), elastic_train.parse_flags())


if __name__ == "__main__":
    main()
