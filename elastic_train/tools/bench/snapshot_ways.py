"""One way to save a state, measured in a process of its own: `python -m elastic_train.tools.bench.snapshot_ways`.

The process trains (a product of matrices over and over) and saves a state of so many bytes beside that. What a save
costs is the time until it is durable, less what the steps of that time take by themselves: by the median of those right
before it. First a core is left idle, then the steps have all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_train.errors import SnapshotError
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.system import num_cores

NUM_TENSORS = 64
SIDE = 512
"""of the matrices of a step: some milliseconds"""
BASELINE_SECONDS = 1.0
"""of steps by themselves, before each save"""

Save = Callable[[dict[str, Any], int], Callable[[], bool]]
"""begins to save, as a step; blocks as long as it has to. Gives what says whether it is durable"""


@dataclass(frozen=True)
class Order:
    """What one process is to measure."""

    way: str
    num_bytes: int
    calls: int
    """saves with a core idle, and as many with none"""
    folder: str


@dataclass(frozen=True)
class Cost:
    """Of one way; seconds by call."""

    blocked: list[float]
    """with a core idle; the first one comes with all that is done once"""
    total: list[float]
    """until durable, with a core idle"""
    lost_idle: list[float]
    lost_busy: list[float]
    extra_bytes: int
    """at the peak of all calls"""
    memcpy: float
    """of the same bytes, into memory that is there"""


class OurWriter:
    """Also makes its buffers beside the steps, as training does."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._writer = SnapshotWriter(folder, keep=1, host="bench", run_uid="bench", task={})
        started = time.perf_counter()
        self._writer.prepare(state)
        self.prepared = time.perf_counter() - started

    def __call__(self, state: dict[str, Any], step: int) -> Callable[[], bool]:
        position: dict[str, Any] = {"step": step, "epoch": 0, "samples_done": 0, "generation": 0, "world_size": 1}
        assert self._writer.save_in_background(state, **position), "one at a time"
        return self._is_durable

    def _is_durable(self) -> bool:
        """Raises: SnapshotError: it was not written."""
        if self._writer.is_busy():
            return False
        for outcome in self._writer.collect():
            if isinstance(outcome, SnapshotError):
                raise outcome
        return True


class TorchSave:
    """torch.save and fsync."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.pt"

    def __call__(self, state: dict[str, Any], _step: int) -> Callable[[], bool]:
        with open(self._path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True


class Dcp:
    """torch.distributed.checkpoint, without a process group."""

    def __init__(self, folder: Path, *, is_async: bool = False, keeps_stager: bool = False) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        self._make_writer, self._save, self._async_save = FileSystemWriter, save, async_save
        self._folder = folder
        self._is_async = is_async
        self._stager = _stager() if keeps_stager else None

    def __call__(self, state: dict[str, Any], step: int) -> Callable[[], bool]:
        writer = self._make_writer(self._folder / f"step-{step}")
        if not self._is_async:
            self._save(state, storage_writer=writer, no_dist=True)
            return lambda: True
        future = self._async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        assert isinstance(future, Future)
        return lambda: future.done() and future.result() is not None


def _stager() -> Any:
    """One that keeps its buffers from call to call."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(StagingOptions(False, False, False, False))


def measure(order: Order) -> Cost:
    folder = Path(order.folder)
    per_tensor = order.num_bytes // NUM_TENSORS // 4
    state = {"model": {f"w{number}": torch.full((per_tensor,), float(number)) for number in range(NUM_TENSORS)}}
    (Path("/proc/self/clear_refs")).write_text("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    save, prepared = way_of(order.way, folder, state)
    blocked, total, lost_idle, lost_busy = [], [], [], []
    for call in range(2 * order.calls):
        is_busy = call >= order.calls
        torch.set_num_threads(num_cores() if is_busy else max(1, num_cores() - 1))
        held_up, durable, lost = save_once(save, state, call)
        if is_busy:
            lost_busy.append(lost)
        else:
            blocked.append(held_up + (prepared if call == 0 else 0.0))
            total.append(durable)
            lost_idle.append(lost)
        remove_old(folder)
    extra = max(0, status_bytes("VmHWM") - before)
    return Cost(blocked, total, lost_idle, lost_busy, extra, copy_seconds(state["model"]))


def way_of(name: str, folder: Path, state: dict[str, Any]) -> tuple[Save, float]:
    """And the seconds that it has taken already."""
    if name == "ours":
        ours = OurWriter(folder, state)
        return ours, ours.prepared
    ways: dict[str, Callable[[], Save]] = {
        "torch.save": lambda: TorchSave(folder),
        "DCP save": lambda: Dcp(folder),
        "DCP async_save": lambda: Dcp(folder, is_async=True),
        "DCP async_save, cached stager": lambda: Dcp(folder, is_async=True, keeps_stager=True),
    }
    return ways[name](), 0.0


def save_once(save: Save, state: dict[str, Any], call: int) -> tuple[float, float, float]:
    """Seconds that it held training up, until it was durable, and of training that it cost."""
    matrix = torch.ones(SIDE, SIDE)

    def step() -> None:
        matrix @ matrix

    alone = []
    until = time.perf_counter() + BASELINE_SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        step()
        alone.append(time.perf_counter() - started)
    started = time.perf_counter()
    is_durable = save(state, call)
    blocked = time.perf_counter() - started
    steps = 0
    while not is_durable():
        step()
        steps += 1
    total = time.perf_counter() - started
    return blocked, total, total - steps * statistics.median(alone)


def copy_seconds(tensors: dict[str, torch.Tensor]) -> float:
    """The fastest of three."""
    targets = [torch.zeros_like(tensor).fill_(1.0) for tensor in tensors.values()]
    found = []
    for _ in range(3):
        started = time.perf_counter()
        for target, tensor in zip(targets, tensors.values(), strict=True):
            target.copy_(tensor)
        found.append(time.perf_counter() - started)
    return min(found)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def remove_old(folder: Path) -> None:
    """What DCP has written; ours deletes by itself, and torch.save replaces."""
    for path in folder.glob("step-?"):
        shutil.rmtree(path)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Order(**json.loads(sys.argv[1]))))))
