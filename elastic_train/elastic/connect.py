"""Connect a worker to its job, in the way that its launch says."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from elastic_train.elastic.background import BackgroundThreads
from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.claims import Bounded
from elastic_train.elastic.formed_group import FormedGroup, form, form_timeout
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.stuck import StuckThread
from elastic_train.errors import FormationFailed, StoreUnreachable, first_line
from elastic_train.protocol.addresses import address_towards, split_endpoint
from elastic_train.protocol.arbiter import Arbiter
from elastic_train.protocol.finder import Finder, Size
from elastic_train.protocol.group_store import GroupStoreServer
from elastic_train.protocol.heartbeat import Pace, is_readable
from elastic_train.protocol.join_queue import address_of, stores_by_node
from elastic_train.protocol.launcher import Launcher
from elastic_train.protocol.links import Links
from elastic_train.protocol.liveness import Watcher, ping_interval
from elastic_train.protocol.other_sides import OtherSides
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.probes import PROBE_SECONDS, Probe, probe_all, refusing
from elastic_train.protocol.signposts import Signposts, reach
from elastic_train.protocol.store import TorchStore
from elastic_train.rendezvous.launch import Launch, max_nodes_of
from elastic_train.runlog.reader import read_json
from elastic_train.stopping import StopSignal
from elastic_train.system import answer_of, close_sockets_at
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.world import Address, Member, World

MEMBERS_FILE = "members.json"
"""in a run directory: the stores of members of the job that writes there"""
OWN_SECONDS = 30.0
"""timeout of this process's own store. It is long because the store lives as long as the process, its one thread may
resolve a caller's name, and a client is useless after one timeout"""
MOST_NAMED = 4
"""stores listed there: each that is gone without a refusal costs a newcomer half a second"""
SET_MASTER = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, for all workers"
"""advice also for workers that srun has started, whose user may have set neither"""


@dataclass(frozen=True)
class Return:
    """What a worker brings along when it was left out and returns as a newcomer."""

    uid: str
    """its uid as a member"""
    stores: tuple[Address, ...] = ()
    """of the other members of its last world"""
    has_trained: bool = False
    """whether the run has a state, with this worker or with others"""
    num_fruitless: int = 0
    """how many times in a row it was left out before a world with it was settled"""
    deadline: float = math.inf
    """--wait-timeout after it was first left out, by the monotonic clock"""
    was: tuple[tuple[str, str], ...] = ()
    """as `Member.was`, of these times"""

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True)
class Applicant:
    """A worker that looks for its job."""

    launch: Launch
    stop: StopSignal
    waits: Waits
    max_world_size: int | None
    """as `PeerJob`'s"""
    run_dir: Path | None
    """contains MEMBERS_FILE; None where nothing is written"""
    log: Callable[[str], None]
    """prints a line for the user of this node: what is being waited for"""
    warn: Callable[[str], None]
    """prints a warning, and writes it to the run's events"""
    back: Return | None = None
    """set where this process was a member before"""
    goes_on: bool = False
    arbiter: Callable[[], Arbiter] | None = None
    """as `PeerJob`'s, like `goes_on`; both have an effect only under c10d, as etcd is an arbiter itself"""
    around: Surroundings = field(default_factory=Surroundings)
    """its `start` and `finish` are replaced"""


@dataclass(frozen=True)
class Endpoints:
    """What this process opens so that others can reach it, before it contacts any of them."""

    uid: str
    host: str
    """IP address at which others reach it"""
    links: Links
    server: GroupStoreServer
    sockets: GroupSockets
    around: Surroundings


