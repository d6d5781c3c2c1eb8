"""Signs at the endpoints of a job: which workers serve and read them, and other programs that listen there."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from elastic_train.elastic.barriers import Waits
from elastic_train.elastic.connect import Applicant, Endpoints, place_of
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol import addresses, signposts
from elastic_train.protocol import names as protocol_names
from elastic_train.protocol.addresses import own_and_others, source_address
from elastic_train.protocol.join_queue import UNCALLED_SECONDS
from elastic_train.protocol.launcher import Launcher
from elastic_train.protocol.signposts import (
    STRANGER_SECONDS,
    Signposts,
    Stranger,
    reach,
    serve,
)
from elastic_train.protocol.store import TorchStore
from elastic_train.rendezvous.launch import C10dSettings, Launch
from elastic_train.stopping import StopSignal
from elastic_train.tools.drills.nodes import free_port, wait_until
from elastic_train.world import Address
from tests.processes import freeze

DEADLINE = 30.0
"""of every wait"""
PATIENCE = 40.0
A, B = ("10.0.0.1", 5001), ("10.0.0.2", 5002)
TIMEOUT = timedelta(seconds=DEADLINE)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., Signposts]


@pytest.fixture
def make(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Signposts at ports of this machine; each look is a new one, for the clock goes on by itself."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    made: list[Signposts] = []

    def make_one(*ports: int, run_id: str = "run", is_host: bool | None = None, **more: Any) -> Signposts:
        endpoints = [("localhost", one) for one in ports]
        made.append(Signposts(endpoints, run_id, is_host=is_host, timeout=PATIENCE, clock=clock, **more))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def look(posts: Signposts, clock: Clock) -> tuple[Address, ...]:
    clock.now += 2 * signposts.LOOK_SECONDS
    return tuple(posts.addresses())


def until(condition: Callable[[], object], seconds: float = DEADLINE) -> float:
    """Seconds until something holds that other threads bring about."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:.0f} s"
        threading.Event().wait(0.01)
    return time.monotonic() - started


# --- the first endpoint -----------------------------------------------------------------------------------------------


def test_only_who_serves_the_first_endpoint_may_begin(make: Make, port: int) -> None:
    one, other, foreign = make(port), make(port), make(port, is_host=False)
    assert one.is_beginner()
    assert one.is_beginner(), "it stays so"
    assert not other.is_beginner()
    assert not foreign.is_beginner()
    one.close()
    assert not foreign.is_beginner(), "another machine's endpoint"
    assert other.is_beginner()


def test_what_is_shown_is_read(make: Make, clock: Clock, port: int) -> None:
    one, other = make(port), make(port)
    assert look(other, clock) == ()
    assert one.is_beginner()
    assert look(other, clock) == (), "nothing is shown yet"
    one.show([A], "")
    assert look(other, clock) == (A,)
    one.show([A, B], "token")
    assert look(other, clock) == (A, B)
    assert not other.is_silent
    assert look(one, clock) == (A, B)


