"""A plain DDP script made elastic: its own loop survives a killed node and takes in a new one, every sample once."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from textwrap import indent

import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import own_loop
from elastic_train.elastic.worker import Worker
from tests.audits import audit
from tests.integration.cluster import (
    PYTHON,
    TORCHRUN,
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_line,
    error_lines,
    events,
    free_port,
    newest_snapshot,
    outcomes,
    result,
    snapshot_names,
    wait_for_step,
    wait_until,
    worlds,
)

EXAMPLES = Path(__file__).parents[2] / "elastic_train" / "examples"
LENGTH, BATCH = 1024, 64


def wait_for_world(cluster: Cluster, size: int) -> None:
    wait_until(
        lambda: any(e["world_size"] == size for e in events(cluster.run_dir, "world")), f"world of {size} workers"
    )


NOTING = f"""
import json, os, sys
import elastic_train
sys.path.insert(0, {str(EXAMPLES)!r})
import elastic_ddp

NAMES = ["RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_RANK",
         "LOCAL_WORLD_SIZE"]


def note(when):
    with open(f"{{when}}.json", "x") as file:
        json.dump([os.environ[name] for name in NAMES], file)


def train(training):
    note(f"generation-{{training.world.generation}}-{{training.world.rank}}")
    its_own(training)


its_own, elastic_ddp.train = elastic_ddp.train, train
elastic_ddp.main()
note(f"after-{{os.getpid()}}")
"""
"""the example, with a note of what its environment says in each world, and when training is over"""


def noted(cluster: Cluster, pattern: str) -> list[list[str]]:
    return sorted(json.loads(path.read_text()) for path in cluster.path.glob(f"{pattern}.json"))


@pytest.mark.slow
def test_a_node_is_killed_and_another_one_joins(cluster: Cluster) -> None:
    epochs = 300  # nobody waits for the one that joins
    flags = ("--epochs", str(epochs), "--ledger", "--peer-timeout", "2")
    (cluster.path / "noting.py").write_text(NOTING)
    program = ("noting.py",)
    nodes = cluster.start(*flags, nodes=3, program=program)
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events")
    wait_for_world(cluster, 3)
    wait_for_step(cluster.run_dir, 40)
    nodes[2].kill()
    wait_for_world(cluster, 2)
    cluster.start(*flags, program=program)
    cluster.finish([nodes[0], nodes[1], cluster.nodes[-1]])
    end = result(cluster.run_dir)
    steps = epochs * LENGTH // BATCH
    assert end["step"] == steps
    assert end["config"]["epochs"] == epochs
    assert not {"dataset", "model", "lr"} & end["config"].keys(), "they say nothing of this loop"
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=steps)
    check_steps(cluster.run_dir, steps)
    assert [incident["cause"] for incident in end["incidents"]] == ["peer_lost", "join"]
    assert all(incident["committed_steps_lost"] == 0 for incident in end["incidents"])
    assert outcomes(cluster.run_dir).count("finished") == 3
    for pattern, size in (("generation-0-*", 3), ("generation-1-*", 2), ("generation-2-*", 3), ("after-*", 3)):
        places = [[str(rank)] * 3 + [str(size)] * 3 + ["0", "1"] for rank in range(size)]
        assert noted(cluster, pattern) == places, pattern


def test_the_example_with_two_optimizers(cluster: Cluster) -> None:
    """Alone, without a launcher. Every epoch is judged, the last one too, and the best one kept."""
    script = str(EXAMPLES / "critic_ddp.py")
    flags = ["--epochs", "12", "--keep-best", "1", "--run-dir", str(cluster.run_dir)]
    cluster.finish([cluster.launch([PYTHON, script, *flags], {})])
    end, [kept] = result(cluster.run_dir), events(cluster.run_dir, "best")[-1:]
    assert (end["step"], kept["step"]) == (12 * 14, 12 * 14), "it learns: the last one is the best"
    state = newest_snapshot(cluster.run_dir)[1]
    assert state["extras"]["referee"]["epochs"] == 12
    assert state["extras"]["warm_up"]["last_epoch"] == 12 * 14


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_that_it_was_made_from(cluster: Cluster) -> None:
    """The other side of the README's diff learns as well."""
    workers = ("--standalone", "--nproc-per-node=2")
    plain = cluster.launch([*TORCHRUN, *workers, str(EXAMPLES / "plain_ddp.py")], {})
    elastic = cluster.launch([*TORCHRUN, *workers, str(EXAMPLES / "elastic_ddp.py"), "--epochs", "100"], {})
    cluster.finish([plain, elastic], timeout=800)
    for node in (plain, elastic):
        [loss] = re.findall(r"^epoch 100: loss ([\d.]+)$", node.text(), re.MULTILINE)
        assert float(loss) < 0.6, "that of the epoch's last batch; it began at ln 2"


# --- the edges of a step, with workers that the test starts itself ----------------------------------------------------

SCRIPT = """
import os, signal
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

numbers = torch.linspace(-1, 1, 98).unsqueeze(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
torch.manual_seed(0)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            optimizer.zero_grad()
            loss = F.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            BEFORE_COMMIT
            training.commit(loss)
        scheduler.step()


state = elastic_train.run(
    train, model, optimizer, TensorDataset(numbers, numbers.square()), elastic_train.parse_flags(),
    extras={"scheduler": scheduler},
)
print("back at step", state.step)
"""
NOT_SAVED = "the optimizer has a scheduler of torch's, which is not saved"


def start_script(cluster: Cluster, world_size: int, before_commit: str = "", *flags: str) -> list[Node]:
    """SCRIPT, with lines of a test's own in each step."""
    lines = indent(before_commit or "pass", " " * 12).lstrip()
    return start_workers(cluster, world_size, SCRIPT.replace("BEFORE_COMMIT", lines), *flags)


