"""`elastic-train report RUN_DIR`: a page about a run, as one self-contained HTML file.

The values are computed here; data/report.html lays them out.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_train.errors import RunDirectoryError
from elastic_train.observe.bill import figures_of_bill
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.tools.audit.audit import Audit
from elastic_train.tools.audit.history import History, PastWorld
from elastic_train.tools.audit.lost_time import Outage, cause_of, lost_time, outages_of, span_of
from elastic_train.tools.audit.trace_bill import bill_of_run
from elastic_train.training.planned_steps import steps_per_epoch
from elastic_train.wording import count

FILE = "report.html"
RATE_BINS = 100
MAX_POINTS = 1600


@dataclass(frozen=True)
class Axis:
    """The range of one axis, never empty."""

    low: float
    high: float

    @staticmethod
    def over(values: Iterable[float]) -> Axis:
        found = [value for value in values if math.isfinite(value)]
        low, high = min(found, default=0.0), max(found, default=1.0)
        return Axis(low, high if high > low else low + 1.0)

    def percent(self, value: float) -> float:
        """The place of a value on the axis, clamped to 0 to 100."""
        return max(0.0, min(100.0, 100.0 * (value - self.low) / (self.high - self.low)))

    def ticks(self, count: int = 5) -> list[float]:
        """Some round numbers within the range."""
        step = nice_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


Segment = tuple[float, float, str, str]
"""of a lane: start and end in seconds since the first event, CSS class, title"""
Curve = tuple[Sequence[tuple[float, float]], Axis, str]
"""points, x axis, and a text for screen readers"""


class Mark(NamedTuple):
    """A mark on either x axis that links to a row of a table."""

    seconds: float
    """since the first event"""
    steps: int
    row: str
    title: str
    kind: str
    """CSS class"""


def short_number(value: float) -> str:
    """A number as people write it at an axis."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def shared_length(names: Sequence[str]) -> int:
    """The length of the prefix that all names share (a host and its slash): a lane has room for a few characters."""
    shared = os.path.commonpath(names) if len(names) > 1 else ""
    return len(shared) + 1 if shared else 0


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


