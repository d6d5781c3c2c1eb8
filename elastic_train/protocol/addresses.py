"""Endpoints HOST:PORT, and the local addresses and interfaces that lead to them."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import math
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from elastic_train.errors import UsageError, first_line
from elastic_train.protocol.names import look_up

if TYPE_CHECKING:  # torchrun's agent needs nothing else of it
    from elastic_train.world import Address

DEFAULT_PORT, MAX_PORT = 29400, 65535
UNUSED_IP, UNUSED_IP_V6 = "192.0.2.1", "2001:db8::1"
"""addresses that no machine has, reserved for documentation: TEST-NET-1 (RFC 5737), RFC 3849"""
ENTRY, MOST_ADDRESSES = 40, 4096
"""bytes of `struct ifreq`, netdevice(7); most IPv4 addresses that are read"""
NAME_SECONDS = 10.0
"""time after which an endpoint's name is looked up anew, to see whether it is this machine's"""


def normalize_endpoint(text: str) -> str:
    """Return HOST:PORT with torchrun's defaults, localhost and 29400."""
    host, port = split_endpoint(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoints(text: str, option_name: str) -> tuple[str, ...]:
    """Return HOST:PORT of each part of a comma-separated list; an empty list is torchrun's default, localhost:29400.

    Raises:
        UsageError: a part is not HOST:PORT, or means another machine on each node.
    """
    parts = [part for part in text.split(",") if part.strip()] or [""]
    try:
        found = [(part.strip(), *split_endpoint(part)) for part in parts]
    except ValueError as error:
        raise UsageError(f"{option_name}: {error}") from error
    for part, _, port in found:
        if not 0 < port <= MAX_PORT:
            raise UsageError(f"{option_name} {part}: a port is 1 to {MAX_PORT}, the same for all")
    own = [part for part, host, _ in found if _is_for_this_machine(host)]
    if 0 < len(own) < len(found):
        raise UsageError(
            f"{option_name} {own[0]} in a list is another machine on each node: give one's name or address"
        )
    return tuple(dict.fromkeys(normalize_endpoint(part) for part in parts))


def split_endpoint(text: str) -> Address:
    """Return (host, port) of `HOST`, `HOST:PORT` or `[V6]:PORT`.

    Raises:
        ValueError: the port is no number.
    """
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](:(?P<v6port>\d+))?|(?P<host>[^:]*)(:(?P<port>\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    host = match["v6"] or match["host"] or "localhost"
    return host, int(match["v6port"] or match["port"] or DEFAULT_PORT)


def address_towards(endpoints: Sequence[Address], warn: Callable[[str], None]) -> str:
    """Return the local IP address from which this machine reaches the endpoints. Blocks for LOOK_UP_SECONDS for each of
    them if no name server answers.

    The route to another machine counts first, since this machine's own name may lead to any of its interfaces. An own
    name that leads to the loopback interface, as Debian's 127.0.1.1, is meant for other machines too. If no name tells
    more, the result is the address of the default route, or 127.0.0.1 without one.

    Args:
        warn: called for each name that leads nowhere.
    """
    of_routes: list[str] = []
    of_own_names: list[str] = []
    of_loopback: list[str] = []
    nowhere: list[str] = []
    for host, port in endpoints:
        try:
            ip = look_up(host)[0]
        except (OSError, ValueError) as error:
            nowhere.append(f"the name in {host}:{port} leads nowhere ({first_line(error)})")
            continue
        with suppress(OSError):  # there may be no route
            found = source_address(ip, port)
            if not ipaddress.ip_address(found).is_loopback:
                (of_own_names if found == ip else of_routes).append(found)
            elif _is_for_this_machine(host):
                of_loopback.append(found)
    known = [*of_routes, *of_own_names]
    if len(of_loopback) == len(endpoints):
        known += of_loopback
    address, are_told = known[0] if known else "127.0.0.1", ""
    if not known:
        with suppress(OSError):
            address = source_address(UNUSED_IP, 9)
        are_told = f"others are told {address}, the address of the default route; "
    for what in nowhere:
        warn(f"{what}: {are_told}check the name server, or give an IP address instead of the name")
    return address


def own_address(host: str) -> str | None:
    """Return the address of this machine to which `host` leads; None if that is a loopback address, as Debian's
    127.0.1.1, though the name is meant for other machines. Blocks as `look_up`.

    Raises:
        ValueError: `host` leads to no address of this machine.
    """
    try:
        own = [ip for ip in look_up(host) if _is_own(ip)]
    except (OSError, ValueError) as error:
        raise ValueError(f"it leads nowhere ({first_line(error)})") from error
    if not own:
        raise ValueError("no network interface of this machine has it")
    is_any = _is_for_this_machine(host)
    return next((ip for ip in own if is_any or not ipaddress.ip_address(ip).is_loopback), None)


def _is_for_this_machine(host: str) -> bool:
    """Return whether `host` means the loopback interface on purpose."""
    return host in ("localhost", "::1") or host.startswith("127.")


def source_address(ip: str, port: int) -> str:
    """Return the local address of the route to an address. Sends nothing. Raises: OSError if there is no route."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((ip, port))
        return str(asker.getsockname()[0])


def own_and_others(host: str) -> tuple[list[str], list[str]]:
    """Return the addresses of this machine to which `host` leads, and those of other machines; the latter are empty if
    the former are. Blocks as `look_up`.

    No socket can be bound to some addresses of this machine: link-local ones without their interface, and IPv6 ones if
    IPv6 is off. So an address counts as another machine's only if an own address has the same IP version."""
    try:
        found = look_up(host)
    except (OSError, ValueError):  # ValueError: `host` is no name
        return [], []
    own = [ip for ip in found if _is_own(ip)]
    kinds = {ipaddress.ip_address(ip).version for ip in own}
    others = {ip: ipaddress.ip_address(ip) for ip in found if ip not in own}
    return own, [
        ip for ip, one in others.items() if one.version in kinds and not (one.is_loopback or one.is_link_local)
    ]


class OwnEndpoints:
    """The endpoints that are on this machine. A name may become known after this process started, and may move.

    Args:
        is_host: whether the first endpoint is on this machine; None if unknown.
    """

    def __init__(self, hosts: Sequence[str], is_host: bool | None, clock: Callable[[], float]) -> None:
        self._hosts, self._is_host, self._clock = hosts, is_host, clock
        self._found: dict[int, tuple[float, bool]] = {}
        """by number of the endpoint: (time of the look-up, result)"""
        self.sharing: dict[int, str] = {}
        """by number: the other machines to which the name leads, if it leads to this machine as well"""

    def has(self, number: int) -> bool:
        """Return whether an endpoint is here, and the first one only here: else two may begin. Blocks as `look_up`."""
        if number == 0 and self._is_host is not None:
            return self._is_host
        looked_at, found = self._found.get(number, (-math.inf, False))
        if self._clock() - looked_at > NAME_SECONDS:
            own, others = own_and_others(self._hosts[number])
            self.sharing[number] = ", ".join(others) if own else ""
            found = bool(own) and not (number == 0 and others)
            self._found[number] = self._clock(), found
        return found


def _is_own(ip: str) -> bool:
    """Return whether a socket can be bound to an address. With net.ipv4.ip_nonlocal_bind, as keepalived sets it, any
    address can be bound: then return whether an interface has it."""
    if not _can_bind(ip):
        return False
    if not _can_bind(UNUSED_IP_V6 if ":" in ip else UNUSED_IP):
        return True
    address = ipaddress.ip_address(ip)
    of_interfaces = {found for _, found in interface_addresses()}
    return address.is_loopback or address.is_unspecified or str(address) in of_interfaces


def _can_bind(ip: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as trial:
        trial.bind((ip, 0))
        return True
    return False


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface that has this address, unless GLOO_SOCKET_IFNAME is set. Of several addresses
    of that interface gloo takes the first IPv4 one, or else the first.

    By default gloo takes the address to which the host name resolves, often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = next((name for name, own in interface_addresses() if own == address.partition("%")[0]), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface name, IP address) of all addresses of this machine; none if this is not Linux. An IPv4 address
    may have a name of its own, such as `eth0:1`, by which gloo knows it too.
    """
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        entries = array.array("B", bytes(ENTRY * MOST_ADDRESSES))
        request = struct.pack("iP", len(entries), entries.buffer_info()[0])
        length, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), 0x8912, request))  # SIOCGIFCONF, netdevice(7)
        for entry in (bytes(entries[start : start + ENTRY]) for start in range(0, length, ENTRY)):
            found.append((entry[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])))
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for digits, *_, name in map(str.split, lines):
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found
