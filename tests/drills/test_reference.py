"""The undisturbed run of a drill."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.tools.drills import reference
from elastic_train.tools.drills.reference import ReferenceFailed, undisturbed

SCRIPT = """
import json, sys, time
from pathlib import Path
run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
(run_dir / "events").mkdir(parents=True)
line = {"time": time.time(), "event": "step", "generation": 0, "step": 7, "loss": 0.5, "epoch": 0, "world_size": 1}
(run_dir / "events" / "host-0-1.jsonl").write_text(json.dumps(line) + "\\n")
while not Path("told").exists():
    time.sleep(0.01)
(run_dir / "result.json").write_text(json.dumps({"step": 7}))
"""
"""stands for a training: it writes what one writes"""
PROGRAM = ("script.py",)


def test_what_it_came_to_and_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LINE_SECONDS", 0.2)
    (tmp_path / "script.py").write_text(SCRIPT)
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        if "step 7 of 9" in line:
            (tmp_path / "told").touch()

    found = undisturbed([], cwd=tmp_path, program=PROGRAM, log=log, last_step=9)
    assert (found["step"], found["early_loss"], found["late_loss"]) == (7, 0.5, None)
    assert "to compare with ..." in said[0]
    assert "step 7 of 9" in said[-1]


def test_what_it_died_of_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('no such planet')")
    with pytest.raises(ReferenceFailed, match="code 1: no such planet"):
        undisturbed([], cwd=tmp_path, program=PROGRAM, log=lambda _line: None)
