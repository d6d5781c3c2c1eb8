"""A thread beside the one that trains, which is waited for later."""

from __future__ import annotations

import threading
from collections.abc import Callable

CHECK_SECONDS = 0.05


class SideThread:
    """Starts `task` at once. Its error is raised where it is waited for."""

    def __init__(self, task: Callable[[], None], name: str, *, is_daemon: bool = True) -> None:
        self._task = task
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=is_daemon)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._task()
        except Exception as error:  # raised by `finish`
            self._error = error

    def finish(self, check: Callable[[], None]) -> None:
        """Block until the task has ended. `check` is called again and again, and may raise.

        Raises: what the task raised; what `check` raises.
        """
        while self.is_alive:
            self._thread.join(CHECK_SECONDS)
            check()
        if self._error is not None:
            raise self._error
