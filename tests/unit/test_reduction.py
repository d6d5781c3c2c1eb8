"""The fast reduction: what it leaves in `.grad` and tells all ranks, in one process and in three.

Three, because a mean over three is not exact in binary. The processes run every case once, when the first test asks.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_train.elastic.own_parallel import OwnParallel, require_summed
from elastic_train.elastic.session_steps import SessionSteps, StepInHand
from elastic_train.errors import FormationFailed, StatesDiffer, UsageError
from elastic_train.tools.bench.reduction_speed import local_world
from elastic_train.training.kept import leave_no_trace
from elastic_train.training.reduction import (
    FastReduction,
    Share,
    StepTotals,
    buffers_of_rank_0,
    share_buffers,
    zero_gradients,
)
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import StateComparison
from elastic_train.training.step import clip_gradients
from tests.ranks import on_each_rank

CPU = torch.device("cpu")
WORLD_SIZE = 3
NUM_STEPS = 3
VOTES = [(1, 0), (1, 1), (1, 0)]
"""of each rank"""


@dataclass(frozen=True)
class Case:
    """Steps of a few samples: how many each micro-batch of each rank has."""

    sizes: list[list[int]]
    scale: float | None = None
    """of a GradScaler, if there is one"""
    spoiled: int | None = None
    """a sample of every step that is NaN"""
    max_norm: float | None = None
    """of the gradient, if it is clipped"""
    option: str | None = None
    """a switch of DDP that is on"""
    trained: tuple[str, ...] = ("03",) * NUM_STEPS
    """the layers that are, in each step"""

    @property
    def step_samples(self) -> int:
        return sum(map(sum, self.sizes))


ALONE = {
    "one pass": Case([[7]]),
    "accumulation": Case([[3, 1, 4]]),
    "scaler": Case([[3, 4]], scale=1024.0),
    "clipped": Case([[3, 4]], max_norm=0.1),
}
TOGETHER = {
    "even": Case([[2], [2], [2]]),
    "uneven": Case([[5], [1], [3]]),
    "no samples": Case([[3], [0], [4]]),
    "accumulation": Case([[2, 1, 2], [3], [1, 1]]),
    "scaler": Case([[2, 1], [3], [1]], scale=1024.0),
    "clipped": Case([[2, 1], [3], [1]], max_norm=0.1),
    "clipped after unscaling": Case([[2], [3], [1]], scale=1024.0, max_norm=0.1),
    "find_unused_parameters": Case([[2, 1], [3], [0]], option="find_unused_parameters"),
    "static_graph": Case([[2], [3], [1]], option="static_graph"),
    "thawed": Case([[2, 1], [3], [0]], trained=("3", "3", "03")),
    "frozen and thawed": Case([[2, 1], [3], [1]], trained=("03", "0", "3")),
    "thawed with an option": Case([[2], [3], [1]], option="find_unused_parameters", trained=("3", "03", "3")),
}
EMPTY = MicroBatch(epoch=0, step=0, shard=0, indices=np.arange(0), step_samples=1, is_last=True)
SPOILED = Case([[2], [2], [2]], spoiled=3)


@dataclass
class Outcome:
    """What one rank has after the steps of a case."""

    losses: list[float] = field(default_factory=list)
    votes: list[tuple[int, ...]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """by step and parameter"""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    sees_the_model: bool = True
    """whether a loss that looks behind DDP finds the model itself"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8, affine=False).eval(), nn.Linear(8, 4))


def set_trained(model: nn.Module, layers: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name[0] in layers)


