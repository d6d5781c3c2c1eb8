"""Ordered reduction: one step's gradient with the same bits for every world size.

The global batch is V micro-batches, one per virtual rank, whatever the world. Each gives a gradient of its own (its
mean loss times its share of the step's samples), and those V leaves are added in one fixed binary tree: a node of
level j covers the virtual ranks [k * 2^j, (k + 1) * 2^j), cut off at V. IEEE addition commutes but is not associative,
so the tree alone decides the bits.

A rank runs a contiguous block of virtual ranks and adds every subtree that lies in its block. The few partial sums
that are left are completed across ranks, by slices: slice r of all partial sums goes to rank r, which adds the rest of
the tree, and the finished slices are gathered. For V a multiple of the ranks that moves the bytes of a ring
all-reduce. Only copies go through the communication library; every addition is ours.

    V = 8, 3 ranks       rank 0: 0 1    rank 1: 2 3 4    rank 2: 5 6 7
    subtrees added locally      [01]           [23] 4           5 [67]
    completed by slices         (([01] + [23]) + ((4 + 5) + [67]))

How gradients get into place: a row is a flat vector of all gradients. The first leaf of a pair gives the tensors that
autograd has made for it, the second one is accumulated into those, and their sum is added to the row that waits for it,
or begins one. So a pair costs three passes over a gradient where a row per leaf would cost six, and the sum is already
where the optimizer reads it. What a parameter gets from nobody is -0.0, the neutral element of IEEE addition (x + -0.0
is x for every x, which +0.0 does not do for -0.0).
A row too is all that is sent: DDP's reducer is not used. A communication hook of DDP would overlap the exchange with
the last backward pass, but on CPUs the two compete for the same cores, and DDP rebuilds its buckets after the first
step, which would change who sends what.

Loss and votes travel beside the rows, each value from one rank or an integer, so that any order of summing gives the
same bits. So do marks of who uses which parameter: one that no virtual rank uses keeps `.grad` None, as in one process.

BatchNorm: every micro-batch starts from the buffers before the step, and the change that it makes to each float buffer
is weighted by its samples and summed in the same tree: running statistics move by the mean over the micro-batches of
what each alone would have done. That is ghost batch normalization (Hoffer, Hubara, Soudry, "Train longer, generalize
better", 2017) with ghost batches of B / V samples; it is defined without a world, it costs no message of its own, and
a buffer that no forward pass writes keeps its bits. Counters (`num_batches_tracked`) take the change of the last
virtual rank, which always has samples: one more per step. An empty micro-batch gives nothing to either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.collectives import exchange
from elastic_train.training.determinism import name_nondeterministic_operator
from elastic_train.training.reduction import Batch, Loss, Share, StepTotals
from elastic_train.training.sampler import MicroBatch, split
from elastic_train.world import World

ALIGNMENT_BYTES = 64
"""where a gradient starts in a row: as aligned as a tensor of its own, for the kernels that look at it"""

CHUNK_ELEMENTS = 4 * 2**20
"""of a row that are exchanged at a time, which bounds what is received and has not been added yet"""

SMALL_ELEMENTS = 2**18
"""received by a rank at most, of each partial sum, where a chunk is not sliced"""

T = TypeVar("T")
Node = tuple[int, int]
"""a subtree: the virtual ranks [start, stop) that it covers"""


# --- the tree ---------------------------------------------------------------------------------------------------------


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Whether the fixed tree over `num_leaves` adds these two."""
    size = left[1] - left[0]
    is_left_child = size & (size - 1) == 0 and left[0] % (2 * size) == 0
    return is_left_child and right == (left[1], min(left[1] + size, num_leaves)) and right[0] < right[1]


def push(stack: list[tuple[Node, T]], node: Node, value: T, num_leaves: int, add: Callable[[T, T], T]) -> None:
    """Put the next node to the right on `stack`, adding what the tree adds; `add(left, right)` gives the sum."""
    while stack and are_siblings(stack[-1][0], node, num_leaves):
        (start, _), left = stack.pop()
        node, value = (start, node[1]), add(left, value)
    stack.append((node, value))


def subtrees(start: int, stop: int, num_leaves: int) -> list[Node]:
    """The largest subtrees that lie in the leaves [start, stop), from left to right."""
    stack: list[tuple[Node, None]] = []
    for leaf in range(start, stop):
        push(stack, (leaf, leaf + 1), None, num_leaves, lambda left, right: None)
    return [node for node, _ in stack]


