"""Steps computed here from a loss: forward, backward, one reduction that includes the votes, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.config import Config
from elastic_train.elastic.handover import Handover
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.pass_checks import PassChecks
from elastic_train.elastic.states_check import StateChecks
from elastic_train.elastic.step_sums import EVERY
from elastic_train.elastic.worker import Worker
from elastic_train.errors import ElasticTrainError, UsageError, first_line
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Activity
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.kept import leave_no_trace
from elastic_train.training.loader_processes import read_apart
from elastic_train.training.optimizers import parameters_beside, parameters_of
from elastic_train.training.ordered import OrderedReduction
from elastic_train.training.reduction import (
    FastReduction,
    Loss,
    Reduction,
    Share,
    StepTotals,
    why_alone,
    without_gradient,
)
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state_hash import StateComparison
from elastic_train.training.step import (
    NO_VOTES,
    OF_UPDATE,
    Votes,
    clip_gradients,
    drop_gradients,
    seed_model_draws,
    task_loss,
    train_step,
)
from elastic_train.wording import named
from elastic_train.world import World

MODEL_ALONE = (
    "training.step trains the model alone: make one module of all that is trained, or loop over training.batches()"
)
BatchLoss = Callable[[nn.Module, Any], torch.Tensor]
"""(module, batch) -> mean loss over the batch's samples, a scalar"""


@dataclass(frozen=True)
class Beginning:
    """What is still to be finished when a world begins."""

    finish_claim: Callable[[], None] | None = None
    """blocks until the run directory is this generation's, before the first step counts; raises where it is not"""
    handover: Handover | None = None
    """finished before the first step's gradient is applied"""
    comparison: StateComparison | None = None
    """made within the first step in which all ranks begin with a state"""
    first_ranks: int | None = None
    """number of ranks, the lowest ones, with samples in the first step: the others get their state in it; None: all"""

    def wait_for_claim(self, watcher: Watcher) -> None:
        if self.finish_claim is not None:
            watcher.do(Activity.FORM, FIRST_SECONDS)  # a disk may be slow
            self.finish_claim()


ALONE = Beginning()
"""of a world with no other member to give the state to, or to compare it with"""


