"""The output of a run: a progress bar or log lines from rank 0, TensorBoard scalars, and the event files."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from elastic_train.errors import kind_and_line, write_line
from elastic_train.observe.metrics import Metrics
from elastic_train.observe.rate import Rate
from elastic_train.runlog.event_types import (
    LEFT_OUT,
    BestRated,
    Done,
    Evaluated,
    SnapshotWritten,
    StepCommitted,
    Warned,
)
from elastic_train.runlog.events import EventLog, Ledger, file_name
from elastic_train.runlog.goodput import bill
from elastic_train.runlog.reader import newest_first
from elastic_train.training.optimizers import rate_of
from elastic_train.training.ratings import Ratings
from elastic_train.training.state import TrainState
from elastic_train.wording import count
from elastic_train.world import World

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.1
LOG_LINE_SECONDS = 10.0
SCALARS_SECONDS = 0.2
SCALARS_DELAY_SECONDS = 3.0
LATE_SECONDS = 0.1
"""delay after a commit from which its line has `late_seconds`"""


class Reporter:
    """Reports and events of a worker. Rank 0 reports for the job, another rank only for itself. Each writes its own
    event file."""

    def __init__(
        self,
        *,
        events: EventLog,
        ledger: Ledger | None,
        tensorboard_dir: Path,
        wants_bar: bool,
        debug: bool,
        node_price: float | None = None,
    ) -> None:
        self.events = events
        self.ledger = ledger
        self.metrics: Metrics | None = None
        """endpoint for Prometheus, if there is one"""
        self._tensorboard_dir = tensorboard_dir
        self._node_price = node_price
        self._state: TrainState | None = None
        """state of all members, in a world"""
        self._wants_bar = wants_bar and sys.stderr is not None and sys.stderr.isatty()  # None: `2>&-`
        self._world: World | None = None
        self._bar: ProgressBar | None = None
        self._scalars: Scalars | None = None
        self._wants_debug = debug
        self._rate = Rate()
        self._last_log_line = time.monotonic()
        self._last_refresh = 0.0
        self._last_scalars = 0.0
        self._first_step = 1
        self._last_snapshot_step: int | None = None
        self._written: list[dict[str, Any]] = []
        """the two newest `step` events of this worker"""
        self._committed_at: tuple[tuple[int, float], ...] = ()
        """the two newest steps and the times of their commits, by the monotonic clock"""

    def leave(self) -> None:
        """Record that this worker has left its world; it may come back."""
        self._close_display()
        self._world = None
        self.events.leave()
        if self.ledger is not None:
            self.ledger.close()  # until its next line

    def begin_files_again(self) -> None:
        """Begin new files of events and ledger, because the run directory was removed or moved. TensorBoard's stays."""
        self.events.begin_again()
        if self.ledger is not None:
            self.ledger.close()  # until its next line

    @property
    def is_reporter(self) -> bool:
        return self._world is None or self._world.rank == 0

    def enter(self, world: World, state: TrainState) -> None:
        """Enter a world that stands and whose members all hold `state`. From now on its rank 0 reports."""
        self._world, self._state = world, state
        self.events.enter(world)
        self._first_step = state.step + 1
        self._rate.restart()
        if self.metrics is not None:
            self.metrics.enter(world, state)
        if world.rank != 0:
            self._close_display()
            return
        if self._wants_bar and self._bar is None and not state.is_finished:
            self._bar = ProgressBar(state.length, state.num_epochs)
        # TensorBoard's import takes a second of processor time: not while a world is starting.
        self._last_scalars = time.monotonic() + SCALARS_DELAY_SECONDS

    def report_quarantines(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Publish the hosts that this run keeps waiting, each with `until`, in Unix seconds."""
        self.events.quarantines = found
        if self.metrics is not None:
            self.metrics.quarantines = found

    def bill(self, state: TrainState) -> dict[str, Any]:
        """Return the bill of the run up to its newest committed step."""
        (paid, kept), samples = state.clock.node_seconds(), state.epoch * state.length + state.samples_done
        return bill(paid=paid, kept=kept, samples=samples, price=self._node_price)

    def report(self, message: str) -> None:
        """Print a message for the job: only rank 0 does."""
        if self.is_reporter:
            self.log(message)

    def log(self, message: str) -> None:
        """Print a message of this worker, on any rank."""
        if self._bar is not None:
            self._bar.print(f"elastic_train: {message}")
        else:
            write_line(message)

    def report_for_node(self, message: str) -> None:
        """Print a message on a node without rank 0: the node's first worker does."""
        if self._world is not None and self._world.rank != 0 and self._world.local_rank == 0:
            self.log(message)

    def warn(self, warning: str | Warned) -> None:
        """Warn for this worker: by a `warning` event and a line on stderr."""
        event = Warned(message=warning) if isinstance(warning, str) else warning
        self.events.write(event)
        prefix = "" if self._world is None or self._world.rank == 0 else f"rank {self._world.rank}: "
        self.log(f"warning: {prefix}{event.message}")

    def failed(self, error: BaseException) -> None:
        """Record the error with which this worker ends."""
        self.events.write(Done(outcome="failed", error=kind_and_line(error)))

    def debug(self, message: str) -> None:
        if self._wants_debug:
            self.log(message)

    def step(self, state: TrainState, loss: float | None, *, epoch: int, samples: int) -> None:
        """Report a committed step: `samples` is its size, `epoch` its epoch; `loss` is None if none was ever given."""
        self.events.step = state.step
        self._rate.add(samples)
        now = time.monotonic()
        if is_due := now - self._last_refresh >= REFRESH_SECONDS or state.is_finished:
            self._last_refresh = now
            self._rate.update(now)
        if self.metrics is not None:
            self.metrics.step(state, loss, self._rate.per_second)
        if self._world is None or self._world.rank != 0:
            return
        self._write_commit(state.last_commits[-1])
        if is_due and self._bar is not None:
            self._bar.update(state, loss, self._rate.per_second, self._world, self._last_snapshot_step)
        if self._bar is None and (now - self._last_log_line >= LOG_LINE_SECONDS or state.is_finished):
            self._last_log_line = now
            self.log(
                f"step={state.step}/{state.last_step} epoch={epoch + 1}/{state.num_epochs} loss={_shown(loss)} "
                f"samples/s={self._rate.per_second:.0f} world_size={self._world.world_size}"
            )
        if now - self._last_scalars >= SCALARS_SECONDS or state.is_finished:
            self._last_scalars = now
            scalars = {
                "train/loss": loss,
                "train/learning_rate": rate_of(state.optimizer.param_groups[0]),
                "run/world_size": self._world.world_size,
                "run/samples_per_second": self._rate.per_second,
            }
            self._add_scalars(state.step, {name: one for name, one in scalars.items() if one is not None})

    def last_logged_step(self) -> int | None:
        """Return the last committed step in the file of the present world's rank 0; None if that is not here."""
        if self._world is None:
            return None
        first = self._world.members[0]
        path = self.events.directory / file_name(first.host, first.local_rank, first.pid)
        if not path.exists():
            return None
        before = self._first_step - 1  # when the world began, all committed steps had been written
        newest = next((line for line in newest_first(path) if line.get("event") == StepCommitted.name), None)
        if newest is None or newest["generation"] != self._world.generation:
            return before  # a restored state may be of an earlier step than the file's last line
        return max(int(newest["step"]), before)

    def write_missing_commits(self, state: TrainState, logged: int) -> None:
        """Write the events of committed steps above `logged`, for a rank 0 that died before it could.

        One may be missing, or two if the loss of a step comes after its commit. If more are missing, `logged` is out of
        date, and nothing is written.
        """
        if logged >= state.step - len(state.last_commits):
            for commit in state.last_commits:
                if commit["step"] > logged:
                    self._write_commit(commit)

    def note_commit(self, step: int) -> None:
        """Record the time of a commit by this worker; its line may come later."""
        self._committed_at = (*self._committed_at[-1:], (step, time.monotonic()))

    def _write_commit(self, commit: dict[str, Any]) -> None:
        now = time.monotonic()
        late = now - dict(self._committed_at).get(commit["step"], now)
        self.events.write(StepCommitted(**commit, late_seconds=late if late > LATE_SECONDS else LEFT_OUT))
        self._written = [*self._written[-1:], commit]

    def void_commits(self, state: TrainState) -> list[dict[str, int]]:
        """Return `void` for a member that was left out: its newest `step` events, if they are of the state's last
        commits. Perhaps no other member has applied these steps; if another has written one, that line counts."""
        mine = [commit for commit in state.last_commits if any(commit is written for written in self._written)]
        return [{"generation": commit["generation"], "step": commit["step"]} for commit in mine]

    def evaluation(self, state: TrainState) -> None:
        metrics = state.test_metrics
        text = " ".join(
            f"test_{name}={value:.2%}" if name == "accuracy" else f"test_{name}={value:.4f}"
            for name, value in metrics.items()
        )
        if self.is_reporter:
            self.events.write(Evaluated(epoch=state.epoch, accuracy=metrics.get("accuracy"), metrics=metrics))
        epoch = state.epoch + (state.samples_done > 0)  # the last step's epoch, as in the lines of steps
        self.report(f"step={state.step} epoch={epoch}/{state.num_epochs} {text}")
        if self._world is not None and self._world.rank == 0:
            self._add_scalars(state.step, {f"test/{name}": value for name, value in metrics.items()})

    def best(self, ratings: Ratings) -> None:
        """Record a new best model."""
        if self.is_reporter:
            self.events.write(BestRated(best=ratings.best_as_json()))

    def rating(self, step: int, metric: float) -> None:
        """Record the metric that a training function has given for its model."""
        if self._world is not None and self._world.rank == 0:
            self._add_scalars(step, {"kept/metric": metric})

    def _add_scalars(self, step: int, values: dict[str, float]) -> None:
        if self._scalars is None:
            self._scalars = Scalars(self._tensorboard_dir, purge_step=self._first_step)
        self._scalars.add(step, values)

    def snapshot(self, *, step: int, path: object, num_bytes: int, stall_seconds: float, total_seconds: float) -> None:
        self._last_snapshot_step = step
        seconds = {"stall_seconds": stall_seconds, "total_seconds": total_seconds}
        if self.metrics is not None:
            self.metrics.snapshot(step=step, num_bytes=num_bytes, **seconds)
        told = None if self._state is None else self.bill(self._state)
        self.events.write(SnapshotWritten(path=str(path), snapshot_step=step, bytes=num_bytes, **seconds, bill=told))
        self.debug(f"snapshot step={step} bytes={num_bytes} seconds={total_seconds:.3f} path={path}")

    def _close_display(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._scalars is not None:
            scalars, self._scalars = self._scalars, None
            problem = scalars.close()
            if problem:
                self.warn(f"TensorBoard scalars were not all written: {problem}")

    def close(self) -> None:
        self._close_display()
        if self.metrics is not None:
            self.metrics.close()
        if self.ledger is not None:
            self.ledger.close()
        self.events.close()


class Screen:
    """A terminal for a progress bar. Output that fails is dropped, so that a closed terminal does not end the training.
    Rich would also keep that output, and repeat it with the next line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class ProgressBar:
    """One line at the bottom of the terminal: position in the epoch, and the main figures of the job."""

    def __init__(self, length: int, num_epochs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._length, self._num_epochs = length, num_epochs
        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=Console(file=cast(TextIO, Screen(sys.stderr))),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("epoch 1", total=length, facts="")
        self._progress.start()

    def update(
        self, state: TrainState, loss: float | None, rate: float, world: World, snapshot_step: int | None
    ) -> None:
        epoch = min(state.epoch + 1, self._num_epochs)
        snapshot = "none yet" if snapshot_step is None else f"step {snapshot_step}"
        self._progress.update(
            self._task,
            completed=self._length if state.is_finished else state.samples_done,
            description=f"epoch {epoch}/{self._num_epochs}",
            facts=f"step {state.step}  loss {_shown(loss)}  {rate:,.0f} samples/s  "
            f"{count(world.world_size, 'worker')}  snapshot {snapshot}",
        )
        self._progress.refresh()

    def print(self, message: str) -> None:
        self._progress.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _shown(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"


class Scalars:
    """TensorBoard scalars, written by a separate thread: the import alone takes a second."""

    def __init__(self, directory: Path, purge_step: int) -> None:
        self._queue: queue.SimpleQueue[tuple[int, float, dict[str, float]] | None] = queue.SimpleQueue()
        self._problem: str | None = None
        self._thread = threading.Thread(
            target=self._write_all, args=(directory, purge_step), name="tensorboard", daemon=True
        )
        self._thread.start()

    def add(self, step: int, values: dict[str, float]) -> None:
        if self._thread.is_alive():
            self._queue.put((step, time.time(), values))

    def _write_all(self, directory: Path, purge_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(directory), purge_step=purge_step)
            while (entry := self._queue.get()) is not None:
                step, wall, values = entry
                for name, value in values.items():
                    writer.add_scalar(name, value, step, walltime=wall)
            writer.close()
        except Exception as error:  # the end of this thread, not of the training; the reporter says it
            self._problem = str(error)

    def close(self, timeout: float = 20.0) -> str | None:
        """Write what is queued; what went wrong, if anything did. Blocks at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        return "they took too long" if self._thread.is_alive() else self._problem
