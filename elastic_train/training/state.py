"""TrainState: the whole state of a training; a snapshot or a peer hands over this and nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from elastic_train.branches import Branches, branches_of
from elastic_train.errors import add_own_note
from elastic_train.runlog.goodput import PhaseClock
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.incidents import IncidentsText, incidents_of
from elastic_train.training.kept import Arguments, KeptStep, load_extra, load_part
from elastic_train.training.optimizers import groups_instead, parts_of, rate_of
from elastic_train.training.planned_steps import planned_steps
from elastic_train.training.ratings import Ratings
from elastic_train.training.state_lock import StateLock, StepStart


class Stateful(Protocol):
    """Any other part of the state: a learning rate scheduler, a scaler, averaged weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load what `state_dict` returned, perhaps in another process and on another device."""


class TrainState:
    """Model, optimizer, scaler and position of one run; usable by itself.

    The position is `samples_done` samples into `epoch`, after `step` committed steps. Samples, learning rate and
    randomness are functions of the position alone; so there is no RNG state, on purpose.

    Args:
        model: any module, not wrapped in DDP; loaded in place.
        optimizer: of the model's parameters.
        scaler: for fp16, where the loop steps through it.
        length: samples of the training set.
        global_batch_size: samples of a whole step, over all ranks.
        epochs, max_steps: where training ends, whichever comes first.
        schedule: learning rate by committed step: `constant`, `cosine`, or a function of (committed steps, last step)
            that returns the share of the peak, also for the last step itself. None leaves learning rates alone; a
            snapshot's are then taken over.
        micro_batch_size: most samples per forward pass on a rank; None for a rank's share in the first world.
        extras: further parts to save and restore, by name.
        has_own_optimizer: the optimizer is the task's own, and may keep learned values in its groups. A snapshot's
            groups are then taken over, as torch does, except for the learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        length: int,
        global_batch_size: int,
        epochs: int,
        max_steps: int | None = None,
        schedule: str | Callable[[int, int], float] | None = None,
        micro_batch_size: int | None = None,
        extras: Mapping[str, Stateful] | None = None,
        has_own_optimizer: bool = False,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.extras: dict[str, Stateful] = dict(extras or {})
        self.epoch = self.step = self.samples_done = 0
        self.run_uid = ""
        """name of this run from its first step on, so that a snapshot of another run is never continued by mistake"""
        self.superseded: tuple[str, ...] = ()
        """uids of the runs that this one has replaced by --fresh"""
        self.micro_batch_size = micro_batch_size
        """most samples per forward pass on a rank"""
        self.last_loss: float | None = None
        self.last_commits: list[dict[str, Any]] = []
        """`step` events of the two newest commits, the newest last; a worker that takes over may have to write them"""
        self.test_metrics: dict[str, float] = {}
        """of the newest evaluation, by name"""
        self.ratings = Ratings()
        self.incidents: list[dict[str, Any]] = []
        """interruptions of this run over all of its restarts, each listed once; the last entries of `result.json`"""
        self.evaluated_step = self.stopped_at = -1
        """step of the newest evaluation; step at which all ranks stopped as told: a start from there is no failure"""
        self.generation: int | None = None
        """generation of the present world; None until this state and its clock are the run's"""
        self.generations = 0
        """number of worlds that this run has had"""
        self.branches: Branches = ()
        self.restarts: Branches = ()
        """where this run was split on the way to this state, and where it was begun again from a snapshot"""
        self.fingerprint: dict[str, Any] = {}
        """all that the bits of an ordered run depend on, on this worker or on the one that saved this state"""
        self.clock, self.lock, self.step_start = PhaseClock(), StateLock(), StepStart(model)
        self.length, self.global_batch_size, self.num_epochs = length, global_batch_size, epochs
        self.last_step = planned_steps(length, global_batch_size, epochs, max_steps)
        self.plan: dict[str, Any] = {"last_step": self.last_step}  # of this start: see `has_returned_early`
        if not model.training:  # the whole model, not some layers that the user froze
            model.train()
        self.kept = KeptStep(model, optimizer, self.extras, scaler)
        self.modes = Modes(self.kept.modules.values())
        self.is_step_open = self._is_updating = False  # open: a step has begun and is not committed
        self.before_update: Callable[[], None] = lambda: None
        """called before the optimizer's step; where it raises, the weights stay those of the last commit"""
        self.kept.updates.call_before_steps(self.begin_update)
        self._schedule, self._has_own_optimizer, self._incidents = schedule, has_own_optimizer, IncidentsText()
        self._base_lrs = [rate_of(group) for group in optimizer.param_groups]
        for step in (self.last_step, 0):  # find now, not after the last step, that a schedule's table is one short
            self._apply_schedule(step)

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the training are committed."""
        return self.step >= self.last_step

    @property
    def learning_rates(self) -> list[float | None]:
        """Learning rate of each group, before the schedule's factor; without a schedule here, the rate in force."""
        return list(self._base_lrs) if self._schedule is not None else [*map(rate_of, self.optimizer.param_groups)]

    @property
    def is_whole(self) -> bool:
        """False between the optimizer's step and its commit, and after a load that failed half way."""
        return not self._is_updating

    @property
    def averaged(self) -> AveragedWeights | None:
        """The moving average of the weights, if it is among the extras."""
        found = self.extras.get("ema")
        return found if isinstance(found, AveragedWeights) else None

    def next_step_samples(self) -> int:
        """Samples of the next step to commit: the global batch, fewer in the last step of an epoch."""
        return min(self.global_batch_size, self.length - self.samples_done)

    def begin_update(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Prepare for an optimizer's step; return what its pre-hook must. Raises: as `KeptUpdates.require_groups`."""
        self.kept.updates.require_groups()
        checked = self.kept.updates.note_step(args, kwargs, self.before_update)
        self.before_update()
        self.lock.hold()
        self._is_updating = True
        return checked

    def end_update(self) -> None:
        """Note that an optimizer's step is over that began between two steps: the state is whole again."""
        self._is_updating = False

    def remember(self) -> None:
        """Begin a step: keep a copy of all that it may change before its reduction is known to be sound."""
        self.is_step_open, self._is_updating = True, False  # a rollback returns to the state of now
        self.kept.keep()
        self.step_start.note()

    def rollback(self) -> bool:
        """Return to the last commit after a step that failed. Weights that were changed are put back (`KeptUpdates`).
        Returns whether a step was open; if not, nothing is changed."""
        if was_open := self.is_step_open:
            self.is_step_open = False
            self._is_updating &= not self.kept.put_back()
        return was_open

    def commit(self, loss: float | None) -> bool:
        """Count the step as done; no other place does. `loss` is the mean over all samples, None if unknown.
        Returns True at the end of an epoch."""
        self.lock.hold()
        if self.averaged is not None:  # first: if this fails, the step does not count
            self.averaged.update(self.model)
        self.is_step_open = False
        self.samples_done += self.next_step_samples()
        self.step, self.last_loss = self.step + 1, loss
        event = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": loss,
            "samples_done": self.samples_done,
            "generation": self.generation,
        }
        self.last_commits = [*self.last_commits[-1:], event]
        if has_ended_epoch := self.samples_done >= self.length:
            self.epoch, self.samples_done = self.epoch + 1, 0
        self._is_updating = False  # the step is done, even if a user's schedule raises
        self._apply_schedule(self.step)
        return has_ended_epoch

    def note_loss(self, loss: float | None) -> None:
        """Record the newest step's mean loss over all samples, which was not known at its commit."""
        self.last_loss = self.last_commits[-1]["loss"] = loss

    def _apply_schedule(self, step: int) -> None:
        if self._schedule is None:
            return
        factor = learning_rate_factor(self._schedule, step, self.last_step)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            if base_lr is not None:
                group["lr"] = base_lr * factor

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.load(weights_only=True)` can read; nothing of an open step, until the optimizer's."""
        state_of = self.kept.updates.state_of
        model, extras = self.model.state_dict(), {name: state_of(extra) for name, extra in self.extras.items()}
        if self.is_step_open:
            self.kept.buffers.put_into(self.model, model)
            for name, extra in self.extras.items():
                self.kept.buffers.put_into(extra, extras[name])
        return {
            "model": model,
            "optimizer": state_of(self.optimizer),
            "schedule": {
                "name": self._schedule if isinstance(self._schedule, str) else None,
                "base_lrs": self._base_lrs,
                "last_step": self.last_step,
                "plan": self.plan,
            },
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "extras": extras,
            "position": {"epoch": self.epoch, "step": self.step, "samples_done": self.samples_done},
            "run": {
                "uid": self.run_uid,
                "superseded": list(self.superseded),
                "micro_batch_size": self.micro_batch_size,
                "last_loss": self.last_loss,
                "last_commits": self.last_commits,
                "test_metrics": self.test_metrics,
                "evaluated_step": self.evaluated_step,
                "ratings": self.ratings.state_dict(),
                "incidents": self._incidents.of(self.incidents),
                "stopped_at": self.stopped_at,
                "generations": self.generations,
                "branches": [list(one) for one in self.branches],
                "restarts": [list(one) for one in self.restarts],
                "fingerprint": self.fingerprint,
                "keeps_updates": self.kept.updates.is_needed,
                "clock": self.clock.state_dict(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_peers: bool = False) -> None:
        """Load what `state_dict` returned, except the clock, which is the caller's decision.

        With a schedule, hyper-parameters stay those of this process's flags (with a task's own optimizer the learning
        rate alone), unless it `is_peers`. An extra that `state` lacks stays; averaged weights start as the model's.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: the state is of another model or optimizer.
            ExtraNotLoaded, a ValueError: an extra does not accept its part.
        """
        self.is_step_open, self._is_updating = False, True
        self.kept.updates.let_go(is_needed=bool(state["run"].get("keeps_updates", False)))
        self.model.load_state_dict(state["model"])
        loaded = state["optimizer"]
        if self._schedule is not None and not self._has_own_optimizer and not is_peers:
            loaded = {**loaded, "param_groups": groups_instead(self.optimizer, loaded["param_groups"])}
        self._base_lrs = list(state["schedule"]["base_lrs"]) if is_peers else self._base_lrs
        for one in (self.optimizer, *parts_of(self.optimizer).values()):
            one.state.clear()  # before the new state is made: GPU memory may not hold both
        load_part(self.optimizer, loaded)
        extras = state.get("extras", {})
        if self.averaged is not None:  # a new average holds weights that were never trained
            extras = {"ema": state["model"], **extras}
        for name in self.extras.keys() & extras.keys():
            load_extra(name, self.extras[name], extras[name])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        position, run = state["position"], state["run"]
        self.epoch, self.step, self.samples_done = (int(position[name]) for name in ("epoch", "step", "samples_done"))
        self.run_uid, self.superseded = str(run["uid"]), tuple(run.get("superseded", ()))
        self.micro_batch_size = (not is_peers and self.micro_batch_size) or run["micro_batch_size"]
        self.last_loss, self.last_commits = run["last_loss"], list(run.get("last_commits", ()))
        self.ratings.load_state_dict(run.get("ratings", {}))
        self.incidents, self.generations = incidents_of(run["incidents"]), int(run["generations"])
        self.evaluated_step, self.stopped_at = int(run.get("evaluated_step", -1)), int(run.get("stopped_at", -1))
        self.branches, self.restarts = branches_of(run.get("branches", ())), branches_of(run.get("restarts", ()))
        self.test_metrics, self.fingerprint = dict(run.get("test_metrics", {})), dict(run.get("fingerprint", {}))
        if has_returned_early(state, self.plan):
            self.last_step = self.step
        self._apply_schedule(self.step)
        self._is_updating = False


def has_returned_early(state: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Return whether this state's run ended because its training function returned, under the same plan."""
    schedule = state["schedule"]
    return schedule.get("plan") == plan and bool(schedule["last_step"] == state["position"]["step"])


def learning_rate_factor(schedule: str | Callable[[int, int], float], step: int, last_step: int) -> float:
    """Return the share of the peak learning rate after `step` of `last_step` committed steps, 0 and all included.

    `cosine` is the half period of SGDR (Loshchilov and Hutter, 2017, equation 5) without restarts.

    Raises: what the user's function raises, with a note of its arguments.
    """
    if not isinstance(schedule, str):
        try:
            return schedule(step, last_step)
        except Exception as error:
            add_own_note(error, f"the schedule was asked for the learning rate after {step} of {last_step} steps")
            raise
    if schedule == "constant" or last_step == 0:
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * min(step, last_step) / last_step))


class Modes:
    """A record of some modules: each layer's mode (`train()` or `eval()`), each parameter's `requires_grad`, and
    whether this thread computes gradients. A `TrainState` records them when it is made. Each world begins in these
    modes, on survivors and newcomers alike."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._modes = [(layer, layer.training) for module in modules for layer in module.modules()]
        self._places = [(module, {name: one.training for name, one in module.named_modules()}) for module in modules]
        self._trained = [(one, one.requires_grad) for module in modules for one in module.parameters()]
        self._has_gradients = torch.is_grad_enabled()

    def put_back(self) -> None:
        """Restore the recorded modes. A layer that is new gets the mode of the one that was in its place; in a new
        place, of the layer that it is in."""
        known = {id(layer): is_training for layer, is_training in self._modes}
        for layer, is_training in self._modes:
            layer.training = is_training
        for module, recorded in self._places:
            found = dict(recorded)
            for name, layer in module.named_modules():
                in_place = found.get(name, found.get(name.rpartition(".")[0], module.training))
                layer.training = found[name] = known.get(id(layer), in_place)
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        torch.set_grad_enabled(self._has_gradients)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every layer and parameter at the end of the block."""
    modes = Modes([model])
    try:
        yield
    finally:
        modes.put_back()


def state_sha256(model_state: Mapping[str, Any]) -> str:
    """Return the SHA-256 over the tensors of a model's `state_dict()`.

    For each key in sorted order: the key as UTF-8, `str(dtype)`, `str(tuple(shape))`, and the contiguous bytes on
    the CPU, with nothing in between. A sparse or quantized tensor's bytes are those of its `dense_parts`. Entries that
    are no tensors, such as a layer's extra state, are left out.
    """
    digest = hashlib.sha256()
    for key in sorted(model_state):
        tensor = model_state[key]
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(key.encode() + str(tensor.dtype).encode() + str(tuple(tensor.shape)).encode())
        for part in dense_parts(tensor):
            digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's content, detached, as dense tensors: for a sparse one its indices and values, for a quantized
    one, in whose view() torch crashes, its integers, scales and zero points."""
    if tensor.is_quantized:
        yield tensor.int_repr()
        if "per_channel" in str(tensor.qscheme()):
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        else:
            yield torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64, device=tensor.device)
        return
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        yield tensor.resolve_conj().resolve_neg()
        return
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()  # equal tensors may list their entries in different orders
        yield tensor.indices()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices())
    else:
        yield from (tensor.ccol_indices(), tensor.row_indices())
    yield tensor.values().resolve_conj().resolve_neg()
