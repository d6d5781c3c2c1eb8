"""What the tree adds: gradients of micro-batches as flat vectors, and with them how buffers have changed, BatchNorm's
statistics among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elastic_train.errors import UsageError


def make_writable(module: nn.Module) -> None:
    """Of a buffer that `expand()` has made, several numbers are one in memory; torch refuses to write it, and so to put
    it back. Give each number its place."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided:
                continue
            if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                layer._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


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
                if buffer.layout is not torch.strided:  # a sparse one: the matrix of a graph, say
                    self._constants.append(place)
                elif buffer.is_floating_point():
                    self._floats.setdefault(buffer.dtype, []).append(place)
                elif buffer.numel() == 1 and not buffer.is_complex():
                    self._counters.append(place)
                else:
                    self._constants.append(place)
        self._model, self._num_saves = model, 0
        self._saved_names = _saved_names(model)
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
        self._num_saves += 1
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
            UsageError: a buffer has changed in a way that cannot be averaged, or is new.
        """
        if self._num_saves == 1 and (new := sorted(_saved_names(self._model) - self._saved_names)):
            # Nobody would put it back before the next micro-batch in this world, and all in the next one.
            raise UsageError(
                f"--reduction ordered: a forward pass made the buffer {new[0]}, which is none of the model that a "
                "newcomer, or a restart, begins with: make it in the constructor (with persistent=False a cache may "
                "be made at any time)"
            )
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
                    f"--reduction ordered: a forward pass changed the {before.dtype} buffer {place.path}; only dense "
                    "float buffers and counters of one element may change"
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


def _saved_names(model: nn.Module) -> set[str]:
    """Of the buffers that are in its state dict."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


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


def made_with_nan(module: nn.Module) -> set[str]:
    """Names of its buffers that hold NaN when it is made: it is there by design, while that in others is damage, as in
    weights. Blocks for the device."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, buffer in buffers if not is_lazy(buffer) and _has_nan(buffer)}


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether one of its numbers is NaN. Blocks for the tensor's device."""
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().sum())  # sparse has no any()
