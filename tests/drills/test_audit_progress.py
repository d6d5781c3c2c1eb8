"""Audits of training: for every promise a run that breaks it, and the check that reports it."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.errors import RunDirectoryError
from elastic_train.runlog.reader import read_all
from elastic_train.tools.audit.audit import CheckOutcome
from elastic_train.tools.audit.history import mixed_branches, read_history
from elastic_train.tools.audit.lost_time import lost_time
from elastic_train.tools.audit.progress_checks import check_ledger
from tests.audits import audit
from tests.drills.planting import (
    drawn,
    end_with,
    events_of,
    ledger_of,
    only_failure,
    restart,
    verdicts,
    with_wall,
)
from tests.drills.small_run import (
    BATCH,
    LAST_STEP,
    LENGTH,
    MEMBERS,
    START,
    Line,
    change,
    delay,
    edit_json,
    edit_lines,
    is_of,
    is_second_world,
    later,
    mark_as_drill,
    set_clock,
    write_lines,
)

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


@pytest.mark.parametrize("ledger", [True, False])
def test_a_run_that_was_continued_without_a_ledger(run_dir: Path, ledger: bool) -> None:
    """What there is of it is checked; where one was asked for, steps are missing."""

    def start_again(lines: list[Line]) -> list[Line]:
        position = next(number for number, line in enumerate(lines) if line["generation"] == 2)
        start = next(line for line in lines if line["event"] == "start")
        again = {**start, "time": START + 4.9, "config": {**start["config"], "ledger": ledger}}
        return [*lines[:position], again, *lines[position:]]

    restart(run_dir, 5, "snapshot", 5)
    edit_lines(events_of(run_dir), start_again)
    for member in MEMBERS[:2]:
        edit_lines(ledger_of(run_dir, member), lambda lines: [line for line in lines if line["step"] <= 5])
    found = audit(run_dir)
    [check] = [check for check in found.checks if check.name == "ledger"]
    assert check.verdict is (CheckOutcome.FAIL if ledger else CheckOutcome.PASS), found.reasons
    if ledger:
        assert any("step 6 was committed and has no line" in reason for reason in found.reasons)
    else:
        assert check.detail.endswith("5 steps, 2 epochs of 10 samples; 2 steps more without --ledger")


def test_a_rank_without_its_line(run_dir: Path) -> None:
    edit_lines(ledger_of(run_dir, MEMBERS[1]), lambda lines: lines[:-1])
    assert f"step {LAST_STEP}, generation 1: 2 samples where 4 belong" in only_failure(run_dir, "ledger")


def test_lines_that_are_of_an_attempt_before_the_commit(run_dir: Path) -> None:
    """Step 4 was begun as generation 0, and committed as generation 1, of whose lines none is left."""

    def drop(lines: list[Line]) -> list[Line]:
        return [line for line in lines if (line["step"], line["generation"]) != (4, 1)]

    for member in MEMBERS[:2]:
        edit_lines(ledger_of(run_dir, member), drop)
    told = "ledger: step 4 was committed in generation 1, and its newest lines are of 0"
    assert only_failure(run_dir, "ledger") == told


def test_lines_of_a_generation_that_nobody_tells_of(run_dir: Path) -> None:
    """They would count for the lines of the generation that committed the step. One that writes lines again may break
    before it stands."""
    for member in MEMBERS[:2]:
        change(ledger_of(run_dir, member), lambda line: line["step"] == 5, generation=9)
    told = "ledger: step 5 has lines of generation 9, and no member says that it stood"
    assert only_failure(run_dir, "ledger") == told
    edit_lines(events_of(run_dir), lambda lines: [*lines, {**lines[-1], "event": "ledger", "generation": 9}])
    assert audit(run_dir).reasons == []


def test_lines_by_somebody_who_was_not_that_rank(run_dir: Path) -> None:
    """c was not in generation 1, and there were two ranks in it."""
    change(ledger_of(run_dir, MEMBERS[1]), lambda line: line["step"] == 6, rank=5)
    last = read_all(ledger_of(run_dir))[-1]
    edit_lines(ledger_of(run_dir), lambda lines: lines[:-1])
    edit_lines(ledger_of(run_dir, MEMBERS[2]), lambda lines: [*lines, last])
    assert only_failure(run_dir, "ledger").splitlines() == [
        "ledger: step 6: b/0/12 wrote a line as rank 5 of generation 1; it was not",
        "ledger: step 7: c/0/13 wrote a line as rank 0 of generation 1; it was not",
    ]


def test_a_step_of_which_one_worker_has_all_samples_and_the_other_one_no_line(run_dir: Path) -> None:
    change(ledger_of(run_dir), lambda line: line["step"] == LAST_STEP, indices=[0, 1, 2, 3])
    edit_lines(ledger_of(run_dir, MEMBERS[1]), lambda lines: lines[:-1])
    assert only_failure(run_dir, "ledger") == f"ledger: step {LAST_STEP}, generation 1: no line of 1 worker"


def test_a_spare_writes_no_lines(run_dir: Path) -> None:
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_second_world, members=[*MEMBERS[:2], "d/0/14"], joined_members=["d/0/14"])
    start, *_, done = read_all(events_of(run_dir))
    write_lines(events_of(run_dir, "d/0/14"), [{**start, "time": START + 1.7}, done])
    assert audit(run_dir).reasons == []


def test_a_torn_line(run_dir: Path) -> None:
    path = ledger_of(run_dir, MEMBERS[2])
    path.write_bytes(path.read_bytes() + b'{"epoch": 1, "st\n')
    assert "is torn" in only_failure(run_dir, "ledger")


def test_a_torn_event(run_dir: Path) -> None:
    path = events_of(run_dir)
    path.write_bytes(path.read_bytes() + b'{"time": 1, "st\n')
    assert "events/a-0-11.jsonl: line 14 is torn" in only_failure(run_dir, "steps")


@pytest.mark.parametrize(
    ("event", "field", "value", "told"),
    [
        ("step", "step", None, "has no step"),
        ("step", "time", "late", "has a wrong time"),
        ("step", "time", math.nan, "has a wrong time"),
        pytest.param("step", "time", 10**400, "has a wrong time", id="no float"),
        ("warning", "discarded", "x", "has a wrong discarded"),
        ("step", "event", None, "has no event"),
        ("world", "members", 3, "has a wrong members"),
        ("world", "generation", None, "has no generation"),
        ("restore", "source", None, "has no source"),
        ("world", "lost_members", "a", "has a wrong lost_members"),
        ("start", "config", "x", "has a wrong config"),
        ("done", "outcome", None, "has no outcome"),
    ],
)
def test_an_event_without_what_it_needs(event: str, field: str, value: object, told: str, run_dir: Path) -> None:
    lines = read_all(events_of(run_dir))
    line = next((line for line in lines if line["event"] == event), {**lines[-1], "event": event})
    edit_lines(events_of(run_dir), lambda lines: [*lines, {**line, field: value}])
    assert only_failure(run_dir, "steps") == f"steps: events/a-0-11.jsonl: line 14 {told}"


@pytest.mark.parametrize("text", ["3", "null", "[]", '"step"'])
def test_a_line_that_is_json_and_no_object(text: str, run_dir: Path) -> None:
    for path in (events_of(run_dir), ledger_of(run_dir)):
        path.write_text(f"{path.read_text()}{text}\n")
    assert audit(run_dir).reasons == [
        f"ledger: ledger/a-0-11.jsonl: line {len(read_all(ledger_of(run_dir))) + 1} is torn",
        "steps: events/a-0-11.jsonl: line 14 is torn",
    ]


def test_a_run_whose_only_steps_cannot_be_read(run_dir: Path) -> None:
    change(events_of(run_dir), lambda line: bool(line["event"] == "step"), loss=1.0, epoch=None)
    assert "steps: events/a-0-11.jsonl: line 4 has no epoch" in audit(run_dir).reasons


@pytest.mark.parametrize(("indices", "told"), [(None, "no indices"), (3, "a wrong indices"), ([{}], "wrong indices")])
def test_samples_without_what_they_need(indices: object, told: str, run_dir: Path) -> None:
    change(ledger_of(run_dir), lambda line: bool(line["step"] == 3), indices=indices)
    assert f"ledger: ledger/a-0-11.jsonl: line 3 has {told}" in audit(run_dir).reasons


def test_an_event_without_a_generation_is_of_no_world(run_dir: Path) -> None:
    lines = read_all(events_of(run_dir))
    event = {name: value for name, value in lines[-1].items() if name != "generation"} | {"event": "evaluation"}
    edit_lines(events_of(run_dir), lambda lines: [*lines, event])
    assert audit(run_dir).passed


def test_members_that_are_no_names(run_dir: Path) -> None:
    change(events_of(run_dir), is_second_world, lost_members=[{}])
    assert "generations: generation 1 names c/0/13, {} as gone, but c/0/13 are" in audit(run_dir).reasons


def test_a_line_that_a_kill_cut_off_is_no_finding_of_its_own(run_dir: Path) -> None:
    path = ledger_of(run_dir, MEMBERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"epoch": 1, "st')
    assert audit(run_dir).passed
    path.write_bytes(whole[:-9])  # what it told is missing, though
    assert "samples where" in only_failure(run_dir, "ledger")


def _tell(run_dir: Path, member: str, **lost: object) -> None:
    """A worker says at its end what it could not write while its disk was full."""

    def tell(lines: list[Line]) -> list[Line]:
        return [*lines[:-1], {**lines[-1], "event": "unwritten", "torn": 0, **lost}, lines[-1]]

    edit_lines(events_of(run_dir, member), tell)


def test_samples_that_were_not_written_for_the_disk_was_full(run_dir: Path) -> None:
    path = ledger_of(run_dir, MEMBERS[1])
    edit_lines(path, lambda lines: [line for line in lines if line["step"] not in (5, 6)])
    path.write_bytes(path.read_bytes().replace(b'{"epoch": 2', b'{"epoch": 1, "st\n{"epoch": 2'))
    assert len(only_failure(run_dir, "ledger").splitlines()) == 4, "two steps, an epoch, a torn line"
    _tell(run_dir, MEMBERS[1], file="ledger", lines={"samples": [[1, 5, 5]]})
    assert only_failure(run_dir, "ledger").splitlines() == [
        "ledger: ledger/b-0-12.jsonl: line 6 is torn",
        "ledger: step 6, generation 1: 1 samples where 2 belong",
    ]
    _tell(run_dir, MEMBERS[0], file="ledger", lines={"samples": [[1, 6, 6]]}, torn=1)
    assert len(only_failure(run_dir, "ledger").splitlines()) == 2, "the other one says nothing of what is missing"
    _tell(run_dir, MEMBERS[1], file="ledger", lines={"samples": [[1, 6, 6]]}, torn=1)
    found = audit(run_dir)
    assert found.reasons == []
    [check] = [check for check in found.checks if check.name == "ledger"]
    assert check.detail == "5 steps, 3 epochs of 10 samples; 2 steps more not written, by their workers' own word"
    assert (found.verdict, found.notes[-1]) == (
        "PASS", "not looked at: 3 lines not written, by their workers' own word"
    )  # fmt: skip
    edit_lines(ledger_of(run_dir), lambda lines: [line for line in lines if line["step"] != 5])
    assert only_failure(run_dir, "ledger") == "ledger: step 5 was committed and has no line"


@pytest.mark.parametrize("lost", [(5, 6), (6, 7)], ids=["in between", "the last"])
def test_steps_that_were_not_written_for_the_disk_was_full(run_dir: Path, lost: tuple[int, int]) -> None:
    edit_lines(
        events_of(run_dir),
        lambda lines: [line for line in lines if line["event"] != "step" or line["step"] not in lost],
    )
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.FAIL
    _tell(run_dir, MEMBERS[0], file="events", lines={"step": [[0, *lost]]})
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.FAIL, "of a generation that had not these steps"
    _tell(run_dir, MEMBERS[0], file="events", lines={"step": [[1, *lost]]})
    found = audit(run_dir)
    assert found.reasons == []
    [check] = [check for check in found.checks if check.name == "steps"]
    assert check.detail == "steps 1 to 7 in 2 generations; 2 of them not written, by their workers' own word"


def test_samples_that_are_none_of_the_data(run_dir: Path) -> None:
    def spoil(lines: list[Line]) -> list[Line]:
        lines[0]["indices"] = [LENGTH, 2**40]
        lines[1]["indices"] = [-1, -1]
        return lines

    edit_lines(ledger_of(run_dir), spoil)
    assert audit(run_dir).reasons == [
        "ledger: epoch 0: sample -1 used more than once",
        "ledger: epoch 0: samples 0, 3, 4 and 1 more never used",
        f"ledger: epoch 0: samples -1, {LENGTH}, {2**40} of a data set of {LENGTH}",
    ]


@pytest.mark.parametrize(("name", "field"), [("config", "global_batch_size"), ("task", "train_length")])
def test_a_start_with_nothing_to_train_on(name: str, field: str, run_dir: Path) -> None:
    for member in MEMBERS:
        change(events_of(run_dir, member), lambda line: bool(line["event"] == "start"), **{name: {field: 0}})
    assert verdicts(audit(run_dir))["ledger"] is CheckOutcome.SKIPPED


def test_a_large_ledger_takes_a_few_bytes_for_a_sample(tmp_path: Path) -> None:
    length, batch, epochs = 20_000, 1000, 10
    run_dir, member = tmp_path / "run", "a/0/11"
    place = {"generation": 0, "rank": 0, "world_size": 1, "time": START, "writer": member}
    config = {"global_batch_size": batch, "ledger": True}
    start = place | {"event": "start", "step": 0, "config": config, "task": {"train_length": length}}
    world = place | {"event": "world", "step": 0, "cause": "start", "members": [member]}
    steps = [
        place | {"event": "step", "step": step, "epoch": (step - 1) * batch // length, "loss": 1.0}
        for step in range(1, epochs * length // batch + 1)
    ]
    write_lines(run_dir / "events" / "a-0-11.jsonl", [start, world, *steps])
    ledger = [
        {**step, "indices": list(range(first, first + batch))}
        for step in steps
        for first in [(step["step"] - 1) * batch % length]
    ]
    write_lines(run_dir / "ledger" / "a-0-11.jsonl", ledger)
    del ledger
    tracemalloc.start()
    detail, findings = check_ledger(read_history(run_dir))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (detail, findings) == ("200 steps, 10 epochs of 20000 samples", [])
    assert most < 10 * epochs * length


def test_a_long_ledger_takes_few_hundred_bytes_for_a_line(tmp_path: Path) -> None:
    """Of a small batch, on many ranks."""
    ranks, each, steps = 8, 2, 1000
    members = [f"a/{rank}/{rank}" for rank in range(ranks)]
    place: Line = {"generation": 0, "rank": 0, "world_size": ranks, "time": START, "writer": members[0]}
    config = {"global_batch_size": ranks * each, "ledger": True}
    start = place | {"event": "start", "step": 0, "config": config, "task": {"train_length": 10 * ranks * each}}
    world = place | {"event": "world", "step": 0, "cause": "start", "members": members}
    of_steps = [place | {"event": "step", "step": n, "epoch": (n - 1) // 10, "loss": 1.0} for n in range(1, steps + 1)]
    write_lines(events_of(tmp_path, members[0]), [start, world, *of_steps])
    for rank, member in enumerate(members):
        used = [
            {"epoch": step["epoch"], "step": step["step"], "generation": 0, "rank": rank, "indices": [first, first + 1]}
            for step in of_steps
            for first in [((step["step"] - 1) % 10 * ranks + rank) * each]
        ]
        write_lines(ledger_of(tmp_path, member), used)
    del used, of_steps
    tracemalloc.start()
    detail, findings = check_ledger(read_history(tmp_path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (detail, findings) == ("1000 steps, 100 epochs of 160 samples", [])
    assert most < 400 * ranks * steps, "250, with the steps; as dicts they took 790"


def test_a_long_run_takes_some_hundred_bytes_for_a_step(tmp_path: Path) -> None:
    steps, member = 20_000, "a/0/11"
    place: Line = {"generation": 0, "rank": 0, "world_size": 1, "nodes": 1, "pid": 11, "host": "a"}
    lines = [
        place | {"event": "start", "step": 0, "config": {"global_batch_size": 4}, "task": {"train_length": 8}},
        place | {"event": "world", "step": 0, "cause": "start", "members": [member]},
        *(
            place | {"event": "step", "step": step, "epoch": (step - 1) // 2, "loss": 1.0 / step, "samples_done": 8}
            for step in range(1, steps + 1)
        ),
    ]
    told = [{**line, "time": START + 0.01 * n} for n, line in enumerate(lines)]
    write_lines(tmp_path / "events" / "a-0-11.jsonl", told)
    del lines, told
    tracemalloc.start()
    lost = lost_time(read_history(tmp_path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lost.wall == pytest.approx(0.01 * (steps - 1))
    assert most < 400 * steps, "330; as dicts they took 2,000"


def test_lines_of_a_step_that_was_not_committed_do_not_count(run_dir: Path) -> None:
    """Those of step 4 in generation 0, in which c died, are there; and a step beyond the last."""
    edit_lines(ledger_of(run_dir), lambda lines: [*lines, {**lines[-1], "step": LAST_STEP + 1}])
    assert audit(run_dir).passed


def test_without_a_ledger_nothing_is_claimed(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "ledger")
    found = audit(run_dir)
    assert found.passed
    assert verdicts(found)["ledger"] is CheckOutcome.SKIPPED

    def ask_for_one(lines: list[Line]) -> list[Line]:
        return [{**line, "config": {**line["config"], "ledger": True}} if "config" in line else line for line in lines]

    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), ask_for_one)
    lost = "ledger: steps were committed with --ledger, and nothing is in ledger/"
    assert only_failure(run_dir, "ledger") == lost
    restart(run_dir, LAST_STEP, "snapshot", LAST_STEP)

    def continue_without(lines: list[Line]) -> list[Line]:
        start = next(line for line in lines if line["event"] == "start")
        return [*lines, {**start, "time": START + 4.9, "config": {**start["config"], "ledger": False}}]

    edit_lines(events_of(run_dir), continue_without)
    assert only_failure(run_dir, "ledger") == lost, "the newest start had none, and those of before had"
    config = read_all(events_of(run_dir))[-1]["config"]
    change(events_of(run_dir), lambda line: line["event"] == "start", config=config)
    assert verdicts(audit(run_dir))["ledger"] is CheckOutcome.SKIPPED, "in each generation somebody had none"


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
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if line["generation"] != 1])
    world = {"step": 1, "members": MEMBERS[1:], "lost_members": [MEMBERS[0]]}
    change(events_of(run_dir, MEMBERS[1]), is_second_world, **world)
    assert "steps: generation 1 begins at step 1, but step 3 had been committed" in audit(run_dir).reasons


def test_a_restart_from_scratch_where_a_snapshot_had_been_saved(run_dir: Path) -> None:
    restart(run_dir, 0, "scratch")
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.PASS, "everything was killed before the first snapshot"
    edit_lines(
        events_of(run_dir),
        lambda lines: [*lines, {**lines[0], "event": "snapshot", "generation": 1, "snapshot_step": 3, "path": "/s/3"}],
    )
    reason = "steps: generation 2 begins at step 0, from scratch, but the snapshot of step 3 had been saved"
    assert reason in audit(run_dir).reasons


def test_a_restart_of_a_drill_loses_no_more_than_what_came_after_the_newest_snapshot(run_dir: Path) -> None:
    restart(run_dir, 3, "snapshot", snapshot=5)
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.PASS, "its disk may have been lost"
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    lost = "steps: generation 2 begins at step 3, but step 7 had been committed"
    assert lost in audit(run_dir).reasons
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("kill-all")}, lines[1]])
    assert lost in audit(run_dir).reasons, "the job had recovered: generation 1 came after it"
    edit_lines(faults, lambda lines: [{**lines[0], "injected_at": START + 4}, lines[1]])
    assert lost not in audit(run_dir).reasons
    reason = "steps: generation 2 begins at step 3, from snapshot, but the snapshot of step 5 had been saved"
    assert reason in audit(run_dir).reasons
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("damage"), "target": "5"}, lines[1]])
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.PASS, "that one was damaged"


def test_a_snapshot_that_made_room_for_damaged_ones(run_dir: Path) -> None:
    restart(run_dir, 3, "snapshot", snapshot=5)
    fault = {"what": "injected", "number": 0, **drawn("damage"), "step": 3, "injected_at": START + 4, "time": START + 4}
    mark_as_drill(run_dir, [{**fault, "number": n, "target": str(n)} for n in (1, 2, 3)], num_faults=3)

    def save(number: int) -> None:
        saved = {"event": "snapshot", "generation": 1, "snapshot_step": 6, "path": f"/s/{number}", "time": START + 3}
        edit_lines(events_of(run_dir), lambda lines: [*lines, {**lines[0], **saved}])

    overlooked = "generation 2 begins at step 3, from snapshot, but the snapshot of step 5 had been saved"
    save(1)
    save(2)
    assert f"steps: {overlooked}" in audit(run_dir).reasons
    save(3)
    assert verdicts(audit(run_dir))["steps"] is CheckOutcome.PASS, "three are kept"


def test_a_restart_that_loses_a_step(run_dir: Path) -> None:
    """All leave, and those who follow begin with less than they had committed."""
    mark_as_drill(run_dir, [])  # of one that killed nobody
    restart(run_dir, 6, "snapshot")
    lost = "steps: generation 2 begins at step 6, but step 7 had been committed"
    assert lost in audit(run_dir).reasons
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [line for line in lines if not _ended_at(line, 7, 1)])
    assert lost not in audit(run_dir).reasons, "whoever had applied it may have died"


def _ended_at(line: Line, step: int, generation: int) -> bool:
    return (line["event"], line["step"], line["generation"]) == ("done", step, generation)


def test_a_step_that_is_missing(run_dir: Path) -> None:
    edit_lines(
        events_of(run_dir), lambda lines: [line for line in lines if (line["event"], line["step"]) != ("step", 2)]
    )
    assert "step 2 was never committed" in only_failure(run_dir, "steps")


def test_a_step_committed_twice_in_one_generation(run_dir: Path) -> None:
    edit_lines(events_of(run_dir), lambda lines: [*lines, next(line for line in lines if line["event"] == "step")])
    assert "generation 0 committed step 1 more than once" in only_failure(run_dir, "steps")


def test_a_step_that_an_expelled_member_wrote_too(run_dir: Path) -> None:
    """Rank 0 froze in its commit and woke up after the others had taken the step over: the successor's line counts."""
    step = {"event": "step", "step": 3, "generation": 0}

    def is_it(line: Line) -> bool:
        return step.items() <= line.items()

    found: list[Line] = []
    edit_lines(events_of(run_dir), lambda lines: found.extend(filter(is_it, lines)) or lines)
    expelled = MEMBERS[2].split("/")
    other = {**found[0], "host": expelled[0], "pid": int(expelled[2]), "loss": 5.0}
    edit_lines(events_of(run_dir, MEMBERS[2]), lambda lines: [*lines, other])
    assert audit(run_dir).passed


