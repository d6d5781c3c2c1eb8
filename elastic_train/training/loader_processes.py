"""Start and end of a DataLoader's processes beside training."""

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
"""timeout for a forked process to reach its first line, for which it needs only a processor"""
POLL_SECONDS = 0.002
MOST_STARTS = 3
_ending: list[threading.Thread] = []
"""threads that end the processes of dropped loaders"""


def open_loader(
    dataset: EpochDataset,
    batch_sampler: Any,
    config: Config,
    warn: Callable[[str], None],
    *,
    pin_memory: bool = False,
    at_most: int | None = None,
) -> Iterator[Any]:
    """Return an iterator over the batches of a DataLoader with `config`'s processes. Blocks until they have begun, and
    until those of the loader before the last one have ended. Dropping the iterator does not block.

    A process forked while another thread holds a lock of the interpreter waits for that lock for ever, before its first
    line (python/cpython#112275, before 3.12), and training waits for its batch. Such a process is killed, and all
    processes are started again.

    Args:
        warn: called with a message about processes that did not begin.
        at_most: limit of the number of processes.
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
    while len(_ending) > 1:  # until their end these processes keep what they have read
        _ending.pop(0).join()
    # Only where there are processes: this call fixes the method, so that a user's later set_start_method raises.
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
        del batches  # ends the processes that listen, and watches none: the death of a watched one raises
        for process in processes:
            process.kill()
            process.join()
    return _read([_fork(make, num_workers)[0]])


def _read(batches: list[Iterator[Any]]) -> Iterator[Any]:
    """Yield from the one iterator in a list. If it is dropped before its end, a separate thread frees it: torch waits
    until each process has read its batch, up to 5 s each, and the other workers would wait for this one."""
    try:
        yield from batches[0]
    except GeneratorExit:
        if not sys.is_finalizing():  # while finalizing no thread starts, and torch ends nothing
            end_watch(batches[0])
            thread = threading.Thread(target=batches.clear, name="loader-end")  # no daemon: this process waits for it
            thread.start()
            _ending.append(thread)
        raise


def end_watch(batches: Any) -> None:
    """Stop watching an iterator's processes, so that the death of one raises nothing in the main thread. torch would
    watch them until all have ended. Its private names are used here alone, as in its own `_shutdown_workers`."""
    if batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def read_apart(
    dataset: EpochDataset,
    parts: Iterable[npt.NDArray[np.int64]],
    config: Config,
    warn: Callable[[str], None],
) -> Iterator[Any]:
    """Yield a batch for each of some lists of samples outside of training. Blocks until each is read.

    With loader processes, one is forked for this alone. A data set must not open its files in this process at a first
    read: processes forked later would share the files' positions. This process's random numbers are not affected.

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
    """Fork the processes; return (their batches, the processes, how many of them have not begun)."""
    begun = multiprocessing.get_context("fork").Semaphore(0)
    before = set(multiprocessing.active_children())
    with _signals_blocked():
        batches = iter(make(begun))
    processes = set(multiprocessing.active_children()) - before
    return batches, processes, num_workers - _count(begun, num_workers)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals of torchrun, terminals and torch in processes forked inside the block, until their first line.
    A process that hangs before it would forward them to this one: it has the pipe that wakes the listening thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _count(begun: Semaphore, num_workers: int) -> int:
    """Return the number of processes that begin in time."""
    deadline, count = time.monotonic() + BEGIN_SECONDS, 0
    while count < num_workers and time.monotonic() < deadline:
        if begun.acquire(block=False):  # a timeout would use a clock that may be set
            count += 1
        else:
            time.sleep(POLL_SECONDS)
    return count


def start_loader_process(_worker: int, begun: Semaphore | None = None) -> None:
    """The `worker_init_fn` of every DataLoader whose processes live beside training; `begun` is released once."""
    # torchrun and terminals signal a worker's whole process group. The death of a loader would cost the open step and
    # the snapshot of the stop: the trainer alone decides to stop.
    os.setpgid(0, 0)
    # A loader that outlived its trainer would hold the trainer's sockets and lock files open.
    die_with_parent()
    torch.set_num_threads(1)
    if begun is not None:
        begun.release()
        while signal.sigtimedwait(SIGNALS, 0) is not None:
            pass  # a signal from before the process group of its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def is_loaders_death(error: Exception) -> bool:
    """Whether torch raises an error because a loader process has ended before its time."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
