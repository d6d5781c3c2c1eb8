"""Whether the members of a world hold the same weights and optimizer state, found out beside its first step.

A re-form goes on from what the survivors have in memory. Should one of them hold something else (an update by an
aborted collective, a bit that fell over, the user's own code), all would train on with it and nobody would see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elastic_train import determinism
from elastic_train.collectives import all_gather
from elastic_train.errors import StatesDiffer
from elastic_train.rules import right_hashes
from elastic_train.side_thread import SideThread
from elastic_train.state import TrainState

CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""what is hashed at a time: it fits a processor's cache, and keeps a GPU busy"""
KIND = ("machine", "cpu_capability", "device", "gpu")
"""of determinism.fingerprint(): machines that differ in these may round an optimizer's update differently"""


class StateComparison:
    """One rank's part in comparing hashes, in a world's first step that all its members begin with a state.

    Args:
        voters: ranks that brought the state into this world; the others have got theirs from one of them.
        with_buffers: whether the model's buffers are equal on all ranks, too.
    """

    def __init__(self, state: TrainState, device: torch.device, voters: Sequence[int], *, with_buffers: bool) -> None:
        self._state = state
        self._voters = voters
        self._with_buffers = with_buffers
        self._device = device
        self._thread: SideThread | None = None
        self._told = torch.zeros(2, dtype=torch.int64)
        """of this rank: kind of machine, and hash"""

    def begin(self) -> None:
        """The state is hashed on a thread from now on, and must not change until `finish_hash`, but for the buffers."""
        parts = dict(tensors_of(self._state))
        if self._with_buffers:
            buffers = self._state.model.named_buffers()
            parts |= {f"buffer {name}": buffer.detach().clone() for name, buffer in buffers}

        def work() -> None:
            self._told = torch.tensor([kind_of_machine(self._device), hash_of(parts)])

        self._thread = SideThread(work, "hash")

    def finish_hash(self, check: Callable[[], None]) -> None:
        """Blocks until this rank's is made: the state may change. `check` is called again and again, and may raise."""
        assert self._thread is not None, "it has begun"
        self._thread.finish(check)

    def compare(self) -> None:
        """Before a step is applied; every rank calls it. Blocks until all ranks have.

        Raises:
            StatesDiffer: not all hold the same, on every rank alike.
            RuntimeError, FormationFailed: a peer was lost.
        """
        found = [(kind, value) for kind, value in all_gather(self._told)]
        right = right_hashes([found[rank] for rank in self._voters])
        wrong = [rank for rank, (_, value) in enumerate(found) if right is None or value not in right]
        if wrong:
            raise StatesDiffer(wrong, len(found), has_majority=right is not None)


@cache
def kind_of_machine(device: torch.device) -> int:
    fingerprint = determinism.fingerprint(device)
    return _digest("/".join(str(fingerprint.get(name, "")) for name in KIND).encode())


def tensors_of(state: TrainState) -> Iterator[tuple[str, Any]]:
    """What must be equal on all ranks after each commit, by name: tensors as they lie in memory, and plain values."""
    for name, parameter in state.model.named_parameters():
        yield f"parameter {name}", parameter.detach()
    yield from _leaves("optimizer", state.optimizer.state_dict()["state"])


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{name} {key}", value[key])
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _leaves(f"{name} {place}", entry)
    else:
        yield name, value


def hash_of(parts: Mapping[str, Any]) -> int:
    """A hash of 64 bits over names, types, shapes and bytes. Blocks; 3 GB/s or so on one core. Copies no large tensor.

    Of each chunk it takes the sum over its 32-bit words, each times an odd 64-bit number of its place, modulo 2**64
    (multilinear hashing, Carter and Wegman, 1979): no change of a single word is lost. It is a check against accidents
    and not against an attacker.
    """
    text = []
    tensors: dict[torch.device, list[Tensor]] = {}
    for name in sorted(parts):
        value = parts[name]
        if not isinstance(value, Tensor):
            text.append(f"{name} {value!r}")
        elif value.layout is torch.strided:
            text.append(f"{name} {value.dtype} {tuple(value.shape)}")
            tensors.setdefault(value.device, []).append(value.detach())
    for device, found in tensors.items():
        text += map(str, _sums(found, device))
    return _digest(";".join(text).encode())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@torch.no_grad()
def _sums(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """One number for each chunk. Chunks lie within a tensor; what is left at their ends is packed into more of them."""
    size = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    factors = _factors(size // 4, device)
    room = torch.empty_like(factors)
    sums: list[Tensor] = []

    def add(data: Tensor) -> None:
        for words in torch.split(data.view(torch.int32), size // 4):
            products = room[: words.numel()].copy_(words).mul_(factors[: words.numel()])
            sums.append(products.sum())

    rest: list[Tensor] = []
    num_left = 0
    padding = torch.zeros(4, dtype=torch.uint8, device=device)
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        num_whole = 0 if data.storage_offset() % 4 else data.numel() // size * size
        if num_whole:
            add(data[:num_whole])
        rest.append(data[num_whole:])
        num_left += data.numel() - num_whole
        if num_left >= size:
            add(_packed(rest, padding))
            rest.clear()
            num_left = 0
    if rest:
        add(_packed(rest, padding))
    return [int(one) for one in torch.stack(sums).tolist()]


@cache
def _factors(number: int, device: torch.device) -> Tensor:
    """Odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(1979)
    return (torch.randint(-(2**62), 2**62, (number,), dtype=torch.int64, generator=generator) * 2 + 1).to(device)


def _packed(parts: Sequence[Tensor], padding: Tensor) -> Tensor:
    together = torch.cat([*parts, padding])
    return together[: together.numel() // 4 * 4]
