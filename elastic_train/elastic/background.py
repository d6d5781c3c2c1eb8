"""Threads beside the training thread, and their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic_train.training.group_sockets import leave_behind


class BackgroundThreads:
    """Threads that a member starts, from any thread, for tasks that may take long.

    They are daemons: one that hangs does not keep the process. But a thread that returns from torch's C++ while the
    interpreter ends aborts the process, even a finished thread ("terminate called without an active exception"). So
    the member waits for them at its end.
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
        """Wait until all have ended, for so many seconds at most. Threads that still run are left behind."""
        with self._lock:
            threads = tuple(self._threads)
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                leave_behind(thread)