def test_a_member_that_wrote_all_steps_of_its_world_beside_rank_0(run_dir: Path) -> None:
    """It had committed them alone: an expelled one may have written the last two."""
    own = [{**line, "host": "c", "pid": 13} for line in read_all(events_of(run_dir)) if line["event"] == "step"][:3]
    edit_lines(events_of(run_dir, MEMBERS[2]), lambda lines: [*lines, *own[1:]])
    assert audit(run_dir).reasons == []
    edit_lines(events_of(run_dir, MEMBERS[2]), lambda lines: [*lines[:-2], *own])
    assert only_failure(run_dir, "steps") == "steps: generation 0 committed step 1 more than once"


def test_steps_that_a_worker_wrote_in_another_order(run_dir: Path) -> None:
    change(events_of(run_dir), lambda line: (line["event"], line["step"]) == ("step", 6), step=50)
    change(events_of(run_dir), lambda line: (line["event"], line["step"]) == ("step", 5), step=6)
    change(events_of(run_dir), lambda line: (line["event"], line["step"]) == ("step", 50), step=5)
    assert only_failure(run_dir, "steps") == "steps: a/0/11 committed step 5 after step 6, in generation 1"


def test_a_survivor_that_went_on_from_fewer_steps_than_it_had(run_dir: Path) -> None:
    """Step 4 was committed, for b had applied it too, and the next world began without it."""
    path = events_of(run_dir, MEMBERS[1])
    change(path, lambda line: line["event"] == "peer_lost", step=4)
    assert only_failure(run_dir, "steps") == "steps: b/0/12 had committed step 4, and began generation 1 at step 3"
    world = next(filter(is_second_world, read_all(path)))
    edit_lines(path, lambda lines: [*lines, {**world, "event": "restore", "source": "peer", "restored_step": 3}])
    assert audit(run_dir).passed, "it was given the state of the others, who had not applied it"


