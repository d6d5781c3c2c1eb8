"""The claim of a run directory blocks nothing, and no file is written before its result is known."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic import run_files
from elastic_train.elastic.run_files import RunFiles
from elastic_train.errors import RunDirectoryError, RunDirectoryInUse, SnapshotError
from elastic_train.storage import ownership
from elastic_train.storage.ownership import Ownership
from elastic_train.storage.run_directory import SNAPSHOTS, RunDirectory
from elastic_train.storage.run_record import RunRecord, read_record
from elastic_train.world import World
from tests.unit.test_liveness import make_member


class SlowDisk:
    """A run directory whose claims wait until they are let go."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Path | None = None) -> None:
        self.directory = RunDirectory(path, snapshots)
        self.let_go = threading.Event()
        self.warnings: list[str] = []
        claim = self.directory.ownership.claim

        def slowly(*arguments: Any, **options: Any) -> str | None:
            assert self.let_go.wait(10.0)
            return claim(*arguments, **options)

        monkeypatch.setattr(self.directory.ownership, "claim", slowly)
        worker: Any = SimpleNamespace(
            bucket=None,
            directory=self.directory,
            host="here",
            launch=SimpleNamespace(run_id="run"),
            reporter=SimpleNamespace(warn=self.warnings.append),
        )
        self.files = RunFiles(worker, "job")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(tmp_path, monkeypatch)


def world_of(generation: int) -> World:
    return World(rank=0, generation=generation, members=(make_member(0),))


def test_nobody_waits_for_a_disk_before_something_is_written(disk: SlowDisk) -> None:
    disk.files.claim(world_of(3), has_state=True)
    assert disk.directory.ownership.read() is None, "it returned before"
    disk.let_go.set()
    disk.files.check_owner(3)
    owner = disk.directory.ownership.read()
    assert owner is not None
    assert owner.generation == 3


def test_who_shares_the_directory_and_comes_to_a_job_that_was_renamed_sees_so(disk: SlowDisk) -> None:
    """Who waited for a job that is gone begins one of another name, and both would save for all."""
    name = disk.directory.identity("job")
    disk.files.take_token("renamed")
    assert RunDirectory(disk.directory.path).identity("renamed") == name


def test_the_record_of_a_run_names_those_that_this_node_gave_up(disk: SlowDisk) -> None:
    """By --fresh, as it joined a job. Later starts know then that its snapshots of these are not meant."""
    disk.files._worker.state = SimpleNamespace(run_uid="Y", superseded=("W",))  # type: ignore[assignment]
    disk.files.replaced = frozenset({"X"})
    disk.files.note_run(world_of(3))
    assert read_record(disk.directory.path) == RunRecord("Y", ("W", "X"))


def test_a_run_directory_that_fails_keeps_no_snapshot_from_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own owner is asked instead; below the directory nothing is written without."""
    disk = SlowDisk(tmp_path, monkeypatch)
    disk.let_go.set()
    disk.files.claim(world_of(3), has_state=True)
    disk.files.finish_claim()

    def fails(*_arguments: Any) -> None:
        raise RunDirectoryError("run directory cannot be read: Input/output error")

    monkeypatch.setattr(disk.directory.ownership, "check_owner", fails)
    with pytest.raises(SnapshotError, match="Input/output error"):
        disk.files.check_before_visible(3)
    asked: list[str] = []
    owner = SimpleNamespace(check=lambda: asked.append("check"), raise_if_lost=lambda: None)
    monkeypatch.setattr(disk.files, "_bucket", SimpleNamespace(owner=owner))
    disk.files.check_before_visible(3)
    assert asked == ["check"]


def test_who_saves_waits_for_a_claim_as_long_as_who_trains(disk: SlowDisk) -> None:
    disk.files.claim(world_of(3), has_state=True)
    errors: list[Exception] = []

    def save() -> None:
        try:
            disk.files.check_owner(3)
        except Exception as error:
            errors.append(error)

    trains = threading.Thread(target=disk.files.finish_claim)
    trains.start()
    trains.join(0.1)  # it waits
    saves = threading.Thread(target=save)
    saves.start()
    saves.join(0.1)
    disk.let_go.set()
    for thread in (trains, saves):
        thread.join(10.0)
    assert not errors, "the record of before was read"


def test_who_trains_does_not_wait_long_for_another_process(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "CLAIM_SECONDS_OF_MEMBERS", 0.03)
    disk.let_go.set()
    disk.files.claim(world_of(3), has_state=True)
    disk.files.finish_claim()
    with open(tmp_path / ".claim.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        disk.files.claim(world_of(4), has_state=True)
        disk.files.finish_claim()
    [warning] = disk.warnings
    assert "has held .claim.lock for 0.03 s" in warning
    Ownership(tmp_path).claim("job", 5, "here")
    disk.files.claim(world_of(5), has_state=True)
    disk.files.finish_claim()


def test_where_flock_is_local_each_folder_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is claimed by its leader in each world, a folder of snapshots elsewhere once."""
    monkeypatch.setattr(ownership, "local_flock", lambda _path: "localflock")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run").mkdir()
    disk = SlowDisk(tmp_path / "run", monkeypatch, snapshots=elsewhere)
    disk.let_go.set()
    for generation in range(3):
        disk.files.claim(world_of(generation), has_state=True)
        disk.files.finish_claim()
    assert [warning.partition(" holds ")[0] for warning in disk.warnings] == [
        f"flock below {tmp_path / 'run'}", f"flock below {elsewhere}"
    ]  # fmt: skip


def test_what_fails_in_turns_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run directory that fails is told of by the claim, and by each snapshot."""
    disk = SlowDisk(tmp_path, monkeypatch, snapshots=tmp_path / SNAPSHOTS)
    disk.let_go.set()

    def fail(what: str) -> Callable[..., None]:
        def call(*_arguments: Any, **_options: Any) -> None:
            raise RunDirectoryError(f"run directory {what}")

        return call

    monkeypatch.setattr(disk.directory.ownership, "claim", fail("cannot be claimed"))
    monkeypatch.setattr(disk.directory.ownership, "check_owner", fail("cannot be read"))
    monkeypatch.setattr(disk.directory.ownership, "check_snapshots", lambda *_arguments: None)
    for generation in range(2):
        disk.files.claim(world_of(generation), has_state=True)
        disk.files.finish_claim()
        disk.files.check_before_visible(generation)
    assert disk.warnings == ["run directory cannot be claimed", "run directory cannot be read"]


def test_another_jobs_directory_is_found_out_before_a_step_counts(disk: SlowDisk, tmp_path: Path) -> None:
    disk.let_go.set()
    disk.files.claim(world_of(3), has_state=True)
    disk.files.finish_claim()
    disk.directory.ownership.release()
    other = Ownership(tmp_path)
    assert other.claim("other", 0, "there") is None
    disk.files.claim(world_of(4), has_state=True)
    with pytest.raises(RunDirectoryInUse):
        disk.files.finish_claim()
    other.release()


def test_a_full_disk_ends_none_that_has_the_state(disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_options: Any) -> str | None:
        raise RunDirectoryError("No space left on device")

    monkeypatch.setattr(disk.directory.ownership, "claim", full)
    disk.files.claim(world_of(3), has_state=True)
    disk.files.finish_claim()
    disk.files.claim(world_of(4), has_state=True)
    disk.files.finish_claim()
    assert disk.warnings == ["No space left on device"], "once"
    disk.files.claim(world_of(5), has_state=False)
    with pytest.raises(RunDirectoryError, match="No space"):
        disk.files.finish_claim()
