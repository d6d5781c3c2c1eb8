"""Comparison of the members' weights and optimizer states, beside the first step of a world.

A re-form goes on from the survivors' memory. If one of them holds a different state (an update by an aborted
collective, a flipped bit, the user's own code), all would train on with it unnoticed.
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
"""bytes hashed at a time: they fit a processor's cache, and keep a GPU busy"""
NO_HASH, CHANGED = 0, 1
"""instead of a hash: no hash could be made; this rank's optimizers have changed the state that a peer has sent"""
KIND = ("machine", "cpu_capability", "device", "gpu")
"""keys of determinism.fingerprint(): machines that differ in these may round an optimizer's update differently"""

NOT_SETTINGS = ("params", "fused", "foreach", "capturable")
"""keys of parameter groups that are not compared: workers may compute a step by different kernels"""


class StateComparison:
    """One rank's part in the comparison of hashes, in a world's first step that all members begin with a state.

    Args:
        voters: ranks that brought the state into this world; the other ranks have got theirs from one of them.
        with_buffers: whether the model's buffers must be equal on all ranks, too.
        is_able: whether this rank's hash is meaningful; if not, the rank takes part with NO_HASH.
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
        self._hash = NO_HASH
        self.why_not: str | None = None
        """why this rank could not make a hash"""
        self.num_kinds = 1
        """after `compare`: number of kinds of machines, which may round differently"""
        self.is_lost_in_loading = False
        """after `compare`, alike on every rank: whether a rank sent CHANGED; then no rank was judged"""

    def begin(self) -> None:
        """Start hashing the state on a thread. Until `finish_hash` the state must not change, except the buffers."""
        if not self._is_able:
            return
        if not self._state.kept.updates.is_as_sent:
            self._hash = CHANGED
            return
        try:
            parts = dict(tensors_of(self._state))
            if self._with_buffers:
                parts |= {f"buffer {name}": buffer.clone() for name, buffer in _buffers_of(self._state.model)}
        except Exception as error:  # of a user's own optimizer
            self.why_not = first_line(error)
            return

        def work() -> None:
            try:
                self._hash = hash_of(parts)
            except Exception as error:  # of a tensor subclass
                self.why_not = first_line(error)

        # No daemon: a process that ends while a thread is inside of torch may be aborted.
        try:
            self._thread = SideThread(work, "hash", is_daemon=False)
        except RuntimeError:  # no thread is left below the host's or the container's limit
            work()

    def finish_hash(self, check: Callable[[], None]) -> None:
        """Block until this rank's hash is made; then the state may change. `check` is called repeatedly, and may
        raise."""
        if self._thread is not None:
            self._thread.finish(check)
            self._thread = None  # frees the hashed tensors, too

    def compare(self) -> None:
        """Compare the hashes before a step is applied. Every rank calls it; blocks until all ranks have.

        Raises:
            StatesDiffer: the ranks' states differ; raised on every rank alike.
            RuntimeError, FormationFailed: a peer was lost.
        """
        told = all_gather(torch.tensor([kind_of_machine(self._device), self._hash], device="cpu"))
        self.num_kinds = len({kind for kind, _ in told})
        if any(value == CHANGED for _, value in told):
            self.is_lost_in_loading = True
            return
        able = [rank for rank, (_, value) in enumerate(told) if value != NO_HASH]
        voters = [rank for rank in self._voters if rank in able]
        right = right_hashes([(told[rank][0], told[rank][1]) for rank in voters])
        if right is None:
            raise StatesDiffer(range(len(told)), len(voters), has_majority=False)
        wrong = [rank for rank in able if told[rank][1] not in right]
        if right.issuperset(told[rank][1] for rank in voters):  # otherwise a rank may have its state from a wrong one
            # The first voter has sent the state. On a machine of another kind a later step may be rounded differently.
            source, source_hash = told[self._voters[0]]
            wrong = [rank for rank in wrong if told[rank][0] == source and source_hash != NO_HASH]
        if wrong:
            raise StatesDiffer(wrong, len(voters), has_majority=True)


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the state dict; other buffers are never handed over."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            yield name, value


@cache
def kind_of_machine(device: torch.device) -> int:
    fingerprint = determinism.fingerprint(device)
    return _digest("/".join(str(fingerprint.get(name, "")) for name in KIND).encode())


def tensors_of(state: TrainState) -> Iterator[tuple[str, Any]]:
    """Yield all that must be equal on all ranks after each commit, by name: tensors (not copied) and plain values.

    Frozen parameters are left out: a forward pass may write different values on each rank.
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
    """Return the parameters, by name, that no optimizer owns and no gradient changes."""
    owned = state.kept.updates.owned
    return {
        name: parameter.detach()
        for name, parameter in state.model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in owned
    }


