"""Weights in the format of torch.distributed.checkpoint: a folder with a file per writing rank, and `.metadata`.

`.metadata` is a pickle, and torch unpickles it, which runs any code in it. This module allows only the classes of such
metadata, and loads only tensors, because other values are pickles as well.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic_train.errors import SnapshotError, cause_of, first_line
from elastic_train.storage.atomic_files import draft_beside, fsync_directory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"
CONTAINERS = ("app", "model", "state_dict")
"""Names under which training scripts nest a model, the outer ones first."""
_ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


def is_dcp(path: Path) -> bool:
    return (path / METADATA_FILE).is_file()


def write_dcp(weights: Mapping[str, Any], path: Path) -> None:
    """Write a state dict as `{"model": weights}`, whole or not at all. The folder must be new or empty.

    Raises:
        SnapshotError: the folder cannot be written, or is not empty.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        draft = draft_beside(path)
        try:
            with _alone():
                save({"model": dict(weights)}, storage_writer=FileSystemWriter(draft), no_dist=True)
            os.rename(draft, path)  # replaces only an empty folder
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written: {cause_of(error)}; choose another --output") from error
    except CheckpointException as error:
        raise SnapshotError(f"{path} cannot be written: {_cause_in(error)}; choose another --output") from error


def read_dcp(path: Path) -> dict[str, Tensor]:
    """Read the complete weights of a model, however ranks divided them; other tensors are not read.

    Raises:
        SnapshotError: the folder cannot be read, or its metadata has foreign classes, or more bytes than the files.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _read_metadata(path)
    try:
        _require_files(path, metadata)
        wanted = _names_of_weights(metadata)
        tensors = _allocate(path, {flat: metadata.state_dict_metadata[flat] for flat in wanted})
        with _alone():
            load(tensors, storage_reader=_reader(path, metadata), no_dist=True)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{path} is no checkpoint that can be read: {first_line(error)}") from error
    except CheckpointException as error:
        raise SnapshotError(f"{path} is no checkpoint that can be read: {_cause_in(error)}") from error
    return {wanted[flat]: tensor for flat, tensor in tensors.items()}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of metadata")


def _read_metadata(path: Path) -> Metadata:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open(path / METADATA_FILE, "rb") as file:
            found = _MetadataUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(f"{path / METADATA_FILE} cannot be read: {cause_of(error)}") from error
    except Exception as error:  # bytes that are no pickle can cause any error in the unpickler
        raise SnapshotError(f"{path / METADATA_FILE} is none that can be read: {first_line(error)}") from error
    if not isinstance(found, Metadata):
        raise SnapshotError(f"{path / METADATA_FILE} is none that can be read: it holds a {type(found).__name__}")
    return found


def _require_files(path: Path, metadata: Metadata) -> None:
    """Raises: SnapshotError: the metadata names a file outside the folder."""
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise SnapshotError(f"{path}: {info.relative_path!r} is not the name of a file in it")


def _names_of_weights(metadata: Metadata) -> dict[str, str]:
    """The model's name of each of its tensors, by the name in the metadata, which is a path joined by dots."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    paths = {flat: (flat,) for flat in metadata.state_dict_metadata} | dict(metadata.planner_data or {})
    prefix: tuple[str, ...] = ()
    for container in CONTAINERS:
        longer = (*prefix, container)
        if any(path[: len(longer)] == longer and len(path) > len(longer) for path in paths.values()):
            prefix = longer
    return {
        flat: str(path[-1])
        for flat, path in paths.items()
        if path[:-1] == prefix and isinstance(metadata.state_dict_metadata[flat], TensorStorageMetadata)
    }


def _allocate(path: Path, described: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocate the tensors. Raises: SnapshotError: the metadata promises more bytes than the files have."""
    promised = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in described.values())
    present = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if promised > present:
        raise SnapshotError(f"{path}: its metadata promises {promised} bytes of weights, its files have {present}")
    return {flat: torch.empty(one.size, dtype=one.properties.dtype, device="cpu") for flat, one in described.items()}


def _reader(path: Path, metadata: Metadata) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class SafeReader(FileSystemReader):
        """Returns the metadata that is already read, and does not unpickle it again."""

        def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
            return metadata

    return SafeReader(path)


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress torch's warning that this is a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _cause_in(error: Any) -> str:
    """The messages in torch's CheckpointException, which is no Exception and holds the errors of all ranks."""
    return "; ".join(first_line(one) or type(one).__name__ for one, _ in error.failures.values())
