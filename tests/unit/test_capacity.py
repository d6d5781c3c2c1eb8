"""How many nodes train, could, are wanted and may be taken: from a run's files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.cli import main
from elastic_train.observe.capacity import Capacity
from elastic_train.observe.status import RunState, read_status
from elastic_train.observe.status_table import describe
from tests.unit.test_status import NOW, Files, Worker, read


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "run")


def inside(files: Files, *, num_nodes: int, num_spare: int = 0, max_nodes: int = 5) -> list[Worker]:
    """The first workers of so many nodes, in one world."""
    num_training = num_nodes - num_spare
    workers = [files.worker(rank, f"n{rank}", started=NOW - 60, max_nodes=max_nodes) for rank in range(num_nodes)]
    for worker in workers:
        worker.line |= {"nodes": num_training} | ({"spare_nodes": num_spare} if num_spare else {})
        worker.enter(0, NOW - 50, members=tuple(f"n{rank}/0/1" for rank in range(num_nodes)))
    workers[0].train(1, 20, NOW - 1)
    return workers


def test_three_train_five_could_and_two_may_be_taken(files: Files) -> None:
    workers = inside(files, num_nodes=4, num_spare=1, max_nodes=6)
    files.worker(4, "new", started=NOW - 5)
    found = read(files).capacity
    assert found == Capacity(train=3, spare=1, waiting=1, max_nodes=6)
    assert (found.could_train, found.wanted, found.may_be_taken) == (5, 1, 0)
    assert dict(describe(read(files), NOW))["nodes"] == "3 train, 5 could, 1 more wanted"
    for worker in workers[1:3]:
        worker.line["noticed"] = True
        worker.write("notice", NOW - 1, state="given")
    found = read(files).capacity
    assert (found.train, found.could_train, found.may_be_taken) == (3, 5, 2)
    assert dict(describe(read(files), NOW))["nodes"] == "3 train, 5 could, 1 more wanted, 2 may be taken away"


def test_a_second_worker_of_a_newcomer_is_no_node_more(files: Files) -> None:
    inside(files, num_nodes=2)
    first = files.worker(3, "new", started=NOW - 5)
    second = Worker(first.path.with_name("new-1-900.jsonl"), 4, "new", 900)
    second.write("start", NOW - 5)
    assert read(files).capacity.waiting == 1


@pytest.mark.parametrize(("alive", "age", "waits"), [(True, 5000, 1), (False, 5, 0), (None, 5, 1), (None, 5000, 0)])
def test_who_waits_and_is_gone(files: Files, alive: bool | None, age: float, waits: int) -> None:
    inside(files, num_nodes=2)
    files.worker(3, "new", started=NOW - age)
    found = read_status(files.run_dir, NOW, lambda start: alive if start["host"] == "new" else True)
    assert found.capacity.waiting == waits


@pytest.mark.parametrize("has_written_since", [False, True])
def test_who_was_left_out_waits_again(files: Files, has_written_since: bool) -> None:
    first, second, third = inside(files, num_nodes=3)
    third.write("warning", NOW - 9, message="it comes back as a newcomer", was="uid3")
    if has_written_since:
        third.line |= {"generation": None, "noticed": True}
        third.write("notice", NOW - 8, state="given")
    for worker in (first, second):
        worker.line |= {"nodes": 2}
        worker.enter(1, NOW - 7, cause="peer_lost", members=("n0/0/1", "n1/0/1"))
    found = read(files).capacity
    assert (found.train, found.waiting, found.could_train, found.wanted) == (2, 1, 3, 2)
    assert found.may_be_taken == has_written_since


def test_nodes_that_may_be_taken(files: Files) -> None:
    first, second, third = inside(files, num_nodes=3)
    for worker in (first, second, third):
        worker.line["noticed"] = True
        worker.write("notice", NOW - 9, state="given")
    del third.line["noticed"]
    third.write("notice", NOW - 8, state="withdrawn")
    assert read(files).capacity.may_be_taken == 2
    assert dict(describe(read(files), NOW))["nodes"] == "3 train, 2 more wanted, 2 may be taken away"
    first.write("done", NOW - 1, outcome="stopped")
    assert read(files).capacity.may_be_taken == 1, "who has left is no node of it any more"


def test_a_notice_of_long_ago_stands_and_ends(files: Files) -> None:
    """Neither its line nor that of its end is among those at the two ends of a long file."""
    standing, ended = inside(files, num_nodes=2)
    for worker in (standing, ended):
        worker.train(1, 500, NOW - 30)
        worker.line["noticed"] = True
        worker.write("notice", NOW - 30, state="given")
    del ended.line["noticed"]
    ended.write("notice", NOW - 29, state="withdrawn")
    for worker in (standing, ended):
        worker.train(501, 1900, NOW - 1)
    assert read(files).capacity.may_be_taken == 1


def test_a_host_in_quarantine_is_told_of_and_cannot_train(files: Files) -> None:
    """Though the line that began it is long ago; the other newcomer can."""
    workers = inside(files, num_nodes=2)
    kept = {"host": "bad", "deaths": 3, "until": NOW + 41}
    for worker in workers:
        worker.line["quarantined"] = [{"host": "over", "deaths": 3, "until": NOW - 1}, kept]
    workers[0].train(21, 1900, NOW - 1)
    assert read(files).quarantined == (kept,), "also before it has come back"
    for rank, host in enumerate(("bad", "new", "over")):
        files.worker(rank + 3, host, started=NOW - 5)
    found = read(files)
    assert found.quarantined == (kept,)
    assert (found.capacity.waiting, found.capacity.quarantined) == (2, 1)
    assert (found.capacity.could_train, found.capacity.wanted) == (4, 1), "there is room for one that can"
    told = dict(describe(found, NOW))
    assert told["nodes"] == "2 train, 4 could, 1 more wanted, 1 quarantined"
    assert told["quarantine"] == "bad, for 41 s more: it died unannounced 3 times, less than 10 min apart"
    for worker in workers:
        worker.write("done", NOW, outcome="finished")
    assert read(files, False).quarantined == ()


@pytest.mark.parametrize("line", [{"quarantined": 7}, {"quarantined": [7, {"host": 1, "until": 9e9}, {"host": "a"}]}])
def test_a_line_that_says_anything_of_quarantine(files: Files, line: dict[str, Any]) -> None:
    [worker] = inside(files, num_nodes=1)
    worker.write("warning", NOW - 1, message="", **line)
    assert read(files).quarantined == ()


@pytest.mark.parametrize(("outcome", "wanted"), [("finished", 0), ("failed", 0), ("stopped", 5)])
def test_what_a_run_that_has_ended_wants(files: Files, outcome: str, wanted: int) -> None:
    for worker in inside(files, num_nodes=2):
        worker.write("done", NOW, outcome=outcome)
    found = read(files, False).capacity
    assert (found.train, found.could_train, found.wanted) == (0, 0, wanted)


def test_a_run_that_all_have_left_wants_all_again(files: Files) -> None:
    inside(files, num_nodes=2)
    found = read(files, False)
    assert (found.state, found.capacity.wanted) == (RunState.DEAD, 5)


@given(*[st.integers(0, 40)] * 3, st.integers(1, 40))
def test_the_sums(train: int, spare: int, waiting: int, max_nodes: int) -> None:
    found = Capacity(train, spare, waiting, max_nodes)
    assert found.wanted == max(0, max_nodes - train - spare - waiting)
    assert found.could_train <= max_nodes
    assert not found.wanted or found.could_train + found.wanted == max_nodes


def test_status_as_json(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    inside(files, num_nodes=3)
    assert main(["status", str(files.run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"]) == ("silent", 20), "long ago, on other machines"
    counts = {"train": 3, "could_train": 3, "wanted": 2, "may_be_taken": 0, "quarantined": 0, "max_nodes": 5}
    assert told["capacity"] == counts
    assert told["quarantined"] == []
    assert told["snapshot"] is None


def test_what_is_no_number_is_null(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN is no JSON: other programs cannot read it."""
    first, *_ = inside(files, num_nodes=2)
    first.write("step", NOW, epoch=0, loss=float("nan"), samples_done=64)
    assert main(["status", str(files.run_dir), "--json"]) == 0
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert json.loads(text)["loss"] is None


def test_json_is_one_look(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    inside(files, num_nodes=1)
    assert main(["status", str(files.run_dir), "--json", "--watch"]) == 2
    assert "--watch: not allowed with argument --json" in capsys.readouterr().err


def test_a_node_that_waits_for_the_dead(files: Files) -> None:
    """All were killed, and one was started again: --min-nodes keeps it waiting, and the others are missing."""
    inside(files, num_nodes=2, max_nodes=3)
    files.worker(4, "again", started=NOW - 0.5)
    found = read_status(files.run_dir, NOW, lambda start: start["host"] == "again")
    assert found.state is RunState.STARTING
    assert (found.capacity.train, found.capacity.could_train, found.capacity.wanted) == (0, 1, 2)
