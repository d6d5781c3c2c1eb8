"""Notices from a file, an endpoint or SLURM's signal; and the relay from one worker of a node to its other workers."""

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

from elastic_train.notices.metadata import MOST_BYTES, ask
from elastic_train.notices.notice import NoticeSource, NoticeUnreadable, from_own, to_own
from elastic_train.preemption import LEAD_SECONDS, PreemptionNotice
from elastic_train.storage.atomic_files import write_atomic

NO_NOTICE = (204, 404)
"""The HTTP statuses of an endpoint without a notice."""
LEFT_SECONDS = 3600.0
"""The age after which a relay file is unused: its node has left, minutes after the write, or has read a withdrawal."""


class FileSource:
    """A file: there is a notice as long as the file exists. `touch` is enough."""

    name = "file"
    poll_seconds = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> PreemptionNotice | None:
        text = read_small(self._path)
        return None if text is None else from_own(self.name, text)


class EndpointSource:
    """An http:// or https:// URL that returns the content of such a file, or 204 or 404 if there is no notice."""

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
            raise answer.refused()
        return from_own(self.name, answer.text)


class SlurmSource:
    """SIGUSR1, which `--signal=USR1@60` sends to processes that srun has started (manual page of sbatch). SLURM never
    withdraws it.

    If the end of the job's time is near, it is the deadline. Otherwise the signal announces a preemption of unknown
    grace time. Every worker creates this object on its main thread: without a handler the signal ends the process.
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
        """Note a SIGUSR1 whose handler the main thread may not have run yet. Any thread may call this."""
        if signal.getsignal(signal.SIGUSR1) == self._remember:  # else the program uses the signal itself
            self._note()

    def _note(self) -> None:
        if self._notice is None:
            is_near = self._ends is not None and self._ends - time.time() <= LEAD_SECONDS
            self._notice = PreemptionNotice(self.name, "SIGUSR1 of SLURM", self._ends if is_near else None)

    def look(self) -> PreemptionNotice | None:
        return self._notice


class Relay:
    """A file in the run directory that passes notices from one worker of a node to the others, which poll it.

    Only its content withdraws a notice. The removal of the file, with the worker that wrote it, does not.
    """

    name = "relay"
    poll_seconds = 1.0
    """Part of the 3 s in which all workers of a node must notice; not less, because the file system may be remote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: PreemptionNotice | None = None
        self.may_be_there = False
        """Whether the file may exist: this worker has written or read it."""

    def begin(self) -> None:
        """Delete the files of killed starts: this node's own, and files of other nodes that are older than
        LEFT_SECONDS. Raises: OSError."""
        self.clear()
        for other in self._path.parent.glob("*"):
            with suppress(OSError):  # another node's first worker may delete it at the same time
                if time.time() - other.stat().st_mtime > LEFT_SECONDS:
                    other.unlink()

    def clear(self) -> None:
        """Delete the file. Raises: OSError."""
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
    """The relay while another worker of the node polls the source and writes the relay; afterwards the source itself.
    The relay's last notice stays valid if the source never withdraws (SLURM), or is not found.

    Args:
        is_first: whether this worker must poll the source; called at each look.
        find: finds the source, or returns None; called once.
    """

    def __init__(self, relay: Relay, is_first: Callable[[], bool], find: Callable[[], NoticeSource | None]) -> None:
        self.name, self.poll_seconds = relay.name, relay.poll_seconds
        self._relay, self._is_first, self._find = relay, is_first, find
        self._source: NoticeSource = relay
        self._has_taken_over = False

    def look(self) -> PreemptionNotice | None:
        if not self._has_taken_over and self._is_first():
            self._source = self._find() or self._relay
            self._has_taken_over = True
            self.name, self.poll_seconds = self._source.name, self._source.poll_seconds
        found = self._source.look()
        if found is None and isinstance(self._source, SlurmSource):  # only the other worker may have got the signal
            return self._relay.look()
        return found


def read_small(path: Path) -> str | None:
    """Read a small file; None if it does not exist. Raises: NoticeUnreadable."""
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