def connect_worker(applicant: Applicant) -> Membership:
    """Return a membership that has found its job, or the place where the job begins. Blocks until then.

    Raises:
        StoreUnreachable, StoreRefused: the rendezvous place does not answer, or refuses.
        Stopped: this worker was told to stop.
    """
    launch, waits = applicant.launch, applicant.waits
    own = open_endpoints(applicant)
    finder, arbiter = place_of(applicant, own)
    job, other_sides = peer_job(applicant, own, finder, arbiter)
    watcher = watcher_of(applicant, own, lambda: membership)
    begin_timeout, too_late = begin_limit(applicant)
    membership = Membership(
        job,
        watcher,
        waits,
        uid=own.uid,
        address=own.links.address,
        store_address=own.server.address,
        local_world_size=launch.local_world_size,
        max_nodes=max_nodes_of(launch, os.environ),
        check=applicant.stop.check,
        log=applicant.log,
        answering=lambda members: answering(members, waits.peer_timeout),
        order=0 if launch.is_open else launch.rank,
        begin_timeout=begin_timeout,
        too_late=too_late,
        sockets=own.sockets,
        group_store=own.server.group_store,
        form=lambda world: form_ahead(world, own),
        other_sides=other_sides,
        surroundings=own.around,
    )
    try:
        membership.arrival.find()
    except BaseException:
        membership.close()
        raise
    if isinstance(finder, Signposts) and finder.is_silent and not job.entrance.is_first and applicant.back is None:
        host, port = address_of(job.facts.host_says("host") or '["?", 0]')
        applicant.log(
            f"nobody answers at {finder.describe()}: this node joins the job that {applicant.run_dir} shows at "
            f"{host}:{port}; a job of its own takes another --run-dir"
        )
    watcher.thread.start()
    return membership


def watcher_of(applicant: Applicant, own: Endpoints, membership: Callable[[], Membership]) -> Watcher:
    """Return the watcher, not yet started."""
    waits = applicant.waits

    def tend(world: World | None) -> None:
        line = stuck.look(world)
        if line is not None and world is not None and world.rank == 0:
            membership().joins.news.send_to_all(world, f"{world.me.name}: {line}")
        membership().tend(world)

    def cut() -> None:
        if not watcher.verdicts:
            stuck.look_apart()
        own.sockets.shut()

    watcher = Watcher(
        own.links,
        waits.peer_timeout,
        cut,
        tend,
        give_up=lambda why: membership().give_up(why, applicant.warn),
        pace=Pace(waits.peer_timeout, waits.stall_timeout, waits.formation_timeout),
    )
    stuck = StuckThread(watcher.own, applicant.warn, watcher.contacts.longest_wait)
    return watcher


def open_endpoints(applicant: Applicant) -> Endpoints:
    """Open this process's endpoints. Blocks and warns as `local_address`."""
    waits, warn = applicant.waits, applicant.warn
    threads = BackgroundThreads()
    around = replace(applicant.around, start=threads.start, finish=threads.finish)
    uid = around.draw_uid()
    host = local_address(applicant.launch, warn)
    # First: the earlier the canary's thread is started, the sooner the canary ends when this process is killed.
    links = Links(host, uid, ping_interval(waits.peer_timeout), waits.peer_timeout, warn, is_readable)
    server = GroupStoreServer(host)
    return Endpoints(uid, host, links, server, GroupSockets(spared_port=server.address[1]), around)


def place_of(applicant: Applicant, own: Endpoints) -> tuple[Finder, Callable[[], Arbiter] | None]:
    """Return the finder of this worker's job, and the arbiter that decides which side goes on. Blocks, and raises, as
    `connect_worker`."""
    launch, waits, back = applicant.launch, applicant.waits, applicant.back

    def earlier() -> list[Address]:
        return [*(() if back is None else back.stores), *read_members(applicant.run_dir, launch.run_id)]

    if launch.etcd is not None:
        from elastic_train.rendezvous.etcd_connections import Connections  # imports gRPC
        from elastic_train.rendezvous.etcd_finder import EtcdFinder

        finder = EtcdFinder(
            Connections(launch.etcd), launch.run_id, uid=own.uid, address=own.server.address,
            lease=max(launch.etcd.grace, waits.peer_timeout), check=applicant.stop.check, log=applicant.log,
            warn=applicant.warn, earlier=earlier, bound=Bounded,
        )  # fmt: skip
        return finder, finder.arbiter
    if launch.c10d is not None:
        signposts = Signposts(
            [split_endpoint(endpoint) for endpoint in launch.c10d.endpoints],
            launch.run_id,
            is_host=launch.c10d.is_host,
            timeout=launch.c10d.join_timeout if back is None else back.seconds_left(),
            earlier=earlier,
        )
        return signposts, applicant.arbiter
    return launcher_of(launch, waits, applicant.stop), None


