"""The reports of the bundled loop to the watcher, in a world of one and without a process group."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from elastic_train.config import Config
from elastic_train.elastic.loop import bundled
from elastic_train.elastic.own_parallel import Wrapped
from elastic_train.elastic.snapshot_schedule import SaveTime
from elastic_train.elastic.trainer import Program, Trainer
from elastic_train.errors import FormationFailed, SnapshotError, TrainingDiverged, UsageError
from elastic_train.protocol.heartbeat import FIRST_SECONDS, LEAST_SECONDS, Pace
from elastic_train.rules import Activity
from elastic_train.training import batches
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.collectives import broken_off_by, wait
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.training.step import Outcome
from elastic_train.training.tasks import Task
from elastic_train.world import World
from tests.unit.test_liveness import make_member

WORLD = World(rank=0, generation=0, members=(make_member(0),))


class Watched(Task):
    """Notes how long a step may take while it trains."""

    name = "watched"

    def __init__(self, test_samples: int | None = None) -> None:
        self.watcher = SimpleNamespace(
            do=lambda *_: None,
            pace=Pace(10.0),
            announce_broken=lambda: None,
        )
        self.patience: list[float] = []
        self._test_samples = test_samples

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 2)

    def train_dataset(self) -> Any:
        return TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))

    def test_dataset(self) -> Any:
        length = self._test_samples
        return None if length is None else TensorDataset(torch.ones(length, 1), torch.zeros(length, dtype=torch.int64))

    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        self.patience.append(self.watcher.pace.limit(Activity.COMPUTE))
        return super().loss(module, batch)


def make_loop(
    task: Watched, train: Callable[[Any], None] | None = None, *, extras: dict[str, Any] | None = None, **flags: Any
) -> tuple[Trainer, TrainState, list[str]]:
    told: list[str] = []
    model = task.build_model()
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), length=4, global_batch_size=2, epochs=1, max_steps=2,
        extras=extras,
    )  # fmt: skip
    reporter = SimpleNamespace(
        ledger=None, step=lambda *_, **__: told.append("step"), evaluation=lambda *_: told.append("evaluation"),
        warn=lambda message: told.append(f"warning: {message}"), note_commit=lambda _step: None,
        best=lambda _ratings: None, report=lambda message: told.append(f"report: {message}"),
    )  # fmt: skip
    worker: Any = SimpleNamespace(
        config=Config(**flags),
        task=task,
        state=state,
        device=torch.device("cpu"),
        reporter=reporter,
        reach=lambda *_: None,
        stop=SimpleNamespace(votes=lambda: (0, 0)),
        launch=SimpleNamespace(is_open=False),
    )
    membership: Any = SimpleNamespace(
        watcher=task.watcher,
        sockets=GroupSockets(),
        vote=lambda: 0,
        joins=SimpleNamespace(follow_vote=lambda world, vote: None),
    )
    save_time = SaveTime(is_bucket=False)
    save_time.enter(WORLD)
    saver: Any = SimpleNamespace(is_due=lambda _state: False, owes_best=lambda _state: False, save_time=save_time)
    program = bundled(worker) if train is None else Program(train)
    return Trainer(program, worker, membership, saver), state, told


def steps(task: Watched) -> list[list[tuple[MicroBatch, Any]]]:
    def micro_batch(step: int) -> MicroBatch:
        indices = np.arange(2 * step - 2, 2 * step)
        return MicroBatch(epoch=0, step=step, shard=0, indices=indices, step_samples=2, is_last=True)

    batch = (torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))
    return [[(micro_batch(step), batch)] for step in (1, 2)]


@pytest.mark.parametrize("is_bundled", [True, False])
def test_how_long_saving_takes_is_voted(*, is_bundled: bool) -> None:
    """Also of a loop that has its votes after its commit."""

    def train(training: Any) -> None:
        for _ in training.epochs():
            for _ in training.batches():
                training.optimizer.step()
                training.commit(0.0)

    loop, *_ = make_loop(Watched(), None if is_bundled else train)
    loop._saver.save_time.note_written(150.2, 1_000)
    loop.run(WORLD, steps(Watched()))
    assert loop._saver.save_time.seconds == 151.0


def test_weights_that_are_changed_between_passes_are_kept_from_the_second_step_on() -> None:
    """By an optimizer that is stepped through another one, and by hand before that, as SAM's usual form is."""
    found: list[tuple[bool, bool]] = []

    def train(training: Any) -> None:
        inner = torch.optim.SGD(training.model.parameters(), lr=0.1)
        for inputs, _ in training.batches():
            weights = [one.detach().clone() for one in training.model.parameters()]
            with torch.no_grad():
                for one in training.model.parameters():
                    one.add_(1.0)
            (training.model(inputs) - 1.0).square().mean().backward()
            found.append((state.kept.updates.are_kept, training._steps.in_hand.is_applied))
            with torch.no_grad():
                for one, value in zip(training.model.parameters(), weights, strict=True):
                    one.copy_(value)
            inner.step()
            assert training._steps.in_hand.is_applied
            assert not state.is_whole
            training.commit(0.0)

    loop, state, told = make_loop(Watched(), train)
    loop.run(WORLD, steps(Watched()))
    assert found == [(False, False), (True, False)]
    assert not [line for line in told if line.startswith("warning")]


