"""An earlier run with its snapshots below a URL: the bucket takes precedence over the worker's disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import earlier_run
from elastic_train.elastic.connect import Return
from elastic_train.elastic.earlier_run import EarlierRun, note_restart
from elastic_train.elastic.restore import ALL_GONE, Restored
from elastic_train.errors import NewerGeneration, ObjectStoreError, RunsMixed, SnapshotError
from elastic_train.rendezvous.launch import Launch
from elastic_train.storage.bucket_owner import BucketOwner
from elastic_train.storage.object_store import ObjectStore, Tries
from elastic_train.storage.past_snapshots import require_none_written
from elastic_train.storage.places import OwnedBucket
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.run_record import RUN_FILE, RunRecord
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.store_arms import MemoryArm, Stored
from elastic_train.storage.store_urls import parse_url
from elastic_train.training.state import state_sha256
from elastic_train.world import World
from tests.ranks import on_each_rank
from tests.unit.test_admission import member
from tests.unit.test_state import make_state, step
from tests.unit.test_stopped_late import SINGLE

PAIR = World(0, 4, (member(0), member(1)))


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> OwnedBucket:
    name = re.sub(r"\W", "-", request.node.name)
    return OwnedBucket(parse_url(f"memory://{name}"))


def own(bucket: OwnedBucket, uid: str, superseded: tuple[str, ...] = ()) -> None:
    bucket.owner.take("job of " + uid, 0, lambda: None)
    bucket.owner.enter("job of " + uid, 0, uid, superseded, is_writer=False)
    bucket.owner.check()


class Met(Exception):
    """The worker has looked, and would meet the others now."""


def look(
    bucket: OwnedBucket,
    run_dir: Path,
    *,
    back: Return | None = None,
    published: str | None = None,
    superseded: str | None = None,
    config: Config = Config(),  # noqa: B008
    warnings: list[str],
    meets: bool = False,
) -> EarlierRun:
    """At the bucket; `meets`: on the way to the others, whose run is `published`."""
    directory = RunDirectory(run_dir)
    directory.create()

    def meet(*_: Any, **__: Any) -> None:
        raise Met

    worker: Any = SimpleNamespace(
        directory=directory,
        config=config,
        host="n1",
        launch=Launch(),
        snapshots_dir=bucket,
        bucket=bucket,
        snapshot_key=None,
        reporter=SimpleNamespace(warn=warnings.append, log=warnings.append, events=SimpleNamespace(write=meet)),
        state=SimpleNamespace(run_uid=""),
        device=torch.device("cpu"),
        task=SimpleNamespace(unused_flags=frozenset(), describe=dict),
        imported_at=0.0,
        built_at=0.0,
    )
    membership: Any = SimpleNamespace(
        published={"run_uid": published, "superseded": superseded}.get,
        job=SimpleNamespace(entrance=SimpleNamespace(is_first=True)),
        address=("127.0.0.1", 1),
    )
    files: Any = SimpleNamespace(warn_once=warnings.append)
    earlier = EarlierRun(worker, membership, files, back)
    if meets:
        with pytest.raises(Met):
            earlier.first_world()
    else:
        earlier._look()
    return earlier


def save(bucket: OwnedBucket, uid: str, step: int, check: Callable[[], None] | None = None) -> None:
    writer = SnapshotWriter(bucket, keep=3, host="n2", run_uid=uid, task={}, before_rename=check or bucket.owner.check)
    writer.save({"model": {}}, step=step, epoch=0, samples_done=0, generation=0, world_size=1)


def test_a_disk_that_was_away_does_not_bring_a_superseded_run_back(bucket: OwnedBucket, tmp_path: Path) -> None:
    own(bucket, "Y", ("X",))
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.replace_file(RUN_FILE, RunRecord("X").to_json())
    earlier = look(bucket, tmp_path / "run", warnings=[])
    assert earlier._record == RunRecord("Y", ("X",))
    events = tmp_path / "run" / "events"
    events.mkdir(exist_ok=True)
    (events / "n1.jsonl").write_text('{"event": "snapshot", "snapshot_step": 5, "generation": 0, "host": "n1"}\n')
    assert earlier._past(earlier._own_past(SINGLE)) is None, "what the disk tells is of the run before"


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([("all are gone", "theirs", False)], ("theirs", "all are gone")),
        ([("all are gone", "theirs", False), (None, "a new one", True)], ("a new one", None)),
    ],
    ids=["started again", "--fresh"],
)
def test_who_has_lost_the_state_names_the_run_unless_it_is_begun_anew(
    bucket: OwnedBucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: list[tuple[str | None, str, bool]],
    named: tuple[str, str | None],
) -> None:
    """Nodes that are started again have no name of it yet. Else they would not look at its snapshots, and end with an
    error. With --fresh a worker that was left out there goes on in the new run."""
    earlier: Any = look(bucket, tmp_path, warnings=[])
    earlier._worker.state.generation, earlier._worker.must_agree_with_snapshot = 4, dict
    earlier._membership.came_later, earlier._membership.awaited = False, None
    earlier._files.take_bucket = lambda _world, _check: None
    told = [{"lost": lost, "run": run, "in_use": None, "is_anew": is_anew} for lost, run, is_anew in others]
    monkeypatch.setattr(earlier_run, "gather_json", lambda mine: [mine, *told])

    def restore(*_: Any, run_uid: str, lost: str | None, **__: Any) -> None:
        assert (run_uid, lost) == named
        raise Met

    monkeypatch.setattr(earlier_run, "restore", restore)
    with pytest.raises(Met):
        earlier.restore(PAIR, lost=None, check=pytest.fail)


def test_who_drops_its_state_names_the_run_that_it_has_trained(
    bucket: OwnedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had a name of its own for a new run as the job began, and one of them counts since then."""
    earlier: Any = look(bucket, tmp_path, warnings=[])
    earlier._worker.state.generation, earlier._worker.must_agree_with_snapshot = 4, dict
    earlier._membership.published, earlier._membership.awaited = lambda _name: "ours", None
    earlier._files.take_bucket = lambda _world, _check: None
    monkeypatch.setattr(earlier_run, "gather_json", lambda mine: [mine])

    def restore(*_: Any, run_uid: str, lost: str | None, **__: Any) -> None:
        assert (run_uid, lost) == ("ours", "states differ")
        raise Met

    monkeypatch.setattr(earlier_run, "restore", restore)
    with pytest.raises(Met):
        earlier.restore(PAIR, lost="states differ", check=pytest.fail)


