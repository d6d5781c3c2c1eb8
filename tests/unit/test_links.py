"""Pings over real sockets to a member that is alive, dead, frozen, or replaced by another process."""

from __future__ import annotations

import errno
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from elastic_train.protocol.links import Links
from elastic_train.protocol.neighbours import LONGEST_LINE, Heard
from elastic_train.system import through_suspends
from elastic_train.world import Address
from tests.processes import freeze

INTERVAL = 0.05
DEADLINE = 30.0
"""of every wait"""
PEER_TIMEOUT = 10.0
FAR = 60.0
"""between two pings of members that shall hear nothing but what is told at once"""
EPOCH = "w1"

Open = Callable[..., Links]


@pytest.fixture
def open_links() -> Iterator[Open]:
    opened: list[Links] = []

    def make(
        uid: str,
        interval: float = INTERVAL,
        host: str = "127.0.0.1",
        peer_timeout: float = PEER_TIMEOUT,
        warn: Callable[[str], None] = pytest.fail,
        can_read: Callable[[str], bool] = lambda _: True,
    ) -> Links:
        opened.append(Links(host, uid, interval, peer_timeout, warn, can_read))
        return opened[-1]

    yield make
    for links in opened:
        links.close()


def open_alone(uid: str) -> Links:
    return Links("127.0.0.1", uid, INTERVAL, PEER_TIMEOUT)


def until(condition: Callable[[], object], *driven: Links) -> list[bool]:
    """Let members take their turns until something holds; what their turns returned."""
    deadline, returned = time.monotonic() + DEADLINE, []
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        returned += [links.turn(0.01) for links in driven]
    return returned


def pass_time(seconds: float, *driven: Links) -> None:
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, *driven)


def heard(links: Links, uid: str) -> Heard:
    found = links.heard(uid)
    assert found is not None, "it is watched"
    return found


def meet(one: Links, other: Links, epoch: str = EPOCH) -> None:
    """Members `a` and `b` of one world have answered each other."""
    one.watch([("a", one.address), ("b", other.address)], epoch)
    other.watch([("a", one.address), ("b", other.address)], epoch)
    until(lambda: heard(one, "b").pinged_at and heard(other, "a").pinged_at, one, other)


PEER = """
import json, os, signal, sys
from elastic_train.protocol.links import Links

links = Links("127.0.0.1", "b", 0.05, 10.0)
print(json.dumps(links.address), flush=True)
links.watch([("a", tuple(json.loads(sys.stdin.readline())))], "w1")
links.announce("-at work")
while not (links.heard("a").pinged_at and links.answered()):
    links.turn(0.05)
child = os.fork() if "forks" in sys.argv else -1
if child == 0:
    signal.pause()
print(child, flush=True)
while True:
    links.turn(0.05)
"""


