"""What a worker finds of an earlier run, how that becomes the state of all, and the first world that it enters."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from elastic_train.branches import BRANCH, Branch, id_of
from elastic_train.elastic.connect import Return
from elastic_train.elastic.formed_group import can_form
from elastic_train.elastic.handover import Check
from elastic_train.elastic.ledger_repair import write_lines_again
from elastic_train.elastic.loading import other_rates, peak_rates
from elastic_train.elastic.membership import Membership, new_token, versions
from elastic_train.elastic.process_group import choose_backend, gpu_of
from elastic_train.elastic.restore import ALL_GONE, Restored, require_line, restore
from elastic_train.elastic.result import config_of
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_report import new_incident
from elastic_train.errors import FormationFailed, ObjectStoreError, RunsMixed, SnapshotsInUse
from elastic_train.protocol.addresses import use_interface_of
from elastic_train.rendezvous.launch import max_nodes_of
from elastic_train.runlog.event_types import LEFT_OUT, Started
from elastic_train.runlog.goodput import process_identity, seconds_since_process_start
from elastic_train.storage.bucket_owner import BucketRecord
from elastic_train.storage.past_snapshots import NOTHING_SEEN, PastSnapshots, read_past_snapshots
from elastic_train.storage.run_record import RUN_FILE, RunRecord, parted, read_record
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots, set_aside
from elastic_train.training import determinism
from elastic_train.training.collectives import barrier, gather_json
from elastic_train.training.state import TrainState
from elastic_train.wording import count
from elastic_train.world import Member, World, from_json, to_json


class EarlierRun:
    """One worker's view of the run that it starts or continues. Made before it contacts the other workers."""

    def __init__(self, worker: Worker, membership: Membership, files: RunFiles, back: Return | None = None) -> None:
        self._back = back
        self._worker = worker
        self._membership = membership
        self._files = files
        self._offers: list[SnapshotInfo] = []
        self._owner: BucketRecord | None = None
        self._fresh_record: RunRecord | None = None
        """the record that --fresh has left in the run directory"""

    def first_world(self) -> World:
        """Find the job and agree with its members on a world. Reads first what this worker sees of an earlier run."""
        worker, membership, launch = self._worker, self._membership, self._worker.launch
        directory, config = worker.directory, worker.config
        use_interface_of(membership.address[0])
        is_fresh = config.fresh and self._back is None
        # The job may have begun since the first look: what it writes must not be moved away.
        is_running = is_fresh and not (membership.job.entrance.is_first and membership.published("run_uid") is None)
        if is_fresh and not is_running and launch.restart_count == 0:
            self._fresh_record = self._start_anew()
        elif is_running and launch.local_rank == 0:
            worker.reporter.log("--fresh: a job is running here already: this node joins it, and moves nothing aside")
        # A worker that joins members with a state needs nothing from a bucket, which may be unreachable just now.
        self._look(is_needed=self._back is None and membership.published("run_uid") is None)
        if self._back is None:
            self._files.replaced = replaced_by_joining(self._offers, membership.published, is_fresh=is_fresh)
        worker.reporter.events.write(
            Started(
                config=config_of(worker),
                versions=versions(),
                device=str(worker.device),
                gpu=torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else LEFT_OUT,
                task=worker.task.describe(),
                max_nodes=max_nodes_of(launch, os.environ),
                **process_identity(),
                was=LEFT_OUT if self._back is None else self._back.uid,
                is_anew=LEFT_OUT if self._fresh_record is None else True,
                seconds=startup_seconds(worker),
            )
        )
        seen = [self._traces.generation, *(offer.generation for offer in self._offers)]
        seen += [] if self._owner is None else [self._owner.generation]
        newest = max(((offer.generation, offer.step) for offer in self._offers), key=itemgetter(1, 0), default=None)
        world = membership.first_world(
            Member(
                host=worker.host,
                local_rank=launch.local_rank,
                pid=os.getpid(),
                agent_pid=launch.agent_pid or 0,
                address=membership.address,
                directory_id=directory.identity(self._files.job_token),
                backend=choose_backend(worker.device),
                max_generation=max((generation for generation in seen if generation is not None), default=None),
                agreement=worker.agreement(),
                min_nodes=config.min_nodes or launch.min_nodes,
                gpu=gpu_of(worker.device),
                node_id=launch.node_id,
                newest=newest,
                forms_ahead=can_form(),
                was=() if self._back is None else self._back.was,
            ),
            lambda theirs: require_line(self._offers if self._back is None else (), theirs),
        )
        self._files.take_token(membership.published("job_token") or self._files.job_token)
        return world

    def _look(self, *, is_needed: bool = True) -> None:
        """Look up what this worker sees of the run. Raises: ObjectStoreError: a bucket is needed and unreachable."""
        worker = self._worker
        self._traces = worker.directory.traces()
        self._offers, self._owner, self._is_replaced = [], None, False
        self._record = self._fresh_record or read_record(worker.directory.path)
        try:
            found = find_snapshots(worker.snapshots_dir, warn=self._files.warn_once, key=worker.snapshot_key)
            self._owner = owner = None if worker.bucket is None else worker.bucket.owner.read()
        except ObjectStoreError as error:
            if is_needed:
                raise
            worker.reporter.warn(f"{error}; this worker offers no snapshot to the others")
        else:
            self._offers = sorted(found, key=lambda offer: offer.age_key, reverse=True)
            if owner is not None:
                here, self._record = self._record, self._record.beside(owner.run_uid, owner.superseded)
                self._is_replaced = here.uid in self._record.superseded
        # A worker that returns knows its run, even if no member is left.
        self._run_uid = self._membership.published("run_uid") or worker.state.run_uid or new_token()

    def _start_anew(self) -> RunRecord:
        """For --fresh: move aside what is in the run directory, and snapshots that lie elsewhere. The first worker that
        comes does so, once per job. Returns the record that stays."""
        directory, membership = self._worker.directory, self._membership
        key = f"fresh/{directory.identity(self._files.job_token)}"
        me = f"{self._worker.host}/{os.getpid()}"
        if membership.agreed_once(key, me) == me:
            directory.ownership.claim(self._files.job_token, 0, self._worker.host)
            record = self._move_aside()
            membership.agreed_once(f"{key}/done", record.to_json().decode())
            return record
        deadline = time.monotonic() + 60.0
        while (done := membership.published(f"{key}/done")) is None:
            self._worker.stop.check()
            if time.monotonic() > deadline:
                raise FormationFailed(f"--fresh: the run in {directory.path} was not moved aside within 60 s")
            time.sleep(0.01)
        return from_json(RunRecord, done)

    def _move_aside(self) -> RunRecord:
        worker, directory = self._worker, self._worker.directory
        before = read_record(directory.path)
        offers = find_snapshots(worker.snapshots_dir, warn=lambda _damaged: None)
        owner = None if worker.bucket is None else worker.bucket.owner.read()
        known = () if owner is None else (owner.run_uid, *owner.superseded)
        uids = {before.uid, *before.superseded, *known, *(offer.run_uid for offer in offers)} - {""}
        record = RunRecord("", tuple(sorted(uids)), is_fresh=True)
        moved = directory.move_aside()
        if moved is not None:
            worker.reporter.log(f"--fresh: the run in {directory.path} was moved to {moved}")
        with suppress(OSError):  # only needed if this start ends before there is a state
            directory.replace_file(RUN_FILE, replace(record, is_fresh=False).to_json())
        self._move_snapshots_aside(offers)
        return record

    def _move_snapshots_aside(self, offers: list[SnapshotInfo]) -> None:
        """Move aside the snapshots that lie outside of the run directory."""
        worker, place = self._worker, self._worker.snapshots_dir
        if not isinstance(place, Path):
            if offers:
                worker.reporter.log(
                    f"--fresh: {count(len(offers), 'snapshot')} of earlier runs stay in {place}; they are not continued"
                )
            return
        folder = time.strftime("before-%Y%m%dT%H%M%SZ", time.gmtime())
        names = set_aside(place, folder, lambda _offer: True)
        if names:
            worker.reporter.log(f"--fresh: {count(len(names), 'snapshot')} in {place} moved to {folder}/ there")

    def restore(self, world: World, *, lost: str | None, check: Check) -> Restored:
        """Bring all members of a world without a state to the newest state that any of them can see. Every rank calls
        this.

        Args:
            lost: how the run's state was lost, where this worker has trained or stood by in this job.
            check: as in restore.restore().

        Raises:
            SnapshotsInUse: another job has the bucket of --snapshot-dir.
            SnapshotError: no snapshot of the run can be seen, and its state was lost, or this worker had waited in the
                join queue. SnapshotError, TaskMismatch: as restore.restore().
        """
        worker, state = self._worker, self._worker.state
        if lost is None and self._membership.came_later and self._membership.published("run_uid") is not None:
            lost = ALL_GONE
        in_use, is_anew = self._files.take_bucket(world, check), self._fresh_record is not None
        run_uid = self._membership.published("run_uid") or self._run_uid  # the job may have named it since it looked
        told = gather_json({"lost": lost, "run": run_uid, "in_use": in_use, "is_anew": is_anew})
        in_use = next((entry["in_use"] for entry in told if entry["in_use"] is not None), None)
        if in_use is not None:
            raise SnapshotsInUse(in_use)
        self._look()  # again: snapshots may have been written and pruned while this worker waited
        # Whose state is lost names the run, as the others may be nodes that were started again; but not beside --fresh.
        namer = next((r for key in ("is_anew", "lost") for r, entry in enumerate(told) if entry[key]), 0)
        started = peak_rates(state) if state.generation is None else None
        restored = restore(
            state,
            world,
            self._offers,
            task=worker.must_agree_with_snapshot(),
            run_uid=told[namer]["run"],
            lost=told[namer]["lost"],
            source=namer,  # who was left out still has the state of another run, and may be rank 0
            awaited=self._membership.awaited,
            record=self._record,
            past=lambda: self._past(self._own_past(world)),
            own_past=lambda: self._own_past(world),
            warn=worker.reporter.warn,
            check=check,
        )
        if state.branches:
            self._membership.agreed_once(BRANCH, to_json(Branch(id_of(state.branches))))
        self._publish(state)
        if restored.source == "snapshot":
            if started is not None and world.rank == 0 and (line := other_rates(started, peak_rates(state))):
                worker.reporter.log(line)
            write_lines_again(worker, world)  # before the next exchange: no rank has a state until all have written
        seen = gather_json({"reached": self._traces.reached, "logged": self._traces.logged})
        note_restart(state, restored, newest_of([entry["reached"] for entry in seen]), world)
        logged = newest_of([entry["logged"] for entry in seen])
        if logged is not None and logged[1] < state.step:
            if world.rank == restored.from_rank:
                worker.reporter.write_missing_commits(state, logged[1])
            barrier()  # as after a loss: the rank that has to write them may die
        if worker.config.reduction == "ordered":
            compare_fingerprints(worker, world)
        return restored

    def _publish(self, state: TrainState) -> None:
        """Tell newcomers which run it is, which runs it has replaced, and what they must agree with."""
        agreed_once = self._membership.agreed_once
        # An earlier attempt, ended by a death, may have named the run already; then that name holds.
        state.run_uid = agreed_once("run_uid", state.run_uid)
        agreed_once("superseded", json.dumps(state.superseded))
        agreed_once("agreement", json.dumps(self._worker.agreement()))

    def warn_of_parted(self) -> None:
        """Warn if the job has begun again from an older state than this node's disk had, as this node came too late."""
        worker, state = self._worker, self._worker.state
        newest = parted((offer for offer in self._offers if offer.run_uid == state.run_uid), state.restarts)
        if worker.launch.local_rank != 0 or newest is None:
            return
        is_further = newest.step > state.step
        remedy = (
            ". To go on from that snapshot instead, stop all nodes and start them all at once" if is_further else ""
        )
        worker.reporter.warn(
            f"host {worker.host} has a snapshot of step {newest.step} of this run, {newest.path}, and the job began "
            f"again without it, from an older one: it is at step {state.step}, and the steps up to {newest.step} "
            f"{'are' if is_further else 'were'} done again{remedy}"
        )

    def _own_past(self, world: World) -> PastSnapshots | None:
        """Return what this worker's run directory reports of the run's snapshots; None if another worker does so."""
        tells = world.is_directory_leader and not self._is_replaced
        return read_past_snapshots(self._worker.directory.events_dir) if tells else None

    def _past(self, past: PastSnapshots | None) -> PastSnapshots | None:
        """Return `past`, completed by what the bucket's owner reports."""
        owner = self._owner
        if owner is None or owner.newest is None or owner.run_uid in self._record.superseded:
            return past
        if self._membership.published("run_uid") not in (None, owner.run_uid):
            return past  # the owner record is of the run before: this job has a run that has not been written there yet
        generation, step = owner.newest
        how = (
            f"host {owner.host} had a snapshot of step {step} of this run (generation {generation}) in "
            f"{self._worker.bucket}"
        )
        return replace(past or NOTHING_SEEN, known=(generation, step, how))


