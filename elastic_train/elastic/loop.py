"""The training loop with everything attached to it that goes with a world: reduction, evaluation, ledger, watcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from elastic_train.elastic.handover import Handover
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.worker import Worker
from elastic_train.errors import FormationFailed, first_line
from elastic_train.protocol.pace import FIRST_SECONDS
from elastic_train.rules import Activity
from elastic_train.runlog.goodput import Phase
from elastic_train.training.collectives import gather_json
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.evaluation import BLOCK_SAMPLES, evaluate, share_buffers
from elastic_train.training.group_sockets import require_unbroken
from elastic_train.training.ordered import OrderedReduction
from elastic_train.training.reduction import Clipping, FastReduction, Loss, Reduction, Share, StepTotals
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import StateComparison
from elastic_train.training.train import (
    JOINING,
    NO_VOTES,
    Outcome,
    StepResult,
    Votes,
    autocast_of,
    drop_gradients,
    task_loss,
    train,
)
from elastic_train.world import World


def votes_of(worker: Worker, membership: Membership) -> Votes:
    """What this rank contributes to the decisions of the step in hand."""
    membership.note_reduction()
    told_to_stop, leaving = worker.stop.votes()
    # Where no peer is lost a vote ends the world: gloo may never end a collective that is cut while all work on it.
    return told_to_stop, leaving or int(membership.watcher.is_store_lost), membership.join_vote()


@dataclass(frozen=True)
class Beginning:
    """What is under way when a world begins."""

    handover: Handover | None = None
    """is to be finished before the first step's gradient is applied"""
    comparison: StateComparison | None = None
    """is to be made within the first step that all ranks begin with a state"""
    is_handed_over: bool = False
    """whether some rank, not this one perhaps, gets its state within the first step"""


ALONE = Beginning()
"""of a world in which there is nobody to hand the state to, or to compare it with"""


class WorldLoop(Protocol):
    """What trains in one world after the other."""

    step_started: float
    """when the step in hand was begun, by the monotonic clock"""
    last_votes: Votes
    """what this rank said in the last step"""

    compares_states: bool
    """whether this worker's state hashes to what the others' does"""

    has_room_for_handover: bool
    """whether newcomers may take part in a step without samples, and get the state while it is computed"""

    def run(self, world: World, steps: Iterable[Share], begin: Beginning = ALONE) -> Outcome:
        """Train in `world` over the steps that it is given; every rank calls it. `begin` says what is to be finished
        before a gradient is applied.

        Raises:
            StatesDiffer: not all ranks hold the same state; the step in hand does not count.
        """
        ...

    def warm_up(self) -> None:
        """Do what the first step would take longer for, as far as it needs nobody else; the state is of no use yet."""
        ...

    def evaluate_if_missed(self, world: World) -> None:
        """Make up for an evaluation that a death has interrupted; every rank calls it."""
        ...

    def abandon(self) -> None:
        """Put the state back to a commit, on another thread: the one that trains waits, and will not come back.

        Raises:
            TrainingDiverged: the newest commit is not worth to be saved.
        """
        ...

    def close(self) -> None:
        """It trains no more: nothing of it stays attached to the state."""
        ...


