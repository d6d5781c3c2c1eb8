"""`--rdzv-backend=etcd3 -m elastic_train`: deaths of nodes and etcd members, and joins without a restart."""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from elastic_train.tools.drills.etcd_cluster import EtcdCluster
from tests.certificates import make_tls
from tests.etcd_cluster import etcd_running, fence_in_trainer, frozen, replace_data
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_lines,
    events,
    last_step,
    newest_snapshot,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import BATCH, ENDLESS, LENGTH, check_run, start_world

PATIENCE = 300.0
"""seconds for the start of a Python process with torch on a busy machine"""
pytestmark = [pytest.mark.timeout(1200), pytest.mark.parametrize("cluster", ["etcd3"], indirect=True)]


def etcd_of(cluster: Cluster) -> EtcdCluster:
    assert cluster.etcd is not None
    return cluster.etcd


def wait_for_world(cluster: Cluster, generation: int, size: int) -> None:
    wait_until(lambda: (generation, size) in worlds(cluster.run_dir), f"world {generation} of {size}", PATIENCE)


def outages(cluster: Cluster) -> dict[int, float]:
    """By generation, the seconds between the last step of the world before and the first of this one."""
    steps = events(cluster.run_dir, "step")
    found = {}
    for generation, _ in worlds(cluster.run_dir)[1:]:
        before = [e["time"] for e in steps if e["generation"] < generation]
        after = [e["time"] for e in steps if e["generation"] == generation]
        if before and after:
            found[generation] = min(after) - max(before)
    return found


def pids_that_trained(cluster: Cluster) -> set[int]:
    return {int(event["pid"]) for event in events(cluster.run_dir, "start")}


def stop_and_check(cluster: Cluster, nodes: list[Node]) -> None:
    """Stop all nodes at once; what they trained must be whole, and etcd must be empty."""
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    done = last_step(cluster.run_dir)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=done)
    check_steps(cluster.run_dir, done)
    found, _ = newest_snapshot(cluster.run_dir)
    assert found.step == done
    assert etcd_of(cluster).keys() == [], "the last one to leave removes everything"


def test_a_node_joins_and_the_first_one_dies(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, steps=1_000_000, nnodes="2:3")
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000")
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 3, "world of 3", PATIENCE)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20, PATIENCE)
    nodes[0].kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2", PATIENCE)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20, PATIENCE)
    stop_and_check(cluster, nodes[1:])
    changes = [e["cause"] for e in events(cluster.run_dir, "world") if e["rank"] == 0 and e["world_size"] != 3]
    assert changes[-1] == "peer_lost"
    newcomer = [e["source"] for e in events(cluster.run_dir, "restore") if e["generation"] > 0]
    assert newcomer == ["peer"], "the state came from those who trained"
    assert len(pids_that_trained(cluster)) == 3, "no process was replaced"
    print("outages:", {generation: round(seconds, 3) for generation, seconds in outages(cluster).items()})


@pytest.mark.slow
def test_thirty_joins_and_deaths(cluster: Cluster) -> None:
    """Joins and kills take turns, drawn by a seed; every one is taken in place."""
    chance = random.Random(5)
    steps = ("--max-steps", "1000000", "--eval-every", "1000000")
    nodes = start_world(cluster, 3, *steps, nnodes="3:5")
    kinds: dict[int, str] = {}
    for _ in range(30):
        generation = worlds(cluster.run_dir)[-1][0]
        if len(nodes) == 5 or (len(nodes) > 3 and chance.random() < 0.5):
            nodes.pop(chance.randrange(len(nodes))).kill()
            kinds[generation + 1] = "death"
        else:
            nodes += cluster.start(*ENDLESS, *steps, nnodes="3:5")
            kinds[generation + 1] = "join"
        wait_for_world(cluster, generation + 1, len(nodes))
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 15, PATIENCE)
    stop_and_check(cluster, nodes)
    seconds = outages(cluster)
    for kind in ("join", "death"):
        found = sorted(seconds[generation] for generation, what in kinds.items() if what == kind)
        print(f"{kind}: {len(found)}, median {statistics.median(found):.3f} s, worst {found[-1]:.3f} s")
    assert worlds(cluster.run_dir)[-1][0] == 30, "each change was one re-form"


