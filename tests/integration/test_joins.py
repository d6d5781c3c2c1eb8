"""Joins and too few nodes: late starters, incompatible nodes, and a node that crashes at every start."""

from __future__ import annotations

import os
import signal
import time

import pytest

from elastic_train.tools.audit.record import PACE_FILE, PACE_VARIABLE, set_pace
from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_lines,
    events,
    free_port,
    last_step,
    outcomes,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import (
    BATCH,
    ENDLESS,
    LENGTH,
    check_run,
    node_with_rank,
    start_after_its_host,
    start_world,
)

PATIENCE = 300.0
"""seconds for the start of some nodes on a busy machine"""
pytestmark = pytest.mark.timeout(1200)
BOTH = pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True)

# Fails on the nodes that its file is told to fail on, after torchrun has started their workers.
CRASHING_TASK = """
import os
from elastic_train.training.tasks import ImageClassification

class Crashing(ImageClassification):
    def __init__(self):
        super().__init__(dataset="digits", model="cnn")
        if os.environ.get("CRASH"):
            raise RuntimeError("this node cannot start")
"""

# A worker that is the same but for the torch that it says it has.
OTHER_TORCH = """
import runpy
import elastic_train  # by which the rendezvous plug-in tells that these workers meet by themselves
import torch
torch.__version__ = "9.9.9"
runpy.run_module("elastic_train", run_name="__main__", alter_sys=True)
"""

# Counts what a forward pass is given; more than what fitted in the first world is out of memory.
BOUNDED_TASK = """
from elastic_train.training.tasks import ImageClassification

class Bounded(ImageClassification):
    def __init__(self):
        super().__init__(dataset="digits", model="mlp")

    def loss(self, module, batch):
        if module.training and len(batch[0]) > 16:
            raise MemoryError(f"{len(batch[0])} samples in one forward pass")
        return super().loss(module, batch)
"""


def world_of_size(cluster: Cluster, size: int, generation: int = 0, timeout: float = PATIENCE) -> None:
    """Wait for one of `generation` or later."""
    wait_until(
        lambda: any(g >= generation and s == size for g, s in worlds(cluster.run_dir)), f"world of {size}", timeout
    )


def stop_all(cluster: Cluster, nodes: list[Node]) -> None:
    """SIGTERM to all; they save and end, and what they have trained is whole."""
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    assert set(outcomes(cluster.run_dir)[-len(nodes) :]) == {"stopped"}
    steps = last_step(cluster.run_dir)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=steps)
    check_steps(cluster.run_dir, steps)


@BOTH
@pytest.mark.slow
def test_four_nodes_started_five_seconds_apart(cluster: Cluster) -> None:
    nodes = []
    for _ in range(4):
        nodes += cluster.start(*ENDLESS, "--max-steps", "1000000")
        time.sleep(5.0)
    world_of_size(cluster, 4)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    stop_all(cluster, nodes)
    assert worlds(cluster.run_dir)[-1][1] == 4


@BOTH
@pytest.mark.slow
def test_a_misfit_joins_and_is_refused(cluster: Cluster) -> None:
    """With another seed, length of the data, or torch: the others lose nothing, and do not even re-form."""
    (cluster.path / "other_torch.py").write_text(OTHER_TORCH)
    usual, other = ("-m", "elastic_train"), ("other_torch.py",)
    nodes = start_world(cluster, 2, steps=1000000, nnodes="2:4")
    misfits: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
        (usual, ("--seed", "5"), "--seed"),
        (usual, ("--dataset", "synthetic"), "data"),
        (other, (), "version of torch is '9.9.9' here"),
    ]
    for program, flags, word in misfits:
        [misfit] = cluster.start(*ENDLESS, "--max-steps", "1000000", *flags, program=program)
        assert misfit.wait(PATIENCE) == 1
        [line] = error_lines(misfit)
        assert word in line
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        assert worlds(cluster.run_dir) == [(0, 2)], "not even a re-form"
    stop_all(cluster, nodes)


