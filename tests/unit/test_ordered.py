"""The fixed tree gives the same bits for every split over ranks; what ordered reduction does with a model, or refuses.

The groups are real gloo groups, whose ranks are threads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastic_train.config import Config
from elastic_train.errors import UsageError
from elastic_train.system import processor_facts
from elastic_train.tools.bench.reduction_speed import local_world
from elastic_train.training import determinism, ordered_tree
from elastic_train.training.evaluation import evaluate
from elastic_train.training.ordered import OrderedReduction
from elastic_train.training.ordered_tree import TreeExchange, are_siblings, push, subtrees, tree_sum
from elastic_train.training.sampler import MicroBatch, split
from elastic_train.training.tasks import Task

CPU = torch.device("cpu")
MAX = 12


def expected_sum(leaves: Sequence[Any], start: int = 0, size: int | None = None) -> Any:
    """The tree from its definition, top down: nodes of 2^j leaves at multiples of 2^j, cut off at the end."""
    if size is None:
        size = 1 << (len(leaves) - 1).bit_length()
    if size == 1:
        return leaves[start]
    left = expected_sum(leaves, start, size // 2)
    if start + size // 2 >= len(leaves):
        return left
    return left + expected_sum(leaves, start + size // 2, size // 2)


# --- the tree alone ---------------------------------------------------------------------------------------------------


class Expression:
    """A sum that shows its brackets."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Expression) -> Expression:
        return Expression(f"({self.text} {other.text})")


@pytest.mark.parametrize("num_leaves", range(1, 34))
def test_subtrees_of_any_blocks_complete_to_the_same_tree(num_leaves: int) -> None:
    leaves = [Expression(str(leaf)) for leaf in range(num_leaves)]
    expected = expected_sum(leaves).text
    for world_size in range(1, num_leaves + 1):
        across: list[tuple[tuple[int, int], Expression]] = []
        for rank in range(world_size):
            within: list[tuple[tuple[int, int], Expression]] = []
            start, stop = split(num_leaves, rank, world_size)
            for leaf in range(start, stop):
                push(within, (leaf, leaf + 1), leaves[leaf], num_leaves, lambda left, right: left + right)
            assert [node for node, _ in within] == subtrees(start, stop, num_leaves)
            for node, value in within:
                push(across, node, value, num_leaves, lambda left, right: left + right)
        assert [value.text for _, value in across] == [expected]


def test_the_tree_of_the_docstring() -> None:
    assert [subtrees(*split(8, rank, 3), 8) for rank in range(3)] == [
        [(0, 2)],
        [(2, 4), (4, 5)],
        [(5, 6), (6, 8)],
    ]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_tree_sum_of_numbers(values: list[float]) -> None:
    assert tree_sum(values) == expected_sum(values)


def rows_held(num_leaves: int, rank: int, world_size: int) -> int:
    """Rows at the peak of a step, by the rules of `OrderedReduction`."""
    stack: list[tuple[tuple[int, int], None]] = []
    start, stop = split(num_leaves, rank, world_size)
    peak, leaf = 0, start
    while leaf < stop:
        is_pair = leaf + 1 < stop and are_siblings((leaf, leaf + 1), (leaf + 1, leaf + 2), num_leaves)
        node = (leaf, leaf + 1 + is_pair)
        adds_to_left = bool(stack) and are_siblings(stack[-1][0], node, num_leaves)
        peak = max(peak, len(stack) + (not adds_to_left))
        push(stack, node, None, num_leaves, lambda left, right: None)
        leaf = node[1]
    return peak


@pytest.mark.parametrize("num_leaves", [*range(1, 98), 128, 256])
def test_memory_is_bounded_by_the_depth_of_the_tree(num_leaves: int) -> None:
    for world_size in range(1, num_leaves + 1):
        held = max(rows_held(num_leaves, rank, world_size) for rank in range(world_size))
        # One is what the optimizer reads; the leaf in hand, in autograd's own tensors, is one more.
        assert held - 1 + 1 <= math.log2(num_leaves) + 1, world_size


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8, 12, 13, 21, 37, 64])
def test_rows_held_are_those_counted(num_leaves: int) -> None:
    model = nn.Linear(4, 2)
    reduction = OrderedReduction(model, local_world(0, 1), CPU, num_leaves)
    reduction.run(share_of([1] * num_leaves, torch.randn(num_leaves, 4)), mean_output, unscaled, ())
    row_bytes = 2 * 64  # weight and bias, each from an aligned address
    assert reduction.memory_bytes == row_bytes * rows_held(num_leaves, 0, 1)


