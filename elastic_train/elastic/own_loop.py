"""A training loop of one's own, made elastic: `run` enters a training function anew for every world.

    def train(training: elastic_train.Training) -> None:
        ddp = training.parallel()
        for epoch in training.epochs():
            for inputs, labels in training.batches():
                ...
                training.commit(loss)

    elastic_train.run(train, model, optimizer, dataset)

Everything around the loop is what `-m elastic_train` has: membership, recovery, snapshots, events, the ways out.
"""

# Without postponed annotations: DDP compares those of a communication hook with its own types.

import math
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate
from torch.utils.hooks import RemovableHandle

from elastic_train.config import Config, check, flag, parse
from elastic_train.elastic.loop import ALONE, Beginning, LoopObserver, compare, stand_in_batch, votes_of
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.elastic.recovery import run_worker
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.worker import Parts, Worker, build
from elastic_train.errors import ElasticTrainError, FormationFailed, TrainingDiverged, UsageError, tell
from elastic_train.protocol.pace import FIRST_SECONDS
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import NOW, Activity
from elastic_train.stopping import StopSignal, die_with_parent
from elastic_train.system import require_system_for_training
from elastic_train.training.collectives import gather_json, reduced, wait
from elastic_train.training.epoch_dataset import length_of
from elastic_train.training.group_sockets import require_unbroken
from elastic_train.training.reduction import Share, hush_statistics, share_buffers
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import Stateful, TrainState
from elastic_train.training.state_hash import hash_of_plain
from elastic_train.training.tasks import Task
from elastic_train.training.train import NO_VOTES, Outcome, Votes, seed_model_draws
from elastic_train.world import World

NOT_FOR_OWN_LOOPS = (
    "dataset", "data_dir", "download", "model", "task", "optimizer", "lr", "momentum", "weight_decay", "schedule",
    "precision", "device", "reduction", "virtual_ranks", "strict", "micro_batch_size", "eval_every",
    "init_from", "clip_grad_norm", "ema_decay", "channels_last", "parallel", "spawn", "find_unused_parameters",
    "static_graph", "compile",
)  # fmt: skip
"""flags that say what the bundled loop trains and how; a training function of one's own decides that itself"""


EVERY = 100
"""steps from one that waits for all ranks, to compare the extras, to the next, where no snapshots are taken"""
LONG_STEP_SECONDS = 1.0
"""steps that take as long wait for all ranks: it costs little, and a grace period may be short"""
MAX_HASH = 2**20
"""of the extras: the sum of the squares of thousands is exact in float64"""


