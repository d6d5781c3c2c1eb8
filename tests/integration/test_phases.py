"""A member dies, fails or freezes at an exact moment, by elastic/fault_seam.py."""

from __future__ import annotations

import signal
import time

import pytest

from tests.audits import audit
from tests.integration.cluster import (
    Cluster,
    Node,
    events,
    last_step,
    newest_snapshot,
    result,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import ENDLESS, check_run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("cluster", ["c10d", pytest.param("etcd3", marks=pytest.mark.slow)], indirect=True),
]
STEPS = 300


def start_with_fault(
    cluster: Cluster, fault: str, nodes: int = 3, steps: int = STEPS, flags: tuple[str, ...] = ()
) -> list[Node]:
    """Start a world whose members all have the fault; its conditions select the one in which it happens."""
    flags = (*ENDLESS, "--max-steps", str(steps), *flags)
    return cluster.start(*flags, nodes=nodes, env={"ELASTIC_TRAIN_FAULT": fault})


def finish_but(cluster: Cluster, nodes: list[Node], struck: int) -> list[Node]:
    """Wait for all nodes: `struck` of them must have failed, by the fault, and all others exit with 0."""
    codes = [node.wait(90) for node in nodes]
    failed = [node for node, code in zip(nodes, codes, strict=True) if code != 0]
    report = "\n".join(f"--- {code}\n{node.text()[-2500:]}" for node, code in zip(nodes, codes, strict=True))
    assert len(failed) == struck, report
    assert sum("fault:" in node.text() for node in nodes) == struck, "the fault fired"
    return [node for node in nodes if node not in failed]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["step", "commit"])
def test_death_within_a_step(cluster: Cluster, point: str) -> None:
    nodes = start_with_fault(cluster, f"kill-node@{point}:rank=1,step=60,generation=0")
    finish_but(cluster, nodes, 1)
    check_run(cluster, STEPS)


@pytest.mark.slow
def test_a_worker_that_is_left_out_right_after_a_commit_voids_its_last_steps(cluster: Cluster) -> None:
    """It has written them, and cannot know whether the others have applied them, too. Each counts once."""
    nodes = start_with_fault(cluster, "freeze@commit:rank=0,step=60,generation=0", steps=STEPS)
    wait_until(lambda: any("fault:" in node.text() for node in nodes), "the fault", 300)
    [node] = [node for node in nodes if "fault:" in node.text()]
    [worker] = node.workers()
    assert max(event["step"] for event in events(cluster.run_dir, "step") if event["pid"] == worker.pid) == 60
    wait_for_step(cluster.run_dir, 80)
    worker.send_signal(signal.SIGCONT)
    cluster.finish(nodes)
    [line] = [event for event in events(cluster.run_dir, "warning") if "void" in event]
    assert line["pid"] == worker.pid
    assert line["void"] == [{"generation": 0, "step": 59}, {"generation": 0, "step": 60}]
    assert "comes back as a newcomer" in line["message"]
    check_run(cluster, STEPS)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["meet", "init", "sync"])
def test_another_death_during_the_re_form(cluster: Cluster, point: str) -> None:
    generation = 0 if point == "meet" else 1
    nodes = start_with_fault(
        cluster, f"kill-node@step:rank=2,step=60,generation=0;kill-node@{point}:rank=1,generation={generation}", nodes=4
    )
    finish_but(cluster, nodes, 2)
    end = check_run(cluster, STEPS)
    assert all(sum(incident["seconds"].values()) < 3.0 for incident in end["incidents"])


@pytest.mark.slow
def test_a_world_that_commits_nothing_writes_nothing_twice(cluster: Cluster) -> None:
    """Rank 0 has written its last step; in the next world another member dies before there is a further one."""
    fault = "kill-node@step:rank=0,step=60,generation=0;kill-node@step:rank=1,generation=1"
    nodes = start_with_fault(cluster, fault, nodes=4)
    finish_but(cluster, nodes, 2)
    check_run(cluster, STEPS)


@pytest.mark.slow
def test_the_source_of_the_state_dies_while_it_sends(cluster: Cluster) -> None:
    """Three train and one is a spare. One dies, the spare steps in, and who is about to send it the state dies too."""
    fault = "kill-node@step:rank=2,step=60,generation=0;kill-node@send:generation=1"
    nodes = start_with_fault(
        cluster, fault, nodes=4, flags=("--reduction", "ordered", "--virtual-ranks", "3", "--global-batch-size", "63")
    )
    finish_but(cluster, nodes, 2)
    check_run(cluster, STEPS, batch=63)
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 2], "generation 1 never came to train"
    assert [e["source"] for e in events(cluster.run_dir, "restore")][-1] == "peer"


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), [("finish", 0), ("finish", 1), ("exit", 0), ("exit", 1)])
def test_death_after_the_last_step_does_not_hold_up_the_others(cluster: Cluster, point: str, rank: int) -> None:
    nodes = start_with_fault(cluster, f"kill-node@{point}:rank={rank},generation=0", steps=60)
    finish_but(cluster, nodes, 1)
    ended = time.time()
    assert result(cluster.run_dir)["step"] == 60
    last_commit = max(e["time"] for e in events(cluster.run_dir, "step"))
    assert ended - last_commit < 45.0, "nobody waits for it, on a busy machine either"


