"""The gradients of one step, from every rank's micro-batches to one gradient in every rank's `.grad`.

This is the seam between the modes of `--reduction`. A `Reduction` runs forward and backward over a rank's
micro-batches and leaves the gradient of the mean loss over the step's samples, the same on every rank. The loss and
the members' votes (such as "I was told to stop") travel with it, so that a decision after a step costs no message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.collectives import all_reduce, numbers, wait
from elastic_train.training.kept import leave_no_trace
from elastic_train.training.sampler import MicroBatch
from elastic_train.wording import named
from elastic_train.world import World

Batch = Any
Share = Sequence[tuple[MicroBatch, Batch]]
"""a rank's part of a step: micro-batches with their data, None for an empty one"""
Loss = Callable[[nn.Module, MicroBatch, Batch], torch.Tensor]
"""(module, micro-batch, its data or None if it is empty) -> mean loss over the micro-batch's samples, a scalar"""


STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
"""the buffers of torch's normalising layers"""
SHARES_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""DDP's option (and attribute) that shares rank 0's buffers in each forward pass; newer torch warns of the old name"""


@dataclass(frozen=True)
class StepTotals:
    """The results of a step's reduction, the same on every rank."""

    loss: float
    """mean over all samples of the step"""
    votes: tuple[int, ...]
    """the ranks' votes, summed entry by entry"""


class Reduction(Protocol):
    """A way to turn micro-batches into the step's gradient; every rank calls `run` once per step."""

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        """Run forward and backward, and reduce. Blocks until every rank has taken part.

        Args:
            micro_batches: this rank's share of the step, at least one (perhaps empty) micro-batch.
            loss: computes a micro-batch's mean loss with the module that it is given.
            scale: multiplies a loss before its backward pass (fp16 loss scaling).
            votes: this rank's votes, as many on every rank.

        Raises:
            RuntimeError: a peer is lost, and the communication library reports it. FormationFailed: it does not.
        """
        ...


