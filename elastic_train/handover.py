"""A newcomer gets the state of those who train, beside the first step of the world that it enters.

From a commit to the optimizer's next step neither weights nor optimizer state change: that is the time in which rank 0
sends them, as they lie in memory, while all compute. A newcomer without samples in that step needs them only when it
applies the step's gradient, which it has from the reduction like everybody. So nothing is copied and nothing is stored
in between, and nobody waits where the step takes longer than the sending.

What a forward pass changes (buffers, such as BatchNorm's statistics) goes by value, and so does what is small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.collectives import GROUP_TIMEOUT
from elastic_train.errors import FormationFailed
from elastic_train.side_thread import SideThread
from elastic_train.snapshot import deserialize_state, serialize_state
from elastic_train.state import TrainState
from elastic_train.tasks import mapped

TAG = 7001
"""of its messages, so that they do not meet those of the step"""
SMALL_BYTES = 4096
POLL_SECONDS = 0.001
SLOT = "elastic_train tensor"


class Handover(Protocol):
    """One rank's part in it."""

    def begin(self) -> None:
        """When the step's reduction is made, for which nobody should have to wait: from now on the state is sent."""

    def finish(self, check: Callable[[], None]) -> None:
        """Before the optimizer's step. Blocks until the state may change: it is sent, or it is here. `check` is called
        again and again, and raises where the group was broken off: gloo may never end a send to one that died.

        Raises:
            RuntimeError: from the communication library, when a peer is lost. What `check` raises.
        """


class Giving:
    """As rank 0: sends `state` to the ranks `targets`, on a thread of its own, from `begin` on."""

    def __init__(self, state: TrainState, targets: Sequence[int]) -> None:
        self._targets = targets
        numbers = [len(targets), state.epoch, state.step, state.samples_done, state.micro_batch_size or 0]
        self._head = torch.tensor(numbers, dtype=torch.int64)
        self._skeleton, self._tensors = take_apart(state)
        self._thread: SideThread | None = None

    def begin(self) -> None:
        """As `Handover.begin`."""
        self._thread = SideThread(self._send, "give")

    def _send(self) -> None:
        self._send_one(self._head)
        message = torch.frombuffer(bytearray(serialize_state(self._skeleton)), dtype=torch.uint8)
        self._send_one(torch.tensor([message.numel()]))
        for tensor in (message, *map(flat, self._tensors)):
            self._send_one(tensor)

    def _send_one(self, tensor: Tensor) -> None:
        for work in [dist.isend(tensor.cpu(), target, tag=TAG) for target in self._targets]:
            _wait(work)

    def finish(self, check: Callable[[], None]) -> None:
        """As `Handover.finish`."""
        assert self._thread is not None, "it has begun"
        self._thread.finish(check)


class Taking:
    """As a newcomer: receives into `state`, on a thread of its own.

    Args:
        device: where the state belongs.
        loaded: called when `state` is that of the others.
    """

    def __init__(self, state: TrainState, device: torch.device, loaded: Callable[[], None]) -> None:
        self._state, self._device, self._loaded = state, device, loaded
        self._head: Tensor | None = None
        self._skeleton: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._thread = SideThread(self._receive, "take")

    def begin(self) -> None:
        """As `Handover.begin`: it listens already."""

    def wait_for_position(self, check: Callable[[], None]) -> int:
        """Until the others are here, and `state` has their position: how many newcomers there are. Blocks for as long
        as the others train on; `check` is called again and again, and may raise.

        Raises: as `Handover.finish`.
        """
        while self._head is None and self._thread.is_alive:
            check()
            time.sleep(POLL_SECONDS)
        if self._head is None:
            check()
            self._thread.finish(check)
            raise FormationFailed("rank 0 sent no state")
        num_newcomers, *position, micro_batch_size = self._head.tolist()
        self._state.epoch, self._state.step, self._state.samples_done = position
        self._state.micro_batch_size = micro_batch_size or None
        return int(num_newcomers)

    def _receive(self) -> None:
        head, size = torch.zeros(5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        _wait(dist.irecv(head, 0, tag=TAG))
        self._head = head
        _wait(dist.irecv(size, 0, tag=TAG))
        message = torch.empty(int(size), dtype=torch.uint8)
        _wait(dist.irecv(message, 0, tag=TAG))
        self._skeleton = deserialize_state(message.numpy().tobytes(), source="the state of rank 0")
        self._tensors = [empty(*looks) for looks in self._skeleton.pop("tensors")]
        for tensor in self._tensors:
            _wait(dist.irecv(flat(tensor), 0, tag=TAG))

    def finish(self, check: Callable[[], None]) -> None:
        """As `Handover.finish`."""
        self._thread.finish(check)
        tensors = [tensor.to(self._device) for tensor in self._tensors]
        self._state.load_state_dict(put_together(self._skeleton, tensors))
        self._state.clock.take_over(self._skeleton["run"]["clock"])
        self._tensors = []
        self._loaded()


def _wait(work: Any) -> None:
    work.wait(GROUP_TIMEOUT)  # a message of gloo waits otherwise for as long as its group was given to form


def take_apart(state: TrainState) -> tuple[dict[str, Any], list[Tensor]]:
    """The state dict with slots in the place of large tensors that no forward pass changes, and these tensors. The
    entry `tensors` says what they look like."""
    changing = {buffer.data_ptr() for buffer in state.model.buffers()}
    tensors: list[Tensor] = []
    slots: dict[tuple[Any, ...], int] = {}

    def replace(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.nbytes < SMALL_BYTES or tensor.data_ptr() in changing or flat_or_none(tensor) is None:
            return tensor.clone()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in slots:
            slots[key] = len(tensors)
            tensors.append(tensor.detach())
        return {SLOT: slots[key]}

    skeleton: dict[str, Any] = mapped(state.state_dict(), replace)  # lists are copied: they may change before they go
    skeleton["tensors"] = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())] for tensor in tensors
    ]
    return skeleton, tensors


def put_together(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """The state dict that `take_apart` took apart."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {SLOT}:
            return tensors[skeleton[SLOT]]
        return {key: put_together(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(put_together(value, tensors) for value in skeleton)
    return skeleton


def empty(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))


def flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, as they lie in memory."""
    found = flat_or_none(tensor)
    assert found is not None, "asked before"
    return found


def flat_or_none(tensor: Tensor) -> Tensor | None:
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    turned = tensor.permute(order)
    return turned.view(-1) if turned.is_contiguous() else None
