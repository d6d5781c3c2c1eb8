"""What a step changes before its reduction is known to be sound, kept so that the step can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from elastic_train.errors import UsageError
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.optimizers import parameters_beside, parameters_of, parts_of
from elastic_train.training.ordered_buffers import made_with_nan, make_writable
from elastic_train.wording import count

Buffers = dict[str, torch.Tensor | None]
"""of one layer, as its forward pass finds them"""
Remembered = dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]
"""which tensor each of them was, and a copy of what it held"""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""of an optimizer's `step`, itself the first"""
PARTS = "made_of"
"""in an optimizer's saved state: those of the optimizers that it is made of"""
_SCALES = ("_scale", "_growth_tracker")
"""of a GradScaler; None before its first use"""


class KeptStep:
    """All that a step may change before its last reduction is known to be sound."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named_extras: Mapping[str, Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        extras = tuple(named_extras.values())
        self.modules = {name: one for name, one in {"": model, **named_extras}.items() if isinstance(one, nn.Module)}
        """the model ("") and those among the extras, by name"""
        self.made_with_nan = {name: made_with_nan(one) for name, one in self.modules.items()}
        """of each the buffers that hold NaN by design"""
        self.buffers = KeptBuffers(model, extras)
        self.updates = KeptUpdates(model, optimizer, extras, self.buffers)
        # A scaler adapts its scale to the gradients, and after a broken reduction these differ between the ranks.
        self.scalers = scalers_in((scaler, optimizer, *extras))
        self._scales: list[tuple[dict[str, Any], Remembered]] = [(vars(one), {}) for one in self.scalers]

    def keep(self) -> None:
        """A step begins."""
        self.buffers.keep()
        with torch.no_grad():  # does not wait for a GPU, as the public ways would
            _remember([({name: held[name] for name in _SCALES}, kept) for held, kept in self._scales])
        self.updates.keep()

    def put_back(self) -> bool:
        """It is again what it was when the step in hand began. Returns whether that includes what optimizers change."""
        self.buffers.put_back()  # first: those of the extras have the form again in which they can be loaded
        for held, kept in self._scales:
            _put_back(held, kept)
        return self.updates.put_back()


class KeptBuffers:
    """What forward passes change in the model and in modules among the extras, BatchNorm's statistics, as it was when a
    step began.

    For the thread that trains; `put_into` also for one that has acquired the state's lock.
    """

    def __init__(self, model: nn.Module, extras: Iterable[Any] = ()) -> None:
        self._modules = [model, *(extra for extra in extras if isinstance(extra, nn.Module))]
        for module in self._modules:
            make_writable(module)
        self._kept: list[tuple[Buffers, Remembered]] = []
        self._num_walks = 0

    def keep(self) -> None:
        """A step begins."""
        if self._num_walks < 2:  # no oftener: walking through a large model costs more than many a step
            self._num_walks += 1  # the second time for what layers register in their first forward pass
            layers = {layer: None for module in self._modules for layer in module.modules() if layer._buffers}
            self._kept = [(layer._buffers, {}) for layer in layers]
        if self._kept:
            with torch.no_grad():
                _remember(self._kept)

    def put_back(self) -> None:
        """They are again what they were when the step in hand began."""
        with torch.no_grad():
            for buffers, kept in self._kept:
                _put_back(buffers, kept)

    def put_into(self, module: Any, module_state: dict[str, Any]) -> None:
        """The same in the state dict of one of them (in another's nothing): what the step in hand does to it meanwhile
        does not show there."""
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
    """A stand-in, on a rank without samples, is about to go through `module`. Returns what puts its buffers back, to be
    called after the backward pass, in which activation checkpoints run forward passes again.

    Torch's normalising layers use their statistics meanwhile, of which one sample may be too few. These alone, because
    other models than ours give something else in eval mode, or take part in collectives (SyncBatchNorm) in train mode
    only. What a SyncBatchNorm takes of the sample it has on all ranks, and keeps.
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
            buffer.data.copy_(value)  # a graph may have saved it, and not need what it was
            buffers[name] = buffer

    return put_back


class KeptUpdates:
    """Weights, optimizers and extras when a step began, where optimizers may change them before its last reduction: one
    of several has stepped, or one steps again, or computes the loss several times in its step (a closure). A copy of
    all that, in every such step; the first in which one steps again has none.

    For the thread that trains, or one that has acquired the state's lock.

    Args:
        buffers: keep those of the extras; a forward pass may have changed them when the copy is made.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, extras: Iterable[Any], buffers: KeptBuffers
    ) -> None:
        own = torch.amp.GradScaler | AveragedWeights  # kept by `KeptStep`; changed at the commit
        self._model, self._buffers = model, buffers
        self._parts = [optimizer, *(extra for extra in extras if not isinstance(extra, own))]
        self.optimizers = [part for part in self._parts if isinstance(part, torch.optim.Optimizer)]
        self._num_groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        self.is_needed = len(self.optimizers) > 1
        """from the next step on; a part of the state, for who takes it over"""
        self._num_begun = 0
        """optimizers' steps in the step in hand"""
        self._parameters: list[nn.Parameter] = []
        self._last: Any = None
        """the copy of the last step, whose memory is used again"""
        self.are_kept = False
        """of the step in hand"""
        self.is_as_sent = True
        """whether the optimizers have kept, bit by bit, what a peer has sent where that was taken over"""

    def call_before_steps(self, hook: Callable[..., Arguments | None]) -> None:
        """As `Optimizer.register_step_pre_hook`, of each."""
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(hook)

    @property
    def owned(self) -> set[int]:
        """The ids of the parameters that the optimizers change."""
        return {id(one) for optimizer in self.optimizers for one in parameters_of(optimizer)}

    def is_part(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one of the optimizers is made of another one, which this is."""
        if any(optimizer is one for one in self.optimizers):
            return False
        return self.owned.issuperset(map(id, parameters_of(optimizer)))

    def has_saved(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether what an optimizer holds is saved with those of the state."""
        saved = {id(tensor) for one in self.optimizers for tensor in _tensors_in(self.state_of(one))}
        return saved.issuperset(map(id, _tensors_in(optimizer.state)))

    def state_of(self, part: Any) -> dict[str, Any]:
        """As `part.state_dict()`, and of an optimizer with those of the ones that it is made of, where neither that nor
        another part of the state has them."""
        state: dict[str, Any] = part.state_dict()
        parts = parts_of(part) if isinstance(part, torch.optim.Optimizer) else {}
        if not parts:
            return state
        has = set(map(id, _tensors_in(state)))
        held = {name: one.state_dict() for name, one in parts.items() if all(one is not it for it in self.optimizers)}
        held = {name: one for name, one in held.items() if has.isdisjoint(map(id, _tensors_in(one.get("state", {}))))}
        return {**state, PARTS: held}

    def require_groups(self) -> None:
        """Raises: UsageError where an optimizer has not the number of parameter groups that it began with."""
        for optimizer, number in zip(self.optimizers, self._num_groups, strict=True):
            found = len(optimizer.param_groups)
            if found != number:
                raise UsageError(
                    f"{type(optimizer).__name__} has {count(found, 'parameter group')}, and began with {number}, as do "
                    "newcomers and restarts, which cannot take its state over then: make all groups before run(), with "
                    "a learning rate of 0, or frozen, until they are needed"
                )

    def note_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]) -> Arguments | None:
        """An optimizer's step begins. A closure of it runs passes, and reductions, within that: returns arguments whose
        closure calls `check` after each; None where there is no closure."""
        self._num_begun += 1
        if self._num_begun > 1:
            self.is_needed = True
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None
        self.is_needed = True
        if not self.are_kept and self._num_begun == 1:  # nothing that an optimizer changes has changed
            self._keep()

        def compute() -> Any:
            loss = closure()
            check()
            return loss

        return (args, {**kwargs, "closure": compute}) if is_named else ((args[0], compute, *args[2:]), kwargs)

    def keep(self) -> None:
        """A step begins."""
        self.are_kept, self._num_begun = False, 0
        if self.is_needed:
            self._keep()

    def _keep(self) -> None:
        # Parameters of modules that are no extra are kept, too.
        self._parameters = [*self._model.parameters(), *parameters_beside([self._model], self.optimizers)]
        states = [self.state_of(part) for part in self._parts]
        for part, state in zip(self._parts, states, strict=True):
            self._buffers.put_into(part, state)
        with torch.no_grad():
            self._last = _copy([self._parameters, states], self._last)
        self.are_kept = True

    def put_back(self) -> bool:
        """They are again what they were. Returns whether they were kept, and could be loaded: what has another form by
        now, such as another number of parameter groups, cannot."""
        if not self.are_kept:
            return False
        values, states = self._last
        self.let_go()  # optimizers take what they load
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
        """Of the copy, and its memory. `is_needed` from the next step on, where a state is taken over that needs it."""
        self._last, self.are_kept = None, False
        self.is_needed |= is_needed


