"""Collectives and messages of the default process group; waiting for one ends soon after the group is broken off.

gloo's own waits may not. When a connection breaks, `Pair::signalException` (gloo, transport/tcp/pair.cc) tells nobody
of the sends that are queued, because they met a full buffer or the broken connection itself, nor of a message that is
half received: a rank that waits for these waits until the group's timeout. A member that wakes up when the others have
hung up meets this often. So the training thread does not wait inside gloo: it looks up now and then, and leaves a group
that hangs behind (`GroupSockets.require_hope`).

NCCL has an abort, and its works are waited for as usual. So are, inside of DDP, its copies of first weights, what its
options make it exchange, sparse gradients, and buckets and buffers on a GPU under gloo. For these the watcher's
`give_up` is what is left.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from elastic_train.errors import FormationFailed, first_line
from elastic_train.training.group_sockets import GroupSockets

SIZE_BYTES = 8
FIRST_BYTES = 512
"""of what is gathered, in the first message: most often it is all, and a second one would hold up a recovery"""
BROADCAST_CHUNK_BYTES = 64 * 2**20
"""gloo moves a broadcast as one buffer; chunks bound the extra memory"""
GROUP_TIMEOUT = timedelta(minutes=30)
"""the last resort while the state is handed over, and at the end of a world; the watcher is there to be faster"""
STEP_TIMEOUT = timedelta(hours=2)
"""the same in training, where the watcher knows how long a member may take (heartbeat.py)"""
LOOK_SECONDS = 0.25


@dataclass
class _Group:
    sockets: GroupSockets
    is_over: bool = False
    failure: str | None = None
    """of one of its collectives; the code that is trained may have caught the error"""

    def require_hope(self) -> None:
        """As `GroupSockets`; for a thread that still waits in a group which the training thread has left, too."""
        if self.is_over:
            raise FormationFailed("the process group is over")
        self.sockets.require_hope()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """The error of a collective inside the block is known from then on."""
        try:
            yield
        except Exception as error:
            self.failure = first_line(error)
            raise


_present: _Group | None = None


@contextmanager
def broken_off_by(sockets: GroupSockets) -> Iterator[None]:
    """Waiting inside the block ends when `sockets` have no hope; one at a time, like torch's default process group."""
    global _present
    _present = group = _Group(sockets)
    try:
        yield
    finally:
        _present, group.is_over = None, True
        _helper.end()


def require_sound() -> None:
    """For where the code that is trained may have caught an error that is none of its own. Raises: FormationFailed
    where a collective of the present group has failed that was waited for here."""
    if _present is not None and _present.failure is not None:
        raise FormationFailed(_present.failure)


def wait(work: Any, tensor: Tensor) -> None:
    """Until an asynchronous collective of `tensor` is done (with NCCL: the stream waits for it).

    Raises:
        FormationFailed: the group was broken off, and does not end. RuntimeError: from the communication library.
    """
    _wait(work, _group_of(tensor))


def _group_of(tensor: Tensor) -> _Group | None:
    """The one whose collectives of it may hang; None where NCCL's abort ends them."""
    is_nccl = _present is not None and _present.sockets.has_nccl and tensor.is_cuda
    return None if is_nccl else _present


def _wait(work: Any, group: _Group | None) -> None:
    if group is None:
        work.wait()
        return
    with group.noting():
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))  # leaves the collective as it is, unlike that of a message
                return
            except RuntimeError:
                if work.is_completed():
                    break  # with its own error, or since the wait was over
            group.require_hope()
        work.wait()


def numbers(tensor: Tensor) -> list[Any]:
    """`tensor.tolist()`, for what has been reduced: blocks until the device has it, or NCCL was aborted."""
    found: list[Any] = LateNumbers(tensor).read() if tensor.is_cuda else tensor.tolist()
    return found


class LateNumbers:
    """What a tensor on a GPU holds, once the GPU has done what it was given so far; it may be given more meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        # By pinned memory: a copy to other memory holds a lock of CUDA's until it has ended, and a thread that saves
        # the last commit meanwhile would wait for that (pytorch/pytorch#143825).
        with _waiting():  # the first time it may
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        self._on_host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Any:
        """`tolist()`: blocks until they have come, or NCCL was aborted."""
        with _waiting():
            self._event.synchronize()
        return self._on_host.tolist()


def _waiting() -> AbstractContextManager[None]:
    return nullcontext() if _present is None else _present.sockets.waiting()


def all_reduce(tensor: Tensor) -> None:
    """The sum over the ranks, in place. Raises as `wait`."""
    wait(dist.all_reduce(tensor, async_op=True), tensor)


def broadcast(tensor: Tensor, source: int) -> None:
    """That of rank `source`, in place. Raises as `wait`."""
    wait(dist.broadcast(tensor, source, async_op=True), tensor)


def all_gather(numbers: Tensor) -> list[list[int]]:
    """Every rank's `numbers` (whole, on the CPU, as many on every rank), by rank. Raises as `wait`."""
    found = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
    wait(dist.all_gather(found, numbers, async_op=True), numbers)
    return [one.tolist() for one in found]


