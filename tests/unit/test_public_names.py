"""The public face: what it exports, that it is lazy, documented and typed, and that its parts work by themselves."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import elastic_train
from elastic_train.storage.snapshot import read_info

EXAMPLES = Path(__file__).parents[2] / "elastic_train" / "examples"


@pytest.mark.parametrize("name", elastic_train.__all__)
def test_every_public_name_exists_and_says_what_it_is(name: str) -> None:
    found = getattr(elastic_train, name)
    assert inspect.getdoc(found)
    for method_name, method in vars(found).items() if inspect.isclass(found) else ():
        if inspect.isfunction(method) and not method_name.startswith("_"):
            assert inspect.getdoc(method) or name == "Stateful" or method_name in ("state_dict", "is_due"), (
                f"{name}.{method_name}"
            )
    assert name in dir(elastic_train)


def test_what_can_be_caught_is_public() -> None:
    known = {*elastic_train.__all__, *vars(builtins)}
    for name in elastic_train.__all__:
        found = getattr(elastic_train, name)
        for owner in [found, *(vars(found).values() if inspect.isclass(found) else ())]:
            raised = (inspect.getdoc(owner) or "").partition("Raises:")[2]
            errors = re.findall(r"\b[A-Z]\w+(?:Error|Diverged|Missing|Mismatch|Damaged|Failed)\b", raised)
            assert known.issuperset(errors), f"{name}: {errors}"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        elastic_train.Trainer  # noqa: B018


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, elastic_train; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


TYPED = """

from dataclasses import dataclass


@dataclass
class Mine:
    width: int = 3


def more(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    config, mine = elastic_train.parse_flags(Mine)
    state = elastic_train.run(
        train, model, optimizer, parity(mine.width), config,
        extras={
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "scaler": torch.amp.GradScaler("cuda"),
            "averaged": torch.optim.swa_utils.AveragedModel(model),
        },
    )
    epochs: int = state.epoch
    print(epochs)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_script_that_uses_them_is_fully_typed(tmp_path: Path) -> None:
    script = tmp_path / "typed.py"  # torch's own Tensor.backward has no types
    script.write_text(
        (EXAMPLES / "elastic_ddp.py").read_text().replace("loss.backward()", "torch.autograd.backward(loss)")
    )
    script.write_text(script.read_text() + TYPED)
    files = [str(script), str(EXAMPLES / "parity_task.py"), str(EXAMPLES / "parts_alone.py")]

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", *files],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=tmp_path,
            env=os.environ | {"MYPYPATH": str(EXAMPLES.parents[1])},  # an editable install is nothing that mypy can see
        )

    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    mistakes = "width: str = elastic_train.parse_flags(Mine)[1].width\nnumber: int = elastic_train.run\n"
    script.write_text(script.read_text() + mistakes)
    said = check().stdout
    assert "Found 2 errors in 1 file" in said, "types are seen, and are no Any"


def test_state_and_snapshots_by_themselves(tmp_path: Path) -> None:
    def make(seed: int) -> elastic_train.TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        return elastic_train.TrainState(model, optimizer, length=10, global_batch_size=4, epochs=2)

    def step(state: elastic_train.TrainState) -> None:
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 3)).square().mean().backward()
        state.optimizer.step()
        state.commit(0.5)

    store = elastic_train.SnapshotStore(tmp_path / "snapshots", keep=2)
    assert store.load_newest() is None
    state = make(0)
    for _ in range(4):
        step(state)
        store.save(state.state_dict(), step=state.step)
    step(state)
    assert store.save_in_background(state.state_dict(), step=state.step)
    store.wait()
    other, found = make(1), store.load_newest()
    assert found is not None
    info, loaded = found
    other.load_state_dict(loaded)
    assert (info.step, other.step, other.epoch, other.samples_done) == (5, 5, 1, 8)
    assert torch.equal(other.model.weight, state.model.weight)  # type: ignore[arg-type]
    assert len(list((tmp_path / "snapshots").iterdir())) == 2


def test_the_example_of_the_parts_goes_on_from_its_newest_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def last_line() -> str:
        runpy.run_path(str(EXAMPLES / "parts_alone.py"), run_name="__main__")
        return capsys.readouterr().out

    first = last_line()
    assert re.fullmatch(r"step 480: loss 0\.0\d+\n", first)
    oldest, *newer = sorted((tmp_path / "parts_alone_snapshots").iterdir())
    for path in newer:
        shutil.rmtree(path)
    assert read_info(oldest).step < 480
    assert last_line() == first, "the rest of it, in the same order"


def test_a_damaged_snapshot_costs_a_warning(tmp_path: Path) -> None:
    store = elastic_train.SnapshotStore(tmp_path)
    store.save({"x": torch.ones(1)}, step=1)
    (store.save({"x": torch.ones(2)}, step=2) / "state.pt").write_bytes(b"rot")
    with pytest.warns(UserWarning, match=r"state\.pt has 3 bytes"):
        found = store.load_newest()
    assert found is not None
    assert found[0].step == 1
