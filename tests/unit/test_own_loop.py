"""Refusals of a loop of one's own, in one line, before any world or in a step."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, Subset, TensorDataset

from elastic_train.config import Config
from elastic_train.elastic import own_loop
from elastic_train.elastic.own_parallel import OwnParallel
from elastic_train.elastic.run import find_world
from elastic_train.elastic.session import Training, scalar_of
from elastic_train.elastic.trainer import Trainer
from elastic_train.errors import FormationFailed, Refused, UsageError

MODEL = nn.Linear(1, 1)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


def train(_training: Training) -> None:
    raise AssertionError("it is not entered")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Of signals, as they were: a process that is refused would have ended."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"epochs": 3}}, "run() was given a dict as config: give what parse_flags() gives"),
        ({"config": {}}, "run() was given a dict as config"),
        ({"config": ["script.py"]}, "run() was given a list as config"),
        (
            {"model": OPTIMIZER, "optimizer": MODEL},
            "run() was given an AdamW as model: give an nn.Module; the order",
        ),
        ({"model": None}, "run() was given nothing (is its return missing?) as model"),
        ({"optimizer": torch.optim.AdamW}, "run() was given the class AdamW as optimizer: give one of torch's"),
        ({"train": "train"}, "run() was given a str as train: give a function that takes a Training"),
        ({"train": lambda: None}, "<lambda>() cannot be called with a Training alone (too many positional arguments)"),
        ({"train": lambda one, two: None}, "<lambda>(one, two) cannot be called with a Training alone (missing a"),
        ({"collate": 3}, "run() was given an int as collate: give a function"),
    ],
)
def test_what_is_of_another_kind(given: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts: dict[str, Any] = {"train": train, "model": MODEL, "optimizer": OPTIMIZER, **given}
    with pytest.raises(SystemExit) as ended:
        own_loop.run(dataset=TensorDataset(torch.zeros(4, 1)), **parts)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic_train: error: {message}")


@pytest.mark.usefixtures("handlers")
def test_what_the_function_raises_is_raised_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on a signal does again what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    raised = LookupError("of the function")

    def fail(_worker: Any, program: Any) -> int:
        assert program.train is train
        raise raised

    monkeypatch.setattr(own_loop, "run_worker", fail)
    with pytest.raises(LookupError) as seen:
        own_loop.run(train, MODEL, OPTIMIZER, TensorDataset(torch.ones(4, 1)), Config(run_dir=tmp_path))
    assert seen.value is raised
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("given", [None, 5])
def test_the_micro_batch_size_that_is_not_given_is_that_of_the_first_world(
    given: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the bundled trainer: the shares that grow after a loss are cut to what has fitted before. The run directory
    may be given as a text, as to the flag."""
    seen: list[int | None] = []

    def note(worker: Any, _program: Any) -> int:
        seen.append(worker.state.micro_batch_size)
        return 7

    monkeypatch.setattr(own_loop, "run_worker", note)
    run_dir: Any = str(tmp_path)
    config = Config(run_dir=run_dir, micro_batch_size=given)
    with pytest.raises(SystemExit):
        own_loop.run(train, MODEL, OPTIMIZER, TensorDataset(torch.ones(4, 1)), config)
    assert seen == [given]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("is_finished", [True, False])
def test_an_optimizer_is_its_owners_again_when_run_has_ended(is_finished: bool, tmp_path: Path) -> None:
    """It may get another group then, for a second training or a loop without elastic_train."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def its_train(training: Training) -> None:
        for _ in training.epochs():
            for (inputs,) in training.batches():
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                training.commit(loss)
        if not is_finished:
            raise LookupError("of the function")

    def its_run(name: str) -> int:
        config = Config(run_dir=tmp_path / name, epochs=1, global_batch_size=2, no_progress=True)
        return own_loop.run(its_train, model, optimizer, TensorDataset(torch.ones(4, 1)), config).step

    with nullcontext() if is_finished else pytest.raises(LookupError):
        assert its_run("first") == 2
    optimizer.add_param_group({"params": [*model[0].parameters()]})
    before = [one.detach().clone() for one in model.parameters()]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    with nullcontext() if is_finished else pytest.raises(LookupError):
        assert its_run("second") == 2


class Interrupted(torch.optim.Optimizer):
    """One during whose step another thread does something."""

    during: Any = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad
        other = threading.Thread(target=self.during)
        other.start()
        other.join(30.0)
        assert not other.is_alive()


@pytest.mark.usefixtures("handlers")
def test_a_step_that_is_given_up_within_the_optimizers_does_not_become_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is put back on another thread where the training thread hangs. That may return at this very moment."""
    model = nn.Linear(1, 1)
    optimizer = Interrupted(model.parameters(), {})
    trainers: list[Trainer] = []
    make = Trainer._make_training
    monkeypatch.setattr(Trainer, "_make_training", lambda self, *args: (trainers.append(self), make(self, *args))[1])
    seen: list[bool] = []

    def its_train(training: Training) -> None:
        for _ in training.epochs():
            for (inputs,) in training.batches():
                loss = model(inputs).square().mean()
                loss.backward()
                if training.state.step == 1:
                    optimizer.during = trainers[0].abandon
                optimizer.step()
                seen.append(training.state.is_whole)
                if training.state.step == 1:
                    raise LookupError("of the function")
                training.commit(loss)

    config = Config(run_dir=tmp_path, epochs=1, global_batch_size=2, no_progress=True)
    with pytest.raises(LookupError):
        own_loop.run(its_train, model, optimizer, TensorDataset(torch.ones(4, 1)), config)
    assert seen == [False, False]


