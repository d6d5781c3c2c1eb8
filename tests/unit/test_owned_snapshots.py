"""A folder of --snapshot-dir belongs to the job whose run directory names it, with that directory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_train.errors import NewerGeneration, OwnershipLost, RunDirectoryInUse
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


def test_a_folder_within_a_run_directory_that_is_moved_aside(tmp_path: Path) -> None:
    """As --fresh does, after it has claimed both."""
    folder = tmp_path / "run" / "weights"
    directory = RunDirectory(tmp_path / "run", folder)
    directory.create()
    folder.mkdir()
    directory.ownership.claim("job-1", 0, "alpha")
    (folder / "kept").touch()
    moved = directory.move_aside()
    assert moved is not None
    assert (moved / "weights" / "kept").exists()
    directory.ownership.claim("job-1", 1, "alpha")
    assert (folder / "owner.json").exists()
    directory.ownership.release()


def test_a_run_directory_that_was_removed_with_the_folder_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights"
    directory = RunDirectory(tmp_path / "run", folder)
    directory.create()
    directory.identity()
    folder.mkdir()
    directory.ownership.claim("job-1", 1, "alpha")
    shutil.rmtree(directory.path)
    directory.make_anew("job-1", 2, "alpha")
    directory.ownership.check_owner("job-1", 2)
    assert (folder / "owner.json").exists()
    directory.ownership.release()


def test_the_snapshots_of_a_run_that_trains_are_not_anothers(make_node: MakeNode, tmp_path: Path) -> None:
    theirs = RunDirectory(tmp_path / "theirs")
    theirs.create()
    theirs.identity()
    theirs.ownership.claim("job-1", 3, "alpha")
    mine = RunDirectory(tmp_path / "mine", theirs.snapshots_dir)
    mine.create()
    with pytest.raises(RunDirectoryInUse, match=f"snapshot directory {theirs.snapshots_dir} is in use"):
        mine.ownership.claim("job-2", 4, "beta")
    mine.ownership.release()
    theirs.ownership.release()
    mine.ownership.claim("job-2", 4, "beta")
    with pytest.raises(RunDirectoryInUse, match=f"run directory {theirs.path} is in use"):
        theirs.ownership.claim("job-3", 5, "alpha")
    mine.ownership.release()


def test_its_own_snapshots_named_once_more_are_claimed_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", tmp_path / "run" / "snapshots")
    directory.create()
    directory.snapshots_dir.mkdir()
    directory.ownership.claim("job-1", 1, "alpha")
    assert list(directory.snapshots_dir.iterdir()) == []
    directory.ownership.release()


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
