"""Certificates for tests, by the openssl commands of deploy/etcd."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.tools import DEPLOY, program
from tests.etcd_cluster import Tls

HERE = ("127.0.0.1", "localhost")


def openssl_lines() -> list[str]:
    """The page's commands, as one types them."""
    section = (DEPLOY / "etcd" / "README.md").read_text().split("## Certificates")[1]
    return re.findall(r"^    (.*)$", section.split("Start each member")[0], re.M)


def make_tls(
    folder: Path,
    hosts: Sequence[str] = HERE,
    *,
    client: str = "client",
    needs_client_cert: bool = True,
) -> Tls:
    """An authority of its own in `folder`, a certificate for servers at `hosts` and one for a client.

    The test is skipped where there is no openssl.
    """
    program("openssl")
    folder.mkdir(parents=True, exist_ok=True)
    names = ",".join(f"{'IP' if is_address(host) else 'DNS'}:{host}" for host in hosts)
    lines = openssl_lines()
    assert lines[0].startswith("SERVERS=")
    lines[0] = f"SERVERS={names} CLIENT={client}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    files = [folder / f"{name}.{kind}" for name in ("server", client) for kind in ("pem", "key")]
    return Tls(folder / "ca.pem", *files, needs_client_cert=needs_client_cert)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