class Process:
    """Member `b`, in a process of its own; it has met `a` when this returns."""

    def __init__(self, a: Links, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        host, port = json.loads(self.process.stdout.readline())
        self.address: Address = (host, port)
        a.watch([("b", self.address)], EPOCH)
        self.process.stdin.write(json.dumps(a.address) + "\n")
        self.process.stdin.flush()
        until(lambda: heard(a, "b").pinged_at and a.answered(), a)
        self.child = int(self.process.stdout.readline())

    def freeze(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)  # its forked child keeps the pipe
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def running(a: Links, *arguments: str) -> Iterator[Process]:
    process = Process(a, *arguments)
    try:
        yield process
    finally:
        process.end()
        if process.child > 0:
            with suppress(ProcessLookupError):
                os.kill(process.child, signal.SIGKILL)


# --- members that live ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_members_of_a_world_answer_each_other(open_links: Open, host: str) -> None:
    try:
        one, other = open_links("a", host=host), open_links("b", host=host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    one.announce("-one two")
    other.announce("-three")
    meet(one, other)
    until(lambda: heard(one, "b").status and heard(other, "a").status, one, other)
    assert (heard(one, "b").status, heard(one, "b").epoch) == ("-three", EPOCH)
    assert (heard(other, "a").status, heard(other, "a").epoch) == ("-one two", EPOCH)
    assert heard(one, "b").has_answered
    assert heard(one, "b").refused_at is None
    assert one.answered().keys() == {"b"}
    assert 0.0 <= one.answered()["b"] < DEADLINE
    assert one.heard("a") is None, "nobody watches itself"


def test_what_a_member_cannot_read_counts_as_not_heard_and_is_told_once(open_links: Open) -> None:
    warnings: list[str] = []
    one, other = open_links("a", warn=warnings.append, can_read=lambda text: "new" not in text), open_links("b")
    one.announce("-mine")
    other.announce("-theirs")
    meet(one, other)
    until(lambda: heard(one, "b").pinged_at and one.answered(), one, other)
    other.announce("-new")
    until(lambda: warnings, one, other)
    before, answered_at = heard(one, "b").heard_at, time.monotonic() - one.answered()["b"]
    seen, now = heard(other, "a").elsewhere_since, time.monotonic()
    until(lambda: time.monotonic() > now + 4 * INTERVAL, one, other)
    assert seen is not None, "it is answered as one of another world"
    assert (heard(one, "b").status, heard(one, "b").heard_at) == ("-theirs", before)
    assert time.monotonic() - one.answered()["b"] == pytest.approx(answered_at, abs=0.01)
    assert len(warnings) == 1
    assert "127.0.0.1" in warnings[0]
    assert "same build" in warnings[0]
    other.announce("-theirs again")
    until(lambda: heard(one, "b").status == "-theirs again", one, other)


class Caller:
    """Somebody who speaks the lines by hand."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.socket = socket.create_connection(links.address, DEADLINE)
        self.received = b""

    def send(self, text: bytes) -> None:
        self.socket.sendall(text)

    def line(self) -> str:
        """The next line that it is answered."""
        self.socket.setblocking(False)

        def has_line() -> bool:
            with suppress(BlockingIOError):
                self.received += self.socket.recv(LONGEST_LINE)
            return b"\n" in self.received

        until(has_line, self.links)
        self.socket.settimeout(DEADLINE)
        line, _, self.received = self.received.partition(b"\n")
        return line.decode()


@pytest.mark.parametrize(
    ("ping", "answer", "is_answered"),
    [
        ("P b w1 7 -fine", "A a w1 7 -mine", True),
        ("P b w1 7 ", "A a w1 7 -mine", True),
        ("P b w1 7", "A a w1 7 -mine", True),
        ("P b w0 7 -fine", "N a", False),
        ("P b - 7 -fine", "N a", False),
        ("P stranger w1 7 -fine", "N a", False),
        ("P a w1 7 -fine", "N a", False),
        ("P b w1", "N a", False),
        ("A b w1 7 -fine", "N a", False),
        ("GET / HTTP/1.1", "N a", False),
        ("", "N a", False),
        ("ä€", "N a", False),
    ],
)
def test_only_a_watched_member_of_the_same_world_is_answered_as_one(
    open_links: Open, ping: str, answer: str, is_answered: bool
) -> None:
    links = open_links("a")
    links.announce("-mine")
    links.watch([("b", ("127.0.0.1", 1))], EPOCH)
    caller = Caller(links)
    caller.send(ping.encode() + b"\n")
    assert caller.line() == answer
    assert bool(links.answered()) is is_answered


def test_who_has_no_world_answers_that_it_lives(open_links: Open) -> None:
    links = open_links("a")
    caller = Caller(links)
    caller.send(b"P b - 7 -fine\nP b  7 -fine\n")
    assert [caller.line(), caller.line()] == ["N a", "N a"]


def test_a_line_may_come_in_parts_and_lines_together(open_links: Open) -> None:
    links = open_links("a")
    links.announce("-mine")
    links.watch([("b", ("127.0.0.1", 1))], EPOCH)
    caller = Caller(links)
    caller.send(b"P b w1 1 -\nP b w1 2")
    assert caller.line() == "A a w1 1 -mine"
    caller.send(b"3 -\nP b w1 3 -\n")
    assert [caller.line(), caller.line()] == ["A a w1 23 -mine", "A a w1 3 -mine"]


def test_another_member_of_another_world_lives_and_no_more(open_links: Open) -> None:
    one, other = open_links("a"), open_links("b")
    one.watch([("b", other.address)], "w1")
    other.watch([("a", one.address)], "w2")
    until(lambda: heard(one, "b").has_answered and heard(other, "a").has_answered, one, other)
    pass_time(4 * INTERVAL, one, other)
    for found in (heard(one, "b"), heard(other, "a")):
        assert (found.pinged_at, found.refused_at, found.status) == (None, None, "")
    assert one.answered() == other.answered() == {}


def test_another_world_starts_no_age(open_links: Open) -> None:
    """Nor does it end that of one who was in the world before."""
    one, other, newcomer = open_links("a"), open_links("b"), open_links("c")
    meet(one, other)
    age = heard(one, "b").pinged_at
    assert age is not None
    one.watch([("b", other.address), ("c", newcomer.address)], "w2")
    newcomer.watch([("a", one.address)], "w1")
    assert (heard(one, "b").pinged_at, heard(one, "c").pinged_at) == (age, None)
    pass_time(4 * INTERVAL, one, other, newcomer)
    assert (heard(one, "b").pinged_at, heard(one, "c").pinged_at) == (age, None), "they are in the world before"
    before = through_suspends()
    other.watch([("a", one.address)], "w2")
    until(lambda: heard(one, "b").pinged_at != age, one, other, newcomer)
    assert (heard(one, "b").pinged_at or 0.0) >= before
    assert heard(one, "c").pinged_at is None


def test_who_is_not_watched_any_more_is_forgotten(open_links: Open) -> None:
    one, other = open_links("a"), open_links("b")
    meet(one, other)
    one.watch([], "w2")
    until(lambda: one.heard("b") is None, one)
    asked = Caller(one)
    asked.send(b"P b w2 1 -\n")
    assert asked.line() == "N a"
    before = heard(other, "a").heard_at
    until(lambda: heard(other, "a").heard_at > before, one, other)
    assert heard(other, "a").refused_at is None, "it lives"


# --- members that are killed or frozen, and strangers -----------------------------------------------------------------


def test_a_killed_process_is_refused_at_once(open_links: Open) -> None:
    links = open_links("a", interval=0.25)
    with running(links) as process:
        assert heard(links, "b").refused_at is None
        before = through_suspends()
        process.end()
        returned = until(lambda: heard(links, "b").refused_at, links)
        assert any(returned), "it matters"
        found = heard(links, "b")
        assert before <= (found.refused_at or 0.0) <= through_suspends()
        assert (found.pinged_at or 0.0) <= (found.refused_at or 0.0)
        pass_time(0.6, links)
        assert heard(links, "b").refused_at == found.refused_at, "the first time counts"


def test_a_frozen_process_is_only_silent(open_links: Open) -> None:
    links = open_links("a")
    with running(links) as process:
        process.freeze()
        pass_time(2 * INTERVAL, links)
        before = heard(links, "b").heard_at
        pass_time(1.5, links)
        assert heard(links, "b").heard_at == before
        assert heard(links, "b").refused_at is None
        process.wake()
        until(lambda: heard(links, "b").heard_at > before, links)
        assert heard(links, "b").refused_at is None


def test_a_frozen_process_that_is_killed_is_refused_at_once(open_links: Open) -> None:
    links = open_links("a", interval=FAR)
    with running(links) as process:
        process.freeze()
        pass_time(0.5, links)
        process.end()
        until(lambda: heard(links, "b").refused_at, links)


def test_a_forked_child_does_not_hide_the_death_of_its_parent(open_links: Open) -> None:
    links = open_links("a", interval=FAR)
    with running(links, "forks") as process:
        assert process.child > 0
        process.end()
        until(lambda: heard(links, "b").refused_at, links)
        assert psutil.Process(process.child).is_running()


class Stranger:
    """Something that listens, says `answer` to each line or closes at once where that is None, and counts its callers;
    on a thread."""

    def __init__(self, answer: bytes | None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = ("127.0.0.1", self.listener.getsockname()[1])
        self.answer, self.num_callers = answer, 0
        self._is_over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.02):
                if key.fileobj is self.listener:
                    caller, _ = self.listener.accept()
                    self.num_callers += 1
                    if self.answer is None:
                        caller.close()
                    else:
                        self._selector.register(caller, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _hear(self, caller: socket.socket) -> None:
        try:
            data = caller.recv(LONGEST_LINE)
            if data and self.answer:
                caller.sendall(self.answer)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(caller)
            caller.close()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


@contextmanager
def listening(answer: bytes | None) -> Iterator[Stranger]:
    stranger = Stranger(answer)
    try:
        yield stranger
    finally:
        stranger.end()


def test_another_process_at_the_address_of_a_dead_one(open_links: Open) -> None:
    links, other = open_links("a"), open_links("c")
    links.watch([("b", other.address)], EPOCH)
    returned = until(lambda: heard(links, "b").refused_at, links, other)
    assert any(returned), "it matters"
    assert not heard(links, "b").has_answered


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n<html>\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"hello\n",
        b"\n",
        b"A\n",
        b"A c w1 1 -\n",
        b"P b w1 1 -\n",
        b"\xff\xfe\n",
        (LONGEST_LINE + 1) * b"x",
    ],
    ids=["http", "ssh", "a-word", "an-empty-line", "a-letter", "another-uid", "a-ping", "bytes", "a-line-without-end"],
)
def test_another_program_at_the_address_of_a_dead_one(open_links: Open, answer: bytes) -> None:
    links = open_links("a")
    with listening(answer) as stranger:
        links.watch([("b", stranger.address)], EPOCH)
        until(lambda: heard(links, "b").refused_at, links)
        pass_time(4 * INTERVAL, links)
        found = heard(links, "b")
        assert (found.has_answered, found.pinged_at, found.status) == (False, None, "")


@pytest.mark.parametrize("answer", [b"", None], ids=["says-nothing", "closes"])
def test_a_program_that_does_not_say_who_it_is_proves_nothing(open_links: Open, answer: bytes | None) -> None:
    links = open_links("a", interval=0.2)
    with listening(answer) as stranger:
        links.watch([("b", stranger.address)], EPOCH)
        until(lambda: stranger.num_callers, links)
        pass_time(2.0, links)
        assert heard(links, "b").refused_at is None
        assert not heard(links, "b").has_answered
        assert stranger.num_callers < 25, "it is not called without a pause"


def test_who_answers_after_all_is_not_dead(open_links: Open) -> None:
    """Where nobody was heard yet, a refusal may have come too early."""
    links = open_links("a")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # a bound port that does not listen refuses, and nobody else gets it
        links.watch([("b", ("127.0.0.1", listener.getsockname()[1]))], EPOCH)
        until(lambda: heard(links, "b").refused_at, links)
        assert heard(links, "b").pinged_at is None
        listener.listen()
        listener.setblocking(False)

        callers: list[socket.socket] = []

        def accept() -> bool:
            with suppress(BlockingIOError):
                callers.append(listener.accept()[0])
            return bool(callers)

        until(accept, links)
        callers[0].sendall(b"N b\n")
        until(lambda: heard(links, "b").has_answered, links)
        assert heard(links, "b").refused_at is None
        callers[0].close()


FROZEN = 2.0


def test_a_suspended_process_takes_nobody_for_silent() -> None:
    """All members are frozen at once, as a machine is: none has heard of any other, and none is to blame."""
    code = """
import os, sys, threading, time
from elastic_train.protocol.links import Links

one, other = Links("127.0.0.1", "a", 0.05, 10.0), Links("127.0.0.1", "b", 0.05, 10.0)
one.watch([("b", other.address)], "w1")
other.watch([("a", one.address)], "w1")
is_over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
while not one.heard("b").pinged_at:
    one.turn(0.05), other.turn(0.05)
print("met", flush=True)
oldest = 0.0
while not is_over.is_set():
    one.turn(0.05)
    oldest = max(oldest, time.monotonic() - one.heard("b").heard_at)
    other.turn(0.05)
print(oldest, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "met\n"
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(FROZEN)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.3)
        told, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.communicate()
    assert float(told) < FROZEN


# --- what ends a turn -------------------------------------------------------------------------------------------------


def test_a_status_with_another_head_ends_a_turn_at_once(open_links: Open) -> None:
    one, other = open_links("a", interval=FAR), open_links("b", interval=FAR)
    one.announce("-one")
    other.announce("-other")
    meet(one, other)
    until(lambda: heard(one, "b").status, one, other)
    pass_time(0.2, one, other)
    other.announce("!out", at_once=True)
    other.turn(0.0)
    told = time.monotonic()
    assert until(lambda: heard(one, "b").status == "!out", one)[-1], "the turn that hears it says so"
    assert time.monotonic() - told < FAR / 4
    other.announce("!out for a reason", at_once=True)
    other.turn(0.0)
    returned = until(lambda: heard(one, "b").status == "!out for a reason", one)
    assert not any(returned), "nothing new"


def test_a_status_in_an_answer_counts_as_well(open_links: Open) -> None:
    one, other = open_links("a"), open_links("b", interval=FAR)
    one.announce("-one")
    other.announce("-other")
    meet(one, other)
    until(lambda: heard(one, "b").status == "-other", one, other)
    other.announce("!out")  # it is in no ping of its own for a long time
    deadline, ended = time.monotonic() + DEADLINE, False
    while not ended:
        assert time.monotonic() < deadline
        ended = one.turn(0.01)
        other.turn(0.01)
    assert heard(one, "b").status == "!out"


def test_another_thread_ends_a_turn(open_links: Open) -> None:
    links = open_links("a", interval=FAR)
    links.turn(0.0)
    has_ended = threading.Event()

    def run() -> None:
        links.turn(FAR)
        has_ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    links.wake()
    assert has_ended.wait(FAR / 4)
    thread.join(DEADLINE)


def test_waking_again_and_again_does_not_block(open_links: Open) -> None:
    links = open_links("a", interval=FAR)

    def run() -> None:
        for _ in range(200_000):
            links.wake()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "a pipe holds 65536 bytes"


# --- a full connection ------------------------------------------------------------------------------------------------


LONG = "-" + 60000 * "x"


def test_a_member_that_never_reads_blocks_nobody_and_hears_whole_lines_later(open_links: Open) -> None:
    links = open_links("a")
    links.announce(LONG)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        links.watch([("b", ("127.0.0.1", listener.getsockname()[1]))], EPOCH)
        received: dict[socket.socket, bytes] = {}

        def accept() -> bool:
            with suppress(BlockingIOError):  # more than one: the kernel may give a connection up that nobody reads
                received[listener.accept()[0]] = b""
            return bool(received)

        until(accept, links)
        longest = 0.0
        for _ in range(400):
            links.announce(LONG, at_once=True)
            before = time.monotonic()
            links.turn(0.0)
            longest = max(longest, time.monotonic() - before)
        assert longest < DEADLINE / 4
        links.announce("-short")

        def is_short_heard() -> bool:
            accept()
            for connection in received:
                connection.setblocking(False)
                with suppress(BlockingIOError, ConnectionResetError):
                    received[connection] += connection.recv(2**20)
            return any(b"-short\n" in data for data in received.values())

        until(is_short_heard, links)
        lines = [line for data in received.values() for line in data.decode().split("\n")[:-1] if line != "C"]
        for connection in received:
            connection.close()
    assert len(lines) < 400, "more than the connection could hold was never sent"
    assert {line.split(" ")[0] for line in lines} == {"P"}
    assert {line.split(" ", 4)[4] for line in lines} <= {LONG, "-short"}


def test_a_caller_that_never_reads_blocks_nobody_and_hears_whole_lines_later(open_links: Open) -> None:
    links = open_links("a")
    links.watch([("b", ("127.0.0.1", 1))], EPOCH)
    caller = Caller(links)
    for number in range(400):
        links.announce(LONG + number % 100 * "x")
        caller.send(f"P b w1 {number} -\n".encode())
        links.turn(0.0)
    links.announce("-short")
    lines: list[str] = []
    while not lines or not lines[-1].endswith("-short"):
        assert number < 2000, "it is never heard again"
        number += 1
        caller.send(f"P b w1 {number} -\n".encode())
        lines.append(caller.line())
    assert {line.split(" ", 4)[4].rstrip("x") for line in lines} == {"-", "-short"}
    assert {line.split(" ")[0] for line in lines} == {"A"}
    assert len(lines) < number, "more than the connection could hold was never sent"
    caller.socket.close()


def test_a_caller_that_never_ends_its_line_is_hung_up_on(open_links: Open) -> None:
    links = open_links("a")
    caller = Caller(links)
    caller.socket.setblocking(False)

    def is_over() -> bool:
        try:
            caller.socket.send(4096 * b"x")
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    until(is_over, links)


def selectors_ready(listener: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        return bool(selector.select(0.0))


# --- callers that are silent ------------------------------------------------------------------------------------------


def is_hung_up(caller: Caller) -> bool:
    caller.socket.setblocking(False)
    try:
        return not caller.socket.recv(LONGEST_LINE)
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("interval", "peer_timeout", "seconds"), [(0.05, 0.75, 1.5), (0.1, 0.2, 2.0)], ids=["timeouts", "pings"]
)
def test_a_caller_that_has_lost_power_is_hung_up_on(
    open_links: Open, interval: float, peer_timeout: float, seconds: float
) -> None:
    """It closes no connection, and no member sends it data that its kernel could leave unacknowledged."""
    links = open_links("a", interval=interval, peer_timeout=peer_timeout)
    before = descriptors()
    caller, living = Caller(links), Caller(links)
    caller.send(b"P b w1 1 -\n")
    assert caller.line() == "N a"
    answered = time.monotonic()
    number = 0

    def is_over() -> bool:
        nonlocal number
        number += 1
        living.send(f"P c w1 {number} -\n".encode())
        return is_hung_up(caller)

    until(is_over, links)
    assert time.monotonic() - answered > seconds - 0.5
    assert not is_hung_up(living)
    for one in (caller, living):
        one.socket.close()
    until(lambda: descriptors() == before, links)


def test_who_is_hung_up_on_and_lives_calls_again_and_takes_nobody_for_dead(open_links: Open) -> None:
    """Its process was frozen for a while."""
    one, other = open_links("a", peer_timeout=0.5), open_links("b", peer_timeout=0.5)
    meet(one, other)
    callers = list(one._callers.callers.values())
    until(lambda: not one._callers.callers, one)
    assert [caller.socket.fileno() for caller in callers] == [-1]
    woken, refused = through_suspends(), []

    def is_back() -> bool:
        refused.extend(links.heard(uid).refused_at for links, uid in ((one, "b"), (other, "a")))  # type: ignore[union-attr]
        return (heard(other, "a").pinged_at or 0.0) > woken and (heard(one, "b").pinged_at or 0.0) > woken

    until(is_back, one, other)
    assert set(refused) == {None}
    assert len(one._callers.callers) == 1


def test_who_was_frozen_itself_hangs_up_on_nobody(open_links: Open) -> None:
    one, other = open_links("a", peer_timeout=0.5), open_links("b", peer_timeout=0.5)
    meet(one, other)
    callers = list(one._callers.callers.values())
    pass_time(1.5, other)
    pass_time(4 * INTERVAL, one, other)
    assert list(one._callers.callers.values()) == callers


# --- no more descriptors ----------------------------------------------------------------------------------------------


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_cannot_accept_waits_for_the_next_ping_and_says_so_once(open_links: Open) -> None:
    """The listener stays readable, for the caller is still there."""
    warnings: list[str] = []
    links = open_links("a", warn=warnings.append)
    for _ in range(2):
        caller = Caller(links)
        caller.send(b"P b w1 1 -\n")
        with no_descriptors_left():
            end, num_turns = time.monotonic() + 1.0, 0
            while time.monotonic() < end:
                links.turn(1.0)
                num_turns += 1
        assert num_turns < 3 / INTERVAL, "it does not spin"
        assert caller.line() == "N a"
        caller.socket.close()
    assert len(warnings) == 1
    assert os.strerror(errno.EMFILE) in warnings[0]
    assert "ulimit -n" in warnings[0]
    assert "\n" not in warnings[0]


def test_who_cannot_make_a_socket_tries_again_at_the_next_ping_and_says_so_once(open_links: Open) -> None:
    warnings: list[str] = []
    one, other = open_links("a", warn=warnings.append), open_links("b")
    with no_descriptors_left():
        one.watch([("b", other.address)], EPOCH)
        other.watch([], EPOCH, ["a"])
        pass_time(4 * INTERVAL, one, other)
    assert not heard(one, "b").has_answered
    until(lambda: heard(one, "b").pinged_at, one, other)
    assert heard(one, "b").refused_at is None
    assert len(warnings) == 1
    assert os.strerror(errno.EMFILE) in warnings[0]


# --- its descriptors --------------------------------------------------------------------------------------------------


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith(("socket:", "pipe:", "anon_inode:")):
                found.add(f"{fd} {name}")
    return found


def test_an_address_of_an_interface_that_is_not_here_is_only_silent(open_links: Open) -> None:
    """A link-local address is told with the name that its interface has there."""
    a, before = open_links("a"), descriptors()
    a.watch([("b", ("fe80::1%nosuch0", 1))], EPOCH)
    pass_time(3 * INTERVAL, a)
    assert heard(a, "b").refused_at is None
    assert descriptors() == before


def test_it_goes_on_accepting_and_keeps_no_connection_of_a_probe(open_links: Open) -> None:
    links = open_links("a")
    before = descriptors()
    for _ in range(5):
        for _ in range(100):
            socket.create_connection(links.address, DEADLINE).close()
        until(lambda: not selectors_ready(links._callers.listener), links)
    until(lambda: descriptors() == before, links)


def test_a_stuck_member_still_accepts(open_links: Open) -> None:
    """A frozen process is probed by everybody; it must not look like a cut cable at once."""
    links = open_links("a")
    callers = [socket.create_connection(links.address, DEADLINE) for _ in range(200)]
    for caller in callers:
        caller.close()


def test_close_leaves_no_descriptor_and_refuses() -> None:
    before = descriptors()
    one, other = open_alone("a"), open_alone("b")
    meet(one, other)
    one.close()
    other.close()
    assert descriptors() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(one.address, DEADLINE)


def test_a_word_after_the_end_is_written_into_nobodys_file(tmp_path: Path) -> None:
    links = open_alone("a")
    links.close()
    files = [(tmp_path / str(number)).open("wb") for number in range(16)]
    links.announce("!out", at_once=True)
    for file in files:
        file.close()
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {0}
