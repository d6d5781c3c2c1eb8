"""A gloo process group that is formed beside the default one, on a thread of its own, and takes its place later.

torch makes the default group in the very call that installs it, so that nobody can train meanwhile. Here gloo's backend
is built by hand; torch's public `Backend.register_backend` then lets `init_process_group` install it without a message.
What torch does not promise stands in this module alone: `ProcessGroupGloo._Options` with `_devices` and `_timeout`, and
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
"""at least, for a group that is formed beside another one: nobody waits for it but the thread that forms"""
ATTEMPTS = 3


_to_install: list[Any] = []


@dataclass
class FormedGroup:
    """A group that stands, and that nobody uses yet."""

    rank: int
    world_size: int
    store: Store
    backend: Any
    """None once it is installed: torch has the only reference then"""
    sockets: dict[int, str]
    """its connections: number -> `socket:[inode]`"""


def can_form() -> bool:
    """Whether this torch, as it is set up here, lets a group be formed beside another one."""
    gloo = getattr(dist.distributed_c10d, "ProcessGroupGloo", None)
    has_names = hasattr(gloo, "_Options") and hasattr(gloo, "create_device")
    # Lazy connections come after the forming; the wrapper for debugging needs a group of its own.
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    return has_names and not is_lazy and dist.get_debug_level() is not dist.DebugLevel.DETAIL


def form_timeout(world_size: int) -> timedelta:
    """Of such a group."""
    return timedelta(seconds=max(FORM_SECONDS, seconds_to_form(world_size)))


def form(store: Store, rank: int, world_size: int, address: str) -> FormedGroup:
    """Connect to all other ranks. Every rank calls it, on a thread of its own choice, with a prefix of this group alone
    in `store`. Blocks until all have, for `form_timeout` and some more at most; training may go on meanwhile.

    Args:
        address: where this rank listens, unless GLOO_SOCKET_IFNAME names interfaces.

    Raises:
        FormationFailed: not all of them did.
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
    """Make it the default group; there must be none. Sends nothing, and waits for nobody."""
    _register_backend()
    _to_install.append(group.backend)
    group.backend = None
    dist.init_process_group(
        BACKEND, store=PrefixStore("installed", group.store), rank=group.rank, world_size=group.world_size
    )


@cache
def _register_backend() -> None:
    """As third parties do; once in a process. A group that a training function makes of some ranks has the backend of
    the default one, and is made in the plain way."""

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        if _to_install:
            return _to_install.pop()
        return dist.distributed_c10d.ProcessGroupGloo(store, rank, world_size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])


def _make_devices(address: str) -> tuple[list[Any], list[Address]]:
    """What gloo listens with, and where: by these addresses the group's connections are told from all others.

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
            if len(listening) == 1:  # else another thread opened one in the same moment
                devices.append(device)
                addresses += listening
                break
        else:
            raise FormationFailed("the port at which gloo listens cannot be told from others")
    return devices, addresses
