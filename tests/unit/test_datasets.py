"""The bundled data sets and the wrapper through which the trainer reads any data set."""

from __future__ import annotations

import fcntl
import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from elastic_train.errors import DatasetMissing, UsageError
from elastic_train.training import datasets
from elastic_train.training.augment import Augmentation
from elastic_train.training.datasets import SyntheticImages, TensorImages
from elastic_train.training.epoch_dataset import EpochDataset, as_fetched
from elastic_train.training.sampler import StepSampler
from elastic_train.training.tasks import Task
from tests.processes import forkserver

CIFAR10_MINI = Path(__file__).parents[2].parent / "shared/data/cifar10-mini"
needs_cifar10_mini = pytest.mark.skipif(not CIFAR10_MINI.is_dir(), reason="cifar10-mini is not here")


@dataclass(frozen=True)
class MicroBatch:
    epoch: int
    indices: npt.NDArray[np.int64]


class MicroBatches:
    """Stands in for the sampler."""

    def __init__(self, epoch: int, shares: list[list[int]]) -> None:
        self._micro_batches = [MicroBatch(epoch, np.array(share, dtype=np.int64)) for share in shares]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._micro_batches)

    def __len__(self) -> int:
        return len(self._micro_batches)


def read(dataset: Dataset[Any], epoch: int, shares: list[list[int]], num_workers: int = 0) -> list[Any]:
    loader = DataLoader(
        EpochDataset(dataset, seed=3),
        batch_sampler=MicroBatches(epoch, shares),  # type: ignore[arg-type]  # torch expects lists of integers
        collate_fn=as_fetched,
        num_workers=num_workers,
    )
    return list(loader)


