"""A wall clock of its own for every node, by libfaketime: https://github.com/wolfcw/libfaketime

It is preloaded into the agent and its workers, and stands between them and the kernel's wall clock; the monotonic
clock is left alone, as it is where somebody sets a machine's clock. Each process reads the offset from a file of its
node, once a second.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from elastic_train.storage.atomic_files import write_atomic

LIBRARY = "libfaketime.so.1"
REREAD_SECONDS = 1.0
"""by when every process of a node that asks for the time has an offset that was set"""


class NodeClocks:
    """The clocks of the nodes of one drill; all are right at first."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes the offsets. Raises LookupError where there is no libfaketime."""
        library = find_library()
        if library is None:
            raise LookupError(NodeClocks.why_not())
        self._library, self._folder = library, folder

    @staticmethod
    def why_not() -> str | None:
        """What this machine lacks for it; None if it has it."""
        if find_library() is not None:
            return None
        return "no libfaketime here: `pip install libfaketime`, or the distribution's package of that name"

    def prefix(self, index: int) -> list[str]:
        """Runs a command by the clock of node `index`."""
        file = self._file(index)
        if not file.exists():
            self.set(index, 0)
        return [
            "env",  # and not the environment: nothing that stands before it has to do with it
            f"LD_PRELOAD={self._library}",
            f"FAKETIME_TIMESTAMP_FILE={file}",
            "FAKETIME_CACHE_DURATION=0",  # read anew when a second begins, and not at every look at the clock
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]

    def set(self, index: int, offset: int) -> None:
        """The clock of node `index` is `offset` seconds ahead of the right time; behind it where that is negative."""
        write_atomic(self._file(index), f"{offset:+d}\n".encode())

    def offset(self, index: int) -> float:
        """Seconds that the clock of a node is ahead, by the word of a process that is started as its agent was.

        Raises subprocess.SubprocessError.
        """
        program = "import time; print(time.time() - time.monotonic())"
        command = [sys.executable, "-c", program]
        wrong, right = (
            float(subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=30, check=True).stdout)
            for prefix in (self.prefix(index), [])
        )
        return wrong - right

    @staticmethod
    def forget(pids: Iterable[int]) -> None:
        """Remove what libfaketime keeps in shared memory for agents that were killed."""
        for pid in pids:
            for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                Path("/dev/shm", name).unlink(missing_ok=True)

    def is_mapped(self, pid: int) -> bool:
        """Whether a process goes by such a clock."""
        with suppress(OSError):
            return str(self._library) in Path(f"/proc/{pid}/maps").read_text()
        return False

    def _file(self, index: int) -> Path:
        return self._folder / f"clock-{index + 1}"


def find_library() -> Path | None:
    """Where it lies: in the Python package, else in the distribution's directories; None if nowhere."""
    package = importlib.util.find_spec("libfaketime")
    homes = (package.submodule_search_locations if package else None) or ()
    folders = [Path(home, "vendor/libfaketime/src") for home in homes]
    folders += [*Path("/usr/lib").glob("*-linux-*/faketime"), Path("/usr/lib/faketime"), Path("/usr/lib64/faketime")]
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()), None)
