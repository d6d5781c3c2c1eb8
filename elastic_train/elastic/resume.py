"""What a worker holds of the run's state, and how the members of a world come to hold one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastic_train.branches import id_of
from elastic_train.elastic.connect import Return
from elastic_train.elastic.earlier_run import EarlierRun, compare_with_peers
from elastic_train.elastic.handover import Giving, Handover, Taking
from elastic_train.elastic.membership import Change, Membership
from elastic_train.elastic.process_group import set_group_timeout
from elastic_train.elastic.restore import ALL_GONE, Restored, sync_from_freshest
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.states_check import own_line
from elastic_train.elastic.trainer import Trainer
from elastic_train.elastic.whole_steps import Beginning
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_report import WorldReport
from elastic_train.errors import SnapshotError, StatesDiffer
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.rules import Activity, apart, freshest
from elastic_train.runlog.event_types import StatesDiffered, Warned
from elastic_train.runlog.goodput import Phase
from elastic_train.training.collectives import GROUP_TIMEOUT, STEP_TIMEOUT, barrier, gather_json
from elastic_train.training.ratings import latest
from elastic_train.training.state_hash import plain_hashes
from elastic_train.world import World


class Holding(Enum):
    """What a worker holds of the run."""

    NOTHING = "nothing"
    SPARE = "a spare's place"
    """other members have trained steps that it does not have"""
    STATE = "the state"


@dataclass(frozen=True)
class Resumed:
    """What a world starts from."""

    restored: Restored | None
    """where this worker got its state; None where it had one"""
    begin: Beginning
    """what is still to be finished in the first step"""


class Resume:
    """Brings one worker to the state of each world that it enters.

    Args:
        back: what this worker brings along, where it was a member before and was left out.
    """

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        trainer: Trainer,
        earlier: EarlierRun,
        files: RunFiles,
        report: WorldReport,
        back: Return | None = None,
    ) -> None:
        self._worker, self._membership, self._trainer = worker, membership, trainer
        self._earlier, self._files, self._report = earlier, files, report
        self._was_left_out = back is not None
        self.holding = Holding.SPARE if back is not None and back.has_trained else Holding.NOTHING
        self._why_dropped: str | None = None
        """why this worker dropped its state: it was wrong, or not whole"""
        self._wrong_at = -1
        """committed steps when its state was wrong"""

    @property
    def has_state(self) -> bool:
        return self.holding is Holding.STATE

    @property
    def has_steps(self) -> bool:
        """Whether this worker has a state in which a step was committed."""
        return self.has_state and self._worker.state.step > 0

    @property
    def _why_lost(self) -> str | None:
        """How the run's state is lost if this worker, which lacks it, goes on alone; None where the run may have no
        state yet."""
        return ALL_GONE if self.holding is Holding.SPARE else self._why_dropped

    def stand_by(self) -> None:
        """Note that this worker is a spare: without a state of its own, it depends on the members that train."""
        if not self.has_state:
            self.holding = Holding.SPARE

    def into(self, world: World, change: Change, *, is_formed_ahead: bool) -> Resumed:
        """Bring the members of `world` to one state. Every rank calls it, in the world's process group.

        Raises:
            FormationFailed, RuntimeError: a member is lost.
            SnapshotError, TaskMismatch: as `EarlierRun.restore`. JobFinished, Stopped: as `Arrival.check`.
        """
        handover, first_ranks = None, None
        if is_formed_ahead:
            restored, handover, num_givers = self._hand_over(world, change)
            voters = list(range(num_givers))
            if self._trainer.has_room_for_handover and num_givers < world.world_size:
                first_ranks = num_givers
        else:
            restored, voters = self._synchronise(world)
        self._note_branch(change)
        if self.has_state:
            self._files.note_run(world)
        set_group_timeout(STEP_TIMEOUT)
        comparison = self._trainer.states.comparison(world, voters)
        return Resumed(restored, Beginning(self._files.finish_claim, handover, comparison, first_ranks))

    def _synchronise(self, world: World) -> tuple[Restored | None, list[int]]:
        """Bring all members to one state. Returns where this one got it, None if it had it, and the ranks that had it.

        A member may be without a state: a death can have interrupted the restore of the first world.
        """
        worker, state, job = self._worker, self._worker.state, self._membership.job
        had_state, check = self.has_state, self._membership.sockets.require_unbroken
        mine = {
            "step": state.step if had_state else -1,
            "last": state.last_step,
            "logged": worker.reporter.last_logged_step(),
            "plain": plain_hashes(state) if had_state and world.world_size > 1 else {},
            "ratings": state.ratings.state_dict(),
            "interrupted": self._report.interrupted,
        }
        with state.lock.released() if had_state else nullcontext():  # another member may hang
            told = gather_json({**mine, "sees": job.place.sees(world.uid)})
        if not had_state:  # it may read the run directory, and write which run it is
            self._files.finish_claim()
        job.place.note(world.uid, is_shared=all(entry["sees"] for entry in told))
        steps = [entry["step"] for entry in told]
        others = apart(steps, [entry["plain"] for entry in told]) if max(steps) >= 0 else {}
        if min(steps) < max(steps) or max(steps) < 0 or others:
            set_group_timeout(GROUP_TIMEOUT)  # reading or sending a large state takes long
            self._membership.watcher.do(Activity.FORM, FIRST_SECONDS)
        if max(steps) < 0:
            restored = self._earlier.restore(world, lost=self._why_lost, check=check)
            self.holding = Holding.STATE
            return restored, list(range(world.world_size))
        fresh = [rank for rank, step in enumerate(steps) if step == max(steps)]
        if world.rank in fresh:  # a member lost in keep() may have left its metric with some of them
            state.ratings.load_state_dict(latest([told[rank]["ratings"] for rank in fresh]))
        source = freshest(steps)
        logged = [entry["logged"] for entry in told if entry["logged"] is not None]
        logged_step = max(logged, default=max(0, steps[source] - 1))
        if logged_step < steps[source]:
            if world.rank == source:
                worker.reporter.write_missing_commits(state, logged_step)
            with state.lock.released() if had_state else nullcontext():
                barrier()  # no rank goes on from a step without an event: the rank that has to write it may die
        fingerprint = state.fingerprint

        def loaded(clock: dict[str, Any]) -> None:
            if not had_state:  # now: the sender may die before all have the state, and this may be the only one left
                self._report.interrupted = told[source]["interrupted"]
                self._take_state(world, clock)

        sync_from_freshest(state, steps, check, lambda: worker.reach("send", world), others, loaded)
        if world.rank == source and others:
            self._warn_of_differences(world, others)
        voters = [rank for rank in fresh if rank not in others]
        state.last_step = min(told[rank]["last"] for rank in fresh)  # a training function may have ended the run early
        if had_state:  # its machine may be of another kind than the source's; it was warned of that before
            state.fingerprint = fingerprint
            return None, voters
        return Restored("peer", state.step, source), voters

    def _warn_of_differences(self, world: World, others: Mapping[int, Sequence[str]]) -> None:
        names = ", ".join(world.members[rank].name for rank in others)
        what = ", ".join(sorted({name for found in others.values() for name in found}))
        self._worker.reporter.warn(
            f"{names} had other {what} than {world.me.name} after step {self._worker.state.step}, and "
            f"{'takes' if len(others) == 1 else 'take'} over its state: a peer was lost in a collective between two "
            "steps, which has ended on some ranks alone, or the ranks do not all do the same there"
        )

    def _hand_over(self, world: World, change: Change) -> tuple[Restored | None, Handover | None, int]:
        """Hand the state of the members that trained, all of which have it, to the newcomers of a world that was formed
        ahead. Returns where this member got its state, what is to be finished in the first step, and how many ranks had
        the state before: the lowest ones."""
        state, membership = self._worker.state, self._membership
        handover: Giving | Taking | None = None

        def loaded(clock: dict[str, Any]) -> None:
            self._take_state(world, clock)
            if self._trainer.has_room_for_handover:
                self._report.state_came_late(world)

        restored, num_givers = None, world.world_size - len(change.joined)
        if not self.has_state:
            handover = taking = Taking(state, 0, loaded)
            membership.arrival.report_ready(world)
            num_givers = world.world_size - taking.wait_for_position(membership.arrival.check)
            restored = Restored("peer", state.step, 0)
            newcomers = [member.name for member in world.workers[num_givers:]]  # they find each other as at a start
            self._report.interrupted = {**self._report.interrupted, "joined": newcomers}
            self._files.claim(world, has_state=False)  # only now: until then the members write as the old generation
        elif world.rank == 0 and change.joined:
            handover = Giving(state, [0, *range(num_givers, world.world_size)])
        if self._trainer.has_room_for_handover:
            return restored, handover, num_givers
        self._files.finish_claim()
        if handover is not None:
            handover.begin()
            with state.lock.released() if isinstance(handover, Giving) else nullcontext():  # a large state takes long
                handover.finish(self._membership.sockets.require_unbroken)
        return restored, None, num_givers

    def _take_state(self, world: World, clock: dict[str, Any]) -> None:
        """Hold a state that has arrived, before the world's first step or within it, and compare this node's past with
        it: snapshots may lie on another branch, the machine may differ."""
        self._worker.state.clock.take_over(clock)
        self.holding = Holding.STATE
        if self._was_left_out:
            self._files.set_branch_aside()
        self._earlier.warn_of_parted()
        compare_with_peers(self._worker, world)
        self._files.note_run(world)

    def _note_branch(self, change: Change) -> None:
        """Note in the state on which branch it is, from the first world of that branch on."""
        branch, state = self._membership.side.branch, self._worker.state
        if branch is None or branch.id == id_of(state.branches):
            return
        state.branches = (*state.branches, (branch.id, state.step))
        names = ", ".join(member.name for member in change.lost)
        message = (
            f"{names} may train on, and so does this side from step {state.step} on, as branch {branch.id} "
            "(--on-split go-on): where the two meet, the one with fewer committed steps stops"
        )
        self._worker.reporter.warn(Warned(message=message, branch=branch.id))

    def lose_step(self, seconds: float) -> None:
        """Roll back what the step in hand, if there is one, may have changed, and book its time as lost."""
        state = self._worker.state
        if state.rollback():
            state.clock.lose(seconds)
            if self.has_state and not state.is_whole:  # another member has a whole one, or there is a snapshot
                self.holding = Holding.NOTHING
                self._why_dropped = f"the optimizer was interrupted in step {state.step + 1}"
        state.clock.enter(Phase.FORM)

    def drop_wrong_states(self, world: World, differ: StatesDiffer, seconds: float) -> None:
        """Drop the states that differ from the majority's, or all states where there is none. In the next world they
        are replaced by a member's state or a snapshot, as for a newcomer. Loses the step in hand like `lose_step`.

        Raises: SnapshotError where this worker has just received the majority's state, and again differs from it.
        """
        reporter = self._worker.reporter
        self.lose_step(seconds)
        wrong = [world.members[rank].name for rank in differ.wrong]
        is_wrong = world.rank in differ.wrong
        if is_wrong:
            self.holding = Holding.SPARE if differ.has_majority else Holding.NOTHING
            self._why_dropped = f"{differ}"
        if differ.has_majority:
            names, verb = ", ".join(wrong), "has" if len(wrong) == 1 else "have"
            message = f"{names} {verb} other weights or optimizer states than most workers, and takes over theirs"
            is_reporting = world.rank == next(rank for rank in range(world.world_size) if rank not in differ.wrong)
        else:
            message = (
                f"the weights or optimizer states of {world.world_size} workers are not equal at step "
                f"{self._worker.state.step}, and there is no majority: the newest snapshot is restored"
            )
            is_reporting = world.rank == 0
        if is_wrong or is_reporting:
            reporter.events.write(StatesDiffered(wrong=wrong, has_majority=differ.has_majority))
        if is_reporting:
            reporter.warn(message)
        elif is_wrong:
            then = "it takes over theirs" if differ.has_majority else "the newest snapshot is restored"
            reporter.log(own_line(differ, self._worker.state.step, then))
        if is_wrong and differ.has_majority:
            # Otherwise it would make the others begin one world after another, until all give up.
            if self._wrong_at == self._worker.state.step:
                raise SnapshotError(
                    f"this worker has taken over the others' state of step {self._wrong_at}, and again has other "
                    "weights or optimizer states: its memory or its device is broken, or what the model or an "
                    "optimizer loads is not what it has saved"
                )
            self._wrong_at = self._worker.state.step
