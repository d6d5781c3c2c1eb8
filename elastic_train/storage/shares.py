"""One snapshot below a URL by several nodes, each over a line of its own: all leave at one step, and have little time.

torch.save puts the bytes of tensors one behind the other. From the first tensor that all nodes have alike to the last
one these are the same bytes on every node, wherever in its file they begin. Each node cuts them into the same parts and
sends every n-th. The name of such a part has the SHA-256 of its bytes and the number of the node that has put it:
whoever that was, it is the part that is meant where its bytes are those that the first node holds, and else it is none.
So the nodes need no word from each other: what lies in the bucket says how far each is. Parts that do not come are sent
by those that are through with their own. What makes a snapshot visible, its manifest, is put by the first node alone,
with all that nodes do not have alike.
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
"""of a part: 8 MiB are 0.3 s at 200 Mbit/s; who dies has lost three of them at most, and nobody waits long for a last
one"""
LEAST_BYTES = 8 * SHARE_BYTES
"""of what all have alike: less than this one node sends as fast"""
LOOK_SECONDS = 1.0
"""between two looks at what has come"""
LEAST_SILENCE_SECONDS = 3.0
SPARE_SECONDS = 5.0
"""before a deadline: for the manifest, and for what a rate does not tell"""
IDLE_SECONDS = 20.0
"""without anything new in the bucket: then nobody will put the manifest"""

HEAD, BODY, TAIL = "head", "share", "tail"
"""what is before the bytes that all have alike, those, and what is behind them"""


@dataclass(frozen=True)
class Fleet:
    """The nodes that write one snapshot together, as one of them sees it."""

    hosts: tuple[str, ...]
    """by node; the first one puts the manifest, and all the rest that others do not have alike"""
    index: int
    """of this node"""
    equal: frozenset[str]
    """names in the model's state of what all have alike, and in that of its averaged weights; the optimizer's tensors
    are, too"""
    seconds_left: Callable[[], float | None]
    """until this node is taken away; None where that is not known"""
    is_first_lost: Callable[[], bool] = lambda: False
    """whether the first node is gone: then nobody waits for a manifest"""

    def sender_of(self, number: int) -> int:
        """The node whose part that is."""
        return number % len(self.hosts)


class SharedState:
    """A state, and before it once more what is alike, which torch.save writes where it comes first, and once. Calling
    it writes it into a file.

    Args:
        state: as `TrainState.state_dict` gives it, the writer's own copy.
    """

    def __init__(self, state: dict[str, Any], fleet: Fleet) -> None:
        weights = [state["model"], state["extras"].get("ema", {})]
        equal = [[value for name, value in one.items() if name in fleet.equal] for one in weights]
        alike: list[Any] = []
        rebuilt([state["optimizer"], equal], alike.append)
        alike = [tensor for tensor in alike if not is_odd(tensor)]
        memories = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in alike)}
        addresses = [address for address, size in memories.items() if size]
        # First of all: torch.save numbers all tensors, and the numbers are among the bytes.
        self._state = {ALIKE: alike, **state}
        self.fleet = fleet
        self.num_bytes = sum(memories.values())
        self.first = addresses[0] if addresses else 0
        """address of the first tensor that all have alike"""
        self.last = addresses[-1] if addresses else 0

    def __call__(self, file: object) -> None:
        write_state(self._state, file)


def shared_by(fleet: Fleet | None, state: dict[str, Any]) -> SharedState | None:
    """What a fleet writes of its nodes' copies of a state; None where one node alone is as fast. A function of sizes:
    all come to the same."""
    shared = None if fleet is None else SharedState(state, fleet)
    return None if shared is None or shared.num_bytes < LEAST_BYTES else shared


TakePart = Callable[[str, int, str, int, bytearray | None], None]
"""zone, number, SHA-256 and size of a part that is complete; its data where that was wanted"""


class Cutter:
    """What torch.save writes into, cut into parts of three zones; those of BODY are the same on every node.

    torch.save writes the memory of a tensor by one call, from where it lies: so its address tells which it is.

    Args:
        wants: whether the data of a part is to be kept.
        hashes: whether the SHA-256 of parts are told.
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
        if self._zone == BODY and address == self._state.last:
            self._enter(TAIL)
        return len(view)

    def flush(self) -> None:
        """Called by torch.save."""

    def close(self) -> None:
        """Nothing more is written."""
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
    """How far a node is with its share, as far as the bucket shows."""

    missing: tuple[int, ...] = ()
    """numbers of its parts that are not there"""
    is_given_up: bool = False
    """nothing more is expected of it"""


