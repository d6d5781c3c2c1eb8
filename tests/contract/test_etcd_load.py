"""Hundreds of members form a generation in a real etcd cluster: what each of them asks for must not grow with them."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elastic_train.protocol.agreement import Agreement, Decided, Liveness, Presence
from elastic_train.protocol.job import Admitted
from elastic_train.protocol.join_queue import Waiting
from elastic_train.rendezvous.etcd_members import EtcdJob
from elastic_train.world import Member
from tests.etcd_cluster import OwnEtcd, etcd_running

PATIENCE = 500.0
LOOK_SECONDS = 1 / 256
"""between two looks of a member, for each member, since all share this process: if each looked at every change of each
other, it would take the cube of their number"""


@dataclass
class Simulated:
    """What one member asked for, and got."""

    num_requests: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    world: tuple[str, ...] = ()


def live(cluster: OwnEtcd, number: int, count: int, everybody: threading.Barrier, told: Simulated) -> None:
    """One member: opens the job, stands in the join queue, is in the first world, and agrees with all on the next."""
    everybody.wait(PATIENCE)
    started = time.monotonic()
    job = EtcdJob(
        replace(cluster.settings(), min_nodes=count, max_nodes=count, grace=PATIENCE),
        f"load-{count}",
        uid=f"uid{number}",
        peer_timeout=PATIENCE,  # of which its place in the queue has a lease, that no watcher renews here
        max_world_size=None,
        check=lambda: None,
        log=print,
        refused=lambda _members: [],
        draw_uid=lambda: secrets.token_hex(6),
    )
    me = Member(
        host=f"node{number}", local_rank=0, pid=number, agent_pid=number, address=("10.0.0.1", 1), directory_id="d",
        backend="gloo", max_generation=None, agreement={"flags": "x" * 800}, store=("10.0.0.1", 2), uid=f"uid{number}",
    )  # fmt: skip
    while not isinstance(place := job.look_from_queue(Waiting(me, 1)), Admitted):
        time.sleep(count * LOOK_SECONDS)
    job.leave_queue()
    world = place.world
    job.enter(world, place.facts, None)
    agreement = Agreement(
        job,
        world,
        Presence(world.generation),
        status=lambda _rank: Liveness.ALIVE,
        is_heard=lambda _rank: True,
        is_gone=lambda _rank: False,
        newcomers=tuple,
        facts={},
        draw_uid=lambda: secrets.token_hex(6),
    )
    while not isinstance(found := agreement.look(), Decided):
        time.sleep(count * LOOK_SECONDS)
    following = found.decision.world_for(me.uid, world, None)
    assert following is not None
    told.seconds = time.monotonic() - started
    told.num_requests, told.num_bytes = job.connections.num_requests, job.connections.num_bytes
    told.world = tuple(member.name for member in following.members)
    everybody.wait(PATIENCE)
    job.close(me)


def form(cluster: OwnEtcd, count: int) -> list[Simulated]:
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