def test_an_epoch_that_was_too_short(run_dir: Path) -> None:
    change(events_of(run_dir), lambda line: (line["event"], line["step"]) == ("step", 6), epoch=2)
    assert only_failure(run_dir, "steps") == "steps: step 6 belongs to epoch 1, its line says 2"


def test_a_run_that_stopped_after_a_step_of_which_no_line_is_left(run_dir: Path) -> None:
    end_with(run_dir, outcome="stopped")
    assert audit(run_dir).reasons == []
    edit_lines(
        events_of(run_dir),
        lambda lines: [line for line in lines if (line["event"], line["step"]) != ("step", LAST_STEP)],
    )
    assert only_failure(run_dir, "steps") == "steps: step 7 was never committed, and the run came to step 7 (1 missing)"


@pytest.mark.parametrize("step", [2, 4])
def test_a_member_that_restored_another_step_than_its_world_began_with(run_dir: Path, step: int) -> None:
    restart(run_dir, 3, "snapshot", 3)
    change(events_of(run_dir), lambda line: (line["event"], line["generation"]) == ("restore", 2), restored_step=step)
    told = f"steps: generation 2 begins at step 3, and a/0/11 restored step {step}"
    assert told in audit(run_dir).reasons


def test_steps_that_an_expelled_member_took_back(run_dir: Path) -> None:
    """It woke up after the others had formed the next world, and had committed two steps more: nobody lost them."""
    lines_of_0: list[Line] = []
    edit_lines(events_of(run_dir), lambda lines: lines_of_0.extend(lines) or lines)
    others = [line for line in lines_of_0 if (line["event"], line["generation"]) == ("step", 1)][:2]
    expelled = MEMBERS[2].split("/")
    own = [{**line, "host": expelled[0], "pid": int(expelled[2]), "generation": 0, "loss": 5.0} for line in others]
    edit_lines(events_of(run_dir, MEMBERS[2]), lambda lines: [*lines, *own])
    began, reached = int(others[0]["step"]) - 1, others[1]["step"]
    told = only_failure(run_dir, "steps")
    assert f"generation 1 begins at step {began}, but step {reached} had been committed" in told
    void = [{"generation": 0, "step": line["step"]} for line in own]
    left_out = {**own[1], "event": "warning", "message": "it comes back as a newcomer", "void": void}
    edit_lines(events_of(run_dir, MEMBERS[2]), lambda lines: [*lines, left_out])
    assert audit(run_dir).passed, audit(run_dir).reasons


