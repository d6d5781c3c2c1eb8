"""Ordered reduction: one step's gradient with the same bits for every world size.

In every world the global batch is V micro-batches, one per virtual rank. Each gives a gradient of its own (that of its
mean loss times its share of the step's samples). One fixed binary tree adds these V leaves: a node of level j covers
the virtual ranks [k * 2^j, (k + 1) * 2^j), cut off at V. IEEE addition commutes but is not associative, so the tree
alone decides the bits.

A rank runs a contiguous block of virtual ranks and adds every subtree that lies in its block. The ranks complete the
few partial sums that are left by slices: slice r of all partial sums goes to rank r, which adds the rest of the tree.
Then the finished slices are gathered. Where V is a multiple of the ranks, this moves as many bytes as a ring
all-reduce. Only copies go through the communication library; every addition is made here.

    V = 8, 3 ranks       rank 0: 0 1    rank 1: 2 3 4    rank 2: 5 6 7
    subtrees added locally      [01]           [23] 4           5 [67]
    completed by slices         (([01] + [23]) + ((4 + 5) + [67]))

A row is a flat vector of all gradients. For the first leaf of a pair autograd makes new tensors; it accumulates the
second leaf into these. Their sum is then added to a waiting row, or begins a new one. So a pair costs three passes
over a gradient, where a row per leaf would cost six, and the sum is already where the optimizer reads it. A parameter
without a gradient has -0.0, the neutral element of IEEE addition: x + -0.0 is x for every x, but -0.0 + +0.0 is +0.0.
Ranks send rows only; DDP's reducer is not used. A communication hook of DDP would overlap the exchange with the last
backward pass, but on CPUs the two compete for the same cores. DDP also rebuilds its buckets after the first step,
which would change the messages.

Loss and votes travel beside the rows. Each value comes from one rank or is an integer, so that any order of summing
gives the same bits. So do the marks of used parameters: one that no virtual rank uses keeps `.grad` None, as in one
process.

BatchNorm: every micro-batch starts from the buffers before the step. Its change of each float buffer is weighted by its
samples and summed in the same tree. So running statistics move by the mean of the changes that each micro-batch alone
would make. That is ghost batch normalization (Hoffer, Hubara, Soudry, "Train longer, generalize better", 2017) with
ghost batches of B / V samples. It is independent of the world and costs no message, and a buffer that no forward pass
writes keeps its bits. Counters (`num_batches_tracked`) take the change of the last virtual rank, which always has
samples: one more per step. An empty micro-batch changes neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.collectives import numbers
from elastic_train.training.determinism import refused_as_what_it_is
from elastic_train.training.ordered_buffers import Buffers, Leaf, Row
from elastic_train.training.ordered_tree import (
    Node,
    TreeExchange,
    are_siblings,
    push,
    tree_sum,
)
from elastic_train.training.reduction import Batch, Loss, Share, StepTotals
from elastic_train.training.sampler import MicroBatch, split
from elastic_train.world import World


def check_model(model: nn.Module) -> None:
    """Raises: UsageError: the model has layers that compute across ranks, or is spread over devices."""
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UsageError(
            "--reduction ordered: the model is spread over several devices; use --reduction fast, in one worker"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"--reduction ordered: layer {name or 'model'} is a SyncBatchNorm, whose statistics span ranks; "
                "use BatchNorm (statistics per micro-batch, the same for every world) or --reduction fast"
            )


@dataclass
class _Tally:
    """Results of a rank's micro-batches beside gradients; summed over the ranks, the same on each."""

    losses: Tensor
    """sum over the samples of each virtual rank, float64; zero for virtual ranks of other ranks"""
    is_used: list[bool]
    """of each parameter, whether a micro-batch gave it a gradient"""
    counters: Tensor
    """change of each counter in the last virtual rank, float64; zero on ranks without that virtual rank"""


