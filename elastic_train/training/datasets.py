"""The bundled data sets.

`digits` is part of the package and needs neither torchvision nor PIL. Only the data sets that need these import them,
because every worker that joins waits for its imports.
"""

from __future__ import annotations

import fcntl
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic_train.config import TaskFlags
from elastic_train.errors import DatasetMissing, UsageError, first_line
from elastic_train.system import try_flock
from elastic_train.training.augment import Augmentation, augment, random_bits

DATASETS: tuple[str, ...] = get_args(get_type_hints(TaskFlags)["dataset"])

DIGITS_PATH = Path(__file__).with_name("data") / "digits.npz"
DIGITS_TEST_PER_CLASS = 36

_FLOAT_LIMIT_BYTES = 16 * 2**20  # limit for a second, normalised copy in memory: cheaper than converting each batch
_LARGEST_IMAGE = 224


@dataclass(frozen=True)
class _TorchvisionSet:
    class_name: str
    channels: int
    image_size: int
    mean: tuple[float, ...]
    """of the training images, per channel, in units of pixel / 255"""
    std: tuple[float, ...]
    augmentation: Augmentation


_TORCHVISION_SETS = {
    "mnist": _TorchvisionSet("MNIST", 1, 28, (0.1307,), (0.3081,), Augmentation(shift=2)),
    "fashion-mnist": _TorchvisionSet("FashionMNIST", 1, 28, (0.2860,), (0.3530,), Augmentation(shift=2, flip=True)),
    "cifar10": _TorchvisionSet(
        "CIFAR10",
        3,
        32,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        Augmentation(shift=4, flip=True),
    ),
}

# Errors of torchvision and the standard library for missing or truncated files.
_UNREADABLE = (RuntimeError, OSError, ValueError, EOFError, AssertionError, pickle.UnpicklingError)


@dataclass(frozen=True)
class ImageData:
    """A loaded training and test set, with the facts that a model is built from."""

    train: Dataset[Any]
    test: Dataset[Any] | None
    channels: int
    classes: int
    image_size: int
    """height and width of a training image, in pixels"""