def test_a_result_of_another_step(run_dir: Path) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, "step": 3})
    assert f"result.json is of step 3, the events reach {LAST_STEP}" in only_failure(run_dir, "steps")


def test_a_restart_from_a_snapshot_may_repeat_steps(run_dir: Path) -> None:
    """Everything was killed after step 7 had been committed, and the snapshot was of step 3."""

    restart(run_dir, 3, "snapshot")
    found = audit(run_dir)
    assert verdicts(found)["steps"] is CheckOutcome.PASS, found.reasons
    assert lost_time(read_history(run_dir)).outages[-1].cause == "restart"


def test_what_a_restart_undid_counts_again_when_it_is_done_again(run_dir: Path) -> None:
    """The run goes on from the snapshot of step 3, and has come to step 5 again."""
    restart(run_dir, 3, "snapshot")
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if not _is_beyond(line, 5, 2)])
    history = read_history(run_dir)
    assert [(step.step, step.generation) for step in history.kept] == [(1, 0), (2, 0), (3, 0), (4, 2), (5, 2)]
    lost = lost_time(history)
    assert lost.wall == pytest.approx(4.9), "steps 1 to 5, with all that lies between"
    assert 0.0 < lost.ratio < 1.0
    assert [outage.generation for outage in lost.outages] == [2]


