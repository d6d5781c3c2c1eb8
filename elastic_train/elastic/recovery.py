"""Run training to its end through all the worlds that it takes: meet, form, synchronise, train, and again.

This is the ring around the loop (train.py), which knows nothing of it. An error that ends a step is classified once;
a lost peer leads to the next world, in the same process; what is the worker's own, or the job's, ends it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from elastic_train.branches import id_of, is_on
from elastic_train.config import Config, max_world_size
from elastic_train.elastic.connect import MEMBERS_FILE, Return, Waits, connect_worker, describe_members
from elastic_train.elastic.handover import Giving, Handover, Taking
from elastic_train.elastic.leaving import WaysOut
from elastic_train.elastic.loop import Beginning, Loop, WorldLoop
from elastic_train.elastic.membership import Change, Membership, new_token
from elastic_train.elastic.process_group import is_communication_error, process_group, set_group_timeout
from elastic_train.elastic.restore import Restored, sync_from_freshest
from elastic_train.elastic.saving import Saver
from elastic_train.elastic.starting import ALL_GONE, Start, describe_start
from elastic_train.elastic.worker import Worker, build, set_threads
from elastic_train.errors import (
    ElasticTrainError,
    FormationFailed,
    JobFinished,
    LeftOut,
    NewerGeneration,
    OwnershipLost,
    Refused,
    RunDirectoryError,
    RunDirectoryInUse,
    SnapshotError,
    StatesDiffer,
    Stopped,
    StoreRefused,
    StoreUnreachable,
    TrainingDiverged,
    UsageError,
    first_line,
)
from elastic_train.protocol.pace import FIRST_SECONDS
from elastic_train.rendezvous.launch import Launch
from elastic_train.rules import Activity, Failure, common_backend, seconds_before_return
from elastic_train.runlog.goodput import Phase
from elastic_train.stopping import StopSignal
from elastic_train.storage.run_record import RUN_FILE, RunRecord
from elastic_train.storage.snapshot import SnapshotInfo, set_aside
from elastic_train.training.batches import steps
from elastic_train.training.collectives import GROUP_TIMEOUT, STEP_TIMEOUT, gather_json
from elastic_train.training.group_sockets import require_unbroken
from elastic_train.training.state_hash import StateComparison
from elastic_train.training.train import Outcome
from elastic_train.world import World

DISCARDED = "discarded"
"""folder beside the snapshots"""
MAX_FRUITLESS_WORLDS = 10
"""worlds in a row in which no step was committed, beyond one for each member"""


MakeLoop = Callable[[Worker, Membership, Saver], WorldLoop]


def run(config: Config, launch: Launch, stop: StopSignal) -> int:
    """Train what the flags say to the end, or until told to stop. Returns the exit code of the worker.

    Raises:
        ElasticTrainError: what training cannot get past, one line each. Whatever the user's task raises.
    """
    return run_worker(build(config, launch, stop), Loop)


def run_worker(worker: Worker, make_loop: MakeLoop) -> int:
    """The same for a worker that is built, with the loop of one's choice."""
    reporter = worker.reporter
    back: Return | None = None
    ends = ExitStack()  # of the member that this worker is
    try:
        while True:
            outcome = _as_member(worker, make_loop, back, ends)
            if isinstance(outcome, int):
                return outcome
            back = outcome
            ends.close()
            gc.collect()  # the stores that it served and reached: others see them closed
            _wait_before_return(worker, back)
    except Stopped as stopped:
        reporter.events.write("done", outcome="stopped")
        nothing = "the workers had formed a world: nothing was trained or lost"
        reporter.say(f"{stopped} before {nothing if back is None else 'this worker was taken in again'}")
        return stopped.exit_code
    except JobFinished as finished:
        reporter.events.write("done", outcome="already_finished")
        reporter.speak(f"{finished}; nothing left to do")
        return finished.exit_code
    except BaseException as error:
        reporter.events.write("done", outcome="failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        ends.close()
        reporter.close()
        worker.directory.release()


def _wait_before_return(worker: Worker, back: Return) -> None:
    """Raises: Stopped: this worker was told to stop meanwhile."""
    until = time.monotonic() + min(
        seconds_before_return(back.num_fruitless, worker.config.peer_timeout), back.seconds_left()
    )
    while (seconds := until - time.monotonic()) > 0:
        worker.stop.check()
        time.sleep(min(seconds, 0.1))


def _as_member(worker: Worker, make_loop: MakeLoop, back: Return | None, ends: ExitStack) -> int | Return:
    """The worker's way as one member of its job: its exit code, or with what it comes back as another one, where the
    others have gone on without it and nodes may join."""
    config, launch, reporter = worker.config, worker.launch, worker.reporter
    membership = connect_worker(
        launch,
        worker.stop,
        Waits(config.formation_timeout, config.peer_timeout, config.wait_timeout, config.stall_timeout),
        max_world_size=max_world_size(config),
        run_dir=worker.directory.path,
        say=reporter.speak if launch.local_rank == 0 else reporter.debug,
        warn=reporter.warn,
        back=back,
        goes_on=config.on_split == "go-on",
    )
    ends.callback(membership.close)
    run = Run(worker, membership, make_loop, back)
    ends.callback(run.loop.close)
    try:
        return run.to_the_end()
    except (LeftOut, NewerGeneration) as error:
        if isinstance(error, Refused) or not launch.is_open:
            raise
        return run.give_way(error)


@dataclass(frozen=True)
class Interruption:
    """Why the world before this one ended, and what it took until the next meeting."""

    cause: str
    """`start`, `peer_lost`, `leave` or `join`"""
    detect_seconds: float = 0.0
    abort_seconds: float = 0.0


class Run:
    """One worker's way through the worlds of a run."""

    def __init__(self, worker: Worker, membership: Membership, make_loop: MakeLoop, back: Return | None = None) -> None:
        self._worker = worker
        self._membership = membership
        self._job_token = membership.agreed_once("job_token", new_token())
        self._saver = Saver(worker, self._job_token)
        self._start = Start(worker, membership, self._job_token, back)
        self.loop = make_loop(worker, membership, self._saver)
        self._ways_out = WaysOut(worker, membership, self._saver, self.loop, self._job_token)
        self._has_state = False
        self._back = back
        self._lost = ALL_GONE if back is not None and back.has_trained else None
        """how the run's state will be lost if this worker, which does not have it or gave it up, has to go on alone"""
        self._ended_at = time.monotonic()
        self._world: World | None = None
        self._has_formed = False
        self._incident: dict[str, Any] | None = None
        """what interrupted the run before the present world"""
        self._last_claim_warning: str | None = None
        self._noted_run: RunRecord | None = None
        membership.at_last = self._save_at_last
        membership.progress = lambda: (worker.state.branches, worker.state.step) if self._has_state else None
        membership.may_not_go_on = self._save_while_waiting

    def to_the_end(self) -> int:
        """Through as many worlds as it takes. Returns the exit code of the worker.

        Raises:
            StoreUnreachable: the store is gone, and the job with it; the state is saved.
            FormationFailed: the job cannot go on; the state is saved.
            LeftOut: others have gone on, or all were suspended for so long that their job ran out; the state is saved
                where nobody else has the run directory.
        """
        try:
            return self._through_worlds()
        except (StoreUnreachable, StoreRefused, FormationFailed, LeftOut) as error:
            comes_back = isinstance(error, LeftOut) and self._worker.launch.is_open
            if isinstance(error, Refused) or comes_back or self._world is None or not self._has_state:
                raise
            raise type(error)(f"{error}; {self._ways_out.save_for_next_start(self._world)}") from error
        finally:
            with suppress(OwnershipLost):  # whatever ended this says more
                self._saver.wait()  # the snapshot in flight is a good one

    def give_way(self, error: ElasticTrainError) -> Return:
        """The others have gone on without this worker, which is to come back."""
        return self._ways_out.give_way(error, self._world, self._back, has_state=self._has_state)

    def _through_worlds(self) -> int:
        worker, membership = self._worker, self._membership
        state = worker.state
        state.clock.enter(Phase.FORM)
        started = time.monotonic()
        world = self._start.first_world()
        self._take_job_token()
        change = Change(seconds_meet=time.monotonic() - started)
        interruption = Interruption("start")
        fruitless, last_step = 0, -1
        while True:
            if world.num_nodes < world.min_nodes and not state.is_finished:
                try:
                    self._wait_for_nodes(world)
                    world, later = membership.next_world(world, has_formed=True)
                except Stopped:
                    return self._stop_between_worlds(world)
                change = replace(later, lost=change.lost + later.lost, left=change.left + later.left)
                continue
            failure: str | None = None
            self._world, self._has_formed = world, False
            self.loop.step_started = time.monotonic()
            try:
                outcome = self._stand_by(world) if world.is_spare else self._go_through(world, change, interruption)
                if isinstance(outcome, int):
                    return outcome
                interruption = outcome
            except Exception as error:  # of any kind: the code that is trained raises what it likes
                membership.watcher.announce_broken()  # before anything else that may take its time
                verdict = self._judge(error, world)
                if verdict is not Failure.PEER:
                    is_of_task = self._has_state and not isinstance(error, ElasticTrainError)
                    # Else others go on with the state.
                    if is_of_task and (verdict is Failure.JOB or (world.num_nodes == 1 and world.is_first_of_node)):
                        self._ways_out.save_for_mended_code(world, error)
                    raise
                now = time.monotonic()
                detected_at = max(self._ended_at, self.loop.step_started)
                failure = first_line(error)
                interruption = Interruption("peer_lost", detected_at - self.loop.step_started, now - detected_at)
            # Out here the error is gone, and with it the last reference to the group: its sockets are closed.
            if failure is not None:
                self._note_loss()
            fruitless = 0 if state.step > last_step or world.is_spare else fruitless + 1
            last_step = state.step
            if fruitless > MAX_FRUITLESS_WORLDS + world.world_size:
                raise FormationFailed(f"{fruitless} worlds in a row committed no step; the last error: {failure}")
            worker.reach("meet", world)
            try:
                is_by_vote = failure is None and not world.is_spare
                world, change = membership.next_world(
                    world,
                    has_formed=self._has_formed,
                    is_by_vote=is_by_vote,
                    is_planned=is_by_vote and interruption.cause == "join",
                )
                if failure is not None:
                    worker.reporter.events.write(
                        "peer_lost",
                        error=failure,
                        reason=change.reason,
                        lost_members=[member.name for member in change.lost],
                    )
            except Stopped:
                return self._stop_between_worlds(world)

    def _judge(self, error: Exception, world: World) -> Failure:
        """Whose error this is."""
        if isinstance(error, ElasticTrainError) and not isinstance(error, FormationFailed):
            if isinstance(error, TrainingDiverged | UsageError):  # of all who train; a spare must not go on
                with suppress(StoreUnreachable):
                    self._membership.announce_fatal(world, str(error))
            return Failure.JOB
        step = self._worker.state.step + 1
        try:
            verdict = self._membership.judge(first_line(error), is_communication_error(error), step, world)
            if verdict is Failure.OWN:
                self._membership.leave(world, "error")  # so that the others do not wait for this worker
            return verdict
        except StoreUnreachable:  # then there is nobody to tell
            return Failure.OWN

    def _take_job_token(self) -> None:
        """The world's: it may not be that of the host at which this worker stood in the queue first."""
        token = self._membership.published("job_token") or self._job_token
        if token != self._job_token:
            self._worker.directory.release()  # --fresh has claimed it
            self._job_token = self._saver.job_token = self._ways_out.job_token = token

    # --- one world ----------------------------------------------------------------------------------------------------

    def _go_through(self, world: World, change: Change, interruption: Interruption) -> int | Interruption:
        """Form the world's process group and train in it; the exit code, or why it goes on with others."""
        worker, membership, state = self._worker, self._membership, self._worker.state
        reporter = worker.reporter
        self._saver.enter(world)
        formed = membership.take_formed(world)
        if formed is None or self._has_state:
            self._claim(world)
        set_threads(world, worker.config)
        backend = common_backend(world.workers)
        init_started = time.monotonic()
        membership.watcher.expect(world)
        worker.reach("init", world)
        if formed is None:
            if world.rank == 0:
                membership.job.show_place(world)
            membership.wait_for_workers(world)
        else:
            membership.wait_for_left_out(world)
            if not self._has_state:
                self._warm_up()
        # Until all have the state nobody is judged: for one that is stuck the others wait this long.
        patience = timedelta(seconds=worker.config.formation_timeout)
        make_store = partial(membership.group_store, world)
        with process_group(world, make_store, backend, membership.sockets, patience, formed, worker.device):
            sync_started = time.monotonic()
            self._has_formed = True
            membership.watcher.enter(world)
            worker.reach("sync", world)
            handover, first_ranks = None, world.world_size
            if formed is None:
                restored, voters = self._synchronise(world)
            else:
                restored, handover, num_givers = self._hand_over(world, change)
                voters = list(range(num_givers))
                if self.loop.has_room_for_handover:
                    first_ranks = num_givers
            self._note_branch(world, change)
            self._note_run(world)
            set_group_timeout(STEP_TIMEOUT)
            state.generation, state.generations = world.generation, state.generations + 1
            reporter.events.enter(world)
            reporter.events.step = state.step
            reporter.enter(world, state)
            seconds = {
                "detect": interruption.detect_seconds,
                "abort": interruption.abort_seconds,
                "meet": change.seconds_meet,
                "init": sync_started - init_started,
                "sync": time.monotonic() - sync_started,
            }
            self._tell_world(world, backend, change, interruption, restored, seconds)
            try:
                comparison = self._make_comparison(world, voters)
                begin = Beginning(handover, comparison, is_handed_over=first_ranks < world.world_size)
                return self._train_and_leave(world, restored, begin, first_ranks)
            except StatesDiffer as differ:
                return self._drop_wrong_states(world, differ)
            except Exception:
                membership.watcher.announce_broken()  # NCCL's abort, below, may wait for the others'
                raise
            finally:
                self._ended_at = time.monotonic()

    def _stand_by(self, world: World) -> int | Interruption:
        """As a spare: wait for the next world, or for the end of the run (the exit code)."""
        worker, membership = self._worker, self._membership
        self._has_formed, self._lost = True, ALL_GONE
        membership.watcher.expect(world)  # what was believed of the world before is over
        membership.watcher.enter(world)
        worker.reporter.events.enter(world)
        worker.reporter.enter(world, worker.state)
        worker.reporter.warn(
            f"this worker is a spare: a step has work for {world.world_size} workers "
            f"({'--virtual-ranks' if worker.config.reduction == 'ordered' else '--global-batch-size'}); "
            "it steps in when one of them is lost"
        )
        try:
            result = membership.stand_by(world)
        except Stopped:
            return self._ways_out.leave(world)
        return Interruption("leave") if result is None else self._ways_out.finish_as_spare(world, result)

    def _claim(self, world: World) -> None:
        """Make the run directory this generation's; a full disk does not end a run that is under way."""
        worker, is_leader = self._worker, world.is_directory_leader
        try:
            warning = worker.directory.claim(self._job_token, world.generation, worker.host, is_leader=is_leader)
        except (RunDirectoryInUse, OwnershipLost):
            raise
        except RunDirectoryError as error:
            if not self._has_state:
                raise
            warning = str(error)
        if is_leader:
            threading.Thread(target=self._write_members, args=(world,), name="members", daemon=True).start()
        if warning is not None and warning != self._last_claim_warning:
            self._last_claim_warning = warning
            worker.reporter.warn(warning)

    def _write_members(self, world: World) -> None:
        with suppress(OSError):  # it only spares newcomers a look at the endpoints
            self._worker.directory.replace_file(MEMBERS_FILE, describe_members(world, self._worker.launch.run_id))

    def _synchronise(self, world: World) -> tuple[Restored | None, list[int]]:
        """Bring all members to one state; None if this one had it already. Returns also the ranks whose state it was.

        A member may be without a state: a death can have interrupted the restoring of the first world.
        """
        worker, state = self._worker, self._worker.state
        had_state = self._has_state
        sees_place = self._membership.job.sees_place(world)
        told = gather_json(
            {"step": state.step if had_state else -1, "logged": worker.reporter.last_logged_step(), "sees": sees_place}
        )
        self._membership.job.note_place(world, is_shared=all(entry["sees"] for entry in told))
        steps = [entry["step"] for entry in told]
        if min(steps) < max(steps) or max(steps) < 0:
            set_group_timeout(GROUP_TIMEOUT)  # a large state takes its time to be read or sent
            self._membership.watcher.do(Activity.FORM, FIRST_SECONDS)
        if max(steps) < 0:
            restored = self._start.restore(world, lost=self._lost, check=self._require_unbroken)
            self._has_state = True
            return restored, list(range(world.world_size))
        source = sync_from_freshest(state, world, steps, self._require_unbroken, lambda: worker.reach("send", world))
        self._has_state = True
        if world.rank == source:
            logged = [entry["logged"] for entry in told if entry["logged"] is not None]
            worker.reporter.write_missing_commits(state, max(logged, default=state.step - 1))
        voters = [rank for rank, step in enumerate(steps) if step == steps[source]]
        if had_state:
            return None, voters
        self._set_aside()
        return Restored("peer", state.step, source), voters

    def _make_comparison(self, world: World, voters: list[int]) -> StateComparison | None:
        """Of what all members of a world begin with; None where there is nobody to compare it with."""
        worker = self._worker
        if world.world_size == 1:
            return None
        is_ordered = worker.config.reduction == "ordered"  # else BatchNorm's statistics are each rank's own
        return StateComparison(
            worker.state, worker.device, voters, with_buffers=is_ordered, is_able=self.loop.compares_states
        )

    def _drop_wrong_states(self, world: World, differ: StatesDiffer) -> Interruption:
        """The others' state is taken over in the next world, or a snapshot restored there, as by a newcomer."""
        state, reporter = self._worker.state, self._worker.reporter
        self._note_loss()
        wrong = [world.members[rank].name for rank in differ.wrong]
        is_wrong = world.rank in differ.wrong
        if is_wrong:
            self._has_state, self._lost = False, ALL_GONE if differ.has_majority else f"{differ}"
        if differ.has_majority:
            names, verb = ", ".join(wrong), "has" if len(wrong) == 1 else "have"
            message = f"{names} {verb} other weights or optimizer states than most workers, and takes over theirs"
            is_teller = world.rank == next(rank for rank in range(world.world_size) if rank not in differ.wrong)
        else:
            message = (
                f"the weights or optimizer states of {world.world_size} workers are not equal at step {state.step}, "
                "and there is no majority: the newest snapshot is restored"
            )
            is_teller = world.rank == 0
        if is_wrong or is_teller:
            reporter.events.write("states_differ", wrong=wrong, has_majority=differ.has_majority)
        if is_teller:
            reporter.warn(message)
        return Interruption("states_differ")

    def _hand_over(self, world: World, change: Change) -> tuple[Restored | None, Handover | None, int]:
        """Newcomers come into a world that was formed ahead, and get the state of those who trained, all of whom have
        it. Returns what this member started from, what is to be finished in the first step, and how many ranks had the
        state before: the lowest ones."""
        state, membership = self._worker.state, self._membership
        handover: Giving | Taking | None = None
        restored, num_givers = None, world.world_size - len(change.joined)
        if not self._has_state:
            handover = taking = Taking(state, 0, self._note_state)
            membership.is_ready_for(world)
            num_givers = world.world_size - taking.wait_for_position(membership.check_arrival)
            restored = Restored("peer", state.step, 0)
            self._claim(world)  # not before: until they come, the others write as the generation before
        elif world.rank == 0 and change.joined:
            handover = Giving(state, [0, *range(num_givers, world.world_size)])
        if self.loop.has_room_for_handover:
            return restored, handover, num_givers
        if handover is not None:
            handover.begin()
            handover.finish(self._require_unbroken)
        return restored, None, num_givers

    def _warm_up(self) -> None:
        """Before there is a process group, so that the newcomer's first step takes no longer than the others'."""
        try:
            self.loop.warm_up()
        except ElasticTrainError:
            raise
        except Exception as error:  # of the user's code; the step will raise it too, and is judged
            self._worker.reporter.debug(f"no warm-up: {first_line(error)}")

    def _require_unbroken(self) -> None:
        require_unbroken(self._membership.sockets)

    def _note_state(self, clock: dict[str, Any]) -> None:
        self._worker.state.clock.take_over(clock)
        self._has_state = True
        self._set_aside()
        if self._world is not None:
            self._note_run(self._world)
        state = self._worker.state
        if self.loop.has_room_for_handover:  # it has come within a step, after what this world has noted already
            state.remember()
            state.generations += 1
            if self._incident is not None:
                state.incidents.append(self._incident)

    def _train_and_leave(
        self, world: World, restored: Restored | None, begin: Beginning, first_ranks: int
    ) -> int | Interruption:
        worker, state = self._worker, self._worker.state
        config, task = worker.config, worker.task
        if state.is_finished:
            outcome = "already_finished" if restored is not None else "finished"
            is_saved = restored is not None and restored.source == "snapshot"
            return self._ways_out.finish(world, outcome, is_saved=is_saved)
        state.clock.enter(Phase.TRAIN)
        if first_ranks == world.world_size:  # else those who trained have just evaluated what was due
            self.loop.evaluate_if_missed(world)
        self._membership.watcher.do(Activity.COMPUTE)
        batches = steps(task.train_set, task.collate, state, world, config, worker.device, first_ranks)
        ended = self.loop.run(world, batches, begin)
        self._membership.watcher.do(Activity.FORM)
        set_group_timeout(GROUP_TIMEOUT)
        if ended is Outcome.FINISHED:
            return self._ways_out.finish(world, "finished", is_saved=False)
        if ended is Outcome.STOPPED:
            return self._ways_out.stop(world)
        state.clock.enter(Phase.FORM)
        if ended is Outcome.SOME_JOIN:
            return Interruption("join")
        if self.loop.last_votes[0]:  # what this worker said in that very step, not what it was told since
            return self._ways_out.leave(world)
        return Interruption("leave")

    # --- between worlds -----------------------------------------------------------------------------------------------

    def _wait_for_nodes(self, world: World) -> None:
        """Fewer nodes than --min-nodes: wait, without training, until some are ready to be taken in.

        Raises:
            Stopped: this worker was told to stop.
            FormationFailed: none came in time.
        """
        worker = self._worker
        limit = worker.config.wait_timeout
        worker.reporter.speak(
            f"{world.num_nodes} of at least {world.min_nodes} nodes are left: waiting {limit:.0f} s for others to join"
        )
        self._membership.watcher.expect(world)  # what ended the world before is over; its rank 0 can be found
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            worker.stop.check()
            if self._membership.can_take_in:
                return
            time.sleep(0.05)
        raise FormationFailed(
            f"only {world.num_nodes} of at least {world.min_nodes} nodes after {limit:.0f} s "
            "(--min-nodes, --wait-timeout)"
        )

    def _stop_between_worlds(self, world: World) -> int:
        """Told to stop while there was no process group.

        Raises:
            Stopped: there is nothing to save yet.
        """
        if not self._has_state:
            self._worker.stop.check()
        self._saver.enter(world)
        return self._ways_out.stop_between_worlds(world)

    def _save_while_waiting(self, why: str) -> None:
        """This side may not go on: what is committed is kept, whatever becomes of it."""
        self._worker.reporter.warn(why)
        if self._world is not None and self._has_state:
            self._worker.reporter.speak(self._ways_out.save_for_nobody(self._world))

    def _save_at_last(self) -> str:
        """Not on the training thread, which waits for a collective that will not end."""
        if self._world is None or not self._has_state:
            return "there is nothing to save"
        try:
            self.loop.abandon()
        except TrainingDiverged as diverged:
            return str(diverged)
        if not self._worker.state.is_whole:
            return "its state is of no commit, and is not saved"
        return self._ways_out.save_for_nobody(self._world)

    def _set_aside(self) -> None:
        """The snapshots of a branch that has stopped are for a person alone, now that this worker has the state of the
        side that goes on."""
        worker, state = self._worker, self._worker.state
        if self._back is None or worker.config.on_split == "wait" or worker.launch.local_rank != 0:
            return

        def is_discarded(offer: SnapshotInfo) -> bool:
            is_mine = offer.run_uid == state.run_uid and offer.host == worker.host
            return is_mine and not is_on(offer.branches, offer.step, state.branches)

        try:
            moved = set_aside(worker.snapshots_dir, DISCARDED, is_discarded)
        except SnapshotError as error:
            worker.reporter.warn(str(error))
            return
        if moved:
            worker.reporter.warn(f"moved to {DISCARDED}/ in {worker.snapshots_dir}: {', '.join(moved)}")

    def _note_run(self, world: World) -> None:
        """The run directory says whose it is."""
        state, directory = self._worker.state, self._worker.directory
        record = RunRecord(state.run_uid, state.superseded)
        if not world.is_directory_leader or not self._has_state or record == self._noted_run:
            return
        try:
            directory.replace_file(RUN_FILE, record.to_json())
        except OSError as error:
            self._worker.reporter.warn(f"{directory.path / RUN_FILE} cannot be written: {first_line(error)}")
        self._noted_run = record

    def _note_branch(self, world: World, change: Change) -> None:
        """The state says on which branch it is, from its first world on."""
        branch, state = self._membership.branch, self._worker.state
        if branch is None or branch.id == id_of(state.branches):
            return
        state.branches = (*state.branches, (branch.id, state.step))
        names = ", ".join(member.name for member in change.lost)
        self._worker.reporter.warn(
            f"{names} may train on, and so does this side from step {state.step} on, as branch {branch.id} "
            "(--on-split go-on): where the two meet, the one with fewer committed steps stops",
            branch=branch.id,
        )

    # --- telling ------------------------------------------------------------------------------------------------------

    def _note_loss(self) -> None:
        """The step in hand, if there was one, is lost: roll back what it may have touched, and book its time."""
        state = self._worker.state
        if state.rollback():
            state.clock.reassign(time.monotonic() - self.loop.step_started, Phase.TRAIN, Phase.LOST)
        state.clock.enter(Phase.FORM)

    def _tell_world(
        self,
        world: World,
        backend: str,
        change: Change,
        interruption: Interruption,
        restored: Restored | None,
        seconds: dict[str, float],
    ) -> None:
        reporter, state = self._worker.reporter, self._worker.state
        lost = [member.name for member in change.lost]
        left = [member.name for member in change.left]
        joined = [member.name for member in change.joined]
        cause = "peer_lost" if lost else "leave" if left else interruption.cause
        reporter.events.write(
            "world",
            cause=cause,
            members=[member.name for member in world.members],
            lost_members=lost,
            left_members=left,
            joined_members=joined,
            seconds=seconds,
            backend=backend,
            branch=None if self._membership.branch is None else self._membership.branch.id,
        )
        if restored is not None:
            reporter.events.write("restore", source=restored.source, restored_step=restored.step)
            reporter.say(describe_start(self._worker, world, backend, restored))
        has_joined = interruption.cause == "start" and restored is not None and restored.source == "peer"
        self._incident = None
        if interruption.cause != "start" or has_joined:
            self._incident = {
                "cause": "join" if has_joined else cause,
                "time": time.time(),
                "lost_members": lost or left,
                "committed_steps_lost": 0,
                "seconds": seconds,
            }
            state.incidents.append(self._incident)
        if restored is None:
            said = ((f"lost {', '.join(lost)}", lost), (f"{', '.join(left)} left", left))
            what = "; ".join(text for text, names in (*said, (f"took in {', '.join(joined)}", joined)) if names)
            workers = f"{world.world_size} workers go on" if world.world_size > 1 else "1 worker goes on"
            phases = " ".join(f"{name}={value:.3f}" for name, value in seconds.items())
            reporter.say(
                f"world generation={world.generation}: {workers} at step {state.step + 1}; "
                f"{what or 'the members are the same'}; {phases} (s)"
            )
        reporter.say_for_node(
            f"in world generation={world.generation} as rank {world.rank} of {world.world_size}; "
            f"rank 0 on {world.members[0].host} reports"
        )
