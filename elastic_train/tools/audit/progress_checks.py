"""Checks of what training did: every sample once, every step in its order, every generation with one membership."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastic_train.tools.audit.finding import WALL_TOLERANCE, Found, Skip
from elastic_train.tools.audit.history import MOST_LATE, History, PastWorld
from elastic_train.tools.audit.lives import Clock, LedgerLine
from elastic_train.tools.audit.unwritten import NOT_WRITTEN
from elastic_train.training.planned_steps import steps_per_epoch
from elastic_train.wording import count

DRILL_TOLERANCE = 0.1
"""seconds: the nodes of a drill share one clock"""
ELSEWHERE = "stand in files that are not here"


def _steps_elsewhere(history: History, writers: Callable[[PastWorld], Sequence[str]]) -> set[int]:
    """The steps of worlds with a writer whose files are not here: its disk may be gone. None in a drill."""
    elsewhere = set(history.elsewhere if history.drill is None else ())
    if elsewhere:
        elsewhere.difference_update(line.writer for line in history.ledger)
    ends = [*(world.step for world in history.worlds[1:]), history.last_step]
    found = set[int]()
    for world, end in zip(history.worlds, ends, strict=False):  # without worlds there still is one end
        if not elsewhere.isdisjoint(writers(world)):
            found.update(range(world.step + 1, end + 1))
    return found


# --- the samples ------------------------------------------------------------------------------------------------------


def check_ledger(history: History) -> Found:
    """The contract's law: every index occurs exactly once per epoch. Of each committed step the lines of its largest
    generation count. Steps that were committed without --ledger are not checked."""
    if not history.ledger:
        has_asked = any((start.get("config") or {}).get("ledger") for start in history.starts)
        if has_asked and any(step.generation not in history.without_ledger for step in history.kept):
            return "no ledger", ["steps were committed with --ledger, and nothing is in ledger/"]
        raise Skip("no ledger; the worker's --ledger writes one")
    length, batch = history.length, history.batch
    if length is None or batch is None:
        raise Skip("the events do not tell the length of the data and the global batch")
    by_step: dict[int, list[LedgerLine]] = defaultdict(list)
    for line in history.ledger:
        by_step[line.step].append(line)
    per_epoch = steps_per_epoch(length, batch)
    findings = history.unwritten.unexplained([line for line in history.torn if line.startswith("ledger/")])
    used, num_epochs, of_epochs = _EpochUse(-1, 0), 0, list[str]()
    unasked = {step.step for step in history.kept if step.generation in history.without_ledger}
    away = _steps_elsewhere(history, lambda world: world.workers)
    skipped, unwritten = unasked | away, set[int]()
    workers: dict[int, Sequence[str]] = {int(line["generation"]): () for line in history.of("ledger")}  # may not stand
    workers |= {world.generation: world.workers for world in history.worlds}
    committed_in = {step.step: step.generation for step in history.kept}

    def is_whole(epoch: int) -> bool:
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        missing = skipped | unwritten
        return history.begins_after < steps[0] and steps[-1] <= history.last_step and missing.isdisjoint(steps)

    for step in range(history.begins_after + 1, history.last_step + 1):
        if step in skipped:
            continue
        generation, lines, has_lost = _lines_that_count(history, step, by_step.get(step, ()))
        unwritten |= {step} if has_lost else set()
        if not lines:
            findings += [f"step {step} was committed and has no line"] if not has_lost else []
            continue
        epoch, within = divmod(step - 1, per_epoch)
        findings += _wrong_ranks(step, generation, lines, workers.get(generation, ()), committed_in.get(step, 0))
        if generation not in workers and history.unwritten.newest("world", generation) is None:
            findings.append(f"step {step} has lines of generation {generation}, and no member says that it stood")
        if {line.epoch for line in lines} != {epoch}:
            findings.append(f"step {step} belongs to epoch {epoch}, its lines say {lines[0].epoch}")
        num_samples, expected = sum(len(line.indices) for line in lines), min(batch, length - within * batch)
        if num_samples > expected or (num_samples < expected and not has_lost):
            findings.append(f"step {step}, generation {generation}: {num_samples} samples where {expected} belong")
        elif not has_lost and (silent := len(workers.get(generation, ())) - len({line.rank for line in lines})) > 0:
            findings.append(f"step {step}, generation {generation}: no line of {count(silent, 'worker')}")
        if used.epoch != epoch:
            of_epochs += used.findings(is_whole=is_whole(used.epoch))
            used, num_epochs = _EpochUse(epoch, length), num_epochs + 1
        used.add([line.indices for line in lines])
    findings += [*of_epochs, *used.findings(is_whole=is_whole(used.epoch))]
    without = f"; {count(len(unasked), 'step')} more without --ledger" if unasked else ""
    without += f"; {count(len(away - unasked), 'step')} more {ELSEWHERE}" if away - unasked else ""
    without += f"; {count(len(unwritten), 'step')} more {NOT_WRITTEN}" if unwritten else ""
    checked = count(history.last_step - history.begins_after - len(skipped) - len(unwritten), "step")
    return f"{checked}, {count(num_epochs, 'epoch')} of {count(length, 'sample')}{without}{history.of_before}", findings


def _lines_that_count(
    history: History, step: int, lines: Sequence[LedgerLine]
) -> tuple[int, Sequence[LedgerLine], bool]:
    """Return (the largest generation of a step, its lines, whether each worker without a line reported that it could
    not write it)."""
    newest = max((line.generation for line in lines), default=0)
    lost = history.unwritten.writers("samples", step, newest)
    generation = max([newest, *lost])
    lines = [line for line in lines if line.generation == generation]
    if generation not in lost:
        return generation, lines, False
    told = lost[generation].union(line.writer for line in lines)
    workers = {member for world in history.worlds if world.generation == generation for member in world.workers}
    return generation, lines, bool(workers) and workers <= told


def _wrong_ranks(
    step: int, generation: int, lines: Sequence[LedgerLine], workers: Sequence[str], committed_in: int
) -> Iterator[str]:
    """Yield which lines of a step are not those of the workers that committed it, each by its rank. Workers that begin
    a step again write their lines again: lines of an earlier generation than the commit's are of an attempt."""
    if generation < committed_in:
        yield f"step {step} was committed in generation {committed_in}, and its newest lines are of {generation}"
    for rank, n in Counter(line.rank for line in lines).items():
        if n > 1:
            yield f"step {step}: rank {rank} wrote {n} lines in generation {generation}"
    for line in lines:
        if workers and line.writer not in workers[line.rank : line.rank + 1]:
            yield f"step {step}: {line.writer} wrote a line as rank {line.rank} of generation {generation}; it was not"