@pytest.mark.parametrize(
    ("source", "began", "reached", "wall", "lost"),
    [("scratch", 0, 7, 5.1, 3.9), ("scratch", 0, 0, 1.1, 1.1), ("snapshot", 3, 3, 1.1, 0.9)],
    ids=["from scratch", "from scratch, no step yet", "from a snapshot, no step yet"],
)
def test_what_a_restart_undid_is_lost_time(
    run_dir: Path, source: str, began: int, reached: int, wall: float, lost: float
) -> None:
    restart(run_dir, began, source)
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if not _is_beyond(line, reached, 2)][:-1])
    history = read_history(run_dir)
    assert history.last_step == reached
    found = lost_time(history)
    assert found.wall == pytest.approx(wall), "from the first step of all to the last, undone or not"
    assert found.by_cause["restart"] == pytest.approx(lost, abs=1e-3)
    assert found.useful + sum(found.by_cause.values()) == pytest.approx(wall)


def test_a_run_that_was_continued_to_an_earlier_end(run_dir: Path) -> None:
    """Killed at step 7 with its snapshot at 3, and told to end with step 5."""
    restart(run_dir, 3, "snapshot")
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if not _is_beyond(line, 5, 2)])
    change(events_of(run_dir), lambda line: (line["event"], line["generation"]) == ("done", 2), step=5)
    edit_json(run_dir / "result.json", lambda result: {**result, "step": 5})
    found = audit(run_dir)
    [check] = [check for check in found.checks if check.name == "steps"]
    assert (check.verdict, check.detail) == (CheckOutcome.PASS, "steps 1 to 5 in 3 generations"), found.reasons
    assert "snapshots: finished, but there is no snapshot of step 5" in found.reasons


def _is_beyond(line: Line, step: int, generation: int) -> bool:
    return bool(line["event"] == "step" and line["generation"] == generation and line["step"] > step)


def test_new_machines_that_went_on_from_a_snapshot(run_dir: Path) -> None:
    """Their disks were empty: nothing of the steps before is there, nor on anybody's."""
    restart(run_dir, 3, "snapshot", snapshot=3)
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if line["generation"] in (None, 2)])
    change(events_of(run_dir), lambda line: line["event"] == "start", time=START + 4.9)
    edit_lines(ledger_of(run_dir), lambda lines: [line for line in lines if line["generation"] == 2])
    for member in MEMBERS[1:]:
        events_of(run_dir, member).unlink()
        ledger_of(run_dir, member).unlink()
    found = audit(run_dir)
    assert found.passed, found.reasons
    details = {check.name: check.detail for check in found.checks}
    said = "; it began here after step 3: what came before is not here"
    assert details["steps"] == f"steps 4 to {LAST_STEP} in 1 generation{said}"
    assert said in details["ledger"]
    assert (found.verdict, found.notes) == ("PASS", ["not looked at: the first 3 steps not here"])
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if line.get("step") != 5])
    assert "step 5 was never committed" in "".join(audit(run_dir).reasons)


