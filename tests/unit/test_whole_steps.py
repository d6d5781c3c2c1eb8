"""What the passes of a step must not change, in a world of one and without a process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from elastic_train.elastic import pass_checks
from elastic_train.elastic.own_parallel import Wrapped
from elastic_train.errors import UsageError
from elastic_train.rules import Activity
from elastic_train.training.kept import KeptStep
from elastic_train.training.state_hash import hashes_by_name
from elastic_train.world import World
from tests.unit.test_liveness import make_member
from tests.unit.test_loop import WORLD, Watched, make_loop, steps


class Following(nn.Module):
    """A frozen copy follows the trained layer in each forward pass, as in MoCo's usual form."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.query, self.key, self.moves = nn.Linear(1, 2), nn.Linear(1, 2), moves
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.moves:
                ours.data = ours.data * 0.5 + theirs.data * 0.5
        outputs: torch.Tensor = self.query(inputs) - self.key(inputs)
        return outputs


class Momentum(Watched):
    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.moves = moves

    def build_model(self) -> nn.Module:
        return Following(moves=self.moves)


PAIR = World(rank=1, generation=0, members=(make_member(0), make_member(1)))
CHANGED = "a forward pass changed what is frozen: 2 parameters (key.weight, key.bias)"


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_a_frozen_parameter_that_a_forward_pass_writes(reduction: str) -> None:
    """The copy equals the layer in the first step."""
    task = Momentum(moves=True)
    loop, state, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    if reduction == "ordered":
        with pytest.raises(UsageError) as raised:
            loop.run(WORLD, steps(task))
        assert str(raised.value).startswith(f"--reduction ordered: {CHANGED}, once in each micro-batch")
        assert (state.step, told) == (1, ["step"])
        return
    loop.run(WORLD, steps(task))
    first, warning, second = told
    assert (first, second) == ("step", "step")
    assert warning.startswith(f"warning: {CHANGED}; in a step that is done again it changes twice")


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_frozen_parameters_are_looked_at_in_a_worker_s_first_steps_alone(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later world begins with a recovery, which would take as much longer as they are large. It is this rank's own
    work, for which the limit of a sum may be too short."""
    done: list[str] = []

    def noting(parts: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
        assert parts.keys() == {"key.weight", "key.bias"}
        done.append("hash")
        return hashes_by_name(parts)

    monkeypatch.setattr(pass_checks, "hashes_by_name", noting)
    task = Momentum(moves=False)
    loop, state, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    task.watcher.do = lambda activity, *_limit: done.append(activity)
    found = []
    for generation in range(2):
        state.last_step = 4 * generation + 4
        loop.run(replace(WORLD, generation=generation), steps(task) * 2)
        assert all(done[place - 1] == Activity.COMPUTE for place, what in enumerate(done) if what == "hash")
        found.append(done.count("hash"))
        done.clear()
    assert found == [6, 0]
    assert told == ["step"] * 8


def test_what_nobody_would_tell_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fast reduction rank 0 warns for all."""
    looked = []
    monkeypatch.setattr(pass_checks, "hashes_by_name", looked.append)
    loop, _, _ = make_loop(Momentum(moves=True))
    loop._passes.enter(PAIR)
    loop._passes.note()
    loop._passes.look()
    assert looked == []


class Toggling(Watched):
    """Freezes or thaws the bias, as the loss of the second step begins."""

    def __init__(self, *, is_thawed: bool, is_put_back: bool = False) -> None:
        super().__init__()
        self.is_thawed, self.is_put_back, self.num_calls = is_thawed, is_put_back, 0

    def build_model(self) -> nn.Module:
        self.model = nn.Linear(1, 2)
        self.model.bias.requires_grad_(not self.is_thawed)
        return self.model

    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        self.found = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        if self.num_calls > 1:
            self.model.bias.requires_grad_(self.is_thawed)
        loss = super().loss(module, batch)
        if self.is_put_back:
            self.model.bias.requires_grad_(not self.is_thawed)
        return loss


TOGGLED = "the loss freezes or thaws 1 parameter (bias) within a step, which sums the gradients of what was trained"


@pytest.mark.parametrize("is_thawed", [True, False])
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_what_is_frozen_or_thawed_within_a_step_is_refused(reduction: str, *, is_thawed: bool) -> None:
    """Its gradient would be this rank's own: in a world of one, too, which others may join."""
    task = Toggling(is_thawed=is_thawed)
    loop, state, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    with pytest.raises(UsageError) as raised:
        loop.run(WORLD, steps(task))
    assert str(raised.value).startswith(TOGGLED)
    assert (state.step, told) == (1, ["step"])
    torch.testing.assert_close(dict(task.model.named_parameters()), task.found, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_a_loss_may_put_back_what_it_freezes(reduction: str) -> None:
    task = Toggling(is_thawed=False, is_put_back=True)
    loop, _, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    loop.run(WORLD, steps(task))
    assert told == ["step", "step"]


@pytest.mark.parametrize("is_thawed", [True, False])
@pytest.mark.usefixtures("group_of_one")
def test_of_several_ranks_each_says_so(*, is_thawed: bool) -> None:
    """DDP alone would sum nothing of what was thawed, and ask for --find-unused-parameters for what was frozen."""
    task = Toggling(is_thawed=is_thawed)
    loop, state, _ = make_loop(task)
    task.num_calls = 1
    with pytest.raises(UsageError) as raised:
        loop.run(PAIR, steps(task))
    assert str(raised.value).startswith(TOGGLED)
    assert state.step == 0


class Writing(nn.Linear):
    """A layer whose forward pass writes its weights in place, as forced weight normalisation does."""

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__(1, 2)
        self.write = write

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.weight.copy_(self.write(self.weight))
        return super().forward(inputs)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2, max_norm=0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.table(inputs.flatten().long())
        return outputs


class Checkpointed(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return outputs


class Built(Watched):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build_model = build  # type: ignore[method-assign]


WRITTEN = "a forward pass writes what is trained: 1 parameter"


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: Writing(lambda weight: weight / weight.norm()), "weight"),
        (lambda: Writing(lambda weight: weight.clamp(-0.01, 0.01)), "weight"),
        (lambda: nn.Sequential(Writing(lambda weight: weight)), "0.weight"),
        (Embedded, "table.weight"),
    ],
    ids=["normalised", "clamped", "nothing changes", "max_norm"],
)
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_trained_weights_that_a_forward_pass_writes(reduction: str, build: Callable[[], nn.Module], name: str) -> None:
    """Whether the write changes a bit is not known: the next one may, or that of another rank."""
    task = Built(build)
    loop, state, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    if reduction == "ordered":
        with pytest.raises(UsageError) as raised:
            loop.run(WORLD, steps(task))
        assert str(raised.value).startswith(f"--reduction ordered: {WRITTEN} ({name}), once in each micro-batch")
        assert (state.step, told) == (0, [])
        return
    loop.run(WORLD, steps(task))
    warning, *others = told
    assert others == ["step", "step"], "it is told once"
    assert warning.startswith(f"warning: {WRITTEN} ({name}); where a step is broken off")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("group_of_one")
