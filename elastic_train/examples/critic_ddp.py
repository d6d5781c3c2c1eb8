"""Train a painter of eight-line drawings with a critic: two modules, two optimizers, a schedule, an early end."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_train

PATIENCE = 5


class Referee:
    """Evaluates the painter after each epoch. Its state is in the extras, so newcomers and a next start get it."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.epochs, self.best, self.num_worse = 0, float("inf"), 0

    def look(self, training: elastic_train.Training, painter: nn.Module) -> None:
        painter.eval()
        with torch.no_grad():
            error = F.mse_loss(painter(self._data), self._data)
        painter.train()
        dist.broadcast(error, 0)  # BatchNorm statistics differ by rank, but all ranks must decide alike
        training.keep(-error.item())
        self.epochs, self.num_worse = training.state.epoch, self.num_worse + 1
        if error < self.best:
            self.best, self.num_worse = error.item(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs, self.best, self.num_worse = state["epochs"], state["best"], state["num_worse"]


def main() -> None:
    torch.manual_seed(0)
    painter = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64))
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(painter.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=50)
    lines = torch.eye(64)[torch.randint(0, 64, (1024, 8))].sum(1)
    referee = Referee(lines[:128])

    def train(training: elastic_train.Training) -> None:
        ddp, ddp_critic = training.parallel(), training.parallel(critic)
        for epoch in training.epochs():
            if referee.epochs < epoch:  # at the top, so that it is repeated if a peer is lost meanwhile
                referee.look(training, painter)
            if referee.num_worse >= PATIENCE:
                return
            for (real,) in training.batches():
                drawn = ddp(real)
                critic_optimizer.zero_grad()
                doubt = F.softplus(-ddp_critic(real)).mean() + F.softplus(ddp_critic(drawn.detach())).mean()
                doubt.backward()
                critic_optimizer.step()
                optimizer.zero_grad()
                loss = F.mse_loss(drawn, real) + 0.01 * F.softplus(-ddp_critic(drawn)).mean()
                loss.backward()
                optimizer.step()
                warm_up.step()
                training.commit(loss)
        referee.look(training, painter)

    extras = {"critic": critic, "critic_optimizer": critic_optimizer, "warm_up": warm_up, "referee": referee}
    elastic_train.run(train, painter, optimizer, TensorDataset(lines[128:]), elastic_train.parse_flags(), extras=extras)


if __name__ == "__main__":
    main()
