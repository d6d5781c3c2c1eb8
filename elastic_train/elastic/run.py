"""A worker's life: build it, make it a member of its job, run the ring, and perhaps return as a new member."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from functools import partial

from elastic_train.config import Config, max_world_size
from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.claims import arbiter_of
from elastic_train.elastic.connect import Applicant, Return, connect_worker
from elastic_train.elastic.earlier_run import EarlierRun
from elastic_train.elastic.exits import CONTINUE, MEND_FIRST, Exits
from elastic_train.elastic.formed_group import FormedGroup
from elastic_train.elastic.late_stop import LateStop
from elastic_train.elastic.loop import bundled
from elastic_train.elastic.membership import Membership, new_token
from elastic_train.elastic.noticed import Noticed
from elastic_train.elastic.process_group import process_group
from elastic_train.elastic.quarantined import admissible
from elastic_train.elastic.result import existing_result
from elastic_train.elastic.resume import Resume
from elastic_train.elastic.ring import Ring, RingParts
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.saving_together import begin_to_save
from elastic_train.elastic.trainer import Program, Trainer
from elastic_train.elastic.whole_steps import why_closed_in
from elastic_train.elastic.worker import Worker, build
from elastic_train.elastic.world_report import WorldReport
from elastic_train.errors import (
    FormationFailed,
    JobFailed,
    JobFinished,
    LeftOut,
    NewerGeneration,
    OwnershipLost,
    Refused,
    Stopped,
    StoreRefused,
    StoreUnreachable,
    UsageError,
)
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import common_backend, seconds_before_return
from elastic_train.runlog.event_types import Done
from elastic_train.runlog.goodput import seconds_since_process_start
from elastic_train.stopping import StopSignal
from elastic_train.training.batches import steps
from elastic_train.training.data_identity import identify_code
from elastic_train.world import World


def run(config: Config, launch: Launch, stop: StopSignal) -> int:
    """Train by the flags until the end, or until told to stop. Returns the exit code of the worker.

    Raises:
        ElasticTrainError: training cannot go on; the message is one line. Any error of the user's task.
    """
    worker = build(config, launch, stop)
    return run_worker(worker, bundled(worker))


def run_worker(worker: Worker, program: Program) -> int:
    """Do what `run` does, with a worker that is built and a program of the caller's choice."""
    reporter = worker.reporter
    back: Return | None = None
    ends = ExitStack()  # closes what belongs to the present membership
    noticed: Noticed | None = None
    try:
        noticed = Noticed(worker)
        if worker.launch.local_rank == 0 and (advice := advice_on_least(worker.config, worker.launch)) is not None:
            reporter.log(advice)
        while True:
            outcome = _as_member(worker, program, back, ends, noticed)
            if isinstance(outcome, int):
                return outcome
            back = outcome
            ends.close()
            gc.collect()  # frees the stores that it served and its connections, so that the others see them closed
            _wait_before_return(worker, back)
    except Stopped as stopped:
        reporter.events.write(Done(outcome="stopped"))
        nothing = "the workers had formed a world: nothing was trained or lost"
        reporter.report(f"{stopped} before {nothing if back is None else 'this worker was admitted again'}")
        return stopped.exit_code
    except JobFinished as finished:
        reporter.events.write(Done(outcome="already_finished"))
        reporter.log(f"{finished}; nothing left to do")
        return finished.exit_code
    except BaseException as error:
        reporter.failed(error)
        raise
    finally:
        ends.close()
        if noticed is not None:
            noticed.close()
        reporter.close()
        worker.directory.ownership.release()
        if worker.bucket is not None:
            worker.bucket.owner.release()


def advice_on_least(config: Config, launch: Launch) -> str | None:
    """Explain that --min-nodes and --nnodes mean two things, where the user's --min-nodes seems to be ignored."""
    if config.min_nodes is None or config.min_nodes >= launch.min_nodes:
        return None
    return (
        f"--min-nodes {config.min_nodes} says with how many nodes training goes on; it begins with "
        f"{launch.min_nodes} at least, as --nnodes says"
    )


