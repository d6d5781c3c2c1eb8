"""The rules of `elastic-train check`: a finding for every bad value, and none for good ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_train.elastic.membership import versions
from elastic_train.tools.check import node_rules, world_rules
from elastic_train.tools.check.advice import Finding, Level
from elastic_train.tools.check.check_command import RULES, describe, is_passed, judge
from elastic_train.tools.check.facts import (
    Gathered,
    Gpu,
    Measured,
    Problem,
    RendezvousFacts,
    SharedFacts,
    Wanted,
    WorkerFacts,
)
from elastic_train.world import from_json, to_json

GB = 10**9
NOW = 1.8e9
"""Unix seconds"""
VERSIONS = versions() | {"python": "3.11", "torch": "2.15.0+cu132", "torchvision": "0.29.2"}
GPU = Gpu(uuid="GPU-0", name="H100", free_bytes=79 * GB, total_bytes=80 * GB)
MEASURED = Measured(bytes=GB, seconds=2.0, last_step=100, moments_error=None)


def worker(rank: int) -> WorkerFacts:
    """A good one, on a machine of its own."""
    return WorkerFacts(
        host=f"node{rank}",
        machine=f"boot-{rank}",
        pid=100,
        agent_pid=99,
        local_rank=0,
        local_world_size=1,
        address=f"10.0.0.{rank + 1}",
        versions=dict(VERSIONS),
        has_hook=True,
        backend="gloo",
        interface="eth0",
        interfaces=("lo=127.0.0.1", f"eth0=10.0.0.{rank + 1}"),
        wanted_interfaces={},
        host_addresses=(f"10.0.0.{rank + 1}",),
        num_gpus=0,
        num_gpu_devices=0,
        gpu=None,
        device_error=None,
        snapshot_dir="/runs/a/snapshots",
        snapshot_dir_error=None,
        snapshot_dir_free=100 * GB,
        shm_free=50 * GB,
        state_error=None,
        trained="--task mine:Mine",
        measured=MEASURED,
        num_loaders=0,
        keep_snapshots=3,
    )


def shared(rank: int, size: int) -> SharedFacts:
    return SharedFacts(
        sees_directory_of=tuple(range(size)),
        clock=NOW + 0.001 * rank,
        all_reduce_seconds=0.01,
    )


def job(size: int = 3, **wanted: object) -> Gathered:
    return Gathered(
        Wanted(**{"nodes": size, "is_c10d": True, **wanted}),  # type: ignore[arg-type]
        tuple(worker(rank) for rank in range(size)),
        tuple(shared(rank, size) for rank in range(size)),
    )


def with_worker(gathered: Gathered, rank: int, **changes: object) -> Gathered:
    workers = list(gathered.workers)
    workers[rank] = replace(workers[rank], **changes)  # type: ignore[arg-type]
    return replace(gathered, workers=tuple(workers))


def with_all(gathered: Gathered, **changes: object) -> Gathered:
    for rank in range(len(gathered.workers)):
        gathered = with_worker(gathered, rank, **changes)
    return gathered


def with_shared(gathered: Gathered, rank: int, **changes: object) -> Gathered:
    found = list(gathered.shared)
    found[rank] = replace(found[rank], **changes)  # type: ignore[arg-type]
    return replace(gathered, shared=tuple(found))


def the_one(findings: list[Finding], level: Level) -> Finding:
    assert [finding.level for finding in findings] == [level], findings
    assert level is Level.FINE or (findings[0].why and findings[0].do)
    return findings[0]


def test_a_good_job_passes_with_a_word_from_every_rule() -> None:
    gathered = job()
    assert {finding.level for finding in judge(gathered)} == {Level.FINE}
    silent = {rule.__name__ for rule in RULES if not rule(gathered)}
    assert silent == {"store_is_usable", "state_can_be_built"}


def test_facts_survive_their_way_through_the_store() -> None:
    one = replace(worker(1), gpu=GPU, rendezvous=RendezvousFacts((Problem("a", "b"), Problem("c", "d"))))
    assert from_json(WorkerFacts, to_json(one)) == one
    assert from_json(WorkerFacts, to_json(worker(0))) == worker(0)
    assert from_json(SharedFacts, to_json(shared(0, 3))) == shared(0, 3)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["torchvision", *versions()])
def test_other_versions_break_it(name: str, rank: int) -> None:
    bad = with_worker(job(), rank, versions=VERSIONS | {name: "1.7.1"})
    found = the_one(world_rules.versions_are_equal(bad), Level.BREAKS)
    assert found.what.startswith(f"{name} is not the same everywhere")
    assert "1.7.1" in found.what
    assert VERSIONS[name] in found.what


def test_another_python_is_a_warning_and_a_version_that_only_one_has_is_found() -> None:
    other = with_worker(job(), 1, versions=VERSIONS | {"python": "3.12"})
    the_one(world_rules.versions_are_equal(other), Level.MATTERS)
    for rank in range(3):
        cuda = with_worker(job(), rank, versions=VERSIONS | {"cuda": "13.2"})
        assert "cuda" in the_one(world_rules.versions_are_equal(cuda), Level.MATTERS).what
        nccl = with_worker(job(), rank, versions=VERSIONS | {"nccl": "2.29"})
        the_one(world_rules.versions_are_equal(nccl), Level.FINE)  # the others do not use it
        two = with_worker(nccl, (rank + 1) % 3, versions=VERSIONS | {"nccl": "2.30"})
        assert "nccl" in the_one(world_rules.versions_are_equal(two), Level.BREAKS).what


@pytest.mark.parametrize(
    ("size", "nodes", "text"),
    [(1, 4, "worlds of one"), (3, 4, "missing"), (4, 3, "4 workers on 4 nodes, and 3 nodes were asked for")],
)
def test_a_world_that_was_not_asked_for(size: int, nodes: int, text: str) -> None:
    found = the_one(world_rules.world_is_the_one_asked_for(job(size, nodes=nodes)), Level.BREAKS)
    assert text in found.what + found.why


def test_fewer_nodes_than_torchrun_allows_are_a_warning_where_nobody_said_how_many() -> None:
    found = the_one(world_rules.world_is_the_one_asked_for(job(1, nodes=None, max_nodes=4)), Level.MATTERS)
    assert "--nnodes allows 4" in found.what
    the_one(world_rules.world_is_the_one_asked_for(job(4, nodes=None, max_nodes=4)), Level.FINE)


def test_no_world_at_all() -> None:
    alone = Gathered(Wanted(nodes=2), (worker(0),), world_error="rank 1 did not come")
    found = the_one(world_rules.world_is_the_one_asked_for(alone), Level.BREAKS)
    assert "rank 1 did not come" in found.what
    assert not is_passed(judge(alone))
    without = with_worker(alone, 0, rendezvous=RendezvousFacts(is_usable=False))
    assert "rendezvous" in the_one(world_rules.world_is_the_one_asked_for(without), Level.BREAKS).do


def test_a_node_that_is_looked_at_while_the_job_trains_is_looked_at_alone() -> None:
    """Its check is no job of its own there: the endpoint is the job's."""
    alone = Gathered(Wanted(nodes=2), (worker(0),), world_error="run id 'none' has h:1, and this is 'none/check'")
    alone = with_worker(alone, 0, rendezvous=RendezvousFacts(is_running=True))
    (found,) = world_rules.world_is_the_one_asked_for(alone)
    assert (found.level, "looked at alone" in found.what) == (Level.SKIPPED, True)
    assert is_passed(judge(alone))