class _WorldEnds(BaseException):
    """Unwinds a training function in which all ranks have agreed to stop; no Exception, which it might catch."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Training:
    """What a training function is given: one world, and the run's state in it.

    All of its methods but `say` are for every rank alike, in the thread that trains. A lost peer shows as an exception
    inside a step, or when the next batch is asked for; `run` then enters the function again, in the next world. So the
    function keeps nothing of a world (its DDP module, collectives in flight) anywhere but in its local variables, and
    lets exceptions pass that it does not know.
    """

    def __init__(self, loop: "OwnLoop", worker: Worker, membership: Membership, world: World, steps: Iterable[Share]):
        self.world = world
        """rank, world_size, local_rank, generation, members; `rank` is another one in every world"""
        self.state: TrainState = worker.state
        """model, optimizer, and the position: `epoch` (from 0), `step` (committed), `samples_done` in this epoch"""
        self.device: torch.device = worker.device
        """where the model's first parameter is"""
        self._loop = loop
        self._worker = worker
        self._watcher = membership.watcher
        self._observer = LoopObserver(loop, worker, membership, world)
        self._steps = iter(steps)
        self._share: Share | None = None
        self._is_applied = False
        self._is_stand_in = False
        self._hushed: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._every = worker.config.snapshot_every or EVERY
        self._has_reduced = False
        """whether the step in hand has had its gradients summed by DDP"""
        self._step_seconds = math.inf
        """of the newest step whose totals have come, a mean over the ranks"""
        self._late: _LateTotals | None = None
        """of the newest committed step"""
        self._diverged: TrainingDiverged | None = None
        self._lost: Exception | None = None
        self._outcome: Outcome | None = None
        self._next_outcome: Outcome | None = None
        """what was decided in the last step, to be done after the one in hand"""
        self._saved_step = self.state.step

    @property
    def model(self) -> nn.Module:
        """The model that `run` was given, not wrapped."""
        return self.state.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that `run` was given."""
        return self.state.optimizer

    @property
    def weight(self) -> float:
        """This rank's share of the samples of the step in hand, 0 to 1; 0 where it has none and gets a stand-in.

        Raises:
            UsageError: no step is in hand.
        """
        micro_batch = self._step_in_hand()[0][0]
        return len(micro_batch.indices) / micro_batch.step_samples

    def parallel(self, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        """`module`, or the model, in torch's DDP; `options` are DDP's. Blocks until every rank has called it.

        Gradients are averaged by samples, not by ranks: what the optimizer sees is the mean over the step's samples,
        also where shares differ in size. The loss of a rank is the mean over its own batch, as usual. `model` itself
        is for evaluation.

        Raises:
            RuntimeError: from the communication library, when a peer is lost; `run` enters the function anew then.
        """
        self._watcher.do(Activity.REDUCE, FIRST_SECONDS)  # it takes rank 0's weights
        ddp = DistributedDataParallel(self.model if module is None else module, **options)
        self.turn_to_own_code()
        if self.world.world_size > 1:
            ddp.register_comm_hook(self, _average_by_samples)
        shares_buffers = ddp.broadcast_buffers and self.world.world_size > 1 and self.device.type == "cpu"
        if shares_buffers:
            ddp.broadcast_buffers = False  # it is the hook that does it
        ddp.register_forward_pre_hook(partial(self._enter_forward, shares_buffers=shares_buffers))
        if self.device.type == "cpu":  # a GPU has the buffers later, and waits within a SyncBatchNorm
            self._hooks.append(ddp.module.register_forward_pre_hook(_ForwardBegins(self)))
        self._loop.remember_parallel(ddp)
        return ddp

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0; a world that begins within an epoch begins with that epoch.

        What the function does after an epoch's last batch is done once, unless a peer is lost in that very code.
        """
        while not self.state.is_finished:
            self._between_steps()
            yield self.state.epoch

    def batches(self) -> Iterator[Any]:
        """This rank's batches, one per step, from the run's position to the end of the epoch, on the CPU (pinned where
        the model is on CUDA).

        A step takes the next `global_batch_size` samples of the epoch's order, fewer at its end, and splits them over
        the ranks; the sizes of the shares differ by 1 at most. So the last step of an epoch may leave a rank a single
        sample, or none: a stand-in then, of which neither gradients nor BatchNorm take notice. Each batch must be
        committed before the next one is asked for.

        Torch's random numbers are seeded for each step by (seed, step, share), so that dropout does not depend on what
        happened before.

        Raises:
            UsageError: the step before was not committed.
        """
        state = self.state
        epoch = state.epoch
        while state.epoch == epoch and not state.is_finished:
            yield self._next_batch()
            self.require_committed()

    def commit(self, loss: torch.Tensor | float) -> None:
        """The step is done: the optimizer (scheduler, scaler) has stepped.

        The mean loss, and whether the world ends, are known one step later, so that no rank waits for the others here.
        It does, until every rank has committed, in the first step of a world, at the end of an epoch, where a snapshot
        is due, in every 100th step where none are, where DDP has not summed the gradients (`no_sync`), and where steps
        take a second or more.

        Whatever happens from here on, its samples count as trained. What is done before the optimizer's step (that of
        a scheduler, say) is done once more where a lost peer makes the step be redone. Collectives of the function's
        own belong before the optimizer's step or after the commit.

        Args:
            loss: mean over this rank's batch, a scalar; the mean over the step's samples is logged.

        Raises:
            UsageError: there is no step in hand; or several workers train and `parallel` was not called, so that each
                would go its own way.
            TrainingDiverged: the loss of this step, or of the one before, is NaN or infinite and the optimizer has
                stepped; on every rank alike.
        """
        share = self._step_in_hand()
        if self.world.world_size > 1 and not self._loop.has_parallel:
            raise UsageError(
                f"nobody averages the gradients of the {self.world.world_size} workers: train the module that "
                "training.parallel() makes in the training function"
            )
        has_stepped, self._is_applied = self._is_applied, True
        own_loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        own_part = 0.0 if self._is_stand_in else own_loss * self.weight  # a stand-in's may be NaN
        self.settle()
        # The best that is known of the mean, should a peer be lost.
        known_loss = (self.state.last_loss or 0.0) if self._is_stand_in else own_loss
        if self._diverged is not None:
            raise self._diverged
        is_late, votes = self._may_be_late(), NO_VOTES
        self._outcome, self._next_outcome = self._next_outcome, None
        if self._lost is None and self._outcome is None:  # else the votes were those of the step before
            votes = self._loop.votes()
        numbers = [own_part, *self._extras_hashes(), *votes, self._observer.seconds_since_commit]
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        totals = _LateTotals(share[0][0], known_loss, has_stepped, sums)
        if self._lost is None and self.world.world_size > 1:
            try:
                totals.work = dist.all_reduce(totals.sums, async_op=True)
            except RuntimeError as error:
                self._note_lost(error)
                is_late = False
        if is_late:
            self._commit(known_loss, totals)
            return
        is_known = self._lost is None and self._has_come(totals)
        if is_known and totals.has_diverged:
            raise self._divergence(totals, self.state.step + 1, self.state.epoch)
        self._commit(totals.mean_loss if is_known else known_loss)
        if is_known:
            self._follow(totals.votes)
        if is_known and totals.do_extras_differ(self.world.world_size):
            try:
                self._warn_of_extras()
            except (RuntimeError, FormationFailed) as error:
                self._note_lost(error)
        self._outcome, self._next_outcome = self._outcome or self._next_outcome, None
        if self.state.is_finished:
            self._outcome = None  # whatever else was asked for has come too late

    def say(self, message: str) -> None:
        """A line for the person who watches; only rank 0 prints it."""
        self._worker.reporter.say(message)

    # --- for OwnLoop --------------------------------------------------------------------------------------------------

    def require_committed(self) -> None:
        """Raises: UsageError where a step is in hand."""
        if self._share is not None:
            raise UsageError(
                f"step {self.state.step + 1} ended without training.commit(loss): call it after the optimizer's step"
            )

    def settle(self) -> None:
        """The mean loss and the votes of the newest step, once every rank has committed it. Blocks until then, but does
        not raise what it finds."""
        totals = self._late
        if totals is None:
            return
        is_known = self._has_come(totals)
        if self._late is not totals:  # another thread has given up this one, and has told of the step
            return
        self._late = None
        self._take_in(totals, is_known=is_known)
        if is_known and self._diverged is None:
            self._follow(totals.votes)

    def finish(self) -> None:
        """The training function has returned. Raises: what ended the world; UsageError; TrainingDiverged."""
        self.require_committed()
        self.settle()
        if self._diverged is not None:
            raise self._diverged
        self._outcome = self._outcome or self._next_outcome
        self.end_if_over()

    def end_if_over(self) -> None:
        """Raises what ended the world while the function was not looking."""
        if self._lost is not None:
            raise self._lost
        if self._outcome is not None:
            raise _WorldEnds(self._outcome)

    def note_applied(self) -> None:
        """The optimizer has stepped."""
        self._is_applied = True

    def settle_at_once(self) -> None:
        """As `settle`, but does not block: the world is over, and what has not come yet never will.

        Raises:
            TrainingDiverged: the newest step has come to nothing.
        """
        self._give_up_totals()
        if self._diverged is not None:
            raise self._diverged

    def commit_what_is_applied(self) -> None:
        """A peer was lost, and the step before is settled. Where the weights are those after the step in hand, the step
        is done. Does not block."""
        if self._share is None or not self._is_applied:
            return
        self._worker.reporter.warn(
            f"a peer was lost between the optimizer's step and the commit of step {self.state.step + 1}: what the loop "
            "does in between (a scheduler's step) may be missing once; move collectives out of there"
        )
        # Its loss was not told; that of the step before stands in.
        self._commit(self.state.last_loss or 0.0)

    def close(self) -> None:
        """Lets go of everything that belongs to the world."""
        self._give_up_totals()
        self._steps = iter(())
        self._share = self._lost = None
        while self._hooks:
            self._hooks.pop().remove()
        self._unhush()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        self.end_if_over()
        state, saver = self.state, self._loop.saver
        if self._saved_step != state.step:
            self._saved_step = state.step
            if saver.is_due(state):
                self.settle()  # only this rank does, where a snapshot was put off: what it finds has to wait
                self.turn_to_own_code()
                if self._diverged is None and self._lost is None:  # else nobody knows whether the loss was finite
                    saver.save(state)

    def _next_batch(self) -> Any:
        self.require_committed()
        self._between_steps()
        self._watcher.do(Activity.COMPUTE)
        share = next(self._steps)
        self._share, self._is_applied, self._has_reduced = share, False, False
        ((micro_batch, batch),) = share  # one each: shares are not cut where the loop is the user's
        self._is_stand_in = batch is None
        self._observer.before_reduction(share)
        self.state.remember()
        seed_model_draws(self._worker.config.seed, micro_batch.step, micro_batch.shard, self.device)
        return self._loop.stand_in() if batch is None else batch

    def _step_in_hand(self) -> Share:
        if self._share is None:
            raise UsageError("there is no step in hand: training.batches() begins one, and commit() ends it")
        return self._share

    def _commit(self, loss: float, late: "_LateTotals | None" = None) -> None:
        share = self._step_in_hand()
        self._share = None
        self._unhush()
        self.state.commit(loss)
        self._late = late
        if late is None:
            self._observer.tell_commit(self.state, loss, share[0][0])
        self._observer.note_commit()
        self.turn_to_own_code()

    def _may_be_late(self) -> bool:
        """Whether loss and votes of the step in hand need not be known at its commit; alike on every rank."""
        state = self.state
        is_last_of_epoch = state.samples_done + state.next_step_samples() >= state.length
        return (
            self._has_reduced  # it stands, as every rank has taken part in it
            and self._step_seconds < LONG_STEP_SECONDS  # who is told to stop may not have the time for two
            and self._lost is None
            and self._next_outcome is None
            and not is_last_of_epoch
            and (state.step + 1) % self._every != 0
            and state.step + 1 < state.last_step
        )

    def _has_come(self, totals: "_LateTotals") -> bool:
        """Waits for the sums; False where a peer was lost."""
        self._watcher.do(Activity.REDUCE)
        try:
            if totals.work is not None:
                wait(totals.work)
        except (RuntimeError, FormationFailed) as error:
            self._note_lost(error)
            return False
        self._watcher.do(Activity.COMPUTE)
        self._step_seconds = totals.seconds / self.world.world_size
        return True

    def _give_up_totals(self) -> None:
        totals, self._late = self._late, None
        if totals is None:
            return
        is_known = False
        if totals.work.is_completed():
            with suppress(RuntimeError):  # a peer was lost
                totals.work.wait()
                is_known = True
        self._take_in(totals, is_known=is_known)

    def _take_in(self, totals: "_LateTotals", *, is_known: bool) -> None:
        """The totals of the newest step have come, or never will."""
        if is_known and totals.has_diverged:
            self._diverged = self._divergence(totals, self.state.step, self.state.epoch)
            return
        loss = totals.mean_loss if is_known else totals.known_loss
        self.state.note_loss(loss)
        self._observer.tell_commit(self.state, loss, totals.first)

    def _follow(self, votes: Votes) -> None:
        """Do what all have decided, after the step in hand."""
        if self._outcome is not None:  # in the last step of a world nobody votes
            return
        told_to_stop, leaving, joining = votes
        self._observer.follow_votes(votes)
        if told_to_stop == self.world.world_size:
            self._next_outcome = Outcome.STOPPED
        elif joining == NOW:
            self._next_outcome = Outcome.SOME_JOIN
        elif leaving:
            self._next_outcome = Outcome.SOME_LEAVE

    def _divergence(self, totals: "_LateTotals", step: int, epoch: int) -> TrainingDiverged:
        return TrainingDiverged(
            f"the loss of step {step} (epoch {epoch + 1}) is {totals.mean_loss}; the last good snapshot is kept"
        )

    def turn_to_own_code(self) -> None:
        """What is done between steps, by one rank perhaps, may take its time."""
        self._watcher.do(Activity.COMPUTE, self._watcher.pace.between_steps)

    def note_gradients(self) -> None:
        """The backward pass is over: this rank waits for its peers from now on."""
        # Before any rank can have the sum: rank 0 has written down every step but that in hand, whenever it is lost.
        self.settle()
        self._watcher.do(Activity.REDUCE)
        self._has_reduced = True

    def _enter_forward(self, ddp: DistributedDataParallel, _arguments: Any, *, shares_buffers: bool) -> None:
        """The buffers are shared before the module's own forward pass; a SyncBatchNorm waits within it.

        Args:
            shares_buffers: here, where DDP would.
        """
        if self._share is not None:
            self._watcher.do(Activity.REDUCE)
            if self._is_stand_in:
                # Until the commit, because activation checkpoints run forward passes again in the backward pass.
                self._hushed += hush_statistics(ddp)
        if shares_buffers and ddp.require_forward_param_sync:
            share_buffers(ddp.module)

    def leave_collective(self) -> None:
        """The module's own forward pass begins."""
        if self._share is not None:
            self._watcher.do(Activity.COMPUTE)

    def _note_lost(self, error: Exception) -> None:
        """It is raised when the next batch is asked for, so that what the function does after a commit is done.

        Raises: `error`, where it is none of the communication library.
        """
        if not is_communication_error(error):
            raise error
        self._lost = error
        self._watcher.announce_broken()

    def _extras_hashes(self) -> tuple[int, int]:
        """A small hash of the extras' plain values, and its square, now and then; else zeros."""
        if not self.state.extras or self._loop.has_warned_of_extras or (self.state.step + 1) % self._every:
            return 0, 0
        value = hash_of_plain(self._hash_by_extra()) % MAX_HASH
        return value, value * value

    def _hash_by_extra(self) -> dict[str, int]:
        return {name: hash_of_plain(extra.state_dict()) % MAX_HASH for name, extra in self.state.extras.items()}

    def _warn_of_extras(self) -> None:
        """Every rank calls it; a lost peer shows as in any collective."""
        self._loop.has_warned_of_extras = True
        self._watcher.do(Activity.REDUCE)
        mine = self._hash_by_extra()
        found = gather_json(mine)
        names = [name for name in sorted(mine) if any(other[name] != mine[name] for other in found)]
        if self.world.rank == 0 and names:
            self._worker.reporter.warn(
                f"extras differ between the ranks: {', '.join(names)}. Snapshots hold those of rank 0; when that is "
                "lost, another rank's count: have every rank do the same with them"
            )

    def _unhush(self) -> None:
        while self._hushed:
            self._hushed.pop().training = True


