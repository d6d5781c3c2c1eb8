"""TrainState: its position, its schedule, and that load(save) changes nothing."""

from __future__ import annotations

import copy
import hashlib
import math
import struct
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic.loading import load
from elastic_train.elastic.trainer import begin_scalers_anew
from elastic_train.errors import SnapshotError, TrainingDiverged, UsageError, kind_and_line
from elastic_train.storage.state_bytes import deserialize_state, serialize_state
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.kept import KeptBuffers, leave_no_trace
from elastic_train.training.optimizers import build_optimizer, parts_of
from elastic_train.training.ordered_buffers import SavedShapes
from elastic_train.training.planned_steps import planned_steps
from elastic_train.training.reduction import StepTotals
from elastic_train.training.state import TrainState, learning_rate_factor, modes_kept, state_sha256
from elastic_train.training.state_hash import hash_of, plain_hashes, tensors_of
from elastic_train.training.step import clip_gradients, train_step

LENGTH, BATCH = 1437, 64
STEPS_PER_EPOCH = 23


def make_state(
    seed: int = 0,
    schedule: str | Callable[[int, int], float] = "cosine",
    length: int = LENGTH,
    lr: float = 0.1,
    **flags: Any,
) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = build_optimizer(
        [{"params": list(model.parameters())}], name="sgd", lr=lr, momentum=0.9, weight_decay=0.0
    )
    plan = {"epochs": 3, "global_batch_size": BATCH, **flags}
    return TrainState(model, optimizer, None, schedule=schedule, length=length, **plan)