def start_workers(cluster: Cluster, world_size: int, text: str, *flags: str) -> list[Node]:
    """Workers with RANK and its companions alone, as torch.multiprocessing.spawn's users set them."""
    script = cluster.path / "script.py"
    script.write_text(text)
    run_dir = cluster.path / f"run-{world_size}"
    command = [PYTHON, str(script), "--run-dir", str(run_dir), "--epochs", "5", "--global-batch-size", "16", "--ledger"]
    where = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [{} if world_size == 1 else where | {"RANK": str(rank)} for rank in range(world_size)]
    return [cluster.launch([*command, *flags], env) for env in ranks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'extras={"scheduler": scheduler}',
            "extras={}",
            "what extras holds is 'nothing' here and 'scheduler' on the run",
        ),
        ("8", "9", "the model is '4 tensors of 28 numbers ("),
    ],
    ids=["extras", "shapes"],
)
def test_a_node_with_an_older_script_is_refused(cluster: Cluster, old: str, new: str, told: str) -> None:
    """Before it costs the others a world. Its flags are theirs."""
    text = SCRIPT.replace("BEFORE_COMMIT", "import time; time.sleep(0.02)")
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{cluster.port}", "--nnodes=1:3"]
    nodes = []
    for name, script in (("newer.py", text), ("older.py", text.replace(old, new))):
        (cluster.path / name).write_text(script)
        flags = ["--run-dir", str(cluster.run_dir), "--epochs", "100000", "--global-batch-size", "16"]
        nodes.append(cluster.launch([*TORCHRUN, *where, str(cluster.path / name), *flags], {}))
        wait_for_step(cluster.run_dir, 10)
    newer, older = nodes
    assert older.wait(120) == 1
    [line] = error_lines(older)
    assert told in line
    assert "this worker is refused" in line
    newer.signal(signal.SIGTERM)
    cluster.finish([newer], code=1)
    assert len(events(cluster.run_dir, "world")) == 1


@pytest.mark.slow
def test_a_node_with_other_code_is_told(cluster: Cluster) -> None:
    """What its loop does cannot be compared; it trains, with the run's learning rate."""
    text = SCRIPT.replace("BEFORE_COMMIT", "import time; time.sleep(0.02)")
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{cluster.port}", "--nnodes=1:3"]
    nodes = []
    for name, script in (("first.py", text), ("copied.py", text), ("other.py", text.replace("lr=0.1", "lr=0.2"))):
        (cluster.path / name).write_text(script)
        flags = ["--run-dir", str(cluster.run_dir), "--epochs", "100000", "--global-batch-size", "16"]
        nodes.append(cluster.launch([*TORCHRUN, *where, str(cluster.path / name), *flags], {}))
        wait_until(lambda: worlds(cluster.run_dir)[-1:] == [(len(nodes) - 1, len(nodes))], "it trains", 60)
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    assert ["other.py is not what the node has with which this job began" in node.text() for node in nodes] == [
        False, False, True
    ]  # fmt: skip


@pytest.mark.slow
def test_uneven_shares_do_not_bend_the_mean(cluster: Cluster) -> None:
    """16 samples on 3 ranks, and 2 at the end of an epoch, where one has nothing to do."""
    weights = {}
    for world_size in (1, 3):
        cluster.finish(start_script(cluster, world_size))
        _, state = newest_snapshot(cluster.path / f"run-{world_size}")
        weights[world_size] = torch.cat([value.flatten() for value in state["model"].values()])
        check_ledger([cluster.path / f"run-{world_size}"], length=98, batch=16, steps=35)
    assert torch.allclose(weights[1], weights[3], atol=1e-5)


@pytest.mark.slow
def test_a_peer_dies_between_the_optimizers_step_and_the_commit(cluster: Cluster) -> None:
    """Survivors that have the step count it, others compute it again; what is done at the end of an epoch is done."""
    place = "training.state.step == 13 and training.world.generation == 0 and training.world.rank == 1"
    fault = f"if {place}: os.kill(os.getpid(), signal.SIGKILL)"
    nodes = start_script(cluster, 3, fault, "--peer-timeout", "2")
    cluster.finish([nodes[0], nodes[2]])
    assert "back at step 35" in nodes[0].text()
    run_dir = cluster.path / "run-3"
    check_ledger([run_dir], length=98, batch=16, steps=35)
    assert [incident["cause"] for incident in result(run_dir)["incidents"]] == ["peer_lost"]
    _, state = newest_snapshot(run_dir)
    assert state["extras"]["scheduler"]["last_epoch"] == 5
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.9**5)


def test_a_stop_that_comes_with_the_last_step_finishes(cluster: Cluster) -> None:
    """And who gave no extras is told what that costs."""
    fault = "if training.state.step == training.state.last_step - 1: os.kill(os.getpid(), signal.SIGTERM)"
    text = SCRIPT.replace('extras={"scheduler": scheduler}', "extras={}").replace("BEFORE_COMMIT", fault)
    (node,) = start_workers(cluster, 1, text)
    cluster.finish([node])
    assert NOT_SAVED in node.text()
    assert result(cluster.path / "run-1")["step"] == 35
    assert "back at step 35" in node.text(), "what follows run() in the script is run"
    assert outcomes(cluster.path / "run-1") == ["finished"]


# --- what is known of a step only in the next one ---------------------------------------------------------------------


def start_with(cluster: Cluster, world_size: int, after_commit: str, *flags: str) -> list[Node]:
    """SCRIPT, with lines of a test's own after each commit."""
    text = SCRIPT.replace("BEFORE_COMMIT", "pass")
    lines = indent(after_commit, " " * 12)
    return start_workers(cluster, world_size, text.replace("(loss)\n", f"(loss)\n{lines}\n"), *flags)


