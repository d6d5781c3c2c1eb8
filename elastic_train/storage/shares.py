"""One snapshot below a URL, written by several nodes over their own network links, when all leave at one step.

torch.save writes the bytes of tensors one after the other. From the first tensor that is equal on all nodes to the last
one, every node writes the same bytes, at whatever position in its file. Each of n nodes cuts these bytes into the same
parts and sends every n-th. The name of a part contains the SHA-256 of its bytes and the number of the sending node. A
part counts, whichever node sent it, if its SHA-256 is that of the same part on the first node. So the nodes need not
communicate: a listing of the bucket shows the progress of each. Nodes that have finished send the missing parts of
other nodes. The first node alone puts all bytes that may differ between nodes, and the manifest, which makes the
snapshot visible.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

from elastic_train.errors import ObjectStoreError
from elastic_train.storage.parts import AT_ONCE, Part, PartSender
from elastic_train.storage.snapshot import MANIFEST_FILE
from elastic_train.storage.state_bytes import ALIKE, is_odd, rebuilt, write_state

SHARE_BYTES = 2**23
"""The size of a part: 8 MiB take 0.3 s at 200 Mbit/s. A node that dies loses at most three, and the wait for the last
part is short."""
LEAST_BYTES = 8 * SHARE_BYTES
"""The least number of equal bytes to share. One node alone sends fewer bytes as fast."""
LOOK_SECONDS = 1.0
"""The time between two listings of the bucket."""
LEAST_SILENCE_SECONDS = 3.0
SPARE_SECONDS = 5.0
"""The reserve before a deadline, for the manifest and for delays beyond the measured rate."""
IDLE_SECONDS = 20.0
"""After this long without a new part in the bucket, the manifest is not expected any more."""

HEAD, BODY, TAIL = "head", "share", "tail"
"""The zones of a file: before the bytes that are equal on all nodes, these bytes, and behind them."""


@dataclass(frozen=True)
class Fleet:
    """The nodes that write one snapshot together, as seen by one of them."""

    hosts: tuple[str, ...]
    """By node; the first one puts the manifest and all bytes that may differ between nodes."""
    index: int
    """The index of this node."""
    equal: frozenset[str]
    """Names of entries that are equal on all nodes, in the state of the model and of its averaged weights. All tensors
    of the optimizer are equal, too."""
    seconds_left: Callable[[], float | None]
    """The time until this node is taken away; None if unknown."""
    is_first_lost: Callable[[], bool] = lambda: False
    """Whether the first node is lost, so that no manifest will come."""

    def sender_of(self, number: int) -> int:
        """The node that should send the part of this number."""
        return number % len(self.hosts)


class SharedState:
    """A state with its equal tensors listed once more in front. torch.save writes each tensor once, where it comes
    first. Calling the object writes the state into a file.

    Args:
        state: the writer's own copy of a `TrainState.state_dict`.
    """

    def __init__(self, state: dict[str, Any], fleet: Fleet) -> None:
        weights = [state["model"], state["extras"].get("ema", {})]
        equal = [[value for name, value in one.items() if name in fleet.equal] for one in weights]
        alike: list[Any] = []
        rebuilt([state["optimizer"], equal], alike.append)
        alike = [tensor for tensor in alike if not is_odd(tensor)]
        memories = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in alike)}
        addresses: list[int] = [address for address, size in memories.items() if size] or [0]
        # In front, because torch.save numbers all tensors, and the numbers are part of the bytes.
        self._state = {ALIKE: alike, **state}
        self.fleet = fleet
        self.num_bytes = sum(tensor.nbytes for tensor in alike)  # not of `memories`: a copy has other ones
        self.first, self.end = addresses[0], addresses[-1] + memories.get(addresses[-1], 0)
        """The addresses of the first tensor that is equal on all nodes, and of the end of the last one."""

    def __call__(self, file: object) -> None:
        write_state(self._state, file)


def senders(num_nodes: int, num_bytes: int, *, is_bucket: bool) -> int:
    """Return how many of `num_nodes` nodes send a snapshot of `num_bytes`, if all leave at once."""
    return num_nodes if is_bucket and num_bytes >= LEAST_BYTES else 1


def shared_by(fleet: Fleet | None, state: dict[str, Any]) -> SharedState | None:
    """The state as a fleet writes it together; None without a fleet, or if one node alone is as fast. All nodes get the
    same answer, because it depends on sizes only."""
    shared = None if fleet is None else SharedState(state, fleet)
    return None if shared is None or senders(len(shared.fleet.hosts), shared.num_bytes, is_bucket=True) == 1 else shared


TakePart = Callable[[str, int, str, int, bytearray | None], None]
"""Called with zone, number, SHA-256 and size of a complete part, and with its data if that was wanted."""


class Cutter:
    """A file for torch.save that cuts the bytes into parts of three zones; the parts of BODY are equal on every node.

    torch.save writes a tensor's memory in place, so addresses identify it. A `HashingFile` passes that on in pieces.

    Args:
        wants: whether to keep the data of a part.
        hashes: whether to compute the SHA-256 of parts.
    """

    def __init__(
        self,
        state: SharedState,
        part_bytes: int,
        wants: Callable[[str, int], bool],
        take: TakePart,
        *,
        hashes: bool = True,
    ) -> None:
        self._state, self._part_bytes, self._wants, self._take = state, part_bytes, wants, take
        self._hashes = hashes
        self._zone, self._number = HEAD, 0
        self._begin_part()

    def _begin_part(self) -> None:
        self._digest, self._size = hashlib.sha256(), 0
        self._data = bytearray() if self._wants(self._zone, self._number) else None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        address = _address_of(view)
        if self._zone == HEAD and address == self._state.first:
            self._enter(BODY)
        self._add(view)
        if self._zone == BODY and address is not None and address + len(view) == self._state.end:
            self._enter(TAIL)
        return len(view)

    def flush(self) -> None:
        """Called by torch.save."""

    def close(self) -> None:
        """End the last part; call this after the last write."""
        if self._size:
            self._end_part()

    def _enter(self, zone: str) -> None:
        self.close()
        self._zone, self._number = zone, 0
        self._begin_part()

    def _add(self, view: memoryview) -> None:
        while len(view):
            piece = view[: self._part_bytes - self._size]
            view = view[len(piece) :]
            self._size += len(piece)
            if self._hashes:
                self._digest.update(piece)
            if self._data is not None:
                self._data += piece
            if self._size == self._part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        self._take(self._zone, self._number, self._digest.hexdigest(), self._size, self._data)
        self._number += 1
        self._begin_part()


def _address_of(view: memoryview) -> int | None:
    import numpy

    return int(numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0]) if len(view) else None


@dataclass(frozen=True)
class ShareProgress:
    """The progress of a node with its share, as the bucket shows it."""

    missing: tuple[int, ...] = ()
    """The numbers of its parts that have not arrived."""
    is_given_up: bool = False
    """Whether the other nodes expect no more parts from it."""


def is_given_up(silent_seconds: float, part_seconds: float, *, has_other_bytes: bool) -> bool:
    """Whether other nodes send all missing parts of a node.

    Args:
        silent_seconds: the time since the newest of its parts arrived.
        part_seconds: the time that the calling node takes for a part.
        has_other_bytes: whether one of its parts arrived with unexpected bytes.
    """
    return has_other_bytes or silent_seconds > silence_limit(part_seconds)


def silence_limit(part_seconds: float) -> float:
    """The longest wait for a node's next part: AT_ONCE parts may all arrive together at the end; twice that time."""
    return max(LEAST_SILENCE_SECONDS, 2 * AT_ONCE * part_seconds)


