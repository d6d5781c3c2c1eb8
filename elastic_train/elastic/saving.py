"""Which worker saves the state, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.snapshot_schedule import SaveTime, SnapshotSchedule
from elastic_train.elastic.worker import Worker
from elastic_train.errors import DISK_FULL, NewerGeneration, OwnershipLost, SnapshotError
from elastic_train.observe.reporting import Reporter
from elastic_train.runlog.event_types import SnapshotDue
from elastic_train.runlog.goodput import Phase
from elastic_train.snapshot_interval import interval_of
from elastic_train.storage.retention import Retention
from elastic_train.storage.shares import Fleet
from elastic_train.storage.snapshot import SnapshotResult
from elastic_train.storage.snapshot_writer import SnapshotPosition, SnapshotWriter
from elastic_train.training.state import TrainState
from elastic_train.wording import duration
from elastic_train.world import World

SLOW_SECONDS = 300.0
"""after which a snapshot that is still in flight causes a warning"""
BEST_SECONDS = 30.0
"""for which training waits for the snapshot in flight, so that the best state can be copied"""


class Saver:
    """Saves the state of one worker in all its worlds; rank 0 writes the regular snapshots.

    Args:
        written: called with each durable snapshot, and the number of nodes that train.
    """

    def __init__(
        self,
        worker: Worker,
        files: RunFiles,
        *,
        written: Callable[[SnapshotResult, int], None] = lambda _result, _num_nodes: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._reporter: Reporter = worker.reporter
        self._files, self._written, self._now = files, written, now
        self._interval = interval_of(worker.config.snapshot_every)
        self._schedule = SnapshotSchedule(self._interval, now=now)
        self.save_time = SaveTime(is_bucket=worker.bucket is not None)
        self._has_noted_due, self._entered_at, self._has_begun = False, 0.0, False
        self._world: World | None = None
        self._best_step = -1
        """of the newest best state that was saved or given up"""
        self.seen_whole: tuple[int, int] | None = None
        """(generation, step) of the newest snapshot by another worker that this one has seen"""
        self.failed_step = -1
        """of the newest state that could not be saved while the caller waited, by this worker or for it; else -1"""
        self.newest: SnapshotResult | None = None
        """the newest durable snapshot"""
        self._has_warned_slow, self.step_on_the_way, self.begun_in_wait = False, -2, (-1, -1)
        """whether the snapshot in flight has caused a warning; its step; the newest one of `begin_to_save`"""
        self._snapshots: SnapshotWriter | None = None
        self._was_writer, self._unfit = True, set[str]()
        """whether this worker was rank 0 in the world before, or had none; errors about the state that were reported"""

    def enter(self, world: World) -> None:
        """Note that a world stands: from now on its generation is the one that writes."""
        self._was_writer = self._world is None or self._world.rank == 0
        self._world = world
        self.save_time.enter(world)
        self._entered_at = self._now()
        self._schedule.enter(takes_over=world.rank == 0 and not self._was_writer, step=self._worker.state.step)

    def is_last_writer(self, world: World) -> bool:
        """Return whether this worker saves for others when all members have one state and stay until it is saved. That
        is each run directory's leader, as its disk may be its own; rank 0 alone where all use one bucket."""
        return world.is_directory_leader if self._worker.bucket is None else world.rank == 0

    def is_due(self, state: TrainState) -> bool:
        """Return whether this worker must call `save` after the step just committed. Reports what was written."""
        if self._world is None:
            return False
        if self._world.rank != 0:
            self.report()  # what it has written while it waited for others
            self._note_due(self._world, state)
            return False
        self._files.raise_if_replaced()
        is_new_best = self.owes_best(state)
        if self._interval.steps == 0 and not is_new_best:
            return False
        is_writing = self._snapshots is not None and self._snapshots.is_busy()
        self._schedule.note_step(state.step, is_writing=is_writing)
        if is_writing:
            self._warn_slow()
        if self._snapshots is not None:
            self.report()
        elif not state.is_finished:  # the optimizer has its state by now, so an unsavable state is reported now
            with nullcontext() if self._was_writer else _warned_once(self._unfit, self._reporter.warn):
                self.writer().prepare(state.state_dict())
        self._adapt(state)
        if state.is_finished:
            return False  # the end of the run saves it in any case
        return is_new_best or (self._schedule.is_overdue and not self.writer().is_busy())

    def begin(self, state: TrainState) -> None:
        """Note that a world begins to train. A best state with which this worker's first world begins is saved."""
        if not self._has_begun and self.owes_best(state):
            self._best_step = state.step
        self._has_begun = True

    def owes_best(self, state: TrainState) -> bool:
        """Whether the weights of this step are the best so far, are to be kept, and are not saved yet."""
        is_best = state.ratings.best is not None and state.ratings.best[0] == state.step
        return bool(self._worker.config.keep_best) and is_best and self._best_step != state.step

    def _adapt(self, state: TrainState) -> None:
        if (changed := self._schedule.adapt(state)) is not None:
            self._reporter.events.write(changed)
            self._reporter.report(
                f"a snapshot every {duration(changed.seconds)} from now on: one costs "
                f"{changed.cost_seconds:.3f} s of training, and a failure is expected every "
                f"{duration(changed.failure_seconds)}"
            )

    def _note_due(self, world: World, state: TrainState) -> None:
        """Write an event once, so that this run directory shows that snapshots exist where another node writes them.
        That happens a step after the first snapshot was due: by then rank 0 has logged that step, too."""
        steps = self._interval.steps
        if self._has_noted_due or steps == 0:
            return
        if steps is None:  # rank 0 counts from its first world, which may be an earlier one; a step may be long
            is_past = self._now() - self._entered_at > 2 * self._interval.first_seconds
        else:
            is_past = state.step > steps
        if is_past:
            self._has_noted_due = True
            if world.is_directory_leader:
                self._reporter.events.write(SnapshotDue(every=steps, by=world.members[0].name))

    def save(self, state: TrainState) -> None:
        """Save in the background; returns when the state is copied."""
        _warn_of_shapes(state, self._unfit, self._reporter.warn)
        with state.clock.during(Phase.SNAPSHOT):
            if self.owes_best(state):
                self._make_room_for_best(state)
            started_at, is_begun = self._now(), True  # if it cannot be saved, the next one is tried when it is due
            with _warned_once(self._unfit, self._reporter.warn):
                is_begun = self.writer().save_in_background(state.state_dict(), **_position(state, self._world))
            if is_begun:
                self._schedule.note_start(started_at)
                self._has_warned_slow, self.step_on_the_way = False, state.step
            else:
                self._schedule.put_off()

    def _warn_slow(self) -> None:
        """Warn once for each snapshot in flight: nothing else shows a store that never answers."""
        seconds, newest = self._schedule.seconds_on_the_way, self.newest
        if self._has_warned_slow or seconds < max(SLOW_SECONDS, 3 * (0.0 if newest is None else newest.total_seconds)):
            return
        self._has_warned_slow = True
        kept = "none is there yet" if newest is None else f"the newest that is there is of step {newest.step}"
        self._reporter.warn(
            f"a snapshot has been on its way to {self._worker.snapshots_dir} for {duration(seconds)}, and the next one "
            f"waits for it: {kept}; training goes on"
        )

    def _make_room_for_best(self, state: TrainState) -> None:
        """Wait for the snapshot in flight: the next step changes the best weights, so their copy cannot be put off."""
        self._best_step = state.step
        if not self.writer().wait(BEST_SECONDS, prunes=False):
            self._reporter.warn(
                f"the best state so far, of step {state.step}, is not kept: the snapshot before it is still being "
                f"written after {BEST_SECONDS:g} s; training goes on"
            )

    def save_and_wait(self, state: TrainState, fleet: Fleet | None = None) -> bool:
        """Save and return whether the snapshot is durable. A full disk causes a warning, and does not end the job."""
        if self._world is not None and self.seen_whole == (self._world.generation, state.step):
            return True
        with state.clock.during(Phase.SNAPSHOT):
            is_saved = self.save_beside(state, fleet)
        self.report()
        return is_saved

    def save_beside(self, state: TrainState, fleet: Fleet | None = None) -> bool:
        """Do the same on another thread, while the training thread goes on. Reports nothing else."""
        self.failed_step = state.step
        try:
            self._report(_save_last(self.writer(), self._reporter.warn, state, _position(state, self._world), fleet))
        except SnapshotError as error:
            self._reporter.warn(str(error))
            return False
        except NewerGeneration:  # the other members have the state, and save it
            self.failed_step = -1
            raise
        self.failed_step = -1
        return True

    def unsaved(self, state: TrainState) -> str:
        """Return the addition to a last line where this state could not be saved."""
        return "; THIS STATE IS NOT SAVED, a warning above says why" if self.failed_step == state.step else ""

    def report(self) -> None:
        """Report what the background thread has written since the last call.

        Raises:
            OwnershipLost: another job, or a newer generation, owns the run directory.
        """
        if self._snapshots is None:
            return
        try:
            outcomes = self._snapshots.collect()
        except OwnershipLost:
            # Perhaps the generation has only changed to one that this worker is a member of.
            self._check_owner()
            self._schedule.put_off()
            return
        for outcome in outcomes:
            if isinstance(outcome, SnapshotResult):
                self._schedule.note_written(outcome.stall_seconds)
                self._report(outcome)
            else:
                self._reporter.warn(f"{outcome}; training goes on")

    def wait(self) -> None:
        """Wait for the snapshot in flight: the process is about to end."""
        if self._snapshots is not None:
            self._snapshots.wait(60.0, prunes=False)
            self.report()

    @property
    def expected_seconds(self) -> float:
        """Seconds that a snapshot takes: as the newest, or twice as long as the first one is in flight by now."""
        return 2 * self._schedule.seconds_on_the_way if self.newest is None else self.newest.total_seconds

    def give_up_in_flight(self, state: TrainState) -> None:
        """Give up a snapshot in flight to a URL, to free the line for the last state."""
        if self._snapshots is not None and self._snapshots.give_up(state.state_dict(), state.step):
            lost = "; it was the best so far" if self._best_step == self.step_on_the_way else ""
            self._reporter.log(f"the snapshot on its way is given up for that of step {state.step}, the last{lost}")

    def writer(self) -> SnapshotWriter:
        # One writer for the life of the process: it keeps its buffers, and writes one snapshot at a time.
        if self._snapshots is None:
            worker, config = self._worker, self._worker.config
            self._snapshots = SnapshotWriter(
                worker.snapshots_dir,
                keep=Retention(config.keep_snapshots, config.keep_every, config.keep_best),
                host=worker.host,
                run_uid=worker.state.run_uid,
                task=worker.must_agree_with_snapshot(),
                before_rename=self._check_before_visible,
                key=worker.snapshot_key,
                may_be_nan=worker.state.kept.made_with_nan,
            )
        return self._snapshots

    def _check_owner(self) -> None:
        assert self._world is not None
        self._files.check_owner(self._world.generation)

    def _check_before_visible(self) -> None:
        assert self._world is not None
        self._files.check_before_visible(self._world.generation)

    def _report(self, result: SnapshotResult) -> None:
        for warning in result.warnings:
            self._reporter.warn(warning)
        self._reporter.snapshot(
            step=result.step,
            path=result.path,
            num_bytes=result.bytes,
            stall_seconds=result.stall_seconds,
            total_seconds=result.total_seconds,
        )
        self.newest = result
        self.save_time.note_written(result.total_seconds, result.bytes)
        self._written(result, 1 if self._world is None else self._world.num_training_nodes)


