"""Process groups of real processes on gloo, their sockets, and their remains."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from torch.utils.data import DataLoader, Dataset

from elastic_train.config import Config, parse
from elastic_train.elastic.next_world import Survivors
from elastic_train.elastic.own_parallel import OwnParallel
from elastic_train.elastic.process_group import is_communication_error, process_group, set_group_timeout
from elastic_train.elastic.session_steps import SessionSteps, StepInHand
from elastic_train.elastic.states_check import StateChecks
from elastic_train.elastic.trainer import Program, Trainer
from elastic_train.elastic.whole_steps import ALONE, Beginning, WholeSteps
from elastic_train.errors import FormationFailed, StoreUnreachable, TrainingDiverged, UsageError
from elastic_train.protocol import addresses, names
from elastic_train.protocol.addresses import address_towards, own_address
from elastic_train.rules import Activity, Failure
from elastic_train.system import open_sockets
from elastic_train.tools.bench.reduction_speed import local_world
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.training.collectives import GROUP_TIMEOUT, exchange
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.training.reduction import StepTotals
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.processes import refuse_threads
from tests.ranks import beside_a_store
from tests.unit.test_liveness import make_member

# --- which sockets are shut -------------------------------------------------------------------------------------------


def connection(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as server:
        client = socket.create_connection(server.getsockname(), source_address=(host, 0))
        accepted, _ = server.accept()
    return client, accepted


def is_open(end: socket.socket) -> bool:
    """Whether it could still receive: one that is broken off is at its end of file."""
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.fixture
def keep() -> Iterator[list[socket.socket]]:
    kept: list[socket.socket] = []
    yield kept
    for end in kept:
        end.close()


def test_only_what_was_opened_for_the_group_is_shut(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    before, during, after = connection(), None, None
    sockets.begin()
    during = connection()
    sockets.complete()
    after = connection()
    keep += [*before, *during, *after]
    sockets.shut()
    assert [is_open(end) for end in (*before, *during, *after)] == [True, True, False, False, True, True]
    sockets.release()


def test_others_may_write_to_what_is_broken_off_until_its_release() -> None:
    """gloo never ends a send that fails (`GroupSockets`)."""
    sockets = GroupSockets()
    far, near = connection()
    sockets._sockets = {near.fileno(): os.readlink(f"/proc/self/fd/{near.fileno()}")}
    sockets.shut()
    assert near.recv(1) == b"", "gloo's thread sees that, fails what waits, and closes it"
    near.close()
    for _ in range(3):
        far.send(b"x")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    sockets.release()
    far.setblocking(True)
    with suppress(ConnectionResetError):
        assert far.recv(1) == b""
    far.close()


def test_without_a_thread_that_would_close_it_later_it_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes. Else a collective without a lost peer would wait on."""

    refuse_threads(monkeypatch)
    sockets = GroupSockets()
    far, near = connection()
    sockets._sockets = {near.fileno(): os.readlink(f"/proc/self/fd/{near.fileno()}")}
    sockets.shut()
    assert near.recv(1) == b""
    near.close()
    sockets.release()
    assert far.recv(1) == b""
    far.close()


def test_what_is_broken_off_is_closed_in_a_while_though_no_other_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.training.group_sockets.KEEP_SECONDS", 0.05)
    sockets = GroupSockets()
    far, near = connection()
    sockets._sockets = {near.fileno(): os.readlink(f"/proc/self/fd/{near.fileno()}")}
    sockets.shut()
    near.close()
    far.settimeout(10)
    assert far.recv(1) == b""
    far.close()


def test_what_is_broken_off_later_is_kept_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.training.group_sockets.KEEP_SECONDS", 0.6)
    sockets, ends = GroupSockets(), []
    for _ in range(2):
        sockets.begin()
        ends += connection()
        sockets.complete()
        sockets.shut()
        kept_since = time.monotonic()
        if len(ends) == 2:
            time.sleep(0.4)
    wait_until(lambda: not sockets._kept, "end of what is kept", 30)
    assert time.monotonic() - kept_since > 0.55
    for end in ends:
        end.close()


