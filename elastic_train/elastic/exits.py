"""The exits of a run: finished, stopped with all members, leaving alone. Each ends with the worker's exit code."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from elastic_train.branches import Position, describe, id_of, parting_step
from elastic_train.elastic.connect import Return
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import set_group_timeout
from elastic_train.elastic.result import save_result, write_result
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.saving_together import (
    make_way,
    save_in_place_of_others,
    save_soon,
    save_together,
    warned_before_kill,
)
from elastic_train.elastic.trainer import Trainer
from elastic_train.elastic.worker import Worker
from elastic_train.errors import (
    ElasticTrainError,
    LeftOut,
    NewerGeneration,
    OwnershipLost,
    StoreUnreachable,
    Superseded,
    add_own_note,
    first_line,
)
from elastic_train.protocol.probes import Probe, probe
from elastic_train.rules import Activity, Failure
from elastic_train.runlog.event_types import LEFT_OUT, Done, NoticeChanged, RunOutcome, StoppedBySignal, Warned
from elastic_train.runlog.goodput import Phase
from elastic_train.stopping import StopSignal
from elastic_train.training.collectives import GROUP_TIMEOUT, barrier
from elastic_train.training.reduction import buffers_of_rank_0, take_buffers
from elastic_train.training.state import TrainState
from elastic_train.wording import main_metrics
from elastic_train.world import World

SAVE_SECONDS = 300.0
"""for which a worker stays while another worker of its node saves the state for all of them"""
CONTINUE = "start all nodes again to continue"
MEND_FIRST = "mend that and start all nodes again"
"""advice where the user's code has failed, and would fail again"""
NOT_WHOLE = "its state is of no commit, and is not saved"
UNSAVED = 1
"""the exit code of a worker that has trained to the end, or was told to stop, and could not save its state. At the end
`run` returns it to a loop of the user's own"""


