"""Where, in the work that GPUs were given, the step in hand begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


class StepStart:
    """The last commit lies before it: whoever copies that need not wait for the step in hand, which may take minutes,
    or hang in a reduction.

    Args:
        model: the devices of its parameters are asked for at the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._events: dict[torch.device, torch.cuda.Event] | None = None

    def note(self) -> None:
        """A step begins. On the thread that trains; does not block."""
        if self._events is None:
            devices = {parameter.device for parameter in self._model.parameters() if parameter.is_cuda}
            self._events = {device: torch.cuda.Event() for device in devices}  # type: ignore[no-untyped-call]
        for device, event in self._events.items():
            event.record(torch.cuda.current_stream(device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside the block, what another thread has the devices copy comes behind the last commit, and beside the step
        in hand."""
        with ExitStack() as streams:
            for device, event in (self._events or {}).items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                streams.enter_context(torch.cuda.stream(stream))
            yield