def test_a_function_that_returns_early_is_no_fault() -> None:
    """Early stopping is what was asked for: one line, of rank 0."""

    def train(training: Any) -> None:
        for _ in training.batches():
            training.state.model(torch.ones(1, 1)).sum().backward()
            training.optimizer.step()
            training.commit(0.0)
            return

    loop, state, told = make_loop(Watched(), train)
    assert loop.run(WORLD, steps(Watched())) is Outcome.FINISHED
    assert (state.step, state.is_finished) == (1, True)
    assert told == ["step", "report: the training function returned at step 1 of 2: that ends the training"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_module_of_an_earlier_world_is_kept_by_more_than_a_circle(is_kept: bool) -> None:
    """LBFGS leaves one behind where a peer is lost within its closure; the function holds nothing."""

    def train(training: Any) -> None:
        for _ in training.batches():
            training.optimizer.step()
            training.commit(0.0)

    loop, _, told = make_loop(Watched(), train)
    module: Any = nn.Linear(1, 1)
    module.itself = [module]
    loop._ddp_modules = [Wrapped(weakref.ref(module), [])]
    held = [module] if is_kept else []
    del module
    loop.run(WORLD, steps(Watched()))
    warnings = [line for line in told if "keeps the DDP module of an earlier world" in line]
    assert len(warnings) == len(held) == is_kept


def test_a_validation_over_the_training_batches_is_told_what_to_read() -> None:
    def train(training: Any) -> None:
        for _ in training.epochs():
            for _ in training.batches():
                pass

    loop, _, _ = make_loop(Watched(), train)
    with pytest.raises(UsageError, match=r"^step 1 ended without training\.commit\(loss\).* a DataLoader of its own"):
        loop.run(WORLD, steps(Watched()))


@pytest.mark.parametrize("is_own", [True, False])
def test_a_world_begins_without_gradients(is_own: bool) -> None:
    """What a step that was broken off has left of any parameter would be added to that of the step when it is done
    again, where the loop ends with zero_grad(). An optimizer may drop its own in another way."""

    class OnePiece(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    one.grad = torch.zeros_like(one)

    critic, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    loose, whole = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    extras = {
        "critic": critic, "teacher": teacher, "of_critic": torch.optim.SGD(critic.parameters()),
        "of_loose": torch.optim.SGD([loose]), "of_whole": OnePiece([whole]),
    }  # fmt: skip
    entered = []

    def train(training: Any) -> None:
        entered.append([None if one.grad is None else one.grad.tolist() for one in trained])
        for one in trained:
            one.grad = torch.ones_like(one)
        raise FormationFailed("a peer is lost")

    loop, state, _ = make_loop(Watched(), train, extras=extras)
    if not is_own:
        program: Any = SimpleNamespace(train=train, loss=lambda *_: None)
        loop = Trainer(program, loop._worker, loop._membership, loop._saver)
    trained = [*state.model.parameters(), *critic.parameters(), *teacher.parameters(), loose, whole]
    for one in trained:  # of a pass before `run`
        one.grad = torch.ones_like(one)
    for _ in range(2):
        with pytest.raises(FormationFailed):
            loop.run(WORLD, steps(Watched()))
    assert entered == [[None] * 7 + [[0.0]]] * 2


@pytest.mark.parametrize("where", ["within", "after", "top", "returned"])
def test_what_follows_an_epoch_is_told_where_it_is_broken_off(where: str) -> None:
    """The next world begins with the next epoch: nothing else would say that an evaluation is missing."""
    gone = FormationFailed("a peer is lost")

    def train(training: Any) -> None:
        for epoch in training.epochs():
            if where == "top" and epoch == 1:
                raise gone
            for _ in training.batches():
                training.optimizer.step()
                training.commit(0.0)
                if where == "within" and training.state.step == 1:
                    raise gone
            if where == "after":
                raise gone
            if where == "returned":
                training._end.lost = gone
                return

    loop, state, told = make_loop(Watched(), train)
    state.num_epochs, state.last_step = 2, 4
    with pytest.raises(FormationFailed):
        loop.run(WORLD, steps(Watched()))
    warnings = [line for line in told if line.startswith("warning: what the training function does after step 2,")]
    assert len(warnings) == (where == "after")


@pytest.mark.parametrize("next_is", ["epoch", "batch"])
@pytest.mark.parametrize("has_nccl", [True, False])
def test_what_follows_a_commit_by_garbage_of_nccl_s_is_not_saved(next_is: str, has_nccl: bool) -> None:
    """An evaluation's sum of own code, say, by which a scheduler has stepped: gloo raises where NCCL says nothing."""

    def train(training: Any) -> None:
        for _ in training.epochs():
            for _ in training.batches():
                training.optimizer.step()
                training.commit(0.0)
                if next_is == "batch":
                    break_off()
            break_off()

    def break_off() -> None:
        if state.step == (1 if next_is == "batch" else 2):
            loop._membership.sockets.has_nccl = has_nccl
            loop._membership.sockets.shut()

    loop, state, told = make_loop(Watched(), train)
    saved: list[int] = []
    state.num_epochs, state.last_step = 2, 4
    saver: Any = SimpleNamespace(
        is_due=lambda _state: True, owes_best=lambda _state: False, save=lambda state: saved.append(state.step),
        save_time=loop._saver.save_time,
    )  # fmt: skip
    loop._saver = saver
    with pytest.raises(FormationFailed):
        loop.run(WORLD, steps(Watched()) * 2)
    at = 1 if next_is == "batch" else 2
    assert (at in saved) is not has_nccl
    warnings = [line for line in told if line.startswith("warning: what the training function does after step 2,")]
    assert len(warnings) == (has_nccl and next_is == "epoch")


@pytest.mark.parametrize("fails", ["raises", "exits", "is refused"])
@pytest.mark.parametrize("is_broken_off", [True, False])
def test_what_own_code_makes_of_garbage_is_no_error_of_its_own(fails: str, is_broken_off: bool) -> None:
    """Every survivor would raise it at the same step, and so end the job. A bug shows again when the step is redone."""

    def train(training: Any) -> None:
        next(iter(training.batches()))
        if is_broken_off:
            loop._membership.sockets.shut()
        if fails == "exits":
            sys.exit(1)
        raise UsageError("no such loop") if fails == "is refused" else ValueError("the loss is NaN\nand more")

    loop, state, _ = make_loop(Watched(), train)
    expected: dict[tuple[str, bool], tuple[type[Exception], str]] = {
        ("raises", True): (FormationFailed, "^the process group was broken off: .*the loss is NaN$"),
        ("exits", True): (FormationFailed, "^the process group was broken off: .*sys.exit"),
        ("is refused", True): (FormationFailed, "^the process group was broken off: no such loop$"),
        ("raises", False): (ValueError, "the loss is NaN"),
        ("exits", False): (RuntimeError, "sys.exit"),
    }
    kind, line = expected.get((fails, is_broken_off), (UsageError, "no such loop"))
    with pytest.raises(kind, match=line):
        loop.run(WORLD, steps(Watched()))
    assert state.step == 0
    assert not state.lock.acquire(0.0), "it is held, as after any other error"


def test_what_was_computed_from_garbage_is_nobodys_error() -> None:
    class Rounding(Watched):
        is_broken_off = False

        def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
            if not self.is_broken_off:
                raise KeyError("my own mistake")
            loop._membership.sockets.shut()
            raise ValueError("cannot convert float NaN to integer")

    task = Rounding()
    loop, state, _ = make_loop(task)
    with pytest.raises(KeyError):
        loop.run(WORLD, steps(task))
    task.is_broken_off = True
    with pytest.raises(FormationFailed, match=r"^the process group was broken off: cannot convert"):
        loop.run(WORLD, steps(task))
    assert state.step == 0


@pytest.mark.parametrize("extra", [None, "average", "scheduler", "ema"])
def test_a_late_stop_may_save_before_a_loop_of_ones_own_asks_for_its_first_batch(extra: str | None) -> None:
    """As between two steps: what it may be about to step is waited for, whatever its name is. The average of the flags
    is updated within the commit."""
    could_save: list[bool] = []

    def train(training: Any) -> None:
        could_save.append(state.lock.acquire(0.0))
        if could_save[-1]:
            state.lock.give_back()
        next(iter(training.batches()))
        training.optimizer.step()
        training.commit(0.0)

    loop, state, _ = make_loop(Watched(), train)
    if extra == "average":
        state.extras["ema"] = AveragedWeights(state.model, 0.9)
    elif extra is not None:
        state.extras[extra] = torch.optim.lr_scheduler.ConstantLR(state.optimizer)
    loop.run(WORLD, steps(Watched()))
    assert could_save == [extra in (None, "average")]
    assert not state.lock.acquire(0.0)


@pytest.mark.parametrize("kind", ["one loader", "skipped"])
def test_an_epoch_without_a_step_does_not_come_again_for_ever(kind: str) -> None:
    """As with a DataLoader that is made once, or where a loop leaves out what it takes for done."""
    seen: list[int] = []

    def train(training: Any) -> None:
        loader = training.batches()
        for epoch in training.epochs():
            seen.append(epoch)
            if kind == "skipped" and epoch == 1:
                continue
            for _ in loader:
                training.optimizer.step()
                training.commit(0.0)

    loop, state, _ = make_loop(Watched(), train)
    state.last_step = 4
    with pytest.raises(UsageError, match=r"^epoch 1 was left without a step: call training.batches\(\) anew in each"):
        loop.run(WORLD, steps(Watched()))
    assert seen == [0, 1]


def test_what_an_epoch_is_left_for() -> None:
    """A look at the first one, the rest of one that is left half way, and the end."""
    seen: list[tuple[int, int]] = []

    def train(training: Any) -> None:
        assert next(training.epochs()) == next(training.epochs()) == 0
        for epoch in training.epochs():
            seen.append((epoch, training.state.step))
            for _ in training.batches():
                training.optimizer.step()
                training.commit(0.0)
                break
        assert not list(training.epochs())

    loop, state, _ = make_loop(Watched(), train)
    loop.run(WORLD, steps(Watched()))
    assert seen == [(0, 0), (0, 1)]
    assert state.is_finished


@pytest.mark.parametrize(
    ("ways", "sizes"),
    [(("shares",) * 2, [[2, 1]] * 2), (("batches",) * 2, [[3]] * 2), (("batches", "shares"), [[3]] * 2)],
)
def test_a_share_is_cut_only_where_the_step_is_none_of_the_users(ways: tuple[str, ...], sizes: list[list[int]]) -> None:
    """Cut by what a rank had in the run's first world, of two."""
    assert sizes_of(ways) == sizes


def test_a_world_that_has_begun_with_cut_shares_has_no_whole_batches() -> None:
    with pytest.raises(UsageError, match=r"batches\(\) came after training.shares\(\), by which"):
        sizes_of(("shares", "batches"))


def sizes_of(ways: tuple[str, ...]) -> list[list[int]]:
    """Of the parts of each step of three samples, a step to an epoch."""
    data = TensorDataset(torch.ones(3, 1))
    seen: list[list[int]] = []

    def train(training: Any) -> None:
        for epoch in training.epochs():
            if ways[epoch] == "batches":
                for (inputs,) in training.batches():
                    seen.append([len(inputs)])
                    training.optimizer.step()
                    training.commit(0.0)
                continue
            for share in training.shares():
                seen.append([len(inputs) for _, (inputs,) in share])
                training.commit(training.step(share, lambda module, batch: module(batch[0]).mean()))

    loop, state, _ = make_loop(Watched(), train)
    state.length, state.global_batch_size, state.micro_batch_size = 3, 3, 2
    config = Config(global_batch_size=3)
    loop.run(WORLD, batches.steps(data, default_collate, state, WORLD, config, torch.device("cpu")))
    return seen


LOST = "[gloo/transport/tcp/pair.cc:550] Connection closed by peer"


class LostPeer:
    """What breaks the process group off, and a collective that a lost peer has ended."""

    has_nccl = False

    def is_completed(self) -> bool:
        return True

    def wait(self, _limit: Any = None) -> None:
        raise RuntimeError(LOST)


def lose_peer() -> None:
    wait(LostPeer(), torch.zeros(1))


def pass_on(what: str, training: Any) -> None:
    """What a loop does that catches the error of a batch."""
    if what == "raise":
        raise ValueError("a bad batch")
    if what == "commit":
        training.commit(0.0)
    elif what == "step":
        training.optimizer.step()
    elif what == "fail":
        training.step(None, None)
    elif what == "next":
        next(iter(training.batches()))


@pytest.mark.parametrize("is_caught", ["inside", "outside"])
@pytest.mark.parametrize("what", ["raise", "commit", "step", "fail", "next", "continue"])
def test_a_loop_that_catches_the_error_of_a_lost_peer_is_not_the_one_that_has_failed(what: str, is_caught: str) -> None:
    """It is the job's error else, on the second node that takes the loss for a bad batch."""

    def train(training: Any) -> None:
        for _ in training.batches():
            try:
                lose_peer()
            except Exception:
                if is_caught == "inside" or what == "raise":
                    pass_on(what, training)
            if is_caught == "outside":
                pass_on(what, training)

    loop, state, _ = make_loop(Watched(), train)
    weights = copy.deepcopy(state.model.state_dict())
    with broken_off_by(LostPeer()), pytest.raises(FormationFailed) as raised:  # type: ignore[arg-type]
        loop.run(WORLD, steps(Watched()))
    assert str(raised.value) == LOST
    assert state.step == 0
    assert not loop.was_applied
    torch.testing.assert_close(dict(state.model.state_dict()), dict(weights), rtol=0, atol=0)


@pytest.mark.parametrize("are_kept", [True, False])
def test_what_a_loop_does_after_an_error_that_it_has_caught_is_undone_or_told(are_kept: bool) -> None:
    """The step is done again, and a scheduler would be a step ahead for good."""

    def train(training: Any) -> None:
        for _ in training.batches():
            with suppress(RuntimeError):
                lose_peer()
            scheduler.step()
            training.commit(0.0)

    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    extras = {"scheduler": scheduler, **({"other": other} if are_kept else {})}
    loop, state, told = make_loop(Watched(), train, extras=extras)
    with broken_off_by(LostPeer()), pytest.raises(FormationFailed):  # type: ignore[arg-type]
        loop.run(WORLD, steps(Watched()))
    assert state.rollback()
    assert scheduler.last_epoch == (0 if are_kept else 1)
    warnings = [line for line in told if "caught the error of a lost peer, and gone on to the commit of step 1" in line]
    assert len(warnings) == (not are_kept)


def test_what_follows_an_epoch_is_done_where_a_peer_is_lost_in_its_last_commit() -> None:
    """The step counts, so the next world does not come by that code (a scheduler's step) again."""
    done = []

    def train(training: Any) -> None:
        for epoch in training.epochs():
            for _ in training.batches():
                training.state.model(torch.ones(1, 1)).sum().backward()
                training.optimizer.step()
                if training.state.step == 1:
                    with suppress(RuntimeError):  # as the sums of a commit
                        lose_peer()
                training.commit(0.0)
            done.append(epoch)

    loop, state, told = make_loop(Watched(), train)
    state.last_step = 4
    with broken_off_by(LostPeer()), pytest.raises(FormationFailed):  # type: ignore[arg-type]
        loop.run(WORLD, steps(Watched()))
    assert (done, state.step, state.epoch) == ([0], 2, 1)
    assert not [line for line in told if line.startswith("warning")]


@pytest.mark.parametrize("error", [ValueError("a bad batch"), UsageError("of its use")])
def test_what_came_of_a_collective_of_the_functions_own_is_no_error_of_its_own(error: Exception) -> None:
    def train(_training: Any) -> None:
        try:
            raise RuntimeError(LOST)
        except RuntimeError as lost:
            try:
                raise KeyError("of its own") from lost
            except KeyError:
                raise error from None

    loop, _, _ = make_loop(Watched(), train)
    with pytest.raises(FormationFailed) as raised:
        loop.run(WORLD, steps(Watched()))
    assert (str(raised.value), raised.value.__cause__) == (LOST, error)


def read_wrongly() -> None:
    raise KeyError("of the data")


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (read_wrongly, ValueError("a bad batch")),
        (read_wrongly, UsageError("of its use")),
        (read_wrongly, SnapshotError("a full disk")),
        (lose_peer, SnapshotError("a full disk")),
        (lose_peer, TrainingDiverged("the loss is nan")),
    ],
)
def test_a_loop_s_own_error_and_one_of_ours_whatever_it_came_after_say_what_they_are(
    fail: Callable[[], None], error: Exception
) -> None:
    def train(training: Any) -> None:
        for _ in training.batches():
            try:
                fail()
            except Exception:
                raise error  # noqa: B904

    loop, _, _ = make_loop(Watched(), train)
    with broken_off_by(LostPeer()), pytest.raises(type(error)) as raised:  # type: ignore[arg-type]
        loop.run(WORLD, steps(Watched()))
    assert raised.value is error


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda losses: losses.mean().item(), "gave a float: it must give a tensor"),
        (lambda losses: None, r"gave nothing \(is its return missing\?\): it must give a tensor"),
        (lambda losses: losses.mean().detach(), "gave a tensor without a gradient"),
        (lambda losses: losses, r"gave a tensor of shape \(2, 2\): it must give a scalar"),
    ],
    ids=["a number", "nothing", "detached", "no scalar"],
)
def test_a_loss_that_cannot_be_differentiated(make: Callable[[torch.Tensor], Any], message: str) -> None:
    class Wrong(Watched):
        def loss(self, module: nn.Module, batch: Any) -> Any:
            return make((module(batch[0]) - 1.0).square())

    task = Wrong()
    loop, _, _ = make_loop(task)
    with pytest.raises(UsageError, match=f"Wrong.loss {message}"):
        loop.run(WORLD, steps(task))


