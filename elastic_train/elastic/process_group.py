"""Form, abort and end the process group of one World."""

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
"""time for NCCL to make a communicator, some seconds on many GPUs; a death meanwhile costs at most this"""


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

    Every member enters it. `make_store` returns a new connection, with a prefix of this generation alone. Blocks until
    all members have entered, for `form_timeout` at most (by default what rules.py says). If a member dies meanwhile
    that had published its address, that takes five times as long: gloo waits for the connection that the member would
    have made, without a socket that could be shut. Does not block where all members have `formed` the group before.
    Inside the block collectives wait for `timeout`, until `set_group_timeout`. `device` is this worker's; without it
    NCCL would take that of LOCAL_RANK, or of a rank that changes from world to world.

    Raises:
        FormationFailed: not all members connected in time.
        RuntimeError: `device` has failed, or has no room left.
    """
    # torch's default arguments `group=group.WORLD` are bound when a first DDP imports torch.distributed.nn.functional.
    # They would keep the first group's sockets open for ever. Imported before that group exists, they bind None.
    import torch._dynamo  # noqa: F401

    has_nccl = "nccl" in backend
    if has_nccl:
        _set_nccl_variables()
        if device is not None:
            _require_room(device)
    excepthook = sys.excepthook  # init_process_group wraps it each time and never restores it
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
        sockets.shut()  # something may still hold the group, whose connections `release` has to close
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
    """The process group of a worker's present world, while there is one.

    It is no ExitStack. Where the end of the group raises another error than the one that caused it, a stack's frame
    would keep both errors alive, and all that they refer to.
    """

    def __init__(self) -> None:
        self._group: AbstractContextManager[None] | None = None

    def enter(self, group: AbstractContextManager[None]) -> None:
        group.__enter__()
        self._group = group

    def close(self, error: BaseException | None = None) -> None:
        """End the group, if there is one; `error` is what has broken it."""
        group, self._group = self._group, None
        if group is not None:
            group.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))

    def break_off(self, error: Exception, device: torch.device) -> Exception:
        """Do the same. Returns the error to judge: `error`, unless it is one of communication. Then it is a fault of
        `device`, which NCCL reports as its own, or the error of the group's end, if there is one."""
        traceback = error.__traceback__
        try:
            self.close(error)
        except Exception as later:
            # `error` now refers to the frames of the group's end, which refer to it: a cycle (Python 3.12).
            error.__traceback__ = traceback
            if is_communication_error(error):
                return _fault_of(device) or later
        return (_fault_of(device) if is_communication_error(error) else None) or error


def _fault_of(device: torch.device) -> Exception | None:
    """Return the error with which a GPU has failed, if any. Does not wait for its kernels, which may never end."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as fault:
        return fault
    return None


def _require_room(device: torch.device) -> None:
    """Release the GPU memory that torch caches and does not use, as NCCL allocates past torch. Raises: RuntimeError
    where the GPU has failed or is full. That is this worker's own fault; later it would look like a world that has not
    formed."""
    torch.cuda.empty_cache()
    torch.zeros(1, device=device)


def _set_nccl_variables() -> None:
    """Set the variables of torch's NCCL backend, which reads them when the first group is made."""
    # Since 2.15 torch takes another backend, nccl2, for "nccl". It ignores the two variables of a non-blocking
    # communicator, and connects within init_process_group (see `_make_group` for the consequences). It was not tried.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    # torchrun's agent sets 1: NCCL's watchdog would kill this process when a peer is lost, as with 3. With 2 it would
    # abort without notice. 0 leaves the abort to us, as torch's `_abort_process_group` asks for.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # A blocking communicator waits 30 min for a dead peer, and cannot be aborted (NVIDIA/nccl#1677).
    os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", NCCL_SECONDS)
    # NCCL connects to all peers now. Else it would in the first large reduction, which a rank may enter minutes late
    # after a first batch or a compilation: the timeout above would apply to that, too.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    # If torch's watchdog sees a lost peer before we abort, it asks all, by the store, to dump what was under way, and
    # sleeps four times that long, a minute, for which the group's end waits (torch 2.11). A later newcomer would read
    # the request, too, and torch's monitor would end its process after 8 minutes.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    # A CUDA error is raised in the training thread as well, and reported to the others from there. The watchdog would
    # end this process first (pytorch/pytorch#126544).
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"


