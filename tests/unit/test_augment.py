"""Augmentation depends on seed, epoch and sample index, and on nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from elastic_train.errors import kind_and_line
from elastic_train.training.augment import (
    Augmentation,
    SeededItems,
    augment,
    horizontal_flip,
    random_bits,
    random_crop_shift,
    random_flips,
    random_integers,
    random_shifts,
)

IMAGES = torch.arange(40 * 3 * 6 * 5, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(40, 3, 6, 5)
BOTH = Augmentation(shift=2, flip=True)


def test_a_sample_looks_the_same_in_every_batch() -> None:
    indices = np.arange(40)
    whole = augment(IMAGES, BOTH, 7, 3, indices)
    for chosen in (np.array([5]), np.array([39, 0, 17]), np.arange(39, -1, -1)):
        part = augment(IMAGES[chosen], BOTH, 7, 3, indices[chosen])
        assert torch.equal(part, whole[chosen])


def test_seed_epoch_and_index_each_change_it() -> None:
    indices = np.arange(40)
    whole = augment(IMAGES, BOTH, 7, 3, indices)
    assert not torch.equal(whole, augment(IMAGES, BOTH, 8, 3, indices))
    assert not torch.equal(whole, augment(IMAGES, BOTH, 7, 4, indices))
    assert not torch.equal(whole, augment(IMAGES, BOTH, 7, 3, indices + 40))


def test_the_same_numbers_in_another_process_and_in_another_release() -> None:
    program = (
        "import numpy as np; from elastic_train.training.augment import random_bits; "
        "print([hex(b) for b in random_bits(5, 2, np.array([0, 1, 10**12]), 1)[:, 0].tolist()])"
    )
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    here = [hex(bits) for bits in random_bits(5, 2, np.array([0, 1, 10**12]), 1)[:, 0].tolist()]
    assert elsewhere.stdout.strip() == str(here)
    # A continued run may be an older one: these must never change.
    assert here == ["0x56e11c45df5940b3", "0xfa4abf6147b2deee", "0x33dcdffb55ae43d2"]


def test_the_numbers_are_spread_evenly_and_are_unrelated() -> None:
    indices = np.arange(30_000)
    shifts = random_shifts(0, 0, indices, 4)
    assert shifts.min() == -4
    assert shifts.max() == 4
    for axis in (0, 1):
        counts = torch.bincount(shifts[:, axis] + 4, minlength=9)
        assert (counts - 30_000 / 9).abs().max() < 5 * (30_000 / 9) ** 0.5
    flips = random_flips(0, 0, indices).double()
    assert abs(flips.mean().item() - 0.5) < 0.015
    next_flips = random_flips(0, 1, indices).double()
    correlations = torch.corrcoef(torch.stack([*shifts.double().T, flips, next_flips]))
    assert (correlations - torch.eye(4, dtype=torch.float64)).abs().max() < 0.03


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert random_integers(seed, 0, np.array([3]), 1, 10).shape == (1,)


def test_shift_moves_the_image_and_lets_black_in() -> None:
    shifts = torch.tensor([[0, 0], [1, 0], [0, -2], [-2, 1]])
    images = IMAGES[:4] + 1
    moved = random_crop_shift(images, shifts, 2)
    for k, (down, right) in enumerate(shifts.tolist()):
        expected = torch.zeros_like(images[k])
        for y in range(6):
            for x in range(5):
                if 0 <= y - down < 6 and 0 <= x - right < 5:
                    expected[:, y, x] = images[k, :, y - down, x - right]
        assert torch.equal(moved[k], expected)


def test_flip_mirrors_the_chosen_only() -> None:
    flipped = horizontal_flip(IMAGES[:2], torch.tensor([True, False]))
    assert torch.equal(flipped[0], IMAGES[0].flip(-1))
    assert torch.equal(flipped[1], IMAGES[1])


def test_an_empty_batch_stays_empty() -> None:
    assert augment(IMAGES[:0], BOTH, 0, 0, np.arange(0)).shape == (0, 3, 6, 5)


def draw_from_all() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.normal())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def read(items: SeededItems, get: Callable[[int], Any], *indices: int, epoch: int = 0) -> list[Any]:
    return items.read(get, np.array(indices), epoch)


def test_item_seeding_rules_all_three_generators_and_leaves_no_trace() -> None:
    seed_all(1)
    undisturbed = [draw_from_all() for _ in range(2)]
    seed_all(1)
    drawn = []
    for seed, epoch, index in [(0, 0, 5), (0, 0, 6), (0, 1, 5), (1, 0, 5), (0, 0, 5)]:
        drawn += read(SeededItems(seed), lambda _: draw_from_all(), index, epoch=epoch)
    assert [draw_from_all() for _ in range(2)] == undisturbed
    assert drawn[0] == drawn[-1]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [4, 4, 4]


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random(), lambda _: float(np.random.normal())])
def test_an_item_looks_the_same_whoever_has_drawn_before(draw: Callable[[int], Any]) -> None:
    """Among others that do not draw, in a first batch or a later one, each read once where the first batch draws."""
    got: list[int] = []

    def get(index: int) -> Any:
        got.append(index)
        return draw(1) if index % 10 == 3 else index

    alone = {index: read(SeededItems(7), get, index)[0] for index in (3, 13, 23)}
    assert len(set(map(str, alone.values()))) == 3
    items = SeededItems(7)
    seed_all(1)
    np.random.normal()  # so that numpy has a second number ready, which changes nothing but that when it is drawn
    undisturbed = draw_from_all()
    seed_all(1)
    np.random.normal()
    for batch in [(0, 1), (2, 3), (4, 13, 5), (6, 7), (23,)]:
        assert read(items, get, *batch) == [alone.get(index, index) for index in batch]
    assert draw_from_all() == undisturbed
    got.clear()
    read(SeededItems(7), get, 3, 4)
    assert got == [3, 4]


def test_a_generator_that_no_item_draws_from_is_not_seeded() -> None:
    items, states = SeededItems(0), []

    def get(index: int) -> float:
        states.append((random.getstate(), np.random.get_state()[1].tobytes()))
        return torch.rand(1).item()

    read(items, get, 1, 2)
    assert len(set(states)) == 2
    states.clear()
    seeds = read(items, lambda _index: torch.initial_seed(), 1, 2)
    assert len(set(seeds)) == 2, "torch's is, for who asks for its seed"
    read(items, get, 1, 2)
    assert len(set(states)) == 1


def test_an_item_that_fails_leaves_no_trace() -> None:
    def fail(_index: int) -> None:
        draw_from_all()
        raise KeyError

    seed_all(1)
    undisturbed = draw_from_all()
    for num_batches in (0, 1):
        items = SeededItems(0)
        for _ in range(num_batches):
            read(items, lambda index: index, 1)
        seed_all(1)
        with pytest.raises(KeyError):
            read(items, fail, 1)
        assert draw_from_all() == undisturbed


def test_an_error_says_of_which_item_it_is() -> None:
    def get(index: int) -> int:
        if index == 7:
            raise ValueError("corrupt JPEG")
        return index

    items = SeededItems(0)
    for first in (6, 0):  # in the first batch, and in a later one
        with pytest.raises(ValueError, match=r"^corrupt JPEG") as raised:
            read(items, get, first, 7)
        assert raised.value.__notes__ == ["elastic_train: item 7 of the data set could not be read"]
        line = "ValueError: corrupt JPEG (item 7 of the data set could not be read)"
        assert kind_and_line(raised.value) == line
        with pytest.raises(ValueError, match="Caught ValueError in a loader process") as of_loader:
            ExceptionWrapper((ValueError, raised.value, raised.value.__traceback__), "in a loader process").reraise()
        assert kind_and_line(of_loader.value) == line
        read(items, get, 1)


def test_an_item_that_fails_over_unseeded_numbers_is_read_again() -> None:
    def get(index: int) -> float:
        if index < 3:
            return 0.0
        drawn = random.random()
        assert drawn in seeded, "a number that no seed explains"
        return drawn

    seeded: set[float] = set()
    read(SeededItems(5), lambda _: seeded.add(random.random()), 3)
    items = SeededItems(5)
    read(items, get, 1, 2)
    assert read(items, get, 2, 3) == [0.0, *seeded]


def test_stop_iteration_is_an_error_that_says_where_it_came_from() -> None:
    """It would end the loop over the batches, and nobody would see."""

    def get(index: int) -> int:
        return next(iter(range(index, 7)))

    items = SeededItems(5)
    for first in (6, 0):  # in the first batch, and in a later one
        with pytest.raises(RuntimeError, match=r"item 7 of the data set could not be read$") as raised:
            read(items, get, first, 7)
        assert isinstance(raised.value.__cause__, StopIteration)
        read(items, get, 1)
    with pytest.raises(RuntimeError, match=r"the batch that begins with item 3 of the data set could not be made$"):
        items.read(get, np.array([3, 4]), 0, lambda found: next(one for one in found if one > 9))
