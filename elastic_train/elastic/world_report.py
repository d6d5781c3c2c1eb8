"""How a world begins, in the run's events, its incidents and the lines for the user."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from elastic_train.branches import Branch
from elastic_train.config import Config
from elastic_train.elastic.loading import shown
from elastic_train.elastic.membership import Change
from elastic_train.elastic.quarantined import lasting, run_seconds
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.worker import Worker
from elastic_train.protocol.quarantine import Deaths
from elastic_train.rules import common_backend
from elastic_train.runlog.event_types import LEFT_OUT, Cause, PeerLost, StateRestored, WorldStands
from elastic_train.training.state import TrainState
from elastic_train.wording import count, workers_go_on
from elastic_train.world import Member, World

PHASES = ("detect", "abort", "meet", "init", "sync")
"""phases of a recovery, as events and incidents name them"""


@dataclass(frozen=True)
class Interruption:
    """Why the previous world ended, and how long it took until the agreement on the next one began."""

    cause: Cause
    detect_seconds: float = 0.0
    """from the beginning of the step in hand, or of the world, to the error"""
    abort_seconds: float = 0.0
    """from the error until it was judged and the process group was gone"""
    failure: str | None = None
    """what broke the world, where it did not end by a vote"""


class WorldReport:
    """Reports each world of one worker once it stands."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._incident: dict[str, Any] | None = None
        """what interrupted the run before the present world"""
        self._deaths = Deaths() if worker.config.quarantine == "on" else None
        """deaths of hosts, where --quarantine counts them"""
        self.interrupted: Mapping[str, Any] = {}
        """what has interrupted the run since the last world that stood, for JSON: names of members that are `lost`,
        have `left` or `joined`, `dead_hosts`, `cause`, `seconds`. A worker that receives another member's state gets
        this too, as the state does not contain it yet"""
        self._first_begun: int | None = None
        """generation of the first world that has begun since the last one that stood"""
        self._first: Member | None = None
        """rank 0 of the newest world that has begun"""
        self._lost_first: tuple[str, int] | None = None
        """name of the rank 0 that this world has lost of the one before, and the committed steps then"""

    def lost(self, failure: str, change: Change) -> None:
        """Report that the previous world was broken by `failure`, and which members the agreement counts as lost."""
        names = [member.name for member in change.lost]
        self._worker.reporter.events.write(PeerLost(error=failure, reason=change.reason, lost_members=names))

    def begins(self, world: World, change: Change, interruption: Interruption) -> None:
        """Note how `world` came about, before its members make its process group. Called once for each world, before
        it `stands`; it may break before that."""
        if self._first_begun is None:
            self._first_begun = world.generation
        self._note_lost_first(world, change)
        hosts: list[str] = []
        if self._deaths is not None:
            hosts = self._deaths.note(change.lost, [one for one in world.members if one not in change.joined])
        of_change = {"lost": change.lost, "left": change.left, "joined": change.joined}
        found = {"dead_hosts": hosts, **{how: [member.name for member in some] for how, some in of_change.items()}}
        took = interruption.detect_seconds, interruption.abort_seconds, change.seconds_meet
        seconds = dict(zip(PHASES, took, strict=False))
        if self.interrupted.get("cause", "start") != "start":  # a start has interrupted nothing
            seconds = {name: self.interrupted["seconds"][name] + value for name, value in seconds.items()}
        self.interrupted = {
            **{name: [*self.interrupted.get(name, ()), *some] for name, some in found.items()},
            "cause": interruption.cause,
            "seconds": seconds,
        }

    def _note_lost_first(self, world: World, change: Change) -> None:
        """Warn where rank 0 was lost twice within a step. It is no proof: how a process ended only its node can see."""
        step, first, before = self._worker.state.step, self._first, self._lost_first
        self._first, self._lost_first = world.members[0], None
        lost = {one.uid: one.node for one in change.lost}
        if first is None or first.uid not in lost or {*lost.values()} != {first.node}:
            return
        self._lost_first = first.name, step
        if world.rank == 0 and before is not None and step - before[1] <= 1:
            self._worker.reporter.warn(
                f"rank 0 was lost twice within a step: {before[0]} after step {before[1]}, {first.name} after step "
                f"{step}. If nobody killed them (their output then ends in `terminate called`, or SIGABRT), it is the "
                "code that is trained, and the next one follows: a collective that rank 0 alone enters, as in "
                "`if rank == 0: all_reduce(...)`. Every rank must enter it"
            )

    def stands(
        self,
        world: World,
        branch: Branch | None,
        change: Change,
        interruption: Interruption,
        restored: Restored | None,
        init_seconds: float,
        sync_seconds: float,
    ) -> None:
        """Report that the members hold one state. From now on events and lines are of this world; the first ones tell
        how it came about.

        Args:
            change: from the previous world.
            restored: where this worker got its state; None where it had one.
            init_seconds: from the agreement until the process group stood.
            sync_seconds: from then until all had one state.
        """
        reporter, state = self._worker.reporter, self._worker.state
        took = interruption.detect_seconds, interruption.abort_seconds, change.seconds_meet, init_seconds, sync_seconds
        seconds = dict(zip(PHASES, took, strict=True))
        state.clock.count_nodes(world.num_nodes)
        reporter.events.step = state.step
        reporter.enter(world, state)
        backend = common_backend(world.workers)
        lost = [member.name for member in change.lost]
        left = [member.name for member in change.left]
        joined = [member.name for member in change.joined]
        self._note_incident(world, interruption, restored, seconds)
        reporter.events.write(
            WorldStands(
                cause=_cause_of(lost, left, interruption.cause),
                members=[member.name for member in world.members],
                lost_members=lost,
                left_members=left,
                joined_members=joined,
                seconds=seconds,
                backend=backend,
                branch=None if branch is None else branch.id,
                incidents=self._new_incidents(),
                # A newcomer may get the run's state later than its rank.
                bill=reporter.bill(state) if world.rank == 0 else LEFT_OUT,
                best=state.ratings.best_as_json() if world.rank == 0 else LEFT_OUT,
            )
        )
        if self._deaths is not None:
            self._report_quarantines(world)
        if restored is not None:
            reporter.events.write(StateRestored(source=restored.source, restored_step=restored.step))
            reporter.report(describe_start(self._worker, world, backend, restored))
        else:
            reporter.report(describe_change(state, world, change, seconds))
        reporter.report_for_node(
            f"in world generation={world.generation} as rank {world.rank} of {world.world_size}; "
            f"rank 0 on {world.members[0].host} reports"
        )

    def _note_incident(
        self, world: World, interruption: Interruption, restored: Restored | None, seconds: dict[str, float]
    ) -> None:
        state = self._worker.state
        has_joined = interruption.cause == "start" and restored is not None and restored.source == "peer"
        interrupted, self.interrupted = self.interrupted, {}
        self._incident = None
        if interruption.cause != "start" or has_joined:
            self._incident = _incident_of(interrupted, seconds, state, world)
            state.incidents.append(self._incident)

    def _new_incidents(self) -> list[dict[str, Any]]:
        """Return the incidents since the last world that stood, also those of a restart whose first world broke."""
        first, self._first_begun = self._first_begun, None
        known = self._worker.state.incidents
        return [one for one in known if first is not None and one.get("generation", -1) >= first]

    def _report_quarantines(self, world: World) -> None:
        self._worker.reporter.report_quarantines(lasting(self._worker.state, world, time.time()))

    def stands_by(self, world: World) -> None:
        """Report that this worker is a spare of the world."""
        self._worker.reporter.enter(world, self._worker.state)
        by = "--virtual-ranks" if self._worker.config.reduction == "ordered" else "--global-batch-size"
        self._worker.reporter.warn(
            f"this worker is a spare: a step has work for {world.world_size} workers ({by}); "
            "it steps in when one of them is lost"
        )

    def state_came_late(self, world: World) -> None:
        """Complete what `stands` has noted, when the state comes within the first step of `world`."""
        state = self._worker.state
        state.remember()
        state.generation, state.generations = world.generation, state.generations + 1
        if self._incident is not None:
            state.incidents.append(self._incident)
        if self._deaths is not None:
            self._report_quarantines(world)


