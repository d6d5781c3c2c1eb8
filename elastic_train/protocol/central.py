"""A job whose members share one store that decides by itself: etcd, or memory.

The first to create `<world>/next` has decided what follows a world, so any living side may go on and no vote is
counted. Keys, below the job's prefix: `fact/NAME`, `queue/UID`, `here/UID` (every worker that has not ended),
`heartbeat/UID` (of rank 0, of those in the queue, and of those between two worlds), `over`, `start/next`, and for each
world `present/RANK`, `left/RANK`, `next` and what else was announced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from elastic_train.protocol.agreement import Decision, Standing
from elastic_train.protocol.job import Admitted, Denied, InQueue, Over, Place, scoped
from elastic_train.protocol.join_queue import Size, Waiting, by_newest, is_start_due, ready_nodes, without_nodes_of
from elastic_train.protocol.store import Below, KeyValueStore, ListingStore, Notes
from elastic_train.rules import disagreement, next_generation, require_agreement
from elastic_train.world import Member, World

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

    def waiting(self, store: ListingStore) -> list[Waiting]:
        """Workers in the queue, by their launcher's order; `store` is that of the thread that asks."""
        texts = store.below(f"{self._prefix}/queue/").values()
        before = self._parsed
        self._parsed = {text: before.get(text) or Waiting.from_json(text) for text in texts}
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
        if self._are_gone(stands):
            self._succeed(stands, mine)
        nodes = len({member.node for member in stands.members})
        return InQueue(f"waiting to be admitted: {nodes} of at most {self._size.max_nodes} nodes train")

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
        reference = json.loads(self._store.create(f"{self._prefix}/fact/agreement", json.dumps(members[0].agreement)))
        fitting = tuple(one for one in members if disagreement(reference, one.agreement) is None)
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

    def _are_gone(self, stands: Standing) -> bool:
        """Whether nobody of them gives a sign of life. Who cannot be reached may train on without the store for as
        long as its grace lasts."""
        uids = {member.uid for member in stands.members}
        prefix = f"{self._prefix}/heartbeat/"
        found = {key: text for key, text in self._store.below(prefix).items() if key.removeprefix(prefix) in uids}
        now = self._clock()
        if found != self._heartbeats[0]:
            self._heartbeats = found, now
        silence = now - self._heartbeats[1] - 1.0
        if silence <= self._peer_timeout:
            return False
        return silence > self._longest_silence or len(self._refused(stands.members)) == len(stands.members)


