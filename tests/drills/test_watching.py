"""`elastic-train status --watch`: a live run, line by line or as a table that changes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from elastic_train.observe.status import RunState
from elastic_train.tools.audit.watching import watch_status
from tests.drills.small_run import START, write_small_run


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

    status = watch_status([run_dir], file, sleep=sleep, now=lambda: START + 3.0)
    assert status.state is RunState.FINISHED
    assert len(refreshes) == 1
    assert "running" in refreshes[0]
    text = file.getvalue()
    assert text.index("running") < text.index("finished")
    assert "7 of 7" in text
    if not file.isatty():
        assert text.splitlines()[-1] == (
            "state: finished; generation: 1; world size: 2; members: a/0/11, b/0/12; step: 7 of 7; epoch: 3, "
            "4 of 10 samples; loss: 0.1429; samples/s: 33; snapshot: step 7; "
            "incidents: 1, the last: peer_lost, 1.2 s ago: lost c/0/13; "
            "generation 1: 2 workers go on at step 4"
        )


def test_large_numbers_are_whole(run_dir: Path) -> None:
    for path in (run_dir / "events").iterdir():
        text = path.read_text()
        path.write_text(text.replace('"samples_done": 10', '"samples_done": 10000').replace("10}", "10000}"))
    file = io.StringIO()
    watch_status([run_dir], file, now=lambda: START + 3.0)
    assert re.search(r"samples/s: \d{1,3}(,\d{3})+;", file.getvalue()), file.getvalue()
