"""The checks of an audit: pure functions over a run's history, one per promise of the contract.

Each returns what it looked at and what is wrong, in words with numbers, so that a person can go and look. Whoever has
nothing to look at raises Skip: nothing is passed off as true.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from elastic_train.drills.history import History, Line, World
from elastic_train.drills.lost_time import lost_time
from elastic_train.errors import SnapshotDamaged, SnapshotError

PHASE_TOLERANCE = 0.05
"""seconds: what rounding may take"""
WALL_TOLERANCE = 2.0
"""seconds: two machines' clocks, and the moment between result.json and the last event"""
LOSS_TOLERANCE = 0.05
"""relative: how far the final loss of a `fast` run may be from the undisturbed one's, plus as much in absolute terms"""
JOIN_LIMIT_SECONDS = 300.0
"""the start of Python processes with torch on a loaded machine"""


class Skip(Exception):
    """A check has nothing to look at; the message says what is missing."""


Found = tuple[str, Iterable[str]]
"""what was looked at, and what is wrong"""


# --- the samples ------------------------------------------------------------------------------------------------------


def check_ledger(history: History) -> Found:
    """The contract's law: of each committed step count the lines of its largest generation; every index occurs once per
    epoch, and never twice."""
    if not history.ledger:
        raise Skip("no ledger; the worker's --ledger writes one")
    length, batch = history.length, history.batch
    if length is None or batch is None:
        raise Skip("the events do not tell the length of the data and the global batch")
    by_step: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in history.ledger:
        if line["step"] <= history.last_step:
            by_step[line["step"]][line["generation"]].append(line)
    per_epoch = -(-length // batch)
    findings = [*history.torn]
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for step in range(1, history.last_step + 1):
        if step not in by_step:
            findings.append(f"step {step} was committed and has no line")
            continue
        generation = max(by_step[step])
        lines = by_step[step][generation]
        epoch, within = divmod(step - 1, per_epoch)
        ranks = Counter(line["rank"] for line in lines)
        findings += [
            f"step {step}: rank {rank} wrote {n} lines in generation {generation}" for rank, n in ranks.items() if n > 1
        ]
        if {line["epoch"] for line in lines} != {epoch}:
            findings.append(f"step {step} belongs to epoch {epoch}, its lines say {lines[0]['epoch']}")
        indices = [index for line in lines for index in line["indices"]]
        expected = min(batch, length - within * batch)
        if len(indices) != expected:
            findings.append(f"step {step}, generation {generation}: {len(indices)} samples where {expected} belong")
        used[epoch].update(indices)
    for epoch, counter in sorted(used.items()):
        twice = sorted(index for index, n in counter.items() if n > 1)
        if twice:
            findings.append(f"epoch {epoch}: {_some(twice)} used more than once")
        missing = sorted(set(range(length)) - counter.keys())
        if missing and (epoch + 1) * per_epoch <= history.last_step:
            findings.append(f"epoch {epoch}: {_some(missing)} never used")
        strange = sorted(index for index in counter if not 0 <= index < length)
        if strange:
            findings.append(f"epoch {epoch}: {_some(strange)} of a data set of {length}")
    return f"{history.last_step} steps, {len(used)} epochs of {length} samples", findings


def _some(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:3]))
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"sample{'s' if len(indices) > 1 else ''} {shown}{more}"


# --- the steps --------------------------------------------------------------------------------------------------------


def check_steps(history: History) -> Found:
    """Committed steps never decrease, and none is missing; only a restart from a snapshot may repeat some."""
    if not history.steps:
        raise Skip("no step was committed")
    findings = []
    worlds = {world.generation: world for world in history.worlds}
    by_generation: dict[int, list[int]] = defaultdict(list)
    for step in history.steps:
        by_generation[step.generation].append(step.step)
    for generation, numbers in sorted(by_generation.items()):
        repeated = sorted(number for number, n in Counter(numbers).items() if n > 1)
        if repeated:
            findings.append(f"generation {generation} committed step {repeated[0]} more than once")
        if generation not in worlds:
            findings.append(f"generation {generation} committed steps, but no member says that it stood")
    present = {step.step for step in history.steps}
    gaps = [step for step in range(1, history.last_step + 1) if step not in present]
    if gaps:
        findings.append(f"step {gaps[0]} was never committed, but step {history.last_step} was ({len(gaps)} missing)")
    reached, before = 0, None
    for world in history.worlds:
        if world.step < reached and world.restored_from != "snapshot":
            redone = range(world.step + 1, reached + 1)
            if not _were_in_hand(history, world, before, redone):
                findings.append(
                    f"generation {world.generation} begins at step {world.step}, but step {reached} had been committed"
                )
        numbers = by_generation.get(world.generation, [])
        if numbers and min(numbers) <= world.step:
            findings.append(
                f"generation {world.generation} began at step {world.step} and committed step {min(numbers)}"
            )
        reached, before = max([reached if world.restored_from != "snapshot" else 0, world.step, *numbers]), world
    if history.result is not None and history.is_finished and history.result.get("step") != history.last_step:
        findings.append(f"result.json is of step {history.result.get('step')}, the events reach {history.last_step}")
    return f"steps 1 to {history.last_step} in {len(history.worlds)} generations", findings


