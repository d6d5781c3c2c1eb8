"""The state that counts when all workers of a world end at one step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic import exits
from elastic_train.elastic.exits import Exits
from elastic_train.training.averaging import AveragedWeights
from elastic_train.training.state import TrainState
from elastic_train.world import World
from tests.unit.test_liveness import make_member

PAIR = World(rank=1, generation=0, members=(make_member(0), make_member(1)))
OF_RANK_0 = 7


class Saved(Exception):
    """The state is about to be saved."""


def make_exits(monkeypatch: pytest.MonkeyPatch, reduction: str) -> tuple[Exits, TrainState, list[str]]:
    """Of rank 1, whose state is saved into a run directory of its own."""
    model = nn.BatchNorm1d(1)
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), length=4, global_batch_size=2, epochs=1,
        extras={"ema": AveragedWeights(model, 0.9), "d": nn.BatchNorm1d(1)},
    )  # fmt: skip
    done: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: done.append(name)

    def receive(module: nn.Module, check: Callable[[], None], *, saved_alone: bool) -> Any:
        assert saved_alone
        check()
        done.append("receive")
        assert state.lock.acquire(0.0), "a late stop can save meanwhile"
        state.lock.give_back()
        return [([buffer], torch.full_like(buffer, OF_RANK_0).reshape(-1)) for buffer in module.buffers()]

    def save(*_arguments: Any) -> None:
        raise Saved

    monkeypatch.setattr(exits, "barrier", note("barrier"))
    monkeypatch.setattr(exits, "buffers_of_rank_0", receive)
    monkeypatch.setattr(exits, "set_group_timeout", note("timeout"))
    monkeypatch.setattr(exits, "save_together", save)
    worker: Any = SimpleNamespace(
        state=state, config=SimpleNamespace(reduction=reduction), reporter=None, device=torch.device("cpu"),
        stop=SimpleNamespace(settle=note("settle")),
    )  # fmt: skip
    membership: Any = SimpleNamespace(
        watcher=SimpleNamespace(do=note("do")), sockets=SimpleNamespace(require_unbroken=note("look"))
    )
    saver: Any = SimpleNamespace(is_last_writer=lambda _world: True, save_and_wait=save)
    trainer: Any = SimpleNamespace(evaluate_if_missed=note("evaluate"))
    return Exits(worker, membership, saver, trainer, SimpleNamespace()), state, done  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["stop", "finish"])
@pytest.mark.parametrize(("reduction", "expected"), [("fast", OF_RANK_0), ("ordered", 0)])
def test_what_each_node_saves_at_the_end_has_the_statistics_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, how: str, reduction: str, expected: int
) -> None:
    """With fast reduction each rank has its own, and each run directory the state of another rank. In ordered mode all
    have the same, and nothing is sent."""
    leaving, state, done = make_exits(monkeypatch, reduction)
    with pytest.raises(Saved):
        leaving.stop(PAIR) if how == "stop" else leaving.finish(PAIR, "finished", is_saved=False)
    assert state.averaged is not None
    modules = (state.model, state.averaged.model, state.extras["d"])
    for module in modules:
        assert isinstance(module, nn.BatchNorm1d)
        assert module.running_mean == module.num_batches_tracked == expected
    if how == "stop" and reduction == "fast":  # who has not committed the step is lost before, and nothing is taken
        assert done.index("barrier") < done.index("receive") < done.index("settle")
