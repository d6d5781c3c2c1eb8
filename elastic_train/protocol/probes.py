"""Probes: one connection attempt each, which tells whether a process listens at an address."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from enum import StrEnum

from elastic_train.system import starts
from elastic_train.world import Address, Member

PROBE_SECONDS = 0.5


class Probe(StrEnum):
    """The result of a connection attempt to the listener of a member."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """its host answers, and no process listens there: the member is gone"""
    SILENT = "silent"
    """no answer: a dead host, a cut cable or a firewall; it proves nothing"""


def probe(address: Address, timeout: float = PROBE_SECONDS) -> Probe:
    """Try to connect to `address`. Blocks up to `timeout` seconds."""
    try:
        with socket.create_connection(address, timeout):
            return Probe.ACCEPTED
    except ConnectionRefusedError:
        return Probe.REFUSED
    except OSError:
        return Probe.SILENT


def refusing(members: Sequence[Member]) -> list[Member]:
    """Return the members whose address refuses connections: their processes are gone. Blocks as `probe_all`."""
    found = probe_all([member.address for member in members])
    return [member for member, answer in zip(members, found, strict=True) if answer is Probe.REFUSED]


def probe_all(addresses: Sequence[Address], timeout: float = PROBE_SECONDS) -> list[Probe]:
    """Probe all addresses at once. Blocks up to `timeout` seconds, twice that where a name has several IP addresses;
    without threads for that, one after the other."""
    results = [Probe.SILENT] * len(addresses)

    def look(index: int) -> None:
        results[index] = probe(addresses[index], timeout)

    threads: list[threading.Thread] = []
    for index in range(len(addresses)):
        thread = threading.Thread(target=look, args=(index,), daemon=True)
        if starts(thread):
            threads.append(thread)
        else:
            look(index)
    deadline = time.monotonic() + 2 * timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return results


def first_accepting(ips: Sequence[str], port: int, timeout: float) -> str:
    """Return the first of some IP addresses that accepts a connection. Blocks up to `timeout` seconds for each.
    Raises OSError if none does."""
    for number, ip in enumerate(ips, 1):
        try:
            socket.create_connection((ip, port), timeout).close()
        except OSError:
            if number == len(ips):
                raise
        else:
            return ip
    raise OSError("the name has no address")
