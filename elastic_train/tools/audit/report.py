"""`elastic-train report RUN_DIR`: one HTML file about a run that needs nothing else, for people to look at."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from elastic_train.errors import RunDirectoryError
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.tools.audit.audit import Audit
from elastic_train.tools.audit.charts import Axis, Mark, Segment, bar, curve, lanes, legend, nice_step, table
from elastic_train.tools.audit.history import History, PastWorld
from elastic_train.tools.audit.lost_time import LostTime, cause_of, lost_time, outages_of, span_of
from elastic_train.tools.audit.record import FaultRecord
from elastic_train.wording import count

FILE = "report.html"
RATE_BINS = 100


def write_report(history: History, found: Audit, path: Path | None = None) -> Path:
    """Write the page to `path`, by default report.html in the directory of the run. Returns the path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    path = path or history.run_dir / FILE
    try:
        write_atomic(path, page(history, found).encode())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}; --output says where else") from error
    return path


def page(history: History, found: Audit) -> str:
    """The whole page. A part that the run has nothing for is left out."""
    lost = lost_time(history)
    parts = (
        _summary(history, found, lost),
        _section("Nodes and generations", _nodes(history)),
        _section("Faults", _faults(history)),
        _section("Loss", _loss(history)),
        _section("Samples per second", _rate(history)),
        _section("Recovery by phase", _recoveries(history)),
        _section("Goodput", _goodput(lost, span_of(history))),
        _section("Wall time by phase", _phases(history)),
        _section("Audit", _audit(found)),
        _configuration(history),
    )
    style = files("elastic_train.tools.audit").joinpath("data/report.css").read_text(encoding="utf-8")
    title = escape(history.run_dir.name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title} - elastic_train</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


# --- the head ---------------------------------------------------------------------------------------------------------


def _summary(history: History, found: Audit, lost: LostTime) -> str:
    verdict = "PASS" if found.passed else "FAIL"
    outages = outages_of(history)
    figures: list[tuple[str, str, str | None]] = [
        ("goodput", "goodput", f"{lost.ratio:.3f}" if lost.wall else None),
        ("step", "committed steps", str(history.last_step)),
        ("generations", "generations", str(len(history.worlds))),
        ("outages", "outages", str(len(outages))),
        ("longest", "longest outage", _seconds(max((outage.seconds for outage in outages), default=None))),
        ("wall", "wall", _seconds((history.result or {}).get("wall_seconds"))),
        ("accuracy", "test accuracy", _percent((history.result or {}).get("test_accuracy"))),
    ]
    items = "".join(
        f'<div><dt>{escape(label)}</dt><dd data-name="{name}">{escape(text)}</dd></div>'
        for name, label, text in figures
        if text is not None
    )
    told = ""
    if history.drill is not None:
        settings = history.drill.settings
        told = (
            f"<p>A drill with seed {settings.get('seed')}: {settings.get('nodes')} nodes as "
            f"{escape(str(settings.get('nodes_as')))}, backend {escape(str(settings.get('backend')))}.</p>"
        )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons)
    return (
        f"<header><h1>{escape(history.run_dir.name)}</h1>"
        f'<span class="verdict {verdict}" data-name="verdict">{verdict}</span>{told}'
        + (f'<ul class="reasons">{reasons}</ul>' if reasons else "")
        + f"<dl>{items}</dl></header>"
    )


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} s"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"


# --- who was in -------------------------------------------------------------------------------------------------------


def _nodes(history: History) -> str:
    if not history.events:
        return ""
    zero = float(history.events[0]["time"])
    end = float(history.events[-1]["time"])
    x = Axis.over([0.0, end - zero])
    name_of = _namer(history)
    segments: dict[str, list[Segment]] = defaultdict(list)
    for member, start, stop in _lives(history):
        segments[name_of(member)].append(Segment(start - zero, stop - zero, "alive", f"{member}: in no world"))
    ends: dict[str, list[float]] = defaultdict(list)
    for line in history.of("done"):
        ends[line["writer"]].append(float(line["time"]) - zero)
    following = [world.time - zero for world in history.worlds[1:]] + [end - zero]
    for world, until in zip(history.worlds, following, strict=True):
        for rank, member in enumerate(world.members):
            stop = min([until, *(end for end in ends[member] if end >= world.time - zero)])
            title = f"generation {world.generation}: {member} as rank {rank} of {len(world.members)}"
            kind = "odd" if world.generation % 2 else "even"
            segments[name_of(member)].append(Segment(world.time - zero, stop, kind, title))
    rows = sorted(segments.items())
    marks = _fault_marks(history, lambda time, _step: time - zero)
    key = [("in a world, of even generation", "even"), ("of odd generation", "odd"), ("in none", "alive")]
    worlds = table(
        ("generation", "at", "why", "workers", "step", "members"),
        (
            (
                str(world.generation),
                f"{world.time - zero:.2f} s",
                escape(cause_of(world) if world.generation else "start"),
                str(len(world.members)),
                str(world.step),
                escape(", ".join(dict.fromkeys(map(name_of, world.members)))),
            )
            for world in history.worlds
        ),
    )
    return f"{lanes(rows, x, marks, 'seconds')}{legend(key)}<details><summary>Generations</summary>{worlds}</details>"