def test_what_other_threads_open_meanwhile_is_spared(keep: list[socket.socket]) -> None:
    """A client of another member's store, an upload: they are used when the group is long over."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    keep += servers
    gloo, store, other_store, bucket = (server.getsockname() for server in servers)
    sockets = GroupSockets()
    sockets.begin()
    keep += [socket.create_connection(store)]
    sockets.note_store(store[1])
    keep += [socket.create_server(("127.0.0.1", 0))]
    accepting = keep[-1]
    far = socket.create_connection(accepting.getsockname())
    ends = [socket.create_connection(place) for place in (gloo, other_store, bucket)]
    ends += [far, accepting.accept()[0]]
    keep += ends
    sockets.complete()
    assert sockets.listening() == [accepting.getsockname()]
    sockets.keep_only([gloo, accepting.getsockname()], 2)
    sockets.shut()
    group_store = keep[len(servers)]
    assert [is_open(end) for end in (group_store, *ends)] == [False, False, True, True, False, False]
    sockets.release()


BOTH = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)


def limited(
    ends: tuple[socket.socket, socket.socket], *options: int, is_reused: bool = True, has_delay: bool = False
) -> tuple[socket.socket, socket.socket]:
    """With a time limit for each of these options, and the rest as gloo sets it where nothing else is said."""
    for end in ends:
        for option in options:
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 1800, 0))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_reused)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, not has_delay)
    return ends


@pytest.mark.parametrize("is_formed_ahead", [False, True])
def test_groups_that_the_trained_code_makes_are_shut_as_well(is_formed_ahead: bool, keep: list[socket.socket]) -> None:
    """They are told from all else by what gloo sets, a database's client on the same host too; one that is formed for
    the next world is none."""
    sockets, earlier = GroupSockets(), limited(connection(), *BOTH)
    sockets.begin()
    groups = connection()
    if is_formed_ahead:
        sockets.take({end.fileno(): os.readlink(f"/proc/self/fd/{end.fileno()}") for end in groups})
    else:
        sockets.complete()
    before = open_sockets()
    ahead = limited(connection(), *BOTH)
    sockets.spare({fd: name for fd, name in open_sockets().items() if before.get(fd) != name})
    theirs, plain, half = limited(connection(), *BOTH), connection(), limited(connection(), socket.SO_RCVTIMEO)
    elsewhere = limited(connection("127.0.0.2"), *BOTH)
    clients = [limited(connection(), *BOTH, is_reused=False), limited(connection(), *BOTH, has_delay=True)]
    clients += [limited(connection(), *BOTH)]
    clients[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
    clients[-1][1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
    others = [earlier, ahead, plain, half, elsewhere, *clients]
    keep += [*groups, *theirs, *(end for ends in others for end in ends)]
    sockets.shut()
    assert not any(map(is_open, (*groups, *theirs)))
    assert [all(map(is_open, ends)) for ends in others] == [True] * len(others)
    sockets.forget()
    later = limited(connection(), *BOTH)
    keep += later
    sockets.shut()
    assert all(map(is_open, later)), "there is no group"


def test_one_look_at_what_is_open_is_enough(keep: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its time where much is open, and the recovery waits for it."""
    sockets, looks = GroupSockets(), []

    def look() -> dict[int, str]:
        looks.append(len(looks))
        return open_sockets()

    monkeypatch.setattr("elastic_train.training.group_sockets.open_sockets", look)
    sockets.begin()
    keep += connection()
    sockets.complete()
    assert len(looks) == 2
    sockets.forget()
    sockets.shut()
    assert len(looks) == 2, "there is no group"
    sockets.begin()
    keep += connection()
    sockets.shut()
    assert len(looks) == 4
    sockets.release()


def test_where_a_peer_s_connection_is_not_found_all_are_shut(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    sockets.begin()
    keep += connection()
    sockets.complete()
    sockets.keep_only([("127.0.0.1", 1)], 1)
    sockets.shut()
    assert not any(is_open(end) for end in keep)


def test_callers_of_the_own_store_are_spared(keep: list[socket.socket]) -> None:
    """They wait for answers, whatever becomes of a group that was made meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets = GroupSockets(spared_port=server.getsockname()[1])
        sockets.begin()
        keep += [socket.create_connection(server.getsockname()), server.accept()[0]]
        sockets.complete()
        sockets.shut()
        assert [is_open(end) for end in keep] == [False, True]
        sockets.release()


def test_what_is_opened_so_far_is_shut_while_the_group_is_being_made(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    keep += connection()
    sockets.begin()
    keep += connection()
    sockets.shut()
    assert [is_open(end) for end in keep] == [True, True, False, False]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_listening_socket_is_never_shut(is_complete: bool, keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    sockets.begin()
    server = socket.create_server(("127.0.0.1", 0))
    keep.append(server)
    if is_complete:
        sockets.complete()
    sockets.shut()
    keep.append(socket.create_connection(server.getsockname(), timeout=5))
    keep.append(server.accept()[0])
    assert is_open(keep[-1])


def test_a_number_that_was_given_to_another_socket_is_left_alone(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    sockets.begin()
    mine, theirs = connection()
    sockets.complete()
    number = mine.fileno()
    mine.close()
    theirs.close()
    other, far = connection()
    keep += [other, far]
    if number not in (other.fileno(), far.fileno()):
        keep.append(socket.socket(fileno=os.dup2(other.fileno(), number)))
    sockets.shut()
    assert is_open(other)
    assert is_open(far)


def test_a_number_that_was_given_to_a_file_is_left_alone() -> None:
    sockets = GroupSockets()
    sockets.begin()
    ends = connection()
    sockets.complete()
    number = ends[0].fileno()
    for end in ends:
        end.close()
    read, write = os.pipe()
    os.dup2(write, number)
    sockets.shut()
    os.write(number, b"x")
    assert os.read(read, 1) == b"x"
    for fd in {read, write, number}:
        os.close(fd)


def test_after_forget_nothing_is_shut(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    sockets.begin()
    keep += connection()
    sockets.complete()
    sockets.forget()
    sockets.shut()
    assert all(is_open(end) for end in keep)


def test_shutting_twice_and_from_many_threads_is_harmless(keep: list[socket.socket]) -> None:
    sockets = GroupSockets()
    sockets.begin()
    keep += connection()
    sockets.complete()
    before = open_sockets()
    threads = [threading.Thread(target=sockets.shut) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sockets.release()
    assert open_sockets().items() <= before.items(), "no copy is left; those of tests before may have gone"
    assert not any(is_open(end) for end in keep)


FORKED = """
import json, os, socket
from elastic_train.training.group_sockets import GroupSockets

def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]