def step(state: TrainState, seed: int) -> None:
    """One optimizer step on made-up data."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    state.optimizer.zero_grad()
    state.model(inputs).square().mean().backward()
    state.optimizer.step()
    state.commit(loss=1.0 / (seed + 1))


def learning_rate(state: TrainState) -> float:
    return float(state.optimizer.param_groups[0]["lr"])


class TestPosition:
    @pytest.mark.parametrize(("length", "batch"), [(1437, 64), (128, 64), (64, 64), (10, 64), (65, 64), (7, 1)])
    def test_commits_over_the_ends_of_epochs(self, length: int, batch: int) -> None:
        state = make_state(length=length, global_batch_size=batch)
        seen = []
        while not state.is_finished:
            epoch, before, samples = state.epoch, state.samples_done, state.next_step_samples()
            has_ended = state.commit(0.5)
            seen.append((epoch, before, samples))
            assert has_ended == (before + samples == length)
            assert (state.epoch, state.samples_done) == ((epoch + 1, 0) if has_ended else (epoch, before + samples))
        assert state.step == len(seen) == state.last_step == 3 * math.ceil(length / batch)
        for epoch in range(3):
            of_epoch = [(before, samples) for which, before, samples in seen if which == epoch]
            assert sum(samples for _, samples in of_epoch) == length
            assert all(samples == batch for _, samples in of_epoch[:-1])

    def test_the_loss_of_the_last_step_is_kept(self) -> None:
        state = make_state()
        assert state.last_loss is None
        state.commit(None)
        assert (state.last_loss, state.last_commits[-1]["loss"]) == (None, None), "of a step that did not give any"
        state.commit(0.25)
        assert state.last_loss == 0.25

    @pytest.mark.parametrize(
        ("flags", "steps"),
        [({"epochs": 2}, 46), ({"epochs": 2, "max_steps": 30}, 30), ({"epochs": 2, "max_steps": 100}, 46)],
    )
    def test_training_ends_at_epochs_or_steps_whichever_comes_first(self, flags: dict[str, Any], steps: int) -> None:
        assert planned_steps(LENGTH, BATCH, flags["epochs"], flags.get("max_steps")) == steps
        assert planned_steps(None, BATCH, flags["epochs"], flags.get("max_steps")) == flags.get("max_steps"), "unknown"
        assert planned_steps(0, BATCH, flags["epochs"], flags.get("max_steps")) == 0, "no data: nothing to train"


class TestSchedule:
    def test_the_learning_rate_is_a_function_of_the_committed_step(self) -> None:
        state = make_state()
        for done in range(state.last_step + 1):
            expected = 0.1 * 0.5 * (1 + math.cos(math.pi * done / (3 * STEPS_PER_EPOCH)))
            assert learning_rate(state) == pytest.approx(expected, abs=1e-12)
            if done < state.last_step:
                state.commit(0.0)

    def test_constant(self) -> None:
        state = make_state(schedule="constant")
        for _ in range(5):
            assert learning_rate(state) == 0.1
            state.commit(0.0)

    def test_a_schedule_without_an_answer_for_the_end_is_known_at_once(self) -> None:
        """It would raise after the last commit: the commonest slip in a table, and in a division."""
        table = [1.0] * (3 * STEPS_PER_EPOCH)
        with pytest.raises(IndexError) as told:
            make_state(schedule=lambda step, _last: table[step])
        asked = f"the schedule was asked for the learning rate after {len(table)} of {len(table)} steps"
        assert kind_and_line(told.value) == f"IndexError: list index out of range ({asked})"
        make_state(schedule=lambda step, _last: table[step], max_steps=len(table) - 1)

    def test_a_step_whose_schedule_fails_is_committed(self) -> None:
        """All ranks fail alike, and what is saved for mended code has that step."""
        table = {0: 1.0, 1: 0.5, 3 * STEPS_PER_EPOCH: 0.0}
        state = make_state(schedule=lambda step, _last: table[step])
        state.remember()
        step(state, 0)
        state.remember()
        with pytest.raises(KeyError):
            step(state, 1)
        assert not state.rollback(), "there is nothing to take back"
        assert (state.step, state.samples_done, state.is_whole) == (2, 2 * BATCH, True)
        mended = make_state(seed=1, schedule=lambda step, _last: 1.0 / (step + 1))
        mended.load_state_dict(state.state_dict())
        assert learning_rate(mended) == pytest.approx(0.1 / 3)
        assert state_sha256(mended.model.state_dict()) == state_sha256(state.model.state_dict())

    def test_groups_keep_their_own_peak(self) -> None:
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        groups: list[dict[str, Any]] = [
            {"params": list(layers[0].parameters())},
            {"params": list(layers[1].parameters()), "lr": 0.5},
        ]
        optimizer = build_optimizer(groups, name="adamw", lr=0.1, momentum=0.0, weight_decay=0.0)
        state = TrainState(
            nn.Sequential(*layers), optimizer, schedule="cosine", length=10, global_batch_size=10, epochs=2
        )
        state.commit(0.0)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.25])

    def test_ends(self) -> None:
        assert learning_rate_factor("cosine", 0, 10) == 1.0
        assert learning_rate_factor("cosine", 5, 10) == pytest.approx(0.5)
        assert learning_rate_factor("cosine", 10, 10) == learning_rate_factor("cosine", 99, 10) == 0.0
        assert learning_rate_factor("cosine", 0, 0) == 1.0


class TestRoundTrip:
    def test_what_was_captured_loads_and_nothing_changes(self) -> None:
        state = make_state(seed=1)
        state.run_uid, state.generations, state.micro_batch_size = "uid", 4, 32
        state.incidents = [{"cause": "restart", "seconds": {"down": 1.5}, "lost_members": ["a/0/1"]}]
        for seed in range(STEPS_PER_EPOCH + 5):
            step(state, seed)
        state.test_metrics = {"accuracy": 0.75}
        saved = deserialize_state(serialize_state(state.state_dict()))

        other = make_state(seed=2)
        other.load_state_dict(saved)
        assert (other.epoch, other.step, other.samples_done) == (1, STEPS_PER_EPOCH + 5, 5 * BATCH)
        assert (other.run_uid, other.generations, other.micro_batch_size) == ("uid", 4, 32)
        assert (other.incidents, other.last_loss) == (state.incidents, state.last_loss)
        assert other.test_metrics == {"accuracy": 0.75}
        assert state_sha256(other.model.state_dict()) == state_sha256(state.model.state_dict())
        assert learning_rate(other) == learning_rate(state)
        for seed in range(40):  # over the end of an epoch, momentum and BatchNorm included
            step(state, seed)
            step(other, seed)
        assert state_sha256(other.model.state_dict()) == state_sha256(state.model.state_dict())

    def test_the_flags_of_this_process_win_over_the_saved_hyper_parameters(self) -> None:
        state = make_state(lr=0.1)
        step(state, 0)
        other = make_state(lr=0.2, micro_batch_size=16, epochs=6)
        state.micro_batch_size = 64
        other.load_state_dict(state.state_dict())
        assert other.micro_batch_size == 16
        assert other.last_step == 6 * STEPS_PER_EPOCH
        assert learning_rate(other) == pytest.approx(0.2 * learning_rate_factor("cosine", 1, other.last_step))

    def test_a_start_that_trains_fewer_parameters_does_not_give_them_the_moments_of_others(self) -> None:
        """torch hands these over by number, and here it sees this process's groups alone."""

        def state(first: int) -> TrainState:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            optimizer = torch.optim.SGD([*model.parameters()][first:], lr=0.1, momentum=0.9)
            return TrainState(model, optimizer, length=8, global_batch_size=4, epochs=2, schedule="cosine")

        before = state(0)
        before.model(torch.randn(3, 2)).sum().backward()
        before.optimizer.step()
        before.commit(0.5)
        with pytest.raises(SnapshotError, match=r"does not fit .* the optimizer trains 2 parameters, and trained 4"):
            load(state(2), before.state_dict(), "a snapshot")

    def test_groups_of_an_optimizer_among_the_extras_share_one_rate_after_a_load_on_another_device(self) -> None:
        """What a scheduler writes into one group, the next one reads."""

        def state() -> TrainState:
            model, critic = nn.Linear(2, 2), nn.Linear(2, 2)
            groups = [{"params": [one]} for one in critic.parameters()]
            extras = {"critic": critic, "judge": torch.optim.Adam(groups, lr=torch.tensor(0.1))}
            optimizer = torch.optim.SGD(model.parameters())
            return TrainState(model, optimizer, length=8, global_batch_size=4, epochs=2, extras=extras)

        before, now = deserialize_state(serialize_state(state().state_dict())), state()
        judge: Any = now.extras["judge"]
        first, second = judge.param_groups
        first["lr"] = second["lr"] = first["lr"].to("meta")
        load(now, before, "a snapshot")
        first, second = judge.param_groups
        assert first["lr"].is_meta
        assert first["lr"] is second["lr"]

    def test_groups_of_an_optimizer_share_one_rate_after_a_rollback_as_well(self) -> None:
        """Else survivors that took the step back and those that did not go on with other rates."""
        model, critic = nn.Linear(2, 2), nn.Linear(2, 2)

        def of(module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": [one]} for one in module.parameters()], lr=torch.tensor(0.1))

        one, judge = of(model), of(critic)
        extras: dict[str, Any] = {"critic": critic, "judge": judge}
        state = TrainState(model, one, length=8, global_batch_size=4, epochs=2, extras=extras)

        def take_back() -> list[Any]:
            for module in (model, critic):
                module(torch.ones(3, 2)).sum().backward()
            for optimizer in (one, judge):
                optimizer.step()
            assert state.rollback()
            assert state.is_whole
            return [group["lr"] for optimizer in (one, judge) for group in optimizer.param_groups]

        state.remember()
        rates = take_back()
        assert rates[0] is rates[1]
        assert rates[2] is rates[3]
        assert rates[0] is not rates[2]
        state.remember()
        one.param_groups[1]["lr"] = torch.tensor(0.3)
        state.remember()  # the memory of the shared rate is free for one of the two alone
        assert [round(float(rate), 3) for rate in take_back()] == [0.1, 0.3, 0.1, 0.1]

    def test_the_incidents_of_a_long_run_are_copied_at_no_cost(self) -> None:
        """One text, which grows with each incident: nothing is made anew, in whatever number of snapshots."""
        state, other = make_state(), make_state()
        state.incidents = [{"cause": "join", "seconds": {"meet": 0.1, "init": 1e-9}}] * 1000
        texts = [state.state_dict()["run"]["incidents"] for _ in range(2)]
        state.incidents.append({"cause": "leave", "lost_members": ["a/0/1"]})
        texts.append(state.state_dict()["run"]["incidents"])
        assert texts[0] is texts[1]
        assert texts[2] == texts[1][:-1] + ',{"cause": "leave", "lost_members": ["a/0/1"]}]'
        other.load_state_dict(deserialize_state(serialize_state(state.state_dict())))
        assert other.incidents == state.incidents
        state.incidents = [{"cause": "restart"}] * 1001  # of another run: a list of the same length
        other.load_state_dict(state.state_dict())
        assert other.incidents == state.incidents

    @pytest.mark.parametrize(
        ("epochs", "plan", "is_finished"),
        [(2, {}, True), (3, {}, False), (1, {}, False), (2, {"patience": 5}, False)],
        ids=["the same", "more epochs", "fewer epochs", "a flag of its own"],
    )
    def test_what_the_function_has_ended_early_stays_so(
        self, epochs: int, plan: dict[str, Any], is_finished: bool
    ) -> None:
        """For a start with the same flags: a node that comes late, say."""
        state, other = make_state(epochs=2), make_state(epochs=epochs)
        other.plan |= plan
        step(state, 0)
        on_the_way = serialize_state(state.state_dict())
        state.last_step = state.step
        ended = serialize_state(state.state_dict())
        other.load_state_dict(deserialize_state(on_the_way))
        assert (other.last_step, other.is_finished) == (epochs * STEPS_PER_EPOCH, False)
        other.load_state_dict(deserialize_state(ended))
        assert (other.last_step, other.is_finished) == (1 if is_finished else epochs * STEPS_PER_EPOCH, is_finished)

    def test_incidents_of_a_snapshot_of_an_earlier_version(self) -> None:
        state, saved = make_state(), make_state().state_dict()
        saved["run"]["incidents"] = [{"cause": "restart"}]
        state.load_state_dict(saved)
        assert state.incidents == saved["run"]["incidents"]

    def test_the_loss_scale_is_part_of_the_state(self) -> None:
        state, other = make_state(), make_state()
        for each in (state, other):
            each.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        assert state.scaler is not None
        assert other.scaler is not None
        state.scaler.scale(torch.ones(()))  # the scale exists from its first use on
        state.scaler.update(32.0)
        other.load_state_dict(deserialize_state(serialize_state(state.state_dict())))
        assert other.scaler.get_scale() == 32.0

    def test_without_a_schedule_learning_rates_and_schedulers_are_the_users_own(self) -> None:
        def make() -> tuple[TrainState, torch.optim.lr_scheduler.LRScheduler]:
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
            state = TrainState(
                model, optimizer, length=LENGTH, global_batch_size=BATCH, epochs=1, extras={"scheduler": scheduler}
            )
            return state, scheduler

        state, scheduler = make()
        for seed in range(3):
            step(state, seed)
            scheduler.step()
        other, other_scheduler = make()
        other.load_state_dict(deserialize_state(serialize_state(state.state_dict())))
        assert learning_rate(other) == learning_rate(state) == pytest.approx(0.1)
        assert other.learning_rates == [pytest.approx(0.1)], "what is told at the start is in force"
        for each in (scheduler, other_scheduler):
            each.step()
        assert learning_rate(other) == learning_rate(state) == pytest.approx(0.01)

    def test_another_model_is_refused(self) -> None:
        saved = make_state().state_dict()
        del saved["model"]["0.weight"]
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            make_state().load_state_dict(saved)


class Masters(torch.optim.Optimizer):
    """Weights of bfloat16, and beside each what must not be rounded to that, as users' optimizers keep it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                if not held:
                    held["step"] = torch.zeros(())
                    held["seen"] = torch.zeros((), dtype=torch.int64)
                    held["master"] = parameter.float()
                    held["moments"] = [torch.zeros_like(held["master"]), {"second": torch.zeros_like(held["master"])}]
                first, second = held["moments"][0], held["moments"][1]["second"]
                held["step"] += 1
                held["seen"] += 2**24 + 1  # no float32 has it
                gradient = parameter.grad.float()
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.1)
                held["master"] -= group["lr"] * first / (second.sqrt() + 1e-8)
                parameter.copy_(held["master"])


class Mixed:
    """A run in bfloat16, whose second optimizer is among the extras."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.head = nn.Linear(4, 3).bfloat16(), nn.Linear(3, 2).bfloat16()
        self.head_optimizer = Masters(self.head.parameters())
        self.state = TrainState(
            self.model, Masters(self.model.parameters()), length=64, global_batch_size=8, epochs=9,
            extras={"head": self.head, "head_optimizer": self.head_optimizer},
        )  # fmt: skip

    def step(self, *, is_committed: bool = True) -> None:
        self.state.remember()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.state.step)).bfloat16()
        self.head(self.model(inputs)).square().mean().backward()
        for optimizer in (self.state.optimizer, self.head_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        if is_committed:
            self.state.commit(0.0)

    def numbers(self) -> dict[str, Any]:
        state = self.state.state_dict()
        return copy.deepcopy({name: state[name] for name in ("model", "optimizer", "extras")})


def check_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)  # dtypes, too


