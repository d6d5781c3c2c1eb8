"""torchrun's keep-alive, without comparing the wall clocks of its agents.

The agents of a c10d rendezvous (torch 2.11 to 2.15; it came with pytorch/pytorch#56538) write into their shared state
when they were last alive, each by its own clock, and drop whoever's word is 15 s old by theirs. So an agent whose clock
is ahead takes all others for dead: one that comes to a job that trains drops it, forms a world of its own, and takes
the run directory away from the rest. And one whose clock is set back writes nothing more until the old word is past.

Here a word is as old as its reader has seen it unchanged, by the monotonic clock; the rest stays torchrun's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any


class Sightings:
    """Since when one agent has seen the words of the others as they are."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[datetime, float]] = {}

    def by_own_clock(self, heartbeats: Mapping[Any, datetime], now: datetime, monotonic: float) -> dict[Any, datetime]:
        """The heartbeats by node, as if this agent had written each when it first saw it."""
        self._seen = {
            node: seen if (seen := self._seen.get(node)) is not None and seen[0] == word else (word, monotonic)
            for node, word in heartbeats.items()
        }
        return {node: now - timedelta(seconds=monotonic - since) for node, (_, since) in self._seen.items()}


def install() -> None:
    """From now on the agent in this process judges so, told once or twice. These parts of torch 2.11 to 2.15 are
    private: where they are not what they were, nothing changes."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as theirs

    holder = getattr(theirs, "_BackendRendezvousStateHolder", None)
    sanitize, should_keep_alive = getattr(holder, "_sanitize", None), getattr(theirs, "_should_keep_alive", None)
    if holder is None or sanitize is None or should_keep_alive is None or sanitize.__module__ == __name__:
        return

    def sanitize_by_sight(self: Any) -> None:
        words = self._state.last_heartbeats
        sightings = vars(self).setdefault("_sightings", Sightings())
        self._state.last_heartbeats = sightings.by_own_clock(words, datetime.now(UTC), time.monotonic())
        sanitize(self)
        self._state.last_heartbeats = {node: words[node] for node in self._state.last_heartbeats}

    def should_keep_alive_now(context: Any) -> bool:
        own = context.state.last_heartbeats.get(context.node)
        return should_keep_alive(context) or (own is not None and own > datetime.now(UTC))

    holder._sanitize = sanitize_by_sight
    theirs._should_keep_alive = should_keep_alive_now  # type: ignore[assignment]
