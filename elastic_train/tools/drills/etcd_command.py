"""`elastic-train etcd --members 3`: a local etcd cluster to try a job on, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from elastic_train.errors import UsageError
from elastic_train.tools.drills.etcd_cluster import HOST, EtcdCluster, EtcdMember
from elastic_train.wording import count

POLL_SECONDS = 0.2
MEMBERS = 3
PORTS = "ports.json"
"""in the folder of a cluster: for clients and for members, of each"""


def serve_etcd(arguments: argparse.Namespace) -> int:
    """Start the members, say how to use them, and end them all on SIGINT, SIGTERM or SIGHUP.

    Raises:
        EtcdMissing: there is no etcd on this machine. TooSlow: it does not become healthy. UsageError: as
            `earlier_ports`.
    """
    ports = [] if arguments.dir is None else earlier_ports(arguments.dir, arguments.members)
    size = arguments.members or len(ports) or MEMBERS
    ended: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(signum, lambda received, _frame: ended.append(received))
    folder = (arguments.dir or Path(tempfile.mkdtemp(prefix="elastic-train-etcd-"))).absolute()
    try:
        cluster = EtcdCluster(folder, size, ports=ports)
        (folder / PORTS).write_text(json.dumps([member.ports for member in cluster.members]))
        with ExitStack() as ends:
            ends.callback(cluster.end)  # also the members of a start that fails half way
            cluster.start()
            print("\n".join(describe(cluster, folder, keeps=arguments.dir is not None)), flush=True)
            watch(cluster, lambda: bool(ended))
    finally:
        if arguments.dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def earlier_ports(folder: Path, size: int | None) -> list[tuple[int, int]]:
    """Of the cluster that an earlier start has left in the folder, which is made where there is none; empty where it is
    empty. By these its members find each other, and jobs find them.

    Raises: UsageError: the folder cannot be written, holds something else or a cluster of another `size`, or a port is
        taken: that cluster may run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if not any(folder.iterdir()):
            return []
        found = [(int(client), int(peer)) for client, peer in json.loads((folder / PORTS).read_bytes())]
    except FileNotFoundError:
        raise UsageError(f"--dir {folder}: is not empty, and holds no cluster of this command") from None
    except (ValueError, TypeError):
        raise UsageError(f"--dir {folder}: {PORTS} in it cannot be read") from None
    except OSError as error:
        raise UsageError(f"--dir {folder}: {error.strerror}") from error
    if size not in (None, len(found)):
        raise UsageError(f"--dir {folder}: holds a cluster with {count(len(found), 'member')}; leave --members out")
    for port in chain.from_iterable(found):
        if not is_free(port):
            raise UsageError(f"--dir {folder}: port {port} of its cluster is taken; does it run already?")
    return found


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def describe(cluster: EtcdCluster, folder: Path, *, keeps: bool) -> list[str]:
    # One of its own: tries without one would all be the run of runs/default, and the second would go on with the first.
    command = ["torchrun", "--rdzv-backend=etcd3", f"--rdzv-endpoint={cluster.endpoint}", "--rdzv-id=try-1"]
    size = len(cluster.members)
    spare = (size - 1) // 2
    return [
        f"elastic-train: etcd, {count(size, 'member')}, plain text, "
        f"in {folder}{'' if keeps else ' (removed at the end)'}; Ctrl-C ends it",
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
    """Until `is_over()`; says when a member has ended, or when all have and nothing is left to wait for."""
    alive = list(cluster.members)
    while alive and not is_over():
        for member in list(alive):
            # Ctrl-C goes to the members of this terminal too.
            if member.process is not None and member.process.poll() is not None and not is_over():
                alive.remove(member)
                left = f"{len(alive)} of {len(cluster.members)} are left"
                print(f"elastic-train: {member.name} has ended, {left}", flush=True)
        time.sleep(POLL_SECONDS)