class TestOptimizerStateOfAnotherDtype:
    """torch's `Optimizer.load_state_dict` would round it to the parameter's."""

    def test_a_step_taken_back(self) -> None:
        run, other = Mixed(), Mixed()
        for each in (run, other):
            for _ in range(3):
                each.step()
        before = run.numbers()
        run.step(is_committed=False)
        assert run.state.rollback()
        check_same_bits(run.numbers(), before)
        for each in (run, other):
            each.step()
        check_same_bits(run.numbers(), other.numbers())

    @pytest.mark.parametrize("is_peers", [False, True], ids=["restore", "join"])
    def test_taken_over(self, is_peers: bool) -> None:
        run, other = Mixed(), Mixed(seed=1)
        for _ in range(3):
            run.step()
        loaded = deserialize_state(serialize_state(run.state.state_dict()))
        load(other.state, loaded, "the state", is_peers=is_peers)
        check_same_bits(other.numbers(), run.numbers())
        for each in (run, other):
            each.step()
        check_same_bits(other.numbers(), run.numbers())


class Counting(nn.Module):
    """Puts new tensors in its buffers' places, as many do."""

    seen: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("rows", torch.zeros(0, 1))
        self.register_buffer("first", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        if self.first is None:
            self.first = outputs[0]
        self.seen = self.seen + len(inputs)
        self.rows = torch.cat([self.rows, outputs])  # with the graph that made them
        return outputs


class TestRollback:
    def test_statistics_are_those_of_the_last_commit(self) -> None:
        state = make_state()
        for seed in range(2):
            state.remember()
            step(state, seed)
        kept = [buffer.clone() for buffer in state.model.buffers()]
        assert not state.rollback(), "no step is in hand"
        state.remember()
        state.model(torch.randn(8, 4))
        assert state.rollback()
        assert all(torch.equal(*pair) for pair in zip(state.model.buffers(), kept, strict=True))

    def test_buffers_that_forward_passes_replace(self) -> None:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model, optimizer, length=10, global_batch_size=5, epochs=3)
        state.remember()
        model(torch.ones(5, 1))
        assert state.rollback()
        assert (model.seen.item(), len(model.rows), model.first) == (0, 0, None)
        for done in range(1, 4):
            state.remember()
            model(torch.ones(5, 1))
            state.commit(0.0)
            state.remember()
            rows = model.rows.detach().clone()
            model(torch.ones(5, 1))
            assert state.rollback()
            assert model.seen.item() == 5 * done
            assert torch.equal(model.rows, rows)