def begin_anew(rank: int, out: Path) -> None:
    """Rank 0 was left out: it has a trained state, and has saved it. Rank 1 was started with --fresh."""
    state, directory = make_state(seed=rank), RunDirectory(out / f"run-{rank}")
    directory.create()
    if rank == 0:
        state.run_uid, state.micro_batch_size = "before", 7
        for seed in range(5):
            step(state, seed)
        writer = SnapshotWriter(directory.snapshots_dir, keep=3, host="n0", run_uid="before", task={})
        writer.save(state.state_dict(), step=5, epoch=0, samples_done=0, generation=0, world_size=1)
        directory.replace_file(RUN_FILE, RunRecord("before").to_json())
    worker: Any = SimpleNamespace(
        directory=directory,
        config=Config(),
        launch=Launch(),
        snapshots_dir=directory.snapshots_dir,
        bucket=None,
        snapshot_key=None,
        reporter=SimpleNamespace(warn=lambda _: None, log=lambda _: None),
        state=state,
        must_agree_with_snapshot=dict,
        agreement=dict,
    )
    membership: Any = SimpleNamespace(
        published=lambda _name: None, agreed_once=lambda _name, proposal: proposal, came_later=False, awaited=None
    )
    files: Any = SimpleNamespace(take_bucket=lambda *_: None, warn_once=pytest.fail)
    earlier: Any = EarlierRun(worker, membership, files)
    earlier._fresh_record = RunRecord("", is_fresh=True) if rank == 1 else None
    earlier._look()
    lost = ALL_GONE if rank == 0 else None
    restored = earlier.restore(replace(PAIR, rank=rank), lost=lost, check=lambda: None)
    found = [state_sha256(state.model.state_dict()), state.step, state.micro_batch_size, state.run_uid]
    (out / str(rank)).write_text(json.dumps([restored.source, *found]))


def test_nodes_that_begin_anew_do_not_take_over_the_state_of_one_that_was_left_out(tmp_path: Path) -> None:
    """That one leads the first world, as it has a snapshot."""
    on_each_rank(begin_anew, tmp_path, size=2)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert found[1][:-1] == ["scratch", state_sha256(make_state(seed=1).model.state_dict()), 0, 32]
    assert found[0] == found[1]


@pytest.mark.parametrize("before", [None, (0, 10)])
def test_a_snapshot_that_is_taken_back_is_not_told_of(bucket: OwnedBucket, before: tuple[int, int] | None) -> None:
    """A peer is lost in that moment. A start would look for ever for what nobody can see."""
    own(bucket, "Y")
    if before is not None:
        save(bucket, "Y", 10)

    def check() -> None:
        if any("000020" in key and key.endswith("manifest.json") for key in bucket.store.list()):
            raise NewerGeneration("the others have gone on")
        bucket.owner.check()

    with pytest.raises(NewerGeneration):
        save(bucket, "Y", 20, check)
    bucket.owner.check()
    record = bucket.owner.read()
    assert record is not None
    assert record.newest == before


