"""Be a member of a world without training in it: for checks and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.process_group import process_group
from elastic_train.rules import common_backend
from elastic_train.world import World


@contextmanager
def standing_in(membership: Membership, world: World, device: torch.device | None = None) -> Iterator[None]:
    """Keep `world` standing and watched inside the block. Every member enters it; blocks until all have.

    Args:
        device: of this worker, for a process group, which is destroyed on the way out; None: it has none.

    Raises:
        FormationFailed: not all members came. RuntimeError: from the communication library.
    """
    watcher = membership.watcher
    watcher.expect(world)
    membership.barriers.wait_for_workers(world)
    group: AbstractContextManager[None] = nullcontext()
    if device is not None:
        backend = common_backend(world.workers)
        make_store = partial(membership.group_store, world)
        group = process_group(world, make_store, backend, membership.sockets, device=device)
    with group:
        watcher.enter(world)
        try:
            yield
        finally:
            watcher.leave()  # a member that goes now is not taken for lost