def test_what_a_forward_pass_of_an_own_loop_writes(rank: int) -> None:
    """Rank 0 warns for all. What the function writes between its passes is its own affair, on every rank alike."""

    def train(training: Any) -> None:
        ddp = training.parallel()
        for inputs, _ in training.batches():
            with torch.no_grad():
                training.model.weight.clamp_(-0.01, 0.01)
            loss = ddp(inputs).square().mean()
            loss.backward()
            with torch.no_grad():
                training.model.bias.add_(1.0)  # as what attacks the weights does, before another pass
            has_told_before = [line for line in told if "writes" in line]
            training.model.write = lambda weight: weight / weight.norm()
            ddp(inputs).square().mean().backward()
            training.optimizer.step()
            training.commit(loss)
            found.append((has_told_before, [line for line in told if "writes" in line]))

    task = Built(lambda: Writing(None))
    loop, _, told = make_loop(task, train)
    found: list[Any] = []
    loop.run(replace(WORLD, rank=rank), steps(task))
    if rank:
        assert found == [([], []), ([], [])]
        return
    (first, warnings), second = found
    assert (first, second) == ([], (warnings, warnings))
    [warning] = warnings
    assert warning.startswith(f"warning: {WRITTEN} (weight); where a step is broken off")


@pytest.mark.parametrize(
    "build",
    [
        lambda: spectral_norm(nn.Linear(1, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(1, 2)),
        lambda: weight_norm(nn.Linear(1, 2)),
        lambda: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)),
        lambda: Checkpointed(1, 2),
        lambda: nn.LazyLinear(2),
    ],
    ids=["spectral_norm", "old spectral_norm", "weight_norm", "BatchNorm", "checkpoint", "lazy"],
)
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm:FutureWarning")
def test_what_writes_no_trained_weight_is_let_through(reduction: str, build: Callable[[], nn.Module]) -> None:
    task = Built(build)
    loop, _, told = make_loop(task, reduction=reduction, virtual_ranks=1)
    loop.run(WORLD, steps(task))
    assert told == ["step", "step"]


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_weights_may_be_written_outside_of_the_passes(reduction: str) -> None:
    """By another optimizer, or by hand, between a step and its commit or after it."""

    def train(training: Any) -> None:
        other = torch.optim.SGD(training.model.parameters(), lr=0.1)
        for share in training.shares():
            loss = training.step(share, lambda module, batch: module(batch[0]).square().mean())
            with torch.no_grad():
                training.model.weight.clamp_(-0.01, 0.01)
            training.commit(loss)
            other.step()

    loop, state, told = make_loop(Watched(), train, reduction=reduction, virtual_ranks=1)
    loop.run(WORLD, steps(Watched()))
    assert state.step == 2
    assert not [line for line in told if "writes" in line]


