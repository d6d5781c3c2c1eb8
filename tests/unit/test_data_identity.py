"""Digests by which members see that they have the same data in the same order."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from elastic_train.errors import Refused
from elastic_train.rules import DATA_BY, ITEMS, require_agreement
from elastic_train.training.data_identity import identify, identify_code, spread


class Files(Dataset[Any]):
    def __init__(self, names: list[Any], root: str = "") -> None:
        self.files = [f"{root}{name}" for name in names]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        return len(Path(self.files[index]).name)


def found(dataset: Dataset[Any], *, may_read: bool = True) -> dict[str, str]:
    return identify(dataset, seed=0, collate=default_collate, may_read=may_read)


NAMES = [f"{kind}/{number:03}.png" for kind in ("cat", "dog") for number in range(50)]


@pytest.mark.parametrize("root", ["/mnt/data/train/", "data/train/"])
def test_a_folder_is_known_wherever_it_lies_and_not_in_another_order(root: str) -> None:
    here = found(Files(NAMES, "/home/me/data/train/"))
    assert "'cat/000.png' is the first" in here["names"]
    assert found(Files(NAMES, root)) == here
    assert found(Files(NAMES[::-1], root))["names"] != here["names"]
    assert found(Files([*NAMES[:-1], "dog/new.png"], root))["names"] != here["names"]


def told(ours: Dataset[Any], theirs: Dataset[Any]) -> str:
    one, other = (
        {
            "train_length": len(data),
            **{f"{DATA_BY}{name}": value for name, value in found(data, may_read=False).items()},
        }  # type: ignore[arg-type]
        for data in (ours, theirs)
    )
    with pytest.raises(Refused) as raised:
        require_agreement(one, other)
    return str(raised.value)


def test_a_refusal_names_the_first_on_both_sides() -> None:
    line = told(Files(NAMES), Files(NAMES[::-1]))
    assert """('cat/000.png' is the first)" here and """ in line
    assert """('dog/049.png' is the first)" on the run: this worker is refused; """ in line
    assert told(Files(NAMES), Files(NAMES[1:])).startswith(
        "the training set has 100 samples here and 99 on the run: this worker is refused; "
    )


def test_nodes_with_and_without_loader_processes_train_together() -> None:
    reading, not_reading = (
        {f"{DATA_BY}{name}": value for name, value in found(Files(NAMES), may_read=may_read).items()}
        for may_read in (True, False)
    )
    assert ITEMS in reading
    assert ITEMS not in not_reading
    require_agreement(reading, not_reading)
    require_agreement(not_reading, reading)


def test_millions_of_names_are_not_walked_through() -> None:
    class Counted(list[str]):
        num_reads = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.num_reads += 1
            return super().__getitem__(place)

    dataset = Files(["a"])
    dataset.files = Counted(["x/y"] * 100_000)
    found(dataset, may_read=False)
    assert Counted.num_reads <= 65


def test_subsets_and_concatenations_are_looked_into() -> None:
    whole = Files(NAMES, "/d/")
    some, others = Subset(whole, [5, 7, 9]), Subset(whole, [5, 9, 7])
    assert found(some, may_read=False) != found(others, may_read=False), "a random split that is not seeded"
    assert found(ConcatDataset([whole, whole]), may_read=True) != found(ConcatDataset([some, whole]), may_read=True)


@pytest.mark.parametrize("make", [np.array, lambda labels: torch.tensor([len(label) for label in labels])])
def test_names_may_lie_in_an_array(make: Any) -> None:
    """As of a data set that is read by loader processes: its items are not compared."""
    dataset, other = Files(NAMES), Files(NAMES)
    dataset.files, other.files = make([*NAMES, "a"]), make(["a", *NAMES])
    assert found(dataset, may_read=False)["names"] != found(other, may_read=False)["names"]
    dataset.files = torch.zeros(101)  # type: ignore[assignment]
    assert found(dataset, may_read=False) == {}, "numbers that a processor may round say nothing"


def test_items_are_compared_where_the_main_process_may_read_them() -> None:
    data = torch.arange(30.0).reshape(10, 3)
    here = found(TensorDataset(data))
    assert here == found(TensorDataset(data.clone()))
    for place in (0, 5, 9):
        other = data.clone()
        other[place, 1] += 1e-6 + other[place, 1] * 1e-6
        assert found(TensorDataset(other)) != here
    assert found(TensorDataset(data), may_read=False) == {}


@pytest.mark.parametrize("item", [random.random, lambda: torch.rand(2), lambda: {"a": (1, "b", None), "c": 2.0}])
def test_what_an_item_draws_from_seeded_generators_is_no_difference(item: Any) -> None:
    class Drawn(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return item()

    random.seed()
    torch.seed()
    here = identify(Drawn(), seed=0, collate=list, may_read=True)
    random.seed()
    torch.seed()
    assert identify(Drawn(), seed=0, collate=list, may_read=True) == here
    assert "items" in here


def test_what_a_batch_draws_is_no_difference() -> None:
    """As of a collate that scales its images at random."""

    def scaled(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([image for (image,) in samples])[:, : random.choice((1, 2, 3, 4, 5, 6))]

    data = TensorDataset(torch.ones(3, 6))
    random.seed(1)
    here = identify(data, seed=0, collate=scaled, may_read=True)
    assert "items" in here
    for other in range(2, 9):
        random.seed(other)
        there = identify(data, seed=0, collate=scaled, may_read=True)
        assert there == here


def test_an_item_may_hold_its_path_and_what_a_processor_rounds() -> None:
    class Item(Files):
        def __init__(self, root: str, error: float) -> None:
            super().__init__(NAMES, root)
            self.error = error

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index / 3 + self.error), index, self.files[index]

    def of(root: str, error: float) -> dict[str, str]:
        return identify(Item(root, error), seed=0, collate=list, may_read=True)

    assert of("/a/", 0.0) == of("/b/c/", 1e-7)


def test_a_data_set_within_that_is_empty_or_has_no_length() -> None:
    class Lazy(Dataset[Any]):
        def __len__(self) -> int:
            raise TypeError("not yet")

    dataset: Any = Files(NAMES, "/a/")
    dataset.more = Files([])
    assert "names" in found(dataset)
    dataset.more = Lazy()
    assert "names" not in found(dataset)


def test_what_draws_from_elsewhere_or_fails_says_nothing() -> None:
    class Clock(Files):
        def __getitem__(self, index: int) -> Any:
            Clock.calls += 1
            return Clock.calls

        calls = 0

    class Broken(Files):
        def __getitem__(self, index: int) -> Any:
            raise OSError("not now")

    for kind in (Clock, Broken):
        assert found(kind(NAMES, "/a/")).keys() == {"names"}


def test_code_is_the_file_that_it_stands_in() -> None:
    path, digest = identify_code(Files) or ("", "")
    assert Path(path) == Path(__file__)
    assert identify_code(found) == (path, digest)
    assert len(digest) == 12
    assert identify_code(identify) not in (None, (path, digest))
    assert identify_code(partial(found)) is None, "nothing is compared"


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 1999, 10**6])
def test_places_are_spread_from_the_first_to_the_last(length: int) -> None:
    places = spread(length)
    assert len(set(places)) == len(places) == min(length, 64)
    assert places == sorted(places)
    assert length == 0 or (places[0], places[-1]) == (0, length - 1)