class FastReduction:
    """All-reduces of DDP's buckets, overlapping the backward pass; the order of summing depends on the world size.

    All micro-batches but the last accumulate under `no_sync`. Gradients are weighted by sample count: each loss is
    multiplied by its share of the step's samples, and by the world size where DDP divides by it.

    On the CPU a communication hook starts the sums of the buckets, in place, during the backward pass. `run` waits for
    them after it, so that the wait can end where gloo's own does not (collectives.py).

    Loss and votes are the gradient of one more parameter, in DDP's first bucket: a message of their own would cost as
    much as the whole gradient of a small model. That parameter is the first root of the backward pass, so they are
    sent before any other gradient. They are float32; so the loss travels as this rank's part of the mean, not of the
    sum. Options that make DDP search the graph do not find this parameter there; then they have a message of their own.

    BatchNorm's running statistics are each rank's own: in train mode nothing reads them. A caller that needs them
    takes rank 0's (`share_buffers`, a snapshot). A model with other buffers gets those of rank 0 before each
    step, as with DDP, in one message per data type. An empty micro-batch changes no buffer.

    Every rank of a world builds it alike, from equal models; nothing is broadcast here. Parameters may be frozen and
    thawed between steps, alike on every rank. A new DDP is made then: each one sums a fixed set of gradients.

    Args:
        num_votes: number of votes that `run` gets.
        do: called in every step when this rank may begin to wait for peers, and when it computes again.
        options: DDP's own, such as `find_unused_parameters`.

    Raises:
        UsageError: the model is spread over several devices, and there are several ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        num_votes: int,
        do: Callable[..., None] = lambda *_: None,
        **options: Any,
    ) -> None:
        self._world_size = world.world_size
        self._device = device
        self._model = self._module = model
        self._totals = nn.Parameter(torch.zeros(1 + num_votes, dtype=torch.float32, device=device))
        self._no_votes = torch.zeros(1 + num_votes, dtype=torch.float32, device=device)
        self._rides_along = not any(options.values())
        self._options = options
        self._sums = _Sums()
        self._divisor = 1
        self._do = do
        self._waits_in_forward = self._waits_in_backward = False
        self._shared: nn.Module | None = None
        """the model, where its buffers are taken from rank 0 before each step"""
        self._parameters = list(model.parameters()) if world.world_size > 1 else []
        self._are_trained: list[bool] = []
        """`requires_grad` of each parameter when DDP was made"""
        if world.world_size > 1:
            require_one_device(model)
            if not has_only_statistics(model):
                self._shared = model
            self._waits_in_forward = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
            if device.type != "cpu":
                self._divisor = world.world_size
                self._waits_in_backward = True
            self._follow_requires_grad()

    def _follow_requires_grad(self) -> None:
        """Make DDP, and make it anew when other parameters are trained: it would wait for gradients that never come."""
        are_trained = [parameter.requires_grad for parameter in self._parameters]
        if are_trained == self._are_trained:
            return
        self._are_trained, self._module = are_trained, self._model  # the one before is gone, its memory with it
        ddp = DistributedDataParallel(
            _Carrier(self._model, self._totals) if self._rides_along else self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # spares a copy of every gradient
            init_sync=False,  # the models are equal; a newcomer's differs only in a step without samples
            **{SHARES_BUFFERS: False, **self._options},
        )
        if self._device.type == "cpu":
            # Without a reference to `self`, which holds the DDP, and without annotations, which DDP would check.
            do = self._do
            ddp.register_comm_hook(self._sums, lambda sums, bucket: _begin_sum(sums, bucket, do))
        # DDP has registered all parameters and buffers. From here on its module is the model itself, as a loss that
        # reads `module.module` expects.
        ddp.module = self._model
        self._module = ddp

    def run(
        self, micro_batches: Share, loss: Loss, scale: Callable[..., torch.Tensor], votes: Sequence[int]
    ) -> StepTotals:
        """As `Reduction.run`. Raises: UsageError, without waiting: DDP waits for a gradient that does not come."""
        self._follow_requires_grad()
        self._sums.begin()
        totals = self._make_totals(votes)
        if self._shared is not None:
            self._enter_waits()
            share_buffers(self._shared)
            if not self._waits_in_backward:  # on a GPU the wait lasts until the step's end
                self._do(Activity.COMPUTE)
        for micro_batch, batch in micro_batches:
            with self._synchronise_at(micro_batch), ExitStack() as passes:
                if self._waits_in_forward:
                    self._enter_waits()
                if batch is None:
                    passes.callback(leave_no_trace(self._model))
                mean = loss(self._module, micro_batch, batch)
                weight = len(micro_batch.indices) * self._divisor / micro_batch.step_samples
                if batch is not None:
                    totals[0].add_(mean.detach().to(totals.device), alpha=weight)  # the loss may be on another device
                scaled = scale(mean if weight == 1.0 else mean * weight)
                if self._waits_in_backward and micro_batch.is_last:
                    self._enter_waits()
                if batch is None:
                    passes.enter_context(zero_gradients(self._module))
                if self._world_size > 1 and micro_batch.is_last and self._rides_along:
                    self._totals.grad = None
                    torch.autograd.backward([scaled, self._totals], [None, totals])
                else:
                    scaled.backward()  # type: ignore[no-untyped-call]
        self._require_begun(micro_batches[-1][0].step)
        while self._sums.works:
            wait(*self._sums.works.pop(0))
        if self._waits_in_backward:
            self._do(Activity.REDUCE)  # this rank has no work of its own left
        if self._world_size > 1 and self._rides_along:
            assert self._totals.grad is not None, "the last micro-batch has set it"
            totals = self._totals.grad
        elif self._world_size > 1:
            all_reduce(totals)
            totals /= self._divisor
        # The only place where a step waits for the device. Where DDP divides, votes are not quite integers.
        mean_loss, *all_votes = numbers(totals)
        return StepTotals(mean_loss, tuple(round(vote) for vote in all_votes))

    def _enter_waits(self) -> None:
        """Report that this rank may wait for peers; on a GPU until the step's end, mixed with its own work."""
        self._do(Activity.STEP if self._waits_in_backward else Activity.REDUCE)

    def _make_totals(self, votes: Sequence[int]) -> torch.Tensor:
        """Return (0 for the loss, votes...), each times DDP's divisor, on the device. The loss is added later."""
        if not any(votes):
            return self._no_votes.clone()
        is_cuda = self._device.type == "cuda"
        # From pinned memory: another copy would wait until the device has done all queued work.
        totals = torch.tensor(
            [0, *(vote * self._divisor for vote in votes)], dtype=torch.float32, pin_memory=is_cuda, device="cpu"
        )
        return totals.to(self._device, non_blocking=True) if is_cuda else totals

    def _require_begun(self, step: int) -> None:
        """Raises: UsageError: DDP has not summed all gradients, so those in `.grad` are this rank's own."""
        if self._world_size == 1:
            return
        assert isinstance(self._module, DistributedDataParallel)
        if self._waits_in_backward:
            require_reduced(self._module, f"in step {step}", "give --find-unused-parameters")
        elif not self._sums.are_all:
            raise _unreduced(self._module, f"in step {step}", "give --find-unused-parameters")

    def _synchronise_at(self, micro_batch: MicroBatch) -> Any:
        if isinstance(self._module, DistributedDataParallel) and not micro_batch.is_last:
            return self._module.no_sync()
        return nullcontext()


Received = list[tuple[list[torch.Tensor], torch.Tensor]]
"""per data type: the buffers, and their new values as one flat tensor"""


def share_buffers(model: nn.Module, check: Callable[[], None] = lambda: None) -> None:
    """Copy the dense buffers of rank 0 to every rank, all or none. Blocks and raises as `buffers_of_rank_0`.

    DDP does the same before a forward pass, but its wait may not end when a peer is lost.
    """
    take_buffers(buffers_of_rank_0(model, check))


