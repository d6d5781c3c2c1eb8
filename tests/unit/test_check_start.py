"""The check finds errors that would end a worker's start, by the functions of the start itself."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_train.config import parse
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.launch import C10dSettings, Launch
from elastic_train.tools.check.check_command import judge, of_the_job, until_all_come
from elastic_train.tools.check.facts import Gathered, RendezvousFacts, Wanted, WorkerFacts
from elastic_train.tools.check.here import look_here
from elastic_train.tools.check.trial_place import trial_place
from elastic_train.training.tasks import Task

ALONE = Launch()
UNDER_TORCHRUN = Launch(agent_pid=1, c10d=C10dSettings(("localhost:1",), min_nodes=1, max_nodes=2, last_call=2.0))
UNDER_SRUN = Launch(world_size=4, num_nodes=4)
"""as deploy/slurm looks at nodes: one task of each, whatever the job's workers are"""


def test_a_check_waits_for_the_nodes_that_are_wanted() -> None:
    """Longer than the last call of their job: they are started one by one."""
    settings = UNDER_TORCHRUN.c10d
    assert settings is not None
    assert until_all_come(UNDER_TORCHRUN, None, 120.0) == UNDER_TORCHRUN
    of_four = replace(UNDER_TORCHRUN, c10d=replace(settings, min_nodes=2, max_nodes=4))
    for wanted, most in ((1, 2), (3, 3), (8, 4)):
        waiting = until_all_come(of_four, wanted, 120.0)
        assert waiting.c10d == replace(settings, min_nodes=2, max_nodes=most, last_call=120.0)
    etcd = EtcdSettings(("localhost:2379",), max_nodes=4)
    assert until_all_come(Launch(etcd=etcd), 3, 120.0).etcd == replace(etcd, max_nodes=3, last_call=120.0)


class Empty(Task):
    """Its training set has no sample."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.zeros(0, 1))


class AcrossRanks(Empty):
    """Ordered mode refuses its model."""

    def build_model(self) -> nn.Module:
        return nn.SyncBatchNorm(1)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.zeros(8, 1))


def look(path: Path, *flags: str, launch: Launch = ALONE, workers: int | None = None) -> WorkerFacts:
    """What one worker finds, with a run directory below `path`, in which no file is left."""
    before = files_below(path)
    asked = [*([] if "--task" in flags else ["--model", "mlp"]), "--run-dir", str(path / "run"), *flags]
    config, launch = of_the_job(parse(asked), launch, workers)
    assert config.run_dir is not None
    directory = trial_place(config, config.run_dir)
    try:
        return look_here(config, launch, "127.0.0.1", directory, RendezvousFacts())
    finally:
        directory.remove_marks()
        assert files_below(path) == before


def files_below(path: Path) -> list[Path]:
    return sorted(found for found in path.rglob("*") if not found.is_dir())


def is_good(found: WorkerFacts) -> bool:
    breaking = [finding.what for finding in judge(Gathered(Wanted(), (found,))) if finding.level == "BREAKS"]
    assert breaking == ([] if found.state_error is None else [f"{found.host}: {found.state_error}"])
    return found.state_error is None


@pytest.fixture
def short_key(tmp_path: Path) -> Path:
    path = tmp_path / "short.key"
    path.write_bytes(b"15 bytes, a few")
    return path


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--snapshot-key", "PATH/missing.key"], "missing.key cannot be read: No such file"),
        (["--snapshot-key", "PATH/short.key"], "short.key holds 15 bytes: 16 at least make a key"),
        (["--store-endpoint", "localhost:0"], "--store-endpoint localhost:0: a port is 1 to"),
        (["--init-from", "PATH/none"], "none cannot be read: No such file or directory .--init-from"),
        (["--metrics-port", "9100", "--metrics-host", "192.0.2.1"], "Cannot assign requested address"),
        (["--task", f"{__name__}:Empty"], "the training set of Empty is empty: there is nothing to train on"),
        (["--task", f"{__name__}:AcrossRanks", "--reduction", "ordered"], "is a SyncBatchNorm"),
        (["--snapshot-dir", "PATH/elsewhere", "--run-dir", "PATH/short.key/run"], "run directory .*: Not a directory"),
    ],
)
@pytest.mark.usefixtures("short_key")
def test_what_ends_a_start_fails_the_check(tmp_path: Path, flags: list[str], error: str) -> None:
    found = look(tmp_path, *(word.replace("PATH", str(tmp_path)) for word in flags))
    assert not is_good(found)
    assert found.state_error is not None
    assert re.search(error, found.state_error), found.state_error


def test_what_starts_passes(tmp_path: Path) -> None:
    """A port that is taken is no fault: a worker goes on without, and tries it again."""
    (tmp_path / "key").write_bytes(b"k" * 16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--metrics-host", "127.0.0.1", "--metrics-port", str(taken.getsockname()[1])]
        found = look(
            tmp_path, *flags, "--snapshot-key", str(tmp_path / "key"), "--snapshot-dir", str(tmp_path / "elsewhere")
        )
    assert is_good(found)
    assert found.measured is not None


def test_the_port_of_the_metrics_is_free_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert is_good(look(tmp_path, "--metrics-host", "127.0.0.1", "--metrics-port", str(port)))
    socket.create_server(("127.0.0.1", port)).close()


def test_the_package_of_the_metrics_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = look(tmp_path, "--metrics-port", "9100")
    assert not is_good(found)
    assert "--metrics-port needs prometheus_client" in str(found.state_error)
    second = replace(ALONE, local_rank=1)  # which serves none
    assert is_good(look(tmp_path, "--metrics-port", "9100", launch=second))


@pytest.mark.parametrize(
    ("launch", "is_known"), [(UNDER_TORCHRUN, True), (ALONE, False), (replace(UNDER_SRUN, num_nodes=2), False)]
)
def test_the_fewest_nodes(tmp_path: Path, launch: Launch, is_known: bool) -> None:
    """Where torchrun's --nnodes is told to the job alone, nobody knows here whether they are too many."""
    found = look(tmp_path, "--min-nodes", "3", launch=launch)
    assert is_good(found) is not is_known
    assert not is_known or "--min-nodes 3: this job has 2 nodes at most" in str(found.state_error)


@pytest.mark.parametrize(
    ("launch", "workers", "is_one"),
    [
        (ALONE, None, True),
        (ALONE, 2, False),
        (UNDER_SRUN, None, True),
        (UNDER_SRUN, 2, False),
        (UNDER_TORCHRUN, None, True),
        (replace(UNDER_TORCHRUN, world_size=2), None, False),
    ],
)
def test_one_process_for_all_gpus(tmp_path: Path, launch: Launch, workers: int | None, is_one: bool) -> None:
    found = look(tmp_path, "--parallel", "dp", launch=launch, workers=workers)
    assert is_good(found) is is_one
    assert is_one or "--parallel dp is one process for all GPUs, and this is one of 2" in str(found.state_error)
