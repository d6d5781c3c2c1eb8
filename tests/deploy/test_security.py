"""The firewall commands of the page on security, run in a network namespace."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.deploy.tools import DEPLOY

PAGE = (DEPLOY / "README.md").read_text()
MESH, OPEN = "10.8.0", "192.0.2"
"""the subnet of wg0, and that of the other interface"""

REACHES = (
    "import socket, sys\n"
    "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)\n"
    "except OSError: sys.exit(1)\n"
)
SERVES = (
    "import socket, time\n"
    "servers = [socket.create_server(('', port)) for port in (29400, 22)]\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


@functools.cache
def why_not() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "iptables") if shutil.which(name) is None]
    if missing:
        return f"no {' and '.join(missing)} here"
    name = f"et{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "iptables", "-S")
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)


class Host:
    """It has wg0, which leads to the mesh, and eth0, to anybody; each is a namespace at the other end of a cable."""

    def __init__(self) -> None:
        self.names = {role: f"et{os.getpid()}-{role}" for role in ("host", "mesh", "anybody")}
        for name in self.names.values():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for role, link, subnet in (("mesh", "wg0", MESH), ("anybody", "eth0", OPEN)):
            host, other = self.names["host"], self.names[role]
            run("ip", "link", "add", link, "netns", host, "type", "veth", "peer", "name", "eth0", "netns", other)
            for name, device, number in ((host, link, 1), (other, "eth0", 2)):
                run("ip", "-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
            # Whoever knows the address of the mesh can ask for it from outside.
            run("ip", "-n", other, "route", "add", "default", "via", f"{subnet}.1")

    def inside(self, role: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.names[role], *command]

    def reaches(self, role: str, address: str, port: int) -> bool:
        command = self.inside(role, [sys.executable, "-c", REACHES, address, str(port)])
        return subprocess.run(command, check=False, timeout=30).returncode == 0

    def close(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.skipif(why_not() is not None, reason=f"no firewall of its own: {why_not()}")
@pytest.mark.parametrize("before", [(), ("iptables", "-A", "INPUT", "-p", "tcp", "-j", "ACCEPT")], ids=["none", "open"])
def test_the_endpoint_of_a_mesh_is_for_the_mesh_and_its_own_host(host: Host, before: Sequence[str]) -> None:
    """Whatever rule the host has already."""
    commands = [shlex.split(code) for code in re.findall(r"`(iptables [^`]+)`", PAGE)]
    assert commands
    for command in ([before] if before else []) + commands:
        run(*host.inside("host", command))
    command = host.inside("host", [sys.executable, "-c", SERVES])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            assert host.reaches("host", f"{MESH}.1", 29400), "its own workers, by the endpoint that all are given"
            assert host.reaches("mesh", f"{MESH}.1", 29400)
            for address in (f"{MESH}.1", f"{OPEN}.1"):
                assert not host.reaches("anybody", address, 29400)
                assert host.reaches("anybody", address, 22), "what else the host serves"
        finally:
            server.kill()