class Exits:
    """What a worker does before it ends, so that the state is safe and no member waits for it."""

    def __init__(self, worker: Worker, membership: Membership, saver: Saver, trainer: Trainer, files: RunFiles) -> None:
        self._worker, self._membership, self._files = worker, membership, files
        self._saver, self._trainer = saver, trainer

    def finish(self, world: World, outcome: RunOutcome, *, is_saved: bool) -> int:
        """Finish: write the last snapshot and result.json, and release the waiting agents. Every rank calls this."""
        worker, state, reporter = self._worker, self._worker.state, self._worker.reporter
        state.clock.enter(Phase.FORM)
        set_group_timeout(GROUP_TIMEOUT)
        self._trainer.evaluate_if_missed(world)
        _take_buffers_of_rank_0(worker, world, self._membership)
        if not is_saved and self._saver.is_last_writer(world):
            self._saver.save_and_wait(state)
        save_in_place_of_others(worker, self._saver, world)
        worker.reach("finish", world)
        data = write_result(worker, world, self._files, has_trained=outcome == "finished")
        self._files.leave_bucket(world)
        self._membership.watcher.leave()  # a member that has finished may go, and is not taken for lost
        self._membership.barriers.finish(world, data.decode())
        self._membership.barriers.end_together(world)
        worker.reach("exit", world)
        unsaved = self._saver.unsaved(state)
        reporter.events.write(Done(outcome=outcome, unsaved=True if unsaved else LEFT_OUT))
        measured = "".join(f", test {name} {value}" for name, value in main_metrics(state.test_metrics).items())
        reporter.report_for_node(f"{outcome.replace('_', ' ')} at step {state.step}{unsaved}")
        if outcome == "already_finished":
            reporter.report(
                f"the run in {worker.directory.path} is finished: {state.step} steps{measured}. Nothing left to do; "
                f"{_what_trains_on(state, worker.config.max_steps)}, --fresh starts anew{unsaved}"
            )
        else:
            summary = json.loads(data)
            reporter.report(
                f"finished: {state.step} steps{measured}, {summary['wall_seconds']:.1f} s, "
                f"{summary['goodput']['ratio']:.0%} of the wall time in training; {worker.directory.result_path}"
                f"{unsaved}{'; the same command goes on from the newest snapshot' if unsaved else ''}"
            )
        return UNSAVED if unsaved else 0

    def finish_as_spare(self, world: World, result: str) -> int:
        """Finish as a spare: write the job's result.json where this node's run directory lacks it."""
        self._membership.watcher.leave()
        if world.is_directory_leader:
            save_result(self._worker, result.encode())
        self._worker.reporter.events.write(Done(outcome="finished"))
        path = self._worker.directory.result_path
        self._worker.reporter.log(f"the run is finished; this spare was not needed; {path}")
        return 0

    def stop(self, world: World) -> int:
        """Stop together with all members, which were told to at this step: save the state for the next start.

        Raises:
            RuntimeError, FormationFailed: a member is lost before all have committed the step.
        """
        state, watcher = self._worker.state, self._membership.watcher
        # A member that a death held up in the last collective is a step behind: it trains on, and must not save here.
        watcher.do(Activity.REDUCE)
        with state.lock.released():
            barrier()
        _take_buffers_of_rank_0(self._worker, world, self._membership)
        watcher.do(Activity.FORM)
        self._worker.stop.settle()
        state.stopped_at = state.step
        set_group_timeout(GROUP_TIMEOUT)
        started = time.monotonic()
        save_together(self._worker, self._saver, world, lambda: watcher.headless is not None)
        self._saver.wait()
        save_in_place_of_others(self._worker, self._saver, world)
        save_seconds = time.monotonic() - started
        self._files.leave_bucket(world)
        barrier()  # else an agent may end a node whose directory leader is still writing
        watcher.leave()
        self._membership.joins.announce_leaving()  # newcomers continue from the snapshot
        self._membership.barriers.end_together(world)
        return self._report_stopped(save_seconds)

    def stop_between_worlds(self, world: World) -> int:
        """Stop between two worlds. There is no process group for an agreement, so each node saves its own state."""
        started, self._worker.state.stopped_at = time.monotonic(), self._worker.state.step
        self._saver.enter(world)
        if world.is_first_of_node:
            with _saving_alone(self._worker, self._saver):
                self._saver.save_and_wait(self._worker.state)
                self._saver.wait()
        if world.num_nodes == 1:  # else the other nodes' next world may take long
            self._files.leave_bucket_alone(world)
        code = self._report_stopped(time.monotonic() - started)
        _let_first_save(world, self._worker.stop, self._membership)
        return code

    def leave(self, world: World) -> int:
        """Leave because this node alone was told to stop; the step in hand is committed, and other members have it."""
        worker = self._worker
        worker.stop.settle()
        try:
            self._membership.leave(world)
        except StoreUnreachable as error:  # the other members will lose it as a peer
            worker.reporter.warn(f"{error}; this worker leaves without a notice to the others")
        with suppress(OwnershipLost):  # the other members may be a generation further
            self._saver.wait()
        self._write_why()
        worker.reporter.events.write(Done(outcome="stopped"))
        what = "a spare" if world.is_spare else f"rank {world.rank}"
        worker.reporter.log(f"{what} leaves at step {worker.state.step}; the others go on")
        return 128 + worker.stop.cause

    def stop_late(self, world: World) -> int:
        """Stop although no commit comes in time. Runs on another thread; the training thread has lost the state's lock.
        Each node saves the last commit for itself, as it does not know which other nodes were told to stop."""
        stop, state, started = self._worker.stop, self._worker.state, time.monotonic()
        stop.settle()
        state.stopped_at = state.step
        if state.is_step_open:
            state.clock.lose(time.monotonic() - self._trainer.step_started)
        if world.is_first_of_node and state.step > 0:
            with _saving_alone(self._worker, self._saver):
                self._saver.save_beside(state)
        self._files.leave_bucket_alone(world)
        code = self._report_stopped(time.monotonic() - started)
        with suppress(StoreUnreachable):  # the other members will lose it as a peer
            self._membership.leave(world, is_by_vote=False)
        _let_first_save(world, stop, None)
        return code

    def _report_stopped(self, save_seconds: float) -> int:
        worker, state, reporter = self._worker, self._worker.state, self._worker.reporter
        self._write_why(save_seconds)
        what, unsaved = f"stopped by {worker.stop.why}", self._saver.unsaved(state)
        reporter.events.write(Done(outcome="stopped", unsaved=True if unsaved else LEFT_OUT))
        reporter.report_for_node(f"{what} at step {state.step}{unsaved}")
        reporter.report(
            f"{what} at step {state.step} ({_place_of(state)}){unsaved}; the same command continues from "
            f"{'the newest snapshot' if unsaved else 'here'}"
        )
        return UNSAVED if unsaved else 128 + worker.stop.cause

    def _write_why(self, save_seconds: float = LEFT_OUT) -> None:
        """Write the signal or the notice by which this worker ends, and how many seconds it had left."""
        reporter, notice = self._worker.reporter, self._worker.stop.notice
        if notice is None:
            reporter.events.write(StoppedBySignal(signal=self._worker.stop.cause.name))
            return
        left = None if notice.deadline is None else notice.deadline - time.time()
        told = notice.to_fields()
        reporter.events.write(NoticeChanged(state="left", seconds_left=left, **told, save_seconds=save_seconds))
        if left is not None and left < 0:
            reporter.warn(f"this node's deadline was {-left:.1f} s ago, by its own clock ({notice.described})")

    def save_for_next_start(self, world: World, advice: str) -> str:
        """Save the last commit on each node, as the live nodes are unknown. Returns advice for the user."""
        self._worker.state.rollback()
        if not self._worker.state.is_whole:
            return NOT_WHOLE
        self._saver.enter(world)
        if world.is_first_of_node:
            return self._save_alone(advice)
        _stay_for_first(world, SAVE_SECONDS, lambda: self._worker.stop.is_requested)
        return self._describe_saved(advice)

    def give_way(
        self, error: ElasticTrainError, world: World | None, before: Return | None, *, has_state: bool
    ) -> Return:
        """Give way to members that have gone on without this worker. Saves its state, as all of them may be lost before
        it is a member again, and leaves the membership. Returns what it brings along as a newcomer.

        Args:
            before: what it brought along the last time.
        """
        worker, membership, state = self._worker, self._membership, self._worker.state
        membership.watcher.leave()
        membership.job.stand_down()  # first: the rest may take time
        saved = self._save_before_return(world) if world is not None and has_state else ""
        discarded: Any = LEFT_OUT
        if isinstance(error, Superseded) and has_state and state.branches != error.winner.branches:
            discarded = _discarded(worker, error.winner)
            saved += f"; discarded: {discarded['what']}"
        who = f"{worker.host}/{worker.launch.local_rank}/{os.getpid()}, {membership.uid}"
        place = "" if world is None else f", rank {world.rank} of generation {world.generation}"
        message = f"{error}; it was {who}{place}, and comes back as a newcomer{saved}"
        void = worker.reporter.void_commits(state) or LEFT_OUT
        worker.reporter.warn(Warned(message=message, was=membership.uid, void=void, discarded=discarded))
        worker.reporter.leave()
        self._files.release()
        state.run_uid = state.run_uid or membership.published("run_uid") or ""  # a spare has no state of it
        if state.generation is not None:  # else its time is in no run's totals, and counts if it begins a run
            state.clock.begin_anew()
            state.generation = None
        others = () if world is None else tuple(member for member in world.members if member is not world.me)
        stores = tuple(member.store for member in others if member.store is not None)
        if isinstance(error, Superseded):
            stores = (error.winner.store, *stores)
        has_trained, by = bool(state.run_uid), error.by if isinstance(error, LeftOut) else None
        was = () if by is None else ((membership.uid, by),)
        if before is None or membership.has_settled:
            return Return(membership.uid, stores, has_trained, 0, time.monotonic() + worker.config.wait_timeout, was)
        stores, was = tuple(dict.fromkeys((*stores, *before.stores))), (*before.was, *was)
        return Return(membership.uid, stores, has_trained, before.num_fruitless + 1, before.deadline, was)

    def _save_before_return(self, world: World) -> str:
        state = self._worker.state
        state.rollback()
        if not world.is_first_of_node or not state.is_whole:
            return ""
        self._saver.enter(world)
        with suppress(OwnershipLost):  # the other members' snapshots will be there
            if save_soon(self._worker, self._saver):
                return f"; the state of step {state.step} is saved, in case that nobody else is left"
        return ""

    def save_as_last_member(self, world: World) -> str:
        """Save the state without the training thread, in case no other member lives. Returns a line for the user."""
        if world.is_first_of_node:
            return self._save_alone("in case that no other is left")
        return "the first worker of this node may have saved the state"

    def fail(self, error: Exception, verdict: Failure, world: World, *, has_state: bool) -> NoReturn:
        """End with an error that no lost peer has caused. Raises it."""
        is_of_task = has_state and not isinstance(error, ElasticTrainError)
        # In the other cases members go on with the state.
        if is_of_task and (verdict is Failure.JOB or (world.num_nodes == 1 and world.is_first_of_node)):
            self._save_for_mended_code(world, error)
        raise error

    def _save_for_mended_code(self, world: World, error: Exception) -> None:
        """Save the last commit for a start with repaired code, after the code has failed on every member that tried the
        step. Adds the outcome as a note to the error."""
        state = self._worker.state
        if state.step == 0:
            return
        self._membership.watcher.leave()  # else it would take this thread for stuck
        try:
            said = self.save_for_next_start(world, MEND_FIRST)
        except Exception as failed:  # from a broken device, say; the first error says more
            said = f"the state of step {state.step} could not be saved: {first_line(failed)}"
        add_own_note(error, said)

    def _save_alone(self, advice: str) -> str:
        try:
            is_saved = self._saver.save_and_wait(self._worker.state)
        except OwnershipLost as error:
            return str(error)
        return self._describe_saved(advice) if is_saved else "the state could not be saved, the warning above says why"

    def _describe_saved(self, advice: str) -> str:
        return f"the state of step {self._worker.state.step} is saved, {advice}"


