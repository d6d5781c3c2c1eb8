"""Weights to and from other programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from elastic_train.errors import SnapshotError, UsageError
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.weights import export_weights, initialise, read_weights, typed_as
from elastic_train.training.averaging import AveragedWeights

TIED = torch.ones(2)
WEIGHTS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(6.0).reshape(2, 3).T,
    "tied": TIED,
    "to it": TIED,
}


def warn(message: str) -> None:
    raise AssertionError(message)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_safetensors_reads_what_we_write_and_so_do_we(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    export_weights(WEIGHTS, path, "safetensors")
    assert equal(load_safetensors(path.read_bytes()), WEIGHTS)
    assert equal(read_weights(path, warn=warn), WEIGHTS)


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    export_weights(WEIGHTS, tmp_path / "w.pt", "pt")
    assert equal(torch.load(tmp_path / "w.pt", weights_only=True), WEIGHTS)


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    export_weights(WEIGHTS, path, "safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match=r"w\.safetensors is no safetensors file"):
        read_weights(path, warn=warn)


def test_a_type_that_safetensors_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"complex128.*take --format pt"):
        export_weights({"z": torch.ones(1, dtype=torch.complex128)}, tmp_path / "w", "safetensors")
    assert not (tmp_path / "w").exists()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    path.touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    remedy = r"pip install 'elastic_train\[safetensors\]'"
    with pytest.raises(UsageError, match=remedy):
        read_weights(path, warn=warn)
    with pytest.raises(UsageError, match=remedy):
        export_weights(WEIGHTS, path, "safetensors")
    export_weights(WEIGHTS, tmp_path / "w.pt", "pt")


@pytest.mark.parametrize("container", [None, "model", "state_dict"])
def test_prefixes_and_containers_of_training_scripts(tmp_path: Path, container: str | None) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    named = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save(named if container is None else {container: named, "epoch": 3}, tmp_path / "w.pt")
    initialise(target, tmp_path / "w.pt", warn=warn)
    assert equal(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("below", ["", "snapshots", "snapshots/NEWEST"])
def test_a_run_a_folder_and_a_snapshot(tmp_path: Path, below: str) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    writer = SnapshotWriter(tmp_path / "snapshots", keep=2, host="node", run_uid="u", task={})
    for step, model in ((1, nn.Linear(2, 1)), (2, source)):
        state = {"model": model.state_dict(), "optimizer": {"a": torch.ones(1)}}
        newest = writer.save(state, step=step, epoch=0, samples_done=0, generation=0, world_size=1).path
    initialise(target, tmp_path / below.replace("NEWEST", newest.name), warn=warn)
    assert equal(target.state_dict(), source.state_dict())


class Wrapper(nn.Module):
    def __init__(self, has_head: bool) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)
        self.head = nn.Linear(1, 1) if has_head else None


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_with_a_layer_of_that_name(tmp_path: Path, has_head: bool, prefix: str) -> None:
    source, target = Wrapper(has_head), Wrapper(has_head)
    torch.save({f"{prefix}{name}": value for name, value in source.state_dict().items()}, tmp_path / "w.pt")
    initialise(target, tmp_path / "w.pt", warn=warn)
    assert equal(target.state_dict(), source.state_dict())


def test_every_misfit_is_named(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(UsageError) as caught:
        initialise(nn.Linear(2, 1), tmp_path / "w.pt", warn=warn)
    for part in ("bias is missing", "extra is not in the model", "weight has shape (2, 2), the model (1, 2)"):
        assert part in str(caught.value)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"weight": print}, tmp_path / "w.pt")
    with pytest.raises(SnapshotError, match="nothing of it was run"):
        read_weights(tmp_path / "w.pt", warn=warn)


def test_the_average_follows_the_weights() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    nn.init.constant_(model[0].weight, 0.0)
    averaged = AveragedWeights(model, decay=0.75)
    expected = 0.0
    for value in (1.0, 2.0, -3.0):
        nn.init.constant_(model[0].weight, value)
        model(torch.randn(4, 1))
        averaged.update(model)
        expected = 0.75 * expected + 0.25 * value
    state = averaged.state_dict()
    assert float(state["0.weight"]) == pytest.approx(expected)
    assert torch.equal(state["1.running_mean"], model.state_dict()["1.running_mean"])
    other = AveragedWeights(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)), decay=0.75)
    other.load_state_dict(state)
    assert equal(other.state_dict(), state)


class Turned(nn.Module):
    """A complex weight, and frozen numbers of which torch takes no mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.order = nn.Parameter(torch.tensor([0, 1]).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.bool])
