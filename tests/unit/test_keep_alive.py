"""torchrun's agents tell the dead from the living though their clocks are apart; with torchrun's own classes."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as theirs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from elastic_train import keep_alive

HOUR = timedelta(hours=1)
SETTINGS = RendezvousSettings(
    run_id="x", min_nodes=1, max_nodes=4, timeout=RendezvousTimeout(), keep_alive_interval=timedelta(seconds=5),
    keep_alive_max_attempt=3,
)  # fmt: skip
OTHER, JOINER = _NodeDesc("other", 1, 0), _NodeDesc("joiner", 2, 0)


class World:
    """The right time, and the state that agents share."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.ahead = timedelta()
        """of the clock of the agent that is looked at"""
        self.state = _RendezvousState()
        self.state.participants = {OTHER: 0}
        self.state.complete = True
        self.beat()

    def right(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def beat(self) -> None:
        self.state.last_heartbeats[OTHER] = self.right()

    def get_state(self) -> tuple[bytes, int]:
        return pickle.dumps(self.state), 1

    def participants(self, holder: Any) -> list[str]:
        """Of an agent that looks now."""
        holder.sync()
        kept = holder.state.last_heartbeats
        assert kept == {node: self.state.last_heartbeats[node] for node in kept}, "what goes back is as they wrote it"
        return [node.addr for node in holder.state.participants]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    clock = SimpleNamespace(now=lambda zone: world.right() + world.ahead)
    monkeypatch.setattr(theirs, "datetime", clock)
    monkeypatch.setattr(keep_alive, "datetime", clock)
    monkeypatch.setattr(keep_alive, "time", SimpleNamespace(monotonic=lambda: world.seconds))
    for where, name in ((_BackendRendezvousStateHolder, "_sanitize"), (theirs, "_should_keep_alive")):
        monkeypatch.setattr(where, name, getattr(where, name))  # as it is now, when the test is over
    return world


@pytest.mark.parametrize("ahead", [timedelta(), HOUR, -HOUR], ids=["right", "ahead", "behind"])
def test_who_goes_on_writing_lives_and_who_does_not_is_dropped_after_15_seconds(world: World, ahead: timedelta) -> None:
    keep_alive.install()
    keep_alive.install()
    world.ahead = ahead
    holder = _BackendRendezvousStateHolder(world, SETTINGS, cache_duration=0)  # type: ignore[arg-type]
    for _ in range(10):
        assert world.participants(holder) == ["other"]
        world.seconds += 5
        world.beat()
    assert world.participants(holder) == ["other"]
    world.seconds += 14.9
    assert world.participants(holder) == ["other"]
    world.seconds += 0.2
    assert world.participants(holder) == []


def test_a_clock_that_is_set_while_the_agent_runs(world: World) -> None:
    keep_alive.install()
    holder = _BackendRendezvousStateHolder(world, SETTINGS, cache_duration=0)  # type: ignore[arg-type]
    for ahead in (timedelta(), HOUR, -HOUR, timedelta()):
        world.ahead = ahead
        assert world.participants(holder) == ["other"]
        world.seconds += 5
        world.beat()


def test_torchruns_own_takes_the_living_for_dead(world: World) -> None:
    """Else there is nothing to mend."""
    world.ahead = HOUR
    holder = _BackendRendezvousStateHolder(world, SETTINGS, cache_duration=0)  # type: ignore[arg-type]
    assert world.participants(holder) == []


def test_an_agent_whose_clock_was_set_back_goes_on_writing(world: World) -> None:
    context: Any = SimpleNamespace(node=OTHER, state=world.state, settings=SETTINGS)
    world.ahead = -HOUR
    assert not theirs._should_keep_alive(context), "torchrun's own would be silent for an hour"
    keep_alive.install()
    assert theirs._should_keep_alive(context)
    world.state.last_heartbeats[OTHER] = world.right() + world.ahead
    assert not theirs._should_keep_alive(context)
    world.seconds += 5
    assert theirs._should_keep_alive(context)
    assert not theirs._should_keep_alive(SimpleNamespace(node=JOINER, state=world.state, settings=SETTINGS))  # type: ignore[arg-type]