@pytest.mark.usefixtures("handlers")
def test_an_optimizer_is_its_owners_again_when_run_has_refused(tmp_path: Path) -> None:
    """In a notebook, say, which lives on."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    (tmp_path / "a file").touch()
    config = Config(run_dir=tmp_path / "a file", epochs=1, global_batch_size=2, no_progress=True)
    with pytest.raises(SystemExit):
        own_loop.run(train, model, optimizer, TensorDataset(torch.ones(4, 1)), config)
    optimizer.add_param_group({"params": [*model[0].parameters()]})
    optimizer.step()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("which", ["its own", "another one", "a part"])
def test_what_is_committed_is_saved_though_an_optimizer_has_stepped_between_two_steps(
    which: str, tmp_path: Path
) -> None:
    """As one that fits a probe after each epoch."""
    model, probe = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, probe))
    part = torch.optim.SGD(probe.parameters(), lr=0.1)
    vars(other)["base_optimizer"] = part  # SAM's second_step calls its step

    def its_train(training: Training) -> None:
        for _ in training.epochs():
            for (inputs,) in training.batches():
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                training.commit(loss)
            probe(torch.ones(1, 1)).sum().backward()
            {"its own": optimizer, "another one": other, "a part": part}[which].step()
            raise LookupError("of the function")

    config = Config(run_dir=tmp_path, epochs=2, global_batch_size=2, no_progress=True)
    extras: Any = {"probe": probe, "other": other}
    with pytest.raises(LookupError) as raised:
        own_loop.run(its_train, model, optimizer, TensorDataset(torch.ones(4, 1)), config, extras=extras)
    assert any("the state of step 2 is saved" in note for note in raised.value.__notes__)
    [saved] = tmp_path.glob("snapshots/*/state.pt")
    state = torch.load(saved, weights_only=True)
    assert (state["position"]["step"], state["model"].keys()) == (2, model.state_dict().keys())
    for given, module in ((state["model"], model), (state["extras"]["probe"], probe)):
        assert all(torch.equal(given[name], value) for name, value in module.state_dict().items())


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_training_in_one_run_directory_is_not_given_the_weights_of_the_first(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a script that trains before and then fine-tunes; one that was not finished goes on."""
    codes = [143, 0]
    entered: list[Path] = []

    def finish(worker: Any, _program: Any) -> int:
        entered.append(worker.directory.path)
        worker.reporter.close()
        worker.directory.ownership.release()
        worker.state.step = worker.state.last_step
        return codes.pop(0) if codes else 0

    def train_in(run_dir: Path, **flags: Any) -> None:
        config = Config(run_dir=run_dir, no_progress=True, **flags)
        own_loop.run(train, MODEL, OPTIMIZER, TensorDataset(torch.ones(4, 1)), config)

    monkeypatch.setattr(own_loop, "run_worker", finish)
    monkeypatch.setattr(own_loop, "_trained", set())
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(SystemExit):
        train_in(first)
    train_in(first)
    train_in(second)
    assert entered == [first, first, second]
    with nullcontext() if fresh else pytest.raises(SystemExit) as ended:
        train_in(tmp_path / "second" / ".." / "first", fresh=fresh)
    assert len(entered) == 3 + fresh
    if not fresh:
        assert ended is not None
        assert ended.value.code == 2
        assert "run() has trained to its end in" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0.3", b"0.3", None, [1.0], torch.ones(3)])
def test_what_is_no_scalar(given: Any) -> None:
    with pytest.raises(UsageError, match=r"commit\(\) was given .*: give the mean loss, a scalar"):
        scalar_of(given, "commit()", "the mean loss")


@pytest.mark.parametrize("given", [0.5, 1, torch.tensor(0.5), torch.ones(1), torch.ones(2).numpy()[0]])
def test_what_is_a_scalar(given: Any) -> None:
    assert scalar_of(given, "commit()", "the mean loss") == float(given)