class Noisy(Dataset[Any]):
    """Draws from all three global generators, as users' transforms do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        return index, random.random(), float(np.random.rand()), torch.rand(2)


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class TestDigits:
    data = datasets.load("digits", Path("nowhere"))

    def test_sizes_and_balance(self) -> None:
        assert isinstance(self.data.train, TensorImages)
        assert isinstance(self.data.test, TensorImages)
        assert (len(self.data.train), len(self.data.test)) == (1437, 360)
        assert torch.bincount(self.data.test.labels).tolist() == [36] * 10
        counts = torch.bincount(self.data.train.labels)
        assert counts.min() >= 138
        assert counts.max() <= 147

    def test_the_split_never_changes(self) -> None:
        with np.load(datasets.DIGITS_PATH, allow_pickle=False) as archive:
            images, labels = archive["images"], archive["labels"]
        positions = datasets.digits_test_positions(labels)
        assert len(set(positions.tolist())) == 360
        digest = hashlib.sha256(positions.astype("<i8").tobytes()).hexdigest()
        assert digest == "699d4bc162ba318f100285dc18c9cefe0f9294704252870572383ba59e770eda"
        # Training images are the others, in file order.
        rest = np.setdiff1d(np.arange(len(labels)), positions)
        assert isinstance(self.data.train, TensorImages)
        assert np.array_equal(self.data.train.images[:, 0].numpy(), images[rest])
        assert np.array_equal(self.data.train.labels.numpy(), labels[rest])
        content = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
        assert content == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"

    def test_normalised(self) -> None:
        assert isinstance(self.data.train, TensorImages)
        images, labels = self.data.train.gather(torch.arange(1437), epoch=0)
        assert images.shape == (1437, 1, 8, 8)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert abs(images.mean().item()) < 0.02
        assert abs(images.std().item() - 1) < 0.02

    def test_needs_neither_torchvision_nor_pil(self) -> None:
        program = (
            "import sys; from elastic_train.training.tasks import ImageClassification; "
            "task = ImageClassification('digits', 'cnn', 'data', 0); "
            "task.build_model(); task.describe(); "
            "print([m for m in ('torchvision', 'PIL', 'torch.utils.tensorboard') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "[]"

    def test_licence_is_bundled(self) -> None:
        text = datasets.DIGITS_PATH.with_name("digits.LICENSE.txt").read_text(encoding="utf-8")
        assert "CC BY 4.0" in text
        assert "10.24432/C50P49" in text


def tensor_images(augmentation: Augmentation | None) -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 9, 9), generator=generator).to(torch.uint8)
    return TensorImages(
        images,
        torch.arange(50) % 4,
        mean=(120.0, 121.0, 122.5),
        std=(60.0, 61.5, 62.0),
        augmentation=augmentation,
        seed=1,
    )


@pytest.mark.parametrize("augmentation", [None, Augmentation(shift=2, flip=True)], ids=["plain", "augmented"])
def test_a_gathered_batch_equals_its_samples_one_by_one(augmentation: Augmentation | None) -> None:
    dataset = tensor_images(augmentation)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    images, labels = dataset.gather(order, epoch=4)
    for k, index in enumerate(order.tolist()):
        image, label = dataset.gather(torch.tensor([index]), epoch=4)
        assert torch.equal(image[0], images[k])
        assert label[0] == labels[k]
        if augmentation is None:
            assert torch.equal(dataset[index][0], images[k])
            assert dataset[index][1] == labels[k]


def test_large_data_are_normalised_as_small_data_are(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tensor_images(None).gather(torch.arange(50), 0)[0]
    monkeypatch.setattr(datasets, "_FLOAT_LIMIT_BYTES", 0)
    assert torch.equal(tensor_images(None).gather(torch.arange(50), 0)[0], small)


class TestSynthetic:
    def test_a_sample_depends_on_seed_and_index_only(self) -> None:
        short, long = SyntheticImages(10, seed=5), SyntheticImages(10**12, seed=5)
        indices = torch.tensor([9, 0, 4])
        images, labels = short.gather(indices, epoch=0)
        again, same_labels = long.gather(indices, epoch=8)
        assert torch.equal(images, again)
        assert torch.equal(labels, same_labels)
        assert torch.equal(long[4][0], images[2])
        assert not torch.equal(SyntheticImages(10, seed=6).gather(indices, 0)[0], images)

    def test_every_class_occurs_and_test_is_not_training(self) -> None:
        data = datasets.synthetic(0, train_length=300, test_length=300)
        assert isinstance(data.train, SyntheticImages)
        assert isinstance(data.test, SyntheticImages)
        images, labels = data.train.gather(torch.arange(300), 0)
        assert images.shape == (300, 3, 32, 32)
        assert sorted(set(labels.tolist())) == list(range(10))
        assert not torch.equal(data.test.gather(torch.arange(300), 0)[1], labels)

    def test_index_out_of_range(self) -> None:
        with pytest.raises(IndexError):
            SyntheticImages(10)[10]


class Resized(Dataset[Any]):
    """Its items depend on what it was told of the epoch, as sizes that grow do."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float, float]] = []

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.told.append((epoch, float(torch.rand(1)), random.random()))

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.told[-1][0], index])


