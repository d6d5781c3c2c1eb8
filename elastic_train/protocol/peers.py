"""A job whose members serve a store each, and decide together: no process and no machine is special.

A decision about what follows a world is single-decree Paxos (Lamport, "The Part-Time Parliament", 1998) over one
**register** for each node of that world. A register lies in the store of the node's first member, and a proposer
changes it by compare-and-swap, so that a member votes even while its own threads do something else. Which votes are
enough is said by laws.py.

Keys in a member's own store: `host` (where newcomers queue, as far as it knows), `queue/...` (the join queue, while it
is the host), `admitted` (its first world), `fact/NAME`; and below each world's key `present`, `register`, `next`,
`left/RANK` and what else was announced.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol import registers
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.clients import Address, Clients
from elastic_train.protocol.entrance import Entrance, Finder, Size
from elastic_train.protocol.job import Admitted, Denied, InQueue, Over, Place, scoped
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.registers import Register
from elastic_train.protocol.store import KeyValueStore
from elastic_train.rules import disagreement, next_generation
from elastic_train.world import Member, World

CARRIED_FACTS = ("job_token", "run_uid", "agreement")


class PeerJob:
    """As job.Job.

    Args:
        own: this member's own store; it answers two threads.
        uid: of this process; others ask for it, for another one may have its address by then.
        run_id: of the job; members of other jobs are not followed.
        reach: a client of the store at an address, for the training thread. Raises: StoreUnreachable.
        refused: which of some members are gone, by one probe each.
        clock: monotonic seconds.
        in_background: runs a task on a thread of its own, where there are threads: connections are made ahead, so that
            a recovery need not wait for them.
    """

    def __init__(
        self,
        own: KeyValueStore,
        address: Address,
        reach: Callable[[Address], KeyValueStore],
        finder: Finder,
        size: Size,
        *,
        uid: str,
        run_id: str,
        peer_timeout: float,
        max_world_size: int | None,
        refused: Callable[[Sequence[Member]], list[Member]],
        draw_uid: Callable[[], str],
        clock: Callable[[], float],
        in_background: Callable[[Callable[[], None]], None] = lambda _task: None,
    ) -> None:
        self._in_background = in_background
        self._own, self._finder = own, finder
        self._peer_timeout, self._max_world_size, self._draw_uid = peer_timeout, max_world_size, draw_uid
        self._clients = Clients(own, uid, reach)
        self._entrance = Entrance(
            self._clients, address, finder, size, run_id=run_id, refused=refused, begin=self._begin, clock=clock
        )
        self._attempt = 0
        self._worlds: tuple[Voters, ...] = ()
        """voters of the worlds since the last settled one, the present one last"""
        self._bound: frozenset[str] = frozenset()
        """uids of voters that have accepted the present world, though they may not be in it"""
        self._past: dict[str, World] = {}
        """worlds that this member has been in since the last settled one, with the present one"""
        self._facts: dict[str, str] = {}
        self._world: World | None = None
        self._told = ""
        """what the newcomers of the present world are told"""
        self._run_id = run_id
        self._uid = uid
        own.put("run_id", run_id)
        own.put("uid", uid)

    # --- the job ----------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self._entrance.is_first

    def create_fact(self, name: str, proposal: str) -> str:
        if name not in self._facts:
            self._facts[name] = self._create(f"fact/{name}", proposal)
            self._own.put(f"fact/{name}", self._facts[name])
            self._tell_spares(name, self._facts[name])
        return self._facts[name]

    def _create(self, key: str, proposal: str) -> str:
        """At rank 0 of the world, before it at the host of the queue."""
        world = self._world
        try:
            if world is not None:
                return self._clients.of_rank(world, 0).create(key, proposal)
            return (self._entrance.host_store or self._own).create(key, proposal)
        except StoreUnreachable:
            if world is None:
                self._entrance.forget_host()
                raise
            self._clients.lose_rank(world, 0)
            return proposal  # a death ends this world, and the next one agrees on one state again

    def _tell_spares(self, name: str, text: str) -> None:
        """Those who train agree by themselves; rank 0 tells the spares."""
        world = self._world
        if world is None or world.rank != 0:
            return
        for rank in range(world.world_size, len(world.members)):
            try:
                self._clients.of_rank(world, rank).put(f"fact/{name}", text)
            except StoreUnreachable:
                self._clients.lose_rank(world, rank)

    def fact(self, name: str) -> str | None:
        host = self._entrance.host_store
        if name not in self._facts and self._world is None and host is not None:
            try:
                found = host.get(f"fact/{name}")
            except StoreUnreachable:  # the next look finds another host
                self._entrance.forget_host()
                return None
            if found is not None:
                self._facts[name] = found
        if name not in self._facts and (told := self._own.get(f"fact/{name}")) is not None:
            self._facts[name] = told
        return self._facts.get(name)

    # --- the join queue -----------------------------------------------------------------------------------------------

    def where(self) -> str:
        return self._finder.describe()

    def expect_answer(self, silence: float) -> None:
        """There is no such store."""

    def find(self) -> bool:
        return self._entrance.find()

    def look_from_queue(self, mine: Waiting) -> Place:
        text = self._own.get("admitted")
        if text is None:
            if self._own.get("over") is not None:
                return Over()
            said = self._entrance.look(mine)
            text = self._own.get("admitted")
            if text is None:
                return InQueue(said)
        return self._admitted(text, mine)

    def _admitted(self, text: str, mine: Waiting) -> Admitted:
        self._told = text
        told = json.loads(text)
        decision = Decision.from_fields(told["decision"])
        old = tuple(Member.from_fields(one) for one in told["old"])
        parent = World(0, decision.generation - 1, old) if old else None
        world = decision.world_for(mine.member.uid, parent, self._max_world_size)
        assert world is not None, "only those in it are told"
        self._worlds = tuple(Voters.from_json(one) for one in told["worlds"])
        return Admitted(world, decision.facts, came_later=bool(old))

    def leave_queue(self) -> None:
        self._entrance.leave()

    def queue(self) -> list[Waiting]:
        return self._entrance.queue()

    def drop(self, members: Sequence[Member]) -> None:
        self._entrance.drop(members)

    def _begin(self, members: tuple[Member, ...]) -> None:
        first = members[0]
        fitting = tuple(one for one in members if disagreement(first.agreement, one.agreement) is None)
        facts = {name: text for name in CARRIED_FACTS if (text := self._own.get(f"fact/{name}")) is not None}
        facts.setdefault("agreement", json.dumps(first.agreement))
        generation = next_generation([one.max_generation for one in fitting])
        decision = Decision(generation, self._draw_uid(), ranks=(), new=fitting, facts=facts)
        self._own.put("begun", decision.uid)
        self._own.put("fact/agreement", facts["agreement"])
        self._told = self._word_for_newcomers(decision, None)
        self._tell_newcomers(fitting)
        self._own.put("host", json.dumps(first.store))

    def _word_for_newcomers(self, decision: Decision, world: World | None) -> str:
        old = () if world is None else decision.members_after(world)[: len(decision.ranks)]
        after = Voters.of(decision.uid, decision.members_after(world)[: self._max_world_size])  # a spare has no state
        told = {
            "decision": json.loads(replace(decision, ranks=tuple(range(len(old)))).to_json()),
            "old": [json.loads(one.to_json()) for one in old],
            "worlds": [one.without(decision.dead).to_json() for one in self._worlds] + [after.to_json()],
        }
        return json.dumps(told)

    def _tell_newcomers(self, newcomers: Sequence[Member]) -> None:
        for member in newcomers:
            try:
                self._clients.of(member).create("admitted", self._told)
            except StoreUnreachable:  # whoever misses it in the next agreement tells it again
                self._clients.lose(member)

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None = None) -> None:
        if decision is not None:
            self._told = self._word_for_newcomers(decision, self._world)
            kept = tuple(one.without(decision.dead) for one in self._worlds)
            self._worlds = (*kept, Voters.of(world.uid, world.workers))
        self._world = self._past[world.uid] = world
        self._attempt = 0
        self._facts.update(facts)
        for name, text in facts.items():
            self._own.put(f"fact/{name}", text)
        self._own.put("begun", world.uid)
        self._own.put("host", json.dumps(world.members[0].store))
        if decision is not None and world.rank == 0:
            self._tell_newcomers(decision.new)
        self.drop(world.members)
        self._clients.keep_only({member.uid for member in world.members})
        self._in_background(lambda: self._clients.connect_ahead(world, lambda: self._world is world))

    def _note_settled(self, world: str) -> None:
        """What is settled for one is settled for all; a spare learns it only from others."""
        uids = [voters.world for voters in self._worlds]
        if world in uids:
            self._worlds = self._worlds[uids.index(world) :]

    def settle(self, world: World) -> None:
        if self._world is world:
            self._worlds, self._bound, self._past = self._worlds[-1:], frozenset(), {world.uid: world}
            self._own.put("settled", json.dumps([world.generation, world.uid]))

    def say_present(self, world: World, text: str) -> None:
        self._own.put(f"{world.key}/present", text)

    def present(self, world: World, ranks: Sequence[int]) -> dict[int, str]:
        found = {}
        for rank in ranks:
            try:
                store = self._clients.of_rank(world, rank)
                text, settled = store.get_many([f"{world.key}/present", "settled"])
                if settled:
                    self._note_settled(json.loads(settled)[1])
                if text is None:
                    store.create("admitted", self._told)  # it may be a newcomer that nobody has told
            except StoreUnreachable:
                self._clients.lose_rank(world, rank)
                continue
            if text is not None:
                found[rank] = text
        return found

    def announce(self, world: World, name: str, text: str) -> None:
        for rank in range(len(world.members)):
            try:
                self._clients.of_rank(world, rank).create(scoped(world, name), text)
            except StoreUnreachable:
                self._clients.lose_rank(world, rank)

    def heard(self, world: World, name: str) -> str | None:
        return self._own.get(scoped(world, name))

    def left(self, world: World) -> frozenset[int]:
        texts = self._own.get_many([f"{world.key}/left/{rank}" for rank in range(len(world.members))])
        return frozenset(rank for rank, text in enumerate(texts) if text is not None)

    def decided(self, world: World, asked: Sequence[int]) -> str | None:
        key = f"{world.key}/next"
        text = self._own.get(key)
        for rank in asked if text is None else ():
            try:
                text = self._clients.of_rank(world, rank).get(key)
            except StoreUnreachable:
                self._clients.lose_rank(world, rank)
            if text is not None:
                self._own.put(key, text)
                break
        if text is None:
            return None
        told: dict[str, Any] = json.loads(text)
        self._bound = frozenset(told["bound"])
        self._note_settled(told["since"])
        return str(told["decision"])

    def decide(self, world: World, proposal: str, *, reachable: Sequence[int], dead: Collection[str]) -> str | Denied:
        worlds = [one.without({*dead, *self._released()}) for one in self._worlds]
        electors = {uid for voters in worlds for uid in voters.electors}
        voters = [rank for rank in reachable if world.members[rank].uid in electors]
        self._attempt += 1
        ballot = (self._attempt, world.rank)
        promises = self._change_registers(world, voters, partial(registers.promise, ballot=ballot))
        if any(register.promised > ballot for register in promises.values()):
            self._attempt = max(register.promised[0] for register in promises.values())
            return Denied()
        if not may_go_on(worlds, _uids(world, promises)):
            return self._denied(world, missing_votes(worlds, _uids(world, promises)))
        accepted = [one for one in promises.values() if one.ballot is not None]
        newest = max(accepted, key=lambda one: one.ballot or (0, -1), default=None)
        chosen = proposal if newest is None or newest.decision is None else newest.decision
        members = _uids(world, Decision.from_json(chosen).ranks)
        if chosen is proposal and not may_go_on(worlds, members):  # a vote is no state: who has one is to be in it
            return self._denied(world, missing_votes(worlds, members))
        holders = set(self._worlds[0].members) - self._worlds[0].dead - set(dead)
        if chosen is proposal and holders and not holders & members:  # they have released their votes, not their state
            return self._denied(world, sorted(holders))
        votes = self._change_registers(
            world, list(promises), lambda register: registers.accept(register, ballot, chosen)
        )
        bound = {rank for rank, register in votes.items() if register.ballot == ballot}
        if not may_go_on(worlds, _uids(world, bound)):
            return Denied(() if bound != set(promises) else missing_votes(worlds, _uids(world, bound)))
        told = [rank for rank in reachable if rank in bound or rank not in voters]
        self._tell(world, chosen, _uids(world, bound), told)
        return chosen

    def _denied(self, world: World, missing: Sequence[str]) -> Denied:
        """The job may train elsewhere: one that may know is asked each time, for it may be silent."""
        inside = {member.store for member in world.members}
        places = [member.store for one in self._past.values() for member in one.members if member.uid in missing]
        with contextlib.suppress(StoreUnreachable):
            places += self._finder.addresses()
        outside = [place for place in dict.fromkeys(places) if place is not None and place not in inside]
        if outside:
            place = outside[self._attempt % len(outside)]
            try:
                text, run_id = self._clients.at(place).get_many(["settled", "run_id"])
            except StoreUnreachable:
                self._clients.lose(place)
                return Denied(tuple(missing))
            if text and run_id == self._run_id:
                generation, uid = json.loads(text)
                first = min(one.generation for one in self._past.values())
                if generation > first and uid not in self._past:
                    return Denied(tuple(missing), generation)
        return Denied(tuple(missing))

    def _change_registers(
        self, world: World, ranks: Sequence[int], rule: Callable[[Register], Register]
    ) -> dict[int, Register]:
        """What stands in each register afterwards, by rank; without those that cannot be reached."""
        found = {}
        for rank in ranks:
            try:
                found[rank] = registers.change(self._clients.of_rank(world, rank), f"{world.key}/register", rule)
            except StoreUnreachable:  # the change may have been made all the same: then it is one more vote
                self._clients.lose_rank(world, rank)
        return found

    def _tell(self, world: World, chosen: str, bound: Collection[str], reachable: Sequence[int]) -> None:
        self._bound = frozenset(bound)
        text = json.dumps({"decision": chosen, "bound": sorted(bound), "since": self._worlds[0].world})
        for rank in reachable:
            try:
                self._clients.of_rank(world, rank).put(f"{world.key}/next", text)
            except StoreUnreachable:  # it asks the others
                self._clients.lose_rank(world, rank)

    def release(self, world: World, decision: Decision) -> None:
        # Its register first: whoever still collects this vote is led to the same decision.
        last = (registers.LAST_ATTEMPT, world.rank)
        self._change_registers(world, [world.rank], lambda _: Register(last, last, decision.to_json()))
        for member in decision.members_after(world):
            with suppress(StoreUnreachable):
                self._clients.of(member).put(f"released/{self._uid}", decision.uid)

    def _released(self) -> frozenset[str]:
        """Voters that have told this member so."""
        voters = sorted({uid for voters in self._worlds for uid in voters.electors})
        texts = self._own.get_many([f"released/{uid}" for uid in voters])
        return frozenset(uid for uid, text in zip(voters, texts, strict=True) if text is not None)

    def world_store(self, world: World) -> KeyValueStore:
        with suppress(StoreUnreachable):
            store = self._clients.of_rank(world, 0)
            store.get("run_id")
            return store
        self._clients.lose_rank(world, 0)
        return self._clients.of_rank(world, 0)

    def world_key(self, world: World) -> str:
        return world.key

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        inside = {member.uid for member in world.members} | self._released()
        electors = {uid for voters in self._worlds[:-1] for uid in voters.electors}
        left_out = electors - inside - self._bound
        return max((self._peer_timeout - answered.get(uid, math.inf) for uid in left_out), default=0.0)

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, is_spokesman: bool) -> None:
        self._finder.keep(has_world=self._world is not None)
        world = world or self._world  # between two worlds, too: no other job may begin meanwhile
        if world is not None and world.rank == 0:
            firsts = {member.node: member.store for member in reversed(world.members)}
            self._finder.show([one for one in reversed(firsts.values()) if one], self._facts.get("job_token", ""))

    def finish(self, world: World) -> None:
        self._own.put("over", world.uid)
        for waiting in self.queue():
            with suppress(StoreUnreachable):
                self._clients.of(waiting.member).put("over", world.uid)

    def close(self, me: Member | None) -> None:
        self._finder.close()
        self._clients.keep_only(())


def _uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)