def test_workers_of_one_node_are_one_node() -> None:
    gathered = job(2, nodes=1)
    gathered = with_worker(gathered, 1, host="node0", machine="boot-0", local_rank=1)
    assert gathered.nodes == {"node0": [0, 1]}
    the_one(world_rules.world_is_the_one_asked_for(gathered), Level.FINE)


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.10.1", Level.BREAKS), ("2.11.0", Level.FINE), ("2.15.0+cu132", Level.FINE), ("2.16.0", Level.MATTERS)],
)
def test_torch_versions(version: str, level: Level) -> None:
    the_one(world_rules.torch_is_known(with_all(job(), versions=VERSIONS | {"torch": version})), level)


def test_a_node_without_the_hook_matters_under_c10d_alone() -> None:
    found = the_one(world_rules.torch_is_known(with_worker(job(), 2, has_hook=False)), Level.MATTERS)
    assert "node2" in found.what
    the_one(world_rules.torch_is_known(with_worker(job(is_c10d=False), 2, has_hook=False)), Level.FINE)


def test_one_alone_has_compared_nothing() -> None:
    for rule in (world_rules.everybody_reaches_everybody, node_rules.snapshot_directory_is_one):
        assert "alone" in the_one(rule(job(1)), Level.FINE).what
        assert "alone" not in the_one(rule(job(2)), Level.FINE).what


