"""Which samples this rank reads: a pure function of seed, epoch, position and World.

The law: after every commit, in any sequence of Worlds, the samples done are a prefix of the epoch's permutation.

The order of an epoch depends on (seed, epoch, length) alone, and the position in it is one integer, the
samples committed in this epoch. Each step takes the next `global_batch_size` positions and splits them over
the ranks of the present World. So a change of the World in mid-epoch changes which rank reads a sample, never
whether it is read: every sample is read exactly once per epoch, apart from steps rolled back.

The caller passes the position, which counts committed samples. Iterating changes no state: the next sampler
yields again what a DataLoader has prefetched and no step has committed.

There is no permutation array. A format-preserving permutation gives the sample at a position in O(1) time and
memory: reading on at 90 % of 10^9 samples costs the same as at 0.

Sources:
    J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: the generalized Feistel
        network on a * b >= length with modular addition, and cycle walking for the values past the length.
        With a and b near the square root of the length, fewer than a values lie past the length, so that a walk
        is rare. With halves of whole bits, half of all values could.
    G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014: SplitMix64,
        with the constants of S. Vigna's `splitmix64.c` (D. Stafford's finalizer "Mix13"), as round function
        and key schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np
import numpy.typing as npt

_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]

# A snapshot's position refers to the order computed here. So a change of a constant, of the number of rounds
# or of the key schedule must raise the snapshot's format version.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Even. With 6, the distance of neighbours at length 257 is 20 sigma off in 5 million pairs; with 8, nothing.
_NUM_ROUNDS = 8
# Positions whose indices are computed in one call while iterating: 32 KiB, enough to hide numpy's overhead.
_BLOCK_SAMPLES = 4096
# Up to this length a table, no larger than a block, costs a fifth of the network: for a short epoch numpy's calls
# dominate. It also lacks the network's limit on tiny lengths: with two odd radices, as at length 9, the network reaches
# even permutations only.
_MAX_TABLE_LENGTH = _BLOCK_SAMPLES


def split(num_items: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the range [start, stop) of `part`. Parts are contiguous, and their sizes differ by at most 1.

    Ordered mode splits a step over virtual ranks, and these over ranks, in this way. With fewer items than parts
    some parts are empty; the last part is empty only without items.
    """
    return num_items * part // num_parts, num_items * (part + 1) // num_parts


def split_larger_first(num_items: int, part: int, num_parts: int) -> tuple[int, int]:
    """As `split`, but with the larger parts first. Fast mode splits a step over ranks, and a rank's share over its
    micro-batches, in this way. So rank 0, whose buffers are evaluated and saved, has samples in every micro-batch,
    and a micro-batch too large for the memory fails at once.
    """
    size, num_larger = divmod(num_items, num_parts)
    start = part * size + min(part, num_larger)
    return start, start + size + (part < num_larger)