def make_samples(case: Case, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(case.step_samples, 6, generator=generator)
    if case.spoiled is not None:
        inputs[case.spoiled] = math.nan
    return inputs, torch.randint(0, 4, (case.step_samples,), generator=generator)


def make_share(case: Case, step: int, rank: int) -> Share:
    inputs, labels = make_samples(case, step)
    start = sum(map(sum, case.sizes[:rank]))
    share: list[tuple[MicroBatch, Any]] = []
    for number, size in enumerate(case.sizes[rank]):
        micro_batch = MicroBatch(
            epoch=0,
            step=step,
            shard=start,
            indices=np.arange(start, start + size),
            step_samples=case.step_samples,
            is_last=number == len(case.sizes[rank]) - 1,
        )
        share.append((micro_batch, (inputs[start : start + size], labels[start : start + size]) if size else None))
        start += size
    return share


def mean_loss(module: nn.Module, _micro_batch: MicroBatch, batch: Any) -> Tensor:
    if batch is None:  # as a variance over the batch, which one sample has not
        return module(torch.ones(1, 6)).mean() * math.nan
    inputs, labels = batch
    return F.cross_entropy(module(inputs), labels)


def run_case(case: Case, rank: int) -> Outcome:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale, enabled=True) if case.scale else None
    options = {case.option: True} if case.option else {}
    set_trained(model, case.trained[0])
    reduction = FastReduction(model, local_world(rank, len(case.sizes)), CPU, num_votes=2, **options)
    outcome = Outcome()

    def loss(module: nn.Module, micro_batch: MicroBatch, batch: Any) -> Tensor:
        outcome.sees_the_model &= getattr(module, "module", module) is model
        return mean_loss(module, micro_batch, batch)

    for step in range(NUM_STEPS):
        set_trained(model, case.trained[step])
        optimizer.zero_grad(set_to_none=True)
        scale = scaler.scale if scaler else lambda value: value
        totals = reduction.run(make_share(case, step, rank), loss, scale, VOTES[rank])
        outcome.losses.append(totals.loss)
        outcome.votes.append(totals.votes)
        if case.max_norm is not None:
            clip_gradients(optimizer, scaler, case.max_norm)
        elif scaler:
            scaler.unscale_(optimizer)
        outcome.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return outcome


OWN_STEPS = [("3", True), ("03", False), ("03", True), ("0", False), ("0", True), ("", False), ("0", False)]
"""of a loop of one's own: the layers that are trained, and whether DDP is made for it"""


