"""The faults that need a network of its own for every node: silence, one-way silence, loss, a slow line."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.tools.drills.cluster import NodeState, Place
from elastic_train.tools.drills.injection import Absence, Disturbance, NotInjected, Silence
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import wait_until

LOST_SHARE = 0.2
SLOW_RATE = "2mbit"
EFFECT_SECONDS = 10.0
"""within which some packet comes or goes, a heartbeat at least"""


class Partition(Absence):
    name = "partition"
    says = "a node's cable is pulled; plugged in again once the others are through, and it comes back"
    needs_network = True

    def cut(self) -> None:
        self.network.pull_cable(self.place.index)

    def inject(self) -> str:
        self.cut()
        self.place.effect = NodeState.CUT_OFF
        if self.network.can_reach(self.place.index, seconds=0.3):
            raise NotInjected("it still reaches the others")
        return "it does not reach the bridge"

    def undo(self) -> None:
        self.network.heal(self.place.index)
        self.place.effect = NodeState.OUT


class OneWayDrop(Partition):
    name = "one-way"
    says = "what a node sends is dropped, what it hears is not"

    def cut(self) -> None:
        self.network.drop_outgoing(self.place.index)


class PowerLoss(Silence):
    name = "power-loss"
    says = "a node's port goes down, then all of its processes: silence, no FIN and no RST"
    needs_network = True

    def inject(self) -> str:
        self.network.pull_cable(self.place.index)
        self.cluster.kill(self.targets)  # it comes back with its cable when it joins
        return "port down, processes gone"


class PacketLoss(Disturbance):
    name = "packet-loss"
    says = "a fifth of the packets to a node is lost for three seconds"
    needs_network = True

    @classmethod
    def why_not(cls) -> str | None:
        return Network.why_no(lambda network: network.drop_some(0, LOST_SHARE))

    def inject(self) -> str:
        self.network.drop_some(self.place.index, LOST_SHARE)
        seconds = _seconds_until(self.network.num_dropped, self.place, "packet was dropped")
        return f"{LOST_SHARE:.0%} of what comes in is dropped, the first packet after {seconds:.2f} s"

    def may_take(self) -> list[Place]:
        """TCP doubles its wait at every loss of the same packet: by chance a node is silent for --peer-timeout."""
        return self.targets

    def undo(self) -> None:
        self.network.heal(self.place.index)


class SlowLink(PacketLoss):
    name = "slow-link"
    says = "a node sends at 2 Mbit/s for three seconds"
    needs_company = True

    @classmethod
    def why_not(cls) -> str | None:
        return Network.why_no(lambda network: network.slow_down(0, SLOW_RATE))

    def inject(self) -> str:
        self.network.slow_down(self.place.index, SLOW_RATE)
        seconds = _seconds_until(self.network.num_held_back, self.place, "packet was held back")
        return f"{SLOW_RATE}, the first packet was held back after {seconds:.2f} s"


def _seconds_until(count: Callable[[int], int], place: Place, what: str) -> float:
    """How long it took to the first packet. Raises: TooSlow where what was done meets with none."""
    started = time.monotonic()
    wait_until(lambda: count(place.index) > 0, what, EFFECT_SECONDS)
    return time.monotonic() - started
