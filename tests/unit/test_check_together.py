"""Which ranks try to reach which before there is a process group, and the measurements in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.errors import FormationFailed
from elastic_train.tools.check.together import measure_all_reduce, probed_by
from elastic_train.world import World


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 66, 200])
def test_everybody_is_probed_by_as_many(size: int) -> None:
    counts = [0] * size
    for rank in range(size):
        probed = probed_by(rank, size)
        assert rank not in probed
        for other in probed:
            counts[other] += 1
    assert set(counts) == {min(size - 1, 64)}


@pytest.mark.parametrize("size", [1, 2, 257, 999])
def test_a_right_sum_of_any_number_of_workers_is_right(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """257 cubed is no float32."""
    members: Any = (None,) * size
    world = World(rank=0, generation=0, members=members)
    monkeypatch.setattr(dist, "all_reduce", lambda data: data.mul_(size))
    assert measure_all_reduce(world, torch.device("cpu")) > 0
    monkeypatch.setattr(dist, "all_reduce", lambda data: data.mul_(size + 1))
    with pytest.raises(FormationFailed, match="a wrong sum"):
        measure_all_reduce(world, torch.device("cpu"))
