"""One HTTP request to an untrusted server: limited in time and bytes, without proxies and redirects.

A numeric address causes no name lookup.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.notices.notice import NoticeUnreadable
from elastic_train.system import answer_of

LINK_LOCAL = ("169.254.169.254", 80)
"""The metadata server of AWS, GCP and Azure, which tells a machine about itself. The address is never routed."""
ANSWER_SECONDS = 2.0
"""The timeout of one request, from the connection to the last byte."""
MOST_BYTES = 64 * 1024
"""The longest answer that is accepted; no notice is longer."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    text: str
    url: str
    """Without its query, which may hold a secret."""

    def refused(self) -> NoticeUnreadable:
        """The error for an answer with a status that tells nothing about a notice."""
        return NoticeUnreadable(f"{self.url}: HTTP status {self.status}")


def ask(
    address: tuple[str, int],
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    seconds: float = ANSWER_SECONDS,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Send a request and read the answer. Blocks at most `seconds`. Raises: NoticeUnreadable."""
    url = f"{address[0]}:{address[1]}{path.partition('?')[0]}"
    connection = _connection(address, seconds, tls)
    opened: list[socket.socket] = []
    is_over = threading.Event()

    def exchange() -> tuple[http.client.HTTPResponse, bytes]:
        connection.connect()
        opened.append(connection.sock)
        if is_over.is_set():  # the lookup of the name took too long
            raise TimeoutError
        connection.request(method, path, headers={**headers, "Connection": "close"})
        response = connection.getresponse()
        return response, response.read(MOST_BYTES + 1)

    try:
        # On a thread: a timeout for each read would not stop a server that sends a byte now and then.
        response, body = answer_of(exchange, "notice-request").result(seconds)
    except TimeoutError:
        raise NoticeUnreadable(f"{url}: timed out") from None
    except http.client.InvalidURL:  # its message contains the URL, which may hold a secret
        raise NoticeUnreadable(f"{url}: no URL has such characters") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoticeUnreadable(f"{url}: {str(error) or type(error).__name__}") from error
    except ValueError:  # an invalid header; its message contains the header, which may be a token
        raise NoticeUnreadable(f"{url}: this is no HTTP") from None
    finally:
        is_over.set()
        for sock in opened:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # ends the thread
        connection.close()
    if len(body) > MOST_BYTES:
        raise NoticeUnreadable(f"{url}: more than {MOST_BYTES} bytes")
    if response.length:  # http.client does not check the length of a body that is read in parts
        promised = len(body) + response.length
        raise NoticeUnreadable(f"{url}: it breaks off after {len(body)} of {promised} bytes")
    named = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, named, body.decode(errors="replace"), url)


def _connection(address: tuple[str, int], seconds: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(*address, timeout=seconds)
    return http.client.HTTPSConnection(*address, timeout=seconds, context=tls)