def run_own_steps(rank: int) -> list[tuple[str, dict[str, Tensor]]]:
    """What each is refused with, and the gradients that it leaves."""
    anything: Any = SimpleNamespace
    [(share, _)] = make_share(TOGETHER["even"], 0, rank)
    step = StepInHand(share, len(share.indices))
    nothing = anything(do=lambda *_: None, settle=lambda: None)
    steps = anything(in_hand=step, required=lambda: step, turn_to_function=lambda: None)
    parallel = OwnParallel(
        local_world(rank, WORLD_SIZE), CPU, nothing, steps, nothing, lambda: None, lambda: None
    )  # fmt: skip
    model, found = make_model(), []
    inputs, _ = make_samples(TOGETHER["even"], 0)
    for number, (layers, is_made) in enumerate(OWN_STEPS):
        set_trained(model, layers)
        if is_made:
            ddp = parallel.wrap(model)
        model.zero_grad()
        output = ddp(inputs[2 * rank : 2 * rank + 2].requires_grad_())
        output.square().mean().backward()
        try:
            require_summed(parallel.made, number)
            line = "nothing"
        except UsageError as error:
            line = str(error)
        found.append((line, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    assert len(model._forward_pre_hooks) == 1
    assert len(parallel.made) == 2, "one that is gone is forgotten when the next is made"
    return found


class PartlyUsed(nn.Module):
    """Of two layers it uses one. Each has more than DDP's first bucket takes."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 50_000), nn.Linear(6, 50_000)])
        self.used = used

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers[self.used](inputs)
        return output


def run_partly_used(rank: int, used: int) -> str:
    """What the first step of such a model is refused with."""
    reduction = FastReduction(PartlyUsed(used), local_world(rank, WORLD_SIZE), CPU, num_votes=2)
    share = make_share(TOGETHER["even"], 1, rank)
    try:
        reduction.run(share, lambda module, _, batch: module(batch[0]).mean(), lambda loss: loss, VOTES[rank])
    except UsageError as error:
        return str(error)
    return "nothing"


def run_beside_ddp(rank: int) -> str:
    reduction = FastReduction(make_model(), local_world(rank, WORLD_SIZE), CPU, num_votes=2)
    share = make_share(TOGETHER["even"], 1, rank)
    try:
        reduction.run(share, lambda module, *_: module.module(share[0][1][0]).mean(), lambda loss: loss, VOTES[rank])
    except UsageError as error:
        return str(error)
    return "nothing"


class Counting(nn.Module):
    """Has a buffer that no other layer than its own knows the meaning of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class OddTypes(nn.Module):
    """Has buffers of types that gloo does not know, and some without a number or a dimension."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool):
            self.register_buffer(str(dtype)[6:], torch.full((2, 3), rank).to(dtype).t())
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int16))
        self.register_buffer("count", torch.tensor(rank, dtype=torch.int16))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output


def run_odd_types(rank: int) -> list[dict[str, Tensor]]:
    """The buffers after a step, after an evaluation's exchange, and after one that does not count."""
    world, model = local_world(rank, WORLD_SIZE), OddTypes(rank)
    reduction = FastReduction(model, world, CPU, num_votes=2)
    share = make_share(TOGETHER["even"], 1, rank)
    reduction.run(share, lambda module, _, batch: module(batch[0]).mean(), lambda loss: loss, VOTES[rank])
    evaluated, broken_off = OddTypes(rank), OddTypes(rank)
    share_buffers(evaluated)

    def check() -> None:
        raise FormationFailed("broken off")

    with pytest.raises(FormationFailed):
        share_buffers(broken_off, check)
    return [dict(one.named_buffers()) for one in (model, evaluated, broken_off)]


def run_with_statistics(rank: int, *others: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """BatchNorm's running mean in each step: as the forward pass finds it, and as the step leaves it."""
    layer = nn.BatchNorm1d(6)
    found: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, _inputs: found.append(module.running_mean.clone()))  # type: ignore[operator,union-attr]
    reduction = FastReduction(nn.Sequential(layer, *others), local_world(rank, WORLD_SIZE), CPU, num_votes=2)
    seen = []
    for step in range(NUM_STEPS):
        share = make_share(TOGETHER["even"], step, rank)
        reduction.run(share, lambda module, _, batch: module(batch[0]).square().mean(), lambda loss: loss, VOTES[rank])
        assert layer.running_mean is not None
        seen.append((found[-1], layer.running_mean.clone()))
    return seen


def run_plainly(case: Case) -> Outcome:
    """All samples of a step in one pass, by torch alone."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outcome = Outcome()
    for step in range(NUM_STEPS):
        inputs, labels = make_samples(case, step)
        set_trained(model, case.trained[step])
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if case.max_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), case.max_norm) > case.max_norm
        outcome.losses.append(float(loss.detach()))
        outcome.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return outcome


def check_training(outcome: Outcome, case: Case) -> None:
    expected = run_plainly(case)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    for found, wanted in zip(outcome.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-7)
    assert outcome.sees_the_model


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    outcome = run_case(ALONE[name], 0)
    check_training(outcome, ALONE[name])
    assert outcome.votes == [VOTES[0]] * NUM_STEPS


def test_alone_a_nan_is_seen() -> None:
    assert math.isnan(run_case(Case([[2, 3]], spoiled=1), 0).losses[0])


@pytest.mark.parametrize("votes", [(0, 0), (300, 1)])
def test_loss_and_votes_have_the_digits_of_float32_whatever_the_default(votes: tuple[int, int]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        reduction = FastReduction(nn.Linear(1, 1), local_world(0, 1), CPU, num_votes=2)
        share = [(MicroBatch(0, 1, 0, np.arange(3), 3, is_last=True), torch.ones(3, 1))]
        totals = reduction.run(share, lambda one, *_: one.weight.float().sum() * 0 + 1 / 3, lambda loss: loss, votes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert totals == StepTotals(float(torch.tensor(1 / 3)), votes)


COMPARED = [(None, 2), (1, WORLD_SIZE), (1, 1), (0, WORLD_SIZE)]
"""which rank's weights have one bit turned over, if any, and how many ranks have brought the state"""


def compare_states(rank: int, turned: int | None, num_voters: int) -> tuple[tuple[int, ...], bool] | None:
    """Compare the states; return the wrong ranks, and whether a majority decides."""
    torch.manual_seed(4)
    model = make_model()
    if rank == turned:
        with torch.no_grad():
            model[0].weight.view(torch.int32).view(-1)[3] ^= 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, length=8, global_batch_size=8, epochs=9)
    comparison = StateComparison(state, CPU, range(num_voters), with_buffers=True, is_able=True)
    comparison.begin()
    comparison.finish_hash(lambda: None)
    try:
        comparison.compare()
    except StatesDiffer as differ:
        return differ.wrong, differ.has_majority
    return None


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes have left, by rank."""
    out = tmp_path_factory.mktemp("reduction")
    on_each_rank(work, out, size=WORLD_SIZE)
    return out


@pytest.fixture(scope="module")
def together(worked: Path) -> list[dict[str, Outcome]]:
    """The outcomes of all cases, by rank."""
    return [torch.load(worked / str(rank), weights_only=False) for rank in range(WORLD_SIZE)]


def work(rank: int, out: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.save(run_with_statistics(rank), out / f"statistics-{rank}")
        torch.save(run_with_statistics(rank, Counting()), out / f"buffers-{rank}")
        outcomes = {name: run_case(case, rank) for name, case in (TOGETHER | {"spoiled": SPOILED}).items()}
        torch.save(outcomes, out / str(rank))
        torch.save(run_odd_types(rank), out / f"odd-types-{rank}")
        refused = [run_partly_used(rank, used) for used in (0, 1)]
        torch.save([*refused, run_beside_ddp(rank)], out / f"refused-{rank}")
        torch.save(run_own_steps(rank), out / f"own-{rank}")
        torch.save([compare_states(rank, bit, voters) for bit, voters in COMPARED], out / f"compared-{rank}")
    torch.save([str(warning.message) for warning in warned], out / f"warnings-{rank}")


@pytest.mark.parametrize("name", TOGETHER)
def test_together(name: str, together: list[dict[str, Outcome]]) -> None:
    first = together[0][name]
    for outcomes in together:
        check_training(outcomes[name], TOGETHER[name])
        assert outcomes[name].votes == [(3, 1)] * NUM_STEPS
        assert outcomes[name].losses == first.losses
        torch.testing.assert_close(outcomes[name].gradients, first.gradients, rtol=0, atol=0)


def test_every_rank_sees_the_nan_of_one_and_all_votes(together: list[dict[str, Outcome]]) -> None:
    for outcomes in together:
        assert all(map(math.isnan, outcomes["spoiled"].losses))
        assert outcomes["spoiled"].votes == [(3, 1)] * NUM_STEPS


def test_a_stand_in_that_is_nan_gives_zeros_and_leaves_no_hook() -> None:
    model = make_model()
    assert mean_loss(model, EMPTY, None).isnan()
    with zero_gradients(model):
        mean_loss(model, EMPTY, None).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


class Averaging(nn.Module):
    """Keeps means of what it sees: in place, past autograd, and in a tensor that it puts in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 4)
        for name in ("in_place", "by_data", "replaced"):
            self.register_buffer(name, torch.ones(6))
        self.num_passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = checkpoint(self.normalise, inputs.requires_grad_(), use_reentrant=False)
        output: Tensor = self.layer(inputs * self.by_data)  # which autograd saves
        return output

    def normalise(self, inputs: Tensor) -> Tensor:
        """Runs again in the backward pass."""
        self.num_passes += 1
        mean = inputs.detach().mean(0)
        self.in_place.lerp_(mean, 0.5)
        self.by_data.data.lerp_(mean, 0.5)
        self.replaced = 0.5 * self.replaced + 0.5 * mean
        output: Tensor = self.norm(inputs)
        return output


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.named_buffers()}


