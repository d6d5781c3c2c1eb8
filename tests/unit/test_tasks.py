"""The task interface: its defaults, the bundled task, and finding a user's own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from elastic_train.config import Config
from elastic_train.elastic.worker import require_no_optimizer_flags
from elastic_train.errors import DatasetMissing, UsageError
from elastic_train.training import tasks
from elastic_train.training.tasks import ImageClassification, Task, flags_class, load_task, make_own_task


class Line(Task):
    """A regression."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        x = torch.linspace(-1, 1, 12).unsqueeze(1)
        return TensorDataset(x, 3 * x)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)


class TestDefaults:
    def test_a_smallest_task(self) -> None:
        task = Line()
        assert task.name == "Line"
        assert task.test_set is None
        assert task.train_set is task.train_set
        assert task.describe() == {"task": "Line", "train_length": 12, "test_length": 0}
        batch = task.collate([task.train_set[k] for k in range(5)])
        assert task.num_samples(batch) == 5

    @pytest.mark.parametrize("model", [nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), nn.Linear(2, 3)])
    def test_the_default_loss_refuses_a_regression(self, model: nn.Module) -> None:
        """Of a vector it would take each batch for one sample, and go below 0."""
        batch = (torch.zeros(4, 2), torch.zeros(4))
        with pytest.raises(UsageError, match="loss\\(self, model, batch\\)"):
            _Plain().loss(model, batch)

    @pytest.mark.parametrize("labels", [torch.zeros(4, dtype=torch.int64), torch.full((4, 3), 1 / 3)])
    def test_the_default_loss_takes_classes_and_shares_of_them(self, labels: torch.Tensor) -> None:
        assert _Plain().loss(nn.Linear(2, 3), (torch.zeros(4, 2), labels)) > 0.0

    def test_a_loss_of_its_own_is_what_is_evaluated(self) -> None:
        task, model = Line(), nn.Linear(1, 1)
        batch = task.collate([task.train_set[k] for k in range(5)])
        sums = task.evaluate(model, batch)
        assert set(sums) == {"loss"}
        assert torch.allclose(sums["loss"], 5 * task.loss(model, batch))

    def test_classification_sums(self) -> None:
        batch = (torch.eye(3), torch.tensor([0, 1, 1]))
        task = _Plain()
        sums = task.evaluate(nn.Identity(), batch)
        assert set(sums) == {"loss", "correct"}
        assert sums["correct"] == 2
        assert torch.allclose(sums["loss"], 3 * task.loss(nn.Identity(), batch))

    def test_batches_of_every_shape(self) -> None:
        class Pair(NamedTuple):
            x: Tensor
            note: str

        task, meta = _Plain(), torch.device("meta")
        batch = {"a": [torch.zeros(4, 2), 7], "b": Pair(torch.zeros(4), "n")}
        assert task.num_samples(batch) == 4
        moved = task.to_device(batch, meta)
        assert moved["a"][0].device == meta
        assert moved["a"][1] == 7
        assert isinstance(moved["b"], Pair)
        assert moved["b"].x.device == meta
        with pytest.raises(TypeError, match="define num_samples"):
            task.num_samples("words")

    def test_what_must_be_written_says_so(self) -> None:
        with pytest.raises(UsageError, match=r"_Plain must define build_model\(\)"):
            _Plain().build_model()
        with pytest.raises(UsageError, match=r"_Plain must define train_dataset\(\)"):
            _Plain().train_dataset()

    def test_learning_rate_goes_with_the_optimizer(self) -> None:
        assert Line().defaults()["optimizer"] == "adamw"
        assert Line().defaults("sgd")["optimizer"] == "sgd"
        assert Line().defaults("sgd")["lr"] > Line().defaults("adamw")["lr"]
        assert ImageClassification(model="vit_b_16").defaults()["optimizer"] == "adamw"
        assert ImageClassification(model="vgg11").defaults()["lr"] < ImageClassification().defaults()["lr"]

    def test_frozen_parameters_are_left_out(self) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        (group,) = Line().parameter_groups(model)
        assert group["params"] == [model.weight]


class _Plain(Task):
    pass


@dataclass
class _Flags:
    width: int = 3


class _Flagged(Task):
    def __init__(self, flags: _Flags, unused: int = 0) -> None:
        self.flags = flags


class _Refused(Task):
    def __init__(self, width: int) -> None:
        self.width = width


class TestOwnFlags:
    def test_a_dataclass_in_the_constructor(self) -> None:
        assert flags_class(_Flagged) is _Flags
        task = make_own_task(_Flagged, _Flags(width=7))
        assert isinstance(task, _Flagged)
        assert task.flags.width == 7

    def test_none(self) -> None:
        assert flags_class(_Plain) is None
        assert isinstance(make_own_task(_Plain, None), _Plain)

    def test_what_no_flag_can_give(self) -> None:
        with pytest.raises(UsageError, match=r"_Refused\(width\) cannot be made from flags"):
            flags_class(_Refused)

    def test_an_optimizer_of_ones_own_takes_no_flags_of_ours(self) -> None:
        require_no_optimizer_flags(Config(schedule="constant"), _Plain())
        with pytest.raises(UsageError, match="--lr: _Plain builds its own optimizer"):
            require_no_optimizer_flags(Config(lr=0.1), _Plain())


