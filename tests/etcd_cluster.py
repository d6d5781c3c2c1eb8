"""Real etcd members for tests, and certificates for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import trustme

from elastic_train.drills.etcd_cluster import EtcdCluster, Tls


def make_certificates(path: Path, *, needs_client_cert: bool = False) -> Tls:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path / "ca.pem")
    files = {}
    for name, identity in (("server", "127.0.0.1"), ("client", "client@example.org")):
        issued = authority.issue_cert(identity, *(["localhost"] if name == "server" else []))
        files[f"{name}_cert"], files[f"{name}_key"] = path / f"{name}.pem", path / f"{name}.key"
        issued.private_key_pem.write_to_path(files[f"{name}_key"])
        with files[f"{name}_cert"].open("wb") as file:
            for part in issued.cert_chain_pems:
                file.write(part.bytes())
    return Tls(ca=path / "ca.pem", needs_client_cert=needs_client_cert, **files)


@contextlib.contextmanager
def etcd_running(path: Path, size: int = 1, tls: Tls | None = None) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(path, size, tls, flags=("--auth-token-ttl", "3"))  # so that a test lives to see one expire
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
