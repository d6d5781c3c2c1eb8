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
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elastic_train.errors import FormationFailed, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.job import Admitted, Denied, InQueue, Over, Place, scoped
from elastic_train.protocol.join_queue import Waiting, by_newest, is_start_due, ready_nodes
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.store import KeyValueStore
from elastic_train.rules import disagreement, next_generation
from elastic_train.world import Member, World

UNCALLED_SECONDS = 2.0
"""that the host of a beginning waits for a running job to call; its rank 0 looks at the endpoints twice a second"""
QUEUE_AGAIN_SECONDS = 10.0
"""after which a newcomer queues again: it may have been dropped for a probe that was lost"""
CHECK_SECONDS = 0.3
"""between two looks of a newcomer at the host of its queue"""
NUM_PROPOSERS = 2
"""ranks that keep a connection to everybody: who proposes, and who does when that one is lost"""
LAST_ATTEMPT = 10**9
"""of the ballot by which a member that is left out accepts for good"""
CARRIED_FACTS = ("job_token", "run_uid", "agreement")

Address = tuple[str, int]


class Finder(Protocol):
    """Finds the job, or the place where it begins; and keeps the signs by which others do."""

    def is_beginner(self) -> bool:
        """Whether this process may begin a job: it alone serves the first endpoint."""

    def addresses(self) -> Sequence[Address]:
        """Stores of members of the job, or of the host of its beginning. May block for a short timeout.

        Raises: ElasticTrainError where it never will."""

    def show(self, addresses: Sequence[Address], job_token: str) -> None:
        """Make it known where members of the job are."""

    def keep(self, *, has_world: bool) -> None:
        """Serve what this machine should serve and nobody does. On the watcher's thread."""

    def describe(self) -> str:
        """Where a newcomer looks, for a person."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Size:
    """Of a job."""

    min_nodes: int
    max_nodes: int
    last_call: float
    """seconds that the first world waits for more nodes when there are enough"""
    join_timeout: float = math.inf
    """seconds within which there have to be enough nodes for it"""
    fixed: int | None = None
    """workers of a world that nobody joins, and that begins with all of them"""


@dataclass(frozen=True)
class Register:
    """What one voter has promised and accepted about the successor of one world."""

    promised: tuple[int, int] = (0, -1)
    """the largest ballot that it has answered, (attempt, rank): it accepts nothing below"""
    ballot: tuple[int, int] | None = None
    """of what it has accepted"""
    decision: str | None = None

    def to_json(self) -> str:
        return json.dumps([self.promised, self.ballot, self.decision], separators=(",", ":"))

    @staticmethod
    def from_json(text: str | None) -> Register:
        if not text:
            return Register()
        promised, ballot, decision = json.loads(text)
        return Register(tuple(promised), None if ballot is None else tuple(ballot), decision)


@dataclass
class _Host:
    """Where this newcomer stands in the queue."""

    address: Address
    store: KeyValueStore
    checked_at: float
    queued_at: float | None = None


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
        self._own, self._address, self._connect, self._finder, self._size = own, address, reach, finder, size
        self._peer_timeout, self._max_world_size = peer_timeout, max_world_size
        self._refused, self._draw_uid, self._clock = refused, draw_uid, clock
        self._clients: dict[Address | str, KeyValueStore] = {}
        """of members by uid, of others by address"""
        self._attempt = 0
        self._worlds: tuple[Voters, ...] = ()
        """voters of the worlds since the last settled one, the present one last"""
        self._bound: frozenset[str] = frozenset()
        """uids of voters that have accepted the present world, though they may not be in it"""
        self._past: dict[str, World] = {}
        """worlds that this member has been in since the last settled one, with the present one"""
        self._facts: dict[str, str] = {}
        self._world: World | None = None
        self._host: _Host | None = None
        self._beginner_since: float | None = None
        self._enough_since: float | None = None
        self._num_seen = 0
        self._queue: dict[str, Waiting] = {}
        self._told = ""
        """what the newcomers of the present world are told"""
        self.is_first = True
        self._run_id = run_id
        self._uid = uid
        own.put("run_id", run_id)
        own.put("uid", uid)

    # --- the job ----------------------------------------------------------------------------------------------------

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
                return self._of(world, 0).create(key, proposal)
            return (self._host.store if self._host is not None else self._own).create(key, proposal)
        except StoreUnreachable:
            if world is None:
                self._forget_host()
                raise
            self._lose(world, 0)
            return proposal  # a death ends this world, and the next one agrees on one state again

    def _tell_spares(self, name: str, text: str) -> None:
        """Those who train agree by themselves; rank 0 tells the spares."""
        world = self._world
        if world is None or world.rank != 0:
            return
        for rank in range(world.world_size, len(world.members)):
            try:
                self._of(world, rank).put(f"fact/{name}", text)
            except StoreUnreachable:
                self._lose(world, rank)

    def fact(self, name: str) -> str | None:
        if name not in self._facts and self._world is None and self._host is not None:
            try:
                found = self._host.store.get(f"fact/{name}")
            except StoreUnreachable:  # the next look finds another host
                self._forget_host()
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
        if self._host is not None:
            return True
        if self._find_other():
            return True
        if self._finder.is_beginner():
            self._own.put("host", json.dumps(self._address))
            self._host = _Host(self._address, self._own, self._clock())
            self._beginner_since = self._clock()
            self._finder.show([self._address], "")
            return True
        return False

    def _find_other(self) -> bool:
        """Whether a sign leads to a host that is not this process; from now on it is the one."""
        for address in self._finder.addresses():
            if address == self._address:
                continue
            try:
                found = self._follow(address)
                if found is None or found.address == self._address:
                    continue
                self.is_first = found.store.get("begun") is None
            except StoreUnreachable:
                self._clients.pop(address, None)
                continue
            self._forget_host()
            self._host = found
            return True
        return False

    def _follow(self, address: Address) -> _Host | None:
        """The host that the store at `address` names, if it says so too."""
        for _ in range(2):
            store = self._own if address == self._address else self._reach(address)
            text, run_id = store.get_many(["host", "run_id"])
            if not text or run_id != self._run_id:
                return None
            named = _address(text)
            if named == address:
                return _Host(address, store, self._clock())
            address = named
        return None

    def look_from_queue(self, mine: Waiting) -> Place:
        text = self._own.get("admitted")
        if text is not None:
            return self._admitted(text, mine)
        if self._own.get("over") is not None:
            return Over()
        host, now = self._host, self._clock()
        if host is not None and now >= host.checked_at + CHECK_SECONDS:
            host.checked_at = now
            try:
                is_host = _is_address(host.store.get("host"), host.address)
            except StoreUnreachable:
                is_host = False
            if not is_host:
                self._forget_host()
            elif self._beginner_since is not None:
                self._find_other()  # a running job has called
        if not self.find():
            return InQueue(f"waiting for the job at {self._finder.describe()}")
        self._enqueue(mine)
        if self._beginner_since is not None:
            self._consider_beginning(mine)
            if self._own.get("admitted") is not None:
                return self.look_from_queue(mine)
        return InQueue(self._describe())

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

    def _forget_host(self) -> None:
        self._host = self._beginner_since = self._enough_since = None
        self._own.put("host", "")

    def _enqueue(self, mine: Waiting) -> None:
        assert self._host is not None, "found"
        now = self._clock()
        if self._host.queued_at is not None and now < self._host.queued_at + QUEUE_AGAIN_SECONDS:
            return
        try:
            number = self._host.store.add("queue/count", 1)
            self._host.store.put(f"queue/{number}", mine.to_json())
            self._host.queued_at = now
        except StoreUnreachable:
            self._clients.pop(self._host.address, None)
            self._forget_host()

    def leave_queue(self) -> None:
        self._host = self._beginner_since = None

    def queue(self) -> list[Waiting]:
        count = int(self._own.get("queue/count") or "0")
        numbers = range(self._num_seen + 1, count + 1)
        for number, text in zip(numbers, self._own.get_many([f"queue/{n}" for n in numbers]), strict=True):
            if text is None:
                break  # its writer is about to
            waiting = Waiting.from_json(text)
            self._queue[waiting.member.uid] = waiting
            self._num_seen = number
        return list(self._queue.values())

    def drop(self, members: Sequence[Member]) -> None:
        """Those in the queue are gone, or in a world."""
        for member in members:
            self._queue.pop(member.uid, None)

    def _describe(self) -> str:
        host = self._host
        if host is None or self._beginner_since is None:
            return "waiting to be admitted"
        num_ready = len(ready_nodes(self._queue.values(), ()))
        return f"waiting for nodes: {num_ready} of at least {self._size.min_nodes} are ready"

    def _consider_beginning(self, mine: Waiting) -> None:
        size, now = self._size, self._clock()
        assert self._beginner_since is not None, "asked by the beginner"
        waiting = sorted(self.queue(), key=lambda one: one.order)
        if size.fixed is not None:
            if len(waiting) < size.fixed:
                return
        else:
            nodes = len(ready_nodes(waiting, ()))
            if nodes < size.min_nodes:
                self._enough_since = None
                if now - self._beginner_since > size.join_timeout:
                    raise FormationFailed(
                        f"{nodes} of at least {size.min_nodes} nodes came within {size.join_timeout:.0f} s (--nnodes, "
                        "--rdzv-conf join_timeout)"
                    )
                return
            self._enough_since = now if self._enough_since is None else self._enough_since
            seconds = now - self._enough_since
            if now - self._beginner_since < UNCALLED_SECONDS or not is_start_due(
                nodes, min_nodes=size.min_nodes, max_nodes=size.max_nodes, seconds_enough=seconds,
                last_call=size.last_call,
            ):  # fmt: skip
                return
        if size.fixed is None:
            found = by_newest(ready_nodes(waiting, ()))[: size.max_nodes]
        else:  # its workers may know of nothing but their ranks
            found = by_newest([(one.member,) for one in waiting])
        members = tuple(member for node in found for member in node)
        gone = self._refused(members)
        if gone:
            self.drop(gone)
            return
        self._begin(members, mine)

    def _begin(self, members: tuple[Member, ...], mine: Waiting) -> None:
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
        self.drop(members)

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
                self._store_of(member).create("admitted", self._told)
            except StoreUnreachable:  # whoever misses it in the next agreement tells it again
                self._clients.pop(member.uid, None)

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
        for gone in set(self._clients) - {member.uid for member in world.members}:
            del self._clients[gone]
        self._in_background(lambda: self._connect_ahead(world))

    def _connect_ahead(self, world: World) -> None:
        """To whom this member would ask in a recovery: rank 0, or everybody where it would propose itself."""
        ranks = range(len(world.members)) if world.rank < NUM_PROPOSERS else range(NUM_PROPOSERS)
        for rank in ranks:
            if self._world is not world or rank >= len(world.members):
                return
            with contextlib.suppress(StoreUnreachable):
                self._of(world, rank)

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
                store = self._of(world, rank)
                text, settled = store.get_many([f"{world.key}/present", "settled"])
                if settled:
                    self._note_settled(json.loads(settled)[1])
                if text is None:
                    store.create("admitted", self._told)  # it may be a newcomer that nobody has told
            except StoreUnreachable:
                self._lose(world, rank)
                continue
            if text is not None:
                found[rank] = text
        return found

    def announce(self, world: World, name: str, text: str) -> None:
        for rank in range(len(world.members)):
            try:
                self._of(world, rank).create(scoped(world, name), text)
            except StoreUnreachable:
                self._lose(world, rank)

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
                text = self._of(world, rank).get(key)
            except StoreUnreachable:
                self._lose(world, rank)
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
        promises = self._change_registers(world, voters, lambda register: _promise(register, ballot))
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
        votes = self._change_registers(world, list(promises), lambda register: _accept(register, ballot, chosen))
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
                text, run_id = self._reach(place).get_many(["settled", "run_id"])
            except StoreUnreachable:
                self._clients.pop(place, None)
                return Denied(tuple(missing))
            if text and run_id == self._run_id:
                generation, uid = json.loads(text)
                first = min(one.generation for one in self._past.values())
                if generation > first and uid not in self._past:
                    return Denied(tuple(missing), generation)
        return Denied(tuple(missing))

    def _change_registers(
        self, world: World, ranks: Sequence[int], change: Callable[[Register], Register]
    ) -> dict[int, Register]:
        """What stands in each register afterwards, by rank; without those that cannot be reached."""
        found = {}
        key = f"{world.key}/register"
        for rank in ranks:
            try:
                store = self._of(world, rank)
                while True:
                    text = store.get(key) or ""
                    before = Register.from_json(text)
                    after = change(before)
                    if after == before or store.swap(key, text, after.to_json()):
                        break
            except StoreUnreachable:  # the change may have been made all the same: then it is one more vote
                self._lose(world, rank)
                continue
            found[rank] = after
        return found

    def _tell(self, world: World, chosen: str, bound: Collection[str], reachable: Sequence[int]) -> None:
        self._bound = frozenset(bound)
        text = json.dumps({"decision": chosen, "bound": sorted(bound), "since": self._worlds[0].world})
        for rank in reachable:
            try:
                self._of(world, rank).put(f"{world.key}/next", text)
            except StoreUnreachable:  # it asks the others
                self._lose(world, rank)

    def release(self, world: World, decision: Decision) -> None:
        # Its register first: whoever still collects this vote is led to the same decision.
        last = (LAST_ATTEMPT, world.rank)
        self._change_registers(world, [world.rank], lambda _: Register(last, last, decision.to_json()))
        for member in decision.members_after(world):
            with suppress(StoreUnreachable):
                self._store_of(member).put(f"released/{self._uid}", decision.uid)

    def _released(self) -> frozenset[str]:
        """Voters that have told this member so."""
        voters = sorted({uid for voters in self._worlds for uid in voters.electors})
        texts = self._own.get_many([f"released/{uid}" for uid in voters])
        return frozenset(uid for uid, text in zip(voters, texts, strict=True) if text is not None)

    def world_store(self, world: World) -> KeyValueStore:
        with suppress(StoreUnreachable):
            store = self._of(world, 0)
            store.get("run_id")
            return store
        self._lose(world, 0)
        return self._of(world, 0)

    def world_key(self, world: World) -> str:
        return world.key

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        inside = {member.uid for member in world.members} | self._released()
        electors = {uid for voters in self._worlds[:-1] for uid in voters.electors}
        left_out = electors - inside - self._bound
        return max((self._peer_timeout - answered.get(uid, math.inf) for uid in left_out), default=0.0)

    def _of(self, world: World, rank: int) -> KeyValueStore:
        return self._store_of(world.members[rank])

    def _store_of(self, member: Member) -> KeyValueStore:
        if member.uid == self._uid:
            return self._own
        store = self._clients.get(member.uid)
        if store is None:
            assert member.store is not None, "every member serves one"
            store = self._connect(member.store)
            if store.get("uid") != member.uid:
                raise StoreUnreachable(f"{member.name} is gone: another process has its address")
            self._clients[member.uid] = store
        return store

    def _reach(self, address: Address) -> KeyValueStore:
        store = self._clients.get(address)
        if store is None:
            store = self._clients[address] = self._connect(address)
        return store

    def _lose(self, world: World, rank: int) -> None:
        """A client that once got no answer gives none again."""
        self._clients.pop(world.members[rank].uid, None)

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
                self._store_of(waiting.member).put("over", world.uid)

    def close(self, me: Member | None) -> None:
        self._finder.close()
        self._clients.clear()


def _promise(register: Register, ballot: tuple[int, int]) -> Register:
    return replace(register, promised=ballot) if ballot > register.promised else register


def _accept(register: Register, ballot: tuple[int, int], decision: str) -> Register:
    return Register(ballot, ballot, decision) if ballot >= register.promised else register


def _uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)


def _address(text: str) -> Address:
    host, port = json.loads(text)
    return str(host), int(port)


def _is_address(text: str | None, address: Address) -> bool:
    return bool(text) and _address(text or "") == address
