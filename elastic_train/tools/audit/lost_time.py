"""Goodput by cause: where the wall time of a run went, from its step events alone.

Between the first committed step and the last, time is useful while steps follow one another, and lost between the last
step of one world and the first of the next. The first step of a world is work, too: an outage is its gap minus one
ordinary step. The rest, which no cause explains, is listed as `slow steps` and never counts as useful.

`ratio` compares with the same job undisturbed at the world sizes that were present: every kept step counts with the
median time of the steps of its world size, and of the pace that the drill had set.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastic_train.tools.audit.history import History, PastWorld
from elastic_train.tools.audit.lives import Step


@dataclass(frozen=True)
class Outage:
    """A standstill of the steps from one world to the next."""

    generation: int
    """of the world that ended it"""
    cause: str
    """`peer_lost`, `leave`, `join` or `restart`"""
    time: float
    """Unix seconds, when the last step before it was committed"""
    seconds: float
    """lost, without one ordinary step"""
    is_measured: bool
    """whether both steps have the same clock, and no step between them is missing"""


@dataclass(frozen=True)
class LostTime:
    """Where the seconds between the first step and the last went, undone steps included. They sum to `wall`."""

    wall: float
    useful: float
    by_cause: dict[str, float]
    """seconds: the outages' causes, `evaluation`, `slow steps`"""
    outages: tuple[Outage, ...]
    step_seconds: dict[int, float]
    """world size -> median seconds of a step"""

    @property
    def ratio(self) -> float:
        """Goodput: 1.0 is the undisturbed job at the world sizes that were present."""
        return self.useful / self.wall if self.wall > 0 else 0.0


def span_of(history: History) -> str:
    """The time that `lost_time` covers, in words."""
    if history.drill is not None and history.drill.settings.get("released"):
        return "between the first step and the moment at which the drill let its job run free"
    return "between the first step and the last"


def lost_time(history: History) -> LostTime:
    """The lost time of a run; all zero with fewer than two committed steps. In a drill, until its job ran free."""
    return _lost_time(history, (history.drill.settings.get("released") if history.drill else None) or math.inf)


def outages_of(history: History) -> tuple[Outage, ...]:
    """The outages of the whole run, the end of a drill included."""
    return _lost_time(history, math.inf).outages


def _lost_time(history: History, until: float) -> LostTime:
    steps = [step for step in history.steps if step.time <= until]
    if len(steps) < 2:
        return LostTime(0.0, 0.0, {}, (), {})
    kept = [step for step in history.kept if step.time <= until]
    if not kept or steps[0].generation < kept[0].generation:
        kept.insert(0, steps[0])  # of an attempt that saved nothing: its time is lost to this run
    undone = [step for step in steps if step.step > history.last_step and step.time > kept[-1].time]
    wall = sum(itertools.starmap(_seconds_between, itertools.pairwise([*kept, *undone[-1:]])))
    ordinary = _Ordinary(history, kept)
    worlds = {world.generation: world for world in history.worlds}
    outages = [
        Outage(
            generation=after.generation,
            cause=cause_of(worlds.get(after.generation)),
            time=before.time,
            seconds=max(0.0, _seconds_between(before, after) - ordinary.seconds(before, after)),
            is_measured=before.clock == after.clock and after.step == before.step + 1,
        )
        for before, after in itertools.pairwise(kept)
        if before.generation != after.generation
    ]
    if undone:
        newest, before, after = history.worlds[-1], kept[-1], undone[-1]
        seconds, is_measured = _seconds_between(before, after), before.clock == after.clock
        outages.append(Outage(newest.generation, cause_of(newest), before.time, seconds, is_measured))
    by_cause: dict[str, float] = defaultdict(float)
    for outage in outages:
        by_cause[outage.cause] += outage.seconds
    evaluation = _evaluation_seconds(history, kept[0].time, [*kept, *undone][-1].time)
    rest = wall - sum(by_cause.values())
    useful = min(rest, sum(itertools.starmap(ordinary.seconds, itertools.pairwise(kept))))
    if evaluation:
        by_cause["evaluation"] = min(evaluation, rest - useful)
    by_cause["slow steps"] = wall - useful - sum(by_cause.values())
    return LostTime(wall, useful, dict(by_cause), tuple(outages), ordinary.by_size)


def _seconds_between(before: Step, after: Step) -> float:
    """The seconds from one step to another: by the clock that cannot be set, if theirs was set in between."""
    is_of_one = (before.writer, before.process) == (after.writer, after.process)  # else perhaps of two machines
    if before.clock != after.clock and is_of_one and before.monotonic is not None and after.monotonic is not None:
        return after.monotonic - before.monotonic
    return after.time - before.time


class _Ordinary:
    """The time of an undisturbed step: the median of the steps like it."""

    def __init__(self, history: History, kept: Sequence[Step]) -> None:
        self._paces = (history.drill.settings.get("paces") or []) if history.drill is not None else []
        by_kind: dict[tuple[int, float], list[float]] = defaultdict(list)
        by_size: dict[int, list[float]] = defaultdict(list)
        for before, after in itertools.pairwise(kept):
            if before.generation == after.generation:
                seconds = max(0.0, _seconds_between(before, after))
                by_kind[self._kind(before, after)].append(seconds)
                by_size[after.world_size].append(seconds)
        overall = median([seconds for found in by_size.values() for seconds in found] or [0.0])
        self._by_kind = {kind: median(found) for kind, found in by_kind.items()}
        present = {after.world_size for after in kept[1:]}
        self.by_size = {size: median(by_size[size]) if size in by_size else overall for size in present}

    def seconds(self, before: Step, after: Step) -> float:
        """The ordinary time of the step `after`: the median by world size and pace, else by world size, else of all."""
        return self._by_kind.get(self._kind(before, after), self.by_size[after.world_size])

    def _kind(self, before: Step, after: Step) -> tuple[int, float]:
        """World size and pace."""
        return after.world_size, next((pace for since, pace in reversed(self._paces) if since <= before.time), 0.0)


def _evaluation_seconds(history: History, since: float, until: float) -> float:
    """The seconds of evaluation between two times, by the share of the evaluations that lie there."""
    times = [float(line["time"]) for line in history.of("evaluation")]
    inside = [time for time in times if since <= time <= until]
    return history.phases.get("evaluate", 0.0) * len(inside) / len(times) if times else 0.0


def cause_of(world: PastWorld | None) -> str:
    """The cause of a world in one word; `restart` for new processes."""
    if world is None:
        return "unknown"
    return "restart" if world.cause == "start" else world.cause