def make_towers(loss: Callable[[nn.Module, nn.Module, Any], torch.Tensor]) -> tuple[Any, Any, nn.Module]:
    """The run of a function whose loss knows another trained module."""
    other = nn.Linear(2, 2)

    def train(training: Any) -> None:
        for _ in training.epochs():
            for share in training.shares():
                training.commit(training.step(share, lambda module, batch: loss(module, other, batch)))

    task = Watched()
    loop, state, _ = make_loop(task, train)
    state.extras |= {"d": other, "d_optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
    state.kept = KeptStep(state.model, state.optimizer, state.extras)
    return lambda: loop.run(WORLD, steps(task)), state, other


def test_a_step_trains_no_module_but_the_model() -> None:
    run, state, _ = make_towers(lambda module, other, batch: other(module(batch[0])).square().mean())
    with pytest.raises(UsageError) as raised:
        run()
    assert str(raised.value) == (
        "the loss trains 2 parameters ((2, 2), (2,)) beside the model, and training.step trains the model alone: make "
        "one module of all that is trained, or loop over training.batches()"
    )
    assert state.step == 0


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_module_that_is_trained_elsewhere_may_give_the_loss(has_gradient: bool) -> None:
    """What its own step has left in its gradients is nothing of this step."""

    def loss(module: nn.Module, other: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            targets = other(torch.ones(2, 2))
        return (module(batch[0]) - targets).square().mean()

    run, state, other = make_towers(loss)
    if has_gradient:
        other(torch.ones(1, 2)).sum().backward()
    run()
    assert state.step == 2


def test_a_step_is_refused_beside_a_module_of_parallel() -> None:
    """Whose hook would weigh the gradients once more, and in ordered mode wait for ranks that have fewer parts."""
    made: Any = nn.Linear(1, 1)

    def train(training: Any) -> None:
        training._parallel.made.append(Wrapped(weakref.ref(made), []))
        for share in training.shares():
            training.step(share, lambda module, batch: made(batch[0]).mean() + module(batch[0]).mean())

    loop, state, _ = make_loop(Watched(), train)
    with pytest.raises(
        UsageError, match=r"there is a module of training.parallel\(\), and training.step trains the model alone"
    ):
        loop.run(WORLD, steps(Watched()))
    assert state.step == 0


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_what_an_optimizer_draws_is_the_same_on_every_rank(reduction: str) -> None:
    """Whatever the model has drawn for a rank's samples before."""

    def drawn_after(number: int) -> list[float]:
        drawn: list[float] = []

        def loss(module: nn.Module, batch: Any) -> torch.Tensor:
            torch.rand(number)
            return module(batch[0]).square().mean()

        def train(training: Any) -> None:
            training.optimizer.register_step_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
            for share in training.shares():
                training.commit(training.step(share, loss))

        loop, _, _ = make_loop(Watched(), train, reduction=reduction, virtual_ranks=1)
        loop.run(WORLD, steps(Watched()))
        return drawn

    one, other = drawn_after(1), drawn_after(3)
    assert one == other
    assert len({*one}) == 2, "each step has its own"


def test_what_the_function_draws_before_a_step_is_of_the_step_and_the_share() -> None:
    """As in a loop over batches(): the optimizer's numbers, which are the same on all ranks, must not go on into it."""

    def drawn_by(shard: int, drawn_before: int) -> list[float]:
        drawn: list[float] = []

        def loss(module: nn.Module, batch: Any) -> torch.Tensor:
            drawn.append(torch.rand(()).item())
            return module(batch[0]).square().mean()

        def train(training: Any) -> None:
            torch.rand(drawn_before)
            for share in training.shares():
                drawn.append(torch.rand(()).item())
                training.commit(training.step(share, loss))

        loop, _, _ = make_loop(Watched(), train)
        loop.run(WORLD, [[(replace(first, shard=shard), batch)] for [(first, batch)] in steps(Watched())])
        return drawn

    one, again, other = drawn_by(0, 1), drawn_by(0, 2), drawn_by(1, 1)
    assert one == again
    assert len({*one, *other}) == 8, "no two ranks, steps or purposes have the same"


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_second_optimizer_of_the_model_gets_the_gradients_of_this_step_alone(
    max_norm: float | None, *, is_scaled: bool
) -> None:
    """Clipped with those of the first one, by the norm of all. Scaled ones are refused."""
    found: list[torch.Tensor] = []

    def train(training: Any) -> None:
        for share in training.shares():
            mean = training.step(share, lambda module, batch: module(batch[0]).sum(1).mean())
            found.extend(one.grad.flatten() for one in training.model.parameters())
            training.state.extras["other"].step()
            training.commit(mean)

    task = Watched()
    loop, state, _ = make_loop(task, train, clip_grad_norm=max_norm)
    state.optimizer.param_groups[0]["params"] = [state.model.weight]
    state.extras["other"] = torch.optim.SGD([state.model.bias], lr=0.1)
    state.scaler = torch.amp.GradScaler("cpu") if is_scaled else None
    state.kept = KeptStep(state.model, state.optimizer, state.extras, state.scaler)
    with pytest.raises(UsageError, match="--precision fp16 scales for") if is_scaled else nullcontext():
        loop.run(WORLD, steps(task))
    value = 1.0 if max_norm is None else 0.5
    assert [one.tolist() for one in found] == ([] if is_scaled else [pytest.approx([value, value])] * 4)
