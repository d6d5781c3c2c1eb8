"""A collective of a function's own is broken off when some ranks have its answer and others have not: what they do by
it between two steps is done on some of them alone."""

from __future__ import annotations

import json
import signal

from tests.integration.cluster import Cluster, check_ledger, events
from tests.integration.test_own_loop import start_workers

SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import TensorDataset
import elastic_train

numbers = torch.linspace(-1, 1, 64).unsqueeze(1)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
answered = Path("answered")


def train(training):
    ddp, world = training.parallel(), training.world
    if world.generation == 1:
        rates = [group["lr"] for group in optimizer.param_groups]
        Path(f"rank-{world.rank}.json").write_text(json.dumps([training.state.step, rates, scheduler.last_epoch]))
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            optimizer.zero_grad()
            loss = (ddp(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            training.commit(loss)
        if world.generation == 0 and epoch == 2:
            if world.rank == 2:
                dist.send(torch.zeros(1), 0)
                while not answered.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.recv(torch.zeros(1), 2)
            answered.touch()
        scheduler.step()


elastic_train.run(train, model, optimizer, TensorDataset(numbers, numbers), elastic_train.parse_flags(),
                  extras={"scheduler": scheduler})
"""


def test_a_scheduler_that_has_stepped_on_one_survivor_alone(cluster: Cluster) -> None:
    nodes = start_workers(cluster, 3, SCRIPT, "--snapshot-every", "0")
    codes = [node.wait(120) for node in nodes]
    assert codes == [0, 0, -signal.SIGKILL], [node.text()[-2000:] for node in nodes]
    began = [json.loads((cluster.path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert began == [[12, [0.1 * 0.5**3], 3]] * 2
    run_dir = cluster.path / "run-3"
    [warning] = [one["message"] for one in events(run_dir, "warning") if "over its state" in one["message"]]
    assert "had other optimizer settings, scheduler than" in warning
    assert events(run_dir, "states_differ") == []
    check_ledger([run_dir], length=64, batch=16, steps=20)