def _incident_of(
    interrupted: Mapping[str, Any], seconds: dict[str, float], state: TrainState, world: World
) -> dict[str, Any]:
    lost, left, joined, hosts = (interrupted[name] for name in ("lost", "left", "joined", "dead_hosts"))
    deaths = {"dead_hosts": hosts, "run_seconds": run_seconds(state)} if hosts else {}
    inside = {member.name for member in world.members}  # a newcomer of a world that broke may be lost again
    who = {"lost": lost, "left": left, "joined": [name for name in joined if name in inside]}
    cause = _cause_of(lost, left, "join" if interrupted["cause"] == "start" else interrupted["cause"])
    return new_incident(cause, seconds | interrupted["seconds"], world, state.step, who) | deaths


def _cause_of(lost: Sequence[str], left: Sequence[str], otherwise: Cause) -> Cause:
    return "peer_lost" if lost else "leave" if left else otherwise


def new_incident(
    cause: str,
    seconds: dict[str, float],
    world: World,
    step: int,
    who: Mapping[str, Sequence[str]] = MappingProxyType({}),
    *,
    steps_lost: int | None = 0,
) -> dict[str, Any]:
    """Return an entry of `incidents` in result.json.

    Args:
        world: the one in which training went on, after `step` committed steps.
        who: names of members that were `lost`, have `left` or `joined`.
    """
    lost, left, joined = (list(who.get(how, ())) for how in ("lost", "left", "joined"))
    return {
        "cause": cause,
        "time": time.time(),
        "generation": world.generation,
        "step": step,
        "world_size": world.world_size,
        "lost_members": lost or left,
        "left_members": left,
        "joined_members": joined,
        "committed_steps_lost": steps_lost,
        "seconds": seconds,
    }


