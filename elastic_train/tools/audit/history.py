"""A run's whole history, read from its directory: the values that the audit and the page are made from.

It reads all files in full; status.py reads only their ends, to answer at once.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path

from elastic_train.errors import RunDirectoryError
from elastic_train.observe.status import Status, missing, read_status
from elastic_train.runlog.events import FINISHED
from elastic_train.runlog.reader import Line, dict_of, int_of, read_json, worker_files
from elastic_train.storage.places import folder_by
from elastic_train.storage.store_urls import is_url
from elastic_train.tools.audit.lives import Clock, Clocks, LedgerLine, Life, Step, ledger_of, lives_of, of_one_run
from elastic_train.tools.audit.record import DrillRecord, read_drill
from elastic_train.tools.audit.unwritten import Unwritten

MOST_LATE = 2
"""steps of a member without a line of it: the loss of a step may come after its commit"""


@dataclass(frozen=True)
class PastWorld:
    """One generation, as its members recorded it."""

    generation: int
    memberships: tuple[tuple[str, ...], ...]
    """the different lists of members recorded for it, by rank; more than one is a broken promise"""
    workers: tuple[str, ...]
    """the members that train, by rank; the others are spares"""
    cause: str
    """`start`, `peer_lost`, `join`, `leave` or `states_differ`; `start` for every world of new processes"""
    time: float
    """when the last member recorded that it stands"""
    stood_by: frozenset[str]
    """the members that recorded it"""
    stood: Mapping[Clock, float]
    """the same by each clock"""
    steps: tuple[int, ...]
    """the different numbers of committed steps with which it began; more than one is a broken promise"""
    lost: frozenset[str]
    left: frozenset[str]
    joined: frozenset[str]
    """newcomers that the members of the world before admitted"""
    seconds: Mapping[str, float]
    """by phase, as the lowest rank wrote them"""
    restores: Mapping[str, tuple[str, int]]
    """writer -> (source, restored step), for members that had no state"""

    @property
    def members(self) -> tuple[str, ...]:
        return self.memberships[0]

    @property
    def step(self) -> int:
        """Committed steps when it began."""
        return self.steps[-1]

    @property
    def is_restored(self) -> bool:
        """Whether its state may have come from elsewhere than a member of the world before."""
        return self.cause == "start" or any(source != "peer" for source, _ in self.restores.values())

    @property
    def restored_from(self) -> str | None:
        """Where the state came from if no member had one: they are new processes, or their states differed. None for a
        world that re-formed in place."""
        is_without = self.cause in ("start", "states_differ")
        return next(iter(self.restores.values()))[0] if is_without and self.restores else None


@dataclass(frozen=True)
class History:
    """Everything in a run directory, as values."""

    run_dir: Path
    lives: tuple[Life, ...]
    """what each process wrote; times are by its machine's clock"""
    ledger: tuple[LedgerLine, ...]
    torn: tuple[str, ...] = ()
    """lines that cannot be read, as `file: what`; without those that a kill cut off at the end of a file"""
    result: Line | None = None
    drill: DrillRecord | None = None
    names: tuple[str, ...] = field(default=(), repr=False)
    """every path below the run directory, relative"""

    @cached_property
    def status(self) -> Status:
        """The status of the run, by the ends of its files. Raises: RunDirectoryError."""
        return read_status(self.run_dir, time.time())

    @cached_property
    def events(self) -> list[Line]:
        """All events but the steps, by time."""
        return sorted((line for life in self.lives for line in life.lines), key=lambda line: float(line["time"]))

    def of(self, event: str) -> list[Line]:
        """The events of one kind, by time; for steps see `steps`."""
        return self._by_event.get(event, [])

    @cached_property
    def _by_event(self) -> dict[str, list[Line]]:
        found: dict[str, list[Line]] = {}
        for line in self.events:
            found.setdefault(line["event"], []).append(line)
        return found

    @cached_property
    def starts(self) -> list[Line]:
        """The `start` events of workers that were in a world, by the newest generation of each; of all workers if none
        was. A worker that was refused may have had other flags and other data."""
        newest = {member: world.generation for world in self.worlds for member in world.members}
        found = [line for line in self.of("start") if line["writer"] in newest] or self.of("start")
        return sorted(found, key=lambda line: newest.get(line["writer"], 0))

    @cached_property
    def config(self) -> Line:
        """The flags of the newest start."""
        return dict_of(self.starts[-1], "config") if self.starts else {}

    @cached_property
    def length(self) -> int | None:
        """Samples per epoch."""
        return next((n for s in self.starts if (n := int_of(dict_of(s, "task"), "train_length"))), None)

    @cached_property
    def batch(self) -> int | None:
        return int_of(self.config, "global_batch_size") or None

    @property
    def snapshot_folders(self) -> list[Path]:
        """The folders of the snapshots: nodes may differ. For a URL, a folder that does not exist: an audit reads no
        object store."""
        return list(dict.fromkeys(folder_by(dict_of(start, "config"), self.run_dir) for start in self.starts))

    @property
    def in_bucket(self) -> str:
        """The end of a sentence about snapshots in an object store, which are not read here; else empty."""
        place, key = self.config.get("snapshot_dir"), self.config.get("snapshot_key")
        by_key = f" --snapshot-key {key}" if key else ""
        return f"; those of {place}: elastic-train snapshot verify {place}{by_key}" if is_url(place) else ""

    @cached_property
    def written(self) -> list[Step]:
        """Every step that a worker wrote down, by time."""
        return sorted((step for life in self.lives for step in life.steps), key=attrgetter("time"))

    @cached_property
    def steps(self) -> list[Step]:
        """The steps that count, by time. The step of a member that was expelled while it committed does not count if a
        member of the next world wrote the same step: the last one or two of their world. Nor does a `_voided` step."""
        found = self.written
        successors = {before.generation: after.members for before, after in itertools.pairwise(self.worlds)}
        own = [step for step in found if step.writer in successors.get(step.generation, ())]
        ends = dict[int, int]()
        for step in own:
            ends[step.generation] = max(step.step, ends.get(step.generation, 0))
        counting = {(step.generation, step.step) for step in own if step.step > ends[step.generation] - MOST_LATE}
        voided = self._voided(found)
        return [
            step
            for step in found
            if (step.generation, step.step) not in counting or step.writer in successors[step.generation]
            if (step.generation, step.step, step.writer) not in voided
        ]

    def _voided(self, found: Sequence[Step]) -> set[tuple[int, int, str]]:
        """(generation, step, writer) of steps that a left-out member took back and that another member wrote."""
        lines = [(void, line["writer"]) for line in self.of("warning") for void in line.get("void") or ()]
        return {
            (int(void["generation"]), int(void["step"]), member)
            for void, member in lines
            if any(
                step.step == void["step"] and step.generation >= void["generation"] and step.writer != member
                for step in found
            )
        }

    @cached_property
    def steps_of(self) -> dict[int, list[Step]]:
        """Generation -> its steps, by time; without generations that committed none."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.generation, []).append(step)
        return found

    @cached_property
    def kept(self) -> list[Step]:
        """One entry per committed step, in order: of several, that of the largest generation. A step that a later world
        began without is undone, until it is committed again."""
        lasting: dict[int, float] = {}
        fewest = math.inf
        for world in reversed(self.worlds):
            lasting[world.generation] = fewest
            fewest = min(fewest, world.step)
        lasts = [step for step in self.steps if step.step <= lasting.get(step.generation, math.inf)]
        by_step = sorted(sorted(lasts, key=attrgetter("generation")), key=attrgetter("step"))
        return list({step.step: step for step in by_step}.values())

    @cached_property
    def last_step(self) -> int:
        """The newest committed step, even if its line is not here. (A stop tells what was committed only of rank 0.)"""
        unwritten = self.unwritten.newest("step", self.worlds[-1].generation) if self.worlds else None
        known = [line for line in self.ends if line.get("outcome") in FINISHED or line["rank"] == 0]
        told = [int(line["step"]) for line in known if line.get("outcome") != "failed"]
        return max(unwritten or 0, self.kept[-1].step if self.kept else 0, *told)

    @cached_property
    def unwritten(self) -> Unwritten:
        return Unwritten(self.of("unwritten"))

    @cached_property
    def begins_after(self) -> int:
        """The number of first steps that have no files here: machines with empty disks resumed from a snapshot, or
        joined members whose disks are gone. 0 if the run began here, and in a drill."""
        began = self.worlds[0].step if self.worlds and self.drill is None else 0
        return 0 if any(step.step <= began for step in self.steps) else began

    @property
    def of_before(self) -> str:
        """The end of a sentence about those steps; empty if there are none."""
        step = self.begins_after
        return f"; it began here after step {step}: what came before is not here" if step else ""

    @cached_property
    def early_loss(self) -> float | None:
        """The mean loss of the first half of the kept steps, while there is still much to learn; None without any."""
        return _mean_loss(self.kept[: (len(self.kept) + 1) // 2])

    @cached_property
    def late_loss(self) -> float | None:
        """The mean loss of the second half; None without any."""
        return _mean_loss(self.kept[(len(self.kept) + 1) // 2 :])

    @cached_property
    def worlds(self) -> list[PastWorld]:
        """The worlds, by generation."""
        found: dict[int, list[Line]] = {}
        for line in self.of("world"):
            found.setdefault(int(line["generation"]), []).append(line)
        restores: dict[int, dict[str, tuple[str, int]]] = {}
        for line in self.of("restore"):
            own = restores.setdefault(int(line["generation"]), {})
            own[line["writer"]] = (str(line["source"]), int(line["restored_step"]))
        return [_world(number, lines, restores.get(number, {})) for number, lines in sorted(found.items())]

    @cached_property
    def elsewhere(self) -> tuple[str, ...]:
        """Members of its worlds without a file here: they may have run directories of their own."""
        here = {life.member for life in self.lives}
        return tuple(dict.fromkeys(member for world in self.worlds for member in world.members if member not in here))

    @cached_property
    def without_ledger(self) -> frozenset[int]:
        """Generations with a member that was started without --ledger."""
        return frozenset(
            int(line["generation"])
            for life in self.lives
            if any(dict_of(it, "config").get("ledger") is False for it in life.lines if it["event"] == "start")
            for line in life.lines
            if line["event"] == "world"
        )

    @cached_property
    def ends(self) -> list[Line]:
        """The `done` events of the newest world's members."""
        newest = {(member, world.generation) for world in self.worlds[-1:] for member in world.members}
        return [line for line in self.of("done") if (line["writer"], line["generation"]) in newest]

    @cached_property
    def outcomes(self) -> dict[str, str]:
        """How the members of the newest world ended; without members that recorded no end."""
        return {line["writer"]: str(line.get("outcome")) for line in self.ends}

    @property
    def is_finished(self) -> bool:
        """Whether the newest world reached the end; an earlier one may have, before the run was continued."""
        return not FINISHED.isdisjoint(self.outcomes.values())

    @property
    def why_no_result(self) -> str:
        """Why the run has no result, in words."""
        return "result.json is damaged: no JSON" if "result.json" in self.names else "there is no result.json"

    @property
    def final_result(self) -> Line | None:
        """result.json, unless the run was continued after the end that it describes."""
        return self.result if self.is_finished else None

    @cached_property
    def phases(self) -> dict[str, float]:
        """The seconds of the run by phase, as result.json has them; empty if it is of no end, or of an earlier one."""
        found = dict_of(self.final_result or {}, "goodput")
        return {name: float(seconds or 0.0) for name, seconds in found.items() if name not in ("wall", "ratio")}