class Passing(Dataset[Any]):
    """One that passes on what it does not have."""

    def __init__(self, inner: Resized) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # before it is there, in a copy that is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class TestEpochDataset:
    shares: ClassVar = [[4, 2, 9], [], [7]]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_reads_micro_batches(self, num_workers: int) -> None:
        data = datasets.load("digits", Path("nowhere"))
        assert isinstance(data.train, TensorImages)
        fetched = read(data.train, 6, self.shares, num_workers)
        assert [micro_batch.indices.tolist() for micro_batch, _ in fetched] == self.shares
        assert [micro_batch.epoch for micro_batch, _ in fetched] == [6, 6, 6]
        assert fetched[1][1] is None
        images, labels = fetched[0][1]
        assert torch.equal(images, data.train.gather(torch.tensor([4, 2, 9]), 6)[0])
        assert torch.equal(labels, data.train.labels[[4, 2, 9]])

    def test_a_set_epoch_that_takes_more_than_the_epoch_is_the_functions_own(self) -> None:
        class Sized(TensorDataset):
            def set_epoch(self, epoch: int, size: int) -> None:
                raise AssertionError("nobody knows the size")

        [(_, (indices,))] = read(Sized(torch.arange(8)), 1, [[3, 5]])
        assert indices.tolist() == [3, 5]

    def test_items_do_not_depend_on_batch_worker_or_history(self) -> None:
        torch.manual_seed(0)
        expected = {}
        for _, (indices, *draws) in read(Noisy(), 1, [list(range(20))]):
            for k, index in enumerate(indices.tolist()):
                expected[index] = [draw[k] for draw in draws]
        torch.rand(100)
        for num_workers in (0, 2):
            for _, (indices, *draws) in read(Noisy(), 1, [[19, 3], [5], [11, 3, 0]], num_workers):
                for k, index in enumerate(indices.tolist()):
                    assert all(torch.equal(draw[k], e) for draw, e in zip(draws, expected[index], strict=True))
        ((_, (_, next_epoch, *_)),) = read(Noisy(), 2, [[0]])
        assert next_epoch[0] != expected[0][0]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_data_set_knows_the_epoch_in_every_process(self, num_workers: int) -> None:
        """What the training function sets would be seen by none that is forked already."""
        inner = Resized()
        for epoch in (3, 4):
            batches = [batch for _, batch in read(Passing(inner), epoch, [[0, 1], [], [2], [3], [4]], num_workers)]
            assert [batch.tolist() for batch in batches if batch is not None] == [
                [[epoch, index] for index in share] for share in ([0, 1], [2], [3], [4])
            ]

    def test_a_data_set_is_told_once_in_an_epoch_and_draws_alike(self) -> None:
        found = []
        for _ in range(2):
            dataset = Resized()
            reader = EpochDataset(dataset, seed=3)
            before = torch.get_rng_state(), random.getstate()
            for epoch in (2, 2, 3):
                reader.__getitems__(MicroBatch(epoch, np.array([0])))
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]
            found.append(dataset.told)
            torch.rand(1)
            random.random()
        assert [epoch for epoch, *_ in found[0]] == [2, 3]
        assert found[0] == found[1]

    @pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random(), lambda _: float(np.random.normal())])
    @pytest.mark.parametrize("is_whole", [False, True], ids=["collate", "gather"])
    def test_what_a_batch_draws_is_the_same_in_every_world(self, is_whole: bool, draw: Any) -> None:
        """Of ordered micro-batches. Only some of them draw, the first of a process perhaps not; other draws are between
        them, which do not notice."""

        def noisy(samples: list[int]) -> tuple[list[int], float | None]:
            return samples, float(draw(1)) if max(samples) % 3 else None

        class Whole(Noisy):
            def gather(self, indices: Tensor, _epoch: int) -> Any:
                return noisy(indices.tolist())

        def read_all(world_size: int) -> dict[tuple[int, int], Any]:
            found = {}
            for rank in range(world_size):
                random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
                expected = [random.random(), float(np.random.normal()), float(torch.rand(1))]
                random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
                data = Whole() if is_whole else Numbers(20)
                reader = EpochDataset(data, seed=3, collate=noisy)
                for epoch in (0, 1):
                    micro_batches = StepSampler(
                        length=20, seed=0, epoch=epoch, samples_done=0, steps_done=0, global_batch_size=8, rank=rank,
                        world_size=world_size, virtual_ranks=4, micro_batch_size=None, max_steps=None,
                    )  # fmt: skip
                    for micro_batch, batch in map(reader.__getitems__, micro_batches):
                        found[epoch, micro_batch.step, micro_batch.shard] = batch
                assert [random.random(), float(np.random.normal()), float(torch.rand(1))] == expected
            return found

        alone = read_all(1)
        drawn = [batch[1] for batch in alone.values() if batch[1] is not None]
        assert 10 < len(set(drawn)) == len(drawn) < len(alone)
        assert read_all(2) == read_all(4) == alone

    def test_a_batch_that_is_made_again_is_made_of_fresh_items(self) -> None:
        def spoil(samples: list[list[int]]) -> tuple[list[list[int]], float]:
            for sample in samples:
                sample.append(0)
            return samples, random.random() if len(seen) > 1 else 0.0

        class Lists(Numbers):
            def __getitem__(self, index: int) -> Any:
                seen.append(index)
                return [index]

        seen: list[int] = []
        reader = EpochDataset(Lists(20), seed=3, collate=spoil)
        assert reader.read(np.array([5])) == ([[5, 0]], 0.0)
        assert reader.read(np.array([6]))[0] == [[6, 0]]
        assert seen == [5, 6, 6], "the draw was seen"

    def test_a_tensor_dataset_gives_the_same_batch_without_its_items(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = TensorDataset(torch.rand(9, 2, 3), torch.arange(9), torch.rand(9).to(torch.bfloat16))
        micro_batch = MicroBatch(0, np.array([7, 0, 7, 3]))
        expected = default_collate([dataset[index] for index in micro_batch.indices.tolist()])
        own = EpochDataset(dataset, seed=3, collate=lambda samples: samples).__getitems__(micro_batch)[1]
        assert [int(label) for _, label, _ in own] == [7, 0, 7, 3]
        monkeypatch.delattr(TensorDataset, "__getitem__")
        batch = EpochDataset(dataset, seed=3, collate=Task().collate).__getitems__(micro_batch)[1]
        assert type(batch) is type(expected)
        for tensor, wanted in zip(batch, expected, strict=True):
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor, wanted)

    def test_a_subclass_of_tensor_dataset_is_read_item_by_item(self) -> None:
        class Doubled(TensorDataset):
            def __getitem__(self, index: int) -> tuple[Tensor, ...]:
                return tuple(2 * tensor for tensor in super().__getitem__(index))

        [(_, [batch])] = read(Doubled(torch.arange(5)), 0, [[4, 1]])
        assert batch.tolist() == [8, 2]

    def test_refuses_an_iterable_data_set(self) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(())

        with pytest.raises(UsageError, match="Stream is an IterableDataset"):
            EpochDataset(Stream(), seed=0)

    def test_refuses_a_loader_and_says_what_to_give(self) -> None:
        loader: Any = DataLoader(TensorDataset(torch.ones(3)))
        with pytest.raises(UsageError, match=r"give its data set \(loader.dataset\)"):
            EpochDataset(loader, seed=0)

    def test_refuses_a_tensor_and_says_what_to_give(self) -> None:
        tensor: Any = torch.ones(3, 2)
        with pytest.raises(UsageError, match=r"a tensor was given .*: give TensorDataset\(tensor\)"):
            EpochDataset(tensor, seed=0)

    def test_whole_batches_are_asked_of_the_data_set_s_own_class_alone(self) -> None:
        class Negated(Dataset[Any]):
            """Passes on all but its items."""

            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

            def __len__(self) -> int:
                return len(self.inner)

            def __getitem__(self, index: int) -> Tensor:
                image: Tensor = -self.inner[index][0]
                return image

        inner = SyntheticImages(10)
        batch = EpochDataset(Negated(inner), seed=0).read(np.array([3, 4]))
        assert torch.equal(batch, -inner.gather(torch.tensor([3, 4]), 0)[0])