class Loop:
    """Runs train.train() in one world after the other: a `WorldLoop`."""

    def __init__(self, worker: Worker, membership: Membership, saver: Saver) -> None:
        self._worker = worker
        self._membership = membership
        self._saver = saver
        self.step_started = time.monotonic()
        self.last_votes: Votes = NO_VOTES
        self.compares_states = True
        # A SyncBatchNorm would take a sample of the newcomer's into everybody's statistics.
        modules = worker.state.model.modules()
        self.has_room_for_handover = worker.config.reduction == "fast" and not any(
            isinstance(module, nn.SyncBatchNorm) for module in modules
        )
        self._loss = task_loss(
            worker.task,
            seed=worker.config.seed,
            precision=worker.config.precision,
            device=worker.device,
            stand_in=stand_in_batch(worker),
        )

    def run(self, world: World, steps: Iterable[Share], begin: Beginning = ALONE) -> Outcome:
        """As `WorldLoop.run`. Raises: what train.train() does."""
        return self.over(world, begin)(steps)

    def over(self, world: World, begin: Beginning = ALONE) -> Callable[[Iterable[Share]], Outcome]:
        """The same for several stretches of steps in one world: what is built for the world is built once."""
        worker, state = self._worker, self._worker.state
        state.set_modes()
        if worker.config.compile:  # for every world anew: the shapes of the shares are others
            self._membership.watcher.pace.expect_first_step()
        reduction = self._make_reduction(world, begin)
        evaluate_if_due = self.make_evaluate(world)
        observer = LoopObserver(self, worker, self._membership, world)
        return lambda steps: train(
            state,
            steps,
            reduction,
            self._loss,
            evaluate_if_due,
            self._saver,
            self._votes,
            world.world_size,
            observer,
        )

    def warm_up(self) -> None:
        """As `WorldLoop.warm_up`: a forward and a backward pass over one sample that counts for nothing."""
        state = self._worker.state
        if self._worker.config.compile:
            return  # for the shapes of a step, not for this one
        state.set_modes()
        nothing = MicroBatch(0, 0, 0, np.zeros(0, dtype=np.int64), 1, is_last=True)
        self._loss(state.model, nothing, None).backward()  # type: ignore[no-untyped-call]
        drop_gradients(state.optimizer)

    def abandon(self) -> None:
        """As `WorldLoop.abandon`."""
        self._worker.state.rollback()

    def close(self) -> None:
        """As `WorldLoop.close`: nothing is."""

    def _votes(self) -> Votes:
        self.last_votes = votes_of(self._worker, self._membership)
        return self.last_votes

    def _make_reduction(self, world: World, begin: Beginning) -> Reduction:
        worker, state = self._worker, self._worker.state
        config, model = worker.config, state.model
        reduction: Reduction
        if config.reduction == "ordered":
            reduction = OrderedReduction(
                model,
                world,
                worker.device,
                config.virtual_ranks,
                do=self._membership.watcher.do,
            )
        else:
            reduction = FastReduction(
                nn.DataParallel(model) if config.parallel == "dp" else model,
                world,
                worker.device,
                find_unused_parameters=config.find_unused_parameters,
                static_graph=config.static_graph,
                num_votes=len(NO_VOTES),
                do=self._membership.watcher.do,
            )
        compare_states = partial(compare, loop=self, worker=worker, membership=self._membership)
        reduction = UnbrokenReduction(reduction, self._membership, begin, compare_states)
        if config.clip_grad_norm is not None:  # on the outside: gradients are unscaled once, if the step counts
            reduction = Clipping(reduction, state.optimizer, state.scaler, config.clip_grad_norm)
        return reduction

    def evaluate_if_missed(self, world: World) -> None:
        """The evaluation that the world before did not live to complete; every rank calls it."""
        state = self._worker.state
        is_at_a_place = state.is_finished or (state.step > 0 and state.samples_done == 0)
        # Together or not at all: a death in an evaluation can leave some with its result and some without.
        if is_at_a_place and not all(gather_json(state.evaluated_step == state.step)):
            self.make_evaluate(world)(state)

    def make_evaluate(self, world: World) -> Callable[[TrainState], None]:
        """The evaluation that the loop calls at the end of every epoch, and of training."""
        worker, config = self._worker, self._worker.config
        test_set = worker.task.test_set
        # Not that of the first world, which the state has: the sums must not depend on it.
        block_samples = min(BLOCK_SAMPLES, config.micro_batch_size or config.global_batch_size)

        def evaluate_if_due(state: TrainState) -> None:
            # Over an empty one there are no means.
            if not test_set or not (state.is_finished or state.epoch % config.eval_every == 0):
                return
            watcher = self._membership.watcher
            model = state.averaged.model if state.averaged else state.model
            with state.clock.during(Phase.EVALUATE):
                watcher.do(Activity.REDUCE)
                share_buffers(model, world, self._membership.sockets)
                found = evaluate(
                    model,
                    worker.task,
                    test_set,
                    world,
                    worker.device,
                    config,
                    block_samples=block_samples,
                    autocast=autocast_of(config.precision, worker.device),
                    do=watcher.do,
                )
            watcher.do(Activity.COMPUTE)
            state.evaluated_step = state.step
            if found.accuracy is not None:
                state.last_accuracy = (state.step, found.accuracy)
            worker.reporter.evaluation(state, found.metrics)

        return evaluate_if_due


