"""What a drill knows of its live run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastic_train.runlog.events import EventLog
from elastic_train.tools.drills.watch import RunWatch
from tests.drills.small_run import LAST_STEP, MEMBERS, START, Line, add_monotonic, edit_lines, write_small_run


def test_after_a_restart_from_a_snapshot_the_step_is_its(tmp_path: Path) -> None:
    """Else a job would count as recovered only beyond the step that was reached before."""
    write_small_run(tmp_path)
    add_monotonic(tmp_path)
    watch = RunWatch(tmp_path)
    watch.poll()
    assert (watch.generation, watch.step) == (1, LAST_STEP)

    def restart(lines: list[Line]) -> list[Line]:
        world = next(line for line in lines if line["event"] == "world")
        again = {**world, "generation": 2, "time": START + 5, "step": 3, "members": [MEMBERS[1]]}
        step = {**again, "event": "step", "step": 4, "epoch": 1, "loss": 0.25, "samples_done": 4}
        return [*lines, again, step]

    edit_lines(tmp_path / "events" / f"{MEMBERS[1].replace('/', '-')}.jsonl", restart)
    watch.poll()
    assert (watch.generation, watch.step) == (2, 4)


def test_a_clock_that_is_set_off_moves_nothing(tmp_path: Path) -> None:
    """A drill subtracts these times from those of its own clock; the monotonic one is the whole machine's."""
    log = EventLog(tmp_path / "events", host="node", local_rank=0, rank=0, world_size=1)
    log.write("world", generation=0, members=["node/0/1"], time=time.time() - 3600)
    log.write("step", generation=0, step=1, loss=1.0, time=time.time() + 3600)
    log.close()
    watch = RunWatch(tmp_path)
    watch.poll()
    assert watch.world is not None
    assert watch.world.first_step_at == pytest.approx(time.time(), abs=5)
