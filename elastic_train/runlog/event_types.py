"""The events of a run, and the fields of each. `EventLog.write` adds the fields that every line has.

The table in observe/README.md says which worker writes an event, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

LEFT_OUT: Any = object()
"""the value of a field that the line does not have; None is written as null"""
Cause = Literal["start", "join", "leave", "peer_lost", "states_differ"]
RunOutcome = Literal["finished", "already_finished", "stopped", "failed"]
Source = Literal["scratch", "snapshot", "peer"]
JsonObject = dict[str, Any]


class Event:
    """One line of the log; its subclasses are the types. `name` is the value of the key `event`."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    name: ClassVar[str] = "start"
    config: JsonObject
    versions: dict[str, str]
    device: str
    gpu: str = LEFT_OUT
    task: JsonObject
    max_nodes: int
    started_ticks: int | None
    """of the kernel, when this process started"""
    pid_namespace: str
    was: str = LEFT_OUT
    """id of the member that this worker was, where it comes back"""
    is_anew: bool = LEFT_OUT
    """--fresh has just begun the run anew"""
    seconds: dict[str, float]
    """of its start, by part"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStands(Event):
    name: ClassVar[str] = "world"
    cause: Cause
    members: list[str]
    lost_members: list[str]
    left_members: list[str]
    joined_members: list[str]
    seconds: dict[str, float]
    """by phase"""
    backend: str
    branch: str | None
    """id; None on the main line"""
    incidents: list[JsonObject]
    """new ones, as in result.json"""
    bill: JsonObject = LEFT_OUT
    """rank 0 alone writes it, and `best`"""
    best: JsonObject | None = LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored(Event):
    name: ClassVar[str] = "restore"
    source: Source
    restored_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Event):
    name: ClassVar[str] = "step"
    step: int
    """of the commit, as `generation`: the log itself may be further by now"""
    generation: int | None
    epoch: int
    loss: float | None
    """mean over the samples of the step; None where none was given"""
    samples_done: int
    """of the epoch"""
    late_seconds: float = LEFT_OUT
    """after the commit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    name: ClassVar[str] = "evaluation"
    epoch: int
    accuracy: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRated(Event):
    name: ClassVar[str] = "best"
    best: JsonObject | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten(Event):
    name: ClassVar[str] = "snapshot"
    path: str
    snapshot_step: int
    bytes: int
    stall_seconds: float
    """in which training stood still"""
    total_seconds: float
    """until it was durable"""
    bill: JsonObject | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDue(Event):
    name: ClassVar[str] = "snapshot_due"
    every: int | None
    """steps; None where it is a time"""
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChanged(Event):
    name: ClassVar[str] = "snapshot_interval"
    seconds: float
    cost_seconds: float
    """of training, for one snapshot"""
    failures: int
    failure_seconds: float
    """from one to the next, as expected"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(Event):
    name: ClassVar[str] = "peer_lost"
    error: str
    reason: str | None
    """why the world ended, where a watcher ended it"""
    lost_members: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesDiffered(Event):
    name: ClassVar[str] = "states_differ"
    wrong: list[str]
    """members"""
    has_majority: bool
    is_mended: bool = LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRepaired(Event):
    name: ClassVar[str] = "ledger"
    steps: list[int]
    """whose lines are written once more"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesMissing(Event):
    name: ClassVar[str] = "unwritten"
    file: str
    lines: dict[str, list[list[int]]]
    """event, or `samples` of a ledger -> generation, first and last step of those that are missing"""
    torn: int
    """how many are cut off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedBySignal(Event):
    name: ClassVar[str] = "signal"
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeChanged(Event):
    name: ClassVar[str] = "notice"
    state: Literal["given", "withdrawn", "left"]
    seconds_left: float | None = LEFT_OUT
    """until the deadline, of a worker that has left"""
    source: str
    reason: str
    deadline: float | None
    """Unix seconds"""
    certain: bool
    save_seconds: float = LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    name: ClassVar[str] = "warning"
    message: str
    was: str = LEFT_OUT
    """id of the member that this worker was, and that the others have left out"""
    void: list[dict[str, int]] = LEFT_OUT
    """generation and step of its newest `step` lines"""
    discarded: JsonObject = LEFT_OUT
    """the `branch` that stops here, its `first` and `last` step, and `what` that is in words"""
    branch: str = LEFT_OUT
    """id of the one that begins here"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Event):
    name: ClassVar[str] = "done"
    outcome: RunOutcome
    error: str = LEFT_OUT
    unsaved: bool = LEFT_OUT
    """the last state, which this worker was to save"""
