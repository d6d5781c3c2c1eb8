"""Restores: missing and surplus entries of a snapshot with their messages, and the run's clock."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic import restore
from elastic_train.elastic.loading import difference, load, other_rates, peak_rates
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.resume import Resumed
from elastic_train.elastic.whole_steps import Beginning
from elastic_train.elastic.world_report import describe_optimizer
from elastic_train.errors import SnapshotDamaged, SnapshotError, TaskMismatch
from elastic_train.rules import NAMES
from elastic_train.runlog.goodput import Phase, PhaseClock
from elastic_train.storage import snapshot
from elastic_train.training.data_identity import KIND_OF, ORDER_OF, identify_state
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import settings_hash
from tests.unit.test_quarantined import report_of
from tests.unit.test_ring import PAIR, Fake
from tests.unit.test_state import make_state


def layers(*sizes: int) -> dict[str, Any]:
    return nn.Sequential(*(nn.Linear(size, 2) for size in sizes)).state_dict()


def test_what_does_not_fit_is_told_in_one_line_however_large_the_model() -> None:
    assert difference(layers(3, 4), layers(3, 4)) == ""
    assert difference(layers(3, 5), layers(3, 4)) == "1 tensor of another shape (1.weight (2, 4) instead of (2, 5))"
    assert difference(layers(3, 4), layers(3)) == "it lacks 2 tensors (1.bias, 1.weight)"
    assert difference(layers(3), layers(3, 4)) == "it has 2 tensors too many (1.bias, 1.weight)"
    many = difference({}, layers(*[2] * 500))
    assert many.startswith("it has 1000 tensors too many (")
    assert len(many) < 100


class Best:
    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("held", [{}, {"best": 1.0}, {"best": 1.0, "gone": 2.0}, {"best": 1.0, "new": 3.0}])
def test_extras_may_come_and_go(held: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def state(extras: dict[str, float]) -> TrainState:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainState(
            model,
            optimizer,
            length=8,
            global_batch_size=8,
            epochs=9,
            extras={name: Best(value) for name, value in extras.items()},
        )

    now = state({"best": 0.0, "new": 7.0})
    monkeypatch.setattr(restore, "load_state", lambda _offer: state(held).state_dict())
    offer: Any = SimpleNamespace(path=Path("a"), task={})
    settings = restore._read(now, offer, {}, lambda _line: None)["settings"]
    assert settings == (settings_hash(now) if {"best", "new"} <= held.keys() else None), "else one rank's extras count"
    assert {name: extra.state_dict()["value"] for name, extra in now.extras.items()} == {
        "best": held.get("best", 0.0),
        "new": held.get("new", 7.0),
    }


@pytest.mark.parametrize(("failures", "is_read"), [(1, True), (2, False)])
def test_a_snapshot_that_cannot_be_read_for_a_moment_is_read_at_a_second_try(
    failures: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the start would take an older one, and the steps since then would be done again."""
    before, told, left = make_state(), list[str](), [SnapshotDamaged("state.pt cannot be read: EIO")] * failures

    def load_once(*_arguments: Any) -> dict[str, Any]:
        if left:
            raise left.pop()
        return before.state_dict()

    monkeypatch.setattr(snapshot, "_load_once", load_once)
    offer: Any = SimpleNamespace(path=Path("a"), task={})
    assert ("read" in restore._read(make_state(), offer, {}, told.append)) == is_read
    assert told == ([] if is_read else ["damaged: state.pt cannot be read: EIO"])


def test_what_was_read_of_a_snapshot_is_gone_before_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large state would be in memory twice."""
    held: list[weakref.ref[torch.Tensor]] = []

    def load_once(*_arguments: Any) -> dict[str, Any]:
        assert [one() for one in held] == [None] * len(held)
        part = torch.zeros(1)
        held.append(weakref.ref(part))
        raise SnapshotDamaged("state.pt cannot be read: EIO")

    monkeypatch.setattr(snapshot, "_load_once", load_once)
    offer: Any = SimpleNamespace(path=Path("a"), task={})
    assert restore._read(make_state(), offer, {}, lambda _: None) == {"unread": "damaged"}
    assert len(held) == 2


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("held", ["3f ('a.png' is the first)", "5e ('b.png' is the first)", None])
def test_an_epoch_that_goes_on_with_other_files_is_told(
    step: int, held: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is listed in another order on another machine: samples would be used twice, or never."""
    before, now, told = make_state(), make_state(), list[str]()
    for _ in range(step):
        before.commit(0.5)
    monkeypatch.setattr(restore, "load_state", lambda _offer: before.state_dict())
    offer: Any = SimpleNamespace(path=Path("a"), task={} if held is None else {NAMES: held})
    assert "read" in restore._read(now, offer, {NAMES: "3f ('a.png' is the first)"}, told.append)
    if held is not None and "b.png" in held and step:
        assert "some are trained twice in epoch 1, and others not at all" in told.pop()
    assert told == []


