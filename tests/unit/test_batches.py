"""The batches of a world, with and without loader processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from elastic_train.config import Config
from elastic_train.elastic.whole_steps import stand_in_batch
from elastic_train.elastic.worker import make_state
from elastic_train.stopping import die_with_parent
from elastic_train.training import loader_processes
from elastic_train.training.batches import pinned, steps
from elastic_train.training.epoch_dataset import EpochDataset
from elastic_train.training.loader_processes import is_loaders_death, open_loader, read_apart
from elastic_train.training.sampler import MicroBatch
from elastic_train.training.state import TrainState
from elastic_train.training.tasks import ImageClassification, Task
from elastic_train.world import World
from tests.unit.test_liveness import make_member

CPU = torch.device("cpu")
MEMBER = make_member(0)


def read(num_workers: int, rank: int) -> list[list[tuple[Any, Any]]]:
    config = Config(model="mlp", global_batch_size=500, epochs=2, micro_batch_size=100, num_workers=num_workers)
    task = ImageClassification("digits", "mlp", Path(), 0)
    state = make_state(config, task, CPU)
    world = World(rank=rank, generation=0, members=(MEMBER, MEMBER))
    return list(steps(task.train_set, task.collate, state, world, config, CPU))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_list_of_micro_batches_per_step(rank: int) -> None:
    found = read(0, rank)
    assert [sum(len(micro_batch.indices) for micro_batch, _ in step) for step in found] == 2 * [
        250, 250, 219 - rank  # half of 500 and of the 437 that are left
    ]  # fmt: skip
    for number, step in enumerate(found, start=1):
        assert [micro_batch.is_last for micro_batch, _ in step] == [False] * (len(step) - 1) + [True]
        assert all(micro_batch.step == number for micro_batch, _ in step)


def test_a_static_graph_has_one_pass_a_step_though_its_share_has_grown() -> None:
    """After the loss of a peer. DDP's first pass of a static graph fails where it is not the step's only one."""
    config = Config(model="mlp", global_batch_size=500, epochs=1, static_graph=True)
    task = ImageClassification("digits", "mlp", Path(), 0)
    state = make_state(config, task, CPU)
    state.micro_batch_size = 167  # of three ranks
    found = steps(task.train_set, task.collate, state, World(0, 1, (MEMBER, MEMBER)), config, CPU)
    assert [[len(micro_batch.indices) for micro_batch, _ in step] for step in found] == [[250], [250], [219]]


def require_equal(steps_of_one: list[list[tuple[Any, Any]]], steps_of_other: list[list[tuple[Any, Any]]]) -> None:
    for step, same in zip(steps_of_one, steps_of_other, strict=True):
        for (micro_batch, batch), (other, other_batch) in zip(step, same, strict=True):
            assert micro_batch.indices.tolist() == other.indices.tolist()
            assert all(torch.equal(one, another) for one, another in zip(batch, other_batch, strict=True))


def test_a_loader_process_that_never_begins_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was forked while another thread held a lock of the interpreter."""
    expected = read(0, 1)

    def hang_once() -> None:
        with suppress(FileExistsError):
            (tmp_path / "hung").touch(exist_ok=False)
            while True:
                time.sleep(60)
        die_with_parent()

    monkeypatch.setattr(loader_processes, "die_with_parent", hang_once)
    monkeypatch.setattr(loader_processes, "BEGIN_SECONDS", 2.0)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # of 5 s: how long an end may take
    others = set(multiprocessing.active_children())
    with pytest.warns(UserWarning, match="1 of 2 loader processes had not begun after 2 s"):
        found = read(2, 1)
    require_equal(expected, found)
    assert set(multiprocessing.active_children()) <= others


class Gated(Dataset[torch.Tensor]):
    """All but the first item is read when the gate opens; who comes there says so."""

    def __init__(self) -> None:
        self.gate, self.came = multiprocessing.Event(), multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 0:
            self.came.release()
            self.gate.wait()
        return torch.tensor([index])


def let_go(dataset: Gated) -> set[Any]:
    """The processes of a loader that was let go while each of them was reading."""
    before = set(multiprocessing.active_children())
    parts = [MicroBatch(0, 0, 0, np.array([index]), 1, is_last=True) for index in range(4)]
    batches = open_loader(
        EpochDataset(dataset, seed=1), parts, Config(num_workers=2), pytest.fail, pin_memory=torch.cuda.is_available()
    )
    assert next(batches)[1].tolist() == [[0]]
    for _ in range(2):
        assert dataset.came.acquire(timeout=60)
    del batches
    return set(multiprocessing.active_children()) - before


