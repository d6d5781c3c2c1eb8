"""Send the state from one rank to those that need it, in chunks as it lies in memory; it is used when it is complete.

Each rank passes what it receives on to two others, so a link carries the state twice at most, for any number of ranks.
A sender copies only buffers and tensors that are not in one piece. A receiver holds the state once beside its own.
Small tensors share a message: each message costs both sides more than its bytes, while both train.

Newcomers receive the state beside the first step of the world that they enter. From a commit to the optimizer's next
step neither weights nor optimizer state change. In that time rank 0 sends them, while all ranks compute. A newcomer
without samples in that step needs them only when it applies the step's gradient, which the reduction gives to every
rank. So no rank waits if the step takes longer than the sending. What a forward pass changes (buffers, such as
BatchNorm's statistics) is sent as a copy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from elastic_train.elastic.loading import load
from elastic_train.errors import FormationFailed
from elastic_train.storage.state_bytes import deserialize_state, is_odd, rebuilt, serialize_state
from elastic_train.training.collectives import GROUP_TIMEOUT, barrier
from elastic_train.training.side_thread import SideThread
from elastic_train.training.state import TrainState
from elastic_train.training.step import drop_all_gradients
from elastic_train.training.tasks import tensors_in

TAG = 7001
"""of its messages, to keep them apart from those of the step"""
PACKET_BYTES = 2**20
"""smaller tensors share messages up to this size"""
CHUNK_BYTES = 16 * 2**20
"""a rank passes a chunk on when it has received it; also the host memory for sending a GPU's state"""
POLL_SECONDS = 0.001
SLOT = "elastic_train tensor"
KEPT = "elastic_train kept"

Check = Callable[[], None]
"""called repeatedly while a rank waits for a state; raises where the process group was broken off"""
Loaded = Callable[[dict[str, Any]], None]
"""called with the clock of the rank that has sent the state, when a rank has that state"""


def hand_out(
    state: TrainState,
    ranks: Sequence[int],
    check: Check,
    *,
    kept: Collection[str] = (),
    before_sending: Callable[[], None] | None = None,
    loaded: Loaded = lambda _clock: None,
) -> None:
    """Bring the state of `ranks[0]` to the others of `ranks`. Every rank of the group calls this. Blocks until all have
    the state.

    Until then the state of each rank is that of a commit: a late stop may save it meanwhile.

    Args:
        kept: names of parameters that are equal on all of `ranks`: they are not sent.
        before_sending: called on the first rank.
        loaded: as `Taking`'s; other ranks may still wait for the state then.

    Raises: as `Giving.finish` and `Taking.finish`.
    """
    if dist.get_rank() == ranks[0] and len(ranks) > 1:
        giving = Giving(state, ranks, kept)
        if before_sending is not None:
            before_sending()
        giving.begin()
        with state.lock.released():
            giving.finish(check)
    elif dist.get_rank() in ranks[1:]:
        drop_all_gradients(state)  # they are of a step that does not count, and may take the room needed on a GPU
        taking = Taking(state, ranks[0], loaded)
        with state.lock.released():
            taking.wait(check)
        taking.finish(check)
    with state.lock.released():
        barrier()


class Giving:
    """Sends `state` on a thread of its own, from `begin` on, to all of `ranks` but the first, which is this rank. The
    receivers have the parameters `kept` already."""

    def __init__(self, state: TrainState, ranks: Sequence[int], kept: Collection[str] = ()) -> None:
        self._ranks = list(ranks)
        skeleton, self._tensors = take_apart(state, kept)
        # Not on the sending thread: that would block the training thread, as Python runs one of them at a time.
        self._skeleton = torch.frombuffer(bytearray(serialize_state(skeleton)), dtype=torch.uint8)
        position = [state.epoch, state.step, state.samples_done, state.micro_batch_size or 0]
        self._head = torch.tensor([len(ranks), self._skeleton.numel(), *position], device="cpu")
        self._link = Link()
        self._thread: SideThread | None = None

    def begin(self) -> None:
        """Start to send the state. Called when the step's reduction is built, so that no rank has to wait for it."""
        self._thread = SideThread(self._send, "give")

    def _send(self) -> None:
        for tensor in (self._head, torch.tensor(self._ranks, device="cpu")):
            self._link.send(tensor, self._ranks[1:])
        _, children = neighbours(0, self._ranks)
        self._link.pass_on(self._skeleton, None, children)
        for packet in packets(self._tensors):
            self._link.pass_on(packed(packet), None, children)

    def finish(self, check: Check) -> None:
        """Block until the state is sent and may change; called before the optimizer's step. Calls `check` meanwhile, as
        gloo may never end a send to a rank that died.

        Raises:
            RuntimeError: from the communication library, when a peer is lost. What `check` raises.
        """
        assert self._thread is not None, "it has begun"
        self._thread.finish(check)


