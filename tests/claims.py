"""Tests of claims that every arbiter must pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic_train.protocol.arbiter import Arbiter

DEADLINE = 60.0


def check_first_claim_stands(one: Arbiter, other: Arbiter) -> None:
    assert one.claim("job", 3, None) is None
    assert one.claim("job", 3, "a") == "a"
    assert other.claim("job", 3, "b") == "a"
    assert other.claim("job", 3, None) == "a"
    assert other.claim("job", 4, "c") == "c", "another generation"
    assert other.claim("another", 3, "d") == "d", "another start"


def check_all_read_the_same(arbiters: Sequence[Arbiter]) -> None:
    gate = threading.Barrier(len(arbiters))

    def run(number: int) -> str | None:
        gate.wait(DEADLINE)
        return arbiters[number].claim("job", 0, f"decision {number}")

    with ThreadPoolExecutor(len(arbiters)) as threads:
        standing = list(threads.map(run, range(len(arbiters)), timeout=DEADLINE))
    assert len(standing) == len(arbiters)
    assert len(set(standing)) == 1
