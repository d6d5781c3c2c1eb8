"""The hash of a state: what it must see, what it must not mind, and whose hash is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.rules import right_hashes
from elastic_train.state import TrainState
from elastic_train.state_hash import CHUNK_BYTES, hash_of, tensors_of

CHUNK = CHUNK_BYTES["cpu"] // 4
SIZES = (1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


def numbers(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bit", [0, 23, 31])
def test_no_flipped_bit_is_lost(size: int, bit: int) -> None:
    data = numbers(size)
    before = hash_of({"weight": data})
    words = data.view(torch.int32)
    for place in {0, size // 2, size - 1}:
        words[place] ^= 1 << bit if bit < 31 else -(2**31)
        assert hash_of({"weight": data}) != before
        words[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert hash_of({"weight": data}) == before


def test_two_signs_that_change_and_two_places_that_change() -> None:
    data = numbers(1000)
    before = hash_of({"weight": data})
    turned = data.clone()
    turned[[1, 3]] *= -1
    assert hash_of({"weight": turned}) != before
    swapped = data.clone()
    swapped[[1, 3]] = data[[3, 1]]
    assert hash_of({"weight": swapped}) != before
    assert hash_of({"a": data[:500], "b": data[500:]}) != hash_of({"a": data[500:], "b": data[:500]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_any_type_and_any_layout(dtype: torch.dtype) -> None:
    data = torch.arange(35).to(dtype).reshape(5, 7)
    assert hash_of({"a": data}) == hash_of({"a": data.t().contiguous().t()}), "bytes in the order of the elements"
    assert hash_of({"a": data}) != hash_of({"a": data.reshape(7, 5)})
    assert hash_of({"a": data[1:]}) == hash_of({"a": data[1:].clone()}), "wherever it lies in its storage"


def test_many_small_ones_fill_several_chunks() -> None:
    parts = {f"weight {place}": numbers(CHUNK // 3 + place) for place in range(9)}
    before = hash_of(parts)
    for name in parts:
        parts[name][-1] += 1.0
        assert hash_of(parts) != before
        parts[name][-1] -= 1.0


def test_plain_values_count_and_their_order_does_not() -> None:
    assert hash_of({"a": 1, "b": 2.0}) == hash_of({"b": 2.0, "a": 1})
    assert hash_of({"a": 1, "b": 2.0}) != hash_of({"a": 2, "b": 2.0})


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_and_optimizer_state_belong_to_it_and_statistics_do_not(make: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    state = TrainState(model, make(model.parameters(), lr=0.1, **options), length=8, global_batch_size=8, epochs=9)
    model(torch.randn(8, 3)).sum().backward()
    state.optimizer.step()
    before = hash_of(dict(tensors_of(state)))
    model(torch.randn(8, 3))  # moves the statistics
    assert hash_of(dict(tensors_of(state))) == before
    held = state.optimizer.state[model[0].weight]
    name = "momentum_buffer" if make is torch.optim.SGD else "exp_avg_sq"
    held[name][2, 1] += 1e-3
    assert hash_of(dict(tensors_of(state))) != before
    held[name][2, 1] -= 1e-3
    with torch.no_grad():
        model[1].bias[3] += 1.0
    assert hash_of(dict(tensors_of(state))) != before


@pytest.mark.parametrize(
    ("hashes", "right"),
    [
        ([1, 1], 1),
        ([1, 2], None),
        ([1, 1, 2], 1),
        ([1, 2, 2], 2),
        ([1, 2, 3], None),
        ([1, 1, 2, 2], None),
        ([1, 1, 1, 2, 2], 1),
        ([1], 1),
    ],
)
def test_a_strict_majority_is_right(hashes: list[int], right: int | None) -> None:
    assert right_hashes([(7, one) for one in hashes]) == (None if right is None else frozenset([right]))


def test_machines_of_several_kinds_may_round_differently() -> None:
    assert right_hashes([(7, 1), (7, 1), (8, 2)]) == {1, 2}
    assert right_hashes([(7, 1), (7, 3), (7, 1), (8, 2)]) == {1, 2}
    assert right_hashes([(7, 1), (7, 3), (8, 2)]) is None
