"""SIGTERM and SIGINT: finish the step in hand, save, leave."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import FrameType

from elastic_train.errors import Stopped

GRACE_SECONDS = 3.0
"""people, and schedulers, stop nodes one after the other, and on a busy machine an agent passes the signal on late"""


class StopSignal:
    """Remembers that this worker was told to stop; the handler does nothing else and waits for nobody.

    The training loop turns it into a vote, so that all ranks stop at the same step though their signals arrive at
    different moments. A second SIGINT is a person who has lost patience: it ends the process at once.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._requested_at = 0.0

    def install(self) -> None:
        """Call from the main thread."""
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)

    def _remember(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        if self.signum is None:
            self._requested_at = time.monotonic()
            self.signum = signum

    @property
    def is_requested(self) -> bool:
        return self.signum is not None

    def votes(self) -> tuple[int, int]:
        """(told to stop, leaving now): what this worker contributes to the step in hand.

        The signals of one stop reach the workers up to some seconds apart. So a worker that was told to
        stop trains on for GRACE_SECONDS; if not everybody has been told by then, it is a stop of this node alone.
        """
        if self.signum is None:
            return 0, 0
        return 1, int(time.monotonic() - self._requested_at > GRACE_SECONDS)

    def check(self) -> None:
        """For waits outside of a step.

        Raises:
            Stopped: this worker was told to stop.
        """
        if self.signum is not None:
            raise Stopped(self.signum)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent dies, so that no worker outlives its agent (prctl(2)).

    torchrun starts workers in sessions of their own: a SIGKILLed agent would leave them training as orphans.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    if libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) == 0 and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before the kernel was told
