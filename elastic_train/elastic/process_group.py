"""Form and end the process group of one World, and break it off."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from elastic_train.elastic.formed_group import FormedGroup, install
from elastic_train.errors import ElasticTrainError, FormationFailed, UsageError, first_line
from elastic_train.rules import seconds_to_form
from elastic_train.training.collectives import GROUP_TIMEOUT, broken_off_by, gather_json, require_sound
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.training.state import TrainState
from elastic_train.world import World

NCCL_SECONDS = "30"
"""that NCCL may take for a communicator, and that a death meanwhile may cost; it takes some seconds on many GPUs"""


@contextmanager
def process_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    timeout: timedelta = GROUP_TIMEOUT,
    formed: FormedGroup | None = None,
    device: torch.device | None = None,
    form_timeout: timedelta | None = None,
) -> Iterator[None]:
    """The default process group of `world` inside the block; destroyed on the way out, whatever happened.

    Every member calls it; `make_store` gives a connection of its own, with a prefix of this generation alone. Blocks
    until all have, for `form_timeout` (by default what rules.py says) and, where a member dies meanwhile that had
    published its address, five times that: gloo waits so long for the connection that it would have made, with no
    socket yet that could be shut. Not at all where the group is `formed` already, by all of them. Inside the block
    collectives wait `timeout`, until `set_group_timeout`. `device` is this worker's: NCCL would else take the one
    of LOCAL_RANK, or of a rank that changes from world to world.

    Raises:
        FormationFailed: not all members connected in time.
        RuntimeError: `device` has failed, or has no room left.
    """
    # torch's default arguments `group=group.WORLD`, bound when a first DDP imports torch.distributed.nn.functional,
    # would keep the first group's sockets open for ever; imported before it exists, they bind None.
    import torch._dynamo  # noqa: F401

    has_nccl = "nccl" in backend
    if has_nccl:
        _set_nccl_variables()
        if device is not None:
            _require_room(device)
    excepthook = sys.excepthook  # init_process_group wraps it each time and never puts it back
    try:
        if formed is None:
            limit = form_timeout or timedelta(seconds=seconds_to_form(world.world_size))
            _make_group(world, make_store, backend, sockets, limit, device if has_nccl else None)
        else:
            sockets.take(formed.sockets)
            install(formed)
        set_group_timeout(timeout)
        with broken_off_by(sockets):
            yield
    except BaseException:
        sockets.shut()  # whatever still holds the group, `release` is to close its connections
        raise
    finally:
        group = dist.group.WORLD
        if group is None:
            _count_groups_anew()
        try:
            _destroy(group, sockets)
        finally:
            sockets.forget(group)
            sys.excepthook = excepthook


class PresentGroup:
    """The process group of the world that a worker is in, while there is one.

    No ExitStack: where the group's end raises another error than the one that ended it, a stack's frame would keep both
    alive, and with them all that they refer to.
    """

    def __init__(self) -> None:
        self._group: AbstractContextManager[None] | None = None

    def enter(self, group: AbstractContextManager[None]) -> None:
        group.__enter__()
        self._group = group

    def close(self, error: BaseException | None = None) -> None:
        """End it, if there is one; `error` is what has broken it."""
        group, self._group = self._group, None
        if group is not None:
            group.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))

    def break_off(self, error: Exception, device: torch.device) -> Exception:
        """The same; returns what is to be judged: `error`, unless it is one of communication. Then what is wrong with
        this worker's `device`, whose faults NCCL tells as its own; else that of the group's end."""
        traceback = error.__traceback__
        try:
            self.close(error)
        except Exception as later:
            # It has the frames of the group's end by now, which refer to the error: a cycle (Python 3.12).
            error.__traceback__ = traceback
            if is_communication_error(error):
                return _fault_of(device) or later
        return (_fault_of(device) if is_communication_error(error) else None) or error


def _fault_of(device: torch.device) -> Exception | None:
    """What a GPU has failed with, if it has. Waits for nothing it was given: that may never end."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as fault:
        return fault
    return None


def _require_room(device: torch.device) -> None:
    """Give back what torch keeps of the GPU's memory and does not use: NCCL takes its own part past torch, and may find
    none else. Raises: RuntimeError where the GPU has failed, or is full: this worker's own fault, and not, as it would
    look later, a world that has not formed."""
    torch.cuda.empty_cache()
    torch.zeros(1, device=device)


def _set_nccl_variables() -> None:
    """For torch's NCCL backend, which reads them as the first group is made."""
    # Since 2.15 torch takes another one, nccl2, for "nccl". It does not read the two variables of a communicator that
    # does not block, and connects within init_process_group: `_make_group` says what follows. It was not tried.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    # 1 is what torchrun's agent sets: NCCL's watchdog would kill this process when a peer is lost, as with 3; with
    # 2 it would abort, and nobody knew. 0 leaves the abort to us, as torch's `_abort_process_group` asks for.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # A communicator that blocks waits for a dead peer for 30 min, and can be aborted by nobody (NVIDIA/nccl#1677).
    os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", NCCL_SECONDS)
    # NCCL connects now, all of them at once. Else it would in the first large reduction, which a rank may come to
    # late, by a first batch or a compilation that takes minutes: the timeout above is for that, too.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    # Where torch's watchdog sees a lost peer before we abort, it tells all by the store to write down what was under
    # way and sleeps four times that long, a minute, for which the group's end waits (torch 2.11). Who joins later
    # would read it, too, and torch's monitor end that process after 8 minutes.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    # An error of CUDA's is raised in the thread that trains as well, and told to the others from there. The watchdog
    # would end this process before (pytorch/pytorch#126544).
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"


