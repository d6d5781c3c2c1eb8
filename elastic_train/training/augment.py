"""Randomness for data, as a pure function of (seed, epoch, sample index).

Nothing here reads or advances a generator that outlives the call. So a sample is the same in every process and every
batch, before and after a change of the world. Data held in memory takes its random
numbers from a counter-based hash, for a whole batch at once. For data that is loaded item by item, `SeededItems` seeds
the global generators before each item and before the batch is made of them, so any transform works unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.errors import add_own_note
from elastic_train.training.sampler import mix

S = TypeVar("S")
T = TypeVar("T")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# One number per purpose, so that two draws for the same sample are unrelated.
_STREAM_SHIFT_Y, _STREAM_SHIFT_X, _STREAM_FLIP, _STREAM_ITEM = 1, 2, 3, 4


@dataclass(frozen=True)
class Augmentation:
    """The random changes of a training image held in memory."""

    shift: int = 0
    """most pixels of a shift along each axis; the free edge is black"""

    flip: bool = False
    """whether to mirror left to right, half of the time"""


@lru_cache(maxsize=16)  # one number takes numpy longer than those of a batch
def _key(seed: int, epoch: int, stream: int) -> np.uint64:
    key = 0
    for word in (seed, epoch, stream):
        key = int(mix(np.array([((key ^ (word & _MASK)) + _GOLDEN) & _MASK], dtype=np.uint64))[0])
    return np.uint64(key)


def random_bits(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], stream: int, num_draws: int = 1
) -> npt.NDArray[np.uint64]:
    """Return `num_draws` times 64 random bits for each sample: (sample, draw). Each purpose has its own `stream`."""
    per_sample = mix(mix(indices.astype(np.uint64) + np.uint64(_GOLDEN)) ^ _key(seed, epoch, stream))
    counters = np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(per_sample[:, None] + counters)


def random_integers(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], stream: int, below: int
) -> npt.NDArray[np.int64]:
    """Return one integer in [0, below) for each sample: (sample,). The bias is under `below` / 2**32."""
    bits = random_bits(seed, epoch, indices, stream)[:, 0]
    return ((bits >> np.uint64(32)) % np.uint64(below)).astype(np.int64)


def random_shifts(seed: int, epoch: int, indices: npt.NDArray[np.int64], limit: int) -> Tensor:
    """Return by how many pixels to move each sample, in [-limit, limit]: (sample, axis); axis 0 is down, 1 right."""
    draws = [
        random_integers(seed, epoch, indices, stream, 2 * limit + 1) - limit
        for stream in (_STREAM_SHIFT_Y, _STREAM_SHIFT_X)
    ]
    return torch.from_numpy(np.stack(draws, axis=1))


def random_flips(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Tensor:
    """Return whether to mirror each sample: bool, (sample,)."""
    return torch.from_numpy(random_integers(seed, epoch, indices, _STREAM_FLIP, 2) == 1)


def random_crop_shift(images: Tensor, shifts: Tensor, limit: int) -> Tensor:
    """Return each image moved by its own shift, with zeros at the free edge; one gather for the whole batch.

    `images` is (sample, channel, height, width), `shifts` is (sample, 2) with entries in [-limit, limit].
    """
    num_samples, num_channels, height, width = images.shape
    padded = F.pad(images, (limit, limit, limit, limit))
    rows = torch.arange(limit, limit + height, device=shifts.device) - shifts[:, :1]
    columns = torch.arange(limit, limit + width, device=shifts.device) - shifts[:, 1:]
    pixels = rows[:, :, None] * (width + 2 * limit) + columns[:, None, :]
    pixels = pixels.reshape(num_samples, 1, height * width).expand(-1, num_channels, -1)
    return padded.flatten(2).gather(2, pixels).reshape(images.shape)


def horizontal_flip(images: Tensor, flips: Tensor) -> Tensor:
    """Return the images, mirrored left to right where `flips` (sample,) is true."""
    return torch.where(flips[:, None, None, None], images.flip(3), images)


def augment(
    images: Tensor, augmentation: Augmentation, seed: int, epoch: int, indices: npt.NDArray[np.int64]
) -> Tensor:
    """Return `images` (sample, channel, height, width) with the random changes of `epoch`; sample k is `indices[k]`."""
    if augmentation.shift:
        shifts = random_shifts(seed, epoch, indices, augmentation.shift)
        images = random_crop_shift(images, shifts, augmentation.shift)
    if augmentation.flip:
        images = horizontal_flip(images, random_flips(seed, epoch, indices))
    return images


class SeededItems:
    """A reader of items that seeds the global CPU generators of torch, random and numpy for each, by (seed, epoch,
    index), and once more for making the batch, by its first item. It restores the generators afterwards.

    torch's generator is seeded for every item, because an item may call `initial_seed()`. Seeding Python's and numpy's
    can take longer than reading an item. So they are seeded only once a draw from them is known: from the first batch,
    which is watched, or from a later one, by their states; that batch is then read again. A draw that restores the
    generator's state is not seen.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: frozenset[str] | None = None
        """generators of `_COSTLY` with known draws; None before the first batch"""

    def read(
        self,
        get: Callable[[int], T],
        indices: npt.NDArray[np.int64],
        epoch: int,
        make: Callable[[list[T]], Any] = list,
    ) -> Any:
        """Return `make` of the list of `get(index)`, for at least one index.

        Raises: what `get` and `make` raise; a RuntimeError instead of StopIteration.
        """
        # All seeds at once: one by one costs ten times as much.
        all_bits = random_bits(self._seed, epoch, indices, _STREAM_ITEM)[:, 0].tolist()
        seeds = list(zip(indices.tolist(), all_bits, strict=True))
        torch_state, states = torch.get_rng_state(), _states()
        is_as_before = False
        try:
            if self._drawn is None:
                batch, self._drawn = _read_and_watch(get, make, seeds)
                return batch
            try:
                batch = _read(get, make, seeds, self._drawn)
            except Exception:  # perhaps because of unseeded draws
                if not self._note_drawn(states):
                    raise
            else:
                if not self._note_drawn(states):
                    is_as_before = not self._drawn
                    return batch
            return _read(get, make, seeds, self._drawn)
        finally:
            torch.set_rng_state(torch_state)
            if not is_as_before:
                for name, state in states.items():
                    _COSTLY[name].put_back(state)

    def _note_drawn(self, before: dict[str, Any]) -> bool:
        """Return whether an unseeded generator was drawn from; from now on it is seeded."""
        assert self._drawn is not None, "the first batch was read"
        unseeded = before.keys() - self._drawn
        drawn = {name for name in unseeded if _COSTLY[name].state() != before[name]}
        self._drawn |= drawn
        return bool(drawn)


