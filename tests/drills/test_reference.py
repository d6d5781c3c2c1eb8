"""The undisturbed run of a drill, and when one of an earlier drill will do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.tools.audit.history import read_history
from elastic_train.tools.drills import reference
from elastic_train.tools.drills.jobs import BUNDLED_TASK
from elastic_train.tools.drills.program import DrilledProgram
from elastic_train.tools.drills.reference import ReferenceFailed, device_of, facts_of, kept_at, undisturbed
from elastic_train.tools.drills.user_code import digests

SCRIPT = """
import json, sys, time
from pathlib import Path
import helper
run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
(run_dir / "events").mkdir(parents=True)
line = {"event": "step", "generation": 0, "step": 7, "loss": 0.5, "epoch": 0, "world_size": 1}
times = {"time": time.time(), "monotonic": time.monotonic()}
start = {"event": "start", "generation": None, "step": 0, **helper.DEVICE}
lines = [json.dumps(one | times) + "\\n" for one in (start, line)]
(run_dir / "events" / "host-0-1.jsonl").write_text("".join(lines))
with open("runs.txt", "a") as file:
    file.write("run\\n")
time.sleep(helper.SECONDS)
(run_dir / "result.json").write_text(json.dumps({"step": 7}))
"""
"""stands for a training: it writes what one writes"""
PROGRAM = DrilledProgram(("script.py",))


def write_helper(folder: Path, *, seconds: float = 0.0, **device: str) -> None:
    (folder / "helper.py").write_text(f"SECONDS = {seconds}\nDEVICE = {device}\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "script.py").write_text(SCRIPT)
    write_helper(tmp_path)
    return tmp_path


def run(folder: Path, *flags: str, device: str | None = None) -> list[str]:
    """What is said."""
    said: list[str] = []
    found = undisturbed(flags, cwd=folder, program=PROGRAM, log=said.append, last_step=9, device=device)
    assert (found["step"], found["early_loss"], found["late_loss"]) == (7, 0.5, None)
    return said


def num_runs(folder: Path) -> int:
    return len((folder / "runs.txt").read_text().splitlines())


def test_it_is_kept_while_code_flags_and_versions_are_the_same(folder: Path) -> None:
    [first] = run(folder)
    assert "for the next drill" in first
    [again] = run(folder)
    assert "kept from an earlier drill" in again
    assert num_runs(folder) == 1
    write_helper(folder, seconds=0.001)
    [anew] = run(folder)
    assert f"anew, for {folder / 'helper.py'} changed" in anew
    run(folder)
    assert num_runs(folder) == 2
    run(folder, "--epochs", "3")
    assert num_runs(folder) == 3


def test_another_version_of_a_package_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    monkeypatch.setattr(reference, "distributions", lambda: [])
    [anew] = run(folder)
    assert "anew, for the installed packages changed" in anew


def test_another_device_is_told(folder: Path) -> None:
    """As where CUDA_VISIBLE_DEVICES hides the GPUs once, or two machines have one home directory."""
    write_helper(folder, device="cuda:0", gpu="GPU 1")
    [first] = run(folder, device="cuda GPU 1")
    assert "for the next drill" in first
    for device in ("cuda GPU 1", None):
        [again] = run(folder, device=device)
        assert "kept from an earlier drill" in again
    for device in ("cpu", "cuda GPU 2"):
        [anew] = run(folder, device=device)
        assert "anew, for the device changed" in anew


@pytest.mark.parametrize(
    ("start", "device"),
    [({"device": "cpu"}, "cpu"), ({"device": "cuda:3", "gpu": "NVIDIA H100"}, "cuda NVIDIA H100"), ({}, "unknown")],
)
def test_what_a_run_has_trained_on(tmp_path: Path, start: dict[str, str], device: str) -> None:
    line = {"event": "start", "time": 1.0, "generation": None, "step": 0, **start}
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "host-0-1.jsonl").write_text(json.dumps(line) + "\n")
    assert device_of(read_history(tmp_path)) == device


def test_a_file_that_a_flag_names_counts(folder: Path) -> None:
    (folder / "words.txt").write_text("one")
    before = facts_of(PROGRAM, ["--words=words.txt"], folder)
    (folder / "words.txt").write_text("two and more")
    assert reference.changes(before, facts_of(PROGRAM, ["--words=words.txt"], folder)) == ["--words=words.txt"]


def test_where_flags_name_data_it_is_run_each_time(folder: Path) -> None:
    for _ in range(2):
        [said] = run(folder, "--init-from=weights.pt")
        assert "not kept: its flags name data" in said
    assert num_runs(folder) == 2


def test_how_far_it_is_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TELL_SECONDS", 0.2)
    write_helper(folder, seconds=1.0)
    assert "step 7 of 9" in run(folder)[-1]


def test_what_it_died_of_is_told(folder: Path) -> None:
    (folder / "script.py").write_text("raise SystemExit('no such planet')")
    with pytest.raises(ReferenceFailed, match="code 1: no such planet"):
        undisturbed([], cwd=folder, program=PROGRAM, log=lambda _line: None)
    kept = kept_at(PROGRAM, [], folder)
    assert kept is not None
    assert not kept.exists()


def test_code_is_found_that_is_imported_late_and_within_packages(folder: Path) -> None:
    (folder / "package").mkdir()
    for name, text in (("__init__", ""), ("task", "from .parts import x\n"), ("parts", "def x():\n import late\n")):
        (folder / "package" / f"{name}.py").write_text(text)
    (folder / "late.py").write_text("import torch, elastic_train, missing\n")
    (folder / "other.py").write_text("")
    found = digests(("-m", "package.task"), folder)
    names = ["late.py", "package/__init__.py", "package/parts.py", "package/task.py"]
    assert list(found) == [str(folder / name) for name in names]


def test_our_own_task_is_known_by_the_code_of_the_package(folder: Path) -> None:
    flags = ["--task", BUNDLED_TASK]
    assert set(facts_of(DrilledProgram(), flags, folder)) == set(facts_of(DrilledProgram(), [], folder))
    given = kept_at(DrilledProgram(), flags, folder)
    assert given is not None
    given.parent.mkdir(parents=True)
    given.write_text(json.dumps({"facts": facts_of(DrilledProgram(), flags, folder), "result": {"step": 3}}))
    assert undisturbed(flags, cwd=folder / "elsewhere", log=lambda _line: None) == {"step": 3}