def test_a_run_that_had_snapshots_in_the_bucket_does_not_begin_anew_where_none_is_seen(
    bucket: OwnedBucket, tmp_path: Path
) -> None:
    own(bucket, "Y")
    for number in (10, 20):
        save(bucket, "Y", number)
    for key in bucket.store.list():
        if key.endswith("manifest.json"):
            bucket.store.put(key, b"{")
    other = OwnedBucket(bucket.store.url)
    other.owner.take("job of Y", 1, lambda: None)  # what is known stays, whoever writes next
    other.owner.enter("job of Y", 1, "Y", (), is_writer=False)
    other.owner.check()
    warnings: list[str] = []
    past = look(other, tmp_path / "empty", warnings=warnings)._past(None)
    assert len(warnings) == 2
    assert past is not None
    with pytest.raises(
        SnapshotError,
        match=rf"^host \S+ had a snapshot of step 20 of this run \(generation 0\) in {bucket}, and no whole one can be "
        "seen from here: .*--snapshot-key.*--fresh to begin anew$",
    ):
        require_none_written([past])
    named = look(other, tmp_path / "empty", published="a run that --fresh began", warnings=[])
    assert named._past(None) is None
    other.owner.enter("job of Y", 2, "Z", ("Y",), is_writer=False)
    other.owner.check()
    begun = look(other, tmp_path / "empty", warnings=[])
    assert begun._past(None) is None, "the run that is named now has none"


class GoneArm(MemoryArm):
    def read(self, key: str, limit: int | None = None) -> Stored:
        raise ConnectionResetError

    def list(self, prefix: str) -> dict[str, int]:
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("back", "published"), [(Return("was", (), False, 0, 0.0), None), (None, "the run of a job that runs")]
)
def test_who_comes_to_others_needs_no_bucket(
    bucket: OwnedBucket, tmp_path: Path, back: Return | None, published: str | None
) -> None:
    bucket.store = ObjectStore(
        bucket.store.url, Tries(total=0.0), GoneArm(fsspec.filesystem("memory"), bucket.store.url)
    )
    bucket.owner = BucketOwner(bucket.store, "one")
    warnings: list[str] = []
    earlier = look(bucket, tmp_path, back=back, published=published, warnings=warnings, meets=True)
    assert earlier._offers == []
    assert [warning.endswith("offers no snapshot to the others") for warning in warnings] == [True]
    with pytest.raises(ObjectStoreError):
        look(bucket, tmp_path, warnings=[], meets=True)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_node_with_snapshots_of_another_run_joins_no_job(
    bucket: OwnedBucket, tmp_path: Path, *, is_known: bool
) -> None:
    """The job has begun without them. Its record would take the place of the run's in the directory, and no start
    would find these snapshots again. Those of a run that the job has replaced are known."""
    own(bucket, "X")
    save(bucket, "X", 120)
    come = partial(
        look, bucket, tmp_path, published="Y", superseded='["X"]' if is_known else None, warnings=[], meets=True
    )
    if is_known:
        come()
    else:
        with pytest.raises(RunsMixed, match=r"^host n2 has a snapshot of step 120 of another run, .* or --fresh$"):
            come()
    assert come(config=Config(fresh=True))._files.replaced == (set() if is_known else {"X"})
    come(back=Return("was", (), False, 0, 0.0))
    come(published="X")
    come(published=None)


def test_a_stop_of_all_makes_the_next_start_a_planned_one() -> None:
    """And no later one: the state says at which step it was, and goes on from there."""
    before = make_state()
    for _ in range(3):
        before.commit(1.0)
    before.stopped_at = 3
    after = make_state()
    after.load_state_dict(before.state_dict())
    note_restart(after, Restored("snapshot", 3, 0), (1, 3), PAIR)
    after.commit(1.0)
    note_restart(after, Restored("snapshot", 4, 0), (1, 4), PAIR)
    assert [incident.get("planned") for incident in after.incidents] == [True, None]


@pytest.mark.parametrize(
    ("reached", "stopped_at", "lost"),
    [((2, 5), None, 2), ((3, 3), None, 0), ((1, 3), None, None), (None, None, None), (None, 3, 0), ((1, 3), 3, 0)],
)
def test_steps_that_a_restart_loses_and_nobody_sees_are_not_called_none(
    reached: tuple[int, int] | None, stopped_at: int | None, lost: int | None
) -> None:
    """Of machines with empty disks, or with those of a generation before that of the snapshot."""
    state = make_state()
    for _ in range(3):
        state.commit(1.0)
    state.generation, state.stopped_at = 2, stopped_at
    note_restart(state, Restored("snapshot", 3, 0), reached, PAIR)
    assert state.incidents[0]["committed_steps_lost"] == lost


def test_a_start_after_a_stop_that_was_killed_before_its_first_snapshot_was_not_planned_to_end() -> None:
    state = make_state()
    for _ in range(3):
        state.commit(1.0)
    state.stopped_at = 3
    note_restart(state, Restored("snapshot", 3, 0), (1, 5), PAIR)
    [incident] = state.incidents
    assert (incident["committed_steps_lost"], incident.get("planned")) == (2, None)
    assert {name: incident[name] for name in ("generation", "step", "world_size", "joined_members")} == {
        "generation": 4, "step": 3, "world_size": 2, "joined_members": [],
    }  # fmt: skip
