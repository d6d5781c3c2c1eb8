"""Work for several ranks over gloo, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from tests.processes import forkserver


def on_each_rank(work: Callable[..., None], *arguments: Any, size: int) -> None:
    """Calls `work(rank, *arguments)`, a function at the top of a module, in a process group of so many ranks. Raises
    where one of them does."""
    beside_a_store(_in_group, work, size, arguments, size=size)


def beside_a_store(work: Callable[..., None], *arguments: Any, size: int) -> None:
    """The same as `work(rank, port, *arguments)`, with a TCPStore at that port and no group."""
    forkserver()  # torch asks for it by its name
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_processes(work, (store.port, *arguments), nprocs=size, start_method="forkserver")


def _in_group(rank: int, port: int, work: Callable[..., None], size: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    work(rank, *arguments)
    dist.destroy_process_group()
