"""Follows a live run by its event files, and reads only new lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from elastic_train.runlog.events import FINISHED
from elastic_train.runlog.reader import Cursor, Line, float_of, member_of, worker_files


@dataclass
class SeenWorld:
    """One generation, as far as its members have recorded it."""

    generation: int
    members: tuple[str, ...]
    """by rank"""
    first_step_at: float | None = None
    """when the first step in it was committed"""


@dataclass
class RunWatch:
    """The contents of the event files so far."""

    run_dir: Path
    step: int = 0
    """the newest committed step"""
    loss: float | None = None
    world_size: int = 0
    """of that step"""
    generation: int = -1
    """the newest generation; -1 before the first"""
    world: SeenWorld | None = None
    """the world of that generation; None again once its processes are known to be gone"""
    names: set[str] = field(default_factory=set)
    """every member that ever wrote, as `host/local_rank/pid`"""
    outcomes: dict[str, str] = field(default_factory=dict)
    """member -> how it ended"""
    warnings: list[tuple[str, float, str]] = field(default_factory=list)
    """(member, Unix seconds, message)"""
    _cursors: dict[Path, Cursor] = field(default_factory=dict, repr=False)

    def poll(self) -> None:
        """Read what was written since the last call."""
        for path in worker_files(self.run_dir / "events"):
            member = member_of(path)
            self.names.add(member)
            for line in self._cursors.setdefault(path, Cursor(path)).read():
                self._take(member, line)

    def _take(self, member: str, line: Line) -> None:
        event = line.get("event")
        if event == "step":
            if line["generation"] >= self.generation and line["step"] >= self.step:
                self.step, self.loss, self.world_size = int(line["step"]), float_of(line, "loss"), line["world_size"]
            world = self.world
            if world is not None and world.generation == line["generation"] and world.first_step_at is None:
                world.first_step_at = float(line["time"])
        elif event == "world":
            if line["generation"] > self.generation:
                self.generation = int(line["generation"])
                self.step = int(line["step"])  # less than before where it restarted from a snapshot
                self.world = SeenWorld(int(line["generation"]), tuple(line["members"]))
        elif event == "warning":
            self.warnings.append((member, float(line["time"]), str(line["message"])))
        elif event == "done":
            self.outcomes[member] = str(line.get("outcome"))

    def forget_world(self) -> None:
        """Drop a world whose processes are all gone. New ones may have the same names: pids in containers repeat."""
        self.poll()
        self.world = None

    @property
    def is_finished(self) -> bool:
        return not FINISHED.isdisjoint(self.outcomes.values())
