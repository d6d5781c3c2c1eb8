"""What stands behind `--` of a drill: flags of the worker, or a script as torchrun takes it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elastic_train.cli import make_parser
from elastic_train.errors import UsageError
from elastic_train.tools.drills.drill_command import settings_of
from elastic_train.tools.drills.nodes import clean_environment
from elastic_train.tools.program import BUNDLED_PROGRAM, read_program


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import elastic_train\n")
    (tmp_path / "plain.py").write_text("import torch\n")


def parsed(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["drill", "--nodes-as", "processes", *arguments])


@pytest.mark.parametrize(
    ("given", "words", "flags"),
    [
        ([], ("-m", "elastic_train"), []),
        (["--task", "x:Y"], ("-m", "elastic_train"), ["--task", "x:Y"]),
        (["-m", "elastic_train", "--lr", "1"], ("-m", "elastic_train"), ["--lr", "1"]),
        (["mine.py"], ("mine.py",), []),
        (["mine.py", "--epochs", "3", "data"], ("mine.py",), ["--epochs", "3", "data"]),
        (["-m", "mine", "--epochs=3"], ("-m", "mine"), ["--epochs=3"]),
    ],
)
def test_a_program_is_told_from_flags(given: list[str], words: tuple[str, ...], flags: list[str]) -> None:
    assert read_program(given, {}) == (words, flags)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["gone.py"], "gone.py: there is no such script in"),
        (["plain.py", "--epochs", "3"], "plain.py does not import elastic_train"),
        (["-m", "plain"], "plain does not import elastic_train"),
        (["-m", "gone"], "gone does not import elastic_train"),
        (["-m"], "-m: name the module"),
    ],
)
def test_what_cannot_be_drilled_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(parsed("--", *given))


def test_a_script_whose_modules_use_us_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TRAIN", "1")
    assert settings_of(parsed("--", "plain.py")).program == ("plain.py",)
    assert clean_environment()["ELASTIC_TRAIN"] == "1", "its nodes must be told, too"


def test_a_script_is_given_what_every_training_takes() -> None:
    found = settings_of(parsed("--nodes", "3", "--", "mine.py", "--rows", "7", "--peer-timeout=3"))
    assert (found.program, found.last_step) == (("mine.py",), None)
    assert found.flags == [
        "--ledger", "--no-progress", "--peer-timeout", "5", "--snapshot-every", "100", "--rows", "7",
        "--peer-timeout=3",
    ]  # fmt: skip
    assert found.peer_timeout == 3.0
    with pytest.raises(UsageError, match="--run-dir=x: the drill sets that itself"):
        settings_of(parsed("--", "mine.py", "--run-dir=x"))
    for wrong in ("soon", "0", "nan"):
        with pytest.raises(UsageError, match=rf"--peer-timeout\b.*\b{wrong}\b"):
            settings_of(parsed("--", "mine.py", "--peer-timeout", wrong))


def test_a_busy_job_is_one_of_the_drills_own() -> None:
    found = settings_of(parsed("--job", "first-step", "--", "--lr", "0.1"))
    assert found.program == BUNDLED_PROGRAM
    assert found.peer_timeout == 2.0
    assert not set(found.job.busy) & set(found.flags), "the undisturbed run is not to be busy"
    assert settings_of(parsed("--job", "large-state")).num_nodes == 3
    assert settings_of(parsed("--job", "large-state", "--nodes", "4")).num_nodes == 4
    for given in (["mine.py"], ["--dataset", "digits"]):
        with pytest.raises(UsageError, match="--job first-step: is for the drill's own jobs"):
            settings_of(parsed("--job", "first-step", "--", *given))


def test_a_job_of_fewer_steps_has_another_last_one() -> None:
    """It slows towards its end, so that the last faults come before that."""
    assert settings_of(parsed("--", "--max-steps", "420")).last_step == 420
