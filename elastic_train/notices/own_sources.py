"""Notices of one's own: a file, an endpoint, a signal of SLURM; and what one worker of a node tells the others."""

from __future__ import annotations

import signal
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from urllib.parse import quote, urlsplit

from elastic_train.notices.metadata import MOST_BYTES, ask, refuse
from elastic_train.notices.notice import NoticeSource, NoticeUnreadable, from_own, to_own
from elastic_train.preemption import LEAD_SECONDS, PreemptionNotice
from elastic_train.storage.atomic_files import write_atomic

NO_NOTICE = (204, 404)
"""HTTP statuses of an endpoint without one"""
LEFT_SECONDS = 3600.0
"""after which nobody reads a relay any more: a node leaves minutes after it was written, or has read that it stays"""


class FileSource:
    """A file: there is a notice as long as it is there. `touch` is enough."""

    name = "file"
    poll_seconds = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> PreemptionNotice | None:
        text = read_small(self._path)
        return None if text is None else from_own(self.name, text)


class EndpointSource:
    """An http:// or https:// URL that answers as a file would read, or with 204 or 404 where there is no notice."""

    name = "http"
    poll_seconds = 2.0

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._tls = ssl.create_default_context() if is_tls else None
        self._address = parts.hostname or "", parts.port or (443 if is_tls else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._path = quote(path, safe=bytes(range(128)), errors="surrogateescape")  # a request is ASCII (RFC 3987)

    def look(self) -> PreemptionNotice | None:
        answer = ask(self._address, self._path, {}, tls=self._tls)
        if answer.status in NO_NOTICE:
            return None
        if answer.status != 200:
            raise refuse(answer, self._address, self._path)
        return from_own(self.name, answer.text)


class SlurmSource:
    """SIGUSR1, as `--signal=USR1@60` has it sent to what srun has started (the manual page of sbatch). SLURM takes
    nothing back.

    The end of the job's time is the deadline where it is near; else the signal is of a preemption, whose grace time
    nobody tells the job. Made on the main thread, by every worker: the signal ends a process that does not expect it.
    """

    name = "slurm"
    poll_seconds = 0.2

    def __init__(self, environ: Mapping[str, str]) -> None:
        ends = environ.get("SLURM_JOB_END_TIME", "")
        self._ends = float(ends) if ends.isdigit() else None
        self._notice: PreemptionNotice | None = None
        signal.signal(signal.SIGUSR1, self._remember)

    def _remember(self, _signum: int, _frame: FrameType | None) -> None:
        self._note()

    def hear(self) -> None:
        """SIGUSR1 has come, and the main thread may not have come to its handler. From any thread."""
        if signal.getsignal(signal.SIGUSR1) == self._remember:  # else it is the program's own
            self._note()

    def _note(self) -> None:
        if self._notice is None:
            is_near = self._ends is not None and self._ends - time.time() <= LEAD_SECONDS
            self._notice = PreemptionNotice(self.name, "SIGUSR1 of SLURM", self._ends if is_near else None)

    def look(self) -> PreemptionNotice | None:
        return self._notice


class Relay:
    """A file in the run directory by which one worker of a node tells the others; a source to those.

    Only what it says takes a notice back; that it is removed, with the one that wrote it, does not.
    """

    name = "relay"
    poll_seconds = 1.0
    """of the 3 s in which the workers of a node hear of it; the file system may be a far one"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: PreemptionNotice | None = None
        self.may_be_there = False
        """the file: this worker has written or read it"""

    def begin(self) -> None:
        """Remove what earlier starts have left that were killed: its own file, and those of any node that are too old
        to be a living one's. Raises: OSError."""
        self.clear()
        for other in self._path.parent.glob("*"):
            with suppress(OSError):  # another node's first worker removes it as well
                if time.time() - other.stat().st_mtime > LEFT_SECONDS:
                    other.unlink()

    def clear(self) -> None:
        """Remove it. Raises: OSError."""
        self._path.unlink(missing_ok=True)

    def write(self, notice: PreemptionNotice | None) -> None:
        """Raises: OSError."""
        self.may_be_there = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, to_own(notice).encode())

    def look(self) -> PreemptionNotice | None:
        text = read_small(self._path)
        if text is not None:
            self.may_be_there = True
            found = from_own(self.name, text)
            self._last = found and replace(found, is_followed=True)
        return self._last


class AfterOthers:
    """The relay, as long as another worker of the node asks the source and writes it; then the source itself. What the
    relay has said last holds on where the source takes nothing back, or cannot be found.

    Args:
        is_first: whether this worker is to ask; called at each look.
        find: the source; None: there is none. Called once.
    """

    def __init__(self, relay: Relay, is_first: Callable[[], bool], find: Callable[[], NoticeSource | None]) -> None:
        self.name, self.poll_seconds = relay.name, relay.poll_seconds
        self._relay, self._is_first, self._find = relay, is_first, find
        self._source: NoticeSource = relay
        self._has_taken_over = False

    def look(self) -> PreemptionNotice | None:
        if not self._has_taken_over and self._is_first():
            self._has_taken_over = True
            self._source = self._find() or self._relay
            self.name, self.poll_seconds = self._source.name, self._source.poll_seconds
        found = self._source.look()
        if found is None and isinstance(self._source, SlurmSource):  # its signal may have come to the other one alone
            return self._relay.look()
        return found


def read_small(path: Path) -> str | None:
    """None where there is no such file. Raises: NoticeUnreadable."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoticeUnreadable(f"{path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise NoticeUnreadable(f"{path}: more than {MOST_BYTES} bytes")
    return data.decode(errors="replace")
