"""The transfer of the state to a newcomer: its parts, and what may change meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic.handover import (
    PACKET_BYTES,
    Taking,
    bytes_of,
    empty,
    flat,
    flat_or_none,
    neighbours,
    packed,
    packets,
    put_together,
    room_for,
    take_apart,
    unpack,
)
from elastic_train.elastic.loading import load
from elastic_train.storage.state_bytes import deserialize_state, serialize_state
from elastic_train.training.side_thread import SideThread
from elastic_train.training.state import TrainState, state_sha256


class Tied(nn.Module):
    """Two names for one weight, a channels-last one, and statistics that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 32, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(32)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(self.convolution(images)).flatten(1)[:, :64]))  # type: ignore[no-any-return]


def make_state(seed: int, *, steps: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainState(model, optimizer, length=100, global_batch_size=10, epochs=3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16, 4, 4)).square().mean().backward()
        optimizer.step()
        state.commit(0.5)
    return state


def received(state: TrainState) -> tuple[dict[str, object], list[torch.Tensor]]:
    """What arrives, when it is taken from `state` now."""
    skeleton, tensors = take_apart(state)
    arrived = deserialize_state(serialize_state(skeleton))
    copies = [empty(*looks) for looks in arrived.pop("tensors")]
    for sent, taken in zip(packets(tensors), packets(copies), strict=True):
        room = room_for(taken)
        bytes_of(room).copy_(bytes_of(packed(sent)))
        unpack(room, taken)
    return arrived, copies


def test_a_newcomer_has_the_same_state_and_goes_on_alike() -> None:
    giver, taker = make_state(1, steps=3), make_state(2)
    taker.load_state_dict(put_together(*received(giver)))
    assert state_sha256(taker.model.state_dict()) == state_sha256(giver.model.state_dict())
    assert (taker.step, taker.samples_done, taker.last_loss) == (3, 30, 0.5)
    for state in (giver, taker):
        torch.manual_seed(3)
        state.optimizer.zero_grad()
        state.model(torch.randn(4, 16, 4, 4)).square().mean().backward()
        state.optimizer.step()
    assert state_sha256(taker.model.state_dict()) == state_sha256(giver.model.state_dict()), "momenta came along"


def test_a_newcomer_s_lazy_modules_get_the_shapes_of_the_others() -> None:
    """Those who train have seen a batch, and it has not."""

    def make() -> TrainState:
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        optimizer = torch.optim.AdamW(model.parameters())
        return TrainState(model, optimizer, length=8, global_batch_size=4, epochs=2)

    giver, taker = make(), make()
    giver.model(torch.randn(4, 2)).sum().backward()
    giver.optimizer.step()
    giver.commit(0.5)
    taking, clocks = Taking.__new__(Taking), list[dict[str, Any]]()
    vars(taking).update(
        _state=taker, _source=0, _loaded=clocks.append, _thread=SimpleNamespace(finish=lambda _check: None)
    )
    taking._skeleton, taking._tensors = received(giver)
    taking.finish(lambda: None)
    assert len(clocks) == 1
    for state in (giver, taker):
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 2).cumsum(0)).square().mean().backward()
        state.optimizer.step()
    assert state_sha256(taker.model.state_dict()) == state_sha256(giver.model.state_dict())


@pytest.mark.parametrize("has_own_optimizer", [False, True])
def test_a_newcomer_trains_with_the_settings_of_the_others(has_own_optimizer: bool) -> None:
    """Its task's code has others. A snapshot's do not count at a new start: the flags may be new."""

    def make(lr: float, decay: float) -> TrainState:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": lr, "weight_decay": decay}])
        plan: dict[str, Any] = {"length": 8, "global_batch_size": 4, "epochs": 2}
        return TrainState(model, optimizer, schedule="cosine", has_own_optimizer=has_own_optimizer, **plan)

    giver, taker, later = make(0.1, 0.01), make(0.5, 0.0), make(0.5, 0.0)
    giver.commit(0.5)
    load(taker, put_together(*received(giver)), "the state of rank 0", is_peers=True)
    load(later, put_together(*received(giver)), "a snapshot")
    assert later.learning_rates == [0.5]
    for state in (giver, taker):
        assert state.learning_rates == [0.1]
        [group] = state.optimizer.param_groups
        assert group["weight_decay"] == 0.01
        assert group["lr"] == pytest.approx(0.1 * (1 + 0.5**0.5) / 2), "after the first of four steps"