_ENVIRONMENT = Environment(
    loader=PackageLoader("elastic_train.tools.audit", "data"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"seconds": _seconds, "number": short_number, "shared": shared_length}
_ENVIRONMENT.globals |= {"Axis": Axis, "cause_of": cause_of, "count": count}
TEMPLATE = _ENVIRONMENT.get_template("report.html")


def write_report(history: History, found: Audit, path: Path | None = None) -> Path:
    """Write the page to `path`, by default `FILE` in the directory of the run. Returns the path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    path = path or history.run_dir / FILE
    try:
        write_atomic(path, page(history, found).encode(errors="backslashreplace"))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}; --output says where else") from error
    return path


def page(history: History, found: Audit) -> str:
    """The whole page, without the parts that the run has no data for."""
    began = min((life.began for life in history.lives), default=0.0)
    ended = max((life.ended for life in history.lives), default=0.0)
    lost, drill, result = lost_time(history), history.drill, history.final_result or {}
    outages = outages_of(history)
    accuracy = result.get("test_accuracy")
    return TEMPLATE.render(
        history=history,
        found=found,
        verdict=found.verdict,
        figures=(
            ("goodput", "goodput", f"{lost.ratio:.3f}" if lost.wall else ""),
            ("step", "committed steps", str(history.last_step)),
            ("generations", "generations", str(len(history.worlds))),
            ("outages", "outages", str(len(outages))),
            ("longest", "longest outage", _seconds(max((outage.seconds for outage in outages), default=None))),
            ("wall", "wall", _seconds(result.get("wall_seconds"))),
            ("accuracy", "test accuracy", "" if accuracy is None else f"{accuracy:.2%}"),
            *figures_of_bill(bill_of_run(history)),
        ),
        drill=drill,
        told=(drill.settings if drill else {}).get,
        zero=began,
        time=Axis.over([0.0, ended - began]),
        lanes_of_nodes=_lanes(history, began, ended),
        nodes_of=lambda members: ", ".join(dict.fromkeys(_node_of(history, member) for member in members)),
        marks=_marks(history, began),
        standstills=_standstills(history, outages),
        loss=_loss(history),
        rate=_rate(history, began),
        recoveries=_recoveries(history),
        lost=lost,
        span=span_of(history),
        goodput={"useful": lost.useful} | {cause: seconds for cause, seconds in lost.by_cause.items() if seconds > 0},
        wall=sum(history.phases.values()),
        phases=history.phases,
        configuration=json.dumps({"worker": history.config} | ({"drill": drill.settings} if drill else {}), indent=2),
    )


def _node_of(history: History, member: str) -> str:
    """The name of a member's lane: the drill's node, else itself."""
    return history.drill.node_of.get(member, member) if history.drill else member


def _lanes(history: History, zero: float, end: float) -> list[tuple[str, list[Segment]]]:
    """Each node with its segments between two times: in which world it was, or in none."""
    lanes: dict[str, list[Segment]] = defaultdict(list)
    for life in history.lives:
        segment = (life.began - zero, life.ended - zero, "alive", f"{life.member}: in no world")
        lanes[_node_of(history, life.member)].append(segment)
    done: dict[str, list[float]] = defaultdict(list)
    for line in history.of("done"):
        done[line["writer"]].append(float(line["time"]))
    ends = [*(world.time for world in history.worlds[1:]), end]
    for world, until in zip(history.worlds, ends, strict=False):  # without worlds there still is one end
        for rank, member in enumerate(world.members):
            stop = min([until, *(time for time in done.get(member, ()) if time >= world.time)])
            title = f"generation {world.generation}: {member} as rank {rank} of {len(world.members)}"
            kind = "odd" if world.generation % 2 else "even"
            lanes[_node_of(history, member)].append((world.time - zero, stop - zero, kind, title))
    return sorted(lanes.items())


def _marks(history: History, zero: float) -> list[Mark]:
    """One for each fault; for a run that was no drill, one for each world after the first."""
    found: list[tuple[float, int, str, str, str]] = []
    if history.drill is not None:
        for fault in history.drill.faults:
            if fault.injected_at is not None:
                title = f"{fault.name} of {fault.target} at step {fault.step}"
                found.append((fault.injected_at, fault.step, f"fault-{fault.number}", title, fault.name))
    else:
        for world in history.worlds[1:]:
            title = f"{cause_of(world)}: generation {world.generation} at step {world.step}"
            found.append((world.time, world.step, f"recovery-{world.generation}", title, cause_of(world)))
    return [
        Mark(time - zero, step, row, title, "join" if cause == "join" else "fault")
        for time, step, row, title, cause in found
    ]


def _standstills(history: History, outages: Sequence[Outage]) -> dict[int, float]:
    """Map the number of each fault to the longest outage until the job had recovered, seconds."""
    found = {}
    for fault in history.drill.faults if history.drill else ():
        if fault.injected_at is None or fault.recovered_seconds is None:
            continue
        until = fault.injected_at + fault.recovered_seconds
        own = [o.seconds for o in outages if o.time < until and o.time + o.seconds > fault.injected_at]
        if own:
            found[fault.number] = max(own)
    return found


def _loss(history: History) -> Curve | None:
    points = [(float(step.step), step.loss) for step in history.kept if step.loss is not None]
    if len(points) < 2:
        return None
    label = f"loss over {len(history.kept)} steps, from {points[0][1]:.4f} to {points[-1][1]:.4f}"
    return thinned(points), Axis.over(step for step, _ in points), label


def _rate(history: History, zero: float) -> Curve | None:
    kept, batch = history.kept, history.batch
    if len(kept) < 2 or batch is None:
        return None
    span = max(step.time for step in kept) - zero
    width = nice_step(max(span / RATE_BINS, 1e-3))
    counts = [0.0] * (int(span / width) + 1)
    for step in kept:
        counts[int((step.time - zero) / width)] += _samples_of(step.step, history.length, batch)
    points = [((index + 0.5) * width, count / width) for index, count in enumerate(counts[:-1] or counts)]
    label = f"samples per second over {span:.0f} s, at most {max(rate for _, rate in points):.0f}"
    return points, Axis.over([0.0, span]), label


def _samples_of(step: int, length: int | None, batch: int) -> int:
    """The samples of a step; the last step of an epoch is smaller."""
    return batch if length is None else min(batch, length - (step - 1) % steps_per_epoch(length, batch) * batch)


def _recoveries(history: History) -> list[tuple[list[tuple[PastWorld, Mapping[str, float]]], list[str], float]]:
    """(worlds with their seconds by phase, names of the phases, longest sum) of recoveries in place and of those with
    new processes. The former take fractions of a second, the latter many seconds: each group has its own scale. New
    processes have a single phase, from the last step before them."""
    phases, last, found = dict[int, Mapping[str, float]](), -math.inf, []
    for world in history.worlds:
        in_one = {"down and startup": max(0.0, world.time - last)} if last > -math.inf else {}
        phases[world.generation] = in_one if world.cause == "start" else world.seconds
        last = max([last, *(step.time for step in history.steps_of.get(world.generation, ())[-1:])])
    for is_anew in (False, True):
        chosen = [world for world in history.worlds[1:] if (world.cause == "start") is is_anew]
        worlds = [(world, phases[world.generation]) for world in chosen]
        if worlds:
            names = list(dict.fromkeys(name for _, phases in worlds for name in phases))
            found.append((worlds, names, max(sum(phases.values()) for _, phases in worlds)))
    return found


def nice_step(rough: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= rough * (1 - 1e-9))


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce the points to as many as can be drawn: the lowest and the highest of each bucket, so that spikes stay."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / (MAX_POINTS // 2))
    kept = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {bucket.index(min(bucket, key=lambda p: p[1])), bucket.index(max(bucket, key=lambda p: p[1]))}
        kept += [bucket[index] for index in sorted(ends)]
    return kept