@pytest.mark.parametrize(
    ("held", "is_refused"),
    [({"main": 1}, False), ({"main": 2}, True), ({}, False), ({"main": 1, "judge": 1}, False), ({"judge": 2}, True)],
)
def test_a_snapshot_whose_moments_are_in_another_order_is_refused(held: dict[str, int], is_refused: bool) -> None:
    """torch would give them to other weights. Earlier versions wrote no order, and extras may come and go."""
    offer: Any = SimpleNamespace(path=Path("a"), task={"task": 1} | {f"{ORDER_OF}{one}": held[one] for one in held})
    task = {"task": 1, f"{ORDER_OF}main": 1} | ({f"{ORDER_OF}judge": 1} if is_refused else {})
    with pytest.raises(TaskMismatch, match="order of the parameters of") if is_refused else nullcontext():
        restore.require_same_task(offer, task)


def test_a_snapshot_of_another_kind_of_optimizer_among_the_extras_is_refused() -> None:
    """torch would take over what the other kind had, as AdamW a weight decay of 0."""

    def task(kind: type[torch.optim.Adam]) -> dict[str, Any]:
        judge = kind(nn.Linear(1, 1).parameters())
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extras = {"judge": judge}
        state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, extras=extras)
        return {name: value for name, value in identify_state(state).items() if name.startswith((ORDER_OF, KIND_OF))}

    offer: Any = SimpleNamespace(path=Path("a"), task=task(torch.optim.Adam))
    restore.require_same_task(offer, task(torch.optim.Adam))
    with pytest.raises(TaskMismatch, match=r"kind of extras\['judge'\] 'Adam', this start has 'AdamW'"):
        restore.require_same_task(offer, task(torch.optim.AdamW))


def test_another_rate_of_an_optimizer_among_the_extras_is_told() -> None:
    def state(lr: float) -> TrainState:
        model = nn.Linear(1, 1)
        optimizer, judge = (torch.optim.SGD(one.parameters(), lr=rate) for one, rate in ((model, 0.1), (model, lr)))
        return TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, extras={"judge": judge})

    now = state(0.3)
    started = peak_rates(now)
    now.load_state_dict(state(0.2).state_dict())
    expected = "the run's learning rate 0.1, 0.2 is used, not this start's 0.1, 0.3"
    assert other_rates(started, peak_rates(now)) == expected


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("lr", [4e-4, 1e-2])
def test_a_learning_rate_that_is_not_used_is_told(lr: float, is_scheduled: bool) -> None:
    """What a scheduler has made of one that is the same is no other one."""

    def state(lr: float) -> tuple[TrainState, Any]:
        model = nn.Linear(1, 1)
        groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": 2e-4}]
        optimizer = torch.optim.SGD(groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if is_scheduled else None
        return TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9), scheduler

    earlier, scheduler = state(4e-4)
    if scheduler is not None:
        earlier.optimizer.step()
        scheduler.step()
    now, _ = state(lr)
    started = peak_rates(now)
    now.load_state_dict(earlier.state_dict())
    line = other_rates(started, peak_rates(now))
    expected = "the run's learning rate 0.0004, 0.0002 is used, not this start's 0.01, 0.0002"
    assert line == (None if lr == 4e-4 else expected)


def test_a_schedule_of_ours_takes_the_rate_of_the_new_start() -> None:
    def state(lr: float) -> TrainState:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, schedule="cosine")

    earlier, now = state(0.1), state(0.3)
    earlier.step = 4
    started = peak_rates(now)
    now.load_state_dict(earlier.state_dict())
    assert other_rates(started, peak_rates(now)) is None