@pytest.mark.parametrize("has_samples", [False, True])
@pytest.mark.usefixtures("group_of_one")
def test_a_stand_in_leaves_no_trace_in_buffers(*, has_samples: bool) -> None:
    """Nor as activations are computed anew. What a micro-batch of the same step has left there stays."""
    model = Averaging()
    reduction = FastReduction(model, local_world(0, 2), CPU, num_votes=2)
    seen: list[dict[str, Tensor]] = []

    def loss(module: nn.Module, _micro_batch: MicroBatch, batch: Any) -> Tensor:
        seen.append(buffers_of(model))
        inputs = torch.full((1, 6), 7.0) if batch is None else batch
        return module(inputs).square().mean()  # type: ignore[no-any-return]

    samples = MicroBatch(epoch=0, step=0, shard=0, indices=np.arange(2), step_samples=2, is_last=False)
    share: Share = [(samples, torch.randn(2, 6))] * has_samples + [(EMPTY, None)]
    begun_with, tensor = buffers_of(model), model.replaced
    reduction.run(share, loss, lambda one: one, (0, 0))
    assert model.num_passes == 2 * len(share)
    torch.testing.assert_close(buffers_of(model), seen[-1], rtol=0, atol=0)
    assert torch.equal(begun_with["in_place"], model.in_place) != has_samples
    assert (model.replaced is tensor) != has_samples
    assert model.norm.training