def test_where_the_job_has_no_sign_any_member_shows_one(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never takes the place of rank 0's: it may be of a world that is long over."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    server, member, first = make(port), make(port, is_host=False), make(port, is_host=False)
    assert server.is_beginner()
    server.show([A], "")
    member.show([B], "token", if_missing=True)
    until(lambda: look(server, clock) == (B, A))
    first.show([A], "token")
    until(lambda: look(server, clock) == (A,))
    end = time.monotonic() + 20 * signposts.KEEP_SECONDS
    while time.monotonic() < end:
        assert look(server, clock) == (A,)


def test_between_two_looks_nobody_is_asked(make: Make, clock: Clock, port: int) -> None:
    one, other = make(port), make(port)
    assert one.is_beginner()
    one.show([A], "")
    assert look(other, clock) == (A,)
    one.show([B], "")
    assert tuple(other.addresses()) == (A,)
    assert look(other, clock) == (B,)


def test_members_that_the_run_directory_names_come_last_and_once(make: Make, clock: Clock, port: int) -> None:
    one, other = make(port), make(port, earlier=lambda: [B, A])
    assert look(other, clock) == (B, A), "also while nobody serves the endpoint"
    assert one.is_beginner()
    one.show([A], "")
    assert look(other, clock) == (A, B)


def test_another_run_at_the_endpoint_is_told_in_one_line_after_a_while(make: Make, clock: Clock, port: int) -> None:
    one, other = make(port, run_id="one"), make(port, run_id="other")
    assert one.is_beginner()
    one.show([A], "")
    for _ in range(2):
        assert look(other, clock) == ()
        clock.now += STRANGER_SECONDS / 3
    assert not other.is_beginner(), "its port is taken"
    clock.now += STRANGER_SECONDS
    what = f"run id 'one' has localhost:{port}, and this is run id 'other'"
    with pytest.raises(StoreUnreachable, match=what) as told:
        look(other, clock)
    assert "\n" not in str(told.value)
    assert not isinstance(told.value, Stranger)


def test_another_run_at_the_endpoint_hides_no_member_from_others(make: Make, clock: Clock, port: int) -> None:
    one, member = make(port, run_id="one"), make(port, run_id="other", earlier=lambda: [B])
    assert one.is_beginner()
    member.keep(has_world=True)
    assert look(member, clock) == (B,)


def test_a_job_shows_itself_where_another_run_took_the_port_of_its_dead_host(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that comes back may look there a moment before."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    one, member, newcomer = (
        make(port, run_id="one"), make(port, run_id="other", is_host=False), make(port, run_id="other"),
    )  # fmt: skip
    assert one.is_beginner()
    assert look(newcomer, clock) == ()
    member.show([B], "token")
    until(lambda: look(newcomer, clock) == (B,))
    clock.now += 2 * STRANGER_SECONDS
    assert look(newcomer, clock) == (B,)


def test_another_run_at_the_first_endpoint_hides_nothing_of_the_others(make: Make, clock: Clock, port: int) -> None:
    further = free_port()
    stranger, one, other = make(port, run_id="another"), make(further), make(port, further)
    assert stranger.is_beginner()
    assert one.is_beginner()
    one.show([A], "token")
    for _ in range(2):
        assert look(other, clock) == (A,)
        clock.now += 2 * STRANGER_SECONDS


def test_another_run_at_a_further_endpoint_is_passed_over(make: Make, clock: Clock, port: int) -> None:
    further = free_port()
    stranger, one, other = make(further, run_id="another"), make(port), make(port, further)
    assert stranger.is_beginner()
    assert one.is_beginner()
    one.show([A], "")
    assert look(other, clock) == (A,)


def test_where_nobody_answers_for_long_a_machine_that_cannot_begin_says_so(make: Make, clock: Clock, port: int) -> None:
    foreign, local = make(port, is_host=False), make(port)
    for posts in (foreign, local):
        assert look(posts, clock) == ()
    clock.now += PATIENCE / 2
    assert look(foreign, clock) == ()
    clock.now += PATIENCE
    with pytest.raises(StoreUnreachable, match=f"nobody answers at localhost:{port} for 40 s"):
        look(foreign, clock)
    assert look(local, clock) == (), "it begins"


def test_join_timeout_says_how_long_the_first_endpoint_is_waited_for(clock: Clock, port: int) -> None:
    """The first pod of a job may come hours after the others; --formation-timeout is for a world that forms."""
    c10d = C10dSettings((f"localhost:{port}",), 1, 4, last_call=2.0, is_host=False, join_timeout=3000.0)
    waits = Waits(formation_timeout=1.0, peer_timeout=1.0, wait_timeout=1.0)
    applicant = Applicant(Launch(c10d=c10d), StopSignal(), waits, None, None, log=print, warn=print)
    posts, _ = place_of(applicant, cast(Endpoints, None))
    assert isinstance(posts, Signposts)
    posts._clock = clock
    assert look(posts, clock) == ()
    clock.now += 10.0
    assert look(posts, clock) == ()
    clock.now += 3000.0
    with pytest.raises(StoreUnreachable, match=f"nobody answers at localhost:{port} for 3000 s"):
        look(posts, clock)
    posts.close()


def test_patience_begins_anew_when_somebody_has_answered(make: Make, clock: Clock, port: int) -> None:
    foreign, one = make(port, is_host=False), make(port)
    assert look(foreign, clock) == ()
    clock.now += PATIENCE - 1
    assert one.is_beginner()
    assert look(foreign, clock) == ()
    one.close()
    clock.now += PATIENCE - 1
    assert look(foreign, clock) == ()


# --- what else may listen there ---------------------------------------------------------------------------------------


@contextmanager
def listening(port: int, answer: bytes | None) -> Iterator[None]:
    """A listener that sends `answer` to any request and closes; with None it accepts and is
    silent."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.05)
    is_over, callers = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                continue
            callers.append(caller)
            if answer is not None:
                caller.settimeout(DEADLINE)
                try:
                    if caller.recv(4096):
                        caller.sendall(answer)
                    caller.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(DEADLINE)
        for caller in (*callers, listener):
            caller.close()


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signposts, "GREETING_SECONDS", 0.5)


@pytest.mark.parametrize("answer", [HTTP, b""], ids=["http", "hangs-up"])
def test_a_stranger_at_the_endpoint_is_an_error_after_a_while(
    make: Make, clock: Clock, port: int, answer: bytes
) -> None:
    posts = make(port)
    with listening(port, answer):
        assert look(posts, clock) == ()
        assert not posts.is_beginner(), "its port is taken"
        clock.now += STRANGER_SECONDS / 2
        assert look(posts, clock) == (), "a store that ends may look like one"
        clock.now += STRANGER_SECONDS
        with pytest.raises(StoreUnreachable, match=f"what listens at localhost:{port} is no rendezvous") as told:
            look(posts, clock)
        assert "\n" not in str(told.value)


def test_a_store_that_is_no_sign_of_ours_is_a_stranger_and_is_left_as_it_is(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody's torchrun serves one at localhost:29400, where --rdzv-endpoint says nothing else."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    store.set("theirs", "")
    before = store.num_keys()
    posts, member = make(port), make(port, is_host=False)
    asked, ask = threading.Semaphore(0), member._client

    def count(number: int) -> Any:
        asked.release()
        return ask(number)

    monkeypatch.setattr(member, "_client", count)
    member.show([A], "token")
    assert look(posts, clock) == ()
    assert posts.is_silent, "nobody of this job answers"
    assert not posts.is_beginner(), "its port is taken"
    clock.now += STRANGER_SECONDS / 2
    assert look(posts, clock) == (), "a sign that is being put up looks like one"
    clock.now += STRANGER_SECONDS
    with pytest.raises(StoreUnreachable, match=f"what listens at localhost:{port} is no rendezvous"):
        look(posts, clock)
    for _ in range(4):  # of two looks after the endpoint one is over
        assert asked.acquire(timeout=DEADLINE)
    assert store.num_keys() == before, "nothing is written there"


def test_a_stranger_at_one_endpoint_hides_nothing_of_the_others(make: Make, clock: Clock, port: int) -> None:
    strange, further = free_port(), free_port()
    one, newcomer = make(port), make(strange, port)
    behind, member = make(port, strange), make(strange, further, earlier=lambda: [B], is_host=False)
    assert one.is_beginner()
    one.show([A], "token")
    member.keep(has_world=True)
    with listening(strange, HTTP):
        for _ in range(2):
            assert look(newcomer, clock) == (A,), "by the other endpoint"
            assert look(behind, clock) == (A,)
            assert look(member, clock) == (B,), "by the run directory, where a world needs no endpoint"
            clock.now += 2 * STRANGER_SECONDS
        one.close()
        until(lambda: is_free(port))
        assert behind.is_beginner()
        assert look(behind, clock) == (), "it serves the first one itself"
        with pytest.raises(StoreUnreachable, match=f"what listens at localhost:{strange} is no rendezvous"):
            look(newcomer, clock)


def test_a_stranger_that_has_gone_meanwhile_is_forgotten(make: Make, clock: Clock, port: int) -> None:
    posts = make(port)
    with listening(port, HTTP):
        assert look(posts, clock) == ()
    clock.now += 2 * STRANGER_SECONDS
    assert look(posts, clock) == ()
    with listening(port, HTTP):
        assert look(posts, clock) == ()


@pytest.mark.usefixtures("_impatient")
def test_what_listens_and_is_silent_may_be_frozen(make: Make, clock: Clock, port: int) -> None:
    posts = make(port)
    with listening(port, None):
        for _ in range(3):
            assert look(posts, clock) == ()
            clock.now += 2 * STRANGER_SECONDS
        clock.now += PATIENCE
        with pytest.raises(StoreUnreachable, match=f"what listens at localhost:{port} is no rendezvous"):
            look(posts, clock)


def test_a_port_that_is_taken_on_another_address_of_this_machine_is_an_error_after_a_while(
    clock: Clock, port: int
) -> None:
    """127.0.0.1 is somebody's torchrun's; the endpoint has all addresses or none."""
    posts = Signposts([("127.0.0.2", port)], "run", is_host=None, timeout=PATIENCE, clock=clock)
    with listening(port, HTTP):
        for _ in range(2):
            assert look(posts, clock) == ()
            assert not posts.is_beginner()
        clock.now += 2 * STRANGER_SECONDS
        what = f"port {port} of this machine is taken on another address than 127.0.0.2: choose another --rdzv-endpoint"
        with pytest.raises(StoreUnreachable, match=f"^{what}$"):
            look(posts, clock)
    posts.close()


def test_a_port_that_was_taken_on_another_address_meanwhile_is_served(clock: Clock, port: int) -> None:
    posts = Signposts([("127.0.0.2", port)], "run", is_host=None, timeout=PATIENCE, clock=clock)
    with listening(port, HTTP):
        assert look(posts, clock) == ()
        assert not posts.is_beginner()
    clock.now += 2 * STRANGER_SECONDS
    assert look(posts, clock) == ()
    assert posts.is_beginner()
    clock.now += 2 * STRANGER_SECONDS
    assert look(posts, clock) == ()
    posts.close()


# --- servers that die, and signs that move ----------------------------------------------------------------------------

MEMBER = """
import sys
from elastic_train.protocol.signposts import Signposts

port = int(sys.argv[1])
posts = Signposts([("localhost", port)], "run", is_host=None, timeout=60.0)
print(posts.is_beginner(), flush=True)
posts.show([("10.0.0.1", 5001)], "token")
posts.keep(has_world=True)
sys.stdin.read()
"""


class Process:
    """A member of the run `run` that serves an endpoint and shows A there."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RES_OPTIONS": "timeout:1 attempts:1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "True\n", "the port is taken"

    def freeze(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def running(port: int) -> Iterator[Process]:
    process = Process(port)
    try:
        yield process
    finally:
        process.end()


def test_another_member_of_the_machine_takes_a_dead_ones_place(make: Make, clock: Clock, port: int) -> None:
    newcomer, member = make(port, is_host=False), make(port)
    with running(port) as process:
        until(lambda: look(newcomer, clock) == (A,))
        member.keep(has_world=True)
        member.show([B], "token")
        until(lambda: look(newcomer, clock) == (B,))
        process.end()
        until(lambda: member._servers)
        until(lambda: look(newcomer, clock) == (B,))
        assert not newcomer.is_beginner()
    assert signposts.KEEP_SECONDS < UNCALLED_SECONDS, "a beginner waits longer than a dead one's place stays empty"


def test_a_member_of_another_machine_writes_the_sign_anew(make: Make, clock: Clock, port: int) -> None:
    """Rank 0 says what is on it, whoever serves it."""
    newcomer, keeper, speaker = make(port, is_host=False), make(port), make(port, is_host=False)
    with running(port) as process:
        keeper.keep(has_world=True)
        speaker.keep(has_world=True)
        speaker.show([B], "token")
        until(lambda: look(newcomer, clock) == (B,))
        process.end()
        until(lambda: keeper._servers)
        until(lambda: look(newcomer, clock) == (B,))


def test_who_has_no_world_does_not_take_the_first_endpoint_in_passing(make: Make, port: int) -> None:
    """Its `is_beginner` does, which looks for a running job first."""
    further = free_port()
    waiting = make(port, further)
    waiting.keep(has_world=False)
    until(lambda: 1 in waiting._servers)
    assert 0 not in waiting._servers


def test_what_fails_in_looking_after_an_endpoint_is_told_once_and_tried_again(
    make: Make, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch and the system raise what they like, on a thread at which nobody looks."""
    failures = iter([RuntimeError("torch cannot"), RuntimeError("torch cannot"), OSError(errno.EMFILE, "too many")])

    def serve_at_last(host: str, port: int) -> TCPStore | None:
        for error in failures:
            raise error
        return serve(host, port)

    monkeypatch.setattr(signposts, "serve", serve_at_last)
    posts = make(port, is_host=True)
    posts.keep(has_world=True)
    wait_until(lambda: 0 in posts._servers, "the endpoint is served", DEADLINE)
    where = f"endpoint localhost:{port}"
    assert caplog.messages == [f"{where}: RuntimeError: torch cannot", f"{where}: OSError: [Errno 24] too many"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_server_that_does_not_take_its_own_sign_is_none_and_another_takes_its_place(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """It may be busy for some seconds. Without the sign it was a stranger to everybody, for as long as it lived."""
    puts: list[str] = []
    put = TorchStore.put

    def put_at_last(store: TorchStore, key: str, text: str) -> None:
        puts.append(key)
        if len(puts) == failing:
            raise StoreUnreachable("no answer within 2 s")
        put(store, key, text)

    monkeypatch.setattr(TorchStore, "put", put_at_last)
    posts = make(port, is_host=True)
    with pytest.raises(StoreUnreachable, match="no answer within 2 s"):
        posts.is_beginner()
    assert is_free(port)
    assert posts.is_beginner()
    posts.show([A], "token")
    assert look(make(port, is_host=False), clock) == (A,)


def test_a_sign_of_another_kind_is_of_another_job(make: Make, clock: Clock, port: int) -> None:
    posts = make(port, is_host=True)
    assert posts.is_beginner()
    posts._clients[0].put(posts._key, '{"stores": [["10.0.0.2", 5002]]}')
    posts.show([A], "token")
    assert posts.other_jobs() == (B,)


def test_any_endpoint_leads_to_the_job(make: Make, clock: Clock, port: int) -> None:
    further = free_port()
    first, second, newcomer = make(port, further), make(port, further, is_host=False), make(port, further)
    second.keep(has_world=False)
    until(lambda: 1 in second._servers)
    assert not second.is_beginner()
    assert first.is_beginner()
    first.show([A], "token")
    until(lambda: look(second, clock) == (A,))
    second_client = reach(("localhost", further))
    until(lambda: second_client.get(second._key) is not None)
    first.close()
    assert look(newcomer, clock) == (A,)


@contextmanager
def mute(port: int) -> Iterator[None]:
    """A frozen process has that port: its kernel accepts."""
    with socket.create_server(("127.0.0.1", port), backlog=100):
        yield


@pytest.mark.usefixtures("_impatient")
def test_a_mute_endpoint_delays_no_call_at_the_first_one(
    make: Make, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that comes back there waits for UNCALLED_SECONDS, and may not know of anybody else."""
    assert 2 * signposts.KEEP_SECONDS + 2 * signposts.AGAIN_SECONDS < UNCALLED_SECONDS
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.01)
    asked: list[int] = []
    real, further = signposts.reach, free_port()

    def reach_and_note(address: Address) -> TorchStore:
        asked.append(address[1])
        return real(address)

    monkeypatch.setattr(signposts, "reach", reach_and_note)
    with mute(further):
        member = make(port, further, is_host=False)
        member.show([A], "job")
        until(lambda: asked.count(further) > 3)
        second, third = [number for number, one in enumerate(asked) if one == further][1:3]
        assert asked[second:third].count(port) >= signposts.RARELY
        first = make(port)
        assert first.is_beginner()
        until(lambda: first.called_by() == (A,))


def test_a_call_that_comes_while_another_endpoint_is_looked_at_is_heard(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(port, free_port())
    assert first.is_beginner()
    assert first.called_by() == ()

    def be_slow(_address: Address) -> TCPStore:
        first._clients[0].put(first._key, json.dumps({"stores": [A], "job": "job"}))
        raise StoreUnreachable("it is frozen")

    monkeypatch.setattr(signposts, "reach_sign", be_slow)
    assert look(first, clock) == (), "it had been read before"
    assert first.called_by() == (A,)


def test_two_machines_that_would_begin_by_lists_that_differ_are_refused(make: Make, clock: Clock, port: int) -> None:
    """Each is the host of the first endpoint of its own list: one job would be two."""
    other_port = free_port()
    one, other = make(port, other_port), make(other_port, port)
    assert one.is_beginner()
    assert other.is_beginner()
    for posts, theirs in ((one, other), (other, one)):
        with pytest.raises(StoreUnreachable, match=f"={posts.describe()} and another .*={theirs.describe()}: each"):
            look(posts, clock)
    other.show([A], "job")
    assert A in look(one, clock), "a job that runs is joined, by whatever list"


def test_equal_lists_and_shorter_ones_are_no_lists_that_differ(make: Make, clock: Clock, port: int) -> None:
    further = free_port()
    one, other, joining = make(port, further), make(port, further, is_host=False), make(further, is_host=False)
    other.keep(has_world=True)
    until(lambda: 1 in other._servers)
    assert one.is_beginner()
    one.show([A], "")
    further_client = reach(("localhost", further))
    until(lambda: further_client.get(one._key_of_beginning) is not None)
    for posts in (one, other, joining):
        assert look(posts, clock) == (A,)


def test_a_beginning_does_not_overwrite_the_call_of_a_running_job(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who begins may look only at moments at which its own sign stands, and begin beside the job."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    beginner, speaker = make(port), make(port, is_host=False)
    assert beginner.is_beginner()
    beginner.show([A], "")
    speaker.show([B], "token")
    speaker.keep(has_world=True)
    until(lambda: B in look(beginner, clock))
    end = time.monotonic() + 20 * signposts.KEEP_SECONDS
    while time.monotonic() < end:
        assert look(beginner, clock) == (B, A)


def test_two_jobs_that_take_turns_at_an_endpoint_learn_of_each_other(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    one, other = make(port), make(port, is_host=False)
    assert one.is_beginner()
    assert look(other, clock) == ()
    one.show([A], "token")
    one.keep(has_world=True)
    other.show([B], "another token")
    other.keep(has_world=True)
    until(lambda: other.other_jobs() == (A,))
    until(lambda: one.other_jobs() == (B,))
    other.close()
    until(lambda: look(one, clock) == (A,))
    assert one.other_jobs() in ((), (B,)), "the last time"
    one.show([A, B], "token")
    end = time.monotonic() + 20 * signposts.KEEP_SECONDS
    while time.monotonic() < end:
        assert one.other_jobs() == (), "a sign of the same job"


def test_who_does_not_speak_for_the_job_any_more_does_not_repeat_its_sign(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was frozen, the others went on without it, and it woke up."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)

    def stop_speaking(posts: Signposts) -> None:
        clock.now += 2 * signposts.FRESH_SECONDS
        posts.keep(has_world=True)
        with posts._lock:  # its thread may be repeating the sign at this moment; who speaks then repeats its own
            pass

    old, new, newcomer = make(port), make(port, is_host=False), make(port)
    assert old.is_beginner()
    old.show([A], "token")
    old.keep(has_world=True)
    assert look(newcomer, clock) == (A,)
    stop_speaking(old)
    new.show([B], "token")
    new.keep(has_world=True)
    until(lambda: look(newcomer, clock) == (B,))
    end = time.monotonic() + 20 * signposts.KEEP_SECONDS
    while time.monotonic() < end:
        assert look(newcomer, clock) == (B,)
    stop_speaking(new)
    old.show([A], "token")
    assert look(newcomer, clock) == (A,), "it is rank 0 again"


def test_a_frozen_server_makes_a_newcomer_wait_and_is_found_when_it_wakes(
    make: Make, clock: Clock, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer = make(port)
    with running(port) as process:
        until(lambda: look(newcomer, clock) == (A,))
        process.freeze()
        monkeypatch.setattr(signposts, "GREETING_SECONDS", 0.5)
        for _ in range(3):
            assert look(newcomer, clock) == ()
            assert not newcomer.is_beginner(), "its port cannot be had"
            clock.now += 2 * STRANGER_SECONDS
        process.wake()
        until(lambda: look(newcomer, clock) == (A,))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


# --- reach ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "no..name", "192.0.2.1"])
def test_reach_where_nobody_answers(host: str, port: int) -> None:
    with pytest.raises(StoreUnreachable, match=f"nobody answers at {host}:{port}") as told:
        reach((host, port))
    assert not isinstance(told.value, Stranger)


@pytest.mark.parametrize("answer", [HTTP, b""], ids=["http", "hangs-up"])
def test_reach_a_stranger(port: int, answer: bytes) -> None:
    with listening(port, answer), pytest.raises(Stranger, match=f"what listens at 127.0.0.1:{port} is no store"):
        reach(("127.0.0.1", port))


@pytest.mark.usefixtures("_impatient")
def test_reach_a_frozen_store_again_and_again(port: int) -> None:
    """Each greeting that is not answered keeps a thread, so there is only one."""
    with running(port) as process:
        process.freeze()
        before = threading.active_count()
        for _ in range(4):
            with pytest.raises(StoreUnreachable, match="does not answer") as told:
                reach(("127.0.0.1", port))
            assert not isinstance(told.value, Stranger)
        assert threading.active_count() <= before + 1
        process.wake()

        def answers() -> bool:
            try:
                return reach(("127.0.0.1", port)).get(signposts.HOLDER) == "run"
            except StoreUnreachable:
                return False

        until(answers)
        until(lambda: threading.active_count() <= before)


# --- serve, and whose address it is -----------------------------------------------------------------------------------


def listening_at(port: int) -> set[str]:
    found = psutil.Process().net_connections("inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_loopback_endpoint_is_served_there_alone(host: str, port: int) -> None:
    server = serve(host, port)
    assert server is not None
    assert listening_at(port) == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["some-name", "10.1.2.3"])
def test_a_name_that_others_may_resolve_otherwise_is_served_on_all_interfaces(host: str, port: int) -> None:
    server = serve(host, port)
    assert server is not None
    assert listening_at(port) <= {"::", "0.0.0.0"}
    server.set("key", "value")
    assert reach(("127.0.0.1", port)).get("key") == "value"
    if socket.has_dualstack_ipv6():
        assert reach(("::1", port)).get("key") == "value"


@pytest.mark.parametrize("host", ["localhost", "some-name"])
def test_a_port_that_is_taken_is_not_served(host: str, port: int) -> None:
    server = serve("localhost", port)
    assert server is not None
    assert serve(host, port) is None


def test_a_port_that_this_user_may_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_address: Any, **_kinds: Any) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(StoreUnreachable, match=r"cannot serve some-name:80 \(Permission denied\)"):
        serve("some-name", 80)


@contextmanager
def forking(port: int) -> Iterator[tuple[subprocess.Popen[str], Callable[[], int]]]:
    """A process that serves a port; what makes it fork a child that stays, and gives the child's pid."""
    code = f"""
import os, signal, sys
from elastic_train.protocol.signposts import serve

server = serve("localhost", {port})
print(flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""
    children: list[int] = []
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def fork() -> int:
        stdin.write("\n")
        children.append(int(stdout.readline()))
        return children[-1]

    stdout.readline()
    try:
        yield process, fork
    finally:
        process.kill()
        process.wait(DEADLINE)
        for child in children:
            os.kill(child, signal.SIGKILL)
        stdin.close()
        stdout.close()


def test_a_forked_child_does_not_serve_in_the_place_of_a_dead_parent(port: int) -> None:
    with forking(port) as (process, fork):
        child = fork()
        assert not is_free(port)
        process.kill()
        process.wait(DEADLINE)
        until(lambda: is_free(port))
        assert psutil.Process(child).is_running()


def test_a_forked_child_does_not_keep_connections_of_a_dead_parent_open(port: int) -> None:
    with forking(port) as (process, fork), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(DEADLINE / 3)
        reach(("127.0.0.1", port)).get("key")  # answered: what came before it is accepted
        child = fork()
        process.kill()
        assert connection.recv(1) == b"", "who waits for an answer of the dead sees that none comes"
        assert psutil.Process(child).is_running()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", socket.gethostname()])
def test_names_of_this_machine(host: str) -> None:
    try:
        socket.getaddrinfo(host, 0)
    except OSError:
        pytest.skip("this machine does not know its own name")
    own, others = own_and_others(host)
    assert own
    assert not others


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "no..name"])
def test_names_of_other_machines(host: str) -> None:
    assert not own_and_others(host)[0]


def test_where_any_address_can_be_bound_the_kernel_says_which_are_this_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By net.ipv4.ip_nonlocal_bind, as beside keepalived; in earnest in integration/test_network.py."""
    monkeypatch.setattr(addresses, "_can_bind", lambda _ip: True)
    with suppress(OSError):
        assert own_and_others(source_address(addresses.UNUSED_IP, 9))[0], "of the default route, where there is one"
    for ip in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
        assert own_and_others(ip) == ([ip], [])
    for ip in (addresses.UNUSED_IP, "198.51.100.1", "2001:db8::2"):
        assert own_and_others(ip) == ([], [])


# --- names ------------------------------------------------------------------------------------------------------------


class NameServer:
    """Answers for `job.test`, when it answers, with `ips`; all else goes to the machine's own."""

    def __init__(self) -> None:
        self._of_machine = socket.getaddrinfo
        self.ips: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0

    def getaddrinfo(self, host: str, port: int, *more: Any, **kinds: Any) -> Any:
        if host != "job.test":
            return self._of_machine(host, port, *more, **kinds)
        if kinds.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        self.num_asked += 1
        assert self.answers.wait(DEADLINE)
        if not self.ips:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in self.ips]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    monkeypatch.setattr(protocol_names, "LOOK_UP_SECONDS", 0.3)
    yield server
    server.answers.set()
    until(lambda: not protocol_names._lookups)


def test_a_name_server_that_does_not_answer_holds_nobody_up_for_long(
    make: Make, clock: Clock, port: int, names: NameServer
) -> None:
    names.ips = ["127.0.0.1"]
    names.answers.clear()
    started, before = time.monotonic(), threading.active_count()
    posts = Signposts([("job.test", port)], "run", is_host=None, timeout=PATIENCE, clock=clock)
    for _ in range(3):
        assert look(posts, clock) == ()
    assert not posts.is_beginner()
    assert time.monotonic() - started < 10 * protocol_names.LOOK_UP_SECONDS
    assert (names.num_asked, threading.active_count()) == (1, before + 1), "what hangs is not asked again and again"
    with pytest.raises(StoreUnreachable, match=f"nobody answers at job.test:{port}: no name server answers"):
        reach(("job.test", port))
    one = make(port)
    assert one.is_beginner()
    one.show([A], "token")
    names.answers.set()
    until(lambda: look(posts, clock) == (A,))
    posts.close()


def test_a_name_that_is_found_late_may_be_this_machines(clock: Clock, port: int, names: NameServer) -> None:
    posts = Signposts([("job.test", port)], "run", is_host=None, timeout=PATIENCE, clock=clock)
    assert not posts.is_beginner()
    names.ips = ["127.0.0.1"]
    clock.now += 2 * addresses.NAME_SECONDS
    assert posts.is_beginner()
    posts.close()


def test_a_name_that_moves_is_followed(make: Make, clock: Clock, port: int, names: NameServer) -> None:
    names.ips = ["192.0.2.1"]
    one = make(port)
    assert one.is_beginner()
    one.show([A], "token")
    posts = Signposts([("job.test", port)], "run", is_host=False, timeout=PATIENCE, clock=clock)
    assert look(posts, clock) == ()
    names.ips = ["127.0.0.1"]
    assert look(posts, clock) == (A,)
    posts.close()


def test_any_address_of_a_name_leads_to_the_job(make: Make, clock: Clock, port: int, names: NameServer) -> None:
    names.ips = ["127.0.0.2", "127.0.0.1"]
    one = make(port)
    assert one.is_beginner()
    one.show([A], "token")
    posts = Signposts([("job.test", port)], "run", is_host=False, timeout=PATIENCE, clock=clock)
    assert look(posts, clock) == (A,)
    posts.close()


def test_a_name_of_several_machines_begins_nothing_until_it_leads_to_one_alone(
    make: Make, clock: Clock, port: int, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would begin a job of its own. So it may be for a moment where the pods of a service come."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    names.ips = ["127.0.0.1", "192.0.2.1"]
    first, second = (
        Signposts([("job.test", port)], "run", is_host=None, timeout=PATIENCE, clock=clock) for _ in range(2)
    )
    for posts in (first, second):
        assert look(posts, clock) == ()
        assert not posts.is_beginner()
        assert posts.describe() == (
            f"job.test:{port} (no node begins it: the first name leads to other machines, too, 192.0.2.1; list the "
            "machines one by one, or give one of them is_host=true in --rdzv-conf)"
        )
    second.keep(has_world=True)  # newcomers would find an endpoint without a sign
    asked = names.num_asked
    clock.now += 2 * addresses.NAME_SECONDS
    until(lambda: names.num_asked > asked)
    assert is_free(port)
    clock.now += PATIENCE
    with pytest.raises(StoreUnreachable, match=r"nobody answers at job.test:\d+ \(no node begins it: .* for 40 s"):
        look(first, clock)
    second.keep(has_world=False)
    names.ips = ["127.0.0.1"]
    clock.now += 2 * addresses.NAME_SECONDS
    assert first.is_beginner()
    assert first.describe() == f"job.test:{port}"
    first.show([A], "")
    names.ips = ["192.0.2.1", "127.0.0.1"]
    clock.now += 2 * addresses.NAME_SECONDS
    assert not second.is_beginner()
    assert look(second, clock) == (A,), "the name leads to the job all the same"
    assert first.is_beginner(), "it stays so"
    for posts in (first, second):
        posts.close()


def test_a_name_of_several_addresses_of_one_machine_begins(clock: Clock, port: int, names: NameServer) -> None:
    names.ips = ["127.0.0.1", "127.0.0.2"]
    posts = Signposts([("job.test", port)], "run", is_host=None, timeout=PATIENCE, clock=clock)
    assert posts.is_beginner()
    posts.close()


def test_who_is_told_to_begin_does_so_by_a_name_of_several_machines(clock: Clock, port: int, names: NameServer) -> None:
    names.ips = ["127.0.0.1", "192.0.2.1"]
    posts = Signposts([("job.test", port)], "run", is_host=True, timeout=PATIENCE, clock=clock)
    assert posts.is_beginner()
    posts.close()


def test_a_further_name_of_several_machines_is_served_by_who_has_a_sign_to_show(
    make: Make, clock: Clock, port: int, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers would find an endpoint without a sign, at a member of rank 3 or at another newcomer."""
    monkeypatch.setattr(signposts, "KEEP_SECONDS", 0.02)
    names.ips = ["127.0.0.1", "192.0.2.1"]
    endpoints = [("localhost", free_port()), ("job.test", port)]
    member, newcomer, first = (
        Signposts(endpoints, "run", is_host=False, timeout=PATIENCE, clock=clock) for _ in range(3)
    )
    member.keep(has_world=True)
    newcomer.keep(has_world=False)
    for posts in (member, newcomer):
        until(lambda: 1 in posts._own._found)  # noqa: B023
        with posts._lock:  # its turn is over
            assert is_free(port)
    first.show([A], "token")
    until(lambda: look(newcomer, clock) == (A,))
    assert sorted(map(list, (first._servers, member._servers, newcomer._servers))) == [[], [], [1]]
    for posts in (member, newcomer, first):
        posts.close()


def test_addresses_that_cannot_be_bound_are_no_other_machines_for_that(names: NameServer) -> None:
    """A name server of the machine's own gives all of its addresses, link-local ones without their interface; a name
    may have one of IPv6 where that is turned off."""
    names.ips = ["127.0.0.1", "fe80::1", "169.254.7.7", "2001:db8::2"]
    assert own_and_others("job.test") == (["127.0.0.1"], [])
    names.ips = ["127.0.0.1", "192.0.2.1"]
    assert own_and_others("job.test") == (["127.0.0.1"], ["192.0.2.1"])


def test_localhost_is_this_machine_where_ipv6_is_turned_off(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    can_bind = addresses._can_bind
    monkeypatch.setattr(addresses, "_can_bind", lambda ip: ":" not in ip and can_bind(ip))
    names.ips = ["::1", "127.0.0.1"]
    assert own_and_others("job.test") == (["127.0.0.1"], [])


# --- a launcher's world -----------------------------------------------------------------------------------------------


def launchers(start: str = "restart-0", size: int = 2) -> list[Launcher]:
    shared = HashStore()
    return [Launcher(shared, rank=rank, start=start) for rank in range(size)]


def test_rank_0_of_a_launcher_begins_and_the_others_find_it() -> None:
    first, second = launchers()
    assert (first.is_beginner(), second.is_beginner()) == (True, False)
    assert second.addresses() == ()
    first.show([A], "")
    assert second.addresses() == [A]
    assert first.addresses() == (), "it does not look for itself"
    first.show([A, B], "token")
    second.show([B], "")
    assert second.addresses() == [A], "nobody joins later"


def test_each_start_of_a_launcher_has_a_sign_of_its_own() -> None:
    shared = HashStore()
    Launcher(shared, rank=0, start="restart-0").show([A], "")
    assert Launcher(shared, rank=1, start="restart-1").addresses() == ()
    assert Launcher(shared, rank=1, start="restart-0").addresses() == [A]


def test_a_launchers_store_that_hangs_for_a_moment_is_waited_for_until_there_is_a_world(port: int) -> None:
    with running(port) as process:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        second = Launcher(store, rank=1, start="restart-0")
        process.freeze()
        waker = threading.Timer(signposts.CALL_SECONDS + 0.5, process.wake)
        waker.start()
        assert second.addresses() == ()
        waker.join()
        second.keep(has_world=True)
        process.freeze()
        assert second.addresses() == ()


def test_a_world_of_one_needs_no_store() -> None:
    alone = Launcher(None, rank=0, start="restart-0")
    alone.show([A], "")
    alone.keep(has_world=True)
    assert alone.is_beginner()
    assert alone.addresses() == ()
    alone.close()