def _position(state: TrainState, world: World | None) -> SnapshotPosition:
    assert world is not None, "it stands"
    return {
        "step": state.step,
        "epoch": state.epoch,
        "samples_done": state.samples_done,
        "generation": world.generation,
        "world_size": world.world_size,
        "branches": state.branches,
        "restarts": state.restarts,
        "metric": state.ratings.at(state.step),
    }


@contextmanager
def _warned_once(told: set[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, once for each error, where the state cannot be saved any more (an extra now holds an array, say). A state
    that was saved before must not end one worker after another.

    Args:
        told: the errors that were reported; the set grows.
    """
    try:
        yield
    except SnapshotError as error:
        if str(error) not in told:
            told.add(str(error))
            warn(f"no snapshot of this state can be made: {error}; training goes on, and nothing newer is saved")


def _warn_of_shapes(state: TrainState, told: set[str], warn: Callable[[str], None]) -> None:
    """Warn where no start could load the state, once for each such set of buffers. `told` as `_warned_once`'s."""
    found = ", ".join(name for shapes in state.kept.saved_shapes.values() for name in shapes.changed())
    if found and found not in told:
        told.add(found)
        warn(
            "no restart and no newcomer can load this state, in which buffers were made, dropped or resized since the "
            f"start, as by a forward pass: {found}. Make them in the constructor in their final size, or with "
            "persistent=False"
        )


def _save_last(
    writer: SnapshotWriter,
    warn: Callable[[str], None],
    state: TrainState,
    position: SnapshotPosition,
    fleet: Fleet | None,
) -> SnapshotResult:
    """Save the last state. On a full disk older snapshots make room, unless branches have parted: they belong to both.
    Others may take that room, so the warning, whose event may lie on that disk, comes last.
    Raises: as `SnapshotWriter.save`."""
    is_stop, removed = state.stopped_at == state.step, list[str]()
    try:
        while True:
            try:
                return writer.save(state.state_dict(), **position, fleet=fleet, is_stop=is_stop)
            except SnapshotError as error:
                cause = error.__cause__
                is_full = isinstance(cause, OSError) and cause.errno in DISK_FULL
                more = writer.make_room(state.state_dict()) if is_full and not state.branches else []
                if not more:
                    raise
                removed += more
    finally:
        if removed:
            warn(f"no room for the state of step {state.step}: removed {', '.join(removed)}")
