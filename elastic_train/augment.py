"""Randomness for data, as a pure function of (seed, epoch, sample index).

Nothing here reads or advances a generator that outlives the call. A sample therefore looks the same whichever
process loads it, in whatever batch, before and after a change of the World. Data held in memory takes its random
numbers from a counter-based hash, for a whole batch at once. Data loaded item by item gets the global generators
seeded around each item (`seeded_items`), so that any transform works unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# One number per purpose, so that two draws for the same sample are unrelated.
_STREAM_SHIFT_Y, _STREAM_SHIFT_X, _STREAM_FLIP, _STREAM_ITEM = 1, 2, 3, 4


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image held in memory."""

    shift: int = 0
    """Moved by up to this many pixels along each axis; black comes in at the edge."""

    flip: bool = False
    """Mirrored left to right, half of the time."""


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: 64 bits in, 64 well-mixed bits out, one to one. Arrays wrap around silently."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_scalar(value: int) -> int:
    return int(_mix(np.array([value & _MASK], dtype=np.uint64))[0])


def random_bits(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], stream: int, num_draws: int = 1
) -> npt.NDArray[np.uint64]:
    """`num_draws` times 64 random bits for each sample: (sample, draw). `stream` says what they are for."""
    key = 0
    for word in (seed, epoch, stream):
        key = _mix_scalar((key ^ (word & _MASK)) + _GOLDEN)
    per_sample = _mix(_mix(indices.astype(np.uint64) + np.uint64(_GOLDEN)) ^ np.uint64(key))
    counters = np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mix(per_sample[:, None] + counters)


def random_integers(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], stream: int, below: int
) -> npt.NDArray[np.int64]:
    """One integer in [0, below) for each sample: (sample,). The bias is under `below` / 2**32."""
    bits = random_bits(seed, epoch, indices, stream)[:, 0]
    return ((bits >> np.uint64(32)) % np.uint64(below)).astype(np.int64)


def random_shifts(seed: int, epoch: int, indices: npt.NDArray[np.int64], limit: int) -> Tensor:
    """Pixels to move each sample by, each in [-limit, limit]: (sample, axis), axis 0 down and axis 1 right."""
    draws = [
        random_integers(seed, epoch, indices, stream, 2 * limit + 1) - limit
        for stream in (_STREAM_SHIFT_Y, _STREAM_SHIFT_X)
    ]
    return torch.from_numpy(np.stack(draws, axis=1))


def random_flips(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Tensor:
    """Whether to mirror each sample: bool, (sample,)."""
    return torch.from_numpy(random_integers(seed, epoch, indices, _STREAM_FLIP, 2) == 1)


def random_crop_shift(images: Tensor, shifts: Tensor, limit: int) -> Tensor:
    """Each image moved by its own shift, zeros coming in at the edge; one gather for the whole batch.

    `images` is (sample, channel, height, width), `shifts` is (sample, 2) with entries in [-limit, limit].
    """
    num_samples, num_channels, height, width = images.shape
    padded = F.pad(images, (limit, limit, limit, limit))
    rows = torch.arange(limit, limit + height) - shifts[:, :1]
    columns = torch.arange(limit, limit + width) - shifts[:, 1:]
    pixels = rows[:, :, None] * (width + 2 * limit) + columns[:, None, :]
    pixels = pixels.reshape(num_samples, 1, height * width).expand(-1, num_channels, -1)
    return padded.flatten(2).gather(2, pixels).reshape(images.shape)


def horizontal_flip(images: Tensor, flips: Tensor) -> Tensor:
    """The images for which `flips` (sample,) is true, mirrored left to right; the others as they are."""
    return torch.where(flips[:, None, None, None], images.flip(3), images)


def augment(
    images: Tensor, augmentation: Augmentation, seed: int, epoch: int, indices: npt.NDArray[np.int64]
) -> Tensor:
    """`images` (sample, channel, height, width), sample k being `indices[k]`, as `epoch` shows them."""
    if augmentation.shift:
        shifts = random_shifts(seed, epoch, indices, augmentation.shift)
        images = random_crop_shift(images, shifts, augmentation.shift)
    if augmentation.flip:
        images = horizontal_flip(images, random_flips(seed, epoch, indices))
    return images


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the global CPU generators (torch, random, numpy) back on the way out.

    With `num_workers` 0 items are loaded in the training process; dropout must not notice.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seeded_items(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Iterator[int]:
    """The indices one by one; whenever one is given, the global CPU generators (torch, random, numpy) are seeded for
    loading that item. Use in `generators_kept`."""
    all_bits = random_bits(seed, epoch, indices, _STREAM_ITEM)[
        :, 0
    ].tolist()  # at once: one by one costs ten times that
    for index, bits in zip(indices.tolist(), all_bits, strict=True):
        _seed(bits)
        yield index


def _seed(bits: int) -> None:
    # Not torch.manual_seed: it seeds the accelerators as well, from which dropout draws.
    torch.default_generator.manual_seed(bits >> 1)
    random.seed(bits)
    np.random.seed(bits >> 32)
