"""What a check leaves behind, and what it takes from under another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_train.tools.check.here import TrialDirectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "snapshots"


def test_a_check_leaves_nothing_behind(path: Path) -> None:
    TrialDirectory(path).close()
    assert not path.parent.exists()
    path.parent.mkdir()
    TrialDirectory(path).close()
    assert path.parent.exists()
    assert not path.exists()


def test_a_check_that_is_over_leaves_another_its_directory(path: Path) -> None:
    """Nodes that are looked at each for itself, and have the directory in common."""
    first, second = TrialDirectory(path), TrialDirectory(path)
    first.close()
    second.leave_mark("token", 0)
    assert second.error is None
    assert second.sees_mark("token", 0)
    second.close()
    assert not list(path.iterdir())


def test_checks_that_come_and_go(path: Path) -> None:
    def come_and_go(_: int) -> str | None:
        directory = TrialDirectory(path)
        there = directory.path.is_dir()
        directory.close()
        return directory.error or (None if there else "gone")

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(come_and_go, range(1000))) == {None}


def test_a_path_that_can_never_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in ((tmp_path / "file" / "snapshots", "Not a directory"), (Path("/proc/none"), "No such file")):
        directory = TrialDirectory(path)
        assert directory.error is not None
        assert directory.error.startswith(error)
        directory.close()