def test_what_all_ranks_have_of_a_stand_in_stays() -> None:
    """A SyncBatchNorm trains in train mode alone, with all ranks, and takes the sample into everybody's statistics."""
    layer = nn.SyncBatchNorm(6)
    put_back = leave_no_trace(nn.Sequential(layer))
    assert layer.training
    assert layer.running_mean is not None
    layer.running_mean.fill_(7)
    put_back()
    assert layer.running_mean.tolist() == [7] * 6


@pytest.mark.usefixtures("group_of_one")
def test_a_stand_in_of_an_own_loop_leaves_no_trace_in_buffers() -> None:
    """Until the optimizer has stepped; what the function changes after that is no trace of it. A second pass finds what
    the first one found: rank 0's is everybody's."""
    anything: Any = SimpleNamespace
    model, nothing = Averaging(), anything(do=lambda *_: None, settle=lambda: None)
    step = StepInHand(EMPTY, num_samples=0)
    steps = SessionSteps(
        (), nothing, nothing, nothing, nothing, nothing, is_own_code=True, require_unbroken=lambda: None,
        reading=nullcontext, hints=nothing,
    )  # fmt: skip
    steps.turn_to_function = lambda: None  # type: ignore[method-assign]
    parallel = OwnParallel(local_world(0, 2), CPU, nothing, steps, nothing, lambda: None, lambda: None)
    ddp = parallel.wrap(model)
    steps.in_hand = step
    begun_with = buffers_of(model)
    found = []
    model.register_forward_pre_hook(lambda *_: found.append(buffers_of(model)))
    losses = [ddp(torch.full((1, 6), 7.0)).square().mean() for _ in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    assert model.num_passes == 4
    torch.testing.assert_close(found, [begun_with, begun_with], rtol=0, atol=0)
    steps.note_applied(None)
    torch.testing.assert_close(buffers_of(model), begun_with, rtol=0, atol=0)
    assert model.norm.training
    model.in_place.fill_(3)
    steps.close()
    assert model.in_place.tolist() == [3] * 6


def test_other_buffers_are_those_of_rank_0_copied_before_each_forward_pass(worked: Path) -> None:
    """As README explains forward_sync_buffers."""
    first, *others = (torch.load(worked / f"buffers-{rank}") for rank in range(WORLD_SIZE))
    for other in others:
        for step in range(NUM_STEPS):
            assert torch.equal(other[step][0], first[step][0])
            assert not torch.equal(other[step][1], first[step][1]), "each rank's own, until the next one"
    for step in range(1, NUM_STEPS):
        assert torch.equal(first[step][0], first[step - 1][1])


def test_statistics_alone_are_each_rank_s_own_and_those_of_rank_0_the_same(worked: Path) -> None:
    """As README explains forward_sync_buffers."""
    for rank in range(WORLD_SIZE):
        own = torch.load(worked / f"statistics-{rank}")
        assert all(torch.equal(own[step][0], own[step - 1][1]) for step in range(1, NUM_STEPS))
    first, second = (torch.load(worked / f"statistics-{rank}") for rank in range(2))
    assert not torch.equal(first[-1][1], second[-1][1])
    copied = torch.load(worked / "buffers-0")
    assert all(torch.equal(own[1], of_ddp[1]) for own, of_ddp in zip(first, copied, strict=True))


def test_buffers_of_any_type_are_those_of_rank_0(worked: Path) -> None:
    own = [dict(OddTypes(rank).named_buffers()) for rank in range(WORLD_SIZE)]
    for rank in range(WORLD_SIZE):
        for found, of in zip(torch.load(worked / f"odd-types-{rank}"), (0, 0, rank), strict=True):
            torch.testing.assert_close(found, own[of], rtol=0, atol=0)


@pytest.mark.parametrize(("saved_alone", "expected"), [(False, [5]), (True, [2])])
def test_what_is_in_no_snapshot_is_shared_where_it_is_evaluated(
    monkeypatch: pytest.MonkeyPatch, *, saved_alone: bool, expected: list[int]
) -> None:
    """A cache may have another size on each rank: where training ends nobody needs it, and the broadcast would fail."""
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(3, dtype=torch.uint8), persistent=False)
    model.register_buffer("mean", torch.zeros(2, dtype=torch.uint8))
    sent: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda flat, *_arguments, **_options: sent.append(flat.numel()))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("elastic_train.training.reduction.wait", lambda *_arguments: None)
    buffers_of_rank_0(model, saved_alone=saved_alone)
    assert sent == expected


