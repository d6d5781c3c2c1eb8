"""`Training`: the argument of a training function, with one world and the run's state in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_train.config import Config, StepFlags, flag
from elastic_train.elastic.evaluations import Evaluations
from elastic_train.elastic.own_parallel import OwnParallel
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.session_steps import SessionSteps
from elastic_train.elastic.step_sums import EVERY, StepSums
from elastic_train.elastic.whole_steps import BatchLoss, WholeSteps
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd
from elastic_train.errors import UsageError
from elastic_train.training.collectives import LateNumbers
from elastic_train.training.reduction import Share
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.training.step import Votes
from elastic_train.wording import kind_of
from elastic_train.world import World


class Training:
    """The argument of a training function: one world, and the run's state in it.

    Every rank calls each method but `say`, in the training thread. A lost peer raises an exception inside a step, or
    when the next batch is asked for. `run` then calls the function again, in the next world. So the function keeps
    what belongs to a world (its DDP module, collectives in flight) in local variables only, and does not catch
    exceptions that it does not know.
    """

    def __init__(
        self,
        worker: Worker,
        world: World,
        saver: Saver,
        steps: SessionSteps,
        sums: StepSums,
        parallel: OwnParallel,
        whole: WholeSteps,
        end: WorldEnd,
        *,
        evaluations: Evaluations,
        check_states: Callable[[], None],
    ) -> None:
        self.world = world
        """rank, world_size, local_rank, generation, members; `rank` changes from world to world"""
        self.state: TrainState = worker.state
        """model, optimizer, and the position: `epoch` (from 0), `step` (committed), `samples_done` in this epoch"""
        self.device: torch.device = worker.device
        """the device of the model's first parameter"""
        self._worker = worker
        self._saver, self._steps, self._sums = saver, steps, sums
        self._parallel = parallel
        self._whole = whole
        self._end = end
        self._evaluations, self.check_states = evaluations, check_states
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
        """This rank's share of the samples of the step in hand, 0 to 1; 0 where its batch is a stand-in.
        Raises: UsageError: no step is in hand."""
        return self._steps.required().weight

    def parallel(self, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        """Wrap `module`, or the model, in torch's DDP; `options` are DDP's. Blocks until every rank has called it.

        Gradients are averaged by samples, not by ranks: the optimizer sees the mean over the step's samples, also where
        shares differ in size. The loss of a rank is the mean over its own batch, as usual. Use `model` itself for
        evaluation. Call this again after parameters were frozen or thawed: an earlier wrapper does not sum the present
        set of gradients, and the optimizer's step raises UsageError.

        Raises:
            UsageError: the module is spread over several devices, and there are several workers.
            RuntimeError: from the communication library, when a peer is lost; `run` then calls the function again.
        """
        return self._parallel.wrap(self.model if module is None else module, **options)

    def epochs(self) -> Iterator[int]:
        """Yield the epochs that are left, from 0. A world that begins within an epoch begins with that epoch.

        The code after an epoch's last batch runs once, unless a peer is lost in that very code.
        Raises: UsageError: an epoch was left without a step."""
        begun_at = None
        while not self.state.is_finished:
            # keep() for this very step comes before the first batch, so one snapshot then holds its metric too.
            self._between_steps(is_saved_later=self._worker.config.keep_best > 0)
            begun_at = self._steps.begin_epoch(begun_at)
            yield self.state.epoch

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches, one per step, from the run's position to the end of the epoch. They are on the
        CPU, pinned where the model is on CUDA.

        A step takes the next `global_batch_size` samples of the epoch's order, fewer at its end, and splits them over
        the ranks. The sizes of the shares differ by 1 at most, so the last step of an epoch may leave a rank a single
        sample or none. A rank without a sample gets a stand-in, which changes neither gradients nor buffers. Commit
        each batch before you ask for the next one.

        Torch's random numbers are seeded for each step by (seed, step, share), so that dropout does not depend on
        earlier steps.

        Raises:
            UsageError: the step before was not committed; or a flag is given that only `step` obeys.
        """
        require_no_step_flags(self._worker.config)
        self.state.micro_batch_size = self.state.global_batch_size  # shares are not cut where the step is the user's
        for micro_batch, batch in map(whole_share, self.shares()):
            self._steps.leave_to_function(micro_batch)
            yield self._whole.stand_in() if batch is None else batch

    def shares(self) -> Iterator[Share]:
        """Yield this rank's part of each step, for `step`; otherwise like `batches`."""
        state, epoch = self.state, self.state.epoch
        while state.epoch == epoch and not state.is_finished:
            self._between_steps()
            yield self._steps.begin()
            self._steps.require_committed()

    def step(self, share: Share, loss: BatchLoss) -> float:
        """Make one optimizer step over the global batch, by the flags: --reduction fast or ordered, --precision,
        --clip-grad-norm, --micro-batch-size. Blocks until every rank has taken part. Commit the result.

        Args:
            share: from `shares`.
            loss: called with a module and a batch, perhaps several times; returns the mean over the batch's samples, a
                scalar. Passing the same function in every step is cheapest.

        Returns:
            The mean loss over the step's samples, the same on every rank.

        Raises:
            TrainingDiverged: the loss is NaN or infinite, on every rank alike; the weights are those before the step.
            RuntimeError: as `parallel`. UsageError: the loss trains something else than the model, or freezes it.
        """
        step = self._steps.required()
        self._parallel.require_none()
        self._sums.settle()
        self._sums.require_finite()
        step.result = self._whole.step(share, loss)
        step.is_applied = True
        return step.result.loss

    def evaluate_if_due(self) -> None:
        """Evaluate the model on the test set of a `Task`, where --eval-every says so. Every rank calls this at the end
        of an epoch."""
        self._end.raise_if_lost()
        self._evaluations.if_due(self.world)

    def keep(self, metric: float) -> None:
        """Report how good the model is now, between two steps. More is better, so pass the negative of a loss. With
        --keep-best a snapshot is written if the metric is better than all before. Blocks until every rank has called
        it; rank 0's number counts.
        Raises: UsageError: a step is in hand, or `metric` is no number. RuntimeError: as `step`."""
        self._steps.require_none("keep()")
        self._evaluations.keep(self.world, float(scalar_of(metric, "keep()", "how good the model is")))

    def commit(self, loss: torch.Tensor | float) -> None:
        """Commit the step in hand: the optimizer (scheduler, scaler) has stepped.

        The mean loss and the decision whether the world ends arrive one step later, so that no rank waits here. These
        commits block until every rank has committed: in the first step of a world, at the end of an epoch, where a
        snapshot is due, in every 100th step, after `no_sync` (DDP has summed no gradients), where steps take a second.

        From this call on, the step's samples count as trained. If a lost peer makes the step be redone, the code before
        the optimizer's step (a scheduler's, say) runs once more. Place collectives of your own before the optimizer's
        step or after the commit.

        Args:
            loss: mean over this rank's batch, a scalar; the log shows the mean over the step's samples.

        Raises:
            UsageError: no step is in hand; or several workers train and `parallel` was not called, so that each would
                train a model of its own.
            TrainingDiverged: the loss of this step, or of the one before, is NaN or infinite and the optimizer has
                stepped; on every rank alike.
            The error that ended the world: a peer was lost in the reduction of a step that a GradScaler has skipped.
        """
        step, sums = self._steps.required(), self._sums
        if step.result is not None:  # `step` has summed loss and votes already
            self._steps.commit(step.result.loss)
            self._end.follow(Votes(*step.result.votes))
            self._end_if_decided()
            return
        self._parallel.require_made()
        has_stepped = self._steps.begin_commit()
        loss = scalar_of(loss, "commit()", "the mean loss over this rank's batch")
        unread = late_number(loss) if self.world.world_size == 1 else None
        sums.settle()
        sums.require_finite()
        own_loss = self.state.last_loss if step.is_stand_in or unread else float(loss)  # a stand-in's may be NaN
        own_part = 0.0 if step.is_stand_in or own_loss is None else own_loss * step.weight  # inf * 0 is NaN
        has = {"has_stepped": has_stepped, "has_reduced": step.has_reduced}
        totals = sums.begin(step.first, own_part, own_loss, self._steps.seconds_since_commit, **has, unread=unread)
        totals.found_inf = step.found_inf
        if totals.may_be_late:
            self._steps.commit(own_loss, totals)
            return
        is_known = sums.wait_for(totals)
        self._steps.commit(totals.mean_loss if is_known else own_loss)
        if is_known:
            self._end.follow(totals.votes)
        self._end_if_decided()

    def _end_if_decided(self) -> None:
        if self.state.step % EVERY == 0 or self.state.is_finished:
            self.check_states()
        self._steps.turn_to_function()
        self._end.bring_forward()
        if self.state.is_finished:
            self._end.call_off()

    def say(self, message: str) -> None:
        """Print a line for the user; only rank 0 prints it."""
        self._worker.reporter.report(message)

    def _between_steps(self, *, is_saved_later: bool = False) -> None:
        self._steps.ask(looks=not self._end.is_due)  # else members that left may have aborted the group
        self._end.raise_if_lost()
        state, saver = self.state, self._saver
        if not is_saved_later and (saver.owes_best(state) or self._saved_step != state.step):  # keep() may come later
            self._saved_step = state.step
            if saver.is_due(state):
                self._sums.settle()  # a put-off snapshot makes this rank alone settle, so errors are raised later
                self._steps.turn_to_function()
                if self._sums.is_sound:
                    saver.save(state)
        self._end.raise_if_over()

    # --- for Trainer --------------------------------------------------------------------------------------------------

    def note_applied(self, found_inf: torch.Tensor | None) -> bool:
        """As `SessionSteps.note_applied`."""
        return self._steps.note_applied(found_inf)

    def finish(self) -> None:
        """End after the function's return. Raises: what ended the world; UsageError; TrainingDiverged."""
        self._steps.ask()
        self._sums.settle()
        self._sums.require_finite()
        self._end.bring_forward()
        self._end.raise_if_over()

    def settle_at_once(self) -> None:
        """Settle the newest step without waiting for a peer: the world is over, and missing sums will never come.
        Raises: TrainingDiverged: the loss of the newest step is not finite."""
        self._sums.give_up()
        self._sums.require_finite()

    def commit_what_is_applied(self, error: str | None = None) -> bool:
        """As `SessionSteps.commit_what_is_applied`."""
        return self._steps.commit_what_is_applied(error)

    def close(self) -> None:
        """Release everything that belongs to the world."""
        self._sums.give_up()
        self._steps.close()
        self._end.close()
        self._parallel.close()


def late_number(loss: torch.Tensor | float) -> LateNumbers | None:
    """Return the loss of a GPU, to be read later so that the GPU does not idle; None where it can be read at once."""
    return LateNumbers(loss) if isinstance(loss, torch.Tensor) and loss.is_cuda else None


def whole_share(share: Share) -> tuple[MicroBatch, Any]:
    """Return a share's only micro-batch. Raises: UsageError where there are several: this world began with `shares`."""
    if len(share) > 1:
        raise UsageError(
            "training.batches() came after training.shares(), by which this world's batches are cut to the micro-batch "
            "size: take one of the two"
        )
    return share[0]


def scalar_of(value: torch.Tensor | float, method: str, wanted: str) -> torch.Tensor | float:
    """Return a method's argument as a scalar, without waiting for its device. Raises: UsageError if it is none."""
    given = "None" if value is None else kind_of(value)
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.detach().reshape(())
        given = f"a tensor of shape {tuple(value.shape)}"
    elif not isinstance(value, str | bytes | bytearray):  # Python would parse a number from these
        with suppress(TypeError, ValueError):
            return float(value)
    raise UsageError(f"{method} was given {given}: give {wanted}, a scalar")


def require_no_step_flags(config: Config) -> None:
    """Raise UsageError where a flag is set that only `Training.step` obeys."""
    for entry in fields(StepFlags):
        value = getattr(config, entry.name)
        if entry.name != "ema_decay" and value != entry.default:
            raise UsageError(
                f"{flag(entry.name)} {value} is for steps that training.step(share, loss) computes, over "
                "training.shares(): a step of your own decides that itself"
            )
