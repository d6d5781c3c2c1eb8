"""The processes of a DataLoader that live beside training: how they begin, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic_train.config import Config
from elastic_train.stopping import die_with_parent
from elastic_train.training.epoch_dataset import EpochDataset, as_fetched

BEGIN_SECONDS = 20.0
"""that a forked process may take for its first line, which needs nothing but a processor"""
MOST_STARTS = 3


def open_loader(
    dataset: EpochDataset,
    batch_sampler: Any,
    config: Config,
    warn: Callable[[str], None],
    *,
    pin_memory: bool = False,
    at_most: int | None = None,
) -> Iterator[Any]:
    """What a DataLoader with `config`'s processes reads, in the sampler's order. Blocks until they have begun.

    A process that is forked in the very moment in which another thread holds a lock of the interpreter waits for it for
    ever, before its first line (python/cpython#112275, before 3.12), and training waits for its batch. It is killed
    then, and all are started anew.

    Args:
        warn: told of processes that did not begin.
        at_most: of the processes.
    """
    num_workers = config.num_workers if at_most is None else min(config.num_workers, at_most)
    context = multiprocessing.get_context(config.multiprocessing_context)
    is_forked = num_workers > 0 and context.get_start_method() == "fork"

    def start() -> tuple[Iterator[Any], int]:
        """With how many processes have not begun."""
        begun = context.Semaphore(0) if is_forked else None
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": config.prefetch_factor,
            "multiprocessing_context": config.multiprocessing_context,
            "worker_init_fn": partial(start_loader_process, begun=begun),
        }
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=as_fetched,
            pin_memory=pin_memory,
            **(options if num_workers else {}),
        )
        batches = iter(loader)
        return batches, 0 if begun is None else num_workers - _count(begun, num_workers)

    for _ in range(MOST_STARTS - 1):
        before = set(multiprocessing.active_children())
        batches, missing = start()
        if missing == 0:
            return batches
        warn(
            f"{missing} of {num_workers} loader processes had not begun after {BEGIN_SECONDS:g} s: forked, perhaps, "
            "while another thread held a lock (python/cpython#112275); all are started again"
        )
        del batches  # it ends those that listen, and watches none from now on: of one that it watches, a death raises
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
    return start()[0]


def _count(begun: Semaphore, num_workers: int) -> int:
    """The processes that begin in time."""
    deadline = time.monotonic() + BEGIN_SECONDS
    return sum(begun.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(num_workers))


def start_loader_process(_worker: int, begun: Semaphore | None = None) -> None:
    """The `worker_init_fn` of every DataLoader whose processes live beside training; `begun` is released once."""
    # torchrun and terminals signal a worker's whole process group. A loader that dies of that takes the step in hand
    # and the snapshot of the stop with it: to stop is for the trainer alone to decide.
    os.setpgid(0, 0)
    # A loader that outlived its trainer would hold the trainer's sockets and lock files open.
    die_with_parent()
    torch.set_num_threads(1)
    if begun is not None:
        begun.release()
