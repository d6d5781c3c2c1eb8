"""An exponential moving average of a model's weights, as a part of the training state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from elastic_train.errors import UsageError, first_line
from elastic_train.training.ordered_buffers import make_writable

AVERAGED = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64}
"""data types of which torch can take a mean"""


class AveragedWeights:
    """average = decay * average + (1 - decay) * weights, after every committed step.

    `torch.optim.swa_utils.AveragedModel` does the same, but puts `module.` before every name of its state.
    BatchNorm's statistics, integer parameters and 8-bit parameters are not averaged but copied from the model.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        try:
            copied = copy.deepcopy(model)
        except Exception as error:  # of any type: a layer may have a way of its own
            raise UsageError(f"averaged weights need a copy of the model: {first_line(error)}") from error
        self.model = copied.requires_grad_(False)
        """the averaged model, for evaluation"""
        make_writable(self.model)
        self._decay = decay
        self._parameters = list(self.model.parameters())
        self._floats = [place for place, one in enumerate(self._parameters) if one.dtype in AVERAGED]
        self._others = [*set(range(len(self._parameters))).difference(self._floats)]
        self._narrow = [place for place in self._floats if _is_narrow(self._parameters[place])]
        self._wide: dict[int, torch.Tensor] = {}
        """averages of trained 16-bit parameters in float32, by place: in 16 bits each small change would be rounded
        away. The averaged model has them rounded."""
        self._infinite: set[int] | None = None
        """places of parameters with infinities, such as a mask; None before the first update"""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average after `model` has committed a step."""
        ours, theirs = self._parameters, list(model.parameters())
        for place in self._narrow:
            if theirs[place].requires_grad and place not in self._wide:
                self._wide[place] = ours[place].float()
        if self._infinite is None:  # only once, because it waits for the device
            self._infinite = {i for i in self._floats if not (ours[i].isfinite().all() & theirs[i].isfinite().all())}
        apart = self._wide.keys() | self._infinite
        floats = [place for place in self._floats if place not in apart] if apart else self._floats
        if floats:
            torch._foreach_lerp_([ours[i] for i in floats], [theirs[i] for i in floats], 1.0 - self._decay)
        for place in apart:  # one by one, so that only one copy exists at a time
            average = self._wide.get(place, ours[place])
            weights = theirs[place].to(average.dtype)
            average.lerp_(weights, 1.0 - self._decay)
            if place in self._infinite:  # the mean of two infinities would be NaN
                average.copy_(torch.where(average.isnan(), weights, average))
            ours[place].copy_(average)
        for place in self._others:
            ours[place].copy_(theirs[place])
        layers = dict(self.model.named_modules())
        for place, layer in model.named_modules():
            if place in layers and (layer._buffers or layers[place]._buffers):
                _take_over(layers[place], layer)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged model's state with the model's own names; averages kept in float32 are float32 here."""
        state = self.model.state_dict()
        state.update(
            (name, self._wide[place]) for name, place in self._places() if name in state and place in self._wide
        )
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load what `state_dict` returned, or the model's own state."""
        self._wide.clear()
        self._infinite = None
        self.model.load_state_dict(state_dict)
        for name, place in self._places():
            given = state_dict.get(name)
            if given is not None and place in self._narrow and not _is_narrow(given):
                self._wide[place] = given.to(self._parameters[place].device, torch.float32, copy=True)

    def _places(self) -> Iterator[tuple[str, int]]:
        """Return (name, place) of the parameters; a tied one has several names."""
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        return ((name, places[id(one)]) for name, one in self.model.named_parameters(remove_duplicate=False))


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize < 4


def _take_over(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy the buffers of layer `theirs` to layer `ours`. A forward pass of either may have replaced a buffer, perhaps
    with another size, or have added or dropped one."""
    for name in ours._buffers.keys() - theirs._buffers.keys():
        del ours._buffers[name]
    ours._non_persistent_buffers_set = set(theirs._non_persistent_buffers_set)
    for name, source in theirs._buffers.items():
        buffer = ours._buffers.get(name)
        if source is None or buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            ours._buffers[name] = None if source is None else source.clone()
        else:
            buffer.copy_(source)