class ExtraNotLoaded(ValueError):
    """What an extra has raised as it took its state over, which is the cause. The message says which one it is."""


def load_extra(name: str, extra: Any, state: Mapping[str, Any]) -> None:
    """As `load_part`. Raises: ExtraNotLoaded; torch.OutOfMemoryError."""
    try:
        load_part(extra, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind: it is the user's code
        raise ExtraNotLoaded(f"extras[{name!r}]: {type(error).__name__}: {' '.join(str(error).split())}") from error


def load_part(part: Any, state: Mapping[str, Any]) -> None:
    """Take over what `KeptUpdates.state_of` gave, an optimizer bit by bit: torch rounds what belongs to a parameter to
    its dtype, moments and master weights in float32 to bfloat16. May keep the tensors that it is given.

    Loads in place: who shares groups or states with an optimizer, as it is made of others commonly, still does.
    """
    if not isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(state)
        return
    parts, held = parts_of(part), state.get(PARTS, {})
    before = [(one, one.state, one.param_groups, [*one.param_groups]) for one in (*parts.values(), part)]
    for name in parts.keys() & held.keys():
        _load_bits(parts[name], held[name])
    _load_bits(part, {name: value for name, value in state.items() if name != PARTS})
    for one, states, groups, each in before:  # the whole one last: what it shares is as its own state has it
        pairs: list[tuple[Any, Any]] = [(states, one.state), *zip(each, one.param_groups, strict=True)]
        for old, new in pairs:
            if new is not old:  # torch has put it in its place
                old.clear()
                old.update(new)
        groups[:] = each
        vars(one).update(state=states, param_groups=groups)


def _load_bits(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    numbers = (number for group in state.get("param_groups", ()) for number in group.get("params", ()))
    given = state.get("state", {})
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):  # one that overrides may have others
        _as_given(optimizer.state.get(parameter), given.get(number))


def _as_given(loaded: Any, given: Any) -> Any:
    """`loaded`, where a tensor has got another dtype than it was `given`, as it was given."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        is_cast = loaded.dtype != given.dtype and loaded.shape == given.shape
        return given.to(loaded.device) if is_cast else loaded
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        for key in loaded.keys() & given.keys() - {"step"}:  # which torch leaves alone, or knows why
            loaded[key] = _as_given(loaded[key], given[key])
    elif type(loaded) in (list, tuple) and type(given) in (list, tuple) and len(loaded) == len(given):
        return type(loaded)(map(_as_given, loaded, given))
    return loaded


def scalers_in(parts: Iterable[Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that are in use among parts of a state, or held by one of them as timm's NativeScaler does."""
    held = (one for part in parts for one in (part, *getattr(part, "__dict__", {}).values()))
    found = (one for one in held if isinstance(one, torch.amp.GradScaler) and one.is_enabled())
    return list({id(one): one for one in found}.values())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(entry)


def _copy(value: Any, last: Any) -> Any:
    """A copy of tensors and plain values, in the memory of the `last` one where that has the same form."""
    if isinstance(value, torch.Tensor):
        if (
            isinstance(last, torch.Tensor)
            and value.layout is torch.strided
            and (last.shape, last.dtype, last.device) == (value.shape, value.dtype, value.device)
        ):
            return last.copy_(value)
        return value.detach().clone()
    if isinstance(value, Mapping):
        earlier = last if isinstance(last, Mapping) else {}
        return {key: _copy(entry, earlier.get(key)) for key, entry in value.items()}
    if type(value) in (list, tuple):
        others = last if isinstance(last, list | tuple) and len(last) == len(value) else [None] * len(value)
        return type(value)(_copy(entry, other) for entry, other in zip(value, others, strict=True))
    return deepcopy(value)


def _remember(found: Iterable[tuple[Buffers, Remembered]]) -> None:
    again: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for buffers, kept in found:
        for name, buffer in buffers.items():
            last, copy = kept.get(name, (None, None))
            if buffer is not None and buffer is last and copy is not None:
                copies, sources = again.setdefault((buffer.device, buffer.dtype, buffer.layout), ([], []))
                copies.append(copy)
                sources.append(buffer)
            else:  # a forward pass may put another tensor in its place, of another size perhaps
                kept[name] = (buffer, _copy(buffer, copy))
    for (_, _, layout), (copies, sources) in again.items():
        if layout is torch.strided:
            torch._foreach_copy_(copies, sources)  # on a GPU each copy of its own costs more than many a layer
        else:
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source)


def _put_back(buffers: Buffers, kept: Remembered) -> None:
    for name, (buffer, copy) in kept.items():
        if buffer is not None and copy is not None:
            buffer.copy_(copy)
        buffers[name] = buffer
