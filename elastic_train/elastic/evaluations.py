"""When the model is evaluated on the task's test set, by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.worker import Worker
from elastic_train.rules import Activity
from elastic_train.runlog.goodput import Phase
from elastic_train.training.collectives import gather_json
from elastic_train.training.evaluation import evaluate, find_no_sum
from elastic_train.training.reduction import share_buffers
from elastic_train.world import World


class Evaluations:
    """The evaluations of one worker; there are none where its task has no test set."""

    def __init__(self, worker: Worker, membership: Membership) -> None:
        self._worker, self._membership = worker, membership
        self._done: set[str] = set()
        """what this worker does once"""

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._done
        self._done.add(what)
        return is_first

    def if_missed(self, world: World) -> None:
        """Make up for an evaluation that the previous world has not completed; every rank calls this."""
        state = self._worker.state
        is_at_a_place = state.is_finished or (state.step > 0 and state.samples_done == 0)
        if not self._worker.task.test_set or not is_at_a_place:
            return
        # All ranks or none: a death in an evaluation can leave only some of them with a result.
        if not all(gather_json(state.evaluated_step == state.step)):
            self.if_due(world)

    def keep(self, world: World, metric: float) -> None:
        """Rate the model by rank 0's `metric`; every rank calls this."""
        watcher = self._membership.watcher
        if world.world_size > 1:  # use rank 0's, so that all have the same best
            watcher.do(Activity.REDUCE)
            metric = float(gather_json(metric)[0])
            watcher.do(Activity.COMPUTE)
        state, reporter = self._worker.state, self._worker.reporter
        self._rate(metric)
        if not self._worker.config.keep_best and self._is_first("hint"):
            reporter.report(
                "keep() rates the model, and no snapshot is kept for that: --keep-best 1 keeps the best one"
            )
        if math.isfinite(metric):
            reporter.rating(state.step, metric)
        elif world.rank == 0 and self._is_first("nothing is rated"):
            reporter.warn(f"keep() was given {metric} at step {state.step}: no finite number, so it rates nothing")

    def _rate(self, metric: float) -> None:
        ratings = self._worker.state.ratings
        if ratings.note(self._worker.state.step, metric):
            self._worker.reporter.best(ratings)

    def if_due(self, world: World) -> None:
        """Evaluate at every --eval-every epochs, and at the end of training. Every rank calls this after an epoch."""
        worker, config, state = self._worker, self._worker.config, self._worker.state
        test_set = worker.task.test_set
        # An empty test set has no means.
        if not test_set or not (state.is_finished or state.epoch % config.eval_every == 0):
            return
        watcher = self._membership.watcher
        model = state.averaged.model if state.averaged else state.model
        with state.clock.during(Phase.EVALUATE):
            watcher.do(Activity.REDUCE)
            if world.world_size > 1:
                share_buffers(model, partial(self._membership.sockets.require_unbroken, worker.device))
            warn = worker.reporter.warn
            with state.lock.released():
                if world.rank == 0 and self._is_first("sums are tried"):
                    watcher.do(Activity.COMPUTE)
                    wrong = find_no_sum(model, worker.task, test_set, worker.device, config, warn=warn)
                    if wrong is not None:
                        warn(wrong)
                metrics = evaluate(model, worker.task, test_set, world, worker.device, config, do=watcher.do, warn=warn)
        watcher.do(Activity.COMPUTE)
        state.evaluated_step, state.test_metrics = state.step, metrics
        odd = odd_numbers(metrics, state.step) if world.rank == 0 else {}
        for name in filter(self._is_first, odd):
            worker.reporter.warn(odd[name])
        if "accuracy" in metrics:
            self._rate(metrics["accuracy"])
        elif "loss" in metrics:
            self._rate(-metrics["loss"])
        elif config.keep_best and world.rank == 0 and self._is_first("nothing is rated"):
            worker.reporter.warn(
                '--keep-best keeps nothing: this task reports neither "correct" nor "loss", by whose means over the '
                "test set the best are chosen"
            )
        worker.reporter.evaluation(state)


def odd_numbers(metrics: Mapping[str, float], step: int) -> dict[str, str]:
    """Return warnings about metrics that cannot be right, by name; result.json has null for non-finite ones."""
    odd = {
        name: f"the test set's {name} is {value} at step {step}: training goes on; look at what the task's evaluate "
        "and summarize give"
        for name, value in metrics.items()
        if not math.isfinite(value)
    }
    accuracy = metrics.get("accuracy", 0.0)
    if "accuracy" not in odd and not 0 <= accuracy <= 1:
        odd["accuracy"] = (
            f'the test accuracy is {accuracy:.6g}, and must be from 0 to 1: if the task gives "correct", that must '
            "be the number of correct samples of the batch"
        )
    return odd
