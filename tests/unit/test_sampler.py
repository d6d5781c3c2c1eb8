"""The order of an epoch is a good permutation, and every World reads each of its samples exactly once."""

import pickle
import tracemalloc
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise, product
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from elastic_train.training import sampler
from elastic_train.training.planned_steps import steps_per_epoch
from elastic_train.training.sampler import (
    EpochOrder,
    MicroBatch,
    StepSampler,
    split,
    split_larger_first,
)

Int64s = npt.NDArray[np.int64]


def whole_epoch(seed: int, epoch: int, length: int) -> Int64s:
    return EpochOrder(seed, epoch, length).indices(np.arange(length))


def make_sampler(**changes: Any) -> StepSampler:
    values: dict[str, Any] = {
        "length": 100, "seed": 7, "epoch": 3, "samples_done": 0, "steps_done": 0, "global_batch_size": 8,
        "rank": 0, "world_size": 1, "virtual_ranks": None, "micro_batch_size": None, "max_steps": None,
    }  # fmt: skip
    return StepSampler(**(values | changes))


def contents(micro_batch: MicroBatch) -> tuple[object, ...]:
    """A micro-batch as a value that can be compared."""
    m = micro_batch
    return (m.epoch, m.step, m.shard, m.indices.tolist(), m.step_samples, m.is_last)


def read_world(**changes: Any) -> dict[int, list[MicroBatch]]:
    """Micro-batches of all ranks by step, by rank and in their order within a step."""
    steps: dict[int, list[MicroBatch]] = {}
    for rank in range(changes.get("world_size", 1)):
        for micro_batch in make_sampler(rank=rank, **changes):
            steps.setdefault(micro_batch.step, []).append(micro_batch)
    return steps


def read_indices(micro_batches: list[MicroBatch]) -> list[int]:
    return [index for micro_batch in micro_batches for index in micro_batch.indices.tolist()]


def chi_square(counts: Int64s) -> float:
    """Of `counts` against equal cells."""
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())


def sigmas(statistic: float, degrees: int) -> float:
    """How many standard deviations a chi-square statistic is from its mean."""
    return float((statistic - degrees) / np.sqrt(2 * degrees))


def sigmas_from_uniform(counts: Int64s) -> float:
    return sigmas(chi_square(counts), counts.size - 1)


