"""Cuts in the network of a drill that no fault of a drill makes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import combinations, product

from elastic_train.tools.drills.network import Network


def cut_pair(network: Network, index: int, other: int) -> None:
    """Two nodes lose each other; both still reach everybody else. `Network.heal` of both ends it."""
    network.hide(index, [network.address(other)])
    network.hide(other, [network.address(index)])


def split(network: Network, *groups: Sequence[int]) -> None:
    """The nodes of a group hear each other and nobody else; the first group has the hub, and those in none."""
    ip = [*network.hub_prefix(), "ip", "link"]
    for number, group in enumerate(groups):
        bridge = f"br{number}"
        if subprocess.run([*ip, "show", bridge], capture_output=True, check=False).returncode != 0:
            subprocess.run([*ip, "add", bridge, "type", "bridge"], check=True)
            subprocess.run([*ip, "set", bridge, "up"], check=True)
        for index in group:
            network.plug_in(index, bridge)


def split_at_the_hub(network: Network, *groups: Sequence[int]) -> None:
    """The nodes of a group hear each other and no other node; all still reach the hub. As `cut_pair`, of many."""
    for one, other in combinations(groups, 2):
        for pair in product(one, other):
            cut_pair(network, *pair)
