"""Whether the members of a world hold the same weights and optimizer state, found out beside its first step.

A re-form goes on from what the survivors have in memory. Should one of them hold something else (an update by an
aborted collective, a bit that fell over, the user's own code), all would train on with it and nobody would see it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic_train.errors import StatesDiffer, first_line
from elastic_train.rules import right_hashes
from elastic_train.training import determinism
from elastic_train.training.collectives import all_gather
from elastic_train.training.optimizers import parts_of
from elastic_train.training.side_thread import SideThread
from elastic_train.training.state import TrainState, dense_parts

CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""what is hashed at a time: it fits a processor's cache, and keeps a GPU busy"""
CANNOT_SAY, CHANGED = 0, 1
"""in a hash's place; the second where this rank's optimizers have not kept what a peer has sent"""
KIND = ("machine", "cpu_capability", "device", "gpu")
"""of determinism.fingerprint(): machines that differ in these may round an optimizer's update differently"""

NOT_SETTINGS = ("params", "fused", "foreach", "capturable")
"""of an optimizer's parameter groups: which kernel computes a step may differ"""


class StateComparison:
    """One rank's part in comparing hashes, in a world's first step that all its members begin with a state.

    Args:
        voters: ranks that brought the state into this world; the others have got theirs from one of them.
        with_buffers: whether the model's buffers are equal on all ranks, too.
        is_able: whether this rank's hash means anything; without, it takes part and says nothing.
    """

    def __init__(
        self, state: TrainState, device: torch.device, voters: Sequence[int], *, with_buffers: bool, is_able: bool
    ) -> None:
        self._state = state
        self._device = device
        self._voters = voters
        self._with_buffers = with_buffers
        self._is_able = is_able
        self._thread: SideThread | None = None
        self._hash = CANNOT_SAY
        self.why_not: str | None = None
        """why this rank could not make a hash"""
        self.num_kinds = 1
        """afterwards: of machines, by what they may round otherwise"""
        self.is_lost_in_loading = False
        """afterwards, on every rank alike: whether there are such that have not; then nobody was judged"""

    def begin(self) -> None:
        """The state is hashed on a thread from now on, and must not change until `finish_hash`, but for the buffers."""
        if not self._is_able:
            return
        if not self._state.kept.updates.is_as_sent:
            self._hash = CHANGED
            return
        try:
            parts = dict(tensors_of(self._state))
            if self._with_buffers:
                parts |= {f"buffer {name}": buffer.clone() for name, buffer in _buffers_of(self._state.model)}
        except Exception as error:  # of an optimizer of the user's own
            self.why_not = first_line(error)
            return

        def work() -> None:
            try:
                self._hash = hash_of(parts)
            except Exception as error:  # of a tensor of its own kind
                self.why_not = first_line(error)

        # No daemon: a process that ends while a thread is inside of torch may be aborted.
        self._thread = SideThread(work, "hash", is_daemon=False)

    def finish_hash(self, check: Callable[[], None]) -> None:
        """Blocks until this rank's is made: the state may change. `check` is called again and again, and may raise."""
        if self._thread is not None:
            self._thread.finish(check)
            self._thread = None  # and with it what the hash was made of

    def compare(self) -> None:
        """Before a step is applied; every rank calls it. Blocks until all ranks have.

        Raises:
            StatesDiffer: not all hold the same, on every rank alike.
            RuntimeError, FormationFailed: a peer was lost.
        """
        told = all_gather(torch.tensor([kind_of_machine(self._device), self._hash], device="cpu"))
        self.num_kinds = len({kind for kind, _ in told})
        if any(value == CHANGED for _, value in told):
            self.is_lost_in_loading = True
            return
        able = [rank for rank, (_, value) in enumerate(told) if value != CANNOT_SAY]
        voters = [rank for rank in self._voters if rank in able]
        right = right_hashes([(told[rank][0], told[rank][1]) for rank in voters])
        if right is None:
            raise StatesDiffer(range(len(told)), len(voters), has_majority=False)
        wrong = [rank for rank in able if told[rank][1] not in right]
        if right.issuperset(told[rank][1] for rank in voters):  # else others may have got theirs from a wrong one
            # The first of those who brought it has given it. On a machine of another kind a step may have been rounded
            # otherwise since.
            source, source_hash = told[self._voters[0]]
            wrong = [rank for rank in wrong if told[rank][0] == source and source_hash != CANNOT_SAY]
        if wrong:
            raise StatesDiffer(wrong, len(voters), has_majority=True)


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that a state dict has: the others are handed to nobody."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            yield name, value


@cache
def kind_of_machine(device: torch.device) -> int:
    fingerprint = determinism.fingerprint(device)
    return _digest("/".join(str(fingerprint.get(name, "")) for name in KIND).encode())


def tensors_of(state: TrainState) -> Iterator[tuple[str, Any]]:
    """What must be equal on all ranks after each commit, by name: tensors as they lie in memory, and plain values.

    Frozen parameters are left out: a forward pass may write each rank's own.
    """
    for name, parameter in _compared(state):
        yield name, parameter.detach()
    yield from _leaves("optimizer", state.kept.updates.state_of(state.optimizer))
    for place, extra in state.extras.items():
        if isinstance(extra, torch.optim.Optimizer):
            yield from _leaves(f"extra {place}", state.kept.updates.state_of(extra))


