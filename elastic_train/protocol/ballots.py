"""How members decide what follows a world: by Paxos, or by a claim in a place that they share.

It is single-decree Paxos (Lamport, "The Part-Time Parliament", 1998) over one **register** for each node of the world,
an acceptor that lies in the store of the node's first member. A proposer changes it by compare-and-swap, so that a
member votes even while its own threads do something else. Which votes are enough is said by laws.py, and when a claim
makes up for them by arbiter.py.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from elastic_train.branches import BRANCH, POSITION, Branch, Position, id_on, is_on
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import ArbiterLost, ArbiterSilent, Arbitration, Claim, silent_members
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.known_worlds import FORGOTTEN, KnownWorlds, tell_released
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.store import Clients, KeyValueStore
from elastic_train.world import World, from_json, from_runs, to_json, to_runs

Ballot = tuple[int, int]
"""(attempt, rank)"""
JOB = "job_token"
"""the fact that names the job"""
LAST_ATTEMPT = 10**9
"""of the ballot by which a member that is left out accepts for good"""


class Vote(IntEnum):
    """What a voter has accepted its decision for."""

    BALLOT = 0
    """some ballot, perhaps before a claim"""
    ALL = 1
    """one of all votes, which may have decided it: then a claim of another one does not count"""
    ACTS = 2
    """this member is about to act on it"""


@dataclass(frozen=True)
class Register:
    """What one voter has promised and accepted about the successor of one world."""

    promised: Ballot = (0, -1)
    """the largest ballot that it has answered: it accepts nothing below"""
    ballot: Ballot | None = None
    """of what it has accepted"""
    decision: str | None = None
    vote: Vote = Vote.BALLOT


def promise(register: Register, ballot: Ballot) -> Register:
    """The first phase."""
    return replace(register, promised=ballot) if ballot > register.promised else register


def accept(register: Register, ballot: Ballot, decision: str, vote: Vote = Vote.BALLOT) -> Register:
    """The second phase."""
    if ballot < register.promised:
        return register
    return Register(ballot, ballot, decision, max(vote, register.vote if register.decision == decision else vote))


def follow(register: Register, rank: int, decision: str) -> Register:
    """The vote of the member of `rank`, its own, for a decision that it is about to act on; later than every ballot
    that it has answered, so that nobody who asks all gets this vote for another one. Not where all votes may have
    decided another one."""
    if register.decision == decision:
        return replace(register, vote=Vote.ACTS)
    if register.vote is not Vote.BALLOT:
        return register
    ballot = (register.promised[0] + 1, rank)
    return Register(ballot, ballot, decision, Vote.ACTS)


def newest(registers: Collection[Register]) -> str | None:
    """The decision that a ballot which has collected these goes on with; None where it is free."""
    accepted = [one for one in registers if one.ballot is not None]
    found = max(accepted, key=lambda one: (one.vote is Vote.ACTS, one.ballot), default=None)
    return None if found is None else found.decision


def is_open(registers: Collection[Register]) -> bool:
    """Whether more than one decision may be claimed, and nobody is about to act on one: then the place alone knows
    whose stands."""
    is_acted_on = any(one.vote is Vote.ACTS for one in registers)
    return not is_acted_on and len({one.decision for one in registers if one.ballot is not None}) > 1


def release(rank: int, decision: str) -> Register:
    """The last vote of one that is left out."""
    return Register((LAST_ATTEMPT, rank), (LAST_ATTEMPT, rank), decision, Vote.ACTS)


def change(store: KeyValueStore, world: World, rule: Callable[[Register], Register]) -> Register:
    """What stands in a register after a rule was applied. Raises: StoreUnreachable; it may be applied all the same."""
    key = f"{world.key}/register"
    while True:
        text = store.get(key) or ""
        before = from_json(Register, text) if text else Register()
        after = rule(before)
        if after == before or store.swap(key, text, to_json(after)):
            return after


@dataclass(frozen=True)
class Round:
    """One attempt at a decision, over connections of its thread."""

    clients: Clients
    world: World
    worlds: Sequence[Voters]
    """since the last settled one, without those that are known to be dead"""
    proposal: str
    reachable: Sequence[int]
    """ranks that may be asked, this one first"""
    dead: frozenset[str]
    answering: frozenset[str] = frozenset()
    """uids of members of this world that answer probes, whether they take part or not"""
    ended: frozenset[str] = frozenset()
    """as `PeerJob.ended_holders`: their votes are not waited for, where a claim is made"""
    needs_votes: bool = True
    """whether a claim does not make up for them"""
    needs_all: bool = False
    """whether each that can be reached has to accept, for whoever has not may claim another decision later"""
    is_lost: bool = False
    """whether nobody can be told any more what was claimed"""

    @property
    def voters(self) -> list[int]:
        """Ranks that are asked for a vote. This one may have accepted a decision without being an elector."""
        if self.needs_all:
            return list(self.reachable)
        electors = {uid for voters in self.worlds for uid in voters.electors} | {self.world.me.uid}
        return [rank for rank in self.reachable if self.world.members[rank].uid in electors]

    def accepted(self, promises: Mapping[int, Register]) -> str | Denied | None:
        """What this ballot goes on with; None where it is free. Denied where that is not known: a claim may stand."""
        # Who has not answered may act on a claim.
        if self.needs_all and (len(promises) < len(self.voters) or (not self.is_lost and is_open(promises.values()))):
            return Denied()
        return newest(promises.values())

    def change_registers(self, ranks: Sequence[int], rule: Callable[[Register], Register]) -> dict[int, Register]:
        """What stands in each afterwards, by rank; without those that cannot be reached: there the change may have been
        made all the same, and is one more vote."""
        return self.clients.ask_each(self.world, ranks, lambda store: change(store, self.world, rule))


class Ballots:
    """One member's proposals of what follows a world, and what it is told of those of others.

    For the training thread and the one that prepares a join, each with connections of its own. Its lock guards the
    number of the attempt: each proposal has a ballot of its own.

    Args:
        facts: what this member knows of the job, as it grows.
    """

    def __init__(
        self, known: KnownWorlds, arbitration: Arbitration, elsewhere: Elsewhere, facts: Mapping[str, str]
    ) -> None:
        self._known, self._arbitration, self._elsewhere, self._facts = known, arbitration, elsewhere, facts
        self._attempt = 0
        self._lock = threading.Lock()

    def decide(self, round_: Round) -> str | Denied:
        """Make its proposal, or one that others have accepted before, the successor of its world. On either thread."""
        if not self._arbitration.is_needed(self._known.voters):
            return self.decide_by_votes(round_)
        is_lost = False
        try:
            outcome = self._decide_by_claim(round_)
            if outcome is not None:
                return outcome
        except ArbiterSilent as error:
            is_lost = isinstance(error, ArbiterLost)
        silent = silent_members(round_.worlds, uids(round_.world, round_.reachable))
        if silent:  # they may act on a claim, or on all votes
            return self._elsewhere.denied(round_, silent)
        return self.decide_by_votes(replace(round_, needs_all=True, is_lost=is_lost))

    def decide_by_votes(self, round_: Round) -> str | Denied:
        """The same, where no claim counts."""
        collected = self._collect(round_)
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        bound: set[int] = set()
        # Of all its own vote last: until the others are bound it may follow a claim.
        for ranks in (round_.voters[1:], round_.voters[:1]) if round_.needs_all else (voters,):
            bound |= self._accept(round_, ballot, ranks, chosen)
            if round_.needs_all and not bound.issuperset(ranks):
                return Denied()
        if not may_go_on(round_.worlds, uids(round_.world, bound)):
            missing = missing_votes(round_.worlds, uids(round_.world, bound))
            return Denied(() if bound != set(voters) else missing)
        told = [rank for rank in round_.reachable if rank in bound or rank not in round_.voters]
        self._notify(round_, chosen, bound, told)
        return chosen

    def _decide_by_claim(self, round_: Round) -> str | Denied | None:
        """None where all votes may have decided another one than stands. Raises: ArbiterSilent."""
        worlds = [one.without(round_.ended) for one in round_.worlds]
        round_ = replace(round_, worlds=worlds, dead=round_.dead | round_.ended)
        world, side = round_.world, uids(round_.world, round_.reachable)
        # Not only for what stands: where the place is silent, two that have each voted for their own decision below,
        # and may have claimed it, wait for it both.
        standing = self._claim(world, None)
        if standing is not None:
            return self._follow(round_, standing)
        # Who has no state may not carry the job away alone: where all who had it are dead, it takes votes besides.
        is_enough = self._arbitration.is_enough(self._known.voters) and bool(self._known.holders(round_.dead))
        if not may_go_on(worlds, side) and not (is_enough and self._arbitration.has_given_way(world.uid)):
            return self._elsewhere.denied(round_, missing_votes(worlds, side))
        collected = self._collect(replace(round_, needs_votes=not is_enough))
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        # Votes before the claim: where others may decide by these alone, they are bound to it. Else its own, so that
        # who asks all, where the place is silent, mostly goes on with what this one claims.
        bound = self._accept(round_, ballot, [world.rank] if is_enough else voters, chosen)
        if world.rank not in bound or not (is_enough or may_go_on(worlds, uids(world, bound))):
            return Denied()
        standing = self._claim(world, chosen)
        assert standing is not None, "something was claimed"
        outcome = self._follow(round_, standing)
        if outcome == standing.decision:  # who finds no claim any more collects it
            self._accept(round_, ballot, voters, standing.decision)
        return outcome

    def _claim(self, world: World, decision: str | None) -> Claim | None:
        job = self._facts.get(JOB)
        if job is None:
            raise ArbiterSilent("the job has no name yet")
        branch = id_on(Branch.from_json(self._facts.get(BRANCH)))
        line = f"{job}.{branch}" if branch else job  # both sides of a split count on from the same generation
        claim = None
        if decision is not None:
            claim = Claim(world.uid, decision, self._known.voters[0].world)
        return self._arbitration.claim(line, world.generation, claim, self._known.voters)

    def _follow(self, round_: Round, standing: Claim) -> str | Denied | None:
        if standing.parent != round_.world.uid:
            return Denied(gone_on=Decision.from_json(standing.decision).generation)
        self._known.note_settled(standing.settled)
        if not self._has_voted(round_.clients, round_.world, standing.decision):
            return None
        self._notify(round_, standing.decision, (), round_.reachable)
        return standing.decision

    def _has_voted(self, clients: Clients, world: World, decision: str) -> bool:
        """Whether this member has, for what it is about to act on: so that all votes decide nothing else."""
        register = change(clients.own, world, lambda register: follow(register, world.rank, decision))
        return register.decision == decision

    def _collect(self, round_: Round) -> tuple[Ballot, list[int], str] | Denied:
        """The ballot, who has promised it, and the decision to go on with: the newest that any of them has accepted."""
        world, worlds, proposal = round_.world, round_.worlds, round_.proposal
        with self._lock:
            self._attempt += 1
            ballot = (self._attempt, world.rank)
        promises = round_.change_registers(round_.voters, lambda register: promise(register, ballot))
        if any(register.promised > ballot for register in promises.values()):
            with self._lock:
                self._attempt = max(self._attempt, *(register.promised[0] for register in promises.values()))
            return Denied()
        if round_.needs_votes and not may_go_on(worlds, uids(world, promises)):
            return self._elsewhere.denied(round_, missing_votes(worlds, uids(world, promises)))
        chosen = round_.accepted(promises) or proposal
        if isinstance(chosen, Denied):
            return chosen
        members = uids(world, Decision.from_json(chosen).ranks)
        # A vote is no state: who has one is to be in it.
        if chosen is proposal and round_.needs_votes and not may_go_on(worlds, members):
            return self._elsewhere.denied(round_, missing_votes(worlds, members))
        holders = self._known.holders(round_.dead)
        if chosen is proposal and holders and not holders & members:  # they have released their votes, not their state
            return self._elsewhere.denied(round_, sorted(holders))
        return ballot, list(promises), chosen

    def _accept(self, round_: Round, ballot: Ballot, voters: Sequence[int], chosen: str) -> set[int]:
        """Who has."""
        vote = Vote.ALL if round_.needs_all else Vote.BALLOT
        votes = round_.change_registers(voters, lambda register: accept(register, ballot, chosen, vote))
        return {rank for rank, register in votes.items() if register.ballot == ballot}

    def _notify(self, round_: Round, chosen: str, bound: Collection[int], reachable: Sequence[int]) -> None:
        """Who does not hear it asks the others."""
        world, known = round_.world, self._known
        known.bound = uids(world, bound)
        text = json.dumps({"decision": chosen, "bound": to_runs(sorted(bound)), "since": known.voters[0].world})
        round_.clients.ask_each(world, reachable, lambda store: store.put(f"{world.key}/next", text))

    def decided(self, clients: Clients, world: World, asked: Sequence[int]) -> str | Denied | None:
        """The decision that stands, as far as this member or one of the ranks `asked` knows. Denied: one of these knows
        only that others have gone on long ago."""
        key = f"{world.key}/next"
        text = clients.own.get(key)
        for rank in asked if text is None else ():
            try:
                store = clients.of_rank(world, rank)
                text = store.get(key)
                forgotten = store.get(FORGOTTEN) if text is None else None
                if forgotten is not None and (generations := json.loads(forgotten))[0] >= world.generation:
                    return Denied(gone_on=int(generations[1]))
            except StoreUnreachable:
                clients.lose_rank(world, rank)
            if text is not None:
                clients.own.put(key, text)
                break
        if text is None:
            return None
        told = json.loads(text)
        if self._arbitration.has_place and not self._has_voted(clients, world, told["decision"]):
            return None
        self._known.bound = uids(world, from_runs(told["bound"]))
        self._known.note_settled(told["since"])
        return str(told["decision"])

    def release(self, clients: Clients, world: World, decision: Decision) -> None:
        """This member is left out by what follows `world`, and goes on as nobody that had a vote: none waits for it."""
        # Its register first: whoever still collects this vote is led to the same decision.
        change(clients.own, world, lambda _: release(world.rank, decision.to_json()))
        for member in decision.members_after(world):
            with contextlib.suppress(StoreUnreachable):
                tell_released(clients.of(member), world)


class Elsewhere:
    """Whether the job trains elsewhere: of those that may know one is asked each time, for it may be silent.

    Over the connections of a round, on its thread.

    Args:
        facts: what this member knows of the job, as it grows.
        goes_on: whether sides without enough votes go on as branches.
    """

    def __init__(
        self, finder: Finder, known: KnownWorlds, facts: Mapping[str, str], *, run_id: str, goes_on: bool
    ) -> None:
        self._finder, self._known, self._facts = finder, known, facts
        self._run_id, self._goes_on = run_id, goes_on
        self._num_asked = 0

    def denied(self, round_: Round, missing: Sequence[str]) -> Denied:
        """What a round without these votes comes to. Blocks for short timeouts."""
        clients, members = round_.clients, round_.world.members
        # Of those in this world, one that answers may never have entered it and train in another by now.
        inside = {member.store for member in members if member.uid not in round_.answering}
        past = self._known.past
        places = [member.store for one in past.values() for member in one.members if member.uid in missing]
        with contextlib.suppress(StoreUnreachable):
            places += self._finder.addresses()
        outside = [place for place in dict.fromkeys(places) if place is not None and place not in inside]
        if outside:
            self._num_asked += 1  # not the attempt, which is the same while a claim is awaited
            place = outside[self._num_asked % len(outside)]
            try:
                keys = ["settled", "run_id", f"fact/{JOB}", *([POSITION] if self._goes_on else [])]
                text, run_id, job, *position = clients.at(place).get_many(keys)
            except StoreUnreachable:
                clients.lose(place)
                return Denied(tuple(missing))
            # Generations of two jobs say nothing about each other, though they have one run id: the two meet.
            is_another = None not in (job, self._facts.get(JOB)) and job != self._facts.get(JOB)
            if text and run_id == self._run_id and not is_another:
                generation, uid = json.loads(text)
                first = min(one.generation for one in past.values())
                has_gone_on = generation > first and not self._is_beside(clients.own, *position)
                if uid not in past and (has_gone_on or self._loses_nothing(clients.own, *position)):
                    return Denied(tuple(missing), generation)
        return Denied(tuple(missing))

    def _is_beside(self, store: KeyValueStore, position: str | None = None) -> bool:
        """Whether this side has committed steps that another one has not: then the two meet (other_sides.py)."""
        own = store.get(POSITION)
        if own is None or position is None:
            return False
        mine = from_json(Position, own)
        return not is_on(mine.branches, mine.step, from_json(Position, position).branches)

    def _loses_nothing(self, store: KeyValueStore, position: str | None = None) -> bool:
        """Whether this member waits on one branch for a state, and finds another that has one: generations of the two
        say nothing about each other."""
        if position is None or store.get(POSITION) is not None:
            return False
        return from_json(Position, position).id != id_on(Branch.from_json(self._facts.get(BRANCH)))


def uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)
