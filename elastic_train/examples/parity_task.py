"""A task: only what is trained. Run it from this folder:

torchrun --rdzv-backend=c10d --nnodes 1:4 -m elastic_train --task parity_task:Parity --bits 10 --epochs 60
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastic_train import Task


@dataclass
class Flags:
    bits: int = 8
    """length of the numbers"""
    hidden: int = 64
    """width of the hidden layer"""


class Parity(Task):
    def __init__(self, flags: Flags) -> None:
        self.flags = flags

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.flags.bits, self.flags.hidden), nn.ReLU(), nn.Linear(self.flags.hidden, 2))

    def train_dataset(self) -> Dataset[tuple[torch.Tensor, ...]]:
        bits = torch.arange(2**self.flags.bits).unsqueeze(1).bitwise_right_shift(torch.arange(self.flags.bits)) % 2
        return TensorDataset(bits.float(), bits.sum(1) % 2)
