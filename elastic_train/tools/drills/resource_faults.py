"""The faults of a machine that has too little of something: memory, and room on its disk."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.injection import (
    Disturbance,
    Fault,
    Injection,
    NotInjected,
    choose_worker,
    snapshots_of,
    some_workers,
    wait_gone,
    with_rank_zero,
)
from elastic_train.tools.drills.nodes import is_running

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

    def inject(self, injection: Injection) -> str:
        worker, root = choose_worker(injection), memory_cgroups()
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
            _remove(group)
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


def _remove(group: Path) -> None:
    """Blocks until the last thread in it has gone. Raises: NotInjected after 5 s."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            group.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotInjected(f"{group} is left behind: {error.strerror}") from error
        time.sleep(0.02)


class DiskFull(Disturbance):
    name = "disk-full"
    says = "the disk of the node that writes snapshots is full when one is due; there is room again afterwards"
    needs_network = True  # with which nodes have mounts of their own
    undo_after = 0.0
    snapshots = 2  # the one that finds no room, and the next, which does

    @classmethod
    def why_not(cls) -> str | None:
        return None if shutil.which("nsenter") else "no nsenter here"

    def limit_seconds(self, injection: Injection) -> float:
        return super().limit_seconds(injection) + SNAPSHOT_SECONDS

    def not_yet(self, cluster: Cluster) -> str | None:
        if (missing := super().not_yet(cluster)) is not None:
            return missing
        if any((cluster.run_dir / "snapshots").glob(".tmp-*")):
            return "a snapshot is being written"
        return None if with_rank_zero(cluster) else "nobody healthy has rank 0"

    def choose(self, injection: Injection) -> list[Place]:
        return with_rank_zero(injection.cluster)

    def inject(self, injection: Injection) -> str:
        snapshots = injection.cluster.run_dir / "snapshots"
        snapshots.mkdir(exist_ok=True)
        since = time.time()
        _in_mounts_of(injection.place, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(snapshots))
        deadline = time.monotonic() + SNAPSHOT_SECONDS
        while (warning := self._warning(injection, since)) is None:
            if time.monotonic() > deadline:
                raise NotInjected(f"no snapshot was due in {SNAPSHOT_SECONDS:.0f} s")
            if not injection.place.is_running:
                raise NotInjected("its node ended first")
            time.sleep(0.05)
            injection.cluster.poll()
        return warning

    def _warning(self, injection: Injection, since: float) -> str | None:
        """What the node has told of a snapshot that found no room."""
        return next(
            (
                seen.message
                for seen in injection.cluster.watch.warnings
                if seen.member in injection.members and seen.time >= since and "No space left" in seen.message
            ),
            None,
        )

    def undo(self, injection: Injection) -> None:
        with suppress(NotInjected):  # its node may be gone; `is_cleared` sees whether there is room
            _in_mounts_of(injection.place, "umount", "--lazy", str(injection.cluster.run_dir / "snapshots"))

    def is_cleared(self, injection: Injection) -> bool:
        """Whether a snapshot was written since."""
        newest = snapshots_of(injection.cluster)[:1]
        return any(info.step > (injection.undone_at_step or 0) for info in newest)


def _in_mounts_of(place: Place, *command: str) -> None:
    """Raises: NotInjected with what the command said."""
    worker = some_workers(place)[0]
    # The pids go with its /proc, which `umount` reads.
    prefix = ["nsenter", "--mount", "--pid", f"--target={worker.pid}"]
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotInjected(f"{' '.join(command)}: {done.stderr.strip()}")
