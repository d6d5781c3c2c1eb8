"""The README's table "what you have -> what you type", row by row."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from elastic_train.cli import main as console
from elastic_train.training.state import state_sha256
from tests.integration.cluster import (
    PYTHON,
    TORCHRUN,
    Cluster,
    Node,
    check_ledger,
    error_lines,
    events,
    free_port,
    newest_snapshot,
    outcomes,
    result,
    wait_for_step,
    wait_until,
    worlds,
)

LENGTH, BATCH = 1437, 64
SHORT = ("--max-steps", "20", "--ledger")


def check_short_run(run_dir: Path, world_size: int, steps: int = 20) -> None:
    assert worlds(run_dir) == [(0, world_size)]
    assert result(run_dir)["step"] == steps
    check_ledger([run_dir], length=LENGTH, batch=BATCH, steps=steps)


@pytest.mark.slow
def test_spawn_without_torchrun_and_one_worker_dies(cluster: Cluster) -> None:
    node = cluster.start_alone(
        *SHORT,
        "--spawn",
        "3",
        "--peer-timeout",
        "2",
        env={"ELASTIC_TRAIN_FAULT": "kill@step:rank=0,step=10,generation=0"},
    )
    cluster.finish([node])
    assert worlds(cluster.run_dir) == [(0, 3), (1, 2)]
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=20)


@pytest.mark.slow
def test_spawn_passes_a_stop_on_and_no_worker_stays(cluster: Cluster) -> None:
    node = cluster.start_alone("--epochs", "1000", "--spawn", "2")
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events")
    wait_for_step(cluster.run_dir, 5)
    workers = node.workers()
    assert len(workers) == 2
    node.signal(signal.SIGTERM)
    assert node.wait() == 143
    assert outcomes(cluster.run_dir) == ["stopped", "stopped"]
    assert not any(worker.is_running() for worker in workers)
    assert newest_snapshot(cluster.run_dir)[0].step > 0


def test_static_torchrun(cluster: Cluster) -> None:
    where = ("--nnodes=2", "--master-addr=localhost", f"--master-port={free_port()}")
    program = ("-m", "elastic_train", "--run-dir", str(cluster.run_dir), *SHORT)
    nodes = [cluster.launch([*TORCHRUN, *where, f"--node-rank={rank}", *program], {}) for rank in range(2)]
    cluster.finish(nodes)
    check_short_run(cluster.run_dir, 2)
    said = "".join(node.text() for node in nodes)
    assert "2 workers on 2 nodes" in said
    assert "global batch 64 = 32 samples a worker" in said


@pytest.mark.slow
def test_the_node_of_master_addr_dies_in_a_static_world(cluster: Cluster) -> None:
    """Its agent too, which hosts the store in which torchrun's agents have met."""
    where = ("--nnodes=3", "--master-addr=localhost", f"--master-port={free_port()}")
    flags = ("--peer-timeout", "2", "--ledger", "--max-steps", "40")
    fault = {"ELASTIC_TRAIN_FAULT": "kill-node@step:rank=0,step=10,generation=0"}
    program = ("-m", "elastic_train", "--run-dir", str(cluster.run_dir), *flags)
    nodes = [cluster.launch([*TORCHRUN, *where, f"--node-rank={rank}", *program], fault) for rank in range(3)]
    assert [node.wait() for node in nodes] == [-signal.SIGKILL, 0, 0]
    assert worlds(cluster.run_dir) == [(0, 3), (1, 2)]
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=40)


@pytest.mark.slow
def test_several_workers_of_one_machine(cluster: Cluster) -> None:
    program = ("-m", "elastic_train", "--run-dir", str(cluster.run_dir), *SHORT)
    cluster.finish([cluster.launch([*TORCHRUN, "--standalone", "--nproc-per-node=2", *program], {})])
    check_short_run(cluster.run_dir, 2)


@pytest.mark.slow
@pytest.mark.skipif("--virtual-local-rank" not in get_args_parser().format_help(), reason="torch before 2.15")
def test_workers_of_which_each_sees_one_gpu_as_the_first(cluster: Cluster) -> None:
    """torchrun tells each that its LOCAL_RANK is 0."""
    program = ("--virtual-local-rank", "-m", "elastic_train")
    cluster.finish(cluster.start(*SHORT, "--device", "cpu", nnodes="1:2", nproc=2, program=program))
    check_short_run(cluster.run_dir, 2)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", "--use-env"])
