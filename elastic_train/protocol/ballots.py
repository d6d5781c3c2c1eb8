"""The decision on the successor of a world: by Paxos, or by a claim in a place that the members share.

This is single-decree Paxos (Lamport, "The Part-Time Parliament", 1998) over one **register** for each node of the
world: the acceptor, in the store of the node's first member. The proposer changes it there by compare-and-swap, so a
member votes even while its own threads are busy. laws.py defines which votes are enough, and arbiter.py when a claim
makes up for votes.
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
from elastic_train.protocol.known_worlds import FORGOTTEN, KnownWorlds, announce_release
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.store import Clients, KeyValueStore
from elastic_train.world import World, from_json, from_runs, to_json, to_runs

Ballot = tuple[int, int]
"""(attempt, rank)"""
JOB = "job_token"
"""the fact that names the job"""
LAST_ATTEMPT = 10**9
"""attempt in the ballot of a member that is left out: it accepts nothing after that"""


class Vote(IntEnum):
    """The purpose for which a voter has accepted its decision."""

    BALLOT = 0
    """an ordinary ballot, perhaps before a claim"""
    ALL = 1
    """a ballot that needs all votes, and may have decided: a claim of another decision no longer counts"""
    ACTS = 2
    """this member is about to act on the decision"""


@dataclass(frozen=True)
class Register:
    """The promise and the vote of one voter about the successor of one world."""

    promised: Ballot = (0, -1)
    """the largest ballot that it has answered: it accepts no smaller one"""
    ballot: Ballot | None = None
    """ballot in which it accepted `decision`"""
    decision: str | None = None
    vote: Vote = Vote.BALLOT


def promise(register: Register, ballot: Ballot) -> Register:
    """Return the register after the first phase of `ballot`."""
    return replace(register, promised=ballot) if ballot > register.promised else register


def accept(register: Register, ballot: Ballot, decision: str, vote: Vote = Vote.BALLOT) -> Register:
    """Return the register after the second phase of `ballot`."""
    if ballot < register.promised:
        return register
    return Register(ballot, ballot, decision, max(vote, register.vote if register.decision == decision else vote))


def follow(register: Register, rank: int, decision: str) -> Register:
    """Return the member's own register with its vote for the decision that it is about to act on. The ballot is above
    every ballot that the register has answered, so a proposer that asks all members cannot get this vote for another
    decision. If all votes may have decided another one, the register stays as it is."""
    if register.decision == decision:
        return replace(register, vote=Vote.ACTS)
    if register.vote is not Vote.BALLOT:
        return register
    ballot = (register.promised[0] + 1, rank)
    return Register(ballot, ballot, decision, Vote.ACTS)


def newest(registers: Collection[Register]) -> str | None:
    """Return the decision that a ballot must keep after it collected these registers; None if it is free to choose."""
    accepted = [one for one in registers if one.ballot is not None]
    found = max(accepted, key=lambda one: (one.vote is Vote.ACTS, one.ballot), default=None)
    return None if found is None else found.decision


def is_open(registers: Collection[Register]) -> bool:
    """Return whether several decisions may be claimed while no member is about to act on one: then only the place for
    claims knows which one stands."""
    is_acted_on = any(one.vote is Vote.ACTS for one in registers)
    return not is_acted_on and len({one.decision for one in registers if one.ballot is not None}) > 1


def release(rank: int, decision: str) -> Register:
    """Return the register with the final vote of a member that is left out."""
    return Register((LAST_ATTEMPT, rank), (LAST_ATTEMPT, rank), decision, Vote.ACTS)


def change(store: KeyValueStore, world: World, rule: Callable[[Register], Register]) -> Register:
    """Apply a rule to a register and return the result. Raises: StoreUnreachable, after which it may be applied too."""
    key = f"{world.key}/register"
    while True:
        text = store.get(key) or ""
        before = from_json(Register, text) if text else Register()
        after = rule(before)
        if after == before or store.swap(key, text, to_json(after)):
            return after


@dataclass(frozen=True)
class Round:
    """One attempt at a decision, over the connections of one thread."""

    clients: Clients
    world: World
    worlds: Sequence[Voters]
    """of the worlds since the last settled one, without the votes of members known to be dead"""
    proposal: str
    reachable: Sequence[int]
    """ranks that may be asked, this member's own first"""
    dead: frozenset[str]
    answering: frozenset[str] = frozenset()
    """uids of members of this world that answer pings, whether they take part or not"""
    ended: frozenset[str] = frozenset()
    """result of `PeerJob.ended_holders`: a claim does not wait for the votes of these members"""
    holding: frozenset[str] = frozenset()
    """uids of members of this side that have the run's state, also where no member has settled the world yet"""
    needs_votes: bool = True
    """False if a claim makes up for votes"""
    needs_all: bool = False
    """whether each reachable member has to accept: one that has not may claim another decision later"""
    is_lost: bool = False
    """whether the claims are lost: no member can learn any more what was claimed"""

    @property
    def voters(self) -> list[int]:
        """Ranks that are asked for a vote. This member's own may have accepted a decision without being an elector."""
        if self.needs_all:
            return list(self.reachable)
        electors = {uid for voters in self.worlds for uid in voters.electors} | {self.world.me.uid}
        return [rank for rank in self.reachable if self.world.members[rank].uid in electors]

    def accepted(self, promises: Mapping[int, Register]) -> str | Denied | None:
        """Return what this ballot must keep; None if it is free; Denied if unknown, as an unread claim may stand."""
        # A member that has not answered may act on a claim.
        if self.needs_all and (len(promises) < len(self.voters) or (not self.is_lost and is_open(promises.values()))):
            return Denied()
        return newest(promises.values())

    def change_registers(self, ranks: Sequence[int], rule: Callable[[Register], Register]) -> dict[int, Register]:
        """Apply a rule to the registers of `ranks` and return them by rank. Unreachable ones are missing; the rule may
        have been applied there all the same, which makes one more vote."""
        return self.clients.ask_each(self.world, ranks, lambda store: change(store, self.world, rule))