class Head(nn.Module):
    """Statistics, in place and replaced, outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.counting = nn.BatchNorm1d(2), Counting()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.counting(self.norm(inputs)[:, :1])  # type: ignore[no-any-return]


class TestModulesAmongTheExtras:
    def make(self, *, is_lbfgs: bool = False) -> tuple[TrainState, nn.Module]:
        """A model and a head, with one optimizer for both."""
        torch.manual_seed(0)
        model, head = nn.Linear(4, 2), Head()
        parameters = [*model.parameters(), *head.parameters()]
        optimizer = torch.optim.LBFGS(parameters, lr=0.1) if is_lbfgs else torch.optim.SGD(parameters, lr=0.1)
        return TrainState(model, optimizer, length=64, global_batch_size=8, epochs=9, extras={"head": head}), head

    def forward(self, state: TrainState, head: nn.Module) -> torch.Tensor:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.step))
        return head(state.model(inputs)).square().mean()  # type: ignore[no-any-return]

    def numbers(self, head: nn.Module) -> dict[str, Any]:
        return copy.deepcopy(dict(head.state_dict()))

    def test_their_statistics_are_those_of_the_last_commit(self) -> None:
        state, head = self.make()
        for _ in range(2):
            before = self.numbers(head)
            state.remember()
            self.forward(state, head).backward()
            assert not torch.equal(head.state_dict()["norm.running_mean"], before["norm.running_mean"])
            saved = state.state_dict()["extras"]["head"]
            check_same_bits(dict(saved), before)  # a late stop, in the middle of the step
            assert state.rollback()
            check_same_bits(self.numbers(head), before)
            state.remember()
            self.forward(state, head).backward()
            state.optimizer.step()
            state.commit(0.0)

    def test_where_a_closure_has_all_copied_later_in_the_step(self) -> None:
        state, head = self.make(is_lbfgs=True)
        before = self.numbers(head)
        state.remember()
        self.forward(state, head)  # changes the statistics before the optimizer's step, in which all is copied

        def closure() -> torch.Tensor:
            state.optimizer.zero_grad()
            loss = self.forward(state, head)
            loss.backward()
            return loss

        state.optimizer.step(closure)
        assert state.kept.updates.are_kept
        assert state.rollback()
        assert state.is_whole
        check_same_bits(self.numbers(head), before)


def test_buffers_that_are_made_with_nan_are_known_whatever_becomes_of_others() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module(), nn.LazyBatchNorm1d())
    made = {
        "fill": torch.tensor([1.0, math.nan]),
        "graph": (torch.eye(2) * math.nan).to_sparse_csr(),
        "n": torch.ones(2),
    }
    for name, buffer in made.items():
        model[1].register_buffer(name, buffer)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    extras = {"critic": nn.Sequential(model[1]), "rate": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9, extras=extras)
    model[0].running_mean.fill_(math.nan)  # type: ignore[operator,union-attr]
    assert state.kept.made_with_nan == {"": {"1.fill", "1.graph"}, "critic": {"0.fill", "0.graph"}}


def test_buffers_are_known_that_a_new_start_cannot_load() -> None:
    """But not of layers that load in a way of their own, as lazy ones do."""
    part = nn.Module()
    for name in ("kept", "dropped", "resized", "cache"):
        part.register_buffer(name, torch.ones(2), persistent=name != "cache")
    part.register_buffer("later", None)
    model = nn.Sequential(part, nn.LazyBatchNorm1d())
    shapes = SavedShapes(model)
    assert not shapes.changed()
    model[1](torch.ones(3, 2))
    part.kept, part.dropped, part.resized, part.cache, part.later = torch.zeros(2), None, *[torch.ones(3)] * 3
    assert shapes.changed() == ["0.dropped", "0.later", "0.resized"]


class TestHash:
    def test_as_the_contract_words_it(self) -> None:
        state = {
            "b": torch.tensor([[1.5, -2.0], [0.25, 3.0]]),
            "a.n": torch.tensor(7),
            "é": torch.tensor([True, False]),
        }
        expected = hashlib.sha256(
            b"a.n" + b"torch.int64" + b"()" + struct.pack("<q", 7)
            + b"b" + b"torch.float32" + b"(2, 2)" + struct.pack("<4f", 1.5, -2.0, 0.25, 3.0)
            + "é".encode() + b"torch.bool" + b"(2,)" + b"\x01\x00"
        ).hexdigest()  # fmt: skip
        assert state_sha256(state) == expected
        assert state_sha256(dict(reversed(state.items()))) == expected

    def test_layout_does_not_matter_and_content_does(self) -> None:
        matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        same = matrix.t().contiguous().t()
        assert not same.is_contiguous()
        assert state_sha256({"w": same}) == state_sha256({"w": matrix})
        others = [matrix.reshape(3, 2), matrix.double(), matrix + 1, -matrix * 0]
        assert len({state_sha256({"w": other}) for other in [matrix, *others]}) == 5

    def test_what_is_no_tensor_is_left_out(self) -> None:
        tensors = {"w": torch.ones(2)}
        assert state_sha256(tensors | {"_extra_state": {"scale": 2}}) == state_sha256(tensors)

    @pytest.mark.filterwarnings("ignore:.*quantize")
    def test_quantized_tensors_by_their_integers_and_scales(self) -> None:
        zeros, ones, scale, zero = torch.zeros(2, 1), torch.ones(2, 1), torch.full((2,), 0.5), torch.tensor([0, 0])
        all_different = [
            torch.quantize_per_tensor(ones, 0.5, 0, torch.qint8),
            torch.quantize_per_tensor(ones, 0.5, 1, torch.qint8),
            torch.quantize_per_tensor(zeros, 0.5, 0, torch.qint8),
            torch.quantize_per_channel(ones, scale.double(), zero, 0, torch.qint8),
            torch.quantize_per_channel(2 * ones, 2 * scale.double(), zero, 0, torch.qint8),
        ]
        for hashed in (state_sha256, hash_of):
            assert len({hashed({"w": one}) for one in all_different}) == len(all_different)
            assert hashed({"w": all_different[0]}) == hashed({"w": all_different[0].clone()})

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    def test_sparse_tensors_by_their_entries(self, layout: torch.layout) -> None:
        eye = torch.eye(3)
        hashes = {state_sha256({"w": dense.to_sparse(layout=layout)}) for dense in (eye, eye.clone(), 2 * eye)}
        assert len(hashes) == 2
        assert not hashes & {state_sha256({"w": eye.roll(1, 0).to_sparse(layout=layout)})}

    def test_the_order_in_which_a_sparse_tensor_was_built_does_not_matter(self) -> None:
        places = torch.tensor([[0, 2], [1, 0]])
        one = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (3, 3), check_invariants=True)
        other = torch.sparse_coo_tensor(places.flip(1), torch.tensor([2.0, 1.0]), (3, 3), check_invariants=True)
        assert state_sha256({"w": one}) == state_sha256({"w": other})

    def test_views_that_conjugate_or_negate_by_their_values(self) -> None:
        view = torch.tensor([1 + 2j, 3 - 4j]).conj()
        for lazy in (view, view.imag):
            assert state_sha256({"w": lazy}) == state_sha256({"w": lazy.resolve_conj().resolve_neg().clone()})


def test_what_an_own_optimizer_keeps_in_its_groups_is_restored() -> None:
    """Prodigy's `d`, ScheduleFree's `weight_sum`: no flag says them, and a newcomer must have them."""

    def make(lr: float) -> TrainState:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        plan: dict[str, Any] = {"length": 8, "global_batch_size": 4, "epochs": 2}
        return TrainState(model, optimizer, schedule="constant", has_own_optimizer=True, **plan)

    old, new = make(0.1), make(0.2)
    old.optimizer.param_groups[0]["learned"] = 7.5
    new.load_state_dict(old.state_dict())
    assert new.optimizer.param_groups[0]["learned"] == 7.5
    assert learning_rate(new) == 0.2, "of this process's code"


def test_layers_that_are_frozen_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Dropout())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=4, epochs=2)
    model.eval()
    state.modes.put_back()
    assert [module.training for module in model] == [True, False, True]
    with modes_kept(model):
        model.eval()
    assert [module.training for module in model] == [True, False, True]

    whole = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    TrainState(
        whole, torch.optim.SGD(whole.parameters(), lr=0.1), length=8, global_batch_size=4, epochs=2
    ).modes.put_back()
    assert all(module.training for module in whole.modules()), "as a whole that is no choice of layers"


def test_layers_that_the_function_has_exchanged_begin_as_their_module_does() -> None:
    """By SyncBatchNorm's conversion, say. Else they stay in eval mode where an evaluation was broken off, on some
    ranks alone: a newcomer's are new."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=4, epochs=2)
    model[2] = nn.Sequential(nn.SyncBatchNorm(3))
    model.eval()
    state.modes.put_back()
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


