"""What a notice does to a worker: it is reported, and the node leaves in time, as if it had been sent SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic_train.elastic.worker import Worker
from elastic_train.notices.notice import NoticeSource
from elastic_train.notices.own_sources import AfterOthers, Relay
from elastic_train.notices.watcher import NoticeWatcher, source_of
from elastic_train.preemption import SAVE_SOONER, Fit, PreemptionNotice, fit_of, given_seconds, notices_flag
from elastic_train.rendezvous.command_line import agent_above
from elastic_train.runlog.event_types import NoticeChanged
from elastic_train.storage.shares import senders
from elastic_train.storage.snapshot import SnapshotResult
from elastic_train.wording import duration, human_bytes
from elastic_train.world import Member, World

REMOVE_SECONDS = 1.0
"""for which the end of a worker waits for the removal of a file"""


class Noticed:
    """Listens for the notices of one worker, on any thread. A node's first live worker listens to the source of
    --notices, its other workers listen to that worker. Make it on the main thread.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._relay = Relay(relay_path(worker)) if worker.launch.local_world_size > 1 else None
        self._watcher: NoticeWatcher | None = None
        self._is_first: Callable[[], bool] = lambda: worker.launch.local_rank == 0
        self._save_seconds: Callable[[], float] = lambda: 0.0
        flag = notices_flag(worker.config.notices)
        self._source_name = flag.kind
        """with `auto`: the name of the source, once it is found"""
        self._has_warned_of_notice = False
        if flag.kind == "off":
            return
        # On all workers of the node: SLURM's source takes a signal.
        self._find_source = source_of(flag, worker.reporter.log, worker.stop.call_on)
        if self._is_first() and self._relay is not None:
            self._relay.begin()
        self._watcher = NoticeWatcher(self._find, self, host=worker.host, save_seconds=lambda: self._save_seconds())
        self._watcher.start()

    def follow(
        self, world: Callable[[], World | None], is_dead: Callable[[Member], bool], save_seconds: Callable[[], float]
    ) -> None:
        """Note that this worker is a member of its job. The newest world tells whether it listens and reports for its
        node, as only torchrun ends a node with its first worker. Before there is a world, and after `let_go`, the
        previous answer holds.

        Args:
            save_seconds: as `NoticeWatcher`'s.
        """
        self._save_seconds = save_seconds
        before = self._is_first()

        def is_first() -> bool:
            now = world()
            if now is None:
                return before
            return not any(
                other.local_rank < now.me.local_rank and other.node == now.me.node and not is_dead(other)
                for other in now.members
            )

        self._is_first = is_first

    def let_go(self) -> None:
        """Drop all references to the membership that has ended."""
        is_first, save_seconds = self._is_first(), self._save_seconds()
        self._is_first, self._save_seconds = lambda: is_first, lambda: save_seconds

    def _find(self) -> NoticeSource | None:
        if self._relay is None or self._is_first():
            return self._find_own()
        return AfterOthers(self._relay, lambda: self._is_first(), self._find_own)

    def _find_own(self) -> NoticeSource | None:
        source = self._find_source()
        if source is not None:
            self._source_name = source.name
        return source

    def judge(self, written: SnapshotResult, num_nodes: int) -> None:
        """Warn once if a snapshot just written took longer than a notice leaves for it.

        Args:
            num_nodes: nodes that train; if all leave at once, each sends its share to a bucket.
        """
        given = given_seconds(self._source_name, os.environ)
        num_senders = senders(num_nodes, written.bytes, is_bucket=self._worker.bucket is not None)
        seconds = written.total_seconds / num_senders
        if given is None or self._has_warned_of_notice or (fit := fit_of(seconds, given)) is Fit.FITS:
            return
        self._has_warned_of_notice = True
        rate = human_bytes(round(written.bytes / written.total_seconds))
        together = f"; {duration(seconds)} by {num_senders} nodes together" if num_senders > 1 else ""
        what = "less than that" if fit is Fit.TOO_LONG else "a long step included, perhaps too little"
        self._worker.reporter.warn(
            f"the snapshot of step {written.step} took {duration(written.total_seconds)} for "
            f"{human_bytes(written.bytes)} ({rate}/s{together}), and a notice of {self._source_name} leaves "
            f"{duration(given)}, {what}: where all nodes are taken at once, steps since the newest snapshot are lost; "
            f"{SAVE_SOONER}"
        )

    def hear(self, notice: PreemptionNotice) -> None:
        """Report a notice; one worker does so for its node."""
        if not self._is_first():
            return
        self._worker.reporter.events.is_noticed = True
        self._worker.reporter.events.write(NoticeChanged(state="given", **notice.to_fields()))
        when = "" if notice.deadline is None else f" in {duration(max(0.0, notice.deadline - time.time()))}"
        leaves = "at once" if notice.deadline is None else "before"
        what = f"is taken away{when}, and leaves {leaves}" if notice.is_certain else f"may be taken away{when}"
        self._worker.reporter.log(f"notice: {notice.host} {what} ({notice.described})")

    def leave(self, notice: PreemptionNotice) -> None:
        if self._worker.stop.is_settled:  # the node leaves already, and its other workers know
            return
        self._worker.stop.give_notice(notice, notice.seconds_left(time.time()))
        self._pass_on(notice)  # last: the run's file system may hang

    def withdraw(self, notice: PreemptionNotice) -> None:
        is_in_time = self._worker.stop.withdraw_notice()
        if is_in_time:  # else the other workers leave as well
            self._pass_on(None)
        if self._is_first():
            self._worker.reporter.events.is_noticed = False
            self._worker.reporter.events.write(NoticeChanged(state="withdrawn", **notice.to_fields()))
            goes_on = "training goes on, unless all nodes stop with the step in hand"
            what = goes_on if is_in_time else "too late: this node leaves"
            self._worker.reporter.log(f"notice withdrawn: {notice.host} ({notice.described}); {what}")

    def warn(self, message: str) -> None:
        self._worker.reporter.warn(message)

    def _pass_on(self, notice: PreemptionNotice | None) -> None:
        if not self._is_first() or self._relay is None:
            return
        try:
            self._relay.write(notice)
        except OSError as error:  # torchrun ends the other workers once this one has left
            self.warn(f"the other workers of this node do not get the notice: {error}")

    def close(self) -> None:
        """End with the worker, on any thread. Blocks for REMOVE_SECONDS at most."""
        if self._watcher is not None:
            self._watcher.close()
        end_agent(self._worker)
        # The file is no longer needed. The other workers read it once a second, and a worker leaves 3 s after it has
        # passed a notice on, or when all have read it. A worker that goes on without this one asks the source itself.
        if self._relay is not None and self._relay.may_be_there and self._is_first():
            removal = threading.Thread(target=self._remove, args=(self._relay,), name="relay", daemon=True)
            removal.start()  # on a thread: the file system may hang, and a late stop must still end
            removal.join(REMOVE_SECONDS)

    @staticmethod
    def _remove(relay: Relay) -> None:
        with suppress(OSError):
            relay.clear()


