"""The bytes of a state as parts: cut and sent while they are made, fetched several at a time and joined in order."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import SnapshotDamaged, SnapshotError

PART_BYTES = 2**24
"""16 MiB: at 1 Gbit/s they take longer than two round trips of 50 ms, and three are on their way at once; at 200 Mbit/s
these take 2 s, should they be given up. The four that are in memory are small beside a state that has many"""
MOST_PART_BYTES = 2**28
"""that is read at once, whatever a manifest says"""
AT_ONCE = 3
"""parts on their way: one connection of TCP seldom fills a line"""


@dataclass(frozen=True)
class Part:
    """An object with a share of a file's bytes."""

    name: str
    bytes: int
    sha256: str
    host: str
    """that wrote it"""

    @staticmethod
    def from_fields(fields: Mapping[str, Any], prefix: str) -> Part:
        """Raises: KeyError, TypeError, ValueError: they are not those of a part whose name begins so."""
        part = Part(str(fields["name"]), fields["bytes"], str(fields["sha256"]), str(fields["host"]))
        if not part.name.startswith(prefix) or "/" in part.name or "\0" in part.name:
            raise ValueError(f"{part.name!r} is not the name of a part")
        if type(part.bytes) is not int or not 0 < part.bytes <= MOST_PART_BYTES:
            raise ValueError(f"part {part.name} of {part.bytes!r} bytes")
        return part


class PartSender:
    """Sends objects, AT_ONCE of them at a time, each by a thread of its own.

    Args:
        put: sends one. Blocks; raises ObjectStoreError.
        is_given_up: whether the rest need not be sent any more: `finish` raises SnapshotError then.
    """

    def __init__(self, put: Callable[[str, bytearray], None], is_given_up: Callable[[], bool] = lambda: False) -> None:
        self._put, self._is_given_up = put, is_given_up
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """of what the rate is made of"""
        self._num_moving, self._began_at = 0, 0.0
        self._seconds, self._bytes = 0.0, 0
        self.names: list[str] = []
        """of all that may have been sent"""

    def has_failed(self) -> bool:
        if self._error is None and self._is_given_up():
            self._error = SnapshotError("it was given up on its way")
        return self._error is not None

    @property
    def rate(self) -> float | None:
        """Bytes per second in which something was on its way; None before one is there."""
        return self._bytes / self._seconds if self._seconds else None

    def send(self, name: str, data: bytearray) -> None:
        """Blocks while AT_ONCE are on their way. Never raises: `finish` does. After an error nothing more is sent."""
        if self.has_failed():
            return
        self._slots.acquire()
        with self._lock:
            if self._num_moving == 0:
                self._began_at = time.monotonic()
            self._num_moving += 1
        self.names.append(name)
        # No pool: its threads would keep a process that has given up on the store from ending.
        thread = threading.Thread(target=self._run, args=(name, data), name="snapshot-part", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, name: str, data: bytearray) -> None:
        try:
            if not self.has_failed():
                self._put(name, data)
                with self._lock:
                    now = time.monotonic()
                    self._bytes, self._seconds = self._bytes + len(data), self._seconds + now - self._began_at
                    self._began_at = now
        except BaseException as error:  # not handled here: finish() gives it to the thread that writes
            self._error = self._error or error
        finally:
            with self._lock:
                self._num_moving -= 1
            self._slots.release()

    def finish(self) -> None:
        """Wait for all. Raises: what a `put` has; SnapshotError where it was given up, for then not all came here."""
        self.wait()
        if self.has_failed() and self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until nothing is on its way."""
        for thread in self._threads:
            thread.join()


def each(
    function: Callable[[str], object], names: Iterable[str], is_given_up: Callable[[], bool] = lambda: False
) -> None:
    """Call a function for each name, AT_ONCE of them at a time. Raises: what a call has; as `PartSender.finish`."""

    def call(name: str, _nothing: bytearray) -> None:
        function(name)

    calling = PartSender(call, is_given_up)
    for name in names:
        calling.send(name, bytearray())
    calling.finish()


class PartStream:
    """What is written here is cut into parts, each sent by a thread of its own while the next ones are made. `write`
    blocks while AT_ONCE of them are on their way, so that memory is bounded.

    Args:
        name_of: of a part, by its number.
        put, is_given_up: as of a `PartSender`.
    """

    def __init__(
        self,
        name_of: Callable[[int], str],
        put: Callable[[str, bytearray], None],
        host: str,
        part_bytes: int = PART_BYTES,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name_of, self._put, self._host, self._part_bytes = name_of, put, host, part_bytes
        self._buffer = bytearray()
        self._sender = PartSender(self._put_part, is_given_up)
        self._sent: dict[str, Part] = {}

    @property
    def names(self) -> list[str]:
        """Of all parts that may have been sent."""
        return self._sender.names

    def write(self, data: bytes | memoryview) -> int:
        """Never raises, for torch.save calls it from C++: `finish` does. After an error nothing more is kept."""
        view = memoryview(data).cast("B")
        written = len(view)
        while len(view) and not self._sender.has_failed():
            room = self._part_bytes - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part_bytes:
                self._send()
        return written

    def _send(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        self._sender.send(self._name_of(len(self.names)), data)

    def _put_part(self, name: str, data: bytearray) -> None:
        part = Part(name, len(data), hashlib.sha256(data).hexdigest(), self._host)
        self._put(name, data)
        self._sent[name] = part

    def finish(self) -> list[Part]:
        """Send the rest, and wait for all. Raises: what a `put` has."""
        if self._buffer:
            self._send()
        self._sender.finish()
        return [self._sent[name] for name in self.names]

    def wait(self) -> None:
        """Until no part is on its way."""
        self._sender.wait()


def fetch(parts: Iterable[Part], get: Callable[[str], bytes | None]) -> Iterator[bytes]:
    """The bytes of parts, in their order, AT_ONCE of them in memory; each is as its manifest promises.

    Args:
        get: fetches an object by its name; None where there is none.

    Raises:
        SnapshotDamaged: one is missing, or another. ObjectStoreError: the store does not answer.
    """

    def one(part: Part) -> bytes:
        data = get(part.name)
        if data is None:
            raise SnapshotDamaged(f"{part.name} is missing")
        if len(data) != part.bytes or hashlib.sha256(data).hexdigest() != part.sha256:
            raise SnapshotDamaged(f"{part.name} is damaged: it is not what its manifest says")
        return data

    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="snapshot-read") as pool:
        try:
            for part in parts:
                waiting.append(pool.submit(one, part))
                if len(waiting) == AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