def test_torch_distributed_launch(cluster: Cluster, flag: str) -> None:
    command = [PYTHON, "-m", "torch.distributed.launch", f"--master-port={free_port()}", "--nproc-per-node=2"]
    program = ["-m", "elastic_train", "--run-dir", str(cluster.run_dir), *SHORT]
    cluster.finish([cluster.launch([*command, *([flag] if flag else []), *program], {})])
    check_short_run(cluster.run_dir, 2)


@pytest.mark.slow
def test_srun_tasks_of_two_hosts(cluster: Cluster) -> None:
    """As srun starts them, with its variables; srun itself is not needed for that."""
    step = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost"}
    port = {"MASTER_PORT": str(free_port())}
    nodes = [
        cluster.start_alone(
            *SHORT, env=step | port | {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}
        )
        for rank in ("0", "1")
    ]
    cluster.finish(nodes)
    check_short_run(cluster.run_dir, 2)


@pytest.mark.slow
def test_data_parallel_and_back_to_ddp(cluster: Cluster) -> None:
    def train(steps: int, *flags: str, start: Callable[..., Node | list[Node]]) -> None:
        started = start("--max-steps", str(steps), "--ledger", *flags)
        cluster.finish(started if isinstance(started, list) else [started])

    train(10, "--parallel", "dp", start=cluster.start_alone)
    assert "is faster" in cluster.nodes[-1].text()
    keys = newest_snapshot(cluster.run_dir)[1]["model"].keys()
    assert not any("module." in key for key in keys)
    train(20, "--spawn", "2", start=cluster.start_alone)
    train(30, "--parallel", "dp", start=cluster.start_alone)
    assert newest_snapshot(cluster.run_dir)[1]["model"].keys() == keys
    assert [e["source"] for e in events(cluster.run_dir, "restore") if e["rank"] == 0] == [
        "scratch", "snapshot", "snapshot"
    ]  # fmt: skip
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=30)


HALVES_TASK = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train import Task

PLACES = os.environ["PLACES"].split()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).to(PLACES[0])
        self.second = nn.Linear(8, 2).to(PLACES[1])

    def forward(self, inputs):
        return self.second(self.first(inputs.to(PLACES[0])).to(PLACES[1]))


class Halves(Task):
    def build_model(self):
        return Model()

    def train_dataset(self):
        inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels.to(PLACES[1]))
"""
HALVES = ("--task", "mine:Halves", "--max-steps", "10", "--global-batch-size", "15")


@pytest.mark.slow
def test_a_model_in_two_parts_under_ddp(cluster: Cluster) -> None:
    """Both parts on the CPU, of which there is one: on several GPUs a world of two refuses it."""
    (cluster.path / "mine.py").write_text(HALVES_TASK)
    weights = []
    for spawn in ((), ("--spawn", "2")):
        run_dir = cluster.path / f"run{len(spawn)}"
        cluster.finish([cluster.start_alone(*HALVES, *spawn, run_dir=run_dir, env={"PLACES": "cpu cpu"})])
        weights.append(newest_snapshot(run_dir)[1]["model"])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_gpu_and_a_model_half_on_it(cluster: Cluster) -> None:
    (cluster.path / "mine.py").write_text(HALVES_TASK)
    cluster.finish([cluster.start_alone(*SHORT, "--device", "cuda")])
    check_short_run(cluster.run_dir, 1)
    halves = cluster.path / "halves"
    cluster.finish([cluster.start_alone(*HALVES, run_dir=halves, env={"PLACES": "cpu cuda:0"})])
    assert result(halves)["step"] == 10


# --- weights in and out -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_snapshot_is_exported_to_plain_torchvision_and_trained_on(cluster: Cluster) -> None:
    from safetensors.torch import load_file
    from torchvision.models import squeezenet1_1

    cluster.finish([cluster.start_alone("--model", "squeezenet1_1", "--max-steps", "1", "--ema-decay", "0.5")])
    saved = newest_snapshot(cluster.run_dir)[1]
    for file_format, load in (("pt", torch.load), ("safetensors", load_file)):
        for averaged in ((), ("--averaged",)):
            path = cluster.path / f"weights.{file_format}"
            code = console(
                ["snapshot", "export", str(cluster.run_dir), "--format", file_format, "--output", str(path), *averaged]
            )
            assert code == 0
            model = squeezenet1_1(num_classes=10)
            model.load_state_dict(load(path), strict=True)
            expected = saved["extras"]["ema"] if averaged else saved["model"]
            assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert not torch.equal(saved["extras"]["ema"]["classifier.1.bias"], saved["model"]["classifier.1.bias"])
    again = cluster.path / "again"
    flags = ("--model", "squeezenet1_1", "--max-steps", "1", "--lr", "1e-30", "--weight-decay", "0", "--momentum", "0")
    cluster.finish([cluster.start_alone(*flags, "--init-from", "weights.safetensors", run_dir=again)])
    assert torch.allclose(
        newest_snapshot(again)[1]["model"]["classifier.1.bias"], saved["extras"]["ema"]["classifier.1.bias"]
    )


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named_one_by_one(cluster: Cluster) -> None:
    torch.save({"state_dict": {"module.net.0.weight": torch.ones(2, 2), "extra": torch.ones(1)}}, cluster.path / "w.pt")
    node = cluster.start_alone("--model", "mlp", "--init-from", "w.pt")
    cluster.finish([node], code=2)
    (line,) = error_lines(node)
    assert "extra is not in the model" in line
    assert "is missing" in line
    absent = cluster.start_alone("--init-from", "nowhere.pt", run_dir=cluster.path / "none")
    cluster.finish([absent], code=1)
    assert not (cluster.path / "none").exists()
    assert "nowhere.pt cannot be read: No such file or directory" in absent.text()


# --- flags of the step ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--find-unused-parameters", "--static-graph"),
        ("--channels-last", "--clip-grad-norm", "0.5", "--ema-decay", "0.9", "--precision", "fp16"),
    ],
    ids=["ddp", "step"],
)
def test_flags_of_the_step(cluster: Cluster, flags: tuple[str, ...]) -> None:
    cluster.finish([cluster.start_alone(*SHORT, "--spawn", "2", *flags)])
    check_short_run(cluster.run_dir, 2)


@pytest.mark.slow
def test_ordered_keeps_its_bits_with_flags_of_the_step(cluster: Cluster) -> None:
    flags = ("--max-steps", "6", "--reduction", "ordered", "--clip-grad-norm", "0.5", "--ema-decay", "0.9")
    ends = []
    for number, spawn in enumerate([(), ("--spawn", "3")]):
        run_dir = cluster.path / f"run-{number}"
        cluster.finish([cluster.start_alone(*flags, "--channels-last", *spawn, run_dir=run_dir)])
        ends.append((result(run_dir)["state_sha256"], state_sha256(newest_snapshot(run_dir)[1]["extras"]["ema"])))
    assert ends[0] == ends[1]


COUNTING_TASK = """
import os
import torch
from elastic_train.training.tasks import ImageClassification