def _lives(history: History) -> list[tuple[str, float, float]]:
    """(member, first event, last event) of each process; in containers a later one may have the same name."""
    lives: list[tuple[str, float, float]] = []
    open_lives: dict[str, tuple[float, float]] = {}
    for line in history.events:
        member, now = line["writer"], float(line["time"])
        if line["event"] == "start" and member in open_lives:
            lives.append((member, *open_lives.pop(member)))
        open_lives[member] = (open_lives.get(member, (now, now))[0], now)
    return lives + [(member, *life) for member, life in open_lives.items()]


def _namer(history: History) -> Callable[[str], str]:
    """Member -> the name of its lane: the drill's node, else itself."""
    nodes = history.drill.node_of if history.drill else {}
    return lambda member: nodes.get(member, member)


def _fault_marks(history: History, place: Callable[[float, int], float]) -> list[Mark]:
    """One for each fault; for a run that was no drill, one for each world after the first."""
    if history.drill is not None:
        return [
            Mark(
                place(fault.struck_at, fault.step),
                f"#fault-{fault.number}",
                f"{fault.name} of {fault.target} at step {fault.step}",
                "join" if fault.name == "join" else "fault",
            )
            for fault in history.drill.faults
            if fault.struck_at is not None
        ]
    return [
        Mark(
            place(world.time, world.step),
            f"#recovery-{world.generation}",
            f"{cause_of(world)}: generation {world.generation} at step {world.step}",
            "join" if cause_of(world) == "join" else "fault",
        )
        for world in history.worlds[1:]
    ]


def _faults(history: History) -> str:
    if history.drill is None or not history.drill.faults:
        return ""
    faults = history.drill.faults
    still = _standstills(history, faults)
    rows = [
        (
            str(fault.number),
            escape(fault.name),
            escape(fault.target),
            str(fault.step) if fault.struck_at is not None else "",
            f'<span data-name="recovered-{fault.number}">{_seconds(fault.recovered_seconds) or "never"}</span>',
            f'<span data-name="still-{fault.number}">{_seconds(still.get(fault.number)) or ""}</span>',
            f"{fault.limit_seconds:.0f} s",
            escape(fault.evidence or fault.reason or ""),
        )
        for fault in faults
    ]
    head = ("", "fault", "of", "at step", "next step after", "standstill", "limit", "how it showed")
    note = (
        "<p>The next step is the first that the fault stood in the way of: after a join that of the world with the "
        "newcomer, whose start counts. The standstill is the time in which nobody committed a step.</p>"
    )
    return note + table(head, rows, ids=[f"fault-{fault.number}" for fault in faults])


def _standstills(history: History, faults: Sequence[FaultRecord]) -> dict[int, float]:
    """Number of a fault -> seconds of the longest outage until the job had got over it."""
    found, outages = {}, outages_of(history)
    for fault in faults:
        if fault.struck_at is None or fault.recovered_seconds is None:
            continue
        until = fault.struck_at + fault.recovered_seconds
        own = [o.seconds for o in outages if o.time < until and o.time + o.seconds > fault.struck_at]
        if own:
            found[fault.number] = max(own)
    return found


# --- curves -----------------------------------------------------------------------------------------------------------


def _loss(history: History) -> str:
    points = [(float(step.step), step.loss) for step in history.kept]
    if len(points) < 2:
        return ""
    x, y = Axis.over(a for a, _ in points), Axis.over([0.0, *(b for _, b in points)])
    marks = _fault_marks(history, lambda _time, step: float(step))
    label = f"loss over {len(points)} steps, from {points[0][1]:.4f} to {points[-1][1]:.4f}"
    return curve(points, x, y, marks, x_unit="steps", label=label)


def _rate(history: History) -> str:
    kept, batch = history.kept, history.batch
    if len(kept) < 2 or batch is None:
        return ""
    zero = float(history.events[0]["time"])
    span = max(step.time for step in kept) - zero
    width = nice_step(max(span / RATE_BINS, 1e-3))
    counts = [0.0] * (int(span / width) + 1)
    for step in kept:
        counts[int((step.time - zero) / width)] += _samples_of(step.step, history.length, batch)
    points = [((index + 0.5) * width, count / width) for index, count in enumerate(counts[:-1] or counts)]
    y = Axis.over([0.0, *(rate for _, rate in points)])
    marks = _fault_marks(history, lambda time, _step: time - zero)
    released = history.drill.settings.get("released") if history.drill else None
    note = "" if released is None else f"<p>From {released - zero:.0f} s on without the pace of the drill.</p>"
    label = f"samples per second over {span:.0f} s, at most {y.high:.0f}"
    return note + curve(points, Axis.over([0.0, span]), y, marks, x_unit="seconds", label=label)


