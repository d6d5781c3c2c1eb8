"""A data set as loaders read it: whole batches, by index and epoch."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static, signature
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from elastic_train.errors import UsageError
from elastic_train.training.augment import SeededItems
from elastic_train.training.datasets import SyntheticImages, TensorImages
from elastic_train.training.sampler import MicroBatch

T = TypeVar("T")

_WITHOUT_DRAWS = (TensorDataset, TensorImages, SyntheticImages)
"""data sets that draw no random numbers; seeding generators would take longer than reading their batches"""


class _LastEpoch:
    """The last epoch given to a data set's `set_epoch` in this process, by any reader."""

    epoch: int | None = None


_known: WeakValueDictionary[int, _LastEpoch] = WeakValueDictionary()
"""by the data set's id, as long as a reader exists; a data set may be unhashable"""


class EpochDataset(Dataset[Any]):
    """Any map-style data set, for a DataLoader whose `batch_sampler` yields micro-batches.

    Fetching returns `(micro_batch, batch)`; `batch` is None for a micro-batch without samples. A data set's method
    `gather(indices: int64 Tensor, epoch: int) -> batch` is called once per micro-batch. Any other data set is read item
    by item. The global generators of torch, random and numpy are seeded by (seed, epoch, index) before each item, so
    that transforms give the same in every process. Then `collate` makes the batch. For `collate` and `gather` these
    generators are seeded by (seed, epoch, the micro-batch's first index). A TensorDataset with the default collate
    gives the same batch without going through its items.

    If the data set has a method `set_epoch` with one argument, every process calls it before its first
    micro-batch of an epoch: a call in the training function would not reach running loader processes. It draws the same
    numbers in each process. Several readers of one data set in a process share the last epoch that it was given.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        length_of(dataset)  # raises for a data set without a length
        self.dataset = dataset
        self._items = SeededItems(seed)
        self._collate = collate
        self._gather: Callable[[Tensor, int], Any] | None = None
        # Look it up on the class: a wrapper may forward missing attributes, and its own items would be bypassed.
        if getattr_static(type(dataset), "gather", None) is not None:
            self._gather = dataset.gather  # type: ignore[attr-defined]
        if type(dataset) is TensorDataset and collate is default_collate:
            self._gather = self._select
        set_epoch = getattr(dataset, "set_epoch", None)
        self._set_epoch: Callable[[int], Any] | None = set_epoch if _takes_one(set_epoch) else None
        self._last = _known.setdefault(id(dataset), _LastEpoch())
        self._seed = seed
        self._draws_nothing = self._gather is not None and type(dataset) in _WITHOUT_DRAWS

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset declares no __len__

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if len(micro_batch.indices) == 0:
            return micro_batch, None
        self._begin_epoch(micro_batch.epoch)
        return micro_batch, self.read(micro_batch.indices, micro_batch.epoch)

    def _begin_epoch(self, epoch: int) -> None:
        if self._set_epoch is not None and epoch != self._last.epoch:
            SeededItems(self._seed).read(self._set_epoch, np.array([epoch]), epoch)
            self._last.epoch = epoch

    def read(self, indices: npt.NDArray[np.int64], epoch: int = 0) -> Any:
        """Return the batch of at least one sample. Outside of training it is of the last epoch given to `set_epoch`."""
        if self._last.epoch is None:
            self._begin_epoch(epoch)
        if self._gather is None:
            return self._items.read(self.dataset.__getitem__, indices, epoch, self._collate)
        gather = self._gather

        def whole(_first: Any = None) -> Any:
            return gather(torch.from_numpy(indices.copy()), epoch)  # torch.tensor() takes ten times as long

        return whole() if self._draws_nothing else self._items.read(int, indices[:1], epoch, whole)

    def _select(self, indices: Tensor, _epoch: int) -> list[Tensor]:
        """Return what default_collate would make of a TensorDataset's items."""
        assert isinstance(self.dataset, TensorDataset)
        return [tensor.index_select(0, indices.to(tensor.device)) for tensor in self.dataset.tensors]


def length_of(dataset: Dataset[Any]) -> int:
    """Return the number of samples of a map-style data set. Raises: UsageError: it is of another kind."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a DataLoader was given: give its data set (loader.dataset); the batch size is --global-batch-size, and "
            "--num-workers its processes"
        )
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no index to share out by; give a "
            "map-style data set with __len__ and __getitem__"
        )
    if isinstance(dataset, Tensor):
        raise UsageError("a tensor was given in place of a data set: give TensorDataset(tensor)")
    if dataset is None:
        raise UsageError("None was given in place of a data set (is a return missing?)")
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} has no length, and its samples no index to share out by; give a map-style data "
            "set with __len__ and __getitem__"
        )
    return len(dataset)


def as_fetched(fetched: T) -> T:
    """Return a fetched batch as it is: the `collate_fn` for a DataLoader over `EpochDataset`."""
    return fetched


def _takes_one(method: Any) -> bool:
    """Return whether `method` accepts one argument; True if its signature is unknown."""
    if not callable(method):
        return False
    try:
        signature(method).bind(0)
    except TypeError:
        return False
    except ValueError:  # a function in C has no signature
        return True
    return True