class _EpochUse:
    """The samples that an epoch has used, in two bytes per sample however many workers wrote them down."""

    def __init__(self, epoch: int, length: int) -> None:
        self.epoch, self._length = epoch, length
        self._once, self._twice = np.zeros(length, bool), np.zeros(length, bool)
        self._strange: Counter[int] = Counter()

    def add(self, of_ranks: Iterable[Sequence[int]]) -> None:
        """Add the indices of one step, one sequence per rank."""
        parts = []
        for indices in of_ranks:
            if not isinstance(indices, array):  # some overflow
                numbers = [index for index in indices if 0 <= index < self._length]
                self._strange += Counter(indices) - Counter(numbers)
                indices = array("q", numbers)
            parts.append(np.asarray(indices))
        found = np.concatenate(parts)
        is_inside = (found >= 0) & (found < self._length)
        self._strange.update(found[~is_inside].tolist())
        unique, times = np.unique(found[is_inside], return_counts=True)
        self._twice[unique[(times > 1) | self._once[unique]]] = True
        self._once[unique] = True

    def findings(self, *, is_whole: bool) -> Iterator[str]:
        """Yield what is wrong. `is_whole`: all steps of the epoch are here, so that an unused sample is a finding."""
        twice = [*np.flatnonzero(self._twice).tolist(), *(index for index, n in self._strange.items() if n > 1)]
        if twice:
            yield f"epoch {self.epoch}: {_some(sorted(twice))} used more than once"
        missing = np.flatnonzero(~self._once)
        if len(missing) and is_whole:
            yield f"epoch {self.epoch}: {_some(missing)} never used"
        if self._strange:
            yield f"epoch {self.epoch}: {_some(sorted(self._strange))} of a data set of {self._length}"


