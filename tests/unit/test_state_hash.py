"""The hash of a state: which differences it shows, which it ignores, and which rank's hash is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.elastic.loading import load
from elastic_train.errors import StatesDiffer
from elastic_train.rules import apart, right_hashes
from elastic_train.storage.state_bytes import deserialize_state, serialize_state
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import (
    CHANGED,
    CHUNK_BYTES,
    NO_HASH,
    StateComparison,
    hash_of,
    hash_of_plain,
    plain_hashes,
    tensors_of,
)
from tests.processes import refuse_threads

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


@pytest.mark.parametrize("value", [np.mean([1.0, 2.0]), np.float32(0.1), np.int64(3), np.bool_(True), np.longdouble(1)])
def test_who_was_given_a_scalar_of_numpy_has_the_same_hash(value: Any) -> None:
    assert hash_of_plain({"best": value}) == hash_of_plain({"best": value.item()})


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


def test_what_a_scheduler_has_changed_is_seen_apart_from_the_weights() -> None:
    model, critic = nn.Linear(3, 4), nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(critic.parameters(), lr=torch.tensor(0.1))
    scheduler, mover = (torch.optim.lr_scheduler.StepLR(one, 1) for one in (optimizer, second))
    extras: dict[str, Any] = {"critic": critic, "second": second, "scheduler": scheduler}
    state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, extras=extras)
    before = plain_hashes(state)
    assert before.keys() == {"optimizer settings", "critic", "second", "scheduler"}
    critic(torch.randn(8, 3))  # each rank has its own statistics
    for group in optimizer.param_groups:
        group["fused"] = False  # a kernel
    assert plain_hashes(state) == before
    optimizer.step()
    scheduler.step()
    after = plain_hashes(state)
    assert {name for name in before if before[name] != after[name]} == {"optimizer settings", "scheduler"}
    second.step()
    mover.step()
    assert {name for name in after if plain_hashes(state)[name] != after[name]} == {"second"}


@pytest.mark.parametrize("step", [0, 9])
def test_rates_that_a_schedule_has_brought_to_0_are_others(step: int) -> None:
    found = set()
    for lr in (0.1, 0.2):
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, schedule="cosine")
        for _ in range(step):
            state.commit(0.0)
        found.add(plain_hashes(state)["optimizer settings"])
    assert len(found) == 2


@pytest.mark.parametrize(
    ("steps", "hashes", "found"),
    [
        ([24, 24], [{"a": 1}, {"a": 1}], {}),
        ([24, 24], [{"a": 1, "b": 2}, {"a": 2, "b": 2}], {1: ["a"]}),
        ([23, 24, 24], [{"a": 1}, {"a": 2}, {"a": 3}], {2: ["a"]}),  # rank 0 is behind anyway
        ([-1, 24], [{}, {"a": 2}], {}),
        ([0, 0, 0], [{"a": 1}, {"a": 2}, {"b": 1}], {1: ["a"], 2: ["a", "b"]}),
    ],
)
def test_who_has_other_extras_than_the_one_whose_state_counts(
    steps: list[int], hashes: list[dict[str, int]], found: dict[int, list[str]]
) -> None:
    assert apart(steps, hashes) == found


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
    assert right_hashes([(7, 1), (7, 1), (8, 2), (8, 1)]) == {1}, "a newcomer of kind 8 had got the state of kind 7"
    assert right_hashes([]) == frozenset()


def make_state(optimizer: Any = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(5)
    model = nn.Linear(3, 2)
    state = TrainState(model, optimizer(model.parameters()), length=8, global_batch_size=8, epochs=9)
    model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()
    return state


def compare(
    monkeypatch: pytest.MonkeyPatch, others: list[Any], voters: list[int], state: TrainState | None = None
) -> StateComparison:
    """This rank is 0; the `others` say what it says (None), or another hash, perhaps with another kind of machine."""
    comparison = StateComparison(state or make_state(), torch.device("cpu"), voters, with_buffers=False, is_able=True)
    comparison.begin()
    comparison.finish_hash(lambda: None)

    def all_gather(mine: torch.Tensor) -> list[list[int]]:
        kind, value = mine.tolist()
        told = [other if isinstance(other, tuple) else (kind, other) for other in others]
        return [[kind, value], *([its_kind, value if other is None else other] for its_kind, other in told)]

    monkeypatch.setattr("elastic_train.training.state_hash.all_gather", all_gather)
    comparison.compare()
    return comparison


def test_without_a_thread_the_hash_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes, which may be reached for a while."""

    state = make_state()
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        comparison = compare(patched, [None], [0, 1], state)
    assert comparison.why_not is None
    assert comparison._hash == hash_of(dict(tensors_of(state))) != NO_HASH


def test_equal_states_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compare(monkeypatch, [None, None], [0, 1, 2]).is_lost_in_loading
    assert not compare(monkeypatch, [NO_HASH, None], [0, 1, 2]).is_lost_in_loading


@pytest.mark.parametrize(
    ("others", "voters", "wrong", "has_majority"),
    [
        ([None, 7], [0, 1, 2], (2,), True),
        ([7, 7], [0, 1, 2], (0,), True),
        ([7, 7, None], [0, 1, 2], (0, 3), True),  # the last one has got what rank 0 has
        ([None, 7], [0, 1], (2,), True),  # who has just got it has not what it was given
        ([7], [0], (1,), True),
        ([7], [0, 1], (0, 1), False),
        ([7, 8, NO_HASH], [0, 1, 2, 3], (0, 1, 2, 3), False),
    ],
)
def test_who_differs_from_the_majority(
    monkeypatch: pytest.MonkeyPatch, others: list[int | None], voters: list[int], wrong: Any, has_majority: bool
) -> None:
    with pytest.raises(StatesDiffer) as raised:
        compare(monkeypatch, others, voters)
    assert (raised.value.wrong, raised.value.has_majority) == (wrong, has_majority)


