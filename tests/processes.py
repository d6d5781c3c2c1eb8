"""Helpers for other processes and for files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil
import pytest

from elastic_train.tools.drills.nodes import wait_until


def refuse_threads(patched: pytest.MonkeyPatch) -> None:
    """As at a limit of processes, or while the interpreter ends (Python 3.12): no thread can be started."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patched.setattr(threading.Thread, "start", refuse)


def freeze(pid: int) -> None:
    """SIGSTOP; it stands still when this returns."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"stop of process {pid}", 10.0)


def cpu_seconds(command: Sequence[str]) -> float:
    """Of a command: its time on the wall when it has a core to itself, whatever else this machine is doing."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def forkserver() -> ForkServerContext:
    """Its processes are forked by one that has imported what takes seconds, once for all tests of a pytest process, and
    runs nothing else: in a fork of the test's own one a lock may be held for ever."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "pytest", "elastic_train.elastic.worker", "tests.simulation.simulator"]
    )
    return context


@cache
def cpu_seconds_of_torch() -> float:
    """Of its import, the least of three."""
    return min(cpu_seconds([sys.executable, "-c", "import torch"]) for _ in range(3))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
