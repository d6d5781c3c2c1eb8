"""A canary ends before its process does, and nothing but its listener is in its hands."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_train.protocol.canary import Canary
from elastic_train.protocol.links import Links
from elastic_train.protocol.neighbours import Heard
from tests.unit.test_links import until

DEADLINE = 30.0
"""of every wait"""
EPOCH = "w1"


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return {name for name in found if "/proc/" not in name}


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def settled(find: Callable[[], set[str]], number: int) -> set[str]:
    """What it finds, once these are so many: a thread that was joined may still be in the kernel."""
    deadline = time.monotonic() + DEADLINE
    while len(found := find()) != number:
        assert time.monotonic() < deadline, found
    return found


def test_it_has_a_listener_and_nothing_else_and_leaves_nothing() -> None:
    before, others = descriptors(), threads()
    canary = Canary("127.0.0.1")
    assert canary.port is not None, "this kernel has close_range(2)"
    assert descriptors() == before, "of this process's own"
    [thread] = settled(lambda: threads() - others, 1)
    assert len(os.listdir(f"/proc/self/task/{thread}/fd")) == 1
    [blocked] = re.findall(r"^SigBlk:\s+(\w+)$", Path(f"/proc/self/task/{thread}/status").read_text(), re.MULTILINE)
    assert int(blocked, 16) & (1 << (signal.SIGTERM - 1)), "it is for the others"
    with socket.create_connection(("127.0.0.1", canary.port), DEADLINE) as caller:
        canary.close()
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", canary.port), DEADLINE)
    settled(lambda: threads() - others, 0)
    assert descriptors() == before
    canary.close()


def test_there_is_none_where_nobody_can_listen() -> None:
    before = descriptors()
    canary = Canary("192.0.2.1")
    assert canary.port is None
    canary.close()
    assert descriptors() == before


def test_there_is_none_where_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.protocol.canary.CLOSE_RANGE", 100_000)  # of no system call
    before, others = descriptors(), threads()
    canary = Canary("127.0.0.1")
    assert canary.port is None
    settled(lambda: threads() - others, 0)
    assert descriptors() == before


WITHOUT_INPUT = """
import os, socket
from elastic_train.protocol.canary import Canary

os.close(0)
canary = Canary("127.0.0.1")
socket.create_connection(("127.0.0.1", canary.port), 30.0).close()
print("it listens")
"""


def test_it_lives_where_standard_input_was_closed() -> None:
    """Then its listener has the number 0, and below it is nothing to be closed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_INPUT], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == "it listens\n", done.stderr


# --- as others see it -------------------------------------------------------------------------------------------------

LARGE = """
import json, socket, sys, threading
from elastic_train.protocol.links import Links

memory = bytearray(2**30)
memory[::4096] = b"x" * len(memory[::4096])
listener = socket.create_server(("127.0.0.1", 0))
links = Links("127.0.0.1", "b", 0.05, 2.0)
for _ in range(8):  # a worker starts some too; the last thread that ends frees the memory, and is seldom an early one
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(json.dumps([links.address[1], listener.getsockname()[1]]), flush=True)
links.watch([("a", ("127.0.0.1", int(sys.argv[1])))], "w1")
while True:
    links.turn(1.0)
"""


class Peer:
    """Member `b`, in a process of its own, with a GiB of memory."""

    def __init__(self, mine: Links) -> None:
        command = [sys.executable, "-c", LARGE, str(mine.address[1])]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port, other_port = json.loads(self.process.stdout.readline())
        self.ordinary = socket.create_connection(("127.0.0.1", other_port), DEADLINE)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.ordinary.close()


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links("127.0.0.1", "a", 0.25, 2.0)
    yield made
    made.close()


def has_canary(links: Links, uid: str) -> bool:
    peer = links._calls.peers.get(uid)
    return peer is not None and peer.canary is not None and peer.canary.was_open


def heard(links: Links) -> Heard:
    found = links.heard("b")
    assert found is not None, "it is watched"
    return found


def is_refused(links: Links) -> bool:
    return heard(links).refused_at is not None


def seconds_of_a_death(links: Links) -> tuple[float, float]:
    """From the SIGKILL until the member is known to be dead, and until the kernel has closed its other connections."""
    peer = Peer(links)
    try:
        links.watch([("b", ("127.0.0.1", peer.port))], EPOCH)
        until(lambda: has_canary(links, "b") and heard(links).pinged_at, links)
        closed: list[float] = []

        def wait_for_close() -> None:
            with suppress(ConnectionResetError):
                assert peer.ordinary.recv(1) == b""
            closed.append(time.monotonic())

        waiter = threading.Thread(target=wait_for_close)
        waiter.start()
        killed = time.monotonic()
        peer.process.kill()
        until(lambda: is_refused(links), links)
        refused = time.monotonic()
        waiter.join(DEADLINE)
        found = heard(links)
        assert (found.refused_at or 0.0) >= (found.pinged_at or math.inf)
        return refused - killed, closed[0] - killed
    finally:
        peer.end()
        links.watch([], EPOCH)
        links.turn(0.0)


def test_a_killed_process_is_refused_before_the_kernel_has_freed_its_memory(links: Links) -> None:
    """Unless its canary is the last thread to end, which frees the memory first."""
    deaths = []
    while not deaths or deaths[-1][0] >= deaths[-1][1] / 2:  # on a busy machine not each time
        deaths.append(seconds_of_a_death(links))
        assert len(deaths) < 6, deaths


def test_a_canary_alone_that_ends_is_a_death_and_one_that_another_program_replaces_is_none(links: Links) -> None:
    other = Links("127.0.0.1", "b", 0.25, 2.0)
    try:
        links.watch([("b", other.address)], EPOCH)
        other.watch([("a", links.address)], EPOCH)

        def both_turn() -> bool:
            other.turn(0.0)
            return has_canary(links, "b")

        until(both_turn, links)
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            canary = links._calls.peers["b"].canary
            assert canary is not None
            canary.address = stranger.getsockname()
            other._canary.close()
            end = time.monotonic() + 1.0
            until(lambda: (other.turn(0.0), time.monotonic() > end)[1], links)
            assert not is_refused(links), "it lives, by its pings"
    finally:
        other.close()
    until(lambda: is_refused(links), links)
