"""Who may touch the training state: the thread that trains, or one that saves the last commit and ends the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
