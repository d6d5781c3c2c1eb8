"""A thread beside the training thread, which waits for it later."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

CHECK_SECONDS = 0.05


class SideThread:
    """A thread that starts `task` at once. `finish` raises the task's error."""

    def __init__(self, task: Callable[[], None], name: str, *, is_daemon: bool = True) -> None:
        self._task: Callable[[], None] | None = task
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=is_daemon)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Block until the task has ended; any thread may."""
        self._thread.join()

    def _run(self) -> None:
        # The task's objects, perhaps a process group, must be freed by the last reference, not by garbage collection.
        task, self._task = self._task, None
        assert task is not None, "it runs once"
        try:
            task()
        except Exception as error:  # raised by `finish`
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            del task

    def finish(self, check: Callable[[], None]) -> None:
        """Block until the task has ended. `check` is called again and again, and may raise.

        Raises: what the task raised; what `check` raises.
        """
        while self.is_alive:
            self._thread.join(CHECK_SECONDS)
            check()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
