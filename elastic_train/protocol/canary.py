"""A listener that closes as soon as its process is killed.

The kernel frees the memory of a killed process before it closes the files that the threads share: some 70 ms later for
a process that has imported torch, and more with a GPU. But each thread gives up its share of the files, and ends, at
once (`do_exit` in Linux's kernel/exit.c). So the canary is a thread with its own descriptor table, which holds only a
listener. It waits in `pause(2)` for ever, and never runs Python: Python's garbage collector would close descriptors of
the process by their numbers in this thread's table. No thread accepts connections to the listener; the kernel does, and
resets them when the listener is closed.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import socket
import sys
import threading
from contextlib import suppress

BACKLOG = 4096
"""connections that the kernel may keep, including those that their callers have closed; later callers get none"""
CLOSE_RANGE, UNSHARE, LAST = 436, 2, 2**32 - 1
"""number and flag of close_range(2), of Linux 5.9, and its largest descriptor"""


class Canary:
    """The canary of this process.

    Args:
        host: the address to listen at; the port is free.
    """

    def __init__(self, host: str) -> None:
        self.port: int | None = None
        """port of the listener; None if the system allows no such thread"""
        self._thread: ctypes.c_ulong | None = None
        if sys.platform != "linux":
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(BACKLOG)
            self._thread = _start(listener.fileno())
            if self._thread is not None:
                self.port = int(listener.getsockname()[1])

    def close(self) -> None:
        """Close the listener, as if the process had been killed. Blocks until it is closed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            libc = ctypes.CDLL(None)
            libc.pthread_cancel(thread)
            libc.pthread_join(thread, None)


def _start(fd: int) -> ctypes.c_ulong | None:
    """Start a thread that holds only a copy of `fd`; the caller closes its own. None if that is impossible."""
    found: list[ctypes.c_ulong] = []

    def run() -> None:
        libc = ctypes.CDLL(None)
        libc.syscall.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]
        # With this flag the thread has its own table from here on.
        if libc.syscall(CLOSE_RANGE, fd + 1, LAST, UNSHARE) != 0:
            return
        if fd > 0:  # 0 if this process's standard input was closed
            libc.syscall(CLOSE_RANGE, 0, fd - 1, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # inherited: no signal may end `pause`
        thread = ctypes.c_ulong()
        if libc.pthread_create(ctypes.byref(thread), None, libc.pause, None) == 0:  # it shares this thread's table
            found.append(thread)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        thread = threading.Thread(target=run, name="canary")
        thread.start()
        thread.join()
    finally:
        if was_enabled:
            gc.enable()
    return found[0] if found else None