def replaced_by_joining(
    offers: Sequence[SnapshotInfo], published: Callable[[str], str | None], *, is_fresh: bool
) -> frozenset[str]:
    """Return the uids of the runs of these snapshots, newest first, that the run of a running job has not replaced yet.

    Raises:
        RunsMixed: there is one, and not `is_fresh`: that job's run would take over the run directory, and no start
            would find the way back to the snapshots.
    """
    run_uid = published("run_uid")
    others = {offer.run_uid for offer in offers} - {run_uid}
    if run_uid is None or not others:
        return frozenset()
    others -= {*json.loads(published("superseded") or "[]")}
    newest = next((offer for offer in offers if offer.run_uid in others), None)
    if newest is not None and not is_fresh:
        raise RunsMixed(
            f"host {newest.host} has a snapshot of step {newest.step} of another run, {newest.path}, and the job that "
            "runs has begun without it: to go on from there, stop that job and start again with this run directory; "
            "to join it, give another --run-dir, or --fresh"
        )
    return frozenset(others)


def compare_fingerprints(worker: Worker, world: World) -> None:
    """Warn where the bits may differ from those of the run so far, or between members. Every rank calls this."""
    state = worker.state
    found = gather_json(determinism.fingerprint(worker.device))
    before = state.fingerprint or found[0]
    if world.rank == 0:
        for member, now in zip(world.workers, found, strict=True):
            _warn_of_bits(worker, member, before, now)
    state.fingerprint = found[world.rank]