def test_gradients_that_are_not_summed_are_refused_in_their_first_step(worked: Path) -> None:
    for rank in range(WORLD_SIZE):
        *unused, beside = torch.load(worked / f"refused-{rank}")
        for used, line in enumerate(unused):
            names = f"layers.{1 - used}.weight, layers.{1 - used}.bias"
            assert line.startswith(
                f"2 parameters ({names}) got no gradient in step 1, and DDP waits for all: give --find-"
            )
        assert beside.startswith("not all parameters got a gradient through DDP's forward pass in step 1")


def test_who_freezes_or_thaws_has_to_make_ddp_again(worked: Path) -> None:
    """Else the gradients of what was thawed would be each rank's own, and those of what was frozen be waited for."""
    first, *others = ([*zip(*torch.load(worked / f"own-{rank}"), strict=True)] for rank in range(WORLD_SIZE))
    lines, gradients = first
    assert all(other[0] == lines for other in others)
    is_refused = [line != "nothing" for line in lines]
    assert is_refused == [False, True, False, True, False, False, False], "whole as it is, a module may be frozen"
    changed = "changed since training.parallel() made the DDP module"
    assert lines[1].startswith(
        f"2 parameters (0.weight, 0.bias) {changed}: thawed, and nobody sums their gradients of step 1. Call"
    )
    assert lines[3].startswith(
        f"2 parameters (3.weight, 3.bias) {changed}: frozen, and DDP waits for a gradient of each in step 3. Call"
    )
    for number, (layers, _) in enumerate(OWN_STEPS):
        if not is_refused[number]:
            assert {name[0] for name in gradients[number]} == set(layers)
            for other in others:
                torch.testing.assert_close(other[1][number], gradients[number], rtol=0, atol=0)


