"""Which ranks try to reach which before there is a process group, and the measurements in one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.errors import FormationFailed
from elastic_train.tools.check import together
from elastic_train.tools.check.facts import SharedFacts
from elastic_train.tools.check.together import gather_facts, measure_all_reduce, probed_by
from elastic_train.world import World, to_json


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


def test_the_facts_of_another_build_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of two builds are what the check is to find: it must not end with a traceback."""
    mine = SharedFacts(unreachable=(1,), sees_directory_of=(0,), clock=1.5)
    other = {**json.loads(to_json(mine)), "since": "the next build"}
    members: Any = (SimpleNamespace(name="a/0/1"), SimpleNamespace(name="b/0/2"))
    world, membership = World(rank=0, generation=0, members=members), SimpleNamespace()
    monkeypatch.setattr(together, "gather", lambda *_: [to_json(mine), json.dumps(other)])
    assert gather_facts(membership, world, "shared", mine) == [mine, mine]  # type: ignore[arg-type]
    del other["clock"]
    with pytest.raises(FormationFailed, match=r"b/0/2 says of itself cannot be read here: .* the same build"):
        gather_facts(membership, world, "shared", mine)  # type: ignore[arg-type]
