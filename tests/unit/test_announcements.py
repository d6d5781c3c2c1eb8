"""The messages between the members of a world, by the stores of other members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.known_worlds import Announcements, KnownWorlds
from elastic_train.protocol.store import Clients
from elastic_train.world import World
from tests.memory_store import MemoryClient, MemoryStore
from tests.unit.test_world import member


def test_rank_0_is_asked_again_after_it_was_silent_for_a_moment() -> None:
    """A member that waits for more nodes would not learn that the others have begun."""
    own, first, silence = MemoryStore(), MemoryStore(), [False]
    members = [replace(member(rank, 0), uid=f"m{rank}", store=("10.0.0.1", rank)) for rank in range(2)]
    world, first.values["uid"] = World(1, 3, tuple(members), uid="w"), "m0"
    clients = Clients(own, "m1", lambda _address: MemoryClient(first, lambda: silence[0]))
    newcomers: Any = None
    announcements = Announcements(clients, KnownWorlds(own), newcomers)
    assert announcements.not_ready(world) == (0, 1)
    silence[0] = True
    with pytest.raises(StoreUnreachable):
        announcements.not_ready(world)
    silence[0] = False
    assert not announcements.are_ready(world)
    assert announcements.not_ready(world) == (0, 1)
