"""HOST:PORT, and the local addresses and interfaces that lead there."""

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
NOBODY, NOBODY_V6 = "192.0.2.1", "2001:db8::1"
"""for documentation alone: TEST-NET-1 (RFC 5737), RFC 3849"""
ENTRY, MOST_ADDRESSES = 40, 4096
"""bytes of `struct ifreq`, netdevice(7); IPv4 addresses that are looked at"""
NAME_SECONDS = 10.0
"""after which it is asked anew whether an endpoint's name is this machine's"""


def normalize_endpoint(text: str) -> str:
    """HOST:PORT with torchrun's defaults, localhost and 29400."""
    host, port = split_endpoint(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoints(text: str, option_name: str) -> tuple[str, ...]:
    """HOST:PORT of each part of a comma-separated list; an empty one is torchrun's default, localhost:29400.

    Raises:
        UsageError: a part is not HOST:PORT, or is another machine to each node.
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
    """(host, port) of `HOST`, `HOST:PORT` or `[V6]:PORT`.

    Raises:
        ValueError: the port is no number.
    """
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](:(?P<v6port>\d+))?|(?P<host>[^:]*)(:(?P<port>\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    host = match["v6"] or match["host"] or "localhost"
    return host, int(match["v6port"] or match["port"] or DEFAULT_PORT)


def address_towards(endpoints: Sequence[Address], warn: Callable[[str], None]) -> str:
    """The local IP address from which the machines of some endpoints are reached. Blocks for LOOK_UP_SECONDS for each
    of them where no name server answers.

    The route to another machine counts first, for this machine's own name may lead to any interface of it. One that
    leads to the loopback interface, as Debian's 127.0.1.1 does, is meant for others too: where no name says more, it is
    the address of the default route, or 127.0.0.1 where there is none.

    Args:
        warn: told of each name that leads nowhere.
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
            address = source_address(NOBODY, 9)
        are_told = f"others are told {address}, the address of the default route; "
    for what in nowhere:
        warn(f"{what}: {are_told}check the name server, or give an IP address instead of the name")
    return address


def own_address(host: str) -> str | None:
    """The address of this machine that a name or an address of it leads to; None where that is a loopback one, as
    Debian's 127.0.1.1 is, but meant for others. Blocks as `look_up`.

    Raises:
        ValueError: it leads to none of this machine's.
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
    """Whether it is a loopback address that was asked for."""
    return host in ("localhost", "::1") or host.startswith("127.")


def source_address(ip: str, port: int) -> str:
    """The local address of the route to an address. Sends nothing. Raises OSError where there is none."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((ip, port))
        return str(asker.getsockname()[0])


def own_and_others(host: str) -> tuple[list[str], list[str]]:
    """The addresses of this machine that a name or an address leads to, and then those that are another machine's; none
    where none is this machine's. Blocks as `look_up`.

    A name may lead to addresses of this machine that nothing can be bound to (link-local ones, without their
    interface; those of IPv6 where it is turned off): one is another machine's by the kind of addresses that are own."""
    try:
        found = look_up(host)
    except (OSError, ValueError):  # ValueError: of a name that is none
        return [], []
    own = [ip for ip in found if _is_own(ip)]
    kinds = {ipaddress.ip_address(ip).version for ip in own}
    others = {ip: ipaddress.ip_address(ip) for ip in found if ip not in own}
    return own, [
        ip for ip, one in others.items() if one.version in kinds and not (one.is_loopback or one.is_link_local)
    ]


class OwnEndpoints:
    """Which endpoints are on this machine. A name may be found later than this process starts, and may move.

    Args:
        is_host: whether the first one is, where that is known.
    """

    def __init__(self, hosts: Sequence[str], is_host: bool | None, clock: Callable[[], float]) -> None:
        self._hosts, self._is_host, self._clock = hosts, is_host, clock
        self._found: dict[int, tuple[float, bool]] = {}
        """by number, with when its name was looked up"""
        self.sharing: dict[int, str] = {}
        """by number: the other machines that its name leads to, where it leads to this one as well"""

    def has(self, number: int) -> bool:
        """Blocks as `look_up`. The first one only where it is no other machine's: each of them would begin a job."""
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
    """Whether a socket can be bound to an address. Beside keepalived any address can (net.ipv4.ip_nonlocal_bind): then,
    whether an interface has it."""
    if not _can_bind(ip):
        return False
    if not _can_bind(NOBODY_V6 if ":" in ip else NOBODY):
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
    """Make gloo use the network interface that has this address, unless GLOO_SOCKET_IFNAME says otherwise. Of several
    that it has gloo takes the first one, an IPv4 one where there is any.

    gloo would take the address that the host name resolves to, often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = next((name for name, own in interface_addresses() if own == address.partition("%")[0]), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_addresses() -> list[tuple[str, str]]:
    """(name, IP address) of all that network interfaces of this machine have; none where this is not Linux. An IPv4
    address may have a name of its own, `eth0:1`, by which gloo knows it too.
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