def test_a_loader_is_let_go_while_its_processes_read() -> None:
    """The other workers wait for this one in the agreement on the next world."""
    dataset = Gated()
    processes = let_go(dataset)
    assert len(processes) == 2
    assert all(process.is_alive() for process in processes), "nor are they killed"
    require_equal(read(0, 1), read(2, 1))
    dataset.gate.set()
    for thread in loader_processes._ending:
        thread.join()
    assert {process.exitcode for process in processes} == {0}


def test_a_loaders_death_is_known_by_torchs_words() -> None:
    before = set(multiprocessing.active_children())
    parts = [MicroBatch(0, 0, 0, np.array([index]), 1, is_last=True) for index in range(40)]
    data = EpochDataset(TensorDataset(torch.arange(40)), seed=1)
    batches = open_loader(data, parts, Config(num_workers=1), pytest.fail)
    next(batches)
    [process] = set(multiprocessing.active_children()) - before

    def die() -> None:
        process.kill()
        time.sleep(60)  # torch's handler of SIGCHLD ends it

    with pytest.raises(RuntimeError) as raised:
        die()
    del batches  # torch would raise again
    assert is_loaders_death(raised.value)


def test_a_process_of_a_loader_that_was_let_go_may_die() -> None:
    """torch raises in the main thread where one of a loader's processes dies, until all have ended."""
    first, second = sorted(let_go(Gated()), key=lambda process: process.pid)
    second.kill()  # the first one is waited for, and no thread takes note of this one's end
    os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)
    signal.raise_signal(signal.SIGCHLD)  # torch looks at its processes now, if it has not done so
    first.kill()  # the gate would wait for the other one to come through it
    loader_processes._ending[-1].join()
    assert {first.exitcode, second.exitcode} == {-signal.SIGKILL}


def test_torch_watches_the_processes_of_a_loader_by_the_private_names_that_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a loader that is let go is watched until its end, or its end fails in a thread."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    batches: Any = iter(DataLoader(TensorDataset(torch.arange(2)), num_workers=1))
    assert batches._worker_pids_set
    loader_processes.end_watch(batches)
    assert not batches._worker_pids_set
    with pytest.raises(ValueError, match="Cannot find worker information"):
        torch._C._remove_worker_pids(id(batches))
    thread = threading.Thread(target=batches._shutdown_workers)
    thread.start()
    thread.join()
    assert failed == []


def test_the_processes_of_one_loader_at_most_end_beside_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds batches, and a data set."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # of 5 s, after which they are killed
    first, second, _ = (let_go(Gated()) for _ in range(3))
    assert not any(process.is_alive() for process in first)
    for thread in loader_processes._ending:
        thread.join()
    assert not any(process.is_alive() for process in second)


AT_THE_END = """
import torch
from tests.unit.test_batches import Gated, let_go

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
print(*(process.pid for process in let_go(Gated())))
"""


def test_a_process_that_ends_ends_those_of_a_loader_that_it_has_let_go() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stderr == ""
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


class Pair(NamedTuple):
    inputs: Any
    labels: Any


class Pinnable:
    """What a collate function of one's own may give."""

    def pin_memory(self) -> str:
        return "pinned"


def collate_or_nothing(samples: list[torch.Tensor]) -> Any:
    """As a common one, which leaves out samples that could not be read."""
    found = [one for one in samples if one[0] < 2]
    return default_collate(found) if found else None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_nothing_is_no_rank_without_samples(num_workers: int) -> None:
    """Else the first sample would be trained in its place, and count as the whole share."""
    model, config = torch.nn.Linear(2, 1), Config(num_workers=num_workers, global_batch_size=1, epochs=1)
    state = TrainState(model, torch.optim.SGD(model.parameters()), length=4, global_batch_size=1, epochs=1)
    world = World(rank=0, generation=0, members=(MEMBER,))
    with pytest.raises(TypeError, match=r"^the batch of sample [23] of the data set is None: "):
        list(steps(Pids(), collate_or_nothing, state, world, config, CPU))


