"""Digests by which members check that they train the same model by the same code, on the same data in the same order.

If one node lists a folder in another order, or a file of it was replaced, the length is the same, but samples would be
used twice or never, unnoticed. Only a few names and items are read, so this is cheap for any number of items.
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

from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.optimizers import parameters_of, sizes_of
from elastic_train.training.state import TrainState
from elastic_train.wording import count

NUM_ENTRIES = 64
"""entries read of each list that the data set holds about its items"""
MAX_DEPTH = 4
"""levels of nested data sets"""
MAX_INNER = 16
"""data sets read of one list in a data set"""
SHOWN = 40
"""characters of a name in a message"""
ORDER_OF, KIND_OF = "order of the parameters of ", "kind of "
"""prefixes of the entries of each optimizer"""


def identify(
    dataset: Dataset[Any], *, seed: int, collate: Callable[[list[Any]], Any], may_read: bool
) -> dict[str, str]:
    """Return digests that must agree between members, by name; empty if none can be made.

    `names`: some entries of lists with an entry per item (files, labels), with paths relative to their common folder.
    `items`: integers, types and shapes of the first, the middle and the last item, if two readings agree; of a
    TensorDataset floats as well. Texts are left out, because an item may hold its path.

    Args:
        may_read: whether to read items. False with loader processes: they must not inherit files that a data set opens
            at its first read.
    """
    found = {}
    names = _names_of(dataset)
    if names:
        shown = next((entry for entry in names[0] if isinstance(entry, str)), "")
        found["names"] = _digest(names) + (f" ({shown[:SHOWN]!r} is the first)" if shown else "")
    if may_read:
        length = len(dataset)  # type: ignore[arg-type]  # Dataset declares no __len__
        places = sorted({0, length // 2, length - 1})
        # Floats only as they are in memory: another processor may round transforms differently.
        read = _read_items(EpochDataset(dataset, seed, collate), places, is_exact=type(dataset) is TensorDataset)
        if read is not None:
            found["items"] = read
    return found


def identify_state(state: TrainState) -> dict[str, str]:
    """Return the names and shapes of a model and its extras that must agree between members, whose scripts may differ;
    and the order in which optimizers list parameters, by which torch takes over their states, a snapshot's too: no hash
    of a state shows another order. Call it when they are made: training may change them."""
    tensors = [*state.model.named_parameters(), *state.model.named_buffers()]
    if any(nn.parameter.is_lazy(tensor) for _, tensor in tensors):  # the first batch decides their shapes
        return {}
    digest = _digest(
        [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(tensors, key=itemgetter(0))]
    )
    numbers = sum(tensor.numel() for _, tensor in tensors)
    modules = sorted(state.kept.modules.items(), reverse=True)  # the model last: it names what an extra has as well
    names = {id(one): f"{place} {name}" for place, module in modules for name, one in module.named_parameters()}
    found = {"the optimizer": state.optimizer, **{f"extras[{name!r}]": one for name, one in state.extras.items()}}
    trained: dict[str, str] = {}
    for place, optimizer in found.items():
        if isinstance(optimizer, torch.optim.Optimizer):
            order = [names.get(id(one)) for one in parameters_of(optimizer)]
            trained[f"{KIND_OF}{place}"] = type(optimizer).__name__
            trained[f"{ORDER_OF}{place}"] = f"{count(len(order), 'parameter')} ({_digest(order)})"
            trained[f"groups of {place}"] = f"{sizes_of(optimizer)}"
    # Averages are of a flag, which is compared itself.
    own = sorted(name for name, one in state.extras.items() if not isinstance(one, AveragedWeights))
    return {
        "the model": f"{count(len(tensors), 'tensor')} of {count(numbers, 'number')} ({digest})",
        **trained,
        "what extras holds": ", ".join(own) or "nothing",
    }


def identify_code(code: Any) -> tuple[str, str] | None:
    """Return the file of a function or class, and the beginning of its SHA-256; None if no file can be read."""
    try:
        path = inspect.getsourcefile(code)
        return None if path is None else (path, hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12])
    except (TypeError, OSError):  # a partial, for one; or a file that was moved
        return None


def _names_of(dataset: Any) -> list[list[Any]]:
    try:
        return list(_lists(dataset, MAX_DEPTH))
    except Exception:  # of the user's code; training will show whether it matters
        return []


def _lists(dataset: Any, depth: int) -> Iterator[list[Any]]:
    length = len(dataset)
    if length == 0:
        return
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        is_array = isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1
        if (is_array or isinstance(value, list | tuple)) and len(value) == length:
            places = spread(length)
            entries = value[places].tolist() if is_array else [value[place] for place in places]
            if all(map(_is_plain, entries)):
                yield _below_common(entries)
        for inner in value[:MAX_INNER] if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, Dataset) and hasattr(inner, "__len__") and depth:
                yield from _lists(inner, depth - 1)


def spread(length: int) -> list[int]:
    """Return at most NUM_ENTRIES places of a list, spread evenly from its first to its last; ascending."""
    number = min(NUM_ENTRIES, length)
    return [place * (length - 1) // max(number - 1, 1) for place in range(number)]


def _is_plain(entry: Any) -> bool:
    if isinstance(entry, list | tuple):
        return len(entry) < 10 and all(map(_is_plain, entry))
    return isinstance(entry, str | int | os.PathLike)


def _below_common(entries: Sequence[Any]) -> list[Any]:
    """Return the entries flat, with paths relative to their common folder, which may differ between nodes."""
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
        return found if read() == found else None  # unseeded draws make the digest useless
    except Exception:  # of the user's code; the first step raises and reports it
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
            digest.update(f"{value!r},".encode())  # the comma tells 1, 11 from 11, 1
        else:
            digest.update(type(value).__name__.encode())
            if (has_floats and isinstance(value, float)) or (has_texts and isinstance(value, str)):
                digest.update(repr(value).encode())

    add(value)
    return digest.hexdigest()