class UnbrokenReduction:
    """A reduction that tells the watcher when it is over, and counts only if the group was not broken off meanwhile.

    gloo raises of itself then; NCCL's collectives, once aborted, end with garbage and no error.
    """

    def __init__(
        self,
        reduction: Reduction,
        membership: Membership,
        begin: Beginning = ALONE,
        compare: Callable[[StateComparison], None] = lambda _comparison: None,
    ) -> None:
        self._reduction = reduction
        self._compare = compare
        self._sockets, self._watcher = membership.sockets, membership.watcher
        self._handover, self._comparison = begin.handover, begin.comparison
        self._is_handed_over = begin.is_handed_over
        if self._handover is not None:
            self._handover.begin()

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        """As `Reduction.run`. Raises: FormationFailed where the group was broken off. StatesDiffer."""
        comparison = None
        if not self._is_handed_over:
            comparison, self._comparison = self._comparison, None
        self._is_handed_over = False
        if comparison is not None:
            comparison.begin()
        try:
            totals = self._reduction.run(micro_batches, loss, scale, votes)
        except Exception as error:
            if self._sockets.is_shut and not is_communication_error(error):  # what it was computed from is garbage
                raise FormationFailed(f"the process group was broken off: {first_line(error)}") from error
            raise
        handover, self._handover = self._handover, None
        if handover is not None:
            self._watcher.do(Activity.FORM, FIRST_SECONDS)  # a large state takes its time
            handover.finish(self._require_unbroken)
        if comparison is not None:
            self._compare(comparison)
        self._watcher.do(Activity.COMPUTE)  # the optimizer's step waits for nobody
        self._require_unbroken()
        return totals

    def _require_unbroken(self) -> None:
        require_unbroken(self._sockets)


def compare(comparison: StateComparison, loop: WorldLoop, worker: Worker, membership: Membership) -> None:
    """Wait for this rank's hash, then for the others'. Raises: as `StateComparison.compare`; FormationFailed."""
    membership.watcher.do(Activity.FORM, FIRST_SECONDS)  # a large state takes its time
    comparison.finish_hash(lambda: require_unbroken(membership.sockets))
    membership.watcher.do(Activity.REDUCE)
    comparison.compare()
    optimizer = type(worker.state.optimizer).__name__
    if comparison.why_not is not None:
        worker.reporter.warn(
            f"states are not compared: {optimizer} or the model cannot be hashed: {comparison.why_not}"
        )
        loop.compares_states = False
    if comparison.is_lost_in_loading:  # on every rank alike
        worker.reporter.debug(f"states are not compared from here on: {optimizer} changes its state when it is loaded")
        loop.compares_states = False


class LoopObserver:
    """Tells the ledger, the reporter and the watcher what the loop does."""

    def __init__(self, loop: WorldLoop, worker: Worker, membership: Membership, world: World) -> None:
        self._loop, self._worker, self._world = loop, worker, world
        self._membership = membership
        self._watcher = membership.watcher
        self._reporter = worker.reporter
        self._committed_at = time.monotonic()

    def before_reduction(self, micro_batches: Share) -> None:
        self._loop.step_started = time.monotonic()
        self._worker.reach("step", self._world)
        self._watcher.do(Activity.COMPUTE)
        if self._reporter.ledger is not None:
            first = micro_batches[0][0]
            self._reporter.ledger.write(
                epoch=first.epoch,
                step=first.step,
                world=self._world,
                indices=[micro_batch.indices for micro_batch, _ in micro_batches],
            )

    def after_commit(self, state: TrainState, result: StepResult, micro_batches: Share) -> None:
        self.tell_commit(state, result.loss, micro_batches[0][0])
        self.note_commit()
        self.follow_votes(result.votes)

    def tell_commit(self, state: TrainState, loss: float, first: MicroBatch) -> None:
        """The newest step is committed, and this its mean loss; `first` is one of its micro-batches."""
        self._reporter.step(state, loss, epoch=first.epoch, samples=first.step_samples)

    def note_commit(self) -> None:
        """A step is committed; its loss may not be known yet."""
        self._worker.reach("commit", self._world)
        watcher = self._watcher
        watcher.do(Activity.COMPUTE)
        now = time.monotonic()
        watcher.pace.note_step(now - self._loop.step_started, now - self._committed_at)
        self._committed_at = now
        self._loop.step_started = now

    @property
    def seconds_since_commit(self) -> float:
        """Since this rank's commit before the step in hand, or since its world began."""
        return time.monotonic() - self._committed_at

    def follow_votes(self, votes: tuple[int, ...]) -> None:
        """What all have said in a step, once that is known."""
        self._membership.follow_join_vote(self._world, votes[JOINING])


def stand_in_batch(worker: Worker) -> Callable[[], Any]:
    """Makes a batch of the first sample, for a rank that has none in a step."""
    dataset = EpochDataset(worker.task.train_set, seed=worker.config.seed, collate=worker.task.collate)

    return partial(dataset.read, np.zeros(1, dtype=np.int64))
