"""The cost of a snapshot: ours beside torch.save and torch.distributed.checkpoint, one right after the other.

Each way of saving has a new process per round, so that first calls and memory peaks are its own. The process trains (it
multiplies matrices again and again) and saves a state beside that. The cost of a save is the time until it is durable,
minus the time that the steps meanwhile take by themselves, by the median of the steps right before it. At first the
steps leave a core idle, then they use all cores.

All ways write the same bytes to the same disk and flush them. A row's ratio is theirs to ours: above 1.0 ours costs
less. memcpy copies the same bytes into memory that exists already. A ratio of at least 0.8 to it means that ours takes
at most 1.25 times as long.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from elastic_train.errors import ElasticTrainError, SnapshotError
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.system import num_cores
from elastic_train.tools.bench.table import BenchRow
from elastic_train.training.state_hash import hash_of

OURS = "ours"
RIVALS = ("torch.save", "DCP save", "DCP async_save", "DCP async_save, cached stager")
CHILD_SECONDS = 300.0
LEAST_SECONDS = 0.001
"""of a loss: less is noise"""
NUM_TENSORS = 64
SIDE = 512
"""of the matrices of a step, which takes some milliseconds"""
BASELINE_SECONDS = 1.0
"""of steps alone, before each save"""

Save = Callable[[dict[str, Any], int], Callable[[], bool]]
"""begins to save a state under a step number, and blocks as long as it must; returns a test whether it is durable"""


@dataclass(frozen=True)
class Cost:
    """The cost of one way of saving; seconds by call."""

    blocked: list[float]
    """with a core idle; the first call includes all one-time work"""
    total: list[float]
    """time until durable, with a core idle"""
    lost_idle: list[float]
    lost_busy: list[float]
    extra_bytes: int
    """additional memory at the peak of all calls"""
    memcpy: float
    """of the same bytes, into existing memory, with a core idle"""
    hashed: float
    """of the same bytes, by the hash that compares the ranks' states, with a core idle; only for ours"""
    num_bytes: int


@dataclass(frozen=True)
class SnapshotEffort:
    """How much to measure."""

    num_bytes: int
    rounds: int
    calls: int
    """per process with a core idle, and as many with none"""


QUICK, THOROUGH = SnapshotEffort(120_000_000, 1, 2), SnapshotEffort(1_200_000_000, 3, 3)


def run(quick: bool) -> list[BenchRow]:
    """Measure the cost of a snapshot for each way of saving."""
    return rows_of(measure_all(QUICK if quick else THOROUGH))


def measure_all(effort: SnapshotEffort) -> dict[str, list[Cost]]:
    """Measure each way of saving once per round."""
    found: dict[str, list[Cost]] = {way: [] for way in (OURS, *RIVALS)}
    for _ in range(effort.rounds):
        for way, costs in found.items():
            costs.append(measure_way(way, effort))
    return found


def measure_way(way: str, effort: SnapshotEffort) -> Cost:
    with tempfile.TemporaryDirectory(prefix="elastic_train-bench-") as scratch:
        order = [way, str(effort.num_bytes), str(effort.calls), scratch]
        command = [sys.executable, "-W", "ignore", "-m", "elastic_train.tools.bench.snapshot_cost", *order]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise ElasticTrainError(f"the measurement of {way} ended with code {done.returncode}: {last[0]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(found: Mapping[str, Sequence[Cost]]) -> list[BenchRow]:
    ours = found[OURS]
    rows = []
    for name, unit, cost in _METRICS:
        mine = [cost(one) for one in ours]
        if name.startswith("held up"):
            rows.append(BenchRow.of_costs(f"{name}: memcpy", mine, [one.memcpy for one in ours], unit))
        for rival in RIVALS:
            theirs = [cost(one) for one in found[rival]]
            rows.append(BenchRow.of_costs(f"{name}: {rival}", mine, theirs, unit))
    hashes = [one.num_bytes / one.hashed / 1e9 for one in ours]
    copies = [one.num_bytes / one.memcpy / 1e9 for one in ours]
    return [*rows, BenchRow.of_rates("hash of a state: memcpy", hashes, copies, "GB/s")]


def _lost(seconds: Sequence[float]) -> float:
    return max(LEAST_SECONDS, statistics.median(seconds))


_METRICS: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
    ("held up by the first call", "s", lambda cost: cost.blocked[0]),
    ("held up by later calls", "s", lambda cost: statistics.median(cost.blocked[1:])),
    ("until durable", "s", lambda cost: statistics.median(cost.total)),
    ("training lost, a core idle", "s", lambda cost: _lost(cost.lost_idle)),
    ("training lost, all cores busy", "s", lambda cost: _lost(cost.lost_busy)),
    ("memory at the peak", "GB", lambda cost: max(1, cost.extra_bytes) / 1e9),
)