def test_a_store_that_cannot_be_used_and_one_with_a_member_away() -> None:
    away = with_worker(job(), 1, rendezvous=RendezvousFacts((Problem("etcd at b:2379 does not answer", "start it"),)))
    found = the_one(world_rules.store_is_usable(away), Level.MATTERS)
    assert ("node1" in found.what, found.do) == (True, "start it")
    gone = with_worker(job(), 1, rendezvous=RendezvousFacts((Problem("no quorum", "see"),), is_usable=False))
    the_one(world_rules.store_is_usable(gone), Level.BREAKS)
    everywhere = with_all(job(), rendezvous=RendezvousFacts((Problem("wrong ca=", "another"),), is_usable=False))
    assert "from node0, node1, node2: wrong ca=" in the_one(world_rules.store_is_usable(everywhere), Level.BREAKS).what


def test_names() -> None:
    twins = with_worker(job(), 1, host="node0")
    assert "2 machines call themselves node0" in the_one(world_rules.names_resolve(twins), Level.BREAKS).what
    nameless = with_worker(job(), 1, host_addresses=())
    assert "node1" in the_one(world_rules.names_resolve(nameless), Level.MATTERS).what


def test_addresses() -> None:
    loopback = with_worker(job(), 1, address="127.0.0.1")
    assert "node1" in the_one(world_rules.addresses_are_usable(loopback), Level.BREAKS).what
    mixed = with_worker(job(), 1, address="fd00::1")
    assert "node1 has an IPv6 address" in the_one(world_rules.addresses_are_usable(mixed), Level.BREAKS).what
    one_machine = with_all(job(), address="127.0.0.1", machine="boot-0")
    the_one(world_rules.addresses_are_usable(one_machine), Level.FINE)


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", Level.BREAKS),
        ("GLOO_SOCKET_IFNAME", "eth", Level.BREAKS),
        ("GLOO_SOCKET_IFNAME", "eth0", Level.FINE),
        ("NCCL_SOCKET_IFNAME", "eth", Level.FINE),
        ("NCCL_SOCKET_IFNAME", "=eth", Level.BREAKS),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", Level.FINE),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", Level.BREAKS),
    ],
)
def test_an_interface_that_is_not_there(variable: str, value: str, level: Level) -> None:
    bad = with_worker(job(), 1, wanted_interfaces={variable: value})
    the_one(world_rules.addresses_are_usable(bad), level)


def test_the_interfaces_are_told() -> None:
    (gloo,) = world_rules.addresses_are_usable(job())
    assert gloo.what == "interface that gloo takes: eth0"
    names = ("lo=127.0.0.1", "docker0=172.17.0.1", "eth0=10.0.0.1", "ib0=10.1.0.1")
    _, nccl = world_rules.addresses_are_usable(with_all(job(), backend="cpu:gloo,cuda:nccl", interfaces=names))
    assert nccl.what.endswith(": eth0 or ib0")


def test_who_cannot_reach_whom() -> None:
    bad = with_shared(job(), 1, unreachable=(2,))
    assert "node1 to node2" in the_one(world_rules.everybody_reaches_everybody(bad), Level.BREAKS).what
    broken = with_shared(job(), 0, group_error="Connection closed by peer")
    assert "closed by peer" in the_one(world_rules.everybody_reaches_everybody(broken), Level.BREAKS).what