def tree_sum(leaves: Sequence[float]) -> float:
    stack: list[tuple[Node, float]] = []
    for leaf, value in enumerate(leaves):
        push(stack, (leaf, leaf + 1), value, len(leaves), lambda left, right: left + right)
    return stack[0][1]


# --- across ranks -----------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """Moves tensors between ranks; blocks until all have been sent and received.

    Between two ranks messages arrive in the order in which they were sent. Raises RuntimeError or
    FormationFailed when a peer is lost.
    """

    def __call__(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None: ...


class TreeExchange:
    """Completes the tree over all ranks' partial sums."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_leaves: int,
        transport: Transport = exchange,
        chunk: int = CHUNK_ELEMENTS,
    ) -> None:
        self._rank = rank
        self._chunk = chunk
        self._world_size = world_size
        self._num_leaves = num_leaves
        self._transport = transport
        self._plan = [
            (owner, node)
            for owner in range(world_size)
            for node in subtrees(*split(num_leaves, owner, world_size), num_leaves)
        ]
        # Nearest neighbour to the right first, so that not all ranks send to the same one at once.
        self._peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._received: dict[torch.dtype, Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._received.values())

    def complete(self, partials: Sequence[Tensor], message: Tensor | None = None) -> None:
        """The sum over all leaves, in place of this rank's first partial sum; every rank calls it.

        Args:
            partials: the sum of each of this rank's subtrees, from left to right, as flat tensors of one length, the
                same on every rank. All but the first are left with garbage.
            message: a flat tensor that goes along; the sum over the ranks takes its place, added in no fixed order.
        """
        for start in range(0, max(1, partials[0].numel()), self._chunk):
            self._complete_chunk([partial[start : start + self._chunk] for partial in partials], message)
            message = None

    def _complete_chunk(self, partials: list[Tensor], message: Tensor | None) -> None:
        result, rank = partials[0], self._rank
        # A small chunk is added up whole by everybody: more bytes, but one exchange less to wait for.
        is_small = result.numel() * (self._world_size - 1) <= SMALL_ELEMENTS
        length = result.numel()
        bounds = [
            (0, length) if is_small else split(length, peer, self._world_size) for peer in range(self._world_size)
        ]

        def part(tensor: Tensor, peer: int) -> Tensor:
            """Of a chunk, what rank `peer` adds up."""
            start, stop = bounds[peer]
            return tensor[start:stop]

        foreign = [owner for owner, _ in self._plan if owner != rank]
        slots = self._slots(part(result, rank), len(foreign))
        sends = [(part(partial, peer), peer) for peer in self._peers for partial in partials]
        receives = list(zip(slots, foreign, strict=True))
        messages: list[tuple[Tensor, int]] = []
        if message is not None:
            sends += [(message, peer) for peer in self._peers]
            messages = [(torch.empty_like(message), peer) for peer in self._peers]
        self._move(sends, receives + messages)
        if message is not None:
            for received, _ in messages:
                message += received
        own, others = iter(partials), iter(slots)
        stack: list[tuple[Node, Tensor]] = []
        for owner, node in self._plan:
            value = part(next(own), rank) if owner == rank else next(others)
            push(stack, node, value, self._num_leaves, lambda left, right: left.add_(right))
        target = part(result, rank)
        if rank > 0:  # else the leftmost operand, in which sums are made, is the target
            target.copy_(stack[0][1])
        if not is_small:
            self._move(
                sends=[(target, peer) for peer in self._peers],
                receives=[(part(result, peer), peer) for peer in self._peers],
            )

    def _slots(self, part: Tensor, count: int) -> list[Tensor]:
        """Where `count` partial sums of `part` are received."""
        buffer = self._received.get(part.dtype)
        if buffer is None or buffer.numel() < count * part.numel():
            buffer = self._received[part.dtype] = part.new_empty(count * part.numel())
        return list(buffer[: count * part.numel()].view(count, part.numel()))

    def _move(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        self._transport([s for s in sends if s[0].numel()], [r for r in receives if r[0].numel()])


# --- rows: where gradients are added ----------------------------------------------------------------------------------


class Row:
    """One gradient: all parameters' gradients and all float buffers' changes, in one flat vector per data type."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], changes: dict[torch.dtype, int], device: torch.device
    ) -> None:
        """`changes`: elements of the float buffers, by data type."""
        dtypes = list(dict.fromkeys([*(parameter.dtype for parameter in parameters), *changes]))
        grads: dict[int, Tensor] = {}
        self.flats: list[Tensor] = []
        self.changes: dict[torch.dtype, Tensor] = {}
        """views, like `grads`"""
        for dtype in dtypes:
            members = [index for index, parameter in enumerate(parameters) if parameter.dtype == dtype]
            sizes = [*(parameters[index].numel() for index in members), changes.get(dtype, 0)]
            unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
            *starts, total = accumulate((math.ceil(size / unit) * unit for size in sizes), initial=0)
            flat = torch.full((total,), -0.0, dtype=dtype, device=device)
            for index, start in zip(members, starts, strict=False):
                grads[index] = _view_like(flat[start:], parameters[index])
            self.flats.append(flat)
            if dtype in changes:
                self.changes[dtype] = flat[starts[-1] : starts[-1] + changes[dtype]]
        self.grads = [grads[index] for index in range(len(parameters))]
        """views, one per parameter"""

    def begin(self, leaf: Leaf) -> Row:
        """`leaf` takes the place of whatever was here."""
        used = [(view, grad) for view, grad in zip(self.grads, leaf.grads, strict=True) if grad is not None]
        if used:
            torch._foreach_copy_([view for view, _ in used], [grad for _, grad in used])
        for view, grad in zip(self.grads, leaf.grads, strict=True):
            if grad is None:
                view.fill_(-0.0)
        for dtype, view in self.changes.items():
            if dtype in leaf.changes:
                view.copy_(leaf.changes[dtype])
            else:
                view.fill_(-0.0)
        return self

    def add_leaf(self, leaf: Leaf) -> Row:
        used = [(view, grad) for view, grad in zip(self.grads, leaf.grads, strict=True) if grad is not None]
        if used:
            torch._foreach_add_([view for view, _ in used], [grad for _, grad in used])
        for dtype, change in leaf.changes.items():
            self.changes[dtype].add_(change)
        return self

    def add(self, other: Row) -> Row:
        for flat, right in zip(self.flats, other.flats, strict=True):
            flat.add_(right)
        return self


@dataclass
class Leaf:
    """The gradient of one virtual rank, or of two neighbours, in the tensors that autograd has made."""

    grads: list[Tensor | None]
    """by parameter; None where it was not used"""
    changes: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """of the float buffers, weighted; empty where no sample was"""
    sparse: set[int] = field(default_factory=set)
    """the parameters whose gradients autograd gives as sparse tensors"""

    def take(self, index: int, grad: Tensor, seen: set[int]) -> None:
        """A gradient that autograd has just made for a parameter. `seen`: the storages of this backward pass."""
        if grad.is_sparse:
            self.sparse.add(index)
            left, dense = self.grads[index], grad.to_dense()
            self.grads[index] = dense if left is None else left.add_(dense)
            return
        # Gradients can be views of one tensor (of parameters that were stacked) or one and the same (of a sum): what
        # is added to one of them must not show in another.
        storage = grad.untyped_storage().data_ptr()
        self.grads[index] = grad.clone() if storage in seen else grad
        seen.add(storage)


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of the beginning of `flat` with the parameter's shape, and its memory format where it has one."""
    start = flat[: parameter.numel()]
    if parameter.dim() in (4, 5) and not parameter.is_contiguous():
        memory_format = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
        if parameter.is_contiguous(memory_format=memory_format):
            return start.as_strided(parameter.size(), parameter.stride())
    return start.view(parameter.size())


# --- buffers ----------------------------------------------------------------------------------------------------------


class Buffers:
    """A model's buffers through one step: put back before every micro-batch, moved on at the end, or not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._floats: dict[torch.dtype, list[_Place]] = {}
        self._counters: list[_Place] = []
        self._constants: list[_Place] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                place = _Place(module, name, f"{prefix}.{name}" if prefix else name)
                if buffer.is_floating_point():
                    self._floats.setdefault(buffer.dtype, []).append(place)
                elif buffer.numel() == 1 and not buffer.is_complex():
                    self._counters.append(place)
                else:
                    self._constants.append(place)
        self._averaged = [place for places in self._floats.values() for place in places]
        self._tensors: dict[_Place, Tensor] = {}
        self._flat: dict[torch.dtype, Tensor] = {}
        self._values: list[Tensor] = []
        self._versions: list[int] = []

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        return {dtype: sum(place.get().numel() for place in places) for dtype, places in self._floats.items()}

    @property
    def num_counters(self) -> int:
        return len(self._counters)

    def save(self) -> None:
        self._tensors = {place: place.get() for place in (*self._averaged, *self._counters, *self._constants)}
        self._flat = {dtype: self._concatenated(places) for dtype, places in self._floats.items()}
        self._values = [part for dtype, places in self._floats.items() for part in self._cut(self._flat[dtype], places)]
        self._values += [self._tensors[place].clone() for place in self._counters]
        self._versions = [self._tensors[place]._version for place in self._constants]

    def restore(self) -> None:
        """The very tensors that were there at `save`, with their values of then."""
        changing = [*self._averaged, *self._counters]
        for place in changing:
            if place.get() is not self._tensors[place]:
                place.put(self._tensors[place])
        if changing:
            torch._foreach_copy_([self._tensors[place] for place in changing], self._values)

    def changes(self) -> dict[torch.dtype, Tensor]:
        """What has changed since `save` in the float buffers, one flat tensor per data type.

        Raises:
            UsageError: a buffer has changed in a way that cannot be averaged.
        """
        for place in self._averaged:
            now, before = place.get(), self._tensors[place]
            if now is not before and (now.shape != before.shape or now.dtype != before.dtype):
                raise UsageError(
                    f"--reduction ordered: a forward pass replaced the buffer {place.path} of shape "
                    f"{tuple(before.shape)} by one of shape {tuple(now.shape)}; the change cannot be averaged"
                )
        for place, version in zip(self._constants, self._versions, strict=True):
            before = self._tensors[place]
            if place.get() is not before or before._version != version:
                raise UsageError(
                    f"--reduction ordered: a forward pass changed the {before.dtype} buffer {place.path}; only float "
                    "buffers and counters of one element may change"
                )
        changes = {}
        for dtype, places in self._floats.items():
            now, saved = self._concatenated(places), self._flat[dtype]
            # Not `now - saved` alone: a mask holds infinities, whose difference is NaN.
            changes[dtype] = (now - saved).masked_fill_(now == saved, 0.0)
        return changes

    def counter_changes(self) -> Tensor:
        """What has changed since `save` in each counter, as float64."""
        saved = self._values[len(self._averaged) :]
        return torch.stack(
            [(place.get().long() - value.long()).double().reshape(()) for place, value in zip(
                self._counters, saved, strict=True)]
        )  # fmt: skip

    def move(self, changes: dict[torch.dtype, Tensor], counter_changes: Sequence[float]) -> None:
        """The buffers of `save`, changed by this."""
        self.restore()
        for dtype, places in self._floats.items():
            torch._foreach_add_([self._tensors[place] for place in places], self._cut(changes[dtype], places))
        for place, change in zip(self._counters, counter_changes, strict=True):
            counter = self._tensors[place]
            counter.copy_(counter.long() + int(change))

    def _concatenated(self, places: Sequence[_Place]) -> Tensor:
        return torch.cat([place.get().detach().reshape(-1) for place in places])

    def _cut(self, flat: Tensor, places: Sequence[_Place]) -> list[Tensor]:
        """Views of `flat` in the shapes of buffers."""
        tensors = [self._tensors[place] for place in places]
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a module keeps a buffer; a forward pass may put another tensor there."""

    module: nn.Module
    name: str
    path: str

    def get(self) -> Tensor:
        tensor = self.module._buffers[self.name]
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        self.module._buffers[self.name] = tensor


# --- the reduction ----------------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Raises: UsageError where the model has layers that compute across ranks, or is spread over devices."""
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UsageError("--reduction ordered: the model is spread over several devices; use --reduction fast")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"--reduction ordered: layer {name or 'model'} is a SyncBatchNorm, whose statistics span ranks; "
                "use BatchNorm (statistics per micro-batch, the same for every world) or --reduction fast"
            )