class OrderedReduction:
    """A `Reduction` whose gradient has the same bits for every world size.

    Every rank of a world builds it alike, from equal models; nothing is broadcast here. A rank's share of a step is
    its block of virtual ranks, empty micro-batches included, as `StepSampler` yields it.

    Memory: at most log2(V) + 1 gradients beyond the one in `.grad`, for up to 97 virtual ranks and all powers of two,
    and the received part of a chunk. One of these gradients, autograd's present leaf, exists only within a step.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        virtual_ranks: int,
        do: Callable[[Activity], None] = lambda _activity: None,
    ) -> None:
        """`do` is called in every step when this rank begins to wait for its peers.

        Raises:
            UsageError: as `check_model`. RuntimeError: a peer is lost.
        """
        check_model(model)
        self._do = do
        self._model = model
        self._world = world
        self._device = device
        self._virtual_ranks = virtual_ranks
        self.exchange_seconds = 0.0
        """total time between a rank's last backward pass and the finished gradient, waiting for peers included"""
        self._block = split(virtual_ranks, world.rank, world.world_size)
        self._buffers = Buffers(model)
        self._exchange = TreeExchange(world.rank, world.world_size, virtual_ranks)
        # gloo moves CUDA tensors through the host one collective at a time, and has no CUDA point to point.
        self._is_staged = False
        if device.type == "cuda" and world.world_size > 1:
            self._is_staged = "nccl" not in str(dist.get_backend_config())
            if not self._is_staged:
                self._exchange.connect(device)
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._sparse: set[int] = set()
        """indices of the tables that are looked up with sparse gradients"""
        self._rows: list[Row] = []
        self._free: list[Row] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes held between steps: rows, `.grad` among them, and the buffers for received chunks."""
        rows = sum(flat.nbytes for row in self._rows for flat in row.flats)
        staging = sum(host.nbytes for host in self._staging.values())
        return rows + staging + self._exchange.memory_bytes

    def run(self, micro_batches: Share, loss: Loss, scale: Callable[..., Tensor], votes: Sequence[int]) -> StepTotals:
        """As `Reduction.run`. When it raises, the model's buffers are restored, and `.grad` is garbage.

        Raises:
            RuntimeError: from the communication library, when a peer is lost.
            UsageError: the model or the loss does something that ordered reduction does not support; `--strict`
                forbids an operator.
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
        leaf = self._new_leaf()
        for micro_batch, batch in micro_batches:
            shard = micro_batch.shard
            if len(micro_batch.indices):
                self._add_leaf(leaf, micro_batch, batch, loss, scale, tally)
            node, following = (shard, shard + 1), (shard + 1, shard + 2)
            if are_siblings(node, following, self._virtual_ranks) and shard + 1 < self._block[1]:
                continue  # the next leaf is added to this one
            if shard > self._block[0] and are_siblings((shard - 1, shard), node, self._virtual_ranks):
                node = (shard - 1, shard + 1)
            self._push_leaf(stack, node, leaf)
            leaf = self._new_leaf()
        result = stack[0][1]
        if not any(len(micro_batch.indices) for micro_batch, _ in micro_batches):
            scale(torch.zeros((), device=self._device))  # initialises a GradScaler in its first step
        flags = torch.tensor([*votes, *tally.is_used], dtype=torch.float64, device="cpu").to(self._device)
        message = torch.cat([tally.losses, flags, tally.counters])
        self._do(Activity.REDUCE)
        started = time.perf_counter()
        message = self._reduce([row for _, row in stack], message)
        self.exchange_seconds += time.perf_counter() - started
        entries = iter(numbers(message))
        loss_sum = tree_sum([next(entries) for _ in range(self._virtual_ranks)])
        totals = StepTotals(loss_sum / micro_batches[0][0].step_samples, tuple(int(next(entries)) for _ in votes))
        for parameter, grad in zip(self._parameters, result.grads, strict=True):
            parameter.grad = grad if next(entries) else None  # an optimizer skips unused parameters
        self._buffers.move(result.changes, list(entries))
        return totals

    def _new_leaf(self) -> Leaf:
        return Leaf([None] * len(self._parameters), sparse={*self._sparse})

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
        """Run one virtual rank forward and backward; add its gradient and its buffers' changes to `leaf`."""
        for index, (parameter, grad) in enumerate(zip(self._parameters, leaf.grads, strict=True)):
            # A sparse gradient is added when it is whole: autograd would add it into a dense one entry by entry.
            parameter.grad = None if index in leaf.sparse else grad
        # A tensor's version shows whether, and how often, autograd has added to a gradient.
        versions = [None if parameter.grad is None else parameter.grad._version for parameter in self._parameters]
        count = len(micro_batch.indices)
        weight = count / micro_batch.step_samples
        with refused_as_what_it_is(self._device):
            mean = loss(self._model, micro_batch, batch)
            scale(mean * weight).backward()  # type: ignore[no-untyped-call]
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
                # (left + a) + b for a right leaf here, but left + (a + b) if the left leaf is on another rank.
                raise UsageError(
                    f"--reduction ordered: the gradient of {self._names[index]} was accumulated in several parts in "
                    "one backward pass, as checkpointing with use_reentrant=True does; take use_reentrant=False"
                )
        for dtype, change in self._buffers.changes().items():
            # Two operations: a fused multiply-add would round once less with a left leaf than without.
            weighted = change.mul_(weight)
            leaf.changes[dtype] = leaf.changes[dtype].add_(weighted) if dtype in leaf.changes else weighted
        if micro_batch.shard == self._virtual_ranks - 1 and self._buffers.num_counters:
            tally.counters = self._buffers.counter_changes()
        self._buffers.restore()

    def _reduce(self, rows: list[Row], message: Tensor) -> Tensor:
        """Complete the tree into the first row; return the message summed over the ranks."""
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
        """Drop the rows where a task has frozen or thawed parameters since the last step, alike on every rank."""
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        if [*map(id, self._parameters)] == [id(one) for _, one in named]:
            return
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        tables = (one for one in self._model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
        sparse = {id(one._parameters.get("weight")) for one in tables if one.sparse}
        self._sparse = {index for index, one in enumerate(self._parameters) if id(one) in sparse}
        self._rows, self._staging = [], {}

    def _take_row(self) -> Row:
        if self._free:
            return self._free.pop()
        self._rows.append(Row(self._parameters, self._buffers.sizes, self._device))
        return self._rows[-1]

    def _add_rows(self, left: Row, right: Row) -> Row:
        self._free.append(right)
        return left.add(right)