def _wait_before_return(worker: Worker, back: Return) -> None:
    """Wait until this worker may return as a new member. Raises: Stopped: it was told to stop meanwhile."""
    until = time.monotonic() + min(
        seconds_before_return(back.num_fruitless, worker.config.peer_timeout), back.seconds_left()
    )
    while (seconds := until - time.monotonic()) > 0:
        worker.stop.check()
        time.sleep(min(seconds, 0.1))


def _as_member(
    worker: Worker, program: Program, back: Return | None, ends: ExitStack, noticed: Noticed
) -> int | Return:
    """Live as one member of the job. Returns the worker's exit code, or a `Return` where the other members went on
    without this worker and nodes may join."""
    config, launch, reporter = worker.config, worker.launch, worker.reporter
    arbiter = arbiter_of(worker.directory.path, worker.bucket)
    membership = connect_worker(
        Applicant(
            launch,
            worker.stop,
            Waits(config.formation_timeout, config.peer_timeout, config.wait_timeout, config.stall_timeout),
            max_world_size=max_world_size(config),
            run_dir=worker.directory.path,
            log=reporter.log if launch.local_rank == 0 else reporter.debug,
            warn=reporter.warn,
            back=back,
            goes_on=config.on_split == "go-on",
            arbiter=lambda: arbiter,
            around=Surroundings(reach=worker.reach, require_unfinished=partial(require_unfinished, worker)),
        )
    )
    ends.callback(membership.close)
    parts = _make_parts(worker, membership, program, back, noticed)
    ends.callback(parts.files.wait_for_claim)  # before the run directory is released
    ends.callback(parts.trainer.close)
    ring = Ring(worker, membership, parts)
    _attend_to(membership, worker, ring, parts, noticed)
    ends.callback(setattr, worker.stop, "when_late", lambda _seconds: None)  # `late.save` refers to all of them
    ends.callback(noticed.let_go)
    try:
        return _through_worlds(ring, parts, comes_back=launch.is_open)
    except (LeftOut, NewerGeneration) as error:
        if not (launch.is_open and _is_left_out(error)):
            raise
        return parts.exits.give_way(error, ring.world, back, has_state=parts.resume.has_state)


def require_unfinished(worker: Worker) -> None:
    """For a node that finds no member of its job, or too few to go on. Raises: JobFinished where the run directory has
    a result of this worker's last step that is newer than this process. An older result proves nothing: the job may be
    about to begin again."""
    path, began_at = worker.directory.result_path, time.time() - seconds_since_process_start()
    with suppress(OSError):
        if path.stat().st_mtime > began_at and existing_result(path, worker.state.last_step) is not None:
            raise JobFinished(f"the run was finished without this node: {path}")


def find_world(earlier: EarlierRun, worker: Worker, warning: str | None) -> World:
    """Return the first world of this worker, and then warn: a refused worker never trains with the others. Raises: as
    `EarlierRun.first_world`."""
    world = earlier.first_world()
    if warning is not None:
        worker.reporter.warn(warning)
    return world


def _differing_code(worker: Worker, membership: Membership, program: Program) -> str | None:
    """Return a warning where the file of the task or of the training function differs from that of the node that began
    the job. Its flags, shapes and names are compared elsewhere. Notes the job's digest in the plan."""
    mine = identify_code(program.train if program.loss is None else type(worker.task))
    if mine is None:
        return None
    path, digest = mine
    theirs = membership.agreed_once("code", digest)
    worker.state.plan["code"] = theirs  # the job's digest on every rank: the plans must be equal
    if theirs == digest:
        return None
    return (
        f"{path} is not what the node has with which this job began (SHA-256 {digest}... here, {theirs}... there): "
        "where it trains otherwise, the result depends on who computes which share; give all nodes the same file"
    )


def _make_parts(
    worker: Worker, membership: Membership, program: Program, back: Return | None, noticed: Noticed
) -> RingParts:
    files = RunFiles(worker, membership.agreed_once("job_token", new_token()))
    differing = _differing_code(worker, membership, program)
    saver = Saver(worker, files, written=noticed.judge)
    earlier = EarlierRun(worker, membership, files, back)
    trainer = Trainer(program, worker, membership, saver)
    report = WorldReport(worker)
    resume = Resume(worker, membership, trainer, earlier, files, report, back)
    task, config = worker.task, worker.config
    return RingParts(
        find=partial(find_world, earlier, worker, differing),
        open_group=partial(_open_group, worker, membership),
        batches=lambda world, first_ranks: steps(
            task.train_set, task.collate, worker.state, world, config, worker.device, first_ranks, worker.reporter.warn
        ),
        trainer=trainer,
        resume=resume,
        files=files,
        saver=saver,
        report=report,
        exits=Exits(worker, membership, saver, trainer, files),
    )