class TestMissing:
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
    def test_torchvision_data(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(DatasetMissing) as caught:
            datasets.load(name, tmp_path / "absent")
        message = str(caught.value)
        assert "\n" not in message
        assert name in message
        assert str(tmp_path / "absent") in message
        assert "--download" in message
        assert "--data-dir" in message

    def test_damaged_data(self, tmp_path: Path) -> None:
        raw = tmp_path / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0")
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"")
        with pytest.raises(DatasetMissing, match="damaged"):
            datasets.load("mnist", tmp_path)

    def test_imagefolder(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetMissing, match=f"no folder {tmp_path}/train: --data-dir"):
            datasets.load("imagefolder", tmp_path)
        (tmp_path / "train").mkdir()
        with pytest.raises(DatasetMissing, match=r"test \(or val\): --data-dir"):
            datasets.load("imagefolder", tmp_path)
        (tmp_path / "val").mkdir()
        with pytest.raises(DatasetMissing, match="no images"):
            datasets.load("imagefolder", tmp_path)


def test_mnist_files_become_one_tensor(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, length in (("train", 3), ("t10k", 2)):
        pixels = np.arange(length * 784).reshape(length, 28, 28).astype(np.uint8)
        sizes = np.array([length, 28, 28], dtype=">i4")
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes.tobytes() + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:1].tobytes() + bytes(range(length)))
    data = datasets.load("mnist", tmp_path)
    assert isinstance(data.test, TensorImages)
    assert data.test.images.shape == (2, 1, 28, 28)
    assert data.test.labels.tolist() == [0, 1]
    assert data.test.gather(torch.tensor([1]), 0)[0].shape == (1, 1, 28, 28)