@pytest.mark.slow
def test_etcd_members_die_and_come_back(cluster: Cluster) -> None:
    """One every 10 s, started again 5 s later, for two minutes; the leader among them."""
    etcd = etcd_of(cluster)
    nodes = start_world(cluster, 3, "--max-steps", "1000000", "--peer-timeout", "10")
    for turn in range(12):
        victim = etcd.leader() if turn % 3 == 0 else etcd.members[turn % 3]
        victim.kill()
        before = last_step(cluster.run_dir)
        time.sleep(5.0)  # the schedule that the promise names
        victim.start()
        etcd.wait_until_healthy()
        time.sleep(5.0)
        assert last_step(cluster.run_dir) > before, "training goes on"
    stop_and_check(cluster, nodes)
    assert len(worlds(cluster.run_dir)) == 1, "no re-form"


@pytest.mark.slow
def test_the_leader_freezes_and_a_member_loses_its_data(cluster: Cluster) -> None:
    """Training notices neither: no step is lost, no world re-forms, and the store still admits a newcomer."""
    etcd = etcd_of(cluster)
    nodes = start_world(cluster, 3, "--max-steps", "1000000", "--peer-timeout", "10", nnodes="3:4")
    leader = etcd.leader()
    other = next(member for member in etcd.members if member is not leader)
    with frozen(leader):
        wait_until(lambda: etcd.is_healthy(other), "new leader", PATIENCE)
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 100, PATIENCE)
    etcd.wait_until_healthy()
    for member in etcd.members[:2]:
        before = last_step(cluster.run_dir)
        replace_data(etcd, member)
        wait_for_step(cluster.run_dir, before + 50, PATIENCE)
    assert len(worlds(cluster.run_dir)) == 1, "no re-form"
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000", "--peer-timeout", "10", nnodes="3:4")
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 4, "join", PATIENCE)
    stop_and_check(cluster, nodes)


@pytest.mark.slow
def test_an_outage_of_etcd(cluster: Cluster) -> None:
    etcd = etcd_of(cluster)
    nodes = start_world(cluster, 2, "--max-steps", "1000000", "--peer-timeout", "10")
    for member in etcd.members:
        member.kill()
    wait_until(lambda: events(cluster.run_dir, "warning"), "warning", PATIENCE)
    before = last_step(cluster.run_dir)
    wait_for_step(cluster.run_dir, before + 20, PATIENCE)
    for member in etcd.members:
        member.start()
    etcd.wait_until_healthy()
    wait_until(lambda: any("etcd answers again" in node.text() for node in nodes), "word of it", PATIENCE)
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000", "--peer-timeout", "10", nnodes="1:2")
    nodes.pop(0).kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2 and len(worlds(cluster.run_dir)) > 1, "world", PATIENCE)
    stop_and_check(cluster, nodes)


@pytest.mark.slow
def test_who_trains_needs_no_etcd_though_a_node_dies_meanwhile(cluster: Cluster, tmp_path: Path) -> None:
    """For much longer than the grace. A newcomer joins by the run directory; one that has another gives up."""
    etcd = etcd_of(cluster)
    flags = (*ENDLESS, "--max-steps", "1000000")
    nodes = cluster.start(*flags, nodes=3, nnodes="1:3", conf="last_call=60,grace=4")
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", PATIENCE)
    wait_for_step(cluster.run_dir, 40, PATIENCE)
    for member in etcd.members:
        member.kill()
    wait_until(lambda: events(cluster.run_dir, "warning"), "warning", PATIENCE)
    nodes.pop(0).kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2", PATIENCE)
    stranger = cluster.start(*flags, run_dir=tmp_path / "another", nnodes="1:3", conf="grace=4")[0]
    assert stranger.wait(PATIENCE) != 0
    assert "does not answer" in stranger.text()
    nodes += cluster.start(*flags, nnodes="1:3", conf="grace=4")
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 3, "join by the run directory", PATIENCE)
    nodes.pop(0).kill()
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 2, "world of 2", PATIENCE)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20, PATIENCE)
    for member in etcd.members:
        member.start()
    etcd.wait_until_healthy()
    nodes += cluster.start(*flags, nnodes="1:3", conf="grace=4")
    wait_until(lambda: worlds(cluster.run_dir)[-1][1] == 3, "join", PATIENCE)
    stop_and_check(cluster, nodes)


