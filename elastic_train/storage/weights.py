"""A model's weights to and from other programs: `elastic-train snapshot export` and `--init-from`."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.errors import SnapshotError, UsageError
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.storage.snapshot import SnapshotInfo, is_snapshot, load_state, newest_whole, read_info, snapshots_in
from elastic_train.storage.state_bytes import deserialize_state

SAFETENSORS_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""torch's data types by their names in the format (https://github.com/huggingface/safetensors#format)"""


WRAPPED = "module."
"""before every name in the state dict of a wrapped model; some models have a layer of that name themselves"""


def export_weights(weights: Mapping[str, Tensor], path: Path, file_format: str) -> None:
    """Write a state dict as `pt` (for torch.load) or `safetensors`, whole or not at all.

    Raises:
        SnapshotError: it cannot be written, or holds what the format has no place for.
    """
    try:
        if file_format == "safetensors":
            write_atomic(path, safetensors_bytes(weights))
        else:
            write_atomic(path, _torch_bytes(weights))
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {error.strerror}") from error


def _torch_bytes(weights: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    return buffer.getvalue()


def safetensors_bytes(weights: Mapping[str, Tensor]) -> bytes:
    """The file: length of the header, the header as JSON, and the tensors' bytes, little-endian as the machine's are.

    Raises:
        SnapshotError: something is no tensor, or of a data type that has no name in the format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):  # a module's extra state
            raise SnapshotError(f"safetensors has tensors alone, and {name} is none: take --format pt")
        if tensor.dtype not in SAFETENSORS_TYPES:
            raise SnapshotError(f"safetensors has no {tensor.dtype}, the type of {name}: take --format pt")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors in place
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def read_safetensors(data: bytes, source: str) -> dict[str, Tensor]:
    """The state dict in a safetensors file. Raises: SnapshotError where the bytes are no such file."""
    types = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        body = memoryview(bytearray(data))[8 + length :]
        weights = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                dtype, shape = types[entry["dtype"]], entry["shape"]
                if not 0 <= start <= stop <= len(body) or stop - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} does not fit its place")
                flat = torch.frombuffer(body[start:stop], dtype=dtype) if stop > start else torch.empty(0, dtype=dtype)
                weights[name] = flat.reshape(shape)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{source} is no safetensors file that can be read: {error}") from error
    return weights


def read_weights(path: Path, *, warn: Callable[[str], None]) -> dict[str, Tensor]:
    """A model's state dict from a snapshot, a run or a folder of snapshots (the newest whole one), or a file that
    torch.save or safetensors wrote.

    Runs no code from the file.

    Raises:
        SnapshotError: there is nothing of the kind, or it cannot be read.
    """
    if path.is_dir():
        _, loaded = read_state(path, warn=warn)
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
        if path.suffix == ".safetensors":
            loaded = read_safetensors(data, str(path))
        else:
            loaded = deserialize_state(data, source=str(path))
    for container in ("model", "state_dict"):  # as training scripts nest it
        if isinstance(loaded.get(container), Mapping):
            loaded = loaded[container]
    weights = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    if not weights:
        raise SnapshotError(f"{path} holds no weights")
    return weights


def read_state(path: Path, *, warn: Callable[[str], None]) -> tuple[SnapshotInfo, dict[str, Any]]:
    """A snapshot and its state, or the newest whole one in a folder of them or in a run.

    The state holds a model; what else depends on who wrote it, a `SnapshotStore` of somebody's own perhaps.

    Raises:
        SnapshotError: there is none, or it holds no model.
    """
    if is_snapshot(path):
        info = read_info(path)
        state = load_state(info)
    else:
        directory = snapshots_in(path)
        found = newest_whole(directory, warn=warn)
        if found is None:
            raise SnapshotError(f"no whole snapshot in {directory}")
        info, state = found
    if not isinstance(state.get("model"), dict):
        raise SnapshotError(f"snapshot {info.path} holds no model")
    return info, state


def initialise(model: nn.Module, path: Path, *, warn: Callable[[str], None]) -> None:
    """Load weights into a model (`--init-from`), also with the `module.` that DDP and DataParallel put before names.

    Raises:
        UsageError: names or shapes do not fit; names each. SnapshotError: as `read_weights`.
    """
    weights, own = read_weights(path, warn=warn), model.state_dict()
    if own.keys().isdisjoint(weights) and all(name.startswith(WRAPPED) for name in weights):
        weights = {name.removeprefix(WRAPPED): value for name, value in weights.items()}
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is not in the model" for name in weights if name not in own]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if problems:
        raise UsageError(f"--init-from {path} does not fit the model: {'; '.join(problems)}")
    model.load_state_dict(weights)
