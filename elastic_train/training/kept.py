"""Copies of all that a step changes before its reduction has succeeded, so that a failed step can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from elastic_train.errors import UsageError
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.optimizers import (
    call_before_steps,
    parameters_beside,
    parameters_of,
    parts_of,
    scalers_in,
    sizes_of,
)
from elastic_train.training.ordered_buffers import SavedShapes, made_with_nan, make_writable
from elastic_train.training.tasks import tensors_in

Buffers = dict[str, torch.Tensor | None]
"""buffers of one layer, by name"""
Remembered = dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]
"""by name: a buffer's tensor, and a copy of its values"""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""arguments of an optimizer's `step`; the first one is the optimizer"""
PARTS = "made_of"
"""key in an optimizer's saved state, for the states of the optimizers that it is made of"""
_SCALES = ("_scale", "_growth_tracker")
"""attributes of a GradScaler; None before its first use"""


class KeptStep:
    """A copy of all that a step may change before its last reduction has succeeded."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named_extras: Mapping[str, Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        extras = tuple(named_extras.values())
        self.modules = {name: one for name, one in {"": model, **named_extras}.items() if isinstance(one, nn.Module)}
        """the model ("") and the modules among the extras, by name"""
        self.made_with_nan = {name: made_with_nan(one) for name, one in self.modules.items()}
        """of each module, the buffers that hold NaN by design"""
        self.saved_shapes = {name: SavedShapes(one) for name, one in self.modules.items()}
        self.buffers = KeptBuffers(model, extras)
        self.updates = KeptUpdates(model, optimizer, extras, self.buffers)
        # A scaler changes its scale by the gradients, and after a failed reduction these differ between ranks.
        self.scalers = scalers_in((scaler, optimizer, *extras))
        self._scales: list[tuple[dict[str, Any], Remembered]] = [(vars(one), {}) for one in self.scalers]

    def keep(self) -> None:
        """Copy all at the start of a step."""
        self.buffers.keep()
        with torch.no_grad():  # GradScaler's public methods would wait for the GPU
            _remember([({name: held[name] for name in _SCALES}, kept) for held, kept in self._scales])
        self.updates.keep()

    def put_back(self) -> bool:
        """Restore all to the start of the open step. Returns whether weights and optimizers are restored, too."""
        self.buffers.put_back()  # first: a load below expects the extras' buffers in their old shapes
        for held, kept in self._scales:
            _put_back(held, kept)
        return self.updates.put_back()


class KeptBuffers:
    """Copies, from the start of a step, of the buffers (BatchNorm's statistics) of the model and of modules among the
    extras: forward passes change these.

    For the training thread; `put_into` also for a thread that has acquired the state's lock.
    """

    def __init__(self, model: nn.Module, extras: Iterable[Any] = ()) -> None:
        self._modules = [model, *(extra for extra in extras if isinstance(extra, nn.Module))]
        for module in self._modules:
            make_writable(module)
        self._kept: list[tuple[Buffers, Remembered]] = []
        self._num_walks = 0

    def keep(self) -> None:
        """Copy the buffers at the start of a step."""
        if self._num_walks < 2:  # search only twice: it can cost more than a step for a large model
            self._num_walks += 1  # again after the first step: forward passes may register buffers
            layers = {layer: None for module in self._modules for layer in module.modules() if layer._buffers}
            self._kept = [(layer._buffers, {}) for layer in layers]
        if self._kept:
            with torch.no_grad():
                _remember(self._kept)

    def put_back(self) -> None:
        """Restore the buffers to the start of the open step."""
        with torch.no_grad():
            for buffers, kept in self._kept:
                _put_back(buffers, kept)

    def put_into(self, module: Any, module_state: dict[str, Any]) -> None:
        """Put the copies into a module's state dict, so that it does not show the changes of the open step. No-op for a
        module without copies here."""
        if not isinstance(module, nn.Module):
            return
        found = {id(buffers): kept for buffers, kept in self._kept}
        for place, layer in module.named_modules(remove_duplicate=False):
            for name, (_, copy) in found.get(id(layer._buffers), {}).items():
                key = f"{place}.{name}" if place else name
                if copy is None:
                    module_state.pop(key, None)
                elif key in module_state:
                    module_state[key] = copy


def leave_no_trace(module: nn.Module) -> Callable[[], None]:
    """Prepare `module` for a stand-in sample on a rank without samples. Returns a function that restores the buffers;
    call it after the backward pass, because activation checkpoints run forward passes again in that.

    Meanwhile torch's normalising layers are in eval mode and use their running statistics: one sample may be too few
    for statistics of its own. Other layers stay in train mode, because a user's model may return another thing in eval
    mode, and a SyncBatchNorm needs train mode for its collectives. Its statistics keep the sample, on all ranks.
    """
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.SyncBatchNorm)]
    frozen = [layer for layer in layers if layer.training and isinstance(layer, _NormBase)]
    kept = [
        (layer._buffers, name, buffer, buffer.detach().clone())
        for layer in layers
        for name, buffer in layer._buffers.items()
        if buffer is not None and not is_lazy(buffer) and buffer.layout is torch.strided
    ]
    for layer in frozen:
        layer.training = False

    def put_back() -> None:
        for layer in frozen:
            layer.training = True
        for buffers, name, buffer, value in kept:
            buffer.data.copy_(value)  # a graph may have saved it; `.data` spares its version check
            buffers[name] = buffer

    return put_back


class KeptUpdates:
    """A copy of weights, optimizers and extras from the start of a step in which optimizers may change them before the
    last reduction: there are several optimizers, or one steps twice, or its step calls a closure. The first step in
    which an optimizer steps twice has no copy.

    For the training thread, or a thread that has acquired the state's lock.

    Args:
        buffers: copies of the extras' buffers; a forward pass may have changed these before the copy here is made.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, extras: Iterable[Any], buffers: KeptBuffers
    ) -> None:
        own = torch.amp.GradScaler | AveragedWeights  # kept by `KeptStep`; changed at the commit
        self._model, self._buffers = model, buffers
        self._parts = [optimizer, *(extra for extra in extras if not isinstance(extra, own))]
        self.optimizers = [part for part in self._parts if isinstance(part, torch.optim.Optimizer)]
        self._sizes = [sizes_of(optimizer) for optimizer in self.optimizers]
        self._hooks: list[RemovableHandle] = []
        self.is_needed = len(self.optimizers) > 1
        """whether steps from the next one on need a copy; saved with the state, for a worker that takes it over"""
        self._num_begun = 0
        """number of optimizer steps begun in the open step"""
        self._parameters: list[nn.Parameter] = []
        self._last: Any = None
        """copy of the last step, whose memory is reused"""
        self.are_kept = False
        """whether there is a copy of the open step"""
        self.is_as_sent = True
        """whether the optimizers hold, bit by bit, the state that a peer has sent; True without such a state"""

    def call_before_steps(self, hook: Callable[..., Arguments | None]) -> None:
        """Register `hook` at each optimizer, as `Optimizer.register_step_pre_hook`, until `leave_to_owner`."""
        self._hooks += [call_before_steps(optimizer, hook) for optimizer in self.optimizers]

    def leave_to_owner(self) -> None:
        """Remove the hooks of `call_before_steps`: training is over, and the optimizers may get other groups."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def owned(self) -> set[int]:
        """The ids of the parameters that the optimizers change."""
        return {id(one) for optimizer in self.optimizers for one in parameters_of(optimizer)}

    def is_part(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` is a part that one of the state's optimizers is made of."""
        if any(optimizer is one for one in self.optimizers):
            return False
        return self.owned.issuperset(map(id, parameters_of(optimizer)))

    def has_saved(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the state of `optimizer` is saved with the state's optimizers."""
        saved = {id(tensor) for one in self.optimizers for tensor in tensors_in(self.state_of(one))}
        return saved.issuperset(map(id, tensors_in(optimizer.state)))

    def state_of(self, part: Any) -> dict[str, Any]:
        """Return `part.state_dict()`. For an optimizer made of others, add the states of those that neither it nor
        another part of the state includes."""
        state: dict[str, Any] = part.state_dict()
        parts = parts_of(part) if isinstance(part, torch.optim.Optimizer) else {}
        if not parts:
            return state
        has = set(map(id, tensors_in(state)))
        held = {name: one.state_dict() for name, one in parts.items() if all(one is not it for it in self.optimizers)}
        held = {name: one for name, one in held.items() if has.isdisjoint(map(id, tensors_in(one.get("state", {}))))}
        return {**state, PARTS: held}

    def require_groups(self) -> None:
        """Raises: UsageError: an optimizer's parameter groups have grown or shrunk since its start."""
        for optimizer, sizes in zip(self.optimizers, self._sizes, strict=True):
            if (found := sizes_of(optimizer)) != sizes:
                raise UsageError(
                    f"the parameter groups of {type(optimizer).__name__} have {found} parameters, and began with "
                    f"{sizes}, as do newcomers and restarts, which could not load its state: make all groups before "
                    "run(). Until they are needed, freeze them or give them a learning rate of 0"
                )

    def note_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]) -> Arguments | None:
        """Note the start of an optimizer's step. A closure runs passes and reductions within the step. So return
        arguments whose closure calls `check` after each of its runs; None if there is no closure."""
        self._num_begun += 1
        if self._num_begun > 1:
            self.is_needed = True
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None
        self.is_needed = True
        if not self.are_kept and self._num_begun == 1:  # no optimizer has changed anything yet
            self._keep()

        def compute() -> Any:
            loss = closure()
            check()
            return loss

        return (args, {**kwargs, "closure": compute}) if is_named else ((args[0], compute, *args[2:]), kwargs)

    def keep(self) -> None:
        """Begin a step, with a copy if one is needed."""
        self.are_kept, self._num_begun = False, 0
        if self.is_needed:
            self._keep()

    def _keep(self) -> None:
        # Also parameters of modules that are neither the model nor an extra.
        self._parameters = [*self._model.parameters(), *parameters_beside([self._model], self.optimizers)]
        states = [self.state_of(part) for part in self._parts]
        for part, state in zip(self._parts, states, strict=True):
            self._buffers.put_into(part, state)
        with torch.no_grad():
            self._last = _copy([self._parameters, states], self._last, {})
        self.are_kept = True

    def put_back(self) -> bool:
        """Restore the copy. Returns False if there is none, or if it cannot be loaded: the number of parameter groups,
        for one, may have changed."""
        if not self.are_kept:
            return False
        values, states = self._last
        self.let_go()  # optimizers keep the tensors that they load
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        try:
            for part, state in zip(self._parts, states, strict=True):
                load_part(part, state)
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False
        return True

    def let_go(self, *, is_needed: bool = False) -> None:
        """Drop the copy and its memory. `is_needed`: make copies from the next step on, as a loaded state demands."""
        self._last, self.are_kept = None, False
        self.is_needed |= is_needed