@dataclass
class _LateTotals:
    """Sums over the ranks that belong to a step, which may still be under way when it is committed."""

    first: MicroBatch
    """of the step; the batch itself would only take memory"""
    known_loss: float
    has_stepped: bool
    """the optimizer; else a GradScaler has skipped the step"""
    sums: torch.Tensor
    """mean loss, hash of the extras, its square, the votes, and each rank's seconds since its commit before"""
    work: Any = None
    """None in a world of one"""

    @property
    def mean_loss(self) -> float:
        return float(self.sums[0])

    @property
    def votes(self) -> Votes:
        told_to_stop, leaving, joining = self.sums[3:6].tolist()
        return int(told_to_stop), int(leaving), int(joining)

    @property
    def seconds(self) -> float:
        return float(self.sums[6])

    @property
    def has_diverged(self) -> bool:
        return self.has_stepped and not math.isfinite(self.mean_loss)

    def do_extras_differ(self, world_size: int) -> bool:
        _, hashes, squares, *_ = self.sums.tolist()
        return world_size * int(squares) != int(hashes) ** 2  # equal ones alone make it so


class _ForwardBegins:
    """A hook of the user's own module, which may be copied or pickled: a copy's does nothing."""

    def __init__(self, training: "Training | None" = None) -> None:
        self._training = None if training is None else weakref.ref(training)

    def __call__(self, *_arguments: Any) -> None:
        training = None if self._training is None else self._training()
        if training is not None:
            training.leave_collective()

    def __reduce__(self) -> tuple[type["_ForwardBegins"], tuple[()]]:
        return _ForwardBegins, ()


