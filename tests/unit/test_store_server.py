"""`elastic-train store`: at which address it listens, and that torchrun's agents then find the port taken."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from elastic_train.errors import StoreUnreachable
from elastic_train.store import _listener, serve

TIMEOUT = timedelta(seconds=30)


@contextmanager
def served(host: str) -> Iterator[int]:
    """Its port, while it serves."""
    ports: queue.Queue[int] = queue.Queue()
    over = threading.Event()
    thread = threading.Thread(
        target=lambda: serve(host, 0, started=ports.put, is_over=over.is_set), name="store", daemon=True
    )
    thread.start()
    try:
        yield ports.get(timeout=60)
    finally:
        over.set()
        thread.join(30)


def addresses_listening_at(port: int) -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN and found.laddr.port == port}


@pytest.mark.parametrize(("host", "listens_at"), [("127.0.0.1", {"127.0.0.1"}), ("0.0.0.0", {"::", "0.0.0.0"})])
def test_it_listens_where_it_was_told(host: str, listens_at: set[str]) -> None:
    with served(host) as port:
        found = addresses_listening_at(port)
        assert found
        assert found <= listens_at
        client = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_an_agent_of_the_same_host_finds_the_port_taken() -> None:
    """It hosts the endpoint itself where it can, on all interfaces."""
    with served("127.0.0.1") as port, pytest.raises(RuntimeError, match=r"EADDRINUSE|address already in use"):
        TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def test_a_port_that_is_taken_is_told() -> None:
    with served("127.0.0.1") as port, pytest.raises(StoreUnreachable, match=f"port {port} cannot be served"):
        serve("127.0.0.1", port, started=print, is_over=lambda: True)


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(StoreUnreachable, match="cannot be served"):
        serve("no-such-host.invalid", 0, started=print, is_over=lambda: True)


@pytest.mark.parametrize(
    ("host", "addresses", "is_one"),
    [
        ("mine", ["127.0.1.1"], False),
        ("mine", ["127.0.0.2", "127.0.0.3"], False),
        ("0.0.0.0", ["0.0.0.0"], False),
        ("127.0.0.2", ["127.0.0.2"], True),
        ("localhost", ["127.0.0.1"], True),
    ],
)
def test_a_name_that_others_may_resolve_otherwise_is_served_on_all_interfaces(
    host: str, addresses: list[str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(_host: str, port: int, **_kinds: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listener = _listener(host, 0)
    assert (listener is not None) == is_one
    if listener is not None:
        assert listener.getsockname()[0] == addresses[0]
        listener.close()
