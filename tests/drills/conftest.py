"""The run in which defects are planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.small_run import write_small_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "run")
    return tmp_path / "run"
