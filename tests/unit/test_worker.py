"""A worker's parts as its flags build them: the model's form and place."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_train.__main__ import quick_imports
from elastic_train.config import Config
from elastic_train.elastic.evaluations import odd_numbers
from elastic_train.elastic.worker import (
    Worker,
    bucket_of,
    check_start,
    check_state,
    make_directory,
    make_state,
    require_bucket,
    warn_of_flags,
)
from elastic_train.elastic.world_report import describe_share
from elastic_train.errors import Refused, RunDirectoryError, SnapshotError, UsageError
from elastic_train.rendezvous.launch import C10dSettings, Launch
from elastic_train.rules import require_agreement
from elastic_train.storage import store_arms
from elastic_train.storage.store_arms import MemoryArm, PlainArm
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.data_identity import identify_state
from elastic_train.training.state import TrainState
from elastic_train.training.tasks import ImageClassification, Task

CPU = torch.device("cpu")


def convolutions(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.in_channels > 1]


@pytest.mark.parametrize(
    ("gives", "flags", "message"),
    [
        (3, {}, r"Scheduled.schedule gave an int: it must give a function"),
        (lambda step, last: None, {}, r"gave a function that gives nothing"),
        (lambda step, last: 1.0, {"schedule": "constant"}, r"--schedule: Scheduled has a schedule of its own"),
    ],
)
def test_a_schedule_of_ones_own_is_a_function_and_the_only_one(gives: Any, flags: dict[str, Any], message: str) -> None:
    class Scheduled(Task):
        def build_model(self) -> nn.Module:
            return nn.Linear(1, 2)

        def train_dataset(self) -> Any:
            return TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))

        def schedule(self) -> Any:
            return gives

    with pytest.raises(UsageError, match=message):
        make_state(Config(**flags), Scheduled(), CPU)


def test_a_model_that_is_not_returned_is_one_line() -> None:
    class Forgetful(Task):
        def build_model(self) -> Any:
            nn.Linear(1, 1)

    with pytest.raises(UsageError, match=r"^Forgetful.build_model gave nothing \(is its return missing\?\): it must"):
        make_state(Config(), Forgetful(), CPU)


def test_a_model_without_values_is_one_line() -> None:
    class Hollow(Task):
        def build_model(self) -> nn.Module:
            with torch.device("meta"):
                return nn.Sequential(nn.Linear(1, 1))

    said = r"^0\.weight of the model is on the meta device, where it has no values: .*to_empty\(device="
    with pytest.raises(UsageError, match=said):
        make_state(Config(), Hollow(), CPU)


@pytest.mark.parametrize("named", ["the model", r"extras\['d'\]"])
def test_a_module_with_a_part_without_values_is_one_line(named: str) -> None:
    """Wherever the rest of it is, and whoever has built it."""
    whole, hollow = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False, device="meta"))
    model, other = (hollow, whole) if named == "the model" else (whole, hollow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, length=4, global_batch_size=4, epochs=1, extras={"d": other})
    with pytest.raises(UsageError, match=rf"^1\.running_mean of {named} is on the meta device"):
        check_state(Config(), ImageClassification("digits", "mlp"), state)


class Margin(Task):
    """Its head lies beside the model, as a loss has it."""

    def __init__(self, *, builds: bool) -> None:
        self.head, self.builds = nn.Linear(2, 3), builds

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 2)

    def train_dataset(self) -> Any:
        return TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [*model.parameters()]}, {"params": [*self.head.parameters()]}]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.SGD(self.parameter_groups(model), lr=0.1) if self.builds else None


@pytest.mark.parametrize("builds", [False, True])
def test_an_optimizer_trains_nothing_beside_the_model(builds: bool) -> None:
    said = r"^the optimizer trains 2 parameters \(\(3, 2\), \(3,\)\) that the model does not have: put them into"
    with pytest.raises(UsageError, match=said):
        make_state(Config(), Margin(builds=builds), CPU)


def test_channels_last_is_kept_where_a_snapshot_is_loaded() -> None:
    task = ImageClassification("digits", "cnn")
    plain, state = (make_state(Config(channels_last=flag), task, CPU) for flag in (False, True))
    state.load_state_dict(plain.state_dict())
    weights = convolutions(state.model)
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert not any(weight.is_contiguous() for weight in weights)
    assert all(torch.equal(*pair) for pair in zip(weights, convolutions(plain.model), strict=True))


def test_compiling_changes_no_name() -> None:
    task = ImageClassification("digits", "mlp")
    plain, compiled = (
        make_state(Config(compile=flag, ema_decay=0.9), task, CPU).state_dict() for flag in (False, True)
    )
    assert compiled["model"].keys() == plain["model"].keys()
    assert compiled["extras"]["ema"].keys() == plain["extras"]["ema"].keys() == plain["model"].keys()


class Spread(Task):
    def __init__(self, *places: str) -> None:
        self.places = places

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(1, 1, device=place) for place in self.places))

    def train_dataset(self) -> Any:
        return TensorDataset(torch.ones(4, 1))


@pytest.mark.parametrize(("places", "found"), [(("cpu", "meta"), ["cpu", "meta"]), (("cpu", "cpu"), ["meta", "meta"])])
def test_a_model_that_its_task_has_spread_out_stays_where_it_is(places: tuple[str, ...], found: list[str]) -> None:
    """The device of the worker is one without memory here, which any machine has."""
    model = make_state(Config(), Spread(*places), torch.device("meta")).model
    assert [layer.weight.device.type for layer in model.children()] == found


def test_a_snapshot_directory_of_no_use_is_told_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Config(run_dir=tmp_path / "run", snapshot_dir=str(tmp_path / "file"))
    with pytest.raises(RunDirectoryError, match=r"^--snapshot-dir .*/file cannot be written to: Not a directory"):
        make_directory(config, "none")


IDENTITY = {"training set by its items": "1f"}


@dataclass
class OwnFlags:
    gain: float = 0.5
    scratch: Path = Path("here")


def agreement_of(**flags: Any) -> dict[str, Any]:
    config = Config(task="mine:Spread", own_flags=OwnFlags(), **flags)
    worker: Any = SimpleNamespace(config=config, task=Spread("cpu"), device=CPU, identity=IDENTITY)
    return Worker.agreement(worker)


def test_members_agree_on_a_tasks_flags_but_for_paths() -> None:
    agreement = agreement_of()
    assert agreement["--gain"] == 0.5
    assert agreement["--task"] == "mine:Spread"
    assert "--scratch" not in agreement
    assert agreement["training set by its items"] == "1f"


def state_of(model: nn.Module, groups: Any = None, **extras: Any) -> TrainState:
    optimizer = torch.optim.Adam([*model.parameters()] if groups is None else groups)
    return TrainState(model, optimizer, length=4, global_batch_size=2, epochs=1, extras=extras)


def test_members_agree_on_the_shapes_of_a_model_and_not_on_its_values() -> None:
    def found(model: nn.Module) -> dict[str, str]:
        return identify_state(state_of(model))

    assert found(nn.Linear(2, 3)) == found(nn.Linear(2, 3))
    assert found(nn.Linear(2, 3))["the model"].startswith("2 tensors of 9 numbers (")
    assert found(nn.Linear(2, 3))["the model"] != found(nn.Linear(3, 2, bias=False))["the model"]
    assert found(nn.Linear(1, 1).half()) != found(nn.Linear(1, 1))
    assert found(nn.Linear(1, 1))["what extras holds"] == "nothing"
    averaged = state_of(model := nn.Linear(1, 1), ema=AveragedWeights(model, 0.9), scheduler=object())
    assert identify_state(averaged)["what extras holds"] == "scheduler", "who lacks --ema-decay hears of that flag"
    assert found(nn.Sequential(nn.LazyLinear(3))) == {}, "the first batch says what it is"


def test_members_agree_on_which_parameters_each_optimizer_trains_in_which_order() -> None:
    """torch hands moments over by the place of a parameter, and a script may list parameters by a set, in another order
    in each process. A newcomer, or a later start, would then train with the moments of other weights, and no comparison
    of states shows that."""
    model, critic = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    first, second, *rest = model.parameters()

    def found(groups: Any, judge: Any) -> dict[str, Any]:
        return of_snapshot(state_of(model, groups, critic=critic, judge=judge))

    def of_snapshot(state: TrainState) -> dict[str, Any]:
        config, identity = Config(task="mine:Spread"), identify_state(state)
        worker: Any = SimpleNamespace(config=config, task=Spread("cpu"), identity=identity, state=state)
        return Worker.must_agree_with_snapshot(worker)

    def judge_of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters)

    usual = found([first, second, *rest], judge_of(critic.weight, critic.bias))
    assert usual["order of the parameters of the optimizer"].startswith("4 parameters (")
    assert usual["order of the parameters of extras['judge']"].startswith("2 parameters (")
    assert usual == found([first, second, *rest], judge_of(critic.weight, critic.bias))
    assert usual != found([first, rest[1], rest[0], second], judge_of(critic.weight, critic.bias))
    assert usual != found([first, second, *rest], judge_of(critic.bias, critic.weight))

    layers = nn.ModuleList([model[1], critic])  # a module among the extras may hold layers of the model
    found_more = of_snapshot(state_of(model, critic=critic, judge=judge_of(critic.weight, critic.bias), layers=layers))
    assert usual == found_more, "extras may come and go"

    one, two = state_of(model), state_of(model, [{"params": [first, second]}, {"params": rest}])
    assert identify_state(one) != identify_state(two), "a newcomer gets the groups of the others as well"
    assert of_snapshot(one) == of_snapshot(two), "a new start may set other rates for some"


def test_members_agree_on_the_peer_timeout() -> None:
    """A death that one member counts as proven in time would be late for another: two worlds would have one parent."""
    with pytest.raises(Refused, match=r"^--peer-timeout is 30\.0 here and 2\.0 on the run"):
        require_agreement(agreement_of(peer_timeout=30.0), agreement_of(peer_timeout=2.0))


def test_members_agree_on_a_bucket_and_not_on_a_folder() -> None:
    assert agreement_of(snapshot_dir="memory://here")["--snapshot-dir"] == "memory://here"
    assert "--snapshot-dir" not in agreement_of(snapshot_dir="/a/folder")
    with pytest.raises(UsageError, match="credentials do not belong into a URL"):
        agreement_of(snapshot_dir="s3://key:secret@bucket/run")


@pytest.mark.parametrize("on_split", ["wait", "go-on"])
def test_a_programs_path_is_a_snapshot_dir(tmp_path: Path, on_split: str) -> None:
    path: Any = tmp_path / "snapshots"
    config = Config(snapshot_dir=path, on_split=on_split)
    assert bucket_of(config) is None
    url: Any = Path("s3:/bucket/run")
    with pytest.raises(UsageError):
        bucket_of(Config(snapshot_dir=url, on_split=on_split))


def test_members_agree_on_the_key_and_do_not_tell_it(tmp_path: Path) -> None:
    def agreement(key: str | None) -> dict[str, Any]:
        if key is not None:
            (tmp_path / key).write_text(key)
        return agreement_of(snapshot_key=None if key is None else tmp_path / key)

    key, other = "a key of 16 bytes", "another key of 16"
    require_agreement(agreement(key), agreement(key))
    for theirs in (None, other):
        with pytest.raises(Refused, match=r"^--snapshot-key is '[0-9a-f]{12}' here and '.*' on the run") as raised:
            require_agreement(agreement(key), agreement(theirs))
        assert "key of" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "world_size", "share"),
    [
        ({}, 1, "64"),
        ({}, 4, "16"),
        ({}, 3, "21 to 22"),
        ({"global_batch_size": 3}, 3, "1"),
        ({"reduction": "ordered"}, 3, "16 to 24"),
        ({"reduction": "ordered", "virtual_ranks": 4}, 4, "16"),
    ],
)
def test_what_a_worker_has_of_the_global_batch(flags: dict[str, Any], world_size: int, share: str) -> None:
    assert describe_share(Config(**flags), world_size) == share


@pytest.mark.parametrize("error", [None, ImportError("no such module")])
def test_garbage_collection_rests_while_modules_are_imported(error: Exception | None) -> None:
    with pytest.raises(ImportError) if error else nullcontext(), quick_imports():
        assert not gc.isenabled()
        if error:
            raise error
    gc.unfreeze()  # of this process, which goes on with other tests
    assert gc.isenabled()


UP_TO_FOUR = Launch(agent_pid=1, c10d=C10dSettings(("h:1",), min_nodes=1, max_nodes=4, last_call=2.0))


def test_no_job_waits_for_more_nodes_than_it_can_have() -> None:
    check_start(Config(min_nodes=4), UP_TO_FOUR)
    check_start(Config(min_nodes=1), Launch())
    check_start(Config(min_nodes=2), Launch(num_nodes=2))
    check_start(Config(min_nodes=2), Launch(agent_pid=1))  # a launcher of which nothing more is known
    with pytest.raises(UsageError, match="--min-nodes 5: this job has 4 nodes at most"):
        check_start(Config(min_nodes=5), UP_TO_FOUR)
    with pytest.raises(UsageError, match="--min-nodes 2: this job has 1 node at most"):
        check_start(Config(min_nodes=2), Launch())


def test_a_store_endpoint_is_read_where_it_is_not_used_too() -> None:
    with pytest.raises(UsageError, match="--store-endpoint h:99999: a port is 1 to 65535"):
        check_start(Config(store_endpoint="h:99999"), Launch())


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("none", "No such file or directory")])
def test_weights_that_are_out_of_reach_are_told_before_anything_is_made(name: str, why: str) -> None:
    with pytest.raises(SnapshotError, match=f"^{name} cannot be read: {why} \\(--init-from\\)$"):
        check_start(Config(init_from=Path(name)), Launch())


def test_weights_at_a_url_are_told_how_to_be_had() -> None:
    remedy = r"s3://\.\.\.: no URL works here; `elastic-train snapshot copy URL FOLDER` brings a snapshot to a folder$"
    with pytest.raises(UsageError, match=f"^--init-from {remedy}") as raised:
        check_start(Config(init_from=Path("s3://user:hunter2@bucket/run-1")), Launch())
    assert "hunter2" not in str(raised.value)


def test_passes_of_a_static_graph_are_not_limited() -> None:
    with pytest.raises(UsageError, match="--static-graph --micro-batch-size 8: DDP makes one pass a step"):
        check_start(Config(static_graph=True, micro_batch_size=8), Launch())


@pytest.mark.parametrize(
    ("flags", "length", "told"),
    [
        (
            {"task": "mine:Mine", "data_dir": Path("photos"), "download": True},
            64,
            ["--data-dir", "--download"],
        ),
        ({"task": "mine:Mine"}, 64, []),
        ({"data_dir": Path("photos"), "dataset": "cifar10"}, 64, []),
        ({"global_batch_size": 65}, 64, ["--global-batch-size 65 is more than the 64 samples of the training set"]),
    ],
)
def test_flags_that_do_less_than_they_say_are_warned_of(flags: dict[str, Any], length: int, told: list[str]) -> None:
    said: list[str] = []
    task = Task() if "task" in flags else ImageClassification("digits", "mlp", Path(), 0)
    warn_of_flags(Config(**flags), Launch(), task, length, SimpleNamespace(warn=said.append))  # type: ignore[arg-type]
    assert len(said) == len(told)
    assert all(line.startswith(start) for line, start in zip(said, told, strict=True))


def test_metrics_that_cannot_be_right_are_warned_of() -> None:
    assert odd_numbers({"accuracy": 1.0, "loss": 3.0}, 7) == {}
    odd = odd_numbers({"accuracy": 1.5, "loss": float("inf")}, 7)
    assert odd["accuracy"].startswith("the test accuracy is 1.5, and must be from 0 to 1")
    assert odd["loss"].startswith("the test set's loss is inf at step 7")
    assert "is nan at step 7" in odd_numbers({"accuracy": float("nan")}, 7)["accuracy"]


@pytest.mark.parametrize("arm", [MemoryArm, PlainArm])
def test_a_bucket_without_a_conditional_put_is_told_in_one_line(
    arm: type[PlainArm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_arms, "MemoryArm", arm)
    url = f"memory://told/{arm.__name__}"
    told: list[str] = []
    reporter: Any = SimpleNamespace(warn=told.append)
    require_bucket(Config(snapshot_dir=url), reporter)
    assert told == (
        [
            f"{url} has no conditional put that can be relied on: a second job with the same --snapshot-dir may be "
            "noticed late, or not at all"
        ]
        if arm is PlainArm
        else []
    )