def _open_group(
    worker: Worker, membership: Membership, world: World, formed: FormedGroup | None
) -> AbstractContextManager[None]:
    # No member is judged until all have the state: the others wait this long for one that is stuck.
    timeout = timedelta(seconds=worker.config.formation_timeout)
    make_store = partial(membership.group_store, world)
    backend = common_backend(world.workers)
    return process_group(
        world, make_store, backend, membership.sockets, timeout, formed, worker.device, membership.forming_timeout
    )


def _attend_to(membership: Membership, worker: Worker, ring: Ring, parts: RingParts, noticed: Noticed) -> None:
    """Connect the membership, stops and notices to this worker; they call it on threads of their own."""
    resume, exits = parts.resume, parts.exits

    def save_while_waiting(why: str | None) -> None:
        """Save what is committed: this side may not go on, and may never do so."""
        if why is not None:
            worker.reporter.warn(why)
        elif worker.bucket is None:  # it is saved by now
            return
        if ring.world is not None and resume.has_state:
            worker.state.lock.hold()  # a late stop may be saving
            try:
                world, saver = ring.world, parts.saver
                is_local = worker.bucket is None
                said = exits.save_as_last_member(world) if is_local else begin_to_save(worker, saver, world)
                if said is not None:
                    worker.reporter.log(said)
            finally:
                worker.state.lock.let_go()

    membership.joins.why_closed_in = partial(why_closed_in, worker)
    if worker.config.quarantine == "on":
        membership.joins.admissible = partial(
            admissible,
            lambda: worker.state if resume.has_state else None,
            worker.reporter.warn,
            membership.joins.news.send_once,
        )
    save_time = parts.saver.save_time
    noticed.follow(lambda: ring.world, membership.watcher.contacts.is_refused, lambda: save_time.seconds)
    late = LateStop(worker, parts.trainer, exits, lambda: ring.world if resume.has_state else None, noticed.close)
    worker.stop.when_late = late.save
    membership.at_last = late.save_at_last
    membership.survivors.may_not_go_on = save_while_waiting
    membership.side.progress = lambda: (worker.state.branches, worker.state.step) if resume.has_state else None


def _through_worlds(ring: Ring, parts: RingParts, *, comes_back: bool) -> int:
    """Run the ring to the end. Where the job cannot go on, save the state for the next start.

    Raises:
        StoreUnreachable: the store is gone, and the job with it.
        FormationFailed: the job cannot go on. JobFailed: another member's error, which would hit every member.
        UsageError: the task returns something unusable.
        LeftOut: the other members have gone on; the state is saved where no other worker uses the run directory.
    """
    try:
        return ring.run()
    except (StoreUnreachable, StoreRefused, FormationFailed, UsageError, LeftOut) as error:
        is_of_code = isinstance(error, UsageError | JobFailed)
        has_state = parts.resume.has_steps if is_of_code else parts.resume.has_state
        is_to_come_back = comes_back and _is_left_out(error)
        if isinstance(error, Refused) or is_to_come_back or ring.world is None or not has_state:
            raise
        said = parts.exits.save_for_next_start(ring.world, MEND_FIRST if is_of_code else CONTINUE)
        raise type(error)(f"{error}; {said}") from error
    finally:
        if not (comes_back and _is_left_out(sys.exception())):  # else it waits where it saves its state
            with suppress(OwnershipLost):  # the error that ended the ring says more
                parts.saver.wait()  # the snapshot in flight is valid


def _is_left_out(error: BaseException | None) -> bool:
    """Whether the other members have gone on without this worker, and may take it in again."""
    return isinstance(error, LeftOut | NewerGeneration) and not isinstance(error, Refused)