def is_given_up(silent_seconds: float, part_seconds: float, *, has_other_bytes: bool) -> bool:
    """Whether others send what is missing of a node.

    Args:
        silent_seconds: since the newest of its parts came.
        part_seconds: that a part takes whoever asks.
        has_other_bytes: one of its parts came with other bytes than it should have.
    """
    return has_other_bytes or silent_seconds > silence_limit(part_seconds)


def silence_limit(part_seconds: float) -> float:
    """For a node's next part: AT_ONCE of them are on their way, and may all end together; twice that."""
    return max(LEAST_SILENCE_SECONDS, 2 * AT_ONCE * part_seconds)


def taken_over(
    progress: Sequence[ShareProgress], me: int, part_seconds: float, seconds_left: float | None
) -> list[int]:
    """The parts, by number, that node `me` sends for others now; its own are there.

    Those that are through share what is missing of those that are given up. Where what is missing at all might not be
    there in time, the later half of each one's is sent as well: it sends the earlier ones itself. The first node always
    has something to send where something is to be sent: whether the others help, it need not know.

    Args:
        part_seconds: that a part takes this node.
        seconds_left: to the deadline, where one is known.
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
    """What is written here is cut, and this node's parts are sent by threads of their own, as by a `PartStream`.

    Args:
        name_of: of a part, by what is particular about it.
        nonce: of one attempt to write what is not named by its content.
        put: sends an object. Blocks; raises ObjectStoreError.
        listed: the objects that are there and their bytes, by name. Raises ObjectStoreError.
        clock: monotonic, in seconds; `sleep` waits by it.
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
        """as this node would send them"""
        self._there: dict[int, Part] = {}
        """of these, by number, as they were sent"""
        self._heard = [(0, clock())] * len(self._fleet.hosts)
        """by node: how many parts it has put, and when the last one of them was seen first"""
        self._look_at = clock() + LOOK_SECONDS
        """the next time while parts are cut; a tenth of the time at most goes into it"""
        self._have_other_bytes: set[int] = set()
        self.names: list[str] = []
        """of parts that are of no use where this attempt fails"""

    def write(self, data: bytes | memoryview) -> int:
        """Never raises, for torch.save calls it from C++: `finish` does."""
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
            self._there[number] = part  # or `finish` of the sender raises
        self._sender.send(part.name, data)
        if self._clock() >= self._look_at:  # so that it is known who is silent once this node is through
            with contextlib.suppress(ObjectStoreError):
                self._look()

    def finish(self) -> list[Part]:
        """All that was written, once every part of it is there; for the first node. Raises: what a `put` has, or
        `listed`."""
        self._cutter.close()
        self._sender.finish()
        self._look()
        while missing := self._missing():
            self._help(missing)
            self._look()
        body = [self._there[number] for number in range(len(self._body))]
        return [*self._around[HEAD], *body, *self._around[TAIL]]

    def finish_share(self) -> bool:
        """For the other nodes: until the manifest is there, helping those that do not come to an end. Returns whether
        it is there; False where nobody will put it. Raises as `finish`."""
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
        """Until no part is on its way."""
        self._sender.wait()

    @property
    def _part_seconds(self) -> float:
        rate = self._sender.rate
        return 0.0 if rate is None else self._part_bytes / rate

    def _is_given_up(self, node: int) -> bool:
        silent_seconds = self._clock() - self._heard[node][1]
        return is_given_up(silent_seconds, self._part_seconds, has_other_bytes=node in self._have_other_bytes)

    def _look(self) -> Mapping[str, int]:
        """What is there; who is how far is known afterwards. Raises: as `listed`."""
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
                continue  # not cut here yet, or of nobody
            mine = self._body[number]
            if sha256 != mine.sha256:
                self._have_other_bytes.add(node)
            elif files[name] == mine.bytes:
                self._there.setdefault(number, replace(mine, name=name, host=self._fleet.hosts[node]))
        return files

    def _missing(self) -> dict[int, tuple[int, ...]]:
        """The numbers of parts that are not there, by the node that should send them."""
        missing: dict[int, list[int]] = {}
        for number in range(len(self._body)):
            if number not in self._there:
                missing.setdefault(self._fleet.sender_of(number), []).append(number)
        return {node: tuple(numbers) for node, numbers in missing.items()}

    def _help(self, missing: Mapping[int, tuple[int, ...]]) -> None:
        """Send some parts of others, or wait a moment."""
        me, fleet = self._fleet.index, self._fleet
        progress = [ShareProgress(missing.get(node, ()), self._is_given_up(node)) for node in range(len(fleet.hosts))]
        numbers = taken_over(progress, me, self._part_seconds, fleet.seconds_left())
        if not numbers:
            self._sleep(LOOK_SECONDS)
            return
        self._send_again(frozenset(numbers[: 2 * AT_ONCE]))  # then it looks what has come meanwhile

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
