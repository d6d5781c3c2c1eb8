"""The faults that need a network of its own for every node: silence, one-way silence, loss, a slow line."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.tools.drills.cluster import NodeState, Place
from elastic_train.tools.drills.injection import Absence, Disturbance, Injection, NotInjected, Silence
from elastic_train.tools.drills.network import Network

LOST_SHARE = 0.2
SLOW_RATE = "2mbit"
EFFECT_SECONDS = 10.0
"""within which some packet comes or goes, a heartbeat at least"""


class Partition(Absence):
    name = "partition"
    says = "a node's cable is pulled; plugged in again once the others are through, and it comes back"
    needs_network = True

    def cut(self, injection: Injection) -> None:
        injection.network.pull_cable(injection.place.index)

    def inject(self, injection: Injection) -> str:
        self.cut(injection)
        injection.place.effect = NodeState.CUT_OFF
        if injection.network.can_reach(injection.place.index, seconds=0.3):
            raise NotInjected("it still reaches the others")
        return "it does not reach the bridge"

    def undo(self, injection: Injection) -> None:
        injection.network.heal(injection.place.index)
        injection.place.effect = NodeState.OUT


class OneWayDrop(Partition):
    name = "one-way"
    says = "what a node sends is dropped, what it hears is not"

    def cut(self, injection: Injection) -> None:
        injection.network.drop_outgoing(injection.place.index)


class PowerLoss(Silence):
    name = "power-loss"
    says = "a node's port goes down, then all of its processes: silence, no FIN and no RST"
    needs_network = True

    def inject(self, injection: Injection) -> str:
        injection.network.pull_cable(injection.place.index)
        injection.cluster.kill(injection.targets)  # it comes back with its cable when it joins
        return "port down, processes gone"


class PacketLoss(Disturbance):
    name = "packet-loss"
    says = "a fifth of the packets to a node is lost for three seconds"
    needs_network = True

    @classmethod
    def why_not(cls) -> str | None:
        return Network.why_no(lambda network: network.drop_some(0, LOST_SHARE))

    def inject(self, injection: Injection) -> str:
        network, index = injection.network, injection.place.index
        network.drop_some(index, LOST_SHARE)
        seconds = _seconds_until(lambda: network.num_dropped(index) > 0, "no packet was dropped")
        return f"{LOST_SHARE:.0%} of what comes in is dropped, the first packet after {seconds:.2f} s"

    def may_take(self, injection: Injection) -> list[Place]:
        """TCP doubles its wait at every loss of the same packet: by chance a node is silent for --peer-timeout."""
        return injection.targets

    def undo(self, injection: Injection) -> None:
        injection.network.heal(injection.place.index)


class SlowLink(PacketLoss):
    name = "slow-link"
    says = "a node sends at 2 Mbit/s for three seconds"
    needs_company = True

    @classmethod
    def why_not(cls) -> str | None:
        return Network.why_no(lambda network: network.slow_down(0, SLOW_RATE))

    def inject(self, injection: Injection) -> str:
        network, index = injection.network, injection.place.index
        network.slow_down(index, SLOW_RATE)
        seconds = _seconds_until(lambda: network.num_held_back(index) > 0, "no packet was held back")
        return f"{SLOW_RATE}, the first packet was held back after {seconds:.2f} s"


def _seconds_until(has_effect: Callable[[], bool], otherwise: str) -> float:
    """How long it took. Raises: NotInjected where what was done meets with no packet."""
    started = time.monotonic()
    while not has_effect():
        if time.monotonic() - started > EFFECT_SECONDS:
            raise NotInjected(f"{otherwise} in {EFFECT_SECONDS:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - started