class Kept:
    """Keeps what it is given, as a replay buffer does, which is in host memory, beside what is on a device."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {
            "rows": torch.zeros(2), "seen": [torch.zeros(1), (torch.zeros(1, device="meta"), 3)], "later": None
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_the_tensors_of_an_extra_are_where_it_has_them() -> None:
    """Not where the model is, which stands for a GPU here."""

    def state() -> TrainState:
        model = nn.Linear(1, 1, device="meta")
        generator = torch.Generator()
        return TrainState(
            model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=8, epochs=9,
            extras={"kept": Kept(), "random": Random(generator)},
        )  # fmt: skip

    earlier, now = state(), state()
    loaded = earlier.state_dict()
    loaded["extras"]["kept"] = {
        "rows": torch.ones(3), "seen": [torch.ones(1), (torch.ones(1), 4), torch.ones(1)], "later": torch.ones(1)
    }  # fmt: skip
    now.extras["kept"].held["new"] = 1  # type: ignore[attr-defined]
    load(now, loaded, "it")
    held = now.extras["kept"].state_dict()
    assert [held[name].device.type for name in ("rows", "later")] == ["cpu", "cpu"]
    assert [held["seen"][0].device.type, held["seen"][1][0].device.type, held["seen"][2].device.type] == [
        "cpu", "meta", "cpu"
    ]  # fmt: skip
    assert (held["rows"].tolist(), held["seen"][1][1]) == ([1.0] * 3, 4)


class Random:
    """A generator, whose state is on the CPU wherever it draws."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


def renamed(_state: dict[str, Any]) -> None:
    raise KeyError("shadow")


def reshaped(_state: dict[str, Any]) -> None:
    nn.Linear(2, 2).load_state_dict(nn.Linear(3, 2).state_dict())


def changed(_state: dict[str, Any]) -> None:
    raise AttributeError("no average")


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        (renamed, r"KeyError: 'shadow'"),
        (reshaped, r"RuntimeError: Error\(s\) in loading state_dict for Linear: size mismatch for weight: .*"),
        (changed, "AttributeError: no average"),
    ],
)
def test_an_extra_that_does_not_take_its_state_is_named(loads: Any, told: str) -> None:
    """And nobody is told to begin anew for it."""
    extra = Best(1.0)
    state = make_state(extras={"average": extra})
    extra.load_state_dict = loads  # type: ignore[method-assign]
    what = r"; correct its load_state_dict\(\), or leave it out of extras: then a warning follows$"
    with pytest.raises(SnapshotError, match=r"^it cannot be taken over: extras\['average'\]: " + told + what) as raised:
        load(state, state.state_dict(), "it")
    assert "\n" not in str(raised.value)


class OwnRate(torch.optim.SGD):
    """As Adafactor, which finds its learning rate itself where it is given none."""

    def __init__(self, parameters: Any, lr: float | None) -> None:
        super().__init__(parameters)
        self.param_groups[0]["lr"] = lr


@pytest.mark.parametrize("schedule", [None, "constant", "cosine"])
def test_an_optimizer_may_find_its_learning_rate_itself(schedule: str | None) -> None:
    def state(lr: float | None) -> TrainState:
        model = nn.Linear(1, 1)
        optimizer = OwnRate(model.parameters(), lr)
        return TrainState(
            model, optimizer, length=8, global_batch_size=4, epochs=9, schedule=schedule, has_own_optimizer=True
        )

    first, later, other = state(None), state(None), state(0.25)
    started, others = peak_rates(later), peak_rates(other)
    first.commit(1.0)
    assert first.optimizer.param_groups[0]["lr"] is None
    assert describe_optimizer(first) == "OwnRate, lr none"
    for one in (later, other):
        one.load_state_dict(first.state_dict())
    assert later.learning_rates == [None]
    assert other_rates(started, peak_rates(later)) is None
    told = "the run's learning rate none is used, not this start's 0.25"
    assert other_rates(others, peak_rates(other)) == (told if schedule is None else None)
    later.load_state_dict(first.state_dict(), is_peers=True)
    assert settings_hash(later) == settings_hash(first)