def _some(indices: Sequence[int] | npt.NDArray[np.intp]) -> str:
    shown = ", ".join(map(str, indices[:3]))
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"sample{'s' if len(indices) > 1 else ''} {shown}{more}"


# --- the steps --------------------------------------------------------------------------------------------------------


def check_steps(history: History) -> Found:
    """Committed steps never decrease, and none is missing; only a restart from the newest snapshot may repeat some."""
    findings = history.unwritten.unexplained([line for line in history.torn if line.startswith("events/")])
    if not history.steps and not findings:
        raise Skip("no step was committed")
    worlds = {world.generation: world for world in history.worlds}
    by_generation = {generation: [step.step for step in steps] for generation, steps in history.steps_of.items()}
    for generation, numbers in sorted(by_generation.items()):
        repeated = sorted(number for number, n in Counter(numbers).items() if n > 1)
        if repeated:
            findings.append(f"generation {generation} committed step {repeated[0]} more than once")
        if generation not in worlds and history.unwritten.newest("world", generation) is None:
            findings.append(f"generation {generation} committed steps, but no member says that it stood")
    present = {step.step for step in history.steps}
    first, newest = history.begins_after + 1, max((history.last_step, *present))  # also steps that a restart undid
    away = _steps_elsewhere(history, lambda world: world.members[:1]) - present  # rank 0 writes them
    absent = [step for step in range(first, newest + 1) if step not in present and step not in away]
    gaps = [step for step in absent if not history.unwritten.writers("step", step, _newest_with(history, step))]
    if gaps:
        findings.append(f"step {gaps[0]} was never committed, and the run came to step {newest} ({len(gaps)} missing)")
    findings += [*_of_other_epochs(history), *_gone_back(history)]
    lines = history.of("snapshot")
    saved = sorted({(int(line["generation"]), int(line["snapshot_step"]), Path(line["path"]).name) for line in lines})
    reached, before = 0, None
    for world in history.worlds:
        has_restarted = _may_have_restarted(history, world, before)
        if world.step < reached and not has_restarted and not _was_in_hand(history, world, before, reached):
            findings.append(
                f"generation {world.generation} begins at step {world.step}, but step {reached} had been committed"
            )
        findings += [
            f"generation {world.generation} begins at step {world.step}, and {writer} restored step {restored}"
            for writer, (_, restored) in world.restores.items()
            if restored != world.step
        ]
        if (overlooked := _overlooked(history, world, saved)) is not None:
            findings.append(
                f"generation {world.generation} begins at step {world.step}, from {world.restored_from}, "
                f"but the snapshot of step {overlooked} had been saved"
            )
        numbers = by_generation.get(world.generation, [])
        if numbers and min(numbers) <= world.step:
            findings.append(
                f"generation {world.generation} began at step {world.step} and committed step {min(numbers)}"
            )
        reached, before = max([0 if has_restarted else reached, world.step, *numbers]), world
    result = history.final_result
    if result is not None and result.get("step") != history.last_step:
        findings.append(f"result.json is of step {result.get('step')}, the events reach {history.last_step}")
    generations = count(len(history.worlds), "generation")
    told = f"; {len(away)} of them {ELSEWHERE}" if away else ""
    told += f"; {len(absent) - len(gaps)} of them {NOT_WRITTEN}" if len(absent) > len(gaps) else ""
    return f"steps {first} to {history.last_step} in {generations}{told}{history.of_before}", findings