def _make_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    timeout: timedelta,
    nccl_device: torch.device | None,
) -> None:
    """Raises: FormationFailed, as `process_group`."""
    sockets.begin()
    try:
        store = make_store()
        if (place := world.members[0].store) is not None:
            sockets.note_store(place[1])
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
        group = dist.group.WORLD
        # From here on sockets are NCCL's. They are left alone: half closed, beside its abort, they had NCCL 2.28 break
        # its process's memory. So `device_id` is not given above, where NCCL would connect.
        sockets.complete(None if nccl_device is None else group)
        # Until here a member that died after the list was made costs this timeout only. No barrier(), which would be
        # NCCL's where a device is given, and have no timeout.
        told = gather_json(sockets.listening())
        sockets.keep_only([(host, port) for one in told for host, port in one], world.world_size - 1)
        if nccl_device is not None:
            assert group is not None, "it was made"
            set_group_timeout(_nccl_timeout())
            _connect_nccl(group, nccl_device, store, sockets)
    except RuntimeError as error:
        raise FormationFailed(
            f"no process group of {world.world_size} workers within {timeout.total_seconds():.0f} s: "
            f"{first_line(error)}"
        ) from error


def _connect_nccl(group: dist.ProcessGroup, device: torch.device, store: Store, sockets: GroupSockets) -> None:
    """Blocks until NCCL's communicator stands: an abort meanwhile waits for it, too, for torch holds a lock. Where a
    member dies NCCL sees that; where its network is lost, it takes TORCH_NCCL_NONBLOCKING_TIMEOUT. Raises:
    FormationFailed."""
    store.set_timeout(_nccl_timeout())  # of rank 0's id
    group.bound_device_id = device  # as `device_id` of init_process_group
    try:
        dist.all_reduce(torch.zeros(1, device=device))
        sockets.require_unbroken(device)
    except (RuntimeError, FormationFailed) as error:
        sockets.abort(group)  # an abort before found nothing, where it came while the communicator was being made
        raise FormationFailed(f"no communicator of NCCL: {first_line(error)}") from error


def _nccl_timeout() -> timedelta:
    return timedelta(seconds=float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]))


def _destroy(group: dist.ProcessGroup | None, sockets: GroupSockets) -> None:
    sockets.wait_for_abort()
    try:
        dist.destroy_process_group()
    except RuntimeError:  # of NCCL, which bids its peers farewell: one of them is gone, and was not missed yet
        if group is None:
            raise
        sockets.abort(group)
        sockets.wait_for_abort()
        dist.destroy_process_group()


def _count_groups_anew() -> None:
    """Make a group of this process alone; its end has torch count from 0 again.

    torch numbers the groups that a process has begun to make, and the number is in the keys by which the members find
    each other. Where one has failed and another had not begun, they would look under different keys for ever.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def set_group_timeout(timeout: timedelta) -> None:
    """`torch.distributed.distributed_c10d.set_timeout` where torch has it (2.15), else its private older name."""
    setter = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from the communication library rather than from the code that is trained.

    gloo has no class of its own: its errors are RuntimeErrors that name its source file.
    """
    if isinstance(error, dist.DistError | FormationFailed):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Gloo" in text or "NCCL" in text)


@contextmanager
def told_as_what_it_is(state: TrainState, sockets: GroupSockets) -> Iterator[None]:
    """The code that is trained runs inside the block, and this says what it raises.

    It may catch the error of a lost peer and raise one of its own, or use what it is given as nobody else would: that
    is no error of its own. Where the group was broken off, it may have looked at NCCL's garbage, or gone on without its
    step, as all who are left. A bug shows again when the step is redone. Where it asks to end the process, that would
    be gone without a word, its last commits with it.

    Raises: FormationFailed, where a peer was lost. RuntimeError in place of SystemExit.
    """
    try:
        try:
            yield
        except SystemExit as end:
            raise RuntimeError(
                f"the training code called sys.exit({end.code!r}) at step {state.step}: to end training there, "
                "return from the training function"
            ) from end
    except Exception as error:
        is_ours = isinstance(error, ElasticTrainError) and not isinstance(error, UsageError)
        if is_ours or is_communication_error(error):  # it says what it is, whatever it came after
            raise
        require_sound()
        if sockets.is_shut:
            raise FormationFailed(f"the process group was broken off: {first_line(error)}") from error
        cause = next(filter(is_communication_error, _behind(error)), None)  # of a collective of the function's own
        if cause is None:
            raise
        raise FormationFailed(first_line(cause)) from error


def _behind(error: BaseException) -> Iterator[BaseException]:
    """What an error was raised from, and while handling what; each once."""
    found: list[BaseException] = [error]
    for one in found:
        behind = (one.__cause__, one.__context__)
        found += [other for other in behind if other is not None and all(other is not known for known in found)]
    yield from found[1:]


def choose_device(requested: str, local_rank: int) -> torch.device:
    """This worker's device: by `local_rank`, wrapping round where local ranks share GPUs."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; auto takes the CPU then")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(device: torch.device) -> str:
    """NCCL for the tensors of a GPU that nobody else in the world uses, which rules.py judges; gloo for the CPU's."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def gpu_of(device: torch.device) -> str | None:
    """The UUID of a CUDA device; None for the CPU. A launcher may have given each worker one GPU, number 0 to all.

    With `NCCL_HOSTID`, where that is set: NCCL has workers share a GPU where it takes them for those of two machines.
    """
    if device.type != "cuda":
        return None
    uuid, host_id = str(torch.cuda.get_device_properties(device).uuid), os.environ.get("NCCL_HOSTID")
    return f"{uuid} of {host_id}" if host_id else uuid
