"""The effect of a quarantine: rank 0 leaves a ready node in the join queue, and reports that to both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_train.elastic.joins import Node
from elastic_train.protocol.quarantine import describe_deaths, quarantines, waits
from elastic_train.training.state import TrainState
from elastic_train.wording import duration
from elastic_train.world import World


def run_seconds(state: TrainState) -> float:
    """Return how long the run has lasted; equal on all that hold its state, whatever their clocks show."""
    return sum(state.clock.totals().values())


def admissible(
    own_state: Callable[[], TrainState | None],
    warn: Callable[[str], None],
    send_once: Callable[[Node, str, str], bool],
    world: World,
    nodes: Sequence[Node],
) -> list[Node]:
    """Return those of some ready nodes that may join `world` now. Runs on rank 0's watcher thread.

    Args:
        own_state: returns None while this worker does not hold the run's state.
        warn: prints a warning in this job, and writes it to the run's events.
        send_once: as `QueueNews.send_once`.
    """
    state = own_state()
    if state is None or not nodes:
        return list(nodes)
    now, step = run_seconds(state), state.step
    found = quarantines(state.incidents, now)
    kept = [node for node in nodes if node[0].host in found and waits(node, world, step)]
    for node in kept:
        host, quarantine = node[0].host, found[node[0].host]
        why = (
            f"{host} waits {duration(quarantine.until - now)} in the join queue (--quarantine): "
            f"{describe_deaths(quarantine.deaths)}"
        )
        if send_once(node, why, "quarantine"):
            warn(why)
    return [node for node in nodes if node not in kept]


def lasting(state: TrainState, world: World, wall: float) -> list[dict[str, Any]]:
    """Return the quarantines of hosts outside of `world`, for people and programs; `wall` is now, in Unix seconds."""
    now, inside = run_seconds(state), {member.host for member in world.members}
    return [
        {"host": host, "deaths": one.deaths, "until": wall + one.until - now}
        for host, one in sorted(quarantines(state.incidents, now).items())
        if host not in inside
    ]
