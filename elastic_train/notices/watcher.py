"""The thread that polls for notices, so that no step waits for an answer; and the choice of the source by --notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from elastic_train.errors import going_on
from elastic_train.notices.clouds import AwsSource, AzureSource, GcpSource, find_cloud
from elastic_train.notices.kubernetes import KubernetesSource
from elastic_train.notices.notice import NoticeSource, NoticeUnreadable
from elastic_train.notices.own_sources import EndpointSource, FileSource, SlurmSource
from elastic_train.preemption import NoticesFlag, PreemptionNotice

SAME_SECONDS = 5.0
"""A deadline that moves by at most this is not reported again: sources that give the remaining seconds move it slightly
with each answer."""
AGAIN_SECONDS = 2.0
"""Between two attempts to find the source."""
REPORTED_FAILURES = 3
"""Failed or meaningless answers in a row before a warning; a single one may be an accident."""


class NoticeListener(Protocol):
    """The receiver of a watcher's reports, on the watcher's thread."""

    def hear(self, notice: PreemptionNotice) -> None:
        """Take a notice that is new, or differs from the previous one."""
        ...

    def leave(self, notice: PreemptionNotice) -> None:
        """Leave now."""
        ...

    def withdraw(self, notice: PreemptionNotice) -> None:
        """Forget `notice`: it was withdrawn, or is no reason to leave yet."""
        ...

    def warn(self, message: str) -> None: ...


class NoticeWatcher:
    """Polls one source at the interval that the source wants.

    Args:
        find: finds the source, or returns None; called on the watcher's thread, because it may block for a moment.
        save_seconds: the time to save the state; 0 if unknown.
        now: Unix seconds.
    """

    def __init__(
        self,
        find: Callable[[], NoticeSource | None],
        listener: NoticeListener,
        *,
        host: str = "",
        save_seconds: Callable[[], float] = lambda: 0.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._find, self._listener = find, listener
        self._host, self._save_seconds, self._now = host, save_seconds, now
        self._standing: PreemptionNotice | None = None
        self._is_leaving = False
        self._failures = 0
        self._is_closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="notices", daemon=True).start()

    def close(self) -> None:
        """Stop polling. Does not wait for a request in progress; its answer is ignored."""
        self._is_closed.set()

    def _run(self) -> None:
        source, told = None, set[str]()
        while not self._is_closed.is_set():
            with going_on(told, "notices"):  # as where no thread can be started for a request
                source = source or self._find()
                if source is None:
                    return
                self.look(source)
            self._is_closed.wait(source.poll_seconds if source is not None else AGAIN_SECONDS)

    def look(self, source: NoticeSource) -> None:
        """Ask the source once and report changes. Without an answer the previous one still holds."""
        try:
            found = source.look()
        except NoticeUnreadable as error:
            self._failures += 1
            if self._failures == REPORTED_FAILURES:
                self._listener.warn(f"no notices from {source.name}: {error}; it is asked again")
            found = self._standing
        else:
            self._failures = 0
        if not self._is_closed.is_set():
            self._follow(replace(found, host=self._host) if found is not None else None)

    def _follow(self, found: PreemptionNotice | None) -> None:
        before = self._standing
        is_due = found is not None and found.is_due(self._now(), self._save_seconds())
        is_other = found is not None and (before is None or _is_other(found, before))
        if before is not None and (found is None or (self._is_leaving and is_other and not is_due)):
            self._is_leaving = False
            self._listener.withdraw(before)  # before `leave`: the last call counts
        self._standing = found  # after `withdraw`, which is called again if it fails; so is `leave`
        try:
            if found is not None and is_due and (is_other or not self._is_leaving):
                self._is_leaving = False
                self._listener.leave(found)
                self._is_leaving = True
        finally:
            if found is not None and is_other:  # after `leave`: it writes to the run directory, which may hang
                self._listener.hear(found)


def _is_other(found: PreemptionNotice, before: PreemptionNotice) -> bool:
    """Whether a notice differs from the previous one in certainty or deadline."""
    if found.is_certain != before.is_certain or (found.deadline is None) != (before.deadline is None):
        return True
    return abs((found.deadline or 0.0) - (before.deadline or 0.0)) > SAME_SECONDS


def source_of(
    flag: NoticesFlag, log: Callable[[str], None], call_on: Callable[[int, Callable[[], None]], None]
) -> Callable[[], NoticeSource | None]:
    """Return a function that finds the source, and may block. Call on the main thread: SLURM's takes a signal.

    Args:
        call_on: `StopSignal.call_on`.
    """
    match flag.kind:
        case "auto":
            return lambda: _found(log)
        case "aws":
            return AwsSource
        case "gcp":
            return GcpSource
        case "azure":
            return AzureSource
        case "kubernetes":
            return lambda: KubernetesSource(log)
        case "slurm":
            slurm = SlurmSource(os.environ)
            call_on(signal.SIGUSR1, slurm.hear)
            return lambda: slurm
        case "file":
            path = Path(flag.target).absolute()  # now: the code that is trained may change the working directory
            return lambda: FileSource(path)
    return lambda: EndpointSource(flag.target)


def _found(log: Callable[[str], None]) -> NoticeSource | None:
    source = find_cloud()
    if source is None:
        log("--notices auto: no metadata server of AWS, GCP or Azure answers here; nothing is watched")
    else:
        log(f"--notices auto: this node is in {source.name}, which is asked for notices")
    return source