# --- over real groups -------------------------------------------------------------------------------------------------


class GlooThreads:
    """A gloo group whose ranks are threads of this process."""

    def __init__(self, world_size: int) -> None:
        store = dist.HashStore()
        self.world_size = world_size
        self.pool = ThreadPoolExecutor(world_size)
        self.groups = self.on_every_rank(
            lambda rank: dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))
        )

    def on_every_rank(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(call, range(self.world_size)))

    def transport(self, rank: int) -> Callable[..., None]:
        group = self.groups[rank]

        def move(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
            works = [group.recv([tensor], peer, 0) for tensor, peer in receives]
            works += [group.send([tensor], peer, 0) for tensor, peer in sends]
            for work in works:
                work.wait()

        return move

    def close(self) -> None:
        self.groups.clear()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, GlooThreads]]:
    made = {world_size: GlooThreads(world_size) for world_size in range(1, MAX + 1)}
    yield made
    for group in made.values():
        group.close()


def awkward(num_leaves: int, sizes: Sequence[int], seed: int) -> list[list[Tensor]]:
    """Leaves of flat tensors over many magnitudes; some entries, and leaves, are the -0.0 of an absent one."""
    generator = torch.Generator().manual_seed(seed)
    leaves = []
    for _ in range(num_leaves):
        leaf = []
        for number, size in enumerate(sizes):
            exponents = torch.randint(-30, 30, (size,), generator=generator)
            values = torch.randn(size, generator=generator) * 2.0**exponents
            values[torch.rand(size, generator=generator) < 0.2] = -0.0
            values = values.to((torch.float32, torch.bfloat16, torch.float64)[number % 3])
            leaf.append(values if torch.rand((), generator=generator) < 0.8 else torch.full_like(values, -0.0))
        leaves.append(leaf)
    return leaves


