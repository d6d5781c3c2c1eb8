"""Ways to damage a small run, and the findings of its audit."""

from __future__ import annotations

from pathlib import Path

from elastic_train.runlog.reader import read_all
from elastic_train.tools.audit.audit import Audit, CheckOutcome
from elastic_train.tools.drills.catalogue import FAULTS
from tests.audits import audit
from tests.drills.small_run import (
    MEMBERS,
    START,
    Line,
    edit_json,
    edit_lines,
    later,
)
from tests.processes import flip_a_bit


def drawn(name: str) -> Line:
    """What the line of a fault of the catalogue says of it."""
    return {"name": name, "effects": sorted(FAULTS[name].effects)}


def events_of(run_dir: Path, member: str = MEMBERS[0]) -> Path:
    return run_dir / "events" / f"{member.replace('/', '-')}.jsonl"


def ledger_of(run_dir: Path, member: str = MEMBERS[0]) -> Path:
    return run_dir / "ledger" / f"{member.replace('/', '-')}.jsonl"


def verdicts(found: Audit) -> dict[str, CheckOutcome]:
    return {check.name: check.verdict for check in found.checks}


def only_failure(run_dir: Path, name: str) -> str:
    """The findings of the one check that failed."""
    found = audit(run_dir)
    failed = {check.name for check in found.checks if check.verdict is CheckOutcome.FAIL}
    assert failed == {name}, found.reasons
    assert not found.passed
    return "\n".join(found.reasons)


def restart(run_dir: Path, step: int, source: str, snapshot: int | None = None) -> None:
    """After step 7 everything begins again, as generation 2, from a step; that of a snapshot had been saved before."""

    def begin_again(lines: list[Line]) -> list[Line]:
        world = next(line for line in lines if line["event"] == "world")
        place = {"generation": 2, "world_size": 1}
        again = {**later(world, 4.0), **place, "step": step, "members": [MEMBERS[0]]}
        restore = {**again, "event": "restore", "source": source, "restored_step": step}
        steps = [line for line in lines if line["event"] == "step" and line["step"] > step]
        repeated = [{**later(line, 4.0), **place} for line in steps]
        saved = {**lines[0], "event": "snapshot", "generation": 1, "snapshot_step": snapshot, "path": f"/s/{snapshot}"}
        done = {**later(lines[-1], 4.6), "generation": 2}
        return [*lines, *([saved] if snapshot is not None else []), again, restore, *repeated, done]

    edit_lines(events_of(run_dir), begin_again)
    if (run_dir / "ledger").exists():
        edit_lines(ledger_of(run_dir), lambda lines: [*lines, *_of_all(run_dir, step)])


def _of_all(run_dir: Path, step: int) -> list[Line]:
    """The lines of a world of one that does the steps after `step` again."""
    found: dict[int, Line] = {}
    for line in (line for member in MEMBERS[:2] for line in read_all(ledger_of(run_dir, member))):
        if line["step"] > step and line["generation"] == 1:
            one = found.setdefault(line["step"], {**line, "generation": 2, "rank": 0, "indices": []})
            one["indices"] += line["indices"]
    return list(found.values())


def fail(run_dir: Path, member: str, time: float) -> None:
    """Its process ends with an error of its own."""

    def end(lines: list[Line]) -> list[Line]:
        done = {**lines[0], "event": "done", "time": START + time, "outcome": "failed", "error": "AttributeError: x"}
        return [*lines, done]

    edit_lines(events_of(run_dir, member), end)


def with_wall(result: Line, wall: float) -> Line:
    phases = {name: value for name, value in result["goodput"].items() if name not in ("wall", "ratio", "down")}
    phases["down"] = wall - sum(phases.values())
    return {"wall_seconds": wall, "goodput": {**phases, "wall": wall, "ratio": phases["train"] / wall}}


def snapshot_of(run_dir: Path, step: int) -> Path:
    return next((run_dir / "snapshots").glob(f"step-{step:012d}-*"))


def damage(run_dir: Path, step: int) -> str:
    """Flip a bit in the snapshot of a step; its name."""
    path = snapshot_of(run_dir, step)
    flip_a_bit(path / "state.pt")
    return path.name


def end_with(run_dir: Path, **outcome: str) -> None:
    """All that were in the last world end so; result.json is of an earlier end."""
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), lambda lines: [*lines[:-1], {**lines[-1], **outcome}])
    edit_json(run_dir / "result.json", lambda result: {**result, "step": 3, "state_sha256": "0" * 64})
