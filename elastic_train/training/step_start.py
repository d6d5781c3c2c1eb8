"""Where, in the work that GPUs were given, the step in hand begins."""

from __future__ import annotations

import torch
from torch import nn

BEFORE_OTHERS = -1
"""priority of a stream: from a pool of its own, none of which NCCL has"""


class StepStart:
    """The last commit lies before it: whoever copies that need not wait for the step in hand, which may take minutes,
    or hang in a reduction.

    Args:
        model: the devices of its parameters are asked for at the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[torch.cuda.Stream, torch.cuda.Event]] | None = None
        """for each GPU: where copies beside a step run, and where the step begins"""

    def note(self) -> None:
        """A step begins. On the thread that trains; does not block."""
        if self._places is None:
            devices = {parameter.device for parameter in self._model.parameters() if parameter.is_cuda}
            self._places = [
                (torch.cuda.Stream(device, priority=BEFORE_OTHERS), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for device in devices
            ]
        for stream, event in self._places:
            event.record(torch.cuda.current_stream(stream.device))

    def copy_beside(self) -> None:
        """What this thread has the devices do from now on comes behind the last commit, and beside the step in hand.
        Not on the thread that trains."""
        for stream, event in self._places or ():
            stream.wait_event(event)
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
