"""What a check leaves on its machine, and what it excludes from a check beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_train.config import Config, parse
from elastic_train.errors import UsageError
from elastic_train.rendezvous.launch import Launch
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.store_urls import parse_url
from elastic_train.tools.check.facts import Measured, RendezvousFacts
from elastic_train.tools.check.here import look_here, measure_snapshot, num_kept
from elastic_train.tools.check.trial_place import TrialPlace, trial_place
from elastic_train.training.tasks import Task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "snapshots"


def test_a_check_makes_the_directory_and_leaves_nothing_in_it(path: Path) -> None:
    """Nodes that are looked at each for itself may have it in common."""
    first, second = TrialPlace(path), TrialPlace(path)
    for rank, directory in enumerate((first, second)):
        directory.leave_mark("token", rank)
        assert directory.error is None
    first.remove_marks()
    assert not second.sees_mark("token", 0)
    assert second.sees_mark("token", 1)
    second.remove_marks()
    assert not list(path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert TrialPlace(tmp_path).error == "Permission denied"


def test_a_path_that_can_never_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in ((tmp_path / "file" / "snapshots", "Not a directory"), (Path("/proc/none"), "No such file")):
        directory = TrialPlace(path)
        assert directory.error is not None
        assert directory.error.startswith(error)


def test_a_bucket_is_tried_and_left_empty(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    config = Config(snapshot_dir=url, model="mlp")
    first, second = trial_place(config, tmp_path), trial_place(config, tmp_path)
    measured = measure_snapshot(config, torch.device("cpu"), first, is_writer=True)
    assert measured is not None
    assert measured.bytes > 1000
    assert measured.last_step == 30 * 23
    first.leave_mark("token", 0)
    assert second.sees_mark("token", 0)
    assert not second.sees_mark("token", 1)
    for place in (first, second):
        assert place.error is None
        assert place.free_bytes > 2**50
        place.remove_marks()
    assert ObjectStore(parse_url(url)).list() == {}


def test_a_bucket_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = trial_place(Config(snapshot_dir=f"file://{tmp_path}/file"), tmp_path)
    assert place.error is not None
    assert "cannot write probe-" in place.error
    place.remove_marks()
    with pytest.raises(UsageError, match="credentials do not belong into a URL"):
        trial_place(Config(snapshot_dir="s3://key:secret@bucket/run"), tmp_path)


class Sparse(Task):
    """Its optimizer takes sparse gradients alone."""

    def build_model(self) -> nn.Module:
        return nn.Embedding(1000, 4, sparse=True)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(model.parameters())

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.arange(64))


class Dense(Sparse):
    """Its optimizer has two moments."""

    def build_model(self) -> nn.Module:
        return nn.Embedding(1000, 4)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())


class DoesNotFit(Sparse):
    """Its optimizer takes more memory than there is."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_pre_hook(run_out_of_memory)
        return optimizer


def run_out_of_memory(*_arguments: object) -> None:
    raise torch.OutOfMemoryError("no room for the moments")


def measure(task: type[Task], path: Path) -> Measured | None:
    directory = TrialPlace(path)
    config = Config(task=f"{__name__}:{task.__name__}", snapshot_dir=str(path))
    try:
        return measure_snapshot(config, torch.device("cpu"), directory, is_writer=True)
    finally:
        directory.remove_marks()
        assert directory.error is None


def test_an_optimizer_that_takes_no_dense_gradients_is_measured_without_its_moments(path: Path) -> None:
    measured = measure(Sparse, path)
    assert measured is not None
    assert 4 * 4000 < measured.bytes < 2 * 4 * 4000
    assert (
        measured.moments_error
        == "RuntimeError: SparseAdam does not support dense gradients, please consider Adam instead"
    )


def test_moments_that_are_measured_are_no_error(path: Path) -> None:
    measured = measure(Dense, path)
    assert measured is not None
    assert 3 * 4 * 4000 < measured.bytes < 4 * 4 * 4000
    assert measured.moments_error is None


def test_moments_that_do_not_fit_are_told(path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room for the moments"):
        measure(DoesNotFit, path)


@pytest.mark.parametrize("flags", [[], ["--device", "cpu"]])
def test_a_worker_tells_which_device_was_asked_for(path: Path, flags: list[str]) -> None:
    directory = TrialPlace(path)
    config, launch = parse(["--model", "mlp", *flags]), Launch.from_environment({}, None)
    try:
        found = look_here(config, launch, "127.0.0.1", directory, RendezvousFacts())
    finally:
        directory.remove_marks()
    assert found.wanted_device == (flags[1] if flags else "auto")


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ({}, 3),
        ({"keep_best": 2}, 5),
        ({"keep_every": 1000}, 3 + 10),
        ({"keep_every": 1001, "keep_best": 2}, 5 + 9),
        ({"keep_every": 50}, 3 + 100),
        ({"keep_every": 50, "snapshot_every": "30s"}, 3 + 200),
        ({"keep_every": 50, "snapshot_every": 0}, 3),
    ],
)
def test_room_is_wanted_for_all_that_stays(flags: dict[str, Any], number: int) -> None:
    """Where one is written each 100 steps, no more than that stay for good."""
    assert num_kept(Config(**flags), 10_000) == number
