"""By what members see that they train the same model by the same code, and on the same data in the same order: a few
names and items.

A folder that one node lists in another order, or in which a file was replaced, has the same length and breaks
exactly-once unseen. Cheap for any number of items.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.state import TrainState
from elastic_train.wording import count

NUM_ENTRIES = 64
"""of each list that the data set holds about its items"""
MAX_DEPTH = 4
"""of data sets within data sets"""
MAX_INNER = 16
"""data sets side by side in one"""
SHOWN = 40
"""characters of a name in a message"""


def identify(
    dataset: Dataset[Any], *, seed: int, collate: Callable[[list[Any]], Any], may_read: bool
) -> dict[str, str]:
    """What must agree between members, by name; empty where nothing can be found out.

    `names`: of lists with an entry for each item (files, labels) some entries, with paths below what these have in
    common. `items`: whole numbers, types and shapes of the first item, the one in the middle and the last one, where
    they can be read twice with the same outcome; other numbers as well of a TensorDataset. No texts: an item may hold
    its path.

    Args:
        may_read: whether to read items. Not where loader processes do: files that a data set opens when it is first
            read must not be inherited by them.
    """
    found = {}
    names = _names_of(dataset)
    if names:
        shown = next((entry for entry in names[0] if isinstance(entry, str)), "")
        found["names"] = _digest(names) + (f" ({shown[:SHOWN]!r} is the first)" if shown else "")
    if may_read:
        length = len(dataset)  # type: ignore[arg-type]  # Dataset declares no __len__
        places = sorted({0, length // 2, length - 1})
        # As they lie in memory, or after transforms, which another processor may round differently.
        read = _read_items(EpochDataset(dataset, seed, collate), places, is_exact=type(dataset) is TensorDataset)
        if read is not None:
            found["items"] = read
    return found


def identify_state(state: TrainState) -> dict[str, str]:
    """What of a model and its extras must agree between members, whose scripts may differ: shapes, and names. Asked
    when they are made: training may change them."""
    tensors = [*state.model.named_parameters(), *state.model.named_buffers()]
    if any(nn.parameter.is_lazy(tensor) for _, tensor in tensors):  # of shapes that the first batch gives them
        return {}
    digest = _digest(
        [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(tensors, key=itemgetter(0))]
    )
    numbers = sum(tensor.numel() for _, tensor in tensors)
    return {
        "the model": f"{count(len(tensors), 'tensor')} of {count(numbers, 'number')} ({digest})",
        "what extras holds": ", ".join(sorted(state.extras)) or "nothing",
    }


def identify_code(code: Any) -> tuple[str, str] | None:
    """The file of a function or a class, and the beginning of its SHA-256; None where none can be read."""
    try:
        path = inspect.getsourcefile(code)
        return None if path is None else (path, hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12])
    except (TypeError, OSError):  # made by a partial, say; or moved since
        return None


def _names_of(dataset: Any) -> list[list[Any]]:
    try:
        return list(_lists(dataset, MAX_DEPTH))
    except Exception:  # of the user's code: what it is good for shows in training
        return []


def _lists(dataset: Any, depth: int) -> Iterator[list[Any]]:
    length = len(dataset)
    if length == 0:
        return
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        is_array = isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1
        if (is_array or isinstance(value, list | tuple)) and len(value) == length:
            places = spread(length, NUM_ENTRIES)
            entries = value[places].tolist() if is_array else [value[place] for place in places]
            if all(map(_is_plain, entries)):
                yield _below_common(entries)
        for inner in value[:MAX_INNER] if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, Dataset) and hasattr(inner, "__len__") and depth:
                yield from _lists(inner, depth - 1)


def spread(length: int, most: int) -> list[int]:
    """Places in a list, evenly spread from its first to its last, `most` of them or all; ascending."""
    most = min(most, length)
    return [number * (length - 1) // max(most - 1, 1) for number in range(most)]


def _is_plain(entry: Any) -> bool:
    if isinstance(entry, list | tuple):
        return len(entry) < 10 and all(map(_is_plain, entry))
    return isinstance(entry, str | int | os.PathLike)


def _below_common(entries: Sequence[Any]) -> list[Any]:
    """Flat, and paths without the folder in which a node keeps its data."""
    flat = [part for entry in entries for part in (entry if isinstance(entry, list | tuple) else (entry,))]
    texts = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in flat]
    folders = {os.path.dirname(text) for text in texts if isinstance(text, str) and os.sep in text}
    if not folders or len({os.path.isabs(folder) for folder in folders}) > 1:
        return texts
    root = os.path.commonpath(folders)
    return [os.path.relpath(text, root) if isinstance(text, str) and os.sep in text else text for text in texts]


def _read_items(dataset: EpochDataset, places: list[int], *, is_exact: bool) -> str | None:
    def read() -> str:
        return _digest(dataset.read(np.array(places, dtype=np.int64)), has_floats=is_exact, has_texts=False)

    try:
        found = read()
        return found if read() == found else None  # what draws from elsewhere says nothing
    except Exception:  # of the user's code: the first step raises it where it can be told
        return None


def _digest(value: Any, *, has_floats: bool = True, has_texts: bool = True) -> str:
    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if has_floats or not (value.is_floating_point() or value.is_complex()):
                digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for entry in value:
                add(entry)
        elif value is None or isinstance(value, int):
            digest.update(f"{value!r},".encode())  # else 1 and 11 were as 11 and 1
        else:
            digest.update(type(value).__name__.encode())
            if (has_floats and isinstance(value, float)) or (has_texts and isinstance(value, str)):
                digest.update(repr(value).encode())

    add(value)
    return digest.hexdigest()