@pytest.fixture(params=[256, 4096], ids=["network", "table"])
def max_table_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Short epochs have a table; the network has its weak spots there, and is the better judged by them."""
    monkeypatch.setattr(sampler, "_MAX_TABLE_LENGTH", request.param)
    return int(request.param)


@cache
def draws(length: int, count: int, _max_table_length: int) -> Int64s:
    """Shape (draw, position): half of the draws differ in the seed, half in the epoch."""
    by_seed = [whole_epoch(seed, 0, length) for seed in range(count // 2)]
    return np.stack(by_seed + [whole_epoch(0, epoch, length) for epoch in range(1, count // 2 + 1)])


class TestEpochOrderIsAPermutation:
    @pytest.mark.parametrize(
        "length",
        [
            *range(1, 70), 97, 127, 128, 129, 251, 255, 256, 257, 258, 272, 273, 289, 290, 511, 512, 513, 1000,
            1023, 1024, 1025, 4095, 4096, 4097, 7919, 16383, 16384, 16385, 65535, 65536, 65537, 99991, 100_000,
        ],
    )  # fmt: skip
    @pytest.mark.usefixtures("max_table_length")
    def test_every_index_once(self, length: int) -> None:
        for epoch in range(2):
            assert np.array_equal(np.sort(whole_epoch(1, epoch, length)), np.arange(length))

    @settings(max_examples=100, deadline=None)
    @given(length=st.integers(1, 20_000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
    def test_every_index_once_for_any_seed(self, length: int, seed: int, epoch: int) -> None:
        assert np.array_equal(np.sort(whole_epoch(seed, epoch, length)), np.arange(length))

    @pytest.mark.parametrize("length", [10**9, 10**9 + 7, 2**40, 2**40 - 87, 2**62, 2**63 - 1])
    def test_long_epochs_stay_in_range_without_repeats(self, length: int) -> None:
        starts = [0, length // 2, length * 9 // 10, length - 5000]
        positions = np.concatenate([np.arange(start, start + 5000) for start in starts])
        indices = EpochOrder(5, 1, length).indices(positions)
        assert indices.dtype == np.int64
        assert indices.min() >= 0
        assert indices.max() < length
        assert len(np.unique(indices)) == len(positions)

    @pytest.mark.parametrize("length", [1, 10, 4096, 4097, 5000, 10**12])
    def test_any_slice_is_that_part_of_the_whole(self, length: int) -> None:
        order = EpochOrder(11, 4, length)
        positions = np.arange(min(length, 5000))
        whole = order.indices(positions)
        one_by_one = [int(order.indices(positions[i : i + 1])[0]) for i in range(0, len(positions), 37)]
        assert one_by_one == whole[::37].tolist()
        assert np.array_equal(order.indices(positions[::-1]), whole[::-1])
        assert order.indices(positions[:0]).tolist() == []

    def test_the_order_of_today(self) -> None:
        """A snapshot's position means this order; when these values change, its format version must too."""
        assert EpochOrder(0, 0, 10).indices(np.arange(10)).tolist() == [2, 9, 8, 4, 1, 6, 3, 5, 0, 7]
        assert EpochOrder(1, 2, 10**9).indices(np.arange(4)).tolist() == [135935095, 452244717, 192794816, 89792386]
        assert EpochOrder(1, 2, 300).indices(np.arange(8)).tolist() == [254, 116, 54, 133, 199, 3, 165, 194]
        assert EpochOrder(1, 2, 5000).indices(np.arange(4)).tolist() == [3623, 2323, 3364, 1502]

    def test_seed_epoch_and_length_each_change_the_order(self) -> None:
        for length in (64, 1000, 5000):
            orders = [whole_epoch(seed, epoch, length) for seed in range(-3, 30) for epoch in range(30)]
            assert len({order.tobytes() for order in orders}) == len(orders)
            matches = [int((orders[i] == orders[j]).sum()) for i in range(0, 900, 7) for j in range(i)]
            assert np.mean(matches) == pytest.approx(1, abs=0.02)  # as many as two independent permutations
        assert not np.array_equal(whole_epoch(0, 0, 1001)[:50], whole_epoch(0, 0, 1000)[:50])

    @pytest.mark.parametrize("length", [0, -1, 2**63])
    def test_length_out_of_range(self, length: int) -> None:
        with pytest.raises(ValueError, match=str(length)):
            EpochOrder(0, 0, length)

    @pytest.mark.parametrize("length", [10, 1000])
    def test_position_out_of_range(self, length: int) -> None:
        for position in (-1, length):
            with pytest.raises(ValueError, match=f"got {position}"):
                EpochOrder(0, 0, length).indices(np.array([0, position, 1]))


