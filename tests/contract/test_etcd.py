"""The etcd client's faults, one by one, against real etcd members: none of them reaches its callers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)

from elastic_train.errors import LeftOut, StoreRefused, StoreUnreachable
from elastic_train.rendezvous import etcd_handler
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_errors import LeaseLost
from elastic_train.rendezvous.etcd_finder import EtcdFinder
from elastic_train.rendezvous.etcd_handler import AgentsHandler, exit_barrier_keys
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease, delete_job, open_job
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.etcd_store import EtcdStore
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.world import to_json
from tests.etcd_cluster import OwnEtcd, etcd_running, frozen
from tests.processes import freeze, refuse_threads

PATIENCE = 60.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEtcd]:
    """Three members; a test that hurts one heals it again."""
    with etcd_running(tmp_path_factory.mktemp("trio"), 3) as cluster:
        yield cluster


@pytest.fixture
def etcd(trio: OwnEtcd) -> Iterator[Etcd]:
    trio.wait_until_healthy()
    connections = Connections(trio.settings())
    yield Etcd(connections, deadline=PATIENCE)
    connections.close()


def connect(settings: EtcdSettings, deadline: float = PATIENCE) -> Etcd:
    return Etcd(Connections(settings), deadline=deadline)


def at_endpoint_of(etcd: Etcd, cluster: OwnEtcd, index: int) -> None:
    """Make a member the one that the next call goes to, as soon as it answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        while etcd.connections.present != index:
            etcd.connections.rotate(etcd.connections.present)
        etcd.get("somewhere")
        if etcd.connections.present == index:
            return
        assert time.monotonic() < deadline, cluster.endpoint
        time.sleep(0.1)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "earlier", ["", "from google.protobuf import timestamp_pb2; "], ids=["alone", "protobuf first"]
)
def test_the_client_loads_under_the_protobuf_that_is_there(earlier: str) -> None:
    """Its generated code does not: TypeError, unless protobuf is switched to its slow form before its first import."""
    load = "from elastic_train.rendezvous.etcd_connections import import_etcd3"
    code = f"{earlier}{load}; print(import_etcd3().etcdrpc.Compare.EQUAL)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_what_every_agent_and_worker_imports_does_not_import_the_client() -> None:
    code = (
        "import sys, elastic_train.elastic.connect, elastic_train.rendezvous.handler, elastic_train.rendezvous.hook; "
        "elastic_train.rendezvous.hook.etcd3_backend(); "
        "print([name for name in ('grpc', 'google.protobuf', 'etcd3', 'tenacity') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("variable", ["grpc_proxy", "http_proxy", "https_proxy"])
def test_a_proxy_for_the_web_is_not_asked_for_etcd(
    variable: str, trio: OwnEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most clusters have one, and it refuses connections to other ports."""
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    etcd = connect(trio.settings(), deadline=10)
    EtcdStore(etcd).put("past/proxies", variable)
    assert EtcdStore(etcd).get("past/proxies") == variable
    etcd.connections.close()


# --- members that die, freeze, and come back --------------------------------------------------------------------------


def test_a_dead_member_costs_one_try(trio: OwnEtcd, etcd: Etcd) -> None:
    store = EtcdStore(etcd)
    store.put("fail/over", "before")
    victim = trio.members[1]
    at_endpoint_of(etcd, trio, 1)
    victim.kill()
    try:
        assert store.get("fail/over") == "before"
        store.put("fail/over", "after")
        assert etcd.connections.present != 1
    finally:
        victim.start()
    trio.wait_until_healthy()
    at_endpoint_of(etcd, trio, 1)
    assert store.get("fail/over") == "after", "a member that is back is used again"


def test_a_frozen_member_does_not_block(trio: OwnEtcd, etcd: Etcd) -> None:
    impatient = EtcdStore(etcd).with_timeouts(PATIENCE, 1.0)
    at_endpoint_of(etcd, trio, 2)
    with frozen(trio.members[2]):
        started = time.monotonic()
        impatient.put("frozen", "yes")
        assert time.monotonic() - started < PATIENCE / 2
    assert impatient.get("frozen") == "yes"


class Balancer:
    """One address for a cluster. Connections may be lost without a word, as with the machine at their other end."""

    def __init__(self, endpoint: str) -> None:
        self._server, self._endpoint, self._lost = socket.create_server(("127.0.0.1", 0)), endpoint, threading.Event()
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_connections(self) -> None:
        self._lost.set()
        self._lost = threading.Event()

    def _accept(self) -> None:
        host, _, port = self._endpoint.rpartition(":")
        with suppress(OSError):
            while True:
                pair = self._server.accept()[0], socket.create_connection((host, int(port)))
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=self._relay, args=(source, sink, self._lost), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if not lost.is_set():
                    sink.sendall(data)

    def close(self) -> None:
        self._server.close()


@pytest.mark.slow
def test_a_connection_that_is_lost_without_a_word_is_made_anew(trio: OwnEtcd) -> None:
    """Calls over it would get no answer for a quarter of an hour, and agents end after the grace of a minute."""
    balancer = Balancer(trio.members[0].endpoint)
    etcd = connect(EtcdSettings((balancer.endpoint,)), deadline=45.0)
    EtcdStore(etcd).put("balanced", "before")
    balancer.lose_connections()
    assert EtcdStore(etcd).get("balanced") == "before"
    etcd.connections.close()
    balancer.close()


def test_the_leader_dies(trio: OwnEtcd, etcd: Etcd) -> None:
    store, leader = EtcdStore(etcd), trio.leader()
    leader.kill()
    try:
        assert store.create("while/electing", "mine") == "mine"
    finally:
        leader.start()
        trio.wait_until_healthy()
    assert store.create("while/electing", "another's") == "mine"


def test_nobody_answers(trio: OwnEtcd) -> None:
    settings = EtcdSettings(("127.0.0.1:1",))
    words: list[str] = []
    etcd = Etcd(Connections(settings), deadline=1.5, before_retry=words.append)
    started = time.monotonic()
    with pytest.raises(StoreUnreachable, match="does not answer") as caught:
        etcd.get("key")
    assert 1.0 < time.monotonic() - started < 20
    assert "\n" not in str(caught.value)
    assert words, "somebody could have said stop"


def test_a_wait_can_be_given_up() -> None:
    def give_up(_why: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Etcd(Connections(EtcdSettings(("127.0.0.1:1",))), deadline=60, before_retry=give_up).get("key")


def frozen_while_it_waits(code: str, argument: str, seconds: float) -> list[str]:
    """Freeze a process for so long after its first line, let it go on, and return its output."""
    command = [sys.executable, "-c", code, argument]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        freeze(process.pid)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGCONT)
        told, _ = process.communicate("go on\n", timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    return told.splitlines()


def test_seconds_of_a_suspension_are_none_of_a_calls() -> None:
    """It has not been tried for so long."""
    code = """
import sys, time
from elastic_train.errors import StoreUnreachable
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_settings import EtcdSettings

try:
    Etcd(Connections(EtcdSettings((sys.argv[1],))), 5.0, before_retry=lambda _why: print("waits", flush=True)).get("x")
except StoreUnreachable:
    print("gives up", flush=True)
"""
    told = frozen_while_it_waits(code, "127.0.0.1:1", 6.0)
    assert told[-1] == "gives up"
    assert told.count("waits") > 1, "for more than one attempt"


@pytest.mark.slow
def test_an_agent_that_was_suspended_for_longer_than_the_grace_goes_on(trio: OwnEtcd) -> None:
    """It is asked before it has had an answer."""
    code = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from elastic_train.rendezvous.etcd_handler import AgentsHandler
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.world import from_json

settings = from_json(EtcdSettings, sys.argv[1])
parameters = RendezvousParameters("etcd3", settings.endpoints[0], "asleep", 1, 1, local_addr="127.0.0.1")
handler = AgentsHandler(parameters, settings, lease=2.0, join_timeout=60.0, read_timeout=60.0)
handler.next_rendezvous()
print("waits", flush=True)
sys.stdin.readline()
handler.num_nodes_waiting()
print("goes on", flush=True)
handler.shutdown()
"""
    settings = replace(trio.settings(), min_nodes=1, max_nodes=1, last_call=0.0, grace=6.0)
    assert frozen_while_it_waits(code, to_json(settings), 8.0) == ["goes on"]


# --- writes without an answer -----------------------------------------------------------------------------------------


class Deaf:
    """Lets a write through and loses its answer, as a member does that dies after it has committed."""

    def __init__(self, etcd: Etcd, monkeypatch: pytest.MonkeyPatch, between: list[object]) -> None:
        real = etcd._attempt
        self.num_lost = 0

        def attempt(method: object, request: object, give_up_at: float) -> object:
            answer = real(method, request, give_up_at)  # type: ignore[arg-type]
            if type(request).__name__ == "TxnRequest" and self.num_lost == 0:
                self.num_lost += 1
                for act in between:
                    act()  # type: ignore[operator]
                from elastic_train.rendezvous.etcd_errors import Transient

                raise Transient("the answer was lost")
            return answer

        monkeypatch.setattr(etcd, "_attempt", attempt)


@pytest.mark.parametrize("before", [None, ""])
def test_a_write_without_an_answer_is_recognised(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    store, key = EtcdStore(etcd), f"lost/{before}"
    if before is not None:
        store.put(key, before)
    deaf = Deaf(etcd, monkeypatch, [])
    assert store.create(key, "mine") == "mine"
    assert deaf.num_lost == 1
    entry = etcd.get(key)
    assert entry is not None
    assert entry.version == (1 if before is None else 2), "written once"


def test_what_others_have_written_since_is_what_stands(
    trio: OwnEtcd, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = EtcdStore(etcd), EtcdStore(connect(trio.settings()))
    Deaf(etcd, monkeypatch, [lambda: other.put("lost/since", "theirs")])
    assert store.create("lost/since", "mine") == "theirs"
    assert store.get("lost/since") == "theirs"


# --- leases, guards, jobs ---------------------------------------------------------------------------------------------


def test_a_lost_lease_is_no_silence(etcd: Etcd) -> None:
    lease = etcd.grant(60)
    assert etcd.refresh(lease)
    etcd.revoke(lease)
    etcd.revoke(lease)
    assert not etcd.refresh(lease)
    with pytest.raises(LeaseLost):
        etcd.transact((), [etcd.put_request("leased", b"x", lease)])
    with pytest.raises(LeftOut, match="lease"):
        EtcdStore(etcd, lease=lease).put("leased", "x")


def test_a_lease_is_kept_where_no_thread_can_be_started(
    trio: OwnEtcd, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a limit of processes, or while the interpreter ends (Python 3.12)."""
    lease, unconnected = etcd.grant(60), connect(trio.settings(), deadline=1.0)

    with monkeypatch.context() as patched:
        refuse_threads(patched)
        assert etcd.refresh(lease)
        with pytest.raises(StoreUnreachable, match="new thread"):
            unconnected.get("key")
    assert etcd.refresh(lease)
    assert replace(unconnected, deadline=PATIENCE).get("key") is None
    unconnected.connections.close()
    etcd.revoke(lease)
    assert not etcd.refresh(lease)


def test_nothing_is_written_behind_a_guard_that_is_gone(etcd: Etcd) -> None:
    EtcdStore(etcd).put("guard", "stands")
    entry = etcd.get("guard")
    assert entry is not None
    store = EtcdStore(etcd, guard=entry)
    store.put("guarded", "1")
    etcd.delete("guard")
    EtcdStore(etcd).put("guard", "another's")
    for write in (
        lambda: store.put("guarded", "2"),
        lambda: store.create("fresh", "2"),
    ):
        with pytest.raises(LeftOut, match="taken over"):
            write()
    assert store.get("guarded") == "1"


def test_all_workers_open_the_same_job(trio: OwnEtcd, etcd: Etcd) -> None:
    jobs: list[object] = []
    workers = [connect(trio.settings()) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda its: open_job(its, trio.settings(), "one", jobs.append), args=(worker,))
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for worker in workers:
        worker.connections.close()
    assert len(jobs) == 8
    assert len(set(jobs)) == 1
    delete_job(etcd, jobs[0])  # type: ignore[arg-type]


def test_an_entry_that_the_last_one_takes_away_meanwhile_is_not_opened(trio: OwnEtcd, etcd: Etcd) -> None:
    """Its lease is not revoked yet."""
    first = open_job(etcd, trio.settings(), "two", lambda job: job)
    real, asked = etcd.refresh, list[int]()

    def write_first(job: JobEntry) -> JobEntry:
        job.store(etcd).put(f"{job.prefix}/key", "value")
        return job

    def take_away(lease: int) -> bool:
        asked.append(lease)
        if len(asked) == 1:
            etcd.delete(first.guard.key)
        return real(lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(etcd, "refresh", take_away)
        job = open_job(etcd, trio.settings(), "two", write_first)
    assert asked == [first.lease, job.lease]
    delete_job(etcd, job)
    assert not etcd.below("/elastic_train/two/")[0], "nothing is left"


def make_agent(cluster: OwnEtcd, run_id: str, min_nodes: int = 1, read_timeout: float = PATIENCE) -> AgentsHandler:
    settings = cluster.settings(min_nodes=min_nodes, max_nodes=4, last_call=2.0)
    parameters = RendezvousParameters("etcd3", "unused", run_id, min_nodes, 4, local_addr="127.0.0.1")
    return AgentsHandler(parameters, settings, lease=10.0, join_timeout=PATIENCE, read_timeout=read_timeout)


def test_a_frozen_server_of_a_round_is_waited_for_as_long_as_the_read_timeout(
    trio: OwnEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts the connection, and nobody answers; torch's TCPStore has no deadline for that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(
            etcd_handler, "GroupStoreServer", lambda _host: SimpleNamespace(address=silent.getsockname())
        )
        agent = make_agent(trio, "frozen", read_timeout=1.0)
        with pytest.raises(RendezvousConnectionError, match=r"rank 0 at 127\.0\.0\.1"):
            agent.next_rendezvous()
    agent.shutdown()


@pytest.mark.parametrize("is_one_through", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_newcomer_restarts_nobody_once_one_agent_is_through(trio: OwnEtcd, is_one_through: bool) -> None:
    """It comes to no other round: whoever went there would wait until torchrun's exit barrier gives up."""
    with ThreadPoolExecutor(3) as threads:
        agents = [make_agent(trio, "late") for _ in range(3)]
        found = [found.result(PATIENCE) for found in [threads.submit(agent.next_rendezvous) for agent in agents[:2]]]
        try:
            assert [info.world_size for info in found] == [2, 2]
            if is_one_through:
                barrier = exit_barrier_keys("late", 0)[0].partition("/")[2]
                found[0].store.add(barrier, 1)  # as torch/distributed/elastic/utils/store.py
            newcomer = threads.submit(agents[2].next_rendezvous)
            wait_until(lambda: agents[0]._keys.below("waiting"), "a newcomer", PATIENCE)
            if is_one_through:
                until = time.monotonic() + 4.0
                while time.monotonic() < until:
                    assert [agent.num_nodes_waiting() for agent in agents[:2]] == [0, 0]
                    time.sleep(0.05)
            else:
                for agent in agents[:2]:
                    wait_until(agent.num_nodes_waiting, "the end of the round", PATIENCE)
        finally:
            for agent in agents[:2]:
                agent.shutdown()
        assert newcomer.result(PATIENCE).world_size == 1
        agents[2].shutdown()


@pytest.mark.parametrize("first", [0, 1])
def test_a_lease_that_is_lost_between_a_round_and_its_entry_costs_that_round(
    trio: OwnEtcd, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """As on a node that was frozen, or without etcd, when the round was decided. Another one took it for dead, and is
    in the queue of the next round when it comes back: neither may wait for the other one in two rounds."""
    agents = [make_agent(trio, "blip", min_nodes=2) for _ in range(2)]
    blinking, other = agents[first], agents[1 - first]
    enter = blinking._enter_round

    def enter_late(members: tuple[str, ...], number: int, deadline: float) -> RendezvousInfo | None:
        if number == 0:
            decided = blinking._newest_round()[2]  # the other one may not have listed it yet
            blinking._store.etcd.revoke(blinking._lease.lease)
            wait_until(lambda: other._node in other._keys.below("waiting", since=decided), "its next wait", PATIENCE)
            wait_until(lambda: blinking._node in other._keys.below("nodes"), "the new lease", PATIENCE)
        return enter(members, number, deadline)

    monkeypatch.setattr(blinking, "_enter_round", enter_late)
    with ThreadPoolExecutor(2) as threads:
        try:
            found = []
            for agent in agents:
                found.append(threads.submit(agent.next_rendezvous))
                wait_until(lambda: len(agents[0]._keys.below("waiting")) == len(found), "its wait", PATIENCE)
            assert [one.result(PATIENCE / 2).world_size for one in found] == [2, 2]
            assert {agent._round for agent in agents} == {1}
        finally:
            for agent in agents:
                agent.shutdown()


def test_an_agent_keeps_its_lease_whatever_goes_wrong_in_one_turn(
    trio: OwnEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no thread can be started for a call of gRPC."""
    agent, turns = make_agent(trio, "threads"), list[str]()
    keep = agent._lease.keep

    def keep_after_one_error() -> None:
        turns.append("turn")
        if len(turns) == 1:
            raise RuntimeError("can't start new thread")
        keep()

    monkeypatch.setattr(agent._lease, "keep", keep_after_one_error)
    wait_until(lambda: len(turns) > 1 or not agent._keeper.is_alive(), "the next turn", PATIENCE)
    assert agent._keeper.is_alive()
    agent.shutdown()


def test_an_agent_and_workers_of_one_run_id_have_a_job_each(trio: OwnEtcd) -> None:
    """torchrun's default is one id for all jobs. Workers that end do not end the job of another script."""
    agent = make_agent(trio, "none")
    assert agent.next_rendezvous().world_size == 1
    finder = EtcdFinder(
        Connections(trio.settings()), "none", uid="uid", address=("127.0.0.1", 1), lease=PATIENCE, check=lambda: None,
        log=print, warn=print,
    )  # fmt: skip
    finder.close()
    agent._lease.keep()
    agent.shutdown()


@pytest.mark.parametrize("when", ["before its first sign of life", "before its first round"])
def test_an_agent_that_starts_as_the_last_one_leaves_goes_on(
    trio: OwnEtcd, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """As where torchrun is started again at once: it may find the job that the other agents are about to delete."""
    last, keep = make_agent(trio, "soon-again"), NodeLease.keep

    def keep_late(lease: NodeLease) -> None:
        if not lease.lease and when == "before its first sign of life":
            last.shutdown()
        keep(lease)

    monkeypatch.setattr(NodeLease, "keep", keep_late)
    agent = make_agent(trio, "soon-again")
    last.shutdown()
    assert agent.next_rendezvous().world_size == 1
    agent.shutdown()


AGENT_OF_ONE = """
import sys
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from elastic_train.rendezvous.etcd_handler import AgentsHandler
from elastic_train.rendezvous.etcd_settings import EtcdSettings

parameters = RendezvousParameters("etcd3", "unused", "told", 1, 1)
settings = EtcdSettings(tuple(sys.argv[1].split(",")))
handler = AgentsHandler(parameters, settings, lease=60.0, join_timeout=60.0, read_timeout=60.0)
handler.next_rendezvous()
raise KeyboardInterrupt  # as torchrun ends by a signal
"""


def test_an_agent_that_is_told_to_stop_leaves_nothing_behind(trio: OwnEtcd, etcd: Etcd) -> None:
    """torch calls no `shutdown` then: its own would close the run id for good."""
    command = [sys.executable, "-c", AGENT_OF_ONE, ",".join(trio.settings().endpoints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "KeyboardInterrupt" in done.stderr
    assert "rror" not in done.stderr.replace("KeyboardInterrupt", ""), done.stderr
    assert not etcd.below("/elastic_train/told/")[0]


def test_who_wakes_up_in_an_entry_that_is_gone_writes_nothing(trio: OwnEtcd, etcd: Etcd) -> None:
    first = open_job(etcd, trio.settings(), "again", lambda job: job)
    store = first.store(etcd)
    delete_job(etcd, first)
    second = open_job(etcd, trio.settings(), "again", lambda job: job)
    assert second.prefix != first.prefix
    with pytest.raises(LeftOut):
        store.put(f"{first.prefix}/late", "x")
    delete_job(etcd, second)


@pytest.mark.parametrize("mebibytes", [1.75, 3.0], ids=["etcd's limit", "gRPC's limit"])
def test_what_is_too_large_for_a_request_is_told_with_a_remedy(etcd: Etcd, mebibytes: float) -> None:
    with pytest.raises(StoreRefused, match=r"large.*; start each member of etcd with a larger --max-request-bytes"):
        EtcdStore(etcd).put("too/large", "x" * int(mebibytes * 2**20))


def test_a_full_database_has_the_grace_to_be_mended(tmp_path: Path) -> None:
    """Training needs no write. A start needs one, though its first call only reads, and fails at once."""
    with etcd_running(tmp_path, flags=("--quota-backend-bytes", str(2 * 2**20))) as cluster:
        running = connect(cluster.settings(), deadline=1.0)
        assert running.get("filling") is None

        def fill() -> None:
            for number in range(100):  # a member counts what it has committed to its disk, which may take its time
                EtcdStore(running).put(f"filling/{number}", "x" * 2**18)

        with pytest.raises(StoreUnreachable, match=r"refuses to write: .*space exceeded; .*defragmented"):
            fill()
        beginning = connect(cluster.settings())
        with pytest.raises(StoreRefused, match=r"refuses to write: .*space exceeded; .*defragmented"):
            open_job(beginning, cluster.settings(), "full", lambda job: job)
        with pytest.raises(StoreRefused, match=r"refuses to write: .*space exceeded; .*defragmented"):
            EtcdStore(beginning).put("here", "")
        for etcd in (running, beginning):
            etcd.connections.close()
