"""`elastic-train etcd --members 3`: a local etcd cluster to try a job on, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from elastic_train.tools.drills.etcd_cluster import EtcdCluster, EtcdMember
from elastic_train.wording import count

POLL_SECONDS = 0.2


def serve_etcd(arguments: argparse.Namespace) -> int:
    """Start the members, print how to use them, and end them all on SIGINT, SIGTERM or SIGHUP.

    Raises:
        EtcdMissing: there is no etcd on this machine. TooSlow: it does not become healthy.
    """
    ended: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(signum, lambda received, _frame: ended.append(received))
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="elastic-train-etcd-")))
        cluster = EtcdCluster(folder, arguments.members)
        ends.callback(cluster.end)  # also the members of a start that fails half way
        cluster.start()
        print("\n".join(describe(cluster, folder)), flush=True)
        watch(cluster, lambda: bool(ended))
    return 0


def describe(cluster: EtcdCluster, folder: Path) -> list[str]:
    # An id of its own: without one each try would be the run of runs/default, and the second would continue the first.
    command = ["torchrun", "--rdzv-backend=etcd3", f"--rdzv-endpoint={cluster.endpoint}", "--rdzv-id=try-1"]
    size = len(cluster.members)
    spare = (size - 1) // 2
    return [
        f"elastic-train: etcd, {count(size, 'member')}, plain text, in {folder} (removed at the end); Ctrl-C ends it",
        *(f"  {member.name} at {member.endpoint}, pid {pid_of(member)}" for member in cluster.members),
        f"{spare} of them may be killed at a time. In other terminals:" if spare else "In other terminals:",
        "",
        f"  {' '.join(command)} --nnodes 1:4 -m elastic_train",
        "",
        "Another --rdzv-id is another run, with a directory of its own below runs/.",
    ]


def pid_of(member: EtcdMember) -> int:
    assert member.process is not None, "it was started"
    return member.process.pid


def watch(cluster: EtcdCluster, is_over: Callable[[], bool]) -> None:
    """Block until `is_over()`, or until all members have ended. Prints when a member has ended."""
    alive = list(cluster.members)
    while alive and not is_over():
        for member in list(alive):
            # Ctrl-C in this terminal reaches the members too.
            if member.process is not None and member.process.poll() is not None and not is_over():
                alive.remove(member)
                left = f"{len(alive)} of {len(cluster.members)} are left"
                print(f"elastic-train: {member.name} has ended, {left}", flush=True)
        time.sleep(POLL_SECONDS)
