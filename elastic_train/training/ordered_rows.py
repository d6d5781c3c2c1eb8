"""Gradients of micro-batches as flat vectors, which the tree adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 64
"""where a gradient starts in a row: as aligned as a tensor of its own, for the kernels that look at it"""


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