def is_open_in_child(number):
    child = os.fork()
    if child == 0:
        try:
            os.fstat(number)
            os._exit(1)
        except OSError:
            os._exit(0)
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

sockets = GroupSockets()
sockets.begin()
mine, theirs = pair()
sockets.complete()
own = is_open_in_child(theirs.fileno())
number = mine.fileno()
mine.close()
read, write = os.pipe()
os.dup2(write, number)
print(json.dumps({"own": own, "reused": is_open_in_child(number)}))
"""


def test_a_forked_child_closes_the_groups_sockets_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"own": False, "reused": True}


# --- its address ------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Whether the name server of this machine answers, for names that are none of its own."""
    event, of_machine = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *more: Any, **kinds: Any) -> Any:
        if host == "job.test" and not kinds.get("flags", 0) & socket.AI_NUMERICHOST:
            assert event.wait(30)
        return of_machine(host, *more, **kinds)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(names, "LOOK_UP_SECONDS", 0.3)
    yield event
    event.set()
    wait_until(lambda: not names._lookups, "end of the look-ups", 30)


def test_a_name_server_that_does_not_answer_costs_seconds_and_one_line(answers: threading.Event) -> None:
    assert not answers.is_set()
    warnings: list[str] = []
    found = address_towards([("job.test", 29400)], warnings.append)
    assert names._lookups, "it has not waited for the answer"
    assert found == address_towards([("192.0.2.1", 9)], pytest.fail)
    assert len(warnings) == 1
    assert "job.test:29400" in warnings[0]
    assert "no name server answers within 0.3 s" in warnings[0]
    assert found in warnings[0]
    assert "\n" not in warnings[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_that_is_asked_for_is_taken(host: str) -> None:
    assert ipaddress.ip_address(address_towards([(host, 29400)], pytest.fail)).is_loopback


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..name"])
def test_a_name_that_leads_nowhere_is_told(host: str) -> None:
    warnings: list[str] = []
    assert address_towards([(host, 29400)], warnings.append) == address_towards([("192.0.2.1", 9)], pytest.fail)
    assert len(warnings) == 1
    assert f"{host}:29400 leads nowhere" in warnings[0]


TWO_NETWORKS = {"h1": "127.0.1.1", "h2": "192.168.56.12", "h3": "192.168.56.13", "mine": "10.0.2.15"} | {
    "localhost": "127.0.0.1"
}
"""what names lead to on a host that has 192.168.56.11 and 10.0.2.15; the default route is the latter's"""


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def source_address(ip: str, _port: int) -> str:
        return "127.0.0.1" if ip.startswith("127.") else "192.168.56.11" if ip.startswith("192.168.") else "10.0.2.15"

    def look_up(host: str) -> list[str]:
        if host.startswith("gone"):
            raise OSError("no such name")
        return [TWO_NETWORKS.get(host, host)]

    monkeypatch.setattr(addresses, "look_up", look_up)
    monkeypatch.setattr(addresses, "source_address", source_address)


@pytest.mark.parametrize("names", [*permutations(("h1", "h2", "h3")), ("mine", "h2"), ("localhost", "h3"), ("h2",)])
@pytest.mark.usefixtures("two_networks")
def test_on_two_networks_the_one_of_the_other_nodes_is_told(names: tuple[str, ...]) -> None:
    assert address_towards([(name, 29400) for name in names], pytest.fail) == "192.168.56.11"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("h1",), "10.0.2.15"),
        (("mine", "h1"), "10.0.2.15"),
        (("localhost", "h1"), "10.0.2.15"),
        (("localhost",), "127.0.0.1"),
        (("localhost", "127.0.0.1"), "127.0.0.1"),
    ],
)
@pytest.mark.usefixtures("two_networks")
def test_where_no_other_node_is_named(names: tuple[str, ...], told: str) -> None:
    assert address_towards([(name, 29400) for name in names], pytest.fail) == told


@pytest.mark.parametrize(("names", "told"), [(("gone", "h2"), "192.168.56.11"), (("localhost", "gone"), "10.0.2.15")])
@pytest.mark.usefixtures("two_networks")
def test_a_name_that_leads_nowhere_beside_others(names: tuple[str, ...], told: str) -> None:
    warnings: list[str] = []
    assert address_towards([(name, 29400) for name in names], warnings.append) == told
    assert len(warnings) == 1
    assert "gone:29400 leads nowhere" in warnings[0]
    assert ("default route" in warnings[0]) == (told == "10.0.2.15")


