"""The live facts of a drill's run."""

from __future__ import annotations

from pathlib import Path

from elastic_train.tools.drills.watch import RunWatch
from tests.drills.small_run import LAST_STEP, MEMBERS, START, Line, edit_lines, write_small_run


def test_after_a_restart_from_a_snapshot_the_step_is_its(tmp_path: Path) -> None:
    """Else a job would count as recovered only beyond the step that was reached before."""
    write_small_run(tmp_path)
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