class Twice(torch.optim.SGD):
    """As SAM's usual form: the signature says that it needs no closure."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Twice requires closure, but it was not provided"


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Twice])
def test_an_optimizer_that_wants_a_closure_is_told_where_it_belongs(make: Any) -> None:
    task = Watched()
    loop, state, _ = make_loop(task)
    state.optimizer = make(state.model.parameters())
    said = f"^{make.__name__} computes its losses itself, by a closure .*: loop over training.batches\\(\\)"
    with pytest.raises(UsageError, match=said):
        loop.run(WORLD, steps(task))


class Spartan(torch.optim.SGD):
    """As apex has them."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def test_an_optimizer_drops_its_gradients_in_its_own_way() -> None:
    task = Watched()
    loop, state, told = make_loop(task)
    state.optimizer = Spartan(state.model.parameters(), lr=0.1)
    loop.run(WORLD, steps(task))
    assert told == ["step", "step"]


def test_an_exit_in_the_code_that_is_trained_is_an_error() -> None:
    """Its last commits are saved as after any other; the process would be gone without a word."""

    class Exits(Watched):
        def loss(self, module: nn.Module, batch: Any) -> Any:
            sys.exit(0)

    task = Exits()
    loop, _, _ = make_loop(task)
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\) at step 0: to end training there, return"):
        loop.run(WORLD, steps(task))