def test_a_node_whose_disk_is_gone(run_dir: Path) -> None:
    """a has died as rank 0, and with it what it had written down; b has trained on, and has a directory of its own."""
    taken = [line for line in read_all(events_of(run_dir)) if (line["event"], line["generation"]) == ("step", 1)]
    own = [{**line, "host": "b", "pid": 12, "monotonic": line["monotonic"] + 1000.0} for line in taken]
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: [*lines[:-1], *own, lines[-1]])
    alone = {"members": [MEMBERS[1]], "lost_members": [MEMBERS[0], MEMBERS[2]]}
    change(events_of(run_dir, MEMBERS[1]), is_second_world, **alone)
    edit_json(
        run_dir / "result.json",
        lambda result: {**result, "incidents": [{**result["incidents"][0], "lost_members": alone["lost_members"]}]},
    )
    of_a = {line["step"]: line for line in read_all(ledger_of(run_dir)) if line["generation"] == 1}

    def use_all(lines: list[Line]) -> list[Line]:
        own = [line for line in lines if line["generation"] == 1]
        alone = [{**line, "rank": 0, "indices": of_a[line["step"]]["indices"] + line["indices"]} for line in own]
        return [*(line for line in lines if line not in own), *alone]

    edit_lines(ledger_of(run_dir, MEMBERS[1]), use_all)
    for path in (events_of(run_dir), ledger_of(run_dir)):
        edit_lines(path, lambda lines: [line for line in lines if line["generation"] != 1])
    assert audit(run_dir).reasons == []
    for path in (events_of(run_dir), ledger_of(run_dir)):
        path.unlink()
    found = audit(run_dir)
    assert found.reasons == []
    assert found.elsewhere == (MEMBERS[0],)
    details = {check.name: check.detail for check in found.checks}
    assert details["steps"] == f"steps 1 to {LAST_STEP} in 2 generations; 3 of them stand in files that are not here"
    assert details["ledger"] == "4 steps, 2 epochs of 10 samples; 3 steps more stand in files that are not here"
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: [line for line in lines if line.get("step") != 5])
    assert "step 5 was never committed" in "".join(audit(run_dir).reasons)


def test_a_node_that_came_to_others_of_whom_nothing_is_here(run_dir: Path) -> None:
    """They have left since, and their disks are gone."""
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [line for line in lines if line["generation"] == 1])
        edit_lines(ledger_of(run_dir, member), lambda lines: [line for line in lines if line["generation"] == 1])
    for path in (events_of(run_dir, MEMBERS[2]), ledger_of(run_dir, MEMBERS[2])):
        path.unlink()
    start = {"event": "start", "generation": None, "step": 0, "time": START + 1.7, "task": {"train_length": LENGTH}}
    start |= {"config": {"global_batch_size": BATCH}}
    edit_lines(events_of(run_dir), lambda lines: [start, *lines])
    found = audit(run_dir)
    assert found.reasons == []
    details = {check.name: check.detail for check in found.checks}
    said = "; it began here after step 3: what came before is not here"
    assert details["steps"] == f"steps 4 to {LAST_STEP} in 1 generation{said}"


# --- the generations --------------------------------------------------------------------------------------------------


def test_two_groups_of_one_generation(run_dir: Path) -> None:
    change(events_of(run_dir, MEMBERS[1]), is_second_world, members=[MEMBERS[1]])
    reasons = only_failure(run_dir, "generations")
    assert "generation 1 has 2 memberships: [a/0/11, b/0/12] and [b/0/12]" in reasons


@pytest.mark.parametrize("step", [1, 4])
def test_members_of_one_generation_that_begin_at_different_steps(run_dir: Path, step: int) -> None:
    change(events_of(run_dir, MEMBERS[1]), is_second_world, step=step)
    steps = " and ".join(map(str, sorted((3, step))))
    assert f"generations: generation 1 began at different steps: {steps}" in audit(run_dir).reasons


def test_a_worker_that_never_stood_in_the_world_that_committed_with_it(run_dir: Path) -> None:
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: [line for line in lines if not is_second_world(line)])
    silent = "generations: generation 1 committed steps, and b/0/12 never stood in it"
    assert only_failure(run_dir, "generations") == silent
    _tell(run_dir, MEMBERS[1], file="events", lines={"world": [[1, 3, 3]]})
    assert audit(run_dir).reasons == []


def test_two_groups_that_train_at_the_same_time(run_dir: Path) -> None:
    """c is cut off, starts from the snapshot of step 3, and trains beside a and b as a generation of its own."""

    def train(lines: list[Line]) -> list[Line]:
        line = {**later(lines[-1], 0.82), "generation": 2, "world_size": 1, "rank": 0, "step": 3}
        world = {**line, "event": "world", "cause": "start", "members": MEMBERS[2:], "lost_members": []}
        restore = {**line, "event": "restore", "source": "snapshot", "restored_step": 3}
        step = {**line, "event": "step", "epoch": 1, "loss": 0.2}
        steps = [{**later(step, 0.1 * n - 0.3), "step": n} for n in range(4, LAST_STEP + 1)]
        return [*lines, world, restore, *steps]

    edit_lines(events_of(run_dir, MEMBERS[2]), train)
    [check] = [check for check in audit(run_dir).checks if check.name == "generations"]
    not_checked = "; not checked: whether one before 2 trained on beside it, for no clock tells of both"
    assert (check.verdict, check.detail) == (CheckOutcome.PASS, f"generations 0 to 2{not_checked}")
    mark_as_drill(run_dir)
    late = "generations: generation 1 committed 2 steps more, up to 7, when a later one trained"
    assert late in audit(run_dir).reasons, "a drill has one clock"
    [check] = [check for check in audit(run_dir).checks if check.name == "generations"]
    assert check.detail == "generations 0 to 2"


def test_one_host_that_trains_in_two_generations_at_the_same_time(run_dir: Path) -> None:
    restart(run_dir, 3, "snapshot", 3)
    assert verdicts(audit(run_dir))["generations"] is CheckOutcome.PASS
    delay(events_of(run_dir), 9.0, is_of(1))
    reasons = audit(run_dir).reasons
    assert "generations: generation 1 committed 4 steps more, up to 7, when a later one trained" in reasons
    assert "generations: generation 2 stood 5.8 s before generation 1" in reasons


@pytest.mark.parametrize("seconds", [-30.0, 100.0])
@pytest.mark.parametrize("first", [3, 6])
def test_a_clock_that_is_set_in_the_middle_of_a_run(run_dir: Path, first: int, seconds: float) -> None:
    """Between two worlds, or within one."""
    set_clock(events_of(run_dir), seconds, lambda line: line["generation"] == 1 and line["step"] >= first)
    assert audit(run_dir).reasons == []


