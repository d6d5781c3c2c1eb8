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
        for buffer, source in zip(self.model.buffers(), model.buffers(), strict=True):
            buffer.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        """The averaged model's, with the model's own names."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.model.load_state_dict(state_dict)