def test_a_frozen_layer_that_the_function_has_exchanged_stays_frozen() -> None:
    """The layer in its place counts. Else a frozen BatchNorm, converted, takes its statistics from the second world on,
    and waits for the ranks of newcomers, where it is still frozen."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).eval(), nn.BatchNorm1d(3))
    model[2].eval()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=4, epochs=2)
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model[1].append(nn.Dropout())
    assert not any(module.training for module in (model[1][0], model[2])), "as torch converts them"
    state.modes.put_back()
    assert [module.training for module in model.modules()] == [True, True, False, False, False, False, False]


def test_modules_among_the_extras_are_put_into_their_modes_too() -> None:
    """A function of the user's was interrupted in an evaluation: a newcomer's modules are not in eval mode."""
    gan, teacher = Gan(), nn.Sequential(nn.Linear(3, 4), nn.Dropout()).eval()
    gan.d[1].eval()
    extras = {"d": gan.d, "teacher": teacher, "scheduler": gan.scheduler}
    state = TrainState(gan.g, gan.state.optimizer, length=8, global_batch_size=4, epochs=2, extras=extras)
    gan.g.eval()
    gan.d.eval()
    teacher.train()
    state.modes.put_back()
    assert all(layer.training for layer in gan.g.modules())
    assert [layer.training for layer in gan.d.modules()] == [True, True, False, True]
    assert not any(layer.training for layer in teacher.modules()), "as it was given"


@pytest.mark.parametrize("has_gradients", [True, False])
def test_gradients_are_computed_again_where_an_evaluation_had_turned_them_off(has_gradients: bool) -> None:
    """By a call, which nothing undoes where a peer is lost before the other one."""
    with torch.set_grad_enabled(has_gradients):
        state = make_state()
        torch.set_grad_enabled(not has_gradients)
        state.modes.put_back()
        assert torch.is_grad_enabled() is has_gradients


def test_what_was_frozen_and_thawed_meanwhile_is_as_it_was_made() -> None:
    """A newcomer's parameters are, and DDP sums those that are trained."""
    gan = Gan()
    frozen = [gan.g[0].weight, gan.d[2].bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    state = TrainState(gan.g, gan.state.optimizer, length=8, global_batch_size=4, epochs=2, extras={"d": gan.d})
    gan.g.requires_grad_(True)
    gan.d.requires_grad_(False)
    state.modes.put_back()
    for parameter in (*gan.g.parameters(), *gan.d.parameters()):
        assert parameter.requires_grad != any(parameter is one for one in frozen)


def test_a_state_is_whole_but_from_the_optimizer_s_step_to_the_commit() -> None:
    state = make_state()
    assert state.is_whole
    state.remember()
    state.model(torch.zeros(2, 4)).sum().backward()
    assert state.is_whole
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(state.optimizer)
    assert not state.is_whole
    state.commit(1.0)
    assert state.is_whole
    state.optimizer.step()
    state.load_state_dict(make_state().state_dict())
    assert state.is_whole


def fail_half_way(optimizer: torch.optim.Optimizer) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("half way")

    with optimizer.register_step_post_hook(fail):
        optimizer.step()


def test_an_overflow_that_the_scaler_skips_leaves_no_trace_in_the_statistics() -> None:
    """The forward pass has put infinities into BatchNorm's running statistics; the step is committed all the same."""
    head = Head()
    state = make_state(extras={"head": head})
    state.scaler = torch.amp.GradScaler("cpu")
    modules = (state.model, head)
    before = copy.deepcopy([dict(module.named_buffers()) for module in modules])

    class Overflowing:
        def run(self, _share: object, _loss: object, scale: Any, votes: object) -> StepTotals:
            scale(state.model(torch.full((4, 4), torch.inf)).sum()).backward()
            head(torch.full((4, 2), torch.inf))
            return StepTotals(float("inf"), (0, 0, 0))

    train_step(state, [], Overflowing(), lambda *_: torch.zeros(()), (0, 0, 0))
    state.commit(float("inf"))
    for module, buffers in zip(modules, before, strict=True):
        check_same_bits(dict(module.named_buffers()), buffers)
    assert all(parameter.isfinite().all() for parameter in state.model.parameters())


def test_a_newcomer_keeps_the_statistics_that_it_is_sent_in_a_step_that_the_scaler_skips() -> None:
    """Its state comes beside its first step, after what it had was kept."""
    state, peer = make_state(), make_state()
    state.scaler = torch.amp.GradScaler("cpu")
    peer.model(torch.full((4, 4), 3.0))

    class Overflowing:
        def run(self, _share: object, _loss: object, scale: Any, votes: object) -> StepTotals:
            scale(state.model(torch.full((4, 4), torch.inf)).sum()).backward()
            state.load_state_dict(peer.state_dict(), is_peers=True)
            return StepTotals(float("inf"), (0, 0, 0))

    train_step(state, [], Overflowing(), lambda *_: torch.zeros(()), (0, 0, 0))
    check_same_bits(dict(state.model.named_buffers()), dict(peer.model.named_buffers()))


@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_loss_that_is_nan_over_finite_gradients_is_no_overflow(scale: float, layout: str) -> None:
    """A scaler goes by the gradients. It would let each step count, with that loss."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=layout == "sparse"), nn.BatchNorm1d(2))
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=scale),
        length=16, global_batch_size=4, epochs=1,
    )  # fmt: skip
    before = [one.detach().clone() for one in model.parameters()]

    class Detached:
        """A term of the loss that trains nothing is NaN."""

        def run(self, _share: object, _loss: object, scale: Any, votes: object) -> StepTotals:
            scale(model(torch.arange(4)).sum()).backward()
            return StepTotals(math.nan, (0, 0, 0))

    with pytest.raises(TrainingDiverged, match=r"^the loss of step 1 \(epoch 1\) is nan; "):
        train_step(state, [], Detached(), lambda *_: torch.zeros(()), (0, 0, 0))
    assert state.is_whole
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("is_used", [True, False], ids=["used before", "in the first step"])
def test_what_a_scaler_found_in_a_step_that_is_taken_back_is_forgotten(is_used: bool) -> None:
    """Of a reduction that was broken off, the ranks may have found different things."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=9)
    state = make_state(extras={"scaler": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)})
    if is_used:
        train_with(state, scaler, gradient=1.0)
    before = scaler.state_dict()
    state.remember()
    train_with(state, scaler, gradient=float("nan"))
    assert scaler.get_scale() == 32.0
    begin_scalers_anew(state)
    assert state.rollback()
    assert scaler.state_dict() == before
    train_with(state, scaler, gradient=1.0)
    assert scaler.state_dict() == before | {"_growth_tracker": before["_growth_tracker"] + 1}