@pytest.mark.slow
def test_rank_0_dies_with_a_step_that_it_has_not_written_down(cluster: Cluster) -> None:
    """Its loss was still under way: the lowest rank of those that have committed it, here of all, writes it, once."""
    fault = f"""\
if training.state.step == 12 and training.world.generation == 0:
    if training.world.rank > 0:
        open(f"{cluster.path}/committed-{{training.world.rank}}", "x").close()
    else:
        while not all(os.path.exists(f"{cluster.path}/committed-{{rank}}") for rank in (1, 2)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)"""
    nodes = start_with(cluster, 3, fault, "--peer-timeout", "2")
    cluster.finish(nodes[1:])
    run_dir = cluster.path / "run-3"
    check_ledger([run_dir], length=98, batch=16, steps=35)
    told = events(run_dir, "step")
    assert sorted(e["step"] for e in told) == list(range(1, 36))
    by_step = {e["step"]: e for e in told}
    assert by_step[11]["pid"] == nodes[0].process.pid
    assert by_step[12]["pid"] == nodes[1].process.pid
    assert by_step[12]["generation"] == 0


def not_finite(cluster: Cluster, rank: int) -> str:
    """Lines before a commit: the loss of step 12 is NaN on one rank, and the snapshots of steps 5 and 10 are there."""
    written = f"{cluster.path}/run-2/snapshots/step-*{{training.state.step}}-*/manifest.json"
    return f"""\
while training.state.step in (5, 10) and not __import__("glob").glob(f"{written}"):
    pass  # else the next one may be put off
if training.state.step == 11 and training.world.rank == {rank}:
    loss = loss * float("nan")
"""


DIVERGED = (
    "the loss of step 12 (epoch 2) is nan; no snapshot is written of it: the next start goes on from the newest one, "
    "or from scratch where there is none (--snapshot-every). Lower the learning rate, clip the gradients, or look at "
    "the data of that step (--ledger writes it)"
)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_loss_that_is_not_finite_ends_it_on_every_rank(cluster: Cluster, rank: int) -> None:
    nodes = start_script(cluster, 2, not_finite(cluster, rank), "--snapshot-every", "5")
    for node in nodes:
        assert node.wait() == 1
        assert DIVERGED in error_line(node)
    manifest, state = newest_snapshot(cluster.path / "run-2")
    assert manifest.step == 10
    assert all(value.isfinite().all() for value in state["model"].values())
    assert max(e["step"] for e in events(cluster.path / "run-2", "step")) == 11


@pytest.mark.slow
def test_a_peer_is_lost_after_a_loss_that_is_not_finite(cluster: Cluster) -> None:
    """The loss is known, the step after it is broken off: what came of it is neither trained further nor saved."""
    then = f"""\
if training.state.step == 11:
    training.commit(loss)
    while training.world.rank == 0 and not training._sums.late.work.is_completed():
        pass
    open(f"{cluster.path}/known-{{training.world.rank}}", "x").close()
    while training.world.rank == 1 and not os.path.exists(f"{cluster.path}/known-0"):
        pass
    if training.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    continue"""
    fault = not_finite(cluster, 0) + then
    nodes = start_script(cluster, 2, fault, "--snapshot-every", "5", "--peer-timeout", "2")
    assert nodes[0].wait() == 1
    assert error_line(nodes[0]).endswith(DIVERGED)
    manifest, _ = newest_snapshot(cluster.path / "run-2")
    assert manifest.step == 10


@pytest.mark.slow
def test_an_error_that_follows_a_loss_that_is_not_finite_is_not_the_cause(cluster: Cluster) -> None:
    """Both workers raise in the step after it, when its loss has come (a message behind that sum has)."""
    then = """\
if training.state.step == 12:
    torch.distributed.barrier()
    raise ValueError("probabilities must be finite")
"""
    nodes = start_script(cluster, 2, not_finite(cluster, 1) + then, "--snapshot-every", "5")
    for node in nodes:
        assert node.wait() == 1
        assert DIVERGED in error_line(node)
    manifest, _ = newest_snapshot(cluster.path / "run-2")
    assert manifest.step == 10
    assert max(e["step"] for e in events(cluster.path / "run-2", "step")) == 11


@pytest.mark.slow
def test_all_stop_after_the_same_step_and_go_on_from_there(cluster: Cluster) -> None:
    slowly = "__import__('time').sleep(0.02)"
    flags = ("--epochs", "40", "--snapshot-every", "1000")
    nodes = start_with(cluster, 2, slowly, *flags)
    run_dir = cluster.path / "run-2"
    wait_for_step(run_dir, 12)
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [143, 143]
    manifest, _ = newest_snapshot(run_dir)
    [stopped_at] = {e["step"] for e in events(run_dir, "done")}
    assert manifest.step == stopped_at < 280
    cluster.finish(start_with(cluster, 2, "pass", *flags))
    check_ledger([run_dir], length=98, batch=16, steps=280)
    assert sorted(e["step"] for e in events(run_dir, "step")) == list(range(1, 281))


@pytest.mark.slow
@pytest.mark.parametrize("last_step", [12, 13])
def test_no_event_is_missing_where_gradients_are_not_summed(cluster: Cluster, last_step: int) -> None:
    """Gradients that add up over two steps. Rank 0 dies after the second of a pair, before the loss is known, and the
    others commit one more without it; or after the first of a pair, which is known at once."""
    text = SCRIPT.replace("BEFORE_COMMIT", "pass")
    for old, new in (
        ("            optimizer.zero_grad()\n", ""),
        ("            loss = F.mse_loss(ddp(inputs), targets)\n            loss.backward()\n",
         "            is_whole = training.state.step % 2 == 1\n"
         "            with contextlib.nullcontext() if is_whole else ddp.no_sync():\n"
         "                loss = F.mse_loss(ddp(inputs), targets)\n                loss.backward()\n"),
        ("            optimizer.step()\n", "            if is_whole:\n"
         "                optimizer.step()\n                optimizer.zero_grad()\n"),
        ("import os, signal\n", "import contextlib, os, signal\n"),
        ("(loss)\n",
         f"(loss)\n            if training.state.step == {last_step} and training.world.generation == 0 and "
         "training.world.rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"),
    ):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    nodes = start_workers(cluster, 3, text, "--peer-timeout", "2")
    cluster.finish(nodes[1:])
    run_dir = cluster.path / "run-3"
    told = events(run_dir, "step")
    assert sorted(e["step"] for e in told) == list(range(1, 36))
    told_by_rank_0 = 13 if last_step == 13 else 11
    assert {e["pid"] for e in told if e["step"] <= told_by_rank_0} == {nodes[0].process.pid}