class WholeSteps:
    """Computes whole steps in one world. It is the `Reduction` of its steps, and wraps the one of --reduction.

    It tells the watcher when that ends, and raises if the group was aborted meanwhile. gloo raises by itself; an
    aborted NCCL collective ends with garbage and no error.

    Args:
        begin: finished within the first steps.
        states: compares the states that the ranks have begun with.
        stand_in: makes a batch of one sample, for a rank without samples in a step; its weight is 0.
        votes: of this rank, called once a step.
        passes: of the worker, for all its worlds.
    """

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        world: World,
        begin: Beginning,
        states: StateChecks,
        stand_in: Callable[[], Any],
        votes: Callable[[], Votes],
        passes: PassChecks,
    ) -> None:
        self._worker, self._membership, self._world = worker, membership, world
        self._begin, self._states, self.stand_in, self._votes, self._passes = begin, states, stand_in, votes, passes
        self._reduction: Reduction | None = None
        self._others: list[nn.Parameter] = []
        """parameters that are trained and outside of the model: no reduction sums their gradients"""
        self._beside: list[nn.Parameter] = []
        """parameters of the model that are not the first optimizer's, which drops the gradients of its own alone"""
        self._trained_beside: list[nn.Parameter] = []
        """those of them that another optimizer trains"""
        self._loss: tuple[BatchLoss, Loss] | None = None
        self._looks = self._has_looked = False
        """whether to search for unused parameters, which would keep other workers out; whether that was done once"""

    def prepare(self) -> Reduction:
        """Return the reduction; makes it at the first call. Every rank calls this."""
        if self._reduction is None:
            self._looks = why_closed_in(self._worker, self._world) == ""
            state = self._worker.state
            self._others = parameters_beside([state.model], state.kept.updates.optimizers)
            own = set(map(id, parameters_of(state.optimizer)))
            self._beside = [one for one in state.model.parameters() if id(one) not in own]
            trained = state.kept.updates.owned
            self._trained_beside = [one for one in self._beside if id(one) in trained]
            if state.scaler is not None and self._trained_beside:
                raise UsageError(
                    "--precision fp16 scales for the optimizer that run() was given, and another one in the extras "
                    "trains a part of the model: take bf16, or loop over training.batches(), with a GradScaler there"
                )
            self._reduction = _make_reduction(self._worker, self._membership, self._world)
            if self._begin.handover is not None:
                self._begin.handover.begin()
        return self._reduction

    @property
    def is_comparing(self) -> bool:
        """Whether the states that the ranks have begun with are still to be compared."""
        return self._begin.comparison is not None

    def step(self, share: Share, loss: BatchLoss) -> StepTotals:
        """Compute a step, which is then applied and not committed. Blocks until every rank has taken part.

        Raises:
            TrainingDiverged, StatesDiffer: on every rank alike; the weights are those before the step.
            RuntimeError, FormationFailed: a peer is lost. UsageError: as `run`.
        """
        votes = self._votes()
        self.prepare()
        if self._loss is None or self._loss[0] is not loss:
            self._loss = loss, batch_loss(self._worker, self.stand_in, loss)
        return train_step(self._worker.state, share, self, self._loss[1], votes)

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        """Do as `Reduction.run`. Raises: FormationFailed where the group was aborted. StatesDiffer. UsageError where
        the loss trains parameters outside of the model; as `PassChecks.look`."""
        reduction, begin = self.prepare(), self._begin
        comparison = begin.comparison if begin.first_ranks is None else None
        if comparison is not None:
            comparison.begin()
        for one in self._beside:
            one.grad = None  # of the step before
        gradients = self._gradients_beside()
        self._passes.note()
        try:
            totals = reduction.run(micro_batches, loss, scale, votes)
        except UsageError:
            self._passes.require_same_trained()  # DDP does not know the cause where a parameter was frozen meanwhile
            raise
        if gradients != self._gradients_beside():
            shapes = [str(tuple(one.shape)) for one in self._others if one.grad is not None]
            raise UsageError(f"the loss trains {named(shapes)} beside the model, and {MODEL_ALONE}")
        self._passes.look()
        if self._looks:
            self._look_for_unused(self._worker.state.step + 1)
        self._finish(begin)
        if comparison is not None:
            self._states.finish(comparison)
        self._begin = ALONE if begin.first_ranks is None else Beginning(comparison=begin.comparison)
        self._membership.watcher.do(Activity.COMPUTE)  # the optimizer's step does not wait for other ranks
        self._membership.sockets.require_unbroken()
        self._clip()
        # What an optimizer draws (noise, stochastic rounding) must be the same on every rank, as must its update.
        seed_model_draws(self._worker.config.seed, self._worker.state.step + 1, OF_UPDATE, self._worker.device)
        return totals

    def _gradients_beside(self) -> list[tuple[int, int]]:
        """Return a value for each gradient of `_others`; it changes with any addition to that gradient."""
        gradients = [one.grad for one in self._others]
        return [(0, 0) if one is None else (id(one), one._version) for one in gradients]

    def _finish(self, begin: Beginning) -> None:
        """Finish, in a world's first step, what was under way when the world began."""
        watcher = self._membership.watcher
        begin.wait_for_claim(watcher)
        if begin.handover is not None:
            watcher.do(Activity.FORM, FIRST_SECONDS)  # a large state takes long
            begin.handover.finish(self._membership.sockets.require_unbroken)

    def _look_for_unused(self, step: int) -> None:
        """Search for parameters without a gradient, in the first step and every 100th. A lone worker trains without
        these gradients. DDP waits for all of them, so the first step with another worker would end the job."""
        if self._has_looked and step % EVERY:
            return
        why = None
        if unused := without_gradient(self._worker.state.model):
            why = (
                f"{named(unused)} got no gradient, and with several workers DDP waits for all: no other node can be "
                "admitted; stop all and start them with --find-unused-parameters, or freeze what is not trained"
            )
            if not self._has_looked:
                self._worker.reporter.warn(why)
        self._membership.joins.why_closed = why  # in one assignment: the watcher thread may read it at any time
        self._has_looked = True

    def _clip(self) -> None:
        """Clip the gradients, only in a step that counts: they are unscaled once."""
        limit, state = self._worker.config.clip_grad_norm, self._worker.state
        if limit is not None:
            clip_gradients(state.optimizer, state.scaler, limit, self._trained_beside)


