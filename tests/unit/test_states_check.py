"""The warnings about extras that differ between ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic import states_check
from elastic_train.elastic.states_check import StateChecks
from elastic_train.training.state_hash import plain_hashes
from elastic_train.world import World
from tests.unit.test_liveness import make_member
from tests.unit.test_state import make_state

PAIR = World(rank=0, generation=0, members=(make_member(0), make_member(1)))


class Kept:
    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.value}


@pytest.mark.parametrize("rank", [0, 1])
def test_extras_that_differ_are_named_once_in_a_world_and_by_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said, compared, state = list[str](), list[Any](), make_state()
    best, state.extras = Kept(0.5), {"same": Kept(1.0), "best": Kept(0.5)}

    def gather(mine: dict[str, int]) -> list[dict[str, int]]:
        """The other rank has its own best, and trains with settings of its own: those are not among the extras."""
        compared.append(mine)
        return [mine, {**mine, "best": plain_hashes(other)["best"]}]

    other = make_state(lr=0.2)
    other.extras = {"same": Kept(1.0), "best": best}
    monkeypatch.setattr(states_check, "gather_json", gather)
    worker: Any = SimpleNamespace(
        state=state, device=SimpleNamespace(type="cpu"), reporter=SimpleNamespace(warn=said.append)
    )
    membership: Any = SimpleNamespace(watcher=SimpleNamespace(do=lambda _activity: None))
    checks: Any = StateChecks(worker, membership)
    checks.comparison = lambda *_: SimpleNamespace(begin=lambda: None)
    checks.finish = lambda _comparison: None
    end: Any = SimpleNamespace(lost=None)
    world, later = replace(PAIR, rank=rank), replace(PAIR, rank=rank, generation=1)

    checks.check(world, end)
    assert said == []
    best.value = 9.0
    checks.check(world, end)
    checks.check(world, end)
    assert len(compared) == 2, "what is known is not compared again"
    checks.check(later, end)
    assert [line.split(". ")[0] for line in said] == ["extras differ between the ranks: best"] * (2 if rank == 0 else 0)
    assert [sorted(one) for one in compared] == [["best", "same"]] * 3
