"""A folder of --snapshot-dir belongs to the job whose run directory names it, with that directory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_train.config import Config
from elastic_train.elastic.worker import make_directory
from elastic_train.errors import NewerGeneration, OwnershipLost, RunDirectoryError, RunDirectoryInUse
from elastic_train.storage import ownership
from elastic_train.storage.ownership import close_lock, open_for_lock
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.system import try_flock

MakeNode = Callable[[str], RunDirectory]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "snapshots of all"
    path.mkdir()
    return path


@pytest.fixture
def make_node(tmp_path: Path, folder: Path) -> Iterator[MakeNode]:
    """A node with a run directory of its own."""
    made: list[RunDirectory] = []

    def make(name: str) -> RunDirectory:
        directory = RunDirectory(tmp_path / name, folder)
        directory.create()
        made.append(directory)
        return directory

    yield make
    for directory in made:
        directory.ownership.release()


def test_the_nodes_of_one_job_share_the_folder(make_node: MakeNode) -> None:
    one, two = make_node("one"), make_node("two")
    for directory in (one, two):
        assert directory.ownership.claim("job-1", 3, "alpha") is None
    for directory in (one, two):
        directory.ownership.check_owner("job-1", 3)
        directory.ownership.release()
    assert make_node("three").ownership.claim("job-2", 4, "gamma") is None


def test_another_job_is_refused_by_name_while_one_lives(make_node: MakeNode, folder: Path) -> None:
    one, two = make_node("one"), make_node("two")
    one.ownership.claim("job-1", 3, "alpha")
    with pytest.raises(RunDirectoryInUse) as refused:
        two.ownership.claim("job-2", 4, "beta")
    told = str(refused.value)
    assert told.startswith(f"snapshot directory {folder} is in use by another job (host alpha, pid ")
    assert told.endswith("; stop that job, or choose another --snapshot-dir; to join it, give its --rdzv-endpoint")
    one.ownership.check_owner("job-1", 3)
    two.ownership.release()
    one.ownership.release()
    assert two.ownership.claim("job-2", 4, "beta") is None


def test_a_node_that_is_a_generation_behind_is_judged_by_its_own_directory(make_node: MakeNode) -> None:
    """Both sides of a split may go on as branches, and each writes into the folder."""
    one, two = make_node("one"), make_node("two")
    one.ownership.claim("job-1", 3, "alpha")
    two.ownership.claim("job-1", 4, "beta")
    one.ownership.check_owner("job-1", 3)
    with pytest.raises(NewerGeneration, match="run directory"):
        two.ownership.check_owner("job-1", 3)


def test_who_lost_the_folder_writes_nothing_more(make_node: MakeNode, folder: Path) -> None:
    one, two = make_node("one"), make_node("two")
    one.ownership.claim("job-1", 3, "alpha")
    for lock in folder.glob(".owner-*.lock"):  # as a file server that was restarted forgets it
        lock.unlink()
    two.ownership.claim("job-2", 4, "beta")
    with pytest.raises(OwnershipLost, match=r"snapshot directory .* now belongs to another job \(host beta"):
        one.ownership.check_owner("job-1", 3)
    with pytest.raises(OwnershipLost, match="snapshot directory"):
        one.ownership.claim("job-1", 5, "alpha")


@pytest.mark.parametrize("ask", ["check_owner", "claim"])
def test_a_folder_that_was_removed_is_made_and_claimed_anew(make_node: MakeNode, folder: Path, ask: str) -> None:
    one, two = make_node("one"), make_node("two")
    one.ownership.claim("job-1", 3, "alpha")
    shutil.rmtree(folder)
    if ask == "claim":
        one.ownership.claim("job-1", 4, "alpha")
    else:
        one.ownership.check_owner("job-1", 3)
    with pytest.raises(RunDirectoryInUse, match=f"{folder} is in use by another job"):
        two.ownership.claim("job-2", 5, "beta")


@pytest.mark.parametrize("comes_first", ["who moved it", "another"])
@pytest.mark.parametrize("name", ["snapshots", "weights"])
def test_a_folder_within_a_run_directory_that_is_moved_aside(tmp_path: Path, name: str, comes_first: str) -> None:
    """As --fresh does, after it has claimed both."""
    folder = tmp_path / "run" / name
    workers = [RunDirectory(tmp_path / "run", folder) for _ in range(2)]
    directory = workers[0]
    directory.create()
    directory.ownership.claim("job-1", 0, "alpha")
    (folder / "kept").touch()
    moved = directory.move_aside()
    assert moved is not None
    assert (moved / name / "kept").exists()
    for worker in workers if comes_first == "who moved it" else workers[::-1]:
        worker.ownership.claim("job-1", 1, "alpha")
    for worker in workers:
        other = RunDirectory(tmp_path / "other", folder)
        other.create()
        with pytest.raises(RunDirectoryInUse, match=f"snapshot directory {folder} is in use"):
            other.ownership.claim("job-2", 0, "beta")
        other.ownership.release()
        worker.ownership.release()


def test_a_link_to_a_folder_of_snapshots_is_not_moved_aside(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(folder)
    directory = RunDirectory(tmp_path / "run", tmp_path / "run" / "snapshots")
    directory.ownership.claim("job-1", 0, "alpha")
    assert directory.move_aside() is None
    assert (tmp_path / "run" / "snapshots").resolve() == folder
    directory.ownership.check_owner("job-1", 0)
    directory.ownership.release()


def test_a_run_directory_that_was_removed_with_the_folder_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights"
    directory = RunDirectory(tmp_path / "run", folder)
    directory.create()
    directory.identity("job")
    folder.mkdir()
    directory.ownership.claim("job-1", 1, "alpha")
    shutil.rmtree(directory.path)
    directory.make_anew("job-1", 2, "alpha")
    directory.ownership.check_owner("job-1", 2)
    assert (folder / "owner.json").exists()
    directory.ownership.release()


def claim(config: Config, token: str) -> RunDirectory:
    """As a worker does that is started with such flags."""
    directory = make_directory(config, "id")
    try:
        directory.ownership.claim(token, 1, "alpha")
    except RunDirectoryInUse:
        directory.ownership.release()
        raise
    return directory


def test_the_snapshots_of_a_run_are_not_anothers_whoever_came_first(tmp_path: Path) -> None:
    """Also before there is a run: nothing in the folder tells whose it is but its record."""
    theirs = Config(run_dir=tmp_path / "theirs")
    mine = Config(run_dir=tmp_path / "mine", snapshot_dir=str(tmp_path / "theirs" / "snapshots"))
    for first, second in ((mine, theirs), (theirs, mine)):
        directory = claim(first, "job-1")
        with pytest.raises(RunDirectoryInUse, match=f"snapshot directory {tmp_path}/theirs/snapshots is in use"):
            claim(second, "job-2")
        directory.ownership.release()
        claim(second, "job-3").ownership.release()


def test_a_folder_that_runs_have_a_link_to_is_one_jobs(tmp_path: Path, folder: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "snapshots").symlink_to(folder)
    one = claim(Config(run_dir=tmp_path / "one"), "job-1")
    for other in (
        Config(run_dir=tmp_path / "two"),
        Config(run_dir=tmp_path / "three", snapshot_dir=str(folder)),
        Config(run_dir=tmp_path / "four", snapshot_dir=str(tmp_path / "two" / "snapshots")),
    ):
        with pytest.raises(RunDirectoryInUse, match=f"snapshot directory {folder} is in use by another job"):
            claim(other, "job-2")
    one.ownership.check_owner("job-1", 1)
    one.ownership.release()


@pytest.mark.parametrize("when", ["at the start", "at a claim"])
def test_a_flag_that_was_not_given_is_not_blamed(tmp_path: Path, when: str) -> None:
    config, snapshots = Config(run_dir=tmp_path / "run"), tmp_path / "run" / "snapshots"
    directory = make_directory(config, "id") if when == "at a claim" else None
    if directory is None:
        (tmp_path / "run").mkdir()
    else:
        snapshots.rmdir()
    snapshots.touch()
    with pytest.raises(RunDirectoryError) as told:
        make_directory(config, "id") if directory is None else directory.ownership.claim("job-1", 0, "alpha")
    assert str(told.value) == (
        f"snapshot directory {snapshots} cannot be written to: Not a directory; choose another one"
    )
    if directory is not None:
        directory.ownership.release()


@pytest.mark.parametrize(("place", "lines"), [("run/snapshots", 1), ("elsewhere", 2)])
def test_what_holds_for_the_run_directory_is_not_told_again_of_its_folder(
    tmp_path: Path, place: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "local_flock", lambda _path: "localflock")
    directory = make_directory(Config(run_dir=tmp_path / "run", snapshot_dir=str(tmp_path / place)), "id")
    warning = directory.ownership.claim("job-1", 0, "alpha")
    assert warning is not None
    assert len(warning.splitlines()) == lines
    assert ("--snapshot-dir" in warning) is (lines == 2)
    directory.ownership.release()


def test_where_a_link_leads_later_is_another_jobs(tmp_path: Path) -> None:
    """A launch script points `latest` at each new run, while the one before still trains."""
    for name in ("run-1", "run-2"):
        (tmp_path / name).mkdir()
    latest = tmp_path / "latest"
    latest.symlink_to("run-1")
    one = claim(Config(run_dir=latest), "job-1")
    latest.unlink()
    latest.symlink_to("run-2")
    two = claim(Config(run_dir=latest), "job-2")
    for directory, token, name in ((one, "job-1", "run-1"), (two, "job-2", "run-2")):
        directory.ownership.check_owner(token, 1)
        directory.ownership.claim(token, 2, "alpha")
        assert directory.events_dir == tmp_path / name / "events"
        directory.ownership.release()


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o700, 0o644), (0o775, 0o666), (0o2770, 0o666)])
def test_a_lock_file_in_a_folder_that_a_group_shares_can_be_locked_by_all_of_it(
    folder: int, file: int, tmp_path: Path
) -> None:
    """Over NFS nobody gets an exclusive lock on a file that it can only read (flock(2))."""
    tmp_path.chmod(folder)
    before = os.umask(0o022)
    try:
        close_lock(open_for_lock(tmp_path / "lock"))
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == file


def test_a_lock_file_of_another_user_is_locked_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that a group shares; where there is none, that it cannot be made is the error."""
    (tmp_path / "there").touch()
    open_file = os.open

    def refuse_writing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_writing)
    fd = open_for_lock(tmp_path / "there")
    assert try_flock(fd, fcntl.LOCK_EX)
    close_lock(fd)
    with pytest.raises(PermissionError):
        open_for_lock(tmp_path / "none")
