"""One question over HTTP: an answer is read to its end, in however many segments it comes, or it is none."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.notices.metadata import Answer, ask
from elastic_train.notices.notice import NoticeUnreadable
from elastic_train.notices.own_sources import EndpointSource
from elastic_train.preemption import PreemptionNotice
from tests.certificates import make_tls

SEGMENT_SECONDS = 0.05
"""between two segments of an answer: who asks has read the first one by then"""
CLOSE = "HTTP/1.1 200 OK\r\nConnection: close\r\n"
LONG = "x" * 20_000


@contextlib.contextmanager
def answering(*segments: str, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, int]]:
    """A server that gives one answer in these segments, ends it, and waits until who asked has closed it, too."""
    ends: list[bytes] = []

    def serve() -> None:
        plain, _ = listener.accept()
        plain.settimeout(10)
        with plain if tls is None else tls.wrap_socket(plain, server_side=True) as connection:
            connection.recv(4096)
            with contextlib.suppress(OSError):  # it has closed it too early, which the answer shows
                for number, segment in enumerate(segments):
                    if number:
                        time.sleep(SEGMENT_SECONDS)
                    connection.sendall(segment.encode())
                connection.shutdown(socket.SHUT_WR)
                ends.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield listener.getsockname()
        server.join(20)
    assert ends == [b""], "it is closed by who asked"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (f"{CLOSE}Content-Length: 6\r\n\r\n", "notice"),
        (f"{CLOSE}Content-Length: {len(LONG)}\r\n\r\n", LONG),
        (f"{CLOSE}\r\n", "notice"),
        ("HTTP/1.0 200 OK\r\n\r\n", "notice"),
        (f"{CLOSE}Transfer-Encoding: chunked\r\n\r\n", "6\r\nnotice\r\n0\r\n\r\n"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", "notice"),
        ("HTTP/1.1 200 OK\r\n\r\n", "notice"),
    ],
    ids=["close", "close, long", "close, without a length", "HTTP/1.0", "chunks", "kept open", "without a length"],
)
def test_a_body_that_comes_behind_its_headers_is_read(head: str, body: str) -> None:
    with answering(head, body) as address:
        answer = ask(address, "/", {})
    assert (answer.status, answer.text) == (200, LONG if body == LONG else "notice")


def test_over_tls_as_well(tmp_path: Path) -> None:
    files = make_tls(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(files.server_cert, files.server_key)
    head = f"{CLOSE}Content-Length: {len(LONG)}\r\n\r\n"
    with answering(head, LONG, tls=server) as address:
        answer = ask(address, "/", {}, tls=ssl.create_default_context(cafile=str(files.ca)))
    assert answer == Answer(
        200, {"connection": "close", "content-length": str(len(LONG))}, LONG, "{}:{}/".format(*address)
    )


@pytest.mark.parametrize("came", ["", "not"])
@pytest.mark.parametrize("head", [CLOSE, "HTTP/1.1 200 OK\r\n"], ids=["close", "kept open"])
def test_one_that_breaks_off_says_nothing(head: str, came: str) -> None:
    """An empty text would be a certain notice, and the node would leave."""
    with answering(f"{head}Content-Length: 6\r\n\r\n", came) as (host, port):
        source = EndpointSource(f"http://{host}:{port}/gone")
        with pytest.raises(NoticeUnreadable, match=f"^{host}:{port}/gone: it breaks off after {len(came)} of 6 bytes$"):
            source.look()


def test_one_that_is_empty_is_whole() -> None:
    with answering(f"{CLOSE}Content-Length: 0\r\n\r\n") as (host, port):
        assert EndpointSource(f"http://{host}:{port}/gone").look() == PreemptionNotice("http", "notice")


def test_of_one_that_is_too_long_its_length_is_told() -> None:
    with (
        answering(f"{CLOSE}Content-Length: 65537\r\n\r\n", "x" * 65537) as address,
        pytest.raises(NoticeUnreadable, match="more than 65536 bytes"),
    ):
        ask(address, "/", {})
