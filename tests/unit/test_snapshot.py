"""Snapshots: whole or absent, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

import elastic_train
from elastic_train.errors import OwnershipLost, SnapshotDamaged, SnapshotError
from elastic_train.storage import atomic_files, local_folder, state_bytes
from elastic_train.storage.direct_file import DirectFile
from elastic_train.storage.local_folder import LocalFolder, held
from elastic_train.storage.retention import Retention
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.snapshot import (
    SnapshotResult,
    find_snapshots,
    first_whole,
    load_state,
    read_info,
    verify,
)
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.state_bytes import (
    HostBuffers,
    deserialize_state,
    serialize_state,
    size_of,
    write_state,
)
from tests.processes import flip_a_bit, freeze, refuse_threads

DEADLINE = 30.0
ROOT = str(Path(elastic_train.__file__).parent.parent)


def make_writer(directory: Path, **changes: Any) -> SnapshotWriter:
    arguments: dict[str, Any] = {"keep": 3, "host": "node-a", "run_uid": "run", "task": {"seed": 0}}
    return SnapshotWriter(directory, **{**arguments, **changes})


def save(
    writer: SnapshotWriter, step: int, generation: int = 0, state: Any = None, metric: float | None = None
) -> SnapshotResult:
    state = {"step": step, "w": torch.full((100,), float(step))} if state is None else state
    return writer.save(
        state, step=step, epoch=1, samples_done=step * 64, generation=generation, world_size=2, metric=metric
    )


def save_in_background(writer: SnapshotWriter, state: dict[str, Any], step: int) -> bool:
    return writer.save_in_background(state, step=step, epoch=0, samples_done=0, generation=0, world_size=1)


def wait_for(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        assert event.wait(DEADLINE)

    return wait


def no_warning(message: str) -> None:
    raise AssertionError(message)


def load(path: Path) -> dict[str, Any]:
    return load_state(read_info(path))


def keys(directory: Path) -> list[tuple[int, int]]:
    """(generation, step) of every snapshot; none is damaged, nothing temporary is left."""
    assert not [path.name for path in directory.glob(".*")]
    infos = find_snapshots(directory, warn=no_warning)
    for info in infos:
        verify(info)
    assert len(list(directory.iterdir())) == len(infos)
    return [info.age_key for info in infos]


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


# --- the state and its bytes ------------------------------------------------------------------------------------


def equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def example_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
        "plain": {"a": [1, 2.5, None, True, "é", b"\0\xff", b"", 1j], 3: (1, (2,)), "size": torch.Size([1, 2])},
        "dtype": torch.float16,
    }


def test_a_state_comes_back_equal() -> None:
    state = example_state()
    loaded = deserialize_state(serialize_state(state))
    assert equal(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert isinstance(loaded["model"], OrderedDict)


def test_a_scalar_of_numpy_is_saved_as_one_of_python() -> None:
    """A best value is one as soon as it is a mean; that is after the first snapshots were saved."""
    state = {"best": np.mean([1.0, 2.0]), "seen": {np.int64(3): [np.bool_(True)]}, "name": np.str_("x")}
    loaded = deserialize_state(serialize_state(state))
    assert loaded == {"best": 1.5, "seen": {3: [True]}, "name": "x"}
    assert [type(one) for one in (loaded["best"], *loaded["seen"], *loaded["seen"][3])] == [float, int, bool]


def annotated() -> Any:
    """The state of a module whose own `_save_to_state_dict` notes an object beside its version."""
    state: Any = torch.nn.ReLU().state_dict()
    state._metadata[""]["by"] = threading.Thread()
    return state


def test_a_copy_that_there_is_no_memory_for_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, and needs the rest."""
    held: list[weakref.ref[torch.Tensor]] = []

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if held:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        buffer = torch.empty_like(tensor)
        held.append(weakref.ref(buffer))
        return buffer

    buffers = HostBuffers()
    with monkeypatch.context() as patch:
        patch.setattr(HostBuffers, "_allocate", staticmethod(allocate))
        with suppress(SnapshotError):
            buffers.copy({"a": torch.ones(2), "b": torch.ones(3)})
    gc.collect()
    assert held[0]() is None
    assert buffers.copy({"b": torch.ones(3)})["b"].tolist() == [1, 1, 1]