@pytest.mark.parametrize("is_clipped", [True, False], ids=["clipped", "plain"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("place", ["of --precision", "of the loop", "wrapped"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_a_step_that_is_broken_off_within_the_scaler_is_done_again_as_if_it_had_never_been(
    device: str, place: str, is_fused: bool, is_clipped: bool
) -> None:
    """Where NCCL's collectives were aborted, that shows only as the optimizer begins its step."""

    def train(breaks: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        state = TrainState(
            model, torch.optim.SGD(model.parameters(), lr=0.1, fused=is_fused),
            scaler if place == "of --precision" else None,
            schedule="constant", length=16, global_batch_size=4, epochs=1, extras=extras_with(scaler, place),
        )  # fmt: skip

        def step() -> None:
            state.remember()
            model.zero_grad()
            scaler.scale(model(torch.ones(4, 4, device=device)).sum()).backward()
            if is_clipped:
                clip_gradients(state.optimizer, scaler, 1.0)
            scaler.step(state.optimizer)
            scaler.update()
            state.commit(1.0)

        step()
        if breaks:
            state.before_update = break_off
            with pytest.raises(RuntimeError, match="broken off"):
                step()
            assert state.is_whole, "no weight is touched"
            state.before_update = lambda: None
            begin_scalers_anew(state)
            assert state.rollback()
        step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, train(breaks=True), train(breaks=False)))


class ScalerHolder:
    """As timm's NativeScaler, and MAE's, have one."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


def extras_with(scaler: torch.amp.GradScaler, place: str) -> dict[str, Any]:
    return {} if place == "of --precision" else {"scaler": ScalerHolder(scaler) if place == "wrapped" else scaler}


@pytest.mark.parametrize("place", ["of --precision", "of the loop", "wrapped"])
def test_a_scaler_of_two_optimizers_is_broken_off_between_their_steps(place: str) -> None:
    """What was unscaled, and its overflow, is forgotten, and the scale is what it was."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    layers = [nn.Linear(1, 1) for _ in range(2)]
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers)
    state = TrainState(
        layers[0], first, scaler if place == "of --precision" else None, schedule="constant", length=16,
        global_batch_size=4, epochs=1, extras=extras_with(scaler, place) | {"layer": layers[1], "second": second},
    )  # fmt: skip

    def step(layer: nn.Module, optimizer: torch.optim.Optimizer, number: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(layer(torch.tensor([[number]])).sum()).backward()
        scaler.step(optimizer)

    state.remember()
    step(layers[0], first)
    scaler.update(32.0)
    step(layers[0], first, float("nan"))
    begin_scalers_anew(state)
    assert state.rollback()
    assert scaler.get_scale() == 64.0
    parameters = [one for layer in layers for one in layer.parameters()]
    weights = [float(one) for one in parameters]
    state.remember()
    for layer, optimizer in zip(layers, (first, second), strict=True):
        step(layer, optimizer)
    scaler.update()
    state.commit(1.0)
    moved = [before - float(one) for before, one in zip(weights, parameters, strict=True)]
    assert moved == [pytest.approx(0.1)] * 4


def break_off() -> None:
    raise RuntimeError("broken off")


def test_a_model_that_cannot_be_copied_is_told_in_one_line() -> None:
    """As with the older weight norm, whose weight is computed."""
    model = nn.Linear(4, 2)
    model.weight_of_norm = model.weight * 2
    with pytest.raises(UsageError, match="copy of the model: Only Tensors created explicitly by the user"):
        AveragedWeights(model, 0.9)


def test_a_buffer_that_was_expanded_can_be_put_back_and_averaged() -> None:
    """Of several numbers in one place torch writes none."""
    model = nn.Linear(4, 2)
    mask = torch.tensor([[True, False]])
    model.register_buffer("mask", mask.expand(3, 2), persistent=False)
    average = AveragedWeights(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, length=8, global_batch_size=4, epochs=1, extras={"ema": average})
    for module in (model, average.model):
        module.mask.copy_(module.mask.clone())
        assert torch.equal(module.mask, mask.expand(3, 2))
    leave_no_trace(model)()
    average.update(model)
    state.remember()
    assert state.rollback()


def test_an_average_that_a_run_gets_later_begins_with_the_weights_it_has() -> None:
    """Not with those that a process begins with, which were never trained."""
    old = make_state(seed=1)
    step(old, 0)
    later = make_state(seed=2)
    later.extras["ema"] = average = AveragedWeights(later.model, 0.999)
    later.load_state_dict(old.state_dict())
    assert state_sha256(average.state_dict()) == state_sha256(old.model.state_dict())
    step(later, 1)
    again = make_state(seed=3)
    again.extras["ema"] = AveragedWeights(again.model, 0.999)
    again.load_state_dict(later.state_dict())
    assert state_sha256(again.extras["ema"].state_dict()) == state_sha256(average.state_dict())


class Caching(nn.Module):
    """Its forward passes put buffers of another size in the place of others, fill in one, make one and drop one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("table", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("early", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(inputs):
            self.table = torch.arange(len(inputs)).float()
        if self.late is None:
            self.late = inputs[:1].clone()
            self.register_buffer("made", torch.ones(3), persistent=False)
        self.late += 1.0
        self.early = None
        return self.layer(inputs)  # type: ignore[no-any-return]


def test_an_average_has_the_buffers_of_its_model_whatever_becomes_of_them() -> None:
    model = Caching()
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), length=64, global_batch_size=8, epochs=1,
        extras={"ema": AveragedWeights(model, 0.75)},
    )  # fmt: skip
    average = state.averaged
    assert average is not None
    for number, samples in enumerate((2, 5, 5), start=1):
        state.remember()
        state.optimizer.zero_grad()
        model(torch.ones(samples, 4)).sum().backward()
        state.optimizer.step()
        state.commit(1.0)
        assert (state.step, state.is_whole) == (number, True)
        theirs, ours = dict(model.named_buffers()), dict(average.model.named_buffers())
        assert sorted(theirs) == sorted(ours) == ["late", "made", "table"]
        for name, buffer in theirs.items():
            assert torch.equal(ours[name], buffer)
            assert (ours[name].dtype, ours[name] is buffer) == (buffer.dtype, False)
        assert sorted(average.state_dict()) == sorted(model.state_dict()) == ["late", "layer.bias", "layer.weight"]
        average.model(torch.ones(9, 4))  # as an evaluation of it may change them


def test_a_step_whose_average_cannot_be_made_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    state.extras["ema"] = average = AveragedWeights(state.model, 0.75)
    step(state, 0)
    monkeypatch.setattr(average, "update", lambda _model: break_off())
    with pytest.raises(RuntimeError, match="broken off"):
        step(state, 1)
    assert (state.step, state.samples_done, state.last_loss) == (1, BATCH, 1.0)
    assert not state.is_whole


def train_with(state: TrainState, scaler: torch.amp.GradScaler, gradient: float) -> None:
    """A step of the user's own."""
    scaler.scale(torch.ones(()))
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    scaler.step(state.optimizer)
    scaler.update()


class Gan:
    """Two modules with an optimizer each, one of them with a scheduler; all but the first are extras."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.d = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.d_optimizer = torch.optim.Adam(self.d.parameters(), lr=0.01, betas=(0.5, 0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(self.d_optimizer, 1, gamma=0.5)
        extras = {"d": self.d, "d_optimizer": self.d_optimizer, "scheduler": scheduler}
        self.state = TrainState(
            self.g, torch.optim.SGD(self.g.parameters(), lr=0.1, momentum=0.9), length=64, global_batch_size=4,
            epochs=9, extras=extras,
        )  # fmt: skip
        self.scheduler = scheduler

    def step(self, *, breaks_in: str = "") -> None:
        self.state.remember()
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.state.step))
        for name, optimizer in (("d", self.d_optimizer), ("g", self.state.optimizer)):
            self.d_optimizer.zero_grad()
            self.state.optimizer.zero_grad()
            score = self.d(self.g(noise)).square().mean()
            (score if name == "d" else -score).backward()
            if name == breaks_in:
                raise RuntimeError("a peer was lost")
            optimizer.step()
            if name == "d":
                self.scheduler.step()
        if breaks_in == "commit":
            raise RuntimeError("a peer was lost")
        self.state.commit(0.0)


@pytest.mark.parametrize("first", [0, 2], ids=["the first step", "a later one"])
@pytest.mark.parametrize("breaks_in", ["d", "g", "commit"])
def test_a_step_of_two_optimizers_is_taken_back_as_a_whole(breaks_in: str, first: int) -> None:
    """A peer is lost before the first of them has stepped, between the two, and after both."""
    ends = []
    for breaks in (False, True):
        gan = Gan()
        for _ in range(first):
            gan.step()
        for _ in range(2 * breaks):
            with pytest.raises(RuntimeError):
                gan.step(breaks_in=breaks_in)
            assert gan.state.is_whole == (breaks_in == "d")
            assert gan.state.rollback()
            assert gan.state.is_whole
        for _ in range(3):
            gan.step()
        assert gan.scheduler.last_epoch == first + 3
        ends.append(gan.state.state_dict())
    for name in ("model", "optimizer", "extras"):
        torch.testing.assert_close(ends[1][name], ends[0][name], rtol=0, atol=0)


def test_the_step_of_another_optimizer_waits_for_nothing_broken_and_locks_the_state() -> None:
    gan = Gan()
    gan.state.remember()
    gan.state.lock.let_go()
    gan.state.before_update = break_off
    gan.d(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="broken off"):
        gan.d_optimizer.step()
    assert gan.state.is_whole
    gan.state.before_update = lambda: None
    gan.d_optimizer.step()
    assert not gan.state.is_whole


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_closure_that_breaks_off_leaves_the_weights_of_the_last_commit(is_keyword: bool) -> None:
    """LBFGS moves the weights between the calls of its closure, each of which has a reduction of its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    state = TrainState(model, optimizer, length=64, global_batch_size=4, epochs=9)
    inputs = torch.randn(16, 4)
    calls: list[str] = []

    def closure() -> torch.Tensor:
        calls.append("closure")
        if calls.count("closure") == fails_at:
            raise RuntimeError("a peer was lost")
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :2].exp()).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        state.remember()
        optimizer.step(closure=closure) if is_keyword else optimizer.step(closure)

    state.before_update = lambda: calls.append("check")
    fails_at = 0
    step()
    state.commit(0.0)
    assert calls[:5] == ["check", "closure", "check", "closure", "check"]
    kept, fails_at = [one.detach().clone() for one in model.parameters()], calls.count("closure") + 2
    held = optimizer.state_dict()["state"][0]["n_iter"]
    with pytest.raises(RuntimeError, match="a peer was lost"):
        step()
    assert not all(map(torch.equal, model.parameters(), kept)), "it has moved them"
    assert state.rollback()
    assert state.is_whole
    assert all(map(torch.equal, model.parameters(), kept))
    assert optimizer.state_dict()["state"][0]["n_iter"] == held


def test_what_is_done_between_two_steps_stays_when_the_next_one_is_taken_back() -> None:
    """A loop that commits before the optimizer's step, or warms up."""
    state = make_state()
    state.remember()
    state.model(torch.randn(8, 4)).sum().backward()
    state.commit(0.0)
    state.optimizer.step()
    weights = [one.detach().clone() for one in state.model.parameters()]
    state.remember()
    assert state.rollback()
    assert state.is_whole
    assert all(map(torch.equal, state.model.parameters(), weights))


def test_an_optimizer_that_steps_several_times_is_taken_back_from_the_second_step_on() -> None:
    """As in PPO, whose epochs are over one batch."""
    state = make_state()
    for number in range(3):
        state.remember()
        assert state.kept.updates.are_kept == (number > 0)
        weights = [one.detach().clone() for one in state.model.parameters()]
        for _ in range(3):
            state.model(torch.randn(8, 4)).sum().backward()
            state.optimizer.step()
        if number == 2:
            assert state.rollback()
            assert state.is_whole
            assert all(map(torch.equal, state.model.parameters(), weights))
        else:
            state.commit(0.0)


def test_a_group_that_was_added_in_the_step_cannot_be_taken_back() -> None:
    gan = Gan()
    gan.step()
    gan.state.remember()
    gan.d_optimizer.step()
    gan.d_optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert gan.state.rollback()
    assert not gan.state.is_whole


@pytest.mark.parametrize("name", ["g", "d"])
def test_a_group_that_the_start_did_not_have_is_refused_before_its_first_step(name: str) -> None:
    """No newcomer and no restart could load a state that has it."""
    gan = Gan()
    gan.step()
    optimizer = gan.state.optimizer if name == "g" else gan.d_optimizer
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    weights = [one.detach().clone() for one in (*gan.g.parameters(), *gan.d.parameters())]
    with pytest.raises(UsageError, match=r"of (SGD|Adam) have \[\d, 1\] parameters, and began with \[\d\]"):
        gan.step()
    assert gan.state.is_whole
    assert all(map(torch.equal, (*gan.g.parameters(), *gan.d.parameters()), weights))


def test_a_group_that_a_loop_has_made_larger_is_refused_as_a_new_one_is() -> None:
    state = make_state()
    state.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
    state.remember()
    with pytest.raises(UsageError, match=r"groups of .* have \[\d+\] parameters, and began with \[\d+\]"):
        state.optimizer.step()
    assert state.is_whole


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is commonly written: its base has a state of its own."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["old_p"] = one.clone()
            one += 0.05 * one.grad

    @torch.no_grad()
    def second_step(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.copy_(self.state[one]["old_p"])
        self.base_optimizer.step()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups


class Forgetful(Sam):
    """Leaves its base with other groups than its own."""

    def load_state_dict(self, state: Any) -> None:
        torch.optim.Optimizer.load_state_dict(self, state)


class Careful(Sam):
    """Saves its base itself."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.base_optimizer.load_state_dict(state["base"])
        self.param_groups = self.base_optimizer.param_groups


def make_sam(kind: type[Sam], dtype: torch.dtype = torch.float32) -> tuple[TrainState, Sam]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    return TrainState(model, optimizer, length=64, global_batch_size=4, epochs=9), optimizer


def step_sam(state: TrainState, optimizer: Sam) -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(state.step)).to(state.model.weight.dtype)  # type: ignore[arg-type]
    for part in (optimizer.first_step, optimizer.second_step):
        optimizer.zero_grad()
        state.model(inputs).square().mean().backward()
        part()
    state.commit(0.0)


def momentum_of(optimizer: Sam) -> list[torch.Tensor]:
    held = optimizer.base_optimizer.state
    return [held[one]["momentum_buffer"].clone() for one in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("is_taken_back", [False, True], ids=["saved and loaded", "taken back"])
@pytest.mark.parametrize("kind", [Sam, Forgetful, Careful])
def test_what_an_optimizer_is_made_of_belongs_to_its_state(kind: type[Sam], is_taken_back: bool) -> None:
    state, optimizer = make_sam(kind)
    for _ in range(2):
        step_sam(state, optimizer)
    momentum, hashed = momentum_of(optimizer), hash_of(dict(tensors_of(state)))
    there, other = (state, optimizer) if is_taken_back else make_sam(kind)
    if is_taken_back:
        state.kept.updates.is_needed = True  # as the trainer's hook has it
        state.remember()
        step_sam(state, optimizer)
        assert hash_of(dict(tensors_of(state))) != hashed
        state.is_step_open = True
        assert state.rollback()
    else:
        load(there, deserialize_state(serialize_state(state.state_dict()), source="it"), "it")
    torch.testing.assert_close(momentum_of(other), momentum, rtol=0, atol=0)
    assert hash_of(dict(tensors_of(there))) == hashed
    other.param_groups[0]["lr"] = 0.5
    assert other.base_optimizer.param_groups[0]["lr"] == 0.5, "what a scheduler sets reaches it"


class Hybrid(torch.optim.Optimizer):
    """Several, each for some of the parameters, whose groups are its own, as of Muon and Adam."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        settings = {"lr": 0.1, "momentum": 0.9}
        self.parts = [torch.optim.SGD([one], **settings) for one in model.parameters()]  # type: ignore[arg-type]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Led(torch.optim.Optimizer):
    """One whose part has groups of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Run:
    """One whose scheduler changes what the outer optimizer, or its part, is set to."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer: Any
        if kind in ("hybrid", "led"):
            self.optimizer = {"hybrid": Hybrid, "led": Led}[kind](self.model)
            self.parts = self.optimizer.parts if kind == "hybrid" else [self.optimizer.inner]
        else:
            self.optimizer = Sam(self.model.parameters(), lr=0.1, momentum=0.9)
            self.parts = [self.optimizer.base_optimizer]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.parts[0] if kind == "led" else self.optimizer, 1, 0.5)
        self.extras: dict[str, Any] = {"scheduler": self.scheduler}
        whole = self.optimizer
        if kind == "base among the extras":
            self.extras["base"] = self.parts[0]
        elif kind == "whole among the extras":
            self.extras["whole"], whole = self.optimizer, self.parts[0]
        self.state = TrainState(
            self.model, whole, length=64, global_batch_size=4, epochs=9, extras=self.extras
        )  # fmt: skip
        self.state.kept.updates.is_needed = True  # as the trainer's hook has it

    def step(self, *, is_committed: bool = True) -> None:
        self.state.remember()
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.state.step))
        for name in ("first_step", "second_step") if isinstance(self.optimizer, Sam) else ("step",):
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            getattr(self.optimizer, name)()
        self.scheduler.step()
        if is_committed:
            self.state.commit(0.0)

    def rates(self) -> list[list[float]]:
        """By parameter, of the whole one and of its parts."""
        found = []
        for optimizers in ([self.optimizer], self.parts):
            groups = [group for one in optimizers for group in one.param_groups]
            found.append([group["lr"] for group in groups for _ in group["params"]])
        return found


