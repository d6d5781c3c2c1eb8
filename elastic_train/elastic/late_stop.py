"""Saves the last commit without the training thread: a stop comes too late for the step in hand, or that thread does
not return from a world that is over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from elastic_train.elastic.exits import NOT_WHOLE, Exits
from elastic_train.elastic.trainer import Trainer
from elastic_train.elastic.worker import Worker
from elastic_train.errors import TrainingDiverged, show_traceback
from elastic_train.world import World


class LateStop:
    """The end of a worker whose training thread does not end in time after a stop, or not at all. What is saved stays
    unchanged meanwhile: that thread waits when it is about to change the state.

    Votes are cast when a step begins, so the step in hand and a whole one must end before all stop by them. If steps or
    an evaluation are long, SIGKILL comes first. The weights are those of the last commit all that time.

    Args:
        world: returns the world in which this worker trains, once it has the run's state; else None.
        end_notices: `Noticed.close`.
        end: terminates the process.
    """

    def __init__(
        self,
        worker: Worker,
        trainer: Trainer,
        exits: Exits,
        world: Callable[[], World | None],
        end_notices: Callable[[], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._worker, self._trainer, self._exits = worker, trainer, exits
        self._world, self._end_notices, self._end = world, end_notices, end
        self._saving = threading.Lock()
        """for one thread at a time, as both would use the same buffers. The training thread waits for a late stop, and
        may count as lost meanwhile"""

    def save(self, seconds: float) -> None:
        """Save the last commit and end the process, on another thread than the training thread. Does nothing where that
        thread handles the stop itself.

        Args:
            seconds: within which the training thread has to reach a point where the state is that of a commit.
        """
        state, reporter = self._worker.state, self._worker.reporter
        if not state.lock.acquire(seconds):
            stop, where = self._worker.stop, "in what comes before the next batch, or between two worlds"
            if not state.is_whole:
                where = f"between the optimizer's step and the commit of step {state.step + 1}"
            is_left_to_it = stop.is_settled or state.is_finished or self._world() is None
            if stop.is_requested and not is_left_to_it:
                reporter.warn(f"told to stop by {stop.why}, and the state is {where}: it is not saved before that ends")
            return
        with self._saving:
            self._save()

    def _save(self) -> None:
        """Save the state, whose lock this thread has, and end the process; give the lock back if there is no reason."""
        state, reporter = self._worker.state, self._worker.reporter
        code: int | None = 1
        try:
            world = self._world()
            # The notice may have ended meanwhile: a worker that waits for the remaining time cannot be called off any
            # more. Ask before the step's votes are given up; the answer holds from there on.
            is_leaving = world is not None and state.is_whole and self._worker.stop.settle_if_requested()
            if world is None or not is_leaving or not self._is_sound():
                state.lock.give_back()
                code = None
            else:
                if state.is_step_open:
                    state.step_start.copy_beside()
                code = self._exits.stop_late(world)
                reporter.close()
                self._worker.directory.ownership.release()
        except Exception as error:  # the training thread waits for the end, and no other thread would report it
            reporter.failed(error)
            show_traceback(error, is_debug=self._worker.config.debug)
        finally:
            if code is not None:
                self._end_notices()
                self._end(code)

    def save_at_last(self) -> str:
        """Save the last commit where the training thread counts as lost and the caller ends the process. Not on the
        training thread. Returns a line for the user."""
        with self._saving:
            return self._save_at_last()

    def _save_at_last(self) -> str:
        state, world = self._worker.state, self._world()
        if world is None:
            return "there is nothing to save"
        # If the training thread holds the lock, it hangs between an optimizer's step and the commit. When it returns,
        # it waits (Watcher.do).
        state.lock.acquire(0.0)
        if state.is_step_open and state.is_whole:  # its collective may be under way on a GPU, and never end
            state.step_start.copy_beside()
        try:
            self._trainer.abandon()
        except TrainingDiverged as diverged:
            return str(diverged)
        if not state.is_whole:
            return NOT_WHOLE
        return self._exits.save_as_last_member(world)

    def _is_sound(self) -> bool:
        try:
            self._trainer.settle()
        except TrainingDiverged as diverged:  # the training thread raises it, if it gets there
            self._worker.reporter.warn(str(diverged))
            return False
        return True