@BOTH
@pytest.mark.slow
def test_a_node_that_crashes_at_every_start(cluster: Cluster) -> None:
    (cluster.path / "crashing.py").write_text(CRASHING_TASK)
    flags = ("--task", "crashing:Crashing")
    nodes = start_world(cluster, 2, *flags, steps=1000000, nnodes="2:4")
    for _ in range(2):
        [crashing] = cluster.start(*ENDLESS, "--max-steps", "1000000", *flags, env={"CRASH": "1"})
        assert crashing.wait(PATIENCE) == 1
        assert "RuntimeError: this node cannot start" in crashing.text()
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        assert worlds(cluster.run_dir) == [(0, 2)], "not even a re-form"
    # A node that is whole can still come.
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000", *flags)
    world_of_size(cluster, 3)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    stop_all(cluster, nodes)


@pytest.mark.slow
@BOTH
def test_fewer_nodes_than_min_nodes_wait_for_others(cluster: Cluster) -> None:
    flags = ("--min-nodes", "2")
    nodes = start_world(cluster, 2, *flags, steps=600)
    nodes[1].kill()
    wait_until(lambda: "waiting 600 s for others to join" in nodes[0].text(), "word of the one that waits")
    waited_at = last_step(cluster.run_dir)
    nodes[1] = cluster.start(*ENDLESS, "--max-steps", "600", *flags)[0]
    cluster.finish(nodes)
    end = check_run(cluster, 600)
    alone = [e for e in events(cluster.run_dir, "step") if e["world_size"] == 1]
    assert alone == [], "not a step below --min-nodes"
    assert waited_at < 600
    assert end["generations"] >= 2


@pytest.mark.slow
@BOTH
def test_too_few_nodes_for_too_long_save_and_end(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, "--min-nodes", "2", "--wait-timeout", "2", steps=100000)
    nodes[1].kill()
    assert nodes[0].wait(60) == 1
    [line] = error_lines(nodes[0])
    assert "only 1 of at least 2 nodes after 2 s" in line
    steps = last_step(cluster.run_dir)
    [again] = [cluster.start_alone(*ENDLESS, "--max-steps", str(steps + 5))]
    cluster.finish([again])
    assert result(cluster.run_dir)["incidents"][-1]["committed_steps_lost"] == 0
    check_run(cluster, steps + 5)


@pytest.mark.slow
@BOTH
def test_four_become_one_and_memory_suffices(cluster: Cluster) -> None:
    """What a forward pass is given never grows beyond the first world's share: 64 / 4 samples."""
    (cluster.path / "bounded.py").write_text(BOUNDED_TASK)
    nodes = start_world(cluster, 4, "--task", "bounded:Bounded", steps=400)
    for node in nodes[1:]:
        node.kill()
    cluster.finish(nodes[:1])
    check_run(cluster, 400)


@BOTH
@pytest.mark.slow
def test_a_join_restarts_nobody(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, steps=1000000, nnodes="2:3")
    before = {worker.pid for node in nodes for worker in node.workers()}
    nodes += cluster.start(*ENDLESS, "--max-steps", "1000000")
    world_of_size(cluster, 3)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    after = {e["pid"] for e in events(cluster.run_dir, "world") if e["generation"] == 1}
    assert before < after
    assert {worker.pid for node in nodes for worker in node.workers()} == after
    assert {e["pid"] for e in events(cluster.run_dir, "start")} == after, "no process was replaced"
    [restored] = [e for e in events(cluster.run_dir, "restore") if e["generation"] == 1]
    assert restored["source"] == "peer"
    assert restored["pid"] not in before
    assert not events(cluster.run_dir, "done")
    stop_all(cluster, nodes)


