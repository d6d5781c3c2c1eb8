"""What a step changes before its reduction is known to be sound, kept so that the step can be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Buffers = dict[str, torch.Tensor | None]
"""of one layer, as its forward pass finds them"""
Remembered = dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]
"""which tensor each of them was, and a copy of what it held"""
_SCALES = ("_scale", "_growth_tracker")
"""of a GradScaler; None before its first use"""


class KeptBuffers:
    """What forward passes change in a model, BatchNorm's statistics, as it was when a step began.

    For the thread that trains; `put_into` also for one that has acquired the state's lock.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: list[tuple[Buffers, Remembered]] | None = None

    def keep(self) -> None:
        """A step begins."""
        if self._kept is None:  # once, because walking through a large model costs more than many a step
            self._kept = [(layer._buffers, {}) for layer in self._model.modules() if layer._buffers]
        if self._kept:
            with torch.no_grad():
                for buffers, kept in self._kept:
                    _remember(buffers, kept)

    def put_back(self) -> None:
        """They are again what they were when the step in hand began."""
        with torch.no_grad():
            for buffers, kept in self._kept or ():
                _put_back(buffers, kept)

    def put_into(self, model_state: dict[str, Any]) -> None:
        """The same in the model's state dict: what the step in hand does to the model meanwhile does not show there."""
        found = {id(buffers): kept for buffers, kept in self._kept or ()}
        for place, layer in self._model.named_modules(remove_duplicate=False):
            for name, (_, copy) in found.get(id(layer._buffers), {}).items():
                key = f"{place}.{name}" if place else name
                if copy is not None and key in model_state:
                    model_state[key] = copy


class KeptScales:
    """The scales of a loop's own GradScalers at the beginning of a step. A scaler adapts its scale to the gradients,
    and after a broken reduction these differ between the ranks."""

    def __init__(self, extras: Iterable[Any]) -> None:
        self._kept: list[tuple[torch.amp.GradScaler, Remembered]] = [
            (extra, {}) for extra in extras if isinstance(extra, torch.amp.GradScaler) and extra.is_enabled()
        ]

    def keep(self) -> None:
        """A step begins. Does not wait for a GPU, as the public ways would."""
        for scaler, kept in self._kept:
            _remember({name: vars(scaler)[name] for name in _SCALES}, kept)

    def put_back(self) -> None:
        """They are again what they were when the step in hand began."""
        for scaler, kept in self._kept:
            _put_back(vars(scaler), kept)


def _remember(buffers: Buffers, kept: Remembered) -> None:
    for name, buffer in buffers.items():
        last, copy = kept.get(name, (None, None))
        if buffer is last and buffer is not None and copy is not None:
            copy.copy_(buffer)
        else:  # a forward pass may put another tensor in its place, of another size perhaps
            kept[name] = (buffer, None if buffer is None else buffer.detach().clone())


def _put_back(buffers: Buffers, kept: Remembered) -> None:
    for name, (buffer, copy) in kept.items():
        if buffer is not None and copy is not None:
            buffer.copy_(copy)
        buffers[name] = buffer