@dataclass
class _Tally:
    """What a rank's micro-batches leave beside gradients; the same on every rank once it is summed over them."""

    losses: Tensor
    """sum over the samples of each virtual rank, float64; zero for those of other ranks"""
    is_used: list[bool]
    """whether a micro-batch gave a gradient to each parameter"""
    counters: Tensor
    """change of each counter in the last virtual rank, float64; zero on ranks that do not have it"""


class OrderedReduction:
    """The gradient of a step, the same bits for every world size.

    Built alike on every rank of a world, whose models must be equal; nothing is broadcast here. Every rank's share of
    a step is its block of virtual ranks, empty micro-batches included, as `StepSampler` gives it.

    Memory: at most log2(V) + 1 gradients beyond the one in `.grad`, for up to 97 virtual ranks and all powers of two,
    and what is received of a chunk. One of them is there only within a step, the leaf that autograd is making.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        virtual_ranks: int,
        do: Callable[[Activity], None] = lambda _activity: None,
    ) -> None:
        """`do` is told in every step when this rank begins to wait for others.

        Raises:
            UsageError: as `check_model`.
        """
        check_model(model)
        self._do = do
        self._model = model
        self._world = world
        self._device = device
        self._virtual_ranks = virtual_ranks
        self.exchange_seconds = 0.0
        """spent so far between a rank's last backward pass and the finished gradient, waiting for others included"""
        self._block = split(virtual_ranks, world.rank, world.world_size)
        self._buffers = Buffers(model)
        self._exchange = TreeExchange(world.rank, world.world_size, virtual_ranks)
        # gloo moves CUDA tensors through the host one collective at a time, and not at all point to point.
        self._is_staged = device.type == "cuda" and world.world_size > 1 and not _has_nccl()
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._rows: list[Row] = []
        self._free: list[Row] = []

    @property
    def memory_bytes(self) -> int:
        """What is held between steps: rows, `.grad` among them, and where chunks are received."""
        rows = sum(flat.nbytes for row in self._rows for flat in row.flats)
        staging = sum(host.nbytes for host in self._staging.values())
        return rows + staging + self._exchange.memory_bytes

    def run(self, micro_batches: Share, loss: Loss, scale: Callable[..., Tensor], votes: Sequence[int]) -> StepTotals:
        """As `Reduction.run`. When it raises, the model's buffers are those from before; `.grad` is garbage.

        Raises:
            RuntimeError: from the communication library, when a peer is lost.
            UsageError: the model, or the loss, does what ordered reduction cannot follow; `--strict` forbids an
                operator.
        """
        shards = [micro_batch.shard for micro_batch, _ in micro_batches]
        assert shards == list(range(*self._block)), f"virtual ranks {shards}, expected [{self._block})"
        self._follow_requires_grad()
        self._free = list(self._rows)
        self._buffers.save()
        try:
            return self._run(micro_batches, loss, scale, votes)
        except BaseException:
            self._buffers.restore()
            raise

    def _run(self, micro_batches: Share, loss: Loss, scale: Callable[..., Tensor], votes: Sequence[int]) -> StepTotals:
        tally = _Tally(
            losses=torch.zeros(self._virtual_ranks, dtype=torch.float64, device=self._device),
            is_used=[False] * len(self._parameters),
            counters=torch.zeros(self._buffers.num_counters, dtype=torch.float64, device=self._device),
        )
        stack: list[tuple[Node, Row]] = []
        leaf = Leaf([None] * len(self._parameters))
        for micro_batch, batch in micro_batches:
            shard = micro_batch.shard
            if len(micro_batch.indices):
                self._add_leaf(leaf, micro_batch, batch, loss, scale, tally)
            node, following = (shard, shard + 1), (shard + 1, shard + 2)
            if are_siblings(node, following, self._virtual_ranks) and shard + 1 < self._block[1]:
                continue  # the next one is added to this
            if shard > self._block[0] and are_siblings((shard - 1, shard), node, self._virtual_ranks):
                node = (shard - 1, shard + 1)
            self._push_leaf(stack, node, leaf)
            leaf = Leaf([None] * len(self._parameters))
        result = stack[0][1]
        flags = torch.tensor([*votes, *tally.is_used], dtype=torch.float64).to(self._device)
        message = torch.cat([tally.losses, flags, tally.counters])
        self._do(Activity.REDUCE)
        started = time.perf_counter()
        message = self._reduce([row for _, row in stack], message)
        self.exchange_seconds += time.perf_counter() - started
        entries = iter(message.tolist())
        loss_sum = tree_sum([next(entries) for _ in range(self._virtual_ranks)])
        totals = StepTotals(loss_sum / micro_batches[0][0].step_samples, tuple(int(next(entries)) for _ in votes))
        for parameter, grad in zip(self._parameters, result.grads, strict=True):
            parameter.grad = grad if next(entries) else None  # an optimizer skips what nobody used
        self._buffers.move(result.changes, list(entries))
        return totals

    def _push_leaf(self, stack: list[tuple[Node, Row]], node: Node, leaf: Leaf) -> None:
        if stack and are_siblings(stack[-1][0], node, self._virtual_ranks):
            (start, _), row = stack.pop()
            push(stack, (start, node[1]), row.add_leaf(leaf), self._virtual_ranks, self._add_rows)
        else:
            push(stack, node, self._take_row().begin(leaf), self._virtual_ranks, self._add_rows)

    def _add_leaf(
        self,
        leaf: Leaf,
        micro_batch: MicroBatch,
        batch: Batch,
        loss: Loss,
        scale: Callable[..., Tensor],
        tally: _Tally,
    ) -> None:
        """Forward and backward of one virtual rank; its gradient and its buffers' changes are added to `leaf`."""
        for index, (parameter, grad) in enumerate(zip(self._parameters, leaf.grads, strict=True)):
            # A sparse gradient is added when it is whole: into a dense one autograd would add it entry by entry.
            parameter.grad = None if index in leaf.sparse else grad
        # A version counter of its own, by which one sees whether, and how often, autograd has added to a gradient.
        versions = [None if parameter.grad is None else parameter.grad._version for parameter in self._parameters]
        count = len(micro_batch.indices)
        weight = count / micro_batch.step_samples
        try:
            mean = loss(self._model, micro_batch, batch)
            scale(mean * weight).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            operator = name_nondeterministic_operator(str(error))
            if operator is None:
                raise
            raise UsageError(
                f"--strict: {operator} has no deterministic form on {self._device.type}; replace it in the model or "
                "the loss, or leave out --strict and the bits may differ from run to run"
            ) from error
        tally.losses[micro_batch.shard] = mean.detach().double() * count
        seen: set[int] = set()
        for index, (parameter, version) in enumerate(zip(self._parameters, versions, strict=True)):
            grad, parameter.grad = parameter.grad, None
            if grad is None or grad._version == version:
                continue
            tally.is_used[index] = True
            if version is None:
                leaf.take(index, grad, seen)
            elif grad._version != version + 1:
                # (left + a) + b for a right leaf, but left + (a + b) where the left one is on another rank.
                raise UsageError(
                    f"--reduction ordered: the gradient of {self._names[index]} was accumulated in several parts in "
                    "one backward pass, as checkpointing with use_reentrant=True does; take use_reentrant=False"
                )
        for dtype, change in self._buffers.changes().items():
            # Two operations: a fused multiply-add would round once less onto a left leaf than onto none.
            weighted = change.mul_(weight)
            leaf.changes[dtype] = leaf.changes[dtype].add_(weighted) if dtype in leaf.changes else weighted
        if micro_batch.shard == self._virtual_ranks - 1 and self._buffers.num_counters:
            tally.counters = self._buffers.counter_changes()
        self._buffers.restore()

    def _reduce(self, rows: list[Row], message: Tensor) -> Tensor:
        """Completes the tree into the first row; the message summed over the ranks."""
        if self._world.world_size == 1:
            return message
        if self._is_staged:
            message = message.cpu()
        for position, flat in enumerate(rows[0].flats):
            partials = [row.flats[position] for row in rows]
            if self._is_staged:
                partials = self._on_host(position, partials)
            self._exchange.complete(partials, message if position == 0 else None)
            if self._is_staged:
                flat.copy_(partials[0])
        return message

    def _on_host(self, position: int, partials: list[Tensor]) -> list[Tensor]:
        for index, partial in enumerate(partials):
            if (position, index) not in self._staging:
                self._staging[position, index] = torch.empty_like(partial, device="cpu", pin_memory=True)
            self._staging[position, index].copy_(partial)
        return [self._staging[position, index] for index in range(len(partials))]

    def _follow_requires_grad(self) -> None:
        """A task may freeze and thaw parameters between steps; it does so alike on every rank."""
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        if len(named) == len(self._parameters) and all(
            ours is theirs for ours, (_, theirs) in zip(self._parameters, named, strict=True)
        ):
            return
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._rows, self._staging = [], {}

    def _take_row(self) -> Row:
        if self._free:
            return self._free.pop()
        self._rows.append(Row(self._parameters, self._buffers.sizes, self._device))
        return self._rows[-1]

    def _add_rows(self, left: Row, right: Row) -> Row:
        self._free.append(right)
        return left.add(right)


def _has_nccl() -> bool:
    config: Any = dist.get_backend_config()
    return "nccl" in str(config)
