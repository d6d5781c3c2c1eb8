"""Audits of a run's end and of what it left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli import main
from elastic_train.errors import RunDirectoryError
from elastic_train.runlog.goodput import bill
from elastic_train.runlog.reader import read_all
from elastic_train.storage.snapshot import SnapshotInfo, verify
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.system import process_stat
from elastic_train.tools.audit import remains_checks
from elastic_train.tools.audit.audit import CheckOutcome, audit_history, conclude, describe
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.node_directories import as_one_run, read_status_of
from elastic_train.tools.audit.report import page, write_report
from elastic_train.training.state import state_sha256
from elastic_train.world import host_name
from tests.audits import audit
from tests.drills.planting import (
    damage,
    drawn,
    end_with,
    events_of,
    ledger_of,
    only_failure,
    restart,
    snapshot_of,
    verdicts,
)
from tests.drills.small_run import (
    LAST_STEP,
    MEMBERS,
    START,
    Line,
    change,
    delay,
    edit_json,
    edit_lines,
    later,
    mark_as_drill,
    write_lines,
)

# --- the state --------------------------------------------------------------------------------------------------------


def test_a_bit_of_a_weight_flipped(run_dir: Path) -> None:
    """The snapshot is whole; its weights are not those that result.json promises."""
    import torch

    weight = torch.arange(4.0)
    weight.view(torch.int32)[2] ^= 1
    shutil.rmtree(snapshot_of(run_dir, LAST_STEP))
    writer = SnapshotWriter(run_dir / "snapshots", keep=3, host="a", run_uid="uid", task={})
    position = {"epoch": 2, "samples_done": 4, "generation": 1, "world_size": 2}
    writer.save({"model": {"weight": weight}}, step=LAST_STEP, **position)
    assert "the final snapshot has" in only_failure(run_dir, "state")


def test_two_nodes_that_ended_with_other_weights(run_dir: Path) -> None:
    """Each has saved the last step, and a third one is of an attempt that a restart undid."""
    import torch

    def save(host: str, generation: int) -> None:
        writer = SnapshotWriter(run_dir / "snapshots", keep=3, host=host, run_uid="uid", task={})
        position = {"epoch": 2, "samples_done": 4, "generation": generation, "world_size": 2}
        writer.save({"model": {"weight": torch.zeros(4)}}, step=LAST_STEP, **position)

    save("c", 0)
    assert audit(run_dir).passed
    save("b", 1)
    found = only_failure(run_dir, "state")
    assert found.startswith("state: the final snapshot has")
    assert found.endswith(f"(step-{LAST_STEP:012d}-gen-0001-b)")


def test_a_file_of_the_user_s_own_is_no_result_of_a_node(run_dir: Path) -> None:
    (run_dir / "eval-result.json").write_text(json.dumps({"step": LAST_STEP, "accuracy": 0.5}))
    assert audit(run_dir).reasons == []


@pytest.mark.parametrize(("step", "says"), [(LAST_STEP, 1), (3, 0)], ids=["of the same step", "of an earlier end"])
def test_a_node_whose_result_has_other_weights(
    run_dir: Path, tmp_path: Path, step: int, says: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("events", "ledger"):
        (tmp_path / "b" / folder).mkdir(parents=True)
    events_of(run_dir, MEMBERS[1]).rename(events_of(tmp_path / "b", MEMBERS[1]))
    ledger_of(run_dir, MEMBERS[1]).rename(ledger_of(tmp_path / "b", MEMBERS[1]))
    result = json.loads((run_dir / "result.json").read_text())
    (tmp_path / "b" / "result.json").write_text(json.dumps({**result, "step": step, "state_sha256": "0" * 64}))
    assert main(["audit", str(run_dir), str(tmp_path / "b")]) == says
    told = capsys.readouterr().out
    assert ("state: one node's result.json says de04dec53c128efd, another one's 0000000000000000" in told) is bool(says)


def test_weights_that_are_not_those_of_the_undisturbed_job(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "state_sha256": "0" * 64})
    assert "undisturbed 0000000000000000" in only_failure(run_dir, "state")


def test_an_undisturbed_job_that_failed(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    (run_dir / "drill" / "reference.json").unlink()
    assert "the undisturbed run failed" in only_failure(run_dir, "state")


def test_the_loss_decides_in_fast_mode(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "state_sha256": "0" * 64})
    edit_json(run_dir / "result.json", lambda result: {**result, "config": {**result["config"], "reduction": "fast"}})
    assert audit(run_dir).passed
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "early_loss": 0.46})
    assert "first half of the steps is 0.5208, undisturbed 0.4600" in only_failure(run_dir, "state")
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "early_loss": None})
    assert "no loss of the one or of the other run" in only_failure(run_dir, "state")


def test_batchnorm_in_fast_mode_is_compared_roughly(run_dir: Path) -> None:
    """Its statistics are of each rank's samples: a quarter of what the undisturbed job's one rank has."""
    import torch

    weights = {"0.weight": torch.arange(4.0), "0.num_batches_tracked": torch.tensor(7)}
    shutil.rmtree(snapshot_of(run_dir, LAST_STEP))
    writer = SnapshotWriter(run_dir / "snapshots", keep=3, host="a", run_uid="uid", task={})
    position = {"epoch": 2, "samples_done": 4, "generation": 1, "world_size": 2}
    writer.save({"model": weights}, step=LAST_STEP, **position)
    mark_as_drill(run_dir)
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "early_loss": 0.36})
    fast = {"reduction": "fast"}
    edit_json(
        run_dir / "result.json",
        lambda result: {**result, "config": {**result["config"], **fast}, "state_sha256": state_sha256(weights)},
    )
    assert audit(run_dir).passed, audit(run_dir).reasons
    edit_json(run_dir / "drill" / "reference.json", lambda found: {**found, "early_loss": 0.25})
    assert "first half of the steps is 0.5208, undisturbed 0.2500" in only_failure(run_dir, "state")


def test_what_was_forgotten_late_in_fast_mode(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    late_loss = (1 / 5 + 1 / 6 + 1 / 7) / 3
    edit_json(
        run_dir / "drill" / "reference.json",
        lambda found: {**found, "state_sha256": "0" * 64, "late_loss": late_loss + 0.04, "test_accuracy": 0.99},
    )
    fast = {"reduction": "fast"}
    edit_json(
        run_dir / "result.json",
        lambda result: {**result, "config": {**result["config"], **fast}, "test_accuracy": 0.97},
    )
    assert audit(run_dir).passed, audit(run_dir).reasons
    edit_json(run_dir / "result.json", lambda result: {**result, "test_accuracy": 0.1})
    assert "the test accuracy is 0.1000, undisturbed 0.9900" in only_failure(run_dir, "state")
    edit_json(run_dir / "result.json", lambda result: {**result, "test_accuracy": 0.97})
    change(events_of(run_dir), lambda line: line["event"] == "step" and line["step"] >= 5, loss=50.0)
    assert "second half of the steps is 50.0000, undisturbed 0.2098" in only_failure(run_dir, "state")


def test_snapshots_that_are_missing(run_dir: Path) -> None:
    shutil.rmtree(snapshot_of(run_dir, LAST_STEP))
    missing = f"finished, but there is no snapshot of step {LAST_STEP}"
    assert missing in "\n".join(audit(run_dir).reasons)
    shutil.rmtree(run_dir / "snapshots")
    assert f"snapshots: {missing}" in audit(run_dir).reasons
    mark_as_drill(run_dir)
    assert missing in only_failure(run_dir, "snapshots")


def test_a_torn_snapshot(run_dir: Path) -> None:
    damage(run_dir, 3)
    assert "is damaged" in only_failure(run_dir, "snapshots")


def test_a_torn_snapshot_that_was_restored(run_dir: Path) -> None:
    name = damage(run_dir, 3)
    restored = {"generation": 1, "step": 3, "source": "snapshot", "restored_step": 3}
    change(events_of(run_dir), lambda line: line["event"] == "restore", **restored)
    assert f"{MEMBERS[0]} restored the snapshot of step 3, which is damaged" in only_failure(run_dir, "snapshots")
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("damage"), "target": name}, lines[1]])
    assert audit(run_dir).passed, "the drill damaged it later"


def test_a_snapshot_that_is_pruned_while_it_is_looked_at(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the job, which trains."""

    def look_late(info: SnapshotInfo) -> None:
        if info.step != LAST_STEP:
            shutil.rmtree(snapshot_of(run_dir, info.step))
        verify(info)

    monkeypatch.setattr(remains_checks, "verify", look_late)
    assert audit(run_dir).reasons == []


