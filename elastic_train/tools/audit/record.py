"""The record of a drill, in `RUN_DIR/drill/`, for the audit and for people.

    drill.json       the settings: seed, backend, nodes, schedule, flags; the paces of the bundled job, and when the
                     drill let it run free
    nodes.jsonl      one line when a node starts, when it ends, and for each worker seen on it
    faults.jsonl     one line when a fault is injected, when it is undone, and when the job has recovered
    reference.json   the result of the same job without faults
    leftovers.json   what was still there when every node had ended
    node1-1.log ...  the output of each start of each node
    pace             see task.py

Every line has `time` (Unix seconds).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from elastic_train.runlog.events import JsonLines
from elastic_train.runlog.reader import read_all, read_json, read_value
from elastic_train.storage.atomic_files import write_atomic

FOLDER = "drill"
PACE_FILE = "pace"
PACE_VARIABLE = "ELASTIC_TRAIN_DRILL_PACE"
"""names that file to the workers of the bundled job: the seconds that a sample takes"""


class Record:
    """The writer of one drill's folder. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FOLDER
        self.path.mkdir(parents=True)
        self._settings: dict[str, Any] = {}
        self._nodes = JsonLines(self.path / "nodes.jsonl")
        self._faults = JsonLines(self.path / "faults.jsonl")

    def add_setting(self, **settings: Any) -> None:
        """Add settings to drill.json."""
        self._settings |= settings
        _replace(self.path / "drill.json", self._settings)

    def node(self, what: str, node: str, **fields: Any) -> None:
        """Write a line. `what`: `started`, `worker` (with `member`, its name in the events), `ended` (with `code`)."""
        self._nodes.write({"time": time.time(), "what": what, "node": node, **fields})

    def fault(self, what: str, number: int, **fields: Any) -> None:
        """Write a line. `what`: `injected`, `undone`, `recovered`, `withdrawn`, `skipped`; `number` counts from 0."""
        self._faults.write({"time": time.time(), "what": what, "number": number, **fields})

    def leftovers(self, found: list[str]) -> None:
        _replace(self.path / "leftovers.json", found)

    def close(self) -> None:
        self._nodes.close()
        self._faults.close()


def write_reference(run_dir: Path, found: dict[str, Any]) -> None:
    """Write the result of the undisturbed job, which runs after the drill itself."""
    _replace(run_dir / FOLDER / "reference.json", found)


def set_pace(path: Path, seconds_per_sample: float) -> None:
    """Set the pace of the workers whose PACE_VARIABLE names this file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(str(seconds_per_sample))
    draft.replace(path)


def _replace(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


class Effect(StrEnum):
    """An effect of a fault that the audit allows for or checks."""

    LOSES_STEPS = "loses_steps"
    """the steps after the newest snapshot: everything is killed at once"""
    HOLDS_UP = "holds_up"
    """the target's workers cannot go on, or hardly, while it lasts: all wait for them"""
    DAMAGES = "damages"
    """the snapshot that is its target"""
    ASKS_TO_LEAVE = "asks_to_leave"
    """the target's workers, which must not be lost then"""


UNKNOWN = "unknown"
"""the name of a fault whose `injected` or `skipped` line is missing"""


@dataclass(frozen=True)
class FaultRecord:
    """One fault of a drill, from its lines."""

    number: int
    name: str
    target: str
    injected_at: float | None
    """Unix seconds; None if it never was"""
    step: int
    """committed steps by then"""
    evidence: str
    """the observation that it really fired"""
    limit_seconds: float
    recovered_seconds: float | None
    """from the injection to the next committed step that the fault delayed; None if there was none"""
    undone_at: float | None
    reason: str | None
    """why it was not injected, or why the job did not recover"""
    may_take: tuple[str, ...] = ()
    """the nodes that the job may lose by the fault"""
    effects: frozenset[str] = frozenset()
    """each an Effect"""
    is_withdrawn: bool = False
    """whether an awaited node was taken away before its limit: there was nothing to recover from"""

    @property
    def described(self) -> str:
        return f"fault {self.number} ({self.name} of {self.target})"

    def has_done(self, effect: Effect) -> bool:
        return effect in self.effects and self.injected_at is not None


@dataclass(frozen=True)
class DrillRecord:
    """The contents of a drill's folder."""

    settings: dict[str, Any]
    nodes: list[dict[str, Any]] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    reference: dict[str, Any] | None = None
    leftovers: list[str] | None = None
    missing: tuple[str, ...] = ()
    """the indispensable files that are absent or torn"""

    @property
    def standstill(self) -> float:
        """Seconds that the job may take without a step and without a fault: for a first step, or an evaluation."""
        return float(self.settings.get("standstill") or 0.0)

    @property
    def node_of(self) -> dict[str, str]:
        """Member (`host/local_rank/pid`) -> the drill's name of its node."""
        return {line["member"]: line["node"] for line in self.nodes if line["what"] == "worker"}

    @property
    def damaged(self) -> frozenset[str]:
        """The names of the snapshots that were damaged on purpose."""
        return frozenset(fault.target for fault in self.faults if fault.has_done(Effect.DAMAGES))

    def may_lose_steps(self, since: float, until: float) -> bool:
        """Return whether everything was killed between two times (Unix seconds)."""
        lossy = [fault.injected_at for fault in self.faults if fault.has_done(Effect.LOSES_STEPS)]
        return any(time is not None and since <= time <= until for time in lossy)


def read_drill(run_dir: Path) -> DrillRecord | None:
    """Read the folder of a drill; None if the run was no drill."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return None
    settings = read_json(folder / "drill.json")
    needed = {"drill.json": settings is not None}
    needed |= {name: (folder / name).is_file() for name in ("nodes.jsonl", "faults.jsonl")}
    leftovers = read_value(folder / "leftovers.json")
    return DrillRecord(
        settings=settings or {},
        nodes=read_all(folder / "nodes.jsonl"),
        faults=fault_records(read_all(folder / "faults.jsonl")),
        reference=read_json(folder / "reference.json"),
        leftovers=leftovers if isinstance(leftovers, list) else None,
        missing=tuple(f"{FOLDER}/{name}" for name, is_there in needed.items() if not is_there),
    )


def fault_records(lines: list[dict[str, Any]]) -> list[FaultRecord]:
    """Merge the lines into one record per fault, in the order of their numbers."""
    by_number: dict[int, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_number.setdefault(int(line["number"]), {})[str(line["what"])] = line
    records = []
    for number, found in sorted(by_number.items()):
        injected, skipped = found.get("injected", {}), found.get("skipped", {})
        recovered, undone = found.get("recovered", {}), found.get("undone", {})
        any_line = injected or skipped
        records.append(
            FaultRecord(
                number=number,
                name=str(any_line.get("name", UNKNOWN)),
                target=str(any_line.get("target", "")),
                injected_at=injected.get("injected_at"),
                step=int(injected.get("step", 0)),
                evidence=str(injected.get("evidence", "")),
                limit_seconds=float(injected.get("limit_seconds", 0.0)),
                recovered_seconds=recovered.get("seconds"),
                undone_at=undone.get("time"),
                reason=skipped.get("reason") or recovered.get("reason"),
                may_take=tuple(injected.get("may_take", ())),
                effects=frozenset(injected.get("effects", ())),
                is_withdrawn="withdrawn" in found,
            )
        )
    return records