@torch.no_grad()
def buffers_of_rank_0(
    model: nn.Module, check: Callable[[], None] = lambda: None, *, saved_alone: bool = False
) -> Received:
    """Receive rank 0's dense buffers, one message per data type; sparse ones are left out. Blocks until all have come.

    Changes no buffer. Returns an empty list on rank 0.

    Args:
        check: raises where the received values must not be used.
        saved_alone: leave out buffers of no state dict, such as a cache, which may have another size on each rank.

    Raises: as `collectives.wait`, and as `check`.
    """
    layers = model.modules() if saved_alone else ()
    left_out = {id(layer._buffers.get(name)) for layer in layers for name in layer._non_persistent_buffers_set}
    by_type = _by_type(one for one in model.buffers() if id(one) not in left_out)
    flats = [(buffers, torch.cat([one.reshape(-1) for one in buffers])) for buffers in by_type]
    # As bytes: gloo knows only some data types.
    works = [dist.broadcast(flat.view(torch.uint8), 0, async_op=True) for _, flat in flats]
    for (_, flat), work in zip(flats, works, strict=True):
        wait(work, flat)
    check()
    return flats if dist.get_rank() > 0 else []


@torch.no_grad()
def take_buffers(received: Received) -> None:
    """Write the received values into the buffers."""
    for buffers, flat in received:
        for buffer, part in zip(buffers, torch.split(flat, [one.numel() for one in buffers]), strict=True):
            buffer.data.copy_(part.view(buffer.shape))  # a graph may have saved it; `.data` spares its version check


def _by_type(buffers: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for buffer in (one for one in buffers if one.layout is torch.strided):
        found.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    return list(found.values())


@dataclass
class _Sums:
    """The sums of one step's gradients, as the communication hook starts them."""

    works: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """started, and not waited for yet"""
    are_all: bool = False
    """whether the sum of the last bucket, and so every sum, has started"""

    def begin(self) -> None:
        """Forget what a step that ended in an error has left."""
        self.works.clear()
        self.are_all = False


def require_reduced(ddp: DistributedDataParallel, when: str, do: str) -> None:
    """Raises: UsageError: a backward pass through `ddp` left out parameters, so that the gradients are this rank's own.
    Does not block. `do` is the advice for the error message."""
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _unreduced(ddp, when, do) from error


def _unreduced(ddp: DistributedDataParallel, when: str, do: str) -> UsageError:
    names = without_gradient(ddp.module)
    what = (
        f"{named(names)} got no gradient" if names else "not all parameters got a gradient through DDP's forward pass"
    )
    return UsageError(f"{what} {when}, and DDP waits for all: {do}, or freeze what is not trained")


def without_gradient(model: nn.Module) -> list[str]:
    """The names of trained parameters without a gradient."""
    return [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]


def _begin_sum(
    sums: _Sums, bucket: dist.GradBucket, do: Callable[[Activity], None]
) -> torch.futures.Future[torch.Tensor]:
    """Start the sum of a bucket over the ranks, as DDP's communication hook. The sum is made in the bucket, of which
    the gradients are views. DDP itself waits for a sparse one."""
    if bucket.is_last():  # the rest of the backward pass concerns the model's input alone
        sums.are_all = True
        do(Activity.REDUCE)
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None, "asynchronous"
    future: torch.futures.Future[torch.Tensor]
    if gradients.is_sparse:
        future = work.get_future().then(lambda done: done.value()[0])
        return future
    sums.works.append((work, gradients))
    future = torch.futures.Future()
    future.set_result(gradients)
    return future


@contextmanager
def zero_gradients(module: nn.Module) -> Iterator[None]:
    """Make a backward pass give zeros to every parameter that takes part in it, so that DDP has all its gradients.

    For a rank without samples: the loss of its one stand-in sample may be NaN (a variance over the batch), and NaN
    times a weight of 0 is NaN.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def has_only_statistics(model: nn.Module) -> bool:
    """Return whether all buffers are running statistics of torch's own normalising layers. A derived layer does not
    count: it may read its statistics in training."""
    return all(
        type(layer).__module__.startswith("torch.nn.modules.") and layer._buffers.keys() <= STATISTICS
        for layer in model.modules()
        if layer._buffers
    )


def require_one_device(model: nn.Module) -> None:
    """Raises: UsageError, as `why_alone`."""
    if (why := why_alone(model)) is not None:
        raise UsageError(why)


def why_alone(model: nn.Module) -> str | None:
    """Return why a model cannot train in several workers, if so: waits for sums, and their abort, know one device."""
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) < 2:
        return None
    return f"the model has parts on {' and '.join(places)}: train it in one worker, or put all parts on one device"


class _Carrier(nn.Module):
    """The module that DDP is built from: the model's parameters and one more. It is never called."""

    def __init__(self, model: nn.Module, totals: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.totals = totals
