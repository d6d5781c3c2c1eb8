"""The training function of `-m elastic_train`, which is also an example of one."""

from __future__ import annotations

from elastic_train.elastic.session import Training
from elastic_train.elastic.trainer import Program
from elastic_train.elastic.worker import Worker


def bundled(worker: Worker) -> Program:
    """Return the program that trains the worker's task."""
    loss = worker.task.loss

    def train(training: Training) -> None:
        for _epoch in training.epochs():
            for share in training.shares():
                training.commit(training.step(share, loss))
            training.evaluate_if_due()

    return Program(train, loss)