class Taking:
    """Receives into `state`, on a thread of its own, what rank `source` sends.

    Args:
        loaded: called when `state` is that of the source.
    """

    def __init__(self, state: TrainState, source: int, loaded: Loaded) -> None:
        self._state, self._source, self._loaded = state, source, loaded
        self._link = Link()
        self._rank = dist.get_rank()
        self._head: Tensor | None = None
        self._skeleton: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._thread = SideThread(self._receive, "take")

    def begin(self) -> None:
        """Do nothing: the thread receives already. As `Giving.begin`."""

    def wait_for_position(self, check: Check) -> int:
        """Wait until the members have come, and set `state` to their position. Returns how many ranks receive the
        state. Blocks for as long as the members train on.

        Raises: as `Giving.finish`.
        """
        while self._head is None and self._thread.is_alive:
            check()
            time.sleep(POLL_SECONDS)
        if self._head is None:
            check()
            self._thread.finish(check)
            raise FormationFailed(f"rank {self._source} sent no state")
        num_ranks, _, *position, micro_batch_size = self._head.tolist()
        self._state.epoch, self._state.step, self._state.samples_done = position
        self._state.micro_batch_size = micro_batch_size or None
        return int(num_ranks) - 1

    def _receive(self) -> None:
        head = torch.zeros(6, dtype=torch.int64, device="cpu")
        self._link.receive(head, self._source)
        self._head = head
        message = torch.zeros(int(head[0]), dtype=torch.int64, device="cpu")
        self._link.receive(message, self._source)
        ranks = message.tolist()
        parent, children = neighbours(ranks.index(self._rank), ranks)

        message = torch.empty(int(head[1]), dtype=torch.uint8, device="cpu")
        self._link.pass_on(message, parent, children)
        self._skeleton = deserialize_state(message.numpy().tobytes(), source=self._source_name)
        self._tensors = [empty(*looks) for looks in self._skeleton.pop("tensors")]
        for packet in packets(self._tensors):
            whole = room_for(packet)
            self._link.pass_on(whole, parent, children)
            unpack(whole, packet)

    @property
    def _source_name(self) -> str:
        return f"the state of rank {self._source}"

    def wait(self, check: Check) -> None:
        """Block until the state has arrived, without touching this rank's own. Raises: as `Giving.finish`."""
        self._thread.finish(check)

    def finish(self, check: Check) -> None:
        """Wait for the state and load it, as `Giving.finish`. Raises: also SnapshotError as `loading.load`."""
        self.wait(check)
        skeleton, tensors = self._skeleton, self._tensors
        self._skeleton, self._tensors = {}, []
        named = self._state.model.named_parameters()
        mine = {name: parameter.detach() for name, parameter in named if not is_lazy(parameter)}
        load(self._state, put_together(skeleton, tensors, mine), self._source_name, is_peers=True)
        self._loaded(skeleton["run"]["clock"])


Handover = Giving | Taking
"""one rank's part in a handover"""


