"""How members decide what follows a world: by Paxos, by a claim in a place that they share, or as a branch.

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

from elastic_train.branches import BRANCH, MOST_OTHERS, POSITION, Branch, Position, id_on, is_on
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import ArbiterSilent, Arbitration, Claim, silent_members
from elastic_train.protocol.job import Denied
from elastic_train.protocol.join_queue import Finder
from elastic_train.protocol.known_worlds import FORGOTTEN, KnownWorlds
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.store import Clients, KeyValueStore, append
from elastic_train.world import World, from_runs, to_runs

Ballot = tuple[int, int]
"""(attempt, rank)"""
JOB = "job_token"
"""the fact that names the job"""
LAST_ATTEMPT = 10**9
"""of the ballot by which a member that is left out accepts for good"""


@dataclass(frozen=True)
class Register:
    """What one voter has promised and accepted about the successor of one world."""

    promised: Ballot = (0, -1)
    """the largest ballot that it has answered: it accepts nothing below"""
    ballot: Ballot | None = None
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


def promise(register: Register, ballot: Ballot) -> Register:
    """The first phase."""
    return replace(register, promised=ballot) if ballot > register.promised else register


def accept(register: Register, ballot: Ballot, decision: str) -> Register:
    """The second phase."""
    return Register(ballot, ballot, decision) if ballot >= register.promised else register


def change(store: KeyValueStore, world: World, rule: Callable[[Register], Register]) -> Register:
    """What stands in a register after a rule was applied. Raises: StoreUnreachable; it may be applied all the same."""
    key = f"{world.key}/register"
    while True:
        text = store.get(key) or ""
        before = Register.from_json(text)
        after = rule(before)
        if after == before or store.swap(key, text, after.to_json()):
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
    needs_votes: bool = True
    """whether a claim does not make up for them"""
    needs_all: bool = False
    """whether each that can be reached has to accept, for whoever has not may claim another decision later"""

    @property
    def voters(self) -> list[int]:
        """Ranks that are asked for a vote. This one may have accepted a decision without being an elector."""
        if self.needs_all:
            return list(self.reachable)
        electors = {uid for voters in self.worlds for uid in voters.electors} | {self.world.me.uid}
        return [rank for rank in self.reachable if self.world.members[rank].uid in electors]

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
        """As Job.decide. On either thread."""
        if not self._arbitration.is_needed(self._known.voters):
            return self.decide_by_votes(round_)
        try:
            return self._decide_by_claim(round_)
        except ArbiterSilent:
            silent = silent_members(round_.worlds, _uids(round_.world, round_.reachable))
            if silent:  # they may have claimed
                return self._elsewhere.denied(round_, silent)
            return self.decide_by_votes(replace(round_, needs_all=True))

    def decide_by_votes(self, round_: Round) -> str | Denied:
        """The same, where no claim counts."""
        collected = self._collect(round_)
        if isinstance(collected, Denied):
            return collected
        ballot, voters, chosen = collected
        bound = self._accept(round_, ballot, voters, chosen)
        if round_.needs_all and bound != set(round_.voters):
            return Denied()
        if not may_go_on(round_.worlds, _uids(round_.world, bound)):
            missing = missing_votes(round_.worlds, _uids(round_.world, bound))
            return Denied(() if bound != set(voters) else missing)
        told = [rank for rank in round_.reachable if rank in bound or rank not in round_.voters]
        self._notify(round_, chosen, bound, told)
        return chosen

    def _decide_by_claim(self, round_: Round) -> str | Denied:
        """Raises: ArbiterSilent."""
        world, worlds, side = round_.world, round_.worlds, _uids(round_.world, round_.reachable)
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
        # Its own vote first: who has a later ballot may decide by all votes, where the place does not answer it.
        if world.rank not in self._accept(round_, ballot, [world.rank], chosen):
            return Denied()
        standing = self._claim(world, chosen)
        assert standing is not None, "something was claimed"
        if standing.parent == world.uid:  # who finds no claim any more collects it
            self._accept(round_, ballot, voters, standing.decision)
        return self._follow(round_, standing)

    def _claim(self, world: World, decision: str | None) -> Claim | None:
        job = self._facts.get(JOB)
        if job is None:
            raise ArbiterSilent("the job has no name yet")
        claim = None
        if decision is not None:
            claim = Claim(world.uid, decision, self._known.voters[0].world)
        return self._arbitration.claim(job, world.generation, claim)

    def _follow(self, round_: Round, standing: Claim) -> str | Denied:
        if standing.parent != round_.world.uid:
            return Denied(gone_on=Decision.from_json(standing.decision).generation)
        self._known.note_settled(standing.settled)
        self._notify(round_, standing.decision, (), round_.reachable)
        return standing.decision

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
        if round_.needs_votes and not may_go_on(worlds, _uids(world, promises)):
            return self._elsewhere.denied(round_, missing_votes(worlds, _uids(world, promises)))
        accepted = [one for one in promises.values() if one.ballot is not None]
        if round_.needs_all and len({one.decision for one in accepted}) > 1:
            return Denied()  # they may be about to claim, and the place alone knows whose stands
        newest = max(accepted, key=lambda one: one.ballot or (0, -1), default=None)
        chosen = proposal if newest is None or newest.decision is None else newest.decision
        members = _uids(world, Decision.from_json(chosen).ranks)
        # A vote is no state: who has one is to be in it.
        if chosen is proposal and round_.needs_votes and not may_go_on(worlds, members):
            return self._elsewhere.denied(round_, missing_votes(worlds, members))
        holders = self._known.holders(round_.dead)
        if chosen is proposal and holders and not holders & members:  # they have released their votes, not their state
            return self._elsewhere.denied(round_, sorted(holders))
        return ballot, list(promises), chosen

    def _accept(self, round_: Round, ballot: Ballot, voters: Sequence[int], chosen: str) -> set[int]:
        """Who has."""
        votes = round_.change_registers(voters, lambda register: accept(register, ballot, chosen))
        return {rank for rank, register in votes.items() if register.ballot == ballot}

    def _notify(self, round_: Round, chosen: str, bound: Collection[int], reachable: Sequence[int]) -> None:
        """Who does not hear it asks the others."""
        world, known = round_.world, self._known
        known.bound = _uids(world, bound)
        text = json.dumps({"decision": chosen, "bound": to_runs(sorted(bound)), "since": known.voters[0].world})
        round_.clients.ask_each(world, reachable, lambda store: store.put(f"{world.key}/next", text))

    def decided(self, clients: Clients, world: World, asked: Sequence[int]) -> str | Denied | None:
        """As Job.decided."""
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
        self._known.bound = _uids(world, from_runs(told["bound"]))
        self._known.note_settled(told["since"])
        return str(told["decision"])

    def release(self, clients: Clients, world: World, decision: Decision) -> None:
        """As Job.release."""
        # Its register first: whoever still collects this vote is led to the same decision.
        last = (LAST_ATTEMPT, world.rank)
        change(clients.own, world, lambda _: Register(last, last, decision.to_json()))
        for member in decision.members_after(world):
            with contextlib.suppress(StoreUnreachable):
                append(clients.of(member), "released", world.me.uid)


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
        mine = Position.from_json(own)
        return not is_on(mine.branches, mine.step, Position.from_json(position).branches)

    def _loses_nothing(self, store: KeyValueStore, position: str | None = None) -> bool:
        """Whether this member waits on one branch for a state, and finds another that has one: generations of the two
        say nothing about each other."""
        if position is None or store.get(POSITION) is not None:
            return False
        return Position.from_json(position).id != id_on(Branch.from_json(self._facts.get(BRANCH)))


class BranchOff:
    """Going on beyond the laws, when nothing was heard for one more peer timeout of those whose votes are missing.

    For the training thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ballots: Ballots,
        known: KnownWorlds,
        arbitration: Arbitration,
        *,
        peer_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._ballots, self._known, self._arbitration = ballots, known, arbitration
        self._peer_timeout, self._clock = peer_timeout, clock
        self._silent_since: tuple[str, tuple[str, ...], float] | None = None
        """uid of the world, of whom nothing is heard, and since when it is these"""

    def decide(self, round_: Round) -> str | Denied:
        """As Job.decide, by the laws where they allow it."""
        outcome = self._ballots.decide(round_)
        if not isinstance(outcome, Denied) or not outcome.votes or outcome.gone_on is not None:
            return outcome
        return self._go_on_without(round_) or outcome

    def _go_on_without(self, denied: Round) -> str | Denied | None:
        """Those that are missing. None where that may not be, or would not help."""
        world, worlds = denied.world, self._known.voters_without(denied.dead)
        silent = silent_members(worlds, _uids(world, denied.reachable))
        without = [one.without(silent) for one in worlds]
        has_state = self._known.has_state and set(without[0].members) - without[0].dead
        # A member that answers and takes no part may go on in a moment; with an arbiter, so may those that are silent.
        is_awaited = not set(silent).isdisjoint(denied.answering) or self._arbitration.is_needed(worlds)
        if not silent or not has_state or is_awaited:
            self._silent_since = None
            return None
        now, before = self._clock(), self._silent_since
        if before is None or before[:2] != (world.uid, silent):
            before = self._silent_since = (world.uid, silent, now)
        if now - before[2] <= self._peer_timeout:
            return None
        decision = self._branch_without(silent, Decision.from_json(denied.proposal))
        members = decision.members_after(world)
        if len({member.node for member in members}) < max(member.min_nodes for member in members):
            return None  # it would not train
        gone = denied.dead | frozenset(silent)
        return self._ballots.decide_by_votes(
            Round(denied.clients, world, without, decision.to_json(), denied.reachable, gone)
        )

    def _branch_without(self, silent: Sequence[str], decision: Decision) -> Decision:
        """Newcomers wait for the world after it: each who is in the first one has been in the parent."""
        known = {member.uid: member.store for one in self._known.past.values() for member in one.members}
        others = [store for uid in silent if (store := known.get(uid)) is not None]
        before = Branch.from_json(decision.facts.get(BRANCH))
        others += () if before is None else before.others
        branch = Branch(decision.uid, min(decision.ranks), tuple(others[:MOST_OTHERS]))
        facts = {**decision.facts, BRANCH: branch.to_json()}
        return replace(decision, new=(), dead=(*decision.dead, *silent), facts=facts)


def _uids(world: World, ranks: Collection[int]) -> frozenset[str]:
    return frozenset(world.members[rank].uid for rank in ranks)
