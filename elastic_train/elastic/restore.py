"""Where a world starts from: the newest snapshot that any of its members can see, or scratch.

It needs neither a shared file system nor a particular rank 0. All members compare, over the process group, the newest
snapshots that they see. The best one in a folder is read by each member that sees that very file; the first of them
sends the state to the others. A bucket is seen by all, so one member reads it for all; if it cannot, the other nodes
try. Only a run directory's leader reports what the directory's events tell of snapshots that no member sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from secrets import token_hex
from typing import Any

from torch import Tensor

from elastic_train.branches import Position, describe, is_on, restarted
from elastic_train.elastic.handover import Check, Loaded, hand_out
from elastic_train.elastic.loading import load
from elastic_train.errors import (
    Refused,
    SnapshotDamaged,
    SnapshotDenied,
    SnapshotError,
    SnapshotUnread,
    TaskMismatch,
)
from elastic_train.rules import NAMES, disagreement, freshest
from elastic_train.runlog.event_types import Source
from elastic_train.storage.past_snapshots import PastSnapshots, require_none_written
from elastic_train.storage.run_record import (
    Offer,
    RunRecord,
    newest_offer,
    parted,
    require_one_line,
    run_to_continue,
)
from elastic_train.storage.snapshot import SnapshotInfo, load_state
from elastic_train.storage.store_urls import is_url
from elastic_train.training.collectives import gather_json
from elastic_train.training.data_identity import KIND_OF, ORDER_OF
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import frozen_of, hash_of, settings_hash
from elastic_train.world import World, value_of

Warn = Callable[[str], None]
ALL_GONE = "all workers that had the state are gone"
NONE_SEEN = "no snapshot of their run can be seen here"


@dataclass(frozen=True)
class Restored:
    """What a world started from."""

    source: Source
    step: int
    from_rank: int


def restore(
    state: TrainState,
    world: World,
    offers: list[SnapshotInfo],
    *,
    task: Mapping[str, Any],
    run_uid: str,
    lost: str | None,
    source: int,
    awaited: str | None,
    record: RunRecord,
    past: Callable[[], PastSnapshots | None],
    own_past: Callable[[], PastSnapshots | None],
    warn: Warn,
    check: Check,
) -> Restored:
    """Bring every rank to the same state; every rank calls this.

    Args:
        state: freshly built, or that of a run which this rank has left; loaded in place.
        offers: the snapshots that this rank can see, newest first.
        task: the facts that a snapshot must agree with.
        run_uid: the name of the run, where this job has one already; else that of a new run.
        lost: how a state of this run was lost; None where the run directories decide which run is continued or begun.
        source: the rank whose state all have where the run begins from scratch; it is freshly built.
        awaited: the run of a job that is gone, in whose join queue this rank has waited.
        record: which run this rank's run directory belongs to.
        past: called where there is no snapshot; returns what this rank's run directory reports of any, None on ranks
            that lead no run directory.
        own_past: the same without what the owner of a bucket reports.
        check: called while this rank waits for a state; raises where the group was broken off.

    Raises:
        RunsMixed: snapshots of two runs can be seen. BranchesMixed: snapshots of two branches of the run can be seen.
        TaskMismatch: the newest snapshot is of another task, seed, batch size, ...; names both values.
        SnapshotError: the snapshot is sound but cannot be loaded. Or no snapshot can be seen, and a state was lost, or
            the run had snapshots which no member can see, even where some of another run can be seen.
    """
    told = gather_json({"offers": [vars(Offer.of(one)) for one in offers], "record": vars(record), "awaited": awaited})
    offered = [[value_of(Offer, one) for one in entry["offers"]] for entry in told]
    superseded: tuple[str, ...] = ()
    if lost is None:
        records = [value_of(RunRecord, entry["record"]) for entry in told]
        choice = run_to_continue(records, list(chain(*offered)))
        run_uid, superseded = choice.uid or run_uid, choice.superseded
        _require_own_run(choice, records, {entry["awaited"] for entry in told}, record, own_past)
    by_rank = [[offer for offer in mine if offer.run == run_uid] for mine in offered]
    require_one_line(list(chain(*by_rank)))
    if others := [offer for offer in offers if offer.run_uid != run_uid]:
        warn(f"snapshots of another run are not used: {others[0].path} and the like")
    offers = [offer for offer in offers if offer.run_uid == run_uid]
    from_rank = _restore_newest(state, world, offers, by_rank, superseded, task=task, warn=warn, check=check)
    if from_rank is not None:
        return Restored("snapshot", state.step, from_rank)
    if lost is not None:
        raise SnapshotError(f"{lost}, and {NONE_SEEN}")
    # The directory may also report snapshots of a run that this one replaces.
    _require_none_written(None if record.uid in superseded else past())
    state.run_uid, state.superseded = run_uid, superseded
    return _begin(state, world, source, check)


def _require_own_run(
    choice: RunRecord,
    records: Sequence[RunRecord],
    awaited: Collection[str | None],
    record: RunRecord,
    own_past: Callable[[], PastSnapshots | None],
) -> None:
    """Raise SnapshotError where the visible snapshots decide the run, no run directory belongs to it, and one of these
    has had snapshots: the run would lose sight of them. Or where none is of an awaited run: what was trained of it may
    lie on the disks of others. Every rank calls this."""
    uids = {one.uid for one in records} - {"", *choice.superseded}
    if {*awaited} - {None, choice.uid, *choice.superseded, *uids}:
        raise SnapshotError(f"{ALL_GONE}, and {NONE_SEEN}")
    if not choice.uid or not uids or choice.uid in uids:
        return
    found = own_past() if record.uid in uids else None
    known = max(filter(None, gather_json(None if found is None else found.known)), default=None)
    if known is not None:
        raise SnapshotError(
            f"{known[2]}, and those that are seen here are of another run: give the --snapshot-dir of this run, or "
            "another --run-dir to go on with the other one"
        )


def _require_none_written(found: PastSnapshots | None) -> None:
    """Call `require_none_written` with what every rank has found. Every rank calls this."""
    told = gather_json(None if found is None else asdict(found))
    require_none_written([value_of(PastSnapshots, fields) for fields in told if fields is not None])


def _begin(state: TrainState, world: World, source: int, check: Check) -> Restored:
    """Begin from scratch with the state of `source` and the longest clock: the run began with its first member, and
    keeps that time for all if that member dies. Every rank calls this."""
    if state.micro_batch_size is None:
        state.micro_batch_size = -(-state.global_batch_size // world.world_size)
    # The seed makes the states equal if the machines are equal; that of `source` counts in any case.
    hand_out(state, [source, *(rank for rank in range(world.world_size) if rank != source)], check)
    state.clock.count_nodes(world.num_nodes)  # before the clock is taken over: inherited time is not counted again
    clocks = gather_json(state.clock.state_dict())
    state.clock.take_over(max(clocks, key=lambda clock: sum(clock["totals"].values())))
    return Restored("scratch", 0, source)


def _restore_newest(
    state: TrainState,
    world: World,
    offers: list[SnapshotInfo],
    by_rank: list[list[Offer]],
    superseded: tuple[str, ...],
    *,
    task: Mapping[str, Any],
    warn: Warn,
    check: Check,
) -> int | None:
    """Bring every rank to the newest whole snapshot of the run. As `restore`; every rank calls this.

    Args:
        offers: the run's snapshots that this rank can see.
        by_rank: the run's snapshots that each rank can see, without those that were tried.
        superseded: uids of runs that this one replaces, beside those that the snapshot names.

    Returns:
        The rank that sends the state to the others; None where there is no whole snapshot.

    Raises:
        TaskMismatch, SnapshotError: as `restore`, for the newest snapshot.
    """
    unread: list[str] = []  # why the newest one could not be read, of each that has tried
    while True:
        best = newest_offer(list(chain(*by_rank)))
        if best is None:
            return None
        have_it = [rank for rank, mine in enumerate(by_rank) if any(map(best.is_same, mine))]
        # Each reads from its own disk. A bucket is read by one for all; if that fails, by the other nodes.
        is_first, is_apart = world.rank == have_it[0], not is_url(best.path)
        is_reader = is_apart or (not is_first and world.is_first_of_node if unread else is_first)
        offer = next((offer for offer in offers if best.is_same(Offer.of(offer))), None)
        found = _read(state, offer, task, warn) if offer is not None and is_reader else {}
        told = gather_json(found)
        for entry in told:
            if "mismatch" in entry:
                raise TaskMismatch(entry["mismatch"])
            if "incompatible" in entry:
                raise SnapshotError(entry["incompatible"])
        whole = [rank for rank, entry in enumerate(told) if "read" in entry]
        if not whole:
            is_last = is_apart or bool(unread)
            unread += [entry["unread"] for entry in told if "unread" in entry]
            if is_last or unread == [SnapshotDamaged.word]:
                _require_skipped(unread)
                unread = []
                by_rank = [[offer for offer in mine if not best.is_same(offer)] for mine in by_rank]
            continue
        if world.rank == 0:
            _warn_of_parted(best, chain(*by_rank), warn)
        state.superseded = tuple(sorted({*state.superseded, *superseded}))
        settings = [entry.get("settings") for entry in told]  # of this start; those of the sending rank count
        without = [r for r, one in enumerate(settings) if r != whole[0] and (one is None or one != settings[whole[0]])]
        hand_out(state, [whole[0], *without], check)
        if state.generation is None:  # else this process has counted its own time all the while
            state.clock.load_state_dict(told[whole[0]]["read"])
        state.restarts = restarted(state.restarts, gather_json(token_hex(4))[0], state.step)
        return whole[0]


def _require_skipped(unread: Collection[str]) -> None:
    """Raise SnapshotError if a snapshot that nobody has read may be whole: an older one has fewer steps."""
    failed = [why for why in unread if why not in (SnapshotDamaged.word, SnapshotDenied.word)]
    if failed and SnapshotDamaged.word not in unread:
        raise SnapshotError(failed[0])


def _warn_of_parted(best: Offer, offers: Iterable[Offer], warn: Warn) -> None:
    if (other := parted(offers, best.restarts)) is not None:
        warn(
            f"host {other.host} has a snapshot of step {other.step} of this run, {other.path}, and host {best.host} "
            f"one of step {best.step}: the one was begun again without what the other had trained. The run goes on "
            f"from step {best.step}"
        )


def _read(state: TrainState, offer: SnapshotInfo, task: Mapping[str, Any], warn: Warn) -> dict[str, Any]:
    """Load a snapshot into `state`. Returns `read`, the clock in it, and a hash of the optimizer's `settings`; None for
    that hash if an extra is not in the snapshot and may begin with other values on each rank. Where the job cannot go
    on, returns the reason: `mismatch`, or `incompatible`, which leaves `state` unusable. Else `unread`: the word of a
    snapshot to be skipped, or why this worker cannot read it."""
    source = f"snapshot {offer.path}"
    try:
        require_same_task(offer, task)
        loaded = load_state(offer)
    except TaskMismatch as error:
        return {"mismatch": str(error)}
    except SnapshotUnread as error:
        warn(error.warning)
        return {"unread": error.word}
    except SnapshotError as error:
        warn(f"{SnapshotDenied.word}: {error}")
        return {"unread": str(error)}
    try:
        load(state, loaded, source)
    except SnapshotError as error:
        return {"incompatible": str(error)}
    _compare_extras(state, loaded, source, warn)
    _compare_names(state, offer.task.get(NAMES), task.get(NAMES), source, warn)
    has_all = state.extras.keys() <= loaded.get("extras", {}).keys()
    return {"read": loaded["run"]["clock"], "settings": settings_hash(state) if has_all else None}


def sync_from_freshest(
    state: TrainState,
    steps: Sequence[int],
    check: Check,
    before_sending: Callable[[], None],
    apart: Collection[int] = (),
    loaded: Loaded = lambda _clock: None,
) -> int:
    """Bring ranks that are behind to the freshest state: after a loss survivors can differ by a step. Returns its rank.

    Every rank calls this. `steps` are the committed steps by rank, -1 for a rank without a state. Ranks in `apart` get
    the state whatever their step. It is loaded only when it is complete, as the source may die while it sends. Frozen
    weights are not sent if the ranks behind have equal ones. `check` is as in `restore`. `before_sending` is called on
    the source when the other ranks wait for it. `loaded` is as in `hand_out`.
    """
    source = freshest(steps)
    behind = [rank for rank, step in enumerate(steps) if step != steps[source] or rank in apart]
    if behind:
        frozen = frozen_of(state) if min(steps) >= 0 else {}
        told = gather_json(_hash_or_none(frozen))
        is_alike = bool(frozen) and told[source] is not None and all(told[rank] == told[source] for rank in behind)
        kept = frozen if is_alike else ()
        hand_out(state, [source, *behind], check, kept=kept, before_sending=before_sending, loaded=loaded)
    return source


def _hash_or_none(frozen: Mapping[str, Tensor]) -> int | None:
    """Return None where there are no tensors, or one that has no bytes to hash: then they are sent."""
    if any(tensor.is_quantized for tensor in frozen.values()):  # torch crashes when it reads their bytes
        return None
    try:
        return hash_of(frozen) if frozen else None
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def require_line(offers: Sequence[SnapshotInfo], theirs: Position) -> None:
    """Raise Refused where a newcomer sees a snapshot that lies on another branch of the run that it wants to join."""
    for offer in offers:
        if offer.run_uid == theirs.run and not is_on(offer.branches, offer.step, theirs.branches):
            raise Refused(
                f"host {offer.host} has a snapshot of step {offer.step} on {describe(offer.branches)}, and the others "
                f"are at {theirs.name}: this worker is refused; move {offer.path}, and others of its branch, away, or "
                "give another --run-dir"
            )


def require_same_task(offer: SnapshotInfo, task: Mapping[str, Any]) -> None:
    """Raise TaskMismatch, naming both values, where a snapshot is of something else than these flags train. Optimizers
    among the extras may come and go, and snapshots of earlier versions have no entry of any optimizer."""
    found = disagreement(_that_must_agree(offer.task, task), _that_must_agree(task, offer.task))
    if found is not None:
        name, theirs, ours = found
        raise TaskMismatch(
            f"snapshot {offer.path} is of a run with {name} {theirs!r}, this start has {ours!r}: give the same, "
            "another --run-dir, or --fresh to start anew (elastic-train snapshot export keeps the weights)"
        )


def _that_must_agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return `one` without names of the data, and without the entries of optimizers that `other` lacks."""
    may_lack = {name for name in one if name == NAMES or (name.startswith((ORDER_OF, KIND_OF)) and name not in other)}
    return {name: value for name, value in one.items() if name not in may_lack}


def _compare_names(state: TrainState, theirs: object, ours: object, source: str, warn: Warn) -> None:
    """Warn where the epoch goes on with samples under other numbers. No refusal: labels may have been corrected."""
    if state.samples_done and None not in (theirs, ours) and theirs != ours:
        warn(
            f"the names or labels of the training set are {ours}, and were {theirs} when {source} was written: if its "
            f"samples are in another order, some are trained twice in epoch {state.epoch + 1}, and others not at all"
        )


def _compare_extras(state: TrainState, loaded: Mapping[str, Any], source: str, warn: Warn) -> None:
    held, ours = loaded.get("extras", {}).keys(), state.extras.keys()
    if ours - held:
        average = "; the average begins with its weights" if state.averaged and "ema" not in held else ""
        warn(f"{source} has no {', '.join(sorted(ours - held))}: what is new among the extras begins anew{average}")
    if held - ours:
        warn(f"{', '.join(sorted(held - ours))} of {source} is not among the extras any more, and is dropped")