def test_nobody_is_judged_where_an_optimizer_has_not_kept_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some round their state when they load it: from then on weights differ, by rounding, with every step."""
    assert compare(monkeypatch, [None, CHANGED], [0, 1]).is_lost_in_loading
    assert compare(monkeypatch, [7, CHANGED], [0, 1]).is_lost_in_loading
    assert not compare(monkeypatch, [NO_HASH], [1]).is_lost_in_loading


def test_who_has_got_the_state_from_a_machine_of_another_kind_may_round_its_steps_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for others, voters in ([[(8, 7)], [0]], [[(8, 3), (8, 7)], [0, 1]], [[None, (8, 7)], [0, 1]]):
        assert not compare(monkeypatch, others, voters).is_lost_in_loading


class Rounds(torch.optim.SGD):
    """Its moments, when it takes them over."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for one in self.state.values():
            one["momentum_buffer"] = one["momentum_buffer"].bfloat16().float()


@pytest.mark.parametrize(("optimizer", "is_as_sent"), [(torch.optim.SGD, True), (Rounds, False)])
@pytest.mark.parametrize("is_extra", [False, True])
def test_what_an_optimizer_makes_of_what_it_is_given_is_seen_when_it_takes_it(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any, is_as_sent: bool, is_extra: bool
) -> None:
    def make() -> TrainState:
        torch.manual_seed(5)
        model, critic = nn.Linear(3, 2), nn.Linear(3, 2)
        one, other = (optimizer(part.parameters(), lr=0.1, momentum=0.9) for part in (model, critic))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        extras = {"critic": critic, "critic_optimizer": other} if is_extra else {}
        state = TrainState(
            model, plain if is_extra else one, length=8, global_batch_size=8, epochs=9, extras=extras
        )  # fmt: skip
        (model(torch.full((1, 3), 0.3)) + critic(torch.full((1, 3), 0.3))).sum().backward()
        for each in state.kept.updates.optimizers:
            each.step()
        return state

    given, taker = make().state_dict(), make()
    load(taker, deserialize_state(serialize_state(given), source="it"), "it")
    assert taker.kept.updates.is_as_sent, "all read that snapshot alike"
    load(taker, deserialize_state(serialize_state(given), source="it"), "it", is_peers=True)
    assert taker.kept.updates.is_as_sent == is_as_sent
    assert compare(monkeypatch, [None], [1], taker).is_lost_in_loading != is_as_sent


def test_a_state_that_cannot_be_hashed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    state.optimizer.state_dict = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    comparison = compare(monkeypatch, [7, 7], [0, 1, 2], state)
    assert comparison.why_not == "division by zero"


def test_an_optimizer_that_wraps_another_one() -> None:
    state = make_state()
    inner = state.optimizer.state_dict()
    state.optimizer.state_dict = lambda: {"base": inner, "k": 5}  # type: ignore[assignment,method-assign]
    names = [name for name, _ in tensors_of(state)]
    assert "optimizer k" in names
    assert "optimizer base state 0 exp_avg" in names


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "RAdam", "NAdam", "ASGD"])
def test_what_was_loaded_hashes_as_what_was_saved(name: str) -> None:
    saved, loaded = make_state(getattr(torch.optim, name)), make_state(getattr(torch.optim, name))
    loaded.load_state_dict(deserialize_state(serialize_state(saved.state_dict()), source="it"))
    assert hash_of(dict(tensors_of(loaded))) == hash_of(dict(tensors_of(saved)))


def test_what_a_forward_pass_writes_into_frozen_parameters_is_each_ranks_own() -> None:
    state = make_state()
    state.model.weight.requires_grad_(False)  # type: ignore[operator]
    assert "parameter weight" in [name for name, _ in tensors_of(state)], "the optimizer owns it"
    state.model.register_parameter("codes", nn.Parameter(torch.ones(2), requires_grad=False))
    assert "parameter codes" not in [name for name, _ in tensors_of(state)]


def test_what_other_optimizers_train_belongs_to_it() -> None:
    model, d, teacher = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 1)
    d_optimizer = torch.optim.Adam(d.parameters())
    extras = {"d": d, "d_optimizer": d_optimizer, "teacher": teacher}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, extras=extras)
    hashes = [hash_of(dict(tensors_of(state)))]
    for change in (d.weight, d_optimizer.state, teacher.weight):
        with torch.no_grad():
            if isinstance(change, torch.Tensor):
                change += 1.0
            else:
                d(torch.ones(1, 2)).sum().requires_grad_()
                change[d.weight]["exp_avg"] = torch.ones(1, 2)
        hashes.append(hash_of(dict(tensors_of(state))))
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3], "nobody trains the teacher"


def test_sparse_and_conjugated_tensors_count() -> None:
    eye, numbers = torch.eye(3), torch.tensor([1 + 2j, 3 - 4j])
    for layout in (torch.sparse_coo, torch.sparse_csr):
        pair = [hash_of({"adjacency": dense.to_sparse(layout=layout)}) for dense in (eye, 2 * eye)]
        assert len(set(pair)) == 2
    assert hash_of({"w": numbers.conj()}) == hash_of({"w": numbers.conj().resolve_conj()})
    assert hash_of({"w": numbers.conj()}) != hash_of({"w": numbers})
