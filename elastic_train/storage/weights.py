"""Exchange of a model's weights with other programs: `elastic-train snapshot export` and `--init-from`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.errors import SnapshotError, UsageError, cause_of
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.storage.dcp import is_dcp, read_dcp, write_dcp
from elastic_train.storage.places import snapshots_in
from elastic_train.storage.retention import best_first
from elastic_train.storage.snapshot import (
    SnapshotFolder,
    SnapshotInfo,
    SnapshotPlace,
    find_snapshots,
    first_whole,
    is_snapshot,
    load_state,
    read_info,
)
from elastic_train.storage.state_bytes import deserialize_state
from elastic_train.storage.store_urls import is_url

WRAPPED = "module."
"""The prefix of all names in the state dict of a wrapped model. Some models have a layer of that name themselves."""


def export_weights(weights: Mapping[str, Tensor], path: Path, file_format: str) -> None:
    """Write a state dict as `pt` (for torch.load), `safetensors` or `dcp` (a folder), whole or not at all.

    Raises:
        SnapshotError: it cannot be written, or the format does not support its content.
        UsageError: `safetensors` is not installed.
    """
    if file_format == "dcp":
        write_dcp(weights, path)
        return
    try:
        write_atomic(path, _safetensors_bytes(weights) if file_format == "safetensors" else _torch_bytes(weights))
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {error.strerror}") from error


def typed_as(model: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Cast weights to the data types of the model's: averages of 16-bit weights are kept in a wider type."""
    found = dict(weights)
    for name, own in model.items():
        if isinstance(own, Tensor) and isinstance(weights.get(name), Tensor):
            found[name] = weights[name].to(own.dtype)
    return found


def _torch_bytes(weights: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    return buffer.getvalue()


def _safetensors_bytes(weights: Mapping[str, Tensor]) -> bytes:
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):  # a module's extra state
            raise SnapshotError(f"safetensors has tensors alone, and {name} is none: take --format pt")
    # The library refuses tensors that share memory, such as tied weights, and tensors that are not contiguous.
    apart = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()
    }
    try:
        return bytes(_safetensors().save(apart, {"format": "pt"}))
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"safetensors has no place for these weights ({error}): take --format pt") from error


def _read_safetensors(data: bytes, source: str) -> dict[str, Tensor]:
    library = _safetensors()
    from safetensors import SafetensorError

    try:
        return dict(library.load(data))
    except (SafetensorError, KeyError) as error:  # a KeyError for a data type that torch does not have
        raise SnapshotError(f"{source} is no safetensors file that can be read: {error}") from error


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(f"safetensors is not installed ({error}): pip install 'elastic_train[safetensors]'") from error
    return safetensors.torch


def read_weights(path: Path, *, warn: Callable[[str], None], key: bytes | None = None) -> dict[str, Any]:
    """Read a model's state dict, including entries that are no tensors. Never runs code from a file.

    `path` is a snapshot, a run or a folder of snapshots (the newest whole one is read), a file of torch.save or
    safetensors, or a folder of torch.distributed.checkpoint. With a key only signed snapshots of a folder are read; for
    a file, `warn` gets a line that it is not signed.

    Raises:
        SnapshotError: `path` is nothing of these, cannot be read, or with a key is of a format without signatures.
        UsageError: the file needs `safetensors`, which is not installed.
    """
    loaded: dict[str, Any]
    if is_dcp(path) and key is None:  # with a key, an attacker with write access but no key could put such files there
        loaded = {**read_dcp(path)}
    elif path.is_dir():
        try:
            _, loaded = read_state(path, warn=warn, key=key)
        except SnapshotError as error:
            if not is_dcp(path):
                raise
            why = "no key signs what torch.distributed.checkpoint wrote there: as a file of torch.save it would be read"
            raise SnapshotError(f"{error}; {why}") from error
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
        if key is not None:
            warn(f"{path} is no snapshot: no key signs it")
        if path.suffix == ".safetensors":
            loaded = _read_safetensors(data, str(path))
        else:
            loaded = deserialize_state(data, source=str(path))
    for container in ("model", "state_dict"):  # training scripts nest weights so
        if isinstance(inner := loaded.get(container), Mapping):
            loaded = dict(inner)
    if not any(isinstance(value, Tensor) for value in loaded.values()):
        raise SnapshotError(f"{path} holds no weights")
    return loaded


def read_state(
    path: SnapshotPlace | SnapshotFolder,
    *,
    warn: Callable[[str], None],
    key: bytes | None = None,
    is_best: bool = False,
) -> tuple[SnapshotInfo, dict[str, Any]]:
    """Read a snapshot and its state; of a folder of snapshots or a run the newest whole one, or with `is_best` the one
    with the largest metric.

    The state holds a model. Its other entries depend on the program that wrote it, which may use a `SnapshotStore`.

    Raises:
        SnapshotError: there is no snapshot, or it holds no model.
    """
    if is_snapshot(path):
        info = read_info(path, key)
        state = load_state(info)
    else:
        directory = snapshots_in(path)
        infos = find_snapshots(directory, warn=warn, key=key)
        found = first_whole(best_first(infos) if is_best else infos, warn)
        if found is None and is_best:
            raise SnapshotError(f"no whole snapshot in {directory} has a metric; --keep-best keeps such ones")
        if found is None:
            raise SnapshotError(f"no whole snapshot in {directory}")
        info, state = found
    if not isinstance(state.get("model"), dict):
        raise SnapshotError(f"snapshot {info.path} holds no model")
    return info, state


def require_there(path: Path) -> None:
    """Raises: SnapshotError: the path of --init-from does not exist or is not accessible. UsageError: it is a URL."""
    if is_url(path):  # not repeated in the error, because it may hold a secret
        scheme = str(path).partition(":")[0]
        raise UsageError(
            f"--init-from {scheme}://...: no URL works here; `elastic-train snapshot copy URL FOLDER` brings a "
            "snapshot to a folder"
        )
    try:
        path.stat()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {cause_of(error)} (--init-from)") from error


def initialise(model: nn.Module, path: Path, *, warn: Callable[[str], None], key: bytes | None = None) -> None:
    """Load weights into a model (`--init-from`), also with the prefix `module.` of DDP and DataParallel. `key` as in
    `read_weights`.

    Raises:
        UsageError: names or shapes do not match; lists each. SnapshotError: as `read_weights`.
    """
    loaded, own = read_weights(path, warn=warn, key=key), model.state_dict()
    tensors = [name for name, value in loaded.items() if isinstance(value, Tensor)]
    if own.keys().isdisjoint(tensors) and all(name.startswith(WRAPPED) for name in tensors):
        loaded = {name.removeprefix(WRAPPED): value for name, value in loaded.items()}
    # Of entries that are no tensors, only a layer's extra state is loaded: a file may also hold an epoch, say.
    extra_states = {name for name, value in own.items() if not isinstance(value, Tensor)}
    weights = {name: value for name, value in loaded.items() if isinstance(value, Tensor) or name in extra_states}
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is not in the model" for name in weights if name not in own]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in weights and name not in extra_states and weights[name].shape != own[name].shape
    ]
    if problems:
        raise UsageError(f"--init-from {path} does not fit the model: {'; '.join(problems)}")
    model.load_state_dict(weights)
