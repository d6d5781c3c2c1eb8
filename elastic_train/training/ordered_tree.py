"""The tree that fixes the order of additions, and the exchange of its values between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from elastic_train.training.collectives import exchange
from elastic_train.training.sampler import split

CHUNK_ELEMENTS = 4 * 2**20
"""elements of a row per exchange; this bounds the memory for received values"""


SMALL_ELEMENTS = 2**18
"""most elements that a rank receives of each partial sum if a chunk is not sliced"""


T = TypeVar("T")


Node = tuple[int, int]
"""a subtree: the virtual ranks [start, stop) that it covers"""


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Return whether the fixed tree over `num_leaves` adds these two nodes."""
    size = left[1] - left[0]
    is_left_child = size & (size - 1) == 0 and left[0] % (2 * size) == 0
    return is_left_child and right == (left[1], min(left[1] + size, num_leaves)) and right[0] < right[1]


def push(stack: list[tuple[Node, T]], node: Node, value: T, num_leaves: int, add: Callable[[T, T], T]) -> None:
    """Push the next node to the right, and make all sums of the tree that this allows, with `add(left, right)`."""
    while stack and are_siblings(stack[-1][0], node, num_leaves):
        (start, _), left = stack.pop()
        node, value = (start, node[1]), add(left, value)
    stack.append((node, value))


def subtrees(start: int, stop: int, num_leaves: int) -> list[Node]:
    """Return the largest subtrees within the leaves [start, stop), from left to right."""
    stack: list[tuple[Node, None]] = []
    for leaf in range(start, stop):
        push(stack, (leaf, leaf + 1), None, num_leaves, lambda left, right: None)
    return [node for node, _ in stack]


def tree_sum(leaves: Sequence[float]) -> float:
    stack: list[tuple[Node, float]] = []
    for leaf, value in enumerate(leaves):
        push(stack, (leaf, leaf + 1), value, len(leaves), lambda left, right: left + right)
    return stack[0][1]


Transport = Callable[[Sequence[tuple[Tensor, int]], Sequence[tuple[Tensor, int]]], None]
"""as `collectives.exchange`"""


class TreeExchange:
    """The exchange that completes the tree over all ranks' partial sums."""

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
        # Nearest neighbour to the right first, so that the ranks do not all send to the same one at once.
        self._peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._received: dict[torch.dtype, Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._received.values())

    def connect(self, device: torch.device) -> None:
        """Exchange a first message with every rank; every rank calls it. NCCL connects two ranks in their first
        message. Later, a rank delayed beyond NCCL's timeout by a first batch or a compilation would count as lost."""
        ones, received = torch.ones(1, device=device), torch.empty(self._world_size, device=device)
        self._transport(
            [(ones, peer) for peer in self._peers], [(received[peer : peer + 1], peer) for peer in self._peers]
        )

    def complete(self, partials: Sequence[Tensor], message: Tensor | None = None) -> None:
        """Replace this rank's first partial sum by the sum over all leaves; every rank calls it.

        Args:
            partials: the sum of each of this rank's subtrees, from left to right, as flat tensors of one length, the
                same on every rank. All but the first are left with garbage.
            message: a flat tensor that travels along; replaced by its sum over the ranks, in no fixed order.
        """
        for start in range(0, max(1, partials[0].numel()), self._chunk):
            self._complete_chunk([partial[start : start + self._chunk] for partial in partials], message)
            message = None

    def _complete_chunk(self, partials: list[Tensor], message: Tensor | None) -> None:
        result, rank = partials[0], self._rank
        # Every rank adds up the whole of a small chunk: more bytes, but one exchange less.
        is_small = result.numel() * (self._world_size - 1) <= SMALL_ELEMENTS
        length = result.numel()
        bounds = [
            (0, length) if is_small else split(length, peer, self._world_size) for peer in range(self._world_size)
        ]

        def part(tensor: Tensor, peer: int) -> Tensor:
            """Return the slice of a chunk that rank `peer` adds up."""
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
        if rank > 0:  # on rank 0 the target is the leftmost operand, in which sums are made
            target.copy_(stack[0][1])
        if not is_small:
            self._move([(target, peer) for peer in self._peers], [(part(result, peer), peer) for peer in self._peers])

    def _slots(self, part: Tensor, count: int) -> list[Tensor]:
        """Return receive buffers for `count` partial sums like `part`."""
        buffer = self._received.get(part.dtype)
        if buffer is None or buffer.numel() < count * part.numel():
            buffer = self._received[part.dtype] = part.new_empty(count * part.numel())
        return list(buffer[: count * part.numel()].view(count, part.numel()))

    def _move(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        self._transport([s for s in sends if s[0].numel()], [r for r in receives if r[0].numel()])