def batch_loss(worker: Worker, stand_in: Callable[[], Any], loss: BatchLoss) -> Loss:
    """Return `loss` for one micro-batch, with the flags' precision and the micro-batch's random numbers."""
    config = worker.config
    return task_loss(
        worker.task, seed=config.seed, precision=config.precision, device=worker.device, stand_in=stand_in, loss=loss
    )


def is_tried_first(worker: Worker, world: World) -> bool:
    """Whether a lone worker's first step shows if other workers can take part: until then none is admitted."""
    is_alone = world.world_size == 1 and worker.launch.is_open
    trains = world.num_nodes >= world.min_nodes  # else it waits for nodes, and makes no step
    return is_alone and trains and waits_for_all(worker.config)


def why_closed_in(worker: Worker, world: World) -> str | None:
    """Return why this worker admits no other to a world that it has alone; "" until a step has shown if it can."""
    why = why_alone(worker.state.model) if world.world_size == 1 else None
    return why or ("" if is_tried_first(worker, world) else None)


def waits_for_all(config: Config) -> bool:
    """Whether DDP waits for a gradient of every parameter in every step."""
    return config.reduction == "fast" and not (config.find_unused_parameters or config.static_graph)


def warm_up(worker: Worker, stand_in: Callable[[], Any], loss: BatchLoss) -> None:
    """Make a forward and a backward pass over one sample, without any lasting effect."""
    state = worker.state
    state.modes.put_back()
    nothing = MicroBatch(0, 0, 0, np.zeros(0, dtype=np.int64), 1, is_last=True)
    put_back = leave_no_trace(state.model)
    try:
        batch_loss(worker, stand_in, loss)(state.model, nothing, None).backward()  # type: ignore[no-untyped-call]
    except ElasticTrainError:
        raise
    except Exception as error:  # of the user's code; the step will raise it again, and it is judged there
        worker.reporter.debug(f"no warm-up: {first_line(error)}")
    finally:
        put_back()
    drop_gradients(state.optimizer)


def stand_in_batch(worker: Worker) -> Callable[[], Any]:
    """Return a function that makes a batch of the first sample, for a rank without samples in a step. With loader
    processes the sample is read once, and each batch is a copy."""
    config = worker.config
    dataset = EpochDataset(worker.task.train_set, seed=config.seed, collate=worker.task.collate)

    def read() -> Any:
        [batch] = read_apart(dataset, [np.zeros(1, dtype=np.int64)], config, worker.reporter.warn)
        return batch

    if config.num_workers == 0:
        return read
    kept = cache(read)
    return lambda: deepcopy(kept())


def _make_reduction(worker: Worker, membership: Membership, world: World) -> Reduction:
    config, model, do = worker.config, worker.state.model, membership.watcher.do
    if config.reduction == "ordered":
        return OrderedReduction(model, world, worker.device, config.virtual_ranks, do=do)
    return FastReduction(
        nn.DataParallel(model) if config.parallel == "dp" else model,
        world,
        worker.device,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        num_votes=len(NO_VOTES),
        do=do,
    )
