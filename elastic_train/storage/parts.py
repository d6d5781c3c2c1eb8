"""The bytes of a state as parts: sent while later ones are still produced; fetched in parallel and joined in order."""

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
from elastic_train.system import starts

PART_BYTES = 2**24
"""16 MiB. At 1 Gbit/s a part takes longer than two round trips of 50 ms. At 200 Mbit/s the three in flight take 2 s to
arrive if a snapshot is given up. The four in memory are small compared to a state of many parts."""
MOST_PART_BYTES = 2**28
"""The largest part that is read, whatever a manifest says."""
AT_ONCE = 3
"""Parts in flight: a single TCP connection seldom saturates the network."""


@dataclass(frozen=True)
class Part:
    """An object that holds a piece of a file."""

    name: str
    bytes: int
    sha256: str
    host: str
    """The host that wrote it."""

    @staticmethod
    def from_fields(fields: Mapping[str, Any], prefix: str) -> Part:
        """Raises: KeyError, TypeError, ValueError: the fields are not those of a part with this prefix in its name."""
        part = Part(str(fields["name"]), fields["bytes"], str(fields["sha256"]), str(fields["host"]))
        if not part.name.startswith(prefix) or "/" in part.name or "\0" in part.name:
            raise ValueError(f"{part.name!r} is not the name of a part")
        if type(part.bytes) is not int or not 0 < part.bytes <= MOST_PART_BYTES:
            raise ValueError(f"part {part.name} of {part.bytes!r} bytes")
        return part


class PartSender:
    """Sends objects, AT_ONCE of them at a time, each on its own thread.

    Args:
        put: sends one object. Blocks; raises ObjectStoreError.
        is_given_up: whether the rest is no longer needed; `finish` raises SnapshotError then.
    """

    def __init__(self, put: Callable[[str, bytearray], None], is_given_up: Callable[[], bool] = lambda: False) -> None:
        self._put, self._is_given_up = put, is_given_up
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """Guards the fields that `rate` is computed from."""
        self._num_moving, self._began_at = 0, 0.0
        self._seconds, self._bytes = 0.0, 0
        self.names: list[str] = []
        """The names of all objects that may have been sent."""

    def has_failed(self) -> bool:
        if self._error is None and self._is_given_up():
            self._error = SnapshotError("it was given up before it was complete")
        return self._error is not None

    @property
    def rate(self) -> float | None:
        """Bytes per second of time with a part in flight; None before the first part has arrived."""
        return self._bytes / self._seconds if self._seconds else None

    def send(self, name: str, data: bytearray) -> None:
        """Send an object; blocks while AT_ONCE are in flight. Errors are raised by `finish`, and end all sending."""
        if self.has_failed():
            return
        self._slots.acquire()
        with self._lock:
            if self._num_moving == 0:
                self._began_at = time.monotonic()
            self._num_moving += 1
        self.names.append(name)
        # No pool: its threads would prevent the exit of a process that has given up on the store.
        thread = threading.Thread(target=self._run, args=(name, data), name="snapshot-part", daemon=True)
        if starts(thread):
            self._threads.append(thread)
        else:
            self._run(name, data)

    def _run(self, name: str, data: bytearray) -> None:
        try:
            if not self.has_failed():
                self._put(name, data)
                with self._lock:
                    now = time.monotonic()
                    self._bytes, self._seconds = self._bytes + len(data), self._seconds + now - self._began_at
                    self._began_at = now
        except BaseException as error:  # not handled here: finish() raises it in the writing thread
            self._error = self._error or error
        finally:
            with self._lock:
                self._num_moving -= 1
            self._slots.release()

    def finish(self) -> None:
        """Wait for all objects. Raises: an error of `put`; SnapshotError if given up, as then not all were sent."""
        self.wait()
        if self.has_failed() and self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until no object is in flight."""
        for thread in self._threads:
            thread.join()


def each(
    function: Callable[[str], object], names: Iterable[str], is_given_up: Callable[[], bool] = lambda: False
) -> None:
    """Call a function for each name, AT_ONCE at a time. Raises: an error of the function; as `PartSender.finish`."""

    def call(name: str, _nothing: bytearray) -> None:
        function(name)

    calling = PartSender(call, is_given_up)
    for name in names:
        calling.send(name, bytearray())
    calling.finish()


class PartStream:
    """A file for torch.save that cuts the bytes into parts and sends each on its own thread, while the next ones are
    produced. `write` blocks while AT_ONCE parts are in flight, so that memory is bounded.

    Args:
        name_of: returns the name of a part by its number.
        put, is_given_up: as for `PartSender`.
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
        """The names of all parts that may have been sent."""
        return self._sender.names

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; drop them after an error, which `finish` raises, because torch.save calls this from C++."""
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
        """Send the rest and wait for all parts. Raises: an error of `put`; SnapshotError if given up."""
        if self._buffer:
            self._send()
        self._sender.finish()
        return [self._sent[name] for name in self.names]

    def wait(self) -> None:
        """Wait until no part is in flight."""
        self._sender.wait()


def fetch(parts: Iterable[Part], get: Callable[[str], bytes | None]) -> Iterator[bytes]:
    """Yield the bytes of parts in order, each verified by its size and SHA-256; at most AT_ONCE are in memory.

    Args:
        get: fetches an object by its name; None if there is none.

    Raises:
        SnapshotDamaged: a part is missing or damaged. ObjectStoreError: the store does not answer.
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