@pytest.mark.parametrize(("ip", "own"), [("127.0.1.1", None), ("127.0.0.2", "127.0.0.2")])
def test_an_own_name_that_leads_to_the_loopback_interface_says_nothing(
    ip: str, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "h1" if own is None else ip
    monkeypatch.setattr(addresses, "look_up", lambda _host: [ip])
    assert own_address(host) == own


@pytest.mark.parametrize(("host", "why"), [("192.0.2.1", "no network interface"), ("no..name", "leads nowhere")])
def test_an_address_of_no_interface_here_is_refused(host: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        own_address(host)


# --- whose error it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"),
        RuntimeError("Gloo connectFullMesh failed with [...] no error"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        dist.DistBackendError("NCCL error in: ..."),
        dist.DistNetworkError("The client socket has timed out"),
        dist.DistStoreError("wait timeout after 3000ms"),
        FormationFailed("no process group of 2 workers within 3 s"),
    ],
    ids=str,
)
def test_errors_of_the_communication_library(error: Exception) -> None:
    assert is_communication_error(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x6)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation"),
        RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one."),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        MemoryError("out of memory"),
        ConnectionResetError("Connection reset by peer"),
        ValueError("gloo/ is not a number"),
        TrainingDiverged("the loss is nan"),
        StoreUnreachable("the rendezvous store does not answer"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_errors_of_the_code_that_is_trained(error: BaseException) -> None:
    assert not is_communication_error(error)


class OneWrong(Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> int:
        raise self._error


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("row 7 is\nno picture"), "ValueError: row 7 is"),
        (KeyError("my bug"), "KeyError: 'my bug'"),
        (AssertionError(), "AssertionError"),
    ],
    ids=repr,
)
def test_the_others_are_told_an_error_of_the_code_by_its_type(error: Exception, told: str, num_workers: int) -> None:
    """That of a loader process comes with its traceback in the message."""
    said: list[str] = []

    def heard(_key: str) -> str:
        return json.dumps(["another node", 1, ""])

    def announce(_world: World, _name: str, text: str) -> None:
        said.append(text)

    job: Any = SimpleNamespace(heard=heard, announcements=SimpleNamespace(announce=announce))
    nothing: Any = None
    survivors = Survivors(
        job, nothing, nothing, nothing,
        newcomers=nothing, check=nothing, require_no_better=nothing, holds_state=nothing, leave=nothing, log=nothing,
    )  # fmt: skip
    world: Any = SimpleNamespace(me=SimpleNamespace(node=("here", 1)))
    with pytest.raises(type(error)) as raised:
        next(iter(DataLoader(OneWrong(error), num_workers=num_workers)))
    assert survivors.judge(raised.value, 1, world) is Failure.JOB
    assert said == [f"step 1 fails on every member that tries it: {told}"]


# --- two real processes -----------------------------------------------------------------------------------------------

NUM_CYCLES = 10

MEMBER = """
import gc, json, os, signal, sys, threading, time
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from elastic_train.config import Config, parse
from elastic_train.errors import FormationFailed
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.elastic.process_group import is_communication_error, process_group
from elastic_train.protocol.store import TorchStore
from elastic_train.system import open_sockets
from elastic_train.world import World
from tests.unit.test_liveness import make_member
from elastic_train.world import Member, World

rank, port, num_cycles = map(int, sys.argv[1:])
torch.set_num_threads(1)
gc.disable()  # sockets must close because the last reference goes, not because of a collection
raw = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
store = TorchStore(raw, timedelta(seconds=20))
members = tuple(
    Member("node", r, r, 1, ("127.0.0.1", 1), "run", "gloo", None) for r in range(2)
)
sockets = GroupSockets()
excepthook = sys.excepthook
PATIENT = timedelta(seconds=60)  # a busy machine may let one of two processes stand still for some seconds


def group(name):
    world = World(rank=rank, generation=0, members=members)
    return process_group(world, lambda: PrefixStore(name, store.raw.clone()), "gloo", sockets, form_timeout=PATIENT)


def wait_for(key):
    deadline = time.monotonic() + 120
    while store.get(key) is None:
        assert time.monotonic() < deadline, key
        time.sleep(0.005)


def meet(name):
    store.put(f"{name}/{rank}", "here")
    wait_for(f"{name}/{1 - rank}")


def threads():
    return len(os.listdir("/proc/self/task"))


def settled(count, goal):
    # Threads and sockets that have been told to end take a moment.
    deadline = time.monotonic() + 5
    while count() > goal and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()


def tell(**facts):
    print(json.dumps(facts), flush=True)


def one_reduction():
    value = torch.ones(1000)
    dist.all_reduce(value)
    assert float(value[0]) == 2.0


# 1. Form and destroy, again and again.
meet("imported")
with group("warm-up"):
    one_reduction()
sockets.release()  # as the next group does
time.sleep(0.2)
start = (len(os.listdir("/proc/self/fd")), threads())
for cycle in range(num_cycles):
    meet(f"cycle-{cycle}")
    with group(f"group-{cycle}"):
        inside = len(open_sockets())
        one_reduction()
sockets.release()  # as the next group does
tell(
    start=start,
    end=(settled(lambda: len(os.listdir("/proc/self/fd")), start[0]), settled(threads, start[1])),
    sockets=(inside, settled(lambda: len(open_sockets()), inside - 1)),
    is_hook_restored=sys.excepthook is excepthook,
)


# 2. An exception whose frames hold a DDP model, its loss and a Work.
def fail_in_training():
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    loss = model(torch.ones(2, 4)).sum()
    if rank == 0:
        raise RuntimeError("the task's own")
    loss.backward()  # hangs until rank 0's connections are closed


meet("trap")
before = set(open_sockets().values())
try:
    with group("trap-group"):
        fail_in_training()
except RuntimeError as error:
    text, is_communication = str(error), is_communication_error(error)
    sockets.release()  # as the next group does
meet("left-trap")
left_open = settled(lambda: len(set(open_sockets().values()) - before), 0)
tell(left_open=left_open, text=text, is_communication=is_communication)

# 3. Another thread breaks a collective off that would block for ever.
meet("shut")
try:
    with group("shut-group"):
        meet("shut-formed")
        if rank == 0:
            is_shut = threading.Event()
            threading.Timer(0.3, lambda: (is_shut.set(), sockets.shut())).start()
            dist.all_reduce(torch.ones(1))
        else:
            wait_for("shut-done")
            dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    text, is_communication = str(error), is_communication_error(error)
    del error
if rank == 0:
    was_shut = is_shut.is_set()
    sockets.release()
    store.put("shut-done", "yes")
    tell(was_shut=was_shut, text=text, is_communication=is_communication)
else:
    tell(text=text, is_communication=is_communication)

# 4. A group that one member has begun to make, and the other has not: the next one must form all the same.
def refuse():
    raise RuntimeError("no store")


meet("one-sided")
before = set(open_sockets().values())
try:
    with process_group(World(rank, 0, members), HashStore if rank == 0 else refuse, "gloo", sockets):
        raise AssertionError("alone")
except FormationFailed as error:
    text = str(error)
meet("one-sided-again")
left_open = len(set(open_sockets().values()) - before)
try:
    with group("one-sided-group"):
        one_reduction()
        then = "formed"
except FormationFailed as error:
    then = str(error)
tell(text=text, left_open=left_open, then=then, is_hook_restored=sys.excepthook is excepthook)

# 5. A member that is SIGKILLed while the other waits for it.
meet("kill")
try:
    with group("kill-group"):
        meet("kill-formed")
        if rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    tell(text=str(error), is_communication=is_communication_error(error))
"""


