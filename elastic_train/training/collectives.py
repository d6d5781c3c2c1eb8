"""Collectives and messages of the default process group; a wait for one ends soon after the group is broken off.

gloo's own waits may not end. When a connection breaks, `Pair::signalException` (gloo, transport/tcp/pair.cc) reports
neither sends that are queued (by a full buffer, or on the broken connection) nor a message that is half received. A
rank that waits for these waits until the group's timeout. This often happens to a member that wakes up after its peers
have closed their connections. So the training thread does not wait inside gloo. It checks the group now and then, and
leaves one that hangs (`GroupSockets.require_hope`).

NCCL has an abort, so its works are waited for as usual. So are some waits inside DDP: its copies of first weights, the
exchanges of its options, sparse gradients, and buckets and buffers on a GPU under gloo. For these only the watcher's
`give_up` helps.
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
"""of a gathered value in the first message: mostly all of it; a second message would delay a recovery"""
BROADCAST_CHUNK_BYTES = 64 * 2**20
"""gloo moves a broadcast as one buffer; chunks bound the extra memory"""
GROUP_TIMEOUT = timedelta(minutes=30)
"""last resort while the state is handed over, and at the end of a world; the watcher is normally faster"""
STEP_TIMEOUT = timedelta(hours=2)
"""the same in training, where the watcher knows how long a member may take (heartbeat.py)"""
LOOK_SECONDS = 0.25


@dataclass
class _Group:
    sockets: GroupSockets
    is_over: bool = False
    failure: str | None = None
    """error of one of its collectives; user code may have caught it"""

    def require_hope(self) -> None:
        """As `GroupSockets.require_hope`; also for a thread that still waits in a group after the training thread."""
        if self.is_over:
            raise FormationFailed("the process group is over")
        self.sockets.require_hope()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record in `failure` the error of a collective inside the block."""
        try:
            yield
        except Exception as error:
            self.failure = first_line(error)
            raise


_present: _Group | None = None


@contextmanager
def broken_off_by(sockets: GroupSockets) -> Iterator[None]:
    """End waits inside the block when `sockets` have no hope. One block at a time, as torch has one default group."""
    global _present
    _present = group = _Group(sockets)
    try:
        yield
    finally:
        _present, group.is_over = None, True
        _helper.end()


def require_sound() -> None:
    """Raises: FormationFailed: a collective of the present group has failed here, though user code may have caught its
    error."""
    if _present is not None and _present.failure is not None:
        raise FormationFailed(_present.failure)


def wait(work: Any, tensor: Tensor) -> None:
    """Wait until an asynchronous collective of `tensor` is done (with NCCL only the stream waits for it).

    Raises:
        FormationFailed: the group was broken off, and its wait hangs. RuntimeError: from the communication library.
    """
    _wait(work, _group_of(tensor))


def _group_of(tensor: Tensor) -> _Group | None:
    """Return the group whose collectives of `tensor` may hang; None if NCCL's abort ends them."""
    is_nccl = _present is not None and _present.sockets.has_nccl and tensor.is_cuda
    return None if is_nccl else _present


def _wait(work: Any, group: _Group | None) -> None:
    if group is None:
        work.wait()
        return
    with group.noting():
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))  # a timeout here ends no collective, but would end a message
                return
            except RuntimeError:
                if work.is_completed():
                    break  # failed, or done just after the timeout
            group.require_hope()
        work.wait()


def numbers(tensor: Tensor) -> list[Any]:
    """Return `tensor.tolist()` of a reduced tensor. Blocks until the device has it, or NCCL was aborted."""
    found: list[Any] = LateNumbers(tensor).read() if tensor.is_cuda else tensor.tolist()
    return found


