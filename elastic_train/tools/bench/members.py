"""Many members of one job in a few processes, for benchmarks: real stores, links and membership, and no training.

A **crew** is a process with some members in it. Each member has a thread that acts like ring.py without a process
group: it enters a world, waits until that is over, and agrees on the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import tenacity
from torch.distributed import DistNetworkError, HashStore

from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.connect import OWN_SECONDS, answering
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.standing import standing_in
from elastic_train.errors import FormationFailed, first_line
from elastic_train.protocol.finder import Size
from elastic_train.protocol.group_store import GroupStoreServer
from elastic_train.protocol.known_worlds import SETTLED_REDUCTIONS
from elastic_train.protocol.launcher import Launcher
from elastic_train.protocol.links import Links
from elastic_train.protocol.liveness import Watcher, ping_interval
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.probes import refusing
from elastic_train.protocol.signposts import reach
from elastic_train.protocol.store import KeyValueStore, TorchStore
from elastic_train.rules import NOW, Activity
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.world import Address, Member, World

HOST = "127.0.0.1"
PEER_TIMEOUT = 60.0
"""hundreds of members share a few cores here: silence does not mean death"""
ATTEMPTS = 20
FULL_PACE = 128
"""members; more of them together send no more pings than these, each member fewer"""
STEP_SECONDS = 0.02
"""between two checks of rank 0 for a newcomer to admit"""


class Sent(NamedTuple):
    """What one member has sent since its start, without TCP's overhead."""

    pings: int
    ping_bytes: int
    calls: int
    """to other members' stores"""


class Counted:
    """Another member's store, as a KeyValueStore that notes each call."""

    def __init__(self, store: Any, note_call: Callable[[], None]) -> None:
        self._store, self._note_call = store, note_call

    def __getattr__(self, name: str) -> Any:
        self._note_call()
        return getattr(self._store, name)


class BenchMember:
    """One member, and its thread."""

    def __init__(self, number: int, most: int, known: Sequence[Address], report: Callable[..., None]) -> None:
        around = Surroundings(poll_seconds=0.001 * max(1.0, most / 32))  # they share the cores of one machine
        uid = around.draw_uid()
        self._report, self._is_over = report, threading.Event()
        self._calls = 0
        self._is_newcomer = bool(known)
        sign = HashStore()  # every newcomer knows one member
        Launcher(sign, rank=0, start="bench").show(known, "")
        server, self._links = serve_store(), Links(HOST, uid, interval_for(most), PEER_TIMEOUT)
        self.store = TorchStore(server.store, timedelta(seconds=OWN_SECONDS))
        self._watcher = Watcher(
            self._links, PEER_TIMEOUT, self._is_over.set, lambda world: self._membership.tend(world),
            interval=interval_for(most),
        )  # fmt: skip
        job = PeerJob(
            self.store, server.address, lambda address: cast(KeyValueStore, Counted(reach(address), self._note_call)),
            Launcher(sign, rank=1, start="bench"), Size(1, most, 0.0), uid=uid, run_id="bench",
            peer_timeout=PEER_TIMEOUT, max_world_size=None, refused=refusing, draw_uid=around.draw_uid,
            clock=time.monotonic, in_background=lambda task: threading.Thread(target=task, daemon=True).start(),
        )  # fmt: skip
        self.me = Member(
            host=f"node{number}", local_rank=0, pid=number, agent_pid=number, address=self._links.address,
            directory_id="run", backend="gloo", max_generation=None, store=server.address, uid=uid,
        )  # fmt: skip
        self._membership = Membership(
            job, self._watcher, Waits(PEER_TIMEOUT, PEER_TIMEOUT, 600.0), uid=uid, address=self._links.address,
            store_address=server.address, local_world_size=1, max_nodes=most, check=lambda: None,
            log=lambda _text: None, answering=answering, sockets=GroupSockets(), group_store=server.group_store,
            surroundings=around,
        )  # fmt: skip

    def start(self) -> None:
        self._watcher.thread.start()
        threading.Thread(target=self._live, name="member", daemon=True).start()

    @property
    def sent(self) -> Sent:
        return Sent(self._links.sockets.num_messages, self._links.sockets.num_bytes, self._calls)

    def _note_call(self) -> None:
        self._calls += 1

    def _live(self) -> None:
        try:
            membership = self._membership
            if self._is_newcomer:
                membership.arrival.find()
            world = membership.first_world(self.me)
            while True:
                has_formed = self._train(world)
                world, _ = membership.next_world(world, has_formed=has_formed)
        except Exception as error:
            self._report("failed", f"{type(error).__name__}: {error}")

    def _train(self, world: World) -> bool:
        """Take part in a world until it is over; return whether it had formed."""
        membership = self._membership
        self._is_over.clear()
        with contextlib.ExitStack() as standing:
            try:
                standing.enter_context(standing_in(membership, world))
            except FormationFailed:
                return False
            self._watcher.do(Activity.COMPUTE)
            for _ in range(SETTLED_REDUCTIONS + 1):
                membership.vote()
            self._report("in", self.me.uid, world.generation, time.monotonic())
            while not self._is_over.wait(STEP_SECONDS if world.rank == 0 else None):
                if membership.vote() == NOW:  # in training, the votes of a step would carry this
                    self._report("admits", time.monotonic())
                    break
        return True


def interval_for(size: int) -> float:
    """Seconds between two pings: with four times FULL_PACE members, each pings a quarter as often."""
    return ping_interval(PEER_TIMEOUT) * max(1.0, size / FULL_PACE)


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(DistNetworkError), stop=tenacity.stop_after_attempt(ATTEMPTS), reraise=True
)
def serve_store() -> GroupStoreServer:
    """Start a member's store. Raises: DistNetworkError: on an overloaded machine the store's thread did not answer."""
    return GroupStoreServer(HOST)


def run_crew(first: int, count: int, most: int, known: Sequence[Address], pipe: Connection) -> None:
    """Run `count` members in this process, as long as the benchmark lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    resource.setrlimit(resource.RLIMIT_NOFILE, 2 * resource.getrlimit(resource.RLIMIT_NOFILE)[1:])
    lock = threading.Lock()

    def report(*what: Any) -> None:
        with lock:
            pipe.send(what)

    with open(os.devnull, "wb") as nowhere:  # torch's messages about attempts that are repeated
        os.dup2(nowhere.fileno(), 2)
    try:
        members = [BenchMember(first + index, most, known, report) for index in range(count)]
    except Exception as error:
        report("failed", f"{type(error).__name__}: {first_line(error)}")
        return
    report("members", [one.me for one in members])
    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        order = pipe.recv()
        if order == "count":
            report("sent", time.monotonic(), [one.sent for one in members])
            continue
        for one in members:
            if order:
                one.store.put("admitted", order)
            one.start()
    os._exit(0)  # hundreds of threads are not waited for


class Crew:
    """The parent's handle on a process with some members."""

    def __init__(self, first: int, count: int, most: int, known: Sequence[Address] = ()) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_crew, args=(first, count, most, known, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
