"""The processes of a DataLoader that live beside training: how they begin, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from elastic_train.config import Config
from elastic_train.stopping import SIGNALS, die_with_parent
from elastic_train.training.epoch_dataset import EpochDataset, as_fetched
from elastic_train.training.sampler import MicroBatch

BEGIN_SECONDS = 20.0
"""that a forked process may take for its first line, which needs nothing but a processor"""
POLL_SECONDS = 0.002
MOST_STARTS = 3
_ending: list[threading.Thread] = []
"""each ends the processes of a loader that was let go"""


def open_loader(
    dataset: EpochDataset,
    batch_sampler: Any,
    config: Config,
    warn: Callable[[str], None],
    *,
    pin_memory: bool = False,
    at_most: int | None = None,
) -> Iterator[Any]:
    """What a DataLoader with `config`'s processes reads, in the sampler's order. Blocks until they have begun, and
    until those of the loader before the last one have ended; to let it go does not block.

    A process that is forked in the very moment in which another thread holds a lock of the interpreter waits for it for
    ever, before its first line (python/cpython#112275, before 3.12), and training waits for its batch. It is killed
    then, and all are started anew.

    Args:
        warn: told of processes that did not begin.
        at_most: of the processes.
    """
    num_workers = config.num_workers if at_most is None else min(config.num_workers, at_most)

    def make(begun: Semaphore | None) -> DataLoader[Any]:
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": config.prefetch_factor,
            "multiprocessing_context": config.multiprocessing_context,
            "worker_init_fn": partial(start_loader_process, begun=begun),
        }
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=as_fetched,
            pin_memory=pin_memory,
            **(options if num_workers else {}),
        )

    if num_workers == 0:
        return iter(make(None))
    while len(_ending) > 1:  # they keep what they have read until then
        _ending.pop(0).join()
    # Asked for only where there are processes: the answer is final, and a later set_start_method of the user's raises.
    if multiprocessing.get_context(config.multiprocessing_context).get_start_method() != "fork":
        return _read([iter(make(None))])
    for _ in range(MOST_STARTS - 1):
        batches, processes, num_missing = _fork(make, num_workers)
        if num_missing == 0:
            return _read([batches])
        warn(
            f"{num_missing} of {num_workers} loader processes had not begun after {BEGIN_SECONDS:g} s: forked, "
            "perhaps, while another thread held a lock (python/cpython#112275); all are started again"
        )
        del batches  # it ends those that listen, and watches none from now on: of one that it watches, a death raises
        for process in processes:
            process.kill()
            process.join()
    return _read([_fork(make, num_workers)[0]])


def _read(batches: list[Iterator[Any]]) -> Iterator[Any]:
    """What the one iterator in a list gives. Where it is let go before its end, that is on a thread of its own: torch
    waits until each process has read its batch, for 5 s at most each, and the other workers would wait for this one."""
    try:
        yield from batches[0]
    except GeneratorExit:
        if not sys.is_finalizing():  # then no thread starts, and torch ends nothing
            end_watch(batches[0])
            thread = threading.Thread(target=batches.clear, name="loader-end")  # no daemon: they end with this process
            thread.start()
            _ending.append(thread)
        raise


def end_watch(batches: Any) -> None:
    """From now on the death of one of an iterator's processes raises nothing in the main thread. torch would watch them
    until all have ended, whoever waits for that. Its private names are used here alone, as in its own
    `_shutdown_workers`."""
    if batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def read_apart(
    dataset: EpochDataset,
    parts: Iterable[npt.NDArray[np.int64]],
    config: Config,
    warn: Callable[[str], None],
) -> Iterator[Any]:
    """A batch for each of some lists of samples, which are no part of training: blocks until it is read.

    Where loader processes read, one is forked for this alone. What a data set opens when it is first read must not be
    opened in this process: those that are forked later would share the file's position. What this process draws does
    not notice.

    Args:
        parts: sample indices of each, one at least.
        warn: as `open_loader`'s.
    """
    if config.num_workers == 0:
        yield from map(dataset.read, parts)
        return
    sampler = [MicroBatch(0, 0, 0, indices, len(indices), is_last=True) for indices in parts]
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed
        fetched = open_loader(dataset, sampler, config, warn, at_most=1)
    for _, batch in fetched:
        yield batch


def _fork(
    make: Callable[[Semaphore], DataLoader[Any]], num_workers: int
) -> tuple[Iterator[Any], set[BaseProcess], int]:
    """What they read, the processes, and how many of them have not begun."""
    begun = multiprocessing.get_context("fork").Semaphore(0)
    before = set(multiprocessing.active_children())
    with _signals_blocked():
        batches = iter(make(begun))
    processes = set(multiprocessing.active_children()) - before
    return batches, processes, num_workers - _count(begun, num_workers)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is forked now is deaf to what torchrun, terminals and torch send until its first line. One that
    never comes to it would pass them on to this process: it has the pipe that wakes the thread that listens here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _count(begun: Semaphore, num_workers: int) -> int:
    """The processes that begin in time."""
    deadline, count = time.monotonic() + BEGIN_SECONDS, 0
    while count < num_workers and time.monotonic() < deadline:
        if begun.acquire(block=False):  # with a timeout it goes by a clock that may be set
            count += 1
        else:
            time.sleep(POLL_SECONDS)
    return count


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
        while signal.sigtimedwait(SIGNALS, 0) is not None:
            pass  # it came before there was a process group of its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