def peer_job(
    applicant: Applicant, own: Endpoints, finder: Finder, arbiter: Callable[[], Arbiter] | None
) -> tuple[PeerJob, OtherSides | None]:
    """Return the job in its members' own stores, and the search for other sides of the run, where nodes may join."""
    launch, around = applicant.launch, own.around
    store = TorchStore(own.server.store, timedelta(seconds=OWN_SECONDS))
    other_sides: OtherSides | None = None
    if launch.is_open:
        other_sides = OtherSides(
            store,
            reach,
            finder,
            uid=own.uid,
            run_id=launch.run_id,
            may_branch=applicant.goes_on and launch.c10d is not None,
            in_background=lambda task: around.start("other-sides", task),
        )
    job = PeerJob(
        store,
        own.server.address,
        reach,
        finder,
        size_of(launch, applicant.waits),
        uid=own.uid,
        run_id=launch.run_id,
        peer_timeout=applicant.waits.peer_timeout,
        max_world_size=applicant.max_world_size,
        refused=refusing,
        draw_uid=around.draw_uid,
        clock=time.monotonic,
        arbiter=arbiter,
        in_background=lambda task: around.start("ahead", task),
        goes_on=other_sides is not None and other_sides.may_branch,
        knows=() if applicant.back is None else applicant.back.stores,
    )
    return job, other_sides


def begin_limit(applicant: Applicant) -> tuple[float, str]:
    """Return (seconds until this worker has to be in a world, where nothing else limits that; the error message)."""
    waits, back = applicant.waits, applicant.back
    if not applicant.launch.is_open:
        return waits.formation_timeout, (
            f"not all workers came within {waits.formation_timeout:.0f} s (--formation-timeout); the log of one that "
            "is missing says why"
        )
    return math.inf if back is None else back.seconds_left(), (
        f"it was left out, and not admitted again within {waits.wait_timeout:.0f} s (--wait-timeout)"
    )


def form_ahead(world: World, own: Endpoints) -> FormedGroup:
    """Form the process group of `world` beside the present one. Blocks until all members do. Raises FormationFailed."""
    try:
        found = own.server.group_store(world, form_timeout(world.world_size))
    except (RuntimeError, OSError) as error:  # torch raises RuntimeErrors, as when rank 0 does not greet in time
        raise FormationFailed(f"the store of the next world's group: {first_line(error)}") from error
    formed = form(PrefixStore(f"ahead/{world.key}", found), world.rank, world.world_size, own.host)
    own.sockets.spare(formed.sockets)
    return formed


def answering(members: tuple[Member, ...], peer_timeout: float = math.inf) -> tuple[Member, ...]:
    """Return those that answer a probe. Blocks the watcher thread, which cannot ping meanwhile, so it must be short."""
    found = probe_all([member.address for member in members], min(PROBE_SECONDS, peer_timeout / 8))
    return tuple(member for member, answer in zip(members, found, strict=True) if answer is Probe.ACCEPTED)


def size_of(launch: Launch, waits: Waits) -> Size:
    settings = launch.c10d or launch.etcd
    if settings is None:
        return Size(1, launch.num_nodes, 0.0, fixed=launch.world_size)
    join_timeout, silence = math.inf, waits.wait_timeout
    if launch.c10d is not None:
        join_timeout = launch.c10d.join_timeout
    elif launch.etcd is not None:  # by then the entries of such a job in etcd have expired
        silence = launch.etcd.grace
    return Size(settings.min_nodes, settings.max_nodes, settings.last_call, join_timeout, silence=silence)


