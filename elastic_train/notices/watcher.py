"""The thread that asks for notices, so that no step waits for an answer; and the source that --notices names."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic_train.notices.clouds import AwsSource, AzureSource, GcpSource, find_cloud
from elastic_train.notices.kubernetes import KubernetesSource
from elastic_train.notices.notice import NoticeSource, NoticeUnreadable
from elastic_train.notices.own_sources import EndpointSource, FileSource, SlurmSource
from elastic_train.preemption import NoticesFlag, PreemptionNotice

SAME_SECONDS = 5.0
"""by which a deadline may move from one answer to the next, and no more is told: sources that give the seconds which
are left name another one each time"""
TOLD_FAILURES = 3
"""answers in a row that mean nothing, before a person is told; one may be an accident"""


class NoticeListener(Protocol):
    """Who is told what a watcher hears, on its thread."""

    def hear(self, notice: PreemptionNotice) -> None:
        """There is a notice, or another one than before."""
        ...

    def leave(self, notice: PreemptionNotice) -> None:
        """It is time to leave."""
        ...

    def withdraw(self, notice: PreemptionNotice) -> None:
        """`notice` holds no more, or is no reason to leave now."""
        ...

    def warn(self, message: str) -> None: ...


class NoticeWatcher:
    """Asks one source as often as it wants to be asked.

    Args:
        find: the source; called on the watcher's thread, for finding out may take a moment. None: there is none.
        save_seconds: that the state takes to be saved; 0 where nobody knows.
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
        """It asks no more. An answer that it waits for is not waited for."""
        self._is_closed.set()

    def _run(self) -> None:
        source = self._find()
        while source is not None and not self._is_closed.is_set():
            self.look(source)
            self._is_closed.wait(source.poll_seconds)

    def look(self, source: NoticeSource) -> None:
        """Ask once, and tell what has changed. Where there is no answer the one before holds."""
        try:
            found = source.look()
        except NoticeUnreadable as error:
            self._failures += 1
            if self._failures == TOLD_FAILURES:
                self._listener.warn(f"no notices from {source.name}: {error}; it is asked again")
            found = self._standing
        else:
            self._failures = 0
        if not self._is_closed.is_set():
            self._follow(found.at(self._host) if found is not None else None)

    def _follow(self, found: PreemptionNotice | None) -> None:
        before, self._standing = self._standing, found
        is_due = found is not None and found.is_due(self._now(), self._save_seconds())
        is_other = found is not None and (before is None or _is_other(found, before))
        if before is not None and (found is None or (self._is_leaving and is_other and not is_due)):
            self._is_leaving = False
            self._listener.withdraw(before)  # before what stands from now on: the last word holds
        if found is not None and is_other:
            self._listener.hear(found)
        if found is not None and is_due and (is_other or not self._is_leaving):
            self._is_leaving = True
            self._listener.leave(found)


def _is_other(found: PreemptionNotice, before: PreemptionNotice) -> bool:
    """Whether it says another thing than the answer before: how sure, or when."""
    if found.is_certain != before.is_certain or (found.deadline is None) != (before.deadline is None):
        return True
    return abs((found.deadline or 0.0) - (before.deadline or 0.0)) > SAME_SECONDS


def source_of(
    flag: NoticesFlag, tell: Callable[[str], None], tell_also: Callable[[int, Callable[[], None]], None]
) -> Callable[[], NoticeSource | None]:
    """What comes to the source, which may take a moment. Call this on the main thread: SLURM's takes a signal.

    Args:
        tell_also: `StopSignal.tell_also`.
    """
    match flag.kind:
        case "auto":
            return lambda: _found(tell)
        case "aws":
            return AwsSource
        case "gcp":
            return GcpSource
        case "azure":
            return AzureSource
        case "kubernetes":
            return lambda: KubernetesSource(tell)
        case "slurm":
            slurm = SlurmSource(os.environ)
            tell_also(signal.SIGUSR1, slurm.hear)
            return lambda: slurm
        case "file":
            return lambda: FileSource(Path(flag.target))
    return lambda: EndpointSource(flag.target)


def _found(tell: Callable[[str], None]) -> NoticeSource | None:
    source = find_cloud()
    if source is None:
        tell("--notices auto: no metadata server of AWS, GCP or Azure answers here; nothing is watched")
    else:
        tell(f"--notices auto: this node is in {source.name}, which is asked for notices")
    return source
