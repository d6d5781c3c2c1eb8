"""Workers that --spawn starts, and the signals that it passes on to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.rendezvous import spawn as spawning
from elastic_train.rendezvous.spawn import spawn

HANDLED = (signal.SIGTERM, signal.SIGINT)


class FakeWorker:
    """Ends by the first signal that it is told; SIGTERM comes while the first one is started."""

    started: list[FakeWorker]

    def __init__(self, *_command: Any, **_kinds: Any) -> None:
        self.told: list[int] = []
        if not self.started:
            os.kill(os.getpid(), signal.SIGTERM)
        self.started.append(self)

    def send_signal(self, signum: int) -> None:
        self.told.append(signum)

    def wait(self) -> int:
        return -self.told[0] if self.told else 0


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeWorker]]:
    before = [signal.getsignal(signum) for signum in HANDLED]
    FakeWorker.started = []
    monkeypatch.setattr(spawning, "subprocess", SimpleNamespace(Popen=FakeWorker))  # torch starts processes, too
    yield FakeWorker.started
    for signum, handler in zip(HANDLED, before, strict=True):
        signal.signal(signum, handler)


def test_a_signal_that_comes_while_workers_are_started_reaches_each_once(workers: list[FakeWorker]) -> None:
    """Twice means to end at once."""
    assert spawn(3, []) == 128 + signal.SIGTERM
    assert [worker.told for worker in workers] == [[signal.SIGTERM]] * 3
