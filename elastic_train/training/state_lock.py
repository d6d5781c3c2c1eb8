"""Who may touch the training state: the thread that trains, or one that saves the last commit and ends the process; and
where, in the work that GPUs were given, the last commit ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class StateLock:
    """Held by the thread that trains, but for the long times in which the state is that of the last commit.

    These are a step before its optimizer's step, and an evaluation. Another thread can acquire the lock there; what it
    then copies stays as it is, because the thread that trains waits when it comes to change the state. That thread
    alone calls `hold`, `let_go` and `released`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_held = True
        """by the thread that trains, by its own account"""
        self._taker: int | None = None
        """the other thread that has it: what it does with the state may call for the lock"""

    def hold(self) -> None:
        """The state may change from now on, or be saved by this thread. Blocks where another thread has the lock, for
        ever unless that gives it back; signals are handled meanwhile. Calling it again is a no-op."""
        if not self._is_held and self._taker != threading.get_ident():
            self._lock.acquire()
            self._is_held = True

    def let_go(self) -> None:
        """Until `hold`, the state is that of the last commit. Calling it again is a no-op."""
        if self._is_held:
            self._is_held = False
            self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let go of it inside the block, and hold it afterwards."""
        self.let_go()
        try:
            yield
        finally:
            self.hold()

    def acquire(self, timeout: float) -> bool:
        """For another thread: whether it has the lock now. Blocks up to `timeout` seconds until it is let go of."""
        is_taken = self._lock.acquire(timeout=max(0.0, timeout))
        if is_taken:
            self._taker = threading.get_ident()
        return is_taken

    def give_back(self) -> None:
        """For the thread that has acquired it: there was nothing to save."""
        self._taker = None
        self._lock.release()


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