@BOTH
@pytest.mark.slow
def test_the_first_node_dies_and_comes_back(cluster: Cluster) -> None:
    """It had rank 0, and under c10d hosted the endpoint. The same command finds the others."""
    ordered = ("--reduction", "ordered", "--schedule", "constant")  # whatever --max-steps is
    nodes = start_after_its_host(cluster, 1000000, *ordered)
    others = {worker.pid for node in nodes[1:] for worker in node.workers()}
    nodes[0].kill()
    world_of_size(cluster, 2, generation=1)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    flags = (*ENDLESS, *ordered, "--max-steps", "1000000")
    [nodes[0]] = cluster.start(*flags, nnodes="1:3", conf=cluster.last_call(60))
    world_of_size(cluster, 3, generation=2)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    assert others < {e["pid"] for e in events(cluster.run_dir, "world") if e["generation"] == 2}
    assert [e["source"] for e in events(cluster.run_dir, "restore") if e["generation"] > 0] == ["peer"]
    assert worlds(cluster.run_dir) == [(0, 3), (1, 2), (2, 3)]
    stop_all(cluster, nodes)
    steps = last_step(cluster.run_dir) + 5
    flags = (*ENDLESS, *ordered, "--max-steps", str(steps))
    cluster.finish([cluster.start_alone(*flags)])
    end = check_run(cluster, steps)
    assert [incident["cause"] for incident in end["incidents"]] == ["peer_lost", "join", "restart"]
    undisturbed = cluster.path / "undisturbed"
    cluster.finish([cluster.start_alone(*flags, run_dir=undisturbed)])
    assert end["state_sha256"] == result(undisturbed)["state_sha256"]


class PacedJob:
    """Three nodes of four, the first of which has rank 0, hosts the endpoint under c10d, and is to be struck by a
    fault."""

    STEPS = 250
    FLAGS = ("--task", "elastic_train.tools.drills.task:PacedDigits", "--min-nodes", "1", "--reduction", "ordered")

    def __init__(self, cluster: Cluster, fault: str) -> None:
        self.cluster = cluster
        self._pace_file = cluster.path / PACE_FILE
        set_pace(self._pace_file, 0.01)
        self._env = {PACE_VARIABLE: str(self._pace_file), "ELASTIC_TRAIN_FAULT": fault}
        self.nodes = start_after_its_host(
            cluster, self.STEPS, *self.FLAGS, nnodes="3:4", conf="last_call_timeout=2", env=self._env, step=3
        )

    def join(self) -> Node:
        """Start a node; returns at once."""
        flags = (*ENDLESS, "--max-steps", str(self.STEPS), *self.FLAGS)
        [node] = self.cluster.start(*flags, nnodes="3:4", env=self._env)
        return node

    def finish(self, survivors: list[Node], newcomer: Node, undisturbed: str) -> None:
        """The fault has struck: the survivors go on in place, the newcomer gets in, and all train to the end, in the
        state of the undisturbed job."""
        run_dir, pids = self.cluster.run_dir, {node.workers()[0].pid for node in survivors}
        assert self.nodes[0].wait(PATIENCE) != 0
        assert "fault: kill-node" in self.nodes[0].text()
        world_of_size(self.cluster, len(survivors) + 1, generation=1)
        wait_for_step(run_dir, last_step(run_dir) + 3)
        set_pace(self._pace_file, 0.0)
        self.cluster.finish([*survivors, newcomer])
        together = {e["pid"] for e in events(run_dir, "world") if e["generation"] == worlds(run_dir)[-1][0]}
        assert together > pids, "no process was replaced"
        assert check_run(self.cluster, self.STEPS)["state_sha256"] == undisturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the state to which the paced job comes in one process."""
    with running(tmp_path_factory.mktemp("undisturbed")) as alone:
        alone.finish([alone.start_alone(*ENDLESS, "--max-steps", str(PacedJob.STEPS), *PacedJob.FLAGS)])
        return str(result(alone.run_dir)["state_sha256"])


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["planned:rank=0,generation=1", "formed:rank=0,generation=1", "proposed:rank=0,generation=0"]
)
def test_rank_0_dies_while_it_takes_a_node_in(cluster: Cluster, undisturbed: str, moment: str) -> None:
    """Under c10d its node hosts the endpoint."""
    job = PacedJob(cluster, f"kill-node@{moment}")
    newcomer = job.join()
    job.finish(job.nodes[1:], newcomer, undisturbed)
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 2, 3]


@BOTH
@pytest.mark.slow
def test_rank_0_dies_while_it_proposes_and_a_node_joins(cluster: Cluster, undisturbed: str) -> None:
    """Another node has just died; under c10d the endpoint's host does too."""
    job = PacedJob(cluster, "kill-node@proposed:rank=0,generation=0")
    newcomer = job.join()
    wait_until(lambda: newcomer.workers(), "worker of the newcomer", PATIENCE)
    victim = node_with_rank(cluster, job.nodes, 2)
    victim.kill()
    job.finish([node for node in job.nodes[1:] if node is not victim], newcomer, undisturbed)


