"""A job whose members share one store that decides by itself: etcd, or memory.

The first to create `<world>/next` has decided what follows a world, so no vote is counted and any living side may go
on, but spares and newcomers without all who have the state: those may train on, and would not notice. They come back
through the queue.

Keys, below the job's prefix: `fact/NAME`, `queue/UID`, `here/UID` (every worker that has not ended), `heartbeat/UID`
(of rank 0, of those in the queue, and of those between two worlds), `over`, `start/next`, and for each world
`present/RANK`, `left/RANK`, `next` and what else was announced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from elastic_train.protocol.agreement import Decision, Standing
from elastic_train.protocol.central_queue import CentralQueue
from elastic_train.protocol.job import Admitted, Denied, KnownMembers, Over, Place
from elastic_train.protocol.join_queue import Size, Waiting
from elastic_train.protocol.store import Below, ListingStore, Notes, SharedStore, scoped
from elastic_train.rules import require_agreement
from elastic_train.world import Member, World


class StateHolders:
    """Who has the state of the training, as far as one member knows. Spares have none, nor newcomers before the first
    reduction of their world has finished."""

    def __init__(self) -> None:
        self._world: World | None = None
        """the present one"""
        self._before: frozenset[str] = frozenset()
        """uids of those who had it when that began"""
        self._is_everybody = False

    def enter(self, world: World, old: Collection[Member]) -> None:
        """This member is in `world` from now on.

        Args:
            old: members of `world` that were in the one before, where this member was not.
        """
        self._before = frozenset(member.uid for member in old) if self._world is None else self._within(self._world)
        self._world, self._is_everybody = world, False

    def note_reduction(self) -> None:
        """One has finished in the present world."""
        self._is_everybody = True

    def may_live_outside(self, side: Collection[str], dead: Collection[str]) -> bool:
        """Whether only others than `side` have the state, and not all of those are dead."""
        holders = frozenset() if self._world is None else self._within(self._world) - frozenset(dead)
        return bool(holders) and holders.isdisjoint(side)

    def _within(self, world: World) -> frozenset[str]:
        if world.is_spare or self._is_everybody:
            return frozenset(member.uid for member in world.workers)
        return self._before & {member.uid for member in world.members}


class Leftovers:
    """What is in the store of members and worlds that are gone, and is still to be removed.

    Args:
        prefix: of the job's keys.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._gone: set[str] = set()
        """uids of members; two threads change it, in place"""
        self._swept = self._before = ""
        """keys of the worlds before the present one, the last and the one before it"""

    def note_gone(self, before: Collection[Member], now: Collection[Member]) -> None:
        """Of these members those are left."""
        self._gone |= {member.uid for member in before} - {member.uid for member in now}

    def remove_members(self, store: ListingStore) -> None:
        for uid in tuple(self._gone):
            store.delete(f"{self._prefix}/heartbeat/{uid}")
            store.delete(f"{self._prefix}/here/{uid}")
            self._gone.discard(uid)

    def remove(self, store: ListingStore, world: World) -> None:
        """All that `world` does not need."""
        self.remove_members(store)
        if self._swept != world.key:
            store.delete_prefix(f"{self._prefix}/ahead/")  # of the plan for this world
            for part in ("present/", "left/", "ready/", "through/") if self._before else ():
                store.delete_prefix(f"{self._prefix}/{self._before}/{part}")
            self._swept, self._before = world.key, self._swept


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
        self._stands, self._holders, self._leftovers = Standing(), StateHolders(), Leftovers(prefix)
        self._mine: Waiting | None = None
        self._is_queued = self._is_beginning = False
        self._uid = ""
        self._left_behind = ""
        """uid of the world from which others have gone on without this worker"""
        self._count = 0
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

    def told(self, key: str) -> str | None:
        assert self._mine is not None, "it is in the queue"
        return self._store.get(f"{self._prefix}/ahead/{self._mine.member.uid}/{key}")

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        text = decision.to_json()
        return self._background.create(self._key(world, "next"), text) == text

    def stop_planning(self) -> None:
        """The watcher's connection serves both threads."""

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None = None) -> None:
        stands = self._stands
        self._holders.enter(world, stands.members[: stands.num_old] if stands.uid == world.uid else ())
        if decision is not None:
            self._leftovers.note_gone(stands.members, world.members)
        self._stands = Standing(world.key, world.generation, world.members, facts, world.uid)

    def note_reductions(self, world: World, number: int) -> None:
        self._holders.note_reduction()

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

    def ended_holders(self, gone: Collection[str]) -> frozenset[str]:
        return frozenset()

    def decide(self, world: World, proposal: str, known: KnownMembers) -> str | Denied:
        inside = [world.members[rank].uid for rank in Decision.from_json(proposal).ranks]
        if self._holders.may_live_outside(inside, known.dead):
            return Denied(gone_on=world.generation)
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

    def world_store(self, world: World) -> SharedStore:
        return self._store

    def parting_store(self, world: World) -> SharedStore:
        return self._parting

    def world_key(self, world: World) -> str:
        return f"{self._prefix}/{world.key}"

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        return 0.0

    def is_left_behind(self, world: World) -> bool:
        return self._left_behind == world.uid

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, is_spokesman: bool, headless: World | None = None) -> None:
        store = self._background
        if self._uid and (world is None or is_spokesman or headless is not None):  # those in the queue look at it
            self._count += 1
            store.put(f"{self._prefix}/heartbeat/{self._uid}", str(self._count))
        if world is None or not is_spokesman:
            return
        following = store.get(self._key(world, "next"))
        # Where all in a world are suspended for long, those in the queue go on. One that wakes alone misses nobody.
        if following and Decision.from_json(following).world_for(world.me.uid, world, None) is None:
            self._left_behind = world.uid
            return
        self._leftovers.remove(store, world)

    def open(self, uid: str) -> None:
        """This worker is of the job; before it stands in the queue."""
        self._uid = uid
        self._store.put(f"{self._prefix}/here/{uid}", "")

    def forget(self, store: ListingStore) -> None:
        """Remove what members that are gone have left."""
        self._leftovers.remove_members(store)

    def finish(self, world: World) -> None:
        self.forget(self._store)
        self._store.put(f"{self._prefix}/over", "finished")

    def stand_down(self) -> None:
        """Newcomers wait for nobody but the store."""

    def close(self, me: Member | None) -> None:
        self.leave_queue()
        if self._uid:
            self._store.delete(f"{self._prefix}/heartbeat/{self._uid}")
            self._store.delete(f"{self._prefix}/here/{self._uid}")