@pytest.mark.parametrize(("offset", "level"), [(0.2, Level.FINE), (3.0, Level.MATTERS), (-3600.0, Level.MATTERS)])
def test_clocks(offset: float, level: Level) -> None:
    found = the_one(world_rules.clocks_agree(with_shared(job(), 2, clock=NOW + offset)), level)
    if level is not Level.FINE:
        last, first = ("node2", "node0") if offset > 0 else ("node1", "node2")
        assert f"clock of {last} is {abs(offset):.1f} s ahead of that of {first}" in found.what


def test_the_clocks_of_a_world_that_was_not_measured() -> None:
    unknown = with_shared(with_shared(job(), 0, clock=None), 1, clock=None)
    assert world_rules.clocks_agree(unknown) == []


def gpu_job(*uuids: str, backend: str = "cpu:gloo,cuda:nccl") -> Gathered:
    gathered = with_all(job(len(uuids)), backend=backend, num_gpus=1, num_gpu_devices=1, machine="boot-0")
    for rank, uuid in enumerate(uuids):
        gathered = with_worker(gathered, rank, gpu=replace(GPU, uuid=uuid))
    return gathered


def test_gpus() -> None:
    rule = node_rules.gpus_are_visible_and_not_shared
    assert "2 x H100" in the_one(rule(gpu_job("a", "b")), Level.FINE).what
    assert "ranks 0, 1" in the_one(rule(gpu_job("a", "a")), Level.MATTERS).what
    the_one(rule(with_worker(gpu_job("a", "a"), 1, machine="boot-1")), Level.FINE)
    used = with_worker(gpu_job("a", "b"), 1, gpu=replace(GPU, uuid="b", free_bytes=10 * GB))
    assert "somebody else" in the_one(rule(used), Level.MATTERS).why
    blind = with_worker(job(), 1, num_gpu_devices=8)
    assert "node1" in the_one(rule(blind), Level.MATTERS).what
    asked = with_worker(blind, 1, wanted_device="cpu")
    assert "training is on the CPU" in the_one(rule(asked), Level.FINE).what
    mixed = with_worker(gpu_job("a", "b"), 1, gpu=None)
    assert "node1 on the CPU" in the_one(rule(mixed), Level.BREAKS).what
    the_one(rule(with_worker(job(), 0, device_error="--device cuda: none here")), Level.BREAKS)
    alone = with_worker(replace(gpu_job("a"), wanted=Wanted(workers=2)), 0, num_gpus=2)
    the_one(rule(alone), Level.FINE)
    assert "2 workers, and torch sees 1 GPU" in the_one(rule(with_worker(alone, 0, num_gpus=1)), Level.BREAKS).what


def test_a_task_that_cannot_be_built() -> None:
    bad = with_worker(job(), 1, state_error="data/MNIST: not found", measured=None)
    assert "node1: data/MNIST" in the_one(node_rules.state_can_be_built(bad), Level.BREAKS).what


def test_the_snapshot_directory() -> None:
    rule = node_rules.snapshot_directory_is_one
    unwritable = with_worker(job(), 1, snapshot_dir_error="Permission denied")
    found = the_one(rule(unwritable), Level.BREAKS)
    assert "node1 cannot write" in found.what
    assert "right to write" in found.do
    full = with_worker(job(), 1, snapshot_dir_error="cannot be written: [Errno 28] No space left on device")
    assert the_one(rule(full), Level.BREAKS).do.startswith("free space there, or")
    apart = with_shared(job(), 2, sees_directory_of=(2,))
    found = the_one(rule(apart), Level.BREAKS)
    assert "node0, node1: /runs/a/snapshots; node2: /runs/a/snapshots" in found.what
    on_purpose = replace(apart, wanted=replace(apart.wanted, wants_shared_directory=False))
    the_one(rule(on_purpose), Level.FINE)
    each_its_own = job(2)
    for rank in range(2):
        each_its_own = with_shared(each_its_own, rank, sees_directory_of=(rank,))
    the_one(rule(each_its_own), Level.BREAKS)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"snapshot_dir_free": 1.5 * GB}, Level.BREAKS),
        ({"snapshot_dir_free": 3 * GB}, Level.MATTERS),
        ({"snapshot_dir_free": 4 * GB}, Level.FINE),
        ({"shm_free": 2 * GB, "num_loaders": 16}, Level.MATTERS),
        ({"shm_free": 2 * GB, "num_loaders": 2}, Level.FINE),
    ],
)
def test_room(changes: dict[str, object], level: Level) -> None:
    found = the_one(node_rules.there_is_room(with_worker(job(), 1, **changes)), level)
    assert level is not Level.FINE or "a snapshot of what --task mine:Mine trains takes 1.0 GB" in found.what