class TensorImages(Dataset[tuple[Tensor, Tensor]]):
    """Images held in memory as uint8 (sample, channel, height, width), labels as int64 (sample,).

    `mean` and `std` are per channel, in pixel units. With an `augmentation` a batch also depends on the epoch.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.images = images
        self.labels = labels
        self._mean = torch.tensor(mean, dtype=torch.float32, device="cpu").reshape(1, -1, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32, device="cpu").reshape(1, -1, 1, 1)
        self._augmentation = augmentation
        self._seed = seed
        is_small = images.numel() * 4 <= _FLOAT_LIMIT_BYTES
        self._normalised = self._normalise(images) if is_small and augmentation is None else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample without augmentation."""
        return self._normalise(self.images[index : index + 1])[0], self.labels[index]

    def gather(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the batch of `indices` (int64) in `epoch`: float32 images and int64 labels."""
        labels = self.labels.index_select(0, indices)
        if self._normalised is not None:
            return self._normalised.index_select(0, indices), labels
        images = self.images.index_select(0, indices)
        if self._augmentation is not None:
            images = augment(images, self._augmentation, self._seed, epoch, indices.numpy())
        return self._normalise(images), labels

    def _normalise(self, images: Tensor) -> Tensor:
        # Two operations, each rounded exactly: a fused one may round differently by a sample's place in the batch.
        return images.to(torch.float32).sub_(self._mean).div_(self._std)


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Any number of generated images: the pattern of a class plus noise, a function of (seed, index).

    Sets with different `first_index` have the same patterns and other noise, such as test and training set.
    """

    shape = (3, 32, 32)
    classes = 10

    def __init__(self, length: int, *, seed: int = 0, first_index: int = 0) -> None:
        self._length = length
        self._seed = seed
        self._first_index = first_index
        self._patterns = self._noise(np.arange(self.classes, dtype=np.int64), stream=-3)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.gather(torch.tensor([index], device="cpu"), 0)
        return images[0], labels[0]

    def gather(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the batch of `indices` (int64), the same in every epoch: float32 images and int64 labels."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self._length:
            raise IndexError(f"synthetic sample index out of range [0, {self._length})")
        numbers = indices.numpy() + self._first_index
        labels = (random_bits(self._seed, 0, numbers, -1)[:, 0] % np.uint64(self.classes)).astype(np.int64)
        images = self._noise(numbers, stream=-2).mul_(2).add_(self._patterns[labels])
        return images, torch.from_numpy(labels)

    def _noise(self, numbers: npt.NDArray[np.int64], stream: int) -> Tensor:
        """Uniform in [-1, 1), float32: (sample, channel, height, width)."""
        bits = random_bits(self._seed, 0, numbers, stream, math.prod(self.shape)) >> np.uint64(40)
        values = torch.from_numpy(bits.astype(np.float32)).mul_(2**-23).sub_(1)
        return values.reshape(len(numbers), *self.shape)


def check_dataset_name(name: str) -> None:
    """Raises: UsageError: there is no data set of that name; the message has close ones."""
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(DATASETS)}"
        raise UsageError(f"--dataset {name}: no such data set; {hint}")


def load(name: str, data_dir: Path, seed: int = 0) -> ImageData:
    """Read the data set `name`. Augmentation and synthetic images are functions of `seed`. Raises: DatasetMissing."""
    if name == "digits":
        return _load_digits(seed)
    if name == "synthetic":
        return synthetic(seed)
    if name == "imagefolder":
        return _load_imagefolder(data_dir)
    return _load_torchvision(name, data_dir, seed)


def digits_test_positions(labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the positions of the test images among the 1,797 digits, ascending; all others are training images.

    A class has n images, numbered 0 to n - 1 in file order. Its test images are k * n // 36 for k = 0 to 35.
    """
    positions = []
    for digit in range(10):
        of_class = np.flatnonzero(labels == digit)
        chosen = np.arange(DIGITS_TEST_PER_CLASS) * len(of_class) // DIGITS_TEST_PER_CLASS
        positions.append(of_class[chosen])
    return np.sort(np.concatenate(positions)).astype(np.int64)


def _load_digits(seed: int) -> ImageData:
    with np.load(DIGITS_PATH, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    is_test = np.zeros(len(labels), dtype=np.bool_)
    is_test[digits_test_positions(labels)] = True

    def part(chosen: npt.NDArray[np.bool_]) -> TensorImages:
        return TensorImages(
            torch.from_numpy(images[chosen]).unsqueeze(1),
            torch.from_numpy(labels[chosen].astype(np.int64)),
            mean=(4.884,),  # pixels go from 0 to 16
            std=(6.017,),
            seed=seed,
        )

    # No augmentation: shifts by a pixel changed the test accuracy by less than one image in 360.
    return ImageData(part(~is_test), part(is_test), channels=1, classes=10, image_size=8)


def synthetic(seed: int, *, train_length: int = 4096, test_length: int = 512) -> ImageData:
    """Return a training and a test set of `SyntheticImages`."""
    train = SyntheticImages(train_length, seed=seed)
    test = SyntheticImages(test_length, seed=seed, first_index=train_length)
    channels, image_size, _ = SyntheticImages.shape
    return ImageData(train, test, channels, SyntheticImages.classes, image_size)


def _load_torchvision(name: str, data_dir: Path, seed: int) -> ImageData:
    facts = _TORCHVISION_SETS[name]

    def part(is_train: bool) -> TensorImages:
        try:
            source = _torchvision_class(name)(str(data_dir), train=is_train, download=False)
        except _UNREADABLE as exc:
            raise DatasetMissing(
                f"{name} is not in {data_dir}, or is damaged there ({first_line(exc)}): "
                "fetch it with --download, or say with --data-dir where it is"
            ) from exc
        images = torch.as_tensor(source.data, device="cpu")
        # MNIST comes as (sample, height, width), CIFAR-10 as (sample, height, width, channel).
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return TensorImages(
            images,
            torch.as_tensor(source.targets, dtype=torch.int64, device="cpu"),
            mean=tuple(255 * value for value in facts.mean),
            std=tuple(255 * value for value in facts.std),
            augmentation=facts.augmentation if is_train else None,
            seed=seed,
        )

    return ImageData(part(True), part(False), facts.channels, classes=10, image_size=facts.image_size)


def _load_imagefolder(data_dir: Path) -> ImageData:
    train_dir = data_dir / "train"
    test_dirs = [data_dir / name for name in ("test", "val") if (data_dir / name).is_dir()]
    if not train_dir.is_dir() or not test_dirs:
        absent = train_dir if not train_dir.is_dir() else f"{data_dir}/test (or val)"
        raise DatasetMissing(
            f"no folder {absent}: --data-dir must name a folder with train/CLASS/IMAGE and test/CLASS/IMAGE"
        )
    from PIL import Image
    from torchvision import datasets  # type: ignore[import-untyped]

    try:
        train, test = datasets.ImageFolder(str(train_dir)), datasets.ImageFolder(str(test_dirs[0]))
    except FileNotFoundError as exc:
        raise DatasetMissing(f"no images for --dataset imagefolder in {data_dir}: {first_line(exc)}") from exc
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes))
        raise DatasetMissing(
            f"{train_dir} and {test_dirs[0]} do not have the same classes: {', '.join(differing[:5])} in one only"
        )
    # All images get the size of the first one, which is the same on every member: they share the order of files.
    with Image.open(train.samples[0][0]) as first:
        image_size = min(*first.size, _LARGEST_IMAGE)
    train.transform, test.transform = _photo_transforms(image_size)
    return ImageData(train, test, channels=3, classes=len(train.classes), image_size=image_size)


def _photo_transforms(image_size: int) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Return the transforms for training (a random part, mirrored half of the time) and for the test (the centre)."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    to_normalised = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    # Small images are already cropped to their subject; photos lose the usual eighth at the border.
    is_small = image_size <= 64
    part = v2.RandomResizedCrop(image_size, scale=(0.5 if is_small else 0.25, 1.0))
    resized = v2.Resize(image_size if is_small else image_size * 8 // 7)
    train = v2.Compose([part, v2.RandomHorizontalFlip(), *to_normalised])
    return train, v2.Compose([resized, v2.CenterCrop(image_size), *to_normalised])


def download(name: str, data_dir: Path, timeout: timedelta = timedelta(hours=1)) -> None:
    """Download one of `config.DOWNLOADABLE` by torchvision into `data_dir`, unless it is there.

    Several processes of one machine may call it at once: one downloads, the others block for at most `timeout`.
    Raises: DatasetMissing.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = data_dir / ".download.lock"
        with lock.open("a") as file:
            if not try_flock(file.fileno(), fcntl.LOCK_EX, timeout):
                raise TimeoutError(f"another process still held {lock} after {timeout.total_seconds():g} seconds")
            _fetch(name, data_dir)
    except _UNREADABLE as exc:
        raise DatasetMissing(
            f"cannot download {name} into {data_dir}: {first_line(exc)}; "
            "or place it there by hand, or say with --data-dir where it is"
        ) from exc


def _fetch(name: str, data_dir: Path) -> None:
    """Download training and test set, for one process at a time. torchvision skips files that are there."""
    for is_train in (True, False):
        _torchvision_class(name)(str(data_dir), train=is_train, download=True)


def _torchvision_class(name: str) -> Any:
    from torchvision import datasets

    return getattr(datasets, _TORCHVISION_SETS[name].class_name)