class Counting(ImageClassification):
    name = "counting"

    def loss(self, model, batch):
        from torch._dynamo.utils import counters
        if model.training:  # an evaluation has a graph of its own
            with open(f"graphs-{os.getpid()}", "a") as file:
                file.write(f"{counters['stats']['unique_graphs']} {len(batch[0])}\\n")
        return super().loss(model, batch)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.timeout(900)  # the compiler's processes, of three workers
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_a_re_form_recompiles_only_for_new_shapes(cluster: Cluster, reduction: str) -> None:
    (cluster.path / "mine.py").write_text(COUNTING_TASK)
    flags = ("--task", "mine:Counting", "--max-steps", "20", "--global-batch-size", "66", "--virtual-ranks", "6")
    node = cluster.start_alone(
        *flags, "--reduction", reduction, "--compile", "--spawn", "3",
        env={"ELASTIC_TRAIN_FAULT": "kill@step:rank=0,step=10,generation=0", "PYTHONPATH": str(cluster.path)},
    )  # fmt: skip
    cluster.finish([node], timeout=600)
    assert worlds(cluster.run_dir) == [(0, 3), (1, 2)]
    for path in cluster.path.glob("graphs-*"):
        calls = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        shapes = {samples for _, samples in calls}
        graphs = calls[-1][0]
        print(reduction, "graphs", graphs, "shapes", sorted(shapes))
        # torch.compile makes a graph for the first shape, and one for all others
        assert graphs <= min(2, len(shapes)), calls


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.timeout(1800)  # three processes compile, one after the other
def test_compiled_bits_do_not_depend_on_the_tails_that_a_process_has_seen(cluster: Cluster) -> None:
    """An epoch's last step has micro-batches of other sizes. One process goes through the first tail; another one
    begins behind it, where the run was stopped."""
    flags = ("--reduction", "ordered", "--compile", "--schedule", "constant", "--device", "cpu")
    ends = []
    for name, stops in {"through": (40,), "stopped": (30, 40)}.items():
        run_dir = cluster.path / name
        for steps in stops:  # of digits in batches of 64 the 23rd is the last of an epoch
            at = ("--global-batch-size", "64", "--epochs", "9", "--max-steps", str(steps))
            cluster.finish([cluster.start_alone(*flags, *at, run_dir=run_dir)], timeout=600)
        ends.append(result(run_dir)["state_sha256"])
    assert ends[0] == ends[1]