def launcher_of(launch: Launch, waits: Waits, stop: StopSignal) -> Launcher:
    """Return the finder of a fixed world's job. Blocks while MASTER_ADDR's store is awaited."""
    start = f"step-{launch.step}/restart-{launch.restart_count}"
    if launch.world_size == 1 or launch.master is None:
        return Launcher(None, rank=launch.rank, start=start)
    host, port = launch.master
    is_server = launch.rank == 0 and not launch.is_agent_store
    store = store_of_launcher(host, port, waits.formation_timeout, stop, is_server=is_server)
    return Launcher(store, rank=launch.rank, start=start)


def store_of_launcher(host: str, port: int, seconds: float, stop: StopSignal, *, is_server: bool) -> Store:
    """Return the store at MASTER_ADDR, which an agent or rank 0 serves. Blocks until it answers.

    Raises:
        StoreUnreachable: it has not answered for `seconds`.
    """
    deadline = time.monotonic() + seconds
    if not is_server:
        wait_for_listener(host, port, deadline, stop)
    timeout = timedelta(seconds=seconds)
    # On a thread: the constructor greets its server without a deadline.
    making = answer_of(
        lambda: TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=timeout), "connect"
    )
    while not wait([making], 0.1).done:
        stop.check()
        if time.monotonic() > deadline + 5.0:
            raise StoreUnreachable(
                f"something at {host}:{port} accepts connections and does not answer like a store; {SET_MASTER}"
            )
    try:
        store = making.result()
    except RuntimeError as error:
        verb = "serve" if is_server else "reach"
        raise StoreUnreachable(
            f"cannot {verb} the store at {host}:{port}: {first_line(error)}; {SET_MASTER}"
        ) from error
    if is_server:  # a forked DataLoader process would keep the port in use after this process's death
        os.register_at_fork(after_in_child=lambda: close_sockets_at(port))
    return store


def wait_for_listener(host: str, port: int, deadline: float, stop: StopSignal) -> None:
    """Wait until something accepts connections at the port. Without a listener TCPStore goes on trying after its own
    deadline, on a thread that aborts the process if it gives up while Python exits."""
    while True:
        stop.check()
        try:
            with socket.create_connection((host, port), timeout=1.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StoreUnreachable(
                    f"cannot reach the store at {host}:{port}: {error.strerror or error}; rank 0 may say why it is not "
                    f"there; or {SET_MASTER}"
                ) from error
        time.sleep(0.2)


def local_address(launch: Launch, warn: Callable[[str], None]) -> str:
    """Return the IP address by which other members reach this worker. Blocks and warns as `address_towards`."""
    if launch.local_address is not None:
        return launch.local_address
    settings = launch.c10d or launch.etcd
    if settings is not None:
        return address_towards([*map(split_endpoint, settings.endpoints)], warn)
    if launch.master is not None and launch.world_size > 1:
        return address_towards([launch.master], warn)
    return "127.0.0.1"


def read_members(run_dir: Path | None, run_id: str) -> list[Address]:
    """Return the stores of members that the run directory lists; all of them may be gone."""
    told = None if run_dir is None else read_json(run_dir / MEMBERS_FILE)
    if told is None or told.get("run_id") != run_id:
        return []
    try:
        return [(str(host), int(port)) for host, port in told["stores"]]
    except (ValueError, KeyError, TypeError):
        return []


def describe_members(world: World, run_id: str) -> bytes:
    """Return the content of MEMBERS_FILE, which `read_members` reads."""
    return json.dumps({"run_id": run_id, "stores": stores_by_node(world)[:MOST_NAMED]}).encode() + b"\n"