def _mean_loss(steps: Sequence[Step]) -> float | None:
    losses = [step.loss for step in steps if step.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _world(generation: int, lines: list[Line], restores: Mapping[str, tuple[str, int]]) -> PastWorld:
    lines = sorted(lines, key=lambda line: int(line["rank"]))
    first = lines[0]
    memberships = tuple(dict.fromkeys(tuple(map(str, line["members"])) for line in lines))
    return PastWorld(
        generation=generation,
        memberships=memberships,
        workers=memberships[0][: int_of(first, "world_size")],
        cause=str(first["cause"]),
        time=max(float(line["time"]) for line in lines),
        stood_by=frozenset(line["writer"] for line in lines),
        stood={line["clock"]: float(line["time"]) for line in sorted(lines, key=itemgetter("time"))},
        steps=tuple(sorted({int(line["step"]) for line in lines})),
        lost=frozenset(str(member) for line in lines for member in line.get("lost_members") or ()),
        left=frozenset(str(member) for line in lines for member in line.get("left_members") or ()),
        joined=frozenset(str(member) for line in lines for member in line.get("joined_members") or ()),
        seconds={name: float(value) for name, value in dict_of(first, "seconds").items()},
        restores=restores,
    )


def require_run(run_dir: Path) -> None:
    """Check that a directory holds a run. Raises: RunDirectoryError: it holds none."""
    if not run_dir.is_dir():
        raise missing(run_dir)
    if not (run_dir / "events").is_dir():
        raise RunDirectoryError(f"{run_dir} holds no run: there is no events/ in it")


def read_history(run_dir: Path) -> History:
    """Read every file of a run. Takes a second per some hundred thousand lines.

    Raises:
        RunDirectoryError: there is no run in it, or it cannot be read.
    """
    try:
        require_run(run_dir)
        # A running job may prune at the same time: `walk` leaves out what is gone meanwhile.
        found = ((folder, name) for folder, *names in os.walk(run_dir) for name in itertools.chain(*names))
        names = tuple(sorted(os.path.relpath(os.path.join(folder, name), run_dir) for folder, name in found))
        torn: list[str] = []
        drill = read_drill(run_dir)
        clocks = Clocks(is_one=drill is not None)
        events, ledgers = (worker_files(run_dir / name) for name in ("events", "ledger"))
        lives = [life for path in events for life in lives_of(path, torn, clocks)]
        ledger = [line for path in ledgers for line in ledger_of(path, torn)]
    except OSError as error:
        where = os.path.realpath(error.filename) if error.filename else run_dir  # `as_one_run` shows links
        raise RunDirectoryError(f"{where} cannot be read: {error.strerror}") from error
    lives, ledger = of_one_run(lives, ledger)
    return History(
        run_dir=run_dir,
        lives=tuple(lives),
        ledger=tuple(ledger),
        torn=tuple(torn),
        result=read_json(run_dir / "result.json"),
        drill=drill,
        names=names,
    )


def mixed_branches(history: History) -> str | None:
    """Describe in one line how two branches of one run trained beside each other; None if they did not."""
    worlds = sorted(history.of("world"), key=itemgetter("generation"))
    branches = {(line["writer"], int(line["generation"])): line.get("branch") for line in worlds}
    began: dict[str | None, Line] = {}
    for line in worlds:
        began.setdefault(line.get("branch"), line)
    newest = {
        branches[step.writer, step.generation]: (step.step, step.writer.rsplit("/", 2)[0])
        for step in sorted(history.written, key=attrgetter("step"))
        if (step.writer, step.generation) in branches
    }
    for (before, (last, host)), (after, first) in itertools.product(newest.items(), began.items()):
        is_later = began[before]["generation"] <= first["generation"]
        if before != after and is_later and last > int(first["step"]) + 1:  # the last step is provisional
            there, other = newest.get(after, (first["step"], first["host"]))
            names = [f"{'branch ' + name if name else 'the main line'}" for name in (before, after)]
            return (
                f"host {host} has come to step {last} on {names[0]}, and host {other} to step {there} on {names[1]}, "
                f"which began at step {first['step']}: audit each in a folder of its own"
            )
    return None