class CentralJob:
    """As job.Job.

    Args:
        store: for the training thread.
        background: for the watcher's thread.
        refused: which of some members are gone, by one probe each.
        reachable: which of some members answer.
        longest_silence: seconds after which members who cannot be reached have stopped, whatever they believe.
        parting: for what a worker says as it ends; by default `store`.
    """

    def __init__(
        self,
        store: ListingStore,
        background: ListingStore,
        prefix: str,
        size: Size,
        *,
        peer_timeout: float,
        longest_silence: float,
        max_world_size: int | None,
        refused: Callable[[Sequence[Member]], list[Member]],
        draw_uid: Callable[[], str],
        clock: Callable[[], float],
        parting: ListingStore | None = None,
    ) -> None:
        self._store, self._background, self._parting = store, background, parting or store
        self._prefix, self._max_world_size = prefix, max_world_size
        self._queue = CentralQueue(
            store,
            prefix,
            size,
            peer_timeout=peer_timeout,
            longest_silence=longest_silence,
            refused=refused,
            draw_uid=draw_uid,
            clock=clock,
        )
        self._stands = Standing()
        self._mine: Waiting | None = None
        self._is_queued = self._is_beginning = False
        self._uid = ""
        self._count = 0
        self._gone: set[str] = set()
        """uids of members that are gone, whose keys are still to be removed; two threads change it, in place"""
        self._swept = ""
        self._before = ""
        """keys of the worlds before the present one, the last and the one before it"""
        self.is_first = store.get(f"{prefix}/start/next") is None

    # --- the job ----------------------------------------------------------------------------------------------------

    def find(self) -> bool:
        return True

    def where(self) -> str:
        return "the store"

    def expect_answer(self, silence: float) -> None:
        """It answers, or raises."""

    def create_fact(self, name: str, proposal: str) -> str:
        return self._store.create(f"{self._prefix}/fact/{name}", proposal)

    def fact(self, name: str) -> str | None:
        return self._store.get(f"{self._prefix}/fact/{name}")

    def host_says(self, key: str) -> str | None:
        return None  # nobody is the host

    # --- the join queue -----------------------------------------------------------------------------------------------

    def look_from_queue(self, mine: Waiting) -> Place:
        if self._store.get(f"{self._prefix}/over") is not None:
            return Over()
        stands = self._stands = self._stands.follow(lambda key: self._store.get(f"{self._prefix}/{key}"))
        for rank, member in enumerate(stands.members):
            if member.uid == mine.member.uid:
                world = World(rank, stands.generation or 0, stands.members, self._max_world_size, stands.uid)
                return Admitted(world, stands.facts or {}, came_later=not self._is_beginning)
        self._enqueue(mine)
        self._is_beginning = stands.generation is None
        return self._queue.begin_if_due(mine) if self._is_beginning else self._queue.succeed_if_gone(stands, mine)

    def _enqueue(self, mine: Waiting) -> None:
        self._mine = mine
        if self._is_queued:
            return
        reference = self.fact("agreement")
        if reference is not None:
            require_agreement(mine.member.agreement, json.loads(reference), "the run")
        self.renew_queue_place(self._store)
        self._is_queued = True

    def renew_queue_place(self, store: ListingStore) -> None:
        """Be in the queue as long as this worker lives, and not much longer, where the store can tell."""
        if self._mine is not None:
            store.put(self._queue_key, self._mine.to_json())

    @property
    def _queue_key(self) -> str:
        assert self._mine is not None, "it is in the queue"
        return f"{self._prefix}/queue/{self._mine.member.uid}"

    def leave_queue(self) -> None:
        if self._mine is not None:
            self._store.delete(self._queue_key)
            self._mine, self._is_queued = None, False

    def queue(self) -> list[Waiting]:
        return self._queue.waiting(self._background)

    def drop(self, members: Sequence[Member]) -> None:
        """Those in the queue are gone: they leave it by themselves."""

    def is_over(self) -> bool:
        return self._store.get(f"{self._prefix}/over") is not None

    # --- a join that is prepared --------------------------------------------------------------------------------------

    def beside(self, member: Member) -> Notes:
        return Below(self._background, f"{self._prefix}/ahead/{member.uid}/")

    def planned(self) -> str | None:
        assert self._mine is not None, "it is in the queue"
        return self._store.get(f"{self._prefix}/ahead/{self._mine.member.uid}/plan")

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        text = decision.to_json()
        return self._background.create(self._key(world, "next"), text) == text

    def stop_planning(self) -> None:
        """The watcher's connection serves both threads."""

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None = None) -> None:
        if decision is not None and self._stands.members:
            now = {member.uid for member in world.members}
            self._gone |= {member.uid for member in self._stands.members} - now
        self._stands = Standing(world.key, world.generation, world.members, facts, world.uid)

    def settle(self, world: World) -> None:
        """One store decides: nobody counts votes."""

    def _key(self, world: World, name: str) -> str:
        return f"{self._prefix}/{world.key}/{name}"

    def say_present(self, world: World, text: str) -> None:
        self._store.put(self._key(world, f"present/{world.rank}"), text)

    def present(self, world: World, ranks: Sequence[int]) -> dict[int, str]:
        texts = self._store.get_many([self._key(world, f"present/{rank}") for rank in ranks])
        return {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}

    def announce(self, world: World, name: str, text: str) -> None:
        self._parting.create(f"{self._prefix}/{scoped(world, name)}", text)

    def heard(self, world: World, name: str) -> str | None:
        return self._store.get(f"{self._prefix}/{scoped(world, name)}")

    def left(self, world: World) -> frozenset[int]:
        keys = [self._key(world, f"left/{rank}") for rank in range(len(world.members))]
        return frozenset(rank for rank, text in enumerate(self._store.get_many(keys)) if text is not None)

    def decided(self, world: World, asked: Sequence[int]) -> str | None:
        return self._store.get(self._key(world, "next"))

    def decide(
        self,
        world: World,
        proposal: str,
        *,
        reachable: Sequence[int],
        dead: Collection[str],
        answering: Collection[str] = (),
    ) -> str | Denied:
        return self._store.create(self._key(world, "next"), proposal)

    def show_place(self, world: World) -> None:
        """The store decides."""

    def sees_place(self, world: World) -> bool:
        return False

    def note_place(self, world: World, *, is_shared: bool | None) -> None:
        """The store decides."""

    def release(self, world: World, decision: Decision) -> None:
        """One store decides: nobody counts votes."""

    def say_ready(self, world: World) -> None:
        self._store.put(self._key(world, f"ready/{world.rank}"), "")

    def are_ready(self, world: World) -> bool:
        return not self.not_ready(world)

    def not_ready(self, world: World) -> tuple[int, ...]:
        texts = self._store.get_many([self._key(world, f"ready/{rank}") for rank in range(world.world_size)])
        return tuple(rank for rank, text in enumerate(texts) if text is None)

    def world_store(self, world: World) -> KeyValueStore:
        return self._store

    def world_key(self, world: World) -> str:
        return f"{self._prefix}/{world.key}"

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        return 0.0

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, is_spokesman: bool, headless: World | None = None) -> None:
        store = self._background
        if self._uid and (world is None or is_spokesman):
            self._count += 1
            store.put(f"{self._prefix}/heartbeat/{self._uid}", str(self._count))
        if world is None or not is_spokesman:
            return
        self.forget(store)
        if self._swept != world.key:
            store.delete_prefix(f"{self._prefix}/ahead/")  # of the plan for this world
            for part in ("present/", "left/", "ready/", "through/") if self._before else ():
                store.delete_prefix(f"{self._prefix}/{self._before}/{part}")
            self._swept, self._before = world.key, self._swept

    def open(self, uid: str) -> None:
        """This worker is of the job; before it stands in the queue."""
        self._uid = uid
        self._store.put(f"{self._prefix}/here/{uid}", "")

    def forget(self, store: ListingStore) -> None:
        """Remove what members that are gone have left."""
        for uid in tuple(self._gone):
            store.delete(f"{self._prefix}/heartbeat/{uid}")
            store.delete(f"{self._prefix}/here/{uid}")
            self._gone.discard(uid)

    def finish(self, world: World) -> None:
        self.forget(self._store)
        self._store.put(f"{self._prefix}/over", "finished")

    def close(self, me: Member | None) -> None:
        self.leave_queue()
        if self._uid:
            self._store.delete(f"{self._prefix}/heartbeat/{self._uid}")
            self._store.delete(f"{self._prefix}/here/{self._uid}")
