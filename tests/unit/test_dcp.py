"""Weights to and from torch.distributed.checkpoint, the real one."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from elastic_train import cli
from elastic_train.errors import SnapshotError
from elastic_train.storage.dcp import read_dcp, write_dcp
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.weights import initialise, read_weights

TIED = torch.ones(2)
WEIGHTS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "complex": torch.ones(1, dtype=torch.complex128),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(6.0).reshape(2, 3).T,
    "a.view": torch.arange(100.0)[10:12],
    "tied": TIED,
    "to it": TIED,
}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def save(state: dict[str, Any], path: Path) -> None:
    """As another program does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]


def forge(path: Path, **changes: Any) -> None:
    """The metadata with other values."""
    with open(path / ".metadata", "rb") as file:
        metadata: Metadata = pickle.load(file)
    for name, value in changes.items():
        setattr(metadata, name, value)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("error")
def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    write_dcp({**WEIGHTS, "layer._extra_state": {"scale": 2}}, tmp_path / "w")
    found = {name: torch.zeros_like(value) for name, value in WEIGHTS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": found}, checkpoint_id=tmp_path / "w", no_dist=True)  # type: ignore[attr-defined]
    assert equal(found, WEIGHTS)
    assert equal(read_weights(tmp_path / "w", warn=pytest.fail), WEIGHTS), "and so do we"
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.mark.parametrize("containers", [(), ("model",), ("state_dict",), ("app", "model")])
def test_a_model_is_found_however_it_is_nested(tmp_path: Path, containers: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state: dict[str, Any] = model.state_dict()
    for name in reversed(containers):
        others = {"optimizer": {"state": {0: {"exp_avg": torch.ones(9)}}}, "step": 3}
        state = {name: state, **others}
    save(state, tmp_path / "w")
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    initialise(other, tmp_path / "w", warn=pytest.fail)
    assert equal(other.state_dict(), model.state_dict())


def test_a_snapshot_goes_out_and_starts_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 3)
    writer = SnapshotWriter(tmp_path / "snapshots", keep=1, host="node", run_uid="u", task={})
    state = {"model": model.state_dict(), "optimizer": {}}
    writer.save(state, step=7, epoch=0, samples_done=0, generation=0, world_size=1)
    command = ["snapshot", "export", str(tmp_path), "--format", "dcp", "--output", str(tmp_path / "w")]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"2 tensors of step 7: {tmp_path / 'w'}\n"
    other = nn.Linear(2, 3)
    initialise(other, tmp_path / "w", warn=pytest.fail)
    assert equal(other.state_dict(), model.state_dict())
    assert cli.main(command) == 1
    assert "w cannot be written: Directory not empty; choose another --output" in capsys.readouterr().err
    assert equal(read_dcp(tmp_path / "w"), model.state_dict()), "what is there stays"


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('run').touch()",))


def test_no_code_of_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"model": {"w": torch.ones(2), "other": Payload()}}, tmp_path / "w")
    assert equal(read_dcp(tmp_path / "w"), {"w": torch.ones(2)}), "what is no tensor is not even read"
    forge(tmp_path / "w", planner_data=Payload())
    with pytest.raises(SnapshotError, match=r"w/\.metadata is none that can be read: builtins\.exec is no part of"):
        read_dcp(tmp_path / "w")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_what_is_no_metadata(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(SnapshotError, match=r"\.metadata is none that can be read: \S"):
        read_dcp(tmp_path)


def test_a_size_that_lies_allocates_nothing(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path)
    with open(tmp_path / ".metadata", "rb") as file:
        described = pickle.load(file).state_dict_metadata
    described["model.w"].size = torch.Size([2**50])
    forge(tmp_path, state_dict_metadata=described)
    with pytest.raises(SnapshotError, match=f"promises {2**52} bytes of weights, its files have"):
        read_dcp(tmp_path)


def test_a_name_that_points_outside(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / "w")
    with open(tmp_path / "w" / ".metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    next(iter(stored.values())).relative_path = "../elsewhere"
    forge(tmp_path / "w", storage_data=stored)
    with pytest.raises(SnapshotError, match=r"'\.\./elsewhere' is not the name of a file in it"):
        read_dcp(tmp_path / "w")


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_file_that_is_gone_or_torn(tmp_path: Path, damage: str) -> None:
    save({"model": {"w": torch.ones(2000)}}, tmp_path)
    [path] = tmp_path.glob("*.distcp")
    if damage == "gone":
        path.rename(tmp_path / "other")
    else:
        path.write_bytes(path.read_bytes()[:100] + bytes(9000))
    with pytest.raises(SnapshotError, match=r"is no checkpoint that can be read: \S"):
        read_dcp(tmp_path)


SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
whole = torch.arange(30.0).reshape(10, 3)
weight = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
dcp.save({"model": {"weight": weight, "bias": torch.ones(10)}}, checkpoint_id=path)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_several_ranks_have_written_in_parts(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "store"), str(tmp_path / "w")]
    ranks = [subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), *arguments]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert len(list((tmp_path / "w").glob("*.distcp"))) == 2
    whole = torch.arange(30.0).reshape(10, 3)
    assert equal(read_dcp(tmp_path / "w"), {"weight": whole, "bias": torch.ones(10)})


def test_without_weights(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path)
    with pytest.raises(SnapshotError, match="holds no weights"):
        read_weights(tmp_path, warn=pytest.fail)
