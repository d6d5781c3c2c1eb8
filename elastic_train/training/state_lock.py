"""Access to the training state, for the training thread or a thread that saves the last commit and ends the process;
and the place of the last commit in the work queued on GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class StateLock:
    """A lock that the training thread holds, except in long phases in which the state is that of the last commit.

    These phases are a step until its optimizer's step, and an evaluation. Another thread can acquire the lock there. It
    can copy the state undisturbed, because the training thread waits before it changes the state. The training thread
    alone calls `hold`, `let_go` and `released`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_held = True
        """whether the training thread holds the lock, or regards it as held"""
        self._taker: int | None = None
        """id of the other thread that has acquired the lock; `hold` is a no-op for it"""

    def hold(self) -> None:
        """Hold the lock, before this thread changes or saves the state. Blocks while another thread has the lock,
        perhaps for ever; signals are handled meanwhile. Calling it again is a no-op."""
        if not self._is_held and self._taker != threading.get_ident():
            self._lock.acquire()
            self._is_held = True

    def let_go(self) -> None:
        """Release the lock: until `hold` the state is that of the last commit. Calling it again is a no-op."""
        if self._is_held:
            self._is_held = False
            self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside the block, and hold it afterwards."""
        self.let_go()
        try:
            yield
        finally:
            self.hold()

    def acquire(self, timeout: float) -> bool:
        """Acquire the lock from another thread, and return whether it did. Blocks up to `timeout` seconds."""
        is_taken = self._lock.acquire(timeout=max(0.0, timeout))
        if is_taken:
            self._taker = threading.get_ident()
        return is_taken

    def give_back(self) -> None:
        """Release the lock from the thread that has acquired it, when there was nothing to save."""
        self._taker = None
        self._lock.release()


BEFORE_OTHERS = -1
"""priority of a stream: streams of this priority are from a pool that NCCL does not use"""


class StepStart:
    """The start of the open step in the work queued on GPUs. A copy of the last commit waits for this point only, not
    for the open step, which may take minutes or hang in a reduction.

    Args:
        model: its parameters' devices are read at the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[torch.cuda.Stream, torch.cuda.Event]] | None = None
        """per GPU: the stream for copies beside a step, and the event at the step's start"""

    def note(self) -> None:
        """Record the start of a step. For the training thread; does not block."""
        if self._places is None:
            devices = {parameter.device for parameter in self._model.parameters() if parameter.is_cuda}
            self._places = [
                (torch.cuda.Stream(device, priority=BEFORE_OTHERS), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for device in devices
            ]
        for stream, event in self._places:
            event.record(torch.cuda.current_stream(stream.device))

    def copy_beside(self) -> None:
        """Queue this thread's further GPU work after the last commit and beside the open step. Not for the training
        thread."""
        for stream, event in self._places or ():
            stream.wait_event(event)
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