def _samples_of(step: int, length: int | None, batch: int) -> int:
    """The last step of an epoch is smaller."""
    return batch if length is None else min(batch, length - (step - 1) % -(-length // batch) * batch)


# --- bars -------------------------------------------------------------------------------------------------------------


def _recoveries(history: History) -> str:
    """In place it takes fractions of a second, with new processes many: each has a scale of its own."""
    in_place, anew = ([w for w in history.worlds[1:] if (w.cause == "start") is is_new] for is_new in (False, True))
    note = "<p>With new processes, from the last step to the world:</p>" if in_place and anew else ""
    bars = _recovery_bars(history, in_place) + note + _recovery_bars(history, anew)
    meaning = "In place from the first sign to the next world, with new processes from the last step to the world."
    return f"<p>{meaning}</p>{bars}" if bars else ""


def _recovery_bars(history: History, worlds: Sequence[PastWorld]) -> str:
    if not worlds:
        return ""
    last_steps = _last_steps(history)
    phases = {world.generation: _phases_of(world, last_steps.get(world.generation)) for world in worlds}
    names = list(dict.fromkeys(name for found in phases.values() for name in found))
    longest = max(sum(found.values()) for found in phases.values())
    colours = {name: _colour(index) for index, name in enumerate(names)}
    name_of = _namer(history)
    rows = []
    for world in worlds:
        found = phases[world.generation]
        whom = dict.fromkeys(map(name_of, sorted(world.lost | world.left | world.joined)))
        rows.append(
            (
                str(world.generation),
                escape(f"{cause_of(world)} {', '.join(whom)}"),
                f'<span data-name="recovery-{world.generation}">{sum(found.values()):.3f} s</span>',
                bar([(name, seconds, colours[name]) for name, seconds in found.items()], longest),
                " ".join(f"{name} {seconds:.3f}" for name, seconds in found.items()),
            )
        )
    head = ("generation", "after", "sum", "", "seconds")
    return legend(colours.items()) + table(head, rows, ids=[f"recovery-{world.generation}" for world in worlds])


def _last_steps(history: History) -> dict[int, float]:
    """Generation -> when the last step of those before it was committed; without those that had none before them."""
    found: dict[int, float] = {}
    last: float | None = None
    for world in history.worlds:
        if last is not None:
            found[world.generation] = last
        if steps := history.steps_of.get(world.generation):
            last = max(steps[-1].time, last or 0.0)
    return found


def _phases_of(world: PastWorld, last: float | None) -> Mapping[str, float]:
    """Seconds by phase until a world stood. One of new processes has a single phase, from the last step before it."""
    if world.cause != "start":
        return world.seconds
    return {} if last is None else {"down and startup": max(0.0, world.time - last)}


def _goodput(lost: LostTime, span: str) -> str:
    if not lost.wall:
        return ""
    parts = [("useful", lost.useful), *((cause, seconds) for cause, seconds in lost.by_cause.items() if seconds > 0)]
    sizes = ", ".join(
        f"{seconds * 1000:.1f} ms with {count(size, 'worker')}" for size, seconds in sorted(lost.step_seconds.items())
    )
    return (
        f"<p>{lost.ratio:.3f} of what the workers present could have done undisturbed, {span} "
        f"({lost.wall:.1f} s); a step takes {escape(sizes)}.</p>" + _shares(parts, lost.wall)
    )


def _phases(history: History) -> str:
    phases = dict((history.result or {}).get("goodput") or {})
    wall = float(phases.pop("wall", 0.0))
    phases.pop("ratio", None)
    if not wall:
        return ""
    return "<p>As result.json has it, from the start of the first process.</p>" + _shares(list(phases.items()), wall)


def _shares(parts: Sequence[tuple[str, float]], total: float) -> str:
    coloured = [(name, seconds, _colour(index)) for index, (name, seconds) in enumerate(parts)]
    rows = [
        (
            f'<span class="key {kind}"></span>{escape(name)}',
            f'<span data-name="share-{escape(name)}">{seconds:.2f} s</span>',
            f"{seconds / total:.1%}",
        )
        for name, seconds, kind in coloured
    ]
    return bar(coloured, total) + table(("", "seconds", "share"), rows)


def _colour(index: int) -> str:
    return f"c{min(index, 6)}"


# --- words ------------------------------------------------------------------------------------------------------------


def _audit(found: Audit) -> str:
    rows = [
        (
            escape(check.name),
            f'<b class="{check.verdict}" data-name="check-{escape(check.name)}">{check.verdict}</b>',
            escape(check.promise),
            "<br>".join(map(escape, (check.detail, *check.findings))),
        )
        for check in found.checks
    ]
    return table(("check", "", "promise", "looked at"), rows, is_prose=True)


def _configuration(history: History) -> str:
    found: dict[str, Any] = {"worker": history.config}
    if history.drill is not None:
        found["drill"] = history.drill.settings
    text = escape(json.dumps(found, indent=2))
    return f"<section><details><summary>Configuration</summary><pre>{text}</pre></details></section>"