@pytest.fixture(scope="module")
def told() -> list[list[dict[str, Any]]]:
    """What two processes saw of their common groups: [rank][part of the script]."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(server.port), str(NUM_CYCLES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    outputs = []
    for member in members:
        try:
            outputs.append(member.communicate(timeout=250))
        finally:
            if member.poll() is None:
                for other in members:
                    other.kill()
    found = [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]
    assert [member.returncode for member in members] == [0, -signal.SIGKILL], outputs
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_forming_and_ending_groups_leaves_nothing_behind(told: list[list[dict[str, Any]]], rank: int) -> None:
    seen = told[rank][0]
    assert seen["end"] == seen["start"]
    assert seen["sockets"][0] > seen["sockets"][1]
    assert seen["is_hook_restored"]


def test_an_exception_that_holds_a_model_does_not_hold_the_sockets(told: list[list[dict[str, Any]]]) -> None:
    """The peers of one that fails wait for them to be shut; gloo closes them with the last reference to the group."""
    failed, other = told[0][1], told[1][1]
    assert (failed["text"], failed["is_communication"]) == ("the task's own", False)
    assert other["is_communication"], other["text"]
    assert failed["left_open"] == other["left_open"] == 0


def test_another_thread_breaks_a_blocked_collective_off(told: list[list[dict[str, Any]]]) -> None:
    blocked, other = told[0][2], told[1][2]
    assert blocked["is_communication"], blocked["text"]
    assert blocked["was_shut"]
    assert other["is_communication"], other["text"]


def test_a_group_that_only_one_member_began_to_make_does_not_hinder_the_next(told: list[list[dict[str, Any]]]) -> None:
    """torch numbers a process's groups, in the keys by which the members find each other: one number apart, they would
    never meet again."""
    began, other = told[0][3], told[1][3]
    assert "within 1 s: wait timeout" in began["text"].lower()
    assert "within 1 s: no store" in other["text"]
    assert (began["then"], other["then"]) == ("formed", "formed")
    assert began["left_open"] == other["left_open"] == 0
    assert began["is_hook_restored"]


def test_the_death_of_a_member_is_a_communication_error(told: list[list[dict[str, Any]]]) -> None:
    seen = told[0][4]
    assert seen["is_communication"], seen["text"]


class AbortableGroup:
    """What is needed of an NCCL group; a real one needs a GPU for every rank."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.aborted = threading.Event()
        self.bound_device_id: torch.device | None = None
        self._seconds = seconds

    def abort(self) -> None:
        time.sleep(self._seconds)
        self.aborted.set()


def test_breaking_off_aborts_nccl_and_is_remembered_until_the_next_group() -> None:
    sockets, group = GroupSockets(), AbortableGroup()
    sockets.begin()
    sockets.complete(group)  # type: ignore[arg-type]
    assert not sockets.is_shut
    sockets.shut()
    assert group.aborted.wait(10)
    assert sockets.is_shut
    sockets.forget()
    assert sockets.is_shut, "whoever was in a collective may look only now"
    sockets.begin()
    assert not sockets.is_shut