def test_one_bit_of_one_rank_is_told_to_all_alike(worked: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert torch.load(worked / f"compared-{rank}") == [None, ((1,), True), ((1,), True), ((0,), True)]


def test_torch_warns_of_no_option_that_ddp_gets(worked: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert [text for text in torch.load(worked / f"warnings-{rank}") if "deprecated" in text] == []


@pytest.mark.parametrize(
    ("device", "layers", "expected"),
    [
        ("cpu", [], ["forward"]),
        ("cuda", [], ["forward", "step", "reduce"]),
        ("cuda", [nn.SyncBatchNorm(6)], ["step", "forward", "step", "reduce"]),
        ("cuda", [Counting()], ["step", "forward", "step", "reduce"]),
        ("cpu", [Counting()], ["reduce", "compute", "forward"]),
    ],
)
def test_a_pause_in_a_step_on_a_gpu_is_no_collective_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, device: str, layers: list[nn.Module], expected: list[str]
) -> None:
    """By fakes, as tests/unit/test_process_group.py for a loop of one's own. Work of this rank's own is between its
    waits there; at the end nothing of that is left, and the limit is that of a collective."""
    done: list[str] = []

    class Ddp(nn.Module):
        def __init__(self, carrier: nn.Module, **_options: Any) -> None:
            super().__init__()
            self.module = carrier

        def register_comm_hook(self, *_hook: Any) -> None: ...

    module = "elastic_train.training.reduction"
    monkeypatch.setattr(f"{module}.DistributedDataParallel", Ddp)
    monkeypatch.setattr(f"{module}.share_buffers", lambda _model: None)
    monkeypatch.setattr(f"{module}.numbers", lambda totals: totals.tolist())
    monkeypatch.setattr(FastReduction, "_require_begun", lambda _self, _step: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **_device: zeros(*size))
    layer = nn.Linear(6, 1)

    def loss(_module: nn.Module, _micro_batch: MicroBatch, batch: Any) -> Tensor:
        done.append("forward")
        return layer(batch[0]).mean()  # type: ignore[no-any-return]

    model = nn.Sequential(layer, *layers)
    fast = FastReduction(model, local_world(0, 2), torch.device(device), num_votes=2, do=done.append)
    fast.run(make_share(TOGETHER["even"], 0, 0), loss, lambda one: one, (0, 0))
    assert done == expected


@pytest.mark.parametrize("places", [("cpu", "meta"), ("cuda:0", "cuda:1")])
def test_parts_on_several_devices_are_refused_in_one_line(places: tuple[str, str]) -> None:
    """By fakes. What waits for NCCL's sums, and for their abort, looks at one device: garbage of another one's would
    reach the weights there."""
    model = nn.Linear(1, 1)
    parts = [SimpleNamespace(device=torch.device(place)) for place in places]
    model.parameters = lambda recurse=True: iter(parts)  # type: ignore[method-assign,assignment,misc]
    steps: Any = None
    own = OwnParallel(local_world(0, 2), torch.device(places[0]), steps, steps, steps, steps, steps)
    for train in (lambda: FastReduction(model, local_world(0, 2), CPU, num_votes=2), lambda: own.wrap(model)):
        with pytest.raises(UsageError, match=f"^the model has parts on {places[0]} and {places[1]}: train it in one "):
            train()


def test_in_one_worker_a_model_may_end_on_another_device_than_it_begins() -> None:
    model = make_model()
    reduction = FastReduction(model, local_world(0, 1), CPU, num_votes=2)
    moved: list[torch.device] = []

    class Elsewhere(Tensor):
        def to(self, device: torch.device) -> Tensor:  # type: ignore[override]
            moved.append(device)
            return self.as_subclass(Tensor)

    def loss(module: nn.Module, micro_batch: MicroBatch, batch: Any) -> Tensor:
        return mean_loss(module, micro_batch, batch).as_subclass(Elsewhere)

    reduction.run(make_share(ALONE["one pass"], 1, 0), loss, lambda one: one, (0, 0))
    assert moved == [CPU]
