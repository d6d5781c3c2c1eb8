"""Threads beside the one that trains, and their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic_train.training.group_sockets import leave_behind


class BackgroundThreads:
    """Threads that a member starts for what may take its time, from any thread.

    They are daemons: one that hangs does not keep the process. But one that comes back from torch's C++ while the
    interpreter ends aborts the process, a finished one too ("terminate called without an active exception"). So the
    member waits for them at its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Run `task` on a thread of its own."""
        thread = threading.Thread(target=task, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def finish(self, seconds: float) -> None:
        """Wait until all have ended, so long at most. One that has not is left behind."""
        with self._lock:
            threads = tuple(self._threads)
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                leave_behind(thread)