@pytest.mark.parametrize(("seconds", "of_machine"), [(-30.0, 0.0), (-3600.0, -900.0)], ids=["set back", "began anew"])
def test_a_clock_that_is_off_after_a_restart(run_dir: Path, seconds: float, of_machine: float) -> None:
    """That of a machine that has begun anew, whose other clock begins at zero, may be so until it is told the time."""
    restart(run_dir, 3, "snapshot", 3)
    edit_json(run_dir / "result.json", lambda result: {**result, **with_wall(result, 6.0)})
    assert audit(run_dir).reasons == []
    delay(events_of(run_dir), of_machine, is_of(2))
    set_clock(events_of(run_dir), seconds - of_machine, is_of(2))
    assert audit(run_dir).reasons == []


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_clock_that_was_set_neither_makes_goodput_nor_loses_it(run_dir: Path, seconds: float) -> None:
    before = lost_time(read_history(run_dir))
    set_clock(events_of(run_dir), seconds, lambda line: line["step"] >= 5)
    found = lost_time(read_history(run_dir))
    assert (found.wall, found.useful, found.ratio) == pytest.approx((before.wall, before.useful, before.ratio))
    assert found.by_cause == pytest.approx(before.by_cause, abs=1e-5)


def test_a_pod_that_came_back_on_another_machine_is_not_timed_by_the_clocks_of_both(run_dir: Path) -> None:
    """Its processes have one name, and so one file; the other machine has been up for a million seconds longer."""
    restart(run_dir, 3, "snapshot", 3)
    before = lost_time(read_history(run_dir))

    def elsewhere(lines: list[Line]) -> list[Line]:
        first = next(place for place, line in enumerate(lines) if line["generation"] == 2)
        started = {**later(lines[0], lines[first]["time"] - lines[0]["time"]), "event": "start", "generation": None}
        later_lines = [started, *lines[first:]]
        return [*lines[:first], *({**line, "monotonic": line["monotonic"] + 1e6} for line in later_lines)]

    edit_lines(events_of(run_dir), elsewhere)
    found = lost_time(read_history(run_dir))
    assert (found.wall, found.by_cause) == (before.wall, before.by_cause)


@pytest.mark.parametrize("name", ["events", "ledger"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    run_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def list_it(path: Any = ".") -> Any:
            if os.fspath(path) == str(run_dir / name):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path)

        return list_it

    for function in ("listdir", "scandir"):
        monkeypatch.setattr(os, function, denied(getattr(os, function)))
    with pytest.raises(RunDirectoryError, match=f"{run_dir / name} cannot be read: Permission denied"):
        read_history(run_dir)


def test_a_result_without_any_events_is_no_pass(run_dir: Path) -> None:
    for path in [*(run_dir / "events").iterdir(), *(run_dir / "ledger").iterdir()]:
        path.unlink()
    shutil.rmtree(run_dir / "snapshots")
    assert audit(run_dir).verdict == "FAIL"


def test_the_next_rank_0_is_on_a_host_whose_clock_is_ahead(run_dir: Path) -> None:
    """No outage is as long as their clocks are apart."""
    taken: list[Line] = []

    def take(lines: list[Line]) -> list[Line]:
        taken.extend(line for line in lines if (line["event"], line["generation"]) == ("step", 1))
        return [line for line in lines if line not in taken]

    edit_lines(events_of(run_dir), take)
    own = [{**line, "host": "b", "pid": 12, "monotonic": line["monotonic"] + 1000.0} for line in taken]
    edit_lines(events_of(run_dir, MEMBERS[1]), lambda lines: [*lines[:-1], *own, lines[-1]])
    assert audit(run_dir).reasons == []
    delay(events_of(run_dir, MEMBERS[1]), 100.0, lambda _line: True)
    assert audit(run_dir).reasons == []


def test_the_flags_are_those_of_the_newest_world_whatever_its_clock_says(run_dir: Path) -> None:
    """d goes on with another folder of snapshots; its clock is a day behind."""
    lines = read_all(events_of(run_dir))
    start = {**lines[0], "time": START - 86400.0, "config": {**lines[0]["config"], "snapshot_dir": "/elsewhere"}}
    world = {**lines[1], "time": START - 86399.0, "generation": 2, "step": LAST_STEP, "members": ["d/0/14"]}
    write_lines(events_of(run_dir, "d/0/14"), [start, world])
    assert read_history(run_dir).config["snapshot_dir"] == "/elsewhere"


@pytest.mark.parametrize(("key", "flag"), [(None, ""), ("/k/run.key", " --snapshot-key /k/run.key")])
def test_how_snapshots_in_a_bucket_are_verified_is_told_whole(run_dir: Path, key: str | None, flag: str) -> None:
    def move(lines: list[Line]) -> list[Line]:
        there = {"snapshot_dir": "s3://bucket/run", "snapshot_key": key}
        return [{**line, "config": {**line["config"], **there}} if "config" in line else line for line in lines]

    for member in MEMBERS:
        edit_lines(events_of(run_dir, member), move)
    told = f"; those of s3://bucket/run: elastic-train snapshot verify s3://bucket/run{flag}"
    assert read_history(run_dir).in_bucket == told


@pytest.mark.parametrize(
    ("member", "ahead", "is_anew"),
    [
        (MEMBERS[0], 5.0, False),
        (MEMBERS[2], 5.0, False),
        (MEMBERS[1], -5.0, False),
        (MEMBERS[0], 60.0, True),
        (MEMBERS[0], 5.0, True),
        (MEMBERS[2], -60.0, False),
    ],
)
def test_hosts_whose_clocks_are_apart(run_dir: Path, member: str, ahead: float, is_anew: bool) -> None:
    """Training compares no clocks, so that such a run is sound."""
    delay(events_of(run_dir, member), ahead, lambda _line: True)
    if is_anew:
        change(events_of(run_dir, member), lambda line: line["event"] == "start", is_anew=True)
    found = audit(run_dir)
    assert found.reasons == []
    assert verdicts(found)["ledger"] is verdicts(found)["phases"] is CheckOutcome.PASS


def test_who_starts_again_after_fresh_is_of_its_run(run_dir: Path) -> None:
    """As a new process on a host of the run, with one of a host that is new; a's clock is a minute ahead."""
    change(events_of(run_dir), lambda line: line["event"] == "start", is_anew=True)
    delay(events_of(run_dir), 60.0, lambda _line: True)
    line = {"rank": 0, "world_size": 2, "step": LAST_STEP, "time": START + 9.0, "generation": 2}
    world = line | {"event": "world", "cause": "start", "members": ["b/0/21", "d/0/22"], "seconds": {}}
    for member in ("b/0/21", "d/0/22"):
        write_lines(events_of(run_dir, member), [line | {"event": "start", "generation": None}, world])
    assert {life.member for life in read_history(run_dir).lives} == {*MEMBERS, "b/0/21", "d/0/22"}


def test_who_starts_again_after_fresh_is_of_its_run_whatever_its_clock_says(run_dir: Path) -> None:
    """It was told the time in between, or was off for a while; it goes on alone."""
    change(events_of(run_dir), lambda line: line["event"] == "start", is_anew=True)
    line = {"rank": 0, "world_size": 1, "step": LAST_STEP, "time": START - 3600.0, "generation": 2}
    world = line | {"event": "world", "cause": "start", "members": ["a/0/21"], "seconds": {}}
    write_lines(events_of(run_dir, "a/0/21"), [line | {"event": "start", "generation": None}, world])
    assert {life.member for life in read_history(run_dir).lives} == {*MEMBERS, "a/0/21"}


def test_a_step_that_whoever_was_frozen_writes_down_late(run_dir: Path) -> None:
    """c had rank 0."""

    def write_fourth(lines: list[Line]) -> list[Line]:
        return [*lines, {**lines[-1], "event": "step", "step": 4, "epoch": 1, "loss": 0.25, "time": START + 9}]

    edit_lines(events_of(run_dir, MEMBERS[2]), write_fourth)
    assert verdicts(audit(run_dir))["generations"] is CheckOutcome.PASS


def test_a_step_written_by_somebody_who_was_not_in(run_dir: Path) -> None:
    def trespass(lines: list[Line]) -> list[Line]:
        return [*lines, {**lines[-1], "event": "step", "generation": 1, "step": LAST_STEP + 1, "epoch": 2, "loss": 1.0}]

    edit_lines(events_of(run_dir, MEMBERS[2]), trespass)
    found = audit(run_dir)
    assert "generations: step 8 of generation 1 was written by c/0/13, which is no member of it" in found.reasons


@pytest.mark.parametrize(("step", "says"), [(3, 0), (1, 1)], ids=["the last one", "one of before"])
def test_a_step_whose_line_was_missing_when_new_processes_went_on_from_it(run_dir: Path, step: int, says: int) -> None:
    """Those before were killed between the snapshot and the line, which the next process has written."""
    restart(run_dir, 3, "snapshot", 3)
    member = "a/0/21"

    def move(lines: list[Line]) -> list[Line]:
        late = next(line for line in lines if (line["event"], line["step"]) == ("step", step))
        own = [line for line in lines if line["generation"] == 2]
        write_lines(events_of(run_dir, member), [{**line, "members": [member], "pid": 21} for line in (late, *own)])
        return [line for line in lines if line not in own and line != late]

    edit_lines(events_of(run_dir), move)
    edit_lines(ledger_of(run_dir), lambda lines: [line for line in lines if line["generation"] != 2])
    found = [reason for reason in audit(run_dir).reasons if reason.startswith("generations")]
    told = f"generations: step {step} of generation 0 was written by {member}, which is no member of it"
    assert found == [told] * says


def test_a_stranger_in_a_world_that_re_formed(run_dir: Path) -> None:
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_second_world, members=[*MEMBERS[:2], "d/0/14"])
    found = audit(run_dir)
    assert any(
        reason.startswith("generations: generation 1 re-formed in place with d/0/14") for reason in found.reasons
    )