def test_what_is_kept_is_a_number() -> None:
    evaluations = SimpleNamespace(keep=lambda _world, _metric: None)
    training: Any = SimpleNamespace(
        _steps=SimpleNamespace(require_none=lambda _what: None), _evaluations=evaluations, world=None
    )
    with pytest.raises(UsageError, match=r"keep\(\) was given None: give how good the model is, a scalar"):
        Training.keep(training, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_is_refused_is_not_told_that_its_code_differs(is_refused: bool) -> None:
    warned: list[str] = []
    worker: Any = SimpleNamespace(reporter=SimpleNamespace(warn=warned.append))

    def first_world() -> str:
        if is_refused:
            raise Refused("--lr is 0.25 here and 0.5 on the run")
        return "a world"

    earlier: Any = SimpleNamespace(first_world=first_world)
    with pytest.raises(Refused) if is_refused else nullcontext():
        assert find_world(earlier, worker, None) == "a world"
        assert warned == []
        assert find_world(earlier, worker, "another file") == "a world"
    assert warned == ([] if is_refused else ["another file"])


def test_what_a_broken_off_broadcast_has_left_in_the_weights_is_put_back() -> None:
    """NCCL ends it with garbage and no error, inside of DDP's constructor; a fake of the device stands in."""
    anything: Any = SimpleNamespace
    is_broken = True

    def require_unbroken() -> None:
        if is_broken:
            raise FormationFailed("the process group was broken off")

    world, device = anything(world_size=2), anything(type="cuda")
    parallel = OwnParallel(world, device, anything(), anything(), anything(), lambda: None, require_unbroken)
    module = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def broadcast() -> None:
        with torch.no_grad(), parallel._kept_if_broken(module):
            for value in module.state_dict().values():
                value.fill_(7)

    with pytest.raises(FormationFailed):
        broadcast()
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    is_broken = False
    broadcast()
    assert module.weight.tolist() == [7.0, 7.0]


@pytest.mark.usefixtures("group_of_one")
def test_another_communication_hook_is_refused_before_a_second_worker_joins() -> None:
    anything: Any = SimpleNamespace
    watcher = anything(do=lambda *_: None)
    steps = anything(turn_to_function=lambda: None)
    parallel = OwnParallel(
        anything(world_size=1), torch.device("cpu"), watcher, steps, anything(), lambda: None, lambda: None
    )
    ddp = parallel.wrap(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"^register_comm_hook\(\) of a module that training.parallel\(\) has made"):
        ddp.register_comm_hook(None, fp16_compress_hook)
    parallel.close()


def snippet_with(words: str) -> str:
    readme = (Path(own_loop.__file__).parents[1] / "training" / "README.md").read_text()
    [snippet] = [part for part in readme.split("```") if part.startswith("python\n") and words in part]
    return snippet.removeprefix("python\n")


@pytest.mark.parametrize(("samples", "world_size"), [(700, 1), (7, 3), (2, 3)])
def test_a_validation_as_the_readme_has_it(samples: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of all ranks are those over all samples, each once, also where a rank has none."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 3))
    inputs, labels = torch.randn(samples, 4), torch.arange(samples) % 3
    told: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", told.append)
    for rank in range(world_size):
        training = SimpleNamespace(model=model.train(), world=SimpleNamespace(rank=rank, world_size=world_size))
        names = {"training": training, "held_out": TensorDataset(inputs, labels), "torch": torch, "F": F}
        exec(snippet_with("held_out"), names | {"DataLoader": DataLoader, "Subset": Subset})
        assert model.training
    loss, count = torch.stack(told).sum(0)
    assert count == samples
    expected = F.cross_entropy(model.eval()(inputs), labels).item()
    assert (loss / count).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("samples", [10, 3, 1])
def test_gradients_that_add_up_as_the_readme_has_it(samples: int) -> None:
    """Clipped they are those of the whole batch, also where there are fewer samples than parts."""

    class Wrapped(nn.Linear):
        is_summing = True
        syncs: ClassVar[list[bool]] = []

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.is_summing = False
            yield
            self.is_summing = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.syncs.append(self.is_summing)
            return super().forward(inputs.view(len(inputs), -1))  # which torch refuses where there is no sample

    torch.manual_seed(1)
    ddp, inputs, labels = Wrapped(4, 3), torch.randn(samples, 4), torch.arange(samples) % 3
    whole = copy.deepcopy(ddp)
    expected = F.cross_entropy(whole(inputs), labels)
    expected.backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    Wrapped.syncs.clear()
    committed: list[torch.Tensor] = []
    names = {
        "training": SimpleNamespace(
            batches=lambda: [(inputs, labels)], device=torch.device("cpu"), commit=committed.append
        ),
        "ddp": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.0), "torch": torch, "F": F,
        "nullcontext": nullcontext,
    }  # fmt: skip
    exec(snippet_with("no_sync"), names)
    assert Wrapped.syncs == [False] * (min(4, samples) - 1) + [True]
    torch.testing.assert_close(committed, [expected.detach()], rtol=0.02, atol=0.02)
    torch.testing.assert_close(ddp.weight.grad, whole.weight.grad, rtol=0.02, atol=0.02)