def taken_over(
    progress: Sequence[ShareProgress], me: int, part_seconds: float, seconds_left: float | None
) -> list[int]:
    """The numbers of the parts that node `me`, which has sent its own, sends for other nodes now.

    Finished nodes divide the missing parts of nodes that are given up. If the missing parts of all nodes might arrive
    too late, they also divide the later half of each node's missing parts; that node sends the earlier half itself. If
    there is any part to send, the first node gets one: it does not rely on the help of other nodes.

    Args:
        part_seconds: the time that this node takes for a part.
        seconds_left: the time until the deadline, if known.
    """
    through = [node for node, one in enumerate(progress) if not one.missing]
    num_missing = sum(len(one.missing) for one in progress)
    is_late = seconds_left is not None and seconds_left - SPARE_SECONDS < num_missing * part_seconds / len(through)
    numbers: list[int] = []
    for one in progress:
        if one.is_given_up:
            numbers += one.missing
        elif is_late:
            numbers += one.missing[len(one.missing) // 2 :]
    return sorted(numbers)[through.index(me) :: len(through)]


class SharedStream:
    """A file for torch.save that cuts the bytes and sends this node's parts on threads, as a `PartStream`.

    Args:
        name_of: returns the name of a part, given its zone, number and suffix as text.
        nonce: identifies this attempt, in names of parts that are not named by their content.
        put: sends an object. Blocks; raises ObjectStoreError.
        listed: returns the size in bytes of existing objects by name. Raises ObjectStoreError.
        clock: monotonic, in seconds; `sleep` waits by this clock.
    """

    def __init__(
        self,
        state: SharedState,
        name_of: Callable[[str], str],
        nonce: str,
        put: Callable[[str, bytearray], None],
        listed: Callable[[], Mapping[str, int]],
        part_bytes: int = SHARE_BYTES,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._state, self._fleet, self._part_bytes = state, state.fleet, part_bytes
        self._name_of, self._nonce, self._listed = name_of, nonce, listed
        self._clock, self._sleep = clock, sleep
        self._sender = PartSender(put)
        self._cutter = Cutter(state, part_bytes, self._is_mine, self._take)
        self._around: dict[str, list[Part]] = {HEAD: [], TAIL: []}
        self._body: list[Part] = []
        """All parts of BODY, with the names that this node would give them."""
        self._there: dict[int, Part] = {}
        """The parts of BODY that have arrived, by number, with the names that their senders gave them."""
        self._heard = [(0, clock())] * len(self._fleet.hosts)
        """By node: how many parts it has put, and when the newest of them was first seen."""
        self._look_at = clock() + LOOK_SECONDS
        """The time of the next listing while parts are cut. Listings take a tenth of the time at most."""
        self._have_other_bytes: set[int] = set()
        self.names: list[str] = []
        """The names of parts that are useless if this attempt fails."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes. Errors are raised by `finish`, because torch.save calls this from C++."""
        return self._cutter.write(data)

    def flush(self) -> None:
        """Called by torch.save."""

    def _is_mine(self, zone: str, number: int) -> bool:
        return self._fleet.sender_of(number) == self._fleet.index if zone == BODY else self._fleet.index == 0

    def _take(self, zone: str, number: int, sha256: str, size: int, data: bytearray | None) -> None:
        suffix = f"{sha256}.{self._fleet.index}" if zone == BODY else self._nonce
        part = Part(self._name_of(f"{zone}-{number:05d}.{suffix}"), size, sha256, self._fleet.hosts[self._fleet.index])
        (self._body if zone == BODY else self._around[zone]).append(part)
        if data is not None:
            self._send(part, data, number if zone == BODY else None)

    def _send(self, part: Part, data: bytearray, number: int | None) -> None:
        if number is None:
            self.names.append(part.name)
        else:
            self._there[number] = part  # in advance: if it is not sent, `finish` of the sender raises
        self._sender.send(part.name, data)
        if self._clock() >= self._look_at:  # so that silent nodes are known once this node has finished
            with contextlib.suppress(ObjectStoreError):
                self._look()

    def finish(self) -> list[Part]:
        """Wait until every part has arrived, and return all parts; only for the first node. Sends parts of other nodes
        meanwhile. Raises: errors of `put` and `listed`."""
        self._cutter.close()
        self._sender.finish()
        self._look()
        while missing := self._missing():
            self._help(missing)
            self._look()
        body = [self._there[number] for number in range(len(self._body))]
        return [*self._around[HEAD], *body, *self._around[TAIL]]

    def finish_share(self) -> bool:
        """Wait until the manifest exists; for all nodes but the first. Sends parts of slower nodes meanwhile. Returns
        False if no manifest will come. Raises as `finish`."""
        self._cutter.close()
        self._sender.finish()
        num_missing, changed_at = -1, self._clock()
        while MANIFEST_FILE not in self._look():
            missing = self._missing()
            if num_missing != (num_missing := sum(map(len, missing.values()))):
                changed_at = self._clock()
            is_idle = self._clock() - changed_at > IDLE_SECONDS + silence_limit(self._part_seconds)
            if is_idle or self._fleet.is_first_lost() or (0 in missing and self._is_given_up(0)):
                return False
            if missing:
                self._help(missing)
            else:
                self._sleep(LOOK_SECONDS)
        return True

    def wait(self) -> None:
        """Wait until no part is in flight."""
        self._sender.wait()

    @property
    def _part_seconds(self) -> float:
        rate = self._sender.rate
        return 0.0 if rate is None else self._part_bytes / rate

    def _is_given_up(self, node: int) -> bool:
        silent_seconds = self._clock() - self._heard[node][1]
        return is_given_up(silent_seconds, self._part_seconds, has_other_bytes=node in self._have_other_bytes)

    def _look(self) -> Mapping[str, int]:
        """List the bucket, update the progress of all nodes and return the listing. Raises: as `listed`."""
        began_at = self._clock()
        try:
            files = self._listed()
        finally:
            now = self._clock()
            self._look_at = now + max(LOOK_SECONDS, 9 * (now - began_at))
        form = re.compile(re.escape(self._name_of(f"{BODY}-")) + r"(\d+)\.(\w+)\.(\d+)")
        found = [(int(one[1]), one[2], int(one[3]), one[0]) for one in map(form.fullmatch, files) if one]
        num_put = Counter(node for _, _, node, _ in found)
        self._heard = [
            (num_put[node], now) if num_put[node] != before else (before, since)
            for node, (before, since) in enumerate(self._heard)
        ]
        for number, sha256, node, name in found:
            if number >= len(self._body) or node >= len(self._fleet.hosts):
                continue  # not cut by this node yet, or of no node of the fleet
            mine = self._body[number]
            if sha256 != mine.sha256:
                self._have_other_bytes.add(node)
            elif files[name] == mine.bytes:
                self._there.setdefault(number, replace(mine, name=name, host=self._fleet.hosts[node]))
        return files

    def _missing(self) -> dict[int, tuple[int, ...]]:
        """The numbers of parts that have not arrived, by the node that should send them."""
        missing: dict[int, list[int]] = {}
        for number in range(len(self._body)):
            if number not in self._there:
                missing.setdefault(self._fleet.sender_of(number), []).append(number)
        return {node: tuple(numbers) for node, numbers in missing.items()}

    def _help(self, missing: Mapping[int, tuple[int, ...]]) -> None:
        """Send some parts of other nodes, or sleep until the next look if there is none to send."""
        me, fleet = self._fleet.index, self._fleet
        progress = [ShareProgress(missing.get(node, ()), self._is_given_up(node)) for node in range(len(fleet.hosts))]
        if not (numbers := taken_over(progress, me, self._part_seconds, fleet.seconds_left())):
            self._sleep(LOOK_SECONDS)
            return
        self._send_again(frozenset(numbers[: 2 * AT_ONCE]))  # a few; the caller lists the bucket before more

    def _send_again(self, numbers: frozenset[int]) -> None:
        def wants(zone: str, number: int) -> bool:
            return zone == BODY and number in numbers

        def take(zone: str, number: int, sha256: str, size: int, data: bytearray | None) -> None:
            if data is not None:
                self._send(self._body[number], data, number)

        cutter = Cutter(self._state, self._part_bytes, wants, take, hashes=False)
        self._state(cast("IO[bytes]", cutter))
        cutter.close()
        self._sender.finish()