@contextmanager
def _saving_alone(worker: Worker, saver: Saver) -> Iterator[None]:
    """Make way for the last state, which this node saves for itself in the block. Warn where another job owns the run
    directory or bucket by now, so that it is not saved. A newer generation of this job saves the state itself."""
    try:
        make_way(worker, saver)
        with warned_before_kill(worker, saver):
            yield
    except NewerGeneration:
        pass
    except OwnershipLost as error:
        worker.reporter.warn(str(error))


def _take_buffers_of_rank_0(worker: Worker, world: World, membership: Membership) -> None:
    """Give rank 0's buffers to all ranks, as each run directory's leader saves its own. They may differ where nothing
    was evaluated, or averaged weights were. All ranks end at this step and call it. Raises: as `buffers_of_rank_0`."""
    if world.world_size == 1 or worker.config.reduction == "ordered":  # the buffers are equal already
        return
    state, check = worker.state, partial(membership.sockets.require_unbroken, worker.device)
    averaged = [state.averaged.model] if state.averaged else []
    with state.lock.released():  # a late stop may save meanwhile, with this rank's own buffers
        received = [
            buffers_of_rank_0(one, check, saved_alone=True) for one in (*state.kept.modules.values(), *averaged)
        ]
    for one in received:
        take_buffers(one)