def _were_in_hand(history: History, world: World, before: World | None, steps: range) -> bool:
    """Whether only members that are not in the next world had applied these steps: by the contract not committed."""
    if before is None:
        return False
    return all(
        step.writer not in world.members
        for step in history.steps
        if step.generation == before.generation and step.step in steps
    )


# --- the generations --------------------------------------------------------------------------------------------------


def check_generations(history: History) -> Found:
    """Generations form a chain: one membership each, each from the one before or from new processes."""
    if not history.worlds:
        raise Skip("no world ever stood")
    findings = []
    for world in history.worlds:
        if len(world.memberships) > 1:
            groups = " and ".join(f"[{', '.join(members)}]" for members in world.memberships)
            findings.append(f"generation {world.generation} has {len(world.memberships)} memberships: {groups}")
        if len(set(world.members)) < len(world.members):
            findings.append(f"generation {world.generation} has a member twice")
    for before, after in itertools.pairwise(history.worlds):
        name = f"generation {after.generation}"
        if after.time < before.time - WALL_TOLERANCE:
            findings.append(f"{name} stood {before.time - after.time:.1f} s before generation {before.generation}")
        if after.cause in ("peer_lost", "leave"):
            strangers = set(after.members) - set(before.members)
            if strangers and after.generation == before.generation + 1:
                findings.append(f"{name} re-formed in place with {', '.join(sorted(strangers))}, not in the one before")
            gone = set(before.members) - set(after.members)
            if after.generation == before.generation + 1 and gone != after.lost | after.left:
                findings.append(f"{name} names {_names(after.lost | after.left)} as gone, but {_names(gone)} are")
    members = {world.generation: world.members for world in history.worlds}
    findings += [
        f"step {step.step} of generation {step.generation} was written by {step.writer}, which is no member of it"
        for step in history.steps
        if step.writer not in members.get(step.generation, (step.writer,))
    ]
    return f"generations {history.worlds[0].generation} to {history.worlds[-1].generation}", findings


def _names(members: Iterable[str]) -> str:
    return ", ".join(sorted(members)) or "nobody"


# --- incidents --------------------------------------------------------------------------------------------------------


def check_incidents(history: History) -> Found:
    """Every incident was got over within its limit, and cost no committed step that did not have to be lost."""
    result = history.result or {}
    incidents = [entry for entry in result.get("incidents") or [] if isinstance(entry, dict)]
    faults = [fault for fault in history.drill.faults if fault.struck_at is not None] if history.drill else []
    outages = lost_time(history).outages
    if not incidents and not faults and not outages:
        raise Skip("nothing happened")
    findings = []
    peer_timeout = float(history.config.get("peer_timeout") or 10.0)
    limits = {"peer_lost": 3 * peer_timeout + 30, "leave": 30.0, "join": JOIN_LIMIT_SECONDS}
    for outage in outages:
        limit = limits.get(outage.cause)
        if limit is not None and outage.seconds > limit:
            findings.append(
                f"{outage.cause} before generation {outage.generation}: {outage.seconds:.2f} s without a step, "
                f"limit {limit:.0f} s"
            )
    # Who kills everything at once loses what came after the last snapshot; no other harm of a drill does.
    may_lose = history.drill is None or any(fault.name in ("kill-all", "damage") for fault in faults)
    for entry in incidents:
        lost = int(entry.get("committed_steps_lost") or 0)
        if lost and not (entry.get("cause") == "restart" and may_lose):
            findings.append(f"{entry.get('cause')}: {lost} committed steps lost")
    for fault in faults:
        if fault.recovered_seconds is None:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): {fault.reason or 'never got over'}"
            )
        elif fault.recovered_seconds > fault.limit_seconds:
            findings.append(
                f"fault {fault.number} ({fault.name} of {fault.target}): next committed step after "
                f"{fault.recovered_seconds:.2f} s, limit {fault.limit_seconds:.0f} s"
            )
    worst = max((outage.seconds for outage in outages if outage.cause == "peer_lost"), default=None)
    told = "" if worst is None else f"; longest outage by a lost peer {worst:.2f} s"
    return f"{len(incidents)} incidents, {len(faults)} faults, {len(outages)} outages{told}", findings