class Ballots:
    """One member's proposals for the successor of a world, and the decisions that it learns from other members.

    For the training thread and the thread that prepares a join, each with connections of its own. The lock guards the
    number of the attempt, so that each proposal has a ballot of its own.

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
        """Make the proposal of `round_`, or an earlier accepted one, the successor of its world. On either thread."""
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
        if silent:  # these members may act on a claim, or on the votes of all
            return self._elsewhere.denied(round_, silent)
        return self.decide_by_votes(replace(round_, needs_all=True, is_lost=is_lost))

    def decide_by_votes(self, round_: Round) -> str | Denied:
        """As `decide`, where no claim counts."""
        collected = self._collect(round_)
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        bound: set[int] = set()
        # Where all votes are needed, its own comes last: until the others are bound this member may follow a claim.
        for ranks in (round_.voters[1:], round_.voters[:1]) if round_.needs_all else (voters,):
            bound |= self._accept(round_, ballot, ranks, chosen)
            if round_.needs_all and not bound.issuperset(ranks):
                return Denied()
        if not may_go_on(round_.worlds, uids(round_.world, bound)):
            return Denied(missing_votes(round_.worlds, uids(round_.world, bound)) if bound == set(voters) else ())
        told = [rank for rank in round_.reachable if rank in bound or rank not in round_.voters]
        self._notify(round_, chosen, bound, told)
        return chosen

    def _decide_by_claim(self, round_: Round) -> str | Denied | None:
        """As `decide`; None if all votes may have decided something else than was claimed. Raises: ArbiterSilent."""
        worlds = [one.without(round_.ended) for one in round_.worlds]
        round_ = replace(round_, worlds=worlds, dead=round_.dead | round_.ended)
        world, side = round_.world, uids(round_.world, round_.reachable)
        # This also tests whether the place answers. Else two members could each vote for a decision of their own below,
        # perhaps claim it, and then both wait for the silent place.
        standing = self._claim(world, None)
        if standing is not None:
            return self._follow(round_, standing)
        # Members without a state may not take the job over by a claim alone: if all that had it are dead, votes count.
        holders = self._known.holders(round_.dead) | round_.holding
        is_enough = bool(holders) and self._arbitration.is_enough(self._known.voters)
        if not may_go_on(worlds, side) and not (is_enough and self._arbitration.has_given_way(world.uid)):
            return self._elsewhere.denied(round_, missing_votes(worlds, side))
        collected = self._collect(replace(round_, needs_votes=not is_enough))
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        # Votes come before the claim: members that may decide by votes alone are then bound to it. Where a claim is
        # enough, only its own vote does: should the place fall silent, a round of all votes mostly finds the claim.
        bound = self._accept(round_, ballot, [world.rank] if is_enough else voters, chosen)
        if world.rank not in bound or not (is_enough or may_go_on(worlds, uids(world, bound))):
            return Denied()
        standing = self._claim(world, chosen)
        assert standing is not None, "something was claimed"
        outcome = self._follow(round_, standing)
        if outcome == standing.decision:  # a member that cannot read the claim later finds these votes
            self._accept(round_, ballot, voters, standing.decision)
        return outcome

    def _claim(self, world: World, decision: str | None) -> Claim | None:
        job = self._facts.get(JOB)
        if job is None:
            raise ArbiterSilent("the job has no name yet")
        branch = id_on(Branch.from_json(self._facts.get(BRANCH)))
        line = f"{job}.{branch}" if branch else job  # both sides of a split count on from the same generation
        claim = None if decision is None else Claim(world.uid, decision, self._known.voters[0].world)
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
        """Vote for what this member is about to act on, so that all votes decide nothing else. Return the success."""
        register = change(clients.own, world, lambda register: follow(register, world.rank, decision))
        return register.decision == decision

    def _collect(self, round_: Round) -> tuple[Ballot, list[int], str] | Denied:
        """Return the ballot, the ranks that promised it, and the newest decision that these accepted, else its own."""
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
        after = Decision.from_json(chosen).members_after(world)
        members = {member.uid for member in after}
        # Enough of the voters must be in the new world: a vote does not hand over the state.
        if chosen is proposal and round_.needs_votes and not may_go_on(worlds, members):
            return self._elsewhere.denied(round_, missing_votes(worlds, members))
        awaited = self._known.holders_outside(world, after, round_.dead, round_.holding, bool(round_.ended))
        if chosen is proposal and awaited:  # also those that released their votes
            return self._elsewhere.denied(round_, sorted(awaited))
        return ballot, list(promises), chosen

    def _accept(self, round_: Round, ballot: Ballot, voters: Sequence[int], chosen: str) -> set[int]:
        """Run the second phase and return the ranks that accepted `chosen`."""
        vote = Vote.ALL if round_.needs_all else Vote.BALLOT
        votes = round_.change_registers(voters, lambda register: accept(register, ballot, chosen, vote))
        return {rank for rank, register in votes.items() if register.ballot == ballot}

    def _notify(self, round_: Round, chosen: str, bound: Collection[int], reachable: Sequence[int]) -> None:
        """Send the decision to the members of `reachable`. A member that misses it asks other members."""
        world, known = round_.world, self._known
        known.bound = uids(world, bound)
        text = json.dumps({"decision": chosen, "bound": to_runs(sorted(bound)), "since": known.voters[0].world})
        round_.clients.ask_each(world, reachable, lambda store: store.put(f"{world.key}/next", text))

    def decided(self, clients: Clients, world: World, asked: Sequence[int]) -> str | Denied | None:
        """Return the decision that stands, if this member or one of the ranks `asked` knows it. Denied: one of these
        ranks knows only that the job has gone on long ago."""
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
        """Give up the vote of this member, which the successor of `world` leaves out: no member waits for it then."""
        # Its register first: a proposer that still collects this vote finds the same decision.
        change(clients.own, world, lambda _: release(world.rank, decision.to_json()))
        for member in decision.members_after(world):
            with contextlib.suppress(StoreUnreachable):
                announce_release(clients.of(member), world)


class Elsewhere:
    """The question whether the job trains elsewhere; each call asks one store that may know, as one may be silent.

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
        """Return the outcome of a round that lacks these votes. Blocks for short timeouts."""
        clients, members = round_.clients, round_.world.members
        # A member of this world that answers may never have entered it, and may train in another world by now.
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
                text, run_id, job, *position = clients.ask(place, lambda store: store.get_many(keys))
            except StoreUnreachable:
                return Denied(tuple(missing))
            # Generations of two jobs with one run id cannot be compared: other_sides.py judges between the two jobs.
            is_another = None not in (job, self._facts.get(JOB)) and job != self._facts.get(JOB)
            if text and run_id == self._run_id and not is_another:
                generation, uid = json.loads(text)
                first = min(one.generation for one in past.values())
                has_gone_on = generation > first and not self._is_beside(clients.own, *position)
                if uid not in past and (has_gone_on or self._loses_nothing(clients.own, *position)):
                    return Denied(tuple(missing), generation)
        return Denied(tuple(missing))

    def _is_beside(self, store: KeyValueStore, position: str | None = None) -> bool:
        """Return whether this side has committed steps that the other side lacks: other_sides.py judges then."""
        own = store.get(POSITION)
        if own is None or position is None:
            return False
        mine = from_json(Position, own)
        return not is_on(mine.branches, mine.step, from_json(Position, position).branches)

    def _loses_nothing(self, store: KeyValueStore, position: str | None = None) -> bool:
        """Return whether this member has no state and has found a branch that has one. The generations of two branches
        cannot be compared."""
        if position is None or store.get(POSITION) is not None:
            return False
        return from_json(Position, position).id != id_on(Branch.from_json(self._facts.get(BRANCH)))


def uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)