class TestEpochOrderShufflesWell:
    """The seeds are fixed, so each statistic is one number; the bound of 5 sigmas is for whoever changes them."""

    @pytest.mark.parametrize(("length", "num_permutations"), [(2, 2), (3, 6), (4, 24), (5, 120)])
    def test_all_permutations_of_tiny_lengths_are_equally_likely(
        self, length: int, num_permutations: int, max_table_length: int
    ) -> None:
        codes = draws(length, 4000, max_table_length) @ (length ** np.arange(length))
        counts = np.unique(codes, return_counts=True)[1]
        assert len(counts) == num_permutations
        assert abs(sigmas_from_uniform(counts)) < 5

    @pytest.mark.parametrize("length", [5, 10, 64, 256, 257, 300])
    def test_every_index_is_as_likely_at_every_position(self, length: int, max_table_length: int) -> None:
        cells = draws(length, 4000, max_table_length) + np.arange(length) * length
        counts = np.bincount(cells.ravel(), minlength=length**2).reshape(length, length)  # (position, index)
        for position in (0, 1, length // 2, length - 1):
            assert abs(sigmas_from_uniform(counts[position])) < 5
        # Sums of permutation matrices vary in (length - 1)**2 directions, by length / (length - 1) more in each.
        assert abs(sigmas(chi_square(counts) * (length - 1) / length, (length - 1) ** 2)) < 5

    def test_every_pair_is_as_likely_at_two_positions(self, max_table_length: int) -> None:
        orders = draws(10, 4000, max_table_length)
        for first, second in [(0, 1), (0, 9), (4, 5), (2, 7)]:
            pairs = np.bincount(orders[:, first] * 10 + orders[:, second], minlength=100).reshape(10, 10)
            assert not pairs.diagonal().any()
            assert abs(sigmas_from_uniform(pairs[~np.eye(10, dtype=bool)])) < 5

    @pytest.mark.parametrize("length", [64, 257, 273, 1000])
    @pytest.mark.parametrize("lag", [1, 16, 17, 32])
    def test_distance_of_nearby_positions_is_uniform(self, length: int, lag: int, max_table_length: int) -> None:
        """The weak spot of a network with too few rounds: positions that share a half."""
        orders = draws(length, 1500, max_table_length)
        distances = (orders[:, lag:] - orders[:, :-lag]) % length
        counts = np.bincount(distances.ravel(), minlength=length)
        assert counts[0] == 0
        assert abs(sigmas_from_uniform(counts[1:])) < 5

    @pytest.mark.parametrize("length", [65_536, 100_003])
    def test_one_long_epoch_looks_random(self, length: int) -> None:
        positions = np.arange(length)
        fixed_points = neighbours_kept = 0
        last = positions
        for epoch in range(20):
            order = whole_epoch(3, epoch, length)
            bound = 5 / np.sqrt(length)
            for lag in (1, 2, 64, 256, 317):
                assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < bound
            assert abs(np.corrcoef(order, positions)[0, 1]) < bound
            assert abs(np.corrcoef(order, last)[0, 1]) < bound
            fixed_points += int((order == positions).sum())
            neighbours_kept += int((np.abs(np.diff(order)) == 1).sum())
            last = order
        assert 5 <= fixed_points <= 40  # Poisson, 1 expected per epoch
        assert 15 <= neighbours_kept <= 70  # Poisson, 2 expected per epoch


class TestCost:
    @pytest.fixture
    def evaluated(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of values that each pass of the network was computed for."""
        sizes: list[int] = []
        permute = EpochOrder._permute

        def counted(order: EpochOrder, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            sizes.append(values.size)
            return permute(order, values)

        monkeypatch.setattr(EpochOrder, "_permute", counted)
        return sizes

    @pytest.mark.parametrize("samples_done", [0, 900_000_000, 999_990_000])
    def test_resuming_costs_the_same_everywhere(self, evaluated: list[int], samples_done: int) -> None:
        tracemalloc.start()
        try:
            sampler = make_sampler(length=10**9, samples_done=samples_done, global_batch_size=64, max_steps=100)
            num_samples = sum(len(micro_batch.indices) for micro_batch in sampler)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert num_samples == 6400
        assert sum(evaluated) <= 1.01 * num_samples
        assert len(evaluated) <= 2 * 3  # two blocks, each with a walk or two
        assert peak_bytes < 1_000_000

    def test_a_rank_computes_its_own_positions_only(self, evaluated: list[int]) -> None:
        sampler = make_sampler(length=10**6, global_batch_size=1024, rank=3, world_size=16)
        num_samples = sum(len(micro_batch.indices) for micro_batch in sampler)
        assert num_samples == pytest.approx(10**6 / 16, rel=0.01)
        assert sum(evaluated) <= 1.01 * num_samples
        assert max(evaluated) <= 4096

    @pytest.mark.parametrize("length", [257, 258, 273, 290, 1025, 4097, 65537])
    def test_walks_are_rare_just_above_a_square_or_power_of_two(
        self, evaluated: list[int], length: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampler, "_MAX_TABLE_LENGTH", 0)
        whole_epoch(0, 0, length)
        assert sum(evaluated) <= 1.1 * length


class TestSplit:
    def test_parts_are_contiguous_balanced_and_complete(self) -> None:
        for cut, num_items in product((split, split_larger_first), range(40)):
            for num_parts in range(1, 45):
                parts = [cut(num_items, part, num_parts) for part in range(num_parts)]
                assert parts[0][0] == 0
                assert parts[-1][1] == num_items
                assert all(before[1] == after[0] for before, after in pairwise(parts))
                sizes = [stop - start for start, stop in parts]
                assert max(sizes) - min(sizes) <= 1

    def test_steps_per_epoch(self) -> None:
        assert [steps_per_epoch(length, 8) for length in (1, 7, 8, 9, 16, 17)] == [1, 1, 1, 2, 2, 3]


class TestFastMode:
    def test_steps_cover_the_epoch_in_order(self) -> None:
        micro_batches = list(make_sampler(length=20, steps_done=40))
        assert [(m.epoch, m.step, m.shard, m.step_samples, m.is_last) for m in micro_batches] == [
            (3, 41, 0, 8, True),
            (3, 42, 0, 8, True),
            (3, 43, 0, 4, True),
        ]
        assert read_indices(micro_batches) == whole_epoch(7, 3, 20).tolist()

    @pytest.mark.parametrize(
        ("share", "most", "sizes"),
        [(10, 4, [4, 3, 3]), (11, 4, [4, 4, 3]), (8, 4, [4, 4]), (3, 4, [3]), (5, 1, [1] * 5), (12, 5, [4, 4, 4])],
    )
    def test_a_share_is_cut_into_balanced_micro_batches(self, share: int, most: int, sizes: list[int]) -> None:
        sampler = make_sampler(
            length=2 * share, global_batch_size=2 * share, rank=1, world_size=2, micro_batch_size=most
        )
        micro_batches = list(sampler)
        assert [len(m.indices) for m in micro_batches] == sizes
        assert [m.shard for m in micro_batches] == [share + sum(sizes[:cut]) for cut in range(len(sizes))]
        assert [m.is_last for m in micro_batches] == [False] * (len(sizes) - 1) + [True]
        assert read_indices(micro_batches) == whole_epoch(7, 3, 2 * share)[share:].tolist()

    def test_a_rank_without_samples_yields_one_empty_micro_batch_a_step(self) -> None:
        steps = read_world(length=7, global_batch_size=3, world_size=5, micro_batch_size=1)
        for step, step_samples in [(1, 3), (2, 3), (3, 1)]:
            assert len(steps[step]) == 5
            assert all(m.is_last and m.step_samples == step_samples for m in steps[step])
            assert sorted(len(m.indices) for m in steps[step]) == [0] * (5 - step_samples) + [1] * step_samples
            assert all(m.indices.dtype == np.int64 for m in steps[step])

    @settings(max_examples=60, deadline=None)
    @given(
        length=st.integers(1, 100),
        global_batch_size=st.integers(1, 40),
        world_size=st.integers(1, 9),
        micro_batch_size=st.none() | st.integers(1, 5),
    )
    def test_rank_0_has_samples_in_every_micro_batch(
        self, length: int, global_batch_size: int, world_size: int, micro_batch_size: int | None
    ) -> None:
        """Its buffers are those that are evaluated and saved: what a step changes in them is to be there."""
        read = {
            rank: list(
                make_sampler(
                    length=length, global_batch_size=global_batch_size, rank=rank, world_size=world_size,
                    micro_batch_size=micro_batch_size,
                )
            )
            for rank in range(world_size)
        }  # fmt: skip
        assert all(len(m.indices) for m in read[0])
        for _, micro_batches in groupby(zip(*read.values(), strict=True), lambda ranks: ranks[0].step):
            shares = [sum(len(m.indices) for m in of_rank) for of_rank in zip(*micro_batches, strict=True)]
            assert shares == sorted(shares, reverse=True)
            assert shares[0] - shares[-1] <= 1


class TestOrderedMode:
    def test_virtual_rank_v_has_the_offsets_from_n_v_over_num_virtual_ranks(self) -> None:
        order = whole_epoch(7, 3, 101).tolist()
        for micro_batch in make_sampler(length=101, global_batch_size=13, virtual_ranks=5):
            start = 13 * (micro_batch.step - 1)
            n, v = micro_batch.step_samples, micro_batch.shard
            assert n == min(13, 101 - start)
            assert micro_batch.indices.tolist() == order[start + n * v // 5 : start + n * (v + 1) // 5]

    @settings(max_examples=60, deadline=None)
    @given(
        length=st.integers(1, 300),
        global_batch_size=st.integers(1, 40),
        virtual_ranks=st.integers(1, 12),
        data=st.data(),
    )
    def test_micro_batches_are_the_same_in_every_world(
        self, length: int, global_batch_size: int, virtual_ranks: int, data: st.DataObject
    ) -> None:
        samples_done = data.draw(st.integers(0, length))
        by_world = []
        for world_size in range(1, virtual_ranks + 1):
            steps = read_world(
                length=length,
                samples_done=samples_done,
                global_batch_size=global_batch_size,
                virtual_ranks=virtual_ranks,
                world_size=world_size,
                micro_batch_size=data.draw(st.none() | st.integers(1, 5)),  # does not apply
            )
            for micro_batches in steps.values():
                assert [m.shard for m in micro_batches] == list(range(virtual_ranks))
                assert sum(m.is_last for m in micro_batches) == world_size
            by_world.append({(m.step, m.shard): m.indices.tolist() for ms in steps.values() for m in ms})
        assert all(world == by_world[0] for world in by_world)


@dataclass(frozen=True)
class Episode:
    """The steps committed in one World before the membership changes."""

    world_size: int
    virtual_ranks: int | None
    micro_batch_size: int | None
    num_steps: int
    num_prefetched: int
    """Steps read after the last commit, and lost."""


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    world_size = draw(st.integers(1, 9))
    return Episode(
        world_size=world_size,
        virtual_ranks=draw(st.none() | st.integers(world_size, 12)),
        micro_batch_size=draw(st.none() | st.integers(1, 5)),
        num_steps=draw(st.integers(0, 6)),
        num_prefetched=draw(st.integers(0, 2)),
    )


class TestTheLaw:
    @settings(max_examples=150, deadline=None)
    @given(
        length=st.integers(1, 400),
        global_batch_size=st.integers(1, 40),
        history=st.lists(episodes(), max_size=8),
    )
    def test_samples_done_are_a_prefix_whatever_the_worlds_were(
        self, length: int, global_batch_size: int, history: list[Episode]
    ) -> None:
        """torch's ElasticDistributedSampler shuffles what is left anew, so that some samples are read twice and others
        never; Horovod's ElasticSampler asserts where a tail is shorter than its padding."""
        order = whole_epoch(7, 3, length).tolist()
        done: list[int] = []
        steps_done = 0
        for episode in [*history, Episode(2, None, None, length, 0)]:
            steps = read_world(
                length=length,
                samples_done=len(done),
                steps_done=steps_done,
                global_batch_size=global_batch_size,
                world_size=episode.world_size,
                virtual_ranks=episode.virtual_ranks,
                micro_batch_size=episode.micro_batch_size,
                max_steps=steps_done + episode.num_steps + episode.num_prefetched,
            )
            for step in sorted(steps)[: episode.num_steps]:
                assert step == steps_done + 1
                samples = read_indices(steps[step])
                assert {one.step_samples for one in steps[step]} == {len(samples)}
                assert sum(one.is_last for one in steps[step]) == episode.world_size
                done += samples
                steps_done = step
                assert done == order[: len(done)]
        assert done == order
        assert steps_done == steps_per_epoch(length, global_batch_size)

    @settings(max_examples=100, deadline=None)
    @given(
        length=st.integers(1, 400),
        global_batch_size=st.integers(1, 500),
        max_steps=st.none() | st.integers(0, 30),
        steps_done=st.integers(0, 20),
        episode=episodes(),
        data=st.data(),
    )
    def test_len_is_the_number_of_micro_batches(
        self,
        length: int,
        global_batch_size: int,
        max_steps: int | None,
        steps_done: int,
        episode: Episode,
        data: st.DataObject,
    ) -> None:
        sampler = make_sampler(
            length=length,
            samples_done=data.draw(st.integers(0, length)),
            steps_done=steps_done,
            global_batch_size=global_batch_size,
            rank=data.draw(st.integers(0, episode.world_size - 1)),
            world_size=episode.world_size,
            virtual_ranks=episode.virtual_ranks,
            micro_batch_size=episode.micro_batch_size,
            max_steps=max_steps,
        )
        micro_batches = list(sampler)
        assert len(sampler) == len(micro_batches)
        last_step = max((m.step for m in micro_batches), default=steps_done)
        assert sum(m.is_last for m in micro_batches) == last_step - steps_done
        assert max_steps is None or last_step <= max(max_steps, steps_done)

    def test_blocks_do_not_show(self) -> None:
        """Several blocks of steps, a share larger than a block, and a rank without samples among them."""
        order = whole_epoch(7, 3, 30_000).tolist()
        for global_batch_size, world_size in [(1, 1), (7, 2), (64, 1), (64, 3), (9000, 2), (30_000, 1), (2, 3)]:
            steps = read_world(length=30_000, global_batch_size=global_batch_size, world_size=world_size)
            assert list(steps) == list(range(1, steps_per_epoch(30_000, global_batch_size) + 1))
            assert [index for step in steps.values() for index in read_indices(step)] == order


class TestStepSamplerAsAValue:
    def test_iterating_changes_nothing(self) -> None:
        sampler = make_sampler(samples_done=16, steps_done=2, micro_batch_size=3)
        begun = iter(sampler)
        for _ in range(5):
            next(begun)
        first = [contents(m) for m in sampler]
        assert first == [contents(m) for m in sampler]
        assert first == [contents(m) for m in pickle.loads(pickle.dumps(sampler))]
        assert first[5:] == [contents(m) for m in begun]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"length": 0}, "length .*got 0"),
            ({"global_batch_size": 0}, "global_batch_size .*got 0"),
            ({"world_size": 0}, "world_size .*got 0"),
            ({"rank": 2, "world_size": 2}, "rank .*got 2"),
            ({"rank": -1}, "rank .*got -1"),
            ({"samples_done": 101}, "samples_done .*got 101"),
            ({"samples_done": -1}, "samples_done .*got -1"),
            ({"steps_done": -1}, "steps_done .*got -1"),
            ({"max_steps": -1}, "max_steps .*got -1"),
            ({"micro_batch_size": 0}, "micro_batch_size .*got 0"),
            ({"virtual_ranks": 0}, "virtual_ranks .*got 0"),
            ({"virtual_ranks": 3, "world_size": 4}, "world_size 4 exceeds virtual_ranks 3"),
        ],
    )
    def test_values_out_of_range(self, changes: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_sampler(**changes)


class EchoDataset(Dataset[tuple[object, ...]]):
    """Returns what the loader asked for."""

    def __getitem__(self, index: int) -> tuple[object, ...]:
        raise AssertionError("the loader must hand over whole micro-batches")

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[object, ...]:
        assert isinstance(micro_batch, MicroBatch)
        return contents(micro_batch)


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 3, 33, 100])
@pytest.mark.parametrize("samples", [1, 2, 7, 100, 101])
def test_ranks_have_equally_many_micro_batches_of_at_most_the_size_asked_for(
    world_size: int, most: int, samples: int
) -> None:
    """A SyncBatchNorm's collectives are one for each; shares may differ by a sample, on either side of a limit."""
    steps = [
        list(
            make_sampler(
                length=samples,
                global_batch_size=samples,
                rank=rank,
                world_size=world_size,
                micro_batch_size=min(most, samples),
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(step) for step in steps}) == 1
    assert sorted(index for step in steps for one in step for index in one.indices) == list(range(samples))
    assert all(len(one.indices) <= most and one.is_last == (one is step[-1]) for step in steps for one in step)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("virtual_ranks", "micro_batch_size"), [(None, None), (None, 2), (6, None)])
def test_data_loader(num_workers: int, virtual_ranks: int | None, micro_batch_size: int | None) -> None:
    sampler = make_sampler(
        samples_done=24,
        steps_done=3,
        rank=1,
        world_size=3,
        virtual_ranks=virtual_ranks,
        micro_batch_size=micro_batch_size,
    )
    loader: DataLoader[Any] = DataLoader(
        EchoDataset(), batch_sampler=cast(Any, sampler), num_workers=num_workers, collate_fn=as_it_is
    )
    expected = [contents(m) for m in sampler]
    assert len(loader) == len(expected)
    assert list(loader) == expected
    assert list(loader) == expected  # the loader begins again, at samples_done