@BOTH
@pytest.mark.slow
def test_a_node_beyond_the_maximum_steps_in_for_a_dead_one(cluster: Cluster) -> None:
    nodes = start_world(cluster, 2, steps=3000, nnodes="1:2")
    nodes += cluster.start(*ENDLESS, "--max-steps", "3000", nnodes="1:2")
    wait_until(lambda: "2 of at most 2 nodes train: this one waits for a place" in nodes[2].text(), "word", PATIENCE)
    nodes[0].kill()
    cluster.finish(nodes[1:])
    check_run(cluster, 3000)
    assert worlds(cluster.run_dir)[-1][1] == 2


@pytest.mark.slow
def test_who_stepped_in_for_a_dead_one_tells_of_that_death(cluster: Cluster) -> None:
    """It entered in the very re-form: one node alone may not train. Later it is rank 0."""
    nodes = start_world(cluster, 2, steps=3000, nnodes="2:2")

    def replace_one(victim: Node, generation: int) -> None:
        [newcomer] = cluster.start(*ENDLESS, "--max-steps", "3000", nnodes="2:2")
        nodes.append(newcomer)
        wait_until(lambda: "this one waits for a place" in newcomer.text(), "word", PATIENCE)
        victim.kill()
        world_of_size(cluster, 2, generation)
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)

    replace_one(nodes[0], 1)
    replace_one(nodes[1], 3)
    cluster.finish(nodes[2:])
    incidents = check_run(cluster, 3000)["incidents"]
    assert [entry["cause"] for entry in incidents] == ["peer_lost", "peer_lost"]
    assert all(len(entry["lost_members"]) == 1 for entry in incidents)
    told = [
        next(e for e in events(cluster.run_dir, "world") if e["lost_members"] == i["lost_members"]) for i in incidents
    ]
    names = ("detect", "abort", "meet")
    assert [[i["seconds"][n] for n in names] for i in incidents] == [[e["seconds"][n] for n in names] for e in told]


@BOTH
@pytest.mark.slow
def test_a_second_job_of_the_same_name_is_nodes_of_the_first(cluster: Cluster) -> None:
    """The same command twice, each for two nodes: no second world, and no restart."""
    first = start_world(cluster, 2, steps=1000000, nnodes="2:4")
    second = cluster.start(*ENDLESS, "--max-steps", "1000000", nodes=2, nnodes="2:4")
    world_of_size(cluster, 4)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    sizes = [size for _, size in worlds(cluster.run_dir)]
    assert (sizes[0], sizes[-1]) == (2, 4)
    assert sizes == sorted(sizes)
    stop_all(cluster, [*first, *second])