class Counting(nn.Module):
    """It counts in its extra state, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += values.detach().sum(0)
        return values

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


def test_what_a_forward_pass_changes_is_that_of_the_commit() -> None:
    """In the model, and in a module among the extras."""
    torch.manual_seed(0)
    model, norm = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), Counting()), nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters()], lr=0.1)
    giver = TrainState(model, optimizer, length=8, global_batch_size=4, epochs=2, extras={"norm": norm})
    skeleton, tensors = take_apart(giver)
    before = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, norm)]
    norm(model(torch.randn(4, 4)))  # the first step of the new world has begun
    arrived = put_together(skeleton, tensors)
    for module, part, values in zip((model, norm), (arrived["model"], arrived["extras"]["norm"]), before, strict=True):
        torch.testing.assert_close(dict(part), values, rtol=0, atol=0)
        assert any(not torch.equal(value, values[name]) for name, value in module.state_dict().items())


def test_large_tensors_are_not_copied_and_a_tied_one_is_sent_once() -> None:
    giver = make_state(1, steps=1)
    _, tensors = take_apart(giver)
    weight = giver.model.state_dict()["first.weight"]
    assert [tensor.data_ptr() for tensor in tensors].count(weight.data_ptr()) == 1
    with torch.no_grad():
        weight.fill_(7.0)
    assert any(bool((tensor == 7.0).all()) for tensor in tensors)


def test_views_that_are_conjugated_when_read_arrive_so() -> None:
    giver, taker = make_state(1), make_state(2)
    for state, number in ((giver, 1 + 2j), (taker, 0j)):
        state.model.register_buffer("turns", torch.tensor([number]).conj())
        state.model.register_buffer("falls", torch.tensor([number]).conj().imag)
    taker.load_state_dict(put_together(*received(giver)))
    assert (taker.model.turns.item(), taker.model.falls.item()) == (1 - 2j, -2)  # type: ignore[operator]


def test_small_tensors_share_a_message() -> None:
    small, large = torch.zeros(100), torch.zeros(PACKET_BYTES // 4 + 1)
    sizes = [len(packet) for packet in packets([small, small, large, small, torch.zeros(0), torch.tensor(True)])]
    assert sizes == [2, 1, 2]
    assert packed([large]) is large, "no copy"
    assert list(packets([])) == []


def test_a_tensor_with_holes_goes_by_value() -> None:
    assert flat_or_none(torch.zeros(8, 8)[:, ::2]) is None
    turned = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    assert flat(turned).tolist() == list(range(24))


def test_everybody_gets_it_from_one_and_passes_it_on_to_two_at_most() -> None:
    ranks = [3, 0, 1, 4, 5, 7, 8]
    senders = {child: ranks[place] for place in range(len(ranks)) for child in neighbours(place, ranks)[1]}
    assert set(senders) == set(ranks[1:])
    assert all(list(senders.values()).count(rank) <= 2 for rank in ranks)
    parents = {ranks[place]: neighbours(place, ranks)[0] for place in range(len(ranks))}
    assert parents == {3: None, **senders}, "as the receiver reckons it"


class Grown(nn.Module):
    """A module of a later version, which changes the weights of an earlier one when it loads them."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40, 40))
        self.register_buffer("mask", torch.eye(3).to_sparse())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination._metadata[prefix[:-1]]["scale"] = torch.ones(3)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        assert torch.equal(local_metadata["scale"], torch.ones(3)), "beside the version, as it was noted"
        if local_metadata.get("version") is None:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_kinds_and_sparse_tensors_arrive() -> None:
    def make() -> TrainState:
        model = Grown()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        return TrainState(
            model, optimizer, length=8, global_batch_size=8, epochs=9, extras={"schedule": schedule, "twin": Grown()}
        )

    giver, taker = make(), make()
    load(taker, put_together(*received(giver)), "it")
    for module in (taker.model, taker.extras["twin"]):
        assert isinstance(module, Grown)
        assert bool((module.weight == 1).all()), "loaded as what it is"
    assert taker.extras["schedule"].state_dict()["milestones"] == Counter({2: 2, 5: 1})
    assert isinstance(taker.extras["schedule"].state_dict()["milestones"], Counter)


@pytest.mark.parametrize("is_failing", [False, True])
def test_what_a_side_thread_held_goes_with_it(is_failing: bool) -> None:
    class Holder:
        def __init__(self) -> None:
            self.thread = SideThread(self.work, "test")

        def work(self) -> None:
            received = torch.zeros(3)
            dropped.append(weakref.ref(received))
            if is_failing:
                raise RuntimeError("lost")

    dropped: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        holder = Holder()
        dropped.append(weakref.ref(holder))
        with suppress(RuntimeError):
            holder.thread.finish(lambda: None)
        del holder
        assert [reference() for reference in dropped] == [None, None]
    finally:
        gc.enable()