@pytest.mark.slow
def test_everything_is_killed_and_started_again_at_once(cluster: Cluster) -> None:
    """With other flags, too: a dead job does not hold its successor up, nor to its word."""
    start_world(cluster, 2, "--max-steps", "1000000")
    cluster.kill()
    before = last_step(cluster.run_dir)
    nodes = cluster.start(*ENDLESS, "--max-steps", str(before + 100), nodes=2)
    cluster.finish(nodes)
    assert result(cluster.run_dir)["step"] == before + 100
    assert not etcd_of(cluster).keys()


@pytest.mark.slow
def test_a_misfit_is_refused_and_the_others_lose_nothing(cluster: Cluster) -> None:
    flags = ("--snapshot-every", "0")  # one of another batch would tell the misfit without asking anybody
    nodes = start_world(cluster, 2, *flags, steps=1_000_000, nnodes="2:3")
    misfit = cluster.start(*ENDLESS, *flags, "--max-steps", "1000000", "--global-batch-size", "32")[0]
    assert misfit.wait(PATIENCE) != 0
    assert "--global-batch-size is 32 here and 64 on the run" in misfit.text()
    stop_and_check(cluster, nodes)
    assert len(worlds(cluster.run_dir)) == 1, "not even a re-form"


@pytest.mark.slow
def test_too_few_nodes_wait_for_one_that_joins_in_place(cluster: Cluster) -> None:
    nodes = cluster.start(*ENDLESS, "--max-steps", "600", nodes=2, nnodes="2:2")
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", PATIENCE)
    wait_for_step(cluster.run_dir, 40, PATIENCE)
    nodes.pop(0).kill()
    wait_until(lambda: "waiting" in nodes[0].text(), "word of it", PATIENCE)
    nodes += cluster.start(*ENDLESS, "--max-steps", "600", nnodes="2:2")
    cluster.finish(nodes)
    check_run(cluster, 600)
    assert len(pids_that_trained(cluster)) == 3


@pytest.mark.slow
def test_a_node_that_waits_takes_over_from_those_who_all_died(cluster: Cluster) -> None:
    """It began to wait long before the newest snapshot, which it must go on from."""
    flags = (*ENDLESS, "--max-steps", "1000000", "--snapshot-every", "20")
    nodes = cluster.start(*flags, nnodes="1:1")
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", PATIENCE)
    wait_for_step(cluster.run_dir, 40, PATIENCE)
    nodes += cluster.start(*flags, nnodes="1:1")
    wait_until(lambda: "1 of at most 1 nodes train: this one waits for a place" in nodes[1].text(), "word", PATIENCE)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 200, PATIENCE)
    nodes[0].kill()
    died_at = last_step(cluster.run_dir)
    wait_until(lambda: len(worlds(cluster.run_dir)) == 2, "world of the other", PATIENCE)
    wait_for_step(cluster.run_dir, died_at + 40, PATIENCE)
    nodes[1].signal(signal.SIGTERM)
    cluster.finish(nodes[1:], code=1)
    (restored,) = [e for e in events(cluster.run_dir, "restore") if e["generation"] > 0]
    assert restored["source"] == "snapshot"
    assert died_at - restored["restored_step"] < 60, "the newest but for those that were being written"
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last_step(cluster.run_dir))
    assert [size for _, size in worlds(cluster.run_dir)] == [1, 1]
    wait_until(lambda: etcd_of(cluster).keys() == [], "end of the job's lease: the dead node's may not be over", 150)


@pytest.mark.slow
def test_a_node_that_waited_in_vain_ends_well(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, "--max-steps", "900")
    nodes += cluster.start(*ENDLESS, "--max-steps", "900", nnodes="1:2")
    cluster.finish(nodes)
    assert "nothing left to do" in nodes[2].text()
    assert not etcd_of(cluster).keys()


