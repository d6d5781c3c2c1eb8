"""Real etcd members for tests."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.drills.etcd_cluster import HEALTHY_SECONDS, EtcdCluster, EtcdMember
from elastic_train.tools.drills.nodes import CommandFailed, wait_until


@dataclass(frozen=True)
class Tls:
    """Files of a certificate authority and of certificates that it signed."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    needs_client_cert: bool = False


class OwnEtcd(EtcdCluster):
    """With certificates, and with the settings by which clients of ours find it."""

    def __init__(self, path: Path, size: int, tls: Tls | None = None, flags: Sequence[str] = ()) -> None:
        self.tls = tls
        of_server, of_client = [*flags], list[str]()
        if tls is not None:
            of_server += ["--cert-file", str(tls.server_cert), "--key-file", str(tls.server_key)]
            of_client += ["--cacert", str(tls.ca)]
            if tls.needs_client_cert:
                of_server += ["--client-cert-auth", "--trusted-ca-file", str(tls.ca)]
                of_client += ["--cert", str(tls.client_cert), "--key", str(tls.client_key)]
        super().__init__(path, size, scheme="https" if tls else "http", flags=of_server, ctl_flags=of_client)

    def settings(self, **changes: object) -> EtcdSettings:
        return EtcdSettings(tuple(member.endpoint for member in self.members), **changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def frozen(member: EtcdMember) -> Iterator[None]:
    member.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        member.signal(signal.SIGCONT)


@contextlib.contextmanager
def etcd_running(path: Path, size: int = 1, tls: Tls | None = None, flags: Sequence[str] = ()) -> Iterator[OwnEtcd]:
    cluster = OwnEtcd(
        path, size, tls, flags=("--auth-token-ttl", "3", *flags)
    )  # so that a test lives to see one expire
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def fence_in_trainer(cluster: EtcdCluster, path: Path) -> Path:
    """The cluster wants a user from now on: `trainer` may read and write below /team. Returns its password's file."""
    password = path / "password"
    password.write_text("hunter2\n")
    password.chmod(0o600)
    for command in (
        ("user", "add", "root:rootpw"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "team"),
        ("role", "grant-permission", "team", "--prefix=true", "readwrite", "/team/"),
        ("user", "add", "trainer:hunter2"),
        ("user", "grant-role", "trainer", "team"),
        ("auth", "enable"),
    ):
        cluster.ctl(*command)
    return password


def replace_data(cluster: EtcdCluster, member: EtcdMember) -> None:
    """A member whose disk is lost, as etcd's handbook has it replaced: removed, and added again without data.

    Blocks until it is healthy again. The others must have a majority.
    """
    other = next(one for one in cluster.members if one is not member)
    number = f"{cluster.ids(member)[0]:x}"
    member.kill()
    shutil.rmtree(member.path / member.name)

    def change(*command: str) -> str:
        """Refused until the others have been in touch for 5 s; what did not answer may have been done."""
        with contextlib.suppress(CommandFailed):
            cluster.ctl("member", *command, endpoint=other.endpoint)
        return cluster.ctl("member", "list", endpoint=other.endpoint)

    wait_until(lambda: number not in change("remove", number), f"etcd without {member.name}", HEALTHY_SECONDS)
    address = f"--peer-urls={member.peer_url}"
    wait_until(
        lambda: member.peer_url in change("add", member.name, address), f"etcd with {member.name}", HEALTHY_SECONDS
    )
    member.start(state="existing")
    cluster.wait_until_healthy()
