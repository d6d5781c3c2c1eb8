"""The ring around training: it takes one worker through the worlds of a run, stage by stage.

It does not know how a step is made. An error inside a world is judged once: a lost peer leads to the next world, in the
same process; an error of the worker's own, or of the job, ends the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_train.elastic.exits import Exits
from elastic_train.elastic.formed_group import FormedGroup
from elastic_train.elastic.membership import Change, Membership
from elastic_train.elastic.process_group import PresentGroup
from elastic_train.elastic.resume import Resume, Resumed
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.trainer import Trainer
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_report import Interruption, WorldReport, losses_of
from elastic_train.errors import FormationFailed, StatesDiffer, Stopped, first_line
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.rules import Activity, Failure
from elastic_train.runlog.goodput import Phase
from elastic_train.training.loader_processes import is_loaders_death
from elastic_train.training.reduction import Share
from elastic_train.training.step import Outcome
from elastic_train.world import World


class Stage(StrEnum):
    """The stage that a worker is in."""

    MEET = "meet"
    """agree with the other members on the next world; at first, find them"""
    WAIT = "wait"
    """wait for nodes: there are fewer than --min-nodes"""
    FORM = "form"
    """make the process group with the other members"""
    SYNC = "sync"
    """bring all members to one state"""
    TRAIN = "train"
    STAND_BY = "stand by"
    """wait as a spare"""
    LEAVE = "leave"
    """leave alone; the other members go on"""
    STOP = "stop"
    """stop together with all members, or between two worlds"""
    FINISH = "finish"


ENDS = {Outcome.FINISHED: Stage.FINISH, Outcome.STOPPED: Stage.STOP}
MAX_FRUITLESS_WORLDS = 10
"""worlds in a row without a committed step, in addition to one for each member"""


@dataclass(frozen=True)
class RingParts:
    """What the stages of a ring work with."""

    find: Callable[[], World]
    """returns the first world. Blocks until there is one; raises as `EarlierRun.first_world`"""
    open_group: Callable[[World, FormedGroup | None], AbstractContextManager[None]]
    """enters the process group of a world; the group may have been formed ahead"""
    batches: Callable[[World, int | None], Iterable[Share]]
    """this rank's shares, from the run's position on. The int: ranks with samples in the first step; None: all"""
    trainer: Trainer
    resume: Resume
    files: RunFiles
    saver: Saver
    report: WorldReport
    exits: Exits


class Stages:
    """The stages of one worker. The method with a stage's name runs it, and returns the next stage or the exit code.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        parts: RingParts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world: World | None = None
        """the present world, also while it waits for nodes; during an agreement, the world before"""
        self._worker, self._membership, self._parts = worker, membership, parts
        self._clock = clock
        self._num_fruitless, self._last_step = 0, -1
        """worlds in a row without a committed step; committed steps at the end of the last one"""
        self._wait_until: float | None = None
        """when to give up the wait for nodes. Kept until a world trains: else the first member that gives up would make
        the others begin anew"""
        self._change = Change()
        """from the previous world to the present one"""
        self._interruption = Interruption("start")
        """what ended the previous world"""
        self._is_inside = False
        """whether the worker is inside a world, where errors are judged"""
        self._has_formed = False
        """whether the process group of the present world has stood"""
        self._is_formed_ahead = False
        """whether that group was formed while the previous world trained"""
        self._group = PresentGroup()
        self._resumed: Resumed | None = None
        """kept until training begins; if it is still there at the finish, this process has trained nothing"""
        self._began = clock()
        """when the present stage began"""

    # --- between worlds -----------------------------------------------------------------------------------------------

    def meet(self) -> Stage:
        """Agree with the other members on the next world. Blocks until there is one."""
        self._group.close()
        self._is_inside = False
        before, failure = self.world, self._interruption.failure
        if before is None:
            return self._enter(self._parts.find(), Change(seconds_meet=self._clock() - self._began))
        if failure is not None:
            self._parts.resume.lose_step(self._clock() - self._parts.trainer.step_started)
        self._count_fruitless(before, failure)
        self._worker.reach("meet", before)
        is_by_vote = failure is None and not before.is_spare
        is_planned = is_by_vote and self._interruption.cause == "join"
        try:
            with self._waiting():
                world, change = self._membership.next_world(
                    before, has_formed=self._has_formed, is_by_vote=is_by_vote, is_planned=is_planned
                )
        except Stopped:
            return Stage.STOP
        if world is before and world.is_spare:  # that world goes on
            self._is_inside = True
            return Stage.STAND_BY
        if failure is not None:
            self._parts.report.lost(failure, change)
        return self._enter(world, change)

    def _count_fruitless(self, before: World, failure: str | None) -> None:
        """Raise FormationFailed where too many worlds in a row have committed no step."""
        step, is_fruitful = self._worker.state.step, self._worker.state.step > self._last_step or before.is_spare
        self._num_fruitless, self._last_step = 0 if is_fruitful else self._num_fruitless + 1, step
        if self._num_fruitless > MAX_FRUITLESS_WORLDS + before.world_size:
            raise FormationFailed(f"{self._num_fruitless} worlds in a row committed no step; the last error: {failure}")

    def _enter(self, world: World, change: Change) -> Stage:
        self.world, self._change, self._has_formed = world, change, False
        if world.num_nodes < world.min_nodes and not self._worker.state.is_finished:
            return Stage.WAIT
        return self._begin(world)

    def _begin(self, world: World) -> Stage:
        self._is_inside = True
        self._worker.set_environment(world)
        self._parts.trainer.step_started = self._clock()
        return Stage.STAND_BY if world.is_spare else Stage.FORM

    def wait(self) -> Stage:
        """Wait until there are --min-nodes again."""
        world, worker, membership = self._present, self._worker, self._membership
        if self._wait_until is None:
            self._wait_until = self._clock() + worker.config.wait_timeout
        left = max(0.0, self._wait_until - self._clock())
        few = f"{world.num_nodes} of at least {world.min_nodes} nodes are here"
        worker.reporter.log(f"{'; '.join([few, *losses_of(self._change)])}: waiting {left:.0f} s for others to join")
        worker.state.clock.count_nodes(world.num_nodes)
        self._parts.files.hold_bucket(world, has_state=self._parts.resume.has_state)
        try:
            if not membership.barriers.wait_for_nodes(world, self._wait_until, lambda: membership.joins.is_end_due):
                return self._begin(world)
            with self._waiting():
                following, later = membership.next_world(world, has_formed=True)
        except Stopped:
            return Stage.STOP
        lost, gone = self._change.lost + later.lost, self._change.left + later.left
        return self._enter(following, replace(later, lost=lost, left=gone))

    # --- inside a world -----------------------------------------------------------------------------------------------

    def form(self) -> Stage:
        """Make the process group with the other members; if it was formed ahead, only wait for left-out workers."""
        world, membership, parts, worker = self._present, self._membership, self._parts, self._worker
        parts.report.begins(world, self._change, self._interruption)  # now: the group may fail to form
        parts.saver.enter(world)
        formed = membership.joins.take_formed(world)
        self._is_formed_ahead = formed is not None
        if formed is None or parts.resume.has_state:  # else the members with state still write as the old generation
            parts.files.claim(world, has_state=parts.resume.has_state)
        worker.share_cores(world)
        membership.watcher.expect(world)
        worker.reach("init", world)
        if formed is None and world.rank == 0:
            membership.job.place.show(world.uid, is_decided=True)
        barriers = membership.barriers
        with self._waiting():
            (barriers.wait_for_workers if formed is None else barriers.wait_for_left_out)(world)
        if formed is not None and not parts.resume.has_state:
            parts.trainer.warm_up()
        with self._waiting():
            self._group.enter(parts.open_group(world, formed))
        self._has_formed = True
        membership.watcher.enter(world)
        return Stage.SYNC

    def sync(self) -> Stage:
        """Bring all members to one state, and report the world."""
        world, parts, state = self._present, self._parts, self._worker.state
        self._worker.reach("sync", world)
        self._resumed = resumed = parts.resume.into(world, self._change, is_formed_ahead=self._is_formed_ahead)
        if parts.resume.has_state:  # else it has only the position, and its clock is not yet the run's
            state.generation, state.generations = world.generation, state.generations + 1
        init, sync = self._began - parts.trainer.step_started, self._clock() - self._began
        parts.report.stands(
            world, self._membership.side.branch, self._change, self._interruption, resumed.restored, init, sync
        )
        return Stage.FINISH if state.is_finished else Stage.TRAIN

    def train(self) -> Stage:
        """Train until the votes of a step end the world, or training is finished."""
        world, membership, parts, state = self._present, self._membership, self._parts, self._worker.state
        resumed, self._resumed = self._resumed, None
        assert resumed is not None, "all have come to one state"
        self._wait_until = None
        state.clock.enter(Phase.TRAIN)
        parts.saver.begin(state)
        if resumed.begin.first_ranks is None:  # else those that trained have just evaluated what was due
            parts.trainer.evaluate_if_missed(world)
        membership.watcher.do(Activity.COMPUTE)
        try:
            ended = parts.trainer.run(world, parts.batches(world, resumed.begin.first_ranks), resumed.begin)
        except StatesDiffer as differ:
            membership.watcher.do(Activity.FORM, FIRST_SECONDS)  # the reduction is over; the snapshot below takes time
            if not differ.has_majority:
                parts.saver.wait()  # else it appears during a restore, and deletes the snapshot that is being read
            parts.resume.drop_wrong_states(world, differ, self._clock() - parts.trainer.step_started)
            self._interruption = Interruption("states_differ")
            return Stage.MEET
        membership.watcher.do(Activity.FORM)
        if ended in ENDS:
            return ENDS[ended]
        state.clock.enter(Phase.FORM)
        self._interruption = Interruption("join" if ended is Outcome.SOME_JOIN else "leave")
        # Use this worker's vote in that very step: it may have been told to stop since.
        return Stage.LEAVE if ended is Outcome.SOME_LEAVE and parts.trainer.last_votes.told_to_stop else Stage.MEET

    def stand_by(self) -> Stage | int:
        """Wait as a spare for the next world, or for the end of the run."""
        world, membership = self._present, self._membership
        self._wait_until = None
        self._parts.resume.stand_by()
        membership.watcher.expect(world)  # forget what was observed in the previous world
        membership.watcher.enter(world)
        if not self._has_formed:  # else this spare has returned to its place
            self._has_formed = True
            self._parts.report.stands_by(world)
        try:
            result = membership.barriers.stand_by(world)
        except Stopped:
            return Stage.LEAVE
        if result is not None:
            return self._parts.exits.finish_as_spare(world, result)
        self._interruption = Interruption("leave")
        return Stage.MEET

    def _break_off(self, error: Exception) -> Stage:
        """Judge the error that has ended the world. Raises it unless a lost peer caused it."""
        self._membership.watcher.announce_broken()  # first of all: the rest may take time
        broken_at, world, resume = self._clock(), self._present, self._parts.resume
        self._resumed = None
        error = self._group.break_off(error, self._worker.device)
        # Told to stop while it waited for a store; or a loader of the user's own got the signal as well, and has died.
        is_stop = isinstance(error, Stopped) or (self._worker.stop.is_requested and is_loaders_death(error))
        if is_stop and resume.has_state:
            self._is_inside = False
            resume.lose_step(broken_at - self._parts.trainer.step_started)
            return Stage.STOP
        step = self._worker.state.step + (not self._parts.trainer.was_applied)  # the one in hand
        verdict = self._membership.survivors.judge(error, step, world)
        if verdict is not Failure.PEER:
            self._parts.exits.fail(error, verdict, world, has_state=resume.has_state)
        failure = first_line(error)
        del error  # the frames of its traceback refer to this one
        detected = broken_at - self._parts.trainer.step_started
        self._interruption = Interruption("peer_lost", detected, self._clock() - broken_at, failure)
        return Stage.MEET

    # --- the ends -----------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """End after training is complete, perhaps before this process began."""
        restored = None if self._resumed is None else self._resumed.restored
        is_saved = restored is not None and restored.source == "snapshot"
        return self._parts.exits.finish(
            self._present, "finished" if restored is None else "already_finished", is_saved=is_saved
        )

    def stop(self) -> int:
        """End because this worker was told to stop. Raises: Stopped where it has nothing to save yet."""
        if self._is_inside:
            return self._parts.exits.stop(self._present)
        if not self._parts.resume.has_state:
            self._worker.stop.check()
        return self._parts.exits.stop_between_worlds(self._present)

    def leave(self) -> int:
        """End because this node alone was told to stop."""
        return self._parts.exits.leave(self._present)

    def _waiting(self) -> AbstractContextManager[None]:
        """Release the state's lock inside the block, so that a late stop may save while this worker waits for members
        that are busy or stuck. Without a state the lock stays held, and a late stop waits for it."""
        return self._worker.state.lock.released() if self._parts.resume.has_state else nullcontext()

    @property
    def _present(self) -> World:
        assert self.world is not None, "only the first agreement has none"
        return self.world


