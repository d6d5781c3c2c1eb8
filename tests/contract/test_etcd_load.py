"""Hundreds of members form a generation in a real etcd cluster: what each of them asks for must not grow with them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elastic_train.drills.etcd_cluster import EtcdCluster
from elastic_train.etcd import Connections, Etcd
from elastic_train.etcd_job import open_job, take_away
from elastic_train.etcd_store import EtcdStore, Mirror
from elastic_train.lobby import Admission, Waiting, ready_nodes
from elastic_train.meeting import Sight, meet, world_of
from elastic_train.world import Member
from tests.etcd_cluster import etcd_running

PATIENCE = 500.0


@dataclass
class Simulated:
    """What one member asked for, and got."""

    num_requests: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    world: tuple[str, ...] = ()


def live(cluster: EtcdCluster, number: int, count: int, everybody: threading.Barrier, told: Simulated) -> None:
    """One member: opens the job, waits in the lobby, is taken into the first world, meets the others."""
    connections = Connections(cluster.settings())
    etcd = Etcd(connections, deadline=PATIENCE, attempt_seconds=60.0)
    everybody.wait(PATIENCE)
    started = time.monotonic()
    job = open_job(etcd, cluster.settings(), f"load-{count}", peer_timeout=10, check=lambda: None, say=print)
    mirror = Mirror(etcd, f"{job.prefix}/")
    store = EtcdStore(etcd, lease=job.lease, guard=job.guard, mirror=mirror)
    me = Member(
        host=f"node{number}", local_rank=0, pid=number, agent_pid=number, address=("10.0.0.1", 1), directory_id="d",
        backend="gloo", max_generation=None, agreement={"flags": "x" * 800}, group_store=("10.0.0.1", 2),
    )  # fmt: skip
    lobby, key = f"{job.prefix}/lobby/", f"{job.prefix}/start"
    lease = etcd.grant(600)
    store.under(lease).put(f"{lobby}node{number}/0", Waiting(me, f"node{number}", 1).to_json())
    while (text := store.get(f"{key}/admit")) is None:
        waiting = mirror.below(lobby)
        if len(waiting) == count and min(waiting) == f"{lobby}node{number}/0":  # the others leave it to the first
            nodes = ready_nodes([Waiting.from_json(one) for _, one in sorted(waiting.items())], ())
            store.create(f"{key}/admit", Admission((), tuple(node[0] for node in nodes)).to_json())
        mirror.wait_for_change(1.0)
    names = [member.name for member in Admission.from_json(text).everyone]
    joined: dict[int, Member] = {}
    rank = names.index(me.name)
    meeting = meet(store, key, rank, count, replace(me), lambda _rank: Sight.ALIVE, lambda _first, _other: True, joined)
    while True:
        try:
            if next(meeting):
                mirror.wait_for_change(1.0)
        except StopIteration as end:
            decision, _ = end.value
            break
    world = world_of(decision, joined, rank)
    assert world is not None
    told.seconds = time.monotonic() - started
    told.num_requests, told.num_bytes = connections.num_requests, connections.num_bytes
    told.world = tuple(member.name for member in world.members)
    everybody.wait(PATIENCE)
    etcd.revoke(lease)
    mirror.close()
    if rank == 0:
        take_away(etcd, job)
    connections.close()


def form(cluster: EtcdCluster, count: int) -> list[Simulated]:
    everybody = threading.Barrier(count)
    members = [Simulated() for _ in range(count)]
    threads = [
        threading.Thread(target=live, args=(cluster, number, count, everybody, told), daemon=True)
        for number, told in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert all(told.world == members[0].world for told in members)
    assert len(members[0].world) == count
    return members


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(path: Path, small: int, large: int) -> None:
    """Form worlds of two sizes; print what a member needed, and judge how that grew."""
    found = {}
    with etcd_running(path, 3) as cluster:
        for count in (small, large):
            members = form(cluster, count)
            found[count] = (mean([m.num_requests for m in members]), mean([m.num_bytes for m in members]))
            print(
                f"{count} members: {max(m.seconds for m in members):.2f} s, {found[count][0]:.1f} requests and "
                f"{found[count][1] / 1024:.0f} KiB a member"
            )
        assert not cluster.keys()
    assert found[large][0] < 1.5 * found[small][0], "requests of a member do not grow"
    assert found[large][1] < 1.3 * large / small * found[small][1], "its bytes grow no faster than the world"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_member_asks_for_does_not_grow_with_the_world(tmp_path: Path) -> None:
    compare(tmp_path, 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_256_members_form_a_world(tmp_path: Path) -> None:
    compare(tmp_path, 16, 256)