KINDS = ["hybrid", "led", "sam", "base among the extras", "whole among the extras"]


@pytest.mark.parametrize("is_taken_back", [False, True], ids=["saved and loaded", "taken back"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_scheduler_sets_reaches_the_parts_after_a_load_too(kind: str, is_taken_back: bool) -> None:
    run, straight = Run(kind), Run(kind)
    for each in (run, straight):
        for _ in range(2):
            each.step()
    if is_taken_back:
        run.step(is_committed=False)
        assert run.state.rollback()
        other = run
    else:
        other = Run(kind)
        load(other.state, deserialize_state(serialize_state(run.state.state_dict()), source="it"), "it")
    assert other.rates() == straight.rates()
    assert plain_hashes(other.state) == plain_hashes(straight.state)
    for each in (other, straight):
        each.step()
    assert other.rates() == straight.rates()
    assert other.rates() == [[1.0 if kind == "led" else 0.0125] * 2, [0.0125] * 2]
    check_same_bits(dict(tensors_of(other.state)), dict(tensors_of(straight.state)))


def test_the_settings_of_a_part_count_and_the_kernel_that_computes_its_step_does_not() -> None:
    run = Run("led")
    run.step()
    found = [(plain_hashes(run.state), hash_of(dict(tensors_of(run.state))))]
    for name, value in (("foreach", True), ("lr", 0.3)):
        run.parts[0].param_groups[0][name] = value
        found.append((plain_hashes(run.state), hash_of(dict(tensors_of(run.state)))))
    assert found[0] == found[1]
    assert found[1][0] != found[2][0]


def test_what_an_optimizer_saves_itself_is_saved_once() -> None:
    for kind, names in ((Sam, {"base_optimizer.0"}), (Careful, set())):
        state, optimizer = make_sam(kind)
        step_sam(state, optimizer)
        assert state.state_dict()["optimizer"]["made_of"].keys() == names


@pytest.mark.parametrize("kind", ["base among the extras", "whole among the extras"])
def test_what_is_an_extra_too_is_saved_once(kind: str) -> None:
    saved = Run(kind).state.state_dict()
    for one in (saved["optimizer"], *saved["extras"].values()):
        assert not one.get("made_of")


def test_the_bits_of_a_part_s_state_are_kept_and_a_state_without_it_loads() -> None:
    state, optimizer = make_sam(Sam, torch.bfloat16)
    step_sam(state, optimizer)
    held = optimizer.base_optimizer.state[state.model.weight]  # type: ignore[index]
    held["momentum_buffer"] = held["momentum_buffer"].float() + 1e-6
    saved = state.state_dict()
    there, other = make_sam(Sam, torch.bfloat16)
    there.load_state_dict(saved)
    torch.testing.assert_close(momentum_of(other), momentum_of(optimizer), rtol=0, atol=0)
    there.load_state_dict({**saved, "optimizer": {key: saved["optimizer"][key] for key in ("state", "param_groups")}})
    assert not other.base_optimizer.state, "of an earlier version: it begins anew"
    step_sam(there, other)


def test_an_optimizer_that_is_made_of_several_and_knows_whose_part_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    whole: Any = torch.optim.SGD(model.parameters())
    whole.parts = [torch.optim.Adam(layer.parameters()) for layer in model]
    whole.parts[0].whole = whole
    whole.parts[1].inner = torch.optim.SGD(model[1].parameters())
    whole.of_others = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert parts_of(whole) == {
        "parts.0": whole.parts[0], "parts.1": whole.parts[1], "parts.1.inner.0": whole.parts[1].inner,
    }  # fmt: skip


class Scaled(torch.optim.Optimizer):
    """One whose step has arguments of its own, a closure not as the first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.seen: list[Any] = []

    def step(self, scale: Any = None, *, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen.append(scale)
        return closure() if closure is not None else None


class Lookahead(torch.optim.Optimizer):
    """As it is widely copied: without torch's constructor, and with the groups of its inner optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state: Any = optimizer.state
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        return self.optimizer.step(closure)


class Delegating(Lookahead):
    """As accelerate's: it unpickles in its own way, and has no defaults of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        del self.defaults

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("kind", [Lookahead, Delegating])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_an_optimizer_that_has_not_called_torchs_constructor(kind: type[Lookahead], is_scheduled: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer, other = (kind(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    groups = copy.deepcopy(optimizer.param_groups)
    if is_scheduled:  # a scheduler keeps the step that it finds
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainState(model, optimizer, length=64, global_batch_size=4, epochs=9)
    seen: list[int] = []
    state.before_update = lambda: seen.append(optimizer.num_steps)
    state.remember()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert (seen, optimizer.num_steps, state.is_whole) == ([0], 1, False)
    assert not torch.equal(model.weight, before)
    state.commit(0.0)
    for _ in range(2):
        other.step()  # of the same class, and none of the state's
    assert (seen, other.num_steps, state.is_whole) == ([0], 2, True)
    state.kept.updates.leave_to_owner()
    if is_scheduled:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()
    else:
        assert [one.keys() for one in optimizer.param_groups] == [one.keys() for one in groups]
    optimizer.step()
    assert (seen, optimizer.num_steps, state.is_whole) == ([0], 2, True)


def test_what_is_no_closure_is_left_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = Scaled(model.parameters())
    state = TrainState(model, optimizer, length=64, global_batch_size=4, epochs=9)
    checks: list[str] = []
    state.before_update = lambda: checks.append("check")
    state.remember()
    optimizer.step(torch.ones(()))
    assert not state.kept.updates.are_kept
    assert optimizer.step(2.0, closure=lambda: "loss") == "loss"
    assert [float(one) for one in optimizer.seen] == [1.0, 2.0]
    assert checks == ["check"] * 3


def test_who_takes_a_state_over_keeps_what_its_steps_need() -> None:
    """Else a newcomer's first step, of several optimizer's steps, would be the one that counts."""
    state = make_state()
    state.remember()
    for _ in range(2):
        state.model(torch.randn(8, 4)).sum().backward()
        state.optimizer.step()
    state.commit(0.0)
    for is_needed, there in ((False, make_state()), (True, state)):
        newcomer = make_state()
        newcomer.load_state_dict(there.state_dict())
        newcomer.remember()
        assert newcomer.kept.updates.are_kept is is_needed


class CountsLate(nn.Module):
    """Registers a buffer in its first forward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        self.seen += 1
        return inputs


def test_a_buffer_that_comes_with_the_first_forward_pass_is_put_back_from_then_on() -> None:
    layer = CountsLate()
    kept = KeptBuffers(layer)
    for _ in range(2):
        kept.keep()
        layer(torch.ones(1))
    kept.put_back()
    assert layer.seen.tolist() == [1.0]


def test_a_buffer_that_gets_its_shape_in_the_first_forward_pass_is_put_back_from_then_on() -> None:
    layer = nn.LazyBatchNorm1d()
    kept = KeptBuffers(layer)
    for _ in range(2):
        kept.keep()
        layer(torch.ones(2, 3))
    kept.put_back()
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, torch.full((3,), 0.1))