def neighbours(place: int, ranks: Sequence[int]) -> tuple[int | None, Sequence[int]]:
    """Return from which rank `ranks[place]` receives the state, and to which ranks it sends it: a binary tree with root
    ranks[0], filled row by row."""
    parent = ranks[(place - 1) // 2] if place else None
    return parent, ranks[2 * place + 1 : 2 * place + 3]


class Link:
    """Messages in the present default group: a thread that outlives its world must not write into the next one.
    Blocking; raises RuntimeError or ValueError where the group has gone."""

    def __init__(self) -> None:
        self._group = dist.group.WORLD

    def pass_on(self, tensor: Tensor, parent: int | None, children: Sequence[int]) -> None:
        """Receive `tensor` from `parent`, if there is one, and send it to `children`, chunk by chunk."""
        whole = flat(tensor)
        for chunk in torch.split(whole, max(1, CHUNK_BYTES // whole.element_size())):
            if parent is not None:
                self.receive(chunk, parent)
            self.send(chunk, children)

    def send(self, tensor: Tensor, targets: Sequence[int]) -> None:
        on_host = tensor.cpu()
        for work in [dist.isend(on_host, target, group=self._group, tag=TAG) for target in targets]:
            _wait(work)

    def receive(self, tensor: Tensor, source: int) -> None:
        _wait(dist.irecv(tensor, source, group=self._group, tag=TAG))


def _wait(work: Any) -> None:
    work.wait(GROUP_TIMEOUT)  # without it, a message of gloo has the timeout that its group was given to form


def take_apart(state: TrainState, kept: Collection[str] = ()) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the state dict with slots instead of dense tensors, and these tensors: copies of those that a forward pass
    changes. The entry `tensors` describes them. Parameters in `kept` are replaced by their names."""
    names = {_place_of(parameter): name for name, parameter in state.model.named_parameters() if name in kept}
    whole, modules = state.state_dict(), state.kept.modules
    of_modules = [whole["extras"][name] if name else whole["model"] for name in modules]  # also a layer's extra state
    steady = [one for module in modules.values() for one in module.parameters()]
    held, trained = ({one.data_ptr() for one in some if not is_odd(one)} for some in (tensors_in(of_modules), steady))
    changing = held - trained
    tensors: list[Tensor] = []
    slots: dict[tuple[Any, ...], int] = {}

    def replace(tensor: Tensor) -> Any:
        if is_odd(tensor) or flat_or_none(tensor) is None:
            return tensor.clone()
        key = _place_of(tensor)
        if key in names and tensor.numel():
            return {KEPT: names[key]}
        if key not in slots or not tensor.numel():
            slots[key] = len(tensors)
            is_changing = tensor.data_ptr() in changing
            tensors.append(tensor.detach().clone() if is_changing else tensor.detach())
        return {SLOT: slots[key]}

    skeleton: dict[str, Any] = rebuilt(whole, replace)  # copies lists, which may change before the sending
    skeleton["tensors"] = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())] for tensor in tensors
    ]
    return skeleton, tensors


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def packets(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield the tensors of each message, in their order, without empty ones; the same on both sides."""
    packet: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        if packet and num_bytes + tensor.nbytes > PACKET_BYTES:
            yield packet
            packet, num_bytes = [], 0
        packet.append(tensor)
        num_bytes += tensor.nbytes
    if packet:
        yield packet


def packed(packet: Sequence[Tensor]) -> Tensor:
    """Return the message of some tensors: a single one as it lies in memory, several as copied bytes on the CPU."""
    return packet[0] if len(packet) == 1 else torch.cat([bytes_of(tensor).cpu() for tensor in packet])


def room_for(packet: Sequence[Tensor]) -> Tensor:
    """Return the tensor into which the message of some tensors is received."""
    if len(packet) == 1:
        return packet[0]
    return torch.empty(sum(tensor.nbytes for tensor in packet), dtype=torch.uint8, device="cpu")


def unpack(whole: Tensor, packet: Sequence[Tensor]) -> None:
    """Copy what was received in `room_for` to the tensors."""
    if len(packet) > 1:
        for tensor, part in zip(packet, torch.split(whole, [tensor.nbytes for tensor in packet]), strict=True):
            bytes_of(tensor).copy_(part)


def bytes_of(tensor: Tensor) -> Tensor:
    return flat(tensor).view(torch.uint8)


def put_together(skeleton: Any, tensors: Sequence[Tensor], mine: Mapping[str, Tensor] | None = None) -> Any:
    """Return the state dict that `take_apart` took apart. `mine` are this rank's parameters, by name."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {SLOT}:
            return tensors[skeleton[SLOT]]
        if mine is not None and skeleton.keys() == {KEPT}:
            return mine[skeleton[KEPT]]
        found = type(skeleton)()
        for key, value in skeleton.items():
            found[key] = put_together(value, tensors, mine)
        if isinstance(skeleton, OrderedDict):
            vars(found).update(put_together(vars(skeleton), tensors, mine))
        return found
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(put_together(value, tensors, mine) for value in skeleton)
    return skeleton


def empty(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="cpu")


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of a dense tensor, as they lie in memory."""
    found = flat_or_none(tensor)
    assert found is not None, "asked before"
    return found


def flat_or_none(tensor: Tensor) -> Tensor | None:
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    turned = tensor.permute(order)
    return turned.view(-1) if turned.is_contiguous() else None