class LateNumbers:
    """The values of a GPU tensor after the work queued so far; more work may be queued before `read`."""

    def __init__(self, tensor: Tensor) -> None:
        # By pinned memory: a copy to other memory holds a lock of CUDA until its end, and a thread that saves the last
        # commit would wait for that lock (pytorch/pytorch#143825).
        with _waiting():  # the first pinned allocation may wait
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        self._on_host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Any:
        """Return them as `tolist()`. Blocks until they have come, or NCCL was aborted."""
        with _waiting():
            self._event.synchronize()
        return self._on_host.tolist()


def _waiting() -> AbstractContextManager[None]:
    return nullcontext() if _present is None else _present.sockets.waiting()


def all_reduce(tensor: Tensor) -> None:
    """Sum `tensor` over the ranks, in place. Raises as `wait`."""
    wait(dist.all_reduce(tensor, async_op=True), tensor)


def broadcast(tensor: Tensor, source: int) -> None:
    """Copy `tensor` of rank `source` to every rank, in place. Raises as `wait`."""
    wait(dist.broadcast(tensor, source, async_op=True), tensor)


def all_gather(numbers: Tensor) -> list[list[int]]:
    """Return every rank's `numbers` (integers on the CPU, as many on every rank), by rank. Raises as `wait`."""
    found = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
    wait(dist.all_gather(found, numbers, async_op=True), numbers)
    return [one.tolist() for one in found]


def barrier() -> None:
    """Wait for all ranks, by a CPU message: torch's own barrier would use NCCL where that exists. Raises as `wait`."""
    all_reduce(torch.zeros(1, device="cpu"))


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
    """Send and receive tensors. Between two ranks messages arrive in the order of sending. Raises as `wait`."""
    operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
    operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
    if not operations:
        return
    # A message of gloo waits for the group's first timeout, and ignores a later set_timeout(): that is one second here,
    # and a slow rank is not lost. With a limit NCCL would block the CPU thread.
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
            torch.cuda.set_device(stream.device)  # `torch.cuda.stream` would return to device 0, and make a context
            torch.cuda.set_stream(stream)
            complete()

        # When a batch fails half way, NCCL and torch keep its begun part per thread, and would continue it in the next
        # world. So this thread ends with its world.
        _helper.run(complete_on_stream, None)


def reduced(work: Any, tensor: Tensor, then: Callable[[], None] = lambda: None) -> Future[Tensor]:
    """Return a future of `tensor` for DDP's communication hook, complete once its all-reduce and all earlier ones are.

    It fails with a RuntimeError that quotes what `wait` raises. `then` is called before, on the helper's thread."""
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

    future = over.then(value)  # DDP would take `set_exception` for a value
    _helper.give(complete)
    return future


class _Helper:
    """A thread that waits for the training thread; each world has a new one, and so has the time after a hang."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None

    def give(self, task: Callable[[], None]) -> None:
        """Queue a task behind all earlier ones. The task must not raise."""
        if self._tasks is None:
            self._tasks = SimpleQueue()
            threading.Thread(target=_do, args=(self._tasks,), name="communication", daemon=True).start()
        self._tasks.put(task)

    def end(self) -> None:
        """End the thread after all queued tasks."""
        if self._tasks is not None:
            self._tasks.put(None)
            self._tasks = None

    def run(self, task: Callable[[], None], group: _Group | None) -> None:
        """Run a task and block until it is done. Raises what it raises, and as `wait` if it may hang in `group`."""
        errors: list[Exception] = []
        is_done = threading.Event()

        def attempt() -> None:
            try:
                task()
            except Exception as error:  # raised below, on the waiting thread
                errors.append(error)
            is_done.set()

        self.give(attempt)
        while not is_done.wait(LOOK_SECONDS):
            try:
                if group is not None:
                    group.require_hope()
            except FormationFailed:
                self.end()  # the thread ends if its task ever does
                raise
        if errors:
            self.end()
            raise errors.pop()


def _do(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it would keep a group alive that is over


_helper = _Helper()


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """Return `data` of rank `source` on every rank, complete or not at all (an exception). Other ranks pass None."""
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
    """Return every rank's `value` (anything JSON can encode), by rank. Every rank calls it; nothing is unpickled."""
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
