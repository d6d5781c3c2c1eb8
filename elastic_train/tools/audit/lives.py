"""What each process wrote into its file of events. A run has millions of steps: they are values of few bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_train.runlog.reader import Line, float_of


@dataclass(slots=True)
class Step:
    """A committed step as somebody wrote it down."""

    step: int
    generation: int
    epoch: int
    loss: float | None
    """None: it was not finite, and a GradScaler skipped the step"""
    time: float
    """of the commit, Unix seconds"""
    monotonic: float | None
    """the same moment by the machine's other clock; None in runs of versions that wrote none"""
    world_size: int
    writer: str


@dataclass
class Life:
    """One process. In containers several, one after the other, have the same name and so the same file."""

    member: str
    """NODE/LOCAL_RANK/PID"""
    lines: list[Line] = field(default_factory=list)
    """its events but the steps; each has its `writer`"""
    steps: list[Step] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """The next event of its file."""
        if line["event"] != "step":
            self.lines.append({**line, "writer": self.member})
            return
        late, monotonic = float_of(line, "late_seconds") or 0.0, float_of(line, "monotonic")
        self.steps.append(
            Step(
                int(line["step"]),
                int(line["generation"]),
                int(line["epoch"]),
                float_of(line, "loss"),
                float(line["time"]) - late,
                None if monotonic is None else monotonic - late,
                int(line["world_size"]),
                self.member,
            )
        )

    @property
    def began(self) -> float:
        """The time of its first event, Unix seconds."""
        return min(self._ends())

    @property
    def ended(self) -> float:
        """The time of its last event, Unix seconds."""
        return max(self._ends())

    def _ends(self) -> list[float]:
        lines = [float(line["time"]) for line in (*self.lines[:1], *self.lines[-1:])]
        return lines + [step.time for step in (*self.steps[:1], *self.steps[-1:])]


def lives_of(member: str, lines: Iterable[Line]) -> list[Life]:
    """The processes that wrote the events of one file."""
    found: list[Life] = []
    was_in_a_world = True
    for line in lines:
        is_in_a_world = line.get("generation") is not None
        if line["event"] == "start" or (was_in_a_world and not is_in_a_world) or not found:
            found.append(Life(member))
        found[-1].add(line)
        was_in_a_world = is_in_a_world
    return found