def bits(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def reduced(group: GlooThreads, num_leaves: int, leaves: list[list[Tensor]], chunk: int) -> list[list[bytes]]:
    """Of each rank: the completed sums' bits, one per data type, and the message's."""

    def call(rank: int) -> list[bytes]:
        exchange = TreeExchange(rank, group.world_size, num_leaves, group.transport(rank), chunk)
        exchange.connect(torch.device("cpu"))
        message = torch.zeros(num_leaves, dtype=torch.float64)
        totals = []
        for position in range(len(leaves[0])):
            stack: list[tuple[tuple[int, int], Tensor]] = []
            for leaf in range(*split(num_leaves, rank, group.world_size)):
                flat = leaves[leaf][position].clone()
                push(stack, (leaf, leaf + 1), flat, num_leaves, lambda left, right: left.add_(right))
                message[leaf] = 0.1 + leaf
            exchange.complete([flat for _, flat in stack], message if position == 0 else None)
            totals.append(bits(stack[0][1]))
        return [*totals, bits(message)]

    return group.on_every_rank(call)


def expected_bits(num_leaves: int, leaves: list[list[Tensor]]) -> list[bytes]:
    totals = [expected_sum([leaf[position] for leaf in leaves]) for position in range(len(leaves[0]))]
    return [bits(total) for total in [*totals, 0.1 + torch.arange(num_leaves, dtype=torch.float64)]]


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("num_leaves", range(1, MAX + 1))
def test_every_world_size_gives_the_bits_of_one_process(
    groups: dict[int, GlooThreads], num_leaves: int, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_small:
        monkeypatch.setattr(ordered_tree, "SMALL_ELEMENTS", -1)
    leaves = awkward(num_leaves, (1009, 5, 64), seed=num_leaves)
    expected = expected_bits(num_leaves, leaves)
    for world_size in range(1, num_leaves + 1):
        for rank, got in enumerate(reduced(groups[world_size], num_leaves, leaves, chunk=400)):
            assert got == expected, (world_size, rank)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_awkward_sizes(groups: dict[int, GlooThreads], data: st.DataObject) -> None:
    num_leaves = data.draw(st.integers(1, MAX), "virtual ranks")
    world_size = data.draw(st.integers(1, num_leaves), "world size")
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3), "sizes")
    leaves = awkward(num_leaves, sizes, data.draw(st.integers(0, 2**32), "seed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_tree, "SMALL_ELEMENTS", data.draw(st.sampled_from([-1, 30, 1000]), "small"))
        found = reduced(groups[world_size], num_leaves, leaves, data.draw(st.integers(1, 50), "chunk"))
    assert found == [expected_bits(num_leaves, leaves)] * world_size


def test_summing_from_rank_to_rank_would_give_other_bits() -> None:
    """The test's numbers can tell orders apart."""
    leaves = [leaf[0] for leaf in awkward(8, (1009,), seed=8)]
    in_order = sum(leaves[1:], start=leaves[0])
    assert bits(in_order) != bits(expected_sum(leaves))


# --- one process ------------------------------------------------------------------------------------------------------


def share_of(counts: Sequence[int], inputs: Tensor) -> list[tuple[MicroBatch, Any]]:
    """All micro-batches of a step, of so many samples each."""
    found: list[tuple[MicroBatch, Any]] = []
    start = 0
    for shard, count in enumerate(counts):
        micro_batch = MicroBatch(
            epoch=0,
            step=1,
            shard=shard,
            indices=np.arange(start, start + count),
            step_samples=sum(counts),
            is_last=shard == len(counts) - 1,
        )
        found.append((micro_batch, inputs[start : start + count] if count else None))
        start += count
    return found


def mean_output(module: nn.Module, _micro_batch: MicroBatch, batch: Tensor) -> Tensor:
    outputs: Tensor = module(batch).square().mean()
    return outputs


def unscaled(loss: Tensor) -> Tensor:
    return loss


def run(model: nn.Module, counts: Sequence[int], loss: Any = mean_output, width: int = 4) -> Any:
    inputs = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(3))
    reduction = OrderedReduction(model, local_world(0, 1), CPU, len(counts))
    return reduction.run(share_of(counts, inputs), loss, unscaled, votes=(1, 0))


class Stacked(nn.Module):
    """Gradients of parameters that are stacked are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.stack(list(self.parts)).T


class Fused(nn.Module):
    """As query, key and value that are used in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        layers: list[Any] = list(self.parts)
        weight, bias = torch.cat([part.weight for part in layers]), torch.cat([part.bias for part in layers])
        return nn.functional.linear(inputs, weight, bias)


class Summed(nn.Module):
    """The gradient of a sum is one and the same tensor for both of its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (self.one.view(-1) + self.other.view(-1))


class Looked(nn.Module):
    """A sparse gradient, with an index that occurs more than once, also in both leaves of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs.mul(7).long().abs() % 5) * inputs.unsqueeze(-1)


class Tied(Looked):
    """A gradient that is sparse in some leaves and dense in others, as a table's that is an output layer at times."""

    def forward(self, inputs: Tensor) -> Tensor:
        is_output = bool(inputs[0, 0] > 0)
        return inputs[:, :3] @ self.table.weight.T if is_output else super().forward(inputs)


@pytest.mark.parametrize("make", [Stacked, Fused, Summed, Looked, Tied], ids=lambda make: str(make.__name__))
@pytest.mark.parametrize("num_leaves", [3, 8, 64])
def test_gradients_that_share_memory_or_are_sparse_are_added_in_the_tree(
    make: Callable[[], nn.Module], num_leaves: int
) -> None:
    """Leaf by leaf, each in tensors of its own, gives the same bits."""
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(2 * num_leaves, 4)
    share = share_of([2] * num_leaves, inputs)
    reduction = OrderedReduction(model, local_world(0, 1), CPU, num_leaves)
    for _ in range(2):  # the second one finds rows with the first one's garbage
        reduction.run(share, mean_output, unscaled, ())
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        leaves = []
        for micro_batch, batch in share:
            model.zero_grad(set_to_none=True)
            (mean_output(model, micro_batch, batch) * (2 / len(inputs))).backward()
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            leaves.append([(grad.to_dense() if grad.is_sparse else grad).clone() for grad in grads])
        assert len(found) == len(leaves[0])
        for index, grad in enumerate(found):
            assert grad.equal(expected_sum([leaf[index] for leaf in leaves])), index


