"""What a quarantine does: rank 0 leaves a node in the join queue though it is ready, and says so to both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_train.elastic.joins import Node
from elastic_train.protocol.quarantine import Quarantine, describe_deaths, quarantines, waits
from elastic_train.training.state import TrainState
from elastic_train.wording import duration
from elastic_train.world import World


def run_seconds(state: TrainState) -> float:
    """How long the run has lasted; the same for all who hold its state, whatever their clocks show."""
    return sum(state.clock.totals().values())


class Quarantined:
    """Picks the nodes that may be admitted. For the watcher's thread of rank 0.

    Args:
        state: of this worker; None while it does not hold the run's.
        warn: tells the people of this job, and notes it in the run's events.
        tell_once: as `QueueNews.tell_once`.
    """

    def __init__(
        self,
        state: Callable[[], TrainState | None],
        warn: Callable[[str], None],
        tell_once: Callable[[Node, str, str], bool],
    ) -> None:
        self._state, self._warn, self._tell_once = state, warn, tell_once

    def admissible(self, world: World, nodes: Sequence[Node]) -> list[Node]:
        """Those of some nodes that are ready to join `world` which need not wait."""
        state = self._state()
        if state is None or not nodes:
            return list(nodes)
        now, step = run_seconds(state), state.step
        found = quarantines(state.incidents, now)
        kept = [node for node in nodes if node[0].host in found and waits(node, world, step)]
        for node in kept:
            self._tell(node, found[node[0].host], now)
        return [node for node in nodes if node not in kept]

    def _tell(self, node: Node, quarantine: Quarantine, now: float) -> None:
        why = (
            f"{node[0].host} waits {duration(quarantine.until - now)} in the join queue (--quarantine): "
            f"{describe_deaths(quarantine.deaths)}"
        )
        if self._tell_once(node, why, "quarantine"):
            self._warn(why)


def lasting(state: TrainState, world: World, wall: float) -> list[dict[str, Any]]:
    """The quarantines of hosts that `world` does without, for people and programs; `wall` is now, in Unix seconds."""
    now, inside = run_seconds(state), {member.host for member in world.members}
    found: Mapping[str, Quarantine] = quarantines(state.incidents, now)
    return [
        {"host": host, "deaths": one.deaths, "until": wall + one.until - now}
        for host, one in sorted(found.items())
        if host not in inside
    ]