def test_a_view_does_not_bring_its_storage_along() -> None:
    assert len(serialize_state({"view": torch.zeros(1_000_000)[:10]})) < 10_000


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"model": {"x": [1, threading.Thread()]}}, r"state\['model'\]\['x'\]\[1\] is a threading.Thread"),
        ({"lr": np.zeros(1)}, r"state\['lr'\] is a numpy.ndarray"),
        ({"at": np.datetime64("2026-01-01")}, r"state\['at'\] is a datetime.date"),
        ({np.int64(1): np.longdouble(1)}, r"state\[1\] is a numpy.longdouble"),
        ({"x": torch.ones(2, device="meta")}, r"state\['x'\] is a torch.Tensor on the meta device, without values: a"),
        ({"model": annotated()}, r"state\['model'\]\['_metadata'\]\[''\]\['by'\] is a threading.Thread"),
        ({"d": {("a", 1): 1}}, r"a key of state\['d'\] is a builtins.tuple"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path, state: Any, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        serialize_state(state)
    writer = make_writer(tmp_path)
    with pytest.raises(SnapshotError, match=named):
        save(writer, 1, state=state)
    with pytest.raises(SnapshotError, match=named):
        save_in_background(writer, state, 1)
    assert keys(tmp_path) == []


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_crafted_pickle_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    buffer = io.BytesIO()
    crafted = {"model": torch.zeros(2), "x": Payload(tmp_path / "executed")}
    if form == "pickle":
        pickle.dump({"x": Payload(tmp_path / "executed")}, buffer)
    else:
        torch.save(crafted, buffer, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(SnapshotError, match="was refused") as caught:
        deserialize_state(buffer.getvalue(), source="snapshot /a/b")
    message = str(caught.value)
    assert message.startswith("snapshot /a/b was refused")
    assert ("posix.mkdir" if form == "zip" else "no zip archive") in message
    assert "nothing of it was run" in message
    assert "\n" not in message
    assert not (tmp_path / "executed").exists()


class Zeros:
    """Unpickled, it takes as much memory as it says."""

    def __reduce__(self) -> Any:
        return bytes, (2**40,)


def test_no_bytes_are_made_for_a_crafted_pickle() -> None:
    buffer = io.BytesIO()
    torch.save({"x": Zeros()}, buffer)
    with pytest.raises(SnapshotError, match="takes 0 positional arguments"):
        deserialize_state(buffer.getvalue())


class OwnTensor(torch.Tensor):
    """Numbers with a class, as libraries for images have."""


def test_a_tensor_with_a_class_of_its_own_can_be_read_back() -> None:
    tensor = torch.arange(3.0).as_subclass(OwnTensor)
    read = deserialize_state(serialize_state({"a": tensor}))["a"]
    assert type(read) is torch.Tensor
    assert read.tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_made_of_others_that_could_not_be_read_back_is_refused_before_it_is_written() -> None:
    tensor = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(SnapshotError, match=r"state\['a'\] is a .*TwoTensor"):
        HostBuffers().prepare({"a": tensor})
    with pytest.raises(SnapshotError, match=r"state\['a'\] is a .*TwoTensor"):
        serialize_state({"a": tensor})


def test_a_file_that_would_take_a_thousand_times_its_size_is_refused() -> None:
    stored, deflated = io.BytesIO(), io.BytesIO()
    with config.patch({"save.compute_crc32": True}):  # type: ignore[attr-defined]  # torch 2.11 patches for all threads
        torch.save({"a": torch.zeros(1_000_000)}, stored)
    with zipfile.ZipFile(stored) as whole, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as small:
        for entry in whole.infolist():
            small.writestr(entry.filename, whole.read(entry))
    assert len(deflated.getvalue()) < 10_000
    with pytest.raises(SnapshotError, match="was refused: its tensors are compressed or overlap"):
        deserialize_state(deflated.getvalue())


def test_bytes_that_are_no_state() -> None:
    whole = serialize_state({"a": torch.zeros(1000)})
    for data in (b"", b"x", b"\x80\x02", whole[:100], whole[: len(whole) // 2], os.urandom(1000)):
        with pytest.raises(SnapshotError) as caught:
            deserialize_state(data)
        assert "\n" not in str(caught.value)
    buffer = io.BytesIO()
    torch.save([1], buffer)
    with pytest.raises(SnapshotError, match="it holds a list, not a state dict"):
        deserialize_state(buffer.getvalue())


def test_map_location(tmp_path: Path) -> None:
    result = save(make_writer(tmp_path), 1)
    info = read_info(result.path)
    assert load_state(info)["w"].device.type == "cpu"
    assert load_state(info, "meta")["w"].device.type == "meta"
    assert load_state(info, torch.device("cpu"))["step"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_on_a_gpu_is_saved_for_the_cpu(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in (1, 2):
        state = {"a": torch.randn(1000, device="cuda"), "b": torch.randn(8, 3, 4, 4, device="cuda")}
        state["b"] = state["b"].to(memory_format=torch.channels_last)
        expected = {key: tensor.cpu() for key, tensor in state.items()}
        assert save_in_background(writer, state, step)
        state["a"].zero_()
        assert writer.wait(DEADLINE)
        [result] = writer.collect()
        assert isinstance(result, SnapshotResult)
        loaded = load(result.path)
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)


# --- writing and reading ----------------------------------------------------------------------------------------


def test_one_snapshot(tmp_path: Path) -> None:
    writer = SnapshotWriter(
        tmp_path / "snapshots",
        keep=1,
        host="node/ä",
        run_uid="u1",
        task={"seed": 3, "classes": [1, 2]},
        now=lambda: 1234.5,
    )
    result = writer.save({"w": torch.arange(5)}, step=120, epoch=2, samples_done=7680, generation=3, world_size=4)
    assert result.path == tmp_path / "snapshots" / "step-000000000120-gen-0003-node__"
    assert (result.step, result.warnings) == (120, ())
    assert 0 < result.stall_seconds == result.total_seconds
    assert sorted(path.name for path in result.path.iterdir()) == ["manifest.json", "state.pt"]
    [info] = find_snapshots(tmp_path / "snapshots", warn=no_warning)
    assert result.bytes == info.files["state.pt"].bytes == (result.path / "state.pt").stat().st_size
    expected = {
        "step": 120,
        "epoch": 2,
        "samples_done": 7680,
        "generation": 3,
        "run_uid": "u1",
        "host": "node/ä",
        "time": 1234.5,
        "world_size": 4,
        "task": {"seed": 3, "classes": [1, 2]},
        "branches": (),
        "restarts": (),
        "metric": None,
    }
    assert {name: getattr(info, name) for name in expected} == expected
    manifest = json.loads((result.path / "manifest.json").read_bytes())
    versions = {"torch_version": str(torch.__version__), "elastic_train_version": elastic_train.__version__}
    assert set(manifest) == {"format_version", "files", *expected, *versions}
    assert manifest == {**manifest, **versions}
    assert torch.equal(load(result.path)["w"], torch.arange(5))


def test_a_directory_without_snapshots(tmp_path: Path) -> None:
    assert find_snapshots(tmp_path / "none", warn=no_warning) == []
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".tmp-step-000000000001-gen-0000-b-1").mkdir()
    (tmp_path / "step-1").mkdir()
    assert first_whole(find_snapshots(tmp_path, warn=no_warning), no_warning) is None
    with pytest.raises(SnapshotError, match="cannot be listed"):
        find_snapshots(tmp_path / "notes.txt", warn=no_warning)


def test_newest_is_by_generation_and_then_step(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=10)
    for generation, step in [(1, 300), (2, 100), (0, 900), (2, 90), (10000, 5)]:
        save(writer, step, generation)
    assert keys(tmp_path) == [(10000, 5), (2, 100), (2, 90), (1, 300), (0, 900)]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "state.pt is damaged: .* its manifest says": lambda path: flip_a_bit(path / "state.pt"),
    r"state.pt has 100 bytes, its manifest says \d+": lambda path: os.truncate(path / "state.pt", 100),
    "state.pt cannot be read: No such file": lambda path: (path / "state.pt").unlink(),
    "manifest.json cannot be read: No such file": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is not JSON": lambda path: os.truncate(path / "manifest.json", 50),
    "unknown format_version 1; elastic_train .* reads 2": lambda path: edit_manifest(path, format_version=1),
    "unknown format_version None": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest.json is wrong or incomplete": lambda path: edit_manifest(path, step="12"),
    "json is wrong or incomplete": lambda path: edit_manifest(path, files={"../state.pt": {"bytes": 1, "sha256": ""}}),
    "does not name state.pt": lambda path: edit_manifest(path, files={}),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(tmp_path: Path, what: str) -> None:
    writer = make_writer(tmp_path)
    newest = [save(writer, step) for step in (1, 2, 3)][-1].path
    DAMAGES[what](newest)
    warnings: list[str] = []
    found = first_whole(find_snapshots(tmp_path, warn=warnings.append), warnings.append)
    assert found is not None
    assert found[0].step == 2
    [warning] = warnings
    assert newest.name in warning
    assert "\n" not in warning
    with pytest.raises(SnapshotDamaged, match=what):
        verify(read_info(newest))
    with pytest.raises(SnapshotDamaged, match=what):
        load_state(read_info(newest))


def test_a_snapshot_that_is_pruned_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = save(make_writer(tmp_path), 1)
    [info] = find_snapshots(tmp_path, warn=no_warning)
    original = Path.read_bytes

    def read_and_vanish(path: Path) -> bytes:
        shutil.rmtree(result.path)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_and_vanish)
    assert find_snapshots(tmp_path, warn=no_warning) == []
    with pytest.raises(SnapshotDamaged, match="cannot be read"):
        verify(info)


@pytest.mark.parametrize("what", ["listdir", "manifest.json", "state.pt", "state"])
def test_one_that_cannot_be_read_for_a_moment_is_the_newest_still(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server fails once. An older one has fewer steps, and what was trained since would be done again."""
    for step in (1, 2):
        save(make_writer(tmp_path), step)
    store, failures = elastic_train.SnapshotStore(tmp_path), list[str]()

    def fail_once(owner: Any, name: str, function: Callable[..., Any]) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            if not failures and (what == name or "step-000000000002" in str(arguments[0])):
                failures.append(what)
                raise OSError(errno.EIO, "Input/output error")
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    if what == "listdir":
        fail_once(os, "listdir", os.listdir)
    elif what == "manifest.json":
        fail_once(Path, "read_bytes", Path.read_bytes)
    elif what == "state.pt":
        fail_once(Path, "stat", Path.stat)
    else:
        fail_once(hashlib, "file_digest", hashlib.file_digest)
    found = store.load_newest()
    assert failures == [what]
    assert found is not None
    assert found[0].step == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_one_that_the_disk_does_not_return_is_skipped(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(make_writer(tmp_path), step)
    stat = os.stat

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if "step-000000000002" in str(path):
            raise OSError(code, os.strerror(code))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", fail)
    told: list[str] = []
    assert [info.step for info in find_snapshots(tmp_path, warn=told.append)] == [1]
    assert len(told) == 1
    assert os.strerror(code) in told[0]


# --- pruning ----------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(writer, step)
    assert keys(tmp_path) == [(0, 4), (0, 3)]
    save(writer, 1, generation=1)
    assert keys(tmp_path) == [(1, 1), (0, 4)]


def test_weights_that_are_nan_are_never_the_newest_snapshot(tmp_path: Path) -> None:
    """A mask with infinite entries is no reason, nor is what was NaN from the start."""
    writer = make_writer(tmp_path, may_be_nan={"": {"fill"}})
    mask, fill = torch.tensor([float("-inf"), 0.0, float("inf")]), torch.tensor([float("nan")])
    good = {"model": {"mask": mask, "fill": fill, "count": torch.tensor(1), "weight": torch.ones(3)}}
    save(writer, 1, state=good)
    bad = {"model": good["model"] | {"weight": torch.tensor([1.0, float("nan"), 1.0])}}
    with pytest.raises(SnapshotError, match="snapshot of step 2 not written: weight holds NaN"):
        save(writer, 2, state=bad)
    assert keys(tmp_path) == [(0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")) == []


def test_so_are_those_of_a_module_among_the_extras(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, may_be_nan={"": set(), "critic": {"fill"}})
    nan = torch.tensor([math.nan, 1.0])
    critic = {"weight": torch.ones(2), "fill": nan}
    good = {"model": {"weight": torch.ones(2)}, "extras": {"critic": critic, "best": {"of": nan}}}
    save(writer, 1, state=good)
    for name in ("weight", "running_mean"):
        bad = good | {"extras": {"critic": critic | {name: nan}}}
        with pytest.raises(SnapshotError, match=f"snapshot of step 2 not written: critic.{name} holds NaN"):
            save(writer, 2, state=bad)
    assert keys(tmp_path) == [(0, 1)]


def test_complex_weights_that_are_nan(tmp_path: Path) -> None:
    model = {"weight": torch.tensor([1 + 2j, complex(0.0, float("nan"))])}
    with pytest.raises(SnapshotError, match="weight holds NaN"):
        save(make_writer(tmp_path), 1, state={"model": model})


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex32, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("index", [0, 12, 100])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_one_nan_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype, index: int) -> None:
    weight = torch.ones(101)
    save(make_writer(tmp_path), 1, state={"model": {"weight": weight.to(dtype)}})
    weight[index] = float("nan")
    with pytest.raises(SnapshotError, match="weight holds NaN"):
        save(make_writer(tmp_path), 2, state={"model": {"weight": weight.to(dtype)}})


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_looked_at_too(tmp_path: Path, layout: torch.layout) -> None:
    writer = make_writer(tmp_path)
    save(writer, 1, state={"model": {"adjacency": torch.eye(3).to_sparse(layout=layout)}})
    with pytest.raises(SnapshotError, match="adjacency holds NaN"):
        save(writer, 2, state={"model": {"adjacency": (torch.eye(3) * float("nan")).to_sparse(layout=layout)}})
    assert keys(tmp_path) == [(0, 1)]


def test_keep_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        make_writer(tmp_path, keep=0)


def test_only_own_snapshots_are_removed(tmp_path: Path) -> None:
    save(make_writer(tmp_path, run_uid="other"), 1)
    save(make_writer(tmp_path, host="b"), 2)
    save(make_writer(tmp_path, host="node-a-b"), 2)
    mine = make_writer(tmp_path, keep=1)
    for step in (3, 4, 5):
        save(mine, step)
    assert [step for _, step in keys(tmp_path)] == [5, 2, 2, 1]


def test_the_same_moment_from_several_hosts_counts_once(tmp_path: Path) -> None:
    writers = [make_writer(tmp_path, host=host, keep=2) for host in ("a", "b", "c")]
    for step in (1, 2, 3):
        for writer in writers:
            save(writer, step)
    assert sorted(keys(tmp_path)) == [(0, 2)] * 3 + [(0, 3)] * 3


def test_a_late_snapshot_of_an_old_generation_is_not_removed_by_its_own_writer(tmp_path: Path) -> None:
    for step in (1, 2):
        save(make_writer(tmp_path, keep=1), step, generation=5)
    result = save(make_writer(tmp_path, keep=1), 9, generation=4)
    assert result.path.exists()
    assert keys(tmp_path) == [(5, 2), (4, 9)]


def test_a_flipped_bit_in_newer_ones_does_not_cost_the_last_that_is_whole(tmp_path: Path) -> None:
    """A restart went by 1, damaged ones being newer; what it saves first is no reason to remove it."""
    for step in (1, 2, 3):
        path = save(make_writer(tmp_path, keep=3), step).path
        if step > 1:
            flip_a_bit(path / "state.pt")

    def steps() -> list[int]:
        return [info.step for info in find_snapshots(tmp_path, warn=lambda message: None)]

    writer = make_writer(tmp_path, keep=3)
    for step in (4, 5):
        save(writer, step)
    assert steps() == [5, 4, 3, 2, 1]
    save(writer, 6)
    assert steps() == [6, 5, 4]


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=2)
    paths = {step: save(writer, step).path for step in (1, 2)}
    os.truncate(paths[2] / "state.pt", 3)
    save(writer, 3)
    assert [info.step for info in find_snapshots(tmp_path, warn=lambda message: None)] == [3, 1]
    save(writer, 4)
    assert keys(tmp_path) == [(0, 4), (0, 3)]  # the damaged one went with those of its age


def test_the_same_snapshot_again(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    first = save(writer, 1)
    before = (first.path / "state.pt").stat()
    again = save(writer, 1)
    assert (again.path, again.bytes, again.warnings) == (first.path, first.bytes, ())
    after = (first.path / "state.pt").stat()  # it was read, so that its access time may differ
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    flip_a_bit(first.path / "state.pt")
    replaced = save(writer, 1)
    assert keys(tmp_path) == [(0, 1)]
    assert load(replaced.path)["step"] == 1
    assert "replaced" in replaced.warnings[0]
    with pytest.raises(SnapshotError, match="another run has one of that name"):
        save(make_writer(tmp_path, run_uid="other"), 1)
    assert keys(tmp_path) == [(0, 1)]


@pytest.mark.parametrize("changes", [{}, {"format_version": 99}], ids=["as-it-is", "of-a-newer-version"])
@pytest.mark.parametrize("key", [None, b"0123456789abcdef"], ids=["without-key", "with-key"])
def test_one_of_another_run_is_not_in_the_way_of_damage(
    tmp_path: Path, key: bytes | None, changes: dict[str, int]
) -> None:
    """Which has not signed it with this key, or has signed it with another: it is whole all the same."""
    theirs = save(make_writer(tmp_path, run_uid="theirs"), 1).path
    edit_manifest(theirs, **changes)
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    with pytest.raises(SnapshotError, match="another run has one of that name"):
        save(make_writer(tmp_path, run_uid="mine", key=key), 1)
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


def test_who_was_replaced_makes_no_room(tmp_path: Path) -> None:
    """The folder is the other job's by now, which counts on what lies there."""
    for step in (10, 20, 30):
        save(make_writer(tmp_path, keep=9), step)

    def replaced() -> None:
        raise OwnershipLost("another job")

    with pytest.raises(OwnershipLost):
        make_writer(tmp_path, keep=9, before_rename=replaced).make_room({"w": torch.zeros(1)})
    assert sizes_of(tmp_path) == [10, 20, 30]


def sizes_of(path: Path) -> list[int]:
    return [info.step for info in sorted(find_snapshots(path, warn=pytest.fail), key=lambda info: info.step)]


def test_room_is_made_by_the_oldest_down_to_the_newest_whole_one(tmp_path: Path) -> None:
    """Of this host alone, without those kept for good, and no more than the state needs, or none where it is larger
    than all of them."""
    writer = make_writer(tmp_path, keep=Retention(9, every=20))
    for step in (10, 20, 30, 40, 50):
        save(writer, step)
    other = SnapshotWriter(tmp_path, keep=9, host="other", run_uid="run", task={})
    save(other, 5)
    flip_a_bit(next(path for path in tmp_path.iterdir() if "-000000000050-" in path.name) / "state.pt")
    state = {"step": 60, "w": torch.full((100,), 60.0)}
    assert writer.make_room({"w": torch.zeros(6000)}) == [], "two snapshots of 4 kB make no room for 24 kB"
    assert sizes_of(tmp_path) == [5, 10, 20, 30, 40, 50]
    [removed] = writer.make_room(state)
    assert "-000000000010-" in removed, "and 20 is kept for good; one makes room for one"
    [removed] = writer.make_room(state)
    assert "-000000000030-" in removed
    assert writer.make_room(state) == [], "40 is the newest that is whole"
    assert sizes_of(tmp_path) == [5, 20, 40, 50]


def test_what_cannot_be_removed_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make_writer(tmp_path)
    for step in (10, 20, 30):
        save(writer, step)

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    assert writer.make_room({"w": torch.zeros(100)}) == []


def test_what_another_container_writes_is_no_leftover(tmp_path: Path) -> None:
    """It has this one's host name, and its process the same pid, or one that nobody has here."""
    names = [f".tmp-step-000000000001-gen-0000-vm-{pid}" for pid in (os.getpid(), 2**22 + 1)]
    with ExitStack() as stack:
        for name in names:
            (tmp_path / name).mkdir()
            stack.enter_context(held(tmp_path / name))
        SnapshotWriter(tmp_path, keep=3, host="vm", run_uid="run", task={})
        assert sorted(os.listdir(tmp_path)) == sorted(names)
    SnapshotWriter(tmp_path, keep=3, host="vm", run_uid="run", task={})
    assert os.listdir(tmp_path) == []


def test_the_best_that_cannot_be_read_for_a_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted process reads it once, from a file server that fails just then."""
    keep = Retention(1, best=1)
    for step, metric in ((1, 0.9), (2, 0.1)):
        save(make_writer(tmp_path, keep=keep), step, metric=metric)
    assert keys(tmp_path) == [(0, 2), (0, 1)]
    digest = hashlib.file_digest

    def fail(file: Any, algorithm: str) -> Any:
        if "step-000000000001" in file.name:
            raise OSError(errno.EIO, "Input/output error")
        return digest(file, algorithm)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", fail)
        save(make_writer(tmp_path, keep=keep), 3, metric=0.2)
    assert (0, 1) in keys(tmp_path)
    save(make_writer(tmp_path, keep=keep), 4, metric=0.3)
    assert keys(tmp_path) == [(0, 4), (0, 1)]


def test_two_containers_with_one_host_name_and_pid_write_one_snapshot(tmp_path: Path) -> None:
    """Each node saves for itself at a late stop, into the folder that all share."""
    manifest = {"step": 1, "epoch": 0, "samples_done": 8, "generation": 0, "world_size": 2, "time": 0.0, "task": {}}
    manifest |= {"run_uid": "r", "host": "vm"}
    name = "step-000000000001-gen-0000-vm"
    first_begun, second_begun, first_done = (threading.Event() for _ in range(3))

    def write(begun: threading.Event, others: threading.Event) -> None:
        def fill(file: IO[bytes]) -> None:
            file.write(bytes(10_000))
            begun.set()
            assert others.wait(20)
            file.write(bytes(10_000))

        LocalFolder(tmp_path).write(name, fill, manifest)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(write, first_begun, second_begun)
        assert first_begun.wait(20)
        second = pool.submit(write, second_begun, first_done)
        try:
            first.result(20)
            verify(read_info(tmp_path / name))
        finally:
            first_done.set()
        second.result(20)
    verify(read_info(tmp_path / name))
    assert os.listdir(tmp_path) == [name]


def test_leftovers_of_dead_writers_of_this_host_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(DEADLINE)
    name = "step-000000000001-gen-0000-node-a"
    ours = ended.pid, f"{ended.pid}.0badcafe", os.getpid()
    gone = [f".tmp-{what}{name}-{pid}" for what in ("", "old-") for pid in ours]
    kept = [f".tmp-{name}-{os.getppid()}", f".tmp-{name}-b-{ended.pid}", ".tmp-mine", "other"]
    for leftover in gone + kept:
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "state.pt").write_text("")
    make_writer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_what_a_worker_leaves_that_is_killed_beside_this_one_goes_with_the_next_snapshot(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(DEADLINE)
    (tmp_path / f".tmp-step-000000000001-gen-0000-node-a-{ended.pid}").mkdir()
    save(writer, 2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_a_new_writer_leaves_the_one_in_flight_alone(tmp_path: Path) -> None:
    entered, proceed = threading.Event(), threading.Event()
    waits = [entered.set, wait_for(proceed)]
    writer = make_writer(tmp_path, before_rename=lambda: [wait() for wait in waits])
    assert save_in_background(writer, {"a": 1}, 1)
    assert entered.wait(DEADLINE)
    make_writer(tmp_path)
    proceed.set()
    assert writer.wait(DEADLINE)
    assert isinstance(writer.collect()[0], SnapshotResult)


# --- in the background ------------------------------------------------------------------------------------------


def test_no_thread_for_a_background_snapshot_is_no_end_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's limit of processes may be reached for a while: by loader processes, or by a neighbour."""

    writer = make_writer(tmp_path)
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        writer.prepare({"a": torch.ones(3)})
        assert save_in_background(writer, {"a": torch.ones(3)}, 1)
    (error,) = writer.collect()
    assert "step-000000000001-gen-0000-node-a not written: no thread can be started" in str(error)
    assert writer.wait(DEADLINE)
    assert save_in_background(writer, {"a": 1}, 2)
    assert writer.wait(DEADLINE)
    assert isinstance(writer.collect()[0], SnapshotResult)


def test_background_writes_the_state_of_the_moment_of_the_call(tmp_path: Path) -> None:
    proceed = threading.Event()
    writer = make_writer(tmp_path, before_rename=wait_for(proceed))
    state = example_state()
    expected = deserialize_state(serialize_state(state))
    assert save_in_background(writer, state, 1)
    for tensor in state["model"].values():
        tensor.zero_()
    for of_parameter in state["optimizer"]["state"].values():
        of_parameter["exp_avg"].fill_(9)
    state["plain"]["a"].append(7)
    state["new"] = 1
    assert writer.is_busy()
    assert writer.collect() == []
    assert not writer.wait(0.01)
    assert not save_in_background(writer, state, 2)
    proceed.set()
    assert writer.wait(DEADLINE)
    assert not writer.is_busy()
    [result] = writer.collect()
    assert isinstance(result, SnapshotResult)
    assert 0 < result.stall_seconds < result.total_seconds
    assert writer.collect() == []
    assert equal(load(result.path), expected)
    assert keys(tmp_path) == [(0, 1)]


def test_mutation_right_after_the_call_in_a_loop(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep=20)
    tensor = torch.zeros(200_000)
    for step in range(1, 16):
        tensor.fill_(step)
        assert save_in_background(writer, {"w": tensor, "step": step}, step)
        tensor.fill_(-1)
        assert writer.wait(DEADLINE)
    results = writer.collect()
    assert len(results) == 15
    for info in find_snapshots(tmp_path, warn=no_warning):
        state = load_state(info)
        assert state["step"] == info.step
        assert bool((state["w"] == info.step).all())


def test_host_buffers_are_used_again() -> None:
    buffers = state_bytes.HostBuffers()

    def addresses(state: dict[str, Any]) -> list[int]:
        copied = buffers.copy(state)
        assert equal(copied, state)
        return [copied[key].data_ptr() for key in state]

    first = addresses({"a": torch.randn(1000), "b": torch.randn(10, 20)})
    assert addresses({"a": torch.randn(1000), "b": torch.randn(10, 20)}) == first
    # another shape gets another buffer, its neighbour keeps its own
    changed = addresses({"a": torch.randn(1000), "b": torch.randn(20, 30)})
    assert changed[0] == first[0]
    assert addresses({"a": torch.randn(1000), "b": torch.randn(20, 30)}) == changed
    assert addresses({"a": torch.randn(1000)}) == first[:1]
    assert len(buffers._buffers) == 1
    addresses({"a": torch.randn(1000).double()})
    strided = {"a": torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last)}
    assert buffers.copy(strided)["a"].stride() == strided["a"].stride()


def test_what_is_one_tensor_in_two_places_is_one_in_the_snapshot() -> None:
    """Each group of an optimizer has the same rate, and what one scheduler writes there, the next group reads."""
    tied, rate = torch.randn(1000), torch.tensor(0.1)
    state = {"model": {"in": tied, "out": tied}, "optimizer": [{"lr": rate}, {"lr": rate}], "part": tied[:500]}
    buffers = HostBuffers()
    buffers.prepare(state)
    file = io.BytesIO()
    write_state(buffers.copy(state), file)
    loaded = deserialize_state(file.getvalue())
    assert equal(loaded, state)
    loaded["optimizer"][0]["lr"].fill_(0.2)
    assert loaded["optimizer"][1]["lr"] == loaded["optimizer"][0]["lr"] != rate
    loaded["part"].fill_(0.0)
    assert torch.equal(loaded["model"]["in"], tied), "a part is another tensor"
    assert len(file.getvalue()) < size_of(state) + tied[:500].nbytes + 1000


def test_buffers_are_there_before_the_first_snapshot() -> None:
    buffers = state_bytes.HostBuffers()
    state = {"a": torch.randn(1000), "sparse": torch.eye(3).to_sparse(), "b": [torch.randn(10, 20).t(), 3]}
    buffers.prepare(state)
    assert buffers._allocation is not None
    buffers._allocation.join(DEADLINE)
    made = [buffer.data_ptr() for buffer in buffers._buffers]
    copied = buffers.copy(state)
    assert [copied["a"].data_ptr(), copied["b"][0].data_ptr()] == made
    assert torch.equal(copied["a"], state["a"])
    assert torch.equal(copied["b"][0], state["b"][0])  # type: ignore[index]
    assert copied["sparse"].is_sparse
    buffers.prepare(state)
    assert [buffer.data_ptr() for buffer in buffers._buffers] == made, "they are there already"


def test_what_cannot_be_saved_is_told_before_a_snapshot_is_due(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="builtin_function"):
        make_writer(tmp_path).prepare({"a": [len]})


def test_a_failure_in_the_background_is_collected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = make_writer(tmp_path / "file")
    assert save_in_background(writer, {"a": 1}, 1)
    assert writer.wait(DEADLINE)
    [outcome] = writer.collect()
    assert isinstance(outcome, SnapshotError)
    assert "step-000000000001" in str(outcome)


def test_what_ends_a_snapshot_for_good_is_raised_by_collect(tmp_path: Path) -> None:
    def before_rename() -> None:
        if lost:
            raise OwnershipLost("lost")

    lost: list[bool] = []
    writer = make_writer(tmp_path, before_rename=before_rename)
    for step in (1, 2):
        assert save_in_background(writer, {"a": 1}, step)
        assert writer.wait(DEADLINE)
        lost.append(True)
    [result] = writer.collect()
    assert isinstance(result, SnapshotResult)
    with pytest.raises(OwnershipLost):
        writer.collect()
    assert writer.collect() == []
    with pytest.raises(OwnershipLost):
        save(writer, 3)
    assert keys(tmp_path) == [(0, 1)]


def test_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    proceed = threading.Event()
    writer = make_writer(tmp_path, before_rename=wait_for(proceed))
    assert save_in_background(writer, {"a": 1}, 1)
    arguments: dict[str, Any] = {"epoch": 0, "samples_done": 0, "generation": 0, "world_size": 1}
    with pytest.raises(SnapshotError, match=r"still being written .* after 0\.01 s"):
        writer.save({"a": 2}, step=2, in_flight_timeout=0.01, **arguments)
    proceed.set()
    writer.save({"a": 2}, step=2, **arguments)
    assert len(writer.collect()) == 1
    assert keys(tmp_path) == [(0, 2), (0, 1)]


# --- a disk that fails ------------------------------------------------------------------------------------------


class FaultyDisk:
    """Fails the n-th write, fsync, mkdir or rename; `fail_at` 0 is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail_at = 0
        self.num_operations = 0
        self.failed = ""
        disk = self

        class File(io.BufferedWriter):
            def write(self, data: Any) -> int:
                disk.operation("write")
                return super().write(data)

        def open_file(path: Path, mode: str) -> Any:
            return File(io.FileIO(path, "wb")) if mode == "wb" else open(path, mode)

        class State(DirectFile):
            def write(self, data: Any) -> int:
                disk.operation("write")
                return super().write(data)

        monkeypatch.setattr(atomic_files, "open", open_file, raising=False)
        monkeypatch.setattr(local_folder, "DirectFile", State)
        for name in ("mkdir", "fsync", "rename"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: Any, **options: Any) -> None:
            self.operation(name)
            function(*arguments, **options)

        return wrapped

    def operation(self, name: str) -> None:
        self.num_operations += 1
        if self.num_operations == self.fail_at:
            self.failed = name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def start(self, fail_at: int) -> None:
        self.fail_at, self.num_operations, self.failed = fail_at, 0, ""


@pytest.mark.parametrize("is_replacing", [False, True])
@pytest.mark.parametrize("is_background", [False, True])
def test_every_fault_leaves_the_older_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replacing: bool, is_background: bool
) -> None:
    disk = FaultyDisk(monkeypatch)
    directory = tmp_path / "snapshots"
    failed = []
    fail_at = 1
    while True:
        disk.start(0)
        shutil.rmtree(directory, ignore_errors=True)
        writer = make_writer(directory, keep=2)
        for step in (1, 2):
            save(writer, step)
        if is_replacing:
            flip_a_bit(save(make_writer(directory, keep=9), 3).path / "state.pt")
        disk.start(fail_at)
        outcome: object
        if is_background:
            assert save_in_background(writer, {"w": torch.ones(500), "step": 3}, 3)
            assert writer.wait(DEADLINE)
            [outcome] = writer.collect()
        else:
            try:
                outcome = save(writer, 3)
            except SnapshotError as error:
                outcome = error
        if not disk.failed:
            break
        failed.append(disk.failed)
        disk.start(0)
        if isinstance(outcome, SnapshotError):
            assert "step-000000000003" in str(outcome)
            assert "No space left on device" in str(outcome)
        else:  # a mkdir of what was there already, or the removal of an old one
            assert isinstance(outcome, SnapshotResult)
            assert fail_at == 1 or "cannot be removed" in outcome.warnings[-1]
            assert fail_at != 1 or failed[-1] == "mkdir"
        assert not list(directory.glob(".tmp-*"))
        whole = []
        for info in find_snapshots(directory, warn=no_warning):
            try:
                verify(info)
                whole.append(info.step)
            except SnapshotDamaged:
                assert (is_replacing, info.step) == (True, 3)
        assert whole in ([2, 1], [3, 2, 1]) or (fail_at == 1 and whole == [3, 2])
        assert save(writer, 3).path.exists()  # the next attempt works
        assert keys(directory) == [(0, 3), (0, 2)]
        fail_at += 1
    assert isinstance(outcome, SnapshotResult)
    assert set(failed) == {"mkdir", "write", "fsync", "rename"}
    assert failed.count("fsync") == 4  # both files, the directory and its parent
    assert failed.count("write") >= 3
    assert keys(directory) == [(0, 3), (0, 2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, timeout=DEADLINE
        )
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=DEADLINE)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    writer = make_writer(small_disk, keep=3)
    big = {"w": torch.randn(75_000)}  # 300 kB
    for step in (1, 2, 3):
        save(writer, step, state=big)
    for step in (4, 5, 6):
        with pytest.raises(SnapshotError, match=r"No space left on device; the snapshots that are there are untouched"):
            save(writer, step, state=big)
        assert save_in_background(writer, big, step)
        assert writer.wait(DEADLINE)
        assert isinstance(writer.collect()[0], SnapshotError)
        assert keys(small_disk) == [(0, 3), (0, 2), (0, 1)]
    for step in (7, 8, 9):
        save(writer, step)
    assert keys(small_disk) == [(0, 9), (0, 8), (0, 7)]


def test_room_is_counted_from_what_is_free_and_what_the_state_takes(small_disk: Path) -> None:
    """Of a state that has grown, as with a replay buffer."""
    writer = make_writer(small_disk, keep=9)
    for step in (1, 2, 3):
        save(writer, step, state={"w": torch.zeros(62_500)})  # 250 kB, and some 250 kB are free
    assert writer.make_room({"w": torch.zeros(250_000)}) == [], "all that may go is 500 kB, and 1 MB would not fit"
    assert len(writer.make_room({"w": torch.zeros(100_000)})) == 1, "400 kB: half of it is free"
    save(writer, 4, state={"w": torch.zeros(100_000)})
    assert keys(small_disk) == [(0, 4), (0, 3), (0, 2)]


# --- killed, and stopped ----------------------------------------------------------------------------------------


KILLED_AT = """
import os
import shutil
import sys
from pathlib import Path
import torch
from torch.testing._internal.two_tensor import TwoTensor
from elastic_train.storage.snapshot import find_snapshots, load_state
from elastic_train.storage.snapshot_writer import SnapshotWriter

directory = Path(sys.argv[1]) / "snapshots"
torch.set_num_threads(1)  # a forked child has no thread pool
CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "ftruncate")

def no_warning(message):
    raise AssertionError(message)

def save(step, in_background=False):
    writer = SnapshotWriter(directory, keep=2, host="node-a", run_uid="run", task={})
    w, where = torch.full((500,), float(step)), dict(step=step, epoch=0, samples_done=0, generation=0, world_size=1)
    if not in_background:
        writer.save({"w": w}, **where)
        return
    assert writer.save_in_background({"w": w}, **where)
    w.fill_(-1)
    assert writer.wait(30)

def count_down(name, left):
    function = getattr(os, name)
    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)  # as SIGKILL: nothing is cleaned up
        return function(*arguments, **options)
    setattr(os, name, counted)

for in_background in (False, True):
    found = set()
    for number in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        save(1)
        save(2)
        child = os.fork()
        if child == 0:
            left = [number]
            for name in CALLS:
                count_down(name, left)
            save(3, in_background)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps = []
        for info in find_snapshots(directory, warn=no_warning):
            assert bool((load_state(info)["w"] == info.step).all())
            steps.append(info.step)
        assert steps in ([2, 1], [3, 2, 1], [3, 2]), (number, steps)
        found.add(tuple(steps))
        if code == 0:
            break
        assert code == 9, code
        save(4)  # the next writer is not in the way of what was left
        assert [info.step for info in find_snapshots(directory, warn=no_warning)][0] == 4
        assert not list(directory.glob(".tmp-*"))
    print(number, len(found))
"""


def test_killed_at_every_call_of_a_write(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 2, "by itself, and in the background"
    for num_calls, outcomes in found:
        assert 10 < num_calls < 199
        assert outcomes == 3, "before it is visible, before the oldest goes, and after"


STALE = """
import sys
import torch
from torch.testing._internal.two_tensor import TwoTensor
from pathlib import Path
from elastic_train.errors import OwnershipLost
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.snapshot_writer import SnapshotWriter

directory = RunDirectory(sys.argv[1])
directory.create()
directory.ownership.claim("first", 4, "node-a")
where = dict(epoch=0, samples_done=0, generation=4, world_size=1)
writer = SnapshotWriter(
    directory.snapshots_dir, keep=2, host="node-a", run_uid="run", task={},
    before_rename=lambda: directory.ownership.check_owner("first", 4),
)
writer.save({"who": "first"}, step=100, **where)
print("ready", flush=True)
sys.stdin.readline()
try:
    writer.save({"who": "first"}, step=200, **where)
except OwnershipLost as lost:
    print(lost, flush=True)
assert writer.save_in_background({"who": "first"}, step=300, **where)
assert writer.wait(30)
try:
    writer.collect()
except OwnershipLost as lost:
    print(lost, flush=True)
"""


def test_a_stopped_writer_that_goes_on_does_no_harm(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STALE, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        freeze(process.pid)
        directory = RunDirectory(tmp_path / "run")
        directory.ownership.claim("second", 5, "node-a")
        writer = make_writer(
            directory.snapshots_dir, keep=2, before_rename=lambda: directory.ownership.check_owner("second", 5)
        )
        save(writer, 110, generation=5)
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate("go on\n", timeout=DEADLINE)
        assert process.returncode == 0
        lines = output.splitlines()
        assert len(lines) == 2
        assert all(f"another job (host node-a, pid {os.getpid()}" in line for line in lines)
        assert keys(directory.snapshots_dir) == [(5, 110), (4, 100)]
        save(writer, 120, generation=5)
        assert keys(directory.snapshots_dir) == [(5, 120), (5, 110)]
        directory.ownership.release()
    finally:
        process.kill()
        process.wait(DEADLINE)


@pytest.mark.parametrize(("number", "told"), [(errno.ENOSPC, True), (errno.EROFS, False), (errno.EACCES, False)])
def test_only_a_full_disk_is_to_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_folder, "_write_state", refuse)
    with pytest.raises(SnapshotError, match="cannot be written") as caught:
        save(make_writer(tmp_path), step=1)
    assert ("free some space" in str(caught.value)) is told
    assert ("writable" in str(caught.value)) is not told