def test_a_snapshot_that_is_pruned_while_files_are_listed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, scandir = snapshot_of(run_dir, 3), os.scandir

    def list_late(path: Any = ".") -> Any:
        if os.fspath(path) == str(gone) and gone.exists():
            gone.rename(run_dir / "elsewhere")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", list_late)
    assert audit(run_dir).reasons == []


def test_a_snapshot_that_the_drill_damaged_and_that_was_restored(run_dir: Path) -> None:
    """Whatever has become of it since: the run that goes on saves a whole one of the same step."""
    mark_as_drill(run_dir)
    name = snapshot_of(run_dir, 3).name
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("damage"), "target": name}, lines[1]])
    restart(run_dir, 3, "snapshot")
    assert f"snapshots: {MEMBERS[0]} restored {name}, which the drill had damaged" in audit(run_dir).reasons

    def save_anew(lines: list[Line]) -> list[Line]:
        return [
            *lines,
            {**lines[0], "event": "snapshot", "time": START + 4, "generation": 1, "snapshot_step": 3, "path": "/s"},
        ]

    edit_lines(events_of(run_dir), save_anew)
    assert verdicts(audit(run_dir))["snapshots"] is CheckOutcome.PASS


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_job_that_did_not_reach_its_end(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [line for line in lines if line["event"] != "done"])
    assert f"nobody finished; the newest committed step is {LAST_STEP}" in only_failure(run_dir, "end")


def test_an_end_before_the_last_step(run_dir: Path) -> None:
    def ask_for_more(lines: list[Line], **flags: object) -> list[Line]:
        config = {**lines[0]["config"], "max_steps": LAST_STEP + 1, **flags}
        return [{**lines[0], "config": config}, *lines[1:]]

    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), ask_for_more)
    assert audit(run_dir).passed, "a user's own function may return before"
    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), lambda lines: ask_for_more(lines, task=None))
    assert only_failure(run_dir, "end") == "end: finished at step 7, and the flags ask for 8 steps"


def test_a_member_of_the_last_world_that_vanished(run_dir: Path) -> None:
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: lines[:-1])
    assert f"{MEMBERS[1]} was in the last world and ended without a word" in only_failure(run_dir, "end")


def test_a_run_that_failed(run_dir: Path) -> None:
    end_with(run_dir, outcome="failed", error="TaskMismatch: x")
    assert "the run is failed: TaskMismatch: x" in only_failure(run_dir, "end")


def test_a_run_that_ended_without_a_word(run_dir: Path) -> None:
    def vanish(lines: list[Line]) -> list[Line]:
        return [{**line, "host": host_name(), "pid": 2**22 + 1} for line in lines[:-1]]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), vanish)
    assert "the run is dead: nobody finished" in only_failure(run_dir, "end")


@pytest.mark.parametrize(("silence", "is_over"), [(120.0, False), (3_700.0, True)])
def test_a_run_of_other_machines_that_fell_silent(run_dir: Path, silence: float, is_over: bool) -> None:
    """Nobody here can tell whether its workers live: after a while they do not."""
    later = time.time() - silence - (START + 2.4)
    (run_dir / "result.json").unlink()
    for member in MEMBERS:
        path = events_of(run_dir, member)
        edit_lines(
            path,
            lambda lines: [{**line, "time": line["time"] + later} for line in lines if line["event"] != "done"],
        )
        os.utime(path, (time.time() - silence,) * 2)
    if is_over:
        told = only_failure(run_dir, "end")
        silent = "end: its workers, on other machines, have written nothing for 1 h 1 min: nobody finished"
        assert told == f"{silent}; the newest committed step is {LAST_STEP}"
        for member in MEMBERS:
            change(events_of(run_dir, member), lambda line: line["event"] == "start", config={"wait_timeout": 7200.0})
            os.utime(events_of(run_dir, member), (time.time() - silence,) * 2)
        assert verdicts(audit(run_dir))["end"] is CheckOutcome.SKIPPED, "it may wait for others as long"
    else:
        found = audit(run_dir)
        assert found.passed, found.reasons
        assert found.notes == ["the run is still running: this says nothing of its end"]