class PinnableTensor(torch.Tensor):
    def pin_memory(self, _device: Any = None) -> Any:
        return "pinned"


def test_what_is_on_a_device_already_is_not_pinned() -> None:
    """Told from the device alone, so that one without a GPU is as good."""
    here, there = torch.ones(2).as_subclass(PinnableTensor), torch.ones(2, device="meta")
    found = pinned([Pair(here, there), {"a": (there, 3)}, Pinnable(), None])
    assert found == [Pair("pinned", there), {"a": (there, 3)}, "pinned", None]
    assert found[0].labels is there
    assert found[1]["a"][0] is there


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_data_on_the_gpu_and_beside_it(place: str) -> None:
    device = torch.device("cuda", 0)
    data = TensorDataset(torch.ones(6, 2, device=place), torch.zeros(6, dtype=torch.int64))
    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()), length=6, global_batch_size=4, epochs=1)
    world = World(rank=0, generation=0, members=(MEMBER,))
    config = Config(global_batch_size=4, epochs=1)
    found = [batch for ((_, batch),) in steps(data, Task.collate, state, world, config, device)]
    assert len(found) == 2
    for inputs, labels in found:
        assert (inputs.device.type, inputs.is_pinned()) == (place, place == "cpu")
        assert labels.is_pinned()


class Pids(Dataset[torch.Tensor]):
    """An item says which process has read it, and what it draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid(), *torch.randint(10**6, (2,)).tolist()])


def test_what_is_read_beside_training_is_read_in_a_process_of_its_own_that_has_ended() -> None:
    parts = [np.arange(2), np.array([3])]
    here, there = (
        list(read_apart(EpochDataset(Pids(), seed=1), parts, Config(num_workers=number), pytest.fail))
        for number in (0, 2)
    )
    assert {row[1] for batch in here for row in batch.tolist()} == {os.getpid()}
    [reader] = {row[1] for batch in there for row in batch.tolist()}
    assert reader not in {os.getpid(), *(child.pid for child in multiprocessing.active_children())}
    assert [batch[:, [0, 2, 3]].tolist() for batch in here] == [batch[:, [0, 2, 3]].tolist() for batch in there]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stand_in_is_another_batch_each_time_and_draws_nothing_here(num_workers: int) -> None:
    task = SimpleNamespace(train_set=Pids(), collate=default_collate)
    worker: Any = SimpleNamespace(
        config=Config(num_workers=num_workers), task=task, reporter=SimpleNamespace(warn=pytest.fail)
    )
    make = stand_in_batch(worker)
    before = torch.get_rng_state()
    first = make()
    expected = first.clone()
    first.zero_()  # as a loss may change its batch
    assert torch.equal(make(), expected)
    assert torch.equal(torch.get_rng_state(), before)


class Permuted(Dataset[torch.Tensor]):
    """It has an order from its first epoch on. No two of them are equal, and none can be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.told: list[int] = []

    def __eq__(self, other: object) -> bool:
        return False

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        self.order = [(index + epoch) % 5 for index in range(5)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.told[-1], self.order[index]])


@pytest.mark.parametrize("is_first", [True, False], ids=["before its first batch", "after it"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_without_samples_reads_a_data_set_that_is_told_its_epoch(num_workers: int, is_first: bool) -> None:
    """As a newcomer does in its first step; and in steps that are cut so that one rank has none in some."""
    data, config = Permuted(), Config(num_workers=num_workers, global_batch_size=2, epochs=3)
    worker: Any = SimpleNamespace(
        config=config,
        task=SimpleNamespace(train_set=data, collate=default_collate),
        reporter=SimpleNamespace(warn=pytest.fail),
    )
    make = stand_in_batch(worker)
    if is_first:
        assert make().tolist() == [[0, 0]]
    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()), length=5, global_batch_size=2, epochs=3)
    state.epoch, state.step = 1, 3
    world = World(rank=0, generation=0, members=(MEMBER,))
    found = []
    for ((_, batch),) in steps(data, default_collate, state, world, config, CPU):
        found += batch.tolist()
        assert make().shape == (1, 2)
    assert sorted(found) == [[epoch, item] for epoch in (1, 2) for item in range(5)]
    if num_workers == 0:
        assert data.told == [*([0] if is_first else []), 1, 2], "once in each epoch"