def test_an_abort_waits_for_the_end_of_what_nccl_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would free that under the thread that trains; which may hang in it, so it waits for a moment only."""
    monkeypatch.setattr("elastic_train.training.group_sockets.ENQUEUE_SECONDS", 60.0)
    sockets, group = GroupSockets(), AbortableGroup(seconds=0.2)
    sockets.begin()
    sockets.complete(group)  # type: ignore[arg-type]
    sockets.shut()
    assert not group.aborted.wait(0.2)
    with sockets.waiting():
        pass
    assert group.aborted.is_set(), "who waited goes on when it has ended"
    sockets.wait_for_abort()
    monkeypatch.setattr("elastic_train.training.group_sockets.ENQUEUE_SECONDS", 0.1)
    sockets.begin()
    sockets.complete(another := AbortableGroup())  # type: ignore[arg-type]
    sockets.shut()
    assert another.aborted.wait(10), "nobody waits"


def test_no_step_begins_in_a_group_of_nccl_that_was_broken_off_while_a_batch_was_read(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort frees what the step would be given to; it need not wait for data, nor they for it."""
    sockets, group = GroupSockets(), AbortableGroup()
    trainer._membership = SimpleNamespace(sockets=sockets)  # type: ignore[assignment]

    def batches() -> Iterator[Any]:
        sockets.shut()
        assert group.aborted.wait(10)
        yield ()

    steps = trainer_steps(trainer)
    steps._shares = batches()
    steps._watcher = SimpleNamespace(do=lambda _activity: None)  # type: ignore[assignment]
    sockets.begin()
    sockets.complete(group)  # type: ignore[arg-type]
    monkeypatch.setattr("elastic_train.training.group_sockets.ENQUEUE_SECONDS", 60.0)
    with pytest.raises(FormationFailed, match="was broken off"):
        steps.begin()
    assert steps.in_hand is None


@pytest.mark.parametrize("value", [None, "1", "2", "3"])
def test_nccl_gets_this_workers_device_and_is_destroyed_when_its_abort_has_ended(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """By fakes: torch's group, which needs GPUs."""
    made: dict[str, Any] = {}
    group, order, reduced = AbortableGroup(seconds=0.3), [], []
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(dist, "init_process_group", lambda _backend, **options: made.update(options))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torch, "zeros", lambda _size, device=None: device)
    monkeypatch.setattr(dist, "all_reduce", reduced.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append(group.aborted.is_set()))
    synchronized: list[torch.device] = []
    monkeypatch.setattr(GroupSockets, "require_unbroken", lambda _self, device: synchronized.append(device))
    monkeypatch.setattr("elastic_train.elastic.process_group.set_group_timeout", lambda _timeout: None)

    def gather(mine: Any) -> list[Any]:
        reduced.append(None)
        return [mine]

    monkeypatch.setattr("elastic_train.elastic.process_group.gather_json", gather)
    sockets, device = GroupSockets(), torch.device("cuda", 2)
    world = World(0, 0, tuple(make_member(rank) for rank in range(2)))

    def lose_a_peer() -> None:
        with process_group(world, HashStore, "cpu:gloo,cuda:nccl", sockets, device=device):
            assert os.environ[variable] == "0"
            assert "device_id" not in made, "NCCL connects when the sockets of the group are known: its own are no part"
            assert group.bound_device_id == device
            assert reduced == [None, device], "NCCL's communicator stands before anything rests on it"
            assert synchronized == [device]
            for name in ("WAIT_TIMEOUT_DUMP_MILSEC", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING"):
                assert os.environ[f"TORCH_NCCL_{name}"] == "0", "its watchdog would hold the group's end up"
            assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0", "it would end the process, without a word"
            raise RuntimeError("NCCL communicator was aborted")

    with pytest.raises(RuntimeError, match="was aborted"):
        lose_a_peer()
    assert order == [True]


WHICH_NCCL = """
from torch.distributed import distributed_c10d as c10d

from elastic_train.elastic.process_group import _set_nccl_variables

_set_nccl_variables()
c10d.Backend._ensure_backend_registered("nccl")
print(c10d.Backend._plugins["NCCL"].creator_fn.__name__)
"""


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="torch has one NCCL backend alone")
@pytest.mark.parametrize(("chosen", "found"), [({}, "nccl"), ({"TORCH_DIST_USE_NCCL2": "1"}, "nccl2")])
def test_nccl_is_the_backend_that_reads_those_variables(chosen: dict[str, str], found: str) -> None:
    """torch has two since 2.15, and takes the other one by default. In a process of its own: torch chooses once."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DIST_USE_NCCL2"}
    shown = subprocess.run(
        [sys.executable, "-c", WHICH_NCCL], env=env | chosen, capture_output=True, text=True, check=True, timeout=300
    )
    assert shown.stdout.split() == [f"_create_{found}_process_group"]


def test_an_end_of_nccl_that_a_lost_peer_spoils_is_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes. torch would else know the group for ever, and refuse each one after it."""
    group, ends = AbortableGroup(), []

    def destroy() -> None:
        ends.append(group.aborted.is_set())
        if not group.aborted.is_set():
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")

    monkeypatch.setattr(dist, "init_process_group", lambda _backend, **_options: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torch, "zeros", lambda _size, device=None: device)
    monkeypatch.setattr(dist, "all_reduce", lambda _tensor: None)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(GroupSockets, "require_unbroken", lambda _self, _device: None)
    monkeypatch.setattr("elastic_train.elastic.process_group.set_group_timeout", lambda _timeout: None)
    monkeypatch.setattr("elastic_train.elastic.process_group.gather_json", lambda mine: [mine])
    world = World(0, 0, tuple(make_member(rank) for rank in range(2)))
    with process_group(world, HashStore, "cpu:gloo,cuda:nccl", GroupSockets(), device=torch.device("cuda", 0)):
        pass
    assert ends == [False, True]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_gpu_of_no_use_is_no_world_that_has_not_formed(
    monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError]
) -> None:
    """By fakes. Of such a world nobody is blamed: all would try again together, until the job ends."""
    emptied: list[bool] = []

    def zeros(_size: int, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        assert emptied, "what torch keeps would be NCCL's to take"
        raise kind("CUDA error: out of memory")

    monkeypatch.setattr(dist, "init_process_group", lambda _backend, **_options: pytest.fail("the others wait in it"))
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    world = World(0, 0, tuple(make_member(rank) for rank in range(2)))
    form = process_group(world, HashStore, "cpu:gloo,cuda:nccl", GroupSockets(), device=torch.device("cuda", 0))
    with pytest.raises(kind, match="out of memory") as raised, form:
        pytest.fail("a world without NCCL")
    assert not is_communication_error(raised.value)


@pytest.mark.parametrize("seconds", [None, "7"])
def test_a_communicator_of_nccl_that_does_not_come_is_a_world_that_has_not_formed(
    monkeypatch: pytest.MonkeyPatch, seconds: str | None
) -> None:
    """By fakes. A blocking one waits for 30 min for who died meanwhile, and can be aborted by nobody."""
    variable, group = "TORCH_NCCL_NONBLOCKING_TIMEOUT", AbortableGroup()
    monkeypatch.delenv(variable, raising=False)
    if seconds is not None:
        monkeypatch.setenv(variable, seconds)
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)

    def reduce(device: torch.device | None) -> None:
        if device is not None:
            assert not group.aborted.is_set()
            raise dist.DistBackendError("NCCL timeout when waiting for nonblocking call to become successful.")

    monkeypatch.setattr(dist, "init_process_group", lambda _backend, **_options: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torch, "zeros", lambda _size, device=None: device)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("elastic_train.elastic.process_group.set_group_timeout", lambda _timeout: None)
    monkeypatch.setattr("elastic_train.elastic.process_group.gather_json", lambda mine: [mine])
    world = World(0, 0, tuple(make_member(rank) for rank in range(2)))
    form = process_group(world, HashStore, "cpu:gloo,cuda:nccl", GroupSockets(), device=torch.device("cuda", 0))
    with pytest.raises(FormationFailed, match="NCCL timeout"), form:
        pytest.fail("a world without NCCL")
    assert group.aborted.is_set(), "what others of it wait for is broken off"
    assert (os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"], os.environ[variable]) == ("1", seconds or "30")
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0", "else the 30 s are for the first large reduction as well"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Of an own loop on NCCL, whose group is broken off while the device still works on a reduction."""
    sockets = GroupSockets()
    stream = SimpleNamespace(synchronize=sockets.shut)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sockets.has_nccl = True
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    task = SimpleNamespace(train_set=torch.utils.data.TensorDataset(torch.ones(1)), collate=list)
    worker: Any = SimpleNamespace(
        state=TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=4, epochs=2),
        device=torch.device("cuda"),
        task=task,
        config=Config(),
    )
    watcher = SimpleNamespace(do=lambda _activity: None)
    membership: Any = SimpleNamespace(sockets=sockets, watcher=watcher)
    saver: Any = None
    found = Trainer(Program(lambda _training: None), worker, membership, saver)
    world = World(rank=0, generation=0, members=(make_member(0), make_member(1)), uid="pair")
    found._training = SimpleNamespace(note_applied=lambda _: None, world=world)  # type: ignore[assignment]
    return found