class ExtraNotLoaded(ValueError):
    """An extra's `load_state_dict` has raised; that error is the cause. The message names the extra."""


def load_extra(name: str, extra: Any, state: Mapping[str, Any]) -> None:
    """As `load_part`. Raises: ExtraNotLoaded; torch.OutOfMemoryError."""
    try:
        load_part(extra, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type: it is the user's code
        raise ExtraNotLoaded(f"extras[{name!r}]: {type(error).__name__}: {' '.join(str(error).split())}") from error


def load_part(part: Any, state: Mapping[str, Any]) -> None:
    """Load what `KeptUpdates.state_of` returned, an optimizer bit by bit. Torch would round a parameter's state to its
    dtype: float32 moments and master weights to bfloat16. May keep the tensors of `state`.

    Loads in place: objects that share groups or states with an optimizer, as parts of one do, still share them.
    """
    if not isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(state)
        return
    parts, held = parts_of(part), state.get(PARTS, {})
    before = [(one, one.state, one.param_groups, [*one.param_groups]) for one in (*parts.values(), part)]
    for name in parts.keys() & held.keys():
        _load_bits(parts[name], held[name])
    _load_bits(part, {name: value for name, value in state.items() if name != PARTS})
    for one, states, groups, each in before:  # the whole optimizer last: its own state decides what parts share
        pairs: list[tuple[Any, Any]] = [(states, one.state), *zip(each, one.param_groups, strict=True)]
        for old, new in pairs:
            if new is not old:  # torch has replaced it
                old.clear()
                old.update(new)
        groups[:] = each
        vars(one).update(state=states, param_groups=groups)


def _load_bits(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    numbers = (number for group in state.get("param_groups", ()) for number in group.get("params", ()))
    given = state.get("state", {})
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):  # a subclass may number others
        _as_given(optimizer.state.get(parameter), given.get(number))


def _as_given(loaded: Any, given: Any) -> Any:
    """Return `loaded`, with each tensor as `given` where loading has changed its dtype."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        is_cast = loaded.dtype != given.dtype and loaded.shape == given.shape
        return given.to(loaded.device) if is_cast else loaded
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        for key in loaded.keys() & given.keys() - {"step"}:  # torch itself keeps or converts `step` as it must be
            loaded[key] = _as_given(loaded[key], given[key])
    elif type(loaded) in (list, tuple) and type(given) in (list, tuple) and len(loaded) == len(given):
        return type(loaded)(map(_as_given, loaded, given))
    return loaded


def _copy(value: Any, last: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a copy of tensors and plain values; a tensor in two places, as the rate of an optimizer's groups, is one
    there, too. Reuse the memory of `last` where that has the same form.

    Args:
        copies: those made so far, by the id of each and of its tensor.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            is_free = (
                isinstance(last, torch.Tensor)
                and id(last) not in copies
                and value.layout is torch.strided
                and (last.shape, last.dtype, last.device) == (value.shape, value.dtype, value.device)
            )
            copy = last.copy_(value) if is_free else value.detach().clone()
            copies[id(value)] = copies[id(copy)] = copy
        return copies[id(value)]
    if isinstance(value, Mapping):
        earlier = last if isinstance(last, Mapping) else {}
        return {key: _copy(entry, earlier.get(key), copies) for key, entry in value.items()}
    if type(value) in (list, tuple):
        others = last if isinstance(last, list | tuple) and len(last) == len(value) else [None] * len(value)
        return type(value)(_copy(entry, other, copies) for entry, other in zip(value, others, strict=True))
    return value if isinstance(value, bool | int | float | None) else deepcopy(value)  # which takes long


def _remember(found: Iterable[tuple[Buffers, Remembered]]) -> None:
    again: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for buffers, kept in found:
        for name, buffer in buffers.items():
            last, copy = kept.get(name, (None, None))
            if buffer is not None and buffer is last and copy is not None:
                copies, sources = again.setdefault((buffer.device, buffer.dtype, buffer.layout), ([], []))
                copies.append(copy)
                sources.append(buffer)
            elif buffer is None or not is_lazy(buffer):  # a pass may replace it, perhaps with another size
                kept[name] = (buffer, _copy(buffer, copy, {}))
    for (_, _, layout), (copies, sources) in again.items():
        if layout is torch.strided:
            torch._foreach_copy_(copies, sources)  # on a GPU separate copies can cost more than a layer
        else:
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source)


def _put_back(buffers: Buffers, kept: Remembered) -> None:
    for name, (buffer, copy) in kept.items():
        if buffer is not None and copy is not None:
            buffer.copy_(copy)
        buffers[name] = buffer