GATHERED = """
def gathered(mean):
    means = [torch.zeros(8) for _ in range(2)]
    torch.distributed.all_gather(means, mean)
    return means

"""


@pytest.mark.slow
def test_buffers_are_rank_0s_in_each_forward_pass_and_it_is_not_ddp_that_sends_them(cluster: Cluster) -> None:
    """Its own wait for them may not end when a peer is lost."""
    text = SCRIPT.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(8), torch.nn.Tanh()")
    for old, new in (
        ("    ddp = training.parallel()\n",
         "    ddp = training.parallel()\n    assert not ddp.will_sync_module_buffers()\n    seen = []\n"
         "    training.model.register_forward_pre_hook(lambda *_: seen.append(model[1].running_mean.clone()))\n"),
        ("            BEFORE_COMMIT\n",
         "            assert torch.equal(*gathered(seen.pop()))\n"
         "            assert not torch.equal(*gathered(model[1].running_mean))\n"),
        ("def train(", GATHERED + "def train("),
    ):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    cluster.finish(start_workers(cluster, 2, text.replace("lr=0.1", "lr=0.01"), "--global-batch-size", "14"))


SCALED = """
import torch
from torch.utils.data import TensorDataset
import elastic_train

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=FUSED)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
broken = set()


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            optimizer.zero_grad()
            loss = (ddp(inputs) - targets).square().mean()
            scaler.scale(loss).backward()
            step = training.state.step
            if step == 3:
                scaler.unscale_(optimizer)
            if step in (1, 3) and step not in broken:
                broken.add(step)
                training._evaluations._membership.sockets.shut()  # as the watcher does when a peer is lost
            if step == 2 and training.world.world_size > 1 and step not in broken:
                broken.add(step)
                if training.world.rank == 0:  # as NCCL may end, once it is aborted; the scaler skips the step
                    model.weight.grad.fill_(float("nan"))
                training._evaluations._membership.sockets.shut()
            scaler.step(optimizer)
            scaler.update()
            training.commit(loss)


data = TensorDataset(torch.ones(16, 1), torch.zeros(16, 1))
elastic_train.run(train, model, optimizer, data, elastic_train.parse_flags(), extras={"scaler": scaler})
assert broken >= {1, 3}
print("weight", model.weight.item(), "scale", scaler.get_scale())
"""


def weight_and_scale(node: Node) -> tuple[float, float]:
    """What it has printed at its end."""
    [[weight, scale]] = re.findall(r"^weight (\S+) scale (\S+)$", node.text(), re.MULTILINE)
    return float(weight), float(scale)


@pytest.mark.parametrize(("world_size", "is_fused"), [(1, False), (2, False), (2, True)])
@pytest.mark.slow
def test_a_step_that_is_redone_is_unscaled(cluster: Cluster, world_size: int, is_fused: bool) -> None:
    """And one whose reduction was broken off does not count, though a scaler takes that for an overflow."""
    nodes = start_workers(cluster, world_size, SCALED.replace("FUSED", str(is_fused)))
    cluster.finish(nodes)
    for node in nodes:
        weight, scale = weight_and_scale(node)
        assert weight == pytest.approx(0.98**5)
        assert scale == 1024.0, "what rank 0 alone has found is forgotten"
    assert not events(cluster.path / f"run-{world_size}", "states_differ")


OVERFLOWING = """
import torch
from torch.utils.data import TensorDataset
import elastic_train

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            optimizer.zero_grad()
            loss = (ddp(inputs) - targets).square().mean()
            if training.state.step in (1, 3) and training.world.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            training.commit(loss)


data = TensorDataset(torch.ones(20, 1), torch.zeros(20, 1))
elastic_train.run(train, model, optimizer, data, elastic_train.parse_flags(), extras={"scaler": scaler})
print("weight", model.weight.item(), "scale", scaler.get_scale())
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_that_a_fused_optimizer_skips_ends_nothing(cluster: Cluster, world_size: int) -> None:
    """torch calls its `step` all the same, and the kernel changes nothing."""
    nodes = start_workers(cluster, world_size, OVERFLOWING)
    cluster.finish(nodes)
    for node in nodes:
        assert weight_and_scale(node) == (pytest.approx(0.98**8), 256.0)
    assert not events(cluster.path / f"run-{world_size}", "states_differ")
    assert audit(cluster.path / f"run-{world_size}").passed


ABSENT = """
import torch
from torch.utils.data import TensorDataset
import elastic_train