STAGES: dict[Stage, Callable[[Stages], Stage | int]] = {stage: getattr(Stages, stage.name.lower()) for stage in Stage}


class Ring(Stages):
    """Takes one worker from stage to stage, and thereby through its worlds."""

    def run(self) -> int:
        """Run the stages until the end. Returns the exit code of the worker.

        Raises:
            Stopped: this worker was told to stop, and has no state. JobFinished: the job had finished before.
            StoreUnreachable, FormationFailed, LeftOut: this worker cannot go on.
            An error of the worker's own, or of the job.
        """
        self._worker.state.clock.enter(Phase.FORM)
        stage: Stage | int = Stage.MEET
        try:
            while isinstance(stage, Stage):
                self._began = self._clock()
                following = self._guarded(stage)
                where = "" if self.world is None else f" generation={self.world.generation} rank={self.world.rank}"
                at = f"step={self._worker.state.step} ({self._clock() - self._began:.3f} s)"
                self._worker.reporter.debug(f"{stage} -> {following}{where} {at}")
                stage = following
            return stage
        finally:
            self._group.close(sys.exception())

    def _guarded(self, stage: Stage) -> Stage | int:
        try:
            return STAGES[stage](self)
        except Exception as error:  # of any kind: the trained code may raise anything
            if not self._is_inside:
                raise
            following = self._break_off(error)
        # The error is gone here, and with it the last reference to the group, so its sockets are closed.
        return following
