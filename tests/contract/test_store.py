"""What stores must do, on each implementation; and what a TCPStore does without its server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest
from torch.distributed import HashStore, TCPStore

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.signposts import reach
from elastic_train.protocol.store import KeyValueStore, TorchStore
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_store import EtcdStore
from tests.etcd_cluster import etcd_running
from tests.memory_store import MemoryStore
from tests.processes import freeze

TIMEOUT = timedelta(seconds=2.5)
PATIENT_TIMEOUT = timedelta(seconds=30)
"""where no server is frozen: a machine without a name server takes a second for many a connection"""
NUM_THREADS = 8
Answer = TypeVar("Answer")
AnyStore = TypeVar("AnyStore")


def tcp_client(port: int, timeout: timedelta = TIMEOUT) -> TorchStore:
    raw = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    return TorchStore(raw, timeout)


@pytest.fixture(scope="module")
def tcp_server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_running(tmp_path_factory.mktemp("etcd")) as cluster:
        connections = Connections(cluster.settings())
        yield Etcd(connections, deadline=PATIENT_TIMEOUT.total_seconds(), attempt_seconds=10)
        connections.close()


SERVED: dict[str, Callable[[pytest.FixtureRequest], MemoryStore | TorchStore]] = {
    "memory": lambda _request: MemoryStore(),
    "hash": lambda _request: TorchStore(HashStore(), TIMEOUT),
    "tcp": lambda request: tcp_client(request.getfixturevalue("tcp_server").port, PATIENT_TIMEOUT),
}
"""by members"""


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest) -> KeyValueStore:
    return SERVED[request.param](request)


@pytest.fixture(params=[*SERVED, "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[KeyValueStore | EtcdStore]:
    if request.param in SERVED:
        yield SERVED[request.param](request)
    else:
        yield EtcdStore(request.getfixturevalue("etcd"))


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A prefix of this test's own: the TCPStore serves all of them."""
    return request.node.name