def test_an_own_loop_applies_nothing_before_the_device_has_finished_the_reduction(trainer: Trainer) -> None:
    """Where it ends by an abort its sums are garbage, and nothing but the end of the wait shows that."""
    state = trainer._worker.state
    state.model.weight.grad = torch.full((1, 2), 7.0)  # type: ignore[union-attr]
    with pytest.raises(FormationFailed):
        state.optimizer.step()
    assert state.model.weight.tolist() == [[1.0, 1.0]]  # type: ignore[operator, union-attr]


def test_the_only_worker_does_not_wait_for_its_device(trainer: Trainer) -> None:
    """No sum of others can reach its weights; a GPU that is waited for has nothing to do meanwhile."""
    training: Any = trainer._training
    training.world = World(rank=0, generation=0, members=(make_member(0),), uid="alone")
    trainer._require_unbroken()
    assert not trainer._membership.sockets.is_shut, "which waiting does here"


@pytest.mark.parametrize("has_reduced", [True, False])
def test_a_step_that_a_scaler_skips_over_garbage_does_not_count(trainer: Trainer, has_reduced: bool) -> None:
    """One without a sum of gradients (`no_sync`) does: nothing of it came from others."""
    state, steps = trainer._worker.state, trainer_steps(trainer)
    steps.in_hand = step = StepInHand(MicroBatch(0, 4, 0, np.arange(1), 2, is_last=True), 1, has_reduced=has_reduced)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(state.model(torch.ones(1, 2)).sum()).backward()
    state.model.weight.grad.fill_(float("nan"))  # type: ignore[operator, union-attr]
    scaler.step(state.optimizer)
    scaler.update()
    with pytest.raises(FormationFailed) if has_reduced else nullcontext():
        assert not steps.begin_commit()
    assert step.is_applied is not has_reduced, "else it is committed with the world's end"