@pytest.mark.parametrize("settings", [[1, 1], [1, 2], [None, None]])
def test_of_several_that_read_a_snapshot_the_first_ones_settings_count(
    settings: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its own disk, and keeps what its task's code has set the optimizer to, and extras that the snapshot
    lacks (None); the last one has no snapshot."""
    handed: list[Sequence[int]] = []
    told: list[dict[str, Any]] = [{"read": {}, "settings": settings[0]}, {"read": {}, "settings": settings[1]}, {}]
    offer = SimpleNamespace(path=Path("a"), restarts=(), is_same=lambda _other: True)
    monkeypatch.setattr(restore, "gather_json", lambda _mine: told)
    monkeypatch.setattr(restore, "_read", lambda *_arguments: told[1])
    monkeypatch.setattr(restore, "newest_offer", lambda _offers: offer)
    monkeypatch.setattr(restore, "Offer", SimpleNamespace(of=lambda one: one))
    monkeypatch.setattr(restore, "hand_out", lambda _state, ranks, _check: handed.append(ranks))
    state: Any = SimpleNamespace(superseded=(), generation=0, restarts=(), step=1)
    world: Any = SimpleNamespace(rank=1, world_size=3)
    offers: list[Any] = [offer]
    by_rank: list[list[Any]] = [[offer], [offer], []]
    source = restore._restore_newest(
        state, world, offers, by_rank, (), task={}, warn=lambda _line: None, check=lambda: None
    )
    assert source == 0
    assert handed == [[0, 2] if settings == [1, 1] else [0, 1, 2]]


class Newcomer(Fake):
    """Of a world that was formed ahead: the state comes within the first step, if they who have it live so long."""

    def into(self, world: Any, change: Any, *, is_formed_ahead: bool) -> Resumed:
        return Resumed(Restored("peer", 5, 0), Beginning(first_ranks=1))


@pytest.mark.parametrize("came", ["position", "state"])
def test_the_totals_of_the_run_are_those_of_its_snapshot_until_its_state_has_come(
    came: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others die in the first step of a prepared join, and the newcomer goes on from a snapshot."""
    now, newcomer = [0.0], Newcomer()
    newcomer.state = state = make_state()  # type: ignore[assignment]
    state.clock = PhaseClock(lambda: now[0], lambda: now[0], process_age=0.0)
    state.clock.enter(Phase.FORM)
    ring = newcomer.ring()
    ring.world = PAIR
    ring.sync()
    expected = {Phase.TRAIN: 300.0, Phase.DOWN: 7.0}
    if came == "state":
        totals = {phase.value: 0.0 for phase in Phase} | {Phase.TRAIN: 400.0}
        state.clock.take_over({"totals": totals, "node_totals": totals})
        reporter: Any = SimpleNamespace(report_quarantines=print)
        report_of(reporter, state, "off").state_came_late(PAIR)
        expected = {Phase.TRAIN: 400.0}
    assert (state.generation, state.generations) == ((None, 0) if came == "position" else (PAIR.generation, 1))

    totals = {phase.value: 0.0 for phase in Phase} | {Phase.TRAIN: 300.0}
    saved = {"totals": totals, "node_totals": totals, "saved_at": -7.0}
    offer = SimpleNamespace(path=Path("a"), restarts=(), is_same=lambda _other: True)
    read = {"read": saved, "settings": 1}
    monkeypatch.setattr(restore, "gather_json", lambda _mine: [read])
    monkeypatch.setattr(restore, "_read", lambda *_arguments: read)
    monkeypatch.setattr(restore, "newest_offer", lambda _offers: offer)
    monkeypatch.setattr(restore, "Offer", SimpleNamespace(of=lambda one: one))
    monkeypatch.setattr(restore, "hand_out", lambda *_arguments: None)
    monkeypatch.setattr(restore, "parted", lambda *_arguments: None)
    alone: Any = SimpleNamespace(rank=0, world_size=1)
    some: Any = offer
    now[0] = 2.0
    found = restore._restore_newest(state, alone, [some], [[some]], (), task={}, warn=print, check=lambda: None)
    assert found == 0
    assert {phase: seconds for phase, seconds in state.clock.totals().items() if seconds} == {
        **expected,
        Phase.FORM: 2.0,
    }
