"""Nodes on this machine: each is a torchrun process with its workers, ended by pid and never by name."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_train.errors import ElasticTrainError, cause_of
from elastic_train.world import host_name

DROPPED_VARIABLES = (
    "PET_",
    "TORCHELASTIC_",
    "ELASTIC_TRAIN_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "CI=",
    "COLUMNS=",
    "LINES=",
)
"""prefixes of `NAME=`"""

PORTS = (15000, 32000)
"""ip(7): ip_local_port_range begins at 32768"""


class TooSlow(ElasticTrainError):
    """A condition did not come true in time."""


class CommandFailed(ElasticTrainError):
    """A command failed; the message has the command and its error."""


class Node:
    """One agent and its workers, in a session of their own.

    `prefix` is a command that runs its further arguments somewhere else, e.g. in a network namespace. With `is_wrapped`
    its process stays as the parent of the agent, and the agent dies with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        cwd: Path,
        env: Mapping[str, str],
        *,
        name: str = "",
        host: str | None = None,
        prefix: Sequence[str] = (),
        is_wrapped: bool = False,
        terminal: int | None = None,
    ) -> None:
        """`terminal` is the file descriptor of a terminal that gets the output instead of the log."""
        self.name = name or log.stem
        self.host = host or host_name()
        """the host in its workers' events"""
        self.log = log
        self._is_wrapped = is_wrapped
        with log.open("wb") as file:
            out = file if terminal is None else terminal
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                env=dict(env),
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    def agent(self) -> psutil.Process | None:
        """The torchrun process; None if it has not started yet, or has ended."""
        process = self._first()
        if process is None or not self._is_wrapped:
            return process
        with contextlib.suppress(psutil.NoSuchProcess):
            return next(iter(process.children()), None)
        return None

    def _first(self) -> psutil.Process | None:
        """The process that was started; None once it has ended, for its pid may be reused."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.poll() is None:
                return psutil.Process(self.process.pid)
        return None

    def workers(self) -> list[psutil.Process]:
        """The running worker processes, in the order of their start."""
        agent = self.agent()
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in agent.children() if agent is not None else ():
                self._seen.setdefault(child.pid, child)
        return [child for child in self._seen.values() if is_running(child)]

    def member_of(self, worker: psutil.Process, names: Sequence[str]) -> str | None:
        """The name (`host/local_rank/pid`, one of `names`) that a worker of this node has in the events."""
        own = [self.host, str(inner_pid(worker.pid))]
        return next((name for name in names if name.rsplit("/", 2)[::2] == own), None)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def all_processes(self) -> list[psutil.Process]:
        """All running descendants, and every running worker that was ever seen."""
        found = {worker.pid: worker for worker in self.workers()}
        for parent in filter(None, (self._first(), *found.copy().values())):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process.pid: process for process in [parent, *parent.children(recursive=True)]}
        return [process for process in found.values() if is_running(process)]

    def listens_at(self, port: int) -> bool:
        """Return whether a process of the node listens at a port; not for nodes with their own network."""
        for process in self.all_processes():
            with contextlib.suppress(psutil.Error):
                found = process.net_connections(kind="tcp")
                if any(entry.status == psutil.CONN_LISTEN and entry.laddr.port == port for entry in found):
                    return True
        return False

    def kill(self) -> None:
        """Kill everything that still runs, frozen or not; the node is gone when it returns."""
        kill_at_once([self])


def end_processes(processes: Sequence[psutil.Process]) -> float:
    """Kill processes, frozen or not; all are stopped first, so that none notices the end of another. They are gone when
    it returns; returns when the kill began, Unix seconds. Raises: TooSlow."""
    began = time.time()
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    wait_until(lambda: not any(map(is_running, processes)), "end of the killed processes", 10)
    return began


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Running processes that had this variable when they started; orphans too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value and is_running(process):
                found.append(process)
    return found


def kill_at_once(nodes: Sequence[Node]) -> float:
    """Call `end_processes` with all processes of some nodes."""
    began = end_processes([process for node in nodes for process in node.all_processes()])
    for node in nodes:
        node.process.wait(10)
    return began


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def inner_pid(pid: int) -> int:
    """The pid that a process has in its own pid namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def free_port() -> int:
    """Return a TCP port of this machine that is free now.

    It lies below the range of ephemeral ports: an outgoing connection could take one of those before it is used.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def is_listening(port: int, host: str = "localhost") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    """Poll `condition` and return its first true value. Raises TooSlow naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TooSlow(f"no {what} within {timeout:.0f} s")
        time.sleep(0.02)


def output_of(command: Sequence[str], *, what: str | None = None, timeout: float | None = None) -> str:
    """Run a command and return its output. `what` is its name in errors. Raises CommandFailed."""
    name = what or " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{name} hangs") from error
    except OSError as error:
        raise CommandFailed(f"{name}: {cause_of(error)}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CommandFailed(f"{name}: {said or f'exit code {done.returncode}'}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables of launchers, and with one thread per worker."""
    kept = {name: value for name, value in os.environ.items() if not f"{name}=".startswith(DROPPED_VARIABLES)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def dying_with_parent() -> list[str]:
    """A prefix that has a process killed when this one dies in any way; empty without `setpriv`."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
