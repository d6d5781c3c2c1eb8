"""Operands of the tree: gradients of micro-batches as flat vectors, and the changes of buffers (BatchNorm's statistics)
with them."""

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
    """Copy each buffer that `expand()` has made, so that each element has its own memory. Torch refuses to write a
    tensor whose elements share memory, so such a buffer could not be restored."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided:
                continue
            if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                layer._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


class Buffers:
    """A model's buffers through one step: restored before every micro-batch, and changed once at the step's end."""

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
                if buffer.layout is not torch.strided:  # sparse, such as the matrix of a graph
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
        """Put back the same tensors as at `save`, with their values of then."""
        changing = [*self._averaged, *self._counters]
        for place in changing:
            if place.get() is not self._tensors[place]:
                place.put(self._tensors[place])
        if changing:
            torch._foreach_copy_([self._tensors[place] for place in changing], self._values)

    def changes(self) -> dict[torch.dtype, Tensor]:
        """Return the changes of the float buffers since `save`, one flat tensor per data type.

        Raises:
            UsageError: a buffer is new, or its change cannot be averaged.
        """
        if self._num_saves == 1 and (new := sorted(_saved_names(self._model) - self._saved_names)):
            # It would not be restored before each micro-batch in this world, but would be in the next one.
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
            # Not only `now - saved`: a mask holds infinities, whose difference is NaN.
            changes[dtype] = (now - saved).masked_fill_(now == saved, 0.0)
        return changes

    def counter_changes(self) -> Tensor:
        """Return the change of each counter since `save`, as float64."""
        saved = self._values[len(self._averaged) :]
        return torch.stack(
            [(place.get().long() - value.long()).double().reshape(()) for place, value in zip(
                self._counters, saved, strict=True)]
        )  # fmt: skip

    def move(self, changes: dict[torch.dtype, Tensor], counter_changes: Sequence[float]) -> None:
        """Restore the buffers of `save`, and add these changes to them."""
        self.restore()
        for dtype, places in self._floats.items():
            torch._foreach_add_([self._tensors[place] for place in places], self._cut(changes[dtype], places))
        for place, change in zip(self._counters, counter_changes, strict=True):
            counter = self._tensors[place]
            counter.copy_(counter.long() + int(change))

    def _concatenated(self, places: Sequence[_Place]) -> Tensor:
        return torch.cat([place.get().detach().reshape(-1) for place in places])

    def _cut(self, flat: Tensor, places: Sequence[_Place]) -> list[Tensor]:
        """Return views of `flat` in the buffers' shapes."""
        tensors = [self._tensors[place] for place in places]
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _saved_names(model: nn.Module) -> set[str]:
    """Return the names of the buffers that are in the model's state dict."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


@dataclass(frozen=True, eq=False)
class _Place:
    """A buffer's place in its module; a forward pass may put another tensor there."""

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
"""of a gradient's start in a row: the same as of a separate tensor, because some kernels choose by it"""


class Row:
    """One gradient: all parameters' gradients and all float buffers' changes, in one flat vector per data type."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], changes: dict[torch.dtype, int], device: torch.device
    ) -> None:
        """`changes`: number of elements of the float buffers, by data type."""
        dtypes = list(dict.fromkeys([*(parameter.dtype for parameter in parameters), *changes]))
        grads: dict[int, Tensor] = {}
        self.flats: list[Tensor] = []
        self.changes: dict[torch.dtype, Tensor] = {}
        """views of `flats`, by data type"""
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
        """views of `flats`, one per parameter"""

    def begin(self, leaf: Leaf) -> Row:
        """Overwrite the row with `leaf`, and return the row."""
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
    """The gradient of one virtual rank, or of two neighbours, in autograd's own tensors."""

    grads: list[Tensor | None]
    """by parameter; None for an unused one"""
    changes: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """weighted changes of the float buffers; empty without samples"""
    sparse: set[int] = field(default_factory=set)
    """indices of parameters whose gradients are, or may be, sparse"""

    def take(self, index: int, grad: Tensor, seen: set[int]) -> None:
        """Store a gradient that autograd has just made. `seen`: storages already stored in this backward pass."""
        if grad.is_sparse:
            self.sparse.add(index)
            grad = grad.to_dense()
        if (left := self.grads[index]) is not None:  # withheld from autograd
            left.add_(grad)
            return
        # Gradients can be views of one tensor (stacked parameters) or the same tensor (a sum): an addition to one
        # must not change another.
        storage = grad.untyped_storage().data_ptr()
        self.grads[index] = grad.clone() if storage in seen else grad
        seen.add(storage)


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of the beginning of `flat` with the parameter's shape and channels-last format, if it has that."""
    start = flat[: parameter.numel()]
    if parameter.dim() in (4, 5) and not parameter.is_contiguous():
        memory_format = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
        if parameter.is_contiguous(memory_format=memory_format):
            return start.as_strided(parameter.size(), parameter.stride())
    return start.view(parameter.size())


class SavedShapes:
    """The shapes that a module's saved buffers have now, when it is new. Left out are layers that load in a way of
    their own, and may accept other shapes."""

    def __init__(self, module: nn.Module) -> None:
        own, layers = nn.Module._load_from_state_dict, module.named_modules()
        plain = [(place, one) for place, one in layers if type(one)._load_from_state_dict is own]
        self._made = [(place, one, _shapes(one)) for place, one in plain if not one._load_state_dict_pre_hooks]

    def changed(self) -> list[str]:
        """Return the names of buffers that were made, dropped or resized since: a new start cannot load them."""
        return [
            f"{place}.{name}" if place else name
            for place, layer, made in self._made
            if made != (now := _shapes(layer))
            for name in sorted(made.keys() | now.keys())
            if made.get(name) != now.get(name)
        ]


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    saved = layer._buffers.keys() - layer._non_persistent_buffers_set
    return {
        name: one.shape
        for name, one in layer._buffers.items()
        if name in saved and one is not None and not is_lazy(one)
    }


def made_with_nan(module: nn.Module) -> set[str]:
    """Return the names of buffers that hold NaN now, when the module is new: by design. NaN that comes later, or in
    weights, is damage. Blocks for the device."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, buffer in buffers if not (is_lazy(buffer) or buffer.is_meta) and _has_nan(buffer)}


def _has_nan(tensor: torch.Tensor) -> bool:
    """Return whether an element is NaN. Blocks for the tensor's device."""
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().sum())  # sparse has no any()
