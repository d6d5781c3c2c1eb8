"""Stores that are reached over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _impatient_resolver() -> Iterator[None]:
    """TCPStore looks up the name of every peer, on its server's one thread too, and IPv4 ones not in /etc/hosts: a name
    server that does not answer stops the whole store for 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield
