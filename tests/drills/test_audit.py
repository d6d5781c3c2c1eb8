"""The audit can fail: for every promise a run in which it is broken, and the check that names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli import main
from elastic_train.drills.audit import Audit, Verdict, audit
from elastic_train.drills.history import read_history
from elastic_train.drills.lost_time import lost_time
from elastic_train.errors import RunDirectoryError
from elastic_train.run_directory import RunDirectory
from elastic_train.saving import handoff_directory
from elastic_train.snapshot import SnapshotWriter
from elastic_train.world import host_name
from tests.drills.small_run import (
    BATCH,
    LAST_STEP,
    LENGTH,
    MEMBERS,
    START,
    Line,
    edit_json,
    edit_lines,
    mark_as_drill,
    write_small_run,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "run")
    return tmp_path / "run"


def events_of(run_dir: Path, member: str = MEMBERS[0]) -> Path:
    return run_dir / "events" / f"{member.replace('/', '-')}.jsonl"


def ledger_of(run_dir: Path, member: str = MEMBERS[0]) -> Path:
    return run_dir / "ledger" / f"{member.replace('/', '-')}.jsonl"


def verdicts(found: Audit) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in found.checks}


def only_failure(run_dir: Path, name: str) -> str:
    """The findings of the one check that failed."""
    found = audit(run_dir)
    failed = {check.name for check in found.checks if check.verdict is Verdict.FAIL}
    assert failed == {name}, found.reasons
    assert not found.passed
    return "\n".join(found.reasons)


def test_a_good_run_passes_every_check(run_dir: Path) -> None:
    found = audit(run_dir)
    assert found.passed, found.reasons
    skipped = {name for name, verdict in verdicts(found).items() if verdict is Verdict.SKIPPED}
    assert skipped == {"faults", "losses"}, "it was no drill"


def test_a_good_drill_passes_every_check(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    assert set(verdicts(audit(run_dir)).values()) == {Verdict.PASS}


# --- the samples ------------------------------------------------------------------------------------------------------


def test_a_sample_that_was_never_used(run_dir: Path) -> None:
    def drop(lines: list[Line]) -> list[Line]:
        lines[-2]["indices"] = lines[-2]["indices"][1:]
        return lines

    edit_lines(ledger_of(run_dir), drop)  # step 6, the last of epoch 1
    assert "epoch 1: sample 8 never used" in only_failure(run_dir, "ledger")


def test_a_sample_that_was_used_twice(run_dir: Path) -> None:
    def repeat(lines: list[Line]) -> list[Line]:
        lines[0]["indices"][0] = LENGTH - 1
        return lines

    edit_lines(ledger_of(run_dir), repeat)
    reasons = only_failure(run_dir, "ledger")
    assert f"epoch 0: sample {LENGTH - 1} used more than once" in reasons
    assert "epoch 0: sample 0 never used" in reasons


def test_a_rank_without_its_line(run_dir: Path) -> None:
    edit_lines(ledger_of(run_dir, MEMBERS[1]), lambda lines: lines[:-1])
    assert f"step {LAST_STEP}, generation 1: 2 samples where 4 belong" in only_failure(run_dir, "ledger")


def test_a_torn_line(run_dir: Path) -> None:
    path = ledger_of(run_dir, MEMBERS[2])
    path.write_bytes(path.read_bytes() + b'{"epoch": 1, "st\n')
    assert "is torn" in only_failure(run_dir, "ledger")


def test_a_line_that_a_kill_cut_off_is_no_finding_of_its_own(run_dir: Path) -> None:
    path = ledger_of(run_dir, MEMBERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"epoch": 1, "st')
    assert audit(run_dir).passed
    path.write_bytes(whole[:-9])  # what it told is missing, though
    assert "samples where" in only_failure(run_dir, "ledger")


def test_lines_of_a_step_that_was_not_committed_do_not_count(run_dir: Path) -> None:
    """Those of step 4 in generation 0, in which c died, are there; and a step beyond the last."""
    edit_lines(ledger_of(run_dir), lambda lines: [*lines, {**lines[-1], "step": LAST_STEP + 1}])
    assert audit(run_dir).passed


def test_without_a_ledger_nothing_is_claimed(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "ledger")
    found = audit(run_dir)
    assert found.passed
    assert verdicts(found)["ledger"] is Verdict.SKIPPED

    def ask_for_one(lines: list[Line]) -> list[Line]:
        return [{**line, "config": {**line["config"], "ledger": True}} if "config" in line else line for line in lines]

    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), ask_for_one)
    assert "steps were committed with --ledger, and nothing is in ledger/" in only_failure(run_dir, "ledger")


# --- the steps --------------------------------------------------------------------------------------------------------


def test_committed_steps_that_decrease(run_dir: Path) -> None:
    """Generation 1 begins at step 2 and does step 3 again, which a, a member of both, had committed."""

    def decrease(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line["event"] == "world" and line["generation"] == 1:
                line["step"] = 2
        third = next(line for line in lines if line["event"] == "step" and line["step"] == 3)
        return [*lines, {**third, "generation": 1, "time": START + 1.85}]

    edit_lines(events_of(run_dir), decrease)
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: [{**line, "step": min(line["step"], 2)} for line in lines])
    found = audit(run_dir)
    assert "steps: generation 1 begins at step 2, but step 3 had been committed" in found.reasons


def test_a_step_that_only_the_dead_had_applied_was_not_committed(run_dir: Path) -> None:
    """c had rank 0 and wrote down step 4 before it died; the others, which had not applied it, do it again."""

    def write_fourth(lines: list[Line]) -> list[Line]:
        fourth = {**lines[-1], "event": "step", "step": 4, "epoch": 1, "loss": 0.25, "time": START + 1.4}
        return [*lines, fourth]

    edit_lines(events_of(run_dir, MEMBERS[2]), write_fourth)
    assert audit(run_dir).passed


def test_more_than_one_step_that_only_the_dead_had_applied(run_dir: Path) -> None:
    """a, who wrote all steps, dies; b and c go on two steps before what had been committed."""

    def go_on(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line["event"] == "world" and line["generation"] == 1:
                line |= {"step": 1, "members": MEMBERS[1:], "lost_members": [MEMBERS[0]]}
        return lines

    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if line["generation"] != 1])
    edit_lines(events_of(run_dir, MEMBERS[1]), go_on)
    assert "steps: generation 1 begins at step 1, but step 3 had been committed" in audit(run_dir).reasons


def restart(run_dir: Path, step: int, source: str, snapshot: int | None = None) -> None:
    """After step 7 everything begins again, as generation 2, from a step; that of a snapshot had been saved before."""

    def begin_again(lines: list[Line]) -> list[Line]:
        world = next(line for line in lines if line["event"] == "world")
        again = {**world, "generation": 2, "time": START + 5, "step": step, "members": [MEMBERS[0]], "world_size": 1}
        restore = {**again, "event": "restore", "source": source, "restored_step": step}
        steps = [line for line in lines if line["event"] == "step" and line["step"] > step]
        repeated = [{**line, "generation": 2, "time": line["time"] + 4, "world_size": 1} for line in steps]
        saved = {**lines[0], "event": "snapshot", "generation": 1, "snapshot_step": snapshot, "path": f"/s/{snapshot}"}
        done = {**lines[-1], "generation": 2, "time": START + 7}
        return [*lines, *([saved] if snapshot is not None else []), again, restore, *repeated, done]

    edit_lines(events_of(run_dir), begin_again)


def test_a_restart_from_scratch_where_a_snapshot_had_been_saved(run_dir: Path) -> None:
    restart(run_dir, 0, "scratch")
    assert verdicts(audit(run_dir))["steps"] is Verdict.PASS, "everything was killed before the first snapshot"
    edit_lines(
        events_of(run_dir),
        lambda lines: [*lines, {**lines[0], "event": "snapshot", "generation": 1, "snapshot_step": 3, "path": "/s/3"}],
    )
    reason = "steps: generation 2 begins at step 0, from scratch, but the snapshot of step 3 had been saved"
    assert reason in audit(run_dir).reasons


def test_a_restart_of_a_drill_loses_no_more_than_what_came_after_the_newest_snapshot(run_dir: Path) -> None:
    restart(run_dir, 3, "snapshot", snapshot=5)
    assert verdicts(audit(run_dir))["steps"] is Verdict.PASS, "its disk may have been lost"
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    assert "steps: generation 2 begins at step 3, but step 7 had been committed" in audit(run_dir).reasons
    edit_lines(faults, lambda lines: [{**lines[0], "name": "kill-all"}, lines[1]])
    reason = "steps: generation 2 begins at step 3, from snapshot, but the snapshot of step 5 had been saved"
    assert reason in audit(run_dir).reasons
    edit_lines(faults, lambda lines: [{**lines[0], "name": "damage", "target": "5"}, lines[1]])
    assert verdicts(audit(run_dir))["steps"] is Verdict.PASS, "that one was damaged"


def test_a_step_that_is_missing(run_dir: Path) -> None:
    edit_lines(
        events_of(run_dir), lambda lines: [line for line in lines if (line["event"], line["step"]) != ("step", 2)]
    )
    assert "step 2 was never committed" in only_failure(run_dir, "steps")


def test_a_step_committed_twice_in_one_generation(run_dir: Path) -> None:
    edit_lines(events_of(run_dir), lambda lines: [*lines, next(line for line in lines if line["event"] == "step")])
    assert "generation 0 committed step 1 more than once" in only_failure(run_dir, "steps")


def test_a_result_of_another_step(run_dir: Path) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, "step": 3})
    assert f"result.json is of step 3, the events reach {LAST_STEP}" in only_failure(run_dir, "steps")


def test_a_restart_from_a_snapshot_may_repeat_steps(run_dir: Path) -> None:
    """Everything was killed after step 7 had been committed, and the snapshot was of step 3."""

    restart(run_dir, 3, "snapshot")
    found = audit(run_dir)
    assert verdicts(found)["steps"] is Verdict.PASS, found.reasons
    assert lost_time(read_history(run_dir)).outages[-1].cause == "restart"


# --- the generations --------------------------------------------------------------------------------------------------


def test_two_groups_of_one_generation(run_dir: Path) -> None:
    def split(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line["event"] == "world" and line["generation"] == 1:
                line["members"] = [MEMBERS[1]]
        return lines

    edit_lines(events_of(run_dir, MEMBERS[1]), split)
    reasons = only_failure(run_dir, "generations")
    assert "generation 1 has 2 memberships: [a/0/11, b/0/12] and [b/0/12]" in reasons


def test_a_step_written_by_somebody_who_was_not_in(run_dir: Path) -> None:
    def trespass(lines: list[Line]) -> list[Line]:
        return [*lines, {**lines[-1], "event": "step", "generation": 1, "step": LAST_STEP + 1, "epoch": 2, "loss": 1.0}]

    edit_lines(events_of(run_dir, MEMBERS[2]), trespass)
    found = audit(run_dir)
    assert "generations: step 8 of generation 1 was written by c/0/13, which is no member of it" in found.reasons


def test_a_stranger_in_a_world_that_re_formed(run_dir: Path) -> None:
    def invite(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line["event"] == "world" and line["generation"] == 1:
                line["members"] = [*MEMBERS[:2], "d/0/14"]
        return lines

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), invite)
    found = audit(run_dir)
    assert any(
        reason.startswith("generations: generation 1 re-formed in place with d/0/14") for reason in found.reasons
    )


def test_a_newcomer_in_a_world_that_re_formed(run_dir: Path) -> None:
    """A loss and an admission fell together."""

    def admit(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line["event"] == "world" and line["generation"] == 1:
                line |= {"members": [*MEMBERS[:2], "d/0/14"], "joined_members": ["d/0/14"]}
        return lines

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), admit)
    assert verdicts(audit(run_dir))["generations"] is Verdict.PASS


def test_who_was_refused_says_nothing_about_the_run(run_dir: Path) -> None:
    """It came with another batch and other data, and was in no world."""

    def come(lines: list[Line]) -> list[Line]:
        start = next(line for line in lines if line["event"] == "start")
        config = {**start["config"], "global_batch_size": 2 * BATCH, "snapshot_dir": "/nowhere"}
        refused = {**start, "time": START + 1.5, "config": config, "task": {"train_length": 2 * LENGTH}}
        return [refused, {**start, "event": "done", "time": START + 1.6, "outcome": "failed", "error": "Refused: no"}]

    shutil.copy(events_of(run_dir), events_of(run_dir, "d/0/14"))
    edit_lines(events_of(run_dir, "d/0/14"), come)
    assert audit(run_dir).passed, audit(run_dir).reasons
    assert read_history(run_dir).batch == BATCH


# --- incidents and faults ---------------------------------------------------------------------------------------------


def test_an_outage_beyond_its_limit(run_dir: Path) -> None:
    def delay(lines: list[Line]) -> list[Line]:
        return [{**line, "time": line["time"] + (40 if line["generation"] == 1 else 0)} for line in lines]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), delay)
    edit_json(run_dir / "result.json", lambda result: {**result, **_with_wall(result, 42.0)})
    assert "peer_lost before generation 1: 40.50 s without a step, limit 36 s" in only_failure(run_dir, "incidents")


def test_an_outage_beyond_its_limit_when_the_drill_had_let_its_job_run_free(run_dir: Path) -> None:
    mark_as_drill(run_dir, released=START + 1.4)
    test_an_outage_beyond_its_limit(run_dir)
    assert lost_time(read_history(run_dir)).outages == (), "which is no part of the goodput"


def test_a_restart_that_took_too_long(run_dir: Path) -> None:
    def delay(lines: list[Line]) -> list[Line]:
        return [{**line, "time": line["time"] + (700 if line["generation"] == 2 else 0)} for line in lines]

    restart(run_dir, 3, "snapshot")
    edit_lines(events_of(run_dir), delay)
    assert verdicts(audit(run_dir))["incidents"] is Verdict.PASS, "its user may have come back late"
    mark_as_drill(run_dir)
    assert any(reason.startswith("incidents: restart before generation 2: 70") for reason in audit(run_dir).reasons)


def test_an_incident_of_which_the_result_says_that_it_took_too_long(run_dir: Path) -> None:
    def lengthen(result: Line) -> Line:
        result["incidents"][0]["seconds"] = {"detect": 40.0}
        return result

    edit_json(run_dir / "result.json", lengthen)
    assert "peer_lost: result.json says 40.00 s, limit 36 s" in only_failure(run_dir, "incidents")


def test_a_fault_that_was_got_over_too_late(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    path = run_dir / "drill" / "faults.jsonl"
    edit_lines(path, lambda lines: [lines[0], {**lines[1], "seconds": 15.5}])
    assert "kill of node3): next committed step after 15.50 s, limit 15 s" in only_failure(run_dir, "incidents")


def test_committed_steps_that_were_lost(run_dir: Path) -> None:
    def lose(result: Line) -> Line:
        result["incidents"][0]["committed_steps_lost"] = 2
        return result

    edit_json(run_dir / "result.json", lose)
    assert "peer_lost: 2 committed steps lost" in only_failure(run_dir, "incidents")


def test_only_who_kills_everything_may_lose_committed_steps(run_dir: Path) -> None:
    def restart(result: Line) -> Line:
        result["incidents"][0] |= {"cause": "restart", "committed_steps_lost": 2}
        return result

    edit_json(run_dir / "result.json", restart)
    assert audit(run_dir).passed, "its user may have killed everything"
    mark_as_drill(run_dir)
    assert "restart: 2 committed steps lost" in only_failure(run_dir, "incidents")
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], "name": "kill-all"}, lines[1]])
    assert audit(run_dir).passed


def test_a_fault_that_did_not_strike(run_dir: Path) -> None:
    skipped = {"what": "skipped", "number": 0, "time": START, "name": "hang", "reason": "training had ended"}
    mark_as_drill(run_dir, [skipped])
    found = audit(run_dir)
    assert "faults: fault 0 (hang) did not strike: training had ended" in found.reasons
    assert verdicts(found)["losses"] is Verdict.FAIL, "then somebody was lost without it"


def fail(run_dir: Path, member: str, time: float) -> None:
    """Its process ends with an error of its own."""

    def end(lines: list[Line]) -> list[Line]:
        done = {**lines[0], "event": "done", "time": START + time, "outcome": "failed", "error": "AttributeError: x"}
        return [*lines, done]

    edit_lines(events_of(run_dir, member), end)


def test_a_worker_that_failed_although_no_fault_had_struck_it(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    fail(run_dir, MEMBERS[2], 1.4)
    assert audit(run_dir).passed, "it was the fault's target"
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [{**lines[0], "may_take": ["node2"]}, lines[1]])
    reasons = only_failure(run_dir, "losses")
    assert "c/0/13 of node3 failed: AttributeError: x, and no fault had struck it" in reasons
    assert "c/0/13 of node3 was lost before generation 1, and no fault had struck it" in reasons


def test_a_fault_accounts_for_no_later_loss_of_its_node(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_lines(
        run_dir / "drill" / "nodes.jsonl",
        lambda lines: [*lines, {"time": START + 1.6, "what": "started", "node": "node3"}],
    )
    assert "was lost before generation 1" in only_failure(run_dir, "losses"), "it had been started again"


def test_a_node_that_was_expelled_by_a_fault_that_is_to_pass(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    undone = {"what": "undone", "number": 0, "time": START + 1.5}
    edit_lines(faults, lambda lines: [{**lines[0], "name": "pause", "may_take": []}, undone, lines[1]])
    assert "c/0/13 of node3 was lost before generation 1" in only_failure(run_dir, "losses")


def test_a_worker_that_its_agent_restarts_to_let_others_join(run_dir: Path) -> None:
    mark_as_drill(run_dir, [])
    nodes = run_dir / "drill" / "nodes.jsonl"
    again = {"time": START + 2.0, "what": "worker", "node": "node3", "member": "c/0/15"}
    edit_lines(nodes, lambda lines: sorted([*lines, again], key=lambda line: line["time"]))
    assert verdicts(audit(run_dir))["losses"] is Verdict.PASS


def test_a_standstill_while_an_etcd_member_is_away(run_dir: Path) -> None:
    kill = {"what": "struck", "number": 0, "name": "kill", "step": 3, "limit_seconds": 15.0, "may_take": ["node3"]}
    away = {**kill, "number": 1, "name": "kill-etcd", "may_take": [], "time": START + 2.05, "struck_at": START + 2.05}
    over = [{"what": "recovered", "number": number, "time": START + 1.9, "seconds": 0.55} for number in (0, 1)]
    undone = {"what": "undone", "number": 1, "time": START + 5.05}
    mark_as_drill(
        run_dir, [{**kill, "time": START + 1.35, "struck_at": START + 1.35}, away, undone, *over], num_faults=2
    )
    assert audit(run_dir).passed, audit(run_dir).reasons

    def stand_still(lines: list[Line]) -> list[Line]:
        return [{**line, "time": line["time"] + (5 if line["time"] > START + 2.05 else 0)} for line in lines]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), stand_still)
    assert "losses: fault 1 (kill-etcd of ): not one step while it lasted" in audit(run_dir).reasons


# --- the time ---------------------------------------------------------------------------------------------------------


def test_phases_that_do_not_sum_to_the_wall(run_dir: Path) -> None:
    def lose(result: Line) -> Line:
        result["goodput"]["train"] -= 0.2
        return result

    edit_json(run_dir / "result.json", lose)
    assert "the phases sum to 2.400 s, the wall is 2.600 s" in only_failure(run_dir, "phases")


def test_a_wall_that_forgets_a_part_of_the_run(run_dir: Path) -> None:
    def delay(lines: list[Line]) -> list[Line]:
        return [{**line, "time": line["time"] + (10 if line["generation"] == 1 else 0)} for line in lines]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), delay)
    assert "the wall is 2.6 s, but the events span" in only_failure(run_dir, "phases")


def test_a_wall_beyond_the_whole_run(run_dir: Path) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, **_with_wall(result, 130.0)})
    assert "the wall is 130.0 s, but the startup and all events together span 2.5 s" in only_failure(run_dir, "phases")


def test_lost_time_sums_to_the_wall_and_names_the_cause(run_dir: Path) -> None:
    lost = lost_time(read_history(run_dir))
    assert lost.wall == pytest.approx(1.1)
    assert lost.useful == pytest.approx(0.6)
    assert lost.by_cause["peer_lost"] == pytest.approx(0.5)
    assert lost.useful + sum(lost.by_cause.values()) == pytest.approx(lost.wall)
    assert lost.ratio == pytest.approx(0.6 / 1.1)


def test_the_pace_that_a_drill_sets_is_no_lost_time(run_dir: Path) -> None:
    """Ten times as slow for the last third of the steps."""

    def go_on(lines: list[Line]) -> list[Line]:
        last = next(line for line in reversed(lines) if line["event"] == "step")
        times = [0.1 * n for n in range(1, 21)] + [2.0 + 1.0 * n for n in range(1, 11)]
        steps = [
            {**last, "step": LAST_STEP + n, "time": last["time"] + time, "epoch": (LAST_STEP + n - 1) // 3}
            for n, time in enumerate(times, start=1)
        ]
        return [*lines, *steps]

    edit_lines(events_of(run_dir), go_on)
    mark_as_drill(run_dir)
    assert lost_time(read_history(run_dir)).ratio < 0.5
    slower = START + 1.0 + 0.1 * LAST_STEP + 0.5 + 1.95
    edit_json(run_dir / "drill" / "drill.json", lambda found: {**found, "paces": [(START, 0.01), (slower, 0.1)]})
    lost = lost_time(read_history(run_dir))
    assert lost.wall - lost.useful == pytest.approx(0.5, abs=1e-3)
    assert lost.by_cause["slow steps"] == pytest.approx(0.0, abs=1e-3)


def test_an_evaluation_after_the_release_of_a_drill_is_none_of_its_lost_time(run_dir: Path) -> None:
    mark_as_drill(run_dir, released=START + 2.3)
    edit_json(
        run_dir / "result.json",
        lambda result: {**result, "goodput": {**result["goodput"], "train": 0.9, "evaluate": 0.1}},
    )

    def evaluate(time: float) -> None:
        edit_lines(
            events_of(run_dir), lambda lines: [*lines, {**lines[0], "event": "evaluation", "time": START + time}]
        )

    def delay(lines: list[Line]) -> list[Line]:
        return [{**line, "time": line["time"] + (0.1 if line["step"] >= 6 else 0)} for line in lines]

    evaluate(2.35)
    edit_lines(events_of(run_dir), delay)
    assert "evaluation" not in lost_time(read_history(run_dir)).by_cause
    evaluate(2.05)
    assert lost_time(read_history(run_dir)).by_cause["evaluation"] == pytest.approx(0.05)


def _with_wall(result: Line, wall: float) -> Line:
    phases = {name: value for name, value in result["goodput"].items() if name not in ("wall", "ratio", "down")}
    phases["down"] = wall - sum(phases.values())
    return {"wall_seconds": wall, "goodput": {**phases, "wall": wall, "ratio": 0.0}}


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


def test_a_torn_snapshot(run_dir: Path) -> None:
    damage(run_dir, 3)
    assert "is damaged" in only_failure(run_dir, "snapshots")


def test_a_torn_snapshot_that_was_restored(run_dir: Path) -> None:
    def restore(lines: list[Line]) -> list[Line]:
        return [
            {**line, "source": "snapshot", "restored_step": 3} if line["event"] == "restore" else line for line in lines
        ]

    name = damage(run_dir, 3)
    edit_lines(events_of(run_dir), restore)
    assert f"{MEMBERS[0]} restored the snapshot of step 3, which is damaged" in only_failure(run_dir, "snapshots")
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], "name": "damage", "target": name}, lines[1]])
    assert audit(run_dir).passed, "the drill damaged it later"


def test_a_snapshot_that_the_drill_damaged_and_that_was_restored(run_dir: Path) -> None:
    """Whatever has become of it since: the run that goes on saves a whole one of the same step."""
    mark_as_drill(run_dir)
    name = snapshot_of(run_dir, 3).name
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], "name": "damage", "target": name}, lines[1]])
    restart(run_dir, 3, "snapshot")
    assert f"snapshots: {MEMBERS[0]} restored {name}, which the drill had damaged" in audit(run_dir).reasons

    def save_anew(lines: list[Line]) -> list[Line]:
        return [
            *lines,
            {**lines[0], "event": "snapshot", "time": START + 4, "generation": 1, "snapshot_step": 3, "path": "/s"},
        ]

    edit_lines(events_of(run_dir), save_anew)
    assert verdicts(audit(run_dir))["snapshots"] is Verdict.PASS


def snapshot_of(run_dir: Path, step: int) -> Path:
    return next((run_dir / "snapshots").glob(f"step-{step:012d}-*"))


def damage(run_dir: Path, step: int) -> str:
    """Flip a bit in the snapshot of a step; its name."""
    path = snapshot_of(run_dir, step)
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)
    return path.name


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_job_that_did_not_reach_its_end(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [line for line in lines if line["event"] != "done"])
    assert f"nobody finished; the newest committed step is {LAST_STEP}" in only_failure(run_dir, "end")


def test_a_member_of_the_last_world_that_vanished(run_dir: Path) -> None:
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: lines[:-1])
    assert f"{MEMBERS[1]} was in the last world and ended without a word" in only_failure(run_dir, "end")


def end_with(run_dir: Path, **outcome: str) -> None:
    """All that were in the last world end so; result.json is of an earlier end."""
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [*lines[:-1], {**lines[-1], **outcome}])
    edit_json(run_dir / "result.json", lambda result: {**result, "step": 3, "state_sha256": "0" * 64})


def test_a_run_that_failed(run_dir: Path) -> None:
    end_with(run_dir, outcome="failed", error="TaskMismatch: x")
    assert "the run is failed: TaskMismatch: x" in only_failure(run_dir, "end")


def test_a_run_that_ended_without_a_word(run_dir: Path) -> None:
    def vanish(lines: list[Line]) -> list[Line]:
        return [{**line, "host": host_name(), "pid": 2**22 + 1} for line in lines[:-1]]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), vanish)
    assert "the run is dead: nobody finished" in only_failure(run_dir, "end")


def test_a_run_that_was_continued_and_stopped(run_dir: Path) -> None:
    """It had finished at step 3 once, and is to go on another day."""
    end_with(run_dir, outcome="stopped")
    found = audit(run_dir)
    assert found.passed, found.reasons
    skipped = {name for name, verdict in verdicts(found).items() if verdict is Verdict.SKIPPED}
    assert skipped == {"end", "faults", "losses", "phases", "state", "leftovers"}


def test_a_survivor_whose_torchrun_failed(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    path = run_dir / "drill" / "nodes.jsonl"
    edit_lines(path, lambda lines: [{**line, "code": 1} if line.get("code") == 0 else line for line in lines])
    assert "node1 finished, but its torchrun exited with 1" in only_failure(run_dir, "end")


def test_an_orphan_process(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as orphan:
        now = time.time()

        def adopt(lines: list[Line]) -> list[Line]:
            here = {"host": host_name(), "pid": orphan.pid, "time": now}
            return [{**line, **here} if line["event"] == "start" else line for line in lines]

        edit_lines(events_of(run_dir, MEMBERS[2]), adopt)
        reasons = "\n".join(audit(run_dir).reasons)
        assert f"leftovers: process {orphan.pid}, a worker of this run, still runs" in reasons
        assert orphan.stdin is not None
        orphan.stdin.close()


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


def test_a_handoff_that_nobody_took(run_dir: Path) -> None:
    folder = handoff_directory(RunDirectory(run_dir))
    folder.mkdir(parents=True)
    try:
        assert "is a handoff that nobody will take" in only_failure(run_dir, "leftovers")
    finally:
        folder.rmdir()
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def test_what_the_drill_itself_found_left(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    (run_dir / "drill" / "leftovers.json").write_text(json.dumps(["port 29400 is still open"]))
    assert "port 29400 is still open" in only_failure(run_dir, "leftovers")
    (run_dir / "drill" / "leftovers.json").unlink()
    assert "the drill did not look for what it left" in only_failure(run_dir, "leftovers")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_ends_in_a_verdict(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS"
    damage(run_dir, LAST_STEP)
    assert main(["audit", str(run_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "FAIL"
    assert lines[-1].startswith("  snapshots: snapshot ")


def test_no_run_is_an_error_and_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_history(tmp_path)
    assert main(["audit", str(tmp_path)]) == 1
    assert "PASS" not in capsys.readouterr().out


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
