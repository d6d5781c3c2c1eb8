"""`elastic-train status --watch`: a live run, line by line or as a table that changes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from elastic_train.observe.status import RunState
from elastic_train.tools.audit.watching import GoodputSoFar, watch_status
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
            "4 of 10 samples; loss: 0.1429; samples/s: 33; snapshot: step 7; goodput: 0.545 (lost: peer_lost 0.5 s); "
            "incidents: 1, the last: peer_lost, 1.2 s ago: lost c/0/13; "
            "generation 1 with 2 workers at step 3"
        )


def test_its_goodput_is_that_of_the_page_to_the_end(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    file = io.StringIO()
    watch_status([tmp_path / "run"], file, now=lambda: START + 3.0)
    assert "; goodput: 0.545 (lost" in file.getvalue()


def test_large_numbers_are_whole(run_dir: Path) -> None:
    for path in (run_dir / "events").iterdir():
        text = path.read_text()
        path.write_text(text.replace('"samples_done": 10', '"samples_done": 10000').replace("10}", "10000}"))
    file = io.StringIO()
    watch_status([run_dir], file, now=lambda: START + 3.0)
    assert re.search(r"samples/s: \d{1,3}(,\d{3})+;", file.getvalue()), file.getvalue()


def test_goodput_is_not_read_all_the_time(run_dir: Path) -> None:
    clock = [0.0]
    goodput = GoodputSoFar([run_dir], now=lambda: clock[0])
    first = goodput.read()
    assert first is not None
    assert first.startswith("0.545 so far (lost: peer_lost 0.5 s")
    (run_dir / "events" / f"{MEMBERS[0].replace('/', '-')}.jsonl").unlink()
    clock[0] = 4.0
    assert goodput.read() == first, "not due"
    clock[0] = 6.0
    assert goodput.read() is None, "no step is left"


def test_the_goodput_of_a_long_run_is_left_to_the_audit(run_dir: Path) -> None:
    size = sum(path.stat().st_size for path in (run_dir / "events").iterdir())
    assert "0.545" in str(GoodputSoFar([run_dir], most_bytes=size).read())
    goodput = GoodputSoFar([run_dir], most_bytes=size - 1)
    assert goodput.read() == goodput.read() == "too long a run to read again and again; elastic-train audit tells it"
