"""A run that had snapshots does not begin anew where none of them can be seen; one that was killed before may."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.elastic.restore import Restored
from elastic_train.errors import SnapshotError
from elastic_train.storage.past_snapshots import PastSnapshots, Reached, read_past_snapshots, require_none_written
from elastic_train.storage.run_record import RunRecord
from elastic_train.training.state import TrainState
from elastic_train.world import World, value_of
from tests.unit.test_restore_from_bucket import restore_at_start
from tests.unit.test_world import member

NOTHING = PastSnapshots(None, None, "")


def at(step: int, *, logged: str = "", every: int = 100, host: str = "b") -> PastSnapshots:
    return PastSnapshots(None, Reached(4, step, every, host), logged)


@pytest.mark.parametrize(
    ("found", "may_begin"),
    [
        ([], True),
        ([NOTHING, NOTHING], True),
        ([PastSnapshots((1, 20, "host a wrote a snapshot of step 20, PATH"), None, "1-25"), NOTHING], False),
        # Who was rank 0 is not here: it may have written what it had to.
        ([at(9000)], False),
        ([NOTHING, at(101), at(9000, host="c")], False),
        ([at(250, logged="101-250")], False),
        ([at(250), PastSnapshots(None, None, "1-150")], False),
        # It is here, and was killed within its first snapshot; or all the time its disk was full.
        ([at(105, logged="1-105")], True),
        ([at(104), PastSnapshots(None, None, "1-105")], True),
        ([at(250), PastSnapshots(None, None, "1-150"), PastSnapshots(None, None, "151-249")], True),
        # Its line of that very step may be lost.
        ([at(100), NOTHING], True),
    ],
)
def test_who_may_begin_from_scratch(found: list[PastSnapshots], may_begin: bool) -> None:
    with (
        nullcontext() if may_begin else pytest.raises(SnapshotError, match=r"seen from here: .*--fresh to begin anew$")
    ):
        require_none_written([value_of(PastSnapshots, json.loads(json.dumps(asdict(one)))) for one in found])


def test_the_line_says_who_was_where() -> None:
    with pytest.raises(
        SnapshotError, match=r"^host c had come to step 9000 of this run at least \(generation 4\), .* every 100"
    ):
        require_none_written([at(9000, host="c")])


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps({"host": "b", **line}) + "\n" for line in lines) + '{"torn')


def start(every: int | str) -> dict[str, Any]:
    return {"event": "start", "generation": None, "step": 0, "config": {"snapshot_every": every}}


def test_what_events_say(tmp_path: Path) -> None:
    assert read_past_snapshots(tmp_path) == NOTHING
    write(tmp_path / "a.jsonl", start(10), *({"event": "step", "generation": 1, "step": step} for step in (1, 2, 10)))
    assert read_past_snapshots(tmp_path) == PastSnapshots(None, None, "1-2,10"), "the first was due just now"
    write(tmp_path / "b.jsonl", start(10), {"event": "world", "generation": 2, "step": 30})
    write(tmp_path / "c.jsonl", start(5), {"event": "snapshot_due", "generation": 1, "step": 90})
    write(tmp_path / "d.jsonl", start(0), {"event": "world", "generation": 3, "step": 99})
    assert read_past_snapshots(tmp_path) == PastSnapshots(None, Reached(2, 30, 10, "b"), "1-2,10")


def test_where_snapshots_go_by_time_an_event_says_that_one_was_due(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", start("30s"), {"event": "world", "generation": 2, "step": 300})
    assert read_past_snapshots(tmp_path) == NOTHING
    write(tmp_path / "b.jsonl", start("30s"), {"event": "snapshot_due", "generation": 1, "step": 90, "every": None})
    past = read_past_snapshots(tmp_path)
    assert past == PastSnapshots(None, Reached(1, 90, 1, "b"), "")
    with pytest.raises(SnapshotError, match=r"come to step 90 .*, when a snapshot had been due, and none can be seen"):
        require_none_written([past])
    require_none_written([past, PastSnapshots(None, None, "1-90")])  # all who could have written one are here


def test_a_snapshot_that_was_surely_there(tmp_path: Path) -> None:
    restored = {"event": "restore", "generation": 1, "step": 30, "source": "snapshot", "restored_step": 30}
    write(tmp_path / "a.jsonl", start(0), restored, restored | {"source": "peer", "restored_step": 99})
    assert read_past_snapshots(tmp_path).known == (1, 30, "host b went on from a snapshot of step 30 of this run")
    write(
        tmp_path / "b.jsonl",
        {"event": "snapshot", "generation": 1, "snapshot_step": 40, "path": "/b/40"},
        {"event": "snapshot", "generation": 2, "snapshot_step": 20, "path": "/b/20"},
    )
    assert read_past_snapshots(tmp_path).known == (2, 20, "host b wrote a snapshot of step 20 of this run, /b/20")


def test_what_cannot_be_read_may_tell_of_a_snapshot(tmp_path: Path) -> None:
    """Of another user, perhaps. One worker's error would be a lost peer to the others: all are told alike."""
    (tmp_path / "a.jsonl").mkdir()
    past = read_past_snapshots(tmp_path)
    with pytest.raises(SnapshotError, match=r"a\.jsonl, which may tell of .*: Is a directory, and no"):
        require_none_written([past, NOTHING])
    write(tmp_path / "b.jsonl", {"event": "snapshot", "generation": 0, "snapshot_step": 40, "path": "/b/40"})
    assert read_past_snapshots(tmp_path).known == (0, 40, "host b wrote a snapshot of step 40 of this run, /b/40")


def begin(record: RunRecord, past: PastSnapshots, awaited: str | None = None) -> Restored:
    """Alone, with no snapshot in sight."""
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), length=8, global_batch_size=8, epochs=9)
    world = World(0, 3, (member(0, 0),))
    return restore_at_start(state, world, [], pytest.fail, record=record, past=past, awaited=awaited)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("superseded", [(), ("old",)])
def test_what_a_directory_says_of_a_run_that_fresh_has_replaced_does_not_count(superseded: tuple[str, ...]) -> None:
    """A node that was away at --fresh has it; the new run was killed before its first snapshot."""
    with nullcontext() if superseded else pytest.raises(SnapshotError, match="of step 20"):
        past = PastSnapshots((1, 20, "host a wrote a snapshot of step 20"), None, "")
        assert begin(RunRecord("old", superseded), past).source == "scratch"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("uid", ["", "other", "theirs"])
def test_who_waited_for_a_job_that_is_gone_does_not_begin_anew_what_its_members_have_trained(uid: str) -> None:
    """Their disks have it. A directory of their run tells how far they had come."""
    with nullcontext() if uid == "theirs" else pytest.raises(SnapshotError, match="all workers that had the state are"):
        assert begin(RunRecord(uid), NOTHING, "theirs").source == "scratch"