def _what_trains_on(state: TrainState, max_steps: int | None) -> str:
    """Describe what trains on after a finished run."""
    if state.step < state.plan["last_step"]:
        return (
            f"the training function had returned, before step {state.plan['last_step']}; another --epochs or "
            "--max-steps, another value of a flag of your own, or a change of its file enters it again"
        )
    return f"a larger {'--max-steps' if max_steps == state.last_step else '--epochs'} trains on"


def _discarded(worker: Worker, winner: Position) -> dict[str, Any]:
    """Describe the steps of this worker's branch that the winner's branch does not have."""
    state = worker.state
    first = parting_step(state.branches, winner.branches) + 1
    what = f"steps {first} to {state.step} of {describe(state.branches)} on {worker.host}"
    return {"branch": id_of(state.branches) or None, "first": first, "last": state.step, "what": what}


def _place_of(state: TrainState) -> str:
    """Return `epoch 55 of 80, 1124 of 1124 samples`. Between two epochs this is the end of the first, as in events."""
    is_at_end = state.step > 0 and state.samples_done == 0
    epoch, samples = (state.epoch, state.length) if is_at_end else (state.epoch + 1, state.samples_done)
    return f"epoch {epoch} of {state.num_epochs}, {samples} of {state.length} samples"


def _let_first_save(world: World, stop: StopSignal, unnotified: Membership | None) -> None:
    """Do as `_stay_for_first`, but no longer than a signal or a notice leaves: the first worker may not have been told.
    `unnotified` is the membership where other members may still wait for this worker."""
    if world.is_first_of_node:
        return
    if unnotified is not None:
        with suppress(StoreUnreachable):
            unnotified.leave(world)
    is_open = stop.notice is not None and stop.notice.deadline is None  # and no agent was told, so no SIGKILL follows
    left = None if is_open else stop.seconds_left()
    _stay_for_first(world, SAVE_SECONDS if left is None else min(SAVE_SECONDS, left))


def _stay_for_first(world: World, seconds: float, may_go: Callable[[], bool] = lambda: False) -> None:
    """Stay while the node's first worker saves: an agent that loses one worker ends all, after 30 s with SIGKILL."""
    first, deadline = world.first_of_node.address, time.monotonic() + seconds
    while not may_go() and time.monotonic() < deadline and probe(first) is Probe.ACCEPTED:
        time.sleep(0.1)
