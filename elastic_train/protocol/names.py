"""The look-up of a host name with a deadline: getaddrinfo(3) has none, and a name server may never answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future

from elastic_train.system import answer_of

LOOK_UP_SECONDS = 2.0
"""time that a name server may take"""

_lookups: dict[str, Future[list[str]]] = {}
"""names that are being looked up; each keeps a thread, for ever if the name server never answers"""
_lookups_lock = threading.Lock()


def look_up(host: str) -> list[str]:
    """Return the IP addresses of a name. Blocks for LOOK_UP_SECONDS at most.

    Raises:
        OSError: the name has no address, or no name server answers. ValueError: it is no name.
    """
    with contextlib.suppress(socket.gaierror):
        return _addresses(host, socket.AI_NUMERICHOST)

    def ask() -> list[str]:
        try:
            return _addresses(host)
        finally:
            with _lookups_lock:
                del _lookups[host]  # before the result is set: a caller that gets it and looks again asks anew

    with _lookups_lock:
        found = _lookups.get(host)
        if found is None:
            found = _lookups[host] = answer_of(ask, "look-up")
    try:
        return found.result(LOOK_UP_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"no name server answers within {LOOK_UP_SECONDS:g} s") from None


def _addresses(host: str, flags: int = 0) -> list[str]:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    return [str(address[0]) for _, _, _, _, address in found]