def end_agent(worker: Worker) -> None:
    """Tell the agent to end as well, where a worker ends by a notice. Else --max-restarts would make it start new
    workers on a node that goes away. Raises nothing; if the agent cannot be told, that is logged."""
    launch, stop = worker.launch, worker.stop
    if stop.notice is None or not stop.is_settled or launch.local_rank > 0:
        return
    parent = os.getppid()
    agent_pid, _ = agent_above(parent) or (parent, [])
    if agent_pid != launch.agent_pid:  # the agent has ended
        return
    try:
        os.kill(agent_pid, signal.SIGTERM)
    except ProcessLookupError:  # it ended in between
        return
    except PermissionError:  # of another user, as behind sudo; a log line, as the events may be closed
        worker.reporter.log(
            f"warning: this worker may not signal the agent, pid {agent_pid}, to end: with --max-restarts it "
            "starts new ones on this node"
        )


def relay_path(worker: Worker) -> Path:
    """Return the path in the run directory, by node and start. The parent process may be a wrapper around the worker,
    so it counts only where nothing else names the start, as under --spawn."""
    launch = worker.launch
    starter = launch.step or launch.agent_pid or os.getppid()
    node = launch.node_id or f"{starter}-{launch.run_id}-{launch.restart_count}"
    return worker.directory.path / "notices" / f"{worker.host}-{node}.json"