@needs_cifar10_mini
class TestImageFolder:
    def test_reads_small_pictures_at_their_own_size(self) -> None:
        data = datasets.load("imagefolder", CIFAR10_MINI)
        assert (data.channels, data.classes, data.image_size) == (3, 10, 32)
        ((_, (images, labels)),) = read(data.train, 0, [[0, 1, 2]])
        assert images.shape == (3, 3, 32, 32)
        assert labels.dtype == torch.int64
        assert data.test is not None
        ((_, (test_images, _)),) = read(data.test, 0, [[5]])
        ((_, (same, _)),) = read(data.test, 1, [[5]])
        assert torch.equal(test_images, same)

    def test_augmentation_does_not_depend_on_the_process(self) -> None:
        data = datasets.load("imagefolder", CIFAR10_MINI)
        here = read(data.train, 2, [[3, 700, 42, 5]])[0][1][0]
        there = read(data.train, 2, [[42, 3], [700], [5]], num_workers=2)
        assert torch.equal(there[0][1][0], here[[2, 0]])
        assert torch.equal(there[1][1][0], here[[1]])
        assert not torch.equal(read(data.train, 3, [[3]])[0][1][0], here[[0]])


def _download_with_a_fake(data_dir: Path, barrier: Any) -> None:
    """In a process of its own: what two ranks of one node do, with a fetch that would notice company."""

    def fetch(name: str, data_dir: Path) -> None:
        if not (data_dir / name).exists():
            (data_dir / f"{name}.part").touch(exist_ok=False)
            with (data_dir / "log").open("a") as log:
                log.write("fetched\n")
            barrier.wait_a_little()
            (data_dir / f"{name}.part").rename(data_dir / name)

    datasets._fetch = fetch
    barrier.meet()
    datasets.download("mnist", data_dir)
    if not (data_dir / "mnist").exists():
        raise SystemExit("download returned before the data was there")


class _Barrier:
    def __init__(self, context: Any) -> None:
        self._barrier = context.Barrier(2)
        self._never = context.Event()

    def meet(self) -> None:
        self._barrier.wait(timeout=60)

    def wait_a_little(self) -> None:
        self._never.wait(0.3)


class TestDownload:
    def test_one_process_fetches_and_the_other_waits(self, tmp_path: Path) -> None:
        context = forkserver()
        barrier = _Barrier(context)
        data_dir = tmp_path / "new" / "data"
        processes = [context.Process(target=_download_with_a_fake, args=(data_dir, barrier)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=90)
        assert [process.exitcode for process in processes] == [0, 0]
        assert (data_dir / "log").read_text() == "fetched\n"

    def test_waiting_for_the_lock_has_an_end(self, tmp_path: Path) -> None:
        lock = tmp_path / ".download.lock"
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(DatasetMissing, match=r"cannot download mnist .*still held .* after 0 seconds"):
                datasets.download("mnist", tmp_path, timeout=timedelta(0))

    def test_a_failed_download_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fetch(name: str, into: Path) -> None:
            raise RuntimeError("Error downloading x:\nlong story")

        monkeypatch.setattr(datasets, "_fetch", fetch)
        with pytest.raises(DatasetMissing) as caught:
            datasets.download("cifar10", tmp_path)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)
