"""One question over HTTP to somebody who may hang or lie: with an end, in few bytes, past proxies, where it was asked.

Redirects are not followed, and no name is looked up for an address that is none.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.notices.notice import NoticeUnreadable

LINK_LOCAL = ("169.254.169.254", 80)
"""where AWS, GCP and Azure answer a machine about itself; on the way to it there is no router"""
ANSWER_SECONDS = 2.0
"""for one question, from the connection to the last byte"""
MOST_BYTES = 64 * 1024
"""of an answer; no notice is longer"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """by names in small letters"""
    text: str


def ask(
    address: tuple[str, int],
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    seconds: float = ANSWER_SECONDS,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Ask, and read the answer. Blocks at most `seconds`; with `tls`, or where `address` is a name, so long for each of
    looking it up, connecting and the handshake.

    Raises: NoticeUnreadable.
    """
    deadline = time.monotonic() + seconds
    connection = _connection(address, seconds, tls)
    try:
        connection.connect()
        with contextlib.closing(connection.sock) as sock:
            connection.sock = _Limited(sock, deadline)
            connection.request(method, path, headers={**headers, "Connection": "close"})
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
    except http.client.InvalidURL:  # which its message would show
        raise NoticeUnreadable(f"{_url(address, path)}: no URL has such characters") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoticeUnreadable(f"{_url(address, path)}: {str(error) or type(error).__name__}") from error
    except ValueError:  # of a header, which its message would show, a token too
        raise NoticeUnreadable(f"{_url(address, path)}: this is no HTTP") from None
    finally:
        connection.close()
    if len(body) > MOST_BYTES:
        raise NoticeUnreadable(f"{_url(address, path)}: more than {MOST_BYTES} bytes")
    if response.length:  # what http.client reads in parts it does not compare with what was promised
        promised = len(body) + response.length
        raise NoticeUnreadable(f"{_url(address, path)}: it breaks off after {len(body)} of {promised} bytes")
    named = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, named, body.decode(errors="replace"))


def refuse(answer: Answer, address: tuple[str, int], path: str) -> NoticeUnreadable:
    """For an answer with a status that says nothing about a notice."""
    return NoticeUnreadable(f"{_url(address, path)}: HTTP status {answer.status}")


def _url(address: tuple[str, int], path: str) -> str:
    """Without a query, which may hold a secret."""
    return f"{address[0]}:{address[1]}{path.partition('?')[0]}"


def _connection(address: tuple[str, int], seconds: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(*address, timeout=seconds)
    return http.client.HTTPSConnection(*address, timeout=seconds, context=tls)


class _Limited(io.RawIOBase):
    """A connected socket of which all that is said and heard ends at a deadline; one timeout for each read would not
    end a server that sends a byte now and then."""

    def __init__(self, sock: Any, deadline: float) -> None:
        super().__init__()
        self._sock, self._deadline = sock, deadline

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self._wait()
        self._sock.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait()
        return int(self._sock.recv_into(buffer))

    def makefile(self, *_arguments: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """Does nothing: a connection that is to end closes it before the body is read."""