def compare_with_peers(worker: Worker, world: World) -> None:
    """After this worker got its state from others, warn in ordered mode where its bits may differ from theirs. No other
    worker compares a newcomer."""
    if worker.config.reduction == "ordered":
        now = determinism.fingerprint(worker.device)
        _warn_of_bits(worker, world.me, worker.state.fingerprint, now)
        worker.state.fingerprint = now


def _warn_of_bits(worker: Worker, member: Member, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if differences := determinism.compare(before, now):
        worker.reporter.warn(f"the bits may differ from here on: on {member.name}, {'; '.join(differences)}")


def startup_seconds(worker: Worker) -> dict[str, float]:
    """Return the seconds that this process spent on `imports` (from its very start), `build`, and `find` (the job)."""
    now = time.monotonic()
    began = now - seconds_since_process_start()
    return {
        "imports": worker.imported_at - began,
        "build": worker.built_at - worker.imported_at,
        "find": now - worker.built_at,
    }


def note_restart(state: TrainState, restored: Restored, reached: tuple[int, int] | None, world: World) -> None:
    """Note an incident where new processes continue a run: how long it was down, and how many steps were lost. The
    steps are None where no member sees what came after the snapshot, as on new machines that have only a bucket.

    Args:
        reached: the newest generation that any member knows of, and its committed steps.
        world: that of the new processes.
    """
    if restored.source == "scratch" or state.is_finished:
        return
    lost = None
    if reached is not None and reached[0] >= (state.generation or 0):
        lost = max(0, reached[1] - restored.step)
    elif restored.step == state.stopped_at:
        lost = 0
    incident = new_incident("restart", {"down": state.clock.newest_down}, world, restored.step, steps_lost=lost)
    is_planned = lost == 0 and restored.step == state.stopped_at
    state.incidents.append(incident | ({"planned": True} if is_planned else {}))


def newest_of(seen: Sequence[Sequence[int] | None]) -> tuple[int, int] | None:
    """Return the newest generation that any member has seen, and its largest step; `seen` are (generation, step)."""
    return max(((one[0], one[1]) for one in seen if one is not None), default=None)