def test_gradient_loss_and_votes_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    counts = [3, 2, 0, 1, 4]
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(3)).double()
    totals = OrderedReduction(model, local_world(0, 1), CPU, 5).run(
        share_of(counts, inputs), mean_output, unscaled, (1, 0)
    )
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    whole = model(inputs).square().mean()
    whole.backward()
    assert totals.loss == pytest.approx(whole.item(), rel=1e-12)
    assert totals.votes == (1, 0)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(grad, parameter.grad)


def test_a_gradient_of_minus_zero_stays_one() -> None:
    """Rows begin at the neutral element of addition, which +0.0 is not: it would turn -0.0 into 0.0."""
    model = nn.Linear(4, 2, bias=False)

    def loss(module: nn.Module, micro_batch: MicroBatch, _batch: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.mul(-0.0).sum() if micro_batch.shard == 2 else torch.zeros((), requires_grad=True)

    run(model, [1, 1, 1, 1], loss)
    assert model.weight.grad is not None
    assert bits(model.weight.grad) == bits(torch.full((2, 4), -0.0))


def test_gradients_keep_the_memory_format_of_their_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    inputs = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    OrderedReduction(model, local_world(0, 1), CPU, 2).run(share_of([2, 2], inputs), mean_output, unscaled, ())
    weight = model[0].weight
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert weight.grad.data_ptr() % 64 == 0


def test_batch_norm_moves_by_the_weighted_mean_over_micro_batches() -> None:
    counts = [3, 0, 2, 5]
    model = nn.BatchNorm1d(4)
    run(model, counts)
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
    expected_mean, expected_var, start = torch.zeros(4), torch.zeros(4), 0
    for count in counts:
        if count:
            alone = nn.BatchNorm1d(4)
            alone(inputs[start : start + count])
            expected_mean += alone.running_mean * count / 10
            expected_var += alone.running_var * count / 10
        start += count
    torch.testing.assert_close(model.running_mean, expected_mean)
    torch.testing.assert_close(model.running_var, expected_var)
    assert model.num_batches_tracked == 1


class Owner(nn.Module):
    """A module with buffers of every kind; `change` is called in its forward pass."""

    def __init__(self, change: Callable[[Owner], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan, 0.1]))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("positions", torch.arange(5))
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self)
        outputs: Tensor = self.linear(inputs)
        return outputs


def test_buffers_that_nothing_writes_keep_their_bits() -> None:
    model = Owner(lambda module: None)
    before = [bits(buffer) for buffer in (model.average, model.positions, model.mask[:2], model.mask[3:])]
    run(model, [1, 1, 1])
    after = [bits(buffer) for buffer in (model.average, model.positions, model.mask[:2], model.mask[3:])]
    assert after == before
    assert model.mask[2].isnan()


def test_a_buffer_that_is_replaced_is_averaged_and_stays_the_same_tensor() -> None:
    def replace(module: Owner) -> None:
        module.average = module.average * 0.5 + 1.0

    model = Owner(replace)
    before = model.average
    run(model, [2, 2])
    assert model.average is before
    assert model.average.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda module: module.positions.add_(1), "positions"),
        (lambda module: setattr(module, "average", torch.zeros(3)), "average"),
    ],
)
def test_buffers_that_cannot_be_averaged_are_refused(change: Callable[[Owner], None], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(Owner(change), [1, 1])


def test_a_scaler_can_step_where_this_rank_has_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of its process, which comes just before an epoch's last one, of fewer samples than ranks."""
    model, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu")
    reduction = OrderedReduction(model, local_world(0, 2), CPU, 2)
    monkeypatch.setattr(reduction, "_reduce", lambda _rows, message: message)
    nothing = MicroBatch(0, 1, 0, np.zeros(0, dtype=np.int64), 1, is_last=True)
    reduction.run([(nothing, None)], mean_output, scaler.scale, ())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scaler.get_scale())  # as the others' samples give
    scaler.step(optimizer)
    assert torch.equal(model.bias, before - 1)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_buffer_that_a_forward_pass_makes(*, is_saved: bool) -> None:
    """Each micro-batch of a rank would find what the one before has left, until the next world begins. A cache may be
    made: what is in no snapshot is taken for one."""

    def make(module: Owner) -> None:
        if not hasattr(module, "late"):
            module.register_buffer("late", torch.zeros(2), persistent=is_saved)
        module.late.add_(1 if is_saved else 0)

    model = Owner(make)
    if is_saved:
        with pytest.raises(UsageError, match="a forward pass made the buffer late, which is none of the model that"):
            run(model, [1, 1])
        return
    for _ in range(2):
        run(model, [1, 1])
    assert model.late.tolist() == [0.0, 0.0]