def _average_by_samples(training: Training, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the sum over ranks of each one's mean times its share of the step's samples."""
    weight, gradients = training.weight, bucket.buffer()
    if bucket.is_last():
        training.note_gradients()
    # Those of a stand-in may be NaN, which no weight makes zero.
    gradients = gradients.mul_(weight) if weight > 0 else gradients.zero_()
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None, "asynchronous"
    if gradients.is_cuda:
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future
    return reduced(work, gradients)


TrainingFunction = Callable[[Training], None]


class OwnLoop:
    """Enters a training function in one world after the other: a `WorldLoop`."""

    def __init__(self, train: TrainingFunction, worker: Worker, membership: Membership, saver: Saver) -> None:
        self._train = train
        self._worker = worker
        self._membership = membership
        self.saver = saver
        self.stand_in = stand_in_batch(worker)
        """makes a batch of the first sample, for a rank that has none in a step; its weight is 0"""
        self.step_started = 0.0
        self.compares_states = True
        self.has_warned_of_extras = False
        self.last_votes: Votes = NO_VOTES
        self._training: Training | None = None
        self._parallel: list[weakref.ref[DistributedDataParallel]] = []
        optimizer = worker.state.optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(self._require_unbroken),
            optimizer.register_step_post_hook(self._note_step),
        )

    has_room_for_handover = False
    """nobody knows what the function does with the weights before the optimizer's step"""

    def run(self, world: World, steps: Iterable[Share], begin: Beginning = ALONE) -> Outcome:
        """As `WorldLoop.run`. Raises: what the training function does."""
        worker, state = self._worker, self._worker.state
        if any(module() is not None for module in self._parallel):
            worker.reporter.warn(
                "the training function keeps the DDP module of an earlier world, and with it that world's memory: "
                "make it with training.parallel() in the function and keep it in a local variable"
            )
        self._parallel.clear()
        state.set_modes()  # the function may have been interrupted in an evaluation of its own
        if begin.comparison is not None:  # at once: what the function does with the weights is not known
            begin.comparison.begin()
            compare(begin.comparison, self, worker, self._membership)
        self._training = training = Training(self, worker, self._membership, world, steps)
        self._membership.watcher.pace.expect_first_step()  # it may compile; nobody knows
        training.turn_to_own_code()
        try:
            self._train(training)
            training.finish()
        except _WorldEnds as end:
            return end.outcome
        except Exception as error:
            self._membership.watcher.announce_broken()  # whatever the function, or its debugger, takes its time for
            training.settle_at_once()  # what NaN has led to says less than that there was one
            if is_communication_error(error):
                training.commit_what_is_applied()
                begin_scalers_anew(state)
            raise
        finally:
            training.close()
            self._training = None
        if not state.is_finished:
            worker.reporter.warn(
                f"the training function returned at step {state.step} of {state.last_step}: that is the end then"
            )
            state.last_step = state.step
        return Outcome.FINISHED

    def warm_up(self) -> None:
        """Nobody knows how."""

    def evaluate_if_missed(self, world: World) -> None:
        """Evaluation is the function's own."""

    def abandon(self) -> None:
        """As `WorldLoop.abandon`."""
        if self._training is not None:
            self._training.settle_at_once()
            self._training.commit_what_is_applied()
        self._worker.state.rollback()

    def close(self) -> None:
        """As `WorldLoop.close`."""
        for hook in self._hooks:
            hook.remove()

    def votes(self) -> Votes:
        self.last_votes = votes_of(self._worker, self._membership)
        return self.last_votes

    @property
    def has_parallel(self) -> bool:
        """Whether the function has asked for DDP in the present world."""
        return bool(self._parallel)

    def remember_parallel(self, module: DistributedDataParallel) -> None:
        self._parallel.append(weakref.ref(module))

    def _require_unbroken(self, *_arguments: Any) -> None:
        """NCCL's collectives, once aborted, end with garbage and no error: it must not reach the weights."""
        if self._training is None:
            return
        require_unbroken(self._membership.sockets, self._worker.device)  # the backward pass may still be under way
        if self._worker.device.type == "cpu":  # a GPU may still wait for the gradients
            self._membership.watcher.do(Activity.COMPUTE)

    def _note_step(self, *_arguments: Any) -> None:
        if self._training is not None:
            self._training.note_applied()


def begin_scalers_anew(state: TrainState) -> None:
    """Have GradScalers forget the step that was broken off between `unscale_` or `step` and `update`: they would take
    its gradients, when it is done again, for unscaled ones."""
    for extra in state.extras.values():
        if isinstance(extra, torch.amp.GradScaler) and extra._scale is not None:  # else `scale` was never called
            extra.update(extra.get_scale())  # the only public way; the scale stays


class OwnTask(Task):
    """What the parts around the loop need to know of a training that is not theirs."""

    def __init__(self, name: str, model: nn.Module, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.name = name
        self._model = model
        self._dataset = dataset
        self.collate = collate

    @property
    def title(self) -> str:
        return f"by {self.name}()"

    def build_model(self) -> nn.Module:
        return self._model

    def train_dataset(self) -> Dataset[Any]:
        return self._dataset


F = TypeVar("F")


@overload
def parse_flags() -> Config: ...
@overload
def parse_flags(own_flags: type[F]) -> tuple[Config, F]: ...
def parse_flags(own_flags: type[F] | None = None) -> Config | tuple[Config, F]:
    """The flags of `-m elastic_train` that concern a run of one's own, from this script's command line; with
    `own_flags`, a dataclass whose fields become flags too, the pair of both.

    Raises:
        SystemExit: a bad flag, which was told in one line (2), or `--help`, which lists all (0).
    """
    try:
        if own_flags is not None and not (isinstance(own_flags, type) and is_dataclass(own_flags)):
            raise UsageError(
                f"parse_flags takes a dataclass, whose fields become flags, and got a {type(own_flags).__name__}; the "
                "command line it reads itself"
            )
        _check_arguments(sys.argv[1:], own_flags)
        config = parse(sys.argv[1:], own_flags, left_out=NOT_FOR_OWN_LOOPS)
    except UsageError as error:
        _exit(error, is_debug=False)
    return config if own_flags is None else (config, config.own_flags)


def run(
    train: TrainingFunction,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    config: Config | None = None,
    *,
    collate: Callable[[list[Any]], Any] = default_collate,
    extras: Mapping[str, Stateful] | None = None,
) -> TrainState:
    """Run a training function to the end of training, through as many worlds as it takes. Call it once per process,
    from the main thread; every worker does, with equal arguments. Blocks until training is over.

    Args:
        train: called with a `Training` in every world; returns at the end of training, or earlier to end it there.
        model: not wrapped in DDP, where it shall be trained; every worker starts with rank 0's weights, or a snapshot.
        optimizer: of the model's parameters.
        dataset: map-style, the same on every worker. Its `__getitem__` may draw from torch, random and numpy, which
            are seeded by (seed, epoch, index). One that puts Python's or numpy's generator back as it was, or only
            reads its state, has to seed it itself.
        config: what `-m elastic_train` takes as flags, see `parse_flags`; `Config(epochs=3, ledger=True)`.
        collate: a list of items to a batch.
        extras: what else belongs to the state (schedulers, a GradScaler, averaged weights), by name.

    Returns:
        The state at the end, equal on every rank.

    Raises:
        SystemExit: training is not finished: stopped by a signal with the state saved (143, 130), or an error that
            training cannot get past (1, 2), which was told in one line.
        What the training function raises, where no others train on. Where they do, its traceback is shown, this
            worker's agent is told to stop, and SystemExit(1) follows.
    """
    require_system_for_training(os.environ)
    config = config or Config()
    stop = StopSignal()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    stop.install()
    if "RANK" in os.environ:
        die_with_parent()
    try:
        _check_config(config)
        check(config)
        _check_parts(model, extras or {})
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        task = OwnTask(getattr(train, "__name__", type(train).__name__), model, dataset, collate)
        state = TrainState(
            model,
            optimizer,
            length=length_of(dataset),
            global_batch_size=config.global_batch_size,
            epochs=config.epochs,
            max_steps=config.max_steps,
            micro_batch_size=config.global_batch_size,  # a share is one batch, however many ranks are left
            extras=extras,
        )
        launch = Launch.from_environment(os.environ, config.store_endpoint)
        worker = build(config, launch, stop, Parts(task, state, device))
        code = run_worker(worker, partial(OwnLoop, train))
    except ElasticTrainError as error:
        _exit(error, is_debug=config.debug)
    except BaseException:
        _restore(handlers)
        raise
    if code != 0:
        sys.exit(code)  # with the handlers that there are: another signal would change the code of a process that ends
    _restore(handlers)
    return state


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def _check_arguments(arguments: list[str], own_flags: type | None) -> None:
    """Raises: UsageError for a flag of the bundled loop, which people try."""
    own = set() if own_flags is None else {entry.name for entry in fields(own_flags)}
    given = {argument.partition("=")[0] for argument in arguments}
    for name in NOT_FOR_OWN_LOOPS:
        if name not in own and flag(name) in given:
            _refuse(name)


def _check_config(config: Config) -> None:
    for entry in fields(Config):
        if entry.name in NOT_FOR_OWN_LOOPS and getattr(config, entry.name) != entry.default:
            _refuse(entry.name)


def _check_parts(model: nn.Module, extras: Mapping[str, Any]) -> None:
    """Raises: UsageError for what would fail, or be saved under other names, only later."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}: give model.module, and train what training.parallel() "
            "makes of it"
        )
    for name, extra in extras.items():
        if not callable(getattr(extra, "state_dict", None)) or not callable(getattr(extra, "load_state_dict", None)):
            raise UsageError(
                f"extras[{name!r}] is a {type(extra).__name__}: it must have state_dict() and load_state_dict(), as a "
                "scheduler has"
            )


def _refuse(name: str) -> NoReturn:
    raise UsageError(f"{flag(name)} is for the bundled loop: a training function of your own decides that itself")


def _exit(error: ElasticTrainError, *, is_debug: bool) -> NoReturn:
    tell(error, rank=os.environ.get("RANK", "0"), is_debug=is_debug)
    sys.exit(error.exit_code)