@pytest.mark.parametrize(
    ("seconds", "grace", "level"),
    [(2.0, 30.0, Level.FINE), (14.0, 30.0, Level.MATTERS), (31.0, 30.0, Level.BREAKS), (31.0, 300.0, Level.FINE)],
)
def test_the_grace_period(seconds: float, grace: float, level: Level) -> None:
    quick, slow = (replace(MEASURED, seconds=one) for one in (1.0, seconds))
    gathered = with_worker(with_all(job(grace_seconds=grace), measured=quick), 1, measured=slow)
    assert "node1" in the_one(node_rules.grace_is_long_enough(gathered), level).what


@pytest.mark.parametrize(
    ("seconds", "notice", "level"),
    [
        (12.0, 30.0, Level.FINE),
        (14.0, 30.0, Level.MATTERS),
        (31.0, 30.0, Level.BREAKS),
        (31.0, 120.0, Level.FINE),
        (31.0, None, None),
    ],
)
def test_the_time_that_a_notice_leaves(seconds: float, notice: float | None, level: Level | None) -> None:
    quick, slow = (replace(MEASURED, seconds=one) for one in (1.0, seconds))
    gathered = with_worker(with_all(job(grace_seconds=300.0), measured=quick), 1, measured=slow)
    noticed = with_worker(gathered, 2, notice_seconds=notice, notices_of="gcp")
    grace, *found = node_rules.grace_is_long_enough(noticed)
    assert grace.level is Level.FINE
    if level is None:
        assert found == []
    else:
        told = the_one(found, level)
        assert f"takes {seconds:.1f} s on node1; a notice of gcp leaves {notice:.0f} s" in told.what


@pytest.mark.parametrize(("size", "level"), [(GB, Level.FINE), (2**20, Level.BREAKS)])
def test_all_nodes_send_their_shares_of_a_large_state_to_a_bucket(size: int, level: Level) -> None:
    measured = replace(MEASURED, bytes=size, seconds=36.0)
    gathered = with_all(job(grace_seconds=300.0), measured=measured, snapshot_dir="s3://b/run")
    noticed = with_worker(gathered, 2, notice_seconds=30.0, notices_of="gcp")
    _, *found = node_rules.grace_is_long_enough(noticed)
    told = the_one(found, level)
    assert ("12.0 s by 3 nodes together" in told.what) is (level is Level.FINE)


def test_moments_that_could_not_be_measured_are_named_with_the_reason() -> None:
    """A snapshot is larger than what was measured."""
    without = replace(MEASURED, moments_error="RuntimeError: sparse ones only")
    fine, skipped = node_rules.there_is_room(with_worker(job(), 0, measured=without))
    assert (fine.level, skipped.level) == (Level.FINE, Level.SKIPPED)
    assert skipped.what == (
        "the optimizer's moments, which make snapshots larger and slower than shown here: its step with gradients of "
        "zeros failed (RuntimeError: sparse ones only)"
    )


def test_what_could_not_be_measured_is_skipped_by_name() -> None:
    unknown = with_all(job(), measured=None)
    rules: list[Callable[[Gathered], list[Finding]]] = [node_rules.there_is_room, node_rules.grace_is_long_enough]
    for rule in rules:
        assert [finding.level for finding in rule(unknown)] == [Level.SKIPPED]


def test_the_worst_is_told_last_with_its_reason_and_what_to_do() -> None:
    bad = with_worker(with_worker(job(), 1, host_addresses=()), 2, versions=VERSIONS | {"torch": "2.11.0"})
    lines = describe(judge(bad))
    levels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert levels[-3:] == ["warning", "BREAKS", "1"]
    assert lines[-1] == "1 thing would break the job, 1 warning"
    assert [line.split()[0] for line in lines[-3:-1]] == ["why:", "do:"]