@pytest.mark.parametrize(("compiles", "patience"), [(True, FIRST_SECONDS), (False, LEAST_SECONDS)])
def test_where_it_compiles_the_first_step_of_each_world_may_take_its_time(compiles: bool, patience: float) -> None:
    task = Watched()
    task.watcher.pace.note_step(0.5)  # of a world before
    loop, state, told = make_loop(task, compile=compiles)
    loop.run(WORLD, steps(task))
    assert state.is_finished
    assert told == ["step", "step"]
    assert task.patience == [patience, LEAST_SECONDS]


def test_an_empty_test_set_is_not_evaluated() -> None:
    task = Watched(test_samples=0)
    loop, state, told = make_loop(task)
    loop.run(WORLD, steps(task))
    assert state.is_finished
    assert told == ["step", "step"]


@pytest.mark.parametrize(("flags", "most"), [({}, 7), ({"micro_batch_size": 3}, 3), ({"global_batch_size": 4}, 4)])
def test_an_evaluation_takes_no_more_memory_than_the_flags_allow_and_has_their_precision(
    flags: dict[str, Any], most: int
) -> None:
    class Evaluated(Watched):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            sizes.append(len(batch[0]))
            kinds.add(model(batch[0]).dtype)
            return super().evaluate(model, batch)

    sizes: list[int] = []
    kinds: set[torch.dtype] = set()
    task = Evaluated(test_samples=7)
    loop, _, told = make_loop(task, precision="bf16", **flags)
    loop.run(WORLD, steps(task))
    assert told.count("evaluation") == 1
    tried = [most, most // 2, most - most // 2]  # whether it gives sums
    assert sizes == tried + [most] * (7 // most) + ([7 % most] if 7 % most else [])
    assert kinds == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            0.5,
            "Given.evaluate gave a float: it must give a dict of scalars by name, sums over the samples of the batch",
        ),
        ({"correct": torch.ones(3)}, "Given.evaluate gave 'correct' of shape (3,): it must be a scalar, the sum"),
    ],
)
def test_an_evaluation_that_gives_something_else_is_told_in_one_line(given: Any, message: str) -> None:
    class Given(Watched):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            return given

    task = Given(test_samples=3)
    loop, _, told = make_loop(task)
    with pytest.raises(UsageError) as raised:
        loop.run(WORLD, steps(task))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert "evaluation" not in told


