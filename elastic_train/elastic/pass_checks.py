"""What forward and backward passes must leave alone: which parameters are trained, and the values of all."""

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
"""of a worker, in which frozen parameters are looked at: in the first one a copy that follows a weight equals it, in
the second perhaps too, where the learning rate begins at 0"""


class PassChecks:
    """Looks at what passes must leave alone, for one worker: in whole steps all of it, and through the modules of a
    loop of one's own, of which optimizers know the rest, the trained weights.

    Which parameters are trained: a reduction sums the gradients of those that were when the step began. What a loss
    thaws would be trained by this rank's own gradient, what it freezes be waited for.

    Trained weights: until a step's gradient is applied they are those of the last commit, on every rank. So they are
    handed to newcomers meanwhile, and nothing keeps them for a step that is done again. Each in-place write shows in
    the parameter's version counter, in every step, at the cost of microseconds. Whether it has changed a bit does not:
    that would take a copy, and a wait for the device. So a write that changes nothing when it comes again, as a clamp
    or a maximal norm, is taken for any other. Nor is it harmless: a rank without samples at an epoch's end makes no
    pass in ordered mode, and in a step that is broken off some have made theirs. Spectral norm and other
    parametrizations write buffers alone; what an optimizer's hook writes is no part of the passes. A write through
    `.data` is not seen.

    Frozen parameters: they would move with each pass, so that they depend on how many of them a rank has, and on
    whether the step is done again. What a loss does to them does not change with the world: they are looked at in a
    worker's first steps alone, for a recovery waits for it.
    """

    def __init__(self, worker: Worker, membership: Membership) -> None:
        self._worker, self._state, self._membership = worker, worker.state, membership
        self._is_ordered = worker.config.reduction == "ordered"
        self._tells = False
        """whether this rank tells of weights that are written; with fast reduction rank 0 warns for all"""
        self._weights: TrainedWeights | None = None
        """of the model; made in a world's first whole step"""
        self._has_warned = False
        self._steps_left = FROZEN_STEPS
        self._hashes: dict[str, list[int]] = {}

    def enter(self, world: World) -> None:
        """The steps of a world begin."""
        self._tells = self._is_ordered or world.rank == 0
        self._weights = None

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Look at each forward pass through a module of an own loop, where this rank tells of it. In between, the
        function may write weights by hand, alike on every rank."""
        if self._tells:
            weights = TrainedWeights(ddp.module)
            ddp.register_forward_pre_hook(lambda *_: weights.note(has_values=not self._has_warned))
            ddp.register_forward_hook(lambda *_: self._look_at_trained(weights))

    def note(self) -> None:
        """The passes of a step begin. Blocks for the device in a worker's first steps, where something is frozen, on
        each rank that would tell."""
        if self._weights is None:
            self._weights = TrainedWeights(self._state.model)
        self._weights.note(has_values=self._tells and not self._has_warned)
        frozen = _frozen(self._state) if self._steps_left and self._tells else {}
        self._hashes = hashes_by_name(frozen) if frozen else {}

    def look(self) -> None:
        """They are over. Raises: UsageError."""
        self.require_same_trained()
        assert self._weights is not None, "note() comes before"
        self._look_at_trained(self._weights)
        self._look_at_frozen()

    def require_same_trained(self) -> None:
        """Raises: UsageError where other parameters are trained than when the passes began."""
        if self._weights is not None and (changed := self._weights.toggled()):
            raise UsageError(
                f"the loss freezes or thaws {named(changed)} within a step, which sums the gradients of what was "
                "trained when it began: do it between steps, alike on every rank, in a training function of your own"
            )

    def _look_at_trained(self, weights: TrainedWeights) -> None:
        if not self._has_warned and (written := weights.written()):
            self._has_warned = True
            self._tell(
                f"writes what is trained: {named(written)}",
                "where a step is broken off, or a node joins, ranks come to differ",
                "write it after the optimizer's step (optimizer.register_step_post_hook)",
            )

    def _look_at_frozen(self) -> None:
        self._steps_left = max(0, self._steps_left - 1)
        if not self._hashes:
            return
        self._membership.watcher.do(Activity.COMPUTE)  # it waits for nobody
        now = hashes_by_name(_frozen(self._state))
        changed = [name for name, before in self._hashes.items() if now.get(name, before) != before]
        if changed:
            self._steps_left = 0
            self._tell(
                f"changed what is frozen: {named(changed)}",
                "in a step that is done again it changes twice",
                "make a buffer of it, or update it after the commit, in a training function of your own",
            )

    def _tell(self, what: str, otherwise: str, cure: str) -> None:
        """Raises: UsageError in ordered mode; else what comes of it is told."""
        if self._is_ordered:
            what = f"--reduction ordered: a forward pass {what}, once in each micro-batch, so the world decides"
            raise UsageError(f"{what}: {cure}")
        self._worker.reporter.warn(f"a forward pass {what}; {otherwise}: {cure}")


class TrainedWeights:
    """Which parameters of a module are trained, and which of these are written, from one moment to another."""

    def __init__(self, module: nn.Module) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._lazy = {name for name, one in zip(self._names, self._parameters, strict=True) if is_lazy(one)}
        """those that get their shape, and are written, in the first pass"""
        self._are_trained: list[bool] = []
        self._versions: list[int] | None = None

    def note(self, *, has_values: bool) -> None:
        """What comes shows from here on; writes only where `has_values`."""
        self._are_trained = [one.requires_grad for one in self._parameters]
        self._versions = self._versions_of_trained() if has_values else None

    def toggled(self) -> list[str]:
        """The names of those that have been frozen or thawed."""
        return self._differing(self._are_trained, [one.requires_grad for one in self._parameters])

    def written(self) -> list[str]:
        """The names of those that were trained, and have been written in place."""
        if self._versions is None:
            return []
        found = self._differing(self._versions, self._versions_of_trained())
        return [name for name in found if name not in self._lazy]

    def _versions_of_trained(self) -> list[int]:
        """0 of the others, which may have none."""
        pairs = zip(self._parameters, self._are_trained, strict=True)
        return [one._version if is_trained else 0 for one, is_trained in pairs]

    def _differing(self, before: Sequence[int], now: Sequence[int]) -> list[str]:
        """The names of the parameters of which that differs."""
        if before == now:  # in each step
            return []
        return [name for name, one, other in zip(self._names, before, now, strict=True) if one != other]


def _frozen(state: TrainState) -> dict[str, torch.Tensor]:
    """By name, parameters of the model and of modules among the extras."""
    return {
        f"{place}.{name}" if place else name: parameter.detach()
        for place, module in state.kept.modules.items()
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