def test_a_run_that_was_continued_and_stopped(run_dir: Path) -> None:
    """It had finished at step 3 once, and is to go on another day."""
    end_with(run_dir, outcome="stopped")
    found = audit(run_dir)
    assert found.passed, found.reasons
    skipped = {name for name, verdict in verdicts(found).items() if verdict is CheckOutcome.SKIPPED}
    assert skipped == {"end", "faults", "losses", "phases", "state", "leftovers"}


def test_what_an_earlier_end_came_to_is_not_told_of_the_run(run_dir: Path) -> None:
    """It has gone on since: an event has the newest bill, and the wall and the accuracy are still to come."""
    end_with(run_dir, outcome="stopped")
    newest = bill(paid=20.0, kept=5.0, samples=28, price=0.24)
    edit_lines(events_of(run_dir), lambda lines: [*lines[:-1], {**lines[-1], "bill": newest}])
    edit_json(run_dir / "result.json", lambda result: {**result, "test_accuracy": 0.125, "wall_seconds": 77.75})
    history = read_history(run_dir)
    found = audit_history(history)
    assert "20 node-seconds paid, 25% kept" in describe(found, history)[-1]
    text = page(history, found)
    assert "12.50%" not in text
    assert "77.75 s" not in text
    assert "As result.json has it" not in text


def test_a_torchrun_that_did_not_end(run_dir: Path) -> None:
    """That of a node which was in no world any more."""
    mark_as_drill(run_dir)
    edit_lines(run_dir / "drill" / "nodes.jsonl", lambda lines: lines[:-1])
    assert only_failure(run_dir, "end") == "end: the torchrun of node3 did not end"