@pytest.mark.slow
def test_an_error_on_one_rank_only(cluster: Cluster) -> None:
    nodes = start_with_fault(cluster, "error@step:rank=1,step=60,generation=0")
    finish_but(cluster, nodes, 1)
    failed = next(node for node in nodes if "fault:" in node.text())
    assert "RuntimeError: fault error@step" in failed.text(), "its own traceback"
    others = "".join(node.text() for node in nodes if node is not failed)
    assert " left (its error in step 61: RuntimeError: fault error@step" in others, "the others know"
    check_run(cluster, STEPS)


@pytest.mark.slow
def test_out_of_memory_on_one_rank(cluster: Cluster) -> None:
    nodes = start_with_fault(cluster, "memory@step:rank=2,step=60,generation=0")
    finish_but(cluster, nodes, 1)
    check_run(cluster, STEPS)


@pytest.mark.slow
def test_an_error_on_every_rank_ends_the_job(cluster: Cluster) -> None:
    nodes = start_with_fault(cluster, "error@step:step=60")
    for node in nodes:
        assert node.wait(60) != 0
    texts = [node.text() for node in nodes]
    assert sum("RuntimeError: fault error@step" in text for text in texts) >= 2, "a second witness ends the job"
    for text in texts:  # the third may find the step before broken off by their end
        assert "RuntimeError: fault error@step" in text or "fails on every member that tries it" in text
    # Rank 0, which writes the steps, may be broken off in the one that the others have just committed.
    assert last_step(cluster.run_dir) in (59, 60)
    assert newest_snapshot(cluster.run_dir)[0].step == 60, "no committed step is lost"
    assert any("elastic_train: the state of step 60 is saved, mend that and start" in text for text in texts)
    assert max(e["generation"] for e in events(cluster.run_dir, "world")) <= 2, "no endless re-forming"


@pytest.mark.slow
def test_an_error_where_one_node_trains_keeps_what_is_committed(cluster: Cluster) -> None:
    [node] = start_with_fault(cluster, "error@step:step=60", nodes=1)
    assert node.wait(60) != 0
    traceback, _, note = node.text().partition("RuntimeError: fault error@step")
    assert "Traceback" in traceback
    assert "elastic_train: the state of step 60 is saved, mend that and start all nodes again" in note
    assert newest_snapshot(cluster.run_dir)[0].step == 60


@pytest.mark.slow
def test_a_poisoned_step_ends_the_job(cluster: Cluster) -> None:
    """Rank 0 of whatever world fails at the same step: the second member that meets it ends the job."""
    nodes = start_with_fault(cluster, "error@step:rank=0,step=60")
    for node in nodes:
        node.wait(60)
    assert sum("\nRuntimeError: fault error@step" in node.text() for node in nodes) == 2, "by its own traceback"
    assert sum("step 61 fails on every member that tries it" in node.text() for node in nodes) >= 1
    assert last_step(cluster.run_dir) == 60


FRUITLESS_TASK = """
import torch.distributed as dist
from elastic_train.training.tasks import ImageClassification

class Fruitless(ImageClassification):
    def loss(self, module, batch):
        raise dist.DistBackendError("NCCL error: it looks like a lost peer in every step")
"""


@pytest.mark.slow
def test_worlds_that_commit_nothing_come_to_an_end(cluster: Cluster) -> None:
    (cluster.path / "fruitless.py").write_text(FRUITLESS_TASK)
    [node] = cluster.start(*ENDLESS, "--task", "fruitless:Fruitless", nproc=2, nnodes="1:2")
    assert node.wait(120) == 1
    assert "worlds in a row committed no step; the last error: NCCL error: it looks like a lost peer" in node.text()
    assert "the state of step 0 is saved" in node.text()
    assert 10 < len(worlds(cluster.run_dir)) < 20