class TestEveryStore:
    def test_a_missing_key_has_no_value_and_is_not_waited_for(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        started = time.monotonic()
        assert store.get(key) is None
        assert time.monotonic() - started < TIMEOUT.total_seconds() / 2

    def test_what_is_put_is_got(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        store.put(key, "one")
        assert store.get(key) == "one"
        store.put(key, "two")
        assert store.create(key, "created") == "two"
        assert store.get(key) == "two"

    @pytest.mark.parametrize("value", ["", "ä \n\0 €", "x" * 1_000_000], ids=["empty", "unicode", "long"])
    def test_any_text_is_a_value(self, store: KeyValueStore | EtcdStore, key: str, value: str) -> None:
        store.put(key, value)
        assert store.get(key) == value

    def test_create_keeps_the_first_value(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        assert store.create(key, "first") == "first"
        assert store.create(key, "second") == "first"
        assert store.create(key, "first") == "first"
        assert store.get(key) == "first"

    def test_an_empty_value_is_as_good_as_none_to_create(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        store.put(key, "")
        assert store.create(key, "value") == "value"
        assert store.get(key) == "value"

    def test_what_is_deleted_has_no_value_and_can_be_created_again(
        self, store: KeyValueStore | EtcdStore, key: str
    ) -> None:
        store.put(key, "value")
        store.put(f"{key}/other", "another")
        for _ in range(2):
            store.delete(key)
            assert store.get(key) is None
            assert store.get(f"{key}/other") == "another"
        assert store.create(key, "new") == "new"

    def test_what_was_deleted_is_gone_at_once(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        for number in range(100):
            store.put(f"{key}/{number}", "value")
            store.delete(f"{key}/{number}")
            assert store.get(f"{key}/{number}") is None

    def test_create_is_won_once_among_many_threads(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        def work(mine: KeyValueStore | EtcdStore, number: int) -> list[str]:
            return [mine.create(f"{key}/{turn}", str(number)) for turn in range(20)]

        answers = in_threads(store, work)
        assert all(answer == answers[0] for answer in answers)
        assert answers[0] == [store.get(f"{key}/{turn}") for turn in range(20)]

    def test_many_threads_may_put_the_same_key(self, store: KeyValueStore | EtcdStore, key: str) -> None:
        """The acknowledgement of a write must not take another's newer value for a loss."""

        def work(mine: KeyValueStore | EtcdStore, number: int) -> None:
            for turn in range(100):
                mine.put(key, f"{number}.{turn}")

        in_threads(store, work)
        assert (store.get(key) or "").endswith(".99")


class TestKeyValueStore:
    def test_missing_keys_are_not_waited_for(self, served: KeyValueStore, key: str) -> None:
        started = time.monotonic()
        assert served.get_many([key, f"{key}/other"]) == [None, None]
        assert time.monotonic() - started < TIMEOUT.total_seconds() / 2

    @pytest.mark.parametrize("value", ["", "ä \n\0 €", "x" * 1_000_000], ids=["empty", "unicode", "long"])
    def test_any_texts_are_values(self, served: KeyValueStore, key: str, value: str) -> None:
        served.put(key, value)
        assert served.get_many([key, key]) == [value, value]

    def test_a_deleted_one_of_many_has_no_value(self, served: KeyValueStore, key: str) -> None:
        served.put(key, "value")
        served.put(f"{key}/other", "another")
        served.delete(key)
        assert served.get_many([key, f"{key}/other"]) == [None, "another"]

    def test_many_keys_keep_their_order_whatever_is_missing(self, served: KeyValueStore, key: str) -> None:
        served.put(f"{key}/0", "zero")
        served.put(f"{key}/2", "two")
        names = [f"{key}/{number}" for number in (2, 1, 0)]
        assert served.get_many(names) == ["two", None, "zero"]
        assert served.get_many([names[0], names[2]]) == ["two", "zero"]
        assert served.get_many([]) == []

    def test_swap_needs_what_it_expects(self, served: KeyValueStore, key: str) -> None:
        served.put(key, "one")
        assert not served.swap(key, "other", "two")
        assert served.get(key) == "one"
        assert served.swap(key, "one", "two")
        assert served.get(key) == "two"
        assert not served.swap(key, "one", "three")
        assert served.get(key) == "two"

    def test_swap_of_a_missing_key(self, served: KeyValueStore, key: str) -> None:
        assert not served.swap(key, "expected", "value")
        assert served.get(key) is None
        assert served.swap(key, "", "value")
        assert served.get(key) == "value"

    def test_a_counter_starts_at_zero(self, served: KeyValueStore, key: str) -> None:
        assert [served.add(key, amount) for amount in (0, 2, 0, -3)] == [0, 2, 2, -1]
        assert served.get(key) == "-1"

    def test_another_client_has_the_same_store(self, served: KeyValueStore, key: str) -> None:
        other = another_client(served)
        served.put(key, "ours")
        assert other.get(key) == "ours"
        assert another_client(other).create(f"{key}/new", "theirs") == "theirs"
        assert served.get(f"{key}/new") == "theirs"

    def test_swap_is_won_once_among_many_threads(self, served: KeyValueStore, key: str) -> None:
        served.put(key, "start")
        wins = in_threads(served, lambda mine, number: mine.swap(key, "start", f"winner {number}"))
        assert wins.count(True) == 1
        assert served.get(key) == f"winner {wins.index(True)}"

    def test_no_addition_is_lost_among_many_threads(self, served: KeyValueStore, key: str) -> None:
        sums = in_threads(served, lambda mine, _number: [mine.add(key, 1) for _ in range(50)])
        assert sorted(value for part in sums for value in part) == list(range(1, 50 * NUM_THREADS + 1))


def another_client(store: AnyStore) -> AnyStore:
    """The same store for another thread; the store itself where it serves many."""
    if not isinstance(store, TorchStore):
        return store
    raw = store.raw
    return tcp_client(raw.port, PATIENT_TIMEOUT) if isinstance(raw, TCPStore) else TorchStore(raw, TIMEOUT)


def in_threads(store: AnyStore, work: Callable[[AnyStore, int], Answer]) -> list[Answer]:
    """What `work` returned in each of NUM_THREADS threads, all at once; with a client each."""
    barrier = threading.Barrier(NUM_THREADS)
    answers: dict[int, Answer] = {}

    def run(mine: AnyStore, number: int) -> None:
        barrier.wait(10)
        answers[number] = work(mine, number)

    each = [another_client(store) for _ in range(NUM_THREADS)]
    threads = [threading.Thread(target=run, args=(mine, number)) for number, mine in enumerate(each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == NUM_THREADS, "a thread failed"
    return [answers[number] for number in range(NUM_THREADS)]


# --- a server that dies, or says nothing ------------------------------------------------------------------------------

SERVER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
print(store.port, flush=True)
sys.stdin.read()
"""

OPERATIONS: dict[str, Callable[[TorchStore], object]] = {
    "get": lambda store: store.get("key"),
    "get_many": lambda store: store.get_many(["key", "other"]),
    "put": lambda store: store.put("key", "value"),
    "create": lambda store: store.create("new", "value"),
    "swap": lambda store: store.swap("key", "value", "other"),
    "add": lambda store: store.add("counter", 1),
    "connect": lambda store: reach(("127.0.0.1", store.raw.port)),  # type: ignore[attr-defined]
}


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    freeze(server.process.pid)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


def seconds_until_unreachable(operation: Callable[[], object]) -> float:
    """How long it takes to raise StoreUnreachable, in a thread: it may not come back at all."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            operation()
            outcome.append(None)
        except BaseException as error:  # told to the test below
            outcome.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(15)
    assert outcome, "it blocks for ever"
    assert isinstance(outcome[0], StoreUnreachable), repr(outcome[0])
    assert "\n" not in str(outcome[0])
    return time.monotonic() - started


def test_a_frozen_server_is_unreachable_within_the_timeout(server: Server) -> None:
    """Every call honours the deadline, though TCPStore's own timeout is for waits only."""
    clients = {name: tcp_client(server.port) for name in OPERATIONS}
    clients["get"].put("key", "value")
    waits: dict[str, float] = {}
    with frozen(server):
        threads = [
            threading.Thread(
                target=lambda name=name, call=call: waits.__setitem__(
                    name, seconds_until_unreachable(lambda: call(clients[name]))
                )
            )
            for name, call in OPERATIONS.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert waits.keys() == OPERATIONS.keys()
    assert all(1.0 < seconds < 3.5 * TIMEOUT.total_seconds() for seconds in waits.values()), waits


class ReadAtOnce(TCPStore):
    """A reader deletes the key before its writer has the reply."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self.delete_key(key)


def test_what_was_read_and_deleted_at_once_was_put(tcp_server: TCPStore) -> None:
    raw = ReadAtOnce("127.0.0.1", tcp_server.port, is_master=False, wait_for_workers=False, timeout=PATIENT_TIMEOUT)
    store = TorchStore(raw, TIMEOUT)
    store.put("queue/1", "read at once")
    assert store.get("queue/1") is None


class DeletedMeanwhile(TCPStore):
    """Another member deletes a key as soon as somebody has found out that it is there."""

    def check(self, keys: list[str]) -> bool:
        is_there = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return is_there


def test_a_key_that_is_deleted_while_it_is_asked_for_is_not_waited_for(tcp_server: TCPStore) -> None:
    raw = DeletedMeanwhile("127.0.0.1", tcp_server.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    store = TorchStore(raw, TIMEOUT)
    raw.set("position", "1")
    assert store.get("position") in ("1", None)
    raw.set("position", "1")
    assert store.get_many(["position", "missing"])[1] is None


def test_a_late_reply_is_never_taken_for_that_of_another_call(server: Server) -> None:
    client = tcp_client(server.port)
    client.put("a", "value of a")
    client.put("b", "value of b")
    with frozen(server):
        seconds_until_unreachable(lambda: client.get("a"))
    other = tcp_client(server.port)
    assert other.get("b") == "value of b", "the server goes on: the late reply arrives"
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            client.get("b")
    assert other.get("b") == "value of b"


def test_a_short_freeze_is_sat_out(server: Server) -> None:
    client = tcp_client(server.port)
    client.put("key", "value")
    with frozen(server):
        timer = threading.Timer(0.3, os.kill, (server.process.pid, signal.SIGCONT))
        timer.start()
        assert client.get("key") == "value"
        timer.join()


def test_a_deadline_does_not_shorten_torchs_own_waits(server: Server) -> None:
    """The group's own rendezvous waits for keys on such a client, longer than any answer may take."""
    client = tcp_client(server.port)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="wait timeout"):
        client.raw.wait(["never"], 1.2 * TIMEOUT)
    assert time.monotonic() - started >= 1.2 * TIMEOUT.total_seconds()
    assert client.get("never") is None


def test_a_killed_server_is_unreachable_at_once() -> None:
    server = Server()
    clients = {name: tcp_client(server.port) for name in OPERATIONS}
    clients["get"].put("key", "value")
    server.end()
    waits = {name: seconds_until_unreachable(partial(call, clients[name])) for name, call in OPERATIONS.items()}
    assert all(seconds < TIMEOUT.total_seconds() for seconds in waits.values()), waits
