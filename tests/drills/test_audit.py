"""The audit can fail: a good run passes, and the command says which it was. The defects are in the files beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli import main
from elastic_train.errors import RunDirectoryError
from elastic_train.tools.audit.audit import CheckOutcome, audit_history
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lost_time import outages_of
from elastic_train.tools.audit.report import page
from tests.audits import audit
from tests.drills.planting import (
    damage,
    events_of,
    verdicts,
)
from tests.drills.small_run import (
    LAST_STEP,
    START,
    Line,
    edit_json,
    edit_lines,
    mark_as_drill,
    write_lines,
)


def test_a_good_run_passes_every_check(run_dir: Path) -> None:
    found = audit(run_dir)
    assert found.passed, found.reasons
    skipped = {name for name, verdict in verdicts(found).items() if verdict is CheckOutcome.SKIPPED}
    assert skipped == {"faults", "losses"}, "it was no drill"


def test_a_good_drill_passes_every_check(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    assert set(verdicts(audit(run_dir)).values()) == {CheckOutcome.PASS}


def test_the_command_ends_in_a_verdict(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == "PASS"
    assert "undisturbed" not in told, "there was no such job"
    assert "1 incident, 0 faults, 1 outage;" in told
    assert "7 steps, 3 epochs of 10 samples" in told
    damage(run_dir, LAST_STEP)
    assert main(["audit", str(run_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "FAIL"
    assert lines[-1].startswith("  snapshots: snapshot ")
    assert any(line.startswith("snapshots    FAIL     broken: ") for line in lines), "no promise looks like a fact"


def as_of_an_older_version(run_dir: Path) -> None:
    """Its incidents had neither the run's position nor the members that left or joined; its events had no incidents."""

    def older(result: Line) -> Line:
        kept = ("cause", "time", "lost_members", "committed_steps_lost", "seconds")
        return {**result, "incidents": [{name: one[name] for name in kept} for one in result["incidents"]]}

    for path in (run_dir / "events").iterdir():
        edit_lines(path, lambda lines: [{name: line[name] for name in line if name != "incidents"} for line in lines])
    edit_json(run_dir / "result.json", older)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_of_an_older_version_is_read(is_over: bool, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_of_an_older_version(run_dir)
    if not is_over:
        (run_dir / "result.json").unlink()
        for path in (run_dir / "events").iterdir():
            edit_lines(path, lambda lines: [line for line in lines if line["event"] != "done"])
    assert [main([command, str(run_dir)]) for command in ("audit", "report")] == [0, 0]
    capsys.readouterr()
    assert main(["status", str(run_dir)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("incident:")]
    assert len(told) == is_over, "events told none"
    assert all(line.endswith(" ago: lost c/0/13") for line in told)


def test_directories_of_nodes_are_checked_together(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    moved = [sorted((run_dir / folder).iterdir())[-1] for folder in ("events", "ledger")]
    for path in moved:
        (other / path.parent.name).mkdir(parents=True)
        path.rename(other / path.parent.name / path.name)
    assert main(["audit", str(run_dir)]) == 0, "what has died may have taken its disk along"
    told = capsys.readouterr().out
    assert "4 steps, 2 epochs of 10 samples; 3 steps more stand in files that are not here" in told
    assert "of 1 worker of this run (c/0/13) there is no file here" in told.splitlines()[-3]
    assert told.splitlines()[-2:] == ["not looked at: 1 of 3 nodes' files not here", "PASS"]
    assert main(["audit", str(run_dir), str(other)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == "PASS"
    assert "not here" not in told
    assert main(["audit", str(run_dir), str(other), str(run_dir)]) == 1
    assert "tell of the same worker: give each run directory once" in capsys.readouterr().err
    assert main(["audit", str(run_dir), str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_an_outage_begins_with_the_last_commit_whenever_its_line_was_written(run_dir: Path) -> None:
    """Where rank 0 is lost, another one writes the line as the next world begins."""
    before = outages_of(read_history(run_dir))

    def delay(lines: list[Line]) -> list[Line]:
        late = {"late_seconds": 0.45}
        return [
            {**one, "time": one["time"] + 0.45, **late} if (one["event"], one["step"]) == ("step", 3) else one
            for one in lines
        ]

    edit_lines(events_of(run_dir), delay)
    assert [round(outage.seconds, 3) for outage in outages_of(read_history(run_dir))] == [0.5]
    assert [round(outage.seconds, 3) for outage in before] == [0.5]


def test_losses_that_a_scaler_has_skipped(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that is not finite is null in the files: with fp16 one now and then is no defect."""
    for path in (run_dir / "events").iterdir():
        edit_lines(path, lambda lines: [{**one, "loss": None} if one.get("step") == 3 else one for one in lines])
    assert read_history(run_dir).early_loss is not None
    for command in ("audit", "report", "status"):
        assert main([command, str(run_dir)]) == 0, command
    assert "PASS" in capsys.readouterr().out


def test_a_run_that_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "result.json").unlink()
    for path in (run_dir / "events").iterdir():
        edit_lines(path, lambda lines: [line for line in lines if line["event"] != "done"])
    assert main(["audit", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["the run is still running: this says nothing of its end", "PASS"]
    assert any("1 incident, 0 faults, 1 outage;" in line for line in lines)


def test_no_run_is_an_error_and_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_history(tmp_path)
    assert main(["audit", str(tmp_path)]) == 1
    assert "PASS" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_file_is_no_run_directory(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert main([command, str(tmp_path / "result.json")]) == 1
    said = f"{tmp_path / 'result.json'} is not a directory; --run-dir of the training says where the run is"
    assert capsys.readouterr().err == f"elastic-train: error: {said}\n"


def test_it_reads_without_writing(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    audit(run_dir)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_files_of_others_in_the_directory(run_dir: Path) -> None:
    (run_dir / "notes.txt").write_text("mine")
    os.mkfifo(run_dir / "pipe")
    assert audit(run_dir).passed


def test_an_event_of_a_later_version(run_dir: Path) -> None:
    def add(lines: list[Line]) -> list[Line]:
        strange: dict[str, Any] = {"time": START + 2, "event": "news", "step": 3, "generation": 1}
        return [*lines, strange]

    edit_lines(events_of(run_dir), add)
    assert audit(run_dir).passed


def test_the_time_it_takes_grows_with_the_run_and_not_with_its_square(tmp_path: Path) -> None:
    steps, generations = 20_000, 2_000
    (tmp_path / "events").mkdir()
    per_generation = steps // generations
    lines: list[Line] = [
        {"event": "start", "generation": None, "config": {"global_batch_size": 4}, "task": {"train_length": 8}}
    ]
    for generation in range(generations):
        done = generation * per_generation
        world = {"generation": generation, "step": done, "rank": 0, "members": ["a/0/1"], "cause": "start"}
        lines.append({"event": "world", **world})
        lines.append({"event": "restore", **world, "source": "snapshot" if done else "scratch", "restored_step": done})
        for step in range(done + 1, done + per_generation + 1):
            lines.append({"event": "step", "generation": generation, "step": step, "epoch": 0, "loss": 1.0})
        lines.append({"event": "snapshot", "generation": generation, "snapshot_step": step, "path": f"/s/{step}"})
    told = [{"world_size": 1, **line, "time": START + 0.01 * number} for number, line in enumerate(lines)]
    write_lines(tmp_path / "events" / "a-0-1.jsonl", told)
    history = read_history(tmp_path)
    began = time.process_time()
    page(history, audit_history(history))
    assert time.process_time() - began < 8.0, "1 s on an idle machine; what grew with the square took half a minute"