def trainer_steps(trainer: Trainer) -> SessionSteps:
    """As the trainer makes them for a world, as far as they need no others."""
    nothing: Any = None
    return SessionSteps(
        (),
        trainer._worker,
        nothing,
        local_world(0, 2),
        nothing,
        trainer,
        is_own_code=True,
        require_unbroken=trainer._require_unbroken,
        reading=trainer._membership.sockets.reading,
        hints=trainer._hints,
    )


def whole_steps(
    sockets: GroupSockets, inner: Any, do: Callable[..., None] = lambda *_activity: None, begin: Beginning = ALONE
) -> WholeSteps:
    nothing: Any = None
    membership: Any = SimpleNamespace(sockets=sockets, watcher=SimpleNamespace(do=do))
    state = SimpleNamespace(optimizer=None, step=0)
    worker: Any = SimpleNamespace(config=parse([]), state=state, device=torch.device("cpu"))
    passes: Any = SimpleNamespace(note=lambda: None, look=lambda: None)
    steps = WholeSteps(worker, membership, nothing, begin, StateChecks(worker, membership), nothing, nothing, passes)
    steps._reduction = inner
    return steps


def test_a_step_whose_group_was_broken_off_does_not_count() -> None:
    sockets = GroupSockets()
    totals = StepTotals(0.5, (0, 0))

    class Inner:
        def run(self, *_arguments: Any, **_more: Any) -> StepTotals:
            return totals

    told: list[Activity] = []
    reduction = whole_steps(sockets, Inner(), told.append)
    assert reduction.run([], lambda *_: torch.zeros(()), lambda loss: loss, ()) is totals
    assert told == [Activity.COMPUTE], "from here on it keeps the others waiting"
    sockets.shut()
    with pytest.raises(FormationFailed):
        reduction.run([], lambda *_: torch.zeros(()), lambda loss: loss, ())


def test_what_a_world_begins_with_is_finished_in_its_first_steps() -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        return lambda *_arguments, **_more: calls.append(name)

    handover: Any = SimpleNamespace(begin=noting("send"), finish=noting("sent"))
    comparison: Any = SimpleNamespace(
        begin=noting("hash"), finish_hash=noting("hashed"), compare=noting("compare"), why_not=None,
        is_lost_in_loading=False,
    )  # fmt: skip
    begin = Beginning(noting("claim"), handover, comparison, first_ranks=1)
    inner = SimpleNamespace(run=noting("reduce"))
    steps = whole_steps(GroupSockets(), inner, begin=begin)
    found = []
    for _ in range(3):
        steps.run([], lambda *_: torch.zeros(()), lambda loss: loss, ())
        found.append(list(calls))
        calls.clear()
    assert found == [
        ["reduce", "claim", "sent"],
        ["hash", "reduce", "hashed", "compare"],  # of the first step that all begin with the state
        ["reduce"],
    ]


def meet_late(rank: int, port: int, out: Path) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=200))
    store.set(str(rank), "")
    store.wait(["0", "1"])  # both have started
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    dist.barrier()
    set_group_timeout(GROUP_TIMEOUT)
    if rank == 1:
        time.sleep(6.5)
    received = torch.zeros(3)
    exchange([(torch.full((3,), float(rank)), 1 - rank)], [(received, 1 - rank)])
    dist.destroy_process_group()
    (out / str(rank)).write_text(str(received.tolist()))


@pytest.mark.timeout(300)
def test_a_slower_rank_is_waited_for_in_an_exchange_of_the_ordered_mode(tmp_path: Path) -> None:
    """gloo's messages keep the short limit with which the group was made, whatever is set later."""
    beside_a_store(meet_late, tmp_path, size=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[1.0, 1.0, 1.0]", "[0.0, 0.0, 0.0]"]


@pytest.mark.parametrize(
    ("world_size", "device", "expected"),
    [(1, "cuda", Activity.COMPUTE), (2, "cpu", Activity.REDUCE), (2, "cuda", Activity.STEP)],
)
def test_a_pause_in_a_forward_pass_on_a_gpu_is_no_collective_that_does_not_end(
    world_size: int, device: str, expected: Activity
) -> None:
    """In which call the host waits for a peer, nobody knows there; so it may take as long as what is its own."""
    done: list[Activity] = []
    watcher: Any = SimpleNamespace(do=done.append)
    steps: Any = SimpleNamespace(in_hand=StepInHand(MicroBatch(0, 4, 0, np.arange(1), 2, is_last=True), 1))
    world = World(rank=0, generation=0, members=tuple(make_member(number) for number in range(world_size)), uid="one")
    nothing: Any = None
    parallel = OwnParallel(world, torch.device(device), watcher, steps, nothing, nothing, nothing)
    ddp: Any = SimpleNamespace(module=None, require_forward_param_sync=True)
    parallel._enter_forward(ddp, (), shares_buffers=False)
    assert done == [expected]


def test_a_group_that_the_trained_code_has_ended_is_told() -> None:
    """Which the last line of many a script does. torch's advice is to call init_process_group()."""
    with pytest.raises(UsageError, match=r"has ended the process group: leave destroy_process_group\(\) out"):
        set_group_timeout(GROUP_TIMEOUT)