def test_a_survivor_whose_torchrun_failed(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    change(run_dir / "drill" / "nodes.jsonl", lambda line: line.get("code") == 0, code=1)
    assert "node1 finished, but its torchrun exited with 1" in only_failure(run_dir, "end")


def test_a_node_that_ends_long_after_the_last_step(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    change(run_dir / "drill" / "nodes.jsonl", lambda line: "code" in line, time=START + 3000)
    assert "node1 ended 2998 s after the last step, limit 60 s" in only_failure(run_dir, "end")


def test_a_drill_of_one_of_whose_workers_there_is_no_file(run_dir: Path) -> None:
    events_of(run_dir, MEMBERS[2]).unlink()
    found = audit(run_dir)
    assert found.passed, "its node may have a run directory of its own"
    assert "c/0/13" in found.notes[0]
    mark_as_drill(run_dir)
    found = audit(run_dir)
    assert "end: of c/0/13, a member of a world, there is no file in events/" in found.reasons
    assert not found.notes, "the nodes of a drill have one run directory"


def test_a_worker_of_the_last_world_that_no_node_had(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_lines(
        run_dir / "drill" / "nodes.jsonl", lambda lines: [line for line in lines if line.get("member") != MEMBERS[1]]
    )
    told = "end: b/0/12 was in the last world, and was seen on no node of the drill"
    assert only_failure(run_dir, "end") == told


def test_an_orphan_process(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as orphan:
        here = {"host": host_name(), "pid": orphan.pid, "time": time.time()}
        change(events_of(run_dir, MEMBERS[2]), lambda line: line["event"] == "start", **here)
        reasons = "\n".join(audit(run_dir).reasons)
        assert f"leftovers: process {orphan.pid}, a worker of this run, still runs" in reasons
        assert orphan.stdin is not None
        orphan.stdin.close()


def test_a_script_that_works_on_after_its_training(run_dir: Path) -> None:
    """As an own loop may, once `run` has returned. The bundled program of a drill ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as script:
        here = {"host": host_name(), "pid": script.pid, "started_ticks": int(process_stat(script.pid)[1])}
        change(events_of(run_dir, MEMBERS[1]), lambda line: line["event"] == "start", **here)
        assert audit(run_dir).passed, audit(run_dir).reasons
        change(events_of(run_dir, MEMBERS[1]), lambda line: line["event"] == "done", outcome="stopped")
        still_runs = f"leftovers: process {script.pid}, a worker of this run, still runs"
        assert still_runs in audit(run_dir).reasons
        change(events_of(run_dir, MEMBERS[1]), lambda line: line["event"] == "done", outcome="finished")
        mark_as_drill(run_dir)
        assert still_runs in audit(run_dir).reasons
        assert script.stdin is not None
        script.stdin.close()


def test_a_temporary_file(run_dir: Path) -> None:
    (run_dir / "snapshots" / ".tmp-step-000000000008-gen-0001-a-11").mkdir()
    assert "is a temporary file" in only_failure(run_dir, "leftovers")


def test_a_temporary_file_of_the_result(run_dir: Path) -> None:
    (run_dir / ".result.json.tmp-0badcafe").touch()
    assert ".result.json.tmp-0badcafe is a temporary file" in only_failure(run_dir, "leftovers")


def test_a_temporary_file_in_a_folder_of_snapshots_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    def move(lines: list[Line]) -> list[Line]:
        elsewhere = {"snapshot_dir": str(tmp_path / "elsewhere")}
        return [{**line, "config": {**line["config"], **elsewhere}} if "config" in line else line for line in lines]

    (run_dir / "snapshots").rename(tmp_path / "elsewhere")
    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), move)
    assert audit(run_dir).passed, audit(run_dir).reasons
    (tmp_path / "elsewhere" / ".tmp-step-000000000008-gen-0001-a-11").mkdir()
    assert "is a temporary file" in only_failure(run_dir, "leftovers")
    shutil.rmtree(tmp_path / "elsewhere")
    assert "no worker has written a snapshot of step 7" in only_failure(run_dir, "snapshots")

    def save(lines: list[Line]) -> list[Line]:
        last = [line for line in lines if line["event"] == "step"][-1]
        return [*lines, {**last, "event": "snapshot", "snapshot_step": LAST_STEP, "path": "/s/7"}]

    edit_lines(events_of(run_dir), save)
    assert verdicts(audit(run_dir))["snapshots"] is CheckOutcome.SKIPPED, "it may be on another machine"


def test_each_node_has_a_folder_of_snapshots_of_its_own(run_dir: Path, tmp_path: Path) -> None:
    for number, member in enumerate(MEMBERS):
        folder = {"snapshot_dir": str(tmp_path / f"of-{number}")}

        def move(lines: list[Line], folder: dict[str, str] = folder) -> list[Line]:
            return [{**line, "config": {**line["config"], **folder}} if "config" in line else line for line in lines]

        edit_lines(events_of(run_dir, member), move)
        shutil.copytree(run_dir / "snapshots", tmp_path / f"of-{number}")
    shutil.rmtree(run_dir / "snapshots")
    assert audit(run_dir).passed, audit(run_dir).reasons
    state = next((tmp_path / "of-0").glob("step-*/state.pt"))
    state.write_bytes(state.read_bytes()[:-1])
    assert "its manifest says" in only_failure(run_dir, "snapshots")
    shutil.rmtree(tmp_path / "of-0")
    (found,) = [check for check in audit(run_dir).checks if check.name == "snapshots"]
    assert f"not on this machine: {tmp_path / 'of-0'}" in found.detail


def test_what_the_drill_itself_found_left(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    (run_dir / "drill" / "leftovers.json").write_text(json.dumps(["port 29400 is still open"]))
    assert "port 29400 is still open" in only_failure(run_dir, "leftovers")
    (run_dir / "drill" / "leftovers.json").unlink()
    assert "the drill did not look for what it left" in only_failure(run_dir, "leftovers")


def test_an_attempt_that_saved_nothing_is_no_part_of_the_wall(run_dir: Path) -> None:
    """Its nodes lost their power before the first snapshot, and the run began again from scratch."""
    early = {"time": START - 100.0, "event": "start", "generation": None, "rank": 0, "step": 0}
    (run_dir / "events" / "gone-0-1.jsonl").write_text(json.dumps(early) + "\n")
    assert verdicts(audit(run_dir))["phases"] is CheckOutcome.PASS
    again = {**later(read_all(events_of(run_dir))[0], -100.0), "generation": None}
    edit_lines(events_of(run_dir), lambda lines: [again, *lines])  # in containers the next one has the same name
    assert verdicts(audit(run_dir))["phases"] is CheckOutcome.PASS


def test_a_result_that_is_no_json(run_dir: Path) -> None:
    (run_dir / "result.json").write_text('{"step": 7, ')
    assert "finished, but result.json is damaged" in only_failure(run_dir, "end")


def test_the_lock_of_a_job_that_is_over_is_no_leftover(run_dir: Path) -> None:
    """Nobody holds it any more, and the next job removes it."""
    (run_dir / ".owner-abc.lock").touch()
    assert verdicts(audit(run_dir))["leftovers"] is CheckOutcome.PASS


def test_one_directory_of_several_tells_that_it_is_a_part(run_dir: Path, tmp_path: Path) -> None:
    """Its page and its verdict are of what this node saw; of all directories together they are of the run."""
    other = tmp_path / "node3"
    (other / "events").mkdir(parents=True)
    shutil.move(events_of(run_dir, MEMBERS[2]), other / "events")
    part = audit(run_dir)
    assert part.elsewhere == (MEMBERS[2],)
    assert f"of 1 worker of this run ({MEMBERS[2]}) there is no file here" in part.notes[0]
    assert part.notes[0] in "\n".join(conclude(part))
    with as_one_run([run_dir, other]) as whole:
        history = read_history(whole)
        assert audit_history(history).notes == []
        text = write_report(history, audit_history(history), tmp_path / "page.html").read_text()
    assert f"<title>{run_dir.name} - elastic_train</title>" in text
    assert "there is no file here" in write_report(read_history(run_dir), part).read_text()


def test_a_directory_of_a_node_that_never_had_rank_0(run_dir: Path) -> None:
    """Whoever had it wrote all steps, elsewhere."""
    for member in (MEMBERS[0], MEMBERS[2]):
        events_of(run_dir, member).unlink()
        ledger_of(run_dir, member).unlink()
    part = audit(run_dir)
    assert (part.verdict, part.reasons) == ("PASS", [])
    assert part.notes[-1] == "not looked at: 2 of 3 nodes' files not here"


def test_status_of_several_directories_is_of_one_run(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "node3"
    whole = read_status_of([run_dir], START + 3.0)
    (other / "events").mkdir(parents=True)
    shutil.move(events_of(run_dir, MEMBERS[2]), other / "events")
    shutil.move(run_dir / "result.json", other)
    together = read_status_of([run_dir, other], START + 3.0)
    assert together.notes[0] == f"told together with {other}"
    assert together.result_path == (other / "result.json").resolve()
    same = replace(together, notes=whole.notes, result_path=whole.result_path)
    assert same == whole


def test_a_directory_that_is_not_there_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="nowhere does not exist"), as_one_run([run_dir, tmp_path / "nowhere"]):
        pytest.fail("half a run")


@pytest.mark.parametrize("ahead", [0.0, 300.0])
def test_what_fresh_has_replaced_is_another_run(run_dir: Path, ahead: float) -> None:
    """One node was told --fresh. The directory of another, whose clock may be ahead, has the run before as well, whose
    rank 0 was elsewhere or is moved aside."""
    events = events_of(run_dir)
    delay(events_of(run_dir, MEMBERS[1]), ahead, lambda _line: True)
    change(events, lambda line: line["event"] == "start", is_anew=True)
    old: Line = {"time": START - 50.0 + ahead, "event": "start", "rank": 0, "generation": None, "step": 0, "pid": 5}
    old |= {"host": "b"}
    members = ["b/0/5", "a/0/4"]
    world = {**old, "event": "world", "generation": 0, "cause": "start", "members": members, "seconds": {}}
    step = {**old, "event": "step", "generation": 0, "step": 5, "epoch": 1, "loss": 1.0, "world_size": 2}
    saved = {**old, "event": "snapshot", "generation": 0, "step": 5, "snapshot_step": 5, "path": "/s/5"}
    restored = {**world, "event": "restore", "source": "scratch", "restored_step": 0}
    write_lines(run_dir / "events" / "b-0-5.jsonl", [old, world, restored, step, saved])
    found = audit(run_dir)
    assert found.reasons == []
    assert found.elsewhere == ()
    change(events, lambda line: line["event"] == "start", is_anew=False)
    assert audit(run_dir).reasons != []


def test_a_run_that_began_with_fresh_hides_nothing_of_its_own(run_dir: Path) -> None:
    """A process that is started again says --fresh again, and moves nothing aside."""
    config = {**json.loads(events_of(run_dir).read_text().splitlines()[0])["config"], "fresh": True}
    change(events_of(run_dir), lambda line: line["event"] == "start", is_anew=True, config=config)
    restart(run_dir, 0, "scratch", snapshot=7)
    assert "from scratch, but the snapshot of step 7 had been saved" in "\n".join(audit(run_dir).reasons)