class TestImageClassification:
    def test_describe(self) -> None:
        assert ImageClassification().describe() == {
            "task": "image-classification",
            "dataset": "digits",
            "model": "cnn",
            "train_length": 1437,
            "test_length": 360,
            "classes": 10,
            "image_size": 8,
        }

    @pytest.mark.parametrize("model", ["cnn", "mlp", "resnet18"])
    def test_one_step_and_one_evaluation(self, model: str) -> None:
        task = ImageClassification("digits", model)
        torch.manual_seed(0)
        network = task.build_model()
        batch = task.train_set.gather(torch.tensor([3]), 0)  # type: ignore[attr-defined]
        torch.autograd.backward(task.loss(network.train(), batch))
        assert all(parameter.grad is not None for parameter in network.parameters())
        with torch.no_grad():
            assert task.evaluate(network.eval(), batch)["correct"] in (0, 1)

    def test_digits_are_learnt(self) -> None:
        """A taste of the default run: a tenth of its epochs."""
        task = ImageClassification()
        torch.manual_seed(0)
        model, defaults = task.build_model(), task.defaults()
        optimizer = torch.optim.SGD(task.parameter_groups(model), lr=defaults["lr"], momentum=defaults["momentum"])
        for epoch in range(3):
            for indices in torch.tensor_split(torch.randperm(1437), 22):
                optimizer.zero_grad()
                batch = task.train_set.gather(indices, epoch)  # type: ignore[attr-defined]
                torch.autograd.backward(task.loss(model, batch))
                optimizer.step()
        with torch.no_grad():
            batch = task.test_set.gather(torch.arange(360), 0)  # type: ignore[union-attr]
            sums = task.evaluate(model.eval(), batch)
        assert sums["correct"] >= 330

    def test_names_are_checked_before_any_data_is_read(self) -> None:
        with pytest.raises(UsageError, match="did you mean digits"):
            ImageClassification("digit")
        with pytest.raises(UsageError, match="did you mean"):
            ImageClassification("digits", "resnet19")

    def test_missing_data(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetMissing):
            _ = ImageClassification("imagefolder", data_dir=tmp_path).train_set


class TestLoadTask:
    @pytest.fixture(autouse=True)
    def in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            if name.startswith("users_"):
                del sys.modules[name]

    def write(self, name: str, text: str) -> None:
        Path(name).write_text(textwrap.dedent(text))

    def test_finds_it_in_the_current_directory(self) -> None:
        self.write("users_one.py", "from elastic_train.training.tasks import Task\nclass Mine(Task): pass\n")
        found = load_task("users_one:Mine")
        assert issubclass(found, Task)
        assert found.name == "Mine"

    def test_the_example_in_the_documentation_works(self) -> None:
        assert tasks.__doc__ is not None
        example = tasks.__doc__.split("\n\n", 1)[1]
        self.write("users_example.py", textwrap.dedent(example))
        task = load_task("users_example:Parity")()
        samples = [task.train_set[k] for k in (0, 1, 3, 255)]
        assert [int(label) for _, label in samples] == [0, 1, 0, 0]
        assert task.loss(task.build_model(), task.collate(samples)).ndim == 0

    def test_missing_module(self) -> None:
        with pytest.raises(UsageError, match="no module named users_absent"):
            load_task("users_absent:Mine")
        with pytest.raises(UsageError, match="no module named users_absent"):
            load_task("users_absent.deeper:Mine")

    def test_missing_name(self) -> None:
        self.write("users_two.py", "from elastic_train.training.tasks import Task\nclass Mine(Task): pass\n")
        with pytest.raises(UsageError, match=r"users_two\.py has no Min; did you mean Mine\?"):
            load_task("users_two:Min")

    def test_no_task(self) -> None:
        self.write("users_three.py", "Mine = 3\n")
        with pytest.raises(UsageError, match="not a subclass"):
            load_task("users_three:Mine")

    @pytest.mark.parametrize("spec", ["users_one", "users_one:", ":Mine", "users-one:Mine", ".users_one:Mine"])
    def test_malformed(self, spec: str) -> None:
        with pytest.raises(UsageError, match="write it as MODULE:NAME"):
            load_task(spec)

    @pytest.mark.parametrize(
        ("spec", "meant"), [("users_one.py:Mine", "users_one:Mine"), ("./a/users_one.py", "a.users_one:MyTask")]
    )
    def test_a_file_is_told_as_the_module_that_is_meant(self, spec: str, meant: str) -> None:
        with pytest.raises(UsageError, match=rf"{meant}$"):
            load_task(spec)

    def test_the_users_own_errors_are_left_alone(self) -> None:
        self.write("users_four.py", "1 / 0\n")
        with pytest.raises(ZeroDivisionError):
            load_task("users_four:Mine")
        self.write("users_five.py", "import users_not_installed\n")
        with pytest.raises(ModuleNotFoundError, match="users_not_installed"):
            load_task("users_five:Mine")
