"""The fault of a machine that has no room on its disk."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress

from elastic_train.tools.drills.injection import RANK_ZERO, Disturbance, NotInjected
from elastic_train.tools.drills.nodes import wait_until

SNAPSHOT_SECONDS = 90.0
"""within which a snapshot must be due"""


class DiskFull(Disturbance):
    name = "disk-full"
    says = "the disk of the node that writes snapshots is full when one is due; there is room again afterwards"
    holder = RANK_ZERO
    needs_network = True  # with which nodes have mounts of their own
    undo_after = 0.0
    snapshots = 2  # the one that finds no room, and the next, which does

    @classmethod
    def why_not(cls) -> str | None:
        return None if shutil.which("nsenter") else "no nsenter here"

    def limit_seconds(self) -> float:
        return super().limit_seconds() + SNAPSHOT_SECONDS

    def not_yet(self) -> str | None:
        is_writing = any((self.cluster.run_dir / "snapshots").glob(".tmp-*"))
        return super().not_yet() or ("a snapshot is being written" if is_writing else None)

    def inject(self) -> str:
        snapshots = self.cluster.run_dir / "snapshots"
        snapshots.mkdir(exist_ok=True)
        since = time.time()
        self._in_mounts("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(snapshots))

        def warning() -> str | None:
            """What the node has told of a snapshot that found no room."""
            self.cluster.poll()
            for member, at, message in self.cluster.watch.warnings:
                if member in self.members and at >= since and "No space left" in message:
                    return message
            if not self.place.is_running:
                raise NotInjected("its node ended first")
            return None

        return str(wait_until(warning, "snapshot was due", SNAPSHOT_SECONDS))

    def undo(self) -> None:
        with suppress(NotInjected):  # its node may be gone; `is_cleared` sees whether there is room
            self._in_mounts("umount", "--lazy", str(self.cluster.run_dir / "snapshots"))

    def is_cleared(self) -> bool:
        """Whether a snapshot was written since."""
        return any(info.step > (self.undone_at_step or 0) for info in self.newest_snapshots()[:1])

    def _in_mounts(self, *command: str) -> None:
        """Raises: NotInjected with what the command said."""
        # The pids go with its /proc, which `umount` reads.
        prefix = ["nsenter", "--mount", "--pid", f"--target={self.workers()[0].pid}"]
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotInjected(f"{' '.join(command)}: {done.stderr.strip()}")