def _compared(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    frozen, owned = frozen_of(state), state.kept.updates.owned
    for name, parameter in state.model.named_parameters():
        if name not in frozen:
            yield f"parameter {name}", parameter
    for place, extra in state.extras.items():
        for name, parameter in extra.named_parameters() if isinstance(extra, nn.Module) else ():
            if id(parameter) in owned:
                yield f"extra {place} parameter {name}", parameter


def frozen_of(state: TrainState) -> dict[str, Tensor]:
    """The parameters, by name, that no optimizer owns and no gradient changes."""
    owned = state.kept.updates.owned
    return {
        name: parameter.detach()
        for name, parameter in state.model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in owned
    }


def is_as_given(state: TrainState, given: Mapping[str, Any]) -> bool:
    """Whether the optimizers hold, bit by bit, what `load_state_dict` has just been `given`. Blocks; what lies where it
    lay costs nothing."""
    pairs = [(state.optimizer, given["optimizer"])]
    pairs += [
        (one, given["extras"][name])
        for name, one in state.extras.items()
        if isinstance(one, torch.optim.Optimizer) and name in given["extras"]
    ]
    for optimizer, theirs in pairs:
        held, sent = (dict(_leaves("", one)) for one in (state.kept.updates.state_of(optimizer), theirs))
        if held.keys() != sent.keys() or not all(_are_equal(held[name], sent[name]) for name in held):
            return False
    return True


def _are_equal(held: Any, sent: Any) -> bool:
    if not (isinstance(held, Tensor) and isinstance(sent, Tensor)):
        return repr(held) == repr(sent)
    return held is sent or hash_of({"": held}) == hash_of({"": sent.to(held.device)})


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value.keys() - {"param_groups"}:  # settings, of an optimizer or of one that it is made of
            yield from _leaves(f"{name} {key}", value[key])
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _leaves(f"{name} {place}", entry)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield name, value.detach().cpu()  # torch leaves a step count on either device, by how it came there
    elif isinstance(value, Tensor | int | float | str):
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
        else:
            text.append(f"{name} {value.dtype} {tuple(value.shape)}")
            tensors.setdefault(value.device, []).extend(dense_parts(value))
    for device, found in tensors.items():
        text += map(str, _sums(found, device))
    return _digest(";".join(text).encode())


def hashes_by_name(parts: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Of the bytes of each tensor, but for those that cannot be hashed. Blocks, as `hash_of`, once for a device."""
    sums: dict[torch.device, dict[str, list[Tensor]]] = {}
    for name, tensor in parts.items():
        with suppress(Exception):  # of a tensor of its own kind
            sums.setdefault(tensor.device, {})[name] = _sums_there([*dense_parts(tensor)], tensor.device)
    found: dict[str, list[int]] = {}
    for here in sums.values():
        numbers = iter(torch.stack([one for several in here.values() for one in several]).tolist())
        found |= {name: [*islice(numbers, len(several))] for name, several in here.items()}
    return found


def hash_of_plain(state: Any) -> int:
    """A hash of 64 bits over what is neither a tensor nor an object of its own kind in a state dict, such as counters
    and best values."""
    return _digest(json.dumps(_plain(state), sort_keys=True).encode())


def plain_hashes(state: TrainState) -> dict[str, int]:
    """Hashes, by name, of what a training function may change between two steps and no comparison of weights and
    optimizer states sees: the optimizers' settings (learning rates, ...) and the extras' plain values."""
    found = {"optimizer settings": settings_hash(state)}
    for name, extra in state.extras.items():
        if isinstance(extra, torch.optim.Optimizer):
            found[name] = _groups_hash(extra)
        else:
            found[name] = hash_of_plain(extra.state_dict())
    return found


def settings_hash(state: TrainState) -> int:
    """Of what the optimizer is set to; a schedule may end with rates of 0, whatever it began with."""
    return hash_of_plain([[*map(_number, state.learning_rates)], _groups_hash(state.optimizer)])


def _groups_hash(optimizer: torch.optim.Optimizer) -> int:
    return hash_of_plain(
        [
            {name: _number(value) for name, value in group.items() if name not in NOT_SETTINGS}
            for one in (optimizer, *parts_of(optimizer).values())
            for group in one.param_groups
        ]
    )


def _number(value: Any) -> Any:
    """Of a learning rate that is a tensor. Machines of two kinds may compute its last digits otherwise."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return float(f"{number:.9g}") if isinstance(number, float) else number


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    if isinstance(state, np.generic):  # who was given the state has Python's
        state = state.item()
    return state if isinstance(state, str | int | float | None) else None


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _sums(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    return [int(one) for one in torch.stack(_sums_there(tensors, device)).tolist()]


@torch.no_grad()
def _sums_there(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """One number for each chunk, on the device. Chunks lie within a tensor; what is left at their ends is packed into
    more of them."""
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
        num_whole = data.numel() // size * size
        if data.storage_offset() % 4 and num_whole:
            data = data.clone()
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
    return sums


@cache
def _factors(number: int, device: torch.device) -> Tensor:
    """Odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(1979)
    return (torch.randint(-(2**62), 2**62, (number,), dtype=torch.int64, generator=generator, device="cpu") * 2 + 1).to(
        device
    )


def _packed(parts: Sequence[Tensor], padding: Tensor) -> Tensor:
    together = torch.cat([*parts, padding])
    return together[: together.numel() // 4 * 4]