def check_faults(history: History) -> Found:
    """Every fault of the drill really struck."""
    if history.drill is None:
        raise Skip("not a drill")
    faults = history.drill.faults
    planned = int(history.drill.settings.get("num_faults", len(faults)))
    findings = [
        f"fault {fault.number} ({fault.name}) did not strike: {fault.reason}"
        for fault in faults
        if fault.struck_at is None
    ]
    if len(faults) < planned:
        findings.append(f"only {len(faults)} of {planned} faults were tried")
    struck = Counter(fault.name for fault in faults if fault.struck_at is not None)
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in sorted(struck.items())) or "none", findings


# --- the time ---------------------------------------------------------------------------------------------------------


def check_phases(history: History) -> Found:
    """The phases sum to the wall, and the wall covers everything that the events saw."""
    if history.result is None:
        raise Skip("no result.json; it is written at the end of training")
    phases = dict(history.result.get("goodput") or {})
    wall = float(history.result.get("wall_seconds") or 0.0)
    seconds = {name: float(value) for name, value in phases.items() if name not in ("wall", "ratio")}
    findings = [
        f"phase {name} has {value:.3f} s" for name, value in seconds.items() if value < 0 or not math.isfinite(value)
    ]
    total = sum(seconds.values())
    if abs(total - wall) > PHASE_TOLERANCE:
        findings.append(f"the phases sum to {total:.3f} s, the wall is {wall:.3f} s")
    if history.kept and history.result.get("step") == history.last_step:
        span = history.kept[-1].time - min(float(line["time"]) for line in history.events)
        if wall < span - WALL_TOLERANCE:
            findings.append(f"the wall is {wall:.1f} s, but the events span {span:.1f} s")
    return f"{total:.2f} s in {len(seconds)} phases", findings


# --- the state --------------------------------------------------------------------------------------------------------


def check_end(history: History) -> Found:
    """The job reached its end: result.json is there, and whoever was in the last world says `finished`."""
    if not history.is_finished and history.drill is None:
        raise Skip("the run has not finished")
    findings = []
    if not history.is_finished:
        findings.append(f"nobody finished; the newest committed step is {history.last_step}")
    elif history.result is None:
        findings.append("finished, but there is no result.json")
    if history.worlds and history.is_finished:
        outcomes = {line["writer"]: line.get("outcome") for line in history.of("done")}
        for member in history.worlds[-1].members:
            if outcomes.get(member) not in ("finished", "already_finished"):
                findings.append(f"{member} was in the last world and ended {outcomes.get(member) or 'without a word'}")
    if history.drill is not None:
        findings += _wrong_codes(history)
    return f"step {history.last_step}", findings


def _wrong_codes(history: History) -> list[str]:
    assert history.drill is not None
    found = []
    codes = {line["node"]: line.get("code") for line in history.drill.nodes if line["what"] == "ended"}
    last = set(history.worlds[-1].members) if history.worlds and history.is_finished else set()
    for member, node in history.drill.node_of.items():
        if member in last and codes.get(node, 0) != 0:
            found.append(f"{node} finished, but its torchrun exited with {codes[node]}")
    return found


def check_state(history: History) -> Found:
    """The final weights are those of the undisturbed job, bit for bit in ordered mode; the final snapshot has them."""
    result = history.result
    if result is None:
        raise Skip("no result.json; it is written at the end of training")
    findings, looked_at = [], []
    stored = _hash_of_final_snapshot(history, int(result.get("step") or 0))
    if stored is not None:
        looked_at.append("the final snapshot")
        if stored != result.get("state_sha256"):
            findings.append(
                f"the final snapshot has {stored[:16]}, result.json says {str(result.get('state_sha256'))[:16]}"
            )
    reference = history.drill.reference if history.drill else None
    if reference is not None:
        looked_at.append("an undisturbed run")
        findings += list(_differences(result, reference))
    if not looked_at:
        raise Skip("neither a snapshot of the last step nor an undisturbed run to compare with")
    return f"{str(result.get('state_sha256'))[:16]}, compared with {' and '.join(looked_at)}", findings


