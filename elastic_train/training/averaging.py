"""An exponential moving average of a model's weights, as a part of the training state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class AveragedWeights:
    """average = decay * average + (1 - decay) * weights, after every committed step.

    `torch.optim.swa_utils.AveragedModel` would do, but for the `module.` that it puts before every name of its state.
    BatchNorm's statistics are not averaged: they are the model's.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        """the averaged model, for evaluation"""
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """`model` has committed a step."""
        ours, theirs = list(self.model.parameters()), list(model.parameters())
        floats = [index for index, parameter in enumerate(ours) if parameter.is_floating_point()]
        torch._foreach_lerp_([ours[i] for i in floats], [theirs[i].detach() for i in floats], 1.0 - self._decay)
        layers = dict(self.model.named_modules())
        for place, layer in model.named_modules():
            if place in layers and (layer._buffers or layers[place]._buffers):
                _take_over(layers[place], layer)

    def state_dict(self) -> dict[str, Any]:
        """The averaged model's, with the model's own names."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.model.load_state_dict(state_dict)


def _take_over(ours: nn.Module, theirs: nn.Module) -> None:
    """Give one layer what the other one's buffers hold. A forward pass, of either, may have put another tensor in the
    place of one, of another size perhaps, or have made or dropped one."""
    for name in ours._buffers.keys() - theirs._buffers.keys():
        del ours._buffers[name]
    ours._non_persistent_buffers_set = set(theirs._non_persistent_buffers_set)
    for name, source in theirs._buffers.items():
        buffer = ours._buffers.get(name)
        if source is None or buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            ours._buffers[name] = None if source is None else source.clone()
        else:
            buffer.copy_(source)
