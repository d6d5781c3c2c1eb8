"""The DDP of a user's own loop: gradients averaged by samples, buffers of rank 0, and no effect of a stand-in."""

# Without postponed annotations: DDP compares the annotations of a communication hook with its own types.

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_train.elastic.session_steps import SessionSteps, StepInHand
from elastic_train.elastic.step_sums import StepSums
from elastic_train.elastic.whole_steps import MODEL_ALONE
from elastic_train.errors import UsageError
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Activity
from elastic_train.training.collectives import reduced, require_sound
from elastic_train.training.reduction import (
    SHARES_BUFFERS,
    require_one_device,
    require_reduced,
    share_buffers,
)
from elastic_train.wording import named
from elastic_train.world import World

MAKE_ANEW = "make it with training.parallel() in the function and keep it in a local variable"


@dataclass(frozen=True)
class Wrapped:
    """A DDP module, to which only the training function holds a strong reference."""

    ddp: weakref.ref[DistributedDataParallel]
    frozen: list[nn.Parameter]
    """its parameters that were frozen when it was made: it does not sum their gradients"""


class OwnParallel:
    """Makes the DDP modules of one world. Their hooks tell the watcher when this rank waits for others.

    Args:
        note_unwrapped: called where the only worker commits a step and has made no module.
        require_unbroken: raises FormationFailed where the process group was broken off; waits for the device.
        watch: called with each module that is made, to check its passes.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        watcher: Watcher,
        steps: SessionSteps,
        sums: StepSums,
        note_unwrapped: Callable[[], None],
        require_unbroken: Callable[[], None],
        watch: Callable[[DistributedDataParallel], None] = lambda _ddp: None,
    ) -> None:
        self._world_size = world.world_size
        self._device = device
        self._watcher = watcher
        self._steps = steps
        self._sums = sums
        self._note_unwrapped, self._require_unbroken, self._watch = note_unwrapped, require_unbroken, watch
        self._lock, self._is_over = threading.Lock(), False
        self._num_ended, self._finds_unused = 0, False
        """backward passes that have ended; whether DDP searches any of the modules for unused parameters"""
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        self.made: list[Wrapped] = []

    def wrap(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """As `Training.parallel`."""
        if self._world_size > 1:
            require_one_device(module)
        self._watcher.do(Activity.REDUCE, FIRST_SECONDS)  # DDP may receive rank 0's weights
        with self._kept_if_broken(module):
            ddp = DistributedDataParallel(module, **options)
        self._finds_unused |= ddp.find_unused_parameters and not ddp.static_graph
        self._steps.turn_to_function()
        if self._world_size > 1:
            ddp.register_comm_hook(self, OwnParallel._average_by_samples)
        ddp.register_comm_hook = _refuse_hook  # type: ignore[method-assign]  # else it fails when a worker joins
        shares_buffers: bool = getattr(ddp, SHARES_BUFFERS)
        if self._world_size == 1 or self._device.type == "cpu":  # a lone worker has them; else the hook shares them
            setattr(ddp, SHARES_BUFFERS, False)
        shares_buffers = shares_buffers and self._world_size > 1 and self._device.type == "cpu"
        ddp.register_forward_pre_hook(partial(self._enter_forward, shares_buffers=shares_buffers))
        self._watch(ddp)
        # On a GPU this hook would come too early: buffers arrive later, and a SyncBatchNorm waits within its pass.
        if self._device.type == "cpu" and module not in self._hooks:
            self._hooks[module] = module.register_forward_pre_hook(_ForwardBegins(self))
        self.made[:] = [one for one in self.made if one.ddp() is not None]  # a function may make one per epoch
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self.made.append(Wrapped(weakref.ref(ddp), frozen))
        return ddp

    @contextmanager
    def _kept_if_broken(self, module: nn.Module) -> Iterator[None]:
        """Keep `module` intact while DDP copies rank 0's weights and buffers into it. If NCCL's group is aborted, these
        are garbage, and the old values are restored. Raises: FormationFailed in that case."""
        if self._world_size == 1 or self._device.type == "cpu":  # gloo raises before it changes any value
            yield
            return
        tensors = [one.detach() for one in (*module.parameters(), *module.buffers())]
        before = [one.clone() for one in tensors]
        try:
            yield
            self._require_unbroken()
        except Exception:  # of any kind: it is raised again, with the module restored
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            raise

    def require_made(self) -> None:
        """Raise UsageError where several workers train without DDP: each would train a model of its own."""
        if self.made:
            return
        if self._world_size > 1:
            raise UsageError(
                f"nobody averages the gradients of the {self._world_size} workers: train the module that "
                "training.parallel() makes in the training function"
            )
        self._note_unwrapped()

    def require_none(self) -> None:
        """Raise UsageError where a DDP module exists in a step that `Training.step` computes. Its hook would weight the
        gradients a second time, and in ordered mode it would wait for a rank with fewer micro-batches."""
        if any(one.ddp() is not None for one in self.made):
            raise UsageError(f"there is a module of training.parallel(), and {MODEL_ALONE}")

    def close(self) -> None:
        """Remove the hooks of the user's own module; the DDP modules belong to the training function."""
        self._is_over = True
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _enter_forward(self, ddp: DistributedDataParallel, _arguments: Any, *, shares_buffers: bool) -> None:
        """Share the buffers before the module's own forward pass; a SyncBatchNorm waits within that.

        Args:
            shares_buffers: whether to share them here, in DDP's place.
        """
        step = self._steps.in_hand
        if step is not None:
            step.has_begun = True
            # On a GPU this lasts until the optimizer steps: it is unknown which call makes the host wait for the GPU.
            # And the user's code in between may pause, or compile for another shape.
            waits = Activity.REDUCE if self._device.type == "cpu" else Activity.STEP
            self._watcher.do(waits if self._world_size > 1 else Activity.COMPUTE)
            step.end_passes(ddp.module)  # before a second pass: the buffers that all get now are the old ones
        if shares_buffers and ddp.require_forward_param_sync:
            share_buffers(ddp.module)
        if step is not None and step.is_stand_in:
            step.stand_in(ddp.module)

    def leave_collective(self) -> None:
        """Note that the module's own forward pass begins, perhaps that of an evaluation before the step's."""
        step = self._steps.in_hand
        if step is not None:
            self._watcher.do(Activity.COMPUTE, None if step.has_begun else self._watcher.pace.between_steps)

    def _average_by_samples(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: sum over the ranks each rank's mean times its share of the step's samples."""
        if self._is_over:
            raise UsageError(f"a DDP module of an earlier world was trained: {MAKE_ANEW}")
        step, gradients = self._steps.required(), bucket.buffer()
        weight, then = step.weight, _nothing
        if bucket.is_last():
            then = self._end_backward(step, is_on_gpu=gradients.is_cuda)
        # A stand-in's gradients may be NaN, which no weight makes zero.
        gradients = gradients.mul_(weight) if weight > 0 else gradients.zero_()
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None, "asynchronous"
        if gradients.is_cuda:
            future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
            return future
        return reduced(work, gradients, then)

    def _end_backward(self, step: StepInHand, *, is_on_gpu: bool) -> Callable[[], None]:
        """Note that the backward pass is over: this rank waits for its peers until it has the last sum. Returns what to
        call then, on the CPU: the function's code before the optimizer's step may take time."""
        # Before any rank can have the sum. So rank 0, whenever it is lost, has logged every step but that in hand.
        self._sums.settle()
        step.has_reduced = True
        with self._lock:
            self._watcher.do(Activity.STEP if is_on_gpu else Activity.REDUCE)
            self._num_ended += 1
            number = self._num_ended

        def leave() -> None:
            with self._lock:
                if number == self._num_ended:  # else a pass through several modules still waits for other sums
                    # DDP still waits to learn which parameters are used.
                    self._watcher.do(Activity.STEP if self._finds_unused else Activity.COMPUTE)

        return leave


def require_summed(made: Iterable[Wrapped], step: int) -> None:
    """Raise UsageError where a backward pass has left gradients unsummed, FormationFailed where a lost peer is the
    cause."""
    require_sound()
    found = [(ddp, one.frozen) for one in made if (ddp := one.ddp()) is not None]
    for ddp, frozen in found:
        try:
            require_reduced(ddp, f"in step {step}", "give training.parallel() find_unused_parameters=True")
        except UsageError as error:
            known = {id(one) for one in frozen}
            _refuse_changed(
                [name for name, one in ddp.module.named_parameters() if not one.requires_grad and id(one) not in known],
                f"frozen, and DDP waits for a gradient of each in step {step}",
                error,
            )
            raise
    thawed = {id(one) for _, frozen in found for one in frozen if one.requires_grad and one.grad is not None}
    if thawed:
        for ddp, frozen in found:  # a later module may sum them
            thawed -= {id(one) for one in ddp.parameters()} - {id(one) for one in frozen}
        names = {name: None for ddp, _ in found for name, one in ddp.module.named_parameters() if id(one) in thawed}
        _refuse_changed([*names], f"thawed, and nobody sums their gradients of step {step}")


def _refuse_changed(names: list[str], what: str, cause: UsageError | None = None) -> None:
    if names:
        raise UsageError(
            f"{named(names)} changed since training.parallel() made the DDP module: {what}. Call training.parallel() "
            "again after freezing or thawing, at the top of the epoch"
        ) from cause


def _refuse_hook(*_arguments: Any, **_options: Any) -> NoReturn:
    raise UsageError(
        "register_comm_hook() of a module that training.parallel() has made: it has a hook, which weighs gradients by "
        "samples, and DDP takes one alone; leave it out"
    )


def _nothing() -> None:
    pass


class _ForwardBegins:
    """A hook of the user's own module. That may be copied or pickled: a copy's hook does nothing."""

    def __init__(self, parallel: OwnParallel | None = None) -> None:
        self._parallel = None if parallel is None else weakref.ref(parallel)

    def __call__(self, *_arguments: Any) -> None:
        parallel = None if self._parallel is None else self._parallel()
        if parallel is not None:
            parallel.leave_collective()

    def __reduce__(self) -> tuple[type["_ForwardBegins"], tuple[()]]:
        return _ForwardBegins, ()