# --- in a process of its own ------------------------------------------------------------------------------------------


class OurWriter:
    """Our writer, which prepares its buffers at the start, as in training."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._writer = SnapshotWriter(folder, keep=1, host="bench", run_uid="bench", task={})
        started = time.perf_counter()
        self._writer.prepare(state)
        self.prepared = time.perf_counter() - started

    def __call__(self, state: dict[str, Any], step: int) -> Callable[[], bool]:
        position: dict[str, Any] = {"step": step, "epoch": 0, "samples_done": 0, "generation": 0, "world_size": 1}
        is_taken = self._writer.save_in_background(state, **position)
        assert is_taken, "one at a time"
        return self._is_durable

    def _is_durable(self) -> bool:
        """Return whether the snapshot is durable. Raises: SnapshotError: it was not written."""
        if self._writer.is_busy():
            return False
        for outcome in self._writer.collect():
            if isinstance(outcome, SnapshotError):
                raise outcome
        return True


def torch_save(folder: Path, state: dict[str, Any], _step: int) -> Callable[[], bool]:
    """Save by torch.save and fsync."""
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: True


def dcp_save(folder: Path, state: dict[str, Any], step: int) -> Callable[[], bool]:
    """Save by torch.distributed.checkpoint, without a process group."""
    save(state, storage_writer=FileSystemWriter(folder / f"step-{step}"), no_dist=True)
    return lambda: True


def dcp_async_save(folder: Path, stager: DefaultStager | None, state: dict[str, Any], step: int) -> Callable[[], bool]:
    """torch.distributed.checkpoint beside training; a `stager` keeps its buffers from call to call."""
    writer = FileSystemWriter(folder / f"step-{step}")
    future = async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    assert isinstance(future, Future)
    return lambda: future.done() and future.result() is not None


def measure(way: str, num_bytes: int, calls: int, folder: Path) -> Cost:
    """Measure `calls` saves with a core idle, and as many with none."""
    per_tensor = num_bytes // NUM_TENSORS // 4
    state = {"model": {f"w{number}": torch.full((per_tensor,), float(number)) for number in range(NUM_TENSORS)}}
    (Path("/proc/self/clear_refs")).write_text("5")  # resets the peak of memory
    before = status_bytes("VmRSS")
    save, prepared = way_of(way, folder, state)
    blocked, total, lost_idle, lost_busy = [], [], [], []
    idle = max(1, num_cores() - 1)
    for call in range(2 * calls):
        is_busy = call >= calls
        torch.set_num_threads(num_cores() if is_busy else idle)
        held_up, durable, lost = save_once(save, state, call)
        if is_busy:
            lost_busy.append(lost)
        else:
            blocked.append(held_up + (prepared if call == 0 else 0.0))
            total.append(durable)
            lost_idle.append(lost)
        remove_old(folder)
    extra = max(0, status_bytes("VmHWM") - before)
    torch.set_num_threads(idle)  # memcpy is compared with the calls with a core idle
    hashed = fastest(lambda: hash_of(state["model"])) if way == OURS else 0.0
    return Cost(blocked, total, lost_idle, lost_busy, extra, copy_seconds(state["model"]), hashed, num_bytes)


def way_of(name: str, folder: Path, state: dict[str, Any]) -> tuple[Save, float]:
    """Return the way of saving, and the seconds that its preparation took."""
    if name == OURS:
        ours = OurWriter(folder, state)
        return ours, ours.prepared
    if name == "torch.save":
        return partial(torch_save, folder), 0.0
    if name == "DCP save":
        return partial(dcp_save, folder), 0.0
    stager = DefaultStager(StagingOptions(False, False, False, False)) if "cached" in name else None
    return partial(dcp_async_save, folder, stager), 0.0


def save_once(save: Save, state: dict[str, Any], call: int) -> tuple[float, float, float]:
    """Save once; return the seconds that it blocked training, until it was durable, and of training that it cost."""
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
    targets = [torch.zeros_like(tensor).fill_(1.0) for tensor in tensors.values()]

    def copy() -> None:
        for target, tensor in zip(targets, tensors.values(), strict=True):
            target.copy_(tensor)

    return fastest(copy)


def fastest(work: Callable[[], object]) -> float:
    """The least seconds of three runs."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def remove_old(folder: Path) -> None:
    """Remove what DCP has written; ours prunes by itself, and torch.save replaces its file."""
    for path in folder.glob("step-?"):
        shutil.rmtree(path)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))))
