"""A program with a training function of its own, whose steps are computed by the flags."""

from __future__ import annotations

COMMIT = "            training.commit(training.step(share, loss))\n"
SCRIPT = """
import time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

torch.manual_seed(0)
numbers = torch.linspace(-1, 1, 98).unsqueeze(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(module, batch):
    inputs, targets = batch
    return F.mse_loss(module(inputs).float(), targets)


def train(training):
    for epoch in training.epochs():
        for share in training.shares():
            training.commit(training.step(share, loss))


elastic_train.run(train, model, optimizer, TensorDataset(numbers, numbers.square()), elastic_train.parse_flags())
"""