model = torch.nn.Sequential(
    torch.nn.Conv1d(1, 1, 1), torch.nn.BatchNorm1d(1), torch.nn.Dropout(), torch.nn.Flatten(), torch.nn.Linear(4, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            is_absent = training.weight == 0
            kept = [buffer.clone() for buffer in model.buffers()]
            for buffer in kept:  # DDP gives everybody rank 0's
                torch.distributed.broadcast(buffer, 0)
            optimizer.zero_grad()
            loss = (ddp(inputs) - targets).square().mean()
            if is_absent:
                loss = loss * float("nan")  # as a variance over the batch is, which a single sample has not
            loss.backward()
            optimizer.step()
            training.commit(loss)
            assert all(parameter.isfinite().all() for parameter in model.parameters())
            assert all(layer.training for layer in model.modules())
            same = [torch.equal(*pair) for pair in zip(model.buffers(), kept)]
            assert all(same) or not is_absent, (training.state.step, same)
            if is_absent:
                print(f"rank {training.world.rank} is absent in step {training.state.step}", flush=True)


inputs = torch.zeros(33, 1, 4)
inputs[0] = 1000.0
elastic_train.run(train, model, optimizer, TensorDataset(inputs, torch.zeros(33, 1)), elastic_train.parse_flags())
"""


@pytest.mark.slow
def test_an_absent_sample_leaves_no_trace(cluster: Cluster) -> None:
    """Rank 1 has none of the last sample of an epoch; rank 0's BatchNorm's statistics are those that are saved."""
    nodes = start_workers(cluster, 2, ABSENT)
    cluster.finish(nodes)
    found = [line for node in nodes for line in node.text().splitlines() if "is absent" in line]
    assert found == [f"rank 1 is absent in step {step}" for step in (3, 6, 9, 12, 15)]


COLD = """
import os, signal, time
import torch
from torch.utils.data import TensorDataset
import elastic_train


class Cold(torch.nn.Linear):
    is_cold = False

    def forward(self, inputs):
        if self.is_cold:
            self.is_cold = False
            time.sleep(10)
        return super().forward(inputs)


model = Cold(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(training):
    ddp = training.parallel()
    model.is_cold = training.world.generation > 0  # as a compiler that meets another batch size
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            optimizer.zero_grad()
            loss = (ddp(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            training.commit(loss)
            if training.state.step == 60 and training.world.generation == 0 and training.world.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)


data = TensorDataset(torch.ones(256, 1), torch.zeros(256, 1))
elastic_train.run(train, model, optimizer, data, elastic_train.parse_flags())
"""


@pytest.mark.slow
def test_the_first_step_of_a_world_may_take_its_time(cluster: Cluster) -> None:
    nodes = start_workers(cluster, 3, COLD, "--peer-timeout", "2")
    cluster.finish(nodes[:2])
    assert {e["generation"] for e in events(cluster.path / "run-3", "world")} == {0, 1}
    assert result(cluster.path / "run-3")["step"] == 80


RAISES = """
import signal
import torch
from torch.utils.data import TensorDataset
import elastic_train


def train(training):
    for batch in training.batches():
        raise KeyError("mine")


model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
try:
    elastic_train.run(train, model, optimizer, TensorDataset(torch.ones(16, 1)), elastic_train.parse_flags())
except KeyError as error:
    assert error.args == ("mine",)
    assert handlers == [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    print("as before")
"""


@pytest.mark.slow
def test_after_the_functions_own_error_signals_do_what_they_did(cluster: Cluster) -> None:
    (node,) = start_workers(cluster, 1, RAISES)
    cluster.finish([node])
    assert "as before" in node.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before_commit", "flags", "code", "message"),
    [
        ("continue", (), 2, "step 1 ended without training.commit(loss)"),
        ("training.commit(loss)", (), 2, "there is no step in hand"),
        ("loss = loss * float('nan')", (), 1, "step 1 (epoch 1) is nan; no snapshot is written"),
        ("", ("--lr", "0.1"), 2, "--lr is for the bundled loop"),
    ],
)
def test_mistakes_end_in_one_line(
    cluster: Cluster, before_commit: str, flags: tuple[str, ...], code: int, message: str
) -> None:
    (node,) = start_script(cluster, 1, before_commit, *flags)
    cluster.finish([node], code=code)
    assert message in error_line(node)
    if before_commit == "continue":
        assert [event["loss"] for event in events(cluster.path / "run-1", "step")] == [None], "none was ever given"


@pytest.mark.slow
def test_workers_whose_gradients_nobody_averages_do_not_train(cluster: Cluster) -> None:
    assert "training.parallel()" in SCRIPT
    nodes = start_workers(
        cluster, 2, SCRIPT.replace("training.parallel()", "training.model").replace("BEFORE_COMMIT", "pass")
    )
    codes = sorted(node.wait() for node in nodes)
    assert codes in ([1, 2], [2, 2]), "who is broken off hears of it from the other"
    for node in nodes:
        assert "nobody averages the gradients of the 2 workers" in error_line(node)
        assert "to continue" not in error_line(node), "it would fail again"


@pytest.mark.slow
def test_a_parameter_without_a_gradient_ends_the_first_step_before_the_optimizers(cluster: Cluster) -> None:
    """DDP has summed nothing then, and would say so in the second step."""
    unused = "model.register_parameter('unused', torch.nn.Parameter(torch.ones(1)))\noptimizer = "
    text = SCRIPT.replace("optimizer = ", unused).replace("BEFORE_COMMIT", "print('has stepped')")
    nodes = start_workers(cluster, 2, text)
    codes = sorted(node.wait() for node in nodes)
    assert codes in ([1, 2], [2, 2]), "who is broken off hears of it from the other"
    for node in nodes:
        assert "1 parameter (unused) got no gradient in step 1, and DDP waits for all" in error_line(node)
        assert "training.parallel() find_unused_parameters=True" in error_line(node)
        assert "has stepped" not in node.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "code"), [("raise ValueError('my mistake')", 1), ("training.commit(torch.ones(3))", 2)]
)
def test_an_error_after_the_optimizers_step_loses_nothing_and_does_no_step_twice(
    cluster: Cluster, mistake: str, code: int
) -> None:
    """The weights cannot be taken back: that step counts."""
    (undisturbed,) = start_script(cluster, 1)
    cluster.finish([undisturbed])
    expected = result(cluster.path / "run-1")["state_sha256"]
    flags = ("--snapshot-every", "0", "--run-dir", str(cluster.path / "again"))
    (node,) = start_script(cluster, 1, f"if training.state.step == 9: {mistake}", *flags)
    assert node.wait() == code
    assert ("the commit of step 10, which counts" in node.text()) == (code == 1), "ours says itself what to mend"
    assert "the state of step 10 is saved, mend that and start all nodes again" in node.text()
    cluster.finish(start_script(cluster, 1, "pass", *flags))
    assert result(cluster.path / "again")["state_sha256"] == expected
    check_ledger([cluster.path / "again"], length=98, batch=16, steps=35)


def test_who_comes_when_all_is_trained_gets_no_model(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare, or a node that waits to be admitted, has not what the others have trained, and must not save it."""

    def finished_without_it(worker: Worker, _program: object) -> int:
        worker.directory.ownership.release()
        return 0

    monkeypatch.setattr(own_loop, "run_worker", finished_without_it)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    with pytest.raises(SystemExit) as ended:
        own_loop.run(lambda _training: None, model, optimizer, data, Config(run_dir=cluster.run_dir))
    assert ended.value.code == 0


@pytest.mark.slow
def test_the_best_may_be_rated_at_the_top_of_the_loop(cluster: Cluster) -> None:
    keep = "for epoch in training.epochs():\n        training.keep(float(epoch == 2))"
    text = SCRIPT.replace("for epoch in training.epochs():", keep).replace("BEFORE_COMMIT", "pass")
    for every in ("0", "7"):  # 7: a regular one is due at that very step
        run_dir = cluster.path / f"every-{every}"
        flags = ("--snapshot-every", every, "--keep-best", "1", "--keep-snapshots", "1", "--run-dir", str(run_dir))
        cluster.finish(start_workers(cluster, 1, text, *flags))
        assert [int(name.split("-")[1]) for name in snapshot_names(run_dir)] == [14, 35]
        assert result(run_dir)["best"] == {"step": 14, "metric": 1.0}


@pytest.mark.slow
def test_gradients_that_add_up_over_commits_are_told(cluster: Cluster) -> None:
    text = SCRIPT.replace("BEFORE_COMMIT", "pass")
    assert text.count("optimizer.step()") == 1
    text = text.replace("optimizer.step()", "if training.state.step % 4 == 3: optimizer.step()")
    [node] = start_workers(cluster, 1, text)
    cluster.finish([node])
    [warning] = events(cluster.path / "run-1", "warning")
    assert warning["message"].startswith("step 1 is committed without a step of the optimizer. Gradients that add up")


@pytest.mark.slow
def test_a_function_that_returns_early_ends_the_training(cluster: Cluster) -> None:
    returning = "training.commit(loss)\nif training.state.step % 9 == 0: return\ncontinue"
    (node,) = start_script(cluster, 1, returning)
    cluster.finish([node])
    assert result(cluster.path / "run-1")["step"] == 9
    assert "returned at step 9 of 35" in node.text()
    for flags, last in (((), 9), (("--epochs", "6"), 18), (("--epochs", "6"), 18)):
        (node,) = start_script(cluster, 1, returning, *flags)
        cluster.finish([node])
        assert "back at step " + str(last) in node.text()
        assert (f"is finished: {last} steps" in node.text()) is (outcomes(cluster.path / "run-1")[-1] != "finished")
    assert outcomes(cluster.path / "run-1") == ["finished", "already_finished", "finished", "already_finished"]
    assert "the training function had returned, before step 42" in node.text()


@pytest.mark.slow
def test_a_collective_on_one_rank_alone_is_told_with_its_place(cluster: Cluster) -> None:
    alone = "        if epoch + training.world.rank == 0: training.keep(0.5)\n        scheduler.step()"
    text = SCRIPT.replace("        scheduler.step()", alone).replace("BEFORE_COMMIT", "pass")
    nodes = start_workers(cluster, 2, text, "--peer-timeout", "2", "--keep-best", "1", "--epochs", "2")
    cluster.finish(nodes)
    places = [
        {place for line in node.text().splitlines() if "all take part in one: it is at" in line
         for place in re.findall(r"script\.py:(\d+) \(train\)", line)}
        for node in nodes
    ]  # fmt: skip
    assert all(len(found) == 1 for found in places), places
    assert places[0] != places[1]


@pytest.mark.slow
def test_a_rank_that_returns_alone_is_told_and_nothing_is_lost(cluster: Cluster) -> None:
    """What decides it is known on rank 0 alone: the others would wait for --stall-timeout in a step without it."""
    at_9 = "training.commit(loss)\nif training.state.step == 9 and training.world.rank == RANK: return\ncontinue"
    flags = ("--peer-timeout", "4", "--snapshot-every", "0")
    first, *others = start_script(cluster, 3, at_9.replace("RANK", "0"), *flags)
    assert first.wait(60) == 2
    said = error_line(first)
    assert "returned at step 9 on rank 0 (" in said
    assert "must return on all ranks at the same step" in said
    assert "such as a sum, and by what is in `extras`: a newcomer has no other state" in said
    assert "the state of step 9 is saved" in said, "also where the others are of its node, and wait for it to save"
    for node in others:
        assert node.wait(20) == 1
        assert "returned at step 9 on rank 0 (" in error_line(node)
        assert "the state of step 9 is saved" in error_line(node)
    cluster.finish(start_script(cluster, 3, "", *flags))
    check_ledger([cluster.path / "run-3"], length=98, batch=16, steps=35)


@pytest.mark.slow
def test_a_rank_that_returns_alone_saves_the_state_for_its_node(cluster: Cluster) -> None:
    """It is the first worker of its node, for which the other one waits."""
    at_9 = "training.commit(loss)\nif training.state.step == 9 and training.world.rank == 0: return\ncontinue"
    (cluster.path / "script.py").write_text(SCRIPT.replace("BEFORE_COMMIT", indent(at_9, " " * 12).lstrip()))
    flags = ("--peer-timeout", "4", "--snapshot-every", "0", "--epochs", "5", "--global-batch-size", "16")
    [node] = cluster.start(*flags, nproc=2, nnodes="1:1", program=("script.py",))
    cluster.finish([node], code=1)
    assert "returned at step 9 on rank 0 (" in node.text()
    assert newest_snapshot(cluster.run_dir)[0].step == 9


@pytest.mark.slow
def test_keep_on_rank_0_alone_at_the_end_is_told(cluster: Cluster) -> None:
    """Its collective would be taken for one of the run's own end, and everything after that for the one before."""
    at_the_end = "training.commit(loss)\nif training.state.is_finished and training.world.rank == 0: training.keep(1.0)"
    first, second = start_script(cluster, 2, f"{at_the_end}\ncontinue", "--peer-timeout", "4")
    assert second.wait(60) == 2
    said = error_line(second)
    assert "returned at step 35 on rank 1 (" in said
    assert "keep() too" in said
    assert "the state of step 35 is saved" in said
    assert first.wait(20) != 0


@pytest.mark.slow
def test_ranks_may_return_early_one_after_the_other(cluster: Cluster) -> None:
    at_9 = "if training.state.step == 9:\n    time.sleep(5.0 * training.world.rank)\n    return"
    before_commit = f"import time\ntraining.commit(loss)\n{at_9}\ncontinue"
    nodes = start_script(cluster, 2, before_commit, "--peer-timeout", "2")
    cluster.finish(nodes)
    assert result(cluster.path / "run-2")["step"] == 9


@pytest.mark.parametrize("snapshot_every", ["7", "0"])
@pytest.mark.slow
def test_what_one_rank_alone_keeps_is_told_by_name(cluster: Cluster, snapshot_every: str) -> None:
    """`if rank == 0: best = ...`: with rank 0 the best would be gone, and a worse one take its place."""
    text = SCRIPT.replace(
        'extras={"scheduler": scheduler}', 'extras={"scheduler": scheduler, "best": best, "same": same}'
    ).replace(
        "def train(training):",
        """class Kept:
    def __init__(self):
        self.values = {"loss": 9.0, "steps": []}

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, values):
        self.values = dict(values)


best, same = Kept(), Kept()


def train(training):""",
    )
    keep = (
        "same.values['steps'] = [training.state.step]\n"
        "            if training.world.rank == 0: best.values['loss'] = loss.item()"
    )
    flags = ("--snapshot-every", snapshot_every, "--epochs", "20")
    nodes = start_workers(cluster, 2, text.replace("BEFORE_COMMIT", keep), *flags)
    cluster.finish(nodes)
    said = [line for node in nodes for line in node.text().splitlines() if "extras differ" in line]
    assert len(said) == 1, "once"
    assert "extras differ between the ranks: best. " in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train, model,", "train, torch.nn.DataParallel(model),", "wrapped in DataParallel: give model.module"),
        ('{"scheduler": scheduler}', '{"best": 0.5}', "extras['best'] is a float: it must have state_dict()"),
        (
            "TensorDataset(numbers, numbers.square())",
            "torch.utils.data.DataLoader(TensorDataset(numbers))",
            "a DataLoader was given: give its data set (loader.dataset)",
        ),
        ("parse_flags()", "parse_flags(['--epochs', '3'])", "parse_flags takes a dataclass"),
        ('{"scheduler": scheduler}', "[scheduler]", "extras is a list: give a dict"),
        ("training.commit(loss)", "training.commit(torch.ones(3))", "commit() was given a tensor of shape (3,)"),
        ("optimizer.zero_grad()", "training.keep(0.5)", "keep() was called while step 1 is in hand"),
        (
            "torch.manual_seed(0)",
            "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
            "there is a process group already",
        ),
    ],
    ids=["wrapped", "extra", "loader", "flags", "extras", "loss", "keep", "group"],
)
def test_wrong_parts_are_refused_in_one_line(cluster: Cluster, old: str, new: str, message: str) -> None:
    assert old in SCRIPT
    [node] = start_workers(cluster, 1, SCRIPT.replace(old, new).replace("BEFORE_COMMIT", "pass"))
    cluster.finish([node], code=2)
    assert message in error_line(node)


@pytest.mark.parametrize(
    "mistake",
    [
        "if training.world.rank:\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01); optimizer.step()",
        pytest.param("F.mse_loss(model(inputs), targets).backward(); optimizer.step()", marks=pytest.mark.slow),
    ],
    ids=["a step on one rank alone", "a backward pass beside DDP"],
)
def test_ranks_that_go_their_own_ways_are_told(cluster: Cluster, mistake: str) -> None:
    """The trained code causes it, and would cause it again: training goes on, with a warning."""
    nodes = start_script(cluster, 2, mistake)
    cluster.finish(nodes)
    assert not any(NOT_SAVED in node.text() for node in nodes), "it was given as one of the extras"
    line = "of 2 workers are not equal after step 35, and there is no majority"
    assert len([node for node in nodes if line in node.text()]) == 1
    assert any("; training by train() from scratch; " in node.text() for node in nodes), "the function's name"
    run_dir = cluster.path / "run-2"
    [event] = events(run_dir, "states_differ")
    assert (event["is_mended"], event["has_majority"], len(event["wrong"])) == (False, False, 2)
    found = audit(run_dir)
    assert found.reasons == ["state: the ranks' weights were not equal after step 35, and training went on"]


GAN = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import elastic_train

torch.manual_seed(0)
g, d = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(g.parameters(), lr=0.01)
d_optimizer = torch.optim.Adam(d.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(d_optimizer, 100)


def train(training):
    ddp_g, ddp_d = training.parallel(), training.parallel(d)
    for _ in training.epochs():
        for (real,) in training.batches():
            fake = ddp_g(torch.randn(len(real), 4))
            d_optimizer.zero_grad()
            (ddp_d(fake.detach()).mean() - ddp_d(real).mean()).backward()
            d_optimizer.step()
            scheduler.step()
            if training.world.generation == 0 and training.world.rank == 0 and training.state.step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            g_optimizer.zero_grad()
            loss = -d(fake).mean()
            loss.backward()
            g_optimizer.step()
            training.commit(loss)
    steps = {int(held["step"]) for one in (g_optimizer, d_optimizer) for held in one.state.values()}
    print("steps", steps, "scheduler", scheduler.last_epoch, "of", training.state.step, file=sys.stderr)


data = TensorDataset(torch.randn(256, 2, generator=torch.Generator().manual_seed(1)))
extras = {"d": d, "d_optimizer": d_optimizer, "scheduler": scheduler}
elastic_train.run(train, g, g_optimizer, data, elastic_train.parse_flags(), extras=extras)
"""


def test_a_worker_dies_between_the_steps_of_two_optimizers(cluster: Cluster) -> None:
    (cluster.path / "gan.py").write_text(GAN)
    nodes = cluster.start("--epochs", "16", "--ledger", nodes=3, program=("gan.py",))
    codes = [node.wait() for node in nodes]
    assert sorted(codes) == [0, 0, 1]
    survivors = [node for node, code in zip(nodes, codes, strict=True) if code == 0]
    for node in survivors:
        assert "steps {64} scheduler 64 of 64" in node.text()
        assert "no part of the state" not in node.text()
    assert not events(cluster.run_dir, "states_differ")
    assert [(e["cause"], e["step"]) for e in events(cluster.run_dir, "world") if e["rank"] == 0][1:] == [
        ("peer_lost", 20)
    ]
    check_steps(cluster.run_dir, 64)


ZERO_GRAD_LAST = """
import os, signal
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(training):
    ddp = training.parallel()
    for epoch in training.epochs():
        for inputs, targets in training.batches():
            loss = F.mse_loss(ddp(inputs), targets)
            place = (training.world.generation, training.world.rank, training.state.step)
            if place == (0, 2, 7):
                model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            if place == (1, 1, 13):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad(set_to_none=True)
            training.commit(loss)


numbers = torch.linspace(-1, 1, 160).unsqueeze(1)
data = TensorDataset(numbers, numbers.square())
elastic_train.run(train, model, optimizer, data, elastic_train.parse_flags())
"""


@pytest.mark.slow
def test_gradients_of_a_step_that_was_broken_off_are_not_added_to_the_redone_one(cluster: Cluster) -> None:
    """A peer is lost in a backward pass, another one between the optimizer's step and `zero_grad()`, which is where
    many a loop ends."""
    (cluster.path / "script.py").write_text(ZERO_GRAD_LAST)
    flags = ["--epochs", "2", "--global-batch-size", "16"]
    nodes = cluster.start(*flags, "--peer-timeout", "2", nodes=3, program=("script.py",))
    undisturbed = cluster.launch([PYTHON, "script.py", *flags, "--run-dir", "alone"], {})
    assert sorted(node.wait() for node in nodes) == [0, 1, 1]
    cluster.finish([undisturbed])
    assert [e["cause"] for e in events(cluster.run_dir, "world") if e["rank"] == 0][1:] == ["peer_lost"] * 2
    ours, expected = (newest_snapshot(run)[1]["model"] for run in (cluster.run_dir, cluster.path / "alone"))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


OF_ALL_RANKS = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(4, 3), torch.nn.Linear(2, 3)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images, texts):
        return self.scale.exp() * F.normalize(self.image(images)), F.normalize(self.text(texts))


RECIPE


data = TensorDataset(torch.randn(130, 4), torch.randn(130, 2))
model = Pairs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
elastic_train.run(train, model, optimizer, data, elastic_train.parse_flags())
"""


MEAN_OVER_TOKENS = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
tokens = torch.randint(0, 5, (130, 12))
labels = torch.where(torch.arange(12) < torch.randint(1, 13, (130, 1)), tokens.roll(-1, 1), -100)


RECIPE


model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
elastic_train.run(train, model, optimizer, TensorDataset(tokens, labels), elastic_train.parse_flags())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sign"), [(OF_ALL_RANKS, "of_all_ranks"), (MEAN_OVER_TOKENS, "!= -100")], ids=["clip", "tokens"]
)
def test_a_loss_over_all_samples_of_a_step_as_the_readme_has_it(cluster: Cluster, script: str, sign: str) -> None:
    """64 samples on three ranks, and two at the end of an epoch, are those of one rank."""
    readme = (Path(own_loop.__file__).parents[1] / "training" / "README.md").read_text()
    [snippet] = [part for part in readme.split("```") if part.startswith("python\n") and sign in part]
    *functions, loop = snippet.removeprefix("python\n").split("\n\n\n")
    begin = "def train(training):\n    ddp, optimizer = training.parallel(), training.optimizer\n"
    train = f"{begin}    for _ in training.epochs():\n{indent(loop, ' ' * 8)}"
    (cluster.path / "script.py").write_text(script.replace("RECIPE", "\n\n\n".join([*functions, train])))
    flags = ["script.py", "--epochs", "2", "--global-batch-size", "64", "--run-dir"]
    three = cluster.launch([*TORCHRUN, "--standalone", "--nproc-per-node=3", *flags, "three"], {})
    one = cluster.launch([PYTHON, *flags, "one"], {})
    cluster.finish([three, one])
    ours, expected = (newest_snapshot(cluster.path / name)[1] for name in ("three", "one"))
    torch.testing.assert_close(ours["model"], expected["model"], rtol=1e-9, atol=1e-9)
    losses = [[round(e["loss"], 9) for e in events(cluster.path / name, "step")] for name in ("three", "one")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


LAZY = """
import time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import elastic_train

model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.LazyLinear(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def loss(module, batch):
    time.sleep(0.02)
    return F.mse_loss(module(batch[0]), batch[1])


def train(training):
    for epoch in training.epochs():
        for share in training.shares():
            training.commit(training.step(share, loss))


numbers = torch.linspace(-1, 1, 160).unsqueeze(1)
elastic_train.run(train, model, optimizer, TensorDataset(numbers, numbers.square()), elastic_train.parse_flags())
"""


@pytest.mark.slow
def test_a_newcomer_takes_the_weights_of_lazy_modules(cluster: Cluster) -> None:
    """Which its own have no shape yet for."""
    (cluster.path / "script.py").write_text(LAZY)
    flags = ["--epochs", "100000", "--global-batch-size", "16"]
    nodes = cluster.start(*flags, nnodes="1:2", program=("script.py",))
    wait_for_step(cluster.run_dir, 10, 180)
    nodes += cluster.start(*flags, nnodes="1:2", program=("script.py",))
    wait_until(lambda: worlds(cluster.run_dir)[-1:] == [(1, 2)], "it joins", 180)
    begun = max(e["step"] for e in events(cluster.run_dir, "world"))
    wait_for_step(cluster.run_dir, begun + 20, 180)
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    assert [e["cause"] for e in events(cluster.run_dir, "world") if e["rank"] == 0][1:] == ["join"]
    assert not events(cluster.run_dir, "states_differ")
