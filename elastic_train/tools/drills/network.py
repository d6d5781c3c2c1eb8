"""Network namespaces as nodes: an address, a host name, pids and shared memory of their own.

A node in one of them can lose its network or its power (silence, with no FIN and no RST), and not only its processes.
All of them hang on one bridge in a namespace of its own: nothing touches the machine's network, and two drills do not
reach each other. It needs root (also of a user namespace), `ip` and `unshare`. Packet loss and a slow line need `tc`,
and a kernel with its queueing disciplines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import psutil

from elastic_train.errors import first_line
from elastic_train.tools.drills.nodes import CommandFailed, output_of

SUBNET = "10.77.0"
HUB_ADDRESS = f"{SUBNET}.1"
NAMESPACES = Path("/run/netns")
"""where `ip netns` keeps them"""
PREFIX = "et"
"""of the namespaces' names, before the pid of the drill"""
UNUSED_MAC = "02:00:00:00:00:00"
"""a hardware address that no node has: packets to it are lost silently"""

# `ip netns exec` enters the network; unshare makes the rest. --kill-child: the node ends with its first process.
_ENTER = (
    'mount --bind "$1" /etc/hosts && hostname "$2" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm'
    ' && shift 2 && exec "$@"'
)


class Network:
    """The namespaces of one drill; `close` removes them all."""

    def __init__(self, num_nodes: int, aliases: Sequence[str] = ()) -> None:
        """`aliases` are further names of the first nodes, one each.

        Raises CommandFailed if this machine does not allow it; nothing is left then.
        """
        self._prefix = f"{PREFIX}{os.getpid()}"
        self._made: list[str] = []
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-train-drill-"))
        self.num_nodes = num_nodes
        self._aliases = aliases
        self._shaped: dict[int, list[list[str]]] = {}
        """node -> commands that undo what was done to its line"""
        self.unplugged: set[int] = set()
        """nodes without a cable"""
        try:
            _delete_leftovers()
            self._make_hub()
            for index in range(num_nodes):
                self._make_node(index)
        except BaseException:  # a signal too: namespaces outlive their maker
            self.close()
            raise

    @staticmethod
    def why_not() -> str | None:
        """Why this machine allows no namespaces; None if it does."""
        missing = [name for name in ("ip", "unshare", "mount", "hostname") if shutil.which(name) is None]
        if missing:
            return f"no {' and '.join(missing)} here"
        if os.geteuid() != 0:
            return "neither root, nor in a user namespace that allows them (unshare --user --map-root-user --net)"
        return Network.why_no(lambda network: output_of([*network.node_prefix(0), "true"]))

    @classmethod
    def why_no(cls, injection: Callable[[Network], object]) -> str | None:
        """Why `injection` fails on node 0 of a new network; None if it works. The kernel may lack what a rule needs,
        even if the command is installed."""
        try:
            with contextlib.closing(cls(1)) as network:
                injection(network)
        except CommandFailed as error:
            return first_line(error)
        return None

    def hub_prefix(self) -> list[str]:
        """A prefix that runs a command at the bridge's own address, outside of all nodes."""
        return self._inside("hub")

    def node_prefix(self, index: int) -> list[str]:
        """A prefix that runs a command as node `index`; all its processes die with the first one."""
        hosts = str(self._folder / "hosts")
        unshare = ["unshare", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-c", _ENTER, "enter", hosts, self.host_name(index)]
        return self._inside(index, *unshare, *enter)

    def address(self, index: int) -> str:
        return f"{SUBNET}.{10 + index}"

    @property
    def addresses(self) -> list[str]:
        """The addresses of all nodes, in order."""
        return [self.address(index) for index in range(self.num_nodes)]

    def host_name(self, index: int) -> str:
        return f"node{index + 1}"

    # --- faults -------------------------------------------------------------------------------------------------------

    def pull_cable(self, index: int) -> None:
        _ip("-n", self._name("hub"), "link", "set", f"veth{index}", "down")
        self.unplugged.add(index)

    def drop_outgoing(self, index: int) -> None:
        """Drop what the node sends; it still receives."""
        self.hide(index, {HUB_ADDRESS, *self.addresses} - {self.address(index)})

    def hide(self, index: int, addresses: Collection[str]) -> None:
        """Have a node send packets for these addresses to a hardware address that does not exist."""
        for address in addresses:
            to = ("to", address, "lladdr", UNUSED_MAC, "nud", "permanent", "dev", "eth0")
            _ip("-n", self._name(index), "neigh", "replace", *to)

    def plug_in(self, index: int, bridge: str = "br0") -> None:
        _ip("-n", self._name("hub"), "link", "set", f"veth{index}", "master", bridge, "up")
        self.unplugged.discard(index)

    def drop_some(self, index: int, share: float) -> Callable[[], int]:
        """Drop a share of the packets to the node; return what counts the lost ones."""
        return self._shape(index, "dropped", "hub", f"veth{index}", "netem", "loss", f"{share:.2%}")

    def slow_down(self, index: int, rate: str) -> Callable[[], int]:
        """Limit what the node sends to `rate`, e.g. `2mbit`; return what counts how often a packet had to wait."""
        limit = ("tbf", "rate", rate, "burst", "32k", "latency", "400ms")
        return self._shape(index, "overlimits", index, "eth0", *limit)

    def heal(self, index: int) -> None:
        """Undo everything that was done to the node's network."""
        self.plug_in(index)
        _ip("-n", self._name(index), "neigh", "flush", "dev", "eth0", "nud", "permanent")
        for command in self._shaped.pop(index, []):
            output_of(command)

    def can_reach(self, index: int, address: str = HUB_ADDRESS, *, seconds: float = 1.0) -> bool:
        """Return whether a TCP connection attempt of the node gets an answer, if only an RST, within `seconds`."""
        attempt = (
            "import socket, sys\n"
            f"s = socket.socket(); s.settimeout({seconds})\n"
            f"try: s.connect(('{address}', 9))\n"
            "except ConnectionRefusedError: pass\n"
            "except OSError: sys.exit(1)\n"
        )
        return _quiet(self._inside(index, sys.executable, "-c", attempt)) == 0

    def close(self) -> None:
        for name in self._made:
            _quiet(["ip", "netns", "del", name])
        self._made.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- making it ----------------------------------------------------------------------------------------------------

    def _make_hub(self) -> None:
        hub = self._name("hub")
        self._add(hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        _ip("-n", hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", "br0")
        names = [f"{self.address(index)} {self.host_name(index)}" for index in range(self.num_nodes)]
        names += [f"{self.address(index)} {alias}" for index, alias in enumerate(self._aliases)]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def _make_node(self, index: int) -> None:
        hub, name = self._name("hub"), self._name(index)
        self._add(name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"veth{index}", "netns", hub)
        self.plug_in(index)
        _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")

    def _add(self, name: str) -> None:
        self._made.append(name)  # first: an interrupt may come between the two
        _ip("netns", "add", name)

    def _name(self, which: int | str) -> str:
        return f"{self._prefix}-{which}"

    def _inside(self, which: int | str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._name(which), *command]

    def _shape(self, index: int, counted: str, which: int | str, device: str, *how: str) -> Callable[[], int]:
        """Set the queueing discipline of a device's output, until `heal(index)`; return what reads a count of it."""
        at = ("dev", device, "root")
        output_of(self._inside(which, "tc", "qdisc", "add", *at, *how))
        self._shaped.setdefault(index, []).append(self._inside(which, "tc", "qdisc", "del", *at))
        show = self._inside(which, "tc", "-s", "qdisc", "show", "dev", device)
        return lambda: sum(map(int, re.findall(rf"{counted} (\d+)", output_of(show))))


def _ip(*arguments: str) -> None:
    output_of(["ip", *arguments])


def _delete_leftovers() -> None:
    """Remove the namespaces of drills that were killed before they removed them. Their processes died with them."""
    for path in NAMESPACES.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _quiet(["ip", "netns", "del", path.name])


def _quiet(command: Sequence[str]) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