def test_sync_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(UsageError, match=r"layer 1 is a SyncBatchNorm.*--reduction fast"):
        OrderedReduction(model, local_world(0, 1), CPU, 8)


def test_a_gradient_in_several_parts_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)

    def loss(module: nn.Module, _micro_batch: MicroBatch, batch: Tensor) -> Tensor:
        hidden = checkpoint(module, batch.clone().requires_grad_(), use_reentrant=True)
        outputs: Tensor = checkpoint(module, hidden, use_reentrant=True)
        return outputs.square().mean()

    with pytest.raises(UsageError, match="use_reentrant=False"):
        run(layer, [2, 2], loss)


def test_when_a_step_fails_the_buffers_are_those_from_before() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = [buffer.clone() for buffer in model.buffers()]

    def fail(module: nn.Module, micro_batch: MicroBatch, batch: Tensor) -> Tensor:
        value = mean_output(module, micro_batch, batch)
        if micro_batch.shard == 2:
            raise RuntimeError("Connection closed by peer")
        return value

    with pytest.raises(RuntimeError, match="closed by peer"):
        run(model, [2, 2, 2, 2], fail)
    assert all(map(torch.equal, before, model.buffers()))


def test_parameters_may_be_frozen_between_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    reduction = OrderedReduction(model, local_world(0, 1), CPU, 2)
    for is_frozen in (False, True, False):
        model[0].requires_grad_(not is_frozen)
        model.zero_grad(set_to_none=True)
        reduction.run(share_of([2, 2], torch.randn(4, 4)), mean_output, unscaled, ())
        assert (model[0].weight.grad is None) == is_frozen
        assert model[1].weight.grad is not None


# --- determinism ------------------------------------------------------------------------------------------------------


@contextmanager
def deterministic(*, strict: bool) -> Iterator[list[str]]:
    """Switched on inside, the process's settings of before after it; gives what was warned."""
    show, threads = warnings.showwarning, torch.get_num_threads()
    compiler = {name: getattr(torch.compiler.config, name) for name in OF_COMPILER}
    said: list[str] = []
    try:
        determinism.switch_on(strict=strict, warn=said.append)
        yield said
    finally:
        warnings.showwarning = show
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        for name, value in compiler.items():
            setattr(torch.compiler.config, name, value)


OF_COMPILER = ("automatic_dynamic_shapes", "recompile_limit", "fail_on_recompile_limit_hit")


def without_deterministic_form(values: Tensor) -> Tensor:
    """Two operators that torch has no deterministic form of, on the CPU as well."""
    torch.nn.functional.max_unpool2d(*nn.functional.max_pool2d(values, 2, return_indices=True), 2)
    return values


def test_a_warning_names_each_operator_once() -> None:
    with deterministic(strict=False) as said, warnings.catch_warnings(record=False):
        warnings.simplefilter("always")
        for _ in range(3):
            without_deterministic_form(torch.randn(1, 1, 4, 4))
    assert len(said) == 1
    assert "max_unpool" in said[0]
    assert "\n" not in said[0]
    assert "--strict" in said[0]


def test_other_warnings_are_left_alone() -> None:
    shown: list[str] = []
    original = warnings.showwarning
    warnings.showwarning = lambda message, *rest, **more: shown.append(str(message))
    try:
        with deterministic(strict=False) as said:
            warnings.showwarning(UserWarning("something else"), UserWarning, "file", 1)
    finally:
        warnings.showwarning = original
    assert (said, shown) == ([], ["something else"])