def describe_change(state: TrainState, world: World, change: Change, seconds: dict[str, float]) -> str:
    """Return `world generation=3: 2 workers go on at step 41; lost a/0; detect=0.001 ...`."""
    joined = ", ".join(member.name for member in change.joined)
    parts = [*losses_of(change), *([f"took in {joined}"] if joined else [])]
    why = f" ({change.reason})" if change.reason else ""
    what = "; ".join(parts) or f"the members are the same{why}"
    phases = " ".join(f"{name}={value:.3f}" for name, value in seconds.items())
    workers = workers_go_on(world.world_size, state.step)
    return f"world generation={world.generation}: {workers}; {what}; {phases} (s)"


def losses_of(change: Change) -> list[str]:
    """Return `lost a/0/12`, `b/0/7 left (its error in step 19: ...)`."""
    lost, left = (", ".join(member.name for member in some) for some in (change.lost, change.left))
    why = "" if change.why_left is None else f" ({change.why_left})"
    return [text for text in (f"lost {lost}" if lost else "", f"{left} left{why}" if left else "") if text]


def describe_share(config: Config, world_size: int) -> str:
    """Return a worker's samples in a whole step: one number, or the least and the most."""
    parts, unit = (
        (config.global_batch_size, 1)
        if config.reduction == "fast"
        else (config.virtual_ranks, config.global_batch_size // config.virtual_ranks)
    )
    low, high = parts // world_size * unit, -(-parts // world_size) * unit
    return f"{low}" if low == high else f"{low} to {high}"


def describe_optimizer(state: TrainState) -> str:
    """Return `SGD, lr 0.1`: the choice, also where no flag was given."""
    return f"{type(state.optimizer).__name__}, lr {shown(dict.fromkeys(state.learning_rates))}"


def describe_start(worker: Worker, world: World, backend: str, restored: Restored) -> str:
    config, state = worker.config, worker.state
    share = describe_share(config, world.world_size)
    epoch = min(state.epoch + 1, config.epochs)
    beginning = "from scratch" if config.init_from is None else f"from the weights of {config.init_from}"
    where = (
        beginning
        if restored.source == "scratch"
        else f"from the {restored.source} of step {restored.step}, in epoch {epoch} of {config.epochs}"
    )
    has_more = restored.source == "snapshot" and not state.is_finished
    lost = state.incidents[-1].get("committed_steps_lost") if has_more and state.incidents else 0
    if lost is None:
        where += " (committed steps that came after it, if any, are done again)"
    elif lost:
        where += f" ({lost} committed steps that came after it are done again)"
    workers = count(world.world_size, "worker")
    if world.num_spares:
        workers += f" and {count(world.num_spares, 'spare')}"
    nodes = count(world.num_nodes, "node")
    return (
        f"world generation={world.generation}: {workers} on {nodes} ({worker.device.type}, {backend}), "
        f"global batch {config.global_batch_size} = {share} samples a worker; training {worker.task.title} {where}; "
        f"{describe_optimizer(state)}"
    )