def is_as_given(state: TrainState, given: Mapping[str, Any]) -> bool:
    """Return whether the optimizers hold, bit by bit, what `load_state_dict` was just `given`. Blocks; tensors that
    are the same object cost nothing."""
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
        for key in value.keys() - {"param_groups"}:  # settings of an optimizer or of one of its parts
            yield from _leaves(f"{name} {key}", value[key])
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _leaves(f"{name} {place}", entry)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield name, value.detach().cpu()  # torch may keep a step count on either device
    elif isinstance(value, Tensor | int | float | str):
        yield name, value


def hash_of(parts: Mapping[str, Any]) -> int:
    """Return a 64-bit hash over names, types, shapes and bytes. Blocks; 3 GB/s or so per core. Copies no large tensor.

    For each chunk it sums the 32-bit words, each times an odd 64-bit number of its place, modulo 2**64 (multilinear
    hashing, Carter and Wegman, 1979): every change of a single word changes the sum. It detects accidents, not attacks.
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
        text += map(str, torch.stack(_sums_there(found, device)).tolist())
    return _digest(";".join(text).encode())


def hashes_by_name(parts: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return hashes of each tensor's bytes; tensors that cannot be hashed are left out. Blocks once per device."""
    sums: dict[torch.device, dict[str, list[Tensor]]] = {}
    for name, tensor in parts.items():
        with suppress(Exception):  # of a tensor subclass
            sums.setdefault(tensor.device, {})[name] = _sums_there([*dense_parts(tensor)], tensor.device)
    found: dict[str, list[int]] = {}
    for here in sums.values():
        numbers = iter(torch.stack([one for several in here.values() for one in several]).tolist())
        found |= {name: [*islice(numbers, len(several))] for name, several in here.items()}
    return found


def hash_of_plain(state: Any) -> int:
    """Return a 64-bit hash over the plain values of a state dict, such as counters and best values."""
    return _digest(json.dumps(_plain(state), sort_keys=True).encode())


def plain_hashes(state: TrainState) -> dict[str, int]:
    """Return hashes, by name, of the optimizers' settings (learning rates, ...) and the extras' plain values. A
    training function may change these between steps; the comparison of weights and optimizer states omits them."""
    found = {"optimizer settings": settings_hash(state)}
    for name, extra in state.extras.items():
        if isinstance(extra, torch.optim.Optimizer):
            found[name] = _groups_hash(extra)
        else:
            found[name] = hash_of_plain(extra.state_dict())
    return found


def settings_hash(state: TrainState) -> int:
    """Return a hash of the optimizer's settings, with the learning rates before a schedule, which may end at 0."""
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
    """Return a value, a one-element tensor as a number; a float with 9 digits, because machines may differ in the last
    ones."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return float(f"{number:.9g}") if isinstance(number, float) else number


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    if isinstance(state, np.generic):  # a worker that was sent the state has Python's type
        state = state.item()
    return state if isinstance(state, str | int | float | None) else None


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@torch.no_grad()
def _sums_there(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return one number per chunk, on the device. A chunk lies in one tensor; the rests of tensors are packed into
    further chunks."""
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
    """Return odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(1979)
    return (torch.randint(-(2**62), 2**62, (number,), dtype=torch.int64, generator=generator, device="cpu") * 2 + 1).to(
        device
    )


def _packed(parts: Sequence[Tensor], padding: Tensor) -> Tensor:
    together = torch.cat([*parts, padding])
    return together[: together.numel() // 4 * 4]