def barrier() -> None:
    """By a message on the CPU: torch's own is NCCL's where that has a device. Raises as `wait`."""
    all_reduce(torch.zeros(1, device="cpu"))


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
    """Move tensors from and to ranks. Between two ranks messages arrive in the order in which they were sent. Raises as
    `wait`."""
    operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
    operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
    if not operations:
        return
    # A message of gloo waits for as long as its group was given at the start, whatever set_timeout() says later: a
    # second here, and a slower rank is no lost one. With a limit NCCL would block the processor.
    limit = () if operations[0].tensor.is_cuda else (STEP_TIMEOUT,)

    def complete() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait(*limit)

    if _present is None:
        complete()
    elif (group := _group_of(operations[0].tensor)) is not None:
        with group.noting():
            _helper.run(complete, group)
    else:
        stream = torch.cuda.current_stream(operations[0].tensor.device)

        def complete_on_stream() -> None:
            torch.cuda.set_device(stream.device)  # `torch.cuda.stream` would go back to 0, and make a context there
            torch.cuda.set_stream(stream)
            complete()

        # Of a batch that fails half way NCCL and torch keep what had begun, for each thread, and would go on with it in
        # the next world, when it is freed: so the thread is one that ends with the world.
        _helper.run(complete_on_stream, None)


def reduced(work: Any, tensor: Tensor, then: Callable[[], None] = lambda: None) -> Future[Tensor]:
    """`tensor` once an all-reduce of it is done, as DDP's communication hook returns it. Fails with a RuntimeError that
    quotes what `wait` raises. Those that were begun before are done by then; `then` is called before anybody knows, on
    another thread."""
    group = _group_of(tensor)
    over: Future[None] = Future()
    errors: list[Exception] = []

    def complete() -> None:
        try:
            _wait(work, group)
            then()
        except Exception as error:  # raised by the future
            errors.append(error)
        over.set_result(None)

    def value(_over: Future[None]) -> Tensor:
        if errors:
            raise errors.pop()
        return tensor

    future = over.then(value)  # `set_exception` would be a value to DDP
    _helper.give(complete)
    return future


class _Helper:
    """A thread that waits in the place of the training thread; a new one for each world, and when it hangs."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None

    def give(self, task: Callable[[], None]) -> None:
        """To be done when all that was given before is. It raises nothing."""
        if self._tasks is None:
            self._tasks = SimpleQueue()
            threading.Thread(target=_do, args=(self._tasks,), name="communication", daemon=True).start()
        self._tasks.put(task)

    def end(self) -> None:
        """The thread ends when all that was given is done."""
        if self._tasks is not None:
            self._tasks.put(None)
            self._tasks = None

    def run(self, task: Callable[[], None], group: _Group | None) -> None:
        """Blocks until it is done. Raises what it raises, and as `wait` where it may hang in `group`."""
        errors: list[Exception] = []
        is_done = threading.Event()

        def attempt() -> None:
            try:
                task()
            except Exception as error:  # raised by the thread that waits
                errors.append(error)
            is_done.set()

        self.give(attempt)
        while not is_done.wait(LOOK_SECONDS):
            try:
                if group is not None:
                    group.require_hope()
            except FormationFailed:
                self.end()  # should it ever come so far
                raise
        if errors:
            self.end()
            raise errors.pop()


def _do(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a group that is over would stay with it


_helper = _Helper()


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """`data` of rank `source` on every rank; the others pass None. Whole, or an exception."""
    is_source = dist.get_rank() == source
    size = torch.tensor([len(data) if is_source and data is not None else 0], dtype=torch.int64, device="cpu")
    broadcast(size, source)
    total = int(size)
    if total == 0:
        return b""
    buffer = bytearray(data) if is_source and data is not None else bytearray(total)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, total, BROADCAST_CHUNK_BYTES):
        broadcast(whole[start : start + BROADCAST_CHUNK_BYTES], source)
    return bytes(buffer)


def gather_json(value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON can say), by rank. Every rank calls it; nothing is unpickled."""
    data = json.dumps(value).encode()
    mine = len(data).to_bytes(SIZE_BYTES, "little") + data
    firsts = [bytes(one) for one in all_gather(_padded(mine[:FIRST_BYTES], FIRST_BYTES))]
    sizes = [SIZE_BYTES + int.from_bytes(first[:SIZE_BYTES], "little") for first in firsts]
    rest = max(sizes) - FIRST_BYTES
    if rest > 0:
        others = all_gather(_padded(mine[FIRST_BYTES:], rest))
        firsts = [first + bytes(other) for first, other in zip(firsts, others, strict=True)]
    return [json.loads(whole[SIZE_BYTES:size]) for whole, size in zip(firsts, sizes, strict=True)]


def _padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
