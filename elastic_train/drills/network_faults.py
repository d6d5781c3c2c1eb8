"""The harm that needs a network of its own for every node: silence, one-way silence, loss, a slow line."""

from __future__ import annotations

from elastic_train.drills.cluster import NodeState, Place
from elastic_train.drills.harm import RECOVERY_LIMIT_SECONDS, Disturbance, Fault, Harm, NotStruck


class Partition(Fault):
    name = "partition"
    says = "a node's cable is pulled; plugged in again once the others are through"
    needs_network = True
    undo_after = 1.0

    def limit_seconds(self, harm: Harm) -> float:
        return 3 * harm.peer_timeout + RECOVERY_LIMIT_SECONDS

    def cut(self, harm: Harm) -> None:
        assert harm.cluster.network is not None
        harm.cluster.network.pull_cable(harm.targets[0].index)

    def strike(self, harm: Harm) -> str:
        place, network = harm.targets[0], harm.cluster.network
        assert network is not None
        self.cut(harm)
        place.affliction = NodeState.CUT_OFF
        if network.can_reach_hub(place.index, 0.3):
            raise NotStruck("it still reaches the others")
        return "it does not reach the bridge"

    def undo(self, harm: Harm) -> None:
        assert harm.cluster.network is not None
        harm.cluster.network.heal(harm.targets[0].index)
        harm.targets[0].affliction = NodeState.OUT

    def is_cleared(self, harm: Harm) -> bool:
        return not harm.targets[0].is_running


class OneWayDrop(Partition):
    name = "one-way"
    says = "what a node sends is dropped, what it hears is not"

    def cut(self, harm: Harm) -> None:
        assert harm.cluster.network is not None
        harm.cluster.network.drop_outgoing(harm.targets[0].index)


class PowerLoss(Fault):
    name = "power-loss"
    says = "a node's port goes down, then all of its processes: silence, no FIN and no RST"
    needs_network = True

    def limit_seconds(self, harm: Harm) -> float:
        return 3 * harm.peer_timeout + RECOVERY_LIMIT_SECONDS

    def strike(self, harm: Harm) -> str:
        place, network = harm.targets[0], harm.cluster.network
        assert network is not None
        network.pull_cable(place.index)
        harm.cluster.kill([place])  # it comes back with its cable when it joins
        return "port down, processes gone"


class PacketLoss(Disturbance):
    name = "packet-loss"
    says = "a fifth of the packets to a node is lost for three seconds"
    needs_network = True

    def strike(self, harm: Harm) -> str:
        assert harm.cluster.network is not None
        harm.cluster.network.drop_some(harm.targets[0].index, 0.2)
        return "20 % of what comes in is dropped"

    def may_take(self, harm: Harm) -> list[Place]:
        """TCP doubles its wait at every loss of the same packet: by chance a node is silent for --peer-timeout."""
        return harm.targets

    def undo(self, harm: Harm) -> None:
        assert harm.cluster.network is not None
        harm.cluster.network.heal(harm.targets[0].index)


class SlowLink(PacketLoss):
    name = "slow-link"
    says = "a node sends at 2 Mbit/s for three seconds"

    def strike(self, harm: Harm) -> str:
        assert harm.cluster.network is not None
        harm.cluster.network.slow_down(harm.targets[0].index, "2mbit")
        return "2 Mbit/s"
