"""The checks that need several workers, in a world that is formed like the job's own."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.elastic.standing import standing_in
from elastic_train.errors import FormationFailed, first_line
from elastic_train.protocol.addresses import use_interface_of
from elastic_train.protocol.probes import Probe, probe
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import common_backend
from elastic_train.tools.check.facts import ALL_REDUCE_BYTES, SharedFacts, WorkerFacts
from elastic_train.tools.check.trial_place import TrialPlace
from elastic_train.training.collectives import barrier
from elastic_train.world import Member, World, to_json, value_or_none

PROBE_SECONDS = 3.0
MOST_PROBES = 64
"""per worker: in a large world each probes the next ranks, so that each rank is probed by this many"""
EXCHANGE_SECONDS = 120.0

Facts = TypeVar("Facts", WorkerFacts, SharedFacts)


def meet_others(membership: Membership, launch: Launch, mine: WorkerFacts) -> World:
    """Form the world that the job would begin with. Differences between workers are reported, none is refused for them.

    Raises:
        FormationFailed, LeftOut, StoreUnreachable, StoreRefused: it does not form.
    """
    use_interface_of(mine.address)
    return membership.first_world(
        Member(
            host=mine.host,
            local_rank=mine.local_rank,
            pid=mine.pid,
            agent_pid=mine.agent_pid,
            address=(mine.address, 0),
            directory_id="",
            backend=mine.backend,
            max_generation=None,
            gpu=None if mine.gpu is None else mine.gpu.uuid,
            node_id=launch.node_id,
        )
    )


def gather(membership: Membership, world: World, name: str, value: str, *, waits: bool = True) -> list[str]:
    """Gather every rank's `value`, by rank, through the store: this works without a process group. Every rank calls it;
    a rank that does not wait gets nothing.

    Raises:
        FormationFailed: a worker has ended, or did not come in time.
    """
    store, key = membership.job.world_store(world), f"{world.key}/check/{name}"
    store.put(f"{key}/{world.rank}", value)
    keys = [f"{key}/{rank}" for rank in range(len(world.members))] if waits else []
    deadline, next_look = time.monotonic() + EXCHANGE_SECONDS, time.monotonic() + 1.0
    while True:
        values = store.get_many(keys)
        missing = [rank for rank, found in enumerate(values) if found is None]
        if not missing:
            return [found for found in values if found is not None]
        now = time.monotonic()
        if now > next_look:
            next_look = now + 1.0
            for rank in missing:
                if probe(world.members[rank].address) is Probe.REFUSED and store.get(keys[rank]) is None:
                    raise FormationFailed(f"{world.members[rank].name} (rank {rank}) has ended; its log says why")
        if now > deadline:
            names = ", ".join(world.members[rank].name for rank in missing)
            raise FormationFailed(f"{names} did not come to the check's step {name!r} in {EXCHANGE_SECONDS:.0f} s")
        time.sleep(0.02)


def gather_facts(membership: Membership, world: World, name: str, mine: Facts) -> list[Facts]:
    """Gather every rank's facts, by rank. Every rank calls it. Raises: FormationFailed: as `gather`; or a worker is of
    another build of elastic_train, whose facts are others."""
    found = []
    for member, text in zip(world.members, gather(membership, world, name, to_json(mine)), strict=True):
        if (facts := value_or_none(type(mine), json.loads(text))) is None:
            raise FormationFailed(
                f"what {member.name} says of itself cannot be read here: give all nodes the same build of elastic_train"
            )
        found.append(facts)
    return found


def look_together(
    membership: Membership, world: World, mine: WorkerFacts, directory: TrialPlace
) -> tuple[list[WorkerFacts], list[SharedFacts]]:
    """Gather the facts of all workers, by rank. Every rank calls it; blocks for some seconds.

    Raises:
        FormationFailed: a worker has ended meanwhile.
    """
    token = f"{world.generation}-{world.members[0].pid}"
    directory.leave_mark(token, world.rank)
    if directory.error is not None:
        mine = replace(mine, snapshot_dir_error=directory.error)
    workers = gather_facts(membership, world, "here", mine)
    ranks = range(len(world.members))
    shared = SharedFacts(
        unreachable=tuple(rank for rank in probed_by(world.rank, len(world.members)) if not is_reachable(world, rank)),
        sees_directory_of=tuple(rank for rank in ranks if directory.sees_mark(token, rank)),
    )
    try:
        shared = measure(membership, world, shared)
    except Exception as error:
        if not is_communication_error(error):
            raise
        shared = replace(shared, group_error=first_line(error))
    found = gather_facts(membership, world, "shared", shared)
    gather(membership, world, "through", "", waits=world.rank == 0)  # rank 0 may host the store, and ends last
    return workers, found


def probed_by(rank: int, size: int) -> list[int]:
    """The ranks that this rank tries to reach."""
    return sorted((rank + distance) % size for distance in range(1, min(size, MOST_PROBES + 1)))


def is_reachable(world: World, rank: int) -> bool:
    return any(probe(world.members[rank].address, PROBE_SECONDS) is Probe.ACCEPTED for _ in range(2))


def measure(membership: Membership, world: World, shared: SharedFacts) -> SharedFacts:
    """Measure clocks and an all-reduce, in a process group formed as for training.

    Raises:
        FormationFailed, or RuntimeError of the communication library.
    """
    backend = common_backend(world.workers)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    with standing_in(membership, world, device):
        # The line with which DDP scripts traditionally begin; each worker prints its own.
        told = f"rank = {dist.get_rank()}, world_size = {dist.get_world_size()}, backend = {backend}"
        print(f"[{os.getpid()}] {told}", flush=True)
        seconds = measure_all_reduce(world, device)
        barrier()
        return replace(shared, all_reduce_seconds=seconds, clock=time.time())


def measure_all_reduce(world: World, device: torch.device) -> float:
    """Return the seconds of an all-reduce over all workers, the best of three: the first one also connects."""
    data = torch.empty(ALL_REDUCE_BYTES // 4, device=device)
    found = []
    for _ in range(3):
        data.fill_(1)  # repeated sums of sums soon exceed the exact integers of float32
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
        if float(data[-1]) != world.world_size:
            raise FormationFailed("an all-reduce gave a wrong sum: do not train on these machines")
    return min(found)