def test_the_average_follows_complex_weights_and_takes_over_what_has_no_mean(dtype: torch.dtype) -> None:
    """They are trained, so their average is not what they began with."""
    model = Turned(dtype)
    averaged = AveragedWeights(model, decay=0.75)
    expected = torch.zeros(2, dtype=torch.complex64)
    for value in (1.0 + 2.0j, -3.0j):
        with torch.no_grad():
            model.weight.fill_(value)
            model.order.copy_(1 - model.order.float())
        averaged.update(model)
        expected = 0.75 * expected + 0.25 * value
        assert averaged.model.order.tolist() == model.order.tolist()
        torch.testing.assert_close(averaged.model.weight, expected)


class Masked(nn.Module):
    """Its mask is a parameter, which holds infinities; half of it is opened on the way."""

    def __init__(self, dtype: torch.dtype, *, is_trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=dtype)
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf, -torch.inf], dtype=dtype), requires_grad=is_trained)


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_infinities_is_the_weights_own(dtype: torch.dtype, is_trained: bool) -> None:
    """Of two it would be NaN, and every evaluation with it."""
    model = Masked(dtype, is_trained=is_trained)
    averaged = AveragedWeights(model, decay=0.75)
    restored = AveragedWeights(model, decay=0.75)
    for opened in (0, 0, 1, 1):
        with torch.no_grad():
            model.mask[1 : 1 + opened] = 8.0
            model.mask[0] += 4.0
            model.layer.weight.add_(1.0)
        averaged.update(model)
        restored.load_state_dict(averaged.state_dict())
    mask = averaged.state_dict()["mask"]
    assert mask[1:].tolist() == [8.0, -torch.inf]
    if dtype == torch.float32 or is_trained:  # a frozen one is averaged in its own type
        assert float(mask[0]) == 4.0 * (0.25 * (4 + 0.75 * 3 + 0.75**2 * 2 + 0.75**3))
    averaged.update(model)
    restored.update(model)
    assert equal(restored.state_dict(), averaged.state_dict())
    assert all(one.isfinite().all() for one in averaged.model.layer.parameters())


class Narrow(nn.Module):
    """Tied weights in 16 bits, a layer in 32 and a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3, dtype=dtype), nn.Linear(3, 4, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_narrow_weights_moves_by_less_than_they_can_tell(dtype: torch.dtype) -> None:
    model = Narrow(dtype)
    averaged = AveragedWeights(model, decay=0.999)
    expected = model.head.weight.detach().float()
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    for _ in range(2000):
        averaged.update(model)
        expected.lerp_(model.head.weight.detach().float(), 1 - 0.999)
    state = averaged.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name in ("head.weight", "embedding.weight"):
        assert torch.equal(state[name], expected)
    assert {name: value.dtype for name, value in averaged.model.state_dict().items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    assert torch.equal(averaged.model.head.weight, expected.to(dtype)), "what is evaluated"


def test_the_average_of_narrow_weights_is_restored_bit_by_bit() -> None:
    """And from a snapshot of before, or the model's own weights, as these are."""
    model = Narrow(torch.bfloat16)
    averaged = AveragedWeights(model, decay=0.999)
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    averaged.update(model)
    other = AveragedWeights(Narrow(torch.bfloat16), decay=0.999)
    other.load_state_dict(averaged.state_dict())
    assert equal(other.state_dict(), averaged.state_dict())
    averaged.update(model)
    other.update(model)
    assert equal(other.state_dict(), averaged.state_dict())
    assert equal(other.model.state_dict(), averaged.model.state_dict())
    other.load_state_dict(model.state_dict())
    assert equal(other.model.state_dict(), model.state_dict())
    assert equal(other.state_dict(), model.state_dict())
    other.update(model)
    assert other.state_dict()["head.weight"].dtype == torch.float32


def test_a_model_may_be_narrow_throughout() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    averaged = AveragedWeights(model, decay=0.999)
    averaged.update(model)
    assert equal(averaged.model.state_dict(), model.state_dict())


def test_the_average_of_what_is_frozen_takes_no_more_memory() -> None:
    model = Narrow(torch.bfloat16).requires_grad_(False)
    averaged = AveragedWeights(model, decay=0.999)
    averaged.update(model)
    assert equal(averaged.state_dict(), model.state_dict())


def test_an_average_is_exported_in_the_types_of_its_model() -> None:
    model = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2), "scale": {"scale": 3}}
    found = typed_as(model, {"a": torch.full((2,), 1.001), "b": torch.full((2,), 1.001), "scale": {"scale": 3}})
    assert found.pop("scale") == {"scale": 3}
    assert equal(found, {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.full((2,), 1.001)})


class Scaled(nn.Linear):
    scale = 1

    def get_extra_state(self) -> dict[str, int]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.scale = state["scale"]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_models_own_export_with_extra_state_that_is_no_tensor(tmp_path: Path, prefix: str) -> None:
    source, target = Scaled(2, 1), Scaled(2, 1)
    source.scale = 3
    weights = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    export_weights({**weights, "epoch": 7}, tmp_path / "w.pt", "pt")
    initialise(target, tmp_path / "w.pt", warn=warn)
    assert target.scale == 3
    assert target.weight.equal(source.weight)