@BOTH
@pytest.mark.slow
def test_all_others_stop_once_a_join_is_decided(cluster: Cluster) -> None:
    """The newcomer goes on from what they have saved, as one in the queue would."""
    fault = {"ELASTIC_TRAIN_FAULT": "stop@proposed:rank=0"}
    [first] = cluster.start(*ENDLESS, "--max-steps", "1000000", env=fault)
    wait_for_step(cluster.run_dir, 5)
    [second] = cluster.start(*ENDLESS, "--max-steps", "1000000")
    assert first.wait(PATIENCE) == 1
    assert "stopped by SIGTERM" in first.text()
    [stopped_at] = (event["step"] for event in events(cluster.run_dir, "done"))
    wait_for_step(cluster.run_dir, stopped_at + 20)
    assert events(cluster.run_dir, "restore")[-1]["restored_step"] == stopped_at
    assert "waiting" not in second.text()
    stop_all(cluster, [second])


@pytest.mark.slow
def test_a_start_at_another_endpoint_says_that_it_joins_by_the_run_directory(cluster: Cluster) -> None:
    """It was meant for a job of its own, perhaps."""
    [first] = cluster.start(*ENDLESS, nnodes="1:4")
    wait_for_step(cluster.run_dir, 5)
    port = free_port()
    [other] = cluster.start(*ENDLESS, nnodes="1:4", nproc=2, port=port)
    world_of_size(cluster, 3)
    told = [line for line in other.text().splitlines() if "nobody answers" in line]
    assert len(told) == 1, "a node has one line, however many its workers are"
    assert told[0].startswith(f"elastic_train: nobody answers at localhost:{port}: this node joins the job that ")
    assert f"{cluster.run_dir} shows at 127.0.0.1:" in told[0]
    assert told[0].endswith("; a job of its own takes another --run-dir")
    assert "nobody answers" not in first.text()


@pytest.mark.slow
def test_a_node_that_comes_after_the_end_does_not_wait_for_a_job(cluster: Cluster) -> None:
    """Under c10d; a node that is not at the first endpoint, and began as the others were about to end. A result that
    was there before says nothing: it waits."""
    cluster.finish(cluster.start("--max-steps", "5"))
    [late] = cluster.start("--max-steps", "5", nnodes="1:4", conf="is_host=false")
    wait_until(lambda: "waiting for the job" in late.text(), "what it waits for", 60.0)
    path = cluster.run_dir / "result.json"
    os.utime(path)  # as if it had come meanwhile
    cluster.finish([late])
    assert f"the run was finished without this node: {path}; nothing left to do" in late.text()
    assert events(cluster.run_dir, "done")[-1]["outcome"] == "already_finished"


@BOTH
@pytest.mark.slow
def test_the_only_node_with_the_state_dies_as_others_join(cluster: Cluster) -> None:
    """In their first step: nobody had its answer in that world, which would prove in time that it is dead."""
    pace = cluster.path / PACE_FILE
    set_pace(pace, 0.05)
    flags = (*ENDLESS, *PacedJob.FLAGS, "--max-steps", "1000000", "--snapshot-every", "5")
    env = {PACE_VARIABLE: str(pace), "ELASTIC_TRAIN_FAULT": "kill-node@step:rank=0,generation=1"}
    [first] = cluster.start(*flags, nnodes="1:3", env=env)
    wait_for_step(cluster.run_dir, 10)
    others = cluster.start(*flags, nodes=2, nnodes="1:3", env={PACE_VARIABLE: str(pace)})
    assert first.wait(PATIENCE) != 0
    reached = last_step(cluster.run_dir)
    wait_for_step(cluster.run_dir, reached + 10)
    assert worlds(cluster.run_dir)[-1][1] == 2
    [restored] = {e["restored_step"] for e in events(cluster.run_dir, "restore") if e["generation"] > 1}
    assert reached - 5 <= restored <= reached, "the newest snapshot"
    bill = max(events(cluster.run_dir, "world"), key=lambda e: (e["generation"], "bill" in e))["bill"]
    assert bill["node_seconds"]["kept"] >= 0.05 * restored, "the totals of the run, as that has them"
    for node in others:
        node.signal(signal.SIGTERM)
    cluster.finish(others, code=1)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last_step(cluster.run_dir))
