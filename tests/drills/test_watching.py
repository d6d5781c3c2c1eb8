"""`elastic-train status --watch`: a live run, line by line or as a table that changes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from elastic_train.drills.watching import GoodputSoFar, watch_status
from elastic_train.status import RunState
from tests.drills.small_run import MEMBERS, START, write_small_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of which the ends are still to come; as on other machines, so that nobody looks for its processes."""
    write_small_run(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def take_back(run_dir: Path) -> dict[Path, list[str]]:
    """Remove what was written in generation 1 and give it back, by file."""
    taken = {}
    for path in (run_dir / "events").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        first = next((i for i, line in enumerate(lines) if json.loads(line)["generation"] == 1), len(lines))
        path.write_text("".join(lines[:first]))
        taken[path] = lines[first:]
    return taken


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("file", [io.StringIO(), Screen()], ids=["lines", "terminal"])
def test_it_follows_a_run_to_its_end(run_dir: Path, file: io.StringIO) -> None:
    to_come = take_back(run_dir)
    refreshes = []

    def sleep(_seconds: float) -> None:
        """While it sleeps the run goes on."""
        refreshes.append(file.getvalue())
        for path, lines in to_come.items():
            with path.open("a") as events:
                events.writelines(lines)
            lines.clear()

    status = watch_status(run_dir, file, sleep=sleep, now=lambda: START + 3.0)
    assert status.state is RunState.FINISHED
    assert len(refreshes) == 1
    assert "running" in refreshes[0]
    text = file.getvalue()
    assert text.index("running") < text.index("finished")
    assert "7 of 7" in text
    if not file.isatty():
        assert "goodput: 0." in text.splitlines()[-1]


def test_goodput_is_not_read_all_the_time(run_dir: Path) -> None:
    clock = [0.0]
    goodput = GoodputSoFar(run_dir, now=lambda: clock[0])
    first = goodput.read()
    assert first is not None
    assert first.startswith("0.545 so far; lost: peer_lost 0.5 s")
    (run_dir / "events" / f"{MEMBERS[0].replace('/', '-')}.jsonl").unlink()
    clock[0] = 4.0
    assert goodput.read() == first, "not due"
    clock[0] = 6.0
    assert goodput.read() is None, "no step is left"