@dataclass(frozen=True)
class EpochOrder:
    """The permutation of one epoch. `seed` and `epoch` count modulo 2**64.

    Raises:
        ValueError: `length` is not in [1, 2**63).
    """

    seed: int
    epoch: int
    length: int

    def __post_init__(self) -> None:
        if not 1 <= self.length < 2**63:
            raise ValueError(f"length must be in [1, 2**63), got {self.length}")

    def indices(self, positions: _Int64s) -> _Int64s:
        """Return the sample index at each position. Both have shape (positions,) and values in [0, length).

        Raises:
            ValueError: a position is outside [0, length).
        """
        if positions.size == 0:
            return np.empty(0, dtype=np.int64)
        for position in (int(positions.min()), int(positions.max())):
            if not 0 <= position < self.length:
                raise ValueError(f"position must be in [0, {self.length}), got {position}")
        if self.length <= _MAX_TABLE_LENGTH:
            return self._table[positions]
        values = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:  # ends: a cycle that started inside comes back inside
            walked = self._permute(values[outside])
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.length)]
        return values.view(np.int64)

    def _permute(self, values: _UInt64s) -> _UInt64s:
        """Pass values once through the network: a bijection on [0, a * b), where length <= a * b < length + a."""
        a = isqrt(self.length - 1) + 1
        b = -(-self.length // a)
        radix_low, radix_high = np.uint64(a), np.uint64(b)
        high = values // radix_low
        low = values - high * radix_low
        for key in range(0, _NUM_ROUNDS, 2):
            _add_round(low, high + self._round_keys[key], radix_low)
            _add_round(high, low + self._round_keys[key + 1], radix_high)
        high *= radix_low
        high += low
        return high

    @cached_property
    def _table(self) -> _Int64s:
        # Distinct keys: the mixer is a bijection. So the order does not depend on the sort algorithm.
        return np.argsort(self._stream(self.length)).astype(np.int64, copy=False)

    @cached_property
    def _round_keys(self) -> _UInt64s:
        return self._stream(_NUM_ROUNDS)

    def _stream(self, count: int) -> _UInt64s:
        """Return the first `count` outputs of SplitMix64, seeded with the hash of (seed, epoch, length)."""
        state = np.zeros(1, dtype=np.uint64)
        for value in (self.seed, self.epoch, self.length):
            state = mix(state + np.array([value % 2**64], dtype=np.uint64) + _GOLDEN)
        return mix(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def mix(values: _UInt64s) -> _UInt64s:
    """Apply SplitMix64's finalizer, a bijection on 64 bits, in place: the caller passes a temporary."""
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def _add_round(half: _UInt64s, keyed_half: _UInt64s, radix: np.uint64) -> None:
    """Compute half = (half + F(keyed_half)) mod radix in place, with F in [0, radix)."""
    hashed = mix(keyed_half)
    # Multiply and shift instead of a slow remainder: radix < 2**32, so that the product fits in 64 bits.
    hashed >>= np.uint64(32)
    hashed *= radix
    hashed >>= np.uint64(32)
    half += hashed
    # Below the radix the subtraction wraps to a huge number and the minimum keeps the sum.
    np.subtract(half, radix, out=hashed)
    np.minimum(half, hashed, out=half)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass on one rank. Compared by identity, as an array has no single truth value."""

    epoch: int
    step: int
    """Number of this step, from 1: the committed steps once this one is committed."""
    shard: int
    """Ordered: the virtual rank. Fast: the first sample's offset in the step. In either mode unique among the
    non-empty micro-batches of a step over all ranks, and ascending with the positions."""
    indices: _Int64s
    """Sample indices, shape (samples,); empty where the step has no sample for this rank or virtual rank."""
    step_samples: int
    """Samples of the whole step over all ranks: the global batch, or less in the last step of an epoch."""
    is_last: bool
    """Whether it is this rank's last micro-batch of the step."""


def _cut_step(
    step_samples: int, rank: int, world_size: int, virtual_ranks: int | None, micro_batch_size: int | None
) -> list[tuple[int, int, int]]:
    """Return a rank's micro-batches in a step, contiguous and at least one: (shard, start, stop), offsets in it."""
    if virtual_ranks is not None:
        return [
            (virtual_rank, *split(step_samples, virtual_rank, virtual_ranks))
            for virtual_rank in range(*split(virtual_ranks, rank, world_size))
        ]
    start, stop = split_larger_first(step_samples, rank, world_size)
    # By the largest share: a SyncBatchNorm needs the same number of collectives on every rank.
    largest = -(-step_samples // world_size)
    num_cuts = 1 if micro_batch_size is None else -(-largest // micro_batch_size)
    cuts = (split_larger_first(stop - start, cut, num_cuts) for cut in range(num_cuts))
    return [(start + first, start + first, start + end) for first, end in cuts]


@dataclass(frozen=True, kw_only=True)
class StepSampler:
    """The micro-batches of one rank from `samples_done` to the end of the epoch, in order.

    A DataLoader takes it as `batch_sampler`; the dataset's `__getitems__` receives the whole `MicroBatch`.
    Every `__iter__` starts again at `samples_done`. Every rank yields every step, even without samples in it.

    Fast (`virtual_ranks` is None): a step is split over the ranks. Each share is cut into consecutive micro-batches
    of at most `micro_batch_size`, the same number on every rank; so ranks other than 0 may yield empty ones.

    Ordered: virtual rank v of V has the offsets [n*v//V, n*(v+1)//V) of a step of n samples, as one micro-batch,
    perhaps empty. The virtual ranks are split over the ranks. So the micro-batches of a step over all ranks are the
    same in every World.

    Raises:
        ValueError: a value out of range, or fewer virtual ranks than ranks.
    """

    length: int
    seed: int
    epoch: int
    samples_done: int
    """The position: samples committed in this epoch, in [0, length]."""
    steps_done: int
    """Steps committed before the first one yielded; used only to number steps."""
    global_batch_size: int
    """Samples of a step over all ranks."""
    rank: int
    world_size: int
    virtual_ranks: int | None
    """Ordered mode with that many virtual ranks, or None for fast mode."""
    micro_batch_size: int | None
    """Most samples in a micro-batch, None for the rank's whole share; fast mode only."""
    max_steps: int | None
    """The highest number of a step: iteration ends after it, or with the epoch. None for no limit."""

    def __post_init__(self) -> None:
        EpochOrder(self.seed, self.epoch, self.length)  # checks the length
        for name in ("global_batch_size", "world_size", "virtual_ranks", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("steps_done", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not 0 <= self.samples_done <= self.length:
            raise ValueError(f"samples_done must be in [0, {self.length}], got {self.samples_done}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}")
        if self.virtual_ranks is not None and self.world_size > self.virtual_ranks:
            raise ValueError(f"world_size {self.world_size} exceeds virtual_ranks {self.virtual_ranks}")

    def __len__(self) -> int:
        """Micro-batches that one iteration yields on this rank."""
        return sum(num_steps * len(self._cut(step_samples)) for num_steps, step_samples in self._runs())

    def __iter__(self) -> Iterator[MicroBatch]:
        order = EpochOrder(self.seed, self.epoch, self.length)
        position, step = self.samples_done, self.steps_done
        for num_steps, step_samples in self._runs():
            cuts = self._cut(step_samples)
            start, stop, last_shard = cuts[0][1], cuts[-1][2], cuts[-1][0]
            own_offsets = np.arange(start, stop, dtype=np.int64)
            block_steps = max(1, _BLOCK_SAMPLES // max(1, stop - start))
            for first in range(0, num_steps, block_steps):
                steps = np.arange(first, min(first + block_steps, num_steps), dtype=np.int64)
                positions = position + steps[:, None] * step_samples + own_offsets  # (step, sample)
                for indices in order.indices(positions.reshape(-1)).reshape(positions.shape):
                    step += 1
                    for shard, cut_start, cut_stop in cuts:
                        yield MicroBatch(
                            epoch=self.epoch,
                            step=step,
                            shard=shard,
                            indices=indices[cut_start - start : cut_stop - start],
                            step_samples=step_samples,
                            is_last=shard == last_shard,
                        )
            position += num_steps * step_samples

    def _runs(self) -> list[tuple[int, int]]:
        """Return (number of steps, samples of each): the full steps left, then the smaller last one if any."""
        num_full, tail_samples = divmod(self.length - self.samples_done, self.global_batch_size)
        num_left = num_full + 1 if self.max_steps is None else max(0, self.max_steps - self.steps_done)
        runs = [(min(num_full, num_left), self.global_batch_size)]
        if tail_samples and num_left > num_full:
            runs.append((1, tail_samples))
        return runs

    def _cut(self, step_samples: int) -> list[tuple[int, int, int]]:
        return _cut_step(step_samples, self.rank, self.world_size, self.virtual_ranks, self.micro_batch_size)