@pytest.mark.parametrize("cause", ["join", "leave", "peer_lost"])
def test_a_member_that_is_gone_and_named_by_nobody(run_dir: Path, cause: str) -> None:
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_second_world, cause=cause, lost_members=[])
    assert "generation 1 names nobody as gone, but c/0/13 are" in only_failure(run_dir, "generations")


def test_a_newcomer_in_a_world_that_re_formed(run_dir: Path) -> None:
    """A loss and an admission fell together."""
    admitted = {"members": [*MEMBERS[:2], "d/0/14"], "joined_members": ["d/0/14"]}
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_second_world, **admitted)
    assert verdicts(audit(run_dir))["generations"] is CheckOutcome.PASS


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


# --- branches ---------------------------------------------------------------------------------------------------------


def split(run_dir: Path, *, discarded: bool) -> None:
    """c has not died, but gone on from step 3 as branch x, up to step 5; with `discarded` it has met the others."""

    def go_on(lines: list[Line]) -> list[Line]:
        world = next(line for line in lines if line["event"] == "world")
        again = {**world, "generation": 1, "time": START + 1.9, "step": 3, "members": [MEMBERS[2]], "branch": "x"}
        step = {**again, "event": "step", "epoch": 1, "loss": 0.2, "world_size": 1}
        steps = [{**step, "step": number, "time": START + 1.9 + 0.1 * number} for number in (4, 5)]
        said = {"branch": "x", "first": 4, "last": 5}
        warning = {**again, "event": "warning", "message": "…", "time": START + 2.5, "step": 5, "discarded": said}
        return [*lines, again, *steps, *([warning] if discarded else [])]

    edit_lines(events_of(run_dir, MEMBERS[2]), go_on)
    edit_lines(
        ledger_of(run_dir, MEMBERS[2]),
        lambda lines: [*lines, *({**lines[-1], "generation": 1, "rank": 0, "step": step} for step in (4, 5))],
    )


def test_two_branches_are_not_mixed(run_dir: Path) -> None:
    split(run_dir, discarded=False)
    found = only_failure(run_dir, "branches")
    assert f"host a has come to step {LAST_STEP} on the main line, and host c to step 5 on branch x" in found


def test_which_branch_was_first_is_told_by_no_clock(run_dir: Path) -> None:
    """c has gone on alone where the others ended, and e has joined it, whose clock is a day behind."""
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [line for line in lines if line["generation"] != 1])
    split(run_dir, discarded=False)
    world = next(line for line in read_all(events_of(run_dir, MEMBERS[2])) if line.get("branch") == "x")
    joined = {"generation": 2, "step": 5, "cause": "join", "members": [MEMBERS[2], "e/0/15"]}
    write_lines(events_of(run_dir, "e/0/15"), [{**world, **joined, "time": START - 86400.0}])
    assert mixed_branches(read_history(run_dir)) is None


def test_what_a_branch_has_discarded_does_not_count(run_dir: Path) -> None:
    split(run_dir, discarded=True)
    found = audit(run_dir)
    assert found.passed, found.reasons