def test_what_is_no_mean_is_made_of_means() -> None:
    class Summarized(Watched):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            return {"twos": torch.full((len(batch[0]),), 2.0).sum()}

        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            return {"cube": means["twos"] ** 3, "correct": 0.5}

    task = Summarized(test_samples=7)
    loop, state, _ = make_loop(task, micro_batch_size=3)
    loop.run(WORLD, steps(task))
    assert state.test_metrics == {"cube": 8.0, "accuracy": 0.5}
    assert state.ratings.at(state.step) == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.5, "Given.summarize gave a float: it must give a dict"),
        ({"f1": None}, "Given.summarize gave 'f1' as nothing"),
        ({"f1": torch.ones(2)}, "Given.summarize gave 'f1' as a Tensor"),
        ({"correct": 0.5, "accuracy": 0.25}, 'Given reports both "correct" and "accuracy"'),
    ],
)
def test_a_summary_that_is_none_is_told_in_one_line(given: Any, said: str) -> None:
    class Given(Watched):
        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            return given  # type: ignore[no-any-return]

    task = Given(test_samples=3)
    loop, _, _ = make_loop(task)
    with pytest.raises(UsageError, match=said):
        loop.run(WORLD, steps(task))


@pytest.mark.parametrize(("is_mean", "samples"), [(True, 7), (False, 7), (True, 1)])
def test_an_evaluation_that_gives_means_is_warned_of_once(is_mean: bool, samples: int) -> None:
    """It would be wrong without a word. Of one sample a mean is the sum."""

    class Mean(Watched):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            values = model(batch[0]).square() + 1.0
            return {"loss": values.sum(), "size": values.mean() * 2 if is_mean else values.mean() * 2 * len(values)}

    task = Mean(test_samples=samples)
    loop, _, told = make_loop(task, eval_every=1)
    loop.run(WORLD, steps(task))
    warnings = [line for line in told if line.startswith("warn")]
    assert len(warnings) == (is_mean and samples > 1)
    assert "evaluation" in told