@pytest.mark.slow
def test_the_only_worker_freezes_and_another_start_takes_its_place(cluster: Cluster) -> None:
    """It must not train on when it wakes up: nobody's closed socket would tell it. Of the two the one that has come
    further goes on."""
    conf = "grace=5"  # for so long nobody takes over from one who cannot be reached
    flags = (*ENDLESS, "--max-steps", "1000000", "--peer-timeout", "2")
    first = cluster.start(*flags, nnodes="1:1", conf=conf)[0]
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", PATIENCE)
    wait_for_step(cluster.run_dir, 40, PATIENCE)
    frozen = first.workers()[0]
    frozen.send_signal(signal.SIGSTOP)
    other = cluster.path / "other"
    second = cluster.start(*flags, run_dir=other, nnodes="1:1", conf=conf)[0]
    ahead = last_step(cluster.run_dir) + 200
    wait_until(lambda: (other / "events").is_dir() and last_step(other) > ahead, "training", PATIENCE)
    frozen.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE) != 0
    assert "two jobs of one run id have met" in first.text()
    second.signal(signal.SIGTERM)
    cluster.finish([second], code=1)


@pytest.mark.slow
def test_the_only_worker_freezes_and_one_that_waits_takes_its_place(cluster: Cluster) -> None:
    """Who wakes up learns it before it saves anything."""
    flags = (*ENDLESS, "--max-steps", "1000000", "--snapshot-every", "400", "--peer-timeout", "2")
    nodes = [cluster.start(*flags, nnodes="1:1", conf="grace=5")[0]]
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", PATIENCE)
    wait_for_step(cluster.run_dir, 40, PATIENCE)
    nodes += cluster.start(*flags, nnodes="1:1", conf="grace=5")
    wait_until(lambda: "this one waits for a place" in nodes[1].text(), "word", PATIENCE)
    wait_for_step(cluster.run_dir, 400 * (last_step(cluster.run_dir) // 400 + 1) + 20, PATIENCE)
    frozen = nodes[0].workers()[0]
    frozen.send_signal(signal.SIGSTOP)
    ahead = last_step(cluster.run_dir) + 100
    wait_until(lambda: len(worlds(cluster.run_dir)) == 2, "world of the other", PATIENCE)
    wait_for_step(cluster.run_dir, ahead, PATIENCE)
    frozen.send_signal(signal.SIGCONT)
    assert nodes[0].wait(PATIENCE) != 0
    nodes[1].signal(signal.SIGTERM)
    cluster.finish(nodes[1:], code=1)


@pytest.mark.slow
def test_a_job_behind_tls_and_a_password(cluster: Cluster, tmp_path: Path) -> None:
    """Mutual TLS, a user whose role allows one prefix, and a password that no process list shows."""
    path = tmp_path / "secure"
    path.mkdir()
    tls = make_tls(path)
    with etcd_running(path, 3, tls) as etcd, running(path, etcd) as nodes_of:
        password = fence_in_trainer(etcd, path)
        conf = (
            f"ca={tls.ca},cert={tls.client_cert},key={tls.client_key},user=trainer,password_file={password},"
            "prefix=/team/jobs,last_call=60"
        )
        nodes = nodes_of.start(*ENDLESS, "--max-steps", "900", nodes=2, nnodes="1:2", conf=conf)
        wait_until(lambda: (nodes_of.run_dir / "events").is_dir(), "events", PATIENCE)
        wait_for_step(nodes_of.run_dir, 40, PATIENCE)
        nodes[0].kill()
        nodes_of.finish(nodes[1:])
        assert result(nodes_of.run_dir)["step"] == 900
        wrong: Node = nodes_of.start(*ENDLESS, conf=conf.replace("/team/jobs", "/other"))[0]
        assert wrong.wait(PATIENCE) != 0
        (line,) = error_lines(wrong)
        assert "permission denied" in line
        assert "hunter2" not in json.dumps([node.text() for node in nodes_of.nodes])