@pytest.mark.slow
def test_a_stuck_training_thread_is_expelled(cluster: Cluster) -> None:
    nodes = start_with_fault(cluster, "hang@step:rank=1,step=60,generation=0", flags=("--stall-timeout", "3"))
    wait_for_step(cluster.run_dir, 55)
    wait_until(lambda: any(e["world_size"] == 2 for e in events(cluster.run_dir, "world")), "world of 2", 40)
    survivors = [node for node in nodes if "fault:" not in node.text()]
    cluster.finish(survivors)
    lost = events(cluster.run_dir, "peer_lost")
    assert any("kept the others waiting" in (e["reason"] or "") for e in lost)
    [stuck] = [node for node in nodes if node not in survivors]
    wait_until(lambda: "this worker has been at one thing for" in stuck.text(), "what it says of itself")
    assert "fault_seam.py" in stuck.text(), "where it stands still"
    check_run(cluster, STEPS)


@pytest.mark.slow
def test_a_thread_that_is_stuck_before_the_state_is_handed_over(cluster: Cluster) -> None:
    """A disk that does not answer, say. One dies, the spare steps in, and another is stuck before it has the state."""
    strikes = "hang@sync:rank=1,generation=1"
    flags = ("--reduction", "ordered", "--virtual-ranks", "3", "--global-batch-size", "63", "--formation-timeout", "30")
    nodes = start_with_fault(cluster, f"kill-node@step:rank=2,step=60,generation=0;{strikes}", nodes=4, flags=flags)
    wait_until(lambda: sum("fault:" in node.text() for node in nodes) == 2, "both faults")
    cluster.finish([node for node in nodes if "fault:" not in node.text()])
    check_run(cluster, STEPS, batch=63)
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 2], "generation 1 never came to train"


WAITING_TASK = """
import time
import torch.distributed as dist
from elastic_train.training.tasks import ImageClassification

class Waiting(ImageClassification):
    num_losses = 0

    def loss(self, module, batch):
        Waiting.num_losses += 1
        if Waiting.num_losses == 60 and dist.get_world_size() == 2:  # neither commits the step
            images = batch[0].clone().requires_grad_() * 1.0
            images.register_hook(self.wait)  # after the last bucket of gradients is on its way
            batch = (images, batch[1])
        return super().loss(module, batch)

    def wait(self, gradient):
        if dist.get_rank() == 1:
            print("waits", flush=True)
        time.sleep(3600)
"""


@pytest.mark.slow
def test_the_last_one_waits_for_a_collective_that_does_not_end(cluster: Cluster) -> None:
    """As gloo's sometimes do not: it is ended by its watcher, and has saved what was committed."""
    (cluster.path / "waiting.py").write_text(WAITING_TASK)
    flags = (*ENDLESS, "--snapshot-every", "0", "--task", "waiting:Waiting", "--max-steps")
    nodes = cluster.start(*flags, "1000", nodes=2)
    [waiting] = wait_until(lambda: [node for node in nodes if "waits\n" in node.text()], "the one that waits")
    [other] = [node for node in nodes if node is not waiting]
    other.kill()
    assert waiting.wait(90) == 1
    assert "the state of step 59 is saved, in case that no other is left" in waiting.text()
    cluster.finish([cluster.start_alone(*flags, "100")])
    end = check_run(cluster, 100)
    assert end["incidents"][-1]["committed_steps_lost"] == 0


STUCK_TASK = """
import time
import torch.distributed as dist
from elastic_train.training.tasks import ImageClassification

class Stuck(ImageClassification):
    num_evaluations = 0
    first_rank = None

    def loss(self, module, batch):
        if Stuck.first_rank is None:  # ranks change, and not every one of them evaluates
            Stuck.first_rank = dist.get_rank()
        return super().loss(module, batch)

    def evaluate(self, model, batch):
        Stuck.num_evaluations += 1
        while Stuck.first_rank == 1 and Stuck.num_evaluations > 4:
            print("stuck", flush=True)
            time.sleep(3600)
        return super().evaluate(model, batch)
"""


@pytest.mark.slow
def test_an_evaluation_that_is_stuck_on_one_rank(cluster: Cluster) -> None:
    """Its heartbeats come and no step is under way; it is expelled all the same."""
    (cluster.path / "stuck.py").write_text(STUCK_TASK)
    flags = ("--peer-timeout", "2", "--stall-timeout", "3", "--ledger", "--eval-every", "1", "--max-steps", "230",
             "--task", "stuck:Stuck")  # fmt: skip
    nodes = cluster.start(*flags, nodes=3, nnodes="1:3")
    stuck = wait_until(lambda: [node for node in nodes if "stuck\n" in node.text()], "stuck evaluation")
    cluster.finish([node for node in nodes if node not in stuck])
    check_run(cluster, 230)
    assert any("kept the others waiting" in (e["reason"] or "") for e in events(cluster.run_dir, "peer_lost"))
    assert len({e["step"] for e in events(cluster.run_dir, "evaluation")}) == 10, "none is missing"