def _of_other_epochs(history: History) -> Iterator[str]:
    """Yield steps of another epoch than the data and the global batch make them."""
    if not history.length or not history.batch:
        return
    for step in history.kept:
        epoch = (step.step - 1) // steps_per_epoch(history.length, history.batch)
        if step.epoch != epoch:
            yield f"step {step.step} belongs to epoch {epoch}, its line says {step.epoch}"


def _gone_back(history: History) -> Iterator[str]:
    """Yield workers that by their own files committed the steps of a generation in another order, or began the next
    world with fewer steps than they had committed, although no state was given to them."""
    for life in history.lives:
        for one, later in itertools.pairwise(life.steps):
            if later.generation == one.generation and later.step < one.step:
                yield f"{life.member} committed step {later.step} after step {one.step}, in generation {one.generation}"
        given = {line["generation"] for line in life.lines if line["event"] == "restore"}
        for line, world in itertools.pairwise(life.lines):
            if world["event"] == "world" and world["step"] < line["step"] and world["generation"] not in given:
                began = f"generation {world['generation']} at step {world['step']}"
                yield f"{life.member} had committed step {line['step']}, and began {began}"


def _newest_with(history: History, step: int) -> int:
    """The newest generation that may have committed a step; 0 if the step was undone."""
    began = (world.generation for world in history.worlds if world.step < step <= history.last_step)
    return max(began, default=0)


def _may_have_restarted(history: History, world: PastWorld, before: PastWorld | None) -> bool:
    """Return whether a world is one of new processes, which may lose the steps after the last snapshot. In a drill they
    may only if everything was killed since the world before."""
    since = before.time if before is not None else 0.0
    killed = history.drill is None or history.drill.may_lose_steps(since, world.time)
    return killed and world.restored_from in ("snapshot", "scratch")


def _was_in_hand(history: History, world: PastWorld, before: PastWorld | None, reached: int) -> bool:
    """Return whether only members missing in the next world had applied the newest step: by contract not committed.

    There is at most one such step: the other members must apply it before they begin the next. Before a restart, a
    member that ended without failing had saved what it had applied.
    """
    if before is None or reached - world.step > 1:
        return False
    if world.cause == "start":
        return not any(
            line["generation"] == before.generation and line["step"] >= reached and line.get("outcome") != "failed"
            for line in history.of("done")
        )
    return all(
        step.writer not in world.members for step in history.steps_of.get(before.generation, ()) if step.step == reached
    )


def _overlooked(history: History, world: PastWorld, saved: list[tuple[int, int, str]]) -> int | None:
    """The step of the newest snapshot if a world of new processes should have begun with it; else None. `saved` has the
    generation, step and name of each snapshot, in order.

    Outside of a drill a world may begin with an older snapshot: the newest may be lost with the disk of its node. A
    snapshot that --keep-snapshots had pruned does not count, even if the newer ones were damaged later.
    """
    if world.restored_from not in ("snapshot", "scratch"):
        return None
    damaged = history.drill.damaged if history.drill is not None else frozenset()
    earlier = bisect.bisect_left(saved, (world.generation, 0, ""))
    kept = saved[max(0, earlier - int(history.config.get("keep_snapshots") or 3)) : earlier]
    newest = max((step for _, step, name in kept if name not in damaged), default=0)
    is_ours = history.drill is not None or world.restored_from == "scratch"
    return newest if newest > world.step and is_ours else None


# --- the generations --------------------------------------------------------------------------------------------------


