"""A job whose members serve a store each, and decide together: no process and no machine is special.

A decision about what follows a world is single-decree Paxos (Lamport, "The Part-Time Parliament", 1998) over one
**register** for each node of that world. A register lies in the store of the node's first member, and a proposer
changes it by compare-and-swap, so that a member votes even while its own threads do something else. Which votes are
enough is said by laws.py.

Keys in a member's own store: `host` (where newcomers queue, as far as it knows), `queue/...` (the join queue, while it
is the host), `admitted` (its first world), `admitted/UID` (that of one that could not be told), `released/...` (who is
nobody's voter any more), `fact/NAME`; and below each world's key `present`, `register`, `next`, `left/...`, at rank 0
`ready/...`, and what else was announced.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_train.branches import BRANCH, MOST_OTHERS, POSITION, Branch, Position, is_on
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol import registers
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbiter, ArbiterSilent, Arbitration, Claim, silent_members
from elastic_train.protocol.clients import Address, Clients
from elastic_train.protocol.entrance import Entrance, Finder, Size, admitted_key
from elastic_train.protocol.job import Admitted, Denied, InQueue, Over, Place, scoped
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.ranks import from_runs, to_runs
from elastic_train.protocol.registers import Register
from elastic_train.protocol.store import KeyValueStore, Notes, append, entries
from elastic_train.rules import disagreement, next_generation
from elastic_train.world import Member, World

CARRIED_FACTS = ("job_token", "run_uid", "agreement")


@dataclass(frozen=True)
class _Round:
    """One attempt at a decision, over connections of its thread."""

    clients: Clients
    world: World
    worlds: Sequence[Voters]
    """since the last settled one, without those that are known to be dead"""
    proposal: str
    reachable: Sequence[int]
    dead: frozenset[str]
    needs_votes: bool

    @property
    def voters(self) -> list[int]:
        """Ranks that can be asked for a vote."""
        electors = {uid for voters in self.worlds for uid in voters.electors}
        return [rank for rank in self.reachable if self.world.members[rank].uid in electors]


class PeerJob:
    """As job.Job.

    Args:
        own: this member's own store; it answers two threads.
        uid: of this process; others ask for it, for another one may have its address by then.
        run_id: of the job; members of other jobs are not followed.
        reach: a client of the store at an address, for the training thread. Raises: StoreUnreachable.
        refused: which of some members are gone, by one probe each.
        clock: monotonic seconds.
        arbiter: a place that members may share, where decisions can be claimed.
        goes_on: whether a side without enough votes goes on as a branch (branches.py), where nothing could claim.
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
        arbiter: Arbiter | None = None,
        in_background: Callable[[Callable[[], None]], None] = lambda _task: None,
        goes_on: bool = False,
    ) -> None:
        self._in_background = in_background
        self._own, self._finder = own, finder
        self._peer_timeout, self._max_world_size, self._draw_uid = peer_timeout, max_world_size, draw_uid
        self._clients = Clients(own, uid, reach)
        self._beside = Clients(own, uid, reach)
        """for the thread that prepares a join"""
        self._entrance = Entrance(
            self._clients, address, finder, size, run_id=run_id, refused=refused, begin=self._begin, clock=clock
        )
        self._arbitration = Arbitration(arbiter, peer_timeout, clock)
        self._goes_on, self._clock = goes_on, clock
        self._silent_since: tuple[str, tuple[str, ...], float] | None = None
        """uid of the world, of whom nothing is heard, and since when it is these"""
        self._attempt = self._num_asked = 0
        self._lock = threading.Lock()
        """for what two threads change: ballots, and the worlds whose voters count"""
        self._is_host_meanwhile = False
        """whether newcomers wait here, as long as there is no rank 0"""
        self._worlds: tuple[Voters, ...] = ()
        """voters of the worlds since the last settled one, the present one last"""
        self._has_state = False
        """whether a world was settled, as far as this member knows: then those of the first of these have the state"""
        self._bound: frozenset[str] = frozenset()
        """uids of voters that have accepted the present world, though they may not be in it"""
        self._past: dict[str, World] = {}
        """worlds that this member has been in since the last settled one, with the present one"""
        self._facts: dict[str, str] = {}
        self._world: World | None = None
        self._ready_for = ""
        """uid of the world"""
        self._told = ""
        """what the newcomers of the present world are told"""
        self._invited: tuple[Member, ...] = ()
        """newcomers of the next world, where it is decided ahead"""
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

    def host_says(self, key: str) -> str | None:
        try:
            host = self._entrance.host_store
            return None if host is None else host.get(key)
        except StoreUnreachable:  # the next look finds another host
            self._entrance.forget_host()
            return None

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
        self._arbitration.take_over(told.get("shared", {}))
        self._has_state = told.get("settled", False)
        return Admitted(world, decision.facts, came_later=bool(old))

    def leave_queue(self) -> None:
        self._entrance.leave()

    def queue(self) -> list[Waiting]:
        return self._entrance.queue()

    def drop(self, members: Sequence[Member]) -> None:
        self._entrance.drop(members)

    def is_over(self) -> bool:
        return self._own.get("over") is not None

    # --- a join that is prepared --------------------------------------------------------------------------------------

    def beside(self, member: Member) -> Notes:
        return self._beside.of(member)

    def planned(self) -> str | None:
        return self._own.get("plan")

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        text = decision.to_json()
        if self._decide(self._beside, world, text, range(len(world.members)), ()) != text:
            return False
        self._invited = decision.new
        self._tell_newcomers(self._beside, decision.new, self._word_for_newcomers(decision, world))
        return True

    def stop_planning(self) -> None:
        self._beside.keep_only(())

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
        self._tell_newcomers(self._clients, fitting, self._told)
        self._own.put("host", json.dumps(first.store))

    def _word_for_newcomers(self, decision: Decision, world: World | None) -> str:
        old = () if world is None else decision.members_after(world)[: len(decision.ranks)]
        after = Voters.of(decision.uid, decision.members_after(world)[: self._max_world_size])  # a spare has no state
        told = {
            "decision": json.loads(replace(decision, ranks=tuple(range(len(old)))).to_json()),
            "old": [json.loads(one.to_json()) for one in old],
            "worlds": [one.without(decision.dead).to_json() for one in self._worlds] + [after.to_json()],
            "shared": self._arbitration.known(self._worlds),
            "settled": self._has_state,
        }
        return json.dumps(told)

    def _tell_newcomers(self, clients: Clients, newcomers: Sequence[Member], told: str) -> None:
        for member in newcomers:
            try:
                clients.of(member).create("admitted", told)
            except StoreUnreachable:  # it may look here; and whoever misses it in the next agreement tells it again
                clients.lose(member)
                self._own.put(admitted_key(member.uid), told)

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None = None) -> None:
        if decision is not None:
            self._told = self._word_for_newcomers(decision, self._world)
            with self._lock:
                kept = tuple(one.without(decision.dead) for one in self._worlds)
                self._worlds = (*kept, Voters.of(world.uid, world.workers))
        before, self._world = self._world, world
        was_host, self._is_host_meanwhile = self._is_host_meanwhile, False
        self._past[world.uid] = world
        told, self._invited = self._invited, ()
        if before is None:
            self._own.put("begun", world.uid)
        for name, text in facts.items():
            if self._facts.get(name) != text or before is None:
                self._own.put(f"fact/{name}", text)
        self._facts.update(facts)
        if before is None or was_host or before.members[0].uid != world.members[0].uid:
            self._own.put("host", json.dumps(world.members[0].store))
        if decision is not None and world.rank == 0 and decision.new != told:
            self._tell_newcomers(self._clients, decision.new, self._told)
        self._clients.keep_only({member.uid for member in world.members})
        self._in_background(lambda: self._after_entering(world))

    def _after_entering(self, world: World) -> None:
        """What nobody waits for."""
        self.drop(world.members)
        self._clients.connect_ahead(world, lambda: self._world is world)

    def _note_settled(self, world: str) -> None:
        """What is settled for one is settled for all; a spare learns it only from others."""
        with self._lock:
            uids = [voters.world for voters in self._worlds]
            if world in uids:
                self._worlds = self._worlds[uids.index(world) :]

    def settle(self, world: World) -> None:
        if self._world is world:
            with self._lock:
                self._worlds, self._bound, self._past = self._worlds[-1:], frozenset(), {world.uid: world}
            self._has_state = True
            self._arbitration.forget_all_but(self._worlds)
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
                    self._has_state = True
                    self._note_settled(json.loads(settled)[1])
                if text is None and store.get("begun") != world.uid:
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
                store = self._clients.of_rank(world, rank)
                if name.startswith("left/"):
                    append(store, f"{world.key}/left", name.removeprefix("left/"))
                else:
                    store.create(scoped(world, name), text)
            except StoreUnreachable:
                self._clients.lose_rank(world, rank)

    def heard(self, world: World, name: str) -> str | None:
        return self._own.get(scoped(world, name))

    def left(self, world: World) -> frozenset[int]:
        return frozenset(map(int, entries(self._own, f"{world.key}/left")))

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
        self._bound = _uids(world, from_runs(told["bound"]))
        self._note_settled(told["since"])
        return str(told["decision"])

    def show_place(self, world: World) -> None:
        self._arbitration.show(world.uid)

    def sees_place(self, world: World) -> bool:
        return self._arbitration.sees(world.uid)

    def note_place(self, world: World, *, is_shared: bool | None) -> None:
        self._arbitration.note(world.uid, is_shared=is_shared)

    def decide(
        self,
        world: World,
        proposal: str,
        *,
        reachable: Sequence[int],
        dead: Collection[str],
        answering: Collection[str] = (),
    ) -> str | Denied:
        outcome = self._decide(self._clients, world, proposal, reachable, dead)
        if not self._goes_on or not isinstance(outcome, Denied) or not outcome.votes or outcome.gone_on is not None:
            return outcome
        return self._decide_as_branch(world, proposal, reachable, dead, answering) or outcome

    def _decide_as_branch(
        self, world: World, proposal: str, reachable: Sequence[int], dead: Collection[str], answering: Collection[str]
    ) -> str | Denied | None:
        """Beyond the laws, when nothing was heard for one more peer timeout of those that are missing: without them.
        None where that may not be, or would not help."""
        worlds = [one.without({*dead, *self._released()}) for one in self._worlds]
        silent = silent_members(worlds, _uids(world, reachable))
        without = [one.without(silent) for one in worlds]
        has_state = self._has_state and set(without[0].members) - without[0].dead
        # A member that answers and takes no part may go on in a moment; with an arbiter, so may those that are silent.
        if not silent or not has_state or not set(silent).isdisjoint(answering) or self._arbitration.is_needed(worlds):
            self._silent_since = None
            return None
        now, before = self._clock(), self._silent_since
        if before is None or before[:2] != (world.uid, silent):
            before = self._silent_since = (world.uid, silent, now)
        if now - before[2] <= self._peer_timeout:
            return None
        decision = self._branch_off(world, Decision.from_json(proposal), silent)
        members = decision.members_after(world)
        if len({member.node for member in members}) < max(member.min_nodes for member in members):
            return None  # it would not train
        gone = frozenset(dead) | frozenset(silent)
        round_ = _Round(self._clients, world, without, decision.to_json(), reachable, gone, needs_votes=True)
        return self._decide_by_votes(round_)

    def _branch_off(self, world: World, decision: Decision, silent: Sequence[str]) -> Decision:
        """Newcomers wait for the world after it: each who is in the first one has been in the parent."""
        known = {member.uid: member.store for one in self._past.values() for member in one.members}
        others = [store for uid in silent if (store := known.get(uid)) is not None]
        before = Branch.from_json(decision.facts.get(BRANCH))
        others += () if before is None else before.others
        branch = Branch(decision.uid, min(decision.ranks), tuple(others[:MOST_OTHERS]))
        facts = {**decision.facts, BRANCH: branch.to_json()}
        return replace(decision, new=(), dead=(*decision.dead, *silent), facts=facts)

    def _decide(
        self, clients: Clients, world: World, proposal: str, reachable: Sequence[int], dead: Collection[str]
    ) -> str | Denied:
        """On either thread: each proposal has a ballot of its own."""
        worlds = [one.without({*dead, *self._released()}) for one in self._worlds]
        round_ = _Round(clients, world, worlds, proposal, reachable, frozenset(dead), needs_votes=True)
        if not self._arbitration.is_needed(self._worlds):
            return self._decide_by_votes(round_)
        try:
            return self._decide_by_claim(round_)
        except ArbiterSilent:
            silent = silent_members(worlds, _uids(world, reachable))
            if silent:  # they may have claimed
                return self._denied(round_, silent)
            return self._decide_by_votes(round_)

    def _decide_by_votes(self, round_: _Round) -> str | Denied:
        collected = self._collect(round_)
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        bound = self._accept(round_, ballot, voters, chosen)
        if not may_go_on(round_.worlds, _uids(round_.world, bound)):
            missing = missing_votes(round_.worlds, _uids(round_.world, bound))
            return Denied(() if bound != set(voters) else missing)
        told = [rank for rank in round_.reachable if rank in bound or rank not in round_.voters]
        self._tell(round_, chosen, bound, told)
        return chosen

    def _decide_by_claim(self, round_: _Round) -> str | Denied:
        """Raises: ArbiterSilent."""
        world, worlds, side = round_.world, round_.worlds, _uids(round_.world, round_.reachable)
        standing = self._claim(world, None)
        if standing is not None:
            return self._follow(round_, standing)
        # Who has no state may not carry the job away alone: where all who had it are dead, it takes votes besides.
        is_enough = self._arbitration.is_enough(self._worlds) and bool(self._holders(round_))
        if not may_go_on(worlds, side) and not (is_enough and self._arbitration.has_given_way(world.uid)):
            return self._denied(round_, missing_votes(worlds, side))
        collected = self._collect(replace(round_, needs_votes=not is_enough))
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        standing = self._claim(world, chosen)
        assert standing is not None, "something was claimed"
        if standing.parent == world.uid:  # who finds no claim any more collects it
            self._accept(round_, ballot, voters, standing.decision)
        return self._follow(round_, standing)

    def _claim(self, world: World, decision: str | None) -> Claim | None:
        job = self._facts.get("job_token")
        if job is None:
            raise ArbiterSilent("the job has no name yet")
        claim = None
        if decision is not None:
            claim = Claim(world.uid, decision, self._worlds[0].world)
        return self._arbitration.claim(job, world.generation, claim)

    def _follow(self, round_: _Round, standing: Claim) -> str | Denied:
        if standing.parent != round_.world.uid:
            return Denied(gone_on=Decision.from_json(standing.decision).generation)
        self._note_settled(standing.settled)
        self._tell(round_, standing.decision, (), round_.reachable)
        return standing.decision

    def _collect(self, round_: _Round) -> tuple[registers.Ballot, list[int], str] | Denied:
        """The ballot, who has promised it, and the decision to go on with: the newest that any of them has accepted."""
        world, worlds, proposal = round_.world, round_.worlds, round_.proposal
        with self._lock:
            self._attempt += 1
            ballot = (self._attempt, world.rank)
        promises = self._change_registers(round_, round_.voters, partial(registers.promise, ballot=ballot))
        if any(register.promised > ballot for register in promises.values()):
            with self._lock:
                self._attempt = max(self._attempt, *(register.promised[0] for register in promises.values()))
            return Denied()
        if round_.needs_votes and not may_go_on(worlds, _uids(world, promises)):
            return self._denied(round_, missing_votes(worlds, _uids(world, promises)))
        accepted = [one for one in promises.values() if one.ballot is not None]
        newest = max(accepted, key=lambda one: one.ballot or (0, -1), default=None)
        chosen = proposal if newest is None or newest.decision is None else newest.decision
        members = _uids(world, Decision.from_json(chosen).ranks)
        # A vote is no state: who has one is to be in it.
        if chosen is proposal and round_.needs_votes and not may_go_on(worlds, members):
            return self._denied(round_, missing_votes(worlds, members))
        holders = self._holders(round_)
        if chosen is proposal and holders and not holders & members:  # they have released their votes, not their state
            return self._denied(round_, sorted(holders))
        return ballot, list(promises), chosen

    def _holders(self, round_: _Round) -> set[str]:
        """Members of the last settled world that are not known to be dead."""
        return set(self._worlds[0].members) - self._worlds[0].dead - round_.dead

    def _accept(self, round_: _Round, ballot: registers.Ballot, voters: Sequence[int], chosen: str) -> set[int]:
        """Who has."""
        votes = self._change_registers(round_, voters, lambda register: registers.accept(register, ballot, chosen))
        return {rank for rank, register in votes.items() if register.ballot == ballot}

    def _denied(self, round_: _Round, missing: Sequence[str]) -> Denied:
        """The job may train elsewhere: one that may know is asked each time, for it may be silent."""
        clients, inside = round_.clients, {member.store for member in round_.world.members}
        places = [member.store for one in self._past.values() for member in one.members if member.uid in missing]
        with contextlib.suppress(StoreUnreachable):
            places += self._finder.addresses()
        outside = [place for place in dict.fromkeys(places) if place is not None and place not in inside]
        if outside:
            self._num_asked += 1  # not the attempt, which is the same while a claim is awaited
            place = outside[self._num_asked % len(outside)]
            try:
                keys = ["settled", "run_id", *([POSITION] if self._goes_on else [])]
                text, run_id, *position = clients.at(place).get_many(keys)
            except StoreUnreachable:
                clients.lose(place)
                return Denied(tuple(missing))
            if text and run_id == self._run_id:
                generation, uid = json.loads(text)
                first = min(one.generation for one in self._past.values())
                if generation > first and uid not in self._past and not self._is_beside(*position):
                    return Denied(tuple(missing), generation)
        return Denied(tuple(missing))

    def _is_beside(self, position: str | None = None) -> bool:
        """Whether this side has committed steps that another one has not: then the two meet (encounters.py)."""
        own = self._own.get(POSITION)
        if own is None or position is None:
            return False
        mine = Position.from_json(own)
        return not is_on(mine.branches, mine.step, Position.from_json(position).branches)

    def _change_registers(
        self, round_: _Round, ranks: Sequence[int], rule: Callable[[Register], Register]
    ) -> dict[int, Register]:
        """What stands in each register afterwards, by rank; without those that cannot be reached."""
        clients, world, found = round_.clients, round_.world, {}
        for rank in ranks:
            try:
                found[rank] = registers.change(clients.of_rank(world, rank), f"{world.key}/register", rule)
            except StoreUnreachable:  # the change may have been made all the same: then it is one more vote
                clients.lose_rank(world, rank)
        return found

    def _tell(self, round_: _Round, chosen: str, bound: Collection[int], reachable: Sequence[int]) -> None:
        clients, world = round_.clients, round_.world
        self._bound = _uids(world, bound)
        text = json.dumps({"decision": chosen, "bound": to_runs(sorted(bound)), "since": self._worlds[0].world})
        for rank in reachable:
            try:
                clients.of_rank(world, rank).put(f"{world.key}/next", text)
            except StoreUnreachable:  # it asks the others
                clients.lose_rank(world, rank)

    def release(self, world: World, decision: Decision) -> None:
        # Its register first: whoever still collects this vote is led to the same decision.
        last = (registers.LAST_ATTEMPT, world.rank)
        registers.change(self._own, f"{world.key}/register", lambda _: Register(last, last, decision.to_json()))
        for member in decision.members_after(world):
            with suppress(StoreUnreachable):
                append(self._clients.of(member), "released", self._uid)

    def _released(self) -> frozenset[str]:
        """Members that have told this one so."""
        return frozenset(entries(self._own, "released"))

    def say_ready(self, world: World) -> None:
        if self._ready_for == world.uid:
            return  # each counts once
        self._ready_for = world.uid
        append(self.world_store(world), f"{world.key}/ready", str(world.rank))

    def are_ready(self, world: World) -> bool:
        return int(self._clients.of_rank(world, 0).get(f"{world.key}/ready/count") or 0) >= world.world_size

    def not_ready(self, world: World) -> tuple[int, ...]:
        ready = set(map(int, entries(self._clients.of_rank(world, 0), f"{world.key}/ready")))
        return tuple(rank for rank in range(world.world_size) if rank not in ready)

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
        # Not voters alone: what any member finds out in time counts for its side.
        before = {uid for voters in self._worlds[:-1] for uid in voters.members if uid not in voters.dead}
        left_out = before - inside - self._bound
        return max((self._peer_timeout - answered.get(uid, math.inf) for uid in left_out), default=0.0)

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, is_spokesman: bool, headless: World | None = None) -> None:
        self._finder.keep(has_world=self._world is not None)
        world = world or self._world  # between two worlds, too: no other job may begin meanwhile
        if headless is not None and headless.rank > 0 and headless is self._world and not self._is_host_meanwhile:
            # Until there is another rank 0, which may take long, a host that comes back must not begin anew.
            self._is_host_meanwhile = True
            self._own.put("host", json.dumps(headless.me.store))
            shown = headless
            while self._world is not shown:  # the training thread has entered another one, and perhaps said so before
                shown = self._world
                self._own.put("host", json.dumps(shown.members[0].store))
        if world is not None and (world.rank == 0 or world is headless):
            firsts = {member.node: member.store for member in reversed(world.members)}
            stores = [one for one in reversed(firsts.values()) if one]
            self._finder.show(stores, self._facts.get("job_token", ""), if_missing=world.rank > 0)

    def finish(self, world: World) -> None:
        self._own.put("over", world.uid)
        for member in (*(waiting.member for waiting in self.queue()), *self._invited):
            with suppress(StoreUnreachable):
                self._clients.of(member).put("over", world.uid)

    def close(self, me: Member | None) -> None:
        self._finder.close()
        self._clients.keep_only(())


def _uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)
