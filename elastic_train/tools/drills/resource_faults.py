"""The faults of a machine that has too little of something: memory, and room on its disk."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from elastic_train.tools.drills.injection import RANK_ZERO, Disturbance, Fault, NotInjected, wait_gone
from elastic_train.tools.drills.nodes import is_running, wait_until

CGROUPS = Path("/sys/fs/cgroup")
SNAPSHOT_SECONDS = 90.0
"""within which a snapshot must be due"""


class OutOfMemory(Fault):
    name = "out-of-memory"
    says = "a worker has no memory left, and the kernel's OOM killer ends it"
    _numbers = itertools.count()

    @classmethod
    def why_not(cls) -> str | None:
        return None if memory_cgroups() else "no memory cgroup can be made here"

    def inject(self) -> str:
        worker, root = self.rng.choice(self.workers()), memory_cgroups()
        if root is None:
            raise NotInjected("no memory cgroup can be made here")
        is_unified = root == CGROUPS
        home = _cgroup_of(worker.pid, root, is_unified)
        group = root / f"elastic-train-drill-{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        try:
            # What it has stays charged to where it was; whatever it needs from now on is too much.
            (group / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text("0")
            (group / "cgroup.procs").write_text(str(worker.pid))
            wait_gone(worker)
            counts = (group / ("memory.events" if is_unified else "memory.oom_control")).read_text()
        except OSError as error:
            raise NotInjected(f"worker {worker.pid} cannot be put into {group}: {error.strerror}") from error
        finally:
            if is_running(worker):
                with suppress(OSError):  # it may end at last; what stays is told by the removal
                    (home / "cgroup.procs").write_text(str(worker.pid))
            wait_until(lambda: _is_removed(group), f"removal of {group}", 5.0)
        if int(dict(line.split() for line in counts.splitlines())["oom_kill"]) == 0:
            raise NotInjected(f"worker {worker.pid} ended, but not by the OOM killer: {counts.split()}")
        return f"worker {worker.pid} was killed by the kernel for want of memory"


def memory_cgroups() -> Path | None:
    """Where cgroups with a limit for memory can be made, of version 2 or 1; None where they cannot."""
    handed_down = CGROUPS / "cgroup.subtree_control"
    is_unified = handed_down.exists() and "memory" in handed_down.read_text().split()
    root = CGROUPS if is_unified else CGROUPS / "memory"
    is_there = is_unified or (root / "memory.limit_in_bytes").exists()
    return root if is_there and os.access(root, os.W_OK) else None


def _cgroup_of(pid: int, root: Path, is_unified: bool) -> Path:
    """The cgroup of a process, as cgroups(7) describes `/proc/PID/cgroup`."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("" if is_unified else "memory") in controllers.split(","):
            return root / path.removeprefix("/")
    return root


def _is_removed(group: Path) -> bool:
    """It goes once the last thread in it has."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


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
