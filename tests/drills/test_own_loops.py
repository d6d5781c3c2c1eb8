"""A drill of a training function of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.tools.audit.record import read_drill
from tests.audits import audit
from tests.drills.test_drill import drill, scenario
from tests.own_steps import COMMIT, SCRIPT

PACE = """
            if training.world.world_size > 1:
                time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_loop_of_ones_own_is_drilled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace(COMMIT, COMMIT + PACE))
    plan = scenario(tmp_path, "kill", "join", "kill-rank-0")
    words = ("--seed", "5", "--nodes", "3", "--nodes-as", "processes", "--scenario", plan)
    script = ("--", "mine.py", "--reduction", "ordered", "--global-batch-size", "16", "--max-steps", "1500")
    done = drill(tmp_path, *words, *script, "--epochs", "1000", timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared with the final snapshot and an undisturbed run\n" in done.stdout, "by its bits"
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert [fault.name for fault in record.faults if fault.injected_at is not None] == ["kill", "join", "kill-rank-0"]
    assert record.settings["program"] == ["mine.py"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"state_sha256": "0" * 64}))
    assert {reason.partition(":")[0] for reason in audit(tmp_path / "run").reasons} == {"state"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_script_that_does_not_train_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import elastic_train\nelastic_train.parse_flags()\n")
    done = drill(tmp_path, "--nodes", "2", "--nodes-as", "processes", "--", "mine.py", timeout=110)
    assert done.returncode == 1, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert "every node ended before the first step" in line
    assert "does mine.py give its training function and elastic_train.parse_flags() to elastic_train.run?" in line
