"""Checks that forward and backward passes leave alone which parameters are trained, and the values of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.worker import Worker
from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import hashes_by_name
from elastic_train.wording import named
from elastic_train.world import World

FROZEN_STEPS = 3
"""a worker's steps in which frozen parameters are checked. In the first one a copy that follows a weight equals it; in
the second one it may, too, where the learning rate begins at 0"""


class PassChecks:
    """Checks what passes must leave alone, for one worker. In whole steps that is all of the following; in a user's own
    loop, where optimizers know the rest, it is the trained weights, in passes through the DDP modules.

    Which parameters are trained: a reduction sums the gradients of those that were trained when the step began. If a
    loss thaws one, this rank's own gradient trains it; if it freezes one, the reduction waits for its gradient.

    Trained weights: until a step's gradient is applied they are those of the last commit, on every rank. So they may be
    sent to newcomers meanwhile, and no copy is kept for a redone step. Each in-place write increments the parameter's
    version counter; reading it costs microseconds a step. It does not show whether a bit has changed: that would take a
    copy, and a wait for the device. So a write that changes nothing when repeated, as a clamp or a maximal norm, counts
    like any other. Nor is it harmless: in ordered mode a rank without samples at an epoch's end makes no pass, and in a
    step that is broken off only some ranks have made theirs. Spectral norm and other parametrizations write only
    buffers; what an optimizer's hook writes is no part of the passes. A write through `.data` is not seen.

    Frozen parameters: if a pass moves them, they depend on the number of passes of a rank, and on whether a step is
    redone. What a loss does to them is the same in every world. So they are checked only in a worker's first steps:
    the check would delay a recovery.
    """

    def __init__(self, worker: Worker, membership: Membership) -> None:
        self._worker, self._state, self._membership = worker, worker.state, membership
        self._is_ordered = worker.config.reduction == "ordered"
        self._warns = False
        """whether this rank reports weights that are written; with fast reduction rank 0 warns for all"""
        self._weights: TrainedWeights | None = None
        """of the model; made in a world's first whole step"""
        self._has_warned = False
        self._steps_left = FROZEN_STEPS
        self._hashes: dict[str, list[int]] = {}

    def enter(self, world: World) -> None:
        """Note that the steps of `world` begin."""
        self._warns = self._is_ordered or world.rank == 0
        self._weights = None

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Check each forward pass through a module of a user's own loop, if this rank reports writes. Between passes
        the function may write weights by hand, alike on every rank."""
        if self._warns:
            weights = TrainedWeights(ddp.module)
            ddp.register_forward_pre_hook(lambda *_: weights.note(has_values=not self._has_warned))
            ddp.register_forward_hook(lambda *_: self._look_at_trained(weights))

    def note(self) -> None:
        """Note the values before a step's passes. In a worker's first steps this blocks for the device if parameters
        are frozen, on each rank that reports writes."""
        if self._weights is None:
            self._weights = TrainedWeights(self._state.model)
        self._weights.note(has_values=self._warns and not self._has_warned)
        frozen = _frozen(self._state) if self._steps_left and self._warns else {}
        self._hashes = hashes_by_name(frozen) if frozen else {}

    def look(self) -> None:
        """Check the values after a step's passes. Raises: UsageError."""
        self.require_same_trained()
        assert self._weights is not None, "note() comes before"
        self._look_at_trained(self._weights)
        self._look_at_frozen()

    def require_same_trained(self) -> None:
        """Raise UsageError where other parameters are trained than before the passes."""
        if self._weights is not None and (changed := self._weights.toggled()):
            raise UsageError(
                f"the loss freezes or thaws {named(changed)} within a step, which sums the gradients of what was "
                "trained when it began: do it between steps, alike on every rank, in a training function of your own"
            )

    def _look_at_trained(self, weights: TrainedWeights) -> None:
        if not self._has_warned and (written := weights.written()):
            self._has_warned = True
            self._warn(
                f"writes what is trained: {named(written)}",
                "where a step is broken off, or a node joins, ranks come to differ",
                "write it after the optimizer's step (optimizer.register_step_post_hook)",
            )

    def _look_at_frozen(self) -> None:
        self._steps_left = max(0, self._steps_left - 1)
        if not self._hashes:
            return
        self._membership.watcher.do(Activity.COMPUTE)  # the check does not wait for other ranks
        now = hashes_by_name(_frozen(self._state))
        changed = [name for name, before in self._hashes.items() if now.get(name, before) != before]
        if changed:
            self._steps_left = 0
            self._warn(
                f"changed what is frozen: {named(changed)}",
                "in a step that is done again it changes twice",
                "make a buffer of it, or update it after the commit, in a training function of your own",
            )

    def _warn(self, what: str, otherwise: str, cure: str) -> None:
        """Raise UsageError in ordered mode; else warn of the consequence."""
        if self._is_ordered:
            what = f"--reduction ordered: a forward pass {what}, once in each micro-batch, so the world decides"
            raise UsageError(f"{what}: {cure}")
        self._worker.reporter.warn(f"a forward pass {what}; {otherwise}: {cure}")


class TrainedWeights:
    """The trained parameters of a module, and which of them were frozen, thawed or written since `note`."""

    def __init__(self, module: nn.Module) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._lazy = {name for name, one in zip(self._names, self._parameters, strict=True) if is_lazy(one)}
        """parameters that get their shape, and are written, in the first pass"""
        self._are_trained: list[bool] = []
        self._versions: list[int] | None = None

    def note(self, *, has_values: bool) -> None:
        """Remember the present parameters; their versions only where `has_values`."""
        self._are_trained = [one.requires_grad for one in self._parameters]
        self._versions = self._versions_of_trained() if has_values else None

    def toggled(self) -> list[str]:
        """Return the names of parameters that were frozen or thawed."""
        return self._differing(self._are_trained, [one.requires_grad for one in self._parameters])

    def written(self) -> list[str]:
        """Return the names of trained parameters that were written in place."""
        if self._versions is None:
            return []
        found = self._differing(self._versions, self._versions_of_trained())
        return [name for name in found if name not in self._lazy]

    def _versions_of_trained(self) -> list[int]:
        """Return the versions of trained parameters; 0 for the others, which may have none."""
        pairs = zip(self._parameters, self._are_trained, strict=True)
        return [one._version if is_trained else 0 for one, is_trained in pairs]

    def _differing(self, before: Sequence[int], now: Sequence[int]) -> list[str]:
        """Return the names of the parameters whose values differ."""
        if before == now:  # the usual case, in each step
            return []
        return [name for name, one, other in zip(self._names, before, now, strict=True) if one != other]


def _frozen(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the frozen parameters of the model and of modules among the extras, by name."""
    return {
        f"{place}.{name}" if place else name: parameter.detach()
        for place, module in state.kept.modules.items()
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
