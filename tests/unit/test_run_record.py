"""Which of several runs is continued: never an old one by accident, and never a start from scratch above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.errors import RunsMixed
from elastic_train.storage.run_record import NO_RUN, RUN_FILE, Offer, RunRecord, read_record, run_to_continue


def offer(run: str, generation: int, step: int, host: str = "a") -> Offer:
    return Offer(run, (generation, step), host, f"/{host}/{run}/{step}")


OLD, NEW = RunRecord("old"), RunRecord("new", superseded=("old",))


def test_the_only_run_is_continued_wherever_its_snapshots_lie() -> None:
    assert run_to_continue([NO_RUN, NO_RUN], [offer("x", 0, 5), offer("x", 1, 7)]).uid == "x"
    assert run_to_continue([NO_RUN], []).uid == ""


def test_an_old_run_that_comes_back_with_an_absent_node_does_not_outrank_the_one_in_its_place() -> None:
    seen = [offer("old", 4, 500, "b"), offer("new", 1, 800)]
    choice = run_to_continue([NEW, OLD], seen)
    assert (choice.uid, choice.superseded) == ("new", ("old",))
    assert run_to_continue([NEW, OLD], seen[:1]).uid == "", "nor where the new one has no snapshot yet"


def test_fresh_counts_for_all_who_start_together() -> None:
    choice = run_to_continue([RunRecord("", ("old",), is_fresh=True), RunRecord("other")], [offer("other", 3, 9, "b")])
    assert (choice.uid, choice.superseded) == ("", ("old", "other"))


def test_the_run_directories_say_which_of_two_is_meant() -> None:
    assert run_to_continue([RunRecord("new"), NO_RUN], [offer("old", 4, 500), offer("new", 1, 80)]).uid == "new"


@pytest.mark.parametrize("records", [[NO_RUN, NO_RUN], [RunRecord("old"), RunRecord("new")], [RunRecord("third")]])
def test_two_runs_are_refused_by_host_and_step(records: list[RunRecord]) -> None:
    with pytest.raises(RunsMixed) as raised:
        run_to_continue(records, [offer("old", 4, 500, "b"), offer("new", 1, 80), offer("new", 1, 90)])
    for part in ("host a", "step 90", "host b", "step 500", "/b/old/500", "--fresh"):
        assert part in str(raised.value)


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) == NO_RUN
    (tmp_path / RUN_FILE).write_bytes(NEW.to_json())
    assert read_record(tmp_path) == NEW
    for damaged in (b"", b"[]", b'{"uid": "x"}', NEW.to_json()[:-3]):
        (tmp_path / RUN_FILE).write_bytes(damaged)
        assert read_record(tmp_path) == NO_RUN


@pytest.mark.parametrize(
    ("here", "owner", "expected"),
    [
        (NO_RUN, NEW, NEW),
        (OLD, NEW, NEW),
        (NEW, OLD, NEW),
        (RunRecord("", ("old",)), OLD, RunRecord("", ("old",))),
        (RunRecord("", ("old",), is_fresh=True), RunRecord("old", ("x",)), RunRecord("", ("old", "x"), is_fresh=True)),
        (RunRecord("other"), NEW, RunRecord("other", ("old",))),
    ],
)
def test_what_the_bucket_says_beats_a_disk_that_was_away(
    here: RunRecord, owner: RunRecord, expected: RunRecord
) -> None:
    assert here.beside(owner.uid, owner.superseded) == expected
