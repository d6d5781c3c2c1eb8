"""A gloo process group that is formed beside the default one, on a thread of its own, and replaces it later.

torch makes the default group in the very call that installs it, so no rank can train meanwhile. Here gloo's backend is
built by hand; torch's public `Backend.register_backend` then lets `init_process_group` install it without a message.
Only this module uses what torch does not promise: `ProcessGroupGloo._Options` with `_devices` and `_timeout`, and
`create_device`. Where they are missing `can_form` is False, and groups are made in the plain way.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import starmap
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from elastic_train.errors import FormationFailed, first_line
from elastic_train.rules import seconds_to_form
from elastic_train.system import open_sockets, opened_since
from elastic_train.training.group_sockets import connections_at, listening_address
from elastic_train.world import Address

BACKEND = "formed"
"""the name under which torch knows a group of this kind"""
FORM_SECONDS = 10.0
"""least timeout of a group that is formed beside another one: only the forming thread waits for it"""
ATTEMPTS = 3


_to_install: list[Any] = []


@dataclass
class FormedGroup:
    """A group that stands and is not yet in use."""

    rank: int
    world_size: int
    store: Store
    backend: Any
    """None once it is installed: then torch holds the only reference"""
    sockets: dict[int, str]
    """its connections: descriptor -> `socket:[inode]`"""


def can_form() -> bool:
    """Whether this torch, with these settings, lets a group be formed beside another one."""
    gloo = getattr(dist.distributed_c10d, "ProcessGroupGloo", None)
    has_names = hasattr(gloo, "_Options") and hasattr(gloo, "create_device")
    # Lazy connections are made after the forming; the debug wrapper needs a group of its own.
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    return has_names and not is_lazy and dist.get_debug_level() is not dist.DebugLevel.DETAIL


def form_timeout(world_size: int) -> timedelta:
    """Return the timeout of such a group."""
    return timedelta(seconds=max(FORM_SECONDS, seconds_to_form(world_size)))


def form(store: Store, rank: int, world_size: int, address: str) -> FormedGroup:
    """Connect to all other ranks. Every rank calls this, on any thread, with a prefix of this group alone in `store`.
    Blocks until all have, for little more than `form_timeout` at most; training may go on meanwhile.

    Args:
        address: where this rank listens, unless GLOO_SOCKET_IFNAME names interfaces.

    Raises:
        FormationFailed: not all ranks connected.
    """
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = form_timeout(world_size)
    try:
        options._devices, mine = _make_devices(address)
        store.set(f"listens/{rank}", json.dumps(mine))
        backend = gloo(PrefixStore("gloo", store), rank, world_size, options)
        theirs = [tuple(one) for other in range(world_size) for one in json.loads(store.get(f"listens/{other}"))]
    except (RuntimeError, OSError) as error:  # too few descriptors, say: training goes on, and the join fails
        raise FormationFailed(f"no group of {world_size} workers was formed ahead: {first_line(error)}") from error
    return FormedGroup(rank, world_size, store, backend, connections_at(mine, theirs))


def install(group: FormedGroup) -> None:
    """Make `group` the default group; there must be none. Sends nothing, and does not block."""
    _register_backend()
    _to_install.append(group.backend)
    group.backend = None
    dist.init_process_group(
        BACKEND, store=PrefixStore("installed", group.store), rank=group.rank, world_size=group.world_size
    )


@cache
def _register_backend() -> None:
    """Register the backend with torch's interface for third parties, once in a process. A group that a training
    function makes of some ranks uses the default group's backend, and is made in the plain way."""

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        if _to_install:
            return _to_install.pop()
        return dist.distributed_c10d.ProcessGroupGloo(store, rank, world_size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])


def _make_devices(address: str) -> tuple[list[Any], list[Address]]:
    """Return gloo's listeners and their addresses, by which the group's connections are told from all others.

    Raises: FormationFailed, RuntimeError.
    """
    create = dist.distributed_c10d.ProcessGroupGloo.create_device
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices, addresses = [], []
    for interface in names or [""]:
        for _ in range(ATTEMPTS):
            before = open_sockets()
            device = create(interface=interface) if interface else create(hostname=address)
            new = opened_since(before, open_sockets())
            listening = [found for found in starmap(listening_address, new.items()) if found is not None]
            if len(listening) == 1:  # else another thread opened one at the same moment
                devices.append(device)
                addresses += listening
                break
        else:
            raise FormationFailed("the port at which gloo listens cannot be told from others")
    return devices, addresses
