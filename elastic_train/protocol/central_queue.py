"""The join queue in a store that all share, and the worlds that those in it make by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from elastic_train.protocol.agreement import Decision, Standing
from elastic_train.protocol.job import InQueue
from elastic_train.protocol.join_queue import Size, Waiting, by_newest, is_start_due, ready_nodes, without_nodes_of
from elastic_train.protocol.store import ListingStore
from elastic_train.rules import agreeing, next_generation
from elastic_train.world import Member

SILENT_SECONDS = 5.0
"""without a heartbeat of its own: then a worker knows nothing of the others' silence either"""
TURN_SECONDS = 1.0
"""that the first of those who wait has to begin the first world, before any other does it"""


class CentralQueue:
    """The join queue, and how those in it make a world by themselves: the first one, or one after a world whose members
    are all gone. For the training thread, but `waiting`, which any thread may call.

    Args: as of CentralJob.
    """

    def __init__(
        self,
        store: ListingStore,
        prefix: str,
        size: Size,
        *,
        peer_timeout: float,
        longest_silence: float,
        refused: Callable[[Sequence[Member]], list[Member]],
        draw_uid: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._prefix, self._size = store, prefix, size
        self._peer_timeout, self._longest_silence = peer_timeout, longest_silence
        self._refused, self._draw_uid, self._clock = refused, draw_uid, clock
        self._parsed: dict[str, Waiting] = {}
        """what the queue's texts say: hundreds wait, and look again at every change"""
        self._enough_since: float | None = None
        self._due_since: float | None = None
        self._next_look = 0.0
        """who is not the first to propose need not look at every change, where hundreds wait"""
        self._heartbeats: tuple[dict[str, str], float] = ({}, clock())
        """of those who train, as they stand, and since when nothing has hidden a change"""
        self._own: tuple[str | None, float] = (None, clock())
        """this worker's own heartbeat, and when it came"""

    def waiting(self, store: ListingStore) -> list[Waiting]:
        """Workers in the queue, by their launcher's order; `store` is that of the thread that asks."""
        texts = store.below(f"{self._prefix}/queue/").values()
        before = self._parsed
        parsed = {text: before.get(text) or Waiting.from_json(text) for text in texts}
        self._parsed = {text: one for text, one in parsed.items() if one is not None}
        return sorted(self._parsed.values(), key=lambda one: (one.order, one.member.name))

    def begin_if_due(self, mine: Waiting) -> InQueue:
        """Make the first world, where it is time and this worker's turn. It stands in the queue."""
        if self._clock() >= self._next_look:
            is_first = self._consider_beginning(mine)
            self._next_look = self._clock() + (0.0 if is_first else TURN_SECONDS / 2)
        num_ready = len(ready_nodes(self._parsed.values(), ()))
        return InQueue(f"waiting for nodes: {num_ready} of at least {self._size.min_nodes} are ready")

    def succeed_if_gone(self, stands: Standing, mine: Waiting) -> InQueue:
        """Make the world after `stands`, where all who trained in that are gone. This worker stands in the queue."""
        if self._are_gone(stands, mine):
            self._succeed(stands, mine)
        return InQueue("waiting to be admitted")

    def _ready(self) -> tuple[Member, ...]:
        nodes = by_newest(ready_nodes(self.waiting(self._store), ()))
        return tuple(member for node in nodes[: self._size.max_nodes] for member in node)

    def _consider_beginning(self, mine: Waiting) -> bool:
        """Begin, where it is time and this worker's turn; whether it is the first in the queue."""
        members, now, size = self._ready(), self._clock(), self._size
        is_first = bool(members) and members[0].uid == mine.member.uid
        nodes = len({member.node for member in members})
        if nodes < size.min_nodes or (size.fixed is not None and len(members) < size.fixed):
            self._enough_since = self._due_since = None
            return is_first
        self._enough_since = now if self._enough_since is None else self._enough_since
        seconds = now - self._enough_since
        if not is_start_due(
            nodes, min_nodes=size.min_nodes, max_nodes=size.max_nodes, seconds_enough=seconds, last_call=size.last_call
        ):
            return is_first
        self._due_since = now if self._due_since is None else self._due_since
        if not is_first and now < self._due_since + TURN_SECONDS:
            return is_first  # written by all at once, a list of hundreds would keep the store busy for no use
        gone = self._refused(members)
        alive = without_nodes_of(gone, members)
        if gone and len({member.node for member in alive}) < size.min_nodes:
            return is_first  # the dead one's place in the queue runs out in a while
        self._begin(alive, None)
        return is_first

    def _begin(self, members: tuple[Member, ...], after: Standing | None) -> None:
        if not members:
            return
        agreement, _ = agreeing(members, members[0].agreement)
        reference = json.loads(self._store.create(f"{self._prefix}/fact/agreement", json.dumps(agreement)))
        _, fitting = agreeing(members, reference)
        seen = [one.max_generation for one in fitting]
        generation = next_generation([*seen, after.generation if after else None])
        lost = tuple(range(len(after.members))) if after else ()
        decision = Decision(generation, self._draw_uid(), ranks=(), new=fitting, lost=lost)
        key = "start" if after is None else after.key
        self._store.create(f"{self._prefix}/{key}/next", decision.to_json())

    def _succeed(self, stands: Standing, mine: Waiting) -> None:
        """All who trained are gone: those who wait go on without them."""
        ready = self._ready()
        alive = without_nodes_of(self._refused(ready), ready)
        if mine.member.uid in {member.uid for member in alive}:
            self._begin(alive, stands)

    def _are_gone(self, stands: Standing, mine: Waiting) -> bool:
        """Whether nobody of them gives a sign of life. Who cannot be reached may train on without the store for as
        long as its grace lasts.

        What is read may be a copy, and stands still where this worker alone is cut off or was suspended: they are
        silent only up to where its own heartbeat has come back by the same way.
        """
        uids = {member.uid for member in stands.members}
        prefix = f"{self._prefix}/heartbeat/"
        texts = self._store.below(prefix)
        found = {key: text for key, text in texts.items() if key.removeprefix(prefix) in uids}
        own, now = texts.get(f"{prefix}{mine.member.uid}"), self._clock()
        was_away = False
        if own is not None and own != self._own[0]:
            was_away = now - self._own[1] > SILENT_SECONDS  # it may be an old one, and theirs of since on their way
            self._own = own, now
        if found != self._heartbeats[0] or was_away:
            self._heartbeats = found, now
        silence = self._own[1] - self._heartbeats[1] - 1.0
        if silence <= self._peer_timeout:
            return False
        return silence > self._longest_silence or len(self._refused(stands.members)) == len(stands.members)