def _make_group(
    world: World,
    make_store: Callable[[], Store],
    backend: str,
    sockets: GroupSockets,
    timeout: timedelta,
    nccl_device: torch.device | None,
) -> None:
    """Make the default process group. Raises: FormationFailed, as `process_group`."""
    sockets.begin()
    try:
        store = make_store()
        if (place := world.members[0].store) is not None:
            sockets.note_store(place[1])
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
        group = dist.group.WORLD
        # New sockets are NCCL's from here on, and are left alone: half closed during an abort, they made NCCL 2.28
        # corrupt its process's memory. So `device_id` is not given above, where NCCL would connect.
        sockets.complete(None if nccl_device is None else group)
        # Until here, a member that died after the agreement costs this timeout only. This is no barrier(): where a
        # device is given, that is NCCL's and has no timeout.
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
    """Make NCCL's communicator. Blocks until it stands; an abort meanwhile waits too, as torch holds a lock. NCCL
    notices a member's death; a lost network takes TORCH_NCCL_NONBLOCKING_TIMEOUT. Raises: FormationFailed."""
    store.set_timeout(_nccl_timeout())  # for reading rank 0's id
    group.bound_device_id = device  # as `device_id` of init_process_group
    try:
        dist.all_reduce(torch.zeros(1, device=device))
        sockets.require_unbroken(device)
    except (RuntimeError, FormationFailed) as error:
        sockets.abort(group)  # an earlier abort found nothing if it came while the communicator was being made
        raise FormationFailed(f"no communicator of NCCL: {first_line(error)}") from error


def _nccl_timeout() -> timedelta:
    return timedelta(seconds=float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]))


def _destroy(group: dist.ProcessGroup | None, sockets: GroupSockets) -> None:
    sockets.wait_for_abort()
    try:
        dist.destroy_process_group()
    except RuntimeError:  # from NCCL, which says goodbye to its peers: one is gone without having been noticed
        if group is None:
            raise
        sockets.abort(group)
        sockets.wait_for_abort()
        dist.destroy_process_group()


def _count_groups_anew() -> None:
    """Make and end a group of this process alone, so that torch numbers groups from 0 again.

    torch numbers the groups that a process begins to make, and the members find each other by keys with that number. If
    making a group failed on one member before another had begun, their numbers would differ for ever.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def set_group_timeout(timeout: timedelta) -> None:
    """Call `torch.distributed.distributed_c10d.set_timeout` where torch has it (2.15), else its older private name.
    Raises: UsageError: the trained code has ended the group."""
    if not dist.is_initialized():
        raise UsageError(
            "the training function has ended the process group: leave destroy_process_group() out, for run() ends the "
            "group of each world"
        )
    setter = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout)


def is_communication_error(error: BaseException) -> bool:
    """Return whether an error comes from the communication library rather than from the trained code.

    gloo has no class of its own: its errors are RuntimeErrors that name its source file.
    """
    if isinstance(error, dist.DistError | FormationFailed):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Gloo" in text or "NCCL" in text)


@contextmanager
def translated_failures(state: TrainState, sockets: GroupSockets) -> Iterator[None]:
    """Translate what the trained code raises inside the block.

    That code may catch the error of a lost peer and raise one of its own, or misuse the values that it got. That is no
    error of its own: where the group was aborted, it may have read NCCL's garbage, or gone on without its step, like
    all survivors. A real bug shows again when the step is redone. A SystemExit would end the process without a message,
    and lose its last commits.

    Raises: FormationFailed: a peer was lost. RuntimeError in place of SystemExit.
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
        if is_ours or is_communication_error(error):  # these say what they are, whatever came before
            raise
        require_sound()
        if sockets.is_shut:
            raise FormationFailed(f"the process group was broken off: {first_line(error)}") from error
        cause = next(filter(is_communication_error, _behind(error)), None)  # from a collective of the function's own
        if cause is None:
            raise
        raise FormationFailed(first_line(cause)) from error


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that led to an error, as cause or context; each once."""
    found: list[BaseException] = [error]
    for one in found:
        behind = (one.__cause__, one.__context__)
        found += [other for other in behind if other is not None and all(other is not known for known in found)]
    yield from found[1:]


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return this worker's device: by `local_rank`, modulo the number of GPUs."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; auto takes the CPU then")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(device: torch.device) -> str:
    """Return the backend: NCCL for tensors on a GPU, gloo on the CPU. rules.py judges if workers share a GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def gpu_of(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device; None for the CPU. Device numbers may be equal where a launcher gives each
    worker one GPU.

    `NCCL_HOSTID` is included where it is set: with different ones NCCL lets workers share a GPU, as on two machines.
    """
    if device.type != "cuda":
        return None
    uuid, host_id = str(torch.cuda.get_device_properties(device).uuid), os.environ.get("NCCL_HOSTID")
    return f"{uuid} of {host_id}" if host_id else uuid