def _differences(result: Line, reference: Line) -> Iterable[str]:
    if result.get("step") != reference.get("step"):
        yield f"step {result.get('step')}, undisturbed {reference.get('step')}"
        return
    if dict(result.get("config") or {}).get("reduction") == "ordered":
        if result.get("state_sha256") != reference.get("state_sha256"):
            ours, theirs = str(result.get("state_sha256"))[:16], str(reference.get("state_sha256"))[:16]
            yield f"state_sha256 {ours}, undisturbed {theirs}"
        return
    loss, undisturbed = float(result.get("train_loss") or 0.0), float(reference.get("train_loss") or 0.0)
    if not math.isclose(loss, undisturbed, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
        yield f"train_loss {loss:.4f}, undisturbed {undisturbed:.4f}"


def _hash_of_final_snapshot(history: History, step: int) -> str | None:
    from elastic_train.snapshot import deserialize_state, read_state_bytes

    for info in _snapshots(history)[0]:
        if info.step == step:
            try:
                state = deserialize_state(read_state_bytes(info), source=str(info.path))
            except (SnapshotDamaged, SnapshotError):
                continue  # check_snapshots says so
            from elastic_train.state import state_sha256

            return state_sha256(state["model"])
    return None


def check_snapshots(history: History) -> Found:
    """No torn snapshot lies there, and none was ever restored."""
    from elastic_train.snapshot import verify

    infos, problems = _snapshots(history)
    planted = {str(fault.target) for fault in (history.drill.faults if history.drill else []) if fault.name == "damage"}
    whole_steps, damaged_steps = set(), set()
    for info in infos:
        try:
            verify(info)
            whole_steps.add(info.step)
        except SnapshotDamaged as error:
            damaged_steps.add(info.step)
            problems.append(str(error))
    findings = [text for text in problems if not any(name in text for name in planted)]
    findings += [
        f"{line['writer']} restored the snapshot of step {line['restored_step']}, which is damaged"
        for line in history.of("restore")
        if line["source"] == "snapshot" and line["restored_step"] in damaged_steps - whole_steps
    ]
    if not infos and not problems:
        raise Skip("no snapshot in the run directory")
    on_purpose = f", {len(planted)} damaged on purpose" if planted else ""
    return f"{len(infos)} snapshots{on_purpose}", findings


def _snapshots(history: History) -> tuple[list[Any], list[str]]:
    """(those with a readable manifest and the right size, what is wrong with the others)."""
    from elastic_train.snapshot import find_snapshots

    problems: list[str] = []
    given = history.config.get("snapshot_dir")
    directory = Path(given) if isinstance(given, str) else history.run_dir / "snapshots"
    try:
        return find_snapshots(directory, warn=problems.append), problems
    except SnapshotError as error:
        return [], [str(error)]


# --- what is left -----------------------------------------------------------------------------------------------------


def check_leftovers(history: History) -> Found:
    """Nothing is left of a run that has ended: no process, no temporary file, no handoff, no port."""
    if not history.is_finished:
        raise Skip("the run has not finished")
    from elastic_train.status import process_is_alive

    findings = [f"{name} is a temporary file" for name in history.names if _is_temporary(name)]
    for line in history.of("start"):
        if process_is_alive(str(line["host"]), int(line["pid"]), float(line["time"])):
            findings.append(f"process {line['pid']}, a worker of this run, still runs")
    findings += [f"{path} is a handoff that nobody will take" for path in _handoffs(history)]
    if history.drill is not None and history.drill.leftovers is not None:
        findings += history.drill.leftovers
    return "processes and shared memory of this machine, temporary files", findings


def _is_temporary(name: str) -> bool:
    last = Path(name).name
    return last.startswith((".tmp-", ".owner-")) or last.endswith(".tmp")


def _handoffs(history: History) -> list[Path]:
    from elastic_train.run_directory import RunDirectory
    from elastic_train.saving import handoff_directory

    if ".directory-id" not in history.names:  # asking for it would make one
        return []
    path = handoff_directory(RunDirectory(history.run_dir))
    return [path] if path.exists() else []


CHECKS: tuple[tuple[str, str, Callable[[History], Found]], ...] = (
    ("end", "the job reached its end", check_end),
    ("faults", "every fault really struck", check_faults),
    ("ledger", "every sample exactly once per epoch", check_ledger),
    ("steps", "committed steps never decrease", check_steps),
    ("generations", "one membership per generation, in a chain", check_generations),
    ("incidents", "every incident within its limit, no committed step lost", check_incidents),
    ("phases", "the phases sum to the wall", check_phases),
    ("state", "the weights are those of the undisturbed job", check_state),
    ("snapshots", "snapshots are whole, none that is torn was restored", check_snapshots),
    ("leftovers", "nothing is left behind", check_leftovers),
)