@dataclass(frozen=True)
class _Generator:
    """A global generator that takes long to seed."""

    seed: Callable[[int], None]
    """by 64 bits"""
    state: Callable[[], Any]
    put_back: Callable[[Any], None]


def _numpy_state() -> tuple[Any, ...]:
    name, key, *rest = np.random.get_state(legacy=True)
    return name, np.asarray(key).tobytes(), *rest


def _put_back_numpy(state: tuple[Any, ...]) -> None:
    name, key, *rest = state
    np.random.set_state((name, np.frombuffer(key, dtype=np.uint32), *rest))


_COSTLY = {
    "random": _Generator(random.seed, random.getstate, random.setstate),
    "numpy": _Generator(lambda bits: np.random.seed(bits >> 32), _numpy_state, _put_back_numpy),
}


def _states() -> dict[str, Any]:
    return {name: generator.state() for name, generator in _COSTLY.items()}


def _seed(bits: int, costly: Iterable[str]) -> None:
    # Not torch.manual_seed: it seeds the accelerators as well, from which dropout draws.
    torch.default_generator.manual_seed(bits >> 1)
    for name in costly:
        _COSTLY[name].seed(bits)


def _read(
    get: Callable[[int], T], make: Callable[[list[T]], Any], seeds: Sequence[tuple[int, int]], costly: Iterable[str]
) -> Any:
    items = []
    for index, bits in seeds:
        _seed(bits, costly)
        items.append(_named(get, index, "item {} of the data set could not be read", index))
    first, bits = seeds[0]
    _seed(bits ^ _GOLDEN, costly)  # otherwise the batch would draw the numbers of its first item
    return _named(make, items, "the batch that begins with item {} of the data set could not be made", first)


def _named(call: Callable[[S], T], argument: S, words: str, index: int) -> T:
    """Return `call(argument)`, and add a note to its error."""
    try:
        return call(argument)
    except StopIteration as error:  # a loop over batches would end at it
        raise RuntimeError(f"StopIteration was raised: {words.format(index)}") from error
    except Exception as error:
        add_own_note(error, words.format(index))
        raise


def _read_and_watch(
    get: Callable[[int], T], make: Callable[[list[T]], Any], seeds: Sequence[tuple[int, int]]
) -> tuple[Any, frozenset[str]]:
    """Return the batch, and the generators from which making it or reading its items has drawn."""
    drawn: set[str] = set()

    def watched(call: Callable[[S], T]) -> Callable[[S], T]:
        def watch(argument: S) -> T:
            fresh = _states()
            result = call(argument)
            drawn.update(name for name, generator in _COSTLY.items() if generator.state() != fresh[name])
            return result

        return watch

    return _read(watched(get), watched(make), seeds, _COSTLY), frozenset(drawn)