def check_generations(history: History) -> Found:
    """Generations form a chain: each has one membership, and comes from the one before or from new processes."""
    if not history.worlds:
        raise Skip("no world ever stood")
    findings = []
    for world in history.worlds:
        name = f"generation {world.generation}"
        if len(world.memberships) > 1:
            groups = " and ".join(f"[{', '.join(members)}]" for members in world.memberships)
            findings.append(f"{name} has {len(world.memberships)} memberships: {groups}")
        if len(world.steps) > 1:
            findings.append(f"{name} began at different steps: {' and '.join(map(str, world.steps))}")
        if len(set(world.members)) < len(world.members):
            findings.append(f"{name} has a member twice")
        if silent := _silent(history, world):
            findings.append(f"{name} committed steps, and {_names(silent)} never stood in it")
    for before, after in itertools.pairwise(history.worlds):
        name = f"generation {after.generation}"
        if (early := _seconds_before(after, before)) > WALL_TOLERANCE:
            findings.append(f"{name} stood {early:.1f} s before generation {before.generation}")
        if after.cause != "start":
            strangers = set(after.members) - set(before.members) - after.joined
            if strangers and after.generation == before.generation + 1:
                findings.append(f"{name} re-formed in place with {', '.join(sorted(strangers))}, not in the one before")
            gone = set(before.members) - set(after.members)
            if after.generation == before.generation + 1 and gone != after.lost | after.left:
                findings.append(f"{name} names {_names(after.lost | after.left)} as gone, but {_names(gone)} are")
    findings += _at_the_same_time(history)
    members = {world.generation: world.members for world in history.worlds}
    taken = {
        (member, world.step - n) for world in history.worlds for member in world.restores for n in range(MOST_LATE)
    }
    findings += [
        f"step {step.step} of generation {step.generation} was written by {step.writer}, which is no member of it"
        for step in history.steps
        if step.writer not in members.get(step.generation, (step.writer,)) and (step.writer, step.step) not in taken
    ]
    told = f"generations {history.worlds[0].generation} to {history.worlds[-1].generation}"
    if (beginning := _by_no_clock(history)) is not None:
        told += f"; not checked: whether one before {beginning} trained on beside it, for no clock tells of both"
    return told, findings


def _silent(history: History, world: PastWorld) -> set[str]:
    """The workers without whom a generation committed steps: they are here, and say nothing of it. Each writes that it
    stands before the first step, which needs all of them."""
    if world.generation not in history.steps_of:
        return set()
    unwritten = history.unwritten.writers("world", world.step).get(world.generation, ())
    return set(world.workers).difference(world.stood_by, unwritten, history.elsewhere)


def _seconds_before(after: PastWorld, before: PastWorld) -> float:
    """Seconds by which `after` stood earlier than `before`, by a clock of both; -inf if they share none."""
    both = before.stood.keys() & after.stood.keys()
    return max((before.stood[clock] - after.stood[clock] for clock in both), default=-math.inf)


def _at_the_same_time(history: History) -> list[str]:
    """Describe the generations that trained on after a later one had begun, by the same clock. Each may have one late
    step: a worker that was frozen or cut off within it writes it down before it learns that it was left out."""
    tolerance = WALL_TOLERANCE if history.drill is None else DRILL_TOLERANCE
    later_began: dict[Clock, float] = {}
    found = []
    for generation, steps in sorted(history.steps_of.items(), reverse=True):
        late = [step for step in steps if step.time > later_began.get(step.clock, math.inf) + tolerance]
        if len(late) > 1:
            found.append(
                f"generation {generation} committed {len(late)} steps more, up to {late[-1].step}, when a later one "
                f"trained"
            )
        for step in steps:
            later_began[step.clock] = min(later_began.get(step.clock, step.time), step.time)
    return found[::-1]


def _by_no_clock(history: History) -> int | None:
    """The first generation of new processes that shares no clock with those before it; else None. The files do not show
    whether those had ended by then. (For a world that re-formed in place, its step shows it.)"""
    earlier = set[Clock]()
    for world in history.worlds:
        own = {step.clock for step in history.steps_of.get(world.generation, ())}
        if earlier and own and world.restored_from in ("snapshot", "scratch") and earlier.isdisjoint(own):
            return world.generation
        earlier |= own
    return None


def _names(members: Iterable[str]) -> str:
    return ", ".join(sorted(members)) or "nobody"