def test_strict_names_the_operator_in_an_error() -> None:
    def loss(module: nn.Module, _micro_batch: MicroBatch, batch: Tensor) -> Tensor:
        without_deterministic_form(batch.reshape(1, 1, 2, 4))
        return mean_output(module, _micro_batch, batch)

    with deterministic(strict=True), pytest.raises(UsageError, match=r"--strict: max_unpool\S* has no deterministic"):
        run(nn.Linear(4, 2), [2, 2], loss)


@pytest.fixture
def sizes() -> Iterator[list[int]]:
    """Of the batches for which `compiled` has made a graph, "s" for any; in the order in which they were made."""
    torch.compiler.reset()
    made.clear()
    yield made
    torch.compiler.reset()


made: list[Any] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def compiled(**options: Any) -> nn.Module:
    """A layer whose graphs run as they are."""

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append([one.shape[0] for one in inputs if isinstance(one, Tensor)][-1])
        return graph.forward

    model = Layer()  # torch 2.11 compiles no layer of its own by Module.compile
    model.compile(backend=note, **options)
    return model


def run_batches(model: nn.Module, sizes: Sequence[int]) -> None:
    for size in sizes:
        run(model, [size], mean_output)


@pytest.mark.parametrize("options", [{}, {"dynamic": None}, {"dynamic": False}])
def test_each_shape_has_a_graph_of_its_own_whatever_a_process_has_met(sizes: list[int], options: Any) -> None:
    """torch would run the ninth one as it is, and, left to itself, the second one by a graph for all that follow: which
    ones these are is a matter of what came first."""
    with deterministic(strict=False):
        run_batches(compiled(**options), [*range(1, 11), *range(1, 11)])
    assert sizes == [*range(1, 11)]


@pytest.mark.parametrize("how", ["trains", "evaluates"])
def test_what_exceeds_the_limit_of_graphs_is_refused(sizes: list[int], how: str) -> None:
    class Summing(Task):
        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"loss": model(batch[0]).sum()}

    def evaluate_batches(model: nn.Module, sizes: Sequence[int]) -> None:
        for size in sizes:
            config = Config(reduction="ordered", global_batch_size=size)
            evaluate(model, Summing(), TensorDataset(torch.randn(size, 4)), local_world(0, 1), CPU, config)

    use = run_batches if how == "trains" else evaluate_batches
    with deterministic(strict=False):
        model = compiled()
        torch.compiler.config.recompile_limit = 2
        use(model, [4, 5, 4, 5])
        with pytest.raises(UsageError) as raised:
            use(model, [6])
    assert str(raised.value) == (
        "--reduction ordered: torch.compile has made 2 graphs of one function, and would run further shapes "
        "uncompiled, so the bits would depend on the shapes that a process has seen: pad to fewer lengths, or raise "
        "torch.compiler.config.recompile_limit and accumulated_recompile_limit when your module is imported"
    )
    assert sizes == [4, 5]


def test_a_limit_that_the_user_has_raised_stays() -> None:
    with torch.compiler.config.patch(recompile_limit=1000), deterministic(strict=False):  # type: ignore[attr-defined]
        assert torch.compiler.config.recompile_limit == 1000


def test_fingerprint_says_what_differs() -> None:
    with deterministic(strict=False):
        now = determinism.fingerprint(CPU)
    assert now["threads"] == 1
    assert now["torch"] == torch.__version__
    assert now["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {type(value) for value in now.values()} == {str, int}, "as a snapshot takes them, no kind of its own"
    assert determinism.compare(now, dict(now)) == []
    saved = {**now, "threads": 4, "gpu": "another"}
    assert determinism.compare(saved, now) == ["gpu another before, unset now", "threads 4 before, 1 now"]


def test_cpu_kind(tmp_path: Any) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nvendor_id\t: Made\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Made X\n\nprocessor\t: 1\n"
    )
    assert determinism._cpu_kind(processor_facts(path)) == "Made family 6 model 85"
    path.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert determinism._cpu_kind(processor_facts(path)) == "0x41 0xd0c"
    assert determinism._cpu_kind(processor_facts(tmp_path / "none"))
